"""Criteo's schemas, and the check that refuses a wrong file with its row and column."""

import gzip
import tracemalloc
from pathlib import Path

import pytest

from ziggurat.data.datasets import fetch, schema_for
from ziggurat.data.datasets.criteo import COLUMNS, criteo_schema
from ziggurat.errors import DataError, MissingFileError
from ziggurat.features.schema import Dense, Encoding, NumericTransform
from ziggurat.testing.data import shared_data

GOOD = ["0", *["1"] * 12, "-2", *["68fd1e64"] * 25, ""]


def _file(path: Path, *rows: list[str], separator: str = "\t") -> Path:
    text = "".join(separator.join(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def test_the_real_sample_passes():
    path = shared_data("criteo_sample") / "criteo_first10k.tsv.gz"
    assert fetch("criteo-kaggle", source=path) == path


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        (GOOD[1:], ["row 1", "39 cells", "test.txt"]),
        ([*GOOD, "x"], ["row 1", "41 cells"]),
        (["2", *GOOD[1:]], ["row 1, column label", "'2'"]),
        ([*GOOD[:5], "1.5", *GOOD[6:]], ["row 1, column I5", "'1.5'", "a whole number, or nothing"]),
        ([*GOOD[:20], "68FD1E64", *GOOD[21:]], ["row 1, column C7", "'68FD1E64'", "eight hex digits"]),
    ],
)
def test_wrong_rows_are_named(tmp_path: Path, row: list[str], parts: list[str]):
    for name in ("train.txt", "train.txt.gz"):
        with pytest.raises(DataError) as raised:
            fetch("criteo-kaggle", source=_file(tmp_path / name, GOOD, row))
        for part in [*parts, name]:
            assert part in str(raised.value)


def test_files_that_cannot_be_read_are_named(tmp_path: Path):
    with pytest.raises(MissingFileError, match="Criteo AI Lab"):
        fetch("criteo-1tb")
    with pytest.raises(MissingFileError, match="none"):
        fetch("criteo-kaggle", source=tmp_path / "none")
    with pytest.raises(DataError, match="an empty file"):
        fetch("criteo-kaggle", source=_file(tmp_path / "empty.txt"))
    packed = _file(tmp_path / "day_0.gz", *[GOOD] * 5000)
    packed.write_bytes(packed.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"day_0\.gz, after row"):
        fetch("criteo-1tb", source=tmp_path)
    (tmp_path / "other").mkdir()
    _file(tmp_path / "other" / "b.tsv", GOOD)
    with pytest.raises(MissingFileError, match=r"found: +b\.tsv"):
        fetch("criteo-1tb", source=tmp_path / "other")


def test_every_file_of_a_folder_is_checked(tmp_path: Path):
    _file(tmp_path / "day_0", GOOD)
    _file(tmp_path / "day_1", GOOD)
    assert fetch("criteo-1tb", source=tmp_path) == tmp_path
    _file(tmp_path / "day_1", GOOD[1:])
    with pytest.raises(DataError, match="day_1"):
        fetch("criteo-1tb", source=tmp_path)


def test_x4_has_a_header(tmp_path: Path):
    path = _file(tmp_path / "train.csv", [*COLUMNS], GOOD, separator=",")
    assert fetch("criteo-x4", source=tmp_path) == tmp_path
    assert fetch("criteo-x4", source=path) == path
    with pytest.raises(DataError, match="the header label,I1"):
        fetch("criteo-x4", source=_file(tmp_path / "train.csv", GOOD, separator=","))


def test_schemas():
    kaggle, terabyte, x4 = (schema_for(f"criteo-{name}") for name in ("kaggle", "1tb", "x4"))
    for schema in (kaggle, terabyte, x4):
        assert set(schema.columns) == set(COLUMNS)
    assert all(kaggle.table(f"C{number}").min_count == 10 for number in range(1, 27))
    hashed = {table.name: table.num_rows for table in terabyte.tables if table.encoding is Encoding.HASHING}
    assert hashed == {"C1": 10_000_000, "C10": 10_000_000, "C11": 3_067_956} | dict.fromkeys(
        ("C20", "C21", "C22"), 10_000_000
    )
    buckets = [feature for feature in x4.features if isinstance(feature, Dense)]
    assert {(f.transform, f.min_count) for f in buckets} == {(NumericTransform.CRITEO_BUCKETS, 10)}
    assert x4.table("I1").min_count == 10
    assert criteo_schema("criteo-x4", min_count=2).table("C3").min_count == 2


def test_a_gzip_bomb_is_no_row_and_takes_no_memory(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "train.txt.gz", "wb", compresslevel=1) as file:
        for _ in range(256):
            file.write(bytes(1 << 20))
    tracemalloc.start()
    with pytest.raises(DataError, match="row 0"):
        fetch("criteo-kaggle", source=tmp_path / "train.txt.gz")
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
