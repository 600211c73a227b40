"""SequencePlaces: what layers know of events besides their vectors: sequences, targets, times.

    events   e_0  e_1  e_2 │ c_0  c_1              c: candidates, scored at the time `asked_at`
    time     t_0  t_1  t_2 │  –    –
    asked    t_1  t_2  t_2 │ asked_at              `next`: an event predicts the next one, so it knows when that happens
    asked    t_0  t_1  t_2 │ asked_at              `own`

The last event of a history is asked at its own time (nothing follows it yet), unless `asked_at` is given for a history
without candidates. A candidate's own time is the time it is asked at: its distance to itself is 0.

Source: `next` is what the research code of HSTU does (timestamps shifted by one event).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional

from ziggurat.errors import DataError
from ziggurat.features.jagged import offsets_of
from ziggurat.ops.attention.choose import jagged_attention
from ziggurat.ops.attention.problem import AttentionBias, AttentionForm, JaggedLayout


class AskedAt(StrEnum):
    """The time that an event of a history is asked at."""

    NEXT = "next"  # when the next event happens: HSTU of the research code
    OWN = "own"  # when it happens itself


class Attention(Protocol):
    """Attention of queries to keys: `jagged_attention`, or one that reaches over ranks."""

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
        """Attend as `jagged_attention` does."""
        ...


@dataclass(frozen=True, kw_only=True)
class SequencePlaces:
    """Places of events: sequences, targets, times; and the attention between them.

    Args:
        layout: where sequences begin, which of them are targets, and what sees what.
        key_times: (N,) of every event; None where no layer has a bias by time.
        query_times: (M,) when each query is asked.
        attention: what layers attend with.
    """

    layout: JaggedLayout
    key_times: Int64[Tensor, "N"] | None = None
    query_times: Int64[Tensor, "M"] | None = None
    attention: Attention = jagged_attention


def asked_times(
    times: Int64[Tensor, "N"], *, offsets: Int64[Tensor, "B+1"], asked: AskedAt, last: Int64[Tensor, "B"] | None = None
) -> Int64[Tensor, "N"]:
    """Return the time at which each event of histories without candidates is asked.

    Args:
        times: of the events, in the order of the sequences.
        offsets: where sequences begin.
        asked: at its own time, or at the next event's.
        last: for the last event of each history; None: its own time.

    Raises:
        DataError: times are no int64, or not one an event.
    """
    # A GPU is not asked: what a model reads of a batch was checked in the copy on the host (`question_times`).
    if times.dtype is not torch.int64 or (not offsets.is_cuda and len(times) != int(offsets[-1])):
        raise DataError(
            expected=f"{int(offsets[-1])} times of int64, one an event",
            found=f"{len(times)} of {times.dtype}",
            where="times of a sequence",
            ways_out=("keep times as whole seconds or milliseconds: FP32 rounds them to two minutes",),
        )
    if asked is AskedAt.OWN:
        return times
    shifted = torch.cat([times[1:], times[-1:], times.new_zeros(1)])
    ends = torch.where(offsets[1:] > offsets[:-1], offsets[1:] - 1, len(times))  # of empty ones: cut off again
    shifted[ends] = functional.pad(times, (0, 1))[ends] if last is None else last
    return shifted[:-1]


def join_lists(
    first: Tensor, second: Tensor, *, offsets: tuple[Int64[Tensor, "B+1"], Int64[Tensor, "B+1"]]
) -> tuple[Tensor, Int64[Tensor, "B+1"]]:
    """Lists of one tensor, each followed by the list of the other: values and offsets.

    Args:
        first: (N, …) what each list begins with.
        second: (M, …) what each list ends with.
        offsets: of both, for as many lists.
    """
    before, behind = offsets
    joined = offsets_of(before.diff() + behind.diff())
    values = first.new_empty(len(first) + len(second), *first.shape[1:])
    values[moved_places(before, joined[:-1], total=len(first))] = first
    values[moved_places(behind, joined[:-1] + before.diff(), total=len(second))] = second
    return values, joined


def cut_lists(values: Tensor, *, offsets: Int64[Tensor, "B+1"], keep: Int64[Tensor, "B"]) -> Tensor:
    """The first `keep` rows of every list."""
    # With `output_size` the host need not ask the device how many rows there are.
    position = torch.arange(len(values), device=values.device) - offsets[:-1].repeat_interleave(
        offsets.diff(), output_size=len(values)
    )
    return values[position < keep.repeat_interleave(offsets.diff(), output_size=len(values))]


def moved_places(offsets: Int64[Tensor, "B+1"], begins: Int64[Tensor, "B"], *, total: int) -> Int64[Tensor, "N"]:
    """Return for each row of lists where it stands if list b begins at `begins[b]`.

    Args:
        offsets: where lists begin.
        begins: where they begin elsewhere.
        total: N, rows of all lists.
    """
    return torch.arange(total, device=offsets.device) + (begins - offsets[:-1]).repeat_interleave(
        offsets.diff(), output_size=total
    )
