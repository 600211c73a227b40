"""Rungs: what the rows of one table may be kept as, what that takes, and what it costs.

    rung           bytes of R rows of D columns, s bytes of optimizer state each
    fp32           R·(4·D + s)
    bf16           R·(2·D + s)
    int8           R·(D + 4 + s)                    int4   R·(D/2 + 4 + s)
    int8 + cache   the same, and C·(4·D + s + 8)    C rows in FP32, with tag and stamp
    disk           H·(4·D + s + 9) + R/4            H rows held in FP32, and two bits for each row; all lie on the disk
    a vocabulary that grows: its map of ids beside that, on every rung

The cost of a rung is the time that the table's lookups and updates take a sample, in units of one FP32 row of 64 bytes
beside its own, plus what rounding is taken to be worth. Times of formats are those of docs/experiments.md, "Do rows in
few bits make lookups and updates faster?": a lookup with its update on one thread with AVX-512, D = 128, uniform rows
(FP32 34 + 80 ns; BF16 1.29 times as fast, INT8 0.93; INT4 26 + 105 ns). A hit in a cache and a miss, which moves two
rows, follow "What does a cache of hot rows cost a step?". The worth of rounding is an assumption, made so that the
order of rungs is that of their precision: a lookup that reads a row rounded to BF16 counts as if it took 0.4 FP32 rows
more, INT8 a half, INT4 one and a quarter. Only rows that a cache misses are rounded in it.

    cost = lookups · (4·D + 64) · (time + misses · worth)

Rows on a disk are exact. A row that a step needs and that is not held is read, and another one written, at the rates
that the disk was measured to have; that time is put into units of FP32 rows by the rate at which one core reads and
updates scattered rows in memory (an assumption: 2.5 GB/s). Nothing is taken to hide behind computing, though both are
done by threads: the choice errs to memory.

A cache is shared by all tables of a width and format; here each table has its share of it to itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ziggurat.embeddings.storage.disk import HELD_BESIDE_BYTES
from ziggurat.ops.row_cache import CachePolicy, CacheSize
from ziggurat.ops.row_file import DiskRate, RowLayout
from ziggurat.ops.row_formats import RowFormat
from ziggurat.planning.tiers.miss_ratio import MissRatioCurve

ROUNDED = (RowFormat.BF16, RowFormat.INT8, RowFormat.INT4)  # a cache stands in front of these alone
_ROW_OVERHEAD = 64  # bytes of a row's read beyond its own
_HIT_TIME = 1.1
_LEAST_MISSES = 0.01  # a sample does not know all rows
_HELD_TIME = 2.0  # a row of a disk that is held: copied for the step, and back
_MEMORY_BYTES_PER_S = 2.5e9  # scattered rows, read and updated by one core
TIME = {RowFormat.FP32: 1.0, RowFormat.BF16: 0.78, RowFormat.INT8: 1.08, RowFormat.INT4: 1.15}
WORTH = {RowFormat.FP32: 0.0, RowFormat.BF16: 0.4, RowFormat.INT8: 0.5, RowFormat.INT4: 1.25}


@dataclass(frozen=True, kw_only=True)
class Rung:
    """What the rows of a table are kept as.

    Args:
        row_format: of all rows.
        cache_share: of the rows that lie in a cache in FP32, too.
        held_share: of the rows on a disk that are held in memory; 0: all rows lie in memory.
    """

    row_format: RowFormat
    cache_share: float = 0.0
    held_share: float = 0.0

    @property
    def is_on_disk(self) -> bool:
        """Whether the rows lie on a disk."""
        return self.held_share > 0

    @property
    def text(self) -> str:
        """In words: "int8 + cache of 5 %", "disk, 10 % of the rows held"."""
        if self.is_on_disk:
            return f"disk, {100 * self.held_share:.3g} % of the rows held"
        cache = f" + cache of {100 * self.cache_share:g} %" if self.cache_share else ""
        return f"{self.row_format.value}{cache}"


class Place(StrEnum):
    """Where rows may lie."""

    ANYWHERE = "anywhere"
    MEMORY = "memory"
    DISK = "disk"


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
        map_bytes: of the map from ids to rows, of a table whose vocabulary grows; on every rung the same.
        disk: what the disk gives that may hold its rows; None: there is none.
        place: where its rows lie, if that is known.
    """

    name: str
    num_rows: int
    dim: int
    state_bytes: int = 4
    lookups: float = 1.0
    curve: MissRatioCurve | None = None
    fixed: RowFormat | None = None
    policy: CachePolicy = CachePolicy.LRU
    map_bytes: int = 0
    disk: DiskRate | None = None
    place: Place = Place.ANYWHERE

    def num_bytes(self, rung: Rung) -> int:
        """All that the rung takes in memory."""
        if rung.is_on_disk:
            return int(rung.held_share * self.all_held_bytes) + self.num_rows // 4 + self.map_bytes
        row = rung.row_format.row_bytes(self.dim) + rung.row_format.beside_bytes(self.dim) + self.state_bytes
        cache = CacheSize(share=rung.cache_share, policy=self.policy)
        cached = cache.bytes_for(self.num_rows, row_bytes=4 * self.dim + self.state_bytes)
        return self.num_rows * row + cached + self.map_bytes

    @property
    def all_held_bytes(self) -> int:
        """Of the rows of a disk, were they all held."""
        return self.num_rows * (4 * self.dim + self.state_bytes + HELD_BESIDE_BYTES)

    @property
    def disk_bytes(self) -> int:
        """What all rows take of the disk: whole rows in pages, each with its checksum."""
        return RowLayout(4 * self.dim + self.state_bytes).file_bytes(self.num_rows)

    def disk_rows(self, rung: Rung) -> float:
        """Rows that a sample reads from the disk, mean; as many are written."""
        if not rung.is_on_disk:
            return 0.0
        if self.curve is None or not self.curve.trace.all_lookups:
            return self.lookups
        touches = self.lookups * self.curve.trace.all_touches / self.curve.trace.all_lookups
        return touches * max(_LEAST_MISSES, self.curve.one_place(rung.held_share * self.num_rows).touches)

    def disk_s(self, rung: Rung) -> float:
        """Seconds of the disk for the rows of a sample."""
        if self.disk is None:
            return 0.0
        return self.disk_rows(rung) * (1.0 / self.disk.read_rows_per_s + 1.0 / self.disk.written_rows_per_s)

    def misses(self, rung: Rung) -> float:
        """The share of the rows of a step that the rung's cache does not have; 1 without a cache."""
        if not rung.cache_share or self.curve is None:
            return 1.0
        return max(_LEAST_MISSES, self.curve.misses(rung.cache_share * self.num_rows))

    def time(self, rung: Rung) -> float:
        """Of lookups and updates, in FP32 rows."""
        if rung.is_on_disk:
            row_s = (4 * self.dim + _ROW_OVERHEAD) / _MEMORY_BYTES_PER_S
            return _HELD_TIME + self.disk_s(rung) / max(self.lookups * row_s, 1e-30)
        once = TIME.get(rung.row_format, 1.0)
        if not rung.cache_share:
            return once
        missed = self.misses(rung)
        return (1.0 - missed) * _HIT_TIME + missed * (_HIT_TIME + 2.0 * once)

    def cost(self, rung: Rung) -> float:
        """Time of the table's lookups and updates a sample, with what rounding is taken to be worth."""
        worth = self.misses(rung) * WORTH.get(rung.row_format, 0.0)
        return self.lookups * (4 * self.dim + _ROW_OVERHEAD) * (self.time(rung) + worth)

    def rungs(self, formats: tuple[RowFormat, ...], *, cache_share: float, held_share: float = 0.0) -> tuple[Rung, ...]:
        """Those that may be chosen: formats that save bytes, FP32 always without a cache; the disk, for exact rows.

        Args:
            formats: that may be chosen.
            cache_share: of the cache in front of rows in few bits.
            held_share: of rows on a disk; 0: no disk.
        """
        given = formats if self.fixed is None else (self.fixed,)
        kept = dict.fromkeys(each.for_columns(self.dim) for each in given)
        may_leave = held_share > 0 and self.disk is not None and RowFormat.FP32 in given
        on_disk = [Rung(row_format=RowFormat.FP32, held_share=held_share)] if may_leave else []
        if on_disk and self.place is Place.DISK:
            return tuple(on_disk)
        in_memory = (Rung(row_format=each, cache_share=cache_share if each in ROUNDED else 0.0) for each in kept)
        return (*in_memory, *(on_disk if self.place is not Place.MEMORY else []))
