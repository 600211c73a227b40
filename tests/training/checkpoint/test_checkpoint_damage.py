"""Flipped, cut, missing, swapped: every damage is found and named, and the checkpoint before is loaded."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.training.checkpoint.checkpoint_cases import SYNC, assert_loads, assert_same, save_steps, state_of, tensors_of
from ziggurat.errors import CheckpointError
from ziggurat.training.checkpoint import CheckpointConfig, CheckpointStore, DamagedCheckpointError, SaveMode

FILES = ("SHA256SUMS", "manifest.json", "rank-00000.safetensors", "state.json")


@pytest.fixture
def newest(tmp_path: Path) -> Path:
    """The newer of two checkpoints."""
    save_steps(tmp_path, range(1, 3))
    return tmp_path / "step-000000000002"


def assert_falls_back(newest: Path, named: str) -> None:
    """Loading reports the damage, names the file, and uses the checkpoint before."""
    store = CheckpointStore(newest.parent)
    checkpoint = store.load()
    assert checkpoint.step == 1
    (error,) = checkpoint.skipped
    assert isinstance(error, DamagedCheckpointError)
    assert named in str(error)
    assert newest.name in error.where
    assert_same(checkpoint.tensors, tensors_of(1))
    assert checkpoint.state == state_of(1)
    into = tensors_of(3)
    before = tensors_of(3)
    with pytest.raises(CheckpointError, match=named):
        store.load(2, into=into)
    assert_same(into, before)
    with pytest.raises(CheckpointError, match=named):
        store.verify(2)


def flip_bits(newest: Path, *, count: int) -> None:
    """Flip single bits, half of them in the small files, and undo each."""
    randomness = random.Random(count)
    for index in range(count):
        path = newest / FILES[index % len(FILES)]
        data = path.read_bytes()
        position = randomness.randrange(len(data))
        flipped = bytearray(data)
        flipped[position] ^= 1 << randomness.randrange(8)
        path.write_bytes(flipped)
        assert_falls_back(newest, path.name)
        path.write_bytes(data)


def truncate(newest: Path, *, count: int) -> None:
    """Cut files at random lengths, to nothing and by one byte among them, and undo each."""
    randomness = random.Random(count)
    for index in range(count):
        path = newest / FILES[index % len(FILES)]
        data = path.read_bytes()
        length = [0, len(data) - 1, randomness.randrange(len(data))][min(index // len(FILES), 2)]
        path.write_bytes(data[:length])
        assert_falls_back(newest, path.name)
        path.write_bytes(data)


def test_sixty_flipped_bits(newest: Path) -> None:
    flip_bits(newest, count=60)
    assert_loads(newest.parent, 2)


def test_thirty_truncations(newest: Path) -> None:
    truncate(newest, count=30)
    assert_loads(newest.parent, 2)


@pytest.mark.slow
def test_two_thousand_flipped_bits(newest: Path) -> None:
    flip_bits(newest, count=2000)
    assert_loads(newest.parent, 2)


@pytest.mark.slow
def test_five_hundred_truncations(newest: Path) -> None:
    truncate(newest, count=500)
    assert_loads(newest.parent, 2)


def flip_every_byte(folder: Path, *, bits: range) -> None:
    """Flip bits of every single byte of a tiny checkpoint."""
    store = CheckpointStore(folder, config=SYNC)
    for step in (1, 2):
        store.save(step, tensors={"w": torch.ones(1)}, state={"a": step})
    for path in sorted((folder / "step-000000000002").iterdir()):
        data = path.read_bytes()
        for position in range(len(data)):
            for bit in bits:
                flipped = bytearray(data)
                flipped[position] ^= 1 << (position + bit) % 8
                path.write_bytes(flipped)
                with pytest.raises(DamagedCheckpointError, match=path.name):
                    store.verify(2)
        path.write_bytes(data)
    store.verify(2)


def test_a_bit_of_every_byte(tmp_path: Path) -> None:
    flip_every_byte(tmp_path, bits=range(1))


@pytest.mark.slow
def test_every_bit_of_every_byte(tmp_path: Path) -> None:
    flip_every_byte(tmp_path, bits=range(8))


@pytest.mark.parametrize("name", FILES)
def test_missing_file(newest: Path, name: str) -> None:
    (newest / name).unlink()
    assert_falls_back(newest, name)


@pytest.mark.parametrize("name", FILES)
def test_appended_bytes(newest: Path, name: str) -> None:
    with (newest / name).open("ab") as file:
        file.write(b"\n")
    assert_falls_back(newest, name)


@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.safetensors", "state.json"])
def test_file_of_an_older_checkpoint(newest: Path, name: str) -> None:
    shutil.copy(newest.parent / "step-000000000001" / name, newest / name)
    assert_falls_back(newest, name)


def test_old_manifest_with_its_sums_and_new_shard(newest: Path) -> None:
    for name in ("manifest.json", "SHA256SUMS"):
        shutil.copy(newest.parent / "step-000000000001" / name, newest / name)
    assert_falls_back(newest, "manifest.json")


def test_checkpoints_with_exchanged_names(newest: Path) -> None:
    older = newest.parent / "step-000000000001"
    older.rename(newest.parent / "aside")
    newest.rename(older)
    (newest.parent / "aside").rename(newest)
    with pytest.raises(CheckpointError, match="2 damaged") as caught:
        CheckpointStore(newest.parent).load()
    assert "step 2, as the folder is called" not in caught.value.found
    assert "step-000000000002/manifest.json: step 1" in caught.value.found


def _symlink(path: Path) -> None:
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real"))


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("replace", [_symlink, _folder, _pipe])
def test_links_folders_and_pipes_are_refused(newest: Path, name: str, replace: Callable[[Path], None]) -> None:
    replace(newest / name)
    assert_falls_back(newest, name)


def test_a_linked_checkpoint_folder_is_refused(newest: Path) -> None:
    newest.rename(newest.parent / "elsewhere")
    newest.symlink_to(newest.parent / "elsewhere")
    assert_falls_back(newest, "symbolic link")


def test_an_empty_checkpoint_folder(newest: Path) -> None:
    shutil.rmtree(newest)
    newest.mkdir()
    assert_falls_back(newest, "SHA256SUMS")


def test_a_file_with_the_name_of_a_checkpoint(newest: Path) -> None:
    shutil.rmtree(newest)
    newest.touch()
    assert_falls_back(newest, newest.name)


def test_damage_in_several_checkpoints_falls_back_further(tmp_path: Path) -> None:
    save_steps(tmp_path, range(1, 5))
    for step, name in ((2, "state.json"), (3, "manifest.json"), (4, "rank-00000.safetensors")):
        (tmp_path / f"step-{step:012d}" / name).write_bytes(b"x")
    checkpoint = CheckpointStore(tmp_path).load()
    assert checkpoint.step == 1
    assert [Path(error.where).parent.name[-1] for error in checkpoint.skipped] == ["4", "3", "2"]
    assert_same(checkpoint.tensors, tensors_of(1))


def test_a_run_goes_on_behind_damaged_checkpoints(tmp_path: Path) -> None:
    save_steps(tmp_path, range(1, 5))
    for step in (3, 4):
        (tmp_path / f"step-{step:012d}" / "state.json").unlink()
    store = CheckpointStore(tmp_path, config=SYNC)
    assert store.load().step == 2
    store.save(3, tensors=tensors_of(3), state=state_of(3))
    assert store.steps() == [1, 2, 3]  # the damaged step 4 belongs to a past that did not happen
    assert_loads(tmp_path, 3)


def test_pruning_never_leaves_only_damaged_checkpoints(tmp_path: Path) -> None:
    save_steps(tmp_path, range(1, 4))
    for step in (2, 3):
        (tmp_path / f"step-{step:012d}" / "state.json").unlink()
    store = CheckpointStore(tmp_path, config=CheckpointConfig(keep=1, mode=SaveMode.SYNC))
    assert store.load().step == 1
    store.save(2, tensors=tensors_of(2), state=state_of(2))
    assert store.steps() == [2]
    assert_loads(tmp_path, 2)


def test_unreadable_blocks_fall_back(newest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = newest / "rank-00000.safetensors"
    real, inode = os.readv, path.stat().st_ino

    def readv(descriptor: int, buffers: list) -> int:
        if os.fstat(descriptor).st_ino == inode:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, buffers)

    monkeypatch.setattr(os, "readv", readv)
    assert_falls_back(newest, path.name)
