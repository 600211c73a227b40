"""A side table that grows, as a stream reads it: what each window was joined with is known, and found again.

    window opened ─► look: versions and parts that are there now ─► join ─► parts that gave something ─► journal
    opened again (after a kill) ──────────────────────────────────────────► those parts, and no other ◄──┘

A teacher logs while its student learns, so the table that a window is joined with is that of the moment at which it is
first opened. A process that is killed opens the window again, later: with what has come since, its weights would be
others. So the parts that gave a score, or a vector of a history (`history.py`), are written down before a row of the
window is trained, each with digests of what it gave, and joined again by name. Whether others are there changes nothing
of this window; the next one refuses a version of which a part is gone (`part_list.py`), and a table of which a version
is gone (`version_list.py`).

An example is in one part of a version. Parts are asked for scores from the newest on, for the rows that have none yet,
and are read when they are asked: while a teacher has scored all rows of a window, old parts are not touched. In memory
are the parts that the last window asked, 24 bytes and 4 a label for each example. For histories each part has an index
of its own, which is mapped: the vectors of a part are sorted once, however many come after it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float32, UInt64

from ziggurat.config import to_json
from ziggurat.data.teachers.history import HistoryIndex, HistoryJoin, index_of_part
from ziggurat.data.teachers.side_table import ExampleIndex, VersionFolder, versions_in
from ziggurat.errors import DataError

_DIGEST_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class JoinedPart:
    """A part of a side table that gave rows of a window scores, or vectors of their histories.

    Args:
        version: TEACHER/VERSION.
        part: name of its file.
        digest: of the facts of the version, and of examples and logits of the part; "" of one that gave no score.
        vectors: of the facts, and of examples, users, times and vectors of the part; "" of one that gave no vector.
    """

    version: str
    part: str
    digest: str
    vectors: str = ""


@dataclass(frozen=True, kw_only=True)
class _Part:
    """The content of a part."""

    index: ExampleIndex
    logits: Float32[np.ndarray, "N L"]
    digest: str


class GrowingSideTable:
    """Opens the side table for one window after the other.

    Args:
        folder: the side table.
        teachers: whose scores are wanted.
        histories: teachers whose vectors are wanted.
    """

    def __init__(self, folder: str | Path, *, teachers: Sequence[str], histories: Sequence[str] = ()) -> None:
        self._folder = Path(folder)
        self._teachers = frozenset(teachers)
        self._histories = frozenset(histories)
        self._parts: dict[tuple[str, str], _Part] = {}
        self._indices: dict[tuple[str, str, str], HistoryIndex] = {}

    def now(self) -> WindowTable:
        """Return what is there now, for requests, which read histories and no scores.

        Raises:
            MissingFileError: there is no side table.
            DataError: a part is gone, or is another one.
        """
        versions = [each for each in versions_in(self._folder) if each.facts.teacher in self._histories]
        drawn = {key_of(each): tuple(part.name for part in each.parts) for each in versions}
        return WindowTable(versions, scored={}, before={}, indices=self._indices_of(versions, drawn))

    def open(self, recorded: Sequence[JoinedPart] | None, *, window: str) -> WindowTable:
        """Return what a window is joined with.

        Args:
            recorded: the parts that it was joined with when it was first opened; None: this is the first time.
            window: its name, for errors.

        Raises:
            MissingFileError: there is no side table.
            DataError: a part that is recorded is gone, or has another content.
        """
        scored: dict[str, tuple[str, ...]] = {}
        drawn: dict[str, tuple[str, ...]] = {}
        if recorded is None:
            wanted = self._teachers | self._histories
            versions = [each for each in versions_in(self._folder) if each.facts.teacher in wanted]
            for version in versions:
                names = tuple(part.name for part in version.parts)
                if version.facts.teacher in self._teachers:
                    scored[key_of(version)] = names
                if version.facts.teacher in self._histories:
                    drawn[key_of(version)] = names
        else:
            for each in recorded:
                if not self._has(each):
                    raise _refused(window, found="it is gone", where=self._folder / each.version / each.part)
                if each.digest:
                    scored[each.version] = (*scored.get(each.version, ()), each.part)
                if each.vectors:
                    drawn[each.version] = (*drawn.get(each.version, ()), each.part)
            versions = [
                VersionFolder.open(self._folder / key) for key in dict.fromkeys(each.version for each in recorded)
            ]
        table = WindowTable(
            versions,
            scored=scored,
            before=self._parts,
            indices=self._indices_of(versions, drawn),
        )
        for each in recorded or ():
            if (each.digest and each.digest != table.digest_of(each.version, each.part)) or (
                each.vectors and each.vectors != table.vectors_of(each.version, each.part)
            ):
                raise _refused(window, found="another content", where=self._folder / each.version / each.part)
        # Content that the window before did not ask for is not kept for the next.
        self._parts = table.read
        return table

    def others(self) -> list[str]:
        """Return the teachers that are there and not wanted: they came after the student began."""
        wanted = self._teachers | self._histories
        return sorted({each.facts.teacher for each in versions_in(self._folder)}.difference(wanted))

    def columns(self) -> tuple[str, ...]:
        """Return the raw columns that examples are known by, of all versions that are there."""
        versions = [each for each in versions_in(self._folder) if each.facts.teacher in self._teachers]
        return tuple(dict.fromkeys(column for each in versions for column in each.facts.example_columns))

    def _has(self, part: JoinedPart) -> bool:
        return (self._folder / part.version / part.part).is_file()

    def _indices_of(
        self, versions: Sequence[VersionFolder], drawn: dict[str, tuple[str, ...]]
    ) -> dict[str, list[HistoryIndex]]:
        """Return the indices of parts that are named by TEACHER/VERSION."""
        return {
            key_of(version): [self._index(version, name) for name in drawn.get(key_of(version), ())]
            for version in versions
        }

    def _index(self, version: VersionFolder, part: str) -> HistoryIndex:
        """Return the index of a part, which stays mapped as long as the part is the same."""
        at = (key_of(version), part, version.check(version.path / part))
        if at not in self._indices:
            self._indices[at] = index_of_part(version, part)
        return self._indices[at]


class WindowTable:
    """The scores and vectors that one window finds in a side table.

    Args:
        versions: of the teachers.
        scored: names of parts in which it may find scores, by TEACHER/VERSION.
        before: parts that were read for the window before.
        indices: of the parts in which it may find vectors, by TEACHER/VERSION.

    Attributes:
        versions: as given.
        read: parts that were read, or taken from before.
    """

    def __init__(
        self,
        versions: Sequence[VersionFolder],
        *,
        scored: dict[str, tuple[str, ...]],
        before: dict[tuple[str, str], _Part],
        indices: dict[str, list[HistoryIndex]],
    ) -> None:
        self.versions = tuple(versions)
        self._by_key = {key_of(each): each for each in versions}
        self._scored = scored
        self._indices = indices
        self._before = before
        self._used: dict[tuple[str, str], None] = {}
        self.read: dict[tuple[str, str], _Part] = {}

    def used(self, histories: Sequence[HistoryJoin] = ()) -> list[JoinedPart]:
        """Return the parts that gave a score, and those of which histories have a vector."""
        scores = {at: self.read[at].digest for at in self._used}
        vectors = {(key_of(index.version), index.part): index.digest for join in histories for index in join.used}
        return [
            JoinedPart(version=at[0], part=at[1], digest=scores.get(at, ""), vectors=vectors.get(at, ""))
            for at in sorted({**scores, **vectors})
        ]

    def indices_of(self, version: VersionFolder) -> list[HistoryIndex]:
        """Return the indices of the parts of a version, that with the newest example first: it fills most rows."""
        return sorted(self._indices.get(key_of(version), ()), key=lambda index: -index.newest)

    def find(
        self, version: VersionFolder, ids: UInt64[np.ndarray, "N 2"]
    ) -> tuple[Bool[np.ndarray, "N"], Float32[np.ndarray, "N L"]]:
        """Return which examples a version has scored, and its logits of them; NaN of the others.

        Raises:
            DataError: a part is damaged.
        """
        key = key_of(version)
        logits_NL = np.full((len(ids), len(version.facts.labels)), np.nan, dtype=np.float32)
        is_known_N = np.zeros(len(ids), dtype=np.bool_)
        for name in reversed(self._scored.get(key, ())):
            open_K = np.flatnonzero(~is_known_N)
            if not len(open_K):
                break
            part = self._part(key, name)
            is_found_K, at_K = part.index.find(ids[open_K])
            if not is_found_K.any():
                continue
            self._used[key, name] = None
            found = open_K[is_found_K]
            is_known_N[found] = True
            logits_NL[found] = part.logits[at_K[is_found_K]]
        return is_known_N, logits_NL

    def digest_of(self, key: str, name: str) -> str:
        """Return the digest of the scores of a part, as it is now."""
        return self._part(key, name).digest

    def vectors_of(self, key: str, name: str) -> str:
        """Return the digest of the vectors of a part, as it is now."""
        return next(index.digest for index in self._indices[key] if index.part == name)

    def _part(self, key: str, name: str) -> _Part:
        found = self.read.get((key, name)) or self._before.get((key, name))
        if found is None:
            version = self._by_key[key]
            ids, logits_NL = version.logits_of(version.path / name)
            digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
            digest.update(json.dumps(to_json(version.facts), sort_keys=True).encode())
            digest.update(ids.tobytes())
            digest.update(logits_NL.tobytes())
            found = _Part(index=ExampleIndex(ids), logits=logits_NL, digest=digest.hexdigest())
        self.read[key, name] = found
        return found


def key_of(version: VersionFolder) -> str:
    """Return the name of a version in its side table, TEACHER/VERSION."""
    return f"{version.path.parent.name}/{version.path.name}"


def _refused(window: str, *, found: str, where: Path) -> DataError:
    return DataError(
        expected=f"what window {window} was joined with at first: by other scores or vectors it trains other weights",
        found=found,
        where=str(where),
        ways_out=("restore the file from a copy", "begin the stream anew: --out ANOTHER_FOLDER"),
    )
