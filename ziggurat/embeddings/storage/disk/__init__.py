"""Tables on a disk: a flat file of rows behind a cache in memory."""

from ziggurat.embeddings.storage.budget import MIN_PLACES, MemoryBudget
from ziggurat.embeddings.storage.disk.backing import DiskRows
from ziggurat.embeddings.storage.disk.bitmap import MarkedRows
from ziggurat.embeddings.storage.disk.storage import (
    HELD_BESIDE_BYTES,
    DiskStorage,
    DiskTables,
    held_facts,
    held_room,
    most_waiting,
    room_for,
)

__all__ = [
    "HELD_BESIDE_BYTES",
    "MIN_PLACES",
    "DiskRows",
    "DiskStorage",
    "DiskTables",
    "MarkedRows",
    "MemoryBudget",
    "held_facts",
    "held_room",
    "most_waiting",
    "room_for",
]
