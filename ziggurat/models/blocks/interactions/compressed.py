"""Compressed interaction network: vector-wise products of growing order (Lian et al., arXiv 1803.05170, equation 6).

    X_{k+1}[o] = Σ_{h,m} W_k[o, h, m] (X₀[h] ⊙ X_k[m]) + b_k[o]          X_k (H_k, d), ⊙ by column

    out = [ Σ_d X_1 | Σ_d X_2 | … ]                                       Σ_k H_k numbers

As FuxiCTR and BARS compute it: no activation between layers, every layer whole into the next and into the output.

Here a column is a row: X is kept as (B, d, H), so the products of a layer are rows of one matrix (B·d, H₀·H_k) and W_k
is one matrix product for the whole batch. Cost: 2·d·H₀·H_k·H_{k+1} FLOPs a sample and layer, and as many numbers
B·d·H₀·H_k are written on the way.
"""

from __future__ import annotations

import itertools
import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.models.blocks.interactions.self_attention import FieldsLinear

_STARTING_STD = 0.3  # of a feature map's sum in the first layer, where the deviation of a label is about 1


def largest_start(dim: int) -> float:
    """Return the standard deviation of the numbers of fields with which sums of the first layer have one of 0.3.

    W_k starts uniform in ± 1/(number of products), so the products of a column have on average s²/√3, however many
    fields there are; d columns are summed. Later layers have higher powers of s, which is below 1.

    Args:
        dim: d.
    """
    return math.sqrt(_STARTING_STD / math.sqrt(dim / 3))


class CompressedInteraction(nn.Module):
    """A compressed interaction network: vector-wise products of growing order.

    Args:
        num_fields: H₀.
        dim: d of a field.
        layer_dims: H_1, H_2, …: feature maps of each layer.

    Attributes:
        output_dim: Σ_k H_k.
    """

    def __init__(self, num_fields: int, *, dim: int, layer_dims: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            FieldsLinear(dim, input_dim=num_fields * wide, output_dim=narrow, has_bias=True)
            for wide, narrow in itertools.pairwise((num_fields, *layer_dims))
        )
        self.output_dim = sum(layer_dims)

    def forward(self, fields_BFD: Float[Tensor, "B F D"]) -> Float[Tensor, "B H"]:
        """Sums over d of all layers, side by side."""
        # Turned once: every layer then multiplies rows that lie side by side.
        first_BDF = fields_BFD.mT.contiguous()
        crossed_BDH = first_BDF
        sums = []
        for layer in self.layers:
            crossed_BDH = layer((first_BDF.unsqueeze(3) * crossed_BDH.unsqueeze(2)).flatten(2))
            sums.append(crossed_BDH.sum(dim=1))
        return torch.cat(sums, dim=1)
