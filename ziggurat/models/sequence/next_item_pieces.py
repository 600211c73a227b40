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
from dataclasses import replace

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from ziggurat.features.batch import Batch, JaggedRows
from ziggurat.features.events import (
    ASKED_AT,
    EARLIER,
    HISTORY,
    HISTORY_LENGTHS,
    HISTORY_PLACES,
    HISTORY_TIMES,
    PIECE_HOMES,
    PIECE_LENGTHS,
    PIECE_SETS,
    PIECE_STARTS,
    of_history,
)
from ziggurat.features.inputs import InputSpec
from ziggurat.features.jagged import MOMENT, SequenceGroup, moments_group, offsets_of
from ziggurat.models.sequence.cut import Chunks, Cutting
from ziggurat.ops.attention.problem import Spans

_TOLD = (PIECE_STARTS, PIECE_LENGTHS, HISTORY_LENGTHS)


def spans_of(named: Mapping[str, Tensor]) -> Spans | None:
    """Return the places of the pieces of a batch; None where its histories are whole.

    Args:
        named: what the dense network reads beside features.
    """
    if PIECE_STARTS not in named:
        return None
    starts_B = named[PIECE_STARTS]
    return Spans(query_starts=starts_B, key_starts=starts_B, lengths=named[PIECE_LENGTHS])


def positions_of(
    offsets_B1: Int64[Tensor, "B+1"], named: Mapping[str, Tensor], *, total: int, from_start: bool
) -> Int64[Tensor, "N"]:
    """Return where each event of a batch is in its whole history, from its first event or back from its last one.

    Args:
        offsets_B1: of the events.
        named: what the dense network reads beside features.
        total: N, which the offsets say, too, but not without a look at the data.
        from_start: counted from the beginning, not from the end.
    """
    lengths_B = offsets_B1.diff()
    begins_B = offsets_B1[:-1] - named.get(PIECE_STARTS, 0)

    def of_events(values_B: Tensor) -> Tensor:
        return values_B.repeat_interleave(lengths_B, output_size=total)

    places_N = named.get(HISTORY_PLACES)
    if places_N is None:
        places_N = torch.arange(total, device=offsets_B1.device) - of_events(begins_B)
    if from_start:
        return places_N
    wholes_B = named.get(HISTORY_LENGTHS, named.get(PIECE_LENGTHS, lengths_B))
    return of_events(wholes_B) - 1 - places_N


def places_and_lengths(batch: Batch) -> dict[str, Tensor]:
    """Return the tensors that describe pieces and thinned histories, for `Model.further`; none for whole histories."""
    found = {name: value for name, value in batch.extras.items() if name in _TOLD}
    if HISTORY_PLACES in batch.sequences:
        found[HISTORY_PLACES] = moments_of(batch, HISTORY_PLACES).values
    return found


def cut_histories(batch: Batch, inputs: InputSpec) -> Cutting:
    """The histories of a batch, one a sample, and how they are cut.

    Args:
        batch: samples that were made of events.
        inputs: of the model.
    """
    batch = batch.expanded()
    lists = lists_by_name(batch, inputs)

    def pieces(chunks: Chunks) -> Batch:
        return _pieces(batch, inputs, lists, chunks)

    return Cutting(lengths=lists[HISTORY].offsets.diff(), pieces=pieces)


def _pieces(batch: Batch, inputs: InputSpec, lists: Mapping[str, JaggedRows], chunks: Chunks) -> Batch:
    """The pieces [start, start + count) of the histories of a batch, S·B samples: one piece of each, S times."""
    num_sets = chunks.starts.shape[0]
    size = batch.batch_size
    starts = chunks.starts.reshape(-1)
    counts = chunks.counts.reshape(-1)
    samples = torch.arange(size).repeat(num_sets)
    lengths_B = lists[HISTORY].offsets.diff()
    ends = starts + counts
    is_last = ends == lengths_B[samples]
    single = batch.single[:, samples]
    for index, spec in enumerate(inputs.single):
        name = HISTORY if inputs.items is not None and spec.name == inputs.items.id else of_history(spec.name)
        if name in lists:
            single[index] = _following(lists[name], single[index], samples, ends, is_last=is_last)
    cut = [cut_rows(lists[spec.name], samples, starts, counts * (spec.name != EARLIER)) for spec in inputs.jagged]
    times, asked = (moments_of(batch, name) for name in (HISTORY_TIMES, ASKED_AT))
    # When a question is asked: as the sample says, which may be nothing, or when the next event happens.
    told = torch.where(is_last, asked.offsets.diff()[samples], 1)
    of_sample = torch.cat([asked.values, asked.values.new_zeros(1)])[asked.offsets[:-1][samples]]
    when = _following(times, of_sample, samples, ends, is_last=is_last)[told > 0]
    sequences = {ASKED_AT: moments_group(when, offsets_of(told))}
    for name in (HISTORY_TIMES, HISTORY_PLACES):
        if name in batch.sequences:
            sequences[name] = moments_of_rows(cut_rows(moments_of(batch, name), samples, starts, counts))
    set_numbers = torch.arange(num_sets).repeat_interleave(size)
    answers = torch.tensor(chunks.are_last)[set_numbers]  # of a sample: whoever has the end of its history
    pieces = {
        PIECE_STARTS: starts,
        PIECE_LENGTHS: lengths_B[samples],
        PIECE_SETS: set_numbers,
        PIECE_HOMES: torch.where(answers, samples, -1),
    }
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


def shortened_histories(batch: Batch, inputs: InputSpec, *, kept_N: Bool[Tensor, "N"]) -> Batch:
    """A batch whose histories lack some events; `HISTORY_PLACES` says where those that remain stood.

    Args:
        batch: samples that were made of events, without repeated features.
        inputs: of the model.
        kept_N: which events of the histories remain.
    """
    lists = lists_by_name(batch, inputs)
    offsets_B1 = lists[HISTORY].offsets
    begins_B1 = torch.cat([kept_N.new_zeros(1, dtype=torch.int64), kept_N.cumsum(0)])[offsets_B1]
    jagged = [
        lists[spec.name] if spec.name == EARLIER else JaggedRows(lists[spec.name].values[kept_N], begins_B1)
        for spec in inputs.jagged
    ]
    samples_N = torch.arange(batch.batch_size).repeat_interleave(offsets_B1.diff(), output_size=len(kept_N))
    places_N = torch.arange(len(kept_N)) - offsets_B1[:-1][samples_N]
    sequences = {
        HISTORY_TIMES: moments_group(moments_of(batch, HISTORY_TIMES).values[kept_N], begins_B1),
        HISTORY_PLACES: moments_group(places_N[kept_N], begins_B1),
    }
    lengths = {HISTORY_LENGTHS: offsets_B1.diff()}
    return replace(
        batch,
        jagged=JaggedRows.joined(jagged),
        sequences=batch.sequences | sequences,
        extras=batch.extras | lengths,
    )


def lists_by_name(batch: Batch, inputs: InputSpec) -> dict[str, JaggedRows]:
    """The lists of a batch by the name of their feature."""
    if not batch.batch_size:
        return {spec.name: JaggedRows.empty() for spec in inputs.jagged}
    names = (spec.name for spec in inputs.jagged)
    return {name: batch.lists(position)[0] for position, name in enumerate(names)}


def moments_of(batch: Batch, name: str) -> JaggedRows:
    """Moments of a batch, one list a sample."""
    group = batch.sequences[name].expanded()
    return JaggedRows(group.values[MOMENT], group.offsets)


def moments_of_rows(rows: JaggedRows) -> SequenceGroup:
    """Lists of moments as a batch has them."""
    return moments_group(rows.values, rows.offsets)


def _following(lists: JaggedRows, otherwise: Tensor, samples: Tensor, ends: Tensor, *, is_last: Tensor) -> Tensor:
    """Return the value at the end of each piece in its list; the other where the list ends there."""
    # One zero more, which those read whose own value is taken anyway.
    padded = torch.cat([lists.values, lists.values.new_zeros(1)])
    at = torch.where(is_last, len(padded) - 1, lists.offsets[:-1][samples] + ends)
    return torch.where(is_last, otherwise, padded[at])


def cut_rows(lists: JaggedRows, samples: Tensor, starts: Tensor, counts: Tensor) -> JaggedRows:
    """The pieces of lists; values are copied."""
    offsets = offsets_of(counts)
    total = int(offsets[-1])
    moved = (lists.offsets[:-1][samples] + starts - offsets[:-1]).repeat_interleave(counts, output_size=total)
    return JaggedRows(lists.values[torch.arange(total) + moved], offsets)
