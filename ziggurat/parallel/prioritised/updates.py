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

from ziggurat.ops.lookup import GradientPart, LookupLayout, Lookups
from ziggurat.parallel.prioritised.collisions import RowMarks, part_of_rows
from ziggurat.parallel.prioritised.hop import CellExchange, GradientRounds
from ziggurat.parallel.tables.ids import LocalIds
from ziggurat.parallel.tables.sharded_tables import ShardedTables

_Parts = list[list[GradientPart]]  # by storage


@dataclass(frozen=True)
class DueLookup:
    """One lookup whose gradient has not come yet.

    Args:
        group: of tables.
        columns: of the gradient.
        lookups: rows that were read.
        layouts: how.
    """

    group: int
    columns: slice
    lookups: Lookups
    layouts: Sequence[LookupLayout]


@dataclass(frozen=True)
class Due:
    """Gradients of a backward pass that have not come yet, of one hop.

    Args:
        hop: that they travel by.
        rounds: under way.
        lookups: that they belong to, at most one a table group.
        before: parts that were recorded before the backward pass came here, by table group and storage.
    """

    hop: CellExchange
    rounds: GradientRounds
    lookups: list[DueLookup]
    before: list[list[int]]

    def parts(self, gradient_RC: Tensor, tables: ShardedTables) -> list[list[GradientPart | None]]:
        """Return the parts that the backward pass of the plain lookup would record, by table group and storage."""
        found: list[list[GradientPart | None]] = [[None] * len(each.recorded) for each in tables.local[:2]]
        for each in self.lookups:
            columns = gradient_RC[:, each.columns]
            found[each.group] = tables.local[each.group].parts_of(columns, each.lookups, each.layouts)
        return found


@dataclass
class Later:
    """The second half of an update.

    Args:
        due: its gradients.
        gradients: what has come of each.
        parts: what is to be applied, by table group and storage; gradients that are due are still to be set.
        places: where the parts of each of `due` are among them, by table group and storage.
        then: applies what is recorded.
    """

    due: list[Due]
    gradients: list[Float[Tensor, "R C"]]
    parts: list[_Parts]
    places: list[list[list[int]]]
    then: Callable[[], None]

    def send_rest(self) -> None:
        """Send the second rounds."""
        for each in self.due:
            each.hop.send_rest(each.rounds)

    def finish(self, tables: ShardedTables) -> None:
        """Wait for the second rounds, and update."""
        self.send_rest()
        # Shorter than `local`, whose last group, the copies, takes no part in an exchange.
        for each, kept in zip(tables.local, self.parts, strict=False):
            for recorded, parts in zip(each.recorded, kept, strict=True):
                # The second half has to be applied alone, before another backward pass records.
                assert not recorded, "an update between two halves of another"
                recorded += parts
        for due, gradient, places in zip(self.due, self.gradients, self.places, strict=True):
            due.hop.receive_rest(due.rounds, gradient)
            for each, parts, at in zip(tables.local, due.parts(gradient, tables), places, strict=False):
                for recorded, part, place in zip(each.recorded, parts, at, strict=True):
                    if part is not None:
                        # Only now all of its gradient is there: cells of the first round, and those of the second.
                        recorded[place] = dataclasses.replace(recorded[place], grad=part.grad)
        self.then()


def pooled_lookups(ids: LocalIds, tables: ShardedTables) -> list[DueLookup]:
    """Return the lookups that `ShardedTables.lookup` makes for the samples of all ranks."""
    found = []
    first = 0
    groups = zip(tables.local, tables.mine.exchanged.groups, ids.batches, strict=False)
    for index, (each, group, batch) in enumerate(groups):
        columns = slice(first, first + group.num_columns)
        first += group.num_columns
        found.append(DueLookup(index, columns, Lookups.of(batch), each.layouts))
    return found


@torch.no_grad()
def land(due: Sequence[Due], *, tables: ShardedTables) -> None:
    """Wait for all gradients, and record them where the plain hop would have."""
    gradients = []
    for each in due:
        gradients.append(each.hop.receive_first(each.rounds))
        if not each.rounds.is_whole:
            each.hop.receive_rest(each.rounds, gradients[-1])
    _record(due, gradients, tables)


@torch.no_grad()
def split(
    due: list[Due], *, tables: ShardedTables, marks: Sequence[RowMarks], number: int, then: Callable[[], None]
) -> Later:
    """Wait for the first rounds, record what belongs to marked rows, and keep the rest.

    Args:
        due: gradients in two rounds.
        tables: to be updated.
        marks: rows that the next batch reads, by table group.
        number: of the step.
        then: applies what is recorded later.
    """
    gradients = [each.hop.receive_first(each.rounds) for each in due]
    places = _record(due, gradients, tables)
    later: list[_Parts] = []
    for each, mine in zip(tables.local[:2], marks, strict=True):
        later.append([])
        for storage, recorded in enumerate(each.recorded):
            # Before the rows are cut in two: a cache decides for both halves at once which rows leave.
            each.tables.storage(storage).begin_update(each.kernel, parts=recorded, number=number)
            marked = mine.storage(storage)
            # `m=marked` binds the marks of this storage: a closure would see those of the last one.
            later[-1].append([part_of_rows(part, lambda rows, m=marked: ~m[rows]) for part in recorded])
            # In place: the tables' own list, which the update reads.
            recorded[:] = [part_of_rows(part, lambda rows, m=marked: m[rows]) for part in recorded]
    return Later(due, gradients, later, places, then)


def _record(due: Sequence[Due], gradients: Sequence[Tensor], tables: ShardedTables) -> list[list[list[int]]]:
    """Record parts in the order of the backward pass; where they are, by `due`, table group and storage."""
    placed = []
    # `before` counts what was there before any of these: each that is put in moves the later ones on.
    shift = [[0] * len(each.recorded) for each in tables.local[:2]]
    for one, gradient_RC in zip(due, gradients, strict=True):
        places = [
            [first + more for first, more in zip(*both, strict=True)] for both in zip(one.before, shift, strict=True)
        ]
        placed.append(places)
        for group, parts in enumerate(one.parts(gradient_RC, tables)):
            for storage, part in enumerate(parts):
                if part is not None:
                    tables.local[group].recorded[storage].insert(places[group][storage], part)
                    shift[group][storage] += 1
    return placed
