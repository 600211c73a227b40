"""A model of one's own: what the guide says about the contract, as small as it can be."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import nn

from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.models import Embedded, LossSums, Model, Outputs, TowerLayer, TowerModuleConfig, TowerModuleKind


@dataclass(frozen=True, kw_only=True)
class OwnConfig:
    """Settings of `OwnModel`; `scale` multiplies the weight of its loss."""

    kind: str = "own"
    embedding_dim: int = 8
    hidden: int = 5
    scale: float = 1.0
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    tower_module: TowerModuleConfig = field(
        default_factory=lambda: TowerModuleConfig(kind=TowerModuleKind.LINEAR, compression=2.0)
    )

    def table_columns(self, inputs: InputSpec) -> dict[str, int]:
        return inputs.table_columns(self.embedding_dim)

    def build(self, inputs: InputSpec, *, embeddings: EmbeddingTables, towers: TowerLayer | None) -> OwnModel:
        return OwnModel(self, inputs, embeddings=embeddings, towers=towers)


class OwnModel(Model):
    """An MLP with a learned temperature, a second head that its loss reads, and a weight that nothing uses."""

    def __init__(
        self, config: OwnConfig, inputs: InputSpec, *, embeddings: EmbeddingTables, towers: TowerLayer | None
    ) -> None:
        super().__init__(inputs, embeddings=embeddings, towers=towers)
        self.config = config
        self.mlp = nn.Linear(len(inputs.dense) + sum(self.field_dims), config.hidden)
        self.heads = nn.Linear(config.hidden, 2)
        self.temperature = nn.Parameter(torch.ones(()).view(1))
        self.unused = nn.Linear(3, 3)

    def forward_dense(self, embedded: Embedded) -> Outputs:
        hidden = self.mlp(torch.cat([embedded.dense, embedded.fields], dim=1)).relu()
        first, second = self.heads(hidden).chunk(2, dim=1)
        return Outputs(logits=first * self.temperature, named={"second": second})

    def loss(self, outputs: Outputs, batch: Batch) -> LossSums:
        sums = super().loss(outputs, batch)
        second = super().loss(replace(outputs, logits=outputs.named["second"]), batch)
        return LossSums(total=sums.total + 0.5 * second.total, weight=sums.weight * self.config.scale)
