"""OverArch: a network that scores thousands of found items anew, between retrieval and the ranker.

    user vector u (D) ──► user part  ─┐
                                      ├─► φ(u, x) = ⟨u, x⟩ + g(u, x)           for each pair, in one forward
    item vector x (D) ──► item part  ─┘   (item parts of a whole catalogue are computed once)

An inner product cannot say everything that a function of two vectors can; the index needs one, what it found does not.

    mlp                  g = w · relu(A u + B x + P (u ∘ x) + b)               A u and B x are parts of one side
    mixture_of_logits    g = a · Σ_p π_p(u, x) δ_p(u, x)                       p: pairs (i, j) of components
                         δ_ij = cosine of f_i(u) and h_j(x)                    k_u · k_x of them
                         π = softmax over p of G_u(u)_p · G_x(x)_p + MLP(δ)_p

The mixture follows Zhai et al., KDD 2023 (arXiv 2306.04039): adaptive weights over elementary inner products reach
matrices of pairs of any rank. Here ⟨u, x⟩ always stands beside g, and g is 0 at the start, so that training begins with
the order of retrieval.

Loss: sampled softmax of φ / τ over the `hardest` candidates of a sample, those with the largest inner products, for the
samples whose own item is among them; the others ask nothing. That is its task: the order of what was found. Were the
own item put beside those that were found, a low inner product would give it away, and φ would learn the opposite of
retrieval. The loss is added, times `weight`, to that of retrieval.

Cost a pair: mlp 2·D·h FLOPs; mixture 2·k_u·k_x·(d + 2·h). Memory of the item parts: `item_width` numbers an item.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from ziggurat.precision.products import DenseProducts, Linear
from ziggurat.typed import Count, Dim, PositiveFloat, checked


class OverArchKind(StrEnum):
    """Ways to score found items anew."""

    NONE = "none"
    MLP = "mlp"
    MIXTURE_OF_LOGITS = "mixture_of_logits"


class OverArchLearning(StrEnum):
    """Choices of what the over-arch's loss changes."""

    TOGETHER = "together"  # encoders and tables, too
    ON_TOP = "on_top"  # itself alone: retrieval is what it would be without it


@dataclass(frozen=True, kw_only=True)
@checked
class OverArchConfig:
    """Settings of the OverArch.

    Args:
        kind: none, mlp or mixture_of_logits.
        hidden: h, of the MLP, or of the gate of the mixture.
        user_components: k_u of the mixture.
        item_components: k_x of the mixture.
        component_dim: d, columns of each component.
        hardest: candidates of a sample that its loss orders; about as large a share of a block as of the catalogue is
            found.
        weight: of its loss, beside that of retrieval.
        learning: together or on_top.
    """

    kind: OverArchKind = OverArchKind.NONE
    hidden: Dim = 64
    user_components: Dim = 4
    item_components: Dim = 4
    component_dim: Dim = 16
    hardest: Count = 64
    weight: PositiveFloat = 1.0
    learning: OverArchLearning = OverArchLearning.TOGETHER

    def build(self, dim: int) -> OverArch | None:
        """The network over vectors of `dim` columns; None for `none`."""
        match self.kind:
            case OverArchKind.NONE:
                return None
            case OverArchKind.MLP:
                return MLPOverArch(self, dim=dim)
            case OverArchKind.MIXTURE_OF_LOGITS:
                return MixtureOfLogits(self, dim=dim)


class OverArch(DenseProducts, ABC):
    """Scores pairs of vectors; what depends on one side alone is computed apart, and kept for a catalogue.

    Args:
        config: which one.
        dim: D, columns of the vectors.
        user_width: numbers of a user's part.
        item_width: numbers of an item's part.
    """

    def __init__(self, config: OverArchConfig, *, dim: int, user_width: int, item_width: int) -> None:
        super().__init__()
        self.config = config
        self.dim = dim
        self.user_width = user_width
        self.item_width = item_width

    @abstractmethod
    def user_parts(self, users_BD: Float[Tensor, "B D"]) -> Float[Tensor, "B U"]:
        """Compute what a score needs of users, FP32."""

    @abstractmethod
    def item_parts(self, items_ND: Float[Tensor, "N D"]) -> Float[Tensor, "N X"]:
        """Compute what a score needs of items, FP32."""

    @abstractmethod
    def pair_weights(self) -> dict[str, Tensor]:
        """Copies of the weights that meet both sides, for `scores` where the network itself is spread over ranks."""

    @abstractmethod
    def scores(
        self, users_BU: Float[Tensor, "B U"], items_BKX: Float[Tensor, "B K X"], *, weights: dict[str, Tensor]
    ) -> Float[Tensor, "B K"]:
        """φ of each user with its items, in the scale of inner products.

        Args:
            users_BU: parts of users.
            items_BKX: parts of the items of each user.
            weights: `pair_weights`.
        """


class MLPOverArch(OverArch):
    """One hidden layer over both vectors and their product."""

    def __init__(self, config: OverArchConfig, *, dim: int) -> None:
        super().__init__(config, dim=dim, user_width=dim + config.hidden, item_width=dim + config.hidden)
        self.of_user = Linear(dim, config.hidden)
        self.of_item = Linear(dim, config.hidden, bias=False)
        self.of_product = nn.Parameter(torch.empty(dim, config.hidden).uniform_(-1.0, 1.0) / math.sqrt(dim))
        # Zeros: training begins with the order of retrieval.
        self.out = nn.Parameter(torch.zeros(config.hidden))

    def user_parts(self, users_BD: Float[Tensor, "B D"]) -> Float[Tensor, "B U"]:
        """The vector, and its share of the hidden layer."""
        # The first layer is linear in its parts, so each side computes its share once, not once a pair.
        return torch.cat([users_BD, self.of_user(users_BD)], dim=1).float()

    def item_parts(self, items_ND: Float[Tensor, "N D"]) -> Float[Tensor, "N X"]:
        """The vector, and its share of the hidden layer."""
        return torch.cat([items_ND, self.of_item(items_ND)], dim=1).float()

    def pair_weights(self) -> dict[str, Tensor]:
        """The map of the product, and the last layer."""
        return {"of_product": self.of_product.clone(), "out": self.out.clone()}

    def scores(
        self, users_BU: Float[Tensor, "B U"], items_BKX: Float[Tensor, "B K X"], *, weights: dict[str, Tensor]
    ) -> Float[Tensor, "B K"]:
        """φ by one hidden layer over both shares of it and that of the product."""
        products_BKD = users_BU[:, None, : self.dim] * items_BKX[:, :, : self.dim]
        hidden_BKH = self.arithmetic.matmul(products_BKD, weights["of_product"].float())
        hidden_BKH = (hidden_BKH + users_BU[:, None, self.dim :] + items_BKX[:, :, self.dim :]).relu()
        return products_BKD.sum(dim=2) + self.arithmetic.linear(
            hidden_BKH, weights["out"].float().unsqueeze(0)
        ).squeeze(2)


class MixtureOfLogits(OverArch):
    """Many inner products with weights that depend on the pair."""

    def __init__(self, config: OverArchConfig, *, dim: int) -> None:
        num_user, num_item = _components(config)
        num_pairs = num_user * num_item
        widths = [dim + num * config.component_dim + num_pairs for num in (num_user, num_item)]
        super().__init__(config, dim=dim, user_width=widths[0], item_width=widths[1])
        self.num_pairs = num_pairs
        self.user_components = Linear(dim, num_user * config.component_dim)
        self.item_components = Linear(dim, num_item * config.component_dim)
        self.user_gate = Linear(dim, self.num_pairs)
        self.item_gate = Linear(dim, self.num_pairs)
        self.gate_in = Linear(self.num_pairs, config.hidden)
        self.gate_out = Linear(config.hidden, self.num_pairs)
        # As above: at first the inner product alone counts.
        self.amount = nn.Parameter(torch.zeros(1))

    def user_parts(self, users_BD: Float[Tensor, "B D"]) -> Float[Tensor, "B U"]:
        """The vector, its components and its share of the weights."""
        return self._parts(users_BD, self.user_components(users_BD), self.user_gate(users_BD))

    def item_parts(self, items_ND: Float[Tensor, "N D"]) -> Float[Tensor, "N X"]:
        """The vector, its components and its share of the weights."""
        return self._parts(items_ND, self.item_components(items_ND), self.item_gate(items_ND))

    def pair_weights(self) -> dict[str, Tensor]:
        """The network of the weights, and how much the mixture counts."""
        # Weights of both networks by name: on ranks the modules may hold parts of them alone.
        named = {"amount": self.amount}
        for name, layer in (("in", self.gate_in), ("out", self.gate_out)):
            named |= {f"{name}.weight": layer.weight, f"{name}.bias": layer.bias}
        return {name: value.clone() for name, value in named.items()}

    def scores(
        self, users_BU: Float[Tensor, "B U"], items_BKX: Float[Tensor, "B K X"], *, weights: dict[str, Tensor]
    ) -> Float[Tensor, "B K"]:
        """φ by inner products of components, weighted for each pair."""
        weights = {name: value.float() for name, value in weights.items()}
        size = len(users_BU)
        num_items = items_BKX.shape[1]
        pairs = self.num_pairs
        num_user, num_item = _components(self.config)
        dim = self.dim
        each = self.config.component_dim
        products_BK = self.arithmetic.matmul(items_BKX[:, :, :dim], users_BU[:, :dim].unsqueeze(2)).squeeze(2)
        # Between the vector in front and the gate's share at the end.
        user_BDI = users_BU[:, dim:-pairs].view(size, num_user, each).transpose(1, 2)
        item_BJD = items_BKX[:, :, dim:-pairs].reshape(size, num_items * num_item, each)
        logits_BKP = self.arithmetic.matmul(item_BJD, user_BDI).view(size, num_items, pairs)
        hidden_BKH = F.silu(self.arithmetic.linear(logits_BKP, weights["in.weight"], weights["in.bias"]))
        gate_BKP = self.arithmetic.linear(hidden_BKH, weights["out.weight"], weights["out.bias"])
        # The gate of a pair: what both sides say by themselves, and a network of their products.
        gate_BKP = gate_BKP + users_BU[:, None, -pairs:] * items_BKX[:, :, -pairs:]
        return products_BK + weights["amount"] * (gate_BKP.softmax(dim=2) * logits_BKP).sum(dim=2)

    def _parts(self, vectors: Tensor, components: Tensor, gate: Tensor) -> Tensor:
        each = self.config.component_dim
        # Components of length 1, so that products are cosines.
        cut = components.float().view(len(components), components.shape[1] // each, each)
        return torch.cat([vectors.float(), F.normalize(cut, dim=2).flatten(1), gate.float()], dim=1)


def _components(config: OverArchConfig) -> tuple[int, int]:
    return config.user_components, config.item_components


def found_softmax(
    scores: Float[Tensor, "Z n K"], *, is_own: Bool[Tensor, "Z n K"], allowed: Bool[Tensor, "Z n K"]
) -> Float[Tensor, "Z n"]:
    """The loss of samples over the candidates that were found for them; 0 where their own item is not among these.

    Args:
        scores: φ / τ, less ln Q.
        is_own: which candidate is the item of the sample itself.
        allowed: False for candidates that are no negatives.
    """
    masked = scores.masked_fill(~allowed, -torch.inf)
    was_found = (is_own & allowed).any(dim=2)
    # Where nothing was found the sum is minus infinity, whose gradient is NaN.
    total = torch.where(was_found.unsqueeze(2), masked, 0.0).logsumexp(dim=2)
    # One candidate at most is the sample's own, so the sum is its score.
    own = torch.where(is_own, scores, 0.0).sum(dim=2)
    return torch.where(was_found, total - own, 0.0)
