"""Bad rows: errors with four parts, quarantine files, counts, budget, and each row reported once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ziggurat.cli.main import build_parser
from ziggurat.data.raw.bad_rows import BadReason, BadRow, BadRowPolicy, BadRows
from ziggurat.data.raw.source import RawSource
from ziggurat.errors import BoundsError, ConfigError, DataError


def _bad(row: int = 3, *, path: str = "a.csv", reason: BadReason = BadReason.NOT_A_NUMBER, found: str = "x") -> BadRow:
    return BadRow(
        path=Path(path), row=row, line=row + 2, column="price", reason=reason, expected="a number", found=found
    )


def test_error_names_file_line_row_column_and_reason():
    with pytest.raises(DataError) as caught:
        BadRows().report(_bad())
    assert caught.value.where == "a.csv, line 5, row 3, column 'price'"
    assert caught.value.expected == "a number"
    assert caught.value.found == "'x'"
    flags = [word for way in caught.value.ways_out for word in way.split() if word.startswith("--")]
    assert flags == ["--data.bad-rows", "--bad-rows"]  # of training, and of what reads files for a trained run
    options = build_parser().parse_args(
        ["predict", "runs/first", "new.parquet", "--out", "a.csv", flags[1], "quarantine"]
    )
    assert options.bad_rows == "quarantine"


def test_id_out_of_range_is_a_bounds_error():
    with pytest.raises(BoundsError):
        BadRows().report(_bad(reason=BadReason.OUT_OF_RANGE))


def test_long_values_are_cut_in_errors():
    with pytest.raises(DataError) as caught:
        BadRows().report(_bad(found="y" * 10_000_000))
    assert len(caught.value.found) < 300
    assert "10,000,000 characters" in caught.value.found


def test_quarantine_writes_and_counts_each_row_once(tmp_path: Path):
    with BadRows(BadRowPolicy.QUARANTINE, folder=tmp_path) as bad_rows:
        assert bad_rows.report(_bad(3))
        assert not bad_rows.report(_bad(3, reason=BadReason.BAD_LABEL))
        assert bad_rows.report(_bad(4, reason=BadReason.BAD_LABEL))
        bad_rows.close()
        assert bad_rows.report(_bad(9))  # goes on after close, without losing what was written
    assert bad_rows.counts == {BadReason.NOT_A_NUMBER: 2, BadReason.BAD_LABEL: 1}
    assert bad_rows.num_rows == 3
    assert bad_rows.is_known(Path("a.csv"), 4)
    assert not bad_rows.is_known(Path("a.csv"), 5)
    (file,) = (tmp_path / "quarantine").iterdir()
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [record["row"] for record in records] == [3, 4, 9]
    assert records[0] == {
        "file": "a.csv",
        "row": 3,
        "line": 5,
        "column": "price",
        "reason": "not_a_number",
        "detail": "a number",
        "found": "x",
    }


def test_files_of_one_name_keep_apart(tmp_path: Path):
    with BadRows(BadRowPolicy.QUARANTINE, folder=tmp_path) as bad_rows:
        bad_rows.report(_bad(path="x/part.csv"))
        bad_rows.report(_bad(path="y/part.csv"))
    assert len(list((tmp_path / "quarantine").iterdir())) == 2


def test_no_bad_row_no_folder(tmp_path: Path):
    with BadRows(BadRowPolicy.QUARANTINE, folder=tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_budget_ends_with_a_summary(tmp_path: Path):
    bad_rows = BadRows(BadRowPolicy.QUARANTINE, folder=tmp_path, budget=2)
    bad_rows.report(_bad(0))
    bad_rows.report(_bad(1))
    with pytest.raises(DataError) as caught:
        bad_rows.report(_bad(2))
    assert "at most 2 bad rows" in caught.value.expected
    assert "3 not_a_number" in caught.value.found
    assert "row 2" in caught.value.where


@pytest.mark.parametrize("arguments", [{"policy": BadRowPolicy.QUARANTINE}, {"budget": -1}])
def test_impossible_settings(arguments: dict):
    with pytest.raises(ConfigError):
        BadRows(**arguments)


def test_text_of_another_encoding_is_told_how_to_convert(tmp_path: Path) -> None:
    (tmp_path / "office.csv").write_bytes("name,x\nJosé,1\n".encode("latin-1"))
    with pytest.raises(DataError, match="iconv -f latin1 -t utf-8"):
        list(RawSource(tmp_path / "office.csv").frames())
