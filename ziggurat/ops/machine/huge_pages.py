"""Pages of 2 MiB under a tensor that is read in random order.

A processor keeps the places of a few thousand pages; with pages of 4 KiB that is some 10 MB of memory, and reads beyond
it look the page up first. On Linux a process may ask for larger ones (`madvise(MADV_HUGEPAGE)`), before its pages are
touched. Tables are read about 1.2 times as fast (`embeddings/storage/memory.py`), and so are the layers of a graph
(`ops/graph/propagation.py`).
"""

from __future__ import annotations

import ctypes
import sys

from torch import Tensor

_HUGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14  # of <sys/mman.h>; Python's `mmap.madvise` reaches only maps that Python made


def advise_huge_pages(tensor: Tensor) -> bool:
    """Ask for 2 MiB pages under a tensor; True if the system agreed. Advice: refusal costs speed, nothing else."""
    size = tensor.numel() * tensor.element_size()
    # A tensor begins anywhere in a page: only from twice its size on is a whole aligned page surely inside.
    if not sys.platform.startswith("linux") or tensor.device.type != "cpu" or size < 2 * _HUGE_PAGE_BYTES:
        return False
    # Whole pages inside the tensor, rounded inwards: what lies beside it is not ours to advise.
    first = -(-tensor.data_ptr() // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    length = (tensor.data_ptr() + size - first) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    # The C library that is loaded already: Python has no call for memory that it does not own.
    libc = ctypes.CDLL(None)
    return libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), ctypes.c_int(_MADV_HUGEPAGE)) == 0
