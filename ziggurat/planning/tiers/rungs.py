"""Rungs: what the rows of one table may be kept as, what that takes, and what it costs.

    rung           bytes of R rows of D columns, s bytes of optimizer state each
    fp32           R·(4·D + s)
    bf16           R·(2·D + s)
    int8           R·(D + 4 + s)                    int4   R·(D/2 + 4 + s)
    int8 + cache   the same, and C·(4·D + s + 8)    C rows in FP32, with tag and stamp

The cost of a rung is the time that the table's lookups and updates take a sample, in units of one FP32 row of 64 bytes
beside its own, plus what rounding is taken to be worth. Time follows the figures of docs/experiments.md (a row in few
bits is decoded, updated and encoded again; a miss moves two rows). The worth of rounding is an assumption, made so that
the order of rungs is that of their precision: a lookup that reads a row rounded to INT4 counts as if it took twice as
long, INT8 a fifth longer, BF16 a tenth. Only rows that a cache misses are rounded in it.

    cost = lookups · (4·D + 64) · (time + misses · worth)

A cache is shared by all tables of a width and format; here each table has its share of it to itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from ziggurat.ops.row_cache import CachePolicy, CacheSize
from ziggurat.ops.row_formats import RowFormat
from ziggurat.planning.tiers.miss_ratio import MissRatioCurve

ROUNDED = (RowFormat.BF16, RowFormat.INT8, RowFormat.INT4)  # a cache stands in front of these alone
_ROW_OVERHEAD = 64  # bytes of a row's read beyond its own
_HIT_TIME = 1.1
_LEAST_MISSES = 0.01  # a sample does not know all rows
TIME = {RowFormat.FP32: 1.0, RowFormat.BF16: 1.28, RowFormat.INT8: 1.32, RowFormat.INT4: 1.39}
WORTH = {RowFormat.FP32: 0.0, RowFormat.BF16: 0.1, RowFormat.INT8: 0.2, RowFormat.INT4: 1.0}


@dataclass(frozen=True, kw_only=True)
class Rung:
    """What the rows of a table are kept as.

    Args:
        row_format: of all rows.
        cache_share: of the rows that lie in a cache in FP32, too.
    """

    row_format: RowFormat
    cache_share: float = 0.0

    @property
    def text(self) -> str:
        """In words: "int8 + cache of 5 %"."""
        cache = f" + cache of {100 * self.cache_share:g} %" if self.cache_share else ""
        return f"{self.row_format.value}{cache}"


@dataclass(frozen=True, kw_only=True)
class TieredTable:
    """A table whose rung is to be chosen.

    Args:
        name: of the table.
        num_rows: R.
        dim: D.
        state_bytes: of the optimizer, for each row.
        lookups: rows that a sample looks up, mean.
        curve: what caches of its rows miss; None where nobody has counted: a cache then counts as useless.
        fixed: its rung, where the user has named it; None lets it be chosen.
        policy: of a cache in front of its rows.
    """

    name: str
    num_rows: int
    dim: int
    state_bytes: int = 4
    lookups: float = 1.0
    curve: MissRatioCurve | None = None
    fixed: RowFormat | None = None
    policy: CachePolicy = CachePolicy.LRU

    def num_bytes(self, rung: Rung) -> int:
        """All that the rung takes in memory."""
        row = rung.row_format.row_bytes(self.dim) + rung.row_format.beside_bytes(self.dim) + self.state_bytes
        cache = CacheSize(share=rung.cache_share, policy=self.policy)
        return self.num_rows * row + cache.bytes_for(self.num_rows, row_bytes=4 * self.dim + self.state_bytes)

    def misses(self, rung: Rung) -> float:
        """The share of the rows of a step that the rung's cache does not have; 1 without a cache."""
        if not rung.cache_share or self.curve is None:
            return 1.0
        return max(_LEAST_MISSES, self.curve.misses(rung.cache_share * self.num_rows))

    def time(self, rung: Rung) -> float:
        """Of lookups and updates, in FP32 rows."""
        once = TIME.get(rung.row_format, 1.0)
        if not rung.cache_share:
            return once
        missed = self.misses(rung)
        return (1.0 - missed) * _HIT_TIME + missed * (_HIT_TIME + 2.0 * once)

    def cost(self, rung: Rung) -> float:
        """Time of the table's lookups and updates a sample, with what rounding is taken to be worth."""
        worth = self.misses(rung) * WORTH.get(rung.row_format, 0.0)
        return self.lookups * (4 * self.dim + _ROW_OVERHEAD) * (self.time(rung) + worth)

    def rungs(self, formats: tuple[RowFormat, ...], *, cache_share: float) -> tuple[Rung, ...]:
        """Those that may be chosen: formats that save bytes, FP32 always without a cache.

        Args:
            formats: that may be chosen.
            cache_share: of the cache in front of rows in few bits.
        """
        given = formats if self.fixed is None else (self.fixed,)
        kept = dict.fromkeys(each.for_columns(self.dim) for each in given)
        return tuple(Rung(row_format=each, cache_share=cache_share if each in ROUNDED else 0.0) for each in kept)
