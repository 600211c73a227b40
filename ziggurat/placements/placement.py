"""Placement: how one table is spread over ranks, and everything that follows from it.

A table is a box of rows × columns; a placement cuts it into parts, one a rank. The rest of the package asks a placement

    how it cuts          `parts`, `owners`, `local_rows`             parallel/tables, checkpoints
    who may hold a part  `check_ranks`, `is_of_one_host`             plans
    what travels         `cuts_columns`, `cuts_rows`, `is_copied`,   lookups: rows there, vectors or partial sums back
                         `sums_in_host`
    what a step costs    `lookups_share`, `bytes_moved`              planning/costs
    where it might go    `device_sets`, `is_searched`                planning/search
    what TorchRec has    `torchrec`                                  bridges/torchrec

and never which placement it is. A placement knows nothing of process groups: it is data with arithmetic.

Every part lies on its rank as a smaller table, with a padding row of its own in front unless it begins with the table's
(row 0 of every table reads as zeros and is never updated).

Placements: Mudigere et al., "Software-hardware co-design for fast and scalable training of deep learning recommendation
models" (Neo and ZionEX), ISCA 2022, section 4.2.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ziggurat.errors import ConfigError, PlanError
from ziggurat.specification import Specification

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A box of a table.

    Args:
        first_row: of the table.
        num_rows: of the part.
        first_column: of the table.
        num_columns: of the part.
    """

    first_row: int
    num_rows: int
    first_column: int
    num_columns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """The ranks between which embeddings travel, as far as costs depend on them.

    Args:
        world_size: all ranks.
        group_size: ranks that take part in the hop behind the lookup.
        ranks_per_host: of that group.
        devices_per_host: of the cluster, at most the world.
    """

    world_size: int
    group_size: int
    ranks_per_host: int
    devices_per_host: int

    def to_all(self, num_bytes: float) -> tuple[float, float]:
        """Bytes inside the host and between hosts, of bytes that go to all ranks of the group evenly."""
        inside = num_bytes * (self.ranks_per_host - 1) / self.group_size
        between = num_bytes * (self.group_size - self.ranks_per_host) / self.group_size
        return inside, between

    def from_world(self, num_bytes: float) -> tuple[float, float]:
        """Bytes inside the host and between hosts, of bytes that come from all ranks of the job evenly."""
        inside = num_bytes * (self.devices_per_host - 1) / self.world_size
        between = num_bytes * (self.world_size - self.devices_per_host) / self.world_size
        return inside, between


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """Bytes of one part in a step, before they are dealt to links.

    Args:
        ids: of the rows that are asked for.
        pooled: of the numbers that the lookup sends on.
        copied: of gradients and row numbers that copies of the table exchange.
    """

    ids: float
    pooled: float
    copied: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Bytes that one part moves in a step: (inside its host, between hosts).

    Args:
        ids: that arrive.
        sent: pooled numbers that leave.
        gathered: gradients between copies.
    """

    ids: tuple[float, float] = (0.0, 0.0)
    sent: tuple[float, float] = (0.0, 0.0)
    gathered: tuple[float, float] = (0.0, 0.0)


class Placement(Specification, kind="placement"):
    """A way to spread one table over ranks. See the module's docstring.

    Attributes:
        cuts_columns: each rank holds some columns of all rows: every rank gets the same ids and answers with fewer
            columns.
        cuts_rows: each rank holds some rows with all their columns: ids are sorted by their owner, and partial sums of
            all owners add up to the pool.
        is_copied: each rank that looks the table up has all of it: no ids and no vectors travel, and gradients of rows
            that were read are summed over the copies.
        sums_in_host: partial sums are added up inside the host before they leave it.
        is_of_one_host: all parts have to lie on one host.
        fits_one_rank: it means something in a job of one rank.
        is_searched: the planner's search decides how many parts there are and where each goes; otherwise it picks one
            of `device_sets`.
        torchrec: TorchRec's generator of a sharding that does the same; "" where there is none.
    """

    cuts_columns: ClassVar[bool] = False
    cuts_rows: ClassVar[bool] = False
    is_copied: ClassVar[bool] = False
    sums_in_host: ClassVar[bool] = False
    is_of_one_host: ClassVar[bool] = False
    is_searched: ClassVar[bool] = False
    fits_one_rank: ClassVar[bool] = False
    torchrec: ClassVar[str] = ""

    @abstractmethod
    def parts(self, *, num_rows: int, num_columns: int, num_parts: int) -> tuple[Part, ...]:
        """Cut a table; parts in the order of the ranks that a plan names.

        Raises:
            PlanError: the table cannot be cut into that many parts.
        """

    def try_out(self) -> None:
        """Cut a small table into one to four parts, and look for the owner of each row."""
        import torch

        for num_parts in (1, 2, 4):
            sizes = {"num_rows": 37, "num_columns": 8}
            try:
                parts = tuple(self.parts(**sizes, num_parts=num_parts))
            except PlanError:
                continue  # it is not for so many ranks
            wanted = self.wrong_parts(parts, **sizes, num_parts=num_parts)
            where = f"placement {self}, {type(self).__module__}.{type(self).__qualname__}"
            if wanted:
                raise ConfigError(
                    expected=wanted,
                    found=f"{parts!r}, of 37 rows and 8 columns",
                    where=f"{where}.parts",
                    ways_out="mend it; cuts_rows and cuts_columns say which of these it has to be",
                )
            if not self.cuts_rows:
                continue
            rows_N = torch.arange(37)
            owners_N = self.owners(rows_N, parts)
            owners = [parts[owner] for owner in owners_N.tolist()]
            held = [part.first_row <= row < part.first_row + part.num_rows for row, part in enumerate(owners)]
            if not all(held):
                raise ConfigError(
                    expected="the part that holds each row",
                    found=f"another one for row {held.index(False)} of {num_parts} parts",
                    where=f"{where}.owners",
                    ways_out="leave `owners` out: it is then found by bisection",
                )
            local_N = self.local_rows(rows_N, owners_N, parts).tolist()
            if len(set(zip(owners_N.tolist(), local_N, strict=True))) < len(local_N):
                raise ConfigError(
                    expected="a place of its own for each row of a part",
                    found=f"{local_N}, of owners {owners_N.tolist()}",
                    where=f"{where}.local_rows",
                    ways_out="leave `local_rows` out: rows then lie in their order",
                )

    def wrong_parts(self, parts: Sequence[Part], *, num_rows: int, num_columns: int, num_parts: int) -> str:
        """Say which parts were expected, where these do not make the table; "" where they do."""
        if len(parts) != num_parts or not all(isinstance(part, Part) for part in parts):
            return "a part for each rank"
        rows = [(part.first_row, part.num_rows) for part in parts]
        columns = [(part.first_column, part.num_columns) for part in parts]
        if self.cuts_rows:
            fits = _follow(rows, num_rows) and set(columns) == {(0, num_columns)}
            expected = f"blocks of rows in order, which together are rows 0 to {num_rows - 1} with all"
            return "" if fits else f"{expected} {num_columns} columns"
        if self.cuts_columns:
            fits = _follow(columns, num_columns) and set(rows) == {(0, num_rows)}
            expected = f"blocks of columns in order, which together are columns 0 to {num_columns - 1} of all"
            return "" if fits else f"{expected} {num_rows} rows"
        whole = Part(first_row=0, num_rows=num_rows, first_column=0, num_columns=num_columns)
        return "" if all(part == whole for part in parts) else "the whole table on each rank"

    def largest_part(self, *, num_rows: int, num_columns: int, num_parts: int) -> tuple[int, int]:
        """Return rows and columns of the largest part; planners ask for it thousands of times.

        Override it where `parts` makes many.
        """
        parts = self.parts(num_rows=num_rows, num_columns=num_columns, num_parts=num_parts)
        largest = max(parts, key=lambda part: part.num_rows * part.num_columns)
        return largest.num_rows, largest.num_columns

    # ------------------------------------------------------------------------- a placement that cuts rows

    def owners(self, rows_N: Tensor, parts: Sequence[Part]) -> Tensor:
        """Return the position of the part that holds each row, (N,) int64; for placements that cut rows.

        Args:
            rows_N: rows of the whole table, (N,) int64.
            parts: contiguous blocks of rows, in order; what `parts` returned.
        """
        import torch

        ends = torch.tensor([part.first_row + part.num_rows for part in parts], device=rows_N.device)
        return torch.bucketize(rows_N, ends, right=True)

    def local_rows(self, rows_N: Tensor, owners_N: Tensor, parts: Sequence[Part]) -> Tensor:
        """Return the number that each row has in its owner's part, (N,) int64, the padding row in front counted."""
        import torch

        begins = torch.tensor([part.first_row for part in parts], device=rows_N.device)[owners_N]
        return rows_N - begins + (begins > 0)

    # ----------------------------------------------------------------------------------------------- plans

    def check_ranks(self, ranks: Sequence[int], *, group: Sequence[int]) -> str:
        """Say which ranks were expected, where a plan names others; "" where they fit.

        Args:
            ranks: that the plan names; distinct, and all of the job.
            group: the ranks that look the table up: all, or those of its tower group.
        """
        del group
        return "" if ranks else "a rank or more"

    # -------------------------------------------------------------------------------------------- planning

    def device_sets(self, devices: Sequence[int], *, devices_per_host: int) -> tuple[tuple[int, ...], ...]:
        """Return the sets of devices that a table may be spread over as a whole; () where the search decides itself.

        Args:
            devices: that the table may go to, sorted.
            devices_per_host: consecutive devices that form a host.
        """
        del devices_per_host
        return (tuple(devices),) if len(devices) > 1 and not self.is_searched else ()

    def lookups_share(self, num_parts: int) -> float:
        """Return the share of all lookups of the global batch that one part answers."""
        return 1 / num_parts if self.cuts_rows or self.is_copied else 1.0

    def bytes_moved(self, step: StepBytes, *, num_parts: int, hop: Hop) -> Moved:
        """Return what one part moves over the links of its rank in a step."""
        del num_parts
        return Moved(ids=hop.from_world(step.ids), sent=hop.to_all(step.pooled))


def _follow(blocks: Sequence[tuple[int, int]], total: int) -> bool:
    """Return whether blocks, each with its begin and its size, follow one another from 0 to a total."""
    ends = list(itertools.accumulate(size for _, size in blocks))
    return ends[-1] == total and [begin for begin, _ in blocks] == [0, *ends[:-1]]
