"""Thinned questions: all candidates of a question lose the same events of its history, whoever computes them.

    sample    0        1        2          question  0           1        draw   0: e_1, e_3      1: all
    history   [e1 e2 e3 e4]     [f1 f2] ──►  samples 0 and 1     sample 2
                                           history   [e1 e3]     [f1 f2]
                                           places    [0  2]      [0  1]   lengths  4, 2

What remains is drawn by the question, not by one of its samples: by when it is asked and by the items of its history.
So a batch that is cut inside a question, by ranks or by pieces, thins both parts alike, and a history that a batch
keeps once for many samples (`Batch.repeated`) is still kept once. Positions are those of the whole history.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from ziggurat.features.batch import Batch, JaggedRows, RepeatedRows
from ziggurat.features.events import HISTORY_LENGTHS, HISTORY_PLACES, HISTORY_TIMES
from ziggurat.models.contract.step_draw import StepDraw
from ziggurat.models.sequence.next_item_inputs import question_times
from ziggurat.models.sequence.next_item_pieces import moments_of, moments_of_rows
from ziggurat.models.sequence.stochastic_length import thinned_rows


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptEvents:
    """Events that remain of the histories of questions.

    Args:
        events: of all histories, one after the other.
        offsets: where each history begins.
    """

    events: Bool[Tensor, "N"]
    offsets: Int64[Tensor, "Q+1"]

    def of(self, rows: JaggedRows, question_U: Int64[Tensor, "U"]) -> JaggedRows:
        """Return the remaining rows of lists that have a row for each event of their question's history.

        Args:
            rows: U lists.
            question_U: whose each list is.
        """
        lengths_U = rows.offsets.diff()
        total = len(rows.values)
        moved_U = self.offsets[:-1][question_U] - rows.offsets[:-1]
        kept_N = self.events[torch.arange(total) + moved_U.repeat_interleave(lengths_U, output_size=total)]
        before_N1 = torch.cat([kept_N.new_zeros(1, dtype=torch.int64), kept_N.cumsum(0)])
        return JaggedRows(rows.values[kept_N], before_N1[rows.offsets])


def shortened_questions(
    batch: Batch,
    *,
    lists: Sequence[int],
    questions: tuple[Int64[Tensor, "Q"], Int64[Tensor, "B"]],
    draw: StepDraw,
    alpha: float,
    longest: int,
) -> Batch:
    """A batch whose histories lack some events, each question's as `stochastic_length.py` says.

    Args:
        batch: candidates, in host memory.
        lists: positions in `InputSpec.jagged` of what each event of a history has; first its item.
        questions: the first sample of each question, and the question of each sample (`questions_of`).
        draw: of the step.
        alpha: α.
        longest: N.
    """
    first_Q, question_B = questions
    asked = batch.take(first_Q).expanded()
    times = moments_of(batch, HISTORY_TIMES)
    offsets_Q1 = moments_of(asked, HISTORY_TIMES).offsets
    keys_Q = question_keys(asked.lists(lists[0])[0], question_times(asked, offsets_Q1)[1])
    events_N = thinned_rows(offsets_Q1, keys_Q, draw=draw, alpha=alpha, longest=longest)
    kept = KeptEvents(events=events_N, offsets=offsets_Q1)
    lengths_B = times.offsets.diff()
    places_N = torch.arange(len(times.values)) - times.offsets[:-1].repeat_interleave(lengths_B)
    moments = {HISTORY_TIMES: times, HISTORY_PLACES: JaggedRows(places_N, times.offsets)}
    return replace(
        batch,
        jagged=_plain_lists(batch, lists=lists, kept=kept, question_B=question_B),
        repeated=tuple(_slices(group, lists=lists, kept=kept, question_B=question_B) for group in batch.repeated),
        sequences=batch.sequences
        | {name: moments_of_rows(kept.of(rows, question_B)) for name, rows in moments.items()},
        extras=batch.extras | {HISTORY_LENGTHS: lengths_B},
    )


def question_keys(rows: JaggedRows, asked_Q: Int64[Tensor, "Q"]) -> Int64[Tensor, "Q"]:
    """A number of 32 bits for each question, by its history's items and the time that it is asked at.

    Args:
        rows: the items of each history.
        asked_Q: when it is asked.
    """
    histories = rows.values.numpy()
    begins = rows.offsets.tolist()
    asked = (asked_Q & 0xFFFFFFFF).tolist()
    # A hash that is the same in every process, as Python's own is not.
    keys = [zlib.crc32(histories[begins[at] : begins[at + 1]].tobytes(), when) for at, when in enumerate(asked)]
    return torch.tensor(keys, dtype=torch.int64)


def _plain_lists(batch: Batch, *, lists: Sequence[int], kept: KeptEvents, question_B: Int64[Tensor, "B"]) -> JaggedRows:
    """The lists of a batch of which there is one a sample."""
    if not batch.batch_size:
        return batch.jagged
    gone = {at for group in batch.repeated for at in group.features.jagged}
    count = (len(batch.jagged.offsets) - 1) // batch.batch_size + len(gone)
    parts = [(at, batch.lists(at)[0]) for at in range(count) if at not in gone]
    return JaggedRows.joined([kept.of(rows, question_B) if at in lists else rows for at, rows in parts])


def _slices(
    group: RepeatedRows, *, lists: Sequence[int], kept: KeptEvents, question_B: Int64[Tensor, "B"]
) -> RepeatedRows:
    """Features that repeat together: a slice of several questions becomes one of each, which may be thinned apart."""
    if not set(lists) & set(group.features.jagged):
        return group
    slices = max(1, group.num_slices)
    # Question and slice as one number: each pair that occurs becomes a slice.
    codes_U, inverse_B = torch.unique(question_B * slices + group.inverse, return_inverse=True)
    slice_U = codes_U % slices
    question_U = codes_U // slices
    parts = [(at, group.lists(at).take(slice_U, batch_size=group.num_slices)) for at in group.features.jagged]
    jagged = [kept.of(rows, question_U) if at in lists else rows for at, rows in parts]
    return replace(group, single=group.single[:, slice_U], jagged=JaggedRows.joined(jagged), inverse=inverse_B)
