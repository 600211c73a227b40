"""Damaged files, read in a process with a memory limit: no crash, no hang, the file is always named; and what carries
checksums over every byte (sealed Parquet, gzip) is never read wrongly."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest

from ziggurat.data.raw.parquet_seal import Seal, seal_parquet
from ziggurat.data.raw.source import RawSource
from ziggurat.errors import DataError

PROGRAM = Path(__file__).with_name("damaged_files.py")
MEMORY_LIMIT_BYTES = 4 << 30
CHECKED = ("sealed", "tsv_gz", "criteo_gz")  # a checksum covers every byte that matters


def _read_damaged(folder: Path, kind: str, *, first_seed: int, num_files: int) -> Counter[str]:
    """Run the program; counts of outcomes."""
    command = [
        sys.executable,
        str(PROGRAM),
        str(folder),
        kind,
        str(first_seed),
        str(num_files),
        str(MEMORY_LIMIT_BYTES),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"{kind}: exit {done.returncode} at {lines[-1:]}\n{done.stderr[-3000:]}"
    assert len(lines) == 2 * num_files
    outcomes: Counter[str] = Counter()
    for case, result in zip(lines[::2], lines[1::2], strict=True):
        outcomes[result["outcome"]] += 1
        assert result["outcome"] in ("same", "differs", "DataError", "SchemaError"), (case, result)
        if result["outcome"].endswith("Error"):
            assert f"file{case['seed']}" in result["where"], (case, result)
            assert result["found"], (case, result)
        if kind in CHECKED:
            assert result["outcome"] != "differs", (case, result)
        assert result["s"] < 10
    return outcomes


@pytest.mark.parametrize("kind", ["sealed", "plain_parquet", "csv", "tsv_gz"])
def test_a_few_damaged_files(tmp_path: Path, kind: str):
    outcomes = _read_damaged(tmp_path, kind, first_seed=0, num_files=25)
    if kind in CHECKED:
        assert outcomes["DataError"] >= 20


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sealed", "plain_parquet", "arrow_stream", "feather", "csv", "tsv_gz", "criteo_gz"])
def test_two_thousand_damaged_files(tmp_path: Path, kind: str):
    num_files = {"sealed": 1000, "plain_parquet": 600}.get(kind, 300)
    outcomes = _read_damaged(tmp_path, kind, first_seed=1000, num_files=num_files)
    assert outcomes.total() == num_files


def _sealed(path: Path) -> pl.DataFrame:
    rng = np.random.default_rng(0)
    frame = pl.DataFrame({"a": rng.integers(0, 9, 200), "s": [f"id{i % 7}" for i in range(200)]})
    pq.write_table(frame.to_arrow(), path, row_group_size=90, write_page_checksum=True)
    seal_parquet(path)
    return frame


def test_flipped_bits_of_sealed_parquet_are_found_or_harmless(tmp_path: Path):
    path = tmp_path / "a.parquet"
    frame = _sealed(path)
    content = path.read_bytes()
    harmless = 0
    for place in range(0, len(content), 3):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            found = pl.concat([chunk.frame for chunk in RawSource(path).frames()])
        except DataError:
            continue
        assert found.equals(frame), place
        harmless += 1
    assert harmless <= 8  # only the seal's own magic number


def test_sealed_parquet_is_read_by_others_and_names_the_damage(tmp_path: Path):
    path = tmp_path / "a.parquet"
    frame = _sealed(path)
    assert pl.read_parquet(path).equals(frame)
    assert pl.from_arrow(pq.read_table(path)).equals(frame)  # type: ignore[union-attr]
    seal = Seal.find(path)
    assert seal is not None
    seal.check(0, seal.body_bytes, what="all of it")
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        list(RawSource(path).frames())
    assert f"{path}, row group 0, column 'a'" in caught.value.where
    content[100] ^= 1
    content[-30] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        list(RawSource(path).frames())
    assert "footer" in caught.value.where


def test_file_without_a_seal_has_none(tmp_path: Path):
    pq.write_table(pl.DataFrame({"a": [1]}).to_arrow(), tmp_path / "a.parquet")
    assert Seal.find(tmp_path / "a.parquet") is None
    (tmp_path / "b.parquet").write_text("hello")
    with pytest.raises(DataError):
        seal_parquet(tmp_path / "b.parquet")
