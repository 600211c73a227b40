"""What an attention over jagged sequences is asked: forms, masks, sequences, biases. Plain data.

    position    0 … C−1        C … L−T−1          L−T … L−1
                context        history            targets (candidates)

    who sees     context   history   targets
    context      all       all       itself            only C > 0
    history      all *     causal *  none              * at most W events before itself
    target       all *     all *     itself            * at most the last W events

A target sees itself and no other target, so a score does not depend on the other candidates. All context positions
count as one event, and all targets stand at one position: the first after the history. So with C context positions,
p(i) = max(0, i − C + 1), not more than p(L − T), and i sees j if

    i = j,   or   0 < p(i) − p(j) ≤ W,   or   i < C and j < L − T.

Each row therefore sees one interval of columns, and itself: that is all that kernels need to know.

Queries and keys may be parts of their sequences (`Spans`): then a result is what these keys add to it, and what several
parts add can be put together, wherever they were computed.

Sources: HSTU, Zhai et al., "Actions Speak Louder than Words", ICML 2024, arXiv 2402.17152, section 3 (pointwise
attention), Appendix H (M-FALCON's mask); the mask's options are those of DLRMv3 / DLRMv4.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from ziggurat.errors import ConfigError, DataError


class AttentionForm(StrEnum):
    """Functions that turn scores into weights."""

    SILU = "silu"  # SiLU(s) / n: pointwise, HSTU
    RELU = "relu"  # ReLU(s) / n: pointwise, a control
    SOFTMAX = "softmax"  # exp(s) / Σ exp(s) over what is seen: SASRec, LiGR


@dataclass(frozen=True, kw_only=True)
class AttentionMask:
    """Rule for which events see which; see the file's drawing.

    Args:
        context: C, positions at the start of every sequence that see the whole history.
        max_attention_length: W, events before itself that a row sees; 0: all.
    """

    context: int = 0
    max_attention_length: int = 0

    def __post_init__(self) -> None:
        for name in ("context", "max_attention_length"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    expected=f"{name} of 0 or more",
                    found=str(getattr(self, name)),
                    where="attention mask",
                    ways_out=f"{name} = 0 turns it off",
                )


CAUSAL = AttentionMask()


@dataclass(frozen=True, kw_only=True)
class Spans:
    """Positions of queries and keys in the sequences of which they are parts, each without gaps.

    A query that sees none of the keys gets zeros, and −∞ as the logarithm of its sum.

    Args:
        query_starts: (B,) position of each sequence's first query.
        key_starts: (B,) position of its first key.
        lengths: (B,) events of the whole sequence, targets among them.
    """

    query_starts: Int64[Tensor, "B"]
    key_starts: Int64[Tensor, "B"]
    lengths: Int64[Tensor, "B"]

    def stacked(self) -> Int64[Tensor, "3 B"]:
        """The three as one tensor."""
        return torch.stack([self.query_starts, self.key_starts, self.lengths])


@dataclass(frozen=True, kw_only=True)
class JaggedLayout:
    """Begins and ends of sequences, and how many of their events are targets.

    Keys and values of sequence b are rows `offsets[b]` to `offsets[b + 1]`. Queries are all of these events, or, where
    `query_offsets` is given, the last `query_offsets[b + 1] − query_offsets[b]` of them: the keys and values of the
    earlier ones are known from before.

    Args:
        offsets: (B + 1,) of keys and values.
        query_offsets: (B + 1,) of queries and results; None: as `offsets`.
        num_targets: (B,) events at the end of each (whole) sequence that are candidates; None: none.
        mask: the same for all sequences; None: causal alone.
        spans: of parts of sequences; queries may then be more than keys. None: the sequences are whole.
        longest: no sequence has more keys, nor queries; what the host knows of a layout on a GPU, so that kernels ask
            for nothing: offsets were checked in the host's copy of the batch. None: not known.
    """

    offsets: Int64[Tensor, "B+1"]
    query_offsets: Int64[Tensor, "B+1"] | None = None
    num_targets: Int64[Tensor, "B"] | None = None
    mask: AttentionMask | None = None
    spans: Spans | None = None
    longest: int | None = None

    @property
    def rule(self) -> AttentionMask:
        """The mask, written out where none is given."""
        return CAUSAL if self.mask is None else self.mask

    @property
    def of_queries(self) -> Int64[Tensor, "B+1"]:
        """Offsets of the queries."""
        return self.offsets if self.query_offsets is None else self.query_offsets


@dataclass(frozen=True, kw_only=True)
class AttentionBias:
    """Relative position and time, added to the scores: w_pos[j − i + R − 1] + w_time[bucket(|t_i − t_j|)].

    Args:
        w_pos: (2R − 1,) for distances below R; None: no bias by position.
        w_time: one number a bucket, the last one for all that is longer; None: no bias by time.
        query_times: when each query is asked (for the next item: the time of the next event).
        key_times: when each event was.
    """

    w_pos: Float[Tensor, "2R-1"] | None = None
    w_time: Float[Tensor, "K"] | None = None
    query_times: Int64[Tensor, "M"] | None = None
    key_times: Int64[Tensor, "N"] | None = None

    @property
    def times(self) -> tuple[Int64[Tensor, "M"], Int64[Tensor, "N"]] | None:
        """The times of queries and events; None where there is no bias by time.

        Raises:
            DataError: there is one, and no times.
        """
        if self.w_time is None:
            return None
        if self.query_times is None or self.key_times is None:
            raise _wrong("query_times and key_times beside w_time", "None")
        return self.query_times, self.key_times


def attended_pairs(layout: JaggedLayout) -> int:
    """Count the pairs (query, key) that the masks of all sequences leave: the cost is linear in this count."""
    total = 0
    for part in parts_of(layout):
        seen = visible(part, mask=layout.rule)
        columns = part.keys.stop - part.keys.start
        # From positions in the sequence to columns among the keys that are there.
        low, high = (each.sub(part.key_start).clamp(0, columns) for each in (seen.low, seen.high))
        # Targets stand behind the interval that they see, so their own column counts in addition.
        own = seen.rows - part.key_start
        # An interval that lies outside of the keys is empty, and must not count negatively.
        high = torch.maximum(low, high)
        total += int((high - low).sum() + (((own < low) | (own >= high)) & (own >= 0) & (own < columns)).sum())
    return total


@dataclass(frozen=True, kw_only=True)
class SequencePart:
    """One sequence of a layout: its rows among queries and keys, and where these stand in the whole of it."""

    queries: slice
    keys: slice
    query_start: int
    key_start: int
    history: int  # events of the whole sequence that are no targets


def parts_of(layout: JaggedLayout) -> list[SequencePart]:
    """The sequences of a layout one by one."""
    begins = layout.offsets.tolist()
    asked = layout.of_queries.tolist()
    num = len(begins) - 1
    targets = [0] * num if layout.num_targets is None else layout.num_targets.tolist()
    lengths = layout.offsets.diff().tolist()
    # Without spans the queries are the last events of their sequence.
    starts = [length - (last - first) for length, first, last in zip(lengths, asked[:-1], asked[1:], strict=True)]
    spans = [starts, [0] * num, lengths] if layout.spans is None else layout.spans.stacked().tolist()
    return [
        SequencePart(
            queries=slice(asked[b], asked[b + 1]),
            keys=slice(begins[b], begins[b + 1]),
            query_start=spans[0][b],
            key_start=spans[1][b],
            history=spans[2][b] - targets[b],
        )
        for b in range(num)
    ]


@dataclass(frozen=True, kw_only=True)
class Visible:
    """The interval [low, high) of positions that each query sees besides itself, and its position p for the bias."""

    low: Int64[Tensor, "M"]
    high: Int64[Tensor, "M"]
    rows: Int64[Tensor, "M"]
    position: Int64[Tensor, "M"]

    def dense(self, length: int, *, first: int = 0) -> Tensor:
        """The same as (M, length) booleans, for the positions from `first` on."""
        return self.sees(torch.arange(first, first + length, device=self.low.device))

    def sees(self, columns: Int64[Tensor, "*B N"]) -> Bool[Tensor, "*B M N"]:
        """Mark the keys that each query sees, by their positions."""
        columns, low, high, rows = (
            columns.unsqueeze(-2),
            *(each.unsqueeze(-1) for each in (self.low, self.high, self.rows)),
        )
        return ((columns >= low) & (columns < high)) | (columns == rows)


def visible(part: SequencePart, *, mask: AttentionMask) -> Visible:
    """Return the keys of the whole sequence that the queries of a part of it see."""
    rows = torch.arange(part.query_start, part.query_start + part.queries.stop - part.queries.start)
    return seen_of(rows, history=torch.tensor(part.history), mask=mask)


def seen_of(rows: Int64[Tensor, "*B M"], *, history: Int64[Tensor, "*B 1"], mask: AttentionMask) -> Visible:
    """Return the keys of the whole sequence that queries see.

    Args:
        rows: positions of the queries.
        history: events of the sequence that are no targets.
        mask: of all sequences.
    """
    # A sequence may be shorter than its context.
    context = history.clamp(max=mask.context)
    last = torch.minimum(rows, history)
    # Context and targets see the whole history; a row in between sees up to itself.
    high = torch.where((rows >= context) & (rows < history), rows + 1, history)
    low = torch.zeros_like(rows)
    if mask.max_attention_length:
        shift = (context - 1).clamp(min=0)  # p(i) = i − shift, where that is positive
        # All of the context has p = 0: who reaches any of it reaches all of it.
        first = last - mask.max_attention_length
        low = torch.where((rows >= context) & (first > shift), first, low)
    return Visible(low=low, high=high, rows=rows, position=last)


def check_problem(q: Tensor, k: Tensor, v: Tensor, *, layout: JaggedLayout, bias: AttentionBias | None) -> None:
    """Refuse tensors that do not fit together, before a kernel reads memory that is not there.

    What offsets, targets and spans hold is looked at unless the layout has `longest`.

    Raises:
        DataError: says which shape, length or offset is wrong.
    """
    if q.dim() != 3 or k.dim() != 3 or v.dim() != 3 or q.shape[1:] != k.shape[1:] or k.shape[:2] != v.shape[:2]:
        raise _wrong("q (M, H, d), k (N, H, d), v (N, H, d_v)", f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}")
    if len({q.dtype, k.dtype, v.dtype}) > 1 or not q.dtype.is_floating_point:
        raise _wrong("q, k and v of one floating-point dtype", f"{q.dtype}, {k.dtype}, {v.dtype}")
    if layout.longest is not None:
        longest = layout.longest if layout.num_targets is None else 0  # with targets it is more than what w_pos has
        _check_bias(bias or AttentionBias(), num_queries=len(q), num_keys=len(k), longest=longest)
        return
    lengths = _checked_offsets(layout.offsets, len(k), "offsets")
    if layout.query_offsets is not None:
        asked = _checked_offsets(layout.query_offsets, len(q), "query_offsets")
        # With spans queries and keys are parts of their own, and may outnumber each other.
        if len(asked) != len(lengths) or (layout.spans is None and bool((asked > lengths).any())):
            raise _wrong("query_offsets with as many sequences as offsets, none longer", f"{asked}, {lengths}")
    elif len(q) != len(k):
        raise _wrong("as many queries as keys, or query_offsets", f"{len(q)} queries, {len(k)} keys")
    if layout.spans is not None:
        lengths = _check_spans(layout.spans, asked=layout.of_queries.diff(), keys=lengths)
    targets = layout.num_targets
    if targets is not None:
        _integers(targets, "num_targets")
        if targets.shape != lengths.shape or bool(((targets < 0) | (targets > lengths)).any()):
            raise _wrong("num_targets between 0 and the length of each sequence", f"{targets}, lengths {lengths}")
    if bias is not None:
        # All targets stand at one position, so they need one number of w_pos together.
        positions = lengths if targets is None else lengths - targets + (targets > 0)
        _check_bias(bias, num_queries=len(q), num_keys=len(k), longest=int(positions.max()) if len(lengths) else 0)


def _check_spans(spans: Spans, *, asked: Tensor, keys: Tensor) -> Tensor:
    """The lengths of whole sequences, in which the parts lie."""
    for name in ("query_starts", "key_starts", "lengths"):
        _integers(getattr(spans, name), name)
        if getattr(spans, name).shape != keys.shape:
            raise _wrong(f"{name} of {len(keys)} numbers", str(tuple(getattr(spans, name).shape)))
    for name, starts, counts in (("queries", spans.query_starts, asked), ("keys", spans.key_starts, keys)):
        # A piece without rows has no position that could be wrong.
        outside = (counts > 0) & ((starts < 0) | (starts + counts > spans.lengths))
        if bool(outside.any()):
            at = int(outside.nonzero()[0])
            found = f"positions {int(starts[at])} to {int(starts[at] + counts[at])} of {int(spans.lengths[at])}"
            raise _wrong(f"{name} inside their sequence", f"{found}, sequence {at}")
    return spans.lengths


def _check_bias(bias: AttentionBias, *, num_queries: int, num_keys: int, longest: int) -> None:
    if bias.w_pos is not None and (bias.w_pos.dim() != 1 or len(bias.w_pos) % 2 == 0):
        raise _wrong("w_pos of 2R − 1 numbers", str(tuple(bias.w_pos.shape)))
    if bias.w_pos is not None and (len(bias.w_pos) + 1) // 2 < longest:
        reach = (len(bias.w_pos) + 1) // 2
        raise _wrong(
            f"sequences of at most R = {reach} events (all targets count as one), for which w_pos has numbers",
            f"one of {longest}",
        )
    if bias.w_time is None:
        return
    for name, times, expected in (
        ("query_times", bias.query_times, num_queries),
        ("key_times", bias.key_times, num_keys),
    ):
        if times is None or len(times) != expected:
            raise _wrong(f"{name} of {expected} numbers", "None" if times is None else f"{len(times)}")
        _integers(times, name)


def _checked_offsets(offsets: Tensor, total: int, name: str) -> Tensor:
    _integers(offsets, name)
    lengths = offsets.diff()
    if offsets.dim() != 1 or not len(offsets) or bool((lengths < 0).any()):
        raise _wrong(f"{name} that never fall", str(offsets))
    if int(offsets[0]) != 0 or int(offsets[-1]) != total:
        raise _wrong(f"{name} from 0 to {total}", f"from {int(offsets[0])} to {int(offsets[-1])}")
    return lengths


def _integers(values: Tensor, name: str) -> None:
    if values.dtype is not torch.int64:
        raise _wrong(f"{name} of int64 (a float of 32 bits rounds times of today to two minutes)", str(values.dtype))


def _wrong(expected: str, found: str) -> DataError:
    return DataError(
        expected=expected,
        found=found,
        where="jagged attention",
        ways_out=("see ziggurat/ops/attention/problem.py for what belongs together",),
    )
