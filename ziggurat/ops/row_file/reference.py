"""How rows lie in a file, and how they are read and written, in plain Python: the twin that defines `row_file.cpp`.

    unit 0 (4 KiB)                        unit 1
    │ row 0 │ row 1 │ … │ row k−1 │ rest │ row k │ …          k = ⌊4096 / row bytes⌋; a row never lies in two units
      │
      └─ payload (the row's numbers) │ tag (4 bytes)

Rows of more than 4 KiB have units of their own, of whole pages. The file is as long as all rows and takes disk only
where something was written. The tag says what a row is:

    0                          never written: the file has zeros there, whether or not its neighbours were written
    the hash of row and number as written
    anything else              damaged: half of a write, or bytes of another row

    hash: h = G ⊕ row; for each 32-bit word w: h = (h ⊕ w)·0xBF58476D1CE4E5B9, h ⊕= h ≫ 29; upper 32 bits, 1 for 0

The hash finds accidents (32 bits: one in four billion passes); it is no signature.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from jaxtyping import Int64, UInt8, UInt32

UNIT_BYTES = 4096
TAG_BYTES = 4
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIER = np.uint64(0xBF58476D1CE4E5B9)


class RowState(IntEnum):
    """Meanings of the tag of a row."""

    NEVER_WRITTEN = 0
    AS_WRITTEN = 1
    DAMAGED = 2


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Layout of rows of equal size in a file.

    Args:
        payload_bytes: of a row's numbers, a multiple of four.
    """

    payload_bytes: int

    @property
    def row_bytes(self) -> int:
        """The bytes of a row with its tag."""
        return self.payload_bytes + TAG_BYTES

    @property
    def unit_bytes(self) -> int:
        """The bytes that are read and written at once: whole pages."""
        return -(-self.row_bytes // UNIT_BYTES) * UNIT_BYTES

    @property
    def rows_per_unit(self) -> int:
        """The number of whole rows in a unit."""
        return self.unit_bytes // self.row_bytes

    def file_bytes(self, num_rows: int) -> int:
        """Length of a file of so many rows."""
        return -(-num_rows // self.rows_per_unit) * self.unit_bytes

    def offset(self, row: int) -> int:
        """Return the offset at which a row begins."""
        unit, place = divmod(row, self.rows_per_unit)
        return unit * self.unit_bytes + place * self.row_bytes


def tags(rows_N: Int64[np.ndarray, "N"], payload_NP: UInt8[np.ndarray, "N P"]) -> UInt32[np.ndarray, "N"]:
    """The tag of each row."""
    hashes = np.uint64(_GOLDEN) ^ rows_N.astype(np.uint64)
    for word in payload_NP.view(np.uint32).astype(np.uint64).T:
        hashes = (hashes ^ word) * _MULTIPLIER
        hashes ^= hashes >> np.uint64(29)
    # 0 is the tag of rows that were never written.
    return np.maximum((hashes >> np.uint64(32)).astype(np.uint32), np.uint32(1))


def read_rows(
    descriptor: int, layout: RowLayout, rows_N: Int64[np.ndarray, "N"]
) -> tuple[UInt8[np.ndarray, "N P"], UInt8[np.ndarray, "N"]]:
    """The numbers of rows, and the state of each."""
    found = np.zeros((len(rows_N), layout.row_bytes), dtype=np.uint8)
    for index, row in enumerate(rows_N.tolist()):
        data = os.pread(descriptor, layout.row_bytes, layout.offset(row))
        # Behind the end of the file nothing is read: zeros stay.
        found[index, : len(data)] = np.frombuffer(data, dtype=np.uint8)
    payload = np.ascontiguousarray(found[:, : layout.payload_bytes])
    written = np.ascontiguousarray(found[:, layout.payload_bytes :]).view(np.uint32)[:, 0]
    states = np.where(written == tags(rows_N, payload), RowState.AS_WRITTEN, RowState.DAMAGED)
    return payload, np.where(written == 0, RowState.NEVER_WRITTEN, states).astype(np.uint8)


def write_rows(
    descriptor: int, layout: RowLayout, rows_N: Int64[np.ndarray, "N"], payload_NP: UInt8[np.ndarray, "N P"]
) -> None:
    """Write rows with their tags."""
    data = np.concatenate([payload_NP, tags(rows_N, payload_NP)[:, None].view(np.uint8)], axis=1)
    for row, each in zip(rows_N.tolist(), data, strict=True):
        if os.pwrite(descriptor, each.tobytes(), layout.offset(row)) != layout.row_bytes:
            raise OSError("a row was written in part")
