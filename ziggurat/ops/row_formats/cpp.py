"""Pooled lookups and exact updates of rows in few bits, in C++: `ops/csrc/lookup/row_formats.cpp`.

The same bits as the formats of this folder and `noise.py` around the C++ rule; the sum of a lookup has the order of the
C++ kernel.
Where it cannot be built, storages decode the rows of a batch with torch instead.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from ctypes import POINTER, Structure, c_int64, c_void_p
from dataclasses import dataclass, field
from pathlib import Path

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from ziggurat.ops.cpp_build import CppLibrary, CppSource
from ziggurat.ops.lookup import GradientPart, LookupLayout, Lookups, Step, SummedGradient
from ziggurat.ops.lookup.cpp import CppKernel, part_of, parts_of, refuse_any, refuse_rows, rule_of, state_pointers
from ziggurat.ops.lookup.cpp_library import CPart, CRule
from ziggurat.ops.row_formats.noise import RowNoise
from ziggurat.ops.row_formats.row_format import RowFormat

_SOURCE = CppSource(
    path=Path(__file__).parents[1] / "csrc" / "lookup" / "row_formats.cpp",
    flags=("-fopenmp", "-ffp-contract=off", "-fno-math-errno"),
    depends_on=torch.__version__,
    without="go on without: torch decodes the rows of a batch, to the same numbers",
)


class _COrigins(Structure):
    """The struct `Origins` of rounding.h."""

    _fields_ = (
        ("count", c_int64),
        ("first_rows", c_void_p),
        ("shifts", c_void_p),
        ("keys", c_void_p),
        ("columns", c_void_p),
    )


class _CStorage(Structure):
    """The struct `Storage` of row_formats.cpp."""

    _fields_ = (
        ("rows", c_void_p),
        ("lower", c_void_p),
        ("format", c_int64),
        ("state_first", c_void_p),
        ("state_second", c_void_p),
        ("dim", c_int64),
        ("origins", c_void_p),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """Rows of a storage, and what an update of them needs.

    Args:
        row_format: what they are kept as.
        dim: D.
        rows: (R, W), contiguous.
        lower: (R, D) lower halves of split numbers; None otherwise.
        state: of the rule, in FP32; for updates.
        noise: of the rows; None rounds to the nearest.
    """

    row_format: RowFormat
    dim: int
    rows: Shaped[Tensor, "R W"]
    lower: Tensor | None
    state: dict[str, Tensor] = field(default_factory=dict)
    noise: RowNoise | None = None


def why_not_rows() -> str:
    """Say why C++ cannot be used here, or return "" if it can."""
    return _LIBRARY.reason


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
    status = _LIBRARY.needed().ziggurat_lookup_rows(
        rows_RW.data_ptr(),
        row_format.cpp_code,
        ctypes.byref(part),
        layout.dim,
        out.data_ptr(),
        out.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    if status:
        refuse_rows(layout, lookups)


def update_rows(table: PackedRows, *, kernel: CppKernel, parts: Sequence[GradientPart], step: Step) -> None:
    """Sum the gradients of equal rows, apply the rule to each row and round it, in one walk; see `LookupKernel.update`.

    Args:
        table: the rows.
        kernel: whose buffers the walk takes.
        parts: gradients, less than 2^32 numbers.
        step: the rule, its learning rate and step.
    """
    with _given(table, step) as storage:
        status = _LIBRARY.needed().ziggurat_update_rows(
            kernel.workspace,
            parts_of(parts),
            len(parts),
            ctypes.byref(storage),
            ctypes.byref(rule_of(step)),
            torch.get_num_threads(),
        )
    if status:
        refuse_any(parts)


def apply_rows(table: PackedRows, *, gradient: SummedGradient, step: Step) -> None:
    """Apply the rule to the rows of `gradient`, in place, and round each once.

    Args:
        table: the rows.
        gradient: of distinct rows.
        step: the rule, its learning rate and step.
    """
    sums = gradient.sums.contiguous()
    with _given(table, step) as storage:
        _LIBRARY.needed().ziggurat_apply_rows(
            ctypes.byref(storage),
            gradient.rows.data_ptr(),
            sums.data_ptr(),
            len(gradient.rows),
            ctypes.byref(rule_of(step)),
            torch.get_num_threads(),
        )


@contextlib.contextmanager
def _given(table: PackedRows, step: Step) -> Iterator[_CStorage]:
    """Yield the structure of a storage for C++, as long as the arrays that it points to are kept."""
    with given_noise(table.noise, number=step.number_on_host) as origins:
        yield _CStorage(
            table.rows.data_ptr(),
            None if table.lower is None else table.lower.data_ptr(),
            table.row_format.cpp_code,
            *state_pointers(table.state),
            table.dim,
            origins,
        )


@contextlib.contextmanager
def given_noise(noise: RowNoise | None, *, number: int) -> Iterator[int | None]:
    """The address of what C++ is given of noise at a step, as long as its arrays are kept; None rounds to the nearest.

    Args:
        noise: of the rows of a storage.
        number: of the step.
    """
    if noise is None:
        yield None
        return
    arrays = (noise.first_rows, noise.shifts, noise.keys(number), noise.columns)
    origins = _COrigins(len(noise.origins), *(array.ctypes.data for array in arrays))
    yield ctypes.addressof(origins)
    # Held by these names until C++ is done with their addresses.
    del arrays, origins


def _declare(library: ctypes.CDLL) -> None:
    lookup = library.ziggurat_lookup_rows
    update = library.ziggurat_update_rows
    apply = library.ziggurat_apply_rows
    lookup.restype = c_int64
    update.restype = c_int64
    apply.restype = None
    lookup.argtypes = [c_void_p, c_int64, POINTER(CPart), c_int64, c_void_p, c_int64, c_int64]
    update.argtypes = [c_void_p, POINTER(CPart), c_int64, POINTER(_CStorage), POINTER(CRule), c_int64]
    apply.argtypes = [POINTER(_CStorage), c_void_p, c_void_p, c_int64, POINTER(CRule), c_int64]


_LIBRARY = CppLibrary(_SOURCE, declare=_declare)
