"""A user's plain module: it looks up its own tables, pooled and un-pooled, and knows nothing of the contract."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from tests.parallel.test_parity import inputs
from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.features.schema import Pooling
from ziggurat.ops.lookup import KernelChoice


def list_inputs() -> InputSpec:
    """Those of the parity tests, with one of the lists un-pooled."""
    spec = inputs()
    lists = (dataclasses.replace(each, pooling=Pooling.NONE) if each.name == "tags" else each for each in spec.jagged)
    return dataclasses.replace(spec, jagged=tuple(lists))


class Lookups(nn.Module):
    """Holds tables one level down, as users do."""

    def __init__(self, spec: InputSpec, *, seed: int) -> None:
        super().__init__()
        self.tables = EmbeddingTables(spec, EmbeddingConfig(dim=8, kernel=KernelChoice.TORCH), seed=seed)


class Plain(nn.Module):
    """A linear layer over numbers, pooled fields, the sum of a list, and a column that only the batch has."""

    def __init__(self, spec: InputSpec, *, seed: int = 3) -> None:
        super().__init__()
        self.lookups = Lookups(spec, seed=seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.mlp = nn.Linear(len(spec.dense) + self.lookups.tables.output_dim + 8 + 1, 1)
        self.temperature = nn.Parameter(torch.ones(1))

    def forward(self, batch: Batch) -> Tensor:
        vectors_BLD, _ = self.lookups.tables.sequence(batch, "tags")
        parity_B1 = (batch.single[0] % 2).float().unsqueeze(1)
        pooled_BT = self.lookups.tables(batch)
        return (
            self.mlp(torch.cat([batch.dense, pooled_BT, vectors_BLD.sum(dim=1), parity_B1], dim=1)) * self.temperature
        )
