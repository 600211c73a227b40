"""A loss and a metric as plain functions: the same on one device and on two ranks, kept at resume."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.training.rank_runs import NUM_ROWS, Case, model_of, plan_of, training_config
from tests.training.tiny import tiny_dataset
from ziggurat.errors import ConfigError, TopologyError
from ziggurat.features.batch import Batch
from ziggurat.models import LossSums, Outputs, loss_sums
from ziggurat.parallel import lost_ranks
from ziggurat.parallel.parallelize import parallelize
from ziggurat.parallel.topology import Topology
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.config import Better, EarlyStopConfig
from ziggurat.training.metrics.accumulator import MetricAccumulator, auc, gather_rows
from ziggurat.training.trainer import Trainer


def squared(outputs: Outputs, batch: Batch) -> LossSums:
    """The Brier score of the labelled samples, whose labels are softened."""
    known = ~batch.labels.isnan()
    soft = 0.1 + 0.8 * batch.labels.nan_to_num()
    error = (outputs.logits.float().sigmoid() - soft) ** 2
    return LossSums(total=(error * known).sum(0), weight=known.float().sum(0))


def doubled_weight(outputs: Outputs, batch: Batch) -> LossSums:
    sums = squared(outputs, batch)
    return dataclasses.replace(sums, weight=2 * sums.weight)


def top_share(scores: Any, labels: Any, weights: Any) -> float:
    """Positives among the tenth of the samples with the highest scores: not a mean over batches."""
    order = np.argsort(-scores, kind="stable")[: max(1, len(scores) // 10)]
    return float((labels * weights)[order].sum() / weights[order].sum())


def broken(scores: Any, labels: Any, weights: Any) -> float:
    raise RuntimeError("no such column")


METRICS = {"top_share": top_share, "own_auc": lambda scores, labels, weights: auc(scores, labels, weights)}
STOP = EarlyStopConfig(metric="top_share", better=Better.HIGHER)


def trainer_of(folder: str, world_size: int, *, loss: Any = squared, metrics: Any = METRICS, **changes: Any) -> Trainer:
    model, parallel = model_of(Case()), None
    if world_size > 1:
        parallel = parallelize(model, plan_of(Case(), world_size), Topology.create())
    config = training_config(world_size, **{"early_stop": STOP, **changes})
    data: Any = {"train": tiny_dataset(NUM_ROWS), "valid": tiny_dataset(101, seed=1)}
    return Trainer(model, config=config, folder=Path(folder), parallel=parallel, loss=loss, metrics=metrics, **data)


def on_ranks(rank: int, world_size: int, folder: str) -> Any:
    trainer = trainer_of(f"{folder}/run", world_size)
    trainer.fit()
    evaluation = trainer.evaluate(trainer.valid)
    said = []
    stop = EarlyStopConfig()
    failing = trainer_of(f"{folder}/broken", world_size, metrics={"broken": broken}, early_stop=stop)
    with pytest.raises(ConfigError) as caught:
        failing.evaluate(trainer.valid)
    said.append(str(caught.value))
    with pytest.raises(ConfigError) as caught:
        trainer_of(f"{folder}/doubled", world_size, loss=doubled_weight).fit()
    said.append(str(caught.value))
    with pytest.raises(ConfigError) as caught:
        trainer_of(f"{folder}/differs", world_size, loss=squared if rank else None)
    said.append(str(caught.value))
    dense = [parameter.detach().double().sum().item() for parameter in trainer.step.dense_named.values()]
    return evaluation.metrics, dense, trainer.position.best_step, said


def test_own_loss_and_metric_on_one_device_and_on_two_ranks(tmp_path: Path) -> None:
    alone = trainer_of(str(tmp_path / "alone"), 1)
    alone.fit()
    found = alone.evaluate(alone.valid).metrics
    assert found["own_auc"] == found["auc"]
    assert alone.position.best_value == max(entry["metrics"]["top_share"] for entry in alone.position.evaluations)
    dense = [parameter.detach().double().sum().item() for parameter in alone.step.dense_named.values()]
    plain = trainer_of(str(tmp_path / "plain"), 1, loss=None)
    plain.fit()
    of_model = [parameter.detach().double().sum().item() for parameter in plain.step.dense_named.values()]
    assert of_model != pytest.approx(dense, abs=1e-2)
    for metrics, weights, best_step, said in run_ranks(on_ranks, 2, 2, str(tmp_path)):
        assert metrics == pytest.approx(found, abs=1e-4)
        assert weights == pytest.approx(dense, abs=1e-4)
        assert best_step == alone.position.best_step
        assert "broken" in said[0]
        assert "loss_weight" in said[1]
        assert "squared" in said[2]


def test_a_resumed_run_wants_its_loss_again(tmp_path: Path) -> None:
    trainer_of(str(tmp_path), 1, epochs=1).fit()
    for other in (None, doubled_weight):
        with pytest.raises(ConfigError, match="squared"):
            trainer_of(str(tmp_path), 1, loss=other).fit(resume=True)
    trainer = trainer_of(str(tmp_path), 1)
    trainer.fit(resume=True)
    assert trainer.position.epoch == 2
    trainer_of(str(tmp_path / "plain"), 1, loss=None, epochs=1).fit()
    with pytest.raises(ConfigError, match="squared"):
        trainer_of(str(tmp_path / "plain"), 1).fit(resume=True)


def test_directions_and_names_of_own_metrics(tmp_path: Path) -> None:
    for stop in (EarlyStopConfig(metric="top_share"), EarlyStopConfig(metric="auc", better=Better.LOWER)):
        with pytest.raises(ConfigError, match="direction"):
            trainer_of(str(tmp_path), 1, early_stop=stop)
    lower = trainer_of(str(tmp_path), 1, early_stop=EarlyStopConfig(metric="top_share", better=Better.LOWER))
    lower.fit()
    values = [entry["metrics"]["top_share"] for entry in lower.position.evaluations]
    assert lower.position.best_value == min(values)
    for name in ("auc", "a/b", ""):
        with pytest.raises(ConfigError, match="slash"):
            MetricAccumulator(tiny_dataset(4).inputs, metrics={name: top_share})
    two = MetricAccumulator(tiny_dataset(4, labels=("click", "buy")).inputs, metrics={"top_share": top_share})
    labels = torch.tensor([[1.0, torch.nan], [0.0, 1.0]])
    two.update(torch.tensor([[0.9, 0.2], [0.1, 0.3]]), labels, None, torch.zeros(2, dtype=torch.int64))
    found = two.compute()
    assert (found["top_share/click"], found["top_share/buy"]) == (1.0, 1.0)
    broken_one = MetricAccumulator(tiny_dataset(4).inputs, metrics={"broken": broken})
    with pytest.raises(ConfigError, match="no such column"):
        broken_one.compute()


def test_the_default_loss_is_what_the_function_of_that_name_gives(tmp_path: Path) -> None:
    inputs = tiny_dataset(4).inputs

    def same(outputs: Outputs, batch: Batch) -> LossSums:
        return loss_sums(outputs.logits, batch.labels, batch.weights, inputs=inputs)

    runs = [trainer_of(str(tmp_path / name), 1, loss=loss, epochs=1) for name, loss in (("a", None), ("b", same))]
    for run in runs:
        run.fit()
    first, second = (dict(run.model.state_dict()) for run in runs)
    assert all(torch.equal(first[name], second[name]) for name in first)


class ExitsLoss:
    """A loss that ends the program at its third batch."""

    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind
        self.calls = 0

    def __call__(self, outputs: Outputs, batch: Batch) -> LossSums:
        self.calls += 1
        if self.calls == 3:
            raise self.kind
        return squared(outputs, batch)


def exits_metric(scores: Any, labels: Any, weights: Any) -> float:
    sys.exit(0)


@pytest.mark.parametrize("kind", [SystemExit, GeneratorExit])
def test_a_loss_that_ends_the_program_is_named(tmp_path: Path, kind: type[BaseException]) -> None:
    for ways in (lambda trainer: trainer.fit(), lambda trainer: list(trainer.steps())):
        trainer = trainer_of(
            str(tmp_path / f"{id(ways)}"), 1, loss=ExitsLoss(kind), metrics={}, early_stop=EarlyStopConfig()
        )
        with pytest.raises(ConfigError, match=kind.__name__) as caught:
            ways(trainer)
        assert "test_own_functions.py:" in caught.value.where
        assert trainer.position.step == 2


def test_a_metric_that_ends_the_program_is_named(tmp_path: Path) -> None:
    trainer = trainer_of(str(tmp_path), 1, loss=None, metrics={"exits": exits_metric}, early_stop=EarlyStopConfig())
    with pytest.raises(ConfigError, match="SystemExit: 0") as caught:
        trainer.fit()
    assert "in exits_metric" in caught.value.where
    with pytest.raises(ConfigError, match="SystemExit: 0"):
        trainer.evaluate(trainer.valid)


def exits_on_ranks(rank: int, folder: str) -> str:
    trainer = trainer_of(folder, 2, loss=ExitsLoss(SystemExit), metrics={}, early_stop=EarlyStopConfig())
    with pytest.raises(ConfigError) as caught:
        trainer.fit()
    return caught.value.found


def test_a_loss_that_ends_the_program_is_named_on_ranks(tmp_path: Path) -> None:
    assert run_ranks(exits_on_ranks, 2, str(tmp_path / "run")) == ["SystemExit", "SystemExit"]


def exits_metric_on_ranks(rank: int, folder: str) -> str:
    trainer = trainer_of(folder, 2, loss=None, metrics={"exits": exits_metric}, early_stop=EarlyStopConfig())
    with pytest.raises(ConfigError) as caught:
        trainer.fit()
    return caught.value.found


def test_a_metric_that_ends_the_program_is_named_on_ranks(tmp_path: Path) -> None:
    found = run_ranks(exits_metric_on_ranks, 2, str(tmp_path / "run"))
    assert found == ["SystemExit: 0", "an error on the first rank"]


def loses_a_rank(rank: int, folder: str) -> list[str]:
    """Evaluate where each exchange fails as it does when another rank is gone."""
    trainer = trainer_of(folder, 2, loss=None, early_stop=EarlyStopConfig())
    group = trainer.team.process_group
    assert group is not None
    lost = RuntimeError("[/a/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:54928. This is …")
    found = []
    with mock.patch.object(lost_ranks, "silent_ranks", return_value=[1 - rank]):
        for name in ("all_reduce", "gather", "broadcast"):
            with mock.patch.object(dist, name, side_effect=lost), pytest.raises(TopologyError) as caught:
                trainer.evaluate(trainer.valid)
            found.append(f"{caught.value.where}: {caught.value.found}")
        with mock.patch.object(dist, "all_gather", side_effect=lost), pytest.raises(TopologyError) as caught:
            gather_rows(np.zeros(3), group=group, device=torch.device("cpu"))
        found.append(f"{caught.value.where}: {caught.value.found}")
    return found


def test_a_rank_that_is_gone_in_an_evaluation_is_named(tmp_path: Path) -> None:
    _, found = run_ranks(loses_a_rank, 2, str(tmp_path / "run"))
    places = ["number of samples of an evaluation", "scores of an evaluation", "metrics of an evaluation"]
    gone = "no answer from rank 0: its connection is gone (Connection closed by peer)"
    assert found == [f"rank 1, {place}: {gone}" for place in (*places, "scores of an evaluation")]
