"""Rows on a disk are those that were stored, else those that were drawn, whatever waits, is read ahead or written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from ziggurat.embeddings.config import EmbeddingConfig, InitialDraw, TableInit
from ziggurat.embeddings.initial_rows import InitialRows, initial_rows, normal_quantile
from ziggurat.embeddings.storage.disk import DiskRows
from ziggurat.errors import FileError
from ziggurat.ops.lookup import TableOptimizerKind, state_shapes

NUM_ROWS, DIM = 9000, 2
PARTS = {"first": (0, 5000), "second": (5000, 4000)}


def drawn(name: str, *, draw: InitialDraw) -> InitialRows:
    config = EmbeddingConfig(dim=DIM, init_draw=draw, init=TableInit.NORMAL, init_std=0.1)
    return InitialRows(table=name, shape=(20_000, DIM), config=config, seed=3, first_row=PARTS[name][0] // 2)


def both(folder: Path, *, draw: InitialDraw, kind: TableOptimizerKind) -> tuple[DiskRows, dict[str, torch.Tensor]]:
    """Rows on a disk, and the same in memory."""
    disk = DiskRows(NUM_ROWS, DIM, folder=folder)
    mirror = {"weight": torch.zeros(NUM_ROWS, DIM)}
    for name, (first, count) in PARTS.items():
        disk.draw(first, count, drawn(name, draw=draw))
        for begin, values in drawn(name, draw=draw).chunks(range(count)):
            mirror["weight"][first + begin : first + begin + len(values)] = values
    rows = torch.tensor([5, 4999, 5001])
    disk.store(rows, {"weight": torch.ones(3, DIM)})
    mirror["weight"][rows] = 1.0
    disk.add_state(kind, initial_sum=0.5)
    for key, shape in state_shapes(kind, num_rows=NUM_ROWS, dim=DIM).items():
        mirror[key] = torch.full(shape, 0.5 if key == "sum" else 0.0)
    return disk, mirror


@pytest.mark.parametrize("draw", InitialDraw)
@pytest.mark.parametrize("kind", [TableOptimizerKind.ROWWISE_ADAGRAD, TableOptimizerKind.SPARSE_ADAM])
def test_rows_are_those_of_memory_through_any_order_of_calls(
    tmp_path: Path, draw: InitialDraw, kind: TableOptimizerKind
) -> None:
    disk, mirror = both(tmp_path, draw=draw, kind=kind)
    generator = torch.Generator().manual_seed(7)
    touched = {5, 4999, 5001}
    for step in range(30):
        rows = torch.randperm(NUM_ROWS, generator=generator)[: int(torch.randint(1, 400, (), generator=generator))]
        rows = rows[rows < 700] if step % 3 else rows
        chosen = list(mirror)[step % len(mirror) :]
        if step % 4 == 0:
            disk.announce(rows)
        if step % 5 == 0:
            disk.store(rows[:50], {key: mirror[key][rows[:50]] + 1 for key in chosen}, step=step)
            for key in chosen:
                mirror[key][rows[:50]] += 1
            touched |= set(rows[:50].tolist())
        found = disk.fetch(rows, keys=list(mirror))
        assert all(torch.equal(found[key], mirror[key][rows]) for key in mirror), step
        if step % 7 == 0:
            disk.flush()
    for key in mirror:
        assert torch.equal(disk.read(0, NUM_ROWS, key=key), mirror[key])
    assert set(disk.touched.among(range(NUM_ROWS)).tolist()) == touched
    assert disk.touched.count == len(touched)
    assert disk.touched.among(range(6, 5001)).tolist() == sorted(row for row in touched if 6 <= row < 5001)


def test_untouched_rows_take_no_disk_where_rows_are_drawn_by_themselves(tmp_path: Path) -> None:
    config = EmbeddingConfig(dim=16, init_draw=InitialDraw.ROWS)
    disk = DiskRows(10**9, 16, folder=tmp_path)
    disk.draw(0, 10**9, InitialRows(table="t", shape=(10**9, 16), config=config, seed=1))
    disk.add_state(TableOptimizerKind.ROWWISE_ADAGRAD)
    rows = torch.tensor([0, 17, 123_456_789, 10**9 - 1])
    weight = disk.fetch(rows, keys=["weight"])["weight"]
    ((_, expected),) = initial_rows("t", shape=(10**9, 16), config=config, seed=1, rows=range(17, 18))
    assert torch.equal(weight[1:2], expected)
    assert not weight[0].any()
    assert weight[2:].abs().max() > 0
    assert disk.disk_bytes == 0
    disk.store(rows, {"weight": weight + 1, "sum": torch.ones(4)})
    disk.flush()
    assert 0 < disk.disk_bytes <= 4 * 8192
    assert torch.equal(disk.fetch(rows, keys=["weight"])["weight"], weight + 1)


def test_rows_read_ahead_are_let_go_when_the_next_batch_needs_none(tmp_path: Path) -> None:
    disk, mirror = both(tmp_path, draw=InitialDraw.ROWS, kind=TableOptimizerKind.ROWWISE_ADAGRAD)
    rows = torch.tensor([5, 4999])
    disk.flush()
    disk.announce(rows)
    assert disk._ahead is not None
    for value in range(3):  # what is stored meanwhile is right, and takes no memory beside what was read
        disk.store(rows[:1], {key: mirror[key][rows[:1]] + value for key in mirror})
        assert disk._ahead.stale.tolist() == [True, False]
        assert torch.equal(disk.fetch(rows, keys=["weight"])["weight"][0], mirror["weight"][5] + value)
    disk._ahead.read.result()
    disk.announce(rows[:0])
    assert disk._ahead is None


def test_the_normal_quantile_is_that_of_the_standard_library() -> None:
    from statistics import NormalDist

    import numpy as np

    probability = np.array([1e-300, 1e-16, 1e-9, 0.01, 0.0749, 0.0751, 0.3, 0.5, 0.9, 0.9251, 0.999, 1 - 1e-12])
    expected = np.array([NormalDist().inv_cdf(float(each)) for each in probability])
    assert np.allclose(normal_quantile(probability), expected, rtol=1e-12, atol=0)


def test_a_write_that_fails_is_told_by_the_next_call_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, mirror = both(tmp_path, draw=InitialDraw.ROWS, kind=TableOptimizerKind.ROWWISE_ADAGRAD)
    disk.flush()

    def full(*_: object) -> None:
        raise FileError(expected="to write", found="No space left on device", where="here", ways_out="free space")

    with monkeypatch.context() as patch:
        patch.setattr(type(disk._file), "write", full)
        rows = torch.arange(100, 200)
        disk.store(rows, {"weight": mirror["weight"][rows] * 2})
        with pytest.raises(FileError, match="No space left"):
            disk.flush()
        assert torch.equal(disk.fetch(rows, keys=["weight"])["weight"], mirror["weight"][rows] * 2)
        with pytest.raises(FileError, match="No space left"):
            disk.flush()
    disk.flush()
    assert torch.equal(disk.fetch(rows, keys=["weight"])["weight"], mirror["weight"][rows] * 2)


def test_a_damaged_row_is_named_and_its_neighbours_are_not(tmp_path: Path) -> None:
    disk, mirror = both(tmp_path, draw=InitialDraw.ROWS, kind=TableOptimizerKind.ROWWISE_ADAGRAD)
    rows = torch.arange(1000, 1200)
    disk.store(rows, {key: values[rows] for key, values in mirror.items()})
    disk.flush()
    plain = os.open(f"/proc/self/fd/{disk._file._descriptor}", os.O_RDWR)
    try:
        os.pwrite(plain, b"\x55\x55", disk._file.layout.offset(1100) + 5)
        os.fsync(plain)
    finally:
        os.close(plain)
    assert torch.equal(disk.fetch(rows[:100], keys=["weight"])["weight"], mirror["weight"][rows[:100]])
    with pytest.raises(FileError, match=r"(?s)row 1,100 of 9,000.*--resume"):
        disk.fetch(rows, keys=["weight"])
