"""Saving and loading a Preprocessing: JSON for what is small, Parquet for vocabularies, all checksummed. No pickle.

    folder/preprocessing.json            schema, statistics, and name, size and SHA-256 of every other file
    folder/vocabulary_000.parquet …      columns id (text) and count, one file a table
    folder/grown_000.parquet …           columns number and row: what training made of growing vocabularies

The JSON file carries the SHA-256 of its own content, so every flipped bit that means something is found on loading:
before anything is parsed that could be misread. Files are written into a temporary folder and renamed together.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from ziggurat.config import to_json
from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.preprocess.values.grown import GrownVocabulary
from ziggurat.data.preprocess.values.numeric import NumericState
from ziggurat.data.preprocess.values.vocabulary import Vocabulary
from ziggurat.errors import CheckpointError, SchemaError
from ziggurat.features.kinds.feature import ColumnType
from ziggurat.features.labels import with_outcomes
from ziggurat.features.schema import Schema, schema_to_json
from ziggurat.files import Format, read_bytes, replacing_folder, sha256_of
from ziggurat.plain import JSON, as_group, as_list, as_text
from ziggurat.typed import CountOrNone, Reader

_MAIN_FILE = "preprocessing.json"
_WAYS_OUT = ("use an older checkpoint", "copy the file again", "fit the preprocessing again")


def _unwrapped(data: JSON) -> JSON:
    """Version 0: the payload, with a version of its own, and its checksum side by side."""
    content = as_group(data)
    payload = as_group(content["payload"])
    if content["sha256"] != sha256_of(json.dumps(payload).encode()) or payload.pop("version") != 1:
        raise ValueError("its sha256 differs")
    return payload


def _labels_say_their_outcomes(data: JSON) -> JSON:
    """Version 1: that the label of what came next is always 1 followed from its name."""
    content = as_group(data)
    schema = as_group(content["schema"])
    features = [as_group(feature) for feature in as_list(schema["features"])]
    moments = [as_text(feature["name"]) for feature in features if feature["kind"] == "moments"]
    return {**content, "schema": {**schema, "labels": with_outcomes(as_list(schema["labels"]), moments=moments)}}


MAIN = Format(
    name="ziggurat.preprocessing",
    what="a fitted preprocessing",
    version=2,
    migrations={0: _unwrapped, 1: _labels_say_their_outcomes},
    error=CheckpointError,
    missing=CheckpointError,
    ways_out=_WAYS_OUT,
    max_bytes=1 << 30,
)


@dataclass(frozen=True, kw_only=True)
class _File:
    """A vocabulary's file."""

    file: str
    bytes: CountOrNone
    sha256: str


@dataclass(frozen=True, kw_only=True)
class _Saved:
    """The content of the main file."""

    fingerprint: str
    schema: Schema
    numbers: dict[str, NumericState]
    vocabularies: dict[str, _File]
    grown: dict[str, _File] = field(default_factory=dict)


def save_preprocessing(preprocessing: Preprocessing, folder: Path) -> None:
    """Write a Preprocessing into `folder`, which is made or replaced.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    with replacing_folder(folder, error=CheckpointError) as temporary:
        _write_all(preprocessing, temporary)


def saved_fingerprint(folder: Path) -> str:
    """Read the fingerprint of a saved Preprocessing, without its vocabularies.

    Raises:
        CheckpointError: the main file is missing, damaged or of another version.
    """
    main = folder / _MAIN_FILE
    return _read_main(main, _reader_of(main)).fingerprint


def load_preprocessing(folder: Path) -> Preprocessing:
    """Read a Preprocessing from `folder`.

    Raises:
        CheckpointError: a file is missing, damaged or of another version; names it.
    """
    main = folder / _MAIN_FILE
    reader = _reader_of(main)
    saved = _read_main(main, reader)
    vocabularies = {table: _read_vocabulary(folder / entry.file, entry) for table, entry in saved.vocabularies.items()}
    grown = {table: _read_grown(folder / entry.file, entry) for table, entry in saved.grown.items()}
    loaded = reader.construct(
        lambda: Preprocessing(saved.schema, vocabularies=vocabularies, numbers=saved.numbers, grown=grown), "schema"
    )
    # The files may each be whole and yet come from two folders.
    if loaded.fingerprint != saved.fingerprint:
        raise _damaged(main, "the fingerprint of what was loaded is not the one that was saved")
    return loaded


def _reader_of(main: Path) -> Reader:
    return Reader(where=str(main), noun="key", error=CheckpointError, ways_out=_WAYS_OUT)


def _read_main(main: Path, reader: Reader) -> _Saved:
    try:
        return reader.build(_Saved, MAIN.read(main))
    except SchemaError as error:
        raise _damaged(main, str(error)) from error


def _read_vocabulary(path: Path, entry: _File) -> Vocabulary:
    frame = _read_frame(path, entry, columns={"id": pl.String, "count": pl.Int64})
    return Vocabulary(frame["id"].rechunk(), frame["count"].rechunk())


def _read_grown(path: Path, entry: _File) -> GrownVocabulary:
    frame = _read_frame(path, entry, columns={"number": pl.Int64, "row": pl.Int32})
    # After the checksum: what is read here is what was written.
    if pq.read_schema(path).field("number").type == pa.int32():
        raise CheckpointError(
            expected="numbers of 62 bits for the ids of a growing table",
            found="numbers of 31 bits, as a version before wrote them in exports and in checkpoints",
            where=str(path),
            ways_out=(
                "train the run again, into another folder, and export that: ziggurat export RUN --out FOLDER",
                "serve it with the version that exported it",
            ),
        )
    return GrownVocabulary(numbers=frame["number"].to_numpy(), table_rows=frame["row"].to_numpy())


def _read_frame(path: Path, entry: _File, *, columns: Mapping[str, ColumnType]) -> pl.DataFrame:
    if entry.file != path.name:
        raise _damaged(path.parent / _MAIN_FILE, f"a vocabulary in another folder: {entry.file!r:.80}")
    content = read_bytes(
        path,
        what="a vocabulary",
        max_bytes=entry.bytes,
        error=CheckpointError,
        missing=CheckpointError,
        ways_out=_WAYS_OUT,
    )
    if len(content) != entry.bytes or sha256_of(content) != entry.sha256:
        raise _damaged(path, "its SHA-256 is not the one noted when it was saved")
    try:
        frame = pl.DataFrame(pq.read_table(io.BytesIO(content)))
        return frame.select([pl.col(name).cast(kind) for name, kind in columns.items()])
    except (pa.ArrowException, OSError, pl.exceptions.PolarsError) as error:
        raise _damaged(path, f"not a vocabulary: {error}") from error


def _write_all(preprocessing: Preprocessing, folder: Path) -> None:
    vocabularies: dict[str, dict[str, str | int]] = {}
    for index, (table, vocabulary) in enumerate(preprocessing.vocabularies.items()):
        name = f"vocabulary_{index:03d}.parquet"
        content = _parquet(vocabulary)
        (folder / name).write_bytes(content)  # `replacing_folder` flushes it, and turns what the system refuses
        vocabularies[table] = {"file": name, "bytes": len(content), "sha256": sha256_of(content)}
    grown: dict[str, dict[str, str | int]] = {}
    for index, (table, each) in enumerate(preprocessing.grown.items()):
        name = f"grown_{index:03d}.parquet"
        content = _to_parquet(pa.table({"number": each.numbers, "row": each.table_rows}))
        (folder / name).write_bytes(content)
        grown[table] = {"file": name, "bytes": len(content), "sha256": sha256_of(content)}
    payload = {
        "fingerprint": preprocessing.fingerprint,
        "schema": schema_to_json(preprocessing.schema),
        "numbers": {name: to_json(state) for name, state in preprocessing.numbers.items()},
        "vocabularies": vocabularies,
    } | ({"grown": grown} if grown else {})
    MAIN.write(folder / _MAIN_FILE, payload, error=CheckpointError)


def _parquet(vocabulary: Vocabulary) -> bytes:
    table = pa.table({"id": vocabulary.ids.to_arrow(), "count": vocabulary.counts.to_arrow()})
    return _to_parquet(table.cast(pa.schema({"id": pa.large_string(), "count": pa.int64()})))


def _to_parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    return sink.getvalue()


def _damaged(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        expected="a file as it was saved",
        found=found,
        where=str(path),
        ways_out=_WAYS_OUT,
    )
