"""Gates between fields: every field is scaled, column by column, by a linear combination of all fields.

    G = A X + c            A (n, n), c (n): one number a field, for each column alike
    out = [ X | X ⊙ G ]    2n fields

FinalNet's feature gating (Zhu et al., SIGIR 2023): the second half are products of two fields each, so that the network
above starts from orders 1 and 2. A starts with zeros and c with ones, so the gates start open.

Cost: 2·n²·d FLOPs a sample.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.models.blocks.fieldwise import FieldMix
from ziggurat.models.blocks.mlp import Init


class FieldGate(nn.Module):
    """[X | X ⊙ (A X + c)].

    Args:
        num_fields: n.
        dim: d; only used to count FLOPs.
    """

    def __init__(self, num_fields: int, *, dim: int) -> None:
        super().__init__()
        self.mix = _ZeroMix(num_fields, num_outputs=num_fields, dim=dim)
        self.bias = nn.Parameter(torch.ones(num_fields, 1))

    def forward(self, fields_BFD: Float[Tensor, "B F D"]) -> Float[Tensor, "B 2F D"]:
        """Fields, then gated fields."""
        return torch.cat([fields_BFD, fields_BFD * (self.mix(fields_BFD) + self.bias)], dim=1)


class _ZeroMix(FieldMix):
    def initialise_own(self, init: Init) -> None:
        """Zeros, whatever the setting."""
        nn.init.zeros_(self.weight)
