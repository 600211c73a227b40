"""Round to block formats in C++: `ops/csrc/block_formats.cpp`, the same bits as `blocks.py`.

    last axis     one block after the other, each in one register or a few
    other axes    blocks side by side, one in each lane of a register

It is built for the instructions of the processor (AVX-512, AVX2, others) and takes every format, also one from outside
the package.
"""

from __future__ import annotations

import ctypes
import functools
import math
from ctypes import POINTER, Structure, byref, c_double, c_int64, c_void_p
from pathlib import Path

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from ziggurat.numerics.block_format import BlockFormat, Rounding, ScaleRule, Scope
from ziggurat.numerics.blocks import block_length
from ziggurat.ops.cpp_build import CppLibrary, CppSource
from ziggurat.ops.kernel_choice import library_for

SOURCE = CppSource(
    path=Path(__file__).parents[1] / "ops" / "csrc" / "block_formats.cpp",
    flags=("-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fwrapv", "-w"),
    depends_on=torch.__version__,  # whose OpenMP it shares
    without="go on without: torch rounds to the same numbers, slower",
)
_RULES = {ScaleRule.FLOOR: 0, ScaleRule.CEIL: 1, ScaleRule.EVEN: 2, ScaleRule.RCEIL: 3}


class CFormat(Structure):
    """The struct `Format` of block_formats.cpp."""

    _fields_ = (
        ("k1", c_int64),
        ("k2", c_int64),
        ("d1", c_int64),
        ("d2", c_int64),
        ("element_bits", c_int64),
        ("fraction_bits", c_int64),
        ("min_exponent", c_int64),
        ("max_exponent", c_int64),
        ("largest_code", c_int64),
        ("rule", c_int64),
        ("truncates", c_int64),
        ("is_twos_complement", c_int64),
        ("largest", c_double),
        ("largest_held", c_double),
    )


@functools.lru_cache(maxsize=1024)  # making it took 2 of the 9 µs that a call of the kernel costs beside the numbers
def c_format(format: BlockFormat, *, n: int) -> CFormat:
    """Return what C++ is told of a format, for rows of n numbers; C++ only reads it."""
    element = format.element
    return CFormat(
        k1=block_length(format, n),
        k2=format.k2,
        d1=format.d1,
        d2=format.d2,
        element_bits=element.bits,
        fraction_bits=element.fraction_bits,
        min_exponent=element.min_exponent,
        max_exponent=element.max_exponent,
        largest_code=element.code(element.largest),
        rule=_RULES[format.scale_rule],
        truncates=format.rounding is Rounding.TRUNCATE,
        is_twos_complement=element.is_twos_complement,
        largest=element.largest,
        largest_held=format.largest_held,
    )


def quantise_fast(
    x: Float[Tensor, "*B"], format: BlockFormat, axis: int, *, library: CppLibrary | None = None
) -> Float[Tensor, "*B"] | None:
    """Return what `quantise` does of finite numbers; None where no kernel serves, or where a number cannot be held.

    Args:
        x: FP32, at least one number.
        format: of the numbers.
        axis: that blocks lie along.
        library: a build of the kernel, for tests.
    """
    built = library_for(x, library or _LIBRARY)
    if built is None:
        return None
    axis %= x.dim()
    if not x.is_contiguous() and x.dim() >= 2 and x.mT.is_contiguous():  # a transposed matrix is rounded where it lies
        swapped = {x.dim() - 1: x.dim() - 2, x.dim() - 2: x.dim() - 1}
        found = quantise_fast(x.mT, format, swapped.get(axis, axis), library=library)
        return None if found is None else found.mT
    # C++ walks rows by sizes alone.
    x = x.contiguous()
    out = torch.empty_like(x)
    # One row of all numbers: no block ends at the end of an axis.
    if format.k1 is Scope.TENSOR or not format.has_scale:
        outer, n, inner = 1, x.numel(), 1
    else:
        outer, n, inner = math.prod(x.shape[:axis]), x.shape[axis], math.prod(x.shape[axis + 1 :])
    given = c_format(format, n=n)
    threads = torch.get_num_threads()
    status = built.ziggurat_quantise(x.data_ptr(), out.data_ptr(), outer, n, inner, byref(given), threads)
    # The kernel found a number that the format cannot hold; the reference says which.
    return None if status else out


def pack_fast(
    rows: Float[Tensor, "R n"], format: BlockFormat, *, row_bytes: int, library: CppLibrary | None = None
) -> UInt8[Tensor, "R W"] | None:
    """Return what `pack` does of rows of finite numbers; None where no kernel serves, or a number cannot be held.

    Args:
        rows: FP32, at least one number.
        format: of the numbers.
        row_bytes: W.
        library: a build of the kernel, for tests.
    """
    built = library_for(rows, library or _LIBRARY)
    if built is None:
        return None
    rows = rows.contiguous()
    count, n = rows.shape
    out = torch.empty(count, row_bytes, dtype=torch.uint8)
    given = c_format(format, n=n)
    threads = torch.get_num_threads()
    status = built.ziggurat_pack(rows.data_ptr(), out.data_ptr(), count, n, row_bytes, byref(given), threads)
    return None if status else out


def unpack_fast(
    packed: UInt8[Tensor, "R W"], format: BlockFormat, *, n: int, library: CppLibrary | None = None
) -> Float[Tensor, "R n"] | None:
    """Return the numbers of packed rows; None where no kernel serves.

    Args:
        packed: bits of at least one number a row.
        format: of the numbers.
        n: numbers of a row.
        library: a build of the kernel, for tests.
    """
    built = library_for(packed, library or _LIBRARY)
    if built is None:
        return None
    packed = packed.contiguous()
    count, row_bytes = packed.shape
    out = torch.empty(count, n)
    given = c_format(format, n=n)
    threads = torch.get_num_threads()
    built.ziggurat_unpack(packed.data_ptr(), out.data_ptr(), count, n, row_bytes, byref(given), threads)
    return out


def block_format_kernel() -> str:
    """Say which implementation rounds to block formats on this CPU, and why; build the kernel if need be."""
    return _LIBRARY.kernel_line()


def declare(library: ctypes.CDLL) -> None:
    """Say which arguments the functions of the library take."""
    library.ziggurat_block_lanes.restype = c_int64
    library.ziggurat_block_lanes.argtypes = []
    library.ziggurat_quantise.restype = c_int64
    library.ziggurat_quantise.argtypes = [c_void_p, c_void_p, c_int64, c_int64, c_int64, POINTER(CFormat), c_int64]
    library.ziggurat_pack.restype = c_int64
    library.ziggurat_pack.argtypes = [c_void_p, c_void_p, c_int64, c_int64, c_int64, POINTER(CFormat), c_int64]
    library.ziggurat_unpack.restype = None
    library.ziggurat_unpack.argtypes = [c_void_p, c_void_p, c_int64, c_int64, c_int64, POINTER(CFormat), c_int64]


_LIBRARY = CppLibrary(SOURCE, declare=declare)
