"""Tables in the memory of the host, with those of their rows that steps need in the memory of the device."""

from ziggurat.embeddings.storage.host.storage import (
    HOST_BESIDE_BYTES,
    MAP_BYTES,
    HostStorage,
    HostTables,
    device_facts,
)

__all__ = ["HOST_BESIDE_BYTES", "MAP_BYTES", "HostStorage", "HostTables", "device_facts"]
