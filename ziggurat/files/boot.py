"""The boot of a machine: a text that changes when it is started anew.

What was written or measured before may be gone behind a power cut, and a rented machine may come up at another place.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return the text of the present boot; "" where the system does not say."""
    with contextlib.suppress(OSError):
        return _BOOT.read_text().strip()
    return ""
