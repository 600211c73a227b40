"""kill -9 at random points of a training run, half of them while a checkpoint is being written.

However often and wherever a run is killed, it resumes, and ends with the same bits as one that was left alone: final
weights, metrics, every logged loss, and the ledger that proves that each row was trained exactly once an epoch.
A fork server with torch loaded starts each life of the run in a fraction of a second.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest

from tests.end_to_end import chaos_run
from ziggurat.data.encoded.ledger import Ledger, expected_sum

_context = mp.get_context("forkserver")

MAX_LIFE_S = 120.0


def start(folder: Path) -> BaseProcess:
    process = _context.Process(target=chaos_run.train, args=(str(folder),))
    process.start()
    return process


def is_writing(checkpoints: Path) -> bool:
    """Whether a save is under way: something in the folder that is not a complete checkpoint."""
    try:
        return any(name.startswith(".") and "partial" in name for name in os.listdir(checkpoints))
    except FileNotFoundError:
        return False


def kill_once(folder: Path, *, rng: random.Random, while_writing: bool, longest_s: float) -> bool:
    """Start a life of the run and kill it; False if it came to its end before."""
    process = start(folder)
    deadline = time.monotonic() + rng.uniform(0.05, longest_s)
    give_up = time.monotonic() + MAX_LIFE_S
    while process.is_alive():
        now = time.monotonic()
        if now > deadline and (not while_writing or is_writing(folder / "checkpoints")):
            break
        assert now < give_up, "the run hangs"
        time.sleep(0.0005)
    process.kill()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL), f"the run failed with exit status {process.exitcode}"
    return process.exitcode == -signal.SIGKILL


def chaos(tmp_path: Path, *, kills: int, seed: int) -> dict[str, int]:
    """Kill runs until there were `kills`; every run that ends is compared with the one left alone."""
    rng = random.Random(seed)
    whole = tmp_path / "whole"
    begin = time.monotonic()
    process = start(whole)
    process.join(MAX_LIFE_S)
    assert process.exitcode == 0
    alone_s = time.monotonic() - begin
    expected = chaos_run.outcome(whole)
    rows = np.arange(chaos_run.NUM_ROWS)
    with Ledger(whole / "ledger.bin") as ledger:
        report = ledger.verify(num_rows=len(rows), row_sum=expected_sum(rows))
    assert report.good
    assert [epoch.exact for epoch in report.epochs] == [True] * 3
    counts = {"kills": 0, "while_writing": 0, "runs": 0}
    while counts["kills"] < kills:
        folder = tmp_path / f"run{counts['runs']}"
        lives = 0
        while counts["kills"] < kills and lives < 12:
            while_writing = counts["kills"] % 2 == 0
            if not kill_once(folder, rng=rng, while_writing=while_writing, longest_s=max(0.3, alone_s / 2)):
                break
            lives += 1
            counts["kills"] += 1
            counts["while_writing"] += while_writing
        last = start(folder)
        last.join(MAX_LIFE_S)
        assert last.exitcode == 0
        assert chaos_run.outcome(folder) == expected
        counts["runs"] += 1
    return counts


def test_four_kills(tmp_path: Path) -> None:
    counts = chaos(tmp_path, kills=4, seed=1)
    assert counts["while_writing"] == 2


@pytest.mark.slow
@pytest.mark.chaos
def test_two_hundred_kills(tmp_path: Path) -> None:
    counts = chaos(tmp_path, kills=200, seed=int(time.time()))
    print(
        f"\n{counts['kills']} kills ({counts['while_writing']} while a checkpoint was being written), "
        f"{counts['runs']} runs ended, all bit-identical to the run left alone"
    )
    assert counts["while_writing"] == 100
