"""Dot products of all pairs of fields, through an MLP, back to fields (DHEN, arXiv 2203.11014, equation 3).

    u = reshape(W_m MLP(LN([⟨x_i, x_j⟩ for i < j])) + b)            (l, d)

DHEN calls it AdvancedDLRM and leaves its inside open; the pairwise products of DLRM and an MLP are what its text
names. The norm before the MLP is ours, for the reason given in `factorization_machine.py`.

Cost: 2·n²·d FLOPs a sample for the products (`models/blocks/dot.py`), then those of the MLP.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.models.blocks.dot import PairwiseDot
from ziggurat.models.blocks.field_norm import shift_of
from ziggurat.models.blocks.mlp import MLP, MLPConfig, Normalization, forgets_constants, norm_of_width
from ziggurat.models.blocks.without_gradient import without_gradient


class DotBlock(nn.Module):
    """Pairwise products, MLP, l fields.

    Args:
        num_fields: n, two or more.
        num_outputs: l.
        dim: d.
        mlp: hidden layers; a linear layer to l·d closes them.
        norm_eps: ε of the norm before the MLP.
        norm: layer, batch, or block.
    """

    def __init__(
        self,
        num_fields: int,
        *,
        num_outputs: int,
        dim: int,
        mlp: MLPConfig,
        norm_eps: float,
        norm: Normalization = Normalization.LAYER,
    ) -> None:
        super().__init__()
        self.num_outputs = num_outputs
        self.dim = dim
        self.products = PairwiseDot(num_fields, dim=dim)
        num_pairs = self.products.num_pairs
        one_alone = num_pairs == 1 and norm is not Normalization.BATCH  # would be 0, or its sign
        self.norm = nn.Identity() if one_alone else norm_of_width(norm, num_pairs, eps=norm_eps)
        self.mlp = MLP(self.products.num_pairs, config=mlp, output_dim=num_outputs * dim, output_bias=mlp.bias)
        if forgets_constants(mlp):
            without_gradient(shift_of(self.norm))

    def forward(self, fields_BFD: Float[Tensor, "B F D"]) -> Float[Tensor, "B M D"]:
        """Turn the dot products of n fields into L fields."""
        return self.mlp(self.norm(self.products(fields_BFD))).unflatten(1, (self.num_outputs, self.dim))
