"""Files as other programs write them: read, or refused with a command that makes them readable."""

from __future__ import annotations

import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import polars as pl
import pytest

from ziggurat.data.inspect.inspect_file import inspect_file
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.prepare import prepare
from ziggurat.data.raw.source import RawSource
from ziggurat.errors import ZigguratError
from ziggurat.features.schema_io import read_schema

TABLE = pl.DataFrame(
    {
        "user_id": [f"u{row % 30}" for row in range(400)],
        "item_id": [f"i{row * 7 % 20}" for row in range(400)],
        "click": [int(row * 13 % 7 > 3) for row in range(400)],
    }
)


def run_way_out(error: ZigguratError, *, folder: Path) -> None:
    """Paste the first way out into a shell."""
    command = error.ways_out[0].partition(": ")[2]
    assert shlex.split(command)[0] in (sys.executable, "iconv", "tr")
    subprocess.run(command, shell=True, check=True, cwd=folder)


def test_a_column_without_a_name_is_left_out(tmp_path: Path) -> None:
    TABLE.with_row_index("").write_csv(tmp_path / "t.csv")
    found = inspect_file(tmp_path / "t.csv")
    assert {each.name for each in found.schema.features} == {"user_id", "item_id"}
    assert any("without a name" in warning for warning in found.warnings)


@pytest.mark.parametrize("name", ["it's.json", "a b.jsonl"])
def test_a_json_document_is_converted_by_the_line_that_is_printed(name: str, tmp_path: Path) -> None:
    TABLE.write_json(tmp_path / name)
    with pytest.raises(ZigguratError) as raised:
        RawSource(tmp_path / name).columns()
    run_way_out(raised.value, folder=tmp_path)
    assert pl.read_parquet((tmp_path / name).with_suffix(".parquet")).equals(TABLE)


def test_a_zip_is_unpacked_by_the_line_that_is_printed(tmp_path: Path) -> None:
    TABLE.write_csv(tmp_path / "log.csv")
    with zipfile.ZipFile(tmp_path / "it's.zip", "w") as packed:
        packed.write(tmp_path / "log.csv", "log.csv")
    with pytest.raises(ZigguratError) as raised:
        RawSource(tmp_path / "it's.zip").columns()
    run_way_out(raised.value, folder=tmp_path)
    assert next(RawSource(tmp_path / "it's").frames()).frame["user_id"].to_list() == TABLE["user_id"].to_list()


def test_a_workbook_is_converted_by_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line runs as it stands: `polars.read_excel` here is one that gives the table."""
    (tmp_path / "it's.xlsx").write_bytes(b"PK")
    with pytest.raises(ZigguratError) as raised:
        RawSource(tmp_path / "it's.xlsx").columns()
    words = shlex.split(raised.value.ways_out[0].partition(": ")[2])
    code = words[words.index("-c") + 1]
    assert words[: words.index("-c")] in (
        [sys.executable],
        [sys.executable, "-m", "pip", "install", "fastexcel", "&&", sys.executable],
    )
    monkeypatch.setattr(pl, "read_excel", lambda name: TABLE)
    exec(code)
    assert pl.read_parquet(tmp_path / "it's.parquet").equals(TABLE)


@pytest.mark.parametrize("kind", ["utf-16", "carriage returns"])
def test_a_text_file_of_another_form_is_converted_by_the_line_that_is_printed(kind: str, tmp_path: Path) -> None:
    text = TABLE.write_csv()
    content = text.encode("utf-16") if kind == "utf-16" else text.replace("\n", "\r").encode()
    (tmp_path / "it's.csv").write_bytes(content)
    with pytest.raises(ZigguratError) as raised:
        RawSource(tmp_path / "it's.csv").columns()
    run_way_out(raised.value, folder=tmp_path)
    assert pl.read_csv(tmp_path / "data.csv").equals(TABLE)


def _partitions(folder: Path, suffix: str) -> None:
    for number, day in enumerate(("2024-01-01", "2024-01-02", "2024-01-03")):
        for country in ("FR", "D%20E", "__HIVE_DEFAULT_PARTITION__"):
            inner = folder / f"day={day}" / f"country={country}"
            inner.mkdir(parents=True)
            (inner / "_SUCCESS").write_text("")
            part = TABLE.slice(100 * number, 100)
            file = inner / f"part-0{suffix}"
            {".csv": part.write_csv, ".jsonl": part.write_ndjson, ".parquet": part.write_parquet}[suffix](file)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_partitions_are_read_with_their_keys_as_text(suffix: str, tmp_path: Path) -> None:
    _partitions(tmp_path / "log", suffix)
    source = RawSource(tmp_path / "log")
    assert [*source.columns()] == [*TABLE.columns, "day", "country"]
    frame = pl.concat([chunk.frame for chunk in source.frames()])
    assert frame.height == 900
    assert frame["day"].value_counts().sort("day").rows() == [(f"2024-01-0{day}", 300) for day in (1, 2, 3)]
    assert sorted(frame["country"].drop_nulls().unique()) == ["D E", "FR"]
    assert frame["country"].null_count() == 300
    hints = {"ids": ["user_id", "item_id"], "numbers": ["click"]}
    (first, *_) = source.frames(columns=["country", "item_id"], **hints)
    assert (first.num_rows, first.column("country")[0], set(first.columns)) == (100, "D E", {"country", "item_id"})
    (first, *_) = source.frames(columns=["day"])
    assert first.frame.equals(pl.DataFrame({"day": ["2024-01-01"] * 100}))
    by_glob = RawSource(f"{tmp_path}/log/**/*{suffix}")
    assert pl.concat([chunk.frame for chunk in by_glob.frames()]).equals(frame)
    found = inspect_file(tmp_path / "log")
    assert not any("without a name" in warning for warning in found.warnings)
    assert found.schema.time == "day"
    assert found.schema.feature("country").kind == "categorical"
    data = prepare(DataConfig(train=(str(tmp_path / "log"),)), schema=found.schema, folder=tmp_path / "prepared")
    assert sum(split.rows for split in data.summary.splits.values()) == 900
    assert set(data.preprocessing.vocabularies["country"].ids) == {"D E", "FR"}


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_partitions_become_one_file_with_their_keys_by_the_line_that_is_printed(suffix: str, tmp_path: Path) -> None:
    for day in ("1", "2"):
        (tmp_path / "hive" / f"day={day}").mkdir(parents=True)
        file = tmp_path / "hive" / f"day={day}" / f"part{suffix}"
        {".csv": TABLE.write_csv, ".jsonl": TABLE.write_ndjson, ".parquet": TABLE.write_parquet}[suffix](file)
    with pytest.raises(ZigguratError) as raised:
        RawSource(tmp_path).columns()  # a tree that is not one of partitions alone
    run_way_out(raised.value, folder=tmp_path)
    made = pl.read_parquet(tmp_path / "data.parquet")
    assert made["day"].cast(pl.String).unique().sort().to_list() == ["1", "2"]
    assert made.height == 2 * TABLE.height


def test_a_part_of_a_tree_is_never_taken_for_all_of_it(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    TABLE.write_csv(tmp_path / "a.csv")
    TABLE.write_csv(tmp_path / "sub" / "b.csv")
    with pytest.raises(ZigguratError) as raised:
        RawSource(tmp_path).columns()
    patterns = [shlex.split(way.partition(": ")[2])[0] for way in raised.value.ways_out]
    assert [sum(chunk.frame.height for chunk in RawSource(each).frames()) for each in patterns] == [800, 400]


def test_a_schema_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    text = '[[feature]]\nname = "user_id"\nkind = "categorical"\n'
    (tmp_path / "s.toml").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read_schema(tmp_path / "s.toml").features[0].name == "user_id"


def test_sorted_seconds_are_a_time_under_any_name(tmp_path: Path) -> None:
    TABLE.with_columns(t=1_700_000_000 + 60 * pl.int_range(400)).write_csv(tmp_path / "t.csv")
    assert inspect_file(tmp_path / "t.csv").schema.time == "t"


def test_files_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    for day in ("2024-01-01", "2024-01-02"):
        folder = tmp_path / "log" / f"day={day}"
        folder.mkdir(parents=True)
        pl.DataFrame({"user": ["a", "b"] * 20, "click": [0, 1, 1, 0] * 10}).write_parquet(folder / "part.parquet")
    warnings = inspect_file(tmp_path / "log", label="click").warnings
    assert (
        "only day=2024-01-01/part.parquet, the first of 2 files, was looked at, and not day=2024-01-02/part.parquet"
        in warnings
    )
