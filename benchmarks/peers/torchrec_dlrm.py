"""TorchRec as its users run it: `DLRM` / `DLRM_DCN` in DistributedModelParallel, fused row-wise Adagrad, one gloo rank.

Follows the training script of TorchRec's authors (facebookresearch/dlrm, torchrec_dlrm/dlrm_main.py): default
sharders, the planner's own plan, `apply_optimizer_in_backward` for the tables, an optimizer of torch for the rest
(fused Adam here, for every contestant). Choices in its favour: KeyedJaggedTensors are made once, before the clock
starts, so their cached offsets are reused; no input pipeline (on CPU it overlaps nothing).

Settings: `precision` "fp32" | "bf16" (autocast of the whole forward), `compile` (TorchRec's own `compile_dense_path`),
`mode` "train" | "score" (eval mode, no_grad: FBGEMM 1.8 fails under inference_mode).
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings

import numpy as np
import torch
import torch.distributed as dist  # noqa: TID251
from torch import nn

from benchmarks.peers.torchrec_network import torchrec_network
from benchmarks.worker import serve
from benchmarks.workload import Workload, make_batches


class TorchRecContestant:
    """A sharded TorchRec model and its training or scoring loop."""

    def __init__(self, workload: Workload, settings: dict[str, object]) -> None:
        from torchrec import KeyedJaggedTensor

        self.bf16 = settings.get("precision", "fp32") == "bf16"
        self.score = settings.get("mode", "train") == "score"
        self.model, plan = _sharded_model(workload, compile_dense=bool(settings.get("compile")))
        self.dense = [value for name, value in self.model.named_parameters() if "embedding_bags" not in name]
        self.optimizer = torch.optim.Adam(self.dense, lr=workload.learning_rate, fused=True)
        self.loss = nn.BCEWithLogitsLoss()
        self.step = 0
        keys = [f"c{index}" for index in range(len(workload.lengths))]
        self.batches = []
        for raw in make_batches(workload):
            lengths = np.repeat(np.array(workload.lengths, dtype=np.int32), workload.batch_size)
            values = torch.from_numpy(np.concatenate([ids.reshape(-1) for ids in raw.ids]))
            sparse = KeyedJaggedTensor(keys=keys, values=values, lengths=torch.from_numpy(lengths))
            labels = [torch.from_numpy(labels) for labels in raw.label_sets]
            self.batches.append((torch.from_numpy(raw.dense), sparse, labels))
        if self.score:
            self.model.eval()
        self.info: dict[str, object] = {
            "plan": plan,
            "num_dense_parameters": sum(value.numel() for value in self.dense),
            "dense_optimizer": "Adam (fused)",
            "table_optimizer": "row-wise Adagrad (FBGEMM, in the backward pass)",
        }

    def run(self, steps: int) -> float:
        """Train on, or score, so many batches."""
        value = torch.zeros(())
        for _ in range(steps):
            value = self._step()
        return value.item()

    def losses(self, steps: int) -> list[float]:
        """Train on so many batches and keep every loss."""
        return [self._step().item() for _ in range(steps)]

    def _step(self) -> torch.Tensor:
        dense, sparse, label_sets = self.batches[self.step % len(self.batches)]
        labels = label_sets[self.step // len(self.batches) % len(label_sets)]
        self.step += 1
        return self._score(dense, sparse) if self.score else self._train(dense, sparse, labels)

    def _train(self, dense: torch.Tensor, sparse: object, labels: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        with self._autocast():
            logits = self.model(dense, sparse)
        loss = self.loss(logits.float().squeeze(-1), labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _score(self, dense: torch.Tensor, sparse: object) -> torch.Tensor:
        with torch.no_grad(), self._autocast():
            return self.model(dense, sparse).float().sigmoid()[0]

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        return torch.autocast("cpu", dtype=torch.bfloat16) if self.bf16 else contextlib.nullcontext()


def _sharded_model(workload: Workload, *, compile_dense: bool) -> tuple[nn.Module, str]:
    """The model inside DistributedModelParallel, and its plan in words."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", RANK="0", WORLD_SIZE="1")
    from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(workload.seed)
    model = torchrec_network(workload)
    apply_optimizer_in_backward(RowWiseAdagrad, model.sparse_arch.parameters(), {"lr": workload.table_learning_rate})
    sharders = get_default_sharders()
    planner = EmbeddingShardingPlanner(topology=Topology(world_size=1, local_world_size=1, compute_device="cpu"))
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    if compile_dense:
        model.compile_dense_path(compile_mode="default")
    chosen = {(entry.sharding_type, entry.compute_kernel) for module in plan.plan.values() for entry in module.values()}
    words = ", ".join(f"{sharding}/{kernel}" for sharding, kernel in sorted(chosen))
    return DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders), words


if __name__ == "__main__":
    serve(TorchRecContestant)
