"""Wire formats: what embeddings and their gradients travel as. One file an idea; this is the one list of them.

    fp32           as computed: 4 bytes a number, or 2 where the network computes in BF16 or FP16; exact
    bf16, fp16     2 bytes
    int8, fp8      1 byte, and a scale of 2 bytes for each field of a sample: 1 + 2/width bytes
    mx9, mx6, mx4  blocks of 16 numbers of a field that share microexponents: 9/8, 6/8 and 4/8 bytes
    mxfp8, mxfp6, mxfp4, mxint8   OCP Microscaling 1.0, blocks of 32: 8.25/8, 6.25/8, 4.25/8 and 8.25/8 bytes

A format of your own derives from `PackedRows` or `EachNumber` and is listed by `WireFormat.add`
(docs/guides/extending.md).
"""

from __future__ import annotations

from ziggurat.numerics import catalogue
from ziggurat.parallel.exchange.wire_formats.each_number import AsComputed, Bf16, EachNumber, Fp16
from ziggurat.parallel.exchange.wire_formats.in_blocks import InBlocks
from ziggurat.parallel.exchange.wire_formats.packed_rows import PackedRows
from ziggurat.parallel.exchange.wire_formats.scaled import Fp8, Int8
from ziggurat.parallel.exchange.wire_formats.wire_format import WireFormat

PLAIN = WireFormat.add(AsComputed())  # numbers travel as they are computed, unless told otherwise
WireFormat.add(Bf16())
WireFormat.add(Fp16())
WireFormat.add(Int8())
WireFormat.add(Fp8())
WireFormat.add(InBlocks(catalogue.MX9))
WireFormat.add(InBlocks(catalogue.MX6))
WireFormat.add(InBlocks(catalogue.MX4))
# The names of the same formats among the precisions of dense products.
WireFormat.add(InBlocks(catalogue.MXFP8_E4M3, name="mxfp8"))
WireFormat.add(InBlocks(catalogue.MXFP6_E2M3, name="mxfp6"))
WireFormat.add(InBlocks(catalogue.MXFP4))
WireFormat.add(InBlocks(catalogue.MXINT8))

__all__ = ["PLAIN", "EachNumber", "InBlocks", "PackedRows", "WireFormat"]
