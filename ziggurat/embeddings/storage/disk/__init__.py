"""Tables on a disk: a flat file of rows behind a cache in memory."""

from ziggurat.embeddings.storage.disk.backing import DiskRows

__all__ = ["DiskRows"]
