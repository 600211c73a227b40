"""LowPrecisionBacking: rows in few bits, in memory, behind a cache of those that are hot.

Rows are kept by `LowPrecisionStorage`, as they are without a cache. What leaves the cache is rounded once, with the
noise of the step in which it leaves: nothing is lost of the updates that it took while it was there.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float, Int64
from torch import Tensor

from ziggurat.embeddings.storage.cached.backing import RowBacking
from ziggurat.embeddings.storage.low_precision import LowPrecision, LowPrecisionStorage
from ziggurat.embeddings.storage.table_storage import WEIGHT
from ziggurat.ops.lookup import TableOptimizerKind
from ziggurat.ops.row_formats import RowFormat, RowOrigin


class LowPrecisionBacking(RowBacking):
    """All rows of a storage in few bits.

    Args:
        num_rows: R.
        dim: D.
        settings: format, rounding and seed.
    """

    def __init__(self, num_rows: int, dim: int, *, settings: LowPrecision) -> None:
        super().__init__(num_rows, dim)
        self.rows = LowPrecisionStorage(num_rows, dim, settings=settings)

    @property
    def num_bytes(self) -> int:
        """See `RowBacking.num_bytes`."""
        return self.rows.num_bytes

    @property
    def row_format(self) -> RowFormat:
        """The format in which rows are kept."""
        return self.rows.row_format

    def add_state(self, kind: TableOptimizerKind, *, initial_sum: float = 0.0) -> None:
        """See `RowBacking.add_state`."""
        self.rows.add_state(kind, initial_sum=initial_sum)

    def name_rows(self, origins: Sequence[RowOrigin]) -> None:
        """See `RowBacking.name_rows`."""
        self.rows.name_rows(origins)

    def fetch(self, rows_N: Int64[Tensor, "N"], *, keys: Sequence[str]) -> dict[str, Float[Tensor, "N *D"]]:
        """See `RowBacking.fetch`."""
        return {key: self.rows.gather(rows_N, key=key) for key in keys}

    def store(self, rows_N: Int64[Tensor, "N"], values: dict[str, Float[Tensor, "N *D"]], *, step: int | None) -> None:
        """See `RowBacking.store`."""
        for key, numbers in values.items():
            # Only updates are rounded with noise; what is loaded goes to the nearest, and state is not rounded.
            if key == WEIGHT and step is not None:
                self.rows.keep(rows_N, numbers, words_N=self.rows.words(rows_N, step=step))
            else:
                self.rows.scatter(rows_N, numbers, key=key)

    def read(self, first_row: int, num_rows: int, *, key: str = WEIGHT) -> Float[Tensor, "N *D"]:
        """See `RowBacking.read`."""
        return self.rows.read(first_row, num_rows, key=key)

    def write(self, first_row: int, values: Float[Tensor, "N *D"], *, key: str = WEIGHT) -> None:
        """See `RowBacking.write`."""
        self.rows.write(first_row, values, key=key)

    def looked_up(self, rows_N: Int64[Tensor, "N"]) -> Float[Tensor, "N D"]:
        """See `RowBacking.looked_up`."""
        return self.rows.looked_up(rows_N)

    def rounded(self, values_ND: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        """See `RowBacking.rounded`."""
        if not self.row_format.rounds:
            return values_ND
        return self.row_format.checked_decode(self.row_format.checked_encode(values_ND), dim=self.dim)

    def state(self, key: str) -> Float[Tensor, "R *D"]:
        """An array of the optimizer's, sharing memory."""
        tensor = self.rows.tensor(key)
        if tensor is None:
            raise KeyError(key)
        return tensor

    def describe(self) -> dict[str, object]:
        """Format, rounding and bytes."""
        return self.rows.describe()
