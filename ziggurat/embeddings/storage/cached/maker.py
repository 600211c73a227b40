"""Cached: what makes storages with a cache of hot rows."""

from __future__ import annotations

from dataclasses import dataclass

from ziggurat.embeddings.storage.cached.low_precision import LowPrecisionBacking
from ziggurat.embeddings.storage.cached.storage import CachedStorage
from ziggurat.embeddings.storage.low_precision import LowPrecision
from ziggurat.embeddings.storage.memory import MemoryStorage
from ziggurat.embeddings.storage.table_storage import TableStorage
from ziggurat.ops.row_cache import CacheSize
from ziggurat.ops.row_formats import PLAIN, RowFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Cached:
    """Makes storages of rows in few bits behind a cache in FP32: what `make_storage` wants.

    Args:
        behind: what rows behind the cache are kept as.
        cache: its share of the rows of a width, and its policy. A share of one keeps all rows in FP32, with nothing
            behind them.
    """

    behind: LowPrecision
    cache: CacheSize

    def __call__(self, num_rows: int, dim: int) -> TableStorage:
        """An empty storage."""
        if self.format_of(dim).is_plain:
            return MemoryStorage(num_rows, dim)
        backing = LowPrecisionBacking(num_rows, dim, settings=self.behind)
        return CachedStorage(backing, cache=self.cache)

    def format_of(self, dim: int) -> RowFormat:
        """Return the format in which rows of so many columns are kept behind the cache."""
        return PLAIN if self.cache.share >= 1.0 else self.behind.format_of(dim)
