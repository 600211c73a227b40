"""What a ranker of candidates reads of a batch: which samples are of one question, and how long ago events were.

    sample    0       1       2       3          question   0       1
    history   [7 4]   [7 4]   [9]     [9]   ──►  first      0       2        (2,) its first sample
    candidate 5       8       5       3          sample's   0 0     1 1      (4,)

Neighbours in a batch that agree in all that a question has (history, what was done, times, context) are of one
question: their outputs may come from one pass over the history, because it depends on nothing else. Nothing has to be
told, so a batch of any source, and of any cut, is computed the same.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from ziggurat.errors import SchemaError
from ziggurat.features.batch import Batch, JaggedRows
from ziggurat.features.events import ASKED_AT, HISTORY_PLACES, HISTORY_TIMES, NEXT_ITEM
from ziggurat.features.inputs import InputSpec
from ziggurat.features.items import Items
from ziggurat.features.jagged import MOMENT, offsets_of
from ziggurat.models.sequence.next_item_inputs import list_lengths, missing_of_events


def check_candidate_inputs(inputs: InputSpec) -> Items:
    """The items of inputs that were made of events with labels.

    Raises:
        SchemaError: they were not.
    """
    labels = [label.name for label in inputs.labels]
    missing = missing_of_events(inputs) + ([] if labels and labels != [NEXT_ITEM] else ["labels of candidates"])
    if inputs.items is not None and not missing:
        return inputs.items
    raise SchemaError(
        expected="data that was made of events with labels: candidates behind a history",
        found=f"no {', no '.join(missing or ['items'])}",
        where="inputs of model sequence_ranker",
        ways_out=(
            "add [events] and a [[label]] to the schema of an event log: see docs/guides/long-histories.md",
            "take a model of samples: din reads a history; next_item finds what comes next",
        ),
    )


def questions_of(batch: Batch, *, lists: list[int], single: list[int]) -> tuple[Int64[Tensor, "Q"], Int64[Tensor, "B"]]:
    """The first sample of each question, and the question of each sample.

    Args:
        batch: with the moments of its histories.
        lists: positions in `InputSpec.jagged` of what a question has.
        single: positions in `InputSpec.single` of its context.
    """
    size = batch.batch_size
    same_B = torch.ones(size, dtype=torch.bool, device=batch.dense.device)
    # There is none before the first.
    same_B[:1] = False
    for position in lists if size else ():
        rows, inverse_B = batch.lists(position)
        same_B &= as_before(rows.values, rows.offsets) if inverse_B is None else _equal_before(inverse_B)
    for position in single:
        same_B &= _equal_before(batch.single[position])
    for name in [name for name in (HISTORY_TIMES, HISTORY_PLACES, ASKED_AT) if name in batch.sequences]:
        moments = batch.sequences[name].expanded()
        same_B &= as_before(moments.values[MOMENT], moments.offsets)
    return same_B.logical_not().nonzero().squeeze(1), same_B.logical_not().cumsum(0) - 1


def moments_of_questions(
    batch: Batch, first_Q: Int64[Tensor, "Q"], *, place: int
) -> tuple[Batch, Int64[Tensor, "Q+1"]]:
    """The first samples of questions, without what a question's times do not need; and where histories begin.

    Args:
        batch: with the moments of its histories.
        first_Q: the first sample of each question.
        place: of a list of the history, in `InputSpec.jagged`.
    """
    nothing = JaggedRows(batch.jagged.values[:0], batch.jagged.offsets[:1])
    without = {"vectors": {}, "jagged": nothing, "repeated": (), "host": None}
    short = replace(batch, dense=batch.dense[:, :0], single=batch.single[:0], labels=batch.labels[:, :0], **without)
    return short.take(first_Q), offsets_of(list_lengths(batch, place)[first_Q])


def longest_question(offsets_Q1: Int64[Tensor, "Q+1"], question_B: Int64[Tensor, "B"]) -> int:
    """Events and candidates of the question that has the most of them together, in host memory.

    Args:
        offsets_Q1: where histories begin.
        question_B: of each sample.
    """
    lengths_Q = offsets_Q1.diff() + torch.bincount(question_B, minlength=len(offsets_Q1) - 1)
    return int(lengths_Q.max()) if len(lengths_Q) else 0


def _equal_before(values_B: Tensor) -> Bool[Tensor, "B"]:
    """Mark the values that equal that of the sample before."""
    same_B = torch.zeros(len(values_B), dtype=torch.bool, device=values_B.device)
    same_B[1:] = values_B[1:] == values_B[:-1]
    return same_B


def as_before(values_N: Int64[Tensor, "N"], offsets_B1: Int64[Tensor, "B+1"]) -> Bool[Tensor, "B"]:
    """Mark the lists that equal that of the sample before.

    Args:
        values_N: of all lists.
        offsets_B1: where they begin.
    """
    lengths_B = offsets_B1.diff()
    same_B = _equal_before(lengths_B)
    samples_N = torch.arange(len(lengths_B), device=values_N.device).repeat_interleave(
        lengths_B, output_size=len(values_N)
    )
    before_N = (torch.arange(len(values_N), device=values_N.device) - lengths_B[samples_N]).clamp(min=0)
    # Compared only where lengths agree: other lists have no counterpart at that distance.
    differs_N = (values_N != values_N[before_N]) & same_B[samples_N]
    return same_B & (torch.zeros_like(lengths_B).index_add(0, samples_N, differs_N.long()) == 0)


def minute_buckets(
    times_N: Int64[Tensor, "N"], asked_N: Int64[Tensor, "N"], *, per_minute: int, num_buckets: int
) -> Int64[Tensor, "N"]:
    """⌊√minutes⌋ between events and the question, the last bucket for all that is longer; 0 for what lies behind it.

    Args:
        times_N: when events happened.
        asked_N: when the question of each was asked.
        per_minute: units of the times in a minute.
        num_buckets: how many there are.
    """
    minutes_N: Float[Tensor, "N"] = (asked_N - times_N).clamp(min=0).double() / per_minute
    return minutes_N.sqrt().long().clamp(max=num_buckets - 1)
