"""Bad rows by the thousand: each is found, with its line, column and reason, and every good row comes through."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.data.raw.text_fuzzer import MAX_RECORD_BYTES, SCHEMA, make_text
from ziggurat.data.preprocess.preprocessing import Preprocessing, numeric_columns
from ziggurat.data.raw.bad_rows import BadRowPolicy, BadRows
from ziggurat.data.raw.source import FileFormat, RawSource
from ziggurat.data.raw.text_blocks import TextOptions
from ziggurat.errors import DataError, SchemaError


def _check_fuzzed(folder: Path, *, num_rows: int, bad_share: float, seed: int, block_bytes: int, huge: bool) -> int:
    """Fit and encode a fuzzed file; everything must be as it was made. Returns the number of bad rows."""
    folder.mkdir(parents=True)
    fuzzed = make_text(num_rows=num_rows, bad_share=bad_share, seed=seed, huge=huge)
    path = folder / "fuzzed.csv"
    path.write_bytes(fuzzed.content)
    text = TextOptions(block_bytes=block_bytes, max_record_bytes=MAX_RECORD_BYTES)
    with BadRows(BadRowPolicy.QUARANTINE, folder=folder) as bad_rows:
        source = RawSource(path, bad_rows=bad_rows, text=text)
        options = {"columns": SCHEMA.columns, "numbers": numeric_columns(SCHEMA), "chunk_rows": 997}
        preprocessing = Preprocessing.fit(SCHEMA, source.frames(**options), bad_rows=bad_rows)
        fitted_rows = bad_rows.num_rows
        kept: list[int] = []
        users: list[str] = []
        for chunk in source.frames(**options):
            encoded = preprocessing.encode(chunk, bad_rows=bad_rows)
            rows = encoded["row:"].to_numpy()
            kept += rows.tolist()
            raw = chunk.frame["user"].filter(pl.Series(np.isin(chunk.file_rows, rows)))
            users += [user or "" for user in raw.to_list()]
    assert kept == fuzzed.good_rows
    assert users == fuzzed.good_users
    assert bad_rows.num_rows == fitted_rows == len(fuzzed.bad_rows)
    (quarantine,) = (folder / "quarantine").iterdir()
    records = [json.loads(line) for line in quarantine.read_text().splitlines()]
    found = {item["row"]: (item["line"], item["column"], item["reason"]) for item in records}
    expected = {row: (line, column, reason.value) for row, (line, column, reason) in fuzzed.bad_rows.items()}
    assert found == expected
    assert all(record["file"] == str(path) for record in records)
    return len(found)


@pytest.mark.parametrize("block_bytes", [MAX_RECORD_BYTES, 1 << 24])
def test_bad_rows(tmp_path: Path, block_bytes: int):
    folder = tmp_path / "a"
    num_bad = _check_fuzzed(folder, num_rows=3000, bad_share=0.35, seed=1, block_bytes=block_bytes, huge=False)
    assert num_bad > 900


def test_every_row_bad(tmp_path: Path):
    num_bad = _check_fuzzed(tmp_path / "a", num_rows=500, bad_share=1.0, seed=2, block_bytes=1 << 16, huge=True)
    assert num_bad == 500


@pytest.mark.slow
def test_a_hundred_thousand_bad_rows(tmp_path: Path):
    total = 0
    for seed in range(20):
        share, block_bytes = (0.02, 0.3, 0.5, 1.0)[seed % 4], (1 << 14, 1 << 18, 1 << 24)[seed % 3]
        num_rows = int(5500 / share) if share > 0.1 else 20_000
        folder = tmp_path / str(seed)
        total += _check_fuzzed(
            folder, num_rows=num_rows, bad_share=share, seed=seed, block_bytes=block_bytes, huge=seed % 5 == 0
        )
    while total < 100_000:
        seed += 1
        folder = tmp_path / str(seed)
        total += _check_fuzzed(folder, num_rows=20_000, bad_share=0.9, seed=seed, block_bytes=1 << 20, huge=False)
    assert total >= 100_000


def test_the_first_bad_row_is_an_error_by_default(tmp_path: Path):
    fuzzed = make_text(num_rows=300, bad_share=0.02, seed=5)
    path = tmp_path / "a.csv"
    path.write_bytes(fuzzed.content)
    with pytest.raises(DataError) as caught:
        Preprocessing.fit(SCHEMA, RawSource(path, text=TextOptions(max_record_bytes=MAX_RECORD_BYTES)).frames())
    lines = {line for line, _, _ in fuzzed.bad_rows.values()}
    assert any(f"{path}, line {line}, row" in caught.value.where for line in lines)


MARKS = st.sampled_from(
    [b"a", b"1", b",", b",", b"\n", b"\n", b'"', b'""', b"\r\n", b"\0", b"\xff", "ü".encode(), b"x" * 50]
)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parts=st.lists(MARKS, max_size=60), block_bytes=st.sampled_from([40, 64, 1 << 16]), num_columns=st.integers(1, 3)
)
def test_any_bytes(tmp_path: Path, parts: list[bytes], block_bytes: int, num_columns: int):
    """Whatever the bytes: no crash, rows and lines rise, good and bad rows together are all rows."""
    header = b",".join([b"a", b"b", b"c"][:num_columns])
    path = tmp_path / "a.csv"
    path.write_bytes(header + b"\n" + b"".join(parts))
    for folder in tmp_path.glob("quarantine/*"):
        folder.unlink()
    found = []
    for size in (block_bytes, 1 << 20):
        bad_rows = BadRows(BadRowPolicy.QUARANTINE, folder=tmp_path)
        text = TextOptions(block_bytes=size, max_record_bytes=40)
        chunks = list(RawSource(path, format=FileFormat.CSV, bad_rows=bad_rows, text=text).frames(chunk_rows=3))
        rows = [row for chunk in chunks for row in chunk.file_rows.tolist()]
        lines = [line for chunk in chunks for line in chunk.lines.tolist()]  # type: ignore[union-attr]
        assert rows == sorted(set(rows))
        assert lines == sorted(set(lines))
        assert all(not bad_rows.is_known(path, row) for row in rows)
        last = max([*rows, -1])
        assert all(row in rows or bad_rows.is_known(path, row) for row in range(last + 1))
        found.append([row for chunk in chunks for row in chunk.frame.rows()])
        bad_rows.close()
    if len(header) + sum(map(len, parts)) < 40:  # no record can be too long, so the blocks may not matter
        assert found[0] == found[1]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=300), suffix=st.sampled_from([".csv", ".tsv", ".txt", ".csv.gz", ".parquet"]))
def test_any_file(tmp_path: Path, content: bytes, suffix: str):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(content)
    where = ""
    try:
        for chunk in RawSource(path).frames():
            assert chunk.num_rows > 0
    except (DataError, SchemaError) as error:
        where = error.where
    assert not where or str(path) in where


def test_a_consumer_that_stops_early_leaves_no_thread(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_text("a\n" + "1\n" * 10_000)
    before = threading.active_count()
    frames = RawSource(path, text=TextOptions(block_bytes=100, max_record_bytes=100)).frames(chunk_rows=10)
    next(frames)
    frames.close()
    assert threading.active_count() == before
