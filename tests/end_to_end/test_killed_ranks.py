"""A rank is killed: the others stop at once, name it, and a restarted job ends with the weights of one left alone."""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import time
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.training.rank_runs import Case, die_at_step, stored, trainer_of
from ziggurat.errors import CheckpointError, TopologyError
from ziggurat.parallel.job import leave_job
from ziggurat.placements import Placement
from ziggurat.testing.ranks import run_ranks

CASE = Case(towers=True, tower_size=1, dropout=0.1)
FOUR = Case(towers=True, tower_size=2, placement=Placement.ROW_WISE, dropout=0.1)
SAW_IT = 3


def life(rank: int, world_size: int, folder: str, attempt: int, victim: int, step: int) -> None:
    """One life of one rank, as torchrun would start it; the victim is killed before a step."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    store = dist.FileStore(f"{folder}/store{attempt}", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    try:
        case = CASE if world_size == 2 else FOUR
        trainer = trainer_of(case, f"{folder}/run", world_size=world_size, checkpoint_every=3)
        die_at_step(trainer, step, dies=rank == victim)
        trainer.fit(resume=True)
        leave_job()
    except (TopologyError, CheckpointError) as error:
        Path(f"{folder}/error{attempt}_{rank}").write_text(str(error))
        os._exit(SAW_IT)


def nothing(rank: int) -> int:
    return rank


def start(world_size: int, folder: Path, *, attempt: int, victim: int = -1, step: int = -1) -> list[BaseProcess]:
    context = mp.get_context("forkserver")
    folder.mkdir(exist_ok=True)
    arguments = (world_size, str(folder), attempt, victim, step)
    processes = [context.Process(target=life, args=(rank, *arguments)) for rank in range(world_size)]
    for process in processes:
        process.start()
    return processes


def ends(processes: list[BaseProcess], *, limit_s: float = 120.0) -> list[int | None]:
    deadline = time.monotonic() + limit_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def same(left: Path, right: Path) -> None:
    one, other = stored(left / "run"), stored(right / "run")
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name]) for name in one)
    assert (left / "run/ledger.bin").read_bytes() == (right / "run/ledger.bin").read_bytes()


def test_one_kill(tmp_path: Path) -> None:
    run_ranks(nothing, 2)  # starts the fork server with everything loaded
    assert ends(start(2, tmp_path / "alone", attempt=0)) == [0, 0]
    assert ends(start(2, tmp_path / "killed", attempt=0, victim=1, step=7)) == [SAW_IT, -9]
    said = (tmp_path / "killed/error0_0").read_text()
    assert "no answer from rank 1" in said
    assert "where:    rank 0, " in said
    assert ends(start(2, tmp_path / "killed", attempt=1)) == [0, 0]
    same(tmp_path / "alone", tmp_path / "killed")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_several_kills_of_any_of_four_ranks_at_any_moment(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    run_ranks(nothing, 4)
    begin = time.monotonic()
    assert ends(start(4, tmp_path / "alone", attempt=0)) == [0] * 4
    alone_s = time.monotonic() - begin
    kills = 0
    for attempt in range(6):
        processes = start(4, tmp_path / "killed", attempt=attempt)
        time.sleep(rng.uniform(0.2, 0.8) * alone_s)
        victim = rng.randrange(4)
        processes[victim].kill()
        codes = ends(processes)
        assert codes[victim] in (0, -9)
        assert all(code in (0, 1, SAW_IT) for rank, code in enumerate(codes) if rank != victim), codes
        kills += codes[victim] == -9
    assert kills
    assert ends(start(4, tmp_path / "killed", attempt=6)) == [0] * 4
    same(tmp_path / "alone", tmp_path / "killed")
