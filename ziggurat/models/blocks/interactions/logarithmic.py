"""Logarithmic neurons: products of powers of fields, with powers that are learned (AFN, arXiv 1909.03276).

    y_m = exp(Σ_f W_mf ln |x_f|) = Π_f |x_f|^W_mf              for every column of the fields by itself

    X (n, d) ─► |x| ≥ ε ─► ln ─► norm ─► W (m × n) ─► exp ─► norm ─► Y (m, d)

A cross layer has products of whole orders; a neuron learns which fields it multiplies, and to which power. Signs are
lost, and what is smaller than ε = 1e-5 counts as ε (FuxiCTR's; the paper says 1e-7). Both norms are over the batch and
all columns of a field, or neuron: logarithms of small embeddings are around −9, and exp takes what it gets.

Cost: 2·n·m·d FLOPs a sample.
"""

from __future__ import annotations

import math

from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.models.blocks.batch_norm import BatchNorm
from ziggurat.models.blocks.interactions.self_attention import FieldsLinear
from ziggurat.models.blocks.mlp import Init

_SMALLEST = 1e-5
_STARTING_STD = 0.25  # of a neuron's sum, in units of the logarithms' size


class _Powers(FieldsLinear):
    def initialise_own(self, init: Init) -> None:
        """Start from N(0, 0.25²/n): exp of larger sums of n logarithms has a heavy tail (the authors take 0.1²)."""
        super().initialise_own(init)
        if init is Init.TORCH:
            nn.init.normal_(self.weight, std=_STARTING_STD / math.sqrt(self.weight.shape[1]))


class LogarithmicNeurons(nn.Module):
    """Learned powers of fields, multiplied.

    Args:
        num_fields: n.
        num_neurons: m.
        dim: d; only used to count FLOPs.
    """

    def __init__(self, num_fields: int, *, num_neurons: int, dim: int) -> None:
        super().__init__()
        self.powers = _Powers(dim, input_dim=num_fields, output_dim=num_neurons)
        self.log_norm = BatchNorm(num_fields)
        self.exp_norm = BatchNorm(num_neurons)

    def forward(self, fields_BFD: Float[Tensor, "B F D"]) -> Float[Tensor, "B M D"]:
        """A field of d numbers for each neuron."""
        # A column is a row, so that norms and the product see all of them as samples.
        logs_BDF = fields_BFD.abs().clamp(min=_SMALLEST).log().mT
        normal_BDF = self.log_norm(logs_BDF.flatten(0, 1)).view_as(logs_BDF)
        products_BDM = self.powers(normal_BDF).exp()
        return self.exp_norm(products_BDM.flatten(0, 1)).view_as(products_BDM).mT
