"""HSTU: hierarchical sequential transduction unit, in its published variants as one layer (arXiv 2402.17152).

    U, V, Q, K = SiLU(LN(x) W)                    which of the four pass SiLU, and their order, are settings
    a_i = Σ_j SiLU(α ⟨q_i, k_j⟩ + b_ij) v_j / n   no softmax: a sum grows with how often a user did something
    x'  = x + W_o [U ⊙ LN(a)]                     or [U, LN(a), U ⊙ LN(a)], or [U, a, U ⊙ LN(a)]

b is a bias by relative position and by time (`ops/attention/reference.py`), learned for each layer and shared by its
heads. n is a constant of the model, its longest sequence, never of the batch: an output does not depend on who else is
in the batch. LN takes n out again where it comes next, but for its ε; the raw a of the third form feels it.

Presets: `hstu_research` (research code of the paper), `stu` (DLRMv3 and DLRMv4), `hstu_nvidia` (recsys-examples).
The table of their differences: docs/models/hstu.md.

Sources: equations 1 to 3 of the paper; `research/modeling/sequential/hstu.py` and `modules/stu.py` of
meta-recsys/generative-recommenders, `native_hstu_layer.py` of NVIDIA/recsys-examples, for what the paper leaves open.

Cost an event, forward: 2·D·H·(2 d + 2 d_v) + 2·H·d_v·D (thrice that for the forms with three parts), and 2·H·(d + d_v)
for each event it sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.models.sequence.layers.layer import Projected, SequenceLayer
from ziggurat.models.sequence.layers.places import SequencePlaces
from ziggurat.ops.attention.problem import AttentionBias, AttentionForm
from ziggurat.ops.dropout import dropout
from ziggurat.ops.gated_norm import Beside, GatedNormForm, gated_norm
from ziggurat.precision.products import Linear
from ziggurat.typed import Count, CountOrNone, Dim, Fraction, PositiveFloat, checked

_INIT_STD = 0.02


class NormWeights(StrEnum):
    """Choices of whether layer norms learn a scale and a shift."""

    NONE = "none"
    AFFINE = "affine"


class Activated(StrEnum):
    """Choices of which of U, V, Q and K pass SiLU."""

    ALL = "all"
    U = "u"


class SplitOrder(StrEnum):
    """Orders in which one projection holds U, V, Q and K of all heads."""

    PARTS_FIRST = "parts_first"  # all heads of U, then of V, Q, K
    HEADS_FIRST = "heads_first"  # U, V, Q, K of the first head, then of the second


class ScoreScale(StrEnum):
    """Factors that scores are multiplied with: α."""

    ONE = "one"
    INVERSE_ROOT = "inverse_root"  # 1/√d


class PositionTimeBias(StrEnum):
    """Biases that are added to scores: b."""

    NONE = "none"
    POSITION = "position"
    TIME = "time"
    POSITION_AND_TIME = "position_and_time"


class HSTUOutput(StrEnum):
    """Inputs of the last map of the layer, W_o."""

    GATED = "gated"  # U ⊙ LN(a)
    PARTS_OF_NORMED = "parts_of_normed"  # U, LN(a), U ⊙ LN(a)
    PARTS_OF_RAW = "parts_of_raw"  # U, a, U ⊙ LN(a)


_BESIDE = {
    HSTUOutput.GATED: Beside.NOTHING,
    HSTUOutput.PARTS_OF_NORMED: Beside.NORMED,
    HSTUOutput.PARTS_OF_RAW: Beside.RAW,
}


class ProjectionInit(StrEnum):
    """Ways to start the weight of the projection."""

    NORMAL = "normal"  # standard deviation 0.02
    XAVIER = "xavier"  # uniform


class MapBias(StrEnum):
    """Choices of whether a linear map has a bias."""

    NONE = "none"
    LEARNED = "learned"


@dataclass(frozen=True, kw_only=True)
@checked
class HSTULayerConfig:
    """Settings of one HSTU layer; the presets below are the published combinations.

    Args:
        dim: D, numbers of an event.
        num_heads: H.
        qk_dim: d, numbers of a query and a key of one head.
        value_dim: d_v, numbers of a value and a gate of one head.
        max_length: n, events of the longest sequence (history, context and candidates); a constant of the model.
        norm: whether both layer norms are affine.
        activated: what passes SiLU.
        split: order inside the projection.
        scale: α.
        bias: b.
        time_buckets: numbers of the bias by time; the last one stands for everything longer.
        output: what W_o reads.
        projection_bias: of W.
        output_bias: of W_o.
        init: of W.
        dropout: share of what W_o reads that is dropped in training.
        eps: ε of the layer norms.
    """

    dim: Dim
    num_heads: Count = 1
    qk_dim: Dim
    value_dim: Dim
    max_length: Count
    norm: NormWeights = NormWeights.NONE
    activated: Activated = Activated.ALL
    split: SplitOrder = SplitOrder.PARTS_FIRST
    scale: ScoreScale = ScoreScale.ONE
    bias: PositionTimeBias = PositionTimeBias.POSITION_AND_TIME
    time_buckets: CountOrNone = 129
    output: HSTUOutput = HSTUOutput.GATED
    projection_bias: MapBias = MapBias.NONE
    output_bias: MapBias = MapBias.LEARNED
    init: ProjectionInit = ProjectionInit.NORMAL
    dropout: Fraction = 0.0
    eps: PositiveFloat = 1e-6


def hstu_research(*, dim: int, max_length: int, num_heads: int = 1, dropout: float = 0.2) -> HSTULayerConfig:
    """HSTU as in the research code of the paper: heads share `dim`, bias by position and time, no 1/√d."""
    head = max(1, dim // num_heads)
    return HSTULayerConfig(
        dim=dim, num_heads=num_heads, qk_dim=head, value_dim=head, max_length=max_length, dropout=dropout
    )


def stu(*, dim: int, max_length: int, num_heads: int = 4, head_dim: int = 128, dropout: float = 0.0) -> HSTULayerConfig:
    """STU as in DLRMv3 and DLRMv4: affine norms, SiLU on U alone, α = 1/√d, no bias, W_o reads U, a, U ⊙ LN(a)."""
    return HSTULayerConfig(
        dim=dim,
        num_heads=num_heads,
        qk_dim=head_dim,
        value_dim=head_dim,
        max_length=max_length,
        norm=NormWeights.AFFINE,
        activated=Activated.U,
        scale=ScoreScale.INVERSE_ROOT,
        bias=PositionTimeBias.NONE,
        output=HSTUOutput.PARTS_OF_RAW,
        projection_bias=MapBias.LEARNED,
        output_bias=MapBias.NONE,
        init=ProjectionInit.XAVIER,
        dropout=dropout,
    )


def hstu_nvidia(
    *, dim: int, max_length: int, num_heads: int = 4, head_dim: int = 128, dropout: float = 0.0
) -> HSTULayerConfig:
    """HSTU as in NVIDIA's recsys-examples: SiLU on all four, split inside each head, α = 1/√d, no bias of scores."""
    return HSTULayerConfig(
        dim=dim,
        num_heads=num_heads,
        qk_dim=head_dim,
        value_dim=head_dim,
        max_length=max_length,
        norm=NormWeights.AFFINE,
        split=SplitOrder.HEADS_FIRST,
        scale=ScoreScale.INVERSE_ROOT,
        bias=PositionTimeBias.NONE,
        projection_bias=MapBias.LEARNED,
        init=ProjectionInit.XAVIER,
        dropout=dropout,
    )


class HSTULayer(SequenceLayer):
    """One HSTU layer: pointwise attention between two linear maps, gated, around a residual.

    Args:
        config: its sizes and its variant.
    """

    def __init__(self, config: HSTULayerConfig) -> None:
        super().__init__()
        self.config = config
        affine = config.norm is NormWeights.AFFINE
        inner = config.num_heads * config.value_dim
        self.norm_in = nn.LayerNorm(config.dim, eps=config.eps, elementwise_affine=affine)
        self.norm_gathered = nn.LayerNorm(inner, eps=config.eps, elementwise_affine=affine)
        # U and V have `value_dim` numbers a head, Q and K `qk_dim`.
        width = 2 * config.num_heads * (config.qk_dim + config.value_dim)
        self.projection = Linear(config.dim, width, bias=config.projection_bias is MapBias.LEARNED)
        parts = 1 if config.output is HSTUOutput.GATED else 3
        self.output = Linear(parts * inner, config.dim, bias=config.output_bias is MapBias.LEARNED)
        wants_position = config.bias in (PositionTimeBias.POSITION, PositionTimeBias.POSITION_AND_TIME)
        wants_time = config.bias in (PositionTimeBias.TIME, PositionTimeBias.POSITION_AND_TIME)
        # Distances from −(n − 1) to n − 1.
        self.w_pos = nn.Parameter(torch.empty(2 * config.max_length - 1)) if wants_position else None
        self.w_time = nn.Parameter(torch.empty(max(1, config.time_buckets))) if wants_time else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew from torch's generator."""
        if self.config.init is ProjectionInit.NORMAL:
            nn.init.normal_(self.projection.weight, std=_INIT_STD)
        else:
            nn.init.xavier_uniform_(self.projection.weight)
        nn.init.xavier_uniform_(self.output.weight)
        for linear in (self.projection, self.output):
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        for weight in (self.w_pos, self.w_time):
            if weight is not None:
                nn.init.normal_(weight, std=_INIT_STD)

    def project(self, events_ND: Float[Tensor, "N D"]) -> Projected:
        """U (as the rest, before its SiLU where U alone has one), V, Q and K of events."""
        config = self.config
        norm = self.norm_in
        normed_ND = gated_norm(None, events_ND, norm.weight, norm.bias, form=GatedNormForm(eps=norm.eps))
        projected = self.projection(normed_ND)
        if config.activated is Activated.ALL:
            # One pass for all four, before they are cut apart. SiLU of U alone is left to `finish`.
            projected = F.silu(projected)
        sizes = [config.value_dim, config.value_dim, config.qk_dim, config.qk_dim]
        if config.split is SplitOrder.HEADS_FIRST:
            u, v, q, k = projected.unflatten(1, (config.num_heads, -1)).split(sizes, dim=2)
        else:
            parts = projected.split([config.num_heads * size for size in sizes], dim=1)
            u, v, q, k = (part.unflatten(1, (config.num_heads, -1)) for part in parts)
        return Projected(q=q, k=k, v=v, rest=u.flatten(1))

    def attend(
        self, q: Float[Tensor, "M H d"], k: Float[Tensor, "N H d"], v: Float[Tensor, "N H dv"], places: SequencePlaces
    ) -> Float[Tensor, "M H dv"]:
        """Pointwise attention with the biases of this layer."""
        config = self.config
        bias = AttentionBias(
            w_pos=self.w_pos, w_time=self.w_time, query_times=places.query_times, key_times=places.key_times
        )
        return places.attention(
            *(q, k, v),
            layout=places.layout,
            form=AttentionForm.SILU,
            scale=1.0 if config.scale is ScoreScale.ONE else config.qk_dim**-0.5,
            # A constant of the model: an output must not depend on who else is in the batch.
            divisor=float(config.max_length),
            bias=bias,
        )

    def finish(
        self, events_MD: Float[Tensor, "M D"], gathered: Float[Tensor, "M H dv"], rest: Float[Tensor, "M R"]
    ) -> Float[Tensor, "M D"]:
        """Gate, map, and add to the events."""
        norm = self.norm_gathered
        form = GatedNormForm(
            eps=norm.eps, activates=self.config.activated is Activated.U, beside=_BESIDE[self.config.output]
        )
        gated = gated_norm(rest, gathered.flatten(1), norm.weight, norm.bias, form=form)
        return events_MD + self.output(dropout(gated, p=self.config.dropout, training=self.training))
