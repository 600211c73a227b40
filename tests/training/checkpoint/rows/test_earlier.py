"""Checkpoints of tables on a disk write what was changed since the one before, and are complete by themselves."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.training.checkpoint.checkpoint_cases import SystemCalls, assert_same
from tests.training.checkpoint.rows.disk_tables import (
    NUM_ROWS,
    SIZES,
    WIDTH,
    Tables,
    delete,
    expected,
    generations,
    manifest_of,
)
from ziggurat.errors import CheckpointError
from ziggurat.training.checkpoint import CheckpointConfig, CheckpointStore, DamagedCheckpointError, Match, SavedRows
from ziggurat.training.checkpoint.rows import earlier
from ziggurat.training.checkpoint.rows.earlier import num_kept
from ziggurat.training.checkpoint.storage import CheckpointReader

ROW_BYTES = 8 + 4 * WIDTH


def written(folder: Path, step: int) -> set[int]:
    """Rows of the storage that lie in the file of this step."""
    reader, found, first = CheckpointReader(folder / f"step-{step:012d}", step=step), set[int](), 0
    for name, size in SIZES.items():
        for part in reader.manifest.sparse[f"{name}.weight"].parts:
            if part.stored.split(".")[1] == str(step):
                found |= {first + int(row) for ids in reader.ids_of(part.stored) for row in ids}
        first += size
    return found


class Life:
    """A run that does anything at random, and knows what each checkpoint has to hold."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng, self.generator = random.Random(seed), np.random.default_rng(seed)
        self.rows_folder, self.folder = folder / "rows", folder / "checkpoints"
        self.rows_folder.mkdir()
        self.tables, self.fresh = Tables(self.rows_folder), Tables(self.rows_folder)
        self.store = CheckpointStore(self.folder, config=CheckpointConfig(keep=self.rng.choice([0, 1, 3])))
        self.saved: dict[int, dict[int, bytes]] = {}
        self.step, self.base, self.has_failed = 0, -1, False
        self.kinds = {"full": 0, "linked": 0, "merged": 0, "failed": 0}

    def act(self) -> None:
        actions = {
            self.update: 6, self.look: 2, self.flush: 1, self.save: 6, self.fail: 2, self.resume: 1, self.lose: 1,
            self.again: 1,
        }  # fmt: skip
        self.rng.choices(list(actions), weights=list(actions.values()))[0]()

    def update(self) -> None:
        most = self.rng.choice([3, 12, 12, 60])
        rows = np.unique(self.generator.integers(0, self.rng.choice([20, NUM_ROWS]), most))
        self.tables.update(rows, self.generator.random((len(rows), WIDTH), dtype=np.float32))

    def look(self) -> None:
        self.tables.storage.gather(torch.from_numpy(self.generator.integers(0, NUM_ROWS, 15)))

    def flush(self) -> None:
        self.tables.storage.flush()

    def save(self) -> None:
        self.step += 1
        before = generations(manifest_of(self.folder, self.base)) if self.base in self.store.steps() else []
        self.store.save(self.step, tensors=self.tables.tensors(), state={"step": self.step})
        found, ids = generations(manifest_of(self.folder, self.step)), written(self.folder, self.step)
        kept = [each for each in found if each != self.step]
        if not kept:
            assert ids == set(self.tables.rows)
            self.kinds["full"] += 1
        elif kept == before and not self.has_failed:  # a failed merge leaves rows as changed that were to be merged
            assert ids == self.tables.unsaved
            self.kinds["linked"] += 1
        else:
            assert kept == before[: len(kept)], (kept, before)
            assert set(self.tables.rows) >= ids >= self.tables.unsaved
            self.kinds["merged"] += 1
        self.keep()

    def again(self) -> None:
        """The same step once more."""
        if self.step in self.store.steps():
            self.update()
            self.step -= 1
            self.save()

    def keep(self) -> None:
        self.saved[self.step], self.base = dict(self.tables.rows), self.step
        self.tables.unsaved.clear()
        self.has_failed = False

    def fail(self) -> None:
        def full(_: str) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        self.step += 1
        steps = self.store.steps()
        try:
            with SystemCalls(at=self.rng.randrange(45), action=full):
                self.store.save(self.step, tensors=self.tables.tensors(), state={"step": self.step})
            self.keep()
        except CheckpointError:
            self.kinds["failed"] += 1
            self.has_failed = True
            if self.step in self.store.steps():  # it had its name already
                self.saved[self.step] = dict(self.tables.rows)
                assert self.store.load(self.step, into=Tables(self.rows_folder).tensors()).step == self.step
            else:
                assert set(self.store.steps()) <= set(steps)

    def resume(self) -> None:
        """A new process goes on from one of the checkpoints."""
        if steps := self.store.steps():
            step = self.rng.choice([steps[-1], *steps])
            self.store = CheckpointStore(self.folder, config=self.store.config)
            self.store.discard_after(step)
            self.tables = Tables(self.rows_folder, places=self.rng.choice([4, 30, 500]))
            assert self.store.load(into=self.tables.tensors()).step == step
            self.step = self.base = step
            self.has_failed = False
            self.tables.rows = dict(self.saved[step])

    def lose(self) -> None:
        """A person deletes a checkpoint; the last one now and then."""
        if len(steps := self.store.steps()) > 1:
            delete(self.folder, self.rng.choice(steps))

    def check(self, *, everything: bool = False) -> None:
        steps = self.store.steps()
        for step in steps if everything else steps[-1:]:
            self.store.verify(step)
            found = CheckpointStore(self.folder).load(step)
            assert_same(found.tensors, expected(self.saved[step], self.fresh))


@pytest.mark.parametrize("seed", range(4))
def test_any_life_of_a_run_has_right_checkpoints(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(earlier, "MAX_GENERATIONS", 4)
    life = Life(tmp_path, seed)
    for number in range(30):
        life.act()
        if number % 4 == 0:
            life.check()
    life.check(everything=True)
    assert life.kinds["linked"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 140))
def test_any_long_life_of_a_run_has_right_checkpoints(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(earlier, "MAX_GENERATIONS", 4)
    life = Life(tmp_path, seed)
    for _ in range(120):
        life.act()
        life.check()
    life.check(everything=True)
    assert all(life.kinds.values())


def _saved_twice(folder: Path, **config: Any) -> tuple[Tables, CheckpointStore]:
    (folder / "rows").mkdir()
    tables, store = Tables(folder / "rows"), CheckpointStore(folder / "checkpoints", config=CheckpointConfig(**config))
    for step, rows in ((1, np.arange(100)), (2, np.array([5, 120]))):
        tables.update(rows, np.full((len(rows), WIDTH), float(step), dtype=np.float32))
        store.save(step, tensors=tables.tensors(), state={})
    return tables, store


def test_the_second_checkpoint_writes_the_changed_rows_and_shares_the_file_of_the_first(tmp_path: Path) -> None:
    tables, _ = _saved_twice(tmp_path)
    first, second = (tmp_path / "checkpoints" / f"step-{step:012d}" for step in (1, 2))
    names = [f"rows-{step:012d}-00000.safetensors" for step in (1, 2)]
    assert sorted(path.name for path in second.glob("rows-*")) == names
    assert (first / names[0]).samefile(second / names[0])
    assert written(tmp_path / "checkpoints", 2) == {5, 120}
    shutil.copytree(second, tmp_path / "copied" / second.name)
    shutil.rmtree(tmp_path / "checkpoints")
    found = CheckpointStore(tmp_path / "copied").load()
    assert_same(found.tensors, expected(tables.rows, Tables(tmp_path / "rows")))


def test_checkpoints_share_nothing_where_that_is_asked_for(tmp_path: Path) -> None:
    _saved_twice(tmp_path, rows=SavedRows.ALL)
    assert generations(manifest_of(tmp_path / "checkpoints", 2)) == [2]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EMLINK])
def test_without_links_all_rows_are_written_and_the_report_says_so(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(fcntl, "ioctl", refuse)
    tables, store = _saved_twice(tmp_path)
    assert generations(manifest_of(tmp_path / "checkpoints", 2)) == [2]
    assert "no hard links" in caplog.text
    assert os.strerror(number) in store.rows_line()
    assert_same(store.load().tensors, expected(tables.rows, Tables(tmp_path / "rows")))
    monkeypatch.undo()
    assert "are linked" in store.rows_line()
    assert sorted(path.name for path in store.folder.glob(".*")) == [".lock"]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    with path.open("r+b") as file:
        file.write(data)


def test_damage_in_a_shared_file_is_found_in_every_checkpoint_that_has_it(tmp_path: Path) -> None:
    _, store = _saved_twice(tmp_path)
    _flip(tmp_path / "checkpoints" / "step-000000000002" / "rows-000000000001-00000.safetensors")
    for step in (1, 2):
        with pytest.raises(DamagedCheckpointError, match="rows-000000000001"):
            store.verify(step)


@pytest.mark.parametrize(
    ("damage", "found"), [(lambda path: os.truncate(path, 100), "found 100 bytes"), (_flip, "SHA-256")]
)
def test_a_damaged_file_of_the_checkpoint_before_is_not_linked_and_no_intact_one_is_deleted_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], found: str
) -> None:
    tables, store = _saved_twice(tmp_path, keep=2)
    damage(tmp_path / "checkpoints" / "step-000000000002" / "rows-000000000002-00000.safetensors")
    store.save(3, tensors=tables.tensors(), state={})
    assert generations(manifest_of(tmp_path / "checkpoints", 3)) == [3]
    assert found in caplog.text
    assert {path.name for path in (tmp_path / "checkpoints" / "step-000000000003").glob("rows-*")} == {
        "rows-000000000003-00000.safetensors"
    }
    store.save(4, tensors=tables.tensors(), state={})  # only step 3 and 4 are left, both intact
    for step in store.steps():
        store.verify(step)
    assert_same(store.load(3).tensors, expected(tables.rows, Tables(tmp_path / "rows")))


def test_what_a_load_filled_in_part_is_written_whole(tmp_path: Path) -> None:
    tables, store = _saved_twice(tmp_path)
    weights = {name: part for name, part in tables.tensors().items() if name.endswith("weight")}
    tables.update(np.array([7]), np.zeros((1, WIDTH), dtype=np.float32))
    store.load(1, into=weights, match=Match.SUBSET)
    numbers = tables.storage.look(np.arange(NUM_ROWS))
    store.save(3, tensors=tables.tensors(), state={})
    assert generations(manifest_of(tmp_path / "checkpoints", 3)) == [3]
    again = Tables(tmp_path / "rows")
    store.load(3, into=again.tensors())
    assert np.array_equal(again.storage.look(np.arange(NUM_ROWS)), numbers)


def test_generations_are_few_and_never_hold_more_than_half_as_much_again() -> None:
    rng = random.Random(0)
    for _ in range(20):
        live, most = rng.randint(1_000, 100_000), rng.choice([1, 30, 1_000])
        parts, total = [live], 0
        for _ in range(600):
            new = rng.randint(0, most)
            kept = num_kept(parts, new=new, live=live)
            parts = [*parts[:kept], sum(parts[kept:]) + new] if kept else [live]
            total += parts[-1]
            assert len(parts) <= earlier.MAX_GENERATIONS + 8
            assert 2 * sum(parts) <= 3 * live or len(parts) == 1
        if most == 1:
            assert total < live + 600 * 8


def test_a_linear_scan_finds_the_same_generations() -> None:
    rng = random.Random(1)
    for _ in range(300):
        parts = [rng.choice([1, 5, 50, 500]) for _ in range(rng.randint(earlier.MAX_GENERATIONS, 40))]
        new = rng.randint(0, 60)
        slow = [i for i in range(len(parts)) if parts[i] <= 2 * (sum(parts[i + 1 :]) + new)]
        assert num_kept(parts, new=new, live=10**6) == (slow[0] if slow else len(parts))
