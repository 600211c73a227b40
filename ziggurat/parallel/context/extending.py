"""extend_spread: new events behind histories that are spread over ranks; only the new ones are computed.

    kept         rank 0: e_1 e_2 │ e_7 e_8       rank 1: e_3 e_4 │ e_5 e_6
    new events   rank 0: e_9 e_12                rank 1: e_10 e_11              each rank brings, and keeps, a share
    kept then    rank 0: e_1 e_2 │ e_7 e_8 e_9 │ e_12        rank 1: e_3 … e_6 │ e_10 e_11

New events are cut as histories are, into 2N chunks, head and tail to a rank, so their work is shared; their queries
meet the keys of all ranks as those of candidates do (`histories.py`). Pieces of a rank that follow each other become
one, so that events which come one by one leave no more pieces than there were.

Where an event is asked at the time of the next one, that time was not known when the last event of a history was
computed; so where times are kept, the first rank, which has the ends of all histories, computes those events again.

Source: incremental computation: Zhai et al., arXiv 2402.17152, Appendix H; partial prefill over ranks: Yang et al.,
arXiv 2411.01783, section 3.5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ziggurat.errors import ConfigError, DataError
from ziggurat.features.jagged import offsets_of
from ziggurat.models.sequence.layers.places import AskedAt, SequencePlaces, asked_times, join_lists
from ziggurat.models.sequence.layers.stack import SequenceStack
from ziggurat.ops.attention.problem import AttentionMask, JaggedLayout
from ziggurat.parallel.context.histories import (
    Behind,
    SpreadHistories,
    context_of,
    last_rows,
    layers_of,
    place_of_last,
)
from ziggurat.parallel.context.pieces import Histories, Pieces, head_and_tail
from ziggurat.parallel.context.spread import Spread
from ziggurat.parallel.context.work import Times


def share_of_events(counts: Int64[Tensor, "B"], *, rank: int, num_ranks: int) -> Pieces:
    """Return the new events of each history that a rank brings: heads of all, then tails; 0 is the first new event.

    Args:
        counts: new events of each history.
        rank: of the context group.
        num_ranks: of the group.
    """
    return head_and_tail(counts, rank=rank, num_ranks=num_ranks)


def extend_spread(
    stack: SequenceStack,
    events_MD: Float[Tensor, "M D"],
    *,
    counts: Int64[Tensor, "B"],
    histories: SpreadHistories,
    times: Int64[Tensor, "M"] | None = None,
) -> SpreadHistories:
    """Histories with new events behind them; collective over the context group.

    Args:
        stack: layers that reach over ranks.
        events_MD: vectors of this rank's share of the new events (`share_of_events`).
        counts: new events of each history, over all ranks; the same on every rank.
        histories: what `remember_spread` or this function gave.
        times: of this rank's share; needed where histories have times.

    Raises:
        ConfigError: the stack does not reach over ranks, or has context, which would have to see the new events.
        DataError: not this rank's share of the events, or times where histories have none.
    """
    context = context_of(stack)
    size = context.group.size
    me = context.group.position
    shares = [share_of_events(counts, rank=rank, num_ranks=size) for rank in range(size)]
    _check(stack, events_MD, shares[me], histories, times)
    own = [Pieces(each.starts + histories.lengths, each.counts) for each in shares]
    asked_anew = (histories.lengths > 0) & (counts > 0)
    if times is None or stack.asked is AskedAt.OWN:
        asked_anew = torch.zeros_like(asked_anew)
    again = Pieces((histories.lengths - 1).clamp(min=0)[None], asked_anew.to(torch.int64)[None])
    whole = Histories(histories.lengths + counts, mask=stack.mask)
    keys = [cached.and_then(new) for cached, new in zip(histories.pieces, own, strict=True)]
    spread = Spread(whole, [again.and_then(own[0]), *own[1:]], keys, context.group, context.traffic)
    of_all = _times(spread, stack, shares, asked_anew, histories, times)
    # The first rank has the ends of all histories (chunk 2N - 1).
    rows_MD = events_MD if me else torch.cat([histories.last_events[asked_anew], events_MD])
    anew = place_of_last(histories.pieces[me], histories.lengths)[0][asked_anew] if me == 0 else counts.new_zeros(0)
    behind = partial(Behind, context, spread, of_all)
    kept = _computed(stack, rows_MD, behind, histories, queries=spread.queries[me], anew=anew)
    last = torch.where((counts > 0)[:, None], last_rows(events_MD, shares[me], counts), histories.last_events)
    joined = None if times is None or histories.times is None else torch.cat([histories.times, times])
    found = SpreadHistories(keys_values=kept, lengths=whole.lengths, times=joined, pieces=tuple(keys), last_events=last)
    return _joined(found, me)


def _computed(
    stack: SequenceStack,
    rows_MD: Float[Tensor, "M D"],
    behind: Callable[[tuple[Tensor, Tensor]], Behind],
    histories: SpreadHistories,
    *,
    queries: Pieces,
    anew: Tensor,
) -> tuple[tuple[Tensor, Tensor], ...]:
    """Keys and values of each layer: those kept, some of them computed anew from the first rows, and of the others."""
    num_anew = len(anew)
    kept = []
    layout = JaggedLayout(offsets=queries.offsets, mask=AttentionMask())  # what is seen is in `spread`
    for layer, (old_k, old_v) in zip(layers_of(stack), histories.keys_values, strict=True):
        projected = layer.project(rows_MD)
        if num_anew:
            old_k = old_k.index_copy(0, anew, projected.k[:num_anew])
            old_v = old_v.index_copy(0, anew, projected.v[:num_anew])
        new_k = projected.k[num_anew:]
        new_v = projected.v[num_anew:]
        places = SequencePlaces(layout=layout, attention=behind((old_k, old_v)))
        gathered = layer.attend(projected.q, new_k, new_v, places)
        kept.append((torch.cat([old_k, new_k]), torch.cat([old_v, new_v])))
        rows_MD = layer.finish(rows_MD, gathered, projected.rest)
    return tuple(kept)


def _times(
    spread: Spread,
    stack: SequenceStack,
    shares: Sequence[Pieces],
    asked_anew: Tensor,
    histories: SpreadHistories,
    times: Tensor | None,
) -> list[Times]:
    """Return, for all ranks, when new events and the last ones before are asked, and when all their events were."""
    if times is None or histories.times is None:
        return []
    counts = shares[0].counts.new_zeros(len(asked_anew))
    for share in shares:
        counts = counts + share.counts.sum(dim=0)
    offsets = offsets_of(counts)
    news = spread.everybody(times, [share.num_rows for share in shares], purpose="times")
    olds = spread.everybody(histories.times, [each.num_rows for each in histories.pieces], purpose="times")
    places = [_rows_of_whole(share, offsets) for share in shares]
    together = torch.cat(news).new_zeros(int(offsets[-1]))
    for at, new in zip(places, news, strict=True):
        together[at] = new
    asked = asked_times(together, offsets=offsets, asked=stack.asked)
    found = [Times(asked[at], torch.cat([old, new])) for at, old, new in zip(places, olds, news, strict=True)]
    first = together[offsets[:-1][asked_anew]]
    return [found[0]._replace(queries=torch.cat([first, found[0].queries])), *found[1:]]


def _rows_of_whole(share: Pieces, offsets: Tensor) -> Tensor:
    """Return where the events of a share stand among those of all ranks, history by history."""
    begins = (offsets[:-1] + share.starts).reshape(-1) - share.offsets[:-1]
    return torch.arange(share.num_rows) + begins.repeat_interleave(share.counts.reshape(-1), output_size=share.num_rows)


def _joined(histories: SpreadHistories, me: int) -> SpreadHistories:
    """The same with pieces of a rank that follow each other as one."""
    pieces = list(histories.pieces)
    for rank, each in enumerate(pieces):
        number = 0
        while number + 1 < each.num_sets:
            if not _follow(each, number):
                number += 1
                continue
            if rank == me:
                histories = _rows_joined(histories, each, number)
            each = _two_as_one(each, number)
        pieces[rank] = each
    return replace(histories, pieces=tuple(pieces))


def _follow(pieces: Pieces, number: int) -> bool:
    """Return True if each piece of the next set begins where that of this set ends; empty pieces may begin anywhere."""
    (start, after), (count, further) = (each[number : number + 2] for each in (pieces.starts, pieces.counts))
    return bool(((count == 0) | (further == 0) | (start + count == after)).all())


def _two_as_one(pieces: Pieces, number: int) -> Pieces:
    starts = pieces.starts
    counts = pieces.counts
    start = torch.where(counts[number] > 0, starts[number], starts[number + 1])
    both = (start, counts[number] + counts[number + 1])
    starts, counts = (
        torch.cat([old[:number], new[None], old[number + 2 :]]) for old, new in zip((starts, counts), both, strict=True)
    )
    return Pieces(starts, counts)


def _rows_joined(histories: SpreadHistories, pieces: Pieces, number: int) -> SpreadHistories:
    """Rows of two sets in the order of one."""
    first, second = (pieces.rows_of_set(each) for each in (number, number + 1))
    offsets = (offsets_of(pieces.counts[number]), offsets_of(pieces.counts[number + 1]))

    def moved(rows: Tensor) -> Tensor:
        between = join_lists(rows[first], rows[second], offsets=offsets)[0]
        return torch.cat([rows[: first.start], between, rows[second.stop :]])

    kept = tuple((moved(k), moved(v)) for k, v in histories.keys_values)
    return replace(histories, keys_values=kept, times=None if histories.times is None else moved(histories.times))


def _check(
    stack: SequenceStack, events: Tensor, share: Pieces, histories: SpreadHistories, times: Tensor | None
) -> None:
    where = "new events behind histories that are spread over ranks"
    if stack.mask.context:
        raise ConfigError(
            expected="a mask without context, so that old events do not see new ones",
            found=f"context = {stack.mask.context}",
            where=where,
            ways_out="call remember_spread again with the whole histories",
        )
    num_histories = share.counts.shape[1]
    if num_histories != len(histories.lengths) or len(events) != share.num_rows:
        raise DataError(
            expected=f"counts of {len(histories.lengths)} histories, and this rank's {share.num_rows} new events",
            found=f"{num_histories} counts, {len(events)} events",
            where=where,
            ways_out="give each rank its share: share_of_events says which",
        )
    if (times is None) != (histories.times is None) or (times is not None and len(times) != len(events)):
        raise DataError(
            expected=f"{'no times' if histories.times is None else f'{len(events)} times'}, as the histories have them",
            found="none" if times is None else f"{len(times)}",
            where=where,
            ways_out="remember with times and extend with times, one an event, or neither",
        )
