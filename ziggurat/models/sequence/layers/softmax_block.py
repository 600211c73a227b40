"""SoftmaxBlock: softmax attention and a feed-forward network: SASRec's block, LiGR's, the original transformer's.

    SASRec    q = LN(x);   y = q + A(q, x, x);          x' = LN(y) + F(LN(y))          F: ReLU, hidden size D
    LiGR      y = x + σ(W₁ x) ⊙ A(LN(x), LN(x), LN(x)); x' = y + σ(W₂ y) ⊙ F(LN(y))    F: SwiGLU, hidden size 4 D
    encoder   y = LN(x + A(x, x, x));                   x' = LN(y + F(y))              F: ReLU, or LeakyReLU in BST
    A(q, k, v) = W_o Σ_j softmax_j(⟨W_q q_i, W_k k_j⟩ / √d) W_v v_j + b_o

SASRec normalises queries alone, and its residuals run from the normalised rows; `normalised = all` with the same
residuals off is the usual pre-norm block. gSASRec is SASRec's block; it differs in its loss. eSASRec is LiGR's.

Controls: `weights = relu` and `silu` put ReLU(s) / n and SiLU(s) / n in the place of softmax, n the longest sequence:
what is left of HSTU's attention without its gate and biases.

Dropout stands behind attention and inside and behind the feed-forward network; weights of attention are not dropped.

Sources: Kang and McAuley, "Self-Attentive Sequential Recommendation", arXiv 1808.09781, section III; LiGR: Borisyuk et
al., "From Features to Transformers", arXiv 2502.03417; with sampled softmax: eSASRec, arXiv 2508.06450; SwiGLU:
Shazeer, arXiv 2002.05202; encoder: Vaswani et al., arXiv 1706.03762; BST: arXiv 1905.06874; TransAct: arXiv 2306.00248.

Cost an event, forward: 8·D² for the four maps of attention, 4·D·F (6·D·F SwiGLU), 4·D for each event it sees.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.errors import ConfigError
from ziggurat.models.blocks.without_gradient import without_gradient
from ziggurat.models.sequence.layers.layer import Projected, SequenceLayer
from ziggurat.models.sequence.layers.places import SequencePlaces
from ziggurat.ops.attention.problem import AttentionForm
from ziggurat.ops.dropout import dropout
from ziggurat.precision.products import Linear
from ziggurat.typed import Count, Dim, Fraction, PositiveFloat, checked


class Normalised(StrEnum):
    """Choices of what layer norms are for, and where residuals start."""

    QUERIES = "queries"  # queries alone; residuals from normalised rows: SASRec
    ALL = "all"  # queries, keys and values; residuals from the rows themselves: pre-norm
    AFTER = "after"  # the sums of residuals and branches: post-norm, the original transformer


class Residual(StrEnum):
    """Ways to add a branch."""

    PLAIN = "plain"
    GATED = "gated"  # times σ(W x): LiGR


class FeedForward(StrEnum):
    """The network behind attention."""

    RELU = "relu"
    LEAKY_RELU = "leaky_relu"  # 0.01 below zero
    GELU = "gelu"
    SWIGLU = "swiglu"


@dataclass(frozen=True, kw_only=True)
@checked
class SoftmaxBlockConfig:
    """Settings of a block; `sasrec`, `ligr` and `encoder` are the published combinations.

    Args:
        dim: D, numbers of an event, a multiple of the heads.
        num_heads: H.
        hidden_dim: F, of the feed-forward network.
        normalised: what layer norms are for.
        residual: how branches are added.
        feed_forward: the network behind attention.
        weights: what scores of attention become: softmax, or ReLU or SiLU over n.
        max_length: n, events of the longest sequence, a constant of the model; unused with softmax.
        dropout: share that is dropped in training.
        eps: ε of the layer norms.
    """

    dim: Dim
    num_heads: Count = 1
    hidden_dim: Dim
    weights: AttentionForm = AttentionForm.SOFTMAX
    max_length: Count = 1
    normalised: Normalised = Normalised.QUERIES
    residual: Residual = Residual.PLAIN
    feed_forward: FeedForward = FeedForward.RELU
    dropout: Fraction = 0.0
    eps: PositiveFloat = 1e-8

    def __post_init__(self) -> None:
        if self.dim % self.num_heads:
            raise ConfigError(
                expected="a dim that the heads share equally",
                found=f"dim {self.dim}, {self.num_heads} heads",
                where="SoftmaxBlockConfig",
                ways_out=(f"dim = {self.dim + -self.dim % self.num_heads}", "fewer heads"),
            )


def sasrec(*, dim: int, num_heads: int = 1, dropout: float = 0.2) -> SoftmaxBlockConfig:
    """The block of SASRec, and of gSASRec."""
    return SoftmaxBlockConfig(dim=dim, num_heads=num_heads, hidden_dim=dim, dropout=dropout)


def pointwise(
    *, weights: AttentionForm, max_length: int, dim: int, num_heads: int = 1, dropout: float = 0.2
) -> SoftmaxBlockConfig:
    """SASRec's block with ReLU(s) / n or SiLU(s) / n in place of softmax: a control for what softmax does."""
    return replace(sasrec(dim=dim, num_heads=num_heads, dropout=dropout), weights=weights, max_length=max_length)


def ligr(*, dim: int, num_heads: int = 1, dropout: float = 0.2) -> SoftmaxBlockConfig:
    """The block of LiGR, and of eSASRec: pre-norm, gated residuals, SwiGLU of four times the size."""
    return SoftmaxBlockConfig(
        dim=dim,
        num_heads=num_heads,
        hidden_dim=4 * dim,
        normalised=Normalised.ALL,
        residual=Residual.GATED,
        feed_forward=FeedForward.SWIGLU,
        dropout=dropout,
        eps=1e-5,
    )


def encoder(
    *, dim: int, num_heads: int, hidden_dim: int, feed_forward: FeedForward, dropout: float
) -> SoftmaxBlockConfig:
    """The block of the original transformer's encoder: BST's with leaky ReLU, TransAct's with ReLU."""
    return SoftmaxBlockConfig(
        dim=dim,
        num_heads=num_heads,
        hidden_dim=hidden_dim,
        normalised=Normalised.AFTER,
        feed_forward=feed_forward,
        dropout=dropout,
        eps=1e-5,
    )


class SoftmaxBlock(SequenceLayer):
    """One block of softmax attention and a feed-forward network.

    Args:
        config: its sizes and its variant.
    """

    def __init__(self, config: SoftmaxBlockConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.dim
        hidden = config.hidden_dim
        self.norm_attention, self.norm_feed = (nn.LayerNorm(dim, eps=config.eps) for _ in range(2))
        self.query, self.key, self.value, self.output = (Linear(dim, dim) for _ in range(4))
        has_gate = config.feed_forward is FeedForward.SWIGLU
        self.feed_in = Linear(dim, (2 if has_gate else 1) * hidden)
        self.feed_out = Linear(hidden, dim)
        is_gated = config.residual is Residual.GATED
        # Gates read the events, not what the branch made of them (LiGR).
        self.gate_attention, self.gate_feed = (Linear(dim, dim) if is_gated else None for _ in range(2))
        for linear in (self.query, self.key, self.value, self.output):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)
        if config.weights is AttentionForm.SOFTMAX:
            without_gradient(self.key.bias)  # ⟨q_i, b⟩ is added to all scores of a query

    def project(self, events_ND: Float[Tensor, "N D"]) -> Projected:
        """Queries, keys and values; the rest is what the residual of attention starts from."""
        kind = self.config.normalised
        normed = events_ND if kind is Normalised.AFTER else self.norm_attention(events_ND)
        source = events_ND if kind is Normalised.QUERIES else normed
        mapped = (linear(rows) for linear, rows in ((self.query, normed), (self.key, source), (self.value, source)))
        q, k, v = (each.unflatten(1, (self.config.num_heads, -1)) for each in mapped)
        return Projected(q=q, k=k, v=v, rest=normed if kind is Normalised.QUERIES else events_ND)

    def attend(
        self, q: Float[Tensor, "M H d"], k: Float[Tensor, "N H d"], v: Float[Tensor, "N H dv"], places: SequencePlaces
    ) -> Float[Tensor, "M H dv"]:
        """Attention over what each event sees."""
        form = self.config.weights
        scale = (self.config.dim // self.config.num_heads) ** -0.5
        divisor = 1.0 if form is AttentionForm.SOFTMAX else float(self.config.max_length)
        return places.attention(q, k, v, layout=places.layout, form=form, scale=scale, divisor=divisor)

    def finish(
        self, events_MD: Float[Tensor, "M D"], gathered: Float[Tensor, "M H dv"], rest: Float[Tensor, "M R"]
    ) -> Float[Tensor, "M D"]:
        """Residual, feed-forward network, residual."""
        found = self._drop(self.output(gathered.flatten(1)))
        rows = rest + (found if self.gate_attention is None else torch.sigmoid(self.gate_attention(events_MD)) * found)
        kind = self.config.normalised
        normed = self.norm_attention(rows) if kind is Normalised.AFTER else self.norm_feed(rows)
        fed = self._drop(self.feed_out(self._drop(self._activate(self.feed_in(normed)))))
        # Pre-norm residuals run from the rows themselves, those of SASRec and of post-norm from the normalised ones.
        rows = rows if kind is Normalised.ALL else normed
        rows = rows + (fed if self.gate_feed is None else torch.sigmoid(self.gate_feed(rows)) * fed)
        return self.norm_feed(rows) if kind is Normalised.AFTER else rows

    def _activate(self, inner: Tensor) -> Tensor:
        if self.config.feed_forward is FeedForward.SWIGLU:
            gate, value = inner.chunk(2, dim=1)
            return F.silu(gate) * value
        if self.config.feed_forward is FeedForward.LEAKY_RELU:
            return F.leaky_relu(inner)
        return F.relu(inner) if self.config.feed_forward is FeedForward.RELU else F.gelu(inner)

    def _drop(self, inner: Tensor) -> Tensor:
        return dropout(inner, p=self.config.dropout, training=self.training)
