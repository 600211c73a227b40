"""Everything a sample carries as a stack of fields of one size, X₀ (n, d): what Wukong, DHEN and attention start from.

    numbers   BOTTOM_MLP  ──► MLP ──► m fields of d         FIELDS ──► x_n · w_n: one field a number
    tables    d columns: one field;   k·d columns: k fields;   any other width: a linear map to one field of d
    vectors   ──► Linear ──► one field of d each

A table of k·d columns gives k fields without a weight more: a feature that matters may have several embeddings (Wukong,
arXiv 2403.02545, section 3.2), either every feature (`embeddings_per_feature` of a model) or one, by the width that its
table has in the schema.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.errors import ConfigError
from ziggurat.features.inputs import InputSpec
from ziggurat.models.blocks.dense_inputs import DenseInputs, NumericInput
from ziggurat.models.blocks.fields import FieldAlignment
from ziggurat.models.blocks.mlp import MLPConfig


class StackedInputs(nn.Module):
    """Builds X₀ from the parts of a batch.

    Args:
        inputs: names and sizes of the features.
        field_dims: numbers of each field that enters.
        dim: d.
        numeric: how numbers enter; not `NumericInput.CONCAT`.
        bottom: hidden layers of the bottom MLP, for `NumericInput.BOTTOM_MLP`.
        num_bottom_fields: m, fields that the bottom MLP gives.

    Attributes:
        num_fields: n.
        dim: d.
    """

    def __init__(
        self,
        inputs: InputSpec,
        *,
        field_dims: Sequence[int],
        dim: int,
        numeric: NumericInput,
        bottom: MLPConfig,
        num_bottom_fields: int = 1,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.dense = DenseInputs(inputs, dim=dim, numeric=numeric, bottom=bottom, num_bottom_fields=num_bottom_fields)
        pieces = [piece for columns in field_dims for piece in _pieces(columns, dim=dim)]
        self.alignment = FieldAlignment(pieces, dim=dim)
        self.num_fields = self.dense.num_numeric_fields + len(pieces) + self.dense.num_vector_fields

    def forward(
        self, dense_BN: Float[Tensor, "B N"], fields_BX: Float[Tensor, "B X"], vectors: dict[str, Tensor]
    ) -> Float[Tensor, "B n d"]:
        """X₀ of every sample: numbers, embeddings, vectors."""
        # Without numbers it would be a matrix of no columns, which a product need not see.
        numeric = [self.dense.numbers(dense_BN)] if self.dense.num_numeric_fields else []
        parts = [*numeric, *self.alignment(fields_BX), *self.dense.vectors(vectors)]
        flat_BX = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return flat_BX.unflatten(1, (self.num_fields, self.dim))


def check_stackable(numeric: NumericInput, *, where: str) -> None:
    """Refuse numbers beside the fields, for which a stack of fields has no place.

    Raises:
        ConfigError: `numeric` is `concat`.
    """
    if numeric is NumericInput.CONCAT:
        raise ConfigError(
            expected="numeric = bottom_mlp or fields: every input has to become a field",
            found="numeric = concat",
            where=where,
            ways_out=("set numeric = fields", "set numeric = bottom_mlp"),
        )


def _pieces(columns: int, *, dim: int) -> list[int]:
    # k·d columns are k fields as they are; any other width is mapped to one field.
    return [dim] * (columns // dim) if columns % dim == 0 else [columns]
