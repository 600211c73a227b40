"""Join rows with the vectors that a teacher has logged of earlier examples of the same user (LoopFM).

    logged   ann 08:00  bob 08:10  ann 09:00  bob 09:30  ann 09:30        by `ziggurat teacher log --history user`
                        │ sorted by (user, time), once
    index    ann 08:00 v1 │ ann 09:00 v3 │ ann 09:30 v5 │ bob 08:10 v2 │ bob 09:30 v4
                        ▲
    row      ann 09:30  ┴─ what stands before it in ann's part, the latest first:  v3, v1

A vector is joined to a row if its example is of an earlier second than the row, and the version that wrote it has a
watermark before the row's time: neither knows the answer of this row, whatever it knows of earlier ones. An example
that several such versions have scored counts once, by the newest of them; examples of one second come in the order of
their digests, whatever parts they are in. Vectors of several versions may stand side by side, since a teacher that
follows a stream writes them so; those of one row are not made alike.

Cost. The index of a version is files beside its parts, written when it is first asked for and again when parts have
come: one sort in memory of 32 bytes an example, and one pass over the vectors, which are scattered through the page
cache. Afterwards it is mapped and not loaded: a row costs a binary search among the examples of the version and reads
the L vectors of its user, which lie side by side. For a slice of 16,384 rows a join holds L · (row bytes + 32) bytes a
row. A stream, whose teacher logs part after part, has an index of each part (`growing.py`): none is sorted again, and a
row asks those whose newest example may be among its last L.

Reference: LoopFM, arXiv 2605.29280 (the abstract: embeddings of the teacher as "user history sequence"; when a vector
may be joined is ours).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import polars as pl
import torch
from jaxtyping import Bool, Float64, Int32, Int64, UInt8, UInt64

from ziggurat.config import to_json
from ziggurat.data.preprocess.values.cells import canonical_text
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.teachers.side_table import TeacherVersion, VersionFolder, example_ids
from ziggurat.data.teachers.version_list import without_version
from ziggurat.errors import DataError, FileError
from ziggurat.features.kinds import TeacherHistory
from ziggurat.files import Format, is_temporary, remove_left_behind, replacing_folder, sha256_of, take_away
from ziggurat.ops.vector_histories import pack_rows

INDEX = Format(
    name="ziggurat.teacher_history",
    what="vectors of a teacher by user and time",
    ways_out=("delete the folder: it is made again from the parts beside it",),
)
_INDEX_FOLDER = "by_user"
_INDEX_FILE = "index.json"
_ORDER = 2  # of examples: 2 has those of one second by digest, not by part. Folders of another order are not looked at
_ARRAYS = ("keys", "times", "examples", "vectors")
_DIGEST_BYTES = 8
_TRIALS = 3  # to map an index that other processes take away
_ROWS_AT_A_TIME = 16_384
_NO_KEY = 0  # of examples and rows without a user


def keys_of(chunk: RawChunk, column: str) -> UInt64[np.ndarray, " N"]:
    """Return a digest of the user of each row, `_NO_KEY` where there is none.

    Raises:
        DataError: the column cannot hold ids.
    """
    texts = canonical_text(chunk.column(column))
    if texts is None:
        raise DataError(
            expected="a column of ids, by which users are known",
            found=str(chunk.column(column).dtype),
            where=chunk.where(0, column=column),
            ways_out="name another column: ziggurat teacher log … --history COLUMN",
        )
    series = texts.fill_null("")
    # Users come again and again in a chunk, and each is hashed once.
    users = series.unique()
    digests = example_ids(RawChunk.of(pl.DataFrame({column: users})), [column])[:, 0]
    digests = np.where((users == "").to_numpy(), np.uint64(_NO_KEY), digests)
    table = pl.DataFrame({column: users, "digest": digests})
    found = pl.DataFrame({column: series}).join(table, on=column, how="left", maintain_order="left")
    return found["digest"].to_numpy()


@dataclass(frozen=True, kw_only=True)
class HistoryIndex:
    """The vectors of a version, or of one part of it, sorted by user and time; mapped from files.

    Args:
        version: whose.
        keys: digest of the user of each example.
        times: of each example.
        examples: half of the digest of each, by which equal ones of several versions are found.
        vectors: the bytes of each.
        part: name of the part; "" of a whole version.
        digest: of the facts of the version and of all that is in the index.
    """

    version: VersionFolder
    keys: UInt64[np.ndarray, " N"]
    times: Float64[np.ndarray, " N"]
    examples: UInt64[np.ndarray, " N"]
    vectors: UInt8[np.ndarray, "N C"]
    part: str = ""
    digest: str = ""

    @cached_property
    def newest(self) -> float:
        """Time of the newest example; −∞ where there is none."""
        return float(np.nanmax(self.times, initial=-np.inf)) if len(self.times) else -np.inf

    def latest(
        self, keys_N: UInt64[np.ndarray, " N"], before_N: Float64[np.ndarray, " N"], *, length: int
    ) -> tuple[Int64[np.ndarray, "N L"], Bool[np.ndarray, "N L"]]:
        """Return places of the last examples of each user before a time, the latest first, and which there are."""
        starts_N = np.searchsorted(self.keys, keys_N, side="left")
        low_N = starts_N.copy()
        high_N = np.searchsorted(self.keys, keys_N, side="right")
        # A search by halves within each user's part, for all rows at once.
        while (is_open_N := low_N < high_N).any():
            middle_N = (low_N + high_N) // 2
            is_before_N = self.times[np.minimum(middle_N, len(self.times) - 1)] < before_N
            low_N = np.where(is_open_N & is_before_N, middle_N + 1, low_N)
            high_N = np.where(is_open_N & ~is_before_N, middle_N, high_N)
        places_NL = low_N[:, None] - 1 - np.arange(length)
        is_there_NL = (places_NL >= starts_N[:, None]) & (keys_N != _NO_KEY)[:, None]
        return np.where(is_there_NL, places_NL, 0), is_there_NL


def index_of(version: VersionFolder) -> HistoryIndex:
    """Return the index of a version, which is written where it is not there or older than the parts.

    Raises:
        DataError: the version was logged without users or vectors, or the index is damaged.
    """
    _refuse_no_vectors(version)
    return _opened(str(version.path), version.identities())


def index_of_part(version: VersionFolder, part: str) -> HistoryIndex:
    """Return the index of one part, which is written where it is not there.

    Args:
        version: whose part it is.
        part: name of its file.

    Raises:
        DataError: the version was logged without users or vectors; the part is gone or another one; the index is
            damaged.
    """
    _refuse_no_vectors(version)
    digest = version.check(version.path / part)
    return _open(version, ((part, digest),), prefix=f"{Path(part).stem}.{_INDEX_FOLDER}", part=part)


def _refuse_no_vectors(version: VersionFolder) -> None:
    """Refuse a version that was logged without what histories are made of.

    Raises:
        DataError: it was.
    """
    facts = version.facts
    if not facts.vectors or not facts.history_key:
        lacks = "vectors" if not facts.vectors else "users"
        raise DataError(
            expected="a version of a teacher that was logged with vectors and users",
            found=f"no {lacks}",
            where=str(version.path),
            ways_out=(
                "log it into another folder: ziggurat teacher log RUN FILES --out ANOTHER_FOLDER --history COLUMN",
                without_version(version.path),
                "leave --teacher-history out",
            ),
        )


@lru_cache(maxsize=64)  # shards are read by several threads, and share what is mapped
def _opened(path: str, parts: tuple[tuple[str, str | int], ...]) -> HistoryIndex:
    return _open(VersionFolder.open(Path(path)), parts, prefix=_INDEX_FOLDER)


def _open(
    version: VersionFolder, parts: tuple[tuple[str, str | int], ...], *, prefix: str, part: str = ""
) -> HistoryIndex:
    """Map the index of some parts, and write it first where it is not there.

    Args:
        version: whose parts.
        parts: name and identity of each.
        prefix: of the name of its folder.
        part: the name that the index has; "" of a whole version.
    """
    digest = hashlib.blake2b(repr((_ORDER, parts)).encode(), digest_size=_DIGEST_BYTES).hexdigest()
    folder = version.path / f"{prefix}-{digest}"
    for trial in range(_TRIALS):
        if not (folder / _INDEX_FILE).exists():
            try:
                _write(version, folder, parts=[version.path / name for name, _ in parts], prefix=prefix)
            except FileError:
                # Another process, whose student reads the same parts, may have written it meanwhile, to the same bits.
                if not (folder / _INDEX_FILE).exists():
                    raise
        try:
            return _mapped(version, folder, part=part)
        except (DataError, FileNotFoundError):
            # Another process, whose student reads parts that came before or since, may have taken it away meanwhile.
            if (folder / _INDEX_FILE).exists() or trial == _TRIALS - 1:
                raise
    raise AssertionError("the last trial returns or raises")


def _mapped(version: VersionFolder, folder: Path, *, part: str) -> HistoryIndex:
    """Map the files of an index.

    Raises:
        DataError, FileNotFoundError: it is damaged, or gone.
    """
    noted = INDEX.read(folder / _INDEX_FILE)
    for name in _ARRAYS:
        file = folder / f"{name}.npy"
        found = sha256_of(file) if file.exists() else "no file"
        if noted.get(name) != found:
            raise DataError(
                expected=f"{file.name} as it was written, SHA-256 {noted.get(name)}",
                found=found,
                where=str(folder),
                ways_out=f"delete {folder}: it is made again from the parts beside it",
            )
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in _ARRAYS}
    content = json.dumps([to_json(version.facts), [noted[name] for name in _ARRAYS]], sort_keys=True)
    content_digest = hashlib.blake2b(content.encode(), digest_size=_DIGEST_BYTES).hexdigest()
    return HistoryIndex(version=version, part=part, digest=content_digest, **arrays)


def _write(version: VersionFolder, folder: Path, *, parts: Sequence[Path], prefix: str) -> None:
    owners = [version.owners_of(part) for part in parts]
    examples_N = np.concatenate([ids[:, 0] for ids, _, _ in owners]) if owners else np.empty(0, np.uint64)
    keys_N = np.concatenate([keys for _, keys, _ in owners]) if owners else np.empty(0, np.uint64)
    times_N = np.concatenate([times for _, _, times in owners]) if owners else np.empty(0)
    # It is read backwards, the latest first: of one second by the digest, as `_Latest.merged` has them.
    order_N = np.lexsort((~examples_N, times_N, keys_N))
    places_N = np.empty(len(order_N), dtype=np.int64)
    places_N[order_N] = np.arange(len(order_N))
    with replacing_folder(folder) as temporary:
        np.save(temporary / "keys.npy", keys_N[order_N])
        np.save(temporary / "times.npy", times_N[order_N])
        np.save(temporary / "examples.npy", examples_N[order_N])
        first = 0
        target: np.ndarray | None = None
        for part in parts:
            vectors = version.vectors_of(part)
            if target is None:
                shape = (len(order_N), vectors.shape[1])
                target = np.lib.format.open_memmap(temporary / "vectors.npy", mode="w+", dtype=np.uint8, shape=shape)
            target[places_N[first : first + len(vectors)]] = vectors
            first += len(vectors)
        if target is None:
            np.save(temporary / "vectors.npy", np.empty((0, 0), dtype=np.uint8))
        elif isinstance(target, np.memmap):
            target.flush()
        INDEX.write(temporary / _INDEX_FILE, {name: sha256_of(temporary / f"{name}.npy") for name in _ARRAYS})
    for older in version.path.glob(f"{prefix}-*"):
        # Of fewer parts; whoever has its files mapped keeps them, and whoever comes to map them sees all or none.
        if older != folder and (older / _INDEX_FILE).exists():
            take_away(older)
    _remove_left_behind(version.path)


def _remove_left_behind(folder: Path) -> None:
    """Remove what killed processes left of indices, of whatever parts, under the names that `_open` gives these.

    Args:
        folder: of the version.
    """
    name = re.compile(rf"\.((?:part-\d+\.)?{_INDEX_FOLDER}-[0-9a-f]{{{2 * _DIGEST_BYTES}}})\..*")
    found = {match[1] for each in folder.iterdir() if is_temporary(each.name) and (match := name.fullmatch(each.name))}
    for each in sorted(found):
        remove_left_behind(folder / each)


def check_versions(feature: TeacherHistory, versions: Sequence[VersionFolder]) -> None:
    """Refuse versions whose vectors are not those of a feature.

    Args:
        feature: which.
        versions: of its teacher.

    Raises:
        DataError: a version was logged without users or vectors, or with others than the feature has.
    """
    for version in versions:
        _refuse_no_vectors(version)
        facts = version.facts
        found = (facts.history_key, facts.vectors, facts.vector_dim)
        wanted = (feature.key, feature.format, feature.dim)
        if found != wanted:
            raise DataError(
                expected="versions of one teacher with vectors of {2} numbers in {1}, by {0!r}".format(*wanted),
                found="{2} numbers in {1}, by {0!r}".format(*found),
                where=str(version.path),
                ways_out=(
                    f"--teacher-history {facts.history_key}, the column that it was logged by",
                    "log versions of another size under another name: ziggurat teacher log … --name ANOTHER",
                    without_version(version.path),
                    "leave --teacher-history out",
                ),
            )


@dataclass(frozen=True, kw_only=True)
class FoundHistories:
    """The histories of some rows.

    Args:
        words: packed vectors of each row.
        latest: time of the latest example of each; NaN where there is none.
    """

    words: Int32[np.ndarray, "N W"]
    latest: Float64[np.ndarray, " N"]


class HistoryJoin:
    """Gives rows the packed vectors of one feature.

    Args:
        feature: which.
        indices: of versions of its teacher or of their parts, the newest watermark first.

    Raises:
        DataError: a version was logged with other vectors than the feature has.
    """

    def __init__(self, feature: TeacherHistory, *, indices: Sequence[HistoryIndex]) -> None:
        check_versions(feature, [index.version for index in indices])
        self.feature = feature
        self.indices = list(indices)
        self._used: set[int] = set()

    @property
    def facts(self) -> list[TeacherVersion]:
        """Facts about the versions."""
        return list({str(index.version.path): index.version.facts for index in self.indices}.values())

    @property
    def used(self) -> list[HistoryIndex]:
        """The indices of which rows have a vector."""
        return [self.indices[number] for number in sorted(self._used)]

    def found(self, chunk: RawChunk, times_N: Float64[np.ndarray, " N"], *, is_calendar: bool) -> FoundHistories:
        """Return the packed history of each row.

        Args:
            chunk: raw rows, with the column of the user.
            times_N: of the rows, NaN where there is none.
            is_calendar: whether they are in seconds since 1970; examples of the same second are then left out.
        """
        keys_N = keys_of(chunk, self.feature.key)
        before_N = np.floor(times_N) if is_calendar else times_N
        words_NW = np.zeros((len(times_N), self.feature.history.words), dtype=np.int32)
        latest_N = np.full(len(times_N), np.nan)
        for first in range(0, len(times_N), _ROWS_AT_A_TIME):
            part = slice(first, first + _ROWS_AT_A_TIME)
            kept = self._latest(keys_N[part], times_N[part], before_N[part])
            words_NW[part] = self._packed(kept)
            latest_N[part] = np.where(kept.versions[:, 0] >= 0, kept.times[:, 0], np.nan)
        return FoundHistories(words=words_NW, latest=latest_N)

    def keys(self) -> UInt64[np.ndarray, " U"]:
        """Return the digests of all users, in order."""
        known = [np.unique(index.keys) for index in self.indices]
        found = np.unique(np.concatenate(known)) if known else np.empty(0, dtype=np.uint64)
        return found[found != _NO_KEY]

    @property
    def newest(self) -> float:
        """Time of the newest example of all versions; −∞ where there is none."""
        return max((index.newest for index in self.indices), default=-np.inf)

    def latest_words(self, keys_N: UInt64[np.ndarray, " N"]) -> Iterator[Int32[np.ndarray, "V W"]]:
        """Yield the packed history of users as of now, whatever version wrote it, slice after slice."""
        for first in range(0, len(keys_N), _ROWS_AT_A_TIME):
            part = keys_N[first : first + _ROWS_AT_A_TIME]
            end = np.full(len(part), np.inf)
            yield self._packed(self._latest(part, end, end))

    def _latest(
        self, keys_N: UInt64[np.ndarray, " N"], times_N: Float64[np.ndarray, " N"], before_N: np.ndarray
    ) -> _Latest:
        """Return the last examples of each row: of which index, where in it, and when; the latest first."""
        length = self.feature.length
        kept = _Latest.none(len(keys_N), length)
        for number, index in enumerate(self.indices):
            if not len(index.keys):
                continue
            # Nothing enters a row that is full of later examples than any of these. False for NaN.
            is_open_N = (times_N > index.version.facts.watermark) & (kept.times[:, -1] <= index.newest)
            rows_K = np.flatnonzero(is_open_N)
            if not len(rows_K):
                continue
            places_KL, is_there_KL = index.latest(keys_N[rows_K], before_N[rows_K], length=length)
            is_known_K = is_there_KL[:, 0]
            rows_M = rows_K[is_known_K]
            if len(rows_M):
                merged = kept.at(rows_M).merged(index, number, places_KL[is_known_K], is_there_KL[is_known_K])
                kept.put(rows_M, merged)
        self._used.update(np.unique(kept.versions[kept.versions >= 0]).tolist())
        return kept

    def _packed(self, kept: _Latest) -> Int32[np.ndarray, "N W"]:
        """Return the vectors of the last examples of each row."""
        bytes_NLC = np.zeros((*kept.versions.shape, self._row_bytes()), dtype=np.uint8)
        for number in np.unique(kept.versions[kept.versions >= 0]).tolist():
            is_mine_NL = kept.versions == number
            bytes_NLC[is_mine_NL] = self.indices[number].vectors[kept.places[is_mine_NL]]
        lengths_N = (kept.versions >= 0).sum(axis=1)
        history = self.feature.history
        return pack_rows(torch.from_numpy(bytes_NLC), torch.from_numpy(lengths_N), history=history).numpy()

    def _row_bytes(self) -> int:
        return next((index.vectors.shape[1] for index in self.indices if len(index.keys)), 0)


@dataclass(frozen=True, kw_only=True)
class _Latest:
    """The latest examples of each row that were found so far.

    Args:
        versions: numbers of the indices they are of, the newest version is first; −1 where there is none.
        places: in the index.
        times: of the examples; −∞ where there is none.
        examples: their digests.
    """

    versions: Int64[np.ndarray, "N L"]
    places: Int64[np.ndarray, "N L"]
    times: Float64[np.ndarray, "N L"]
    examples: UInt64[np.ndarray, "N L"]

    @staticmethod
    def none(num_rows: int, length: int) -> _Latest:
        shape = (num_rows, length)
        return _Latest(
            versions=np.full(shape, -1, dtype=np.int64),
            places=np.zeros(shape, dtype=np.int64),
            times=np.full(shape, -np.inf),
            examples=np.zeros(shape, dtype=np.uint64),
        )

    def at(self, rows_K: Int64[np.ndarray, " K"]) -> _Latest:
        """Return those of some rows."""
        return _Latest(
            versions=self.versions[rows_K],
            places=self.places[rows_K],
            times=self.times[rows_K],
            examples=self.examples[rows_K],
        )

    def put(self, rows_K: Int64[np.ndarray, " K"], others: _Latest) -> None:
        """Replace those of some rows."""
        self.versions[rows_K] = others.versions
        self.places[rows_K] = others.places
        self.times[rows_K] = others.times
        self.examples[rows_K] = others.examples

    def merged(
        self,
        index: HistoryIndex,
        number: int,
        places_NL: Int64[np.ndarray, "N L"],
        is_there_NL: Bool[np.ndarray, "N L"],
    ) -> _Latest:
        """Return the latest of these and of those of an older version; an example of both counts once, by these."""
        mine = _Latest(
            versions=np.where(is_there_NL, number, -1),
            places=places_NL,
            times=np.where(is_there_NL, index.times[places_NL], -np.inf),
            examples=np.where(is_there_NL, index.examples[places_NL], np.uint64(0)),
        )
        if (self.versions < 0).all():
            return mine
        length = self.versions.shape[1]
        versions = np.concatenate([self.versions, mine.versions], axis=1)
        times = np.concatenate([self.times, mine.times], axis=1)
        examples = np.concatenate([self.examples, mine.examples], axis=1)
        places = np.concatenate([self.places, mine.places], axis=1)
        # Latest first; equal examples side by side, and of these the newer version first, since the sort is stable.
        order = np.lexsort((examples, -times), axis=1)
        versions, times, examples, places = (
            np.take_along_axis(each, order, axis=1) for each in (versions, times, examples, places)
        )
        is_again = np.zeros(versions.shape, dtype=np.bool_)
        is_again[:, 1:] = (examples[:, 1:] == examples[:, :-1]) & (times[:, 1:] == times[:, :-1])
        order = np.argsort(is_again | (versions < 0), axis=1, kind="stable")[:, :length]
        versions = np.where(is_again, -1, versions)
        return _Latest(
            versions=np.take_along_axis(versions, order, axis=1),
            places=np.take_along_axis(places, order, axis=1),
            times=np.where(
                np.take_along_axis(versions, order, axis=1) >= 0, np.take_along_axis(times, order, axis=1), -np.inf
            ),
            examples=np.take_along_axis(examples, order, axis=1),
        )
