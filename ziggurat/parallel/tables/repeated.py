"""Deduplicated batches on many ranks: slices travel, not samples.

    plain features   ids of B samples   ──► exchange ──► pooled (B, ·) ──────────────────►┐
    group 0          ids of U₀ slices   ──► exchange ──► pooled (U₀, ·) ──► inverse ─────►├──► pooled (B, T)
    group 1          ids of U₁ slices   ──► exchange ──► pooled (U₁, ·) ──► inverse ─────►┘

To the ranks that hold tables a group is a smaller batch of other features. So each group has an exchange of its own, an
ordinary `ShardedEmbeddings` over the same tables with the fields of the group; ids and vectors of a group, there and
back, shrink by its factor B/U. Gradients of samples are summed for slices before they travel.

Flat models do this. With towers the last hop starts from whole samples of all peers, so batches are expanded first.
All ranks deduplicate the same groups: `training/repeats.py` decides alike on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.features.jagged import FeatureGroup
from ziggurat.ops.repeat import expand
from ziggurat.parallel.tables.ids import batch_of_rows

if TYPE_CHECKING:
    from ziggurat.parallel.tables.embeddings import ShardedEmbeddings


class RepeatedExchange:
    """The exchanges of plain features and of each group, for batches with the same groups.

    Args:
        inputs: of the whole model.
        groups: of the batches.
        make: makes the exchange of some fields over the tables of the model.
    """

    def __init__(
        self, inputs: InputSpec, groups: tuple[FeatureGroup, ...], *, make: Callable[[InputSpec], ShardedEmbeddings]
    ) -> None:
        in_groups = [(set(group.single), set(group.jagged)) for group in groups]
        self._plain = [at for at in range(len(inputs.single)) if not any(at in single for single, _ in in_groups)]
        jagged = [at for at in range(len(inputs.jagged)) if not any(at in lists for _, lists in in_groups)]
        parts = [FeatureGroup(single=tuple(self._plain), jagged=tuple(jagged)), *groups]
        self.exchanges = [
            make(
                replace(
                    inputs,
                    single=tuple(inputs.single[at] for at in part.single),
                    jagged=tuple(inputs.jagged[at] for at in part.jagged),
                )
            )
            for part in parts
        ]
        self._names = [spec.name for spec in inputs.fields]

    def split(self, batch: Batch) -> list[Batch]:
        """The samples with their plain features, then the slices of each group."""
        plain = batch_of_rows(batch.single[self._plain], batch.jagged, size=batch.batch_size)
        return [plain, *(batch_of_rows(group.single, group.jagged, size=group.num_slices) for group in batch.repeated)]

    def forward(self, batch: Batch, parts: list[Batch]) -> Float[Tensor, "B T"]:
        """Pooled embeddings in the order of the fields; collective."""
        found: dict[str, Tensor] = {}
        for number, (exchange, part) in enumerate(zip(self.exchanges, parts, strict=True)):
            pooled = exchange(part)
            if number:
                pooled = expand(pooled, batch.repeated[number - 1].inverse)
            names = [spec.name for spec in exchange.inputs.fields]
            found |= dict(zip(names, pooled.split(exchange.field_dims, dim=1), strict=True))
        return torch.cat([found[name] for name in self._names], dim=1)
