"""Rounding to BF16 equals its definition on all 2^32 numbers of FP32: the block format, torch, and lookup kernels.

    finite        to the nearest, ties to even; torch and lookups make infinity of what is nearer to it than to 3.39e38
    block format  refuses these and infinities by name (65,538 with both signs); truncation refuses infinities alone
    NaN           NaN, whatever its other bits

Every number is rounded by the vector code that serves tensors, and compared in C++ with the distances to both
neighbours in FP64. The everyday test takes each 256th part.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_uint64, c_void_p
from pathlib import Path

import pytest
import torch

from ziggurat.errors import NumericsError
from ziggurat.numerics import BlockFormat, quantise
from ziggurat.ops.cpp_build import CppLibrary, CppSource

COUNT = 2**22
BF16 = BlockFormat.named("bf16")
TRUNCATED = BlockFormat.named("bf16_truncated")


def declare(library: ctypes.CDLL) -> None:
    library.sweep_fill.restype = None
    library.sweep_fill.argtypes = [c_uint64, c_int64, c_void_p, c_void_p, c_void_p]
    library.sweep_differing.restype = c_int64
    library.sweep_differing.argtypes = [c_void_p, c_void_p, c_void_p, c_int64]
    library.sweep_header_differing.restype = c_int64
    library.sweep_header_differing.argtypes = [c_void_p, c_void_p, c_int64]


LIBRARY = CppLibrary(
    CppSource(path=Path(__file__).with_name("bf16_sweep.cpp"), flags=("-w",)),
    declare=declare,
)


@pytest.mark.parametrize("step", [256, pytest.param(1, marks=pytest.mark.slow)])
def test_every_number_is_rounded_to_the_nearest_in_bf16(step: int) -> None:
    library = LIBRARY.or_none()
    if library is None:
        pytest.skip("no compiler")
    bits, nearest, below = (torch.empty(COUNT, dtype=torch.int32) for _ in range(3))
    x = bits.view(torch.float32)
    num_refused = {BF16.name: 0, TRUNCATED.name: 0}
    # With the last part of all, which holds the largest numbers, infinity and NaN.
    begins = sorted({*range(0, 2**32, step * COUNT), 0x7F800000 - COUNT, 0x7F800000, 0xFF800000 - COUNT, 0xFF800000})
    for begin in begins:
        library.sweep_fill(begin, COUNT, bits.data_ptr(), nearest.data_ptr(), below.data_ptr())
        where = f"numbers from {begin:#010x} on"
        assert library.sweep_header_differing(bits.data_ptr(), nearest.data_ptr(), COUNT) == 0, where
        by_torch = x.bfloat16().float()
        assert library.sweep_differing(bits.data_ptr(), nearest.data_ptr(), by_torch.data_ptr(), COUNT) == 0, where
        for format, wanted in ((BF16, nearest), (TRUNCATED, below)):
            held = x
            if (begin & 0x7FFFFFFF) + COUNT > 0x7F7F0000:  # magnitudes follow one another as their bits do
                refused = x.abs() > format.largest_held
                count = int(refused.sum())
                num_refused[format.name] += count
                if count:
                    with pytest.raises(NumericsError, match=f"the first of {count:,}" if count > 1 else "inf at"):
                        quantise(x[refused], format, -1)
                held = torch.where(refused, 0.0, x)
                wanted[refused] = 0
            found = quantise(held, format, -1)
            assert library.sweep_differing(held.data_ptr(), wanted.data_ptr(), found.data_ptr(), COUNT) == 0, where
    assert num_refused == {BF16.name: 2 * 32_769, TRUNCATED.name: 2}
