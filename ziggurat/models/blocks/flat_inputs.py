"""Everything a sample carries as one flat vector x₀: what models without pairwise fields (DCNv2, DNN) start from.

    x₀ = [numbers | fields (pooled embeddings, or what towers make of them) | projected pretrained vectors]

Fields may differ in their number of columns: nothing is stacked, so nothing has to agree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.features.inputs import InputSpec
from ziggurat.models.blocks.dense_inputs import DenseInputs, NumericInput
from ziggurat.models.blocks.mlp import MLPConfig


class FlatInputs(nn.Module):
    """Builds x₀ from the parts of a batch.

    Args:
        inputs: names and sizes of the features.
        field_dims: numbers of each field that enters x₀ as it is.
        dim: D of numeric fields and projected vectors.
        numeric: how numbers enter.
        bottom: hidden layers of the bottom MLP, for `NumericInput.BOTTOM_MLP`.

    Attributes:
        output_dim: width d of x₀.
    """

    def __init__(
        self,
        inputs: InputSpec,
        *,
        field_dims: Sequence[int],
        dim: int,
        numeric: NumericInput,
        bottom: MLPConfig,
    ) -> None:
        super().__init__()
        self.dense = DenseInputs(inputs, dim=dim, numeric=numeric, bottom=bottom)
        own_fields = self.dense.num_numeric_fields + self.dense.num_vector_fields
        self.output_dim = self.dense.num_beside + own_fields * dim + sum(field_dims)
        # x₀ itself needs no gradient if nothing in it was learned: only numbers, passed on as they are.
        self.is_raw = not inputs.fields and not own_fields

    def forward(
        self, dense_BN: Float[Tensor, "B N"], fields_BX: Float[Tensor, "B X"], vectors: dict[str, Tensor]
    ) -> Float[Tensor, "B d"]:
        """x₀ of every sample."""
        fields = [fields_BX] if fields_BX.shape[1] else []
        return torch.cat([self.dense.numbers(dense_BN), *fields, *self.dense.vectors(vectors)], dim=1)
