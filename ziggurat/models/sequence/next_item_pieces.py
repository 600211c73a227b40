"""Pieces of histories as samples of their own: what each piece asks is what the whole history asks there.

    sample     history  e_1 e_2 e_3 │ e_4 e_5 e_6     next: e_7, asked when it happens
    pieces     e_1 e_2 e_3   next: e_4, asked at t_4
               e_4 e_5 e_6   next: e_7                 (that of the sample)

Every event of a history is a question whose answer is the event after it, so a piece whose next item is the first event
after it has the questions of the whole between its ends, and pieces together have each question once. Where a piece
begins and how long the whole is travels with it (`PIECE_STARTS`, `PIECE_LENGTHS`), for positions and attention.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Int64
from torch import Tensor

from ziggurat.features.batch import Batch, JaggedRows
from ziggurat.features.events import ASKED_AT, EARLIER, HISTORY, HISTORY_TIMES, PIECE_LENGTHS, PIECE_STARTS, of_history
from ziggurat.features.inputs import InputSpec
from ziggurat.features.jagged import MOMENT, moments_group, offsets_of
from ziggurat.ops.attention.problem import Spans

PIECES = (PIECE_STARTS, PIECE_LENGTHS)


def spans_of(named: Mapping[str, Tensor]) -> Spans | None:
    """Where the pieces of a batch stand; None where its histories are whole.

    Args:
        named: what the dense network reads beside features.
    """
    if PIECE_STARTS not in named:
        return None
    starts_B = named[PIECE_STARTS]
    return Spans(query_starts=starts_B, key_starts=starts_B, lengths=named[PIECE_LENGTHS])


def edges_of(offsets_B1: Int64[Tensor, "B+1"], named: Mapping[str, Tensor], *, from_start: bool) -> Int64[Tensor, "B"]:
    """Where, among the events of a batch, each whole history begins, or has its last event.

    Args:
        offsets_B1: of the events.
        named: what the dense network reads beside features.
        from_start: the beginning, not the end.
    """
    begins_B = offsets_B1[:-1] - named.get(PIECE_STARTS, 0)
    return begins_B if from_start else begins_B + named.get(PIECE_LENGTHS, offsets_B1.diff()) - 1


def pieces_of_histories(
    batch: Batch, inputs: InputSpec, *, starts: Int64[Tensor, "S B"], counts: Int64[Tensor, "S B"]
) -> Batch:
    """The pieces [start, start + count) of the histories of a batch, S·B samples: one piece of each, S times.

    Args:
        batch: samples that were made of events.
        inputs: of the model.
        starts: first event of each piece.
        counts: events of each piece; may be 0.
    """
    batch, num_sets = batch.expanded(), starts.shape[0]
    samples = torch.arange(batch.batch_size).repeat(num_sets)
    lists = _lists(batch, inputs)
    lengths_B = lists[HISTORY].offsets.diff()
    ends = (starts + counts).reshape(-1)
    is_last = ends == lengths_B[samples]
    single = batch.single[:, samples]
    for index, spec in enumerate(inputs.single):
        name = HISTORY if inputs.items is not None and spec.name == inputs.items.id else of_history(spec.name)
        if name in lists:
            single[index] = _following(lists[name], single[index], samples, ends, is_last=is_last)
    cut = [
        _cut(lists[spec.name], samples, starts.reshape(-1), counts.reshape(-1) * (spec.name != EARLIER))
        for spec in inputs.jagged
    ]
    times, asked = (_whole(batch, name) for name in (HISTORY_TIMES, ASKED_AT))
    own = _cut(times, samples, starts.reshape(-1), counts.reshape(-1))
    # When a question is asked: as the sample says, which may be nothing, or when the next event happens.
    told = torch.where(is_last, asked.offsets.diff()[samples], 1)
    of_sample = torch.cat([asked.values, asked.values.new_zeros(1)])[asked.offsets[:-1][samples]]
    when = _following(times, of_sample, samples, ends, is_last=is_last)[told > 0]
    sequences = {
        HISTORY_TIMES: moments_group(own.values, own.offsets),
        ASKED_AT: moments_group(when, offsets_of(told)),
    }
    pieces = {PIECE_STARTS: starts.reshape(-1), PIECE_LENGTHS: lengths_B[samples]}
    return Batch(
        dense=batch.dense[samples],
        single=single,
        jagged=JaggedRows.joined(cut),
        vectors={name: value[samples] for name, value in batch.vectors.items()},
        sequences=sequences,
        labels=batch.labels[samples],
        weights=None if batch.weights is None else batch.weights[samples],
        groups=None if batch.groups is None else batch.groups[samples],
        row_ids=batch.row_ids[samples],
        extras={name: value[samples] for name, value in batch.extras.items()} | pieces,
    )


def _lists(batch: Batch, inputs: InputSpec) -> dict[str, JaggedRows]:
    """The lists of a batch by the name of their feature."""
    if not batch.batch_size:
        return {spec.name: JaggedRows.empty() for spec in inputs.jagged}
    names = (spec.name for spec in inputs.jagged)
    return {name: batch.lists(position)[0] for position, name in enumerate(names)}


def _whole(batch: Batch, name: str) -> JaggedRows:
    """Moments of a batch, one list a sample."""
    group = batch.sequences[name].expanded()
    return JaggedRows(group.values[MOMENT], group.offsets)


def _following(lists: JaggedRows, otherwise: Tensor, samples: Tensor, ends: Tensor, *, is_last: Tensor) -> Tensor:
    """What stands at the end of each piece in its list; the other where the list ends there."""
    padded = torch.cat([lists.values, lists.values.new_zeros(1)])
    at = torch.where(is_last, len(padded) - 1, lists.offsets[:-1][samples] + ends)
    return torch.where(is_last, otherwise, padded[at])


def _cut(lists: JaggedRows, samples: Tensor, starts: Tensor, counts: Tensor) -> JaggedRows:
    """The pieces of lists; values are copied."""
    offsets = offsets_of(counts)
    total = int(offsets[-1])
    moved = (lists.offsets[:-1][samples] + starts - offsets[:-1]).repeat_interleave(counts, output_size=total)
    return JaggedRows(lists.values[torch.arange(total) + moved], offsets)
