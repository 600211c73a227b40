"""Factorization machines over a stack of fields, and the block that Wukong makes of them (arXiv 2403.02545).

X holds n fields of d numbers. All pairwise dot products are one matrix; its rows can be summarised without forming it:

    plain        FM(X) = X Xᵀ                       (n, n)    2·n²·d FLOPs
    optimized    FM(X) = X (Xᵀ Y)                   (n, k)    4·n·k·d: Y (n, k) is learned, XᵀY comes first
    attentive    FM(X) = X (Xᵀ Y(X))                (n, k)    Y(X) = reshape(MLP(flatten(C X))): every sample its own Y

    block        FMB(X) = reshape(W … MLP(LN(flatten(FM(X)))) + b)      (n_out, d)

With Y = 1 (n, 1) row i of the optimised form is ⟨x_i, Σ_j x_j⟩, half of Rendle's factorization machine (ICDM 2010). The
paper says of the attentive form only that Y is made by an MLP from linearly compressed input; here C (c, n) compresses
and the MLP's own closing layer makes n·k numbers.

The norm matters: products of small embeddings are tiny (N(0, 1e-4) starts give 1e-8), and the MLP needs numbers of
order one. Its ε is a setting for that reason. The closing layer of the block's MLP is linear.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.models.blocks.field_norm import shift_of
from ziggurat.models.blocks.fieldwise import FieldMix, mix_by, start_like_linear
from ziggurat.models.blocks.mlp import MLP, Init, MLPConfig, Normalization, forgets_constants, norm_of_width
from ziggurat.models.blocks.without_gradient import without_gradient
from ziggurat.ops.interactions.fm_norm import FMKernel, fm_norm
from ziggurat.precision.products import DenseProducts


class FMKind(StrEnum):
    """Ways to summarise the dot products; see the module docstring."""

    PLAIN = "plain"
    OPTIMIZED = "optimized"
    ATTENTIVE = "attentive"


class PlainFactorizationMachine(DenseProducts):
    """All dot products of n fields, X Xᵀ: both halves and the diagonal.

    Args:
        num_fields: n.
        dim: d of a field; only used to count FLOPs.
    """

    def __init__(self, num_fields: int, *, dim: int) -> None:
        super().__init__()
        self.num_fields = num_fields
        self.dim = dim

    def forward(self, fields_BFD: Float[Tensor, "B F D"]) -> Float[Tensor, "B F F"]:
        """All dot products of the fields."""
        return self.arithmetic.matmul(fields_BFD, fields_BFD.mT)


class FactorizationMachine(DenseProducts):
    """The dot products of n fields projected to k numbers a field, X (Xᵀ Y), without forming them all.

    Args:
        num_fields: n.
        dim: d of a field; only used to count FLOPs.
        rank: k.
        kernel: what computes products and norm in a block.
    """

    def __init__(self, num_fields: int, *, dim: int, rank: int, kernel: FMKernel = FMKernel.AUTO) -> None:
        super().__init__()
        self.dim = dim
        self.kernel = kernel
        self.weight = nn.Parameter(torch.empty(num_fields, rank))
        self.initialise_own(Init.TORCH)

    def initialise_own(self, init: Init) -> None:
        """Start Y as an `nn.Linear(n, k)` would."""
        num_fields, rank = self.weight.shape
        start_like_linear(self.weight, init, fan_in=num_fields, fan_out=rank)

    def forward(self, fields_BFD: Float[Tensor, "B F D"]) -> Float[Tensor, "B F r"]:
        """The products, from right to left: 4·n·d·k FLOPs instead of 2·n²·(d + k)."""
        # Right to left: the n × n products are never formed.
        mixed_BrD = mix_by(self.arithmetic, fields_BFD, self.weight.t())
        return self.arithmetic.matmul(fields_BFD, mixed_BrD.mT)


class AttentiveFactorizationMachine(DenseProducts):
    """X (Xᵀ Y(X)) with a Y for every sample.

    Args:
        num_fields: n.
        dim: d of a field.
        rank: k.
        num_compressed: c, fields that the MLP reads.
        attention: hidden layers of the MLP.
    """

    def __init__(self, num_fields: int, *, dim: int, rank: int, num_compressed: int, attention: MLPConfig) -> None:
        super().__init__()
        self.num_fields = num_fields
        self.dim = dim
        self.rank = rank
        self.compress = FieldMix(num_fields, num_outputs=num_compressed, dim=dim)
        self.attention = MLP(
            num_compressed * dim, config=attention, output_dim=num_fields * rank, output_bias=attention.bias
        )

    def forward(self, fields_BFD: Float[Tensor, "B F D"]) -> Float[Tensor, "B F r"]:
        """The products with the sample's own Y."""
        projection_BFr = self.attention(self.compress(fields_BFD).flatten(1)).unflatten(1, (self.num_fields, self.rank))
        # From right to left here as well: no n × n products.
        return self.arithmetic.matmul(fields_BFD, self.arithmetic.matmul(fields_BFD.mT, projection_BFr))


class FactorizationMachineBlock(nn.Module):
    """Wukong's factorization machine block: products, norm, MLP, and back to fields.

    Args:
        products: what gives `num_products` numbers for each of `num_fields` fields.
        num_products: k, or n for the plain form, times n: the width of the flat products.
        num_outputs: n_F, fields that come out.
        dim: d of a field.
        mlp: hidden layers; a linear layer to n_F·d closes them.
        norm_eps: ε of the norm.
        norm: layer, as published, batch, or block.
    """

    def __init__(
        self,
        products: nn.Module,
        *,
        num_products: int,
        num_outputs: int,
        dim: int,
        mlp: MLPConfig,
        norm_eps: float,
        norm: Normalization = Normalization.LAYER,
    ) -> None:
        super().__init__()
        self.num_outputs = num_outputs
        self.dim = dim
        self.products = products
        # Products of small embeddings are tiny, and the MLP needs numbers of order one.
        self.norm = norm_of_width(norm, num_products, eps=norm_eps)
        self.mlp = MLP(num_products, config=mlp, output_dim=num_outputs * dim, output_bias=mlp.bias)
        # The first mean over the batch takes out what the norm's shift adds, so its gradient is noise.
        if forgets_constants(mlp):
            without_gradient(shift_of(self.norm))

    def forward(self, fields_BFD: Float[Tensor, "B F D"]) -> Float[Tensor, "B M D"]:
        """Compute reshape(MLP(LN(flatten(FM(X)))))."""
        return self.mlp(self._normal_products(fields_BFD)).unflatten(1, (self.num_outputs, self.dim))

    def _normal_products(self, fields_BFD: Tensor) -> Tensor:
        machine = self.products
        norm = self.norm
        # The fused kernel is for plain products with a layer norm; all others are computed one after the other.
        if not isinstance(machine, FactorizationMachine) or not isinstance(norm, nn.LayerNorm):
            return norm(machine(fields_BFD).flatten(1))
        if not _asks_for_kernel(machine, fields_BFD):
            return norm(machine(fields_BFD).flatten(1))
        affine = {"scale_P": norm.weight, "shift_P": norm.bias}
        return fm_norm(fields_BFD, machine.weight, **affine, eps=norm.eps, kernel=machine.kernel)


def _asks_for_kernel(machine: FactorizationMachine, fields_BFD: Tensor) -> bool:
    """Return whether `fm_norm` computes products and layer norm: by name, or by `auto` on a GPU."""
    if not machine.arithmetic.is_native:
        return False
    if machine.kernel is FMKernel.AUTO:
        return fields_BFD.device.type == "cuda"
    return machine.kernel is FMKernel.TRITON
