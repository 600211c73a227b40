"""Writing a data set into the cache: what is there already stays, everything else is replaced."""

from __future__ import annotations

import os
from pathlib import Path

import polars as pl

from ziggurat.data.datasets.fetch import is_complete, write_dataset

FRAME = pl.DataFrame({"user": [1, 2, 3], "label": [0, 1, 0]})


def written(folder: Path, frame: pl.DataFrame = FRAME, *, origin: str = "made") -> tuple[int, int]:
    """Write a data set; return what tells its file from another one of the same name."""
    write_dataset(folder, {"train.parquet": frame}, origin=origin, members={"train.csv": "ab"}, notes="Terms: none.")
    assert is_complete(folder)
    assert pl.read_parquet(folder / "train.parquet").equals(frame)
    assert os.listdir(folder.parent) == [folder.name]
    facts = (folder / "train.parquet").stat()
    return facts.st_ino, facts.st_mtime_ns


def test_the_same_content_stays_the_same_file(tmp_path: Path) -> None:
    first = written(tmp_path / "set")
    assert written(tmp_path / "set") == first


def test_other_rows_another_origin_and_damage_are_replaced(tmp_path: Path) -> None:
    first = written(tmp_path / "set")
    assert written(tmp_path / "set", FRAME.head(2)) != first
    second = written(tmp_path / "set")
    assert written(tmp_path / "set", origin="made anew") != second
    assert "made anew" in (tmp_path / "set" / "SOURCE.txt").read_text()
    (tmp_path / "set" / "train.parquet").write_bytes(b"half")
    written(tmp_path / "set", origin="made anew")
