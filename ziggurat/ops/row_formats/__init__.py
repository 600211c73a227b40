"""Row formats: what the rows of tables are kept as. One file each; this is the one list of them.

    fp32         4·D bytes          the numbers
    bf16         2·D                upper halves of the numbers: 8 bits of precision, the range of FP32
    split_bf16   2·D  (+ 2·D)       the same, and the lower halves beside the optimizer's state: together FP32
    int8         D + 4              codes 0 … 255 between the two ends of the row, which are FP16
    int4         ⌈D/2⌉ + 4          codes 0 … 15, two a byte

A format of your own derives from `RowFormat` and is listed by `RowFormat.add` (docs/guides/extending.md).
"""

from __future__ import annotations

from ziggurat.ops.row_formats.bf16 import Bf16
from ziggurat.ops.row_formats.fp32 import Fp32
from ziggurat.ops.row_formats.int4 import Int4
from ziggurat.ops.row_formats.int8 import Int8
from ziggurat.ops.row_formats.noise import RowNoise, RowOrigin
from ziggurat.ops.row_formats.rounding import Rounding
from ziggurat.ops.row_formats.row_format import RowFormat
from ziggurat.ops.row_formats.split_bf16 import SplitBf16

PLAIN = RowFormat.add(Fp32())  # rows that are the numbers themselves, which is what tables have unless told otherwise
RowFormat.add(Bf16())
RowFormat.add(SplitBf16())
RowFormat.add(Int8())
RowFormat.add(Int4())

__all__ = ["PLAIN", "Rounding", "RowFormat", "RowNoise", "RowOrigin"]
