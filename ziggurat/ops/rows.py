"""Rows in columns: place them in another order, gather runs of them into a batch, hash their numbers.

    columns of a row group     place     columns of a window           gather        batch
    C1  a b c d …             ──────►    C1  c a d b │ …      run  ──────────────►   single (S, B), widened to int64
    I1  1 2 3 4 …              4 B       I1  3 1 4 2 │ …     of rows                 dense  (B, N), row by row

A shuffle of columns would touch a cache line for each value. Here it does not: a row group is permuted while its
columns, one after the other, are in the cache (`place_rows`), and what a batch takes lies together (`gather_rows`).

The C++ kernel and the numpy reference give the same bytes; numpy serves machines without a compiler. Both release the
interpreter lock. Cost in C++, on one core of an AMD EPYC (Zen 4): 1 ns a value to place, 0.5 ns to gather, 2.5 ns a row
to hash.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int32, Int64

from ziggurat.features.hashing import GOLDEN, mix
from ziggurat.ops.cpp_build import CppLibrary, CppSource

CHUNK_BITS = 40  # of a list's start: above its chunk, below its place in the chunk

_SOURCE = CppSource(
    path=Path(__file__).parent / "csrc" / "rows.cpp", without="go on without: numpy gives the same rows, slower"
)


class Columns:
    """Columns of one block of rows, and where each lies in memory.

    Args:
        arrays: each (R, …), contiguous; kept as long as the block.
    """

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.arrays = tuple(arrays)
        self.addresses = np.array([_address(array) for array in self.arrays], dtype=np.uint64)
        self.widths = np.array([_row_bytes(array) for array in self.arrays], dtype=np.int64)


def place_rows(columns: Columns, *, out: Columns, places: Int32[np.ndarray, " N"]) -> None:
    """Copy row i of every column to row `places[i]` of its target; rows with a negative place are left out.

    Args:
        columns: of N rows.
        out: of R rows, of the same dtypes and row shapes.
        places: none twice, all below R.
    """
    library = _LIBRARY.or_none()
    if library is None:
        place_rows_reference(columns, out=out, places=places)
        return
    places = np.ascontiguousarray(places, dtype=np.int32)
    library.ziggurat_place_rows(
        len(columns.arrays), *map(_address, (columns.addresses, out.addresses, columns.widths, places)), len(places)
    )


def place_rows_reference(columns: Columns, *, out: Columns, places: Int32[np.ndarray, " N"]) -> None:
    """Write the result that `place_rows` must equal."""
    kept = places >= 0
    everything = bool(kept.all())
    for column, target in zip(columns.arrays, out.arrays, strict=True):
        target[places if everything else places[kept]] = column if everything else column[kept]


@dataclass(frozen=True, slots=True)
class Targets:
    """Places of the columns of a block in the arrays of a batch, counted in elements.

    Args:
        array: number of the array of each column.
        first: element of its first row.
        step: elements from one row to the next.
    """

    array: Int64[np.ndarray, " C"]
    first: Int64[np.ndarray, " C"]
    step: Int64[np.ndarray, " C"]


def gather_rows(
    blocks: Sequence[Columns], runs: Int64[np.ndarray, "K 3"], *, out: Sequence[np.ndarray], targets: Targets
) -> None:
    """Copy runs of rows, one behind the other, from columns to their places in the arrays of a batch.

    Args:
        blocks: all with the same columns.
        runs: number of the block, first row, number of rows.
        out: contiguous arrays; what is int32 in a column and int64 here is widened.
        targets: of each column.
    """
    library = _LIBRARY.or_none()
    if library is None:
        gather_rows_reference(blocks, runs, out=out, targets=targets)
        return
    runs = np.ascontiguousarray(runs, dtype=np.int64)
    addresses = np.concatenate([block.addresses for block in blocks])
    # From here on in bytes, as the kernel counts.
    items = np.array([array.itemsize for array in out], dtype=np.int64)[targets.array]
    begins = np.array([_address(array) for array in out], dtype=np.int64)[targets.array] + targets.first * items
    strides = targets.step * items
    widths = blocks[0].widths
    # Columns of 4 bytes may be widened to 8; all others go as they are.
    out_widths = np.where(widths == 4, items, widths)
    library.ziggurat_gather_rows(
        len(runs), _address(runs), len(widths), *map(_address, (addresses, widths, begins, out_widths, strides))
    )


def gather_rows_reference(
    blocks: Sequence[Columns], runs: Int64[np.ndarray, "K 3"], *, out: Sequence[np.ndarray], targets: Targets
) -> None:
    """Write the result that `gather_rows` must equal."""
    for number, (array, first, step) in enumerate(
        zip(targets.array.tolist(), targets.first.tolist(), targets.step.tolist(), strict=True)
    ):
        parts = [blocks[block].arrays[number][begin : begin + rows] for block, begin, rows in runs.tolist()]
        values = np.concatenate(parts)
        # A view, since `out` is contiguous: writing to it writes to the batch.
        flat = out[array].reshape(-1)
        if values.ndim == 1:
            flat[first::step][: len(values)] = values
        else:
            flat[first : first + values.size] = values.reshape(-1)


def gather_lists(
    starts: Int64[np.ndarray, " N"], *, offsets: Int64[np.ndarray, " N+1"], chunks: Sequence[Int32[np.ndarray, " V"]]
) -> Int64[np.ndarray, " M"]:
    """Copy lists out of chunks of values, one behind the other.

    Args:
        starts: of each list: number of the chunk · 2^CHUNK_BITS + place in the chunk.
        offsets: where each list begins in the result, and the end of the last.
        chunks: the values.
    """
    library = _LIBRARY.or_none()
    if library is None:
        return gather_lists_reference(starts, offsets=offsets, chunks=chunks)
    starts = np.ascontiguousarray(starts, np.int64)
    offsets = np.ascontiguousarray(offsets, np.int64)
    values = np.empty(int(offsets[-1]), dtype=np.int64)
    begins = np.array([_address(chunk) for chunk in chunks], dtype=np.uint64)
    library.ziggurat_gather_lists(len(starts), *map(_address, (starts, offsets, begins, values)))
    return values


def gather_lists_reference(
    starts: Int64[np.ndarray, " N"], *, offsets: Int64[np.ndarray, " N+1"], chunks: Sequence[Int32[np.ndarray, " V"]]
) -> Int64[np.ndarray, " M"]:
    """Compute the result that `gather_lists` must equal."""
    bases = np.zeros(len(chunks) + 1, dtype=np.int64)
    np.cumsum([len(chunk) for chunk in chunks], out=bases[1:])
    values = np.concatenate(chunks) if len(chunks) else np.empty(0, dtype=np.int32)
    # A start is the number of its chunk, and below it the place there.
    begins = bases[starts >> CHUNK_BITS] + (starts & ((1 << CHUNK_BITS) - 1))
    lengths = np.diff(offsets)
    index = np.repeat(begins - offsets[:-1], lengths) + np.arange(int(offsets[-1]))
    return values[index].astype(np.int64)


def share_lists(values: Int32[np.ndarray, " V"], offsets: Int64[np.ndarray, " N+1"]) -> Int64[np.ndarray, " N"]:
    """Return where each list starts: at its own offset, or where the list before starts if both are equal.

    Equal lists then have one start, in runs, and nothing is copied. Costs one comparison of values.

    Args:
        values: rows of the lists, one list behind the other.
        offsets: where each begins, and the end of the last.
    """
    library = _LIBRARY.or_none()
    if library is None:
        return share_lists_reference(values, offsets)
    values = np.ascontiguousarray(values, np.int32)
    offsets = np.ascontiguousarray(offsets, np.int64)
    starts = np.empty(len(offsets) - 1, dtype=np.int64)
    library.ziggurat_share_lists(_address(values), _address(offsets), len(starts), _address(starts))
    return starts


def share_lists_reference(
    values: Int32[np.ndarray, " V"], offsets: Int64[np.ndarray, " N+1"]
) -> Int64[np.ndarray, " N"]:
    """Compute the result that `share_lists` must equal."""
    offsets = np.asarray(offsets, dtype=np.int64)
    lengths = np.diff(offsets)
    if not len(lengths):
        return np.empty(0, dtype=np.int64)
    places = np.arange(offsets[0], offsets[-1])
    # Each value against the one a list's length before: the same place of the list before, if both are as long.
    differs = values[places] != values[np.maximum(places - np.repeat(lengths, lengths), 0)]
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(differs)])
    # A list is new if any of its values differs, or its length.
    differs_L = (sums[offsets[1:] - offsets[0]] > sums[offsets[:-1] - offsets[0]]) | (np.diff(lengths, prepend=-1) != 0)
    heads = np.maximum.accumulate(np.where(differs_L, np.arange(len(lengths)), 0))
    return offsets[heads]


def hash_rows(row_ids: Int64[np.ndarray, " N"]) -> tuple[int, int]:
    """Two hashes of row ids, mod 2^64: one that depends on their order, and one that adds up (see the ledger)."""
    library = _LIBRARY.or_none()
    row_ids = np.ascontiguousarray(row_ids, dtype=np.int64)
    if library is None:
        return hash_rows_reference(row_ids)
    sums = np.zeros(2, dtype=np.uint64)
    library.ziggurat_hash_rows(_address(row_ids), len(row_ids), _address(sums))
    return int(sums[0]), int(sums[1])


def hash_rows_reference(row_ids: Int64[np.ndarray, " N"]) -> tuple[int, int]:
    """Compute the result that `hash_rows` must equal."""
    # Mixed before it is added up: sums of the ids themselves would be equal for many sets of rows.
    mixed = mix(row_ids.view(np.uint64) + GOLDEN)
    ordered = mix(mixed + np.arange(len(mixed), dtype=np.uint64) * GOLDEN)
    return int(ordered.sum(dtype=np.uint64)), int(mixed.sum(dtype=np.uint64))


def kernel_reason() -> str:
    """Say why rows are moved with numpy instead of C++, or return "" if they are not."""
    return _LIBRARY.reason


def _row_bytes(column: np.ndarray) -> int:
    assert column.flags.c_contiguous
    return column.itemsize * (column.shape[1] if column.ndim > 1 else 1)


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]  # three times as fast as array.ctypes.data


def _declare(library: ctypes.CDLL) -> None:
    prototypes = {
        "ziggurat_place_rows": [c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_int64],
        "ziggurat_gather_rows": [c_int64, c_void_p, c_int64, *[c_void_p] * 5],
        "ziggurat_gather_lists": [c_int64, *[c_void_p] * 4],
        "ziggurat_share_lists": [c_void_p, c_void_p, c_int64, c_void_p],
        "ziggurat_hash_rows": [c_void_p, c_int64, c_void_p],
    }
    for name, arguments in prototypes.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = None


_LIBRARY = CppLibrary(_SOURCE, declare=_declare)
