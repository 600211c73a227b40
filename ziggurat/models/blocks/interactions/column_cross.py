"""Products of columns, summed over fields: the cross module of DHEN (arXiv 2203.11014, equation 7).

    G = Xᵀ X                (d, d): G_ij = Σ_f x_fi x_fj
    u = W G + b             (l, d), W (l, d)

Where dot products sum over columns and keep pairs of fields, this sums over fields and keeps pairs of columns. The
paper's "skip" of a cross layer is left out, since the layer around it has a shortcut.

Cost: 2·n·d² + 2·l·d² FLOPs a sample.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.models.blocks.fieldwise import FieldMix
from ziggurat.precision.products import DenseProducts


class ColumnCross(DenseProducts):
    """W (Xᵀ X) + b.

    Args:
        num_fields: n; only used to count FLOPs.
        num_outputs: l.
        dim: d.
    """

    def __init__(self, num_fields: int, *, num_outputs: int, dim: int) -> None:
        super().__init__()
        self.num_fields = num_fields
        self.dim = dim
        self.mix = FieldMix(dim, num_outputs=num_outputs, dim=dim)
        self.bias = nn.Parameter(torch.zeros(num_outputs, dim))

    def forward(self, fields_BFD: Float[Tensor, "B F D"]) -> Float[Tensor, "B M D"]:
        """Cross the columns of n fields into L fields."""
        return self.mix(self.arithmetic.matmul(fields_BFD.mT, fields_BFD)) + self.bias
