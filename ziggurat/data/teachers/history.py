"""Join rows with the vectors that a teacher has logged of earlier examples of the same user (LoopFM).

    logged   ann 08:00  bob 08:10  ann 09:00  bob 09:30  ann 09:30        by `ziggurat teacher log --history user`
                        │ sorted by (user, time), once
    index    ann 08:00 v1 │ ann 09:00 v3 │ ann 09:30 v5 │ bob 08:10 v2 │ bob 09:30 v4
                        ▲
    row      ann 09:30  ┴─ what stands before it in ann's part, the latest first:  v3, v1

A vector is joined to a row if its example is of an earlier second than the row, and the version that wrote it has a
watermark before the row's time: neither knows the answer of this row, whatever it knows of earlier ones. An example
that several such versions have scored counts once, by the newest of them. Vectors of several versions may stand side by
side, since a teacher that follows a stream writes them so; those of one row are not made alike.

Cost. The index of a version is files beside its parts, written when it is first asked for and again when parts have
come: one sort in memory of 32 bytes an example, and one pass over the vectors, which are scattered through the page
cache. Afterwards it is mapped and not loaded: a row costs a binary search among the examples of the version and reads
the L vectors of its user, which lie side by side. For a slice of 16,384 rows a join holds L · (row bytes + 32) bytes a
row.

Reference: LoopFM, arXiv 2605.29280 (the abstract: embeddings of the teacher as "user history sequence"; when a vector
may be joined is ours).
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import polars as pl
import torch
from jaxtyping import Bool, Float64, Int32, Int64, UInt8, UInt64

from ziggurat.data.preprocess.values.cells import canonical_text
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.teachers.side_table import TeacherVersion, VersionFolder, example_ids
from ziggurat.errors import DataError
from ziggurat.features.kinds import TeacherHistory
from ziggurat.files import Format, replacing_folder, sha256_of
from ziggurat.ops.vector_histories import pack_rows

INDEX = Format(
    name="ziggurat.teacher_history",
    what="vectors of a teacher by user and time",
    ways_out=("delete the folder: it is made again from the parts beside it",),
)
_INDEX_FOLDER = "by_user"
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
    """The vectors of a version, sorted by user and time; mapped from files.

    Args:
        version: whose.
        keys: digest of the user of each example.
        times: of each example.
        examples: half of the digest of each, by which equal ones of several versions are found.
        vectors: the bytes of each.
    """

    version: VersionFolder
    keys: UInt64[np.ndarray, " N"]
    times: Float64[np.ndarray, " N"]
    examples: UInt64[np.ndarray, " N"]
    vectors: UInt8[np.ndarray, "N C"]

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
    facts = version.facts
    if not facts.vectors or not facts.history_key:
        lacks = "vectors" if not facts.vectors else "users"
        raise DataError(
            expected="a version of a teacher that was logged with vectors and users",
            found=f"no {lacks}",
            where=str(version.path),
            ways_out=(
                "log it into another folder: ziggurat teacher log RUN FILES --out ANOTHER_FOLDER --history COLUMN",
                "leave --teacher-history out",
            ),
        )
    return _opened(str(version.path), version.identities())


@lru_cache(maxsize=64)  # shards are read by several threads, and share what is mapped
def _opened(path: str, parts: tuple[tuple[str, str | int], ...]) -> HistoryIndex:
    version = VersionFolder.open(Path(path))
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()
    folder = version.path / f"{_INDEX_FOLDER}-{digest}"
    if not (folder / "index.json").exists():
        _write(version, folder, parts=[version.path / name for name, _ in parts])
    noted = INDEX.read(folder / "index.json")
    files = {name: folder / f"{name}.npy" for name in ("keys", "times", "examples", "vectors")}
    for name, file in files.items():
        found = sha256_of(file) if file.exists() else "no file"
        if noted.get(name) != found:
            raise DataError(
                expected=f"{file.name} as it was written, SHA-256 {noted.get(name)}",
                found=found,
                where=str(folder),
                ways_out=f"delete {folder}: it is made again from the parts beside it",
            )
    arrays = {name: np.load(file, mmap_mode="r", allow_pickle=False) for name, file in files.items()}
    return HistoryIndex(version=version, **arrays)


def _write(version: VersionFolder, folder: Path, *, parts: Sequence[Path]) -> None:
    owners = [version.owners_of(part) for part in parts]
    examples_N = np.concatenate([ids[:, 0] for ids, _, _ in owners]) if owners else np.empty(0, np.uint64)
    keys_N = np.concatenate([keys for _, keys, _ in owners]) if owners else np.empty(0, np.uint64)
    times_N = np.concatenate([times for _, _, times in owners]) if owners else np.empty(0)
    order_N = np.lexsort((times_N, keys_N))
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
        names = ("keys", "times", "examples", "vectors")
        INDEX.write(temporary / "index.json", {name: sha256_of(temporary / f"{name}.npy") for name in names})
    for older in version.path.glob(f"{_INDEX_FOLDER}-*"):
        # Of fewer parts; whoever has its files mapped keeps them.
        if older != folder and (older / "index.json").exists():
            shutil.rmtree(older, ignore_errors=True)


class HistoryJoin:
    """Gives rows the packed vectors of one feature.

    Args:
        feature: which.
        versions: of its teacher, the newest watermark first.

    Raises:
        DataError: a version was logged without users or vectors, or with others than the feature has.
    """

    def __init__(self, feature: TeacherHistory, *, versions: Sequence[VersionFolder]) -> None:
        self.feature = feature
        self.indices = [index_of(version) for version in versions]
        for index in self.indices:
            facts = index.version.facts
            found = (facts.history_key, facts.vectors, facts.vector_dim)
            wanted = (feature.key, feature.format, feature.dim)
            if found != wanted:
                raise DataError(
                    expected="versions of one teacher with vectors of {2} numbers in {1}, by {0!r}".format(*wanted),
                    found="{2} numbers in {1}, by {0!r}".format(*found),
                    where=str(index.version.path),
                    ways_out=(
                        f"--teacher-history {facts.history_key}, the column that it was logged by",
                        "log versions of another size under another name: ziggurat teacher log … --name ANOTHER",
                        "leave --teacher-history out",
                    ),
                )

    @property
    def facts(self) -> list[TeacherVersion]:
        """Facts about the versions."""
        return [index.version.facts for index in self.indices]

    def words(
        self, chunk: RawChunk, times_N: Float64[np.ndarray, " N"], *, is_calendar: bool
    ) -> Int32[np.ndarray, "N W"]:
        """Return the packed history of each row.

        Args:
            chunk: raw rows, with the column of the user.
            times_N: of the rows, NaN where there is none.
            is_calendar: whether they are in seconds since 1970; examples of the same second are then left out.
        """
        keys_N = keys_of(chunk, self.feature.key)
        before_N = np.floor(times_N) if is_calendar else times_N
        words_NW = np.zeros((len(times_N), self.feature.history.words), dtype=np.int32)
        for first in range(0, len(times_N), _ROWS_AT_A_TIME):
            part = slice(first, first + _ROWS_AT_A_TIME)
            words_NW[part] = self._words(keys_N[part], times_N[part], before_N[part])
        return words_NW

    def keys(self) -> UInt64[np.ndarray, " U"]:
        """Return the digests of all users, in order."""
        known = [np.unique(index.keys) for index in self.indices]
        found = np.unique(np.concatenate(known)) if known else np.empty(0, dtype=np.uint64)
        return found[found != _NO_KEY]

    @property
    def newest(self) -> float:
        """Time of the newest example of all versions; −∞ where there is none."""
        times = [float(np.nanmax(index.times)) for index in self.indices if len(index.times)]
        return max(times, default=-np.inf)

    def latest_words(self, keys_N: UInt64[np.ndarray, " N"]) -> Iterator[Int32[np.ndarray, "V W"]]:
        """Yield the packed history of users as of now, whatever version wrote it, slice after slice."""
        for first in range(0, len(keys_N), _ROWS_AT_A_TIME):
            part = keys_N[first : first + _ROWS_AT_A_TIME]
            end = np.full(len(part), np.inf)
            yield self._words(part, end, end)

    def _words(
        self, keys_N: UInt64[np.ndarray, " N"], times_N: Float64[np.ndarray, " N"], before_N: np.ndarray
    ) -> Int32[np.ndarray, "N W"]:
        length = self.feature.length
        num_rows = len(keys_N)
        history = self.feature.history
        # Of each row so far: number of the version, place in its index, time and example; the latest first.
        kept = _Latest.none(num_rows, length)
        for number, index in enumerate(self.indices):
            is_open_N = times_N > index.version.facts.watermark  # False for NaN
            if not is_open_N.any() or not len(index.keys):
                continue
            places_NL, is_there_NL = index.latest(keys_N, before_N, length=length)
            kept = kept.merged(index, number, places_NL, is_there_NL & is_open_N[:, None])
        bytes_NLC = np.zeros((num_rows, length, self._row_bytes()), dtype=np.uint8)
        for number, index in enumerate(self.indices):
            is_mine_NL = kept.versions == number
            if is_mine_NL.any():
                bytes_NLC[is_mine_NL] = index.vectors[kept.places[is_mine_NL]]
        lengths_N = (kept.versions >= 0).sum(axis=1)
        packed = pack_rows(torch.from_numpy(bytes_NLC), torch.from_numpy(lengths_N), history=history)
        return packed.numpy()

    def _row_bytes(self) -> int:
        return next((index.vectors.shape[1] for index in self.indices if len(index.keys)), 0)


@dataclass(frozen=True, kw_only=True)
class _Latest:
    """The latest examples of each row that were found so far.

    Args:
        versions: numbers of the versions they are of, the newest is 0; −1 where there is none.
        places: in the index of the version.
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
