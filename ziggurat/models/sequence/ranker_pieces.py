"""Pieces of questions: context, history and candidates of a ranker's question as one sequence, cut at any event.

    question   [ c │ e_1 e_2 e_3 e_4 │ k_1 k_2 ]       samples  k_1, k_2
    chunks       c   e_1 │ e_2 e_3 │ e_4 k_1 │ k_2
    pieces     rank 0:  (c e_1) a sample without label, which carries e_1     (k_2) the sample k_2
               rank 1:  (e_2 e_3) likewise                                    (e_4 k_1) the sample k_1, with e_4

The samples of a piece are its candidates; one without candidates has a sample that asks nothing (its labels are
missing) and carries the piece's events. Only the first sample of a piece has events, so nothing is looked up twice.
What a piece cannot know by itself travels with it (`QuestionPiece`): when the question is asked, what stands behind the
piece, and how much of what the whole has. Candidates see context, history and themselves, wherever they are, so their
scores, and the losses of all pieces together, are those of whole questions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ziggurat.features.batch import Batch, JaggedRows
from ziggurat.features.events import (
    ASKED_AT,
    HISTORY_LENGTHS,
    HISTORY_PLACES,
    HISTORY_TIMES,
    PIECE_HOMES,
    PIECE_LENGTHS,
    PIECE_SETS,
    PIECE_STARTS,
)
from ziggurat.features.inputs import InputSpec
from ziggurat.features.jagged import moments_group, offsets_of
from ziggurat.models.sequence.cut import Chunks, Cutting
from ziggurat.models.sequence.next_item_inputs import question_times
from ziggurat.models.sequence.next_item_pieces import (
    cut_rows,
    lists_by_name,
    moments_of,
    moments_of_rows,
    places_and_lengths,
    positions_of,
)
from ziggurat.models.sequence.ranker_inputs import questions_of

_FACTS = "piece_facts"
# What a ranker reads of pieces; see `QuestionPiece`. CANDIDATES: the samples that are.
CANDIDATES, NUM_CONTEXT, NUM_TARGETS, BEGAN, FOLLOWING = (
    "candidates",
    "num_context",
    "num_targets",
    "began",
    "following",
)


class QuestionPiece(NamedTuple):
    """Facts that the sample of a piece carries about the piece, one number each.

    Args:
        is_first: whether the sample is the first one of its piece.
        is_candidate: whether it is a candidate of the question.
        num_context: context rows of the piece.
        num_targets: candidates of the whole question.
        began_at: time of the context: that of the first event.
        following_at: time of the event behind the piece; read where one of the history is there.
    """

    is_first: Tensor
    is_candidate: Tensor
    num_context: Tensor
    num_targets: Tensor
    began_at: Tensor
    following_at: Tensor


def questions_or_pieces(
    batch: Batch, *, lists: list[int], single: list[int]
) -> tuple[Int64[Tensor, "Q"], Int64[Tensor, "B"], dict[str, Tensor]]:
    """The first sample of each question or piece, the one of each sample, and what only pieces of questions know.

    Args:
        batch: of questions or pieces.
        lists: positions in `InputSpec.jagged` of what a question has.
        single: positions in `InputSpec.single` of its context.
    """
    if _FACTS not in batch.extras:
        return *questions_of(batch, lists=lists, single=single), {}
    facts = QuestionPiece(*batch.extras[_FACTS].unbind(dim=1))
    first_Q = facts.is_first.nonzero().squeeze(1)
    of_pieces = {NUM_CONTEXT: facts.num_context, NUM_TARGETS: facts.num_targets}
    of_pieces |= {BEGAN: facts.began_at, FOLLOWING: facts.following_at}
    named = {name: value[first_Q] for name, value in of_pieces.items()}
    # `is_first` counted up gives each sample the number of its piece.
    return first_Q, facts.is_first.cumsum(0) - 1, named | {CANDIDATES: facts.is_candidate.nonzero().squeeze(1)}


@dataclass(frozen=True, kw_only=True, eq=False)
class Questions:
    """The questions of a batch, each history once.

    Args:
        batch: all samples, without repeated features.
        first: the first sample of each question; those of a question are neighbours.
        counts: candidates of each.
        lists: of each question, by name, thinned or not.
        times: of their events.
        places: where each event stood in the whole history.
        wholes: events of the whole histories.
        asked: when each is asked.
        num_context: context rows before each history.
    """

    batch: Batch
    first: Int64[Tensor, "Q"]
    counts: Int64[Tensor, "Q"]
    lists: dict[str, JaggedRows]
    times: JaggedRows
    places: JaggedRows
    wholes: Int64[Tensor, "Q"]
    asked: Int64[Tensor, "Q"]
    num_context: int


def cut_questions(questions: Questions, inputs: InputSpec) -> Cutting:
    """The sequences of questions, and how they are cut.

    Args:
        questions: of a batch.
        inputs: of the model.
    """
    # A sequence has context, events and candidates, in this order; it is cut as a whole.
    lengths_Q = questions.times.offsets.diff() + questions.counts + questions.num_context

    def pieces(chunks: Chunks) -> Batch:
        return _pieces(questions, inputs, chunks)

    return Cutting(lengths=lengths_Q, pieces=pieces)


def questions_to_cut(batch: Batch, inputs: InputSpec, *, first_Q: Int64[Tensor, "Q"], num_context: int) -> Questions:
    """The questions of a batch as pieces are made of them.

    Args:
        batch: whole samples, thinned or not.
        inputs: of the model.
        first_Q: the first sample of each question.
        num_context: context rows before each history.
    """
    asked = batch.take(first_Q).expanded()
    times = moments_of(asked, HISTORY_TIMES)
    named = places_and_lengths(asked)
    total = len(times.values)
    places_N = positions_of(times.offsets, named, total=total, from_start=True)
    # The slice is for a batch without questions, which has no end either.
    ends_Q = torch.cat([first_Q[1:], first_Q.new_tensor([batch.batch_size])])[: len(first_Q)]
    return Questions(
        batch=batch.expanded(),
        first=first_Q,
        counts=ends_Q - first_Q,
        lists=lists_by_name(asked, inputs),
        times=times,
        places=JaggedRows(places_N, times.offsets),
        wholes=named.get(HISTORY_LENGTHS, times.offsets.diff()),
        asked=question_times(asked, times.offsets)[1],
        num_context=num_context,
    )


def _pieces(whole: Questions, inputs: InputSpec, chunks: Chunks) -> Batch:
    """The pieces [start, start + count) of the sequences of questions, piece after piece; see the file's drawing."""
    num_sets, num_questions = chunks.starts.shape
    # Set after set, each with all questions: piece p belongs to question p mod Q.
    of_piece = torch.arange(num_questions).repeat(num_sets)
    starts = chunks.starts.reshape(-1)
    ends = (chunks.starts + chunks.counts).reshape(-1)
    histories_Q = whole.times.offsets.diff()
    context = whole.num_context
    behind = (context + histories_Q)[of_piece]  # where candidates begin
    # From positions in the sequence to events: context lies in front.
    from_event, to_event = ((each - context).clamp(min=0).minimum(histories_Q[of_piece]) for each in (starts, ends))
    from_candidate, to_candidate = ((each - behind).clamp(min=0) for each in (starts, ends))
    candidates = to_candidate - from_candidate
    # The samples: candidates, or the one that carries the events of a piece that has none.
    sizes = candidates.clamp(min=1)
    piece = torch.arange(len(sizes)).repeat_interleave(sizes)
    inside = torch.arange(len(piece)) - offsets_of(sizes)[:-1][piece]
    is_candidate = candidates[piece] > 0
    question = of_piece[piece]
    samples = whole.first[question] + torch.where(is_candidate, from_candidate[piece] + inside, 0)
    batch = whole.batch
    # The first sample of a piece carries its events, the others none.
    counts = (to_event - from_event)[piece] * (inside == 0)

    def cut(rows: JaggedRows) -> JaggedRows:
        return cut_rows(rows, question, from_event[piece], counts)

    # How much of the context lies in the piece.
    in_context = [each.clamp(max=context) for each in (starts, ends)]
    facts = QuestionPiece(
        is_first=inside == 0,
        is_candidate=is_candidate,
        num_context=(in_context[1] - in_context[0])[piece],
        num_targets=whole.counts[question],
        began_at=began_at(whole.times.values, whole.asked, whole.times.offsets)[question],
        following_at=_behind(whole.times, to_event, of_piece)[piece],
    )
    extras = {
        PIECE_STARTS: starts[piece],
        PIECE_LENGTHS: (behind + whole.counts[of_piece])[piece],
        PIECE_SETS: piece // max(1, num_questions),
        PIECE_HOMES: torch.where(is_candidate, samples, -1),
        HISTORY_LENGTHS: whole.wholes[question],
        _FACTS: torch.stack([each.to(torch.int64) for each in facts], dim=1),
    }
    moments = {HISTORY_TIMES: whole.times, HISTORY_PLACES: whole.places}
    sequences = {name: moments_of_rows(cut(rows)) for name, rows in moments.items()}
    sequences[ASKED_AT] = moments_group(whole.asked[question], torch.arange(len(piece) + 1))
    return Batch(
        dense=batch.dense[samples],
        single=batch.single[:, samples],
        jagged=JaggedRows.joined([cut(whole.lists[spec.name]) for spec in inputs.jagged]),
        vectors={name: value[samples] for name, value in batch.vectors.items()},
        sequences=sequences,
        # A sample that carries events alone has no label, and so no loss.
        labels=torch.where(is_candidate.unsqueeze(1), batch.labels[samples], torch.nan),
        weights=None if batch.weights is None else batch.weights[samples],
        groups=None if batch.groups is None else batch.groups[samples],
        row_ids=batch.row_ids[samples],
        extras={name: value[samples] for name, value in batch.extras.items()} | extras,
    )


def context_rows(context_QCD: Float[Tensor, "Q C D"], named: dict[str, Tensor]) -> Float[Tensor, "X D"]:
    """The context rows of each question, or of each piece those that lie in it.

    Args:
        context_QCD: of the question.
        named: what the dense network reads beside features.
    """
    rows_XD = context_QCD.flatten(0, 1)
    if NUM_CONTEXT not in named:
        return rows_XD
    at_C = torch.arange(context_QCD.shape[1], device=rows_XD.device)
    begin_Q1 = named[PIECE_STARTS].unsqueeze(1)
    inside_QC = (at_C >= begin_Q1) & (at_C < begin_Q1 + named[NUM_CONTEXT].unsqueeze(1))
    return rows_XD[inside_QC.flatten()]


def began_at(
    times_N: Int64[Tensor, "N"], asked_Q: Int64[Tensor, "Q"], offsets_Q1: Int64[Tensor, "Q+1"]
) -> Int64[Tensor, "Q"]:
    """Return the time of each question's context: its first event's time, or the question's if it has no event.

    Args:
        times_N: of the events.
        asked_Q: of the questions.
        offsets_Q1: where histories begin.
    """
    filled_Q = offsets_Q1.diff() > 0
    firsts_Q = offsets_Q1[:-1]
    first_times_Q = torch.cat([times_N, times_N.new_zeros(1)])[firsts_Q]  # an empty history may begin behind all
    return torch.where(filled_Q, first_times_Q, asked_Q)


def _behind(times: JaggedRows, places: Tensor, lists: Tensor) -> Tensor:
    """The time at a place of each list; 0 where the list ends before it, which nobody reads."""
    is_there = places < times.offsets.diff()[lists]
    # The zero behind all times stands for what is not there.
    at = torch.where(is_there, times.offsets[:-1][lists] + places, len(times.values))
    return torch.cat([times.values, times.values.new_zeros(1)])[at]
