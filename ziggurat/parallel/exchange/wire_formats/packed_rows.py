"""PackedRows: wire formats of bytes, in which the numbers of a field are coded together.

What one rank gets is one part of all rows after the other (codes, then scales), each filled up with zeros to a multiple
of 16 bytes: a GPU reads and writes 16 bytes at once, from such places.

    [ codes of row 0 | of row 1 | … | 0 ][ scales of row 0 | of row 1 | … | 0 ]

A format says what a row takes in each part (`row_bytes`), and codes rows (`encode_rows`, `decode_rows`).
"""

from __future__ import annotations

import itertools
from abc import abstractmethod

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from ziggurat.errors import ConfigError
from ziggurat.parallel.exchange.wire_formats.wire_format import WireFormat

_ALIGNMENT = 16
_TRIED_WIDTHS = ((1,), (16, 16, 3), (20, 5))


class PackedRows(WireFormat):
    """Packs whole rows to bytes, part after part. See the module's docstring."""

    packs_rows = True

    @abstractmethod
    def row_bytes(self, widths: tuple[int, ...]) -> tuple[int, ...]:
        """Return the bytes of a row in each part of a message.

        Args:
            widths: numbers of each field of a row.
        """

    @abstractmethod
    def encode_rows(
        self, rows_RC: Float[Tensor, "R C"], *, widths: tuple[int, ...], at_random: bool
    ) -> tuple[UInt8[Tensor, "R W"], ...]:
        """Return the bytes of rows, part by part, as wide as `row_bytes` says.

        What is not finite has to arrive as not finite, for the guard of the step finds it there.

        Args:
            rows_RC: FP32, one row at least.
            widths: numbers of each field of a row; fields share nothing.
            at_random: round up with the probability of the remainder; never asked for unless `rounds_at_random`.
        """

    @abstractmethod
    def decode_rows(self, parts: tuple[UInt8[Tensor, "R W"], ...], *, widths: tuple[int, ...]) -> Float[Tensor, "R C"]:
        """Return the FP32 numbers of the bytes of rows."""

    def carried(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type of bytes, whatever comes in."""
        del dtype
        return torch.uint8

    def num_items(self, num_numbers: int, *, widths: tuple[int, ...]) -> int:
        """Return the bytes of all parts, filled up."""
        if not num_numbers:
            return 0
        rows = num_rows(num_numbers, widths)
        return sum(aligned(rows * part) for part in self.row_bytes(widths))

    def bytes_per_number(self, dtype: torch.dtype, *, widths: tuple[int, ...]) -> float:
        """Return the bytes of a row, shared out."""
        del dtype
        return sum(self.row_bytes(widths)) / max(sum(widths), 1)

    def encode(self, numbers: Tensor, *, widths: tuple[int, ...], at_random: bool) -> Tensor:
        """Return all parts, each filled up with zeros."""
        if not numbers.numel():
            return numbers.new_empty(0, dtype=torch.uint8)
        rows_RC = numbers.to(torch.float32).view(-1, sum(widths))
        message: list[Tensor] = []
        for part in self.encode_rows(rows_RC, widths=widths, at_random=at_random):
            num_bytes = part.numel()
            message += [part.reshape(-1), part.new_zeros(aligned(num_bytes) - num_bytes)]
        return torch.cat(message)

    def decode(self, message: Tensor, *, count: int, widths: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the numbers of all rows."""
        if not count:
            return message[:0].to(dtype)
        rows = num_rows(count, widths)
        parts = []
        begin = 0
        for width in self.row_bytes(widths):
            parts.append(message[begin : begin + rows * width].view(rows, width))
            begin += aligned(rows * width)
        return self.decode_rows(tuple(parts), widths=widths).reshape(-1).to(dtype)

    def try_out(self) -> None:
        """Send rows of a few layouts."""
        for widths in _TRIED_WIDTHS:
            self.check(widths)

    def check(self, widths: tuple[int, ...]) -> None:
        """Refuse a format that breaks what exchanges rely on; tried with a few rows.

        Args:
            widths: numbers of each field of a row.

        Raises:
            ConfigError: its bytes are not as many as it says; or rows of zeros do not arrive as zeros; or what is not
                finite arrives as finite; or a row depends on those beside it, or a field on its neighbours.
        """
        draw = torch.Generator().manual_seed(len(widths))
        rows_RC = torch.randn(5, sum(widths), generator=draw)
        rows_RC[1] = 0.0
        rows_RC[3, -1] = torch.nan
        rows_RC[4, -1] = torch.inf
        sent = self.encode_rows(rows_RC, widths=widths, at_random=False)
        shapes = [(tuple(part.shape), part.dtype) for part in sent]
        wanted = [((5, num_bytes), torch.uint8) for num_bytes in self.row_bytes(widths)]
        if shapes != wanted:
            raise self._broken(f"parts of {wanted}, as `row_bytes` says", f"{shapes}", "encode_rows")
        came = self.decode_rows(sent, widths=widths)
        if came.shape != rows_RC.shape or came.dtype != torch.float32:
            found = f"{tuple(came.shape)} of {came.dtype}"
            raise self._broken(f"{tuple(rows_RC.shape)} of torch.float32", found, "decode_rows")
        if bool(came[1].any()):
            raise self._broken("zeros where zeros were sent", f"{came[1].tolist()}", "decode_rows")
        if not bool(came[:3].isfinite().all()):
            raise self._broken("finite numbers where finite ones were sent", f"{came[:3].tolist()}", "decode_rows")
        if bool(came[3].isfinite().all()) or bool(came[4].isfinite().all()):
            expected = "NaN and infinities that arrive as not finite, for the step that guards against them"
            raise self._broken(expected, f"{came[3:].tolist()}", "encode_rows")
        alone = self.decode_rows(self.encode_rows(rows_RC[2:3], widths=widths, at_random=False), widths=widths)
        if not torch.equal(alone[0], came[2]):
            raise self._broken("a row that does not depend on those beside it", "another one", "encode_rows")
        others = rows_RC[2:3].clone()
        # Larger neighbours: a scale that the first field shared with them would show.
        others[:, widths[0] :] *= 1024.0
        beside = self.decode_rows(self.encode_rows(others, widths=widths, at_random=False), widths=widths)
        if not torch.equal(beside[:, : widths[0]], alone[:, : widths[0]]):
            raise self._broken("a field that does not depend on its neighbours", "another one", "encode_rows")

    def _broken(self, expected: str, found: str, method: str) -> ConfigError:
        return ConfigError(
            expected=expected,
            found=found,
            where=f"{type(self).__module__}.{type(self).__qualname__}.{method}",
            ways_out="correct it; docs/guides/extending.md says what a wire format promises",
        )


def aligned(num_bytes: int) -> int:
    """Return the next multiple of 16."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def num_rows(num_numbers: int, widths: tuple[int, ...]) -> int:
    """Return the rows that so many numbers are."""
    columns = sum(widths)
    assert num_numbers % columns == 0, (num_numbers, columns)
    return num_numbers // columns


def runs(widths: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return neighbouring fields of one width, which are coded together: (width, number of fields)."""
    return [(width, len(list(fields))) for width, fields in itertools.groupby(widths)]
