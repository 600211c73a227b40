"""What a next-item model reads of a batch that was made of events: answers, times, the ends of histories."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ziggurat.errors import DataError, SchemaError
from ziggurat.features.batch import Batch
from ziggurat.features.events import ASKED_AT, HISTORY, HISTORY_TIMES, NEXT_ITEM
from ziggurat.features.inputs import InputSpec
from ziggurat.features.items import Items
from ziggurat.features.jagged import MOMENT


def check_event_inputs(inputs: InputSpec) -> Items:
    """The items of inputs that were made of events without labels: what comes next is asked.

    Raises:
        SchemaError: they were not.
    """
    missing = missing_of_events(inputs)
    missing += [] if NEXT_ITEM in {label.name for label in inputs.labels} else [f"{NEXT_ITEM} among the labels"]
    if inputs.items is not None and not missing:
        return inputs.items
    raise SchemaError(
        expected="data that was made of events, which have a history, times and the item that came next",
        found=f"no {', no '.join(missing or ['items'])}",
        where="inputs of model next_item",
        ways_out=(
            "add [events] to the schema of an event log, without labels: see docs/guides/long-histories.md",
            "take a model of samples: two_tower finds items, din reads a history; sequence_ranker ranks candidates",
        ),
    )


def missing_of_events(inputs: InputSpec) -> list[str]:
    """Return the lists and times of events that the inputs lack."""
    lists = {spec.name for spec in inputs.jagged}
    moments = {spec.name for spec in inputs.moments}
    missing = [name for name in (HISTORY,) if name not in lists]
    missing += [name for name in (HISTORY_TIMES, ASKED_AT) if name not in moments]
    return missing


def check_one_history(batch: Batch, places: Mapping[str, int]) -> None:
    """Refuse lists of a history that differ in length; looks at the copy on the host where there is one.

    Args:
        batch: samples.
        places: of the lists, by name, in `InputSpec.jagged`.

    Raises:
        DataError: they do; names the sample.
    """
    if not batch.batch_size:
        return
    batch = batch.on_host or batch
    found = {name: list_lengths(batch, place) for name, place in places.items()}
    first, expected_B = next(iter(found.items()))
    for name, lengths_B in found.items():
        if not torch.equal(lengths_B, expected_B):
            sample = int((lengths_B != expected_B).nonzero()[0])
            raise DataError(
                expected=f"as many rows in {name!r} as in {first!r}: both describe the same events",
                found=f"{int(lengths_B[sample])} and {int(expected_B[sample])}",
                where=f"sample {sample} of a batch",
                ways_out="give all lists of a history one length, with nulls where something is not known",
            )


def list_lengths(batch: Batch, place: int) -> Int64[Tensor, "B"]:
    """Return the length of each sample's list at a place of `InputSpec.jagged`."""
    lists, inverse_B = batch.lists(place)
    lengths_B = lists.offsets.diff()
    return lengths_B if inverse_B is None else lengths_B[inverse_B]


def last_of_each(values_ND: Float[Tensor, "N D"], offsets_B1: Int64[Tensor, "B+1"]) -> Float[Tensor, "B D"]:
    """The last row of each list; zeros for an empty one."""
    # Row 0 is zeros: an empty list points there.
    behind_zeros = torch.cat([values_ND.new_zeros(1, *values_ND.shape[1:]), values_ND])
    return behind_zeros[torch.where(offsets_B1.diff() > 0, offsets_B1[1:], 0)]


def answers_of(values: Tensor, targets: Tensor, offsets_B1: Int64[Tensor, "B+1"]) -> Tensor:
    """Return what comes after each event: the next of its history, after the last one the target.

    Args:
        values: (N, …) of the events.
        targets: (B, …) of what comes after each history.
        offsets_B1: where histories begin.
    """
    shifted = torch.cat([values[1:], values[-1:], values.new_zeros(1, *values.shape[1:])])
    places_B = torch.where(offsets_B1.diff() > 0, offsets_B1[1:] - 1, len(values))  # of empty histories: cut off again
    return shifted.index_copy(0, places_B, targets)[:-1]


def question_times(
    batch: Batch,
    offsets_B1: Int64[Tensor, "B+1"],
    *,
    times: str = HISTORY_TIMES,
    asked_at: str = ASKED_AT,
    on_host: Int64[Tensor, "B+1"] | None = None,
) -> tuple[Int64[Tensor, "N"], Int64[Tensor, "B"]]:
    """Return times of events, and when what comes next is asked for: if nobody says so, at the last event's time.

    Args:
        batch: with the moments of its histories.
        offsets_B1: where histories begin.
        times: name of the moments of events.
        asked_at: name of the moments of questions, one a sample; "" for none.
        on_host: `offsets_B1` in the copy on the host, where the batch has one: that is checked, and no GPU is asked.

    Raises:
        DataError: not one time an event.
    """
    kept = batch if on_host is None else batch.on_host or batch
    expected_B1 = offsets_B1 if on_host is None else on_host
    found_B1 = kept.sequences[times].expanded().offsets
    if not torch.equal(found_B1, expected_B1):
        raise DataError(
            expected="a time for each event of a history",
            found=f"{int(expected_B1[-1]):,} events and {int(found_B1[-1]):,} times, or other lengths",
            where=f"{times} of a batch",
            ways_out=("give the events and their times one length", "make samples of events: [events] in the schema"),
        )
    times_N = batch.sequences[times].expanded().values[MOMENT]
    last_B = last_of_each(times_N, offsets_B1)
    if asked_at:
        asked = batch.sequences[asked_at].expanded()
        first_B = nn.functional.pad(asked.values[MOMENT], (0, 1))[asked.offsets[:-1]]
        last_B = torch.where(asked.offsets.diff() > 0, first_B, last_B)
    return times_N, last_B
