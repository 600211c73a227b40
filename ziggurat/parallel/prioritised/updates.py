"""Updates in two halves: rows that the next batch reads now, all others when their gradients have come.

A row belongs to one half, with every gradient that it has: the sum over its lookups is made by the same kernel, in the
same order, and the rule is applied once, with the rate and the number of the step that it belongs to. The first half
needs only gradients of the first round: a cell that reads such a row was sent there. The second half needs both, since
a cell may hold rows of both kinds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ziggurat.ops.lookup import GradientPart, Lookups
from ziggurat.parallel.prioritised.collisions import RowMarks, part_of_rows
from ziggurat.parallel.prioritised.hop import CellExchange, GradientRounds
from ziggurat.parallel.tables.ids import LocalIds
from ziggurat.parallel.tables.sharded_tables import ShardedTables

_Parts = list[list[GradientPart]]  # by storage


@dataclass(frozen=True)
class Due:
    """Gradients of a backward pass that have not come yet.

    Args:
        rounds: under way.
        ids: the rows that they belong to.
        before: parts that were recorded before the backward pass came here, by table group and storage.
    """

    rounds: GradientRounds
    ids: LocalIds
    before: list[list[int]]


@dataclass
class Later:
    """The second half of an update.

    Args:
        due: its gradients.
        gradient: what has come of them.
        parts: what is to be applied, by table group and storage; the gradient of pooled lookups is still to be set.
        then: applies what is recorded.
    """

    due: Due
    gradient: Float[Tensor, "R C"]
    parts: list[_Parts]
    then: Callable[[], None]

    def finish(self, hop: CellExchange, tables: ShardedTables) -> None:
        """Wait for the second round, and update."""
        hop.receive_rest(self.due.rounds, self.gradient)
        whole = _pooled_parts(self.due, self.gradient, tables)
        for each, kept, pooled, before in zip(tables.local, self.parts, whole, self.due.before, strict=False):
            for recorded, parts, part, place in zip(each.recorded, kept, pooled, before, strict=True):
                assert not recorded, "an update between two halves of another"
                recorded += parts
                if part is not None:
                    recorded[place] = dataclasses.replace(parts[place], grad=part.grad)
        self.then()


@torch.no_grad()
def land(due: Due, *, hop: CellExchange, tables: ShardedTables) -> None:
    """Wait for all gradients, and record them where the plain hop would have."""
    gradient_RC = hop.receive_first(due.rounds)
    if not due.rounds.is_whole:
        hop.receive_rest(due.rounds, gradient_RC)
    _record(due, gradient_RC, tables)


@torch.no_grad()
def split(
    due: Due,
    *,
    hop: CellExchange,
    tables: ShardedTables,
    marks: Sequence[RowMarks],
    then: Callable[[], None],
) -> Later:
    """Wait for the first round, record what belongs to marked rows, and keep the rest.

    Args:
        due: gradients in two rounds.
        hop: that they travel by.
        tables: to be updated.
        marks: rows that the next batch reads, by table group.
        then: applies what is recorded later.
    """
    gradient_RC = hop.receive_first(due.rounds)
    _record(due, gradient_RC, tables)
    later: list[_Parts] = []
    for each, mine in zip(tables.local[:2], marks, strict=True):
        later.append([])
        for storage, recorded in enumerate(each.recorded):
            marked = mine.storage(storage)
            later[-1].append([part_of_rows(part, lambda rows, m=marked: ~m[rows]) for part in recorded])
            recorded[:] = [part_of_rows(part, lambda rows, m=marked: m[rows]) for part in recorded]
    return Later(due, gradient_RC, later, then)


def _record(due: Due, gradient_RC: Tensor, tables: ShardedTables) -> None:
    for each, pooled, before in zip(tables.local, _pooled_parts(due, gradient_RC, tables), due.before, strict=False):
        for recorded, part, place in zip(each.recorded, pooled, before, strict=True):
            if part is not None:
                recorded.insert(place, part)


def _pooled_parts(due: Due, gradient_RC: Tensor, tables: ShardedTables) -> list[list[GradientPart | None]]:
    """What the backward pass of the plain lookup would record, by table group and storage."""
    found, first = [], 0
    for each, group, batch in zip(tables.local, tables.mine.exchanged.groups, due.ids.batches, strict=False):
        columns = gradient_RC[:, first : first + group.num_columns]
        first += group.num_columns
        found.append(each.parts_of(columns, Lookups.of(batch), each.layouts))
    return found
