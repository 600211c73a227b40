"""Keep the memory that a training step frees, instead of giving it back to the kernel and fetching it again.

A step allocates and frees the same large matrices again and again (2048 × 1728 floats are 13.5 MiB). On the CPU torch
asks glibc's malloc for them, and glibc

    maps memory anew for what is larger than its mmap threshold          (128 KiB at first, at most 32 MiB)
    returns free memory at the end of the heap above its trim threshold  (128 KiB at first, at most 64 MiB)

Returned memory comes back as empty pages: each of its 4 KiB costs a page fault and a zeroing. Both thresholds grow with
what a process happens to free, so the same step took 20,000 to 48,000 faults in one process (a tenth of its time) and
none in another. `keep_freed_memory` sets both, once: the first to what glibc itself may reach, the second so high that
the activations of a step stay.

Cost: up to `KEPT_BYTES` that the process has used before stay with it. Matrices of more than 32 MiB are still mapped
anew each time: glibc allows no higher threshold.
"""

from __future__ import annotations

import ctypes

KEPT_BYTES = 1 << 30
LARGEST_KEPT_BYTES = 32 << 20
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h


def keep_freed_memory() -> str:
    """Set glibc's thresholds for the whole process; calling it again changes nothing.

    Returns:
        What was done, for the start-up report.
    """
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version.restype = ctypes.c_char_p
        version = library.gnu_get_libc_version().decode()
        done = library.mallopt(_MMAP_THRESHOLD, LARGEST_KEPT_BYTES) and library.mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
    except (AttributeError, OSError, TypeError):
        return "left alone: the C library is not glibc"
    if not done:
        return f"left alone: glibc {version} refused the thresholds"
    return f"glibc {version} keeps up to {KEPT_BYTES >> 20} MiB of freed memory in pieces of up to 32 MiB"
