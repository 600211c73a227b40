"""Initial weights as a function of (seed, table, block of rows): whoever holds a row draws it, and nobody else must.

    block 0          rows     0 … 4,095     generator seeded by sha256("seed/table")
    block b          rows 4,096·b … + 4,095 generator seeded by sha256("seed/table" + NUL + b)

So a rank that holds a quarter of a table draws a quarter of it (and the rest of the two blocks at its ends), any
placement has the same weights as one device, and adding, removing or reordering tables changes no other table's.
All columns of a block are drawn; a rank with some columns keeps those. Memory beyond the table itself: one block.

The numbers come from the CPU's generator whatever the device of the table, so that they are the same everywhere.

One row of a block costs the whole block: 0.1 to 1 ms. For a table of which a run touches a small part, `init_draw =
"rows"` counts instead of keeping a generator, in memory as on disk:

    key    = first 64 bits of sha256("initial/<seed>/<table>")
    bits   = mix(mix(key + row·G) + (column + 1)·G)                 splitmix64's, see `ziggurat.features.hashing`
    u      = (upper 53 bits + ½) / 2^53                             uniform: bound·(2u − 1);  normal: std·Φ⁻¹(u)

A table in the memory of a GPU makes them there, in the same bits (`counted_rows.py`). Φ⁻¹ is Wichura's rational
approximation (AS 241, Applied Statistics 37, 1988; relative error below 1e-15), with a logarithm made of the four
operations, so that no library decides about the last bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from ziggurat.embeddings.config import EmbeddingConfig, InitialDraw, TableInit
from ziggurat.features.hashing import GOLDEN, mix
from ziggurat.features.schema import PADDING_ROW

BLOCK_ROWS = 4096


def initial_rows(
    table: str,
    *,
    shape: tuple[int, int],
    config: EmbeddingConfig,
    seed: int,
    rows: range | None = None,
    columns: slice = slice(None),
) -> Iterator[tuple[int, Float[Tensor, "N D"]]]:
    """Draw rows of one table, block after block; the padding row is zero.

    Args:
        table: its name.
        shape: rows and columns of the whole table.
        config: distribution.
        seed: of the run.
        rows: which rows; all by default.
        columns: which columns.

    Yields:
        The first row, and the weights of it and the following ones. The memory is used again for the next block.
    """
    rows = range(shape[0]) if rows is None else rows
    if len(rows) == 0:
        return
    buffer = torch.empty(min(BLOCK_ROWS, shape[0]), shape[1])
    for block in range(rows.start // BLOCK_ROWS, -(-rows.stop // BLOCK_ROWS)):
        first = block * BLOCK_ROWS
        last = min((block + 1) * BLOCK_ROWS, shape[0])
        weight = buffer[: last - first]
        if config.init_draw is InitialDraw.ROWS:
            initial = InitialRows(table=table, shape=shape, config=config, seed=seed)
            weight.copy_(initial.take(torch.arange(first, last)))
        else:
            # A block is drawn whole, even if few of its rows are wanted: the generator gives its numbers in order.
            _draw_block(weight, num_rows=shape[0], config=config, generator=_generator(seed, table, block))
        if block == 0:
            weight[PADDING_ROW] = 0.0
        begin = max(first, rows.start)
        end = min(last, rows.stop)
        yield begin, weight[begin - first : end - first, columns]


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialRows:
    """The initial weights of a table, or of the part that a rank holds, as a function of the row.

    Args:
        table: its name.
        shape: rows and columns of the whole table.
        config: distribution, and what the numbers follow from.
        seed: of the run.
        first_row: of the table, where the part begins.
        first_column: of the table, where the part begins.
        num_columns: of the part; None: all that follow.
    """

    table: str
    shape: tuple[int, int]
    config: EmbeddingConfig
    seed: int
    first_row: int = 0
    first_column: int = 0
    num_columns: int | None = None

    @property
    def columns(self) -> slice:
        """The columns of the part in the table."""
        last = self.shape[1] if self.num_columns is None else self.first_column + self.num_columns
        return slice(self.first_column, last)

    def chunks(self, rows: range) -> Iterator[tuple[int, Float[Tensor, "N D"]]]:
        """Consecutive rows of the part, as `initial_rows` yields them, counted from the part's first."""
        within = range(rows.start + self.first_row, rows.stop + self.first_row)
        for first, values in self._drawn(within):
            yield first - self.first_row, values

    def take(self, rows_N: Int64[Tensor, "N"]) -> Float[Tensor, "N D"]:
        """Any rows of the part; with `blocks` each block that one of them lies in is drawn, once if rows are sorted."""
        rows = rows_N.numpy() + self.first_row
        if self.config.init_draw is InitialDraw.ROWS:
            return torch.from_numpy(self._counted(rows))
        out = torch.empty(len(rows), self.columns.stop - self.columns.start)
        blocks = rows // BLOCK_ROWS
        # Where the block changes: each run of rows in one block is drawn once.
        cuts = np.flatnonzero(np.diff(blocks)) + 1
        for mine in np.split(np.arange(len(rows)), cuts) if len(rows) else []:
            first = int(blocks[mine[0]]) * BLOCK_ROWS
            within = range(first, min(first + BLOCK_ROWS, self.shape[0]))
            for _, values in self._drawn(within):
                out[torch.from_numpy(mine)] = values[torch.from_numpy(rows[mine] - first)]
        return out

    def _drawn(self, rows: range) -> Iterator[tuple[int, Float[Tensor, "N D"]]]:
        return initial_rows(
            self.table, shape=self.shape, config=self.config, seed=self.seed, rows=rows, columns=self.columns
        )

    def _counted(self, rows: Int64[np.ndarray, "N"]) -> np.ndarray:
        """(N, D) weights that follow from seed, table, row and column alone."""
        digest = hashlib.sha256(f"initial/{self.seed}/{self.table}".encode()).digest()
        key = np.uint64(int.from_bytes(digest[:8], "little"))
        # From 1, so that no column adds 0 to the row's word.
        columns = np.arange(self.columns.start + 1, self.columns.stop + 1, dtype=np.uint64)
        words = mix(key + rows.astype(np.uint64) * GOLDEN)
        bits = mix(words[:, None] + columns * GOLDEN)
        # The half keeps u above 0, where the quantile is infinite.
        uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        if self.config.init is TableInit.UNIFORM:
            values = (2.0 * uniform - 1.0) * self.shape[0] ** -0.5
        else:
            values = self.config.init_std * normal_quantile(uniform)
        values[rows == PADDING_ROW] = 0.0
        return values.astype(np.float32)


def normal_quantile(probability: Float64[np.ndarray, "*N"]) -> Float64[np.ndarray, "*N"]:
    """Φ⁻¹ by the four operations and a square root alone: the same bits on every machine; 0 < probability < 1."""
    centred = probability - 0.5
    tail = np.sqrt(-_log(np.minimum(probability, 1.0 - probability)))
    # 0.425², the border of the middle part in AS 241.
    square = 0.180625 - centred * centred
    middle = centred * ratio(MIDDLE, square)
    outer = np.where(tail <= 5.0, ratio(NEAR, tail - 1.6), ratio(FAR, tail - 5.0))
    return np.where(np.abs(centred) <= 0.425, middle, np.sign(centred) * outer)


def _log(x: Float64[np.ndarray, "*N"]) -> Float64[np.ndarray, "*N"]:
    """Compute ln x = e·ln 2 + 2·artanh((m − 1)/(m + 1)) for x = m·2^e, √½ ≤ m < √2."""
    mantissa, exponent = np.frexp(x)
    # `frexp` gives ½ ≤ m < 1; the series wants m around 1.
    is_small = mantissa < 0.5**0.5
    mantissa = np.where(is_small, 2.0 * mantissa, mantissa)
    exponent = exponent - is_small
    z = (mantissa - 1.0) / (mantissa + 1.0)
    square = z * z
    series = np.zeros_like(z)
    # Horner's rule from the highest power; at |z| ≤ 0.172 what follows is below FP64's last bit.
    for power in range(21, 0, -2):
        series = series * square + 1.0 / power
    return exponent * 0.6931471805599453 + 2.0 * z * series


def ratio(coefficients: tuple[tuple[float, ...], tuple[float, ...]], x: Any) -> Any:
    """The quotient of two polynomials by Horner's rule, at numbers of numpy or of torch."""
    above = x * 0.0  # zeros of numpy or of torch, as x is
    below = x * 0.0
    for a, b in zip(*coefficients, strict=True):
        above = above * x + a
        below = below * x + b
    return above / below


# fmt: off
MIDDLE = (  # AS 241, |p − ½| ≤ 0.425; highest power first
    (2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457,
     13731.693765509461125, 1971.5909503065514427, 133.14166789178437745, 3.387132872796366608),
    (5226.495278852854561, 28729.085735721942674, 39307.89580009271061, 21213.794301586595867,
     5394.1960214247511077, 687.1870074920579083, 42.313330701600911252, 1.0),
)
NEAR = (  # √(−ln p) ≤ 5
    (7.7454501427834140764e-4, 0.0227238449892691845833, 0.24178072517745061177, 1.27045825245236838258,
     3.64784832476320460504, 5.7694972214606914055, 4.6303378461565452959, 1.42343711074968357734),
    (1.05075007164441684324e-9, 5.475938084995344946e-4, 0.0151986665636164571966, 0.14810397642748007459,
     0.68976733498510000455, 1.6763848301838038494, 2.05319162663775882187, 1.0),
)
FAR = (
    (2.01033439929228813265e-7, 2.71155556874348757815e-5, 0.0012426609473880784386, 0.026532189526576123093,
     0.29656057182850489123, 1.7848265399172913358, 5.4637849111641143699, 6.6579046435011037772),
    (2.04426310338993978564e-15, 1.4215117583164458887e-7, 1.8463183175100546818e-5, 7.868691311456132591e-4,
     0.0148753612908506148525, 0.13692988092273580531, 0.59983220655588793769, 1.0),
)
# fmt: on


def _draw_block(
    weight: Float[Tensor, "N D"], *, num_rows: int, config: EmbeddingConfig, generator: torch.Generator
) -> None:
    if config.init is TableInit.UNIFORM:
        bound = num_rows**-0.5
        weight.uniform_(-bound, bound, generator=generator)
    else:
        weight.normal_(0.0, config.init_std, generator=generator)


def _generator(seed: int, table: str, block: int) -> torch.Generator:
    # The first block draws by the name alone.
    name = f"{seed}/{table}" if block == 0 else f"{seed}/{table}\0{block}"
    digest = hashlib.sha256(name.encode()).digest()
    # 63 bits: the generator takes a signed number.
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
