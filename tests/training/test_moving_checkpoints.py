"""A checkpoint fits any number of ranks, any placement of tables, any tower size, and one device.

Saved on some ranks, loaded on others: the same bits, and the next step is the same step.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training.rank_runs import Case, as_data, stored, trainer_of
from ziggurat.config import from_json
from ziggurat.ops.lookup import TableOptimizerKind
from ziggurat.parallel.dense import DenseParallelism
from ziggurat.placements import Placement
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.checkpoint import CheckpointStore
from ziggurat.training.state import RNG, prepare_to_load, restore_state, snapshot_tensors, state_tensors

STEPS = 3
FSDP, HSDP = DenseParallelism.FSDP, DenseParallelism.HSDP
SOURCES = {
    "table_wise": Case(towers=True, tower_size=2),
    "row_wise": Case(towers=True, tower_size=4, placement=Placement.ROW_WISE, dense=FSDP),
    "column_wise": Case(towers=True, tower_size=2, placement=Placement.COLUMN_WISE, dense=HSDP),
}
TARGETS = {
    "one_device": (1, Case(towers=True)),
    "two_row_wise": (2, Case(towers=True, tower_size=2, placement=Placement.ROW_WISE)),
    "two_column_wise": (2, Case(towers=True, tower_size=2, placement=Placement.COLUMN_WISE, dense=FSDP)),
    "two_towers": (2, Case(towers=True, tower_size=1)),
    "four_flat": (4, Case(towers=True, tower_size=4, placement=Placement.COLUMN_WISE, dense=FSDP)),
    "four_towers": (4, Case(towers=True, tower_size=2, placement=Placement.ROW_WISE, dense=HSDP)),
}


def save(rank: int, world_size: int, jobs: list[list[Any]]) -> None:
    """Train a few steps of each job on every rank; the trainer saves at the end."""
    del rank
    for folder, case in jobs:
        trainer_of(from_json(Case, case, where="test"), folder, world_size=world_size, max_steps=STEPS).fit()


def load(rank: int, world_size: int, jobs: list[list[Any]]) -> None:
    """Load each job's checkpoint, save it again as it was loaded, then take one more step."""
    del rank
    for folder, case in jobs:
        chosen = from_json(Case, case, where="test")
        trainer = trainer_of(chosen, folder, world_size=world_size, max_steps=STEPS + 1)
        prepare_to_load(trainer.step)
        into = snapshot_tensors(trainer.step)
        trainer.store.load(into=into, optional=RNG)
        restore_state(trainer.step, into)
        with CheckpointStore(Path(folder) / "again/checkpoints") as again:
            again.save(STEPS, tensors=state_tensors(trainer.step), state={})
        trainer.fit(resume=True)


def everywhere(function: Any, jobs: dict[int, list[list[Any]]]) -> None:
    for world_size, mine in jobs.items():
        if world_size == 1:
            function(0, 1, mine)
        else:
            run_ranks(function, world_size, world_size, mine, timeout_s=120.0)


def check(tmp_path: Path, sources: dict[str, tuple[int, Case]], targets: dict[str, tuple[int, Case]]) -> None:
    """Every source to every target."""
    jobs: dict[int, list[list[Any]]] = {}
    for name, (world_size, case) in sources.items():
        jobs.setdefault(world_size, []).append([str(tmp_path / name), as_data(case)])
    everywhere(save, jobs)
    moves: dict[int, list[list[Any]]] = {}
    for source in sources:
        for target, (world_size, case) in targets.items():
            folder = tmp_path / f"{source}_to_{target}"
            shutil.copytree(tmp_path / source, folder)
            moves.setdefault(world_size, []).append([str(folder), as_data(case)])
    everywhere(load, moves)
    for source in sources:
        saved = stored(tmp_path / source)
        following = stored(tmp_path / f"{source}_to_one_device", STEPS + 1)
        for target in targets:
            folder = tmp_path / f"{source}_to_{target}"
            again = stored(folder / "again")
            assert saved.keys() == again.keys()
            for name, value in saved.items():
                assert np.array_equal(again[name], value), f"{source} to {target}: {name} differs after loading"
            found = stored(folder, STEPS + 1)
            for name, value in following.items():
                np.testing.assert_allclose(
                    found[name], value, rtol=1e-6, atol=1e-6, err_msg=f"{source} to {target}: {name} after the step"
                )


@pytest.mark.slow
def test_from_four_ranks_to_any(tmp_path: Path) -> None:
    check(tmp_path, {name: (4, case) for name, case in SOURCES.items()}, TARGETS)


@pytest.mark.slow
def test_copies_and_rows_over_a_host(tmp_path: Path) -> None:
    copies, in_host = Placement.DATA_PARALLEL, Placement.TABLE_ROW_WISE
    sources = {
        "copies": (4, Case(towers=True, tower_size=2, placement=copies)),
        "in_host": (4, Case(towers=True, tower_size=2, placement=in_host)),
    }
    targets = {
        "one_device": (1, Case(towers=True)),
        "two_copies": (2, Case(towers=True, tower_size=2, placement=copies)),
        "two_row_wise": TARGETS["two_row_wise"],
        "four_in_host": sources["in_host"],
    }
    check(tmp_path, sources, targets)


def test_from_one_device_and_two_ranks(tmp_path: Path) -> None:
    adam = {"optimizer": TableOptimizerKind.SPARSE_ADAM}
    sources = {
        "alone": (1, Case(**adam)),
        "two": (2, Case(placement=Placement.COLUMN_WISE, **adam)),
    }
    targets = {
        "one_device": (1, Case(**adam)),
        "two_row_wise": (2, Case(placement=Placement.ROW_WISE, **adam)),
    }
    check(tmp_path, sources, targets)


def test_a_checkpoint_of_another_model_is_refused_on_all_ranks(tmp_path: Path) -> None:
    case = Case()
    save(0, 1, [[str(tmp_path / "flat"), as_data(case)]])
    with pytest.raises(AssertionError, match=r"no place for|not there"):
        run_ranks(load, 2, 2, [[str(tmp_path / "flat"), as_data(Case(towers=True, tower_size=1))]])
