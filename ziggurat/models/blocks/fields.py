"""Pooled embeddings as a stack of fields of one size.

Pairwise interactions need every field to have D numbers. Tables may differ (a small table needs fewer columns: mixed
dimensions, arXiv 1909.11810, whose projection this is): a field with d ≠ D columns passes a linear map d → D without
bias. Where all sizes agree there is nothing to compute and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.precision.products import Linear


class FieldAlignment(nn.Module):
    """Brings pooled embeddings of any sizes to F fields of D numbers, still flat.

    Args:
        field_dims: columns of each field, in order.
        dim: D.
    """

    def __init__(self, field_dims: Sequence[int], *, dim: int) -> None:
        super().__init__()
        self.field_dims = tuple(field_dims)
        self.dim = dim
        odd = [columns for columns in field_dims if columns != dim]
        self.projections = nn.ModuleList(Linear(columns, dim, bias=False) for columns in odd)

    def forward(self, pooled_BT: Float[Tensor, "B T"]) -> list[Float[Tensor, "B X"]]:
        """Pieces that, side by side, are (B, F·D)."""
        if not len(self.projections):
            return [pooled_BT] if self.field_dims else []
        projections = iter(self.projections)
        fields = pooled_BT.split(self.field_dims, dim=1)
        return [field if field.shape[1] == self.dim else next(projections)(field) for field in fields]
