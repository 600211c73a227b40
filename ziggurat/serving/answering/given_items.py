"""Items that a request names, by id or by their columns, with their scores and values.

ids     ──► numbers in the catalogue ──► pairs of encoded user and item ─┬─► ranker ──────────────► tasks ─┐
columns ──► whole rows, as `predict` reads them ─────────────────────────┘                                 ├─► value
both    ──► vectors of user and item, where the formula names `retrieval` or `over_arch` ──► their scores ──┘
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float32, Float64, Int64
from torch import Tensor

from ziggurat.serving.answering.chain import OVER_ARCH, RETRIEVAL, Chain, Question
from ziggurat.serving.answering.unknown_of_rows import UnknownOfRow
from ziggurat.serving.request_rows import number_of, placed_in_request


@dataclass(frozen=True, kw_only=True)
class GivenItems:
    """The items of one request.

    Args:
        size: how many.
        numbers: in the catalogue, of those that were given by id.
        rows: columns of the others, by their place in the request; what a request leaves out of an item that the
            catalogue has is as it stands there.
    """

    size: int
    numbers: Int64[Tensor, "n"]
    rows: Mapping[int, Mapping[str, object]]

    def in_order(self, known: Tensor, new: Tensor) -> Tensor:
        """Merge the results of both kinds of items, in the order of the request."""
        if not self.rows:
            return known
        # Where nothing is of one kind, its empty scores are FP32; those of a label that is a number are FP64.
        dtype = torch.promote_types(known.dtype, new.dtype)
        found = torch.empty(self.size, *new.shape[1:], dtype=dtype)
        found[[place for place in range(self.size) if place not in self.rows]] = known.to(dtype)
        found[list(self.rows)] = new.to(dtype)
        return found


@dataclass(frozen=True, kw_only=True)
class GivenScores:
    """The results computed for the items of one request, in its order.

    Args:
        tasks: scores of the ranker.
        values: what they are ordered by.
        retrieval: inner products of user and item, or None where the formula does not name them.
        over_arch: scores of the OverArch, or None where the formula does not name them.
        unknown: what training did not know of the items that were given by their columns.
    """

    tasks: Float32[Tensor, "n L"]
    values: Float64[Tensor, "n"]
    retrieval: Float32[Tensor, "n"] | None = None
    over_arch: Float32[Tensor, "n"] | None = None
    unknown: tuple[UnknownOfRow, ...] = ()


_Pair = tuple[Tensor, Tensor]  # of the items given by id, and of those given by columns
_Pairs = dict[str, _Pair]


def score_given(chain: Chain, *, questions: Sequence[Question], given: Sequence[GivenItems]) -> list[GivenScores]:
    """Scores and values of the items of each request.

    Args:
        chain: with a ranker.
        questions: who asks.
        given: what each asks about.

    Raises:
        ZigguratError: one of them cannot be answered; nobody is then.
    """
    ranker = chain.needed_ranker
    none = torch.empty(0, len(chain.labels))
    known = [none] * len(given)
    if any(len(each.numbers) for each in given):
        known = chain.rank(questions, [each.numbers for each in given])
    whole = [{**who.row, **row} for who, each in zip(questions, given, strict=True) for row in each.rows.values()]
    sizes = [len(each.rows) for each in given]
    unknown = list[UnknownOfRow]()
    with placed_in_request(lambda row, column: _place(given, row, column)):
        new = (ranker.score_rows(whole, unknown=unknown) if whole else none).split(sizes)
    ends = list(itertools.accumulate(sizes))
    further = _further(chain, questions, given)
    tasks = list(zip(known, new, strict=True))
    values = _values(chain, given, tasks=tasks, further=further)
    return [
        GivenScores(
            tasks=each.in_order(*tasks[i]),
            values=each.in_order(*values[i]),
            retrieval=each.in_order(*further[i][RETRIEVAL]) if RETRIEVAL in further[i] else None,
            over_arch=each.in_order(*further[i][OVER_ARCH]) if OVER_ARCH in further[i] else None,
            unknown=tuple(unknown[ends[i] - sizes[i] : ends[i]]),
        )
        for i, each in enumerate(given)
    ]


def _place(given: Sequence[GivenItems], row: int, column: str) -> str:
    """Return the part of a request that a column of a row came from; rows are those of all requests together."""
    place, item = [pair for each in given for pair in each.rows.items()][row]
    return f"item {place} (counted from 0)" if column in item else "user"


def _values(
    chain: Chain, given: Sequence[GivenItems], *, tasks: Sequence[_Pair], further: Sequence[_Pairs]
) -> list[_Pair]:
    """Values of the items of all requests, from one evaluation of the formula for each kind of item."""
    of_ids, of_rows = (
        {name: torch.cat([each[name][kind] for each in further]) for name in further[0]} for kind in (0, 1)
    )
    known, new = (torch.cat([pair[kind] for pair in tasks]) for kind in (0, 1))
    found = chain.values(torch.cat([each.numbers for each in given]), known, of_ids)
    rows = [row for each in given for row in each.rows.values()]
    others = _values_of_rows(chain, rows, new, of_rows) if rows else found[:0]
    sizes = [[len(pair[kind]) for pair in tasks] for kind in (0, 1)]
    return list(zip(found.split(sizes[0]), others.split(sizes[1]), strict=True))


def _values_of_rows(
    chain: Chain, rows: Sequence[Mapping[str, object]], tasks: Tensor, further: Mapping[str, Tensor]
) -> Float64[Tensor, "n"]:
    """The value of items that were given by their columns."""
    scores = {name: tasks[:, index] for index, name in enumerate(chain.labels)}
    for name in chain.numbers:
        cells = [number_of(row.get(name), column=name) for row in rows]
        scores[name] = torch.tensor([math.nan if each is None else each for each in cells], dtype=torch.float64)
    return chain.value(scores | dict(further))


def _further(chain: Chain, questions: Sequence[Question], given: Sequence[GivenItems]) -> list[_Pairs]:
    """Compute what the formula names beside tasks: of each user with the items given by id, and those by columns."""
    assert chain.encoder is not None or not chain.value.names & {RETRIEVAL, OVER_ARCH}, "checked when it is loaded"
    tasks = () if chain.encoder is None else chain.encoder.tasks
    names = {RETRIEVAL, OVER_ARCH, *tasks} & set(chain.value.names)
    if not names or chain.encoder is None:
        return [{} for _ in given]
    index = chain.needed_index
    users_BVD = chain.task_vectors(questions)
    users = users_BVD.mean(dim=1)
    rows = [row for each in given for row in each.rows.values()]
    with placed_in_request(lambda row, column: _place(given, row, column)):
        vectors = chain.encoder.vectors_of_rows(rows) if rows else users[:0]
    new = vectors.split([len(each.rows) for each in given])
    found: list[_Pairs] = [{} for _ in given]
    for name in sorted(names - {OVER_ARCH}):
        of_name = users if name == RETRIEVAL else users_BVD[:, tasks.index(name)]
        for i, (user, each, mine) in enumerate(zip(of_name, given, new, strict=True)):
            found[i][name] = (index.vectors_of(each.numbers) @ user, mine @ user)
    if OVER_ARCH in names:
        assert chain.rescorer is not None, "checked when the export is loaded"
        known = chain.rescorer.scores(users, [each.numbers for each in given])
        unknown = chain.rescorer.scores_of_vectors(users, new)
        for i, pair in enumerate(zip(known, unknown, strict=True)):
            found[i][OVER_ARCH] = pair
    return found
