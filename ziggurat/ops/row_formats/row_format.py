"""RowFormat: what the rows of an embedding table are kept as, and everything that follows from it.

The rest of the package asks a row format

    how numbers become rows and back    `encode`, `decode`, `encode_trained`, `decode_trained`    storages, exports
    what a row takes                    `width`, `row_bytes`, `beside_bytes`, `for_columns`       memory, plans
    whether updates lose anything       `rounds`                                                  rounding, caches
    what may be done with rows          `is_plain`, `keeps_rows_whole`, `without_beside`          disks, plans, exports
    which kernels read them in place    `cpp_code`, `triton_layout`, `is_updated_by_triton`       ops
    what it costs                       `time`, `worth`, `is_searched`                            planning/tiers

and never which format it is. `encode` and `decode` are in torch and define the numbers; compiled code that is named by
`cpp_code` or `triton_layout` gives the same bits. A format without any works everywhere: the rows of a batch are then
decoded and encoded by torch.

Checkpoints are FP32 and know nothing of formats, so every format keeps one promise: rows that were read are written
back to the same numbers, `decode(encode(decode(row))) == decode(row)`, bit for bit, without noise.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar, TypeVar

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from ziggurat.errors import ConfigError
from ziggurat.specification import Specification, answer_of

A = TypeVar("A")

NUMBERS = "numbers"  # the layout of rows that Triton reads as FP32, or as upper halves of it


class RowFormat(Specification, kind="row format"):
    """Format that the rows of tables are kept in while they are trained. See the module's docstring.

    Attributes:
        dtype: of the tensor that holds rows.
        is_plain: rows are the FP32 numbers themselves, so that any storage holds them: memory, a disk, or the host
            behind a device.
        rounds: updates are rounded to what the format can hold; a cache in FP32 keeps what they would lose.
        keeps_rows_whole: the numbers of a row share something (their ends, a scale), so that no plan cuts the columns.
        has_beside: updates need more than lookups read of a row: a tensor of `dtype` with D columns beside the rows.
        cpp_code: its number in `ops/csrc/lookup/formats.h`; 0: C++ does not know it.
        triton_layout: what the lookups of `ops/lookup/triton` are told of its rows; "": Triton cannot read them.
        is_updated_by_triton: Triton writes its rows in place, too.
        time: of a lookup with its update, in units of an FP32 row of the same columns.
        worth: what rounding is taken to be worth, in the same unit; formats of a lower one are taken as more precise.
        is_searched: a limit of memory may choose it.
    """

    dtype: ClassVar[torch.dtype]
    is_plain: ClassVar[bool] = False
    rounds: ClassVar[bool] = True
    keeps_rows_whole: ClassVar[bool] = False
    has_beside: ClassVar[bool] = False
    cpp_code: ClassVar[int] = 0
    triton_layout: ClassVar[str] = ""
    is_updated_by_triton: ClassVar[bool] = False
    time: ClassVar[float] = 1.0
    worth: ClassVar[float] = 0.0
    is_searched: ClassVar[bool] = False

    @abstractmethod
    def width(self, dim: int) -> int:
        """Return the elements of `dtype` in a row of so many columns."""

    @abstractmethod
    def encode(
        self, values_ND: Float[Tensor, "N D"], *, words_N: Int64[Tensor, "N"] | None = None
    ) -> Shaped[Tensor, "N W"]:
        """Round numbers to rows, as lookups read them.

        Args:
            values_ND: the numbers.
            words_N: noise of each row (`RowNoise.words`, `noise`); None rounds to the nearest.
        """

    @abstractmethod
    def decode(self, rows_NW: Shaped[Tensor, "N W"], *, dim: int) -> Float[Tensor, "N D"]:
        """Return the numbers of rows, as lookups read them."""

    def encode_trained(
        self, values_ND: Float[Tensor, "N D"], *, words_N: Int64[Tensor, "N"] | None
    ) -> tuple[Shaped[Tensor, "N W"], Tensor | None]:
        """Round numbers to rows, and to what lies beside them for updates; None where nothing does."""
        return self.encode(values_ND, words_N=words_N), None

    def decode_trained(
        self, rows_NW: Shaped[Tensor, "N W"], beside_ND: Tensor | None, *, dim: int
    ) -> Float[Tensor, "N D"]:
        """Return the numbers of rows, as updates see them; without `beside_ND` those that lookups read."""
        del beside_ND
        return self.decode(rows_NW, dim=dim)

    def checked_encode(
        self, values_ND: Float[Tensor, "N D"], *, words_N: Int64[Tensor, "N"] | None = None
    ) -> Shaped[Tensor, "N W"]:
        """Return `encode`, and refuse rows that cannot be kept.

        Raises:
            ConfigError: it failed, or its rows have another shape or dtype than `width` and `dtype` say.
        """
        rows = self._answer(lambda: self.encode(values_ND, words_N=words_N), "encode", num=len(values_ND))
        return self._expect(rows, (len(values_ND), self.width(values_ND.shape[1])), self.dtype, "encode")

    def checked_decode(self, rows_NW: Shaped[Tensor, "N W"], *, dim: int) -> Float[Tensor, "N D"]:
        """Return `decode`, and refuse other shapes and dtypes, as `checked_encode` does."""
        values = self._answer(lambda: self.decode(rows_NW, dim=dim), "decode", num=len(rows_NW))
        return self._expect(values, (len(rows_NW), dim), torch.float32, "decode")

    def checked_encode_trained(
        self, values_ND: Float[Tensor, "N D"], *, words_N: Int64[Tensor, "N"] | None
    ) -> tuple[Shaped[Tensor, "N W"], Tensor | None]:
        """Return `encode_trained`, and refuse other shapes and dtypes, as `checked_encode` does."""
        name = "encode_trained"
        num, dim = values_ND.shape
        made = self._answer(lambda: self.encode_trained(values_ND, words_N=words_N), name, num=num)
        if not isinstance(made, tuple) or len(made) != 2:
            raise self._broken("rows, and what lies beside them", type(made).__name__, name)
        rows = self._expect(made[0], (num, self.width(dim)), self.dtype, name)
        if not self.has_beside:
            if made[1] is not None:
                raise self._broken("nothing beside rows, or has_beside = True", type(made[1]).__name__, name)
            return rows, None
        return rows, self._expect(made[1], (num, dim), self.dtype, name)

    def checked_decode_trained(
        self, rows_NW: Shaped[Tensor, "N W"], beside_ND: Tensor | None, *, dim: int
    ) -> Float[Tensor, "N D"]:
        """Return `decode_trained`, and refuse other shapes and dtypes, as `checked_encode` does."""
        name = "decode_trained"
        values = self._answer(lambda: self.decode_trained(rows_NW, beside_ND, dim=dim), name, num=len(rows_NW))
        return self._expect(values, (len(rows_NW), dim), torch.float32, name)

    def _answer(self, ask: Callable[[], A], method: str, *, num: int) -> A:
        return answer_of(ask, expected=f"an answer for {num:,} rows", where=self._where(method))

    def _expect(self, found: object, shape: tuple[int, ...], dtype: torch.dtype, method: str) -> Tensor:
        """Refuse what is not a tensor of a shape and a dtype: writing it would repeat or convert it."""
        if isinstance(found, Tensor) and tuple(found.shape) == shape and found.dtype == dtype:
            return found
        given = f"{tuple(found.shape)} of {found.dtype}" if isinstance(found, Tensor) else type(found).__name__
        raise self._broken(f"{shape} of {dtype}", given, method)

    @property
    def file_dtype(self) -> torch.dtype:
        """The dtype of the same bytes in an export."""
        return self.dtype

    @property
    def without_beside(self) -> RowFormat:
        """The format of the same lookups with nothing beside its rows, for tables that nobody trains."""
        return self

    def row_bytes(self, dim: int) -> int:
        """Return the bytes of what lookups read of a row."""
        return self.width(dim) * self.dtype.itemsize

    def beside_bytes(self, dim: int) -> int:
        """Return the bytes of a row that lie beside the optimizer's state, for updates alone."""
        return dim * self.dtype.itemsize if self.has_beside else 0

    def for_columns(self, dim: int) -> RowFormat:
        """Return the format of tables of so many columns: plain where this one saves nothing.

        A table of one column takes five bytes a row in INT8.
        """
        plain = self.plain()
        return self if self.row_bytes(dim) < plain.row_bytes(dim) else plain

    def less_precise(self) -> tuple[RowFormat, ...]:
        """Return the formats that a limit of memory may choose in its place, the most precise first."""
        less = [each for each in RowFormat if each.is_searched and each.worth > self.worth]
        return tuple(sorted(less, key=lambda each: each.worth))

    def try_out(self) -> None:
        """Try rows of a few widths."""
        for dim in (1, 8, 20):
            self.check(dim)

    def check(self, dim: int) -> None:
        """Refuse a format that breaks what storages, checkpoints and plans rely on; tried with a few rows.

        Args:
            dim: columns of the rows.

        Raises:
            ConfigError: rows have another width or dtype than the format says; or they do not come back as they were
                read; or rows of zeros, which stand for padding, are read as something else; or a row depends on those
                beside it, or columns on one another where plans may cut them.
        """
        draw = torch.Generator().manual_seed(dim)
        # Of many magnitudes, as trained rows are.
        values = torch.randn(4, dim, generator=draw) * torch.exp(torch.randn(4, dim, generator=draw))
        values[:, 0] *= 100.0  # a number that others depend on, where they share an end or a scale
        values[1] = 0.0
        rows = self.encode(values)
        if tuple(rows.shape) != (4, self.width(dim)) or rows.dtype != self.dtype:
            expected = f"(4, {self.width(dim)}) of {self.dtype}, as `width` and `dtype` say"
            raise self._broken(expected, f"{tuple(rows.shape)} of {rows.dtype}", "encode")
        read = self.decode(rows, dim=dim)
        if tuple(read.shape) != (4, dim) or read.dtype != torch.float32:
            raise self._broken(f"(4, {dim}) of torch.float32", f"{tuple(read.shape)} of {read.dtype}", "decode")
        if bool(read[1].any()):
            raise self._broken("zeros for a row of zeros, which is what padding is", f"{read[1].tolist()}", "decode")
        again = self.decode(self.encode(read), dim=dim)
        if not torch.equal(again, read):
            changed = int((again != read).sum())
            raise self._broken(
                "the numbers that were read, where they are written back", f"{changed} of {4 * dim} others", "encode"
            )
        # A step rounds the rows that it touches, in whatever company.
        if not torch.equal(self.encode(values[2:3]), rows[2:3]):
            raise self._broken("a row that does not depend on others", "another row where it is alone", "encode")
        kept = self.decode_trained(*self.encode_trained(values, words_N=None), dim=dim)
        if not self.rounds and not torch.equal(kept, values):
            raise self._broken("every number as it was, or rounds = True", "other numbers", "encode_trained")
        if dim > 1 and not self.keeps_rows_whole:
            part = self.decode(self.encode(values[:, 1:]), dim=dim - 1)
            if not torch.equal(part, read[:, 1:]):
                raise self._broken(
                    "columns that do not depend on one another, or keeps_rows_whole = True",
                    "other numbers where the first column is left out",
                    "encode",
                )

    def _broken(self, expected: str, found: str, method: str) -> ConfigError:
        return ConfigError(
            expected=expected,
            found=found,
            where=self._where(method),
            ways_out=f"correct `{method}`; docs/guides/extending.md says what a row format promises",
        )

    def _where(self, method: str) -> str:
        return f"row format {self}, {type(self).__module__}.{type(self).__qualname__}.{method}"

    @staticmethod
    def plain() -> RowFormat:
        """Return the format of rows that are the numbers themselves."""
        return next(each for each in RowFormat if each.is_plain)
