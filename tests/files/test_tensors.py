"""Files of tensors that the system does not let be read: what users see, whatever library says it."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ziggurat.errors import FileError, MissingFileError
from ziggurat.files.tensors import load_tensors, open_tensors


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Inside, no file can be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open("/dev/null", os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    taken = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        for each in taken:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file({"a": torch.arange(4.0)}, str(tmp_path / "a.safetensors"))
    return tmp_path / "a.safetensors"


def test_tensors_are_those_that_were_written(path: Path) -> None:
    assert load_tensors(path)["a"].tolist() == [0.0, 1.0, 2.0, 3.0]
    with open_tensors(path) as file:
        assert set(file.keys()) == {"a"}
    with open_tensors(path, framework="numpy") as file:
        assert file.get_tensor("a").tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_process_without_descriptors_says_so(path: Path) -> None:
    with pytest.raises(FileError, match="Too many open files") as caught, no_descriptor_left():
        load_tensors(path)
    assert caught.value.where == str(path)
    assert "ulimit -n" in str(caught.value)
    with pytest.raises(FileError, match="Too many open files"), no_descriptor_left(), open_tensors(path):
        pass


def test_a_call_of_torch_that_the_system_refuses_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise RuntimeError(f"unable to mmap 16 bytes from file <{name}>: Cannot allocate memory (12)")

    monkeypatch.setattr("ziggurat.files.tensors.load_file", refuse)
    with pytest.raises(FileError, match="Cannot allocate memory") as caught:
        load_tensors(path)
    assert "end other programs" in str(caught.value)


def test_other_errors_are_left_to_whoever_knows_the_file(path: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        load_tensors(tmp_path / "none.safetensors")
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(SafetensorError):
        load_tensors(path)
    own = FileError(expected="the tensors of a model", found="others", where=str(path), ways_out="restore it")
    with pytest.raises(FileError, match="the tensors of a model"), open_tensors(_whole(tmp_path / "c.safetensors")):
        raise own
    with pytest.raises(RuntimeError, match="of the block"), open_tensors(_whole(tmp_path / "b.safetensors")):
        raise RuntimeError("of the block")


def _whole(path: Path) -> Path:
    save_file({"a": torch.zeros(1)}, str(path))
    return path
