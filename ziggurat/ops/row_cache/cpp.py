"""The cache of rows in C++: `ops/csrc/lookup/row_cache.cpp`. The same places and the same bits as `ways.py` says."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from ctypes import POINTER, Structure, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ziggurat.ops.cpp_build import CppLibrary, CppSource
from ziggurat.ops.lookup import LookupLayout, Lookups, Step
from ziggurat.ops.lookup.cpp import CppKernel, part_of, refuse_rows, rule_of, state_pointers
from ziggurat.ops.lookup.cpp_library import CPart, CRule
from ziggurat.ops.row_cache.admission import Admission
from ziggurat.ops.row_formats.cpp import PackedRows, given_noise

_SOURCE = CppSource(
    path=Path(__file__).parents[1] / "csrc" / "lookup" / "row_cache.cpp",
    flags=("-fopenmp", "-ffp-contract=off", "-fno-math-errno"),
    depends_on=torch.__version__,
    without="go on without: torch finds and moves rows, to the same numbers",
)


# A protocol and not the class: `ways.py` imports this module.
class WaysInMemory(Protocol):
    """The tensors of `Ways` that compiled code reads and writes."""

    tags_SW: Tensor  # noqa: N815  # names with shapes, as in `Ways`
    stamps_SW: Tensor  # noqa: N815  # names with shapes, as in `Ways`
    counts_R: Tensor | None  # noqa: N815  # names with shapes, as in `Ways`
    measures_SW: Tensor | None  # noqa: N815  # names with shapes, as in `Ways`

    @property
    def num_sets(self) -> int:
        """Sets of ways."""
        ...


class CWays(Structure):
    """The struct `Ways` of ways.h."""

    _fields_ = (
        ("num_sets", c_int64),
        ("tags", c_void_p),
        ("stamps", c_void_p),
        ("counts", c_void_p),
        ("measures", c_void_p),
    )


class CPlaced(Structure):
    """The struct `Placed` of row_cache.cpp, with its `Arrays`."""

    _fields_ = (
        ("slots", c_void_p),
        ("packed", c_void_p),
        ("state", c_void_p * 2),
        ("behind", c_void_p * 2),
        ("widths", c_int64 * 2),
        ("format", c_int64),
        ("dim", c_int64),
        ("origins", c_void_p),
        ("rows", c_void_p),
        ("places", c_void_p),
        ("left", c_void_p),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedRows:
    """A cache, what is behind it, and where an admission has put the distinct rows of a step.

    Args:
        slots: (C, D) rows of the cache.
        state: of the rule, of the rows of the cache.
        table: rows behind it, with their state and noise.
        rows: of the step.
        admission: where they go.
    """

    slots: Float[Tensor, "C D"]
    state: dict[str, Tensor]
    table: PackedRows
    rows: Int64[Tensor, "U"]
    admission: Admission


def why_not_cache() -> str:
    """Say why C++ cannot be used here, or return "" if it can."""
    return _LIBRARY.reason


def is_available() -> bool:
    """Return whether C++ can be used here."""
    return not why_not_cache()


def find_rows(ways: WaysInMemory, rows_N: Int64[Tensor, "N"]) -> Int64[Tensor, "N"]:
    """The place of each row in a cache, -1 where it is not held; see `Ways.find`."""
    rows = rows_N.contiguous()
    places = torch.empty_like(rows)
    _LIBRARY.needed().ziggurat_find_rows(
        ctypes.byref(_ways(ways)), rows.data_ptr(), len(rows), places.data_ptr(), torch.get_num_threads()
    )
    return places


def admit_rows(
    ways: WaysInMemory, rows_U: Int64[Tensor, "U"], *, step: int
) -> tuple[Int64[Tensor, "U"], Int64[Tensor, "U"], int, int, int]:
    """A way for each row of a step, what left it, and the three numbers of an `Admission`; see `Ways.admit`."""
    rows = rows_U.contiguous()
    counts = (c_int64 * 3)()
    places = torch.empty_like(rows)
    left = torch.empty_like(rows)
    _LIBRARY.needed().ziggurat_admit_rows(
        ctypes.byref(_ways(ways)),
        rows.data_ptr(),
        len(rows),
        step,
        places.data_ptr(),
        left.data_ptr(),
        counts,
        torch.get_num_threads(),
    )
    return places, left, *counts


def lookup_cached(
    slots: Float[Tensor, "C D"],
    table: PackedRows,
    *,
    ways: WaysInMemory,
    layout: LookupLayout,
    lookups: Lookups,
    out: Float[Tensor, "B T"],
) -> None:
    """Pool fields whose rows are in a cache, or behind it in a format; see `LookupKernel.lookup`.

    Raises:
        BoundsError: a row is outside its table.
    """
    part = part_of(layout, lookups)
    status = _LIBRARY.needed().ziggurat_lookup_cached(
        slots.data_ptr(),
        table.rows.data_ptr(),
        table.row_format.cpp_code,
        ctypes.byref(_ways(ways)),
        ctypes.byref(part),
        layout.dim,
        out.data_ptr(),
        out.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    if status:
        refuse_rows(layout, lookups)


def update_cached(cached: CachedRows, *, kernel: CppKernel, step: Step) -> None:
    """Move rows between cache and table, sum the gradients of each and apply the rule to it, in one walk.

    What leaves a way is rounded and kept, what enters it is decoded; a row that found no way is updated in the table.

    Args:
        cached: the rows; `kernel.distinct_rows` gave them last, and the parts' gradients still exist.
        kernel: that has sorted the parts.
        step: the rule, its learning rate and step.
    """
    with _given(cached, step) as placed:
        _LIBRARY.needed().ziggurat_update_cached(
            kernel.workspace, ctypes.byref(placed), ctypes.byref(rule_of(step)), torch.get_num_threads()
        )


def apply_cached(cached: CachedRows, *, sums: Float[Tensor, "U D"], step: Step) -> None:
    """The same for gradients that are summed.

    Args:
        cached: the rows.
        sums: of each row.
        step: the rule, its learning rate and step.
    """
    sums = sums.contiguous()
    with _given(cached, step) as placed:
        _LIBRARY.needed().ziggurat_apply_cached(
            sums.data_ptr(), len(sums), ctypes.byref(placed), ctypes.byref(rule_of(step)), torch.get_num_threads()
        )


@contextlib.contextmanager
def _given(cached: CachedRows, step: Step) -> Iterator[CPlaced]:
    """Yield the structure of rows for C++, as long as the arrays that it points to are kept."""
    table = cached.table
    with given_noise(table.noise, number=step.number_on_host) as origins:
        yield CPlaced(
            cached.slots.data_ptr(),
            table.rows.data_ptr(),
            (c_void_p * 2)(*state_pointers(cached.state)),
            (c_void_p * 2)(*state_pointers(table.state)),
            # Numbers of a row of each array: one, or one a column.
            (c_int64 * 2)(*(tensor[:1].numel() for tensor in cached.state.values())),
            table.row_format.cpp_code,
            table.dim,
            origins,
            cached.rows.data_ptr(),
            cached.admission.places.data_ptr(),
            cached.admission.left.data_ptr(),
        )


def _ways(ways: WaysInMemory) -> CWays:
    found = (None if each is None else each.data_ptr() for each in (ways.counts_R, ways.measures_SW))
    return CWays(ways.num_sets, ways.tags_SW.data_ptr(), ways.stamps_SW.data_ptr(), *found)


def _declare(library: ctypes.CDLL) -> None:
    find = library.ziggurat_find_rows
    admit = library.ziggurat_admit_rows
    lookup = library.ziggurat_lookup_cached
    update = library.ziggurat_update_cached
    apply = library.ziggurat_apply_cached
    find.restype = admit.restype = update.restype = apply.restype = None
    lookup.restype = c_int64
    find.argtypes = [POINTER(CWays), c_void_p, c_int64, c_void_p, c_int64]
    admit.argtypes = [POINTER(CWays), c_void_p, c_int64, c_int64, c_void_p, c_void_p, POINTER(c_int64), c_int64]
    lookup.argtypes = [c_void_p, c_void_p, c_int64, POINTER(CWays), POINTER(CPart), c_int64, c_void_p, c_int64, c_int64]
    update.argtypes = [c_void_p, POINTER(CPlaced), POINTER(CRule), c_int64]
    apply.argtypes = [c_void_p, c_int64, POINTER(CPlaced), POINTER(CRule), c_int64]


_LIBRARY = CppLibrary(_SOURCE, declare=_declare)
