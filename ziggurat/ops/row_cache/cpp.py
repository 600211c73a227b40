"""The cache of rows in C++: `ops/csrc/lookup/row_cache.cpp`. The same places and the same bits as `ways.py` says."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ziggurat.ops.cpp_build import CppLibrary, CppSource
from ziggurat.ops.lookup import LookupLayout, Lookups
from ziggurat.ops.lookup.cpp import part_of, refuse_rows
from ziggurat.ops.lookup.cpp_library import CPart
from ziggurat.ops.row_formats.cpp import FORMATS, PackedRows, given_noise

if TYPE_CHECKING:
    from ziggurat.ops.row_cache.ways import Ways

_SOURCE = CppSource(
    path=Path(__file__).parents[1] / "csrc" / "lookup" / "row_cache.cpp",
    flags=("-fopenmp", "-ffp-contract=off", "-fno-math-errno"),
    depends_on=torch.__version__,
    without="go on without: torch finds and moves rows, to the same numbers",
)


class CWays(Structure):
    """The struct `Ways` of ways.h."""

    _fields_ = (
        ("num_sets", c_int64),
        ("tags", c_void_p),
        ("stamps", c_void_p),
        ("counts", c_void_p),
        ("measures", c_void_p),
    )


class CArrays(Structure):
    """The struct `Arrays` of row_cache.cpp."""

    _fields_ = (
        ("slots", c_void_p),
        ("rows", c_void_p),
        ("lower", c_void_p),
        ("state", c_void_p * 2),
        ("behind", c_void_p * 2),
        ("widths", c_int64 * 2),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """Rows that leave places of a cache, and rows that take them.

    Args:
        places: of the cache, each once.
        leaving: the row that leaves each place, negative where none does.
        entering: the row that takes it, negative where none does.
    """

    places: Int64[Tensor, "N"]
    leaving: Int64[Tensor, "N"]
    entering: Int64[Tensor, "N"]


def why_not_cache() -> str:
    """Why C++ cannot be used here; "" if it can."""
    return _LIBRARY.reason


def is_available() -> bool:
    """Whether C++ can be used here."""
    return not why_not_cache()


def find_rows(ways: Ways, rows_N: Int64[Tensor, "N"]) -> Int64[Tensor, "N"]:
    """The place of each row in a cache, -1 where it is not held; see `Ways.find`."""
    rows = rows_N.contiguous()
    places = torch.empty_like(rows)
    _LIBRARY.needed().ziggurat_find_rows(
        ctypes.byref(_ways(ways)), rows.data_ptr(), len(rows), places.data_ptr(), torch.get_num_threads()
    )
    return places


def admit_rows(ways: Ways, rows_U: Int64[Tensor, "U"], *, step: int) -> tuple[Int64[Tensor, "U"], Int64[Tensor, "U"]]:
    """A way for each row of a step, and what left it; see `Ways.admit`."""
    rows = rows_U.contiguous()
    places, left = torch.empty_like(rows), torch.empty_like(rows)
    _LIBRARY.needed().ziggurat_admit_rows(
        ctypes.byref(_ways(ways)),
        rows.data_ptr(),
        len(rows),
        step,
        places.data_ptr(),
        left.data_ptr(),
        torch.get_num_threads(),
    )
    return places, left


def lookup_cached(
    slots: Float[Tensor, "C D"],
    table: PackedRows,
    *,
    ways: Ways,
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
        FORMATS[table.row_format],
        ctypes.byref(_ways(ways)),
        ctypes.byref(part),
        layout.dim,
        out.data_ptr(),
        out.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    if status:
        refuse_rows(layout, lookups)


def exchange_rows(
    slots: Float[Tensor, "C D"], table: PackedRows, *, behind: dict[str, Tensor], moves: Moves, number: int
) -> None:
    """Move rows between a cache and what is behind it; what leaves is rounded, state moves as it is.

    Args:
        slots: rows of the cache.
        table: rows behind it; its state is that of the cache.
        behind: the state behind it, by the same names.
        moves: which rows.
        number: of the step, for the noise of what leaves.
    """
    held = list(table.state.values())
    arrays = CArrays(
        slots.data_ptr(),
        table.rows.data_ptr(),
        None,
        (c_void_p * 2)(*(tensor.data_ptr() for tensor in held)),
        (c_void_p * 2)(*(behind[key].data_ptr() for key in table.state)),
        (c_int64 * 2)(*(tensor[:1].numel() for tensor in held)),
    )
    with given_noise(table.noise, number=number) as origins:
        _LIBRARY.needed().ziggurat_exchange_rows(
            ctypes.byref(arrays),
            FORMATS[table.row_format],
            slots.shape[1],
            moves.places.data_ptr(),
            moves.leaving.data_ptr(),
            moves.entering.data_ptr(),
            origins,
            len(moves.places),
            torch.get_num_threads(),
        )


def _ways(ways: Ways) -> CWays:
    found = (None if each is None else each.data_ptr() for each in (ways.counts_R, ways.measures_SW))
    return CWays(ways.num_sets, ways.tags_SW.data_ptr(), ways.stamps_SW.data_ptr(), *found)


def _declare(library: ctypes.CDLL) -> None:
    find, admit = library.ziggurat_find_rows, library.ziggurat_admit_rows
    lookup, exchange = library.ziggurat_lookup_cached, library.ziggurat_exchange_rows
    find.restype = admit.restype = exchange.restype = None
    lookup.restype = c_int64
    find.argtypes = [POINTER(CWays), c_void_p, c_int64, c_void_p, c_int64]
    admit.argtypes = [POINTER(CWays), c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64]
    lookup.argtypes = [c_void_p, c_void_p, c_int64, POINTER(CWays), POINTER(CPart), c_int64, c_void_p, c_int64, c_int64]
    exchange.argtypes = [POINTER(CArrays), c_int64, c_int64, *[c_void_p] * 4, c_int64, c_int64]


_LIBRARY = CppLibrary(_SOURCE, declare=_declare)
