"""data.json of a run: what it was trained on. A resume refuses other data by it, an evaluation names its own.

    vocabulary   fingerprint of the fitted preprocessing: schema, ids in their order, statistics
    splits       rows and SHA-256 of every encoded value, for train, valid and test
    raw_files    path, size, digest and role of every raw file
    rounding     how numbers were rounded when they were encoded; "exact": the same on every machine

Two files of equal counts, or one file overwritten by another, differ in these digests; the same file at another place,
or touched by a copy, does not. The digest of a raw file reads 17 blocks of 64 KiB, spread evenly from its first byte
to its last, so that it takes a moment for a terabyte too: it is there to recognise a file, and the digests of the
encoded values are there to prove that nothing changed.

Records of version 1 have digests of numbers that followed the processor (logarithms) and the type of the column (a
float of 32 bits for the decimal that was meant); those of version 2 have digests of numbers to predict in 32 bits.
Where such a digest differs, the digests of the raw files decide.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ziggurat.commands import pasted
from ziggurat.config import from_json, to_json
from ziggurat.data.encoded.dataset import EncodedDataset
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.prepared import PreparedData
from ziggurat.data.preprocess.preprocessing_io import load_preprocessing, saved_fingerprint
from ziggurat.data.preprocess.splits import SplitBy
from ziggurat.data.raw.source import RawSource
from ziggurat.errors import CheckpointError, ConfigError, DataError
from ziggurat.files import Format
from ziggurat.files.stores import DataPath
from ziggurat.runs.fingerprint import Difference, differences
from ziggurat.training.records.run_folder import RunFolder


def _rounded_by_the_processor(content: dict[str, object]) -> object:
    """Version 1: the same rows were encoded to other last bits on another kind of processor."""
    return {**content, "rounding": Rounding.PROCESSOR}


def _labels_in_32_bits(content: dict[str, object]) -> object:
    """Version 2: numbers to predict were rounded to 32 bits; of other labels nothing changed."""
    is_exact = content.get("rounding", Rounding.EXACT) == Rounding.EXACT
    return {**content, "rounding": Rounding.LABELS_IN_32_BITS if is_exact else content["rounding"]}


class Rounding(StrEnum):
    """The way numbers were rounded when they were encoded."""

    EXACT = "exact"  # by rules that every machine follows, numbers to predict not at all
    LABELS_IN_32_BITS = "labels_in_32_bits"  # by the same rules, and numbers to predict to 32 bits
    PROCESSOR = "processor"  # by the processor's own logarithms


_FORMAT = Format(
    name="ziggurat.run_data",
    what="the record of a run's data",
    version=3,
    migrations={1: _rounded_by_the_processor, 2: _labels_in_32_bits},
    ways_out=("restore the file from a copy", "delete it: the run is then resumed without comparing its data"),
)
_BLOCKS = 17
_BLOCK_BYTES = 1 << 16
_ALL = "all"  # the role of a file whose rows a split deals out


@dataclass(frozen=True, kw_only=True)
class RawFile:
    """One raw file of a run.

    Args:
        path: absolute, or its URL in a store.
        num_bytes: its size.
        digest: see the module's docstring.
        role: train, valid or test where the files were split before, else "all".
    """

    path: str
    num_bytes: int
    digest: str
    role: str


@dataclass(frozen=True, kw_only=True)
class SplitRecord:
    """Rows and digest of one split."""

    name: str
    num_rows: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class DataRecord:
    """The data that a run was trained on: its schema, files and contents."""

    vocabulary: str
    splits: tuple[SplitRecord, ...]
    raw_files: tuple[RawFile, ...]
    rounding: Rounding = Rounding.EXACT

    @staticmethod
    def of(prepared: PreparedData, *, data: DataConfig) -> DataRecord:
        """The record of prepared data.

        Args:
            prepared: the data.
            data: with the real paths in it (`execute.raw_files`).
        """
        return DataRecord(
            vocabulary=prepared.preprocessing.fingerprint,
            splits=_splits(prepared),
            raw_files=tuple(raw_file(path, role=role) for path, role in files_with_roles(data)),
        )

    def save(self, path: Path) -> None:
        """Write the record to its file."""
        _FORMAT.write(path, to_json(self))

    @staticmethod
    def load(path: Path) -> DataRecord | None:
        """Read it; None if there is none, as in runs of before.

        Raises:
            DataError: the file is damaged.
        """
        return from_json(DataRecord, _FORMAT.read(path), where=str(path)) if path.exists() else None

    def rows(self, split: str) -> int:
        """Rows of a split."""
        return sum(entry.num_rows for entry in self.splits if entry.name == split)

    def facts(self) -> dict[str, str]:
        """Return the facts that must be equal, as a fingerprint."""
        return {"vocabulary": self.vocabulary} | self.rows_facts()

    def rows_facts(self) -> dict[str, str]:
        """The part of `facts` that says what the rows hold."""
        found: dict[str, str] = {}
        for entry in self.splits:
            found[f"data {entry.name} rows"] = str(entry.num_rows)
            found[f"data {entry.name} content"] = entry.digest
        return found


def files_with_roles(data: DataConfig) -> list[tuple[DataPath, str]]:
    """Every raw file, globs and folders expanded, with its role."""
    by_files = data.split.by is SplitBy.FILES
    # Without files of their own the rows of one file may be in any split.
    named = {"train": data.train, "valid": data.valid, "test": data.test}
    return [
        (path, name if by_files else _ALL)
        for name, paths in named.items()
        if paths
        for path in RawSource(paths, format=data.format, copies=data.copies).paths
    ]


def raw_file(path: DataPath, *, role: str = _ALL) -> RawFile:
    """Return the record by which a raw file is recognised."""
    size = path.stat().st_size
    # The size goes into the digest, since blocks of two files may be the same.
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        # The last block begins here, so that the end of the file is in it.
        last = max(0, size - _BLOCK_BYTES)
        # A file that fits one block has all these places at 0: the set leaves one of them.
        for start in sorted({last * block // (_BLOCKS - 1) for block in range(_BLOCKS)}):
            file.seek(start)
            digest.update(file.read(_BLOCK_BYTES))
    return RawFile(path=str(path.absolute()), num_bytes=size, digest=digest.hexdigest(), role=role)


def refuse_splits_of_stream(run: RunFolder, *, asked: str) -> None:
    """Refuse to divide the rows of a stream into splits: it has trained all of them, each after it was scored.

    Raises:
        ConfigError: the run is a stream.
    """
    if run.is_stream():
        raise ConfigError(
            expected="a run with rows of its own that it was not trained on",
            found="a stream, which has trained all its rows; what it scored before is in windows.jsonl",
            where=f"{run.path}, {asked}",
            ways_out=(
                f"look at the windows: ziggurat report {pasted(run.path)}",
                f"name rows that it has not seen: ziggurat evaluate {pasted(run.path)} FILE",
            ),
        )


_TO_RESUME = (
    "restore the raw files; where they lie now may be named: --data.train FILE",
    "start a new run on this data: --out ANOTHER_FOLDER",
)
_ROUNDED_ANEW = (
    "data: the raw files are those of the run; a version before encoded them, and rounded some numbers of {} otherwise"
)
_OLD_NUMBERS = (
    "if the raw files are the same, a version before trained the run: it named ids of {} by numbers of 31 bits; "
    "train it again, or go on with that version"
)
_OLD_LABELS = (
    "if the raw files are the same, a version before trained the run: it took the label {}, a number, as it is, and "
    "not by its mean and deviation; train it again, or go on with that version"
)


def refuse_other_data(
    run: RunFolder,
    prepared: PreparedData,
    *,
    data: DataConfig,
    asked: str = "--resume",
    ways_out: tuple[str, ...] = _TO_RESUME,
) -> str:
    """Raise unless the prepared data is what the run was trained on so far; returns what could not be compared.

    Args:
        run: the folder.
        prepared: what its raw files give today.
        data: with the real paths in it (`execute.raw_files`).
        asked: what it is asked for.
        ways_out: of the error.

    Raises:
        DataError: rows, content or vocabularies differ; says which.
    """
    record = DataRecord.load(run.data)
    fitted = load_preprocessing(run.preprocessing) if run.preprocessing.exists() else None
    if record is None and fitted is None:
        return "data: not compared, the run has no record of it"
    where = run.preprocessing if record is None else run.data
    now = DataRecord(vocabulary=prepared.preprocessing.fingerprint, splits=_splits(prepared), raw_files=())
    saved = {} if record is None else record.rows_facts()
    given = {} if record is None else now.rows_facts()
    vocabulary = "" if record is None else record.vocabulary
    if fitted is not None:
        vocabulary = fitted.fingerprint
    # Where the run has kept what was fitted, statistics may differ by their rounding; in a fingerprint they may not.
    if fitted is None or fitted.difference(prepared.preprocessing):
        saved = {"vocabulary": vocabulary} | saved
        given = {"vocabulary": now.vocabulary} | given
    # What nobody can compare is no difference.
    found = [each for each in differences(saved, given) if not _is_incomparable(each)]
    note = ""
    has_numbers = prepared.inputs.has_number_labels
    if record is not None and _are_contents(found) and _is_rounded_anew(record, data, has_numbers=has_numbers):
        note = _ROUNDED_ANEW.format(", ".join(sorted(each.setting.split()[1] for each in found)))
        found = []
    if found:
        # Numbers of ids have changed between versions, which shows in contents alone.
        growing = prepared.inputs.numbered if all(it.setting.endswith(" content") for it in found) else ()
        raise DataError(
            expected="the data that the run was trained on: the same rows in the same order",
            found="; ".join(f"{it.setting}: {_short(it.first)} in the run, {_short(it.second)} now" for it in found),
            where=f"{where}, {asked}",
            ways_out=(*ways_out, *_of_a_version_before(run, prepared, growing=sorted(growing))),
        )
    return note if record is not None else "data: its vocabularies are the run's; the run has no digest of its rows"


def _are_contents(found: Sequence[Difference]) -> bool:
    return bool(found) and all(each.setting.endswith(" content") for each in found)


def _is_rounded_anew(record: DataRecord, data: DataConfig, *, has_numbers: bool) -> bool:
    """Return whether a version before encoded the same raw files otherwise, wherever they lie now.

    Args:
        record: of the run.
        data: what is read now.
        has_numbers: whether a label is a number.
    """
    if record.rounding is Rounding.EXACT or (record.rounding is Rounding.LABELS_IN_32_BITS and not has_numbers):
        return False
    now = [raw_file(path, role=role) for path, role in files_with_roles(data)]
    # Digests and roles, in the order of the files, wherever they lie.
    return [(file.digest, file.role) for file in record.raw_files] == [(file.digest, file.role) for file in now]


def refuse_other_vocabularies(run: RunFolder) -> None:
    """Raise unless the vocabularies in a run's folder are those of the data that the run was trained on.

    The ids of all data are read through them: with those of another run, every score is that of other ids.

    Raises:
        CheckpointError: `preprocessing/` and `data.json` do not belong together, or one is damaged.
    """
    record = DataRecord.load(run.data)
    if record is None:
        return
    found = saved_fingerprint(run.preprocessing)
    if found != record.vocabulary:
        raise CheckpointError(
            expected=f"the vocabularies of the data that the run was trained on, {_short(record.vocabulary)}",
            found=f"others, {_short(found)}: those of another start into this folder, or of another run",
            where=str(run.preprocessing),
            ways_out=(
                "restore the folder from a copy of this run",
                "train again, into another folder: --out runs/another_name",
            ),
        )


def _of_a_version_before(run: RunFolder, prepared: PreparedData, *, growing: Sequence[str]) -> list[str]:
    """Ways out of a run whose raw files may be the same, but which a version before encoded in another way."""
    ways = [_OLD_NUMBERS.format(", ".join(growing))] if growing else []
    scaled = [label.name for label in prepared.inputs.labels if label.scale != 1.0 or label.offset != 0.0]
    if scaled and run.preprocessing.exists():
        then = load_preprocessing(run.preprocessing).inputs.labels
        if all(label.scale == 1.0 and label.offset == 0.0 for label in then):
            ways.append(_OLD_LABELS.format(", ".join(map(repr, scaled))))
    return ways


def rows_of_split(prepared: PreparedData, split: str, *, run: Path) -> EncodedDataset:
    """The encoded rows of one of a run's splits.

    Args:
        prepared: the run's data.
        split: train, valid or test.
        run: its folder.

    Raises:
        ConfigError: it has no such rows.
    """
    dataset = {"train": prepared.train, "valid": prepared.valid, "test": prepared.test}.get(split)
    if dataset is None or not dataset.num_rows:
        raise ConfigError(
            expected="train, valid or test, of which the run has rows",
            found=f"{split!r}, no rows",
            where=f"{run}, {prepared.summary.split}",
            ways_out=("name another split", f"evaluate a file: ziggurat evaluate {pasted(run)} FILE"),
        )
    return dataset


def _splits(prepared: PreparedData) -> tuple[SplitRecord, ...]:
    datasets = {"train": prepared.train, "valid": prepared.valid, "test": prepared.test}
    return tuple(
        SplitRecord(name=name, num_rows=found.num_rows, digest=found.digest)
        for name, found in datasets.items()
        if found is not None
    )


def _is_incomparable(difference: Difference) -> bool:
    """Data that was prepared before there were digests has one of its files, which says nothing of another one."""
    values = (difference.first, difference.second)
    return difference.setting.endswith(" content") and any(value.startswith("manifest ") for value in values)


def _short(value: str) -> str:
    return value[:12] + "…" if len(value) > 16 else value or "none"


@dataclass(frozen=True, kw_only=True)
class KnownFile:
    """A raw file that a run has read, and how much of it was trained on.

    Args:
        path: as it was given.
        role: see `RawFile`.
        trained_rows: rows of the run's training split.
        all_rows: of all its splits.
        of_events: whether these rows are questions that were made of a log of events, not rows of the file.
    """

    path: DataPath
    role: str
    trained_rows: int
    all_rows: int
    of_events: bool = False

    def warning(self, run: Path) -> str:
        """Say what to know before the metrics of this file are believed."""
        if self.role == _ALL:
            what = "questions that its events gave" if self.of_events else "rows of that data"
            rows = f"{self.trained_rows:,} of the {self.all_rows:,} {what} were trained on"
        else:
            rows = "all of it was trained on" if self.role == "train" else "it chose the best step"
        return (
            f"{self.path} is data of this run: {rows}; its own test rows: ziggurat evaluate {pasted(run)} --split test"
        )


def known_files(record: DataRecord | None, paths: Sequence[DataPath]) -> list[KnownFile]:
    """Those of `paths` that a run was trained on or chose its best step by: by content, so that a copy is known too."""
    if record is None:
        return []
    sizes = {file.num_bytes for file in record.raw_files}
    by_digest = {file.digest: file for file in record.raw_files}
    found: list[KnownFile] = []
    for path in _existing(paths):
        # Sizes first: most files need not be read.
        file = by_digest.get(raw_file(path).digest) if path.stat().st_size in sizes else None
        # Test rows are there to be evaluated, so they are no surprise.
        if file is not None and file.role != "test":
            rows = sum(entry.num_rows for entry in record.splits)
            found.append(KnownFile(path=path, role=file.role, trained_rows=record.rows("train"), all_rows=rows))
    return found


def _existing(paths: Iterable[DataPath]) -> list[DataPath]:
    return [path for path in paths if path.is_file()]
