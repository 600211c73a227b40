"""FinishedFiles: which files of a folder that grows are whole, and may be read.

    Parquet     its footer is there: the last 8 bytes say how long it is, and end with PAR1. It is written last
    Arrow       a file ends with ARROW1
    others      size and time of change have stayed the same for some seconds; for 15 times as long where the last line
                has no end, which half a file and those of some writers have in common

Names that programs give to files that they still write are no data by their suffix (`.parquet.tmp`) or are hidden
(`.part-0.parquet`), so nobody sees them here. Whoever writes text should write it elsewhere and rename it: under its
final name a pause of the writer that is longer than those seconds looks like the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ziggurat.files.stores import DataPath, StoreFile, facts_of
from ziggurat.files.table_endings import READ_AS

_PARQUET_MAGIC = b"PAR1"
_ARROW_MAGIC = b"ARROW1"
_TEXT = ("csv", "tsv", "jsonl")
_AMID_LINE = 15  # times as long waits a text that may be half a file


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """Remembers a file as it was when it was seen first in this state, and when that was."""

    facts: tuple[str, int, int | str]
    at_s: float


class FinishedFiles:
    """Tells files that are whole from those that are still written.

    Args:
        settle_s: seconds for which a file without an end of its own must stay as it is.
        clock: seconds.
    """

    def __init__(self, *, settle_s: float = 2.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._settle_s = settle_s
        self._clock = clock
        self._seen: dict[str, _Seen] = {}
        self.waiting: tuple[str, ...] = ()  # files that the last call left out

    def of(self, paths: Iterable[DataPath], *, known: Callable[[DataPath], bool]) -> list[DataPath]:
        """Return those files that are whole.

        Args:
            paths: that are there.
            known: whether a file was taken before: it is not judged again.
        """
        found: list[DataPath] = []
        waiting: list[str] = []
        for path in paths:
            try:
                is_whole = known(path) or self._is_whole(path)
            except FileNotFoundError:  # it was renamed or removed in this moment
                continue
            if is_whole:
                found.append(path)
                self._seen.pop(str(path), None)
            else:
                waiting.append(str(path))
        self.waiting = tuple(waiting)
        return found

    def _is_whole(self, path: DataPath) -> bool:
        if isinstance(path, StoreFile):
            return True  # an object in a store appears when it is whole
        format = READ_AS.get(path.suffix.lower())
        if format == "parquet":
            return _has_footer(path)
        if format == "arrow" and _last_bytes(path, len(_ARROW_MAGIC)) == _ARROW_MAGIC:
            return True
        facts = facts_of(path)
        now = self._clock()
        seen = self._seen.get(str(path))
        if seen is None or seen.facts != facts:
            self._seen[str(path)] = _Seen(facts=facts, at_s=now)
            return False
        settle_s = self._settle_s * (_AMID_LINE if ends_amid_line(path) else 1)
        return now - seen.at_s >= settle_s and facts[1] > 0


def ends_amid_line(path: DataPath) -> bool:
    """Return whether a text file ends without the end of its last line, so that this may be the first half of a row."""
    is_text = not isinstance(path, StoreFile) and READ_AS.get(path.suffix.lower()) in _TEXT
    return is_text and _last_bytes(path, 1) not in (b"", b"\n", b"\r")


def _has_footer(path: DataPath) -> bool:
    """Return whether a Parquet file ends as a whole one does: with a footer that fits in it."""
    size = path.stat().st_size
    tail = _last_bytes(path, 8)
    if len(tail) < 8 or tail[4:] != _PARQUET_MAGIC:
        return False
    return 0 < int.from_bytes(tail[:4], "little") <= size - 12


def _last_bytes(path: DataPath, count: int) -> bytes:
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - count))
        return file.read(count)
