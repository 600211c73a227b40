"""Ranks that find different devices: all say which, before a process group is made, and none waits for another."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.end_to_end.test_stopped_ranks import free_port
from tests.parallel.test_device import gpus
from ziggurat import recipe_named
from ziggurat.errors import ConfigError, TopologyError, ZigguratError
from ziggurat.parallel.device import Device
from ziggurat.parallel.job import job, join_job, same_device
from ziggurat.runs.many_ranks import Ranks
from ziggurat.testing.ranks import run_ranks

# name: GPUs that each rank sees, what each is told to compute on, what every rank must say
CASES: dict[str, tuple[tuple[int, int], tuple[Device, Device], tuple[str, ...]]] = {
    "one sees none": (
        (2, 0),
        (Device.AUTO, Device.AUTO),
        (
            "--device auto: cuda (GPU 0) on rank 0",
            "--device auto: cpu (no GPU) on rank 1",
            "rank 1 of 2, unlike rank 0",
        ),
    ),
    "one has too few": (
        (1, 2),
        (Device.AUTO, Device.AUTO),
        ("cpu (1 GPU for 2 ranks on this host) on rank 0", "cuda (GPU 1) on rank 1"),
    ),
    "one was told": ((2, 2), (Device.CPU, Device.AUTO), ("--device cpu: cpu (as configured) on rank 0", "rank 1")),
    "one must and cannot": ((2, 0), (Device.CUDA, Device.CUDA), ("--device cuda: no GPU on rank 1", "rank 1 of 2")),
    "both must and cannot": ((0, 0), (Device.CUDA, Device.CUDA), ("a GPU for each of 2 ranks", "--device cuda")),
    "other reasons, one kind": ((1, 0), (Device.AUTO, Device.AUTO), ("cpu",)),
}


@contextlib.contextmanager
def seeing(count: int) -> Any:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    with mock.patch("torch.backends.cuda.is_built", return_value=True), gpus(count):
        yield


def said_of_devices(rank: int, folder: str) -> list[str]:
    said = []
    for number, (seen, wanted, _) in enumerate(CASES.values()):
        store = dist.FileStore(f"{folder}/{number}", 2)
        store.set_timeout(timedelta(seconds=20))
        with seeing(seen[rank]):
            try:
                said.append(same_device(wanted[rank], store=store, rank=rank, world_size=2).device.type)
            except ConfigError as error:
                said.append(str(error))
    return said


def test_ranks_with_different_devices_are_named_by_all(tmp_path: Path) -> None:
    answers = run_ranks(said_of_devices, 2, str(tmp_path))
    for said in answers:
        for (name, (_, _, words)), text in zip(CASES.items(), said, strict=True):
            assert all(word in text for word in words), (name, text)
            assert name.endswith("one kind") or ("expected:" in text and "ways out:" in text), (name, text)


def starts(rank: int, port: int, folder: str, joined: bool) -> tuple[str, bool]:
    """What a start says, and whether a process group was made."""
    if not joined:
        dist.barrier()
        dist.destroy_process_group()
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    config = recipe_named("movielens_dlrm")
    try:
        with seeing((2, 0)[rank]), job(device=config.device, timeout_s=20.0):
            Ranks(config, plan=None)
        return "no error", dist.is_initialized()
    except ZigguratError as error:
        return f"{type(error).__name__} {error}", dist.is_initialized()
    finally:
        if not joined:
            dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/end", 2), rank=rank, world_size=2)


def test_a_job_is_not_joined_and_a_group_that_is_there_is_not_used(tmp_path: Path) -> None:
    for joined in (False, True):
        for text, was_made in run_ranks(starts, 2, free_port(), str(tmp_path), joined):
            assert text.startswith("ConfigError"), text
            assert was_made is joined
            assert "--device" in text
            assert "rank 1 of 2, unlike rank 0" in text


@pytest.mark.parametrize("changed", [{"MASTER_ADDR": ""}, {"WORLD_SIZE": "two"}])
def test_half_an_environment_is_named(monkeypatch: pytest.MonkeyPatch, changed: dict[str, str]) -> None:
    for name, value in (
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"} | changed
    ).items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    with pytest.raises(TopologyError, match="what torchrun sets"):
        join_job(timeout_s=1.0)


_RANK = """
import os, time
from ziggurat.parallel.lost_ranks import end_with_launcher
end_with_launcher()
print(os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone ends a process with its parent")
def test_a_rank_ends_when_its_torchrun_is_killed() -> None:
    launch = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    for is_of_torchrun in (True, False):
        given = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"}
        given |= {"TORCHELASTIC_RUN_ID": "none"} if is_of_torchrun else {}
        with subprocess.Popen([sys.executable, "-c", launch, _RANK], env=given, stdout=subprocess.PIPE) as launcher:
            assert launcher.stdout is not None
            rank = int(launcher.stdout.readline())
            launcher.kill()
            ended = select.select([launcher.stdout], [], [], 10.0 if is_of_torchrun else 0.5)[
                0
            ]  # its end closes the pipe
            assert bool(ended) is is_of_torchrun
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
