"""Add a model: matrix factorisation with biases, of a user and an item.

    logit = b + b_u + b_i + ⟨p_u, q_i⟩                 of a number to predict: in deviations from its mean

Each row of a table is a vector of D numbers and, in one column more for each
label, its bias. Which two features are the user and the item is said by name; all others are left out, so that this
floor says how much they add. Cost: 2·D operations a sample and label.

Reference: Koren, Bell and Volinsky, "Matrix factorization techniques for recommender systems", Computer 42 (2009).

    ziggurat train table_dlrm --model matrix_factorisation:MatrixFactorisationConfig --data.train ratings.csv \
        --schema my.toml --model.user user_id --model.item item_id
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.errors import ConfigError
from ziggurat.features.inputs import InputSpec
from ziggurat.models import Embedded, Model, Outputs
from ziggurat.models.towers.layer import TowerLayer


@dataclass(frozen=True, kw_only=True)
class MatrixFactorisationConfig:
    """Settings of the model `MatrixFactorisation`.

    Args:
        embedding_dim: D, numbers of each vector; tables have a column more for each label.
        user: name of the feature that says who.
        item: name of the feature that says what.
        embedding: tables: optimizer, kernel, starting weights.
    """

    kind: str = "matrix_factorisation"
    embedding_dim: int = 16
    user: str = "user"
    item: str = "item"
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)

    def table_columns(self, inputs: InputSpec) -> dict[str, int]:
        """Return the columns of every table: a vector, and a bias for each label."""
        return inputs.table_columns(self.embedding_dim, extra=len(inputs.labels))

    def build(
        self, inputs: InputSpec, *, embeddings: EmbeddingTables, towers: TowerLayer | None
    ) -> MatrixFactorisation:
        """Return the model on tables of these columns."""
        del towers  # none: this config has no `tower_module`
        return MatrixFactorisation(self, inputs=inputs, embeddings=embeddings)


class MatrixFactorisation(Model):
    """The product of a user's vector and an item's, and their biases."""

    def __init__(self, config: MatrixFactorisationConfig, *, inputs: InputSpec, embeddings: EmbeddingTables) -> None:
        super().__init__(inputs, embeddings=embeddings)
        names = [spec.name for spec in inputs.fields]
        missing = [name for name in (config.user, config.item) if name not in names]
        widths = {dim for name, dim in zip(names, self.field_dims, strict=True) if name in (config.user, config.item)}
        if missing or len(widths) > 1:
            raise ConfigError(
                expected=f"features of the user and of the item, in tables of one width: {', '.join(names)}",
                found=f"no {', '.join(missing)}" if missing else f"widths {sorted(widths)}",
                where="settings of model 'matrix_factorisation'",
                ways_out=("--model.user NAME --model.item NAME", "leave embedding_dim of these tables open"),
            )
        self._user = names.index(config.user)
        self._item = names.index(config.item)
        self._num_labels = len(inputs.labels)
        self.bias = nn.Parameter(torch.zeros(self._num_labels))

    def forward_dense(self, embedded: Embedded) -> Outputs:
        """Return a logit for each label."""
        fields = embedded.fields.split(list(self.field_dims), dim=1)
        user, user_biases = self._parts(fields[self._user])
        item, item_biases = self._parts(fields[self._item])
        products = (user * item).sum(1, keepdim=True)
        return self.as_outputs(products + user_biases + item_biases + self.bias)

    def output_biases(self) -> Sequence[Tensor]:
        """Return the bias of each label: a new run starts at the share of positives by it."""
        return self.bias.unbind()

    def _parts(self, field: Tensor) -> tuple[Tensor, Tensor]:
        """Divide a field into its vector and its biases."""
        return field[:, : -self._num_labels], field[:, -self._num_labels :]
