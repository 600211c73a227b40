"""Tables on a disk: a flat file of rows behind a cache in memory."""

from ziggurat.embeddings.storage.disk.backing import DiskRows
from ziggurat.embeddings.storage.disk.storage import DiskStorage, DiskTables, MemoryBudget

__all__ = ["DiskRows", "DiskStorage", "DiskTables", "MemoryBudget"]
