"""A product of two matrices in INT8: codes of both operands, exact INT32 sums, and two scales.

    left (m, k)   ──► codes, a scale for each row      ┐
                                                       ├─► torch._int_mm: INT32 sums ──► sum · scale · scale
    right (k, n)  ──► codes, a scale for each column   ┘      VNNI, tensor cores

    scale = largest magnitude / 127, 1 where all are zero        code = round(x / scale), ties to even

torch rounds an operand in five passes over memory, which takes as long as the product itself; the kernel
(`ops/csrc/int8_product.cpp`) takes two passes, reads BF16 as it is, and gives BF16 or FP32. `*_reference` define the
numbers, and the kernel has the same bits. What holds a number that is not finite has the scale NaN: its products are
NaN, so that the step finds it and changes no weight.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p
from pathlib import Path

import torch
from jaxtyping import Float, Float32, Int8, Int32
from torch import Tensor

from ziggurat.ops.cpp_build import CppLibrary, CppSource
from ziggurat.ops.kernel_choice import library_for

SOURCE = CppSource(
    path=Path(__file__).parents[1] / "ops" / "csrc" / "int8_product.cpp",
    flags=("-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fwrapv", "-w"),
    depends_on=torch.__version__,  # whose OpenMP it shares
    without="go on without: torch computes the same numbers, slower",
)
_MOST = 127.0


def int8_product(
    left: Float[Tensor, "m k"], right: Float[Tensor, "k n"], *, dtype: torch.dtype, library: CppLibrary | None = None
) -> Float[Tensor, "m n"]:
    """Multiply matrices of FP32 or BF16 in INT8.

    Args:
        left: operand.
        right: operand.
        dtype: of the result, FP32 or BF16.
        library: a build of the kernel, for tests.
    """
    left_codes, of_rows = codes(left, dim=1, library=library)
    right_codes, of_columns = codes(right, dim=0, library=library)
    sums = torch._int_mm(left_codes, right_codes)
    built = library_for(sums, library or _LIBRARY)
    if built is None or dtype not in (torch.float32, torch.bfloat16):
        return scaled_reference(sums, of_rows, of_columns).to(dtype)
    out = torch.empty(sums.shape, dtype=dtype)
    rows, columns = sums.shape
    sums = sums.contiguous()
    built.ziggurat_int8_scaled(
        sums.data_ptr(),
        of_rows.data_ptr(),
        of_columns.data_ptr(),
        rows,
        columns,
        dtype is torch.bfloat16,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def codes(
    operand: Float[Tensor, "a b"], *, dim: int, library: CppLibrary | None = None
) -> tuple[Int8[Tensor, "a b"], Float32[Tensor, "_"]]:
    """Return the codes of an operand, laid out as it is, and the scale of each slice along a dim.

    Args:
        operand: FP32 or BF16.
        dim: that the product sums over: 1 of the left operand, 0 of the right.
        library: a build of the kernel, for tests.
    """
    built = library_for(operand, library or _LIBRARY)
    if built is None or operand.dtype not in (torch.float32, torch.bfloat16):
        return codes_reference(operand, dim=dim)
    if not operand.is_contiguous() and operand.t().is_contiguous():  # rounded where it lies
        found, scales = codes(operand.t(), dim=1 - dim, library=library)
        return found.t(), scales
    operand = operand.detach().contiguous()
    rows, columns = operand.shape
    found = torch.empty(operand.shape, dtype=torch.int8)
    scales = torch.empty(rows if dim == 1 else columns)
    built.ziggurat_int8_codes(
        operand.data_ptr(),
        operand.dtype is torch.bfloat16,
        rows,
        columns,
        dim == 0,
        found.data_ptr(),
        scales.data_ptr(),
        torch.get_num_threads(),
    )
    return found, scales


def codes_reference(operand: Float[Tensor, "a b"], *, dim: int) -> tuple[Int8[Tensor, "a b"], Float32[Tensor, "_"]]:
    """Compute the codes and scales that `codes` must equal."""
    numbers = operand.float()
    largest = numbers.abs().amax(dim=dim, keepdim=True)
    scales = torch.where(largest == 0, 1.0, largest / torch.tensor(_MOST))
    scales = torch.where(largest.isfinite(), scales, torch.nan)
    return torch.round(numbers / scales).nan_to_num(0.0, 0.0, 0.0).to(torch.int8), scales.flatten()


def scaled_reference(
    sums: Int32[Tensor, "m n"], of_rows: Float32[Tensor, "m"], of_columns: Float32[Tensor, "n"]
) -> Float32[Tensor, "m n"]:
    """Compute the numbers of sums, which the kernel must equal."""
    return sums.float() * of_rows[:, None] * of_columns


def declare(library: ctypes.CDLL) -> None:
    """Say which arguments the functions of the library take."""
    library.ziggurat_int8_codes.restype = None
    library.ziggurat_int8_codes.argtypes = [c_void_p, *[c_int64] * 4, c_void_p, c_void_p, c_int64]
    library.ziggurat_int8_scaled.restype = None
    library.ziggurat_int8_scaled.argtypes = [*[c_void_p] * 3, *[c_int64] * 3, c_void_p, c_int64]


_LIBRARY = CppLibrary(SOURCE, declare=declare)
