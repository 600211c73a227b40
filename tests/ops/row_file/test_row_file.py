"""Rows of a file come back as they were written, in C++ as in Python; holes and damage are told apart."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from ziggurat.errors import FileError
from ziggurat.ops.row_file import RowFile, RowLayout, RowState, file, reference


def some_rows(number: int, *, of: int, payload_bytes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.choice(of, number, replace=False))
    return rows, rng.integers(0, 256, (number, payload_bytes), dtype=np.uint8)


@pytest.mark.parametrize("payload_bytes", [4, 72, 4096])
def test_rows_come_back_and_others_stay_unwritten(tmp_path: Path, payload_bytes: int) -> None:
    kept = RowFile(tmp_path, num_rows=400, payload_bytes=payload_bytes)
    mirror: dict[int, bytes] = {}
    for seed in range(2):
        rows, values = some_rows(60, of=400, payload_bytes=payload_bytes, seed=seed)
        kept.write(rows, values)
        mirror.update(zip(rows.tolist(), map(bytes, values), strict=True))
    every = np.arange(400)
    values, states = kept.read(every)
    assert set(np.flatnonzero(states == RowState.AS_WRITTEN).tolist()) == set(mirror)
    assert not (states == RowState.DAMAGED).any()
    assert all(bytes(values[row]) == data for row, data in mirror.items())
    assert list(tmp_path.iterdir()) == []


def test_cpp_and_python_write_the_same_bytes(tmp_path: Path) -> None:
    layout = RowLayout(72)
    rows, values = some_rows(700, of=3000, payload_bytes=72, seed=1)
    path = tmp_path / "python"
    written = RowFile(tmp_path, num_rows=3000, payload_bytes=72)
    written.write(rows, values)
    with path.open("w+b") as other:
        os.ftruncate(other.fileno(), layout.file_bytes(3000))
        reference.write_rows(other.fileno(), layout, rows, values)
        found, states = reference.read_rows(other.fileno(), layout, rows)
    assert (found == values).all()
    assert (states == RowState.AS_WRITTEN).all()
    again, again_states = written.read(np.arange(3000))
    mirror = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    for row in range(3000):
        place = mirror[layout.offset(row) : layout.offset(row) + layout.payload_bytes]
        assert (again[row] == place).all()
    assert (np.flatnonzero(again_states) == rows).all()
    if not file.why_not_cpp():  # the tags that Python computes are those that C++ finds right
        assert (again_states[rows] == RowState.AS_WRITTEN).all()
        assert (reference.tags(rows, values) == mirror_tags(mirror, layout, rows)).all()


def mirror_tags(mirror: np.ndarray, layout: RowLayout, rows: np.ndarray) -> np.ndarray:
    begins = [layout.offset(row) + layout.payload_bytes for row in rows.tolist()]
    return np.array([mirror[begin : begin + 4].view(np.uint32)[0] for begin in begins])


def test_a_flipped_bit_is_damage_of_that_row_alone(tmp_path: Path) -> None:
    kept = RowFile(tmp_path, num_rows=200, payload_bytes=20)
    kept.write(np.arange(200), np.ones((200, 20), dtype=np.uint8))
    plain = os.open(f"/proc/self/fd/{kept._descriptor}", os.O_RDWR)
    try:
        place = kept.layout.offset(77) + 3
        byte = os.pread(plain, 1, place)[0]
        os.pwrite(plain, bytes([byte ^ 4]), place)
        os.fsync(plain)
    finally:
        os.close(plain)
    states = kept.read(np.arange(200))[1]
    assert np.flatnonzero(states == RowState.DAMAGED).tolist() == [77]


def test_a_disk_that_refuses_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileError, match=r"(?s)make a file for rows.*missing.*--tables.disk"):
        RowFile(tmp_path / "missing", num_rows=10, payload_bytes=8)
    kept = RowFile(tmp_path, num_rows=100, payload_bytes=8)

    class Full:
        def ziggurat_write_rows(self, *_: object) -> int:
            return errno.ENOSPC

    monkeypatch.setattr(file._LIBRARY, "or_none", Full)
    with pytest.raises(FileError, match=r"(?s)No space left.*--resume"):
        kept.write(np.arange(3), np.zeros((3, 8), dtype=np.uint8))


def test_rows_are_read_where_no_thread_can_be_started(tmp_path: Path) -> None:
    rows, payload = np.arange(0, 4_000, 8), np.random.default_rng(0).integers(0, 256, (500, 256), dtype=np.uint8)
    rows_of_all = RowFile(tmp_path, num_rows=4_000, payload_bytes=256, num_threads=8)
    rows_of_all.write(rows[:1], payload[1:2])  # loads the library, which another user may not read
    read, write = os.pipe()
    if (child := os.fork()) == 0:  # a limit on threads cannot be taken back
        answer = b"failed"
        try:
            resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
            _become_a_user()
            rows_of_all.write(rows, payload)
            answer = b"equal" if np.array_equal(rows_of_all.read(rows)[0], payload) else b"others"
        finally:
            os.write(write, answer)
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 10) == b"equal"
    os.close(read)
    os.close(write)


def _become_a_user() -> None:
    """Leave root, whose threads no limit counts."""
    if os.getuid() == 0:
        os.setuid(65_534)
