"""The side table: scores and vectors of teachers by example, in Parquet files beside the data.

    FOLDER/
      versions.json                which versions there are (`version_list.py`)
      large/                       a teacher
        5f0c91ab22de/              a version of it: a digest of its weights
          version.json             watermark, labels, columns of the example id, format of the vectors; list of parts
          part-00000.parquet       example │ teacher │ version │ watermark │ logit:click │ vector │ key │ time
          by_user-9d0c…/           the vectors by user and time, of these parts (`history.py`)

An *example* is known by a digest of some raw columns, of the schema's features and its time unless others are named: 16
bytes of BLAKE2b of their texts. Text files and typed ones give the same digest for ids and texts; numbers with a
fraction may be written in several ways, so example ids are best made of columns of ids. The *watermark* is the time of
the newest row that a version was trained on: what it says of an example that is not later may know the answer.

A part appears when it is complete, and `version.json` lists it with its digest (`part_list.py`): one that is gone, was
added or has another content is refused when it is wanted. Whoever logs goes on where the parts end. In memory are 16
bytes an example (with the scores: 16 + 4 a label), never the vectors.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Bool, Float, Float32, Int64, UInt64

from ziggurat.commands import pasted
from ziggurat.config import from_json, to_json
from ziggurat.data.preprocess.values.times import readable_times
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.streams.windows import Clock
from ziggurat.data.teachers.part_list import PART, LoggedPart, PartList, another_content, digest_of_file
from ziggurat.data.teachers.version_list import found_versions, held_list, list_versions
from ziggurat.errors import DataError, MissingFileError
from ziggurat.features.date_order import DateOrder
from ziggurat.files import Format, remove_left_behind, replacing, sha256_of
from ziggurat.files.parquet import write_table

VERSION = Format(
    name="ziggurat.teacher",
    what="a version of a teacher",
    # A Ziggurat that knows nothing of lists would add parts that are in none.
    version=2,
    migrations={1: lambda content: {**content, "list": {"parts": None, "next": None}}},
    ways_out=("restore the folder from a copy", "log the teacher again into another folder: ziggurat teacher log"),
)
_VERSION_FILE = "version.json"
_EXAMPLE = "example"
_VECTOR = "vector"
_KEY = "key"
_TIME = "time"
_DIGEST_BYTES = 16
_LOGIT = "logit:"
_MAX_LISTS = 64  # lists of parts that a process remembers


@dataclass(frozen=True, kw_only=True)
class TeacherVersion:
    """The facts about a version of a teacher.

    Args:
        teacher: its name.
        version: a digest of its weights and settings.
        labels: in the order of its logits.
        are_probabilities: for each label, whether σ of its logit is a probability.
        example_columns: raw columns that the example id is made of.
        watermark: time of the newest row it was trained on: seconds since 1970, or what the time column counts.
        is_calendar: whether the watermark is in seconds since 1970.
        vectors: row format of the vectors; "" without.
        vector_dim: numbers of a vector.
        history_key: raw column of the user, of versions that keep user and time of each example (`history.py`); "".
    """

    teacher: str
    version: str
    labels: tuple[str, ...]
    are_probabilities: tuple[bool, ...]
    example_columns: tuple[str, ...]
    watermark: float
    is_calendar: bool
    vectors: str = ""
    vector_dim: int = 0
    history_key: str = ""


def example_ids(chunk: RawChunk, columns: Sequence[str]) -> UInt64[np.ndarray, "N 2"]:
    """Return a digest of each row over some columns."""
    texts = [_texts(chunk.column(name)).alias(str(index)) for index, name in enumerate(columns)]
    rows = pl.DataFrame(texts).select(pl.concat_str(pl.all(), separator="\x1f")).to_series().to_list()
    digests = [hashlib.blake2b(row.encode(), digest_size=_DIGEST_BYTES).digest() for row in rows]
    return np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, 2)


def _texts(series: pl.Series) -> pl.Series:
    """Return cells as text; an empty cell and an empty text are one."""
    if isinstance(series.dtype, pl.List | pl.Array):
        series = series.cast(pl.List(pl.String)).list.join("\x1e", ignore_nulls=True)
    return series.cast(pl.String).fill_null("")


class ExampleIndex:
    """Finds examples by their digests; 16 bytes each."""

    def __init__(self, ids: UInt64[np.ndarray, "N 2"] | None = None) -> None:
        found = np.empty((0, 2), dtype=np.uint64) if ids is None else ids
        self.order = np.argsort(found[:, 0], kind="stable")
        self._sorted = found[self.order]

    def __len__(self) -> int:
        return len(self._sorted)

    def find(self, ids: UInt64[np.ndarray, "N 2"]) -> tuple[Bool[np.ndarray, "N"], Int64[np.ndarray, "N"]]:
        """Return which examples are known, and the place of each in the order they were given in."""
        if not len(self._sorted):
            return np.zeros(len(ids), dtype=np.bool_), np.zeros(len(ids), dtype=np.int64)
        at = np.searchsorted(self._sorted[:, 0], ids[:, 0]).clip(max=len(self._sorted) - 1)
        is_known = (self._sorted[at] == ids).all(axis=1)
        return is_known, self.order[at]

    def add(self, ids: UInt64[np.ndarray, "N 2"]) -> None:
        """Take examples that are not known; places are not those of `find` any more."""
        merged = np.concatenate([self._sorted, ids])
        self._sorted = merged[np.argsort(merged[:, 0], kind="stable")]
        self.order = np.arange(len(self._sorted))


class VersionFolder:
    """A version of a teacher in a side table.

    Args:
        path: FOLDER/TEACHER/VERSION.
        facts: of the version.
    """

    def __init__(self, path: Path, facts: TeacherVersion) -> None:
        self.path = path
        self.facts = facts

    @staticmethod
    def begin(folder: str | Path, facts: TeacherVersion) -> VersionFolder:
        """Return the place of a version, which is made where it is not there yet.

        Raises:
            DataError: it is there, with other example ids, vectors or watermark; or it is listed and gone.
        """
        path = Path(folder) / facts.teacher / facts.version
        if not (path / _VERSION_FILE).exists():
            _refuse_parts_alone(path)
            # It may be the one that is gone, which is then logged again.
            begun = f"{facts.teacher}/{facts.version}"
            found_versions(Path(folder), lambda: _names_of_versions(folder), about_to_log=begun)
            path.mkdir(parents=True, exist_ok=True)
            with held_list(Path(folder)):
                # Another process may have begun the same version, and logged parts: its list of them stays.
                if not (path / _VERSION_FILE).exists():
                    VersionFolder(path, facts)._write_list(PartList())
        stored = VersionFolder.open(path)
        if stored.facts != facts:
            before, after = to_json(stored.facts), to_json(facts)
            names = [name for name in before if before[name] != after[name]]
            raise DataError(
                expected=f"what the version was logged with, {', '.join(f'{name} = {before[name]}' for name in names)}",
                found=", ".join(f"{name} = {after[name]}" for name in names),
                where=str(path),
                ways_out=("give the same flags again", "log into another folder: --out ANOTHER_FOLDER"),
            )
        # Behind its description: a version that is listed and does not describe itself is gone.
        list_versions(Path(folder), _names_of_versions(folder))
        return stored

    @staticmethod
    def open(path: Path) -> VersionFolder:
        """Open a version that was logged.

        Raises:
            DataError: its description is damaged.
        """
        return VersionFolder(path, _description(path)[0])

    @property
    def is_checked(self) -> bool:
        """False for a version whose parts an older Ziggurat wrote without digests: they are taken as they are found."""
        return self._list().is_checked

    @property
    def parts(self) -> list[Path]:
        """The files, in the order in which they were written.

        Raises:
            DataError: one is gone, or one is there that was not logged.
        """
        # Names first: a part that gets its name meanwhile is in the list before.
        names = _names_of_parts(self.path)
        return [self.path / name for name in self._list().found(names, folder=self.path)]

    def identities(self) -> tuple[tuple[str, str | int], ...]:
        """Return name and digest of each part, of parts without a digest name and size: others when content is."""
        found: list[tuple[str, str | int]] = []
        for path in self.parts:
            part = self._list().named(path.name)
            found.append((path.name, path.stat().st_size if part is None else part.sha256))
        return tuple(found)

    def check(self, part: Path) -> str:
        """Compare a part with the list of the version; return the SHA-256 of its file, "no file" where it is gone.

        Raises:
            DataError: it has another content, is in no list, or is gone.
        """
        self._list().check(part)
        return digest_of_file(part)

    def settle(self) -> int:
        """Bring in order what a killed process left, and list parts that are in no list; one process does, that logs.

        Returns:
            Parts of an older Ziggurat that are listed from now on.

        Raises:
            DataError: a part is damaged, gone, or was added.
        """
        for path in (self.path / _VERSION_FILE, self._next_path()):
            remove_left_behind(path, is_alone=True)
        kept = self._list()
        if kept.parts is None:
            # As they are now: whether they are whole is all that can be known of them.
            listed = tuple(_listed_now(path) for path in self.parts)
            self._write_list(PartList(parts=listed))
            return len(listed)
        if kept.next is not None:
            is_there = (self.path / kept.next.name).is_file()
            if is_there:
                kept.check(self.path / kept.next.name)
            self._write_list(PartList(parts=(*kept.parts, kept.next) if is_there else kept.parts))
        return 0

    def _list(self) -> PartList:
        return _description(self.path)[1]

    def _write_list(self, parts: PartList) -> None:
        VERSION.write(self.path / _VERSION_FILE, {"facts": to_json(self.facts), "list": to_json(parts)})

    def _next_path(self) -> Path:
        existing = self.parts
        number = int(existing[-1].stem.rpartition("-")[2]) + 1 if existing else 0
        return self.path / f"part-{number:05}.parquet"

    def _read(self, path: Path, columns: list[str]) -> pa.Table:
        """Return columns of a part.

        Raises:
            DataError: it is damaged, or not as it was logged.
        """
        part = self._list().check(path)
        table = _read(path, columns)
        if part is not None and table.num_rows != part.rows:
            raise another_content(path, expected=f"{part.rows:,} examples", found=f"{table.num_rows:,}")
        return table

    def index(self) -> ExampleIndex:
        """Return all examples that were logged."""
        ids = [_ids_of(self._read(path, [_EXAMPLE])) for path in self.parts]
        return ExampleIndex(np.concatenate(ids) if ids else None)

    def logits(self) -> tuple[ExampleIndex, Float32[np.ndarray, "N L"]]:
        """Return all examples and their logits."""
        found = [self.logits_of(path) for path in self.parts]
        if not found:
            return ExampleIndex(), np.empty((0, len(self.facts.labels)), dtype=np.float32)
        return ExampleIndex(np.concatenate([ids for ids, _ in found])), np.concatenate([logits for _, logits in found])

    def logits_of(self, part: Path) -> tuple[UInt64[np.ndarray, "N 2"], Float32[np.ndarray, "N L"]]:
        """Return the examples of a file, and their logits.

        Raises:
            DataError: it is damaged.
        """
        names = [f"{_LOGIT}{label}" for label in self.facts.labels]
        table = self._read(part, [_EXAMPLE, *names])
        return _ids_of(table), np.stack([table.column(name).to_numpy() for name in names], axis=1)

    def write_part(
        self,
        ids: UInt64[np.ndarray, "N 2"],
        logits: Float32[np.ndarray, "N L"],
        vectors: np.ndarray | None,
        *,
        keys: UInt64[np.ndarray, " N"] | None = None,
        times: Float[np.ndarray, " N"] | None = None,
    ) -> Path:
        """Write examples as the next file, which appears when it is complete.

        Args:
            ids: none of which is in another part.
            logits: of each label.
            vectors: rows in the format of the version, as bytes; None without.
            keys: digest of the user of each, of a version with a history key.
            times: of each, beside the keys.
        """
        facts = self.facts
        columns: dict[str, pa.Array] = {_EXAMPLE: _fixed(ids.view(np.uint8).reshape(len(ids), _DIGEST_BYTES))}
        columns["teacher"] = pa.array([facts.teacher] * len(ids)).dictionary_encode()
        columns["version"] = pa.array([facts.version] * len(ids)).dictionary_encode()
        columns["watermark"] = pa.array(np.full(len(ids), facts.watermark))
        for index, label in enumerate(facts.labels):
            columns[f"{_LOGIT}{label}"] = pa.array(np.ascontiguousarray(logits[:, index]))
        if vectors is not None:
            columns[_VECTOR] = _fixed(vectors)
        if keys is not None:
            columns[_KEY] = pa.array(keys)
            columns[_TIME] = pa.array(times)
        self.settle()
        path = self._next_path()
        listed = self._list().parts
        assert listed is not None, "`settle` has listed them"
        with replacing(path) as temporary:
            write_table(pa.table(columns), temporary)
            part = LoggedPart(name=path.name, rows=len(ids), sha256=sha256_of(temporary))
            # Before it has its name, which a reader finds only in a list.
            self._write_list(PartList(parts=listed, next=part))
        self._write_list(PartList(parts=(*listed, part)))
        return path

    def vectors_of(self, part: Path) -> np.ndarray:
        """Return the vectors of a file as they were written: (N, bytes of a row)."""
        column = self._read(part, [_VECTOR]).column(_VECTOR).combine_chunks()
        return _bytes_of(column)

    def owners_of(
        self, part: Path
    ) -> tuple[UInt64[np.ndarray, "N 2"], UInt64[np.ndarray, " N"], Float[np.ndarray, " N"]]:
        """Return examples of a file, the digest of the user of each, and its time."""
        table = self._read(part, [_EXAMPLE, _KEY, _TIME])
        return _ids_of(table), table.column(_KEY).to_numpy(), table.column(_TIME).to_numpy()


def versions_in(folder: str | Path) -> list[VersionFolder]:
    """Return all versions of all teachers in a side table.

    Raises:
        MissingFileError: there is none.
        DataError: a description is damaged, or gone beside its parts; or a version that was logged is gone.
    """
    for path in sorted(Path(folder).glob("*/*")):
        _refuse_parts_alone(path)
    names = found_versions(Path(folder), lambda: _names_of_versions(folder))
    found = [VersionFolder.open(Path(folder) / name) for name in names]
    if not found:
        raise MissingFileError(
            expected="a folder with logged scores of a teacher",
            found="none" if Path(folder).exists() else "no such folder",
            where=str(folder),
            ways_out=(f"ziggurat teacher log RUN FILES --out {folder}", "correct the name of the folder"),
        )
    return found


def _names_of_versions(folder: str | Path) -> list[str]:
    """Return TEACHER/VERSION of all versions that describe themselves, in order."""
    found = sorted(path.parent for path in Path(folder).glob(f"*/*/{_VERSION_FILE}"))
    return [f"{path.parent.name}/{path.name}" for path in found]


def unchecked_note(versions: Sequence[VersionFolder]) -> str:
    """Return a sentence that names versions whose parts have no digests; "" where all have."""
    names = sorted({f"{each.path.parent.name}/{each.path.name}" for each in versions if not each.is_checked})
    if not names:
        return ""
    return (
        f"an older Ziggurat logged {', '.join(names)} without digests of the parts, which are taken as they are found: "
        "`ziggurat teacher log` with the same run and folder lists them from then on"
    )


def _refuse_parts_alone(folder: Path) -> None:
    """Refuse parts without the description that says what they are.

    Raises:
        DataError: there are such.
    """
    # Parts first: they come behind the description, which a version that begins meanwhile has by then.
    names = _names_of_parts(folder)
    if names and not (folder / _VERSION_FILE).exists():
        raise DataError(
            expected=f"{_VERSION_FILE} beside the parts of a version of a teacher",
            found=f"none, and {len(names):,} part{'s' if len(names) > 1 else ''}",
            where=str(folder),
            ways_out=(
                "restore the file from a copy",
                f"take the folder away, and log the teacher again: mv {pasted(folder)} ELSEWHERE",
            ),
        )


def _names_of_parts(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("part-*.parquet") if PART.fullmatch(path.name))


def _description(folder: Path) -> tuple[TeacherVersion, PartList]:
    """Return the facts of a version and the list of its parts, as the file has them now.

    Raises:
        DataError, MissingFileError: it is damaged, or gone.
    """
    path = folder / _VERSION_FILE
    try:
        stat = os.stat(path)
    except OSError:
        return _read_description(str(path))  # which says what is wrong
    # Asked for at each part and chunk, and written whole: another list is another file.
    return _known_description(str(path), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


@lru_cache(maxsize=_MAX_LISTS)
def _known_description(
    path: str, inode: int, num_bytes: int, modified_ns: int, changed_ns: int
) -> tuple[TeacherVersion, PartList]:
    del inode, num_bytes, modified_ns, changed_ns  # a file that was written anew is another entry
    return _read_description(path)


def _read_description(path: str) -> tuple[TeacherVersion, PartList]:
    content = VERSION.read(path)
    facts = from_json(TeacherVersion, content.get("facts"), where=path, error=DataError)
    return facts, from_json(PartList, content.get("list"), where=path, error=DataError)


def _listed_now(path: Path) -> LoggedPart:
    """Return the record of a part as it is now.

    Raises:
        DataError: a page of it is damaged.
    """
    sha256 = digest_of_file(path)
    return LoggedPart(name=path.name, rows=_read(path, None).num_rows, sha256=sha256)


def times_of(chunk: RawChunk, column: str, *, date_order: DateOrder) -> tuple[Float[np.ndarray, "N"], bool]:
    """Return the time of each row, and whether it is in seconds since 1970; NaN where there is none.

    The unit of each file is told by its first rows: a file in milliseconds beside one in seconds is in no other time.
    """
    series = chunk.column(column)
    if series.null_count() == len(series):
        return np.full(len(series), np.nan), True
    clock = Clock.of(chunk, column, date_order=date_order)
    times = readable_times(series, order=clock.date_order, is_date=clock.is_date)
    return times / (clock.per_second or 1), bool(clock.per_second)


def _read(path: Path, columns: list[str] | None) -> pa.Table:
    """Return columns of a part, all without names, whatever a list says of it.

    Raises:
        DataError: it is damaged.
    """
    try:
        # A file and not a data set: folders named like partitions would add columns.
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            table = file.read(columns=columns)
        if (columns is None or _EXAMPLE in columns) and table.column(_EXAMPLE).type != pa.binary(_DIGEST_BYTES):
            raise ValueError(f"examples of type {table.column(_EXAMPLE).type}, written by another program")
        return table
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise DataError(
            expected=f"a part of a side table with {', '.join(columns or [_EXAMPLE])}, as it was written",
            found=str(error).splitlines()[0],
            where=str(path),
            ways_out=(
                "restore the file from a copy",
                "delete it, and log again: ziggurat teacher log scores what is not there",
            ),
        ) from error


def _ids_of(table: pa.Table) -> UInt64[np.ndarray, "N 2"]:
    if not table.num_rows:
        return np.empty((0, 2), dtype=np.uint64)
    return _bytes_of(table.column(_EXAMPLE).combine_chunks()).view("<u8").reshape(-1, 2)


def _bytes_of(column: pa.Array) -> np.ndarray:
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    rows = [
        np.frombuffer(each.buffers()[1], dtype=np.uint8).reshape(-1, each.type.byte_width)[
            each.offset : each.offset + len(each)
        ]
        for each in chunks
    ]
    return np.ascontiguousarray(np.concatenate(rows))


def _fixed(rows: np.ndarray) -> pa.Array:
    """Return rows of bytes as an Arrow column."""
    width = rows.shape[1]
    content = pa.py_buffer(np.ascontiguousarray(rows).tobytes())
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), len(rows), [None, content])
