"""StorageFacts: what a training log says of storages that keep some of their rows nearer than others."""

from __future__ import annotations

from collections.abc import Iterable

from ziggurat.embeddings.storage.cached import CacheCounts, CachedStorage
from ziggurat.embeddings.storage.disk import DiskStorage, held_facts
from ziggurat.embeddings.storage.host import HostStorage, device_facts
from ziggurat.embeddings.storage.table_storage import TableStorage


class StorageFacts:
    """Counts what caches of hot rows, disks and the host's memory did from one call to the next."""

    def __init__(self) -> None:
        self._counted = CacheCounts()

    def since_last(self, storages: Iterable[TableStorage]) -> dict[str, float]:
        """Return the shares of rows that were near since the last call; {} where every row always is."""
        every = list(storages)
        found = dict[str, float]()
        caches = [storage for storage in every if isinstance(storage, CachedStorage)]
        if caches:
            counts = sum((cache.counts for cache in caches), CacheCounts())
            found |= (counts - self._counted).facts()
            self._counted = counts
        found |= held_facts(storage for storage in every if isinstance(storage, DiskStorage))
        return found | device_facts(storage for storage in every if isinstance(storage, HostStorage))
