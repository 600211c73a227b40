"""How vocabularies that grow fared in a run, as its log says: unknown ids, ids that lost their rows, full tables.

A table that is full takes a row from one id for another, or leaves the new one unknown, as `evict` says. Where a good
part of the look-ups of a run did that, its limit is too small for the ids that come, and what their rows have learned
is lost again and again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ziggurat.features.inputs import InputSpec
from ziggurat.training.records.log import read_records

_PREFIX = "growing/"
_FULL_SHARE = 0.5  # of the lines of a log, from which on a table is said to be full
_LOST_SHARE = 0.2  # of look-ups, from which on it is said that they cost rows


@dataclass(frozen=True, kw_only=True)
class LoggedGrowth:
    """The figures that a log gives of one growing table.

    Args:
        name: of the table.
        limit: ids that may have a row at a time.
        lookups: of ids, in training.
        unknown: of them, those that met an unknown id.
        evicted: ids that lost their row to another.
        full_share: of the lines of the log at which every row had an id.
    """

    name: str
    limit: int
    lookups: int
    unknown: int
    evicted: int
    full_share: float

    @property
    def unknown_share(self) -> float:
        """The share of look-ups with unknown ids."""
        return self.unknown / max(self.lookups, 1)

    @property
    def text(self) -> str:
        """The growth in words."""
        return (
            f"{self.unknown_share:.1%} of {self.lookups:,} look-ups met an unknown id, and {self.evicted:,} ids lost "
            f"their row to another; all {self.limit:,} rows were taken in {self.full_share:.0%} of the log's lines"
        )

    @property
    def is_short(self) -> bool:
        """True if the limit is too small: full most of the time, and a fifth of the look-ups cost some id its row."""
        lost = (self.unknown + self.evicted) / max(self.lookups, 1)
        return self.full_share > _FULL_SHARE and lost > _LOST_SHARE


def logged_growth(log: Path, *, limits: Mapping[str, int]) -> dict[str, LoggedGrowth]:
    """Return what became of the ids of each growing table in the training of a run.

    Args:
        log: its metrics.jsonl.
        limits: ids that may have a row, by table; others are left out.
    """
    counts = Counter[tuple[str, str]]()
    lines = Counter[str]()
    full = Counter[str]()
    for record in read_records(log):
        if record.get("kind") != "train":
            continue
        for name, count in record.items():
            # From the right: the name of a table may have slashes of its own.
            table, _, what = name.removeprefix(_PREFIX).rpartition("/")
            if not name.startswith(_PREFIX) or table not in limits:
                continue
            counts[table, what] += count
            # One count of ids a line: how full the table was when it was written.
            if what == "ids":
                lines[table] += 1
                if count >= limits[table]:
                    full[table] += 1
    return {
        table: LoggedGrowth(
            name=table,
            limit=limits[table],
            lookups=counts[table, "known"] + counts[table, "unknown"],
            unknown=counts[table, "unknown"],
            evicted=counts[table, "evicted"],
            full_share=full[table] / max(lines[table], 1),
        )
        for table in dict.fromkeys(table for table, _ in counts)
    }


def limits_of(inputs: InputSpec) -> dict[str, int]:
    """Ids that may have a row at a time, by table that grows."""
    return {table.name: table.growing.num_ids for table in inputs.tables if table.growing is not None}


def short_of_rows(log: Path, inputs: InputSpec) -> list[str]:
    """List what to say at the end of a run of growing tables whose limit is too small for the ids that came."""
    limits = limits_of(inputs)
    found = logged_growth(log, limits=limits).values() if limits else ()
    return [
        f"growing table {each.name!r} is too small for the ids that come: {each.text}. A larger num_rows, or min_count "
        "for ids that come once, keeps what rows have learned"
        for each in found
        if each.is_short
    ]
