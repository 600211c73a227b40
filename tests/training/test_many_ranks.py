"""Runs on many ranks: the numbers of one device, any checkpoint on any ranks, resumed bit for bit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training.rank_runs import (
    NUM_ROWS,
    Case,
    as_data,
    die_at_step,
    model_of,
    plan_of,
    stored,
    train,
    trainer_of,
)
from ziggurat.config import from_json
from ziggurat.data.encoded.ledger import Ledger, expected_sum, read_ledger
from ziggurat.data.encoded.loader import LoaderConfig
from ziggurat.errors import ZigguratError
from ziggurat.ops.lookup import TableOptimizerKind
from ziggurat.parallel.dense import DenseParallelism
from ziggurat.parallel.parallelize import parallelize
from ziggurat.parallel.topology import Topology
from ziggurat.placements import Placement
from ziggurat.testing.ranks import RankFailure, run_ranks
from ziggurat.training.config import Compile, EarlyStopConfig, NonFinite


def run(world_size: int, case: Case, folder: Path, *, resume: bool = False, **changes: Any) -> dict[str, float]:
    """Metrics of the final weights; those of all ranks are the same."""
    if world_size == 1:
        return train(0, 1, as_data(case), str(folder), changes, resume)
    results = run_ranks(train, world_size, world_size, as_data(case), str(folder), changes, resume, timeout_s=240.0)
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
    (2, Case(towers=True, tower_size=1, num_parts=2)),
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


def test_resumed_on_as_many_ranks_with_the_same_bits(tmp_path: Path) -> None:
    case = Case(towers=True, tower_size=2, placement=Placement.ROW_WISE, dropout=0.2)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(4, case, whole, checkpoint_every=5)
    with pytest.raises(RankFailure, match="SIGKILL"):
        run_ranks(train_and_die, 4, 4, as_data(case), str(cut), {"checkpoint_every": 5}, 8)
    run(4, case, cut, resume=True, checkpoint_every=5)
    left, right = stored(whole), stored(cut)
    assert left.keys() == right.keys()
    assert all(np.array_equal(left[name], right[name]) for name in left)
    assert log(whole) == log(cut)
    assert (whole / "ledger.bin").read_bytes() == (cut / "ledger.bin").read_bytes()


@pytest.mark.parametrize("numbers", [(4, 2), (2, 1), (1, 2)])
def test_resumed_on_another_number_of_ranks_at_the_same_row(tmp_path: Path, numbers: tuple[int, int]) -> None:
    before, after = numbers
    # Another global batch too: 24 and then 40 rows a step. The run goes on at row 5 · 24.
    run(before, Case(), tmp_path, max_steps=5, loader=LoaderConfig(batch_size=24 // before, shuffle_buffer_rows=200))
    run(after, Case(), tmp_path, resume=True, loader=LoaderConfig(batch_size=40 // after, shuffle_buffer_rows=200))
    records = read_ledger(tmp_path / "ledger.bin")
    assert records["num_rows"][:6].tolist() == [24] * 5 + [40]
    with Ledger(tmp_path / "ledger.bin") as ledger:
        report = ledger.verify(num_rows=NUM_ROWS, row_sum=expected_sum(np.arange(NUM_ROWS)))
    assert report.good
    assert [epoch.exact for epoch in report.epochs] == [True, True]
    assert log(tmp_path)[-1]["step"] == len(records)


def test_the_best_weights_come_back(tmp_path: Path) -> None:
    case = Case(placement=Placement.ROW_WISE, dense=DenseParallelism.FSDP)
    early = EarlyStopConfig(metric="auc", patience=3)
    metrics = run(2, case, tmp_path, early_stop=early, learning_rate=0.5, table_learning_rate=2.0, evaluate_every=2)
    evaluations = [line for line in log(tmp_path) if line["kind"] == "valid"]
    best = max(evaluations, key=lambda line: line["auc"])
    assert best is not evaluations[-1], "the case must get worse in the end to show anything"
    assert metrics["auc"] == best["auc"]


@pytest.mark.parametrize("clip_norm", [pytest.param(0.0, marks=pytest.mark.slow), 0.5])
def test_a_nan_on_one_rank_stops_all_and_touches_no_weight(tmp_path: Path, clip_norm: float) -> None:
    case = Case(nan_row=100, towers=True, tower_size=1)
    for outcome in run_ranks(
        train_to_error, 2, 2, as_data(case), str(tmp_path), {"clip_norm": clip_norm}, timeout_s=240.0
    ):
        assert outcome.startswith("NumericsError")
        assert "on rank" in outcome
    run(2, case, tmp_path / "skip", clip_norm=clip_norm, non_finite=NonFinite.SKIP)
    skipped = [line for line in log(tmp_path / "skip") if line["kind"] == "skipped"]
    assert len(skipped) == 2  # once an epoch
    assert all(np.isfinite(value).all() for value in stored(tmp_path / "skip").values())
    dumped = sorted(path.name for path in (tmp_path / "skip/non_finite").iterdir())
    assert len(dumped) == 4
    assert dumped[0].endswith("_rank0.safetensors")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("world", "a job of 3 ranks"),
        ("missing", "missing: tags"),
        ("other", "rank 1 of 2, unlike rank 0"),
        ("outside", "which hold tower 1"),
        ("dense_adam", "adam_dense"),
    ],
)
def test_plans_that_cannot_be_executed_are_refused_on_all_ranks(change: str, words: str) -> None:
    for outcome in run_ranks(refusal, 2, change):
        assert outcome.startswith("PlanError")
        assert words in outcome


def test_compiling_a_network_in_parts_is_refused(tmp_path: Path) -> None:
    """Copies are compiled; under FSDP reductions would be left out."""
    case = as_data(Case(dense=DenseParallelism.FSDP))
    for outcome in run_ranks(train_to_error, 2, 2, case, str(tmp_path), {"compile": Compile.DEFAULT}):
        assert outcome.startswith("ConfigError")


# ----------------------------------------------------------------------------------------------------- on every rank


def train_and_die(rank: int, world_size: int, case: Any, folder: str, changes: dict[str, Any], step: int) -> None:
    """Kill rank 1 before a step, while a checkpoint may be under way."""
    trainer = trainer_of(from_json(Case, case, where="test"), folder, world_size=world_size, **changes)
    die_at_step(trainer, step, dies=rank == 1)
    trainer.fit()


def train_to_error(rank: int, world_size: int, case: Any, folder: str, changes: dict[str, Any]) -> str:
    """The error that a run ends with."""
    try:
        train(rank, world_size, case, folder, changes)
    except ZigguratError as error:
        return f"{type(error).__name__}\n{error}"
    return "no error"


def refusal(rank: int, change: str) -> str:
    """Why `parallelize` refuses a plan."""
    case = Case(towers=True, tower_size=1)
    if change == "dense_adam":
        case = Case(optimizer=TableOptimizerKind.ADAM_DENSE)
    plan = plan_of(case, 2)
    try:
        if change == "world":
            plan = dataclasses.replace(plan_of(Case(), 3), towers=None)
        elif change == "missing":
            plan = dataclasses.replace(plan, tables=plan.tables[:-1])
        elif change == "other" and rank == 1:
            plan = dataclasses.replace(plan, tables=plan.tables[::-1])
        elif change == "outside":
            entry = dataclasses.replace(plan.tables[0], ranks=(0,))
            plan = dataclasses.replace(plan, tables=(entry, *plan.tables[1:]))
        parallelize(model_of(case), plan, Topology.create(tower_size=min(plan.ranks_per_group, 2)))
    except ZigguratError as error:
        return f"{type(error).__name__}\n{error}"
    return "no error"
