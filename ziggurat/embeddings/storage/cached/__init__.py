"""A cache of hot rows in FP32 over rows that lie elsewhere: in few bits, or on a disk."""

from ziggurat.embeddings.storage.cached.backing import RowBacking
from ziggurat.embeddings.storage.cached.counts import CacheCounts
from ziggurat.embeddings.storage.cached.low_precision import LowPrecisionBacking
from ziggurat.embeddings.storage.cached.maker import Cached
from ziggurat.embeddings.storage.cached.storage import CACHE, CachedStorage

__all__ = ["CACHE", "CacheCounts", "Cached", "CachedStorage", "LowPrecisionBacking", "RowBacking"]
