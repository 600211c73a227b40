"""RowFormat: what the rows of an embedding table are kept as, and what a row takes in memory.

    fp32         4·D bytes          the numbers
    bf16         2·D                upper halves of the numbers: 8 bits of precision, the range of FP32
    split_bf16   2·D  (+ 2·D)       the same, and the lower halves beside the optimizer's state: together FP32
    int8         D + 4              codes 0 … 255 between the two ends of the row, which are FP16
    int4         ⌈D/2⌉ + 4          codes 0 … 15, two a byte

`reference.py` says how numbers become rows and rows numbers.
"""

from __future__ import annotations

from enum import StrEnum

END_BYTES = 4  # the two ends of a row of codes, FP16 each


class RowFormat(StrEnum):
    """What the rows of tables are kept as while they are trained."""

    FP32 = "fp32"  # the numbers themselves
    BF16 = "bf16"  # half the bytes; updates are rounded at random
    SPLIT_BF16 = "split_bf16"  # lookups read half the bytes; updates are those of FP32, bit for bit
    INT8 = "int8"  # about a quarter of the bytes; updates are rounded at random
    INT4 = "int4"  # about an eighth

    @property
    def has_codes(self) -> bool:
        """True if a row is codes between its ends, so that all its columns belong together."""
        return self in (RowFormat.INT8, RowFormat.INT4)

    @property
    def most(self) -> int:
        """The largest code."""
        return {RowFormat.INT8: 255, RowFormat.INT4: 15}[self]

    def for_columns(self, dim: int) -> RowFormat:
        """What a table of so many columns is kept as: FP32 where this saves nothing (INT8 of one column: 5 bytes)."""
        return self if self.row_bytes(dim) < RowFormat.FP32.row_bytes(dim) else RowFormat.FP32

    def row_bytes(self, dim: int) -> int:
        """Bytes of what lookups read of a row, its ends included."""
        if self is RowFormat.INT8:
            return dim + END_BYTES
        if self is RowFormat.INT4:
            return (dim + 1) // 2 + END_BYTES
        return (4 if self is RowFormat.FP32 else 2) * dim

    def beside_bytes(self, dim: int) -> int:
        """Bytes of a row that lie beside the optimizer's state: the lower halves of split numbers."""
        return 2 * dim if self is RowFormat.SPLIT_BF16 else 0


class Rounding(StrEnum):
    """How an update is rounded to what a row format can hold."""

    # Up or down at random, right on average: many small updates add up. Not so, in a row of codes, for numbers within
    # one step of FP16 of an end of their row: they are cut off where the end is rounded inwards.
    STOCHASTIC = "stochastic"
    NEAREST = "nearest"  # updates below half a step of the format are lost
