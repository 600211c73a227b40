"""CacheCounts: what updates found in a cache of rows, in rows of steps."""

from __future__ import annotations

from dataclasses import astuple, dataclass


@dataclass
class CacheCounts:
    """Counts of what updates found in a cache, in rows of steps: each distinct row of each step once.

    Args:
        rows: that updates touched.
        hits: those that the cache held.
        stored: rows that left it for others.
        conflicts: rows that found no way in it.
    """

    rows: int = 0
    hits: int = 0
    stored: int = 0
    conflicts: int = 0

    def __add__(self, other: CacheCounts) -> CacheCounts:
        return CacheCounts(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: CacheCounts) -> CacheCounts:
        return CacheCounts(*(mine - its for mine, its in zip(astuple(self), astuple(other), strict=True)))

    def facts(self) -> dict[str, float]:
        """Return facts for a training log: the share of touched rows that were held, rows stored, and conflicts."""
        rate = round(self.hits / self.rows, 6) if self.rows else 0.0
        return {"cache_hit_rate": rate, "cache_stored": self.stored, "cache_conflicts": self.conflicts}
