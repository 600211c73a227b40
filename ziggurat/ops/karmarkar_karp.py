"""Karmarkar-Karp: items into parts of equal number and nearly equal sum, by differencing.

Deal the items, largest first, into tuples of one item for each part. A tuple is a partial partition: its spread is its
largest sum minus its smallest. Join the two with the largest spreads, the largest sums of the one with the smallest of
the other, and go on until one is left:

    [9 7] [6 6] [5 1]     spreads 2 0 4   ─►  [5 1] + [9 7]: 5+7, 1+9 = [12 10]   ─►  [12 10] + [6 6] = [18 16]

Every tuple gives one item to each part, so the parts have equal numbers of items (one more or less where the last tuple
is not full: it is filled with items that cost nothing). n items in R parts take n/R joins of R log R: for 8,192 items
and 64 parts less than a millisecond, after sorting.

`karmarkar_karp_reference` defines the result; C++ finds the same one: the same sums in the same order, ties broken by
age and place. Sources: Karmarkar and Karp, "The differencing method of set partitioning", 1982; Michiels et al.,
"Performance ratios for the differencing method", 2003, for parts of equal number (BLDM).
"""

from __future__ import annotations

import ctypes
import heapq
from ctypes import c_int64, c_void_p
from pathlib import Path

import numpy as np

from ziggurat.ops.cpp_build import CppLibrary, CppSource

_SOURCE = CppSource(
    path=Path(__file__).parent / "csrc" / "karmarkar_karp.cpp",
    without="go on without: Python finds the same parts, slower (about 20 ms for 8,192 samples on 64 ranks)",
)


def karmarkar_karp(costs: np.ndarray, *, num_parts: int) -> np.ndarray:
    """The part of each item.

    Args:
        costs: (n,) float64, finite, not negative.
        num_parts: at least 1.

    Returns:
        (n,) int32 from 0 to num_parts - 1. Numbers of items differ by one at most.
    """
    library = _LIBRARY.or_none()
    if library is None:
        return karmarkar_karp_reference(costs, num_parts=num_parts)
    order = np.argsort(-costs, kind="stable")
    falling = np.ascontiguousarray(costs[order], dtype=np.float64)
    parts = np.empty(len(costs), dtype=np.int32)
    library.karmarkar_karp(falling.ctypes.data, len(costs), num_parts, parts.ctypes.data)
    return _in_order(parts, order)


def karmarkar_karp_reference(costs: np.ndarray, *, num_parts: int) -> np.ndarray:
    """Compute the result of `karmarkar_karp` in plain Python."""
    # Stable: equal costs keep their order, so both implementations deal the same items.
    order = np.argsort(-costs, kind="stable")
    falling = costs[order].tolist()
    waiting = []
    for number, begin in enumerate(range(0, len(falling), num_parts)):
        chunk = falling[begin : begin + num_parts]
        slots = [(cost, [begin + at]) for at, cost in enumerate(chunk)]
        slots += [(0.0, [])] * (num_parts - len(chunk))
        # The smallest minus the largest: a heap gives the widest spread first. Numbers break ties by age.
        waiting.append((slots[-1][0] - slots[0][0], number, slots))
    number = len(waiting)
    heapq.heapify(waiting)
    while len(waiting) > 1:
        left = heapq.heappop(waiting)[2]
        right = heapq.heappop(waiting)[2]
        pairs = zip(left, reversed(right), strict=True)
        joined = [(one[0] + other[0], one[1] + other[1]) for one, other in pairs]
        # Stable as well: equal sums stay in the order of their places.
        joined.sort(key=lambda slot: -slot[0])
        heapq.heappush(waiting, (joined[-1][0] - joined[0][0], number, joined))
        number += 1
    parts = np.empty(len(falling), dtype=np.int32)
    for part, (_, items) in enumerate(waiting[0][2] if waiting else []):
        parts[items] = part
    return _in_order(parts, order)


def karmarkar_karp_kernel() -> str:
    """Say which implementation plans here, and why; build the kernel if need be."""
    return _LIBRARY.kernel_line()


def _in_order(parts: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Parts of sorted items as those of the items themselves."""
    found = np.empty_like(parts)
    found[order] = parts
    return found


def _declare(library: ctypes.CDLL) -> None:
    """Say which arguments the function of the library takes."""
    library.karmarkar_karp.argtypes = [c_void_p, c_int64, c_int64, c_void_p]
    library.karmarkar_karp.restype = None


_LIBRARY = CppLibrary(_SOURCE, declare=_declare)
