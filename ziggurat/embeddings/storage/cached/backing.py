"""RowBacking: where all rows of a storage lie, behind the cache of those that are hot.

    lookup    rows of the batch ──► the cache, or `fetch`
    update    rows of the gradient ──► `fetch` of those that the cache does not hold ──► the rule, in FP32
                                   ──► `store` of those that leave it, and of those that found no place in it

Weight and optimizer state of a row move together. A backing is asked for distinct rows, in no particular order, and
gives copies: nothing that it hands out shares memory with it. Numbers that its format cannot hold are rounded when they
are stored (`rounded` says to what), with noise that is a function of seed, table, step, row and column where it rounds
at random, so that a run repeats bit for bit. The optimizer's state is exact.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from jaxtyping import Float, Int64
from torch import Tensor

from ziggurat.embeddings.storage.table_storage import WEIGHT
from ziggurat.ops.lookup import TableOptimizerKind
from ziggurat.ops.row_formats import RowFormat, RowOrigin


class RowBacking(ABC):
    """All rows of the tables of one dim, and the optimizer's numbers of each, behind a cache.

    Args:
        num_rows: R, of all its tables.
        dim: D.

    Attributes:
        num_rows: R.
        dim: D.
    """

    def __init__(self, num_rows: int, dim: int) -> None:
        self.num_rows = num_rows
        self.dim = dim

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of memory for weights and state."""

    @property
    def disk_bytes(self) -> int:
        """Bytes on a disk."""
        return 0

    @property
    def row_format(self) -> RowFormat | None:
        """The format in which rows are kept in memory; None for a backing that takes other memory than that."""
        return None

    @abstractmethod
    def add_state(self, kind: TableOptimizerKind, *, initial_sum: float = 0.0) -> None:
        """Have room for an optimizer's numbers of every row; see `TableStorage.add_state`."""

    def name_rows(self, origins: Sequence[RowOrigin]) -> None:
        """Learn which rows of which tables these are; see `TableStorage.name_rows`."""
        del origins

    @abstractmethod
    def fetch(self, rows_N: Int64[Tensor, "N"], *, keys: Sequence[str]) -> dict[str, Float[Tensor, "N *D"]]:
        """Copies of distinct rows in FP32, as updates see them.

        Args:
            rows_N: distinct rows.
            keys: which arrays: the weights, and the names of `state_shapes`.
        """

    @abstractmethod
    def store(self, rows_N: Int64[Tensor, "N"], values: dict[str, Float[Tensor, "N *D"]], *, step: int | None) -> None:
        """Keep distinct rows, each array rounded once where the backing rounds.

        Args:
            rows_N: distinct rows.
            values: of some arrays, by name.
            step: whose update it is, for the noise of rounding; the same row is stored once in a step. None rounds to
                the nearest.
        """

    @abstractmethod
    def read(self, first_row: int, num_rows: int, *, key: str = WEIGHT) -> Float[Tensor, "N *D"]:
        """Consecutive rows of one array; may share memory with the backing."""

    @abstractmethod
    def write(self, first_row: int, values: Float[Tensor, "N *D"], *, key: str = WEIGHT) -> None:
        """Replace consecutive rows of one array, rounded to the nearest."""

    def looked_up(self, rows_N: Int64[Tensor, "N"]) -> Float[Tensor, "N D"]:
        """The weights of some rows as lookups read them: those of `fetch`, unless the format keeps more."""
        return self.fetch(rows_N, keys=(WEIGHT,))[WEIGHT]

    def rounded(self, values_ND: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        """Return weights as they would come back after `write`: the same numbers, unless the backing rounds."""
        return values_ND

    def announce(self, rows_N: Int64[Tensor, "N"]) -> None:
        """Learn which rows a coming batch needs; a slow backing may begin to read them."""
        del rows_N

    def describe(self) -> dict[str, object]:
        """Return what the start-up report says beside rows and columns."""
        return {}
