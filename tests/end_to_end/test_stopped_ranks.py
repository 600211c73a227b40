"""A rank stands still (SIGSTOP), or never comes: the others say so within the time limit, and end."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import socket
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

import ziggurat
from tests.end_to_end.test_main_job import SMALL, events
from tests.end_to_end.test_towers import SCHEMA
from ziggurat.cli.main import main
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.checkpoint.storage import CheckpointWriter

TRAIN = ["train", "table_dlrm", "--data.train", "events.parquet", "--schema", "my.toml", *SMALL]
TRAIN += ["--training.precision", "fp32", "--model.embedding.kernel", "torch", "--training.checkpoint-every", "1"]


def stopping_rank(rank: int, port: int, place: str, stops: bool, arguments: list[str]) -> None:
    """One rank as torchrun would start it. One that stops does so while it writes the second checkpoint."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), ZIGGURAT_CACHE=f"{place}/cache")
    os.chdir(place)
    log = os.open(f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    write, written = CheckpointWriter.write_data, []

    def write_or_stop(self: CheckpointWriter, *given: Any) -> Any:
        written.append(1)
        if stops and len(written) == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        return write(self, *given)

    CheckpointWriter.write_data = write_or_stop  # type: ignore[method-assign]
    sys.exit(main(arguments))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(place: Path, *, ranks: tuple[int, ...], stops: int, arguments: list[str]) -> list[BaseProcess]:
    place.mkdir()
    events(600).write_parquet(place / "events.parquet")
    ziggurat.write_schema(SCHEMA, place / "my.toml", comments=None)
    context, port = mp.get_context("forkserver"), free_port()
    made = []
    for rank in ranks:
        process = context.Process(target=stopping_rank, args=(rank, port, str(place), rank == stops, arguments))
        process.start()
        made.append(process)
    return made


def nothing(rank: int) -> int:
    return rank


def test_the_others_name_the_rank_and_end(tmp_path: Path) -> None:
    run_ranks(nothing, 2)  # starts the fork server with everything loaded
    arguments = [*TRAIN, "--parallel.timeout-s", "3", "--out", "runs/a"]
    jobs = {stops: start(tmp_path / f"job{stops}", ranks=(0, 1), stops=stops, arguments=arguments) for stops in (0, 1)}
    alone = start(tmp_path / "alone", ranks=(1,), stops=-1, arguments=arguments)
    deadline = time.monotonic() + 90.0
    codes = {}
    try:
        for stops, job in jobs.items():
            job[1 - stops].join(max(0.0, deadline - time.monotonic()))
            codes[stops] = (job[1 - stops].exitcode, job[stops].exitcode)
        alone[0].join(max(0.0, deadline - time.monotonic()))
        codes[-1] = (alone[0].exitcode, None)
    finally:
        for process in [*jobs[0], *jobs[1], *alone]:
            process.kill()
            process.join()
    logs = {stops: (tmp_path / f"job{stops}/rank{1 - stops}.log").read_text() for stops in (0, 1)}
    logs[-1] = (tmp_path / "alone/rank1.log").read_text()
    assert codes == {0: (2, None), 1: (2, None), -1: (2, None)}, logs
    assert "no answer from rank 1" in logs[1]
    assert "all 2 ranks to join the job within 3 s" in logs[-1]
    for text in logs.values():
        assert "TopologyError\nexpected: " in text
        assert "ways out:" in text
        assert "Traceback" not in text


@pytest.mark.slow
def test_a_long_wait_for_a_checkpoint_is_bounded(tmp_path: Path) -> None:
    run_ranks(nothing, 2)
    limits = ["--parallel.timeout-s", "60", "--training.checkpoint.timeout-s", "3"]
    job = start(tmp_path / "job", ranks=(0, 1), stops=1, arguments=[*TRAIN, *limits, "--out", "runs/a"])
    try:
        job[0].join(120.0)
        text = (tmp_path / "job/rank0.log").read_text()
        assert job[0].exitcode == 2, text
    finally:
        for process in job:
            process.kill()
            process.join()
    assert "no answer from rank 1" in text
