"""A cache of hot rows in FP32 over rows that lie elsewhere: in few bits, or on a disk."""

from ziggurat.embeddings.storage.cached.backing import RowBacking

__all__ = ["RowBacking"]
