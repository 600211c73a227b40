"""ContextAttention: takes the place of attention in the layers of a model whose histories are cut over ranks.

    batch of pieces ─► places (spans) ─► every layer: project ─► attend ─► finish
                                                               └ this: across the ranks of the context group

Layers compute on the events that a rank has; only here do they meet those of others. What is not cut (evaluation, other
models' calls) goes to ordinary attention.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from ziggurat.errors import ConfigError
from ziggurat.models import Model
from ziggurat.models.sequence.cut import CutsHistories
from ziggurat.ops.attention.choose import jagged_attention
from ziggurat.ops.attention.partial import AttentionSettings
from ziggurat.ops.attention.problem import AttentionBias, AttentionForm, JaggedLayout, Spans
from ziggurat.parallel.context.choice import ContextRates, Passing, RowWidths, choose_travelling, measure_rates
from ziggurat.parallel.context.pieces import Histories, head_and_tail
from ziggurat.parallel.context.spread import Spread
from ziggurat.parallel.context.travel import spread_attention
from ziggurat.parallel.context.work import Times, Travelling, Work
from ziggurat.parallel.exchange.traffic import Traffic
from ziggurat.parallel.topology import Axis, RankGroup, Topology, own_group


@dataclass(eq=False)
class _Kept:
    """State that the layers of one pass share."""

    layout: JaggedLayout
    spread: Spread
    times: list[Times] = field(default_factory=list)
    travelling: dict[RowWidths, Travelling] = field(default_factory=dict)


class ContextAttention:
    """Attention of layers over histories whose pieces lie on the ranks of a group; calls are collective.

    Args:
        group: the ranks, in the order of their pieces.
        traffic: counts the messages.
        passing: what travels; `auto` measures the group at the first call.

    Attributes:
        chosen: what travelled, and how often, for reports.
    """

    def __init__(self, group: RankGroup, *, traffic: Traffic, passing: Passing = Passing.AUTO) -> None:
        self._group = group
        self._traffic = traffic
        self._passing = passing
        self._kept: _Kept | None = None
        self._rates: ContextRates | None = None
        self.chosen = dict.fromkeys(Travelling, 0)

    def __call__(
        self,
        q: Float[Tensor, "M H d"],
        k: Float[Tensor, "N H d"],
        v: Float[Tensor, "N H dv"],
        *,
        layout: JaggedLayout,
        form: AttentionForm,
        scale: float,
        divisor: float = 1.0,
        bias: AttentionBias | None = None,
    ) -> Float[Tensor, "M H dv"]:
        """Compute `jagged_attention`; a layout with spans is that of this rank's heads and tails, heads first.

        Args:
            q: queries of this rank's events.
            k: keys of them.
            v: values of them.
            layout: pieces of all histories, and how long these are.
            form: how scores become weights.
            scale: α.
            divisor: n.
            bias: of position and time.
        """
        settings = AttentionSettings(form=form, scale=scale, divisor=divisor)
        if layout.spans is None:
            return jagged_attention(q, k, v, layout=layout, form=form, scale=scale, divisor=divisor, bias=bias)
        bias = bias or AttentionBias()
        kept = self._of(layout, layout.spans)
        widths = row_widths(q, v, form=form)
        # Layers of one model may differ in width, and what is cheaper to send with it.
        if widths not in kept.travelling:
            kept.travelling[widths] = self.choose(kept.spread, widths)
        own_times = bias.times
        # Times are the same for all layers: they travel once a pass.
        if own_times is not None and not kept.times:
            kept.times = _times_of_all(kept.spread, *own_times)
        times = kept.times if own_times is not None else []
        travelling = kept.travelling[widths]
        self.chosen[travelling] += 1
        work = Work(kept.spread, settings, travelling, times=times, w_pos=bias.w_pos, w_time=bias.w_time)
        return spread_attention(q, k, v, work=work)

    def _of(self, layout: JaggedLayout, spans: Spans) -> _Kept:
        """Return which rank has which events, found once for all layers of a pass."""
        # By identity: all layers of a pass are handed the one layout, and a new pass brings a new one.
        if self._kept is not None and self._kept.layout is layout:
            return self._kept
        # Each history has two pieces here, heads before tails: half of the list names every history once.
        lengths = spans.lengths[: len(spans.lengths) // 2].cpu()
        histories = Histories(lengths, mask=layout.rule)
        if layout.num_targets is not None:
            histories = Histories(lengths, layout.num_targets[: len(lengths)].cpu(), layout.rule)
        # Every rank computes the pieces of all: nobody has to be asked who holds what.
        pieces = [head_and_tail(lengths, rank=rank, num_ranks=self._group.size) for rank in range(self._group.size)]
        spread = Spread(histories, pieces, pieces, self._group, self._traffic)
        self._kept = _Kept(layout, spread)
        return self._kept

    @property
    def group(self) -> RankGroup:
        """The ranks, in the order of their pieces."""
        return self._group

    @property
    def traffic(self) -> Traffic:
        """The traffic that has been sent."""
        return self._traffic

    @property
    def rates(self) -> ContextRates | None:
        """The measured rates of the group; None where nothing was measured."""
        return self._rates

    def use_rates(self, rates: ContextRates) -> None:
        """Choose by rates that were measured before; those of another number of ranks say nothing here."""
        if len(rates.bytes_per_s) == self._group.size - 1:
            self._rates = rates

    def choose(self, spread: Spread, widths: RowWidths) -> Travelling:
        """Choose what travels in one attention; the same on every rank. Collective if the group is not measured yet."""
        if self._passing is not Passing.AUTO:
            return Travelling(self._passing.value)
        if self._rates is None:
            self._rates = measure_rates(spread)
        return choose_travelling(
            spread.histories,
            queries=spread.queries,
            keys=spread.keys,
            widths=widths,
            rates=self._rates,
            overlaps=spread.overlaps,
        )


def context_attention_of(model: Model) -> ContextAttention | None:
    """The attention of a model that reaches over ranks; None where it does not."""
    attention = getattr(getattr(model, "stack", None), "attention", None)
    return attention if isinstance(attention, ContextAttention) else None


def row_widths(q: Tensor, v: Tensor, *, form: AttentionForm) -> RowWidths:
    """Widths of the rows of these queries and values."""
    return RowWidths(
        query=q.shape[1] * q.shape[2],
        value=v.shape[1] * v.shape[2],
        num_heads=q.shape[1],
        number_bytes=q.element_size(),
        is_softmax=form is AttentionForm.SOFTMAX,
        is_training=torch.is_grad_enabled(),
    )


def _times_of_all(spread: Spread, query_times: Tensor, key_times: Tensor) -> list[Times]:
    """The times of the events of every rank."""
    asked = [each.num_rows for each in spread.queries]
    held = [each.num_rows for each in spread.keys]
    queries = spread.everybody(query_times, asked, purpose="times")
    keys = spread.everybody(key_times, held, purpose="times")
    return [Times(*both) for both in zip(queries, keys, strict=True)]


def that_cuts(model: Model, *, size: int) -> CutsHistories:
    """Return a model as one that can cut histories.

    Args:
        model: to be trained.
        size: ranks that divide the histories.

    Raises:
        ConfigError: it cannot train on pieces of histories.
    """
    if isinstance(model, CutsHistories):
        return model
    raise ConfigError(
        expected="a model with layers over histories that trains on pieces of them: next_item, sequence_ranker",
        found=f"{type(model).__name__}, which does not",
        where=f"--context {size}",
        ways_out=("--context 1: ranks then divide samples alone", "ziggurat train movielens_hstu --context N"),
    )


def check_context(model: Model, topology: Topology, *, num_parts: int) -> None:
    """Refuse to divide the histories of a model that has none.

    Args:
        model: on one device.
        topology: the ranks.
        num_parts: parts of a batch in a step.

    Raises:
        ConfigError: the model cannot train on pieces of histories, or its batches are cut into parts.
    """
    size = topology.context.size
    if size == 1:
        return
    that_cuts(model, size=size)
    if num_parts > 1:
        raise ConfigError(
            expected="batches in one part, because the ranks of a history compute it together",
            found=f"{num_parts} parts",
            where=f"--context {size}",
            ways_out=("--parallel.num-parts 1", "--context 1"),
        )


def spread_stack(model: Model, *, topology: Topology, traffic: Traffic, passing: Passing) -> None:
    """Let the layers of a model reach over the ranks of their context group, in place; collective over all ranks.

    They have a process group of their own: a step has many of these messages, while others of it are still under way.

    Args:
        model: which can cut histories.
        topology: the ranks.
        traffic: counts the messages.
        passing: what travels.
    """
    stack = that_cuts(model, size=topology.context.size).stack
    group = own_group(topology, Axis.CONTEXT, what="attend to histories together")
    stack.attention = ContextAttention(group, traffic=traffic, passing=passing)
