"""A small TorchRec model with towers, its batches, and its training on one device, for tests of the bridge."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan
from torchrec.streamable import Pipelineable

from ziggurat.bridges.torchrec import TowerEmbedding, TowerEmbeddingSharder, tower_plan
from ziggurat.models.towers.modules import TowerModuleConfig, TowerModuleKind
from ziggurat.parallel.exchange.wire import WireConfig
from ziggurat.parallel.topology import Topology
from ziggurat.plan import Plan, Towers
from ziggurat.testing.ranks import run_ranks

NUM_ROWS = 16
DIM = 16
LEARNING_RATE = 0.1
EPS = 0.01  # large, so that a gradient that nearly cancels is not blown up
TOWERS = Towers(towers=(("f3", "f0"), ("g1", "f1"), ("f2", "f5"), ("f4",)))
ADAGRAD = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": LEARNING_RATE, "eps": EPS}
SGD = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": LEARNING_RATE}
IDENTITY = TowerModuleConfig(kind=TowerModuleKind.IDENTITY)
LINEAR = TowerModuleConfig(kind=TowerModuleKind.LINEAR, compression=2.0, p=1)
CROSS = TowerModuleConfig(kind=TowerModuleKind.CROSS, compression=4.0)


@dataclass
class SmallBatch(Pipelineable):
    """Also for TorchRec's pipelines."""

    dense: Tensor
    sparse: KeyedJaggedTensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> SmallBatch:
        return SmallBatch(
            self.dense.to(device, non_blocking=non_blocking),
            self.sparse.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: Any) -> None:
        for part in (self.dense, self.sparse, self.labels):
            part.record_stream(stream)

    def pin_memory(self) -> SmallBatch:
        return self


class SmallModel(nn.Module):
    """Towers and one linear layer."""

    def __init__(self, config: TowerModuleConfig, *, device: str = "cpu", mean: bool = True) -> None:
        super().__init__()
        self.loss_scale = 1.0 / NUM_ROWS
        torch.manual_seed(1)
        self.embeddings = TowerEmbedding(
            EmbeddingBagCollection(tables=table_configs(mean=mean), device=torch.device(device)),
            TOWERS,
            config,
            seed=3,
        )
        self.over = nn.Linear(3 + self.embeddings.output_dim, 1)

    def forward(self, batch: SmallBatch) -> tuple[Tensor, Tensor]:
        pooled = self.embeddings(batch.sparse)
        logits = self.over(torch.cat([batch.dense, pooled], dim=1)).squeeze(1)
        losses = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")
        return losses.sum() * self.loss_scale, logits


def table_configs(*, mean: bool, dim: int = DIM) -> list[EmbeddingBagConfig]:
    """Five tables with one feature, one with two; the third is averaged."""
    return [
        EmbeddingBagConfig(
            name=f"t{i}",
            embedding_dim=dim,
            num_embeddings=20 + i,
            feature_names=[f"f{i}"] if i != 1 else ["f1", "g1"],
            pooling=PoolingType.MEAN if i == 2 and mean else PoolingType.SUM,
        )
        for i in range(6)
    ]


def random_batch(num_rows: int, *, seed: int) -> SmallBatch:
    """Lists of up to three ids, often empty."""
    generator = torch.Generator().manual_seed(seed)
    keys = ["f0", "f1", "g1", "f2", "f3", "f4", "f5"]
    lengths = torch.randint(4, (len(keys) * num_rows,), generator=generator)
    values = torch.randint(20, (int(lengths.sum()),), generator=generator)
    return SmallBatch(
        torch.randn(num_rows, 3, generator=generator),
        KeyedJaggedTensor.from_lengths_sync(keys=keys, values=values, lengths=lengths),
        torch.randint(2, (num_rows,), generator=generator).float(),
    )


def part_of(batch: SmallBatch, first: int, last: int) -> SmallBatch:
    """Some rows of a batch."""
    keys = list(batch.sparse.keys())
    parts = [batch.sparse[key].to_dense()[first:last] for key in keys]
    rows = [row for part in parts for row in part]
    values = torch.cat(rows) if rows else torch.empty(0)
    sparse = KeyedJaggedTensor(
        keys=keys,
        values=values.long(),
        lengths=torch.tensor([len(row) for row in rows], dtype=torch.int32),
        stride=last - first,
    )
    return SmallBatch(batch.dense[first:last], sparse, batch.labels[first:last])


def parts_of(batch: SmallBatch, cuts: Sequence[int]) -> list[SmallBatch]:
    """One part a rank."""
    bounds = [0, *cuts, len(batch.labels)]
    return [part_of(batch, *pair) for pair in itertools.pairwise(bounds)]


def even_cuts(num_rows: int, world_size: int) -> list[int]:
    return [num_rows * rank // world_size for rank in range(1, world_size)]


def on_ranks(function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """`run_ranks` with patience: TorchRec's first step in a process takes seconds, on a busy machine a minute."""
    return run_ranks(function, world_size, *arguments, timeout_s=300.0)


class OneDevice:
    """Training of a model on one device: row-wise Adagrad or SGD on tables, SGD on everything else."""

    def __init__(self, model: SmallModel, *, tables: dict[str, Any] = ADAGRAD) -> None:
        self.model = model
        self._is_adagrad = tables is ADAGRAD
        self._sums = {name: torch.zeros(len(weight)) for name, weight in model.named_parameters() if "bags" in name}

    def step(self, batch: SmallBatch) -> Tensor:
        self.model.zero_grad()
        loss, logits = self.model(batch)
        loss.backward()
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                gradient = weight.grad
                assert gradient is not None
                if name in self._sums and self._is_adagrad:
                    self._sums[name] += gradient.pow(2).mean(dim=1)
                    gradient = gradient / (self._sums[name].sqrt() + EPS).unsqueeze(1)
                weight -= LEARNING_RATE * gradient
        return logits.detach()


class ManyRanks:
    """The same inside `DistributedModelParallel`."""

    def __init__(
        self,
        model: SmallModel,
        *,
        tower_size: int,
        plan: Plan | None = None,
        sharding: Any = None,
        tables: dict[str, Any] = ADAGRAD,
        wire: WireConfig | None = None,
    ) -> None:
        self.topology = Topology.create(tower_size=tower_size)
        model = copy.deepcopy(model)
        model.loss_scale *= self.topology.world_size  # the mean over ranks is then the mean over the global batch
        self.sharder = TowerEmbeddingSharder(self.topology, fused_params=dict(tables), wire=wire)
        self.plan = ShardingPlan({"embeddings": sharding or tower_plan(model.embeddings, self.topology, plan=plan)})
        self.model = DistributedModelParallel(model, plan=self.plan, sharders=[self.sharder])
        self.optimizer = torch.optim.SGD(self.dense_weights().values(), lr=LEARNING_RATE)

    def dense_weights(self) -> dict[str, nn.Parameter]:
        """Weights that the user's optimizer trains: all but the tables."""
        return {name: weight for name, weight in self.model.named_parameters() if "embedding_bags" not in name}

    def step(self, mine: SmallBatch) -> Tensor:
        self.optimizer.zero_grad()
        loss, logits = self.model(mine)
        loss.backward()
        self.optimizer.step()
        return logits.detach()

    def assert_like(self, single: nn.Module, *, limit: float) -> None:
        """All weights that this rank holds."""
        wanted = single.state_dict()
        found = self.model.state_dict()
        for name, value in found.items():
            whole = wanted[name]
            if isinstance(value, ShardedTensor):
                for shard in value.local_shards():
                    (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                    assert_close(name, shard.tensor, whole[row : row + rows, column : column + columns], limit)
            else:
                assert_close(name, value, whole, limit)
        held = {name.split(".")[3] for name in found if "modules_of_towers" in name}
        per_group = len(TOWERS) // self.topology.num_groups
        has_weights = any("modules_of_towers" in name for name in wanted)
        assert len(held) == (per_group if has_weights else 0)


def assert_close(name: str, found: Tensor, wanted: Tensor, limit: float) -> None:
    assert found.shape == wanted.shape, (name, found.shape, wanted.shape)
    worst = float((found - wanted).abs().max()) if found.numel() else 0.0
    assert worst <= limit, f"{name}: {worst:.3g} apart, allowed {limit:g}"
