"""Wire formats of few bits: the fields of a row packed to the exact bits of a block format (`ziggurat/numerics`).

    field of 40 numbers in MX9    block of 16, 18 bytes │ block of 16, 18 bytes │ block of 8, 9½ bytes, filled up to 10

Blocks lie along the columns of a field and never reach into the next one, so numbers of different features share no
scale. A field begins at a whole byte: MX9 takes 9/8 bytes a number where widths are multiples of 16, a little more
elsewhere. Numbers are rounded to the nearest, in both directions. An infinity makes NaN of its block, as NaN does.

On a CPU a kernel packs and unpacks (`numerics/kernel.py`); on other devices torch does, to the same bits and slowly.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from ziggurat.errors import ConfigError
from ziggurat.numerics.block_format import BlockFormat, Scope
from ziggurat.numerics.packing import Packed, pack_rows, row_bits, unpack
from ziggurat.parallel.exchange.wire_formats.packed_rows import PackedRows, runs


class InBlocks(PackedRows):
    """A block format on the wire.

    Args:
        format: whose blocks share scales.
        name: of the wire format; that of the block format unless given.

    Raises:
        ConfigError: numbers of the format have no scale, so that large ones could not travel, or all of a tensor share
            one, so that unlike features would.
    """

    rounds_at_random = False

    def __init__(self, format: BlockFormat, *, name: str = "") -> None:
        if not format.has_scale or format.k1 is Scope.TENSOR:
            raise ConfigError(
                expected="a block format of which numbers along an axis share a scale",
                found=f"{format.name}, of which {'all numbers of a tensor do' if format.has_scale else 'none do'}",
                where="InBlocks, a wire format",
                ways_out=("InBlocks(BlockFormat.named('mx9'))", "see the formats: ziggurat numerics formats"),
            )
        self.format = format
        self.name = name or format.name

    def row_bytes(self, widths: tuple[int, ...]) -> tuple[int, ...]:
        """Return the bytes of all fields, each filled up to whole bytes."""
        return (sum(self._field_bytes(width) for width in widths),)

    def encode_rows(
        self, rows_RC: Float[Tensor, "R C"], *, widths: tuple[int, ...], at_random: bool
    ) -> tuple[UInt8[Tensor, "R W"], ...]:
        """Pack field after field."""
        assert not at_random, "refused by WireConfig"
        pieces = []
        column = 0
        for width, count in runs(widths):
            fields = rows_RC[:, column : column + count * width].reshape(-1, width)
            column += count * width
            pieces.append(pack_rows(fields, self.format).view(len(rows_RC), -1))
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1),)

    def decode_rows(self, parts: tuple[UInt8[Tensor, "R W"], ...], *, widths: tuple[int, ...]) -> Float[Tensor, "R C"]:
        """Unpack field after field."""
        (packed,) = parts
        pieces = []
        begin = 0
        for width, count in runs(widths):
            field_bytes = self._field_bytes(width)
            fields = packed[:, begin : begin + count * field_bytes].reshape(-1, field_bytes)
            begin += count * field_bytes
            shape = torch.Size((len(fields), width))
            pieces.append(unpack(Packed(rows=fields, format=self.format, shape=shape, axis=1)).view(len(packed), -1))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)

    def _field_bytes(self, width: int) -> int:
        return -(-row_bits(self.format, width) // 8)
