"""Files that are still written wait; whole ones do not."""

from __future__ import annotations

import gzip
from pathlib import Path

import polars as pl

from ziggurat.data.raw.source import RawSource
from ziggurat.data.streams.finished_files import FinishedFiles, ends_amid_line

FRAME = pl.DataFrame({"user": ["ann", "bob"] * 50, "click": [0, 1] * 50})


def names(finished: FinishedFiles, folder: Path) -> list[str]:
    return [path.name for path in finished.of(RawSource(folder).paths, known=lambda path: False)]


def test_a_parquet_file_is_whole_when_its_footer_is_there(tmp_path: Path) -> None:
    FRAME.write_parquet(tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    finished = FinishedFiles(settle_s=1e9)
    for size in (0, 3, 4, 7, 8, 11, len(whole) // 2, len(whole) - 1):
        (tmp_path / "b.parquet").write_bytes(whole[:size])
        assert names(finished, tmp_path) == ["a.parquet"], size
        assert finished.waiting == (str(tmp_path / "b.parquet"),)
    (tmp_path / "b.parquet").write_bytes(whole)
    assert names(finished, tmp_path) == ["a.parquet", "b.parquet"]
    assert finished.waiting == ()


def test_an_arrow_file_is_whole_when_it_ends_as_one(tmp_path: Path) -> None:
    FRAME.write_ipc(tmp_path / "a.arrow")
    whole = (tmp_path / "a.arrow").read_bytes()
    (tmp_path / "a.arrow").write_bytes(whole[:-1])
    finished = FinishedFiles(settle_s=1e9)
    assert names(finished, tmp_path) == []
    (tmp_path / "a.arrow").write_bytes(whole)
    assert names(finished, tmp_path) == ["a.arrow"]


def test_text_is_whole_when_it_has_stayed_as_it_was(tmp_path: Path) -> None:
    now = [0.0]
    finished = FinishedFiles(settle_s=2.0, clock=lambda: now[0])
    text = FRAME.write_csv()
    (tmp_path / "a.csv").write_text(text[:40])
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "c.csv").touch()
    assert names(finished, tmp_path) == []
    now[0] = 1.9
    (tmp_path / "a.csv").write_text(text)
    assert names(finished, tmp_path) == []
    now[0] = 2.1
    assert names(finished, tmp_path) == ["b.csv.gz"]
    now[0] = 3.9
    assert names(finished, tmp_path) == ["a.csv"], "b is seen anew, as if it were new; c is empty"


def test_text_without_the_end_of_its_last_line_waits_longer(tmp_path: Path) -> None:
    """A time of which the last digits are not written yet is a time like others, of years ago."""
    now = [0.0]
    finished = FinishedFiles(settle_s=2.0, clock=lambda: now[0])
    text = FRAME.write_csv()
    (tmp_path / "a.csv").write_text(text)
    (tmp_path / "b.csv").write_text(text[:-1])
    (tmp_path / "c.csv").write_text(text[:-3])
    assert [ends_amid_line(tmp_path / f"{name}.csv") for name in "abc"] == [False, True, True]
    assert names(finished, tmp_path) == []
    now[0] = 29.0
    assert names(finished, tmp_path) == ["a.csv"]
    (tmp_path / "c.csv").write_text(text)
    now[0] = 30.1
    assert names(finished, tmp_path) == ["b.csv"], "c is seen anew, and a, which nobody has taken"


def test_names_of_files_that_are_still_written_are_no_data(tmp_path: Path) -> None:
    FRAME.write_parquet(tmp_path / "a.parquet")
    for name in ("b.parquet.tmp", ".part-0.parquet", "c.csv.part"):
        (tmp_path / name).write_bytes((tmp_path / "a.parquet").read_bytes())
    assert names(FinishedFiles(settle_s=0.0), tmp_path) == ["a.parquet"]
