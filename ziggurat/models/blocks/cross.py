"""Cross networks of DCNv2 and GDCN: explicit products of features, one more factor each layer (arXiv 2008.13535).

         ┌───────────────┐     ┌────── …
    x_l ─┴─► f_l ─► ⊙ ─► + ─► x_{l+1}             x_{l+1} = x₀ ⊙ f_l(x_l) + x_l
                    ▲
    x₀ ─────────────┴──────────── …

    full rank    f_l(x) = W_l x + b_l                                              equation 1
    low rank     f_l(x) = U_l V_l x + b_l                                          equation 2
    mixture      f_l(x) = Σ_e G_e(x) U_le tanh(C_le tanh(V_le x)) + b_l            equations 3 and 4
    gated        f_l(x) = (W_l x + b_l) ⊙ σ(W_gl x)                                GDCN, arXiv 2311.04635

After l layers x holds polynomials of the inputs up to degree l + 1. A full-rank layer costs 2·d² FLOPs a sample, a
low-rank one 4·d·r, so rank pays below d/2 (TorchRec advises d/4). In the mixture the gates G are a softmax of a linear
map shared by all layers, without bias (as in FuxiCTR's CrossNetMix); since the gates sum to 1, b_l stands outside the
sum, and weighing the experts' r numbers before U turns E products of width r into one of width E·r.

The gate of GDCN closes on products of an order that only add noise, number by number and for each sample; without it
(σ = 1) the layer is the full-rank one. It costs a second matrix, 4·d² FLOPs a layer.

Full and low rank run as one operation with its own backward pass (`ziggurat.ops.interactions.cross`).
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.models.blocks.mlp import Init
from ziggurat.ops.interactions.cross import cross_layers
from ziggurat.precision.products import DenseProducts, Linear, its_arithmetic


class CrossNet(nn.Module):
    """A full-rank cross network, x_{l+1} = x₀ ⊙ (W_l x_l + b_l) + x_l.

    Args:
        dim: d, width of the input and of every layer.
        num_layers: number of cross layers.
        bias: whether there is a b_l.
    """

    def __init__(self, dim: int, *, num_layers: int, bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Linear(dim, dim, bias=bias) for _ in range(num_layers))

    def forward(self, inputs_Bd: Float[Tensor, "B d"]) -> Float[Tensor, "B d"]:
        """Apply every layer; without layers the input itself."""
        # Another arithmetic rounds each product by itself: the fused operation would read the weights past it.
        if not its_arithmetic(self.layers).is_native:
            return _layer_by_layer(inputs_Bd, self.layers)
        ups, biases = _weights(self.layers)
        return cross_layers(inputs_Bd, downs=(), ups=ups, biases=biases)


class LowRankCrossNet(nn.Module):
    """A low-rank cross network, x_{l+1} = x₀ ⊙ (U_l V_l x_l + b_l) + x_l.

    Args:
        dim: d, width of the input and of every layer.
        num_layers: number of cross layers.
        rank: r, width between V_l (r × d) and U_l (d × r).
        bias: whether there is a b_l.
    """

    def __init__(self, dim: int, *, num_layers: int, rank: int, bias: bool = True) -> None:
        super().__init__()
        self.down = nn.ModuleList(Linear(dim, rank, bias=False) for _ in range(num_layers))
        self.up = nn.ModuleList(Linear(rank, dim, bias=bias) for _ in range(num_layers))

    def forward(self, inputs_Bd: Float[Tensor, "B d"]) -> Float[Tensor, "B d"]:
        """Apply every layer; without layers the input itself."""
        if not its_arithmetic([*self.down, *self.up]).is_native:
            return _layer_by_layer(inputs_Bd, self.up, downs=self.down)
        downs = [linear.weight for linear in self.down if isinstance(linear, nn.Linear)]
        ups, biases = _weights(self.up)
        return cross_layers(inputs_Bd, downs=downs, ups=ups, biases=biases)


def _weights(linears: nn.ModuleList) -> tuple[list[Tensor], list[Tensor]]:
    """Return matrices of linear maps, and their biases: zeros without a gradient for a map that has none."""
    found = [linear for linear in linears if isinstance(linear, nn.Linear)]
    biases = [linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias for linear in found]
    return [linear.weight for linear in found], biases


def _layer_by_layer(
    inputs_Bd: Float[Tensor, "B d"], ups: nn.ModuleList, *, downs: nn.ModuleList | None = None
) -> Float[Tensor, "B d"]:
    """Compute `cross_layers_reference`, each product as its own layer computes it."""
    crossed_Bd = inputs_Bd
    for index, up in enumerate(ups):
        low = crossed_Bd if downs is None else downs[index](crossed_Bd)
        crossed_Bd = torch.addcmul(crossed_Bd, inputs_Bd, up(low))
    return crossed_Bd


class ExpertCores(DenseProducts):
    """One r × r matrix an expert: C_e in v_e → C_e v_e.

    Args:
        num_experts: E.
        rank: r.
    """

    def __init__(self, num_experts: int, *, rank: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.rank = rank
        self.weight = nn.Parameter(torch.empty(num_experts, rank, rank))
        self.initialise_own(Init.TORCH)

    def initialise_own(self, init: Init) -> None:
        """Start each expert's matrix as an `nn.Linear(r, r)` would."""
        with torch.no_grad():
            if init is Init.XAVIER_NORMAL:
                self.weight.normal_(0.0, math.sqrt(1.0 / self.rank))
            else:
                self.weight.uniform_(-1.0 / math.sqrt(self.rank), 1.0 / math.sqrt(self.rank))

    def forward(self, inputs_BEr: Float[Tensor, "B E r"]) -> Float[Tensor, "B E r"]:
        """C_e times the vector of each expert."""
        # Experts first: one batched product has a matrix for each.
        return self.arithmetic.matmul(inputs_BEr.transpose(0, 1), self.weight.mT).transpose(0, 1)


class CrossNetMix(nn.Module):
    """Mixture of low-rank experts: x_{l+1} = x₀ ⊙ (Σ_e G_e(x_l) U_l,e tanh(C_l,e tanh(V_l,e x_l)) + b_l) + x_l.

    Args:
        dim: d, width of the input and of every layer.
        num_layers: number of cross layers.
        rank: r of each expert.
        num_experts: E.
        bias: whether there is a b_l.
    """

    def __init__(self, dim: int, *, num_layers: int, rank: int, num_experts: int, bias: bool = True) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.rank = rank
        width = num_experts * rank
        self.gate = Linear(dim, num_experts, bias=False)
        self.down = nn.ModuleList(Linear(dim, width, bias=False) for _ in range(num_layers))
        self.cores = nn.ModuleList(ExpertCores(num_experts, rank=rank) for _ in range(num_layers))
        self.up = nn.ModuleList(Linear(width, dim, bias=bias) for _ in range(num_layers))

    def forward(self, inputs_Bd: Float[Tensor, "B d"]) -> Float[Tensor, "B d"]:
        """Apply every layer; without layers the input itself."""
        crossed_Bd = inputs_Bd
        for down, cores, up in zip(self.down, self.cores, self.up, strict=True):
            low_BEr = down(crossed_Bd).tanh().unflatten(1, (self.num_experts, self.rank))
            gates_BE = self.gate(crossed_Bd).softmax(dim=1)
            # Weighed before U: one product of width E·r then serves all experts.
            mixed_BEr = cores(low_BEr).tanh() * gates_BE.unsqueeze(2)
            crossed_Bd = torch.addcmul(crossed_Bd, inputs_Bd, up(mixed_BEr.flatten(1)))
        return crossed_Bd


class GatedCrossNet(nn.Module):
    """Gated cross network: x_{l+1} = x₀ ⊙ (W_l x_l + b_l) ⊙ σ(G_l x_l) + x_l.

    Args:
        dim: d, width of the input and of every layer.
        num_layers: number of cross layers.
    """

    def __init__(self, dim: int, *, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Linear(dim, dim) for _ in range(num_layers))
        self.gates = nn.ModuleList(Linear(dim, dim, bias=False) for _ in range(num_layers))

    def forward(self, inputs_Bd: Float[Tensor, "B d"]) -> Float[Tensor, "B d"]:
        """Apply every layer."""
        crossed_Bd = inputs_Bd
        for layer, gate in zip(self.layers, self.gates, strict=True):
            passed_Bd = inputs_Bd * gate(crossed_Bd).sigmoid()
            crossed_Bd = torch.addcmul(crossed_Bd, passed_Bd, layer(crossed_Bd))
        return crossed_Bd
