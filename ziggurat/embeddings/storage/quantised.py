"""QuantisedStorage: rows in BF16, INT8 or INT4, for tables that are read and no longer trained.

    fp32   64 bytes a row of 16     the numbers
    bf16   32                       the numbers, rounded to 8 bits of precision
    int8   16 + 8                   codes 0 … 255, and a scale and an offset a row:   x ≈ offset + scale · code
    int4    8 + 8                   codes 0 …  15, two a byte

    offset = min(x)   scale = (max(x) − min(x)) / (2^bits − 1)   error of a number ≤ scale / 2

A scale of each row (and not of the table) lets frequent rows with large numbers and rare rows with small ones keep the
same relative precision. A row of equal numbers, as the padding row is, has scale 0 and stays exact.

Lookups are those of every storage that is not one tensor (`table_storage.py`): the distinct rows of a batch are decoded
into a small FP32 table, on which any kernel works. Writing encodes; there is no optimizer's state and no update.

Reference: row-wise quantisation of embedding tables, Guan et al., "Post-Training 4-bit Quantization on Embedding
Tables", MLSys workshop at NeurIPS 2019 (arXiv 1911.02079), section 3, with the range of the row.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ziggurat.embeddings.storage.table_storage import WEIGHT, TableStorage
from ziggurat.errors import ConfigError
from ziggurat.ops.lookup import TableOptimizerKind


class TablePrecision(StrEnum):
    """What the numbers of tables are kept as."""

    FP32 = "fp32"  # as they were trained
    BF16 = "bf16"
    INT8 = "int8"  # with a scale and an offset a row
    INT4 = "int4"

    @property
    def bits(self) -> int:
        """Bits of a number, scales left out."""
        return {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4}[self.value]


class QuantisedStorage(TableStorage):
    """Tables of one dim in the memory of the host, in few bits; for reading.

    Args:
        num_rows: R.
        dim: D.
        precision: BF16, INT8 or INT4.

    Attributes:
        parts: what is kept: "weight" (R, bytes of a row), and for codes "scale" and "offset" (R,).
    """

    def __init__(self, num_rows: int, dim: int, *, precision: TablePrecision) -> None:
        super().__init__(num_rows, dim)
        assert precision is not TablePrecision.FP32, "that is MemoryStorage"
        self.precision = precision
        self.parts = {
            key: torch.zeros(num_rows, *shape, dtype=dtype) for key, (shape, dtype) in layout(precision, dim).items()
        }

    @property
    def dtype(self) -> torch.dtype:
        """What kernels compute with: float32."""
        return torch.float32

    @property
    def device(self) -> torch.device:
        """The memory of the host."""
        return torch.device("cpu")

    @property
    def num_bytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(part.numel() * part.element_size() for part in self.parts.values())

    def add_state(self, kind: TableOptimizerKind, *, initial_sum: float = 0.0) -> None:
        """Refuse: these tables are not trained.

        Raises:
            ConfigError: always.
        """
        del initial_sum
        raise ConfigError(
            expected="tables in float32 for training",
            found=f"tables in {self.precision.value}, which are for reading, and the optimizer {kind.value}",
            where="EmbeddingTables",
            ways_out="train the run itself, and export it again",
        )

    def gather(self, rows_N: Int64[Tensor, "N"], *, key: str = WEIGHT) -> Float[Tensor, "N D"]:
        """Some rows, decoded."""
        assert key == WEIGHT, key
        return decode({key: part.index_select(0, rows_N) for key, part in self.parts.items()}, dim=self.dim)

    def scatter(self, rows_N: Int64[Tensor, "N"], values: Float[Tensor, "N D"], *, key: str = WEIGHT) -> None:
        """Replace some rows by others, encoded."""
        assert key == WEIGHT, key
        for name, part in encode(values, self.precision).items():
            self.parts[name].index_copy_(0, rows_N, part)

    def read(self, first_row: int, num_rows: int, *, key: str = WEIGHT) -> Float[Tensor, "N D"]:
        """Consecutive rows, decoded."""
        assert key == WEIGHT, key
        rows = slice(first_row, first_row + num_rows)
        return decode({key: part[rows] for key, part in self.parts.items()}, dim=self.dim)

    def write(self, first_row: int, values: Float[Tensor, "N D"], *, key: str = WEIGHT) -> None:
        """Replace consecutive rows by others, encoded."""
        assert key == WEIGHT, key
        self.write_parts(first_row, encode(values, self.precision))

    def write_parts(self, first_row: int, parts: dict[str, Tensor]) -> None:
        """Replace consecutive rows by others that are encoded already.

        Args:
            first_row: of the storage.
            parts: as `encode` gives them.
        """
        for name, part in parts.items():
            self.parts[name][first_row : first_row + len(part)].copy_(part)

    def describe(self) -> dict[str, str]:
        """The precision, for the start-up report."""
        return {"precision": self.precision.value}


def layout(precision: TablePrecision, dim: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape of a row and dtype of each part."""
    if precision in (TablePrecision.FP32, TablePrecision.BF16):
        return {WEIGHT: ((dim,), torch.float32 if precision is TablePrecision.FP32 else torch.bfloat16)}
    codes = dim if precision is TablePrecision.INT8 else (dim + 1) // 2
    return {WEIGHT: ((codes,), torch.uint8), "scale": ((), torch.float32), "offset": ((), torch.float32)}


def encode(rows_ND: Float[Tensor, "N D"], precision: TablePrecision) -> dict[str, Tensor]:
    """Rows as the parts that are kept; see the module's docstring."""
    if precision is TablePrecision.BF16:
        return {WEIGHT: rows_ND.to(torch.bfloat16)}
    low_N, high_N = rows_ND.aminmax(dim=1) if rows_ND.numel() else (rows_ND.sum(1), rows_ND.sum(1))
    most = 2**precision.bits - 1
    scale_N = (high_N - low_N) / most
    divisor_N1 = torch.where(scale_N > 0, scale_N, 1.0).unsqueeze(1)
    codes_ND = ((rows_ND - low_N.unsqueeze(1)) / divisor_N1).round_().clamp_(0, most).to(torch.uint8)
    if precision is TablePrecision.INT4:
        if codes_ND.shape[1] % 2:
            codes_ND = torch.nn.functional.pad(codes_ND, (0, 1))
        codes_ND = codes_ND[:, ::2] | (codes_ND[:, 1::2] << 4)
    return {WEIGHT: codes_ND, "scale": scale_N, "offset": low_N}


def decode(parts: dict[str, Tensor], *, dim: int) -> Float[Tensor, "N D"]:
    """Rows in float32 from their parts."""
    codes = parts[WEIGHT]
    if codes.dtype == torch.bfloat16:
        return codes.float()
    if codes.shape[1] < dim:
        codes = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)[:, :dim]
    return codes.float() * parts["scale"].unsqueeze(1) + parts["offset"].unsqueeze(1)
