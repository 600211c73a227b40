"""Saving and loading a Preprocessing: JSON for what is small, Parquet for vocabularies, all checksummed. No pickle.

    folder/preprocessing.json            schema, statistics, and name, size and SHA-256 of every other file
    folder/vocabulary_000.parquet …      columns id (text) and count, one file a table

The JSON file carries the SHA-256 of its own payload and must be written exactly as we write it, so every flipped bit
of every file is found on loading: before anything is parsed that could be misread. Files are written into a temporary
folder and renamed together.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from ziggurat.config import from_json, to_json
from ziggurat.data.preprocess.numeric import NumericState
from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.preprocess.vocabulary import Vocabulary
from ziggurat.errors import CheckpointError, ConfigError, SchemaError
from ziggurat.features.schema import Schema

FORMAT_VERSION = 1
_MAIN_FILE = "preprocessing.json"


def save_preprocessing(preprocessing: Preprocessing, folder: Path) -> None:
    """Write a Preprocessing into `folder`, which is made or replaced.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            _write_all(preprocessing, temporary)
            if folder.exists():
                shutil.rmtree(folder)
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            expected="to write the fitted preprocessing",
            found=str(error),
            where=str(folder),
            ways_out=("free some space", "check the permissions of the folder"),
        ) from error


def load_preprocessing(folder: Path) -> Preprocessing:
    """Read a Preprocessing from `folder`.

    Raises:
        CheckpointError: a file is missing, damaged or of another version; names it.
    """
    payload = _read_main(folder / _MAIN_FILE)
    vocabularies: dict[str, Vocabulary] = {}
    for table, entry in payload["vocabularies"].items():
        path = folder / entry["file"]
        content = _read_bytes(path)
        if len(content) != entry["bytes"] or hashlib.sha256(content).hexdigest() != entry["sha256"]:
            raise _damaged(path, "its SHA-256 is not the one noted when it was saved")
        frame = pl.from_arrow(pq.read_table(io.BytesIO(content)))
        assert isinstance(frame, pl.DataFrame)
        vocabularies[table] = Vocabulary(frame["id"].rechunk(), frame["count"].rechunk())
    where = str(folder / _MAIN_FILE)
    try:
        schema = from_json(Schema, payload["schema"], where=where)
        numbers = {name: from_json(NumericState, data, where=where) for name, data in payload["numbers"].items()}
    except (ConfigError, SchemaError) as error:
        raise _damaged(folder / _MAIN_FILE, str(error)) from error
    loaded = Preprocessing(schema, vocabularies=vocabularies, numbers=numbers)
    if loaded.fingerprint != payload["fingerprint"]:
        raise _damaged(folder / _MAIN_FILE, "the fingerprint of what was loaded is not the one that was saved")
    return loaded


def _write_all(preprocessing: Preprocessing, folder: Path) -> None:
    vocabularies: dict[str, Any] = {}
    for index, (table, vocabulary) in enumerate(preprocessing.vocabularies.items()):
        name = f"vocabulary_{index:03d}.parquet"
        content = _parquet(vocabulary)
        _write_durably(folder / name, content)
        digest = hashlib.sha256(content).hexdigest()
        vocabularies[table] = {"file": name, "bytes": len(content), "sha256": digest}
    payload = {
        "version": FORMAT_VERSION,
        "fingerprint": preprocessing.fingerprint,
        "schema": to_json(preprocessing.schema),
        "numbers": {name: to_json(state) for name, state in preprocessing.numbers.items()},
        "vocabularies": vocabularies,
    }
    _write_durably(folder / _MAIN_FILE, _wrapped(payload))


def _wrapped(payload: dict[str, Any]) -> bytes:
    digest = hashlib.sha256(json.dumps(payload).encode()).hexdigest()
    return (json.dumps({"sha256": digest, "payload": payload}, indent=1) + "\n").encode()


def _read_main(path: Path) -> dict[str, Any]:
    content = _read_bytes(path)
    try:
        payload = json.loads(content)["payload"]
        is_intact = _wrapped(payload) == content
    except (ValueError, KeyError, TypeError, RecursionError):
        is_intact, payload = False, {}
    if not is_intact:
        raise _damaged(path, "it is not what was written: its SHA-256 or its form differs")
    if payload["version"] != FORMAT_VERSION:
        raise CheckpointError(
            expected=f"a preprocessing of version {FORMAT_VERSION}",
            found=f"version {payload['version']}",
            where=str(path),
            ways_out=("load it with the version of Ziggurat that wrote it", "fit it again"),
        )
    return payload


def _parquet(vocabulary: Vocabulary) -> bytes:
    table = pa.table({"id": vocabulary.ids.to_arrow(), "count": vocabulary.counts.to_arrow()})
    table = table.cast(pa.schema({"id": pa.large_string(), "count": pa.int64()}))
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    return sink.getvalue()


def _write_durably(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            expected="a file of a saved preprocessing",
            found=str(error),
            where=str(path),
            ways_out=("check the path", "use an older checkpoint", "fit the preprocessing again"),
        ) from error


def _damaged(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        expected="a file as it was saved",
        found=found,
        where=str(path),
        ways_out=("use an older checkpoint", "copy the file again", "fit the preprocessing again"),
    )
