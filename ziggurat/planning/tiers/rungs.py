"""Rungs: what the rows of one table may be kept as, what that takes, and what it costs.

    rung           bytes of R rows of D columns, s bytes of optimizer state each
    fp32           R·(4·D + s)
    bf16           R·(2·D + s)
    int8           R·(D + 4 + s)                    int4   R·(D/2 + 4 + s)
    int8 + cache   the same, and C·(4·D + s + 8)    C rows in FP32, with tag and stamp
    disk           H·(4·D + s + 9) + 3·R/8          H rows held in FP32, and three bits a row; all lie on the disk
    host           H·(4·D + s) + 4·R                H rows held on the device, and where each is; all lie on the host
    a vocabulary that grows: its map of ids beside that, on every rung

The cost of a rung is the time that the table's lookups and updates take a sample, in units of one FP32 row of 64 bytes
beside its own, plus what rounding is taken to be worth; both stand in the formats (`ops/row_formats/`). Times are those
of docs/experiments, "Do rows in few bits make lookups and updates faster?": a lookup with its update on one thread with
AVX-512, D = 128, uniform rows (FP32 34 + 80 ns; BF16 1.29 times as fast, INT8 0.93; INT4 26 + 105 ns). A hit in a cache
and a miss, which moves two rows, follow "What does a cache of hot rows cost a step?". The worth of rounding is an
assumption, made so that the order of rungs is that of their precision: a lookup that reads a row rounded to BF16 counts
as if it took 0.4 FP32 rows more, INT8 a half, INT4 one and a quarter. Only rows that a cache misses are rounded in it.

    cost = lookups · (4·D + 64) · (time + misses · worth)

Rows on a disk are exact. A row that a step needs and that is not held is read, and another one written, at the rates
that the disk was measured to have; that time is put into units of FP32 rows by the rate at which one core reads and
updates scattered rows in memory (an assumption: 2.5 GB/s). Rows on the host are exact, too, and travel at the rate that
the way to the device was measured to have; each is gathered there, or put back, at that rate of scattered rows. Nothing
is taken to hide behind computing, though threads do it: the choice errs to memory.

A cache is shared by all tables of a width and format; here each table has its share of it to itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ziggurat.embeddings.storage.disk import HELD_BESIDE_BYTES
from ziggurat.embeddings.storage.host import MAP_BYTES
from ziggurat.ops.row_cache import CachePolicy, CacheSize
from ziggurat.ops.row_file import DiskRate, RowLayout
from ziggurat.ops.row_formats import PLAIN, RowFormat
from ziggurat.planning.tiers.miss_ratio import MissRatioCurve

_ROW_OVERHEAD = 64  # bytes of a row's read beyond its own
_HIT_TIME = 1.1
_MIN_MISSES = 0.01  # a sample does not know all rows
_HELD_TIME = 2.0  # a row of a disk that is held: copied for the step, and back
_PLACE_TIME = 1.1  # a row of the host that is held: its place is looked up; an assumption, as that of a hit
_MEMORY_BYTES_PER_S = 2.5e9  # scattered rows, read and updated by one core


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLink:
    """The way between the memory of the host and that of the device.

    Args:
        bytes_per_s: of copies from locked memory.
    """

    bytes_per_s: float

    def text(self) -> str:
        """Describe the link in words."""
        return f"{self.bytes_per_s / 1e9:.1f} GB/s to the device"

    def row_s(self, row_bytes: int) -> float:
        """Seconds of a row that comes and one that goes, gathered and put back one after the other."""
        return 2 * (row_bytes / self.bytes_per_s + (row_bytes + _ROW_OVERHEAD) / _MEMORY_BYTES_PER_S)


@dataclass(frozen=True, kw_only=True)
class Rung:
    """The way in which the rows of a table are kept.

    Args:
        row_format: of all rows.
        cache_share: of the rows that lie in a cache in FP32, too.
        held_share: of the rows on a disk that are held in memory, or of those on the host that the device holds; 0: all
            rows lie in the memory that computes.
        is_in_host: rows that are not held are on the host, not on a disk.
    """

    row_format: RowFormat = PLAIN
    cache_share: float = 0.0
    held_share: float = 0.0
    is_in_host: bool = False

    @property
    def is_below(self) -> bool:
        """True if the rows lie on a disk, or on the host of the device."""
        return self.held_share > 0

    @property
    def text(self) -> str:
        """The rung in words: "int8 + cache of 5 %", "disk, 10 % of the rows held", "host, 10 % of the rows held"."""
        if self.is_below:
            return f"{'host' if self.is_in_host else 'disk'}, {100 * self.held_share:.3g} % of the rows held"
        cache = f" + cache of {100 * self.cache_share:g} %" if self.cache_share else ""
        return f"{self.row_format.value}{cache}"


class Place(StrEnum):
    """The places where rows may lie."""

    ANYWHERE = "anywhere"
    MEMORY = "memory"
    BELOW = "below"


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
        link: the way to the host whose memory may hold them; None: they may not lie there. Not beside a disk.
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
    link: HostLink | None = None
    place: Place = Place.ANYWHERE

    def num_bytes(self, rung: Rung) -> int:
        """All that the rung takes in the memory that computes."""
        if rung.is_below:
            beside = MAP_BYTES * self.num_rows if rung.is_in_host else 3 * self.num_rows // 8
            return int(rung.held_share * self.all_held_bytes) + beside + self.map_bytes
        row = rung.row_format.row_bytes(self.dim) + rung.row_format.beside_bytes(self.dim) + self.state_bytes
        cache = CacheSize(share=rung.cache_share, policy=self.policy)
        cached = cache.bytes_for(self.num_rows, row_bytes=4 * self.dim + self.state_bytes)
        return self.num_rows * row + cached + self.map_bytes

    @property
    def all_held_bytes(self) -> int:
        """The bytes of the rows of a disk or of the host, if all were held."""
        return self.num_rows * (self.row_bytes + (0 if self.link is not None else HELD_BESIDE_BYTES))

    @property
    def row_bytes(self) -> int:
        """The bytes of a row in FP32 with the optimizer's numbers."""
        return 4 * self.dim + self.state_bytes

    @property
    def disk_bytes(self) -> int:
        """The bytes that all rows take of the disk: whole rows in pages, each with its checksum."""
        return RowLayout(self.row_bytes).file_bytes(self.num_rows)

    def rows_below(self, rung: Rung) -> float:
        """Rows that a sample reads from the disk or the host, mean; as many go back."""
        if not rung.is_below:
            return 0.0
        if self.curve is None or not self.curve.trace.all_lookups:
            return self.lookups
        touches = self.lookups * self.curve.trace.all_touches / self.curve.trace.all_lookups
        held = rung.held_share * self.num_rows
        missed = self.curve.misses(held) if rung.is_in_host else self.curve.one_place(held).touches
        return touches * max(_MIN_MISSES, missed)

    def below_s(self, rung: Rung) -> float:
        """Seconds of the disk, or of the way to the host, for the rows of a sample."""
        if self.link is not None:
            return self.rows_below(rung) * self.link.row_s(self.row_bytes)
        if self.disk is None:
            return 0.0
        return self.rows_below(rung) * (1.0 / self.disk.read_rows_per_s + 1.0 / self.disk.written_rows_per_s)

    def misses(self, rung: Rung) -> float:
        """The share of the rows of a step that the rung's cache does not have; 1 without a cache."""
        if not rung.cache_share or self.curve is None:
            return 1.0
        return max(_MIN_MISSES, self.curve.misses(rung.cache_share * self.num_rows))

    def time(self, rung: Rung) -> float:
        """Return the time of lookups and updates, in FP32 rows."""
        if rung.is_below:
            row_s = (4 * self.dim + _ROW_OVERHEAD) / _MEMORY_BYTES_PER_S
            held = _PLACE_TIME if rung.is_in_host else _HELD_TIME
            return held + self.below_s(rung) / max(self.lookups * row_s, 1e-30)
        once = rung.row_format.time
        if not rung.cache_share:
            return once
        missed = self.misses(rung)
        # A miss moves two rows: one comes, and one goes to make room.
        return (1.0 - missed) * _HIT_TIME + missed * (_HIT_TIME + 2.0 * once)

    def cost(self, rung: Rung) -> float:
        """Time of the table's lookups and updates a sample, with what rounding is taken to be worth."""
        worth = self.misses(rung) * rung.row_format.worth
        return self.lookups * (4 * self.dim + _ROW_OVERHEAD) * (self.time(rung) + worth)

    def rungs(self, formats: tuple[RowFormat, ...], *, cache_share: float, held_share: float = 0.0) -> tuple[Rung, ...]:
        """Those that may be chosen: formats that save bytes, FP32 always without a cache; disk or host, for exact rows.

        Args:
            formats: that may be chosen.
            cache_share: of the cache in front of rows in few bits.
            held_share: of rows on a disk or on the host; 0: neither.
        """
        given = formats if self.fixed is None else (self.fixed,)
        kept = dict.fromkeys(each.for_columns(self.dim) for each in given)
        may_leave = held_share > 0 and (self.disk or self.link) is not None and any(each.is_plain for each in given)
        lower = Rung(held_share=held_share, is_in_host=self.link is not None)
        below = [lower] if may_leave else []
        if below and self.place is Place.BELOW:
            return tuple(below)
        in_memory = (Rung(row_format=each, cache_share=cache_share if each.rounds else 0.0) for each in kept)
        return (*in_memory, *(below if self.place is not Place.MEMORY else []))
