"""Runs on many ranks: the numbers of one device, any checkpoint on any ranks, resumed bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training.rank_runs import Case, as_data, stored, train
from ziggurat.data.ledger import read_ledger
from ziggurat.parallel.dense import DenseParallelism
from ziggurat.plan import Placement
from ziggurat.testing.ranks import run_ranks


def run(world_size: int, case: Case, folder: Path, *, resume: bool = False, **changes: Any) -> dict[str, float]:
    """Metrics of the final weights; those of all ranks are the same."""
    if world_size == 1:
        return train(0, 1, as_data(case), str(folder), changes, resume)
    results = run_ranks(train, world_size, world_size, as_data(case), str(folder), changes, resume)
    assert all(result == results[0] for result in results)
    return results[0]


def log(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name != "timing"} for line in lines]


def close(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], limit: float) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=limit, atol=limit, err_msg=name)


CASES = [
    (2, Case()),
    (2, Case(placement=Placement.COLUMN_WISE, towers=True, tower_size=2)),
    (4, Case(placement=Placement.ROW_WISE, towers=True, tower_size=2, dense=DenseParallelism.HSDP)),
    (4, Case(placement=Placement.COLUMN_WISE, towers=True, tower_size=2, dense=DenseParallelism.FSDP)),
]


@pytest.mark.parametrize(("world_size", "case"), CASES)
def test_many_ranks_train_as_one_device(tmp_path: Path, world_size: int, case: Case) -> None:
    alone = run(1, case, tmp_path / "one")
    together = run(world_size, case, tmp_path / "many")
    for metric, value in alone.items():
        assert together[metric] == pytest.approx(value, rel=2e-4, abs=2e-4), metric
    left, right = log(tmp_path / "one"), log(tmp_path / "many")
    assert [(line["kind"], line["step"]) for line in left] == [(line["kind"], line["step"]) for line in right]
    assert [line["rows"] for line in left if "rows" in line] == [line["rows"] for line in right if "rows" in line]
    np.testing.assert_allclose(
        [line["loss"] for line in left if "loss" in line], [line["loss"] for line in right if "loss" in line], rtol=1e-4
    )
    close(stored(tmp_path / "many", 7), stored(tmp_path / "one", 7), 1e-4)
    one, many = read_ledger(tmp_path / "one/ledger.bin"), read_ledger(tmp_path / "many/ledger.bin")
    for column in ("epoch", "num_rows", "step", "sum"):
        assert np.array_equal(one[column], many[column])
