"""kill -9 at the system calls of checkpoints that link, merge, write all again and prune: the newest one is right."""

from __future__ import annotations

import itertools
import os
import signal
import traceback
from pathlib import Path

import numpy as np
import pytest

from tests.training.checkpoint.checkpoint_cases import SystemCalls, assert_same
from tests.training.checkpoint.rows.disk_tables import NUM_ROWS, WIDTH, Tables, expected, generations, manifest_of
from ziggurat.training.checkpoint import CheckpointConfig, CheckpointStore, SaveMode
from ziggurat.training.checkpoint.rows import earlier

KEEP_TWO = CheckpointConfig(keep=2, mode=SaveMode.SYNC)
STEPS = 7


def _step(tables: Tables, step: int) -> None:
    """What a step changes: all rows at first, then few, and many in the end, so that all are written again."""
    generator = np.random.default_rng(step)
    rows = np.arange(NUM_ROWS) if step == 1 else np.unique(generator.integers(0, NUM_ROWS, 6 if step < 6 else 120))
    tables.update(rows, generator.random((len(rows), WIDTH), dtype=np.float32))


def _live(folder: str, last: int, at: int) -> None:
    """Go on from the newest checkpoint to a step, with a checkpoint of each, and die at a system call."""
    earlier.MAX_GENERATIONS = 3
    tables, store = Tables(Path(folder) / "rows"), CheckpointStore(Path(folder) / "checkpoints", config=KEEP_TWO)
    first = store.load(into=tables.tensors()).step if store.steps() else 0
    with SystemCalls(at=at, action=lambda _: os.kill(os.getpid(), signal.SIGKILL)):
        for step in range(first + 1, last + 1):
            _step(tables, step)
            store.save(step, tensors=tables.tensors(), state={})


def _lived(folder: Path, *, last: int, at: int = -1) -> int:
    """A life in a process of its own; its exit status. Forked: most lives are shorter than starting an interpreter."""
    child = os.fork()
    if not child:
        try:
            _live(str(folder), last, at)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    exitcode = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert exitcode in (0, -signal.SIGKILL)
    return exitcode


def _kill_throughout(folder: Path, *, stride: int, first: int = 0) -> int:
    """Kill a run at every so many system calls of its checkpoints; each life goes on from what the one before left."""
    (folder / "rows").mkdir()
    fresh, kills, at, left = Tables(folder / "rows"), 0, first, set[str]()
    oracle = [Tables(folder / "rows")]
    for step in range(1, STEPS + 1):
        oracle.append(Tables(folder / "rows"))
        oracle[step].rows = dict(oracle[step - 1].rows)
        _step(oracle[step], step)
    while True:
        here = folder / f"{at}"
        (here / "rows").mkdir(parents=True)
        exitcode = _lived(here, last=STEPS, at=at)
        store = CheckpointStore(here / "checkpoints", config=KEEP_TWO)
        left.update(name.split("-")[0] for name in store.leftovers)
        for step in store.steps():
            store.verify(step)
        if store.steps():
            checkpoint = store.load()
            assert checkpoint.skipped == ()
            assert_same(checkpoint.tensors, expected(oracle[checkpoint.step].rows, fresh))
        assert _lived(here, last=STEPS) == 0
        assert_same(store.load().tensors, expected(oracle[STEPS].rows, fresh))
        if exitcode == 0:
            break
        kills, at = kills + 1, at + stride
    assert {".partial", ".pruned"} <= left or stride > 5
    return kills


def test_the_run_that_is_killed_links_merges_and_writes_all_again(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    found = []
    for last in range(1, STEPS + 1):
        assert _lived(tmp_path, last=last) == 0
        found.append(generations(manifest_of(tmp_path / "checkpoints", last)))
    assert found[:3] == [[1], [1, 2], [1, 2, 3]]
    assert any(len(later) <= len(before) and len(later) > 1 for before, later in itertools.pairwise(found))
    assert found[-1] == [STEPS] or found[-2] == [STEPS - 1]
    assert CheckpointStore(tmp_path / "checkpoints").steps() == [STEPS - 1, STEPS]


def test_kills_throughout_checkpoints_that_share_files(tmp_path: Path) -> None:
    assert _kill_throughout(tmp_path, stride=113, first=7) >= 3


@pytest.mark.slow
def test_kills_at_every_third_call_of_checkpoints_that_share_files(tmp_path: Path) -> None:
    assert _kill_throughout(tmp_path, stride=3) > 100
