"""StorageByTable: some tables in storages of their own kind, the rest in another.

Tables share a storage if they have the same columns and the same maker:

    user_id  64 columns  int8 ─┐ storage 0        item_id  64 columns  bf16 ── storage 1
    city     64 columns  int8 ─┘                  colour    1 column   int8 ── storage 2, in FP32: INT8 saves nothing
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ziggurat.embeddings.storage.cached.maker import Cached
from ziggurat.embeddings.storage.low_precision import LowPrecision
from ziggurat.embeddings.storage.memory import MemoryStorage
from ziggurat.embeddings.storage.table_storage import MakeStorage, TableStorage
from ziggurat.ops.row_cache import NO_CACHE, CacheSize
from ziggurat.ops.row_formats import PLAIN, RowFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageByTable:
    """Makes storages for tables by name: what `make_storage` may be, too.

    Args:
        rest: makes those of tables that are not named.
        by_table: makes those of others, by the table's name.
    """

    rest: MakeStorage
    by_table: Mapping[str, MakeStorage]

    def __call__(self, num_rows: int, dim: int) -> TableStorage:
        """An empty storage for tables that are not named."""
        return self.rest(num_rows, dim)


def maker_of(make_storage: MakeStorage, *, table: str, dim: int) -> MakeStorage:
    """Return the maker of one table's storage; makers are equal for tables that may share one.

    Args:
        make_storage: of all tables.
        table: its name.
        dim: its columns.
    """
    if isinstance(make_storage, StorageByTable):
        make_storage = make_storage.by_table.get(table, make_storage.rest)
    is_narrow = isinstance(make_storage, LowPrecision | Cached) and make_storage.format_of(dim).is_plain
    # One maker for all that stay plain, so that they are equal and share a storage.
    return MemoryStorage if is_narrow else make_storage


def format_of(make_storage: MakeStorage, *, table: str, dim: int) -> RowFormat | None:
    """Return the format that rows of a table will have in memory; None if the maker does not say.

    Args:
        make_storage: of all tables.
        table: its name.
        dim: its columns.
    """
    mine = maker_of(make_storage, table=table, dim=dim)
    if mine is MemoryStorage:
        return PLAIN
    return mine.format_of(dim) if isinstance(mine, LowPrecision | Cached) else None


def cache_of(make_storage: MakeStorage, *, table: str, dim: int) -> CacheSize:
    """The cache in front of a table's rows; of no rows if there is none.

    Args:
        make_storage: of all tables.
        table: its name.
        dim: its columns.
    """
    mine = maker_of(make_storage, table=table, dim=dim)
    return mine.cache if isinstance(mine, Cached) else NO_CACHE
