"""What tables on a disk, or on the host, take: of memory, for rows that are held, and of the disk."""

from __future__ import annotations

from collections.abc import Mapping

from ziggurat.embeddings.room import TableSize
from ziggurat.embeddings.storage.disk import HELD_BESIDE_BYTES
from ziggurat.embeddings.tables_config import budget_of
from ziggurat.ops.row_file import RowLayout
from ziggurat.recipes.run_config import RunConfig


def held_share(config: RunConfig, sizes: Mapping[str, TableSize]) -> float:
    """The share of the rows on a disk that are held."""
    whole = sum(held_bytes(size) for name, size in sizes.items() if config.tables.is_on_disk(name))
    return budget_of(config.tables.memory, setting="tables.memory").share_of(whole)


def share_on_device(config: RunConfig, sizes: Mapping[str, TableSize]) -> float:
    """The share of the rows of the host's memory that the device holds."""
    mine = [size for name, size in sizes.items() if config.tables.is_in_host(name)]
    whole = sum(size.weight_bytes + size.state_bytes for size in mine)
    return budget_of(config.tables.device_memory, setting="tables.device-memory").share_of(whole)


def held_bytes(size: TableSize) -> int:
    """Return the bytes of all rows of a table on a disk, if they were held."""
    return size.weight_bytes + size.state_bytes + size.num_rows * HELD_BESIDE_BYTES


def bytes_on_disk(size: TableSize) -> int:
    """Return the bytes that the file of a table takes of the disk, once all its rows were changed."""
    row_bytes = (size.weight_bytes + size.state_bytes) // max(size.num_rows, 1)
    return RowLayout(row_bytes).file_bytes(size.num_rows)
