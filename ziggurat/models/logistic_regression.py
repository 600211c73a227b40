"""Logistic regression: one learned number for each row of each table, and one for each numeric input.

    logit_l = b_l + Σ_f pool(e_f)_l + Σ_n w_ln x_n + Σ_v ⟨u_lv, v⟩

The embedding of a row is its weight, so tables have as many columns as there are labels (one, usually), whatever the
schema says of their size. No interactions: the floor that every other model has to beat, and the model to look at first
when data seem wrong. For a regression label it is linear regression.

Cost: a lookup of F numbers and 2·N FLOPs a sample and label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.features.inputs import InputSpec
from ziggurat.models.blocks.mlp import Init, initialise, start_sum_low
from ziggurat.models.blocks.output_biases import biases_of
from ziggurat.models.contract.ranking_model import RankingModel
from ziggurat.models.contract.reads import Reads
from ziggurat.models.contract.search_space import Dimension
from ziggurat.models.towers.layer import TowerLayer
from ziggurat.precision.products import Linear
from ziggurat.typed import checked


@dataclass(frozen=True, kw_only=True)
@checked
class LogisticRegressionConfig:
    """Settings of the model `LogisticRegression`.

    Args:
        init: starting weights of the linear map on numbers and vectors.
        embedding: tables: optimizer, kernel, starting weights.

    Example:
        >>> from ziggurat.testing.batches import small_inputs
        >>> type(zg.build_model(zg.LogisticRegressionConfig(), small_inputs(), seed=0)).__name__
        'LogisticRegression'
    """

    reads: ClassVar[Reads] = Reads.SAMPLES
    is_linear: ClassVar[bool] = True
    search: ClassVar[tuple[Dimension, ...]] = ()

    kind: Literal["logistic_regression"] = "logistic_regression"
    init: Init = Init.TORCH
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)

    def table_columns(self, inputs: InputSpec) -> dict[str, int]:
        """Columns of every table: one a label, whatever the schema says."""
        return dict.fromkeys((table.name for table in inputs.tables), len(inputs.labels))

    def build(
        self, inputs: InputSpec, *, embeddings: EmbeddingTables, towers: TowerLayer | None = None
    ) -> LogisticRegression:
        """The model on tables of these columns."""
        del towers  # none: this config has no `tower_module`
        return LogisticRegression(self, inputs=inputs, embeddings=embeddings)


class LogisticRegression(RankingModel):
    """One learned number for each row of each table, and one for each numeric input.

    `embeddings` must have one column for each label in every table.
    """

    def __init__(self, config: LogisticRegressionConfig, *, inputs: InputSpec, embeddings: EmbeddingTables) -> None:
        super().__init__(inputs, embeddings=embeddings)
        self.config = config
        self.num_labels = len(inputs.labels)
        assert all(columns == self.num_labels for columns in embeddings.field_dims), "one column for each label"
        self.vector_names = tuple(spec.name for spec in inputs.vectors)
        width = len(inputs.dense) + sum(spec.dim for spec in inputs.vectors)
        self.linear = Linear(width, self.num_labels) if width else None
        # The linear map has one already.
        self.bias = nn.Parameter(torch.zeros(self.num_labels)) if self.linear is None else None
        if self.linear is not None:
            start_sum_low(self.linear)
            initialise([self.linear], config.init)

    def output_biases(self) -> Sequence[Tensor]:
        """See `Model.output_biases`."""
        return list(self.bias.unbind()) if self.bias is not None else biases_of([self.linear])

    def interact(self, dense_BN: Tensor, fields_BX: Tensor, vectors: dict[str, Tensor]) -> Tensor:
        """The sum of all weights that a sample touches."""
        parts = []
        if fields_BX.shape[1]:
            # A row is its weights, one a label: fields are added up.
            parts.append(fields_BX.unflatten(1, (-1, self.num_labels)).sum(dim=1))
        if self.linear is not None:
            numbers_BN = torch.cat([dense_BN, *(vectors[name] for name in self.vector_names)], dim=1)
            parts.append(self.linear(numbers_BN))
        if self.bias is not None:
            parts.append(self.bias)
        # From left to right, as a sum of two was always rounded.
        logits_BL, *others = parts
        for part in others:
            logits_BL = logits_BL + part
        return logits_BL
