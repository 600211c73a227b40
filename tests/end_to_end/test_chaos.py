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
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.end_to_end import chaos_run
from ziggurat.data.encoded.ledger import Ledger, expected_sum

_context = mp.get_context("forkserver")

MAX_LIFE_S = 120.0
Life = Callable[[str], None]


def start(folder: Path, life: Life = chaos_run.train) -> BaseProcess:
    process = _context.Process(target=life, args=(str(folder),))
    process.start()
    return process


def is_writing(checkpoints: Path) -> bool:
    """Whether a save is under way: something in the folder that is not a complete checkpoint."""
    try:
        return any(name.startswith(".") and "partial" in name for name in os.listdir(checkpoints))
    except FileNotFoundError:
        return False


def shares_files(checkpoints: Path) -> bool:
    """Whether a checkpoint has rows of tables that an earlier one wrote."""
    return any(len(list(step.glob("rows-*"))) > 1 for step in checkpoints.glob("step-*"))


def kill_once(folder: Path, *, rng: random.Random, while_writing: bool, longest_s: float, life: Life) -> bool:
    """Start a life of the run and kill it; False if it came to its end before."""
    process = start(folder, life)
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


@dataclass(frozen=True)
class Alone:
    """What a run in memory that nobody killed ended with, and how long it took."""

    outcome: dict[str, Any]
    seconds: float


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    whole = tmp_path_factory.mktemp("alone") / "whole"
    begin = time.monotonic()
    process = start(whole)
    process.join(MAX_LIFE_S)
    assert process.exitcode == 0
    seconds = time.monotonic() - begin
    rows = np.arange(chaos_run.NUM_ROWS)
    with Ledger(whole / "ledger.bin") as ledger:
        report = ledger.verify(num_rows=len(rows), row_sum=expected_sum(rows))
    assert report.good
    assert [epoch.exact for epoch in report.epochs] == [True] * 3
    return Alone(chaos_run.outcome(whole), seconds)


def chaos(tmp_path: Path, *, alone: Alone, kills: int, seed: int, life: Life = chaos_run.train) -> dict[str, int]:
    """Kill runs until there were `kills`; every run that ends is compared with the one left alone."""
    rng = random.Random(seed)
    counts = {"kills": 0, "while_writing": 0, "runs": 0, "sharing_files": 0}
    while counts["kills"] < kills:
        folder = tmp_path / f"run{counts['runs']}"
        lives = 0
        while counts["kills"] < kills and lives < 12:
            while_writing = counts["kills"] % 2 == 0
            longest_s = max(0.3, alone.seconds / 2)
            if not kill_once(folder, rng=rng, while_writing=while_writing, longest_s=longest_s, life=life):
                break
            lives += 1
            counts["kills"] += 1
            counts["while_writing"] += while_writing
        last = start(folder, life)
        last.join(MAX_LIFE_S)
        assert last.exitcode == 0
        assert chaos_run.outcome(folder) == alone.outcome
        counts["runs"] += 1
        counts["sharing_files"] += shares_files(folder / "checkpoints")
    return counts


def test_four_kills(tmp_path: Path, alone: Alone) -> None:
    counts = chaos(tmp_path, alone=alone, kills=4, seed=1)
    assert counts["while_writing"] == 2


def test_kills_while_rows_are_written_back_to_a_disk(tmp_path: Path, alone: Alone) -> None:
    assert chaos(tmp_path, alone=alone, kills=2, seed=2, life=chaos_run.train_on_disk)["while_writing"] == 1


@pytest.mark.slow
@pytest.mark.chaos
def test_a_hundred_kills_while_rows_are_written_back_to_a_disk(tmp_path: Path, alone: Alone) -> None:
    counts = chaos(tmp_path, alone=alone, kills=100, seed=int(time.time()), life=chaos_run.train_on_disk)
    print(
        f"\n{counts['kills']} kills of runs with tables on a disk ({counts['while_writing']} while a checkpoint was "
        f"being written), {counts['runs']} runs ended, all bit-identical to a run in memory that was left alone; "
        f"{counts['sharing_files']} of them with checkpoints that share files"
    )
    assert counts["while_writing"] == 50


@pytest.mark.slow
@pytest.mark.chaos
def test_two_hundred_kills(tmp_path: Path, alone: Alone) -> None:
    counts = chaos(tmp_path, alone=alone, kills=200, seed=int(time.time()))
    print(
        f"\n{counts['kills']} kills ({counts['while_writing']} while a checkpoint was being written), "
        f"{counts['runs']} runs ended, all bit-identical to the run left alone"
    )
    assert counts["while_writing"] == 100
