"""Folders that Hugging Face's `save_to_disk` wrote: the files that state.json names, and no others."""

from __future__ import annotations

import json
import shlex
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


def describe(folder: Path, *names: str) -> Path:
    """Write the names of data files into the description of a saved data set."""
    state = json.loads((folder / "state.json").read_text())
    state["_data_files"] = [{"filename": name} for name in names]
    (folder / "state.json").write_text(json.dumps(state))
    return folder


def test_the_order_is_that_of_the_description(tmp_path: Path) -> None:
    folder = describe(save(tmp_path / "saved"), "data-00001-of-00002.arrow", "data-00000-of-00002.arrow")
    assert numbers(folder) == [*range(30, 60), *range(30)]


def test_a_description_that_names_no_file_is_refused_and_a_glob_takes_all(tmp_path: Path) -> None:
    folder = save(tmp_path / "saved", _data_files=[])
    with pytest.raises(DataError, match=r"(?s)an empty list.*state\.json") as refused:
        RawSource(folder)
    (folder / "state.json").write_text('{"_fingerprint": "1"}')
    with pytest.raises(DataError, match=r"(?s)only _fingerprint.*state\.json"):
        RawSource(folder)
    (glob,) = shlex.split(refused.value.ways_out[-1].rpartition(": ")[2])
    assert sorted(numbers(Path(glob))) == list(range(90))  # with the leftover of a mapping, as the way out says: all


def test_a_file_that_is_named_twice_or_lies_elsewhere_is_refused(tmp_path: Path) -> None:
    folder = describe(save(tmp_path / "saved"), "data-00000-of-00002.arrow", "data-00000-of-00002.arrow")
    with pytest.raises(DataError, match=r"data-00000-of-00002\.arrow more than once"):
        RawSource(folder)
    save(tmp_path / "other")
    outside = str(tmp_path / "other" / "data-00000-of-00002.arrow")
    for name in ("../other/data-00000-of-00002.arrow", outside, "..", "", "./data-00000-of-00002.arrow"):
        with pytest.raises(DataError, match="by their names alone"):
            RawSource(describe(folder, name))


def test_splits_that_are_none_lie_elsewhere_or_are_not_saved_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "other")
    about = tmp_path / "saved" / "dataset_dict.json"
    save(tmp_path / "saved" / "train")
    for text in ('{"splits": []}', "{}", '{"splits": ["../other"]}'):
        about.write_text(text)
        with pytest.raises(DataError, match=r"dataset_dict\.json"):
            RawSource(about.parent)
    about.write_text('{"splits": ["train"]}')
    (about.parent / "train" / "state.json").unlink()
    with pytest.raises(DataError, match=r"state\.json and dataset_info\.json"):
        RawSource(about.parent)


@pytest.mark.parametrize("counted", [True, False])
def test_a_second_stream_behind_the_first_is_refused_by_its_file(tmp_path: Path, counted: bool) -> None:
    file = save(tmp_path / "saved") / "data-00001-of-00002.arrow"
    file.write_bytes(2 * file.read_bytes())
    with pytest.raises(DataError, match=r"(?s)behind the end of the first stream.*data-00001"):
        RawSource(file).num_rows_hint() if counted else numbers(file.parent)


@pytest.mark.parametrize(
    "text", ["[]", '{"_data_files": 3}', '{"_data_files": ["data.arrow"]}', '{"_data_files": [{}]}']
)
def test_another_layout_of_the_description_is_refused_by_its_file(tmp_path: Path, text: str) -> None:
    folder = save(tmp_path / "saved")
    (folder / "state.json").write_text(text)
    with pytest.raises(DataError, match=r"state\.json"):
        RawSource(folder)
