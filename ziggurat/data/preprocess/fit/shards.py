"""Shards: raw files in parts that are read on their own, by whoever comes.

A shard is some files that follow each other, of one split where the files were split before; or, where there are
several processes, a part of one large text file (`raw/text_parts.py`). Every row has a number
that counts through all files, and what a row becomes (its split, whether a negative is kept, its place) may depend on
it; so before a shard is read, the rows of those before it are counted. Parquet files say how many they have; text is
read for it, one shard at a time, unless a split by time reads everything anyway.

What is prepared does not depend on the shards: vocabularies and statistics add up exactly (`fitter.py`), and the files
of the result are cut by rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from ziggurat.config import JSON, from_json
from ziggurat.data.raw.source import RawSource
from ziggurat.data.raw.text_parts import TextPart
from ziggurat.errors import DataError
from ziggurat.files.stores import DataPath

SHARD_BYTES = 256 << 20  # smaller files are read together
MAX_SHARDS = 256


@dataclass(frozen=True, kw_only=True)
class ShardSizes:
    """Settings for how large shards are.

    Args:
        least_bytes: smaller files are put together; more where there would be too many shards.
        processes: that share the work; with several, large text files are cut so that each has something to do.
    """

    least_bytes: int = SHARD_BYTES
    processes: int = 1


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Some raw files that follow each other, or a part of one.

    Args:
        index: its place among all shards.
        source: number of the split that its files are for, where files were split before; else 0.
        paths: the files.
        part: of the only file; None for all of it.
    """

    index: int
    source: int
    paths: tuple[str, ...]
    part: TextPart | None = None

    @property
    def name(self) -> str:
        """The name of the shard's unit of work."""
        return f"shard-{self.index:04}"

    @staticmethod
    def from_json(data: JSON) -> Shard:
        """Read what `to_json` made."""
        return from_json(Shard, data, where="note of a shard", error=DataError)

    def to_json(self) -> dict[str, JSON]:
        """The shard as plain data."""
        return {**asdict(self), "paths": list(self.paths)}


def plan_shards(
    by_split: Sequence[Sequence[DataPath]],
    *,
    sizes: ShardSizes,
    parts_of: Callable[[DataPath, int], tuple[TextPart, ...]],
) -> list[Shard]:
    """Cut files into shards of at least so many bytes, where the files allow it.

    Args:
        by_split: files in the order of their rows, for each split (or all of them as the first one's).
        sizes: how large shards are.
        parts_of: cuts a file into at most so many parts, or into none.
    """
    total = sum(path.stat().st_size for paths in by_split for path in paths)
    least = max(sizes.least_bytes, total // MAX_SHARDS)
    part_bytes = max(least, total // max(sizes.processes, 1))
    shards: list[Shard] = []
    for source, paths in enumerate(by_split):
        waiting: list[str] = []
        waiting_bytes = 0
        for path in paths:
            size = path.stat().st_size
            num_parts = round(size / max(part_bytes, 1)) if sizes.processes > 1 else 1
            parts = parts_of(path, num_parts) if num_parts > 1 else ()
            # Shards follow the order of the rows: files before one that is cut come first.
            if parts and waiting:
                shards.append(Shard(index=len(shards), source=source, paths=tuple(waiting)))
                waiting = []
                waiting_bytes = 0
            for part in parts:
                shards.append(Shard(index=len(shards), source=source, paths=(str(path),), part=part))
            if not parts:
                waiting.append(str(path))
                waiting_bytes += size
            if waiting and (waiting_bytes >= least or path is paths[-1]):
                shards.append(Shard(index=len(shards), source=source, paths=tuple(waiting)))
                waiting = []
                waiting_bytes = 0
    return shards


def count_rows(source: RawSource, *, column: str, progress: Callable[[int], None]) -> int:
    """Rows of the files, bad ones included: what Parquet and Arrow files say, or all that others hold.

    Args:
        source: the files.
        column: one that all of them have; the only one that is looked at.
        progress: called with the rows so far.
    """
    if all(source.knows_rows(path) for path in source.paths):
        known = source.num_rows_hint()
        if known is not None:
            return known
    done = 0
    for chunk in source.frames(columns=[column]):
        done += chunk.num_rows
        progress(done)
    return source.num_read
