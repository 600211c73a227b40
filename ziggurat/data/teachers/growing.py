"""A side table that grows, as a stream reads it: what each window was joined with is known, and found again.

    window opened ─► look: versions and parts that are there now ─► join ─► parts that gave a score ─► journal
    opened again (after a kill) ─────────────────────────────────────────► those parts, and no other ◄──┘

A teacher logs while its student learns, so the table that a window is joined with is that of the moment at which it is
first opened. A process that is killed opens the window again, later: with what has come since, its weights would be
others. So the parts that gave a score are written down before a row of the window is trained, each with a digest of its
content, and joined again by name. Whether others are there changes nothing of this window; the next one refuses a
version of which a part is gone (`part_list.py`), and does without a version that is gone as a whole.

An example is in one part of a version. Parts are asked from the newest on, for the rows that have no score yet, and are
read when they are asked: while a teacher has scored all rows of a window, old parts are not touched. In memory are the
parts that the last window asked, 24 bytes and 4 a label for each example.
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
from ziggurat.data.teachers.side_table import ExampleIndex, VersionFolder, versions_in
from ziggurat.errors import DataError

_DIGEST_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class JoinedPart:
    """A part of a side table that gave rows of a window their scores.

    Args:
        version: TEACHER/VERSION.
        part: name of its file.
        digest: of the facts of the version, and of examples and logits of the part.
    """

    version: str
    part: str
    digest: str


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
    """

    def __init__(self, folder: str | Path, *, teachers: Sequence[str]) -> None:
        self._folder = Path(folder)
        self._teachers = tuple(teachers)
        self._parts: dict[tuple[str, str], _Part] = {}

    def open(self, recorded: Sequence[JoinedPart] | None, *, window: str) -> WindowScores:
        """Return what a window is joined with.

        Args:
            recorded: the parts that it was joined with when it was first opened; None: this is the first time.
            window: its name, for errors.

        Raises:
            MissingFileError: there is no side table.
            DataError: a part that is recorded is gone, or has another content.
        """
        if recorded is None:
            versions = [each for each in versions_in(self._folder) if each.facts.teacher in self._teachers]
            wanted = {key_of(each): tuple(part.name for part in each.parts) for each in versions}
        else:
            wanted = {}
            for each in recorded:
                wanted[each.version] = (*wanted.get(each.version, ()), each.part)
            versions = [self._version(key, parts[0], window=window) for key, parts in wanted.items()]
        scores = WindowScores(versions, wanted, before=self._parts)
        for each in recorded or ():
            digest = scores.digest_of(each.version, each.part) if self._has(each) else ""
            if digest != each.digest:
                found = "another content" if digest else "it is gone"
                raise _refused(window, found=found, where=self._folder / each.version / each.part)
        # Content that the window before did not ask for is not kept for the next.
        self._parts = scores.read
        return scores

    def others(self) -> list[str]:
        """Return the teachers that are there and not wanted: they came after the student began."""
        return sorted({each.facts.teacher for each in versions_in(self._folder)}.difference(self._teachers))

    def columns(self) -> tuple[str, ...]:
        """Return the raw columns that examples are known by, of all versions that are there."""
        versions = [each for each in versions_in(self._folder) if each.facts.teacher in self._teachers]
        return tuple(dict.fromkeys(column for each in versions for column in each.facts.example_columns))

    def _has(self, part: JoinedPart) -> bool:
        return (self._folder / part.version / part.part).is_file()

    def _version(self, key: str, part: str, *, window: str) -> VersionFolder:
        if not (self._folder / key).is_dir():
            raise _refused(window, found="it is gone", where=self._folder / key / part)
        return VersionFolder.open(self._folder / key)


class WindowScores:
    """The scores that one window finds in a side table.

    Args:
        versions: of the teachers.
        wanted: names of parts that it may find, by TEACHER/VERSION.
        before: parts that were read for the window before.

    Attributes:
        versions: as given.
        read: parts that were read, or taken from before.
    """

    def __init__(
        self,
        versions: Sequence[VersionFolder],
        wanted: dict[str, tuple[str, ...]],
        *,
        before: dict[tuple[str, str], _Part],
    ) -> None:
        self.versions = tuple(versions)
        self._by_key = {key_of(each): each for each in versions}
        self._wanted = wanted
        self._before = before
        self._used: dict[tuple[str, str], None] = {}
        self.read: dict[tuple[str, str], _Part] = {}

    @property
    def used(self) -> list[JoinedPart]:
        """The parts that gave a score."""
        return [
            JoinedPart(version=key, part=name, digest=self.read[key, name].digest) for key, name in sorted(self._used)
        ]

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
        for name in reversed(self._wanted[key]):
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
        """Return the digest of a part, as it is now."""
        return self._part(key, name).digest

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
        expected=f"what window {window} was joined with at first: with other scores it would train other weights",
        found=found,
        where=str(where),
        ways_out=("restore the file from a copy", "begin the stream anew: --out ANOTHER_FOLDER"),
    )
