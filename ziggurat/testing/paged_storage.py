"""PagedStorage: tables in small pages of memory, made when they are first written. For tests of the storage door.

It shares nothing with `MemoryStorage`: no array is one tensor, so every lookup, update and checkpoint has to go through
the methods that a cached or disk storage would give. The most rows that were ever asked for at once are counted.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ziggurat.embeddings.storage import WEIGHT, TableStorage
from ziggurat.ops.lookup import TableOptimizerKind, state_shapes

PAGE_ROWS = 7


class PagedStorage(TableStorage):
    """Pages of a few rows each, by number.

    Args:
        num_rows: R.
        dim: D.

    Attributes:
        most_rows: read or written in one call so far.
    """

    def __init__(self, num_rows: int, dim: int) -> None:
        super().__init__(num_rows, dim)
        self._pages: dict[str, dict[int, Tensor]] = {WEIGHT: {}}
        self._tails: dict[str, tuple[int, ...]] = {WEIGHT: (dim,)}
        self._initial: dict[str, float] = {WEIGHT: float("nan")}  # what was never written must never be used
        self.most_rows = 0

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of rows that are read."""
        return torch.float32

    @property
    def device(self) -> torch.device:
        """The device of rows that are read."""
        return torch.device("cpu")

    @property
    def chunk_rows(self) -> int:
        """Rows that are moved at a time: few, so that a small table has several chunks."""
        return 10

    @property
    def num_bytes(self) -> int:
        """The bytes of the pages that exist."""
        return sum(page.nbytes for pages in self._pages.values() for page in pages.values())

    def add_state(self, kind: TableOptimizerKind, *, initial_sum: float = 0.0) -> None:
        """Pages appear when they are written."""
        for key, shape in state_shapes(kind, num_rows=self.num_rows, dim=self.dim).items():
            self._pages[key], self._tails[key] = {}, shape[1:]
            self._initial[key] = kind.initial(key, initial_sum=initial_sum)

    def gather(self, rows_N: Int64[Tensor, "N"], *, key: str = WEIGHT) -> Float[Tensor, "N *D"]:
        """Row by row."""
        found = torch.empty(len(rows_N), *self._tails[key])
        for position, row in enumerate(rows_N.tolist()):
            assert 0 <= row < self.num_rows, row
            page = self._pages[key].get(row // PAGE_ROWS)
            found[position] = self._initial[key] if page is None else page[row % PAGE_ROWS]
        return found

    def scatter(self, rows_N: Int64[Tensor, "N"], values: Float[Tensor, "N *D"], *, key: str = WEIGHT) -> None:
        """Row by row."""
        for row, value in zip(rows_N.tolist(), values, strict=True):
            assert 0 <= row < self.num_rows, row
            if row // PAGE_ROWS not in self._pages[key]:
                page = torch.full((PAGE_ROWS, *self._tails[key]), self._initial[key])
                self._pages[key][row // PAGE_ROWS] = page
            self._pages[key][row // PAGE_ROWS][row % PAGE_ROWS] = value

    def read(self, first_row: int, num_rows: int, *, key: str = WEIGHT) -> Float[Tensor, "N *D"]:
        """A copy of the rows."""
        self.most_rows = max(self.most_rows, num_rows)
        return self.gather(torch.arange(first_row, first_row + num_rows), key=key)

    def write(self, first_row: int, values: Float[Tensor, "N *D"], *, key: str = WEIGHT) -> None:
        """Write the rows into their pages."""
        self.most_rows = max(self.most_rows, len(values))
        self.scatter(torch.arange(first_row, first_row + len(values)), values, key=key)
