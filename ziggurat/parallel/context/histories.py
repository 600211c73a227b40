"""Histories whose keys and values stay on the ranks that computed them, and candidates that are scored behind them.

    remember      pieces of the histories through all layers; each rank keeps its keys and values
    score         rank r brings its share of the candidates; in every layer their queries meet the keys of all ranks,
                  which (pass-Q) they travel to, or which (pass-KV) come to them
    extend        rank r brings its share of new events, which stay with it (`extending.py`)

One long user's candidates are few rows against a history of 10⁵, so what travels is their queries and what they gather,
2·b numbers a head and layer, however long the history is. Candidates see the history and themselves, so the result is
that of `SequenceStack.score` on one device.

Sources: M-FALCON, Zhai et al., arXiv 2402.17152, Appendix H; decoding by pass-Q: Yang et al., arXiv 2411.01783,
algorithm 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from ziggurat.errors import ConfigError, DataError
from ziggurat.models.sequence.layers.layer import SequenceLayer
from ziggurat.models.sequence.layers.places import SequencePlaces
from ziggurat.models.sequence.layers.stack import SequenceStack
from ziggurat.ops.attention.partial import AttentionSettings
from ziggurat.ops.attention.problem import AttentionBias, AttentionForm, AttentionMask, JaggedLayout
from ziggurat.parallel.context.attention import ContextAttention, row_widths
from ziggurat.parallel.context.pieces import Histories, Pieces, head_and_tail
from ziggurat.parallel.context.spread import Spread
from ziggurat.parallel.context.travel import spread_attention
from ziggurat.parallel.context.work import Times, Work


@dataclass(frozen=True, kw_only=True)
class SpreadHistories:
    """Keys and values of this rank's pieces of histories, layer by layer.

    Args:
        keys_values: of each layer, in the order of this rank's pieces.
        lengths: (B,) events of the whole histories.
        times: of this rank's events, where a layer asks for them.
        pieces: of each rank: heads, tails, and what `extend_spread` put behind them.
        last_events: (B, D) the input of each history's last event, which the first rank has; zeros elsewhere.
    """

    keys_values: tuple[tuple[Tensor, Tensor], ...]
    lengths: Int64[Tensor, "B"]
    times: Int64[Tensor, "N"] | None
    pieces: tuple[Pieces, ...]
    last_events: Float[Tensor, "B D"]


def remember_spread(
    stack: SequenceStack, events_ND: Float[Tensor, "N D"], *, places: SequencePlaces
) -> tuple[Float[Tensor, "N D"], SpreadHistories]:
    """Outputs of this rank's pieces of histories, and their keys and values; collective over the context group.

    Args:
        stack: layers that reach over ranks (`parallelize` with a context axis).
        events_ND: vectors of this rank's events: heads of all histories, then tails.
        places: of them, from `stack.places_of(…, spans=…)`.

    Raises:
        ConfigError: the stack does not reach over ranks.
        DataError: the places are not those of pieces.
    """
    group = context_of(stack).group
    spans = places.layout.spans
    if spans is None:
        raise DataError(
            expected="places of pieces of histories, with the spans of these in the whole",
            found="places of whole histories",
            where="histories that are spread over ranks",
            ways_out=("stack.places_of(…, spans=…)", "stack.remember(…), on one device"),
        )
    # Heads of all histories, then their tails: half of the list names every history once.
    lengths = spans.lengths[: len(spans.lengths) // 2]
    pieces = tuple(head_and_tail(lengths, rank=rank, num_ranks=group.size) for rank in range(group.size))
    last = last_rows(events_ND, pieces[group.position], lengths)
    kept = []
    for layer in layers_of(stack):
        projected = layer.project(events_ND)
        kept.append((projected.k, projected.v))
        gathered = layer.attend(projected.q, projected.k, projected.v, places)
        events_ND = layer.finish(events_ND, gathered, projected.rest)
    kept_of = {"keys_values": tuple(kept), "lengths": lengths, "times": places.key_times}
    return events_ND, SpreadHistories(**kept_of, pieces=pieces, last_events=last)


def last_rows(events_ND: Float[Tensor, "N D"], pieces: Pieces, lengths: Int64[Tensor, "B"]) -> Float[Tensor, "B D"]:
    """The row of each history's last event; zeros where this rank has none.

    Args:
        events_ND: rows of pieces.
        pieces: of this rank.
        lengths: of the whole histories.
    """
    found = events_ND.new_zeros(len(lengths), events_ND.shape[1])
    at_B, has_B = place_of_last(pieces, lengths)
    found[has_B] = events_ND[at_B[has_B]]
    return found


def place_of_last(pieces: Pieces, lengths: Int64[Tensor, "B"]) -> tuple[Int64[Tensor, "B"], Bool[Tensor, "B"]]:
    """Return the place of each history's last event among the rows of pieces, and whether it is there.

    Args:
        pieces: of a rank.
        lengths: of the whole histories.
    """
    is_last_SB = (pieces.counts > 0) & (pieces.starts + pieces.counts == lengths)
    ends_SB = pieces.offsets[1:].view(pieces.starts.shape)
    # At most one piece of a rank has the last event, so the sum picks its place.
    return torch.where(is_last_SB, ends_SB - 1, 0).sum(dim=0), is_last_SB.any(dim=0)


def share_of_candidates(counts: Int64[Tensor, "B"], *, rank: int, num_ranks: int) -> Int64[Tensor, "2 B"]:
    """The first candidate of each history that a rank brings, and the first that it does not.

    Args:
        counts: candidates of each history.
        rank: of the context group.
        num_ranks: of the group.
    """
    return torch.stack([counts * rank // num_ranks, counts * (rank + 1) // num_ranks])


def score_spread(
    stack: SequenceStack,
    candidates_MD: Float[Tensor, "M D"],
    *,
    counts: Int64[Tensor, "B"],
    histories: SpreadHistories,
    asked_at: Int64[Tensor, "B"] | None = None,
) -> Float[Tensor, "M D"]:
    """Outputs of this rank's candidates behind histories that are spread over ranks; collective over the group.

    Args:
        stack: layers that reach over ranks.
        candidates_MD: vectors of this rank's share (`share_of_candidates`), history after history.
        counts: candidates of each history, over all ranks; the same on every rank.
        histories: what `remember_spread` gave.
        asked_at: time of each history's question; needed where histories have times.

    Raises:
        ConfigError: the stack does not reach over ranks.
        DataError: not this rank's share of the candidates, or times where histories have none.
    """
    context = context_of(stack)
    size = context.group.size
    me = context.group.position
    shares = [share_of_candidates(counts, rank=rank, num_ranks=size) for rank in range(size)]
    mine = shares[me][1] - shares[me][0]
    _check(candidates_MD, mine, counts, histories, asked_at)
    # Candidates stand behind their history: their positions begin at its length.
    rows = [Pieces((histories.lengths + first)[None], (last - first)[None]) for first, last in shares]
    keys = [cached.and_then(own) for cached, own in zip(histories.pieces, rows, strict=True)]
    spread = Spread(
        Histories(histories.lengths + counts, counts, stack.mask), rows, keys, context.group, context.traffic
    )
    times = _times(spread, histories, asked_at, [last - first for first, last in shares])
    layout = JaggedLayout(offsets=rows[me].offsets, mask=AttentionMask())  # what is seen is in `spread`
    places = SequencePlaces(
        layout=layout,
        key_times=None if asked_at is None else times[me].queries,
        query_times=None if asked_at is None else times[me].queries,
    )
    for layer, kept in zip(layers_of(stack), histories.keys_values, strict=True):
        projected = layer.project(candidates_MD)
        own = replace(places, attention=Behind(context, spread, times, kept))
        gathered = layer.attend(projected.q, projected.k, projected.v, own)
        candidates_MD = layer.finish(candidates_MD, gathered, projected.rest)
    return candidates_MD


@dataclass(frozen=True)
class Behind:
    """Attention of rows to kept keys, and to those that come with them.

    Args:
        context: of the stack.
        spread: who has which rows and keys.
        times: of each rank; none where no layer asks for them.
        kept: keys and values of this rank.
    """

    context: ContextAttention
    spread: Spread
    times: Sequence[Times]
    kept: tuple[Tensor, Tensor]

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        layout: JaggedLayout,
        form: AttentionForm,
        scale: float,
        divisor: float = 1.0,
        bias: AttentionBias | None = None,
    ) -> Tensor:
        """Do the same as `jagged_attention`, but take what is seen from `spread`, not from the layout."""
        del layout
        bias = bias or AttentionBias()
        work = Work(
            self.spread,
            AttentionSettings(form=form, scale=scale, divisor=divisor),
            self.context.choose(self.spread, row_widths(q, v, form=form)),
            times=self.times if bias.w_time is not None else (),
            w_pos=bias.w_pos,
            w_time=bias.w_time,
        )
        return spread_attention(q, torch.cat([self.kept[0], k]), torch.cat([self.kept[1], v]), work=work)


def _times(spread: Spread, histories: SpreadHistories, asked_at: Tensor | None, asked: Sequence[Tensor]) -> list[Times]:
    """Return the times of all ranks: candidates are asked at one time of their history, which is also their own."""
    if asked_at is None or histories.times is None:
        return []
    of_rows = [asked_at.repeat_interleave(counts) for counts in asked]
    sizes = [keys.num_rows - len(own) for keys, own in zip(spread.keys, of_rows, strict=True)]
    cached = spread.everybody(histories.times, sizes, purpose="times")
    return [Times(own, torch.cat([old, own])) for old, own in zip(cached, of_rows, strict=True)]


def layers_of(stack: SequenceStack) -> list[SequenceLayer]:
    """The layers of a stack."""
    return [layer for layer in stack.layers if isinstance(layer, SequenceLayer)]


def context_of(stack: SequenceStack) -> ContextAttention:
    """The attention of a stack that reaches over ranks.

    Raises:
        ConfigError: it does not.
    """
    if isinstance(stack.attention, ContextAttention):
        return stack.attention
    raise ConfigError(
        expected="a stack whose layers reach over ranks",
        found="one of this device alone",
        where="histories that are spread over ranks",
        ways_out=("parallelize the model on a topology with context_size above 1", "call stack.remember and score"),
    )


def _check(
    candidates: Tensor, mine: Tensor, counts: Tensor, histories: SpreadHistories, asked_at: Tensor | None
) -> None:
    if len(counts) != len(histories.lengths) or len(candidates) != int(mine.sum()):
        raise DataError(
            expected=f"counts of {len(histories.lengths)} histories, and this rank's {int(mine.sum())} candidates",
            found=f"{len(counts)} counts, {len(candidates)} candidates",
            where="candidates behind histories that are spread over ranks",
            ways_out="give each rank its share: share_of_candidates says which",
        )
    if (asked_at is None) != (histories.times is None):
        raise DataError(
            expected="asked_at exactly where the histories have times",
            found="none" if asked_at is None else "one",
            where="candidates behind histories that are spread over ranks",
            ways_out="remember with times and ask with asked_at, or neither",
        )
