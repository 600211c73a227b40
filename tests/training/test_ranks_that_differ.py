"""A rank with another setting, model or data is named before the first step, by every rank, with both values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.rank_runs import Case, model_of, plan_of, trainer_of, training_config
from tests.training.tiny import tiny_dataset
from ziggurat.data.encoded.loader import LoaderConfig
from ziggurat.errors import ConfigError, PlanError, ZigguratError
from ziggurat.parallel.agreement import require_equal
from ziggurat.parallel.dense import DenseParallelism
from ziggurat.parallel.exchange.wire import WireConfig, WireFormat
from ziggurat.parallel.parallelize import ParallelConfig, parallelize
from ziggurat.parallel.topology import Topology
from ziggurat.placements import Placement
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.checkpoint import CheckpointConfig
from ziggurat.training.config import DenseOptimizer, EarlyStopConfig, Precision
from ziggurat.training.trainer import Trainer

FLAT = Case()
SETTINGS: dict[str, dict[str, Any]] = {
    "training.learning-rate: 0.01 on rank 0; 0.02 on rank 1": {"learning_rate": 0.02},
    "training.table-learning-rate": {"table_learning_rate": 0.2},
    "training.seed": {"seed": 8},
    "training.optimizer": {"optimizer": DenseOptimizer.SGD},
    'training.precision: "fp32" on rank 0; "bf16" on rank 1': {"precision": Precision.BF16},
    "training.early-stop.patience": {"early_stop": EarlyStopConfig(patience=3)},
    "training.epochs": {"epochs": 5},
    "training.log-every": {"log_every": 7},
    "training.evaluate-every": {"evaluate_every": 2},
    "training.checkpoint-every": {"checkpoint_every": 2},
    "training.checkpoint.keep": {"checkpoint": CheckpointConfig(keep=9)},
    "training.loader.batch-size": {"loader": LoaderConfig(batch_size=5)},
    "cpu threads": {"threads": 2},
}


def error_of(action: Callable[[], Any]) -> str:
    """What an action that must fail says."""
    try:
        action()
    except ZigguratError as error:
        return f"{type(error).__name__}\n{error}"
    return "no error"


def settings_that_differ(rank: int, folder: str) -> list[str]:
    """One error for each of SETTINGS, changed on rank 1, then those for other data and another folder."""
    model, plan = model_of(FLAT), plan_of(FLAT, 2)
    parallel = parallelize(model, plan, Topology.create())
    said: list[str] = []

    def trainer(changes: dict[str, Any], train: Any, where: str) -> Trainer:
        valid = tiny_dataset(101, seed=1)
        config = training_config(2, **changes)
        return Trainer(model, config=config, train=train, valid=valid, folder=where, parallel=parallel)

    train = tiny_dataset(200)
    for changes in SETTINGS.values():
        said.append(error_of(lambda changes=changes: trainer(changes if rank else {}, train, folder)))
    said.append(error_of(lambda: trainer({}, tiny_dataset(200, seed=7) if rank else train, folder)))
    said.append(error_of(lambda: trainer({}, train, f"{folder}{rank}")))
    trainer({}, train, folder)  # equal ranks: no error
    return said


def test_training_settings_data_and_folder(tmp_path: Path) -> None:
    answers = run_ranks(settings_that_differ, 2, str(tmp_path / "run"))
    for said in answers:
        for wanted, text in zip([*SETTINGS, "data train content", "folder"], said, strict=True):
            assert text.startswith("ConfigError"), (wanted, text)
            assert wanted in text
            assert "where:    rank 1 of 2" in text
    assert answers[0] == answers[1]
    assert not (tmp_path / "run").exists()  # nothing was written


def models_that_differ(rank: int) -> list[str]:
    """One error for each way in which rank 1 may call `parallelize` otherwise."""
    topology = Topology.create()
    spread = {"seed": 3, "config": ParallelConfig()}
    ways: list[tuple[Any, dict[str, Any]]] = [
        (dataclasses.replace(FLAT, dropout=0.5), spread),
        (FLAT, spread | {"seed": 4}),
        (FLAT, spread | {"config": ParallelConfig(dense=DenseParallelism.FSDP)}),
        (FLAT, spread | {"config": ParallelConfig(wire=WireConfig(between_towers=WireFormat.BF16))}),
        (FLAT, spread | {"config": ParallelConfig(num_parts=2)}),
        (dataclasses.replace(FLAT, placement=Placement.ROW_WISE), spread),
    ]
    said = []
    for case, how in ways:
        mine, my_way = (case, how) if rank else (FLAT, spread)
        model = model_of(mine, draw_tables=False)
        said.append(error_of(lambda: parallelize(model, plan_of(mine, 2), topology, **my_way)))  # noqa: B023
    narrow = model_of(FLAT)
    if rank:
        next(narrow.parameters()).data[0] += 1
    said.append(error_of(lambda: parallelize(narrow, plan_of(FLAT, 2), topology)))
    return said


def test_models_plans_and_ways_to_spread_them() -> None:
    wanted = ["dropout", "tables.seed: 3 on rank 0; 4 on rank 1", "parallel.dense", "parallel.wire.between-towers"]
    wanted += ["parallel.num-parts: 1 on rank 0; 2 on rank 1", "tables.0.placement", "weight "]
    for said in run_ranks(models_that_differ, 2):
        for part, text in zip(wanted, said, strict=True):
            assert part in text, text
            assert "rank 1 of 2" in text
            assert text.startswith("PlanError" if "placement" in part else "ConfigError")


def many_facts(rank: int) -> str:
    facts = {f"setting-{index}": "x" * 5000 for index in range(3000)}
    if rank == 2:
        facts = {name: "y" * 5000 for name in facts} | {"extra": "1"}
    return error_of(lambda: require_equal(facts, where="here"))


def test_what_is_said_of_many_differences_is_bounded() -> None:
    for text in run_ranks(many_facts, 3):
        assert "on ranks 0, 1; " in text
        assert "rank 2 of 3" in text
        assert "and 2989 more" in text
        assert len(text) < 6000


def test_one_rank_alone_compares_nothing() -> None:
    require_equal({"a": "1"}, where="here")


def test_early_trainer_of_equal_ranks_still_trains(tmp_path: Path) -> None:
    assert run_ranks(fit, 2, str(tmp_path / "run")) == [14, 14]


def fit(rank: int, folder: str) -> int:
    del rank
    return trainer_of(FLAT, folder, world_size=2).fit().steps


@pytest.mark.parametrize("kind", [ConfigError, PlanError])
def test_errors_are_of_the_kind_that_was_asked_for(kind: type[ZigguratError]) -> None:
    assert set(run_ranks(kinds, 2, kind.__name__)) == {kind.__name__}


def kinds(rank: int, name: str) -> str:
    kind = {"ConfigError": ConfigError, "PlanError": PlanError}[name]
    return error_of(lambda: require_equal({"a": str(rank)}, where="here", kind=kind)).splitlines()[0]
