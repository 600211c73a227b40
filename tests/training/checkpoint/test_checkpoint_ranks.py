"""Several ranks: shards saved on four and loaded on three, two or one, and errors that all ranks tell."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from tests.training.checkpoint.checkpoint_cases import SYNC, assert_same, bits
from ziggurat.errors import CheckpointError
from ziggurat.testing.ranks import RankFailure, run_ranks
from ziggurat.training.checkpoint import (
    CheckpointConfig,
    CheckpointReader,
    CheckpointStore,
    CheckpointWriter,
    Match,
    SaveMode,
)


def whole_tensors() -> dict[str, Tensor]:
    """The tensors as one process would hold them."""
    random = torch.Generator().manual_seed(0)
    return {
        "rows": torch.randn(10, 6, generator=random),
        "columns": torch.randn(5, 10, generator=random),
        "few rows": torch.randn(2, 3, generator=random),
        "one element": torch.randn(1, generator=random),
        "no rows": torch.empty(0, 4),
        "both": torch.randn(7, 9, generator=random),
        "half": torch.randn(9, 4, generator=random).bfloat16(),
        "counts": torch.randint(0, 2**60, (11,), generator=random),
        "replicated": torch.randn(3, 3, generator=random),
        "plain": torch.randn(4, 4, generator=random),
        "scalar": torch.tensor(2.5),
    }


def local_part(whole: Tensor, mesh: DeviceMesh, placements: list[Placement]) -> Tensor:
    """What this rank holds of a tensor: torch's rule is `torch.chunk` along each mesh axis, then nothing."""
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            chunks = whole.chunk(mesh.size(axis), dim=placement.dim)
            index = mesh.get_local_rank(axis)
            whole = chunks[index] if index < len(chunks) else whole.narrow(placement.dim, 0, 0)
    return whole.clone()


def sharded(whole: dict[str, Tensor], world_size: int, *, turned: bool = False) -> dict[str, Tensor]:
    """The tensors as this rank holds them; `turned` shards along other dimensions."""
    mesh = init_device_mesh("cpu", (world_size,))
    square = init_device_mesh("cpu", (2, world_size // 2) if world_size % 2 == 0 else (1, world_size))
    first, second = (1, 0) if turned else (0, 1)
    places: dict[str, tuple[DeviceMesh, list[Placement]]] = {
        "rows": (mesh, [Shard(first)]),
        "columns": (mesh, [Shard(second)]),
        "few rows": (mesh, [Shard(0)]),
        "one element": (mesh, [Shard(0)]),
        "no rows": (mesh, [Shard(0)]),
        "half": (mesh, [Shard(first)]),
        "counts": (mesh, [Shard(0)]),
        "replicated": (mesh, [Replicate()]),
        "both": (square, [Shard(first), Shard(second)]),
    }
    return {
        name: DTensor.from_local(
            local_part(tensor, *places[name]),
            *places[name],
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
        if name in places
        else tensor.clone()
        for name, tensor in whole.items()
    }


def assert_holds(found: Tensor, whole: Tensor, name: str) -> None:
    """What this rank holds is its part of `whole`, to the bit."""
    if isinstance(found, DTensor):
        whole = local_part(whole, found.device_mesh, list(found.placements))
        found = found.to_local()
    assert found.shape == whole.shape, name
    assert bits(found) == bits(whole), name


def _save(rank: int, folder: str, mode: SaveMode) -> list[str]:
    world_size = dist.get_world_size()
    tensors = sharded(whole_tensors(), world_size)
    tensors[f"rng.rank{rank}"] = torch.full((3,), rank, dtype=torch.uint8)
    if rank == world_size - 1:
        tensors["table of the last rank"] = torch.arange(6.0).view(2, 3)
    with CheckpointStore(folder, config=CheckpointConfig(mode=mode)) as store:
        store.save(5, tensors=tensors, state={"epoch": 1})
        for tensor in tensors.values():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
        for _ in range(20):
            dist.all_reduce(torch.ones(10))  # training goes on beside the background thread
    return sorted(path.name for path in Path(folder).glob("step-*/*"))


def _load(rank: int, folder: str) -> int:
    world_size = dist.get_world_size()
    whole = whole_tensors()
    into = sharded({name: torch.ones_like(tensor) for name, tensor in whole.items()}, world_size, turned=True)
    if rank == 0:
        into["table of the last rank"] = torch.zeros(2, 3)
        into |= {f"rng.rank{other}": torch.zeros(3, dtype=torch.uint8) for other in range(4)}
    checkpoint = CheckpointStore(folder).load(into=into)
    assert checkpoint.state == {"epoch": 1}
    for name, tensor in whole.items():
        assert_holds(into[name], tensor, name)
    if rank == 0:
        assert bits(into["table of the last rank"]) == bits(torch.arange(6.0))
        assert [int(into[f"rng.rank{other}"][0]) for other in range(4)] == [0, 1, 2, 3]
    fresh = CheckpointStore(folder).load(5).tensors
    assert bits(fresh["both"]) == bits(whole["both"])
    return checkpoint.step


@pytest.mark.parametrize("mode", SaveMode)
def test_saved_on_four_ranks_loaded_on_fewer(tmp_path: Path, mode: SaveMode) -> None:
    (files, *_) = run_ranks(_save, 4, str(tmp_path), mode)
    assert files == [
        "SHA256SUMS",
        "manifest.json",
        *(f"rank-{rank:05d}.safetensors" for rank in range(4)),
        "state.json",
    ]
    for world_size in (3, 2):
        assert run_ranks(_load, world_size, str(tmp_path)) == [5] * world_size
    found = CheckpointStore(tmp_path).load().tensors
    assert_same({name: found[name] for name in whole_tensors()}, whole_tensors())
    for path in (tmp_path / "step-000000000005").glob("rank-*"):
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_END)
            file.write(bytes([byte ^ 1]))
        with pytest.raises(CheckpointError, match=path.name):
            CheckpointStore(tmp_path).verify(5)
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(bytes([byte]))
    CheckpointStore(tmp_path).verify(5)


def test_saved_by_one_process_loaded_on_four_ranks(tmp_path: Path) -> None:
    tensors = whole_tensors() | {f"rng.rank{rank}": torch.full((3,), rank, dtype=torch.uint8) for rank in range(4)}
    tensors["table of the last rank"] = torch.arange(6.0).view(2, 3)
    CheckpointStore(tmp_path, config=SYNC).save(5, tensors=tensors, state={"epoch": 1})
    assert run_ranks(_load, 4, str(tmp_path)) == [5] * 4


def test_files_of_ranks_swapped(tmp_path: Path) -> None:
    run_ranks(_save, 4, str(tmp_path), SaveMode.SYNC)
    folder = tmp_path / "step-000000000005"
    first, second = folder / "rank-00001.safetensors", folder / "rank-00002.safetensors"
    first.rename(folder / "aside")
    second.rename(first)
    (folder / "aside").rename(second)
    with pytest.raises(CheckpointError, match="rank-00001"):
        CheckpointStore(tmp_path).load(5)


def _one_rank_has_a_full_disk(rank: int, folder: str) -> list[str]:
    store = CheckpointStore(folder)
    tensors = sharded(whole_tensors(), 4)
    store.save(1, tensors=tensors, state={})
    store.wait()
    real = os.write

    def write(descriptor: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.write = write if rank == 2 else real
    told = ""
    try:
        store.save(2, tensors=tensors, state={})
        store.wait()
    except CheckpointError as error:
        told = str(error)
    os.write = real
    assert store.steps() == [1]
    store.save(3, tensors=tensors, state={})
    assert store.load().step == 3
    return told.splitlines()


def test_all_ranks_tell_of_the_full_disk_of_one(tmp_path: Path) -> None:
    for rank, told in enumerate(run_ranks(_one_rank_has_a_full_disk, 4, str(tmp_path))):
        assert told[1] == "found:    No space left on device"
        assert "rank-00002.safetensors" in told[2]
        assert ("(rank 2)" in told[2]) == (rank != 2)


CASES = {  # what differs on two ranks → what both must say
    "shape": "shape (3,)",
    "dtype": "float64",
    "sharding": "sharded",
    "state": "the same state",
    "step": "the same step",
    "partial": "partial sums",
    "object": "state['x']",
}


def _differing(case: str, rank: int) -> tuple[int, dict[str, Tensor], dict]:
    mesh = init_device_mesh("cpu", (2,))
    whole, half = torch.ones(2), torch.ones(1)
    tensors: dict[str, dict[int, Tensor]] = {
        "shape": {0: whole, 1: torch.ones(3)},
        "dtype": {0: whole, 1: whole.double()},
        "sharding": {0: whole, 1: DTensor.from_local(half, mesh, [Shard(0)], run_check=False)},
        "partial": dict.fromkeys((0, 1), DTensor.from_local(whole, mesh, [Partial()], run_check=False)),
    }
    states = {"state": {"rank": rank}, "object": {"x": object() if rank else 1}}
    return 1 + rank * (case == "step"), {"w": tensors.get(case, {}).get(rank, whole)}, states.get(case, {})


def _different_tensors(rank: int, folder: str) -> dict[str, str]:
    told = {}
    for case in CASES:
        store = CheckpointStore(Path(folder) / case, config=SYNC)
        step, tensors, state = _differing(case, rank)
        try:
            store.save(step, tensors=tensors, state=state)
        except CheckpointError as error:
            told[case] = str(error)
        assert store.steps() == []
        store.save(1, tensors={"w": torch.ones(2)}, state={})
    return told


def test_ranks_that_disagree_all_say_so(tmp_path: Path) -> None:
    for told in run_ranks(_different_tensors, 2, str(tmp_path)):
        for case, words in CASES.items():
            assert words in told[case]


def _save_two(rank: int, folder: str) -> None:
    with CheckpointStore(folder) as store:
        for step in (1, 2):
            store.save(step, tensors=sharded(whole_tensors(), 2), state={})


def _load_each(rank: int, folder: str, names: list[str]) -> list[tuple[int, str]]:
    outcomes = []
    for name in names:
        into = sharded({name: torch.zeros_like(tensor) for name, tensor in whole_tensors().items()}, 2)
        checkpoint = CheckpointStore(Path(folder) / name).load(into=into)
        for tensor_name, tensor in whole_tensors().items():
            assert_holds(into[tensor_name], tensor, tensor_name)
        (error,) = checkpoint.skipped
        outcomes.append((checkpoint.step, error.where.split("(")[0].strip()))
    return outcomes


def test_all_ranks_fall_back_together(tmp_path: Path) -> None:
    names = ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors", "state.json"]
    run_ranks(_save_two, 2, str(tmp_path / "intact"))
    expected = []
    for name in names:
        shutil.copytree(tmp_path / "intact", tmp_path / name)
        path = tmp_path / name / "step-000000000002" / name
        path.write_bytes(path.read_bytes()[:-1])
        expected.append((1, str(path)))
    assert run_ranks(_load_each, 2, str(tmp_path), names) == [expected] * 2


def _a_rank_dies_in_a_save(rank: int, folder: str) -> None:
    store = CheckpointStore(folder)
    store.save(1, tensors=sharded(whole_tensors(), 3), state={})
    store.wait()
    if rank == 1:
        os.write = lambda *_: os._exit(3)
    start = time.monotonic()
    try:
        store.save(2, tensors=sharded(whole_tensors(), 3), state={})
        store.wait()
    except CheckpointError as error:
        (Path(folder) / f"told.{rank}").write_text(f"{time.monotonic() - start} {error}")
    time.sleep(1)


def test_a_rank_that_dies_in_a_save(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="rank 1"):
        run_ranks(_a_rank_dies_in_a_save, 3, str(tmp_path))
    store = CheckpointStore(tmp_path)
    assert store.steps() == [1]
    assert store.load().step == 1


def _own_group(rank: int, folder: str) -> int:
    pair = dist.new_group([1, 2])
    if rank in (1, 2):
        assert isinstance(pair, dist.ProcessGroup)
        with CheckpointStore(folder, process_group=pair) as store:
            store.save(1, tensors={"w": torch.ones(3), f"of rank {rank}": torch.tensor(rank)}, state={})
        checkpoint = CheckpointStore(folder, process_group=pair).load()
        return int(checkpoint.tensors["of rank 1"]) + int(checkpoint.tensors["of rank 2"])
    return 0


def test_a_group_of_some_ranks(tmp_path: Path) -> None:
    assert run_ranks(_own_group, 4, str(tmp_path)) == [0, 3, 3, 0]


def _sharded_tensors(rank: int, folder: str, *, saving: bool) -> list[np.ndarray]:
    from torch.distributed._shard.sharded_tensor import init_from_local_shards
    from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard

    whole = torch.arange(10.0 * 4).view(10, 4)
    cuts = [0, 7, 10] if saving else [0, 2, 4, 10]
    mine = whole[cuts[rank] : cuts[rank + 1]].clone() if saving else torch.zeros(cuts[rank + 1] - cuts[rank], 4)
    shard = LocalShard.from_tensor_and_offsets(mine, [cuts[rank], 0], rank)
    tensors: dict = {"table": init_from_local_shards([shard], 10, 4)}
    store = CheckpointStore(folder, config=SYNC)
    if saving:
        store.save(1, tensors=tensors, state={})
    else:
        store.load(into=tensors)
    return [mine.numpy()]


def _save_sharded_tensors(rank: int, folder: str) -> None:
    _sharded_tensors(rank, folder, saving=True)


def _load_sharded_tensors(rank: int, folder: str) -> list[np.ndarray]:
    return _sharded_tensors(rank, folder, saving=False)


def test_sharded_tensors_of_uneven_rows(tmp_path: Path) -> None:
    run_ranks(_save_sharded_tensors, 2, str(tmp_path))
    whole = np.arange(40, dtype=np.float32).reshape(10, 4)
    parts = run_ranks(_load_sharded_tensors, 3, str(tmp_path))
    assert np.array_equal(np.concatenate([part[0] for part in parts]), whole)
    assert np.array_equal(CheckpointStore(tmp_path).load().tensors["table"].numpy(), whole)


def _through_torch(rank: int, folder: str) -> dict:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(12.0).view(6, 2)
    weight = DTensor.from_local(local_part(whole, mesh, [Shard(0)]), mesh, [Shard(0)], run_check=False)
    state = {"model": {"weight": weight, "layers": [torch.ones(3), torch.full((2,), 2.0)]}}
    dcp.save(state, storage_writer=CheckpointWriter(folder, step=4, state={"epoch": 2}))
    turned = DTensor.from_local(torch.zeros(6, 1), mesh, [Shard(1)], run_check=False)
    layers = [torch.zeros(3), torch.zeros(2)]
    dcp.load({"model": {"weight": turned, "layers": layers}}, storage_reader=CheckpointReader(folder))
    assert_holds(turned, whole, "weight")
    assert [float(layer.sum()) for layer in layers] == [3.0, 4.0]
    # Torch's own error is no Exception.
    with pytest.raises(CheckpointException, match="'object' is not one"):
        dcp.save({"w": weight, "object": "text"}, storage_writer=CheckpointWriter(folder, step=4))
    return CheckpointReader(folder).state()


def test_below_torchs_own_entry_points(tmp_path: Path) -> None:
    folder = tmp_path / "step-000000000004"
    assert run_ranks(_through_torch, 2, str(folder)) == [{"epoch": 2}] * 2
    tensors = CheckpointStore(tmp_path).load().tensors
    assert set(tensors) == {"model.weight", "model.layers.0", "model.layers.1"}
    assert torch.equal(tensors["model.weight"], torch.arange(12.0).view(6, 2))


def _partly(rank: int, folder: str) -> float:
    into = {"w": torch.zeros(2)} if rank else {"v": torch.zeros(2)}
    store = CheckpointStore(folder)
    with pytest.raises(CheckpointError, match="no place for: 'u'"):
        store.load(into=into)
    store.load(into=into, match=Match.SUBSET)
    return sum(float(tensor.sum()) for tensor in into.values())


def test_names_are_compared_over_all_ranks(tmp_path: Path) -> None:
    tensors = {"u": torch.ones(2), "v": torch.full((2,), 2.0), "w": torch.full((2,), 3.0)}
    CheckpointStore(tmp_path, config=SYNC).save(1, tensors=tensors, state={})
    assert run_ranks(_partly, 2, str(tmp_path)) == [4.0, 6.0]
