"""One line of `ziggurat tables`: what a table takes, where its rows lie, and what a cache of them hits."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ziggurat.ops.machine.memory import size_text
from ziggurat.ops.row_cache.ways import NUM_WAYS, num_sets
from ziggurat.planning.tiers.miss_ratio import MissRatioCurve


@dataclass(frozen=True, kw_only=True)
class CacheHits:
    """The hits of a cache of some share of the rows.

    Args:
        share: of the rows.
        cache_rows: rows in the cache.
        touches: share of the rows a step needs that are there.
        lookups: share of lookups whose row is there.
        error: standard error of `touches` that comes from counting a sample of the rows; 0: all were counted.
    """

    share: float
    cache_rows: int
    touches: float
    lookups: float
    error: float

    @staticmethod
    def at(curve: MissRatioCurve, share: float, *, has_one_place: bool = False, whole_sets: bool = False) -> CacheHits:
        """The hits of a cache of a share of the rows of a curve.

        Args:
            curve: of the rows.
            share: of them that the cache holds.
            has_one_place: each row has one place in it, as rows of a disk do.
            whole_sets: it holds as many rows as its sets of 32 ways, as the cache of a run does.
        """
        num_rows = curve.trace.num_rows
        places = NUM_WAYS * num_sets(num_rows, share=share) if whole_sets else round(share * num_rows)
        cache_rows = min(places, num_rows)
        missed = curve.one_place(cache_rows) if has_one_place else curve.at(cache_rows)
        return CacheHits(
            share=share,
            cache_rows=cache_rows,
            touches=1.0 - missed.touches,
            lookups=1.0 - missed.lookups,
            error=curve.error(cache_rows),
        )

    @property
    def text(self) -> str:
        """The hits in per cent, with the error of a sample."""
        return f"{100 * self.touches:.1f}" + (f" ± {100 * self.error:.1f}" if self.error else "") + " %"


class RowsPlace(StrEnum):
    """The place where the rows of a table lie."""

    MEMORY = "memory"  # of the device that computes
    HOST = "host"  # with some of them on the device
    DISK = "disk"  # with some of them in memory


WHERE = {RowsPlace.MEMORY: "", RowsPlace.HOST: " on host", RowsPlace.DISK: " on disk"}


@dataclass(frozen=True, kw_only=True)
class TableUse:
    """One table, or tables that share a cache.

    Args:
        name: of the table; of several "all of D columns in FORMAT".
        num_rows: rows.
        dim: columns.
        row_format: what rows are kept as.
        weight_bytes: of memory, for what lookups read; 0 where rows lie on a disk.
        state_bytes: of memory, for the optimizer's numbers and lower halves; 0 where rows lie on a disk.
        cache_bytes: of hot rows in FP32, or of rows of a disk or the host that are held; with state, and what says
            which they are.
        map_bytes: of the map from ids to rows, where the vocabulary grows.
        disk_bytes: of the disk, once every row was changed.
        rows_touched: different rows in the sample.
        age_batches: batches since these were used last, at the end of the sample: the median of them.
        lookups_per_sample: mean.
        touches_per_sample: rows that a step has to have, a sample.
        hits: predicted, by share of the rows.
        own_hits: predicted for the cache that the run has; None without.
        first_touches: share of touches that no cache hits.
        place: where all its rows lie.
    """

    name: str
    num_rows: int
    dim: int
    row_format: str
    weight_bytes: int
    state_bytes: int
    cache_bytes: int
    map_bytes: int
    disk_bytes: int
    rows_touched: int
    age_batches: float
    lookups_per_sample: float
    touches_per_sample: float
    hits: tuple[CacheHits, ...]
    own_hits: CacheHits | None
    first_touches: float
    place: RowsPlace = RowsPlace.MEMORY

    def cells(self) -> tuple[str, ...]:
        """A line of the table, as `COLUMNS` name it."""
        return (
            self.name,
            f"{self.num_rows:,} × {self.dim}",
            self.row_format + WHERE[self.place],
            *(
                size_text(each) if each else ""
                for each in (self.weight_bytes, self.state_bytes, self.cache_bytes, self.map_bytes, self.disk_bytes)
            ),
            f"{self.rows_touched:,}",
            f"{self.age_batches:,.0f}",
            f"{self.lookups_per_sample:.2f}",
            *(each.text for each in self.hits),
        )
