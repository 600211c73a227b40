"""Where the rows of embedding tables lie: one door (`TableStorage`), and what stands behind it."""

from ziggurat.embeddings.storage.by_table import StorageByTable, cache_of, format_of, maker_of
from ziggurat.embeddings.storage.low_precision import LowPrecision, LowPrecisionStorage
from ziggurat.embeddings.storage.memory import MemoryStorage
from ziggurat.embeddings.storage.part import StoredRows, TablePart, reader, table_tensor
from ziggurat.embeddings.storage.table_storage import WEIGHT, MakeStorage, TableStorage

__all__ = [
    "WEIGHT",
    "LowPrecision",
    "LowPrecisionStorage",
    "MakeStorage",
    "MemoryStorage",
    "StorageByTable",
    "StoredRows",
    "TablePart",
    "TableStorage",
    "cache_of",
    "format_of",
    "maker_of",
    "reader",
    "table_tensor",
]
