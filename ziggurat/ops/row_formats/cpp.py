"""Pooled lookups and exact updates of rows in few bits, in C++: `ops/csrc/lookup/row_formats.cpp`.

The same bits as `reference.py` and `noise.py` around the C++ rule; the sum of a lookup has the order of the C++ kernel.
Where it cannot be built, storages decode the rows of a batch with torch instead.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from ziggurat.ops.cpp_build import CppSource
from ziggurat.ops.lookup import LookupLayout, Lookups, Step, SummedGradient
from ziggurat.ops.lookup.cpp import part_of, refuse_rows, rule_of, state_pointers
from ziggurat.ops.lookup.cpp_library import CPart, CRule
from ziggurat.ops.row_formats.formats import RowFormat

_SOURCE = CppSource(
    path=Path(__file__).parents[1] / "csrc" / "lookup" / "row_formats.cpp",
    flags=("-fopenmp", "-ffp-contract=off", "-fno-math-errno"),
    depends_on=torch.__version__,
    without="go on without: torch decodes the rows of a batch, to the same numbers",
)
FORMATS = {RowFormat.BF16: 1, RowFormat.SPLIT_BF16: 2, RowFormat.INT8: 3, RowFormat.INT4: 4}


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of a storage.

    Args:
        row_format: what they are kept as.
        rows: (R, W), contiguous.
        lower: (R, D) lower halves of split numbers; None otherwise.
    """

    row_format: RowFormat
    rows: Shaped[Tensor, "R W"]
    lower: Tensor | None


def why_not_rows() -> str:
    """Why C++ cannot be used here; "" if it can."""
    return _loaded()[1]


def lookup_rows(
    rows_RW: Shaped[Tensor, "R W"],
    row_format: RowFormat,
    *,
    layout: LookupLayout,
    lookups: Lookups,
    out: Float[Tensor, "B T"],
) -> None:
    """Pool the fields of a layout into their columns of `out`; see `LookupKernel.lookup`.

    Raises:
        BoundsError: a row is outside its table.
    """
    part = part_of(layout, lookups)
    status = _library().ziggurat_lookup_rows(
        rows_RW.data_ptr(),
        FORMATS[row_format],
        ctypes.byref(part),
        layout.dim,
        out.data_ptr(),
        out.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    if status:
        refuse_rows(layout, lookups)


def apply_rows(
    table: PackedRows,
    *,
    state: dict[str, Tensor],
    gradient: SummedGradient,
    step: Step,
    words_N: Int64[Tensor, "N"] | None,
) -> None:
    """Apply the rule to the rows of `gradient`, in place, and round each once.

    Args:
        table: the rows.
        state: of the rule, in FP32.
        gradient: of distinct rows.
        step: the rule, its learning rate and step.
        words_N: noise of each row of the gradient; None rounds to the nearest.
    """
    words = None if words_N is None else words_N.to(torch.int32)  # the same 32 bits
    sums = gradient.sums.contiguous()
    _library().ziggurat_apply_rows(
        table.rows.data_ptr(),
        None if table.lower is None else table.lower.data_ptr(),
        FORMATS[table.row_format],
        *state_pointers(state),
        sums.shape[1],
        gradient.rows.data_ptr(),
        sums.data_ptr(),
        None if words is None else words.data_ptr(),
        len(gradient.rows),
        ctypes.byref(rule_of(step)),
        torch.get_num_threads(),
    )


def _library() -> ctypes.CDLL:
    library, reason = _loaded()
    assert library is not None, reason
    return library


@functools.cache
def _loaded() -> tuple[ctypes.CDLL | None, str]:
    """The compiled library, if it can be built; tried once a process."""
    return _SOURCE.load_or_reason(_declare)


def _declare(library: ctypes.CDLL) -> None:
    lookup, apply = library.ziggurat_lookup_rows, library.ziggurat_apply_rows
    lookup.restype, apply.restype = c_int64, None
    lookup.argtypes = [c_void_p, c_int64, POINTER(CPart), c_int64, c_void_p, c_int64, c_int64]
    apply.argtypes = [c_void_p, c_void_p, c_int64, *[c_void_p] * 2, c_int64, *[c_void_p] * 3, c_int64]
    apply.argtypes = [*apply.argtypes, POINTER(CRule), c_int64]
