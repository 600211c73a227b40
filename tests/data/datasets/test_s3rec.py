"""Logs in S3-Rec's file form: what is read, what is refused, and the published file where it is there."""

from __future__ import annotations

import gzip
from pathlib import Path

import polars as pl
import pytest

from ziggurat.data.datasets import fetch, s3rec
from ziggurat.data.datasets.s3rec import read_s3rec
from ziggurat.errors import DataError, MissingFileError
from ziggurat.files import sha256_of

MADE = b"7 3 1 2\n9 5\n\n2 1 1 4\n"


def test_each_line_is_a_user_and_places_count_from_its_begin() -> None:
    events = read_s3rec(MADE, where="made")
    assert events["user_id"].to_list() == [7, 7, 7, 9, 2, 2, 2]
    assert events["item_id"].to_list() == [3, 1, 2, 5, 1, 1, 4]
    assert events["place"].to_list() == [0, 1, 2, 0, 0, 1, 2]
    assert events.schema["place"] == pl.Int64


@pytest.mark.parametrize(
    ("data", "where"), [(b"1 2\n3\n", "line 2"), (b"1 2 x\n", "line 1"), (b"1 -2\n", "line 1"), (b"\n", "made")]
)
def test_other_lines_are_refused_where_they_stand(data: bytes, where: str) -> None:
    with pytest.raises(DataError, match=where):
        read_s3rec(data, where="made")


def test_a_source_is_checked_converted_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingFileError, match="no default download"):
        fetch("beauty-events", cache=tmp_path / "cache")
    (tmp_path / "Beauty.txt.gz").write_bytes(gzip.compress(MADE))
    with pytest.raises(DataError, match="sha256"):
        fetch("beauty-events", source=tmp_path, cache=tmp_path / "cache")
    monkeypatch.setattr(s3rec, "_SHA256", sha256_of(MADE))
    for source in (tmp_path, tmp_path / "Beauty.txt.gz", tmp_path / "Beauty.txt", None):
        path = fetch("beauty-events", source=source, cache=tmp_path / "cache")
        assert pl.read_parquet(path).equals(read_s3rec(MADE, where="made"))
