"""Convolution over the stack of fields, taken as an image of n rows and d columns (DHEN, arXiv 2203.11014, equation 5).

    Y_c = K_c ∗ X + b_c,  c = 1 … C           (n, d) each: "same" padding with zeros, kernel κ × κ

The C channels come out as C·n fields. Neighbouring fields and neighbouring columns have no meaning of their own, so a
kernel learns to give them one: the order of the fields is part of the model. DHEN's paper names the module and leaves
its sizes open; this is the simplest reading.

Cost: 2·C·κ²·n·d FLOPs a sample.
"""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.models.blocks.mlp import Init
from ziggurat.precision.products import DenseProducts


class FieldConvolution(DenseProducts):
    """C kernels over the n × d image of a sample.

    Args:
        num_fields: n.
        dim: d; only used to count FLOPs.
        num_channels: C.
        kernel_size: κ, an odd number.
    """

    def __init__(self, num_fields: int, *, dim: int, num_channels: int, kernel_size: int) -> None:
        super().__init__()
        self.num_fields = num_fields
        self.dim = dim
        self.convolution = nn.Conv2d(1, num_channels, kernel_size, padding=kernel_size // 2)

    def initialise_own(self, init: Init) -> None:
        """Keep torch's start of a convolution, or Xavier's."""
        if init is Init.XAVIER_NORMAL:
            nn.init.xavier_normal_(self.convolution.weight)
            if self.convolution.bias is not None:
                nn.init.zeros_(self.convolution.bias)

    def forward(self, fields_BFD: Float[Tensor, "B F D"]) -> Float[Tensor, "B CF D"]:
        """Channel after channel, each n fields."""
        weight = self.convolution.weight
        bias = self.convolution.bias
        padding = self.convolution.kernel_size[0] // 2
        if self.arithmetic.is_native:
            return F.conv2d(fields_BFD.unsqueeze(1), weight, bias, padding=padding).flatten(1, 2)
        # The neighbourhood of each number as a row, so that the convolution is one product.
        patches_BKP = F.unfold(fields_BFD.unsqueeze(1), self.convolution.kernel_size, padding=padding)
        channels_BPC = self.arithmetic.linear(patches_BKP.mT, weight.flatten(1), bias)
        return channels_BPC.mT.unflatten(2, fields_BFD.shape[1:]).flatten(1, 2)
