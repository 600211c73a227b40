"""Pairwise dot products of the fields of a sample: the interaction of DLRM.

    fields (F, D)                 products Z = X Xᵀ (F, F)         pairs, row by row (P = F(F−1)/2)

    x0 ──────                         0   1   2   3
    x1 ──────                     0   ·  01  02  03
    x2 ──────           →         1       ·  12  13      →         [01 02 03 12 13 23]
    x3 ──────                     2           ·  23
                                  3               ·

Z is symmetric and its diagonal is no interaction, so only the part above the diagonal goes on (arXiv 1906.00091,
section 2.1.3; `itself=False` there).

Two things make the plain form slow. Picking with a pair of index tensors (`z[:, rows, columns]`) gathers element by
element and scatters back with accumulation. And autograd treats the two factors of X Xᵀ as different tensors: two
batched products backward, and a sum. Here the picking is `torch.gather` with precomputed places, and the backward pass
uses the symmetry: with g the gradient of the pairs,

    dX = (G + Gᵀ) X,   where (G + Gᵀ)_ij = g_pair(i, j), 0 on the diagonal,

so it is one more gather and one batched product. Nothing is ever scattered.

Cost: 2·F²·D FLOPs a sample forward and as much backward, instead of 2·F²·D and 4·F²·D.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn


class PairwiseDot(nn.Module):
    """All F(F−1)/2 dot products between F fields of D numbers.

    Args:
        num_fields: F, two or more for any pairs to come out.
        dim: D; only used to count FLOPs.

    Attributes:
        num_pairs: P = F(F−1)/2.
    """

    pair_places: Tensor
    full_places: Tensor

    def __init__(self, num_fields: int, *, dim: int) -> None:
        super().__init__()
        self.num_fields = num_fields
        self.dim = dim
        self.num_pairs = num_fields * (num_fields - 1) // 2
        rows, columns = torch.triu_indices(num_fields, num_fields, offset=1)
        full = torch.zeros((num_fields, num_fields), dtype=torch.int64)
        full[rows, columns] = full[columns, rows] = torch.arange(self.num_pairs)
        self.register_buffer("pair_places", rows * num_fields + columns, persistent=False)
        self.register_buffer("full_places", full.flatten(), persistent=False)

    def forward(self, fields_BFD: Float[Tensor, "B F D"]) -> Float[Tensor, "B P"]:
        """Products in the order (0,1), (0,2), …, (1,2), …; in the dtype of autocast where that is on."""
        device_type = fields_BFD.device.type
        if torch.is_autocast_enabled(device_type):
            fields_BFD = fields_BFD.to(torch.get_autocast_dtype(device_type))
        return _PairwiseDot.apply(fields_BFD, self.pair_places, self.full_places)  # type: ignore[return-value]


class _PairwiseDot(torch.autograd.Function):
    """`gather(bmm(X, Xᵀ))` with the symmetric backward pass of the module docstring."""

    @staticmethod
    def forward(fields_BFD: Tensor, pair_places_P: Int64[Tensor, "P"], full_places_FF: Int64[Tensor, "F*F"]) -> Tensor:
        products_BFF = torch.bmm(fields_BFD, fields_BFD.mT)
        return products_BFF.flatten(1).gather(1, pair_places_P.expand(fields_BFD.shape[0], -1))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        fields_BFD, _, full_places_FF = inputs
        ctx.save_for_backward(fields_BFD, full_places_FF)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        fields_BFD, full_places_FF = ctx.saved_tensors
        batch_size, num_fields, _ = fields_BFD.shape
        symmetric_BFF = gradients[0].gather(1, full_places_FF.expand(batch_size, -1)).view(-1, num_fields, num_fields)
        symmetric_BFF.diagonal(dim1=1, dim2=2).zero_()
        return torch.bmm(symmetric_BFF, fields_BFD), None, None
