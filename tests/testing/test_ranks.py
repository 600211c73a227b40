from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ziggurat.ops import cpp_build
from ziggurat.ops.cpp_build import CppSource
from ziggurat.testing import ranks
from ziggurat.testing.ranks import RankFailure, run_ranks


def rank_and_sum(rank: int, values: np.ndarray) -> tuple[int, np.ndarray, str]:
    tensor = torch.from_numpy(values) * (rank + 1)
    dist.all_reduce(tensor)
    return rank, tensor.numpy(), os.environ["WORLD_SIZE"]


def fail_on_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("the answer was not 42")
    dist.barrier()


def not_loaded(rank: int) -> list[str]:
    del rank
    return [name for name in ranks._PRELOAD if name not in sys.modules and importlib.util.find_spec(name)]


def objects_to_collect(rank: int) -> tuple[int, int]:
    """Objects that a full garbage collection looks at, and those that it leaves alone."""
    del rank
    return len(gc.get_objects()), gc.get_freeze_count()


def exit_on_one(rank: int, code: int) -> None:
    if rank == 1:
        os._exit(code)
    dist.barrier()


def kill_on_one(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang_on_one(rank: int) -> None:
    if rank == 1:
        _wait_for_godot()


def _wait_for_godot() -> None:
    time.sleep(1000)


def build_slowly(rank: int, folder: str, seconds: float) -> int:
    """Load a library from an empty cache, with a compiler that takes its time."""
    compiler = Path(folder) / f"compiler{rank}"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] || sleep {seconds}\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    source = Path(folder) / "seven.cpp"
    source.write_text('extern "C" int seven() { return 7; }\n')
    with mock.patch.object(cpp_build, "_compiler", return_value=str(compiler)):
        found = CppSource(path=source, flags=("-O0",)).load(folder=Path(folder) / "kernels")
    dist.barrier()
    return found.seven()


def build_and_hang(rank: int, folder: str) -> None:
    build_slowly(rank, folder, 0.0)
    _wait_for_godot()


def return_rank(rank: int) -> int:
    return rank


def return_unpicklable(rank: int) -> object:
    return lambda: rank


def uneven_exchange(rank: int) -> list[int]:
    world_size = dist.get_world_size()
    sizes_in = [rank + 1] * world_size
    sizes_out = [other + 1 for other in range(world_size)]
    received = torch.empty(sum(sizes_out), dtype=torch.int64)
    dist.all_to_all_single(received, torch.full((sum(sizes_in),), rank), sizes_out, sizes_in)
    return received.tolist()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_in_rank_order(world_size):
    results = run_ranks(rank_and_sum, world_size, np.arange(3.0))
    total = sum(range(1, world_size + 1))
    for rank, (found, values, size) in enumerate(results):
        assert found == rank
        assert size == str(world_size)
        np.testing.assert_array_equal(values, np.arange(3.0) * total)


def test_uneven_all_to_all_works():
    assert run_ranks(uneven_exchange, 2) == [[0, 1, 1], [0, 1, 1]]


def test_whoever_started_the_fork_server_it_has_loaded_what_ranks_import() -> None:
    assert run_ranks(not_loaded, 1) == [[]]


def test_exception_names_its_rank_and_line():
    with pytest.raises(RankFailure, match=r"(?s)rank 1 of 2 failed.*fail_on_one.*the answer was not 42"):
        run_ranks(fail_on_one, 2)


@pytest.mark.parametrize("code", [0, 3])
def test_rank_that_leaves_quietly_is_noticed_at_once(code):
    start = time.monotonic()
    with pytest.raises(RankFailure, match=f"rank 1 of 2 died without an exception: exit {code}"):
        run_ranks(exit_on_one, 2, code, timeout_s=60)
    assert time.monotonic() - start < 20


def test_killed_rank_is_noticed_at_once():
    start = time.monotonic()
    with pytest.raises(RankFailure, match="rank 1 of 2 died without an exception: killed by SIGKILL"):
        run_ranks(kill_on_one, 2, timeout_s=60)
    assert time.monotonic() - start < 20


def test_hanging_rank_is_named_with_its_stack():
    with pytest.raises(RankFailure, match=r"(?s)ranks \[1\] of 2 did not return in time.*_wait_for_godot"):
        run_ranks(hang_on_one, 2, timeout_s=2)


def test_result_that_cannot_travel_is_reported():
    with pytest.raises(RankFailure, match=r"(?s)rank \d of 2 failed.*pickle"):
        run_ranks(return_unpicklable, 2)


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_a_kernel_that_is_compiled_has_its_own_time(tmp_path: Path) -> None:
    run_ranks(return_rank, 1)  # starts the fork server
    begin_s = time.monotonic()
    run_ranks(return_rank, 2)
    alone_s = time.monotonic() - begin_s  # on a busy machine, seconds
    timeout_s = max(1.0, 3 * alone_s)
    assert run_ranks(build_slowly, 2, str(tmp_path), timeout_s + 1.0, timeout_s=timeout_s) == [7, 7]


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_the_time_of_ranks_begins_anew_after_a_build(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="did not return in time"):
        run_ranks(build_and_hang, 1, str(tmp_path), timeout_s=1.0)


def test_a_rank_collects_no_garbage_among_what_the_fork_server_loaded() -> None:
    """The memory of a module is shared until a collection writes to it, in every rank anew."""
    assert gc.isenabled()
    for collected, frozen in run_ranks(objects_to_collect, 2):
        assert frozen > 100_000
        assert collected < frozen / 10
