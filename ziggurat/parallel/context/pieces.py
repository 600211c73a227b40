"""Pieces of histories: which events each rank has, and which of them others need. Integers alone.

    N = 2 ranks, 2N chunks        0 │ 1 │ 2 │ 3
                                 r0   r1  r1  r0         rank r has chunk r (head) and chunk 2N − 1 − r (tail)

An event sees those before it, so late events cost more than early ones; head and tail together cost the same on every
rank. Every history of a batch is cut by itself, at whole events, so ranks differ by a few events a history.

What a rank needs of another one follows from the mask: rows see an interval of positions (`ops/attention/problem.py`),
so a piece of keys is needed from some position on, up to some other, or not at all. Targets are seen by themselves
alone, and so are needed nowhere else.

Source: the cut into 2N chunks: Yang et al., "Context Parallelism for Scalable Million-Token Inference", MLSys 2025,
arXiv 2411.01783, sharding of full prefill.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Int64
from torch import Tensor

from ziggurat.features.jagged import offsets_of
from ziggurat.ops.attention.problem import AttentionMask, JaggedLayout, Spans


@dataclass(frozen=True, eq=False)
class Pieces:
    """The events of one rank: S intervals of each of B histories; rows lie set by set, history by history.

    Args:
        starts: (S, B) position of the first event.
        counts: (S, B) events.
    """

    starts: Int64[Tensor, "S B"]
    counts: Int64[Tensor, "S B"]

    @property
    def num_sets(self) -> int:
        """S."""
        return self.starts.shape[0]

    @cached_property
    def offsets(self) -> Int64[Tensor, "S*B+1"]:
        """The positions where the rows of each piece begin."""
        return offsets_of(self.counts.reshape(-1))

    @cached_property
    def bounds(self) -> list[int]:
        """The positions where the rows of each set begin, and where the last one ends."""
        return offsets_of(self.counts.sum(dim=1)).tolist()

    @property
    def num_rows(self) -> int:
        """Events in all pieces."""
        return self.bounds[-1]

    def rows_of_set(self, number: int) -> slice:
        """The rows of one set."""
        return slice(self.bounds[number], self.bounds[number + 1])

    def cut(self, low: Int64[Tensor, "S B"], high: Int64[Tensor, "S B"]) -> Pieces:
        """The part of each piece that lies in [low, high)."""
        first = torch.maximum(low, self.starts)
        last = torch.minimum(high, self.starts + self.counts)
        # Where nothing is left the start means nothing, and the count is 0.
        return Pieces(first, (last - first).clamp(min=0))

    def and_then(self, further: Pieces) -> Pieces:
        """These sets, and those of further pieces of the same histories."""
        return Pieces(torch.cat([self.starts, further.starts]), torch.cat([self.counts, further.counts]))

    def rows_within(self, outer: Pieces) -> Int64[Tensor, "n"]:
        """Return where these events stand among the rows of pieces that they were cut from."""
        begins = outer.offsets[:-1] + (self.starts - outer.starts).reshape(-1)
        counts = self.counts.reshape(-1)
        moved = (begins - self.offsets[:-1]).repeat_interleave(counts, output_size=self.num_rows)
        return torch.arange(self.num_rows) + moved


def head_and_tail(lengths_B: Int64[Tensor, "B"], *, rank: int, num_ranks: int) -> Pieces:
    """Return a rank's pieces of histories that are cut into 2N chunks.

    Args:
        lengths_B: events of the whole histories.
        rank: r.
        num_ranks: N.
    """
    # Of 2N chunks rank r has the r-th from the front and from the back: under a causal mask all have equal work.
    chunks = torch.tensor([rank, 2 * num_ranks - 1 - rank]).unsqueeze(1)
    # Neighbours round the same edge, so no event is left out and none is in two chunks.
    starts, ends = (lengths_B * edge // (2 * num_ranks) for edge in (chunks, chunks + 1))
    return Pieces(starts, ends - starts)


@dataclass(frozen=True, eq=False)
class Histories:
    """The histories of a batch, as all ranks know them.

    Args:
        lengths: (B,) events of each, targets among them.
        num_targets: (B,) candidates at the end of each; None: none.
        mask: of the attention.
    """

    lengths: Int64[Tensor, "B"]
    num_targets: Int64[Tensor, "B"] | None = None
    mask: AttentionMask = field(default_factory=AttentionMask)

    @cached_property
    def ends(self) -> Int64[Tensor, "B"]:
        """The position where each history ends and its targets begin."""
        return self.lengths if self.num_targets is None else self.lengths - self.num_targets

    def columns_seen(self, rows: Pieces) -> tuple[Int64[Tensor, "S B"], Int64[Tensor, "S B"]]:
        """The interval of positions that the rows of each piece see between them, beside themselves."""
        reach = self.mask.max_attention_length
        context = self.ends.clamp(max=self.mask.context)
        first = rows.starts
        last = rows.starts + rows.counts
        has_context = first < context
        # A row of the context sees the whole history, so then does the piece.
        high = torch.where(has_context, self.ends, torch.minimum(last, self.ends))
        low = torch.zeros_like(first)
        if reach:
            begins = torch.minimum(first, self.ends) - reach
            low = torch.where(~has_context & (begins > (context - 1).clamp(min=0)), begins, low)
        # A piece without rows sees an empty interval.
        return low, torch.where(rows.counts > 0, high, low)

    def keys_needed(self, keys: Pieces, *, by: Pieces) -> Pieces:
        """The part of some pieces that rows of other pieces see."""
        low, high = self.columns_seen(by)
        intervals = zip(low, high, strict=True)
        parts = [keys.cut(first.expand_as(keys.starts), last.expand_as(keys.starts)) for first, last in intervals]
        return _hull(parts, like=keys)

    def rows_that_see(self, rows: Pieces, keys: Pieces) -> Pieces:
        """The part of some pieces whose rows see keys of other pieces."""
        parts = [self._rows_that_see(rows, keys, number) for number in range(keys.num_sets)]
        return _hull(parts, like=rows)

    def _rows_that_see(self, rows: Pieces, keys: Pieces, number: int) -> Pieces:
        reach = self.mask.max_attention_length
        context = self.ends.clamp(max=self.mask.context)
        begin = keys.starts[number]
        end = torch.minimum(begin + keys.counts[number], self.ends)
        last = rows.starts + rows.counts
        low = torch.maximum(rows.starts, begin)
        high = last
        if reach:
            # Rows below this still reach key `end − 1`; all of the context counts as one event.
            bound = torch.maximum(end, context.clamp(min=1)) + reach
            # Targets stand at the end of the history: if that is in reach, all of them see these keys.
            high = torch.where(self.ends < bound, last, torch.minimum(last, bound))
        has_context = rows.starts < context
        low = torch.where(has_context, rows.starts, low)
        high = torch.where(has_context, torch.maximum(high, torch.minimum(last, context)), high)
        return rows.cut(low, torch.where(begin < end, high, low))

    def calls(self, rows: Pieces, keys: Pieces) -> Iterator[tuple[slice, slice, JaggedLayout]]:
        """Rows, keys and layout of each attention that there is something to compute in."""
        low, high = self.columns_seen(rows)
        for of_rows, of_keys in itertools.product(range(rows.num_sets), range(keys.num_sets)):
            begin = keys.starts[of_keys]
            end = keys.starts[of_keys] + keys.counts[of_keys]
            seen = torch.minimum(end, high[of_rows]) > torch.maximum(begin, low[of_rows])
            # A target also sees itself, which lies behind the history and in no interval.
            if self.num_targets is not None:
                first = rows.starts[of_rows]
                last = rows.starts[of_rows] + rows.counts[of_rows]
                own = torch.minimum(last, end) > torch.maximum(torch.maximum(first, begin), self.ends)
                seen = seen | own
            if not bool(seen.any()):
                continue
            layout = JaggedLayout(
                offsets=offsets_of(keys.counts[of_keys]),
                query_offsets=offsets_of(rows.counts[of_rows]),
                num_targets=self.num_targets,
                mask=self.mask,
                spans=Spans(query_starts=rows.starts[of_rows], key_starts=begin, lengths=self.lengths),
            )
            yield rows.rows_of_set(of_rows), keys.rows_of_set(of_keys), layout

    def pairs(self, rows: Pieces, keys: Pieces) -> int:
        """Count the pairs of a row and a key that see each other; the cost is linear in this number."""
        reach = self.mask.max_attention_length
        context = self.ends.clamp(max=self.mask.context)
        total = 0
        for of_rows, of_keys in itertools.product(range(rows.num_sets), range(keys.num_sets)):
            begin = keys.starts[of_keys]
            end = torch.maximum(torch.minimum(begin + keys.counts[of_keys], self.ends), begin)
            first = rows.starts[of_rows]
            count = rows.counts[of_rows]
            last = first + count
            # Events behind the context, one by one; rows of the context are counted in `wide`.
            middle = torch.maximum(torch.minimum(first, self.ends), context)
            until = torch.maximum(torch.minimum(last, self.ends), middle)
            wide = (torch.minimum(last, context) - first).clamp(min=0)
            pairs = wide * (end - begin)
            # Event i sees the positions below i + 1, less those below i − W.
            pairs += _below(middle, until, begin, end, shift=1)
            behind = (last - torch.maximum(first, self.ends)).clamp(min=0)
            seen = (torch.minimum(end, self.ends) - begin).clamp(min=0)
            if reach:
                shift = (context - 1).clamp(min=0)
                # Only events further than the reach from the context lose any key.
                from_there = torch.maximum(middle, shift + reach + 1)
                pairs -= _below(from_there, torch.maximum(until, from_there), begin, end, shift=-reach)
                hidden = torch.where(self.ends - reach > shift, self.ends - reach, 0)
                seen = (seen - (torch.minimum(hidden, end) - begin).clamp(min=0)).clamp(min=0)
            total += int((pairs + behind * seen).sum())
        return total


def _below(first: Tensor, last: Tensor, begin: Tensor, end: Tensor, *, shift: int) -> Tensor:
    """Σ over events i in [first, last) of how many positions of [begin, end) lie below i + shift."""
    size = end - begin

    def until(event: Tensor) -> Tensor:
        below = (event - 1 + shift - begin).clamp(min=0)
        rising = torch.minimum(below, size)
        # It rises by one an event until all of [begin, end) lies below, and stays there.
        return rising * (rising + 1) // 2 + (below - rising) * size

    return torch.where(last > first, until(last) - until(first), 0)


def _hull(parts: Sequence[Pieces], *, like: Pieces) -> Pieces:
    """The smallest piece that holds those of all parts."""
    if not parts:
        return Pieces(like.starts, torch.zeros_like(like.counts))
    # A part without rows must not widen the hull: it begins behind all others, and ends before them.
    far = torch.iinfo(torch.int64).max
    starts = torch.stack([torch.where(each.counts > 0, each.starts, far) for each in parts]).amin(dim=0)
    ends = torch.stack([torch.where(each.counts > 0, each.starts + each.counts, 0) for each in parts]).amax(dim=0)
    is_empty = ends <= starts
    return Pieces(torch.where(is_empty, like.starts, starts), torch.where(is_empty, 0, ends - starts))
