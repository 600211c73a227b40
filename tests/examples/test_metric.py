"""A metric from outside the package: its number, in runs on one device and on ranks, error bars, plots, choices."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.training.rank_runs import Case, as_data, train, trainer_of
from ziggurat.errors import ConfigError
from ziggurat.features.inputs import InputSpec, LabelSpec
from ziggurat.features.schema import Label, Task
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.config import Better, EarlyStopConfig
from ziggurat.training.early_stop import stop_metric
from ziggurat.training.metrics.accumulator import MetricAccumulator
from ziggurat.training.metrics.metric import Judged, Metric, shown_name
from ziggurat.training.metrics.scored_samples import scored_samples
from ziggurat.training.records.log import read_records
from ziggurat.training.records.run_folder import RunFolder
from ziggurat.training.report.page import best_step
from ziggurat.training.report.plots import training_figures

RNG = np.random.default_rng(5)


@pytest.fixture(scope="module")
def top_percent() -> Iterator[Metric]:
    """The metric, listed while these tests run: every evaluation of this process has it."""
    yield Metric.add(importlib.import_module("examples.extensions.top_percent").TOP_PERCENT)
    del Metric._members["top_percent"]


def judged(scores: Any, labels: Any, weights: Any = None) -> Judged:
    samples = scored_samples(np.asarray(scores), np.asarray(labels), weights)
    return Judged(samples, None, 10)


def test_it_counts_the_best_scored_percent(top_percent: Metric) -> None:
    scores = np.linspace(0.0, 1.0, 1_000)
    labels = np.zeros(1_000)
    labels[[3, 500, 992, 998, 999]] = 1.0
    assert top_percent.compute(judged(scores, labels)) == pytest.approx((3 / 10) / (5 / 1_000))
    assert top_percent.compute(judged(np.full(1_000, 0.5), labels)) == pytest.approx(1.0)
    assert math.isnan(top_percent.compute(judged(scores, np.zeros(1_000))))
    assert math.isnan(top_percent.compute(judged([], [])))
    counts = RNG.integers(1, 4, 200)
    some = RNG.random(200).round(2)
    liked = (RNG.random(200) < 0.3).astype(float)
    repeated = judged(some.repeat(counts), liked.repeat(counts))
    assert top_percent.compute(judged(some, liked, counts)) == pytest.approx(top_percent.compute(repeated))


def test_evaluations_have_it_after_the_others_with_its_error(top_percent: Metric) -> None:
    inputs = InputSpec(labels=(LabelSpec(name="click"), LabelSpec(name="spent", task=Task.REGRESSION)))
    accumulator = MetricAccumulator(inputs)
    accumulator.update(torch.rand(2_000, 2), (torch.rand(2_000, 2) < 0.3).float())
    names = list(accumulator.compute())
    assert names[names.index("accuracy/click") + 1] == "top_percent/click"
    assert "top_percent/spent" not in names
    assert 0.0 < accumulator.half_width("top_percent/click") < 2.0
    assert shown_name("top_percent/click") == "lift of the top percent of click"


def test_training_stops_by_it_and_a_report_draws_it(top_percent: Metric, tmp_path: Path) -> None:
    config = EarlyStopConfig(metric="top_percent")
    assert stop_metric(config, labels=[Label(name="click")], has_groups=False) == "top_percent"
    wrong = EarlyStopConfig(metric="top_percent", better=Better.LOWER)
    with pytest.raises(ConfigError, match="the direction in which"):
        stop_metric(wrong, labels=[Label(name="click")], has_groups=False)
    trainer = trainer_of(Case(), tmp_path, world_size=1, early_stop=config)
    result = trainer.fit()
    records = read_records(RunFolder(tmp_path).metrics)
    values = {record["step"]: record["top_percent"] for record in records if record["kind"] == "valid"}
    assert result.best_value == max(values.values())
    assert best_step(records, {"training": {"early_stop": {"metric": "top_percent"}}}) == result.best_step
    titles = [figure.axes[0].get_title(loc="left") for figure in training_figures(records)]
    assert "Validation lift of the top percent" in titles


def train_with_extension(rank: int, *arguments: Any) -> Any:
    """Runs on every rank, whose process has to import the metric before it reads settings."""
    importlib.import_module("examples.extensions.top_percent")
    return train(rank, *arguments)


def test_four_ranks_stop_by_the_same_numbers(top_percent: Metric, tmp_path: Path) -> None:
    del top_percent
    changes = {"early_stop": EarlyStopConfig(metric="top_percent", patience=1)}
    alone = train(0, 1, as_data(Case()), str(tmp_path / "one"), changes)
    found = run_ranks(train_with_extension, 4, 4, as_data(Case()), str(tmp_path / "four"), changes)
    assert all(each == found[0] for each in found)
    assert found[0]["top_percent"] == pytest.approx(alone["top_percent"], rel=1e-4)
    assert found[0]["auc"] == pytest.approx(alone["auc"], abs=1e-3)


WRONG_ANSWERS = [
    ("0.7", "found: *'0.7', of type str"),
    (None, "found: *None, of type NoneType"),
    (np.zeros(3), r"found: *array\(\[0., 0., 0.\]\), of type ndarray"),
    (0.5 + 1j, r"found: *\(0.5\+1j\), of type complex"),
    (torch.tensor(0.5 + 1j), "of type Tensor"),
    (math.inf, "found: *inf"),
    (np.float32("-inf"), "found: *-inf"),
    (KeyError("lost"), "found: *KeyError: 'lost'"),
]


@pytest.fixture
def late(request: pytest.FixtureRequest) -> Iterator[Metric]:
    """A metric that answers something else for more samples than it is tried out with."""
    answer = request.param

    class Late(Metric):
        name = "late"

        def compute(self, judged: Judged) -> float:
            if len(judged.samples.scores) <= 40:
                return 0.5
            if isinstance(answer, Exception):
                raise answer
            return answer

    yield Metric.add(Late())
    del Metric._members["late"]


def filled(**own: Any) -> MetricAccumulator:
    accumulator = MetricAccumulator(InputSpec(labels=(LabelSpec(name="click"),)), metrics=own)
    accumulator.update(torch.rand(100, 1), (torch.rand(100, 1) < 0.3).float())
    return accumulator


@pytest.mark.parametrize(("late", "message"), WRONG_ANSWERS, indirect=["late"])
def test_an_answer_that_is_no_number_is_refused_later_too(late: Metric, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"for 100 samples(.|\n)*{message}(.|\n)*metric late, .*Late\.compute"):
        filled().compute()
    with pytest.raises(ConfigError, match="metric late"):
        filled().half_width("late")


@pytest.mark.parametrize(
    "late", [0.25, 1, np.float32(0.25), np.array(0.25), torch.tensor([0.25]), math.nan], indirect=True
)
def test_numbers_of_any_library_are_answers(late: Metric) -> None:
    value = filled().compute()["late"]
    assert isinstance(value, float)
    assert value in (0.25, 1.0) or math.isnan(value)


@pytest.mark.parametrize(("answer", "message"), WRONG_ANSWERS)
def test_an_answer_of_a_function_that_is_no_number_is_refused(answer: Any, message: str) -> None:
    def mine(scores: Any, labels: Any, weights: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(ConfigError, match=rf"{message}(.|\n)*where: *metric 'mine'"):
        filled(mine=mine).compute()


def compute_on_ranks(rank: int) -> str:
    class Late(Metric):
        name = "late"

        def compute(self, judged: Judged) -> float:
            return 0.5 if len(judged.samples.scores) <= 40 else None  # type: ignore[return-value]

    Metric.add(Late())
    spec = InputSpec(labels=(LabelSpec(name="click"),))
    accumulator = MetricAccumulator(spec, process_group=torch.distributed.group.WORLD)
    accumulator.update(torch.rand(50, 1), (torch.rand(50, 1) < 0.3).float())
    with pytest.raises(ConfigError) as caught:
        accumulator.compute()
    return caught.value.found


def test_every_rank_hears_of_an_answer_that_is_no_number() -> None:
    assert run_ranks(compute_on_ranks, 2) == ["None, of type NoneType", "an error on the first rank"]
