"""Logging a teacher that is killed again and again ends with the bytes of one that nobody killed.

A reader opens the side table all the time: it finds complete parts alone, and no example twice.
"""

from __future__ import annotations

import multiprocessing as mp
import random
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest

import ziggurat as zg
from tests.killing import Polling, kill_after, mark_begin, wait_for_begin
from ziggurat.data.teachers.side_table import versions_in
from ziggurat.errors import MissingFileError, ZigguratError
from ziggurat.ops.lookup import KernelChoice
from ziggurat.precision import Precision
from ziggurat.runs.teachers import log as logging
from ziggurat.runs.teachers.log import log_teacher
from ziggurat.testing.ranks import preload

_context = mp.get_context("forkserver")
NUM_ROWS = 60_000
PART_ROWS = 2_000
FIRST = 1_767_225_600  # 2026-01-01
SCHEMA = zg.Schema(
    features=(zg.Categorical(name="user"), zg.Categorical(name="item")), labels=(zg.Label(name="click"),), time="at"
)


def rows(count: int, *, first: int = 0) -> pl.DataFrame:
    n = pl.int_range(first, first + count, eager=True)
    frame = pl.DataFrame({"user": n * 7 % 4001, "item": n * 11 % 2503})
    return frame.with_columns(click=(n * 13 % 5 == 0).cast(pl.Int64), at=FIRST + n)


def log(base: str, out: str) -> None:
    """Log the teacher to the end, from wherever the side table stands."""
    run = zg.load_run(f"{base}/big")
    logging.CHUNK_ROWS = PART_ROWS  # so that each chunk is a part
    mark_begin(Path(base))
    log_teacher(run, f"{base}/new.parquet", out=out, rows_per_part=PART_ROWS)


def files_of(folder: Path) -> dict[str, bytes]:
    """The files of a side table of one version, which has each example once."""
    (version,) = versions_in(folder)
    table = pl.concat([pl.from_arrow(pq.read_table(part)) for part in version.parts])  # type: ignore[type-var]
    assert isinstance(table, pl.DataFrame)
    assert table["example"].n_unique() == table.height == NUM_ROWS
    assert len(version.parts) == NUM_ROWS // PART_ROWS
    return {path.name: path.read_bytes() for path in version.path.iterdir()}


class Reader(Polling):
    """Opens the side table all the time."""

    def __init__(self, folder: Path) -> None:
        super().__init__(pause_s=0.01)
        self._folder = folder
        self.most = 0

    def look(self) -> None:
        """Read all that was logged."""
        if not self._folder.is_dir():
            return
        try:
            for version in versions_in(self._folder):
                index, logits = version.logits()
                assert len(index) == len(logits)
                assert np.isfinite(logits).all()
                assert len(index) >= self.most
                self.most = len(index)
        except MissingFileError:  # the folder is there before its first version
            return
        except (ZigguratError, AssertionError) as error:
            self.problems.append(f"{type(error).__name__}: {error}")


def kill_once(base: Path, out: Path, *, rng: random.Random, longest_s: float) -> bool:
    process = _context.Process(target=log, args=(str(base), str(out)))
    process.start()
    wait_for_begin(process, base)
    return kill_after(process, rng.uniform(0.0, longest_s), longest_s=300)


def check_kills(base: Path, *, kills: int, seed: int) -> dict[str, int]:
    preload()
    rows(2_000).write_parquet(base / "old.parquet")
    rows(NUM_ROWS, first=2_000).write_parquet(base / "new.parquet")
    embedding = zg.EmbeddingConfig(kernel=KernelChoice.TORCH)
    config = zg.table_run(zg.DNNConfig(embedding_dim=4, embedding=embedding), SCHEMA)
    data = replace(config.data, train=(str(base / "old.parquet"),))
    training = replace(config.training, epochs=1, threads=1, precision=Precision.FP32)
    zg.train_run(replace(config, data=data, training=training), folder=base / "big")
    begin = time.monotonic()
    log(str(base), str(base / "whole"))
    longest_s = time.monotonic() - begin
    whole = files_of(base / "whole")
    rng = random.Random(seed)
    counts = {"kills": 0, "tables": 0, "begun": 0}
    while counts["kills"] < kills:
        counts["tables"] += 1
        out = base / f"cut-{counts['tables']}"
        with Reader(out) as reader:
            while counts["kills"] < kills and kill_once(base, out, rng=rng, longest_s=longest_s):
                counts["kills"] += 1
                counts["begun"] += reader.most > 0
            log(str(base), str(out))
        assert reader.problems == []
        found = files_of(out)
        assert found.keys() == whole.keys()  # nothing is left of those that were killed
        assert found == whole
    return counts


@pytest.mark.slow
def test_kills_while_a_teacher_is_logged_lose_no_example_and_bring_none_twice(tmp_path: Path) -> None:
    counts = check_kills(tmp_path, kills=40, seed=3)
    assert counts["begun"] > 5, counts
    print(f"\n{counts}: the side table of one that was left alone")


def test_a_killed_logging_goes_on_to_the_same_side_table(tmp_path: Path) -> None:
    assert check_kills(tmp_path, kills=2, seed=1)["kills"] == 2
