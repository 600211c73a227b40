"""A set-associative cache of rows: which rows it holds (`ways.py`), and compiled lookups and moves (`cpp.py`)."""

from ziggurat.ops.row_cache.admission import FREE, HIT, NO_WAY, Admission
from ziggurat.ops.row_cache.ways import NEVER, NO_CACHE, NUM_WAYS, CachePolicy, CacheSize, Ways

__all__ = ["FREE", "HIT", "NEVER", "NO_CACHE", "NO_WAY", "NUM_WAYS", "Admission", "CachePolicy", "CacheSize", "Ways"]
