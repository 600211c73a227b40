"""Bilinear fusion of two representations (Mao et al., FinalMLP, arXiv 2304.00902, equations 9 to 11).

    out = w_x · h₁ + w_y · h₂ + Σ_heads h₁⁽ʰ⁾ᵀ W_h h₂⁽ʰ⁾ + b             for each label; h⁽ʰ⁾ one of H equal pieces

One head is the full bilinear form; H heads have 1/H of its weights. As in FuxiCTR both linear maps have a bias.

Cost: 2·(d₁ + d₂)·L + 2·d₁·(d₂/H)·L + 2·L·d₂ FLOPs a sample.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.errors import ConfigError
from ziggurat.models.blocks.fieldwise import start_like_linear
from ziggurat.models.blocks.mlp import Init
from ziggurat.precision.products import DenseProducts, Linear


class BilinearFusion(DenseProducts):
    """One number a label from two vectors.

    Args:
        first_dim: d₁.
        second_dim: d₂.
        num_heads: H; divides both.
        num_labels: L.

    Raises:
        ConfigError: H does not divide both.
    """

    def __init__(self, first_dim: int, second_dim: int, *, num_heads: int, num_labels: int) -> None:
        super().__init__()
        if num_heads < 1 or first_dim % num_heads or second_dim % num_heads:
            raise ConfigError(
                expected="a number of heads that divides the width of both networks",
                found=f"{num_heads} heads, widths {first_dim} and {second_dim}",
                where="bilinear fusion",
                ways_out=("change num_heads", "change the last hidden layers"),
            )
        self.num_heads = num_heads
        self.num_labels = num_labels
        self.first = Linear(first_dim, num_labels)
        self.second = Linear(second_dim, num_labels)
        # The labels' matrices side by side, so that all of them are one product.
        self.weight = nn.Parameter(torch.empty(num_heads, first_dim // num_heads, num_labels * second_dim // num_heads))
        self.initialise_own(Init.TORCH)

    def initialise_own(self, init: Init) -> None:
        """Start W like a linear map from all products of the form to the labels: so many terms are summed."""
        start_like_linear(self.weight, init, fan_in=self.weight.numel() // self.num_labels, fan_out=self.num_labels)

    def forward(self, first_BX: Float[Tensor, "B X"], second_BY: Float[Tensor, "B Y"]) -> Float[Tensor, "B L"]:
        """w_x · h₁ + w_y · h₂ + Σ_heads h₁ᵀ W h₂ + b."""
        first_HBx = first_BX.unflatten(1, (self.num_heads, -1)).transpose(0, 1)
        second_BHy1 = second_BY.unflatten(1, (self.num_heads, -1, 1))
        mapped_BHLy = self.arithmetic.matmul(first_HBx, self.weight).transpose(0, 1).unflatten(2, (self.num_labels, -1))
        crossed_BHL = self.arithmetic.matmul(mapped_BHLy, second_BHy1).squeeze(3)
        return self.first(first_BX) + self.second(second_BY) + crossed_BHL.sum(dim=1)
