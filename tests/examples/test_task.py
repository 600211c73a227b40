"""A task from outside the package: read, learned, scored and judged, on one device and on ranks, by every verb."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import ziggurat as zg
from ziggurat.cli.main import main
from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.embeddings import EmbeddingConfig, KernelChoice
from ziggurat.errors import ConfigError, DataError, SchemaError
from ziggurat.features.inputs import InputSpec, LabelSpec
from ziggurat.features.labels import linear_model_name
from ziggurat.features.schema import Task
from ziggurat.features.schema_io import read_schema
from ziggurat.models import build_model
from ziggurat.models.contract.losses import in_label_units, loss_sums, scores_from_logits
from ziggurat.placements import Placement
from ziggurat.plan import Plan, TablePlacement
from ziggurat.runs.export.parity import is_kept
from ziggurat.testing.parity import Tolerance, assert_same_as_single_device
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.config import EarlyStopConfig
from ziggurat.training.early_stop import AUTO_METRIC, stop_metric
from ziggurat.training.label_gradients import far_labels
from ziggurat.training.metrics.accumulator import MetricAccumulator
from ziggurat.training.metrics.metric import Metric, deciding, held_in_few_bits, loss_metric
from ziggurat.training.records.run_folder import RunFolder, read_evaluation

MODULE = "examples.extensions.poisson_count"


@pytest.fixture
def count() -> Iterator[Task]:
    """The task and its metric, listed while a test runs: others of this process ask for all that are listed."""
    module = importlib.import_module(MODULE)
    Metric.add(module.MEAN_DEVIANCE)
    yield Task.add(module.COUNT)
    del Task._members["count"]
    del Metric._members["mean_deviance"]


def inputs_of(task: Task, **more: Any) -> InputSpec:
    visits = LabelSpec(name="visits", task=task, offset=3.0, scale=2.0)
    return InputSpec(labels=(LabelSpec(name="click"), visits), **more)


def test_it_starts_at_the_mean_and_learns_the_deviance(count: Task) -> None:
    inputs = inputs_of(count)
    computed = torch.tensor([[0.3, 0.0], [-1.0, 0.7], [2.0, -40.0]])
    logits = in_label_units(computed, inputs=inputs)
    scores = scores_from_logits(logits, inputs=inputs)
    assert scores[:, 0].tolist() == computed[:, 0].double().sigmoid().tolist()
    assert scores[:, 1].tolist() == pytest.approx([3.0, 3.0 * math.exp(0.7), 3.0 * math.exp(-40.0)])
    labels = torch.tensor([[1.0, 0.0], [0.0, 5.0], [1.0, math.nan]], dtype=torch.float64)
    sums = loss_sums(logits, labels, inputs=inputs)
    rate = 3.0 * math.exp(0.7)
    expected = 2 * 3.0 + 2 * (5 * math.log(5 / rate) - 5 + rate)
    assert float(sums.total[1]) == pytest.approx(expected, rel=1e-6)
    assert float(sums.weight[1]) == 2.0


def test_metrics_of_numbers_judge_it_too_after_its_own(count: Task) -> None:
    accumulator = MetricAccumulator(inputs_of(count))
    labels = torch.tensor([[1.0, 0.0], [0.0, 5.0]], dtype=torch.float64)
    accumulator.update(torch.tensor([[0.5, 1.0], [0.5, 4.0]], dtype=torch.float64), labels)
    found = accumulator.compute()
    assert list(found)[-4:] == ["mean_deviance/visits", "rmse/visits", "mae/visits", "r2/visits"]
    assert found["mean_deviance/visits"] == pytest.approx((2.0 + 2 * (5 * math.log(5 / 4) - 1)) / 2)
    assert found["rmse/visits"] == 1.0
    assert deciding(count) is loss_metric(count) is Metric("mean_deviance")
    label = zg.Label(name="visits", task=count)
    assert stop_metric(EarlyStopConfig(metric=AUTO_METRIC), labels=[label], has_groups=False) == "mean_deviance"
    assert Metric("mean_deviance") in held_in_few_bits(count)
    assert not is_kept("mean_deviance/visits", run=1.0, change=1e-3)
    assert linear_model_name([count, count]) == "Poisson regression"
    assert linear_model_name([count, Task("binary")]) == "a linear model"


@pytest.mark.parametrize("settings", [{"positive": "yes"}, {"positive_weight": 2.0}, {"outcomes": "positive_only"}])
def test_a_schema_asks_the_task_what_its_settings_mean(settings: dict[str, Any], count: Task) -> None:
    with pytest.raises(SchemaError, match=r'take task = "count" out|leave both out'):
        zg.Label(name="visits", task=count, **settings)


def test_what_is_no_count_is_refused_in_files_batches_and_metrics(count: Task) -> None:
    schema = zg.Schema(features=(zg.Dense(name="x"),), labels=(zg.Label(name="visits", task=count),))
    chunk = RawChunk.of(pl.DataFrame({"x": [1.0, 2.0], "visits": [3, -1]}))
    with pytest.raises(DataError, match="a number from 0 on, for count label") as refused:
        Preprocessing.fit(schema, [chunk])
    assert 'task = "regression"' in str(refused.value)
    accumulator = MetricAccumulator(inputs_of(count))
    with pytest.raises(DataError, match="a number from 0 on"):
        accumulator.update(torch.zeros(1, 2), torch.tensor([[1.0, -1.0]]))


def test_a_task_that_nobody_listed_is_refused_by_name_with_the_way_to_list_it() -> None:
    with pytest.raises(SchemaError, match="--extension MODULE") as refused:
        zg.Label(name="visits", task="count")  # type: ignore[arg-type]
    assert "binary, regression" in refused.value.expected


class _Plain(Task):
    name = "plain"

    def loss(self, logits_B: Any, labels_B: Any, *, mean: float, deviation: float) -> Any:
        return ((logits_B - labels_B) / deviation).square().float()


@pytest.mark.parametrize(
    ("part", "answer", "message"),
    [
        ("loss", lambda self, logits_B, labels_B, mean, deviation: (logits_B - labels_B).mean(), "finite losses"),
        ("loss", lambda self, logits_B, labels_B, mean, deviation: labels_B.float(), "with a gradient"),
        ("scores", lambda self, logits: logits.log() * math.nan, "finite scores"),
        ("possible", lambda self, values: values.isfinite(), "no attribute 'isfinite'"),
        ("possible", lambda self, values: True, "a truth value for each value"),
        ("gives_probabilities", True, "scores from 0 to 1"),
    ],
)
def test_one_that_breaks_a_promise_is_refused_where_it_is_added(part: str, answer: Any, message: str) -> None:
    broken = type("Broken", (_Plain,), {part: answer, "__module__": __name__})
    with pytest.raises(ConfigError, match=message):
        Task.add(broken())
    assert "plain" not in Task._members


def test_a_task_that_nothing_judges_says_so() -> None:
    with pytest.raises(ConfigError, match=r"judged_like = Task\.REGRESSION"):
        deciding(_Plain())


def visits(num_rows: int) -> pl.DataFrame:
    """Counts whose mean is the product of what a user and an item bring."""
    draw = np.random.default_rng(0)
    user = draw.integers(0, 20, num_rows)
    item = draw.integers(0, 12, num_rows)
    rate = np.exp(-0.5 + 0.12 * user + 0.1 * (item - 6))
    return pl.DataFrame({"user": user, "item": item, "visits": draw.poisson(rate)})


SCHEMA = """\
[[feature]]
name = "user"
kind = "categorical"

[[feature]]
name = "item"
kind = "categorical"

[[label]]
name = "visits"
task = "count"

[items]
id = "item"
features = ["item"]
"""


def test_the_command_line_trains_evaluates_predicts_exports_and_serves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: Task
) -> None:
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.chdir(tmp_path)
    Path("my.toml").write_text(SCHEMA)
    schema = read_schema("my.toml")
    assert schema.labels[0].task is count
    zg.write_schema(schema, "again.toml")
    assert read_schema("again.toml") == schema
    visits(4_000).write_csv("visits.csv")
    known = ["--extension", MODULE]
    given = ["--data.train", "visits.csv", "--schema", "my.toml", "--out", "runs/a", "--threads", "1"]
    settings = ["--model.embedding-dim", "4", "--epochs", "3", "--training.loader.batch-size", "64"]
    assert main([*known, "train", "table_dlrm", *given, *settings]) == 0
    found = read_evaluation(RunFolder(Path("runs/a")).evaluation("test"))["metrics"]
    assert found["mean_deviance"] < 1.35  # chance alone leaves about 1.1, and the mean of all rows 2.4
    assert main([*known, "evaluate", "runs/a", "visits.csv"]) == 0
    assert main([*known, "predict", "runs/a", "visits.csv", "--out", "scores.csv"]) == 0
    assert main([*known, "report", "runs/a"]) == 0
    scores = pl.read_csv("scores.csv")["visits"].to_numpy()
    assert scores.min() > 0
    assert scores.mean() == pytest.approx(visits(4_000)["visits"].mean(), rel=0.1)
    assert main([*known, "export", "runs/a", "--out", "export"]) == 0
    recommender = zg.Recommender.load(Path("export"))
    for row, score in zip(visits(4_000).head(5).to_dicts(), scores, strict=False):
        (ranked,) = recommender.rank({"user": str(row["user"])}, [str(row["item"])]).items
        assert ranked.tasks["visits"] == pytest.approx(score, rel=1e-5)


def prepared(task: Task) -> tuple[Preprocessing, Any]:
    schema = zg.Schema(
        features=(zg.Categorical(name="user"), zg.Categorical(name="item")),
        labels=(zg.Label(name="visits", task=task),),
    )
    chunk = RawChunk.of(visits(40))
    preprocessing = Preprocessing.fit(schema, [chunk])
    return preprocessing, preprocessing.batch(chunk.frame, with_labels=True)


def test_labels_that_start_far_off_are_measured_in_their_own_unit(count: Task) -> None:
    preprocessing, batch = prepared(count)
    model = build_model(zg.DLRMConfig(embedding_dim=4), preprocessing.inputs, seed=3)

    class _Rows:
        num_rows = batch.batch_size

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "ziggurat.training.label_gradients.ordered_batches",
            lambda dataset, *, batch_size: type("Batches", (), {"batches": lambda self, epoch: iter([batch])})(),
        )
        assert far_labels(model, _Rows()) == []  # type: ignore[arg-type]


def check_ranks(rank: int) -> None:
    """Runs on every rank, whose process imports the task before it reads a schema."""
    preprocessing, batch = prepared(importlib.import_module(MODULE).COUNT)
    table = TablePlacement(table="user", placement=Placement.ROW_WISE, ranks=(0, 1, 2, 3))
    other = TablePlacement(table="item", placement=Placement.TABLE_WISE, ranks=(1,))
    config = zg.DLRMConfig(embedding_dim=4, embedding=EmbeddingConfig(kernel=KernelChoice.TORCH))
    assert_same_as_single_device(
        lambda: build_model(config, preprocessing.inputs, seed=3),
        Plan(world_size=4, tables=(table, other)),
        batch=batch,
        tolerance=Tolerance(fields=1e-6, others=3e-6),
    )


def test_four_ranks_equal_one_device() -> None:
    run_ranks(check_ranks, 4)
