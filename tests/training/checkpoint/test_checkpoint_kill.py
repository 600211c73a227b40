"""kill -9 while saving: at every system call in turn, and at random times. An intact checkpoint always remains."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.training.checkpoint.checkpoint_cases import (
    FORKSERVER,
    SystemCalls,
    assert_same,
    save_steps,
    state_of,
    tensors_of,
)
from ziggurat.training.checkpoint import CheckpointConfig, CheckpointStore, SaveMode

KEEP_ONE = CheckpointConfig(keep=1, mode=SaveMode.SYNC)


def _die(_: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _save_and_die(folder: str, step: int, at: int) -> None:
    store = CheckpointStore(folder, config=KEEP_ONE)
    store.load()
    with SystemCalls(at=at, action=_die):
        store.save(step, tensors=tensors_of(20), state=state_of(20))


def _killed_at_every_call(folder: Path, *, step: int, stride: int) -> None:
    """Save `step` over a single checkpoint of step 1, with a kill before each system call in turn."""
    at, outcomes, left = 0, set(), set()
    while True:
        here = folder / str(at)
        save_steps(here, range(1, 2))
        process = FORKSERVER.Process(target=_save_and_die, args=(str(here), step, at))
        process.start()
        process.join()
        store = CheckpointStore(here, config=KEEP_ONE)
        left.update(name.split("-")[0] for name in store.leftovers)
        checkpoint = store.load()
        outcomes.add(20 if checkpoint.state == state_of(20) else 1)
        expected = 20 if checkpoint.state == state_of(20) else 1
        assert checkpoint.skipped == (), at
        assert checkpoint.state == state_of(expected), at
        assert_same(checkpoint.tensors, tensors_of(expected))
        store.save(step + 1, tensors=tensors_of(21), state=state_of(21))  # and life goes on
        assert store.steps() == [step + 1]
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        at += stride
    assert at > 30
    assert outcomes == {1, 20}
    assert ".partial" in left
    if stride == 1:
        assert ".pruned" in left if step > 1 else ".replaced" in left


@pytest.mark.parametrize("step", [2, 1])
def test_killed_at_system_calls_throughout_a_save(tmp_path: Path, step: int) -> None:
    _killed_at_every_call(tmp_path, step=step, stride=5)


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 1])
def test_killed_at_every_system_call_of_a_save(tmp_path: Path, step: int) -> None:
    _killed_at_every_call(tmp_path, step=step, stride=1)


def _tensors(step: int) -> dict[str, torch.Tensor]:
    return {"table": torch.full((200_000, 4), float(step)), "count": torch.tensor(step)}


def _save_for_ever(folder: str, progress) -> None:
    torch.set_num_threads(1)
    store = CheckpointStore(folder, config=CheckpointConfig(keep=2))
    step = store.load().step
    progress.send(step)
    while True:
        step += 1
        store.save(step, tensors=_tensors(step), state={"step": step})
        progress.send(step)  # which is being written now, in the background


def _killed_at_random_times(folder: Path, *, kills: int) -> None:
    """Kill a process that saves without a pause; each next one goes on from what is there."""
    randomness = random.Random(kills)
    store = CheckpointStore(folder)
    store.save(0, tensors=_tensors(0), state={"step": 0})
    store.wait()
    in_the_middle, last = 0, 0
    for kill in range(kills):
        receiver, sender = FORKSERVER.Pipe(duplex=False)
        process = FORKSERVER.Process(target=_save_for_ever, args=(str(folder), sender))
        process.start()
        sender.close()
        assert receiver.recv() == last
        for _ in range(randomness.randrange(4)):
            receiver.recv()
        time.sleep(randomness.uniform(0, 0.02))
        process.kill()
        process.join()
        store = CheckpointStore(folder)
        in_the_middle += any(name.startswith(".partial") for name in store.leftovers)
        checkpoint = store.load()
        assert checkpoint.skipped == (), kill
        assert checkpoint.step >= last
        assert checkpoint.state == {"step": checkpoint.step}
        assert_same(checkpoint.tensors, _tensors(checkpoint.step))
        for step in store.steps():
            store.verify(step)
        last = checkpoint.step
    assert in_the_middle >= kills // 4
    assert last >= kills // 4


def test_killed_ten_times(tmp_path: Path) -> None:
    _killed_at_random_times(tmp_path, kills=10)


@pytest.mark.slow
def test_killed_a_hundred_times(tmp_path: Path) -> None:
    _killed_at_random_times(tmp_path, kills=100)
