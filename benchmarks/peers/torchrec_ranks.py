"""TorchRec flat on many ranks, as its users run it: `DLRMTrain` in DistributedModelParallel, fused row-wise Adagrad.

Follows the training script of TorchRec's authors (facebookresearch/dlrm, torchrec_dlrm/dlrm_main.py). Variants:

    table_wise, table_row_wise                          plain steps
    table_wise_pipelined, table_row_wise_pipelined      TrainPipelineSparseDist: the next batch's ids travel early

Table-wise tables go round the ranks, table-row-wise ones round the hosts: 26 equal tables need no planner. Dense
gradients are reduced by DDP, as DistributedModelParallel does by default. Batches are made before the clock starts.
"""

from __future__ import annotations

import itertools
import logging
import os
import warnings
from typing import Any

import numpy as np
import torch

from benchmarks.datacentre.serve import serve_ranks
from benchmarks.peers.torchrec_network import torchrec_network
from benchmarks.rank_batches import rank_batches
from benchmarks.workload import Workload


class TorchRecRanks:
    """All variants of one workload on this rank."""

    def __init__(self, settings: dict[str, Any]) -> None:
        warnings.filterwarnings("ignore")
        logging.disable(logging.WARNING)
        workload = Workload.from_json(settings["workload"])
        self.batches = _batches(workload)
        self.variants = {name: TorchRecVariant(name, workload, self.batches) for name in settings["variants"]}
        self.info = {
            name: {"num_dense_parameters": variant.num_dense_parameters} for name, variant in self.variants.items()
        }

    def run(self, name: str, steps: int) -> float:
        """Train."""
        value = 0.0
        for _ in range(steps):
            value = self.variants[name].step()
        return value


class TorchRecVariant:
    """One sharded model and its loop."""

    def __init__(self, name: str, workload: Workload, batches: list[Any]) -> None:
        from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

        self.model = _sharded_model(workload, row_wise=name.startswith("table_row_wise"))
        dense = [value for key, value in self.model.named_parameters() if "embedding_bags" not in key]
        self.num_dense_parameters = sum(value.numel() for value in dense)
        self.optimizer = torch.optim.Adam(dense, lr=workload.learning_rate, fused=True)
        self.batches = itertools.cycle(batches)
        self.pipeline = None
        if name.endswith("_pipelined"):
            self.pipeline = TrainPipelineSparseDist(self.model, self.optimizer, torch.device("cpu"))

    def step(self) -> float:
        """One step."""
        if self.pipeline is not None:
            loss, _, _ = self.pipeline.progress(self.batches)
            return float(loss)
        self.optimizer.zero_grad(set_to_none=True)
        loss, _ = self.model(next(self.batches))
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


def _batches(workload: Workload) -> list[Any]:
    from torchrec import KeyedJaggedTensor
    from torchrec.datasets.utils import Batch

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    keys = [f"c{index}" for index in range(len(workload.lengths))]
    lengths = torch.from_numpy(np.repeat(np.array(workload.lengths, dtype=np.int32), workload.batch_size))
    found = []
    for raw in rank_batches(workload, rank=rank, world_size=world_size):
        values = torch.from_numpy(np.concatenate([ids.reshape(-1) for ids in raw.ids]))
        found.append(
            Batch(
                dense_features=torch.from_numpy(raw.dense),
                sparse_features=KeyedJaggedTensor(keys=keys, values=values, lengths=lengths),
                labels=torch.from_numpy(raw.label_sets[0]),
            )
        )
    return found


def _sharded_model(workload: Workload, *, row_wise: bool) -> torch.nn.Module:
    """`DLRMTrain` around the workload's network, inside DistributedModelParallel."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_row_wise, table_wise
    from torchrec.distributed.types import ShardingPlan
    from torchrec.models.dlrm import DLRMTrain

    class Sharder(EmbeddingBagCollectionSharder):
        """On CPU TorchRec offers table-wise alone by default; the others work."""

        def sharding_types(self, compute_device_type: str) -> list[str]:
            return ["table_wise", "table_row_wise"]

    torch.manual_seed(workload.seed)
    world_size, per_host = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    network = torchrec_network(workload)
    collection = network.sparse_arch.embedding_bag_collection
    rule = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": workload.table_learning_rate}
    sharder = Sharder(fused_params=rule)
    num_hosts = world_size // per_host
    placed = {
        table.name: table_row_wise(host_index=index % num_hosts) if row_wise else table_wise(rank=index % world_size)
        for index, table in enumerate(collection.embedding_bag_configs())
    }
    plan = construct_module_sharding_plan(
        collection, placed, sharder=sharder, local_size=per_host, world_size=world_size, device_type="cpu"
    )
    for entry in plan.values():
        entry.compute_kernel = "fused"
    model = DLRMTrain(network)
    [path] = [key for key, module in model.named_modules() if module is collection]
    return DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan({path: plan}), sharders=[sharder]
    )


if __name__ == "__main__":
    serve_ranks(TorchRecRanks)
