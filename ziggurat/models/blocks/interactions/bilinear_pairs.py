"""Bilinear products of pairs of fields: v_i is mapped before it is multiplied with v_j, column by column.

    p_ij = (W v_i) ⊙ v_j         i < j          n(n−1)/2 vectors of d

    all     one W for all pairs          each     a W_i for the left field          pair     a W_ij for each pair

Dot products keep one number a pair and Hadamard products weigh no column against another; this does both. FiBiNET
(Huang, Zhang and Zhang, arXiv 1905.09433, equations 7 to 10). The last field stands on no left side, so there are n − 1
matrices W_i.

Cost a sample: 2·(n − 1)·d² FLOPs for `all` and `each`, n(n − 1)·d² for `pair`; n(n − 1)/2·d numbers are written.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.models.blocks.fieldwise import BatchedLinear
from ziggurat.models.blocks.interactions.self_attention import FieldsLinear


class BilinearKind(StrEnum):
    """Choices of which pairs share a matrix."""

    ALL = "all"
    EACH = "each"
    PAIR = "pair"


class BilinearPairs(nn.Module):
    """(W v_i) ⊙ v_j of all pairs, in the order (0, 1), (0, 2), …, (1, 2), ….

    Args:
        num_fields: n, two or more.
        dim: d.
        kind: which pairs share a matrix.

    Attributes:
        num_pairs: n(n−1)/2.
    """

    left: Tensor
    right: Tensor

    def __init__(self, num_fields: int, *, dim: int, kind: BilinearKind) -> None:
        super().__init__()
        self.kind = kind
        left, right = torch.triu_indices(num_fields, num_fields, offset=1)
        # Buffers, so that they follow the model to a device; not saved, since n says what they are.
        self.register_buffer("left", left, persistent=False)
        self.register_buffer("right", right, persistent=False)
        self.num_pairs = num_fields * (num_fields - 1) // 2
        match kind:
            case BilinearKind.ALL:
                self.map = FieldsLinear(num_fields - 1, input_dim=dim, output_dim=dim)
            case BilinearKind.EACH:
                self.map = BatchedLinear(num_fields - 1, input_dim=dim, output_dim=dim)
            case BilinearKind.PAIR:
                self.map = BatchedLinear(self.num_pairs, input_dim=dim, output_dim=dim)

    def forward(self, fields_BFD: Float[Tensor, "B F D"]) -> Float[Tensor, "B P D"]:
        """A vector for each pair."""
        right_BPD = fields_BFD.index_select(1, self.right)
        match self.kind:
            case BilinearKind.ALL:
                mapped_BPD = self.map(fields_BFD[:, :-1]).index_select(1, self.left)
            case BilinearKind.EACH:
                mapped_BPD = self.map(fields_BFD[:, :-1].flatten(1)).index_select(1, self.left)
            case BilinearKind.PAIR:
                mapped_BPD = self.map(fields_BFD.index_select(1, self.left).flatten(1))
        return mapped_BPD * right_BPD
