"""Exact sums of numbers and of their squares: the same bits in whatever order and parts the numbers come.

Problem: floating-point sums depend on their order, so the mean of a column over one file is not quite what the means
of its parts give. What is fitted on many machines must be what one machine fits.

Idea: a float64 is a whole number of 53 bits times a power of two. Whole numbers of one power are added up as whole
numbers, and only the end is rounded (the small superaccumulator of Neal, "Fast exact summation using small and large
superaccumulators", 2015). A square is split into its rounded value and its rounding error, which are both float64.

    1.5 = 0x18000000000000 · 2^-52  ─►  sums[exponent of 1.5] += 0x18000000000000

Squares of numbers below 2^-400 count as nothing: their rounding errors cannot be represented.
The C++ kernel and the numpy reference give the same sums. Cost in C++: 5 ns a number with its square; numpy 150 ns.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float64

from ziggurat.ops.cpp_build import CppLibrary, CppSource

_SOURCE = CppSource(
    path=Path(__file__).parent / "csrc" / "exact_sums.cpp", without="go on without: numpy gives the same sums, slower"
)
_SCALE = 1200  # sums are whole numbers of 2^-1200
# All that 11 bits of a float64 can say.
_EXPONENTS = 2048
_MOST = 1 << 20  # numbers added to the halves before they are emptied
_SMALLEST = 2.0**-400
_SPLIT = 2.0**27 + 1  # Veltkamp's


@dataclass(frozen=True, kw_only=True)
class ExactSums:
    """Count of numbers, and their exact sum and sum of squares, in units of 2^-1200.

    Args:
        count: numbers.
        total: sum.
        squares: sum of squares.
    """

    count: int = 0
    total: int = 0
    squares: int = 0

    def __add__(self, other: ExactSums) -> ExactSums:
        return ExactSums(
            count=self.count + other.count, total=self.total + other.total, squares=self.squares + other.squares
        )

    @property
    def mean(self) -> float:
        """The mean, rounded once; 0 of nothing."""
        return self.total / (self.count << _SCALE) if self.count else 0.0

    @property
    def deviation(self) -> float:
        """The standard deviation (of the population); 0 of nothing."""
        if not self.count:
            return 0.0
        spread = (self.count * self.squares << _SCALE) - self.total * self.total
        return (max(spread, 0) / (self.count * self.count << 2 * _SCALE)) ** 0.5


def exact_sums(values: Float64[np.ndarray, " N"]) -> ExactSums:
    """Sum finite numbers, and their squares, exactly."""
    library = _LIBRARY.or_none()
    if library is None:
        return exact_sums_reference(values)
    values = np.ascontiguousarray(values, dtype=np.float64)
    found = ExactSums()
    for start in range(0, len(values), _MOST):
        part = values[start : start + _MOST]
        # Sums of lower and of upper 32 bits: of 2^20 numbers neither overflows 64 bits.
        halves = np.zeros((2, 2, _EXPONENTS), dtype=np.int64)
        library.ziggurat_exact_sums(part.ctypes.data, len(part), halves[0].ctypes.data, halves[1].ctypes.data)
        found += ExactSums(count=len(part), total=_whole(halves[0]), squares=_whole(halves[1]))
    return found


def exact_sums_reference(values: Float64[np.ndarray, " N"]) -> ExactSums:
    """Compute the result that `exact_sums` must equal."""
    found = ExactSums()
    for start in range(0, len(values), _MOST):
        part = np.asarray(values[start : start + _MOST], dtype=np.float64)
        large = part[np.abs(part) >= _SMALLEST]
        # Rounded; what rounding took is computed below, exactly, and added to it.
        squares = large * large
        bulk = _SPLIT * large
        high = bulk - (bulk - large)  # Dekker's product: large = high + low, of 26 bits each
        low = large - high
        errors = ((high * high - squares) + 2 * high * low) + low * low
        total = _sum_reference(squares) + _sum_reference(errors)
        found += ExactSums(count=len(part), total=_sum_reference(part), squares=total)
    return found


def kernel_reason() -> str:
    """Say why sums are made with numpy instead of C++, or return "" if they are not."""
    return _LIBRARY.reason


def _sum_reference(values: np.ndarray) -> int:
    mantissas, exponents = np.frexp(values)
    # Exact: a mantissa has 53 bits.
    whole = np.ldexp(mantissas, 53).astype(np.int64)
    total = 0
    for exponent in np.unique(exponents).tolist():
        chosen = whole[exponents == exponent]
        # In halves of 32 bits, whose sums fit 64 bits; Python's integers have no end.
        sums = int((chosen & 0xFFFFFFFF).sum()) + (int((chosen >> 32).sum()) << 32)
        total += sums << (_SCALE + exponent - 53)
    return total


def _whole(halves: np.ndarray) -> int:
    """The whole number that (2, 2048) halves stand for."""
    total = 0
    for place in np.flatnonzero(halves.any(axis=0)).tolist():
        # Numbers without the leading bit (place 0) have the exponent of place 1.
        total += (int(halves[0, place]) + (int(halves[1, place]) << 32)) << (_SCALE - 1075 + max(place, 1))
    return total


def _declare(library: ctypes.CDLL) -> None:
    library.ziggurat_exact_sums.argtypes = [c_void_p, c_int64, c_void_p, c_void_p]
    library.ziggurat_exact_sums.restype = None


_LIBRARY = CppLibrary(_SOURCE, declare=_declare)
