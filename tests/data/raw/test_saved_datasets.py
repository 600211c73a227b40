"""Folders that Hugging Face's `save_to_disk` wrote: the files that state.json names, and no others."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest

from ziggurat.data.inspect.inspect_file import inspect_file
from ziggurat.data.raw.source import RawSource
from ziggurat.errors import DataError


def save(folder: Path, *, num_files: int = 2, rows_per_file: int = 30, **state: object) -> Path:
    """A folder as `datasets` writes it (tests/bridges/test_data_sources.py compares with the package)."""
    folder.mkdir(parents=True)
    names = [f"data-{index:05d}-of-{num_files:05d}.arrow" for index in range(num_files)]
    for index, name in enumerate([*names, "cache-1234567890abcdef.arrow"]):
        start = index * rows_per_file
        table = pa.table(
            {"n": range(start, start + rows_per_file), "user": [f"u{n % 9}" for n in range(rows_per_file)]}
        )
        with pa.ipc.new_stream(folder / name, table.schema) as writer:
            writer.write_table(table, max_chunksize=10)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "1", "_split": None, **state}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))
    return folder


def numbers(path: Path) -> list[int]:
    return [n for chunk in RawSource(path).frames() for n in chunk.frame["n"]]


def test_named_files_are_the_rows(tmp_path: Path) -> None:
    folder = save(tmp_path / "saved")
    assert numbers(folder) == list(range(60))
    assert RawSource(folder).columns() == {"n": pl.Int64(), "user": pl.String()}
    assert RawSource(folder).num_rows_hint() == 60
    assert inspect_file(folder, label="n").num_rows == 30  # the first file


def test_of_several_splits_one_is_asked_for(tmp_path: Path) -> None:
    for split in ("train", "test"):
        save(tmp_path / "saved" / split)
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match="saved/train"):
        RawSource(tmp_path / "saved")
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert numbers(tmp_path / "saved") == list(range(60))


def test_absent_files_and_indices_are_refused(tmp_path: Path) -> None:
    (save(tmp_path / "a") / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match="no data-00001-of-00002"):
        RawSource(tmp_path / "a")
    with pytest.raises(DataError, match="flatten_indices"):
        RawSource(save(tmp_path / "b", _indices_data_files=[{"filename": "indices.arrow"}]))


@pytest.mark.parametrize(
    "text", ["[]", '{"_data_files": 3}', '{"_data_files": ["data.arrow"]}', '{"_data_files": [{}]}']
)
def test_another_layout_of_the_description_is_refused_by_its_file(tmp_path: Path, text: str) -> None:
    folder = save(tmp_path / "saved")
    (folder / "state.json").write_text(text)
    with pytest.raises(DataError, match=r"state\.json"):
        RawSource(folder)
