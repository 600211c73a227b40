"""Columns of one wide matrix to and from several narrow ones: how exchanged embeddings find their places.

    parts   [ a c e ]  [ b d ]          join ──►   wide   [ a b c d e ]          ◄── split

Torch copies one block of columns after the other, through the whole matrix each time: with 26 features of 64 numbers
dealt to four ranks, a batch of 1,024 passes through the cache in 26 thin stripes. The C++ kernel goes row by row, so
that every matrix is read and written from front to back: 0.6 ms instead of 2.2 for those 6.8 MB, on one thread of an
AMD EPYC (Zen 4). The reference, in torch, is what it must equal; it serves all other devices, and machines without a
compiler.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from ziggurat.ops.cpp_build import CppLibrary, CppSource

_SOURCE = CppSource(
    path=Path(__file__).parent / "csrc" / "columns.cpp",
    without="go on without: torch's own copies give the same numbers, slower",
)


@dataclass(frozen=True, slots=True)
class Columns:
    """Neighbouring columns of the wide matrix, and where they are in a narrow one.

    Args:
        part: number of the narrow matrix.
        part_begin: first column there.
        begin: first column of the wide matrix.
        width: number of columns.
    """

    part: int
    part_begin: int
    begin: int
    width: int


class ColumnMoves:
    """Joins parts to a wide matrix, and splits it again.

    Args:
        columns: of the wide matrix, each in one part.
    """

    def __init__(self, columns: Sequence[Columns]) -> None:
        self._columns = tuple(columns)
        self._tables: dict[int, Tensor] = {}

    def join(self, parts: Sequence[Float[Tensor, "R C"]], *, out: Float[Tensor, "R W"]) -> None:
        """Write the columns of the parts into the wide matrix; all contiguous, of one dtype."""
        self._run("ziggurat_join_columns", out, parts)

    def split(self, wide: Float[Tensor, "R W"], *, out: Sequence[Float[Tensor, "R C"]]) -> None:
        """Write the columns of the wide matrix into the parts; all contiguous, of one dtype."""
        self._run("ziggurat_split_columns", wide, out)

    def _run(self, name: str, wide: Tensor, parts: Sequence[Tensor]) -> None:
        library = _LIBRARY.or_none() if all(_is_plain(each, like=wide) for each in (wide, *parts)) else None
        if library is None:
            reference = join_reference if name == "ziggurat_join_columns" else split_reference
            reference(self._columns, wide=wide, parts=parts)
            return
        # The kernel moves bytes, so one table of columns serves all dtypes of a size.
        item = wide.element_size()
        if item not in self._tables:
            rows = [(each.part, each.part_begin * item, each.begin * item, each.width * item) for each in self._columns]
            self._tables[item] = torch.tensor(rows, dtype=torch.int64).view(-1)
        getattr(library, name)(
            wide.data_ptr(),
            wide.shape[1] * item,
            (c_void_p * len(parts))(*(part.data_ptr() for part in parts)),
            (c_int64 * len(parts))(*(part.shape[1] * item for part in parts)),
            len(wide),
            len(self._columns),
            self._tables[item].data_ptr(),
        )


def join_reference(columns: Sequence[Columns], *, wide: Tensor, parts: Sequence[Tensor]) -> None:
    """Write the result that `ColumnMoves.join` must equal."""
    for each in columns:
        wide[:, _wide(each)] = parts[each.part][:, _narrow(each)]


def split_reference(columns: Sequence[Columns], *, wide: Tensor, parts: Sequence[Tensor]) -> None:
    """Write the result that `ColumnMoves.split` must equal."""
    for each in columns:
        parts[each.part][:, _narrow(each)] = wide[:, _wide(each)]


def _wide(columns: Columns) -> slice:
    return slice(columns.begin, columns.begin + columns.width)


def _narrow(columns: Columns) -> slice:
    return slice(columns.part_begin, columns.part_begin + columns.width)


def _is_plain(matrix: Tensor, *, like: Tensor) -> bool:
    return matrix.device.type == "cpu" and matrix.dtype == like.dtype and matrix.is_contiguous()


def _declare(library: ctypes.CDLL) -> None:
    for function in (library.ziggurat_join_columns, library.ziggurat_split_columns):
        function.argtypes = [c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_void_p]
        function.restype = None


_LIBRARY = CppLibrary(_SOURCE, declare=_declare)
