"""Logistic regression beside a run: the same rows, the same numbers each time, and a report that says who is better."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

import ziggurat
from tests.end_to_end.test_main_job import SMALL, events
from ziggurat.cli.main import main
from ziggurat.errors import ConfigError, DataError
from ziggurat.features.events import Events
from ziggurat.features.inputs import InputSpec, LabelSpec
from ziggurat.features.items import Items
from ziggurat.features.labels import Outcomes, Task
from ziggurat.features.schema import Pooling
from ziggurat.models import DINConfig, LogisticRegressionConfig, TwoTowerConfig
from ziggurat.recipes.catalogue import table_run
from ziggurat.runs.execute import prepare_run, train_run
from ziggurat.runs.load import load_run
from ziggurat.runs.quality.baselines import baseline_config, check_baseline, train_baseline
from ziggurat.runs.quality.paired import paired_differences
from ziggurat.training.evaluation.evaluate import versus_baseline, versus_trees
from ziggurat.training.metrics.accumulator import MetricAccumulator
from ziggurat.training.records.run_folder import EVALUATION, TREES, VERSUS, RunFolder
from ziggurat.training.report.page import write_report

SCHEMA = ziggurat.Schema(
    features=(
        ziggurat.Categorical(name="user_id"),
        ziggurat.Categorical(name="item"),
        ziggurat.Dense(name="price"),
        ziggurat.MultiHot(name="tags"),
    ),
    labels=(ziggurat.Label(name="click"),),
    time="timestamp",
)
TINY = ["--model.top.hidden-dims", "8", "--model.bottom.hidden-dims", "8", "--dim", "4", "--precision", "bf16"]


def test_a_run_and_its_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZIGGURAT_CACHE", str(tmp_path / "cache"))
    events(2000).write_parquet("events.parquet")
    ziggurat.write_schema(SCHEMA, "my.toml")
    train = ["train", "table_dlrm", "--data.train", "events.parquet", "--schema", "my.toml", "--out", "runs/a"]
    assert main([*train, "--epochs", "1", *SMALL, *TINY]) == 0
    assert "ziggurat report runs/a --baseline" in capsys.readouterr().out
    without = Path("runs/a/report.html").read_text()
    assert "logistic regression" not in without

    assert main(["report", "runs/a", "--baseline"]) == 0
    shown = capsys.readouterr().out
    ours, theirs = (
        EVALUATION.read(RunFolder(folder).evaluation("test")) for folder in (Path("runs/a"), Path("runs/a/baseline"))
    )
    assert ours["num_rows"] == theirs["num_rows"]
    assert theirs["metrics"]["auc"] > 0.6
    page = Path("runs/a/report.html").read_text()
    half_widths = VERSUS.read(RunFolder(Path("runs/a")).versus)["test"]
    assert 0.0 < half_widths["auc"] < 0.2
    verdict = versus_baseline(
        ours["metrics"], theirs["metrics"], metric="auc", name="logistic regression", half_widths=half_widths
    )
    for words in (verdict, f"logistic regression {theirs['metrics']['auc']:.5f}"):
        assert words in page
        assert words in shown
    assert f"<td class=n>{theirs['metrics']['log_loss']:.5f}" in page
    grown = TREES.read(RunFolder(Path("runs/a")).trees)
    half_width = grown["half_widths"]["test"]
    assert 0.0 < half_width < 0.5
    trees = versus_trees(
        ours["metrics"],
        grown["test"],
        metric="auc",
        library=grown["library"],
        half_width=half_width,
    )
    assert f" ± {half_width:.5f}" in trees
    assert f"trees {grown['test']:.5f}" in trees
    assert trees in page
    assert trees in shown
    RunFolder(Path("runs/a")).trees.unlink()
    write_report(Path("runs/a"))
    assert "trees were not tried" in Path("runs/a/report.html").read_text()
    assert "precision differs (bf16; fp32)" in page
    assert "threads differs" not in page

    # it is the run that its config says, and the same each time
    again = RunFolder(tmp_path / "runs/again")
    assert main(["train", "--config", "runs/a/baseline/config.json", "--out", str(again.path)]) == 0
    assert EVALUATION.read(again.evaluation("test"))["metrics"] == theirs["metrics"]
    log = Path("runs/a/baseline/metrics.jsonl").read_text()
    assert train_baseline("runs/a").evaluations["test"].metrics == theirs["metrics"]
    assert Path("runs/a/baseline/metrics.jsonl").read_text() == log  # not trained again
    assert load_run("runs/a").config.model.kind == "dlrm"

    events(2000, seed=1).write_parquet("events.parquet")
    shutil.rmtree("runs/a/baseline")
    with pytest.raises(DataError, match="trained on"):
        train_baseline("runs/a")
    assert not Path("runs/a/baseline").exists()


def test_the_verdict_follows_the_direction_of_the_metric() -> None:
    ours, theirs = {"auc": 0.7, "log_loss": 0.5}, {"auc": 0.7, "log_loss": 0.6}
    assert "no difference" in versus_baseline(ours, theirs, metric="auc", name="logistic regression")
    assert "(0.10000 better)" in versus_baseline(ours, theirs, metric="log_loss", name="logistic regression")
    assert versus_baseline(ours, {}, metric="auc", name="logistic regression") == ""


def test_a_difference_within_its_error_is_none_and_worse_metrics_are_named() -> None:
    ours = {"auc": 0.70764, "gauc": 0.61, "calibration": 1.2, "log_loss": 0.5}
    theirs = {"auc": 0.70, "gauc": 0.63, "calibration": 1.0, "log_loss": 0.5}
    half = {"auc": 0.008, "gauc": 0.005, "calibration": 0.01, "calibration from 1": 0.01, "log_loss": 0.01}
    line = versus_baseline(ours, theirs, metric="auc", name="logistic regression", half_widths=half)
    assert "(+0.00764 ± 0.00800, no difference that these rows can show" in line
    assert line.endswith("; worse by gauc 0.02000 ± 0.00500, calibration 1.20000 instead of 1.00000")
    ours |= {"log_loss": 0.4, "calibration": 0.9}
    half["auc"] = 0.001
    line = versus_baseline(ours, theirs | {"calibration": 0.8}, metric="auc", name="a", half_widths=half)
    assert line.endswith("better); better by calibration, log_loss too; worse by gauc 0.02000 ± 0.00500")
    # Above and below 1 differ by 0.1 in calibration, and by nothing that these rows show in the distance from 1.
    far = ours | {"calibration": 1.079}
    for from_one in ({"calibration from 1": 0.13}, {}):
        known = {"auc": 0.001, "calibration": 0.05, **from_one}
        line = versus_baseline(far, theirs | {"calibration": 0.983}, metric="auc", name="a", half_widths=known)
        assert "calibration" not in line
    assert "better" in versus_baseline(
        ours, theirs, metric="auc", name="logistic regression", half_widths={"auc": 0.001}
    )
    far_below = versus_baseline(
        {"auc": 0.39}, {"auc": 0.685}, metric="auc", name="logistic regression", half_widths={"auc": 0.01}
    )
    assert "worse than a sum of weights" in far_below
    assert "learned no more" not in far_below
    # Of an error, more is worse: no sign says otherwise.
    error = versus_baseline({"rmse": 19.5}, {"rmse": 2.2}, metric="rmse", name="linear regression")
    assert error == "rmse 19.50000, linear regression 2.20000 (17.30000 worse than a sum of weights)"
    grown = versus_trees({"rmse": 19.5}, 2.2, metric="rmse", library="trees 1.0")
    assert grown == "rmse 19.50000, trees 2.20000 (17.30000 worse than trees; trees 1.0, its defaults)"
    grown = versus_trees({"auc": 0.49}, 0.452, metric="auc", library="trees 1.0", half_width=0.07)
    assert "(+0.03800 ± 0.07000, no difference that these rows can show; " in grown
    grown = versus_trees({"auc": 0.49}, 0.452, metric="auc", library="trees 1.0", half_width=0.01)
    assert "(0.03800 ± 0.01000 better than trees; " in grown


def test_the_error_of_a_difference_is_that_of_models_on_the_same_groups() -> None:
    draw = np.random.default_rng(0)
    found: list[float] = []
    for noise in (0.02, 0.5):
        inputs = InputSpec(labels=(LabelSpec(name="click"),), has_groups=True)
        group = np.repeat(np.arange(200), 20)
        truth = draw.random(4000)
        label = torch.from_numpy((draw.random(4000) < truth).astype(np.float32))[:, None]
        scores = [np.clip(truth + draw.normal(scale=noise, size=4000), 0, 1) for _ in range(2)]
        accumulators = [MetricAccumulator(inputs) for _ in scores]
        for accumulator, each in zip(accumulators, scores, strict=True):
            score = torch.from_numpy(each.astype(np.float32))[:, None]
            accumulator.update(score, label, None, torch.from_numpy(group))
        differences = paired_differences(*accumulators, units=group)
        metrics = accumulators[0].compute()
        assert set(differences) == {*metrics, "calibration from 1"}
        distances = [abs(each.compute()["calibration"] - 1.0) for each in accumulators]
        assert differences["calibration from 1"].value == pytest.approx(distances[0] - distances[1])
        assert abs(differences["auc"].value) < 2 * differences["auc"].half_width
        found.append(differences["auc"].half_width)
    assert 0.0 < found[0] < found[1] < 0.05  # what both models know alike is no part of the error


def test_what_has_no_baseline_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="logistic regression itself"):
        check_baseline(table_run(LogisticRegressionConfig(), SCHEMA))
    numbers = dataclasses.replace(SCHEMA, labels=(ziggurat.Label(name="click", task=Task.REGRESSION),))
    with pytest.raises(ConfigError, match="linear regression itself"):
        check_baseline(table_run(LogisticRegressionConfig(), numbers))
    with pytest.raises(ConfigError, match="finds no items among all"):
        check_baseline(table_run(TwoTowerConfig(), SCHEMA))
    chosen = ziggurat.Label(name="click", outcomes=Outcomes.POSITIVE_ONLY)
    with pytest.raises(ConfigError) as refused:
        check_baseline(table_run(TwoTowerConfig(), dataclasses.replace(SCHEMA, labels=(chosen,))))
    assert refused.value.ways_out == ("leave --baseline out",)  # a ranker learns nothing from rows of one class
    log = ziggurat.Schema(
        features=(ziggurat.Categorical(name="item"),),
        labels=(),
        group="user_id",
        time="timestamp",
        items=Items(id="item", features=("item",)),
        events=Events(),
    )
    with pytest.raises(ConfigError, match="no order of events") as refused:
        check_baseline(table_run(DINConfig(), log))
    assert "ziggurat compare RUN OTHER" in refused.value.ways_out[1]
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="ziggurat report RUN --baseline"):
        check_baseline(table_run(DINConfig(), SCHEMA))


def test_lists_that_are_read_one_by_one_are_summed() -> None:
    features = (*SCHEMA.features[:3], dataclasses.replace(SCHEMA.features[3], pooling=Pooling.NONE))
    run = table_run(DINConfig(), dataclasses.replace(SCHEMA, features=features))
    stop = dataclasses.replace(run.training.early_stop, metric="profit", better="higher")
    run = dataclasses.replace(run, training=dataclasses.replace(run.training, early_stop=stop, seed=7))
    rows: Any = SimpleNamespace(train=SimpleNamespace(num_rows=300_000), valid=None)
    found = baseline_config(run, data=rows)
    assert (found.training.loader.batch_size, found.training.epochs) == (512, 3)
    assert found.table_schema.features[3].pooling is Pooling.SUM  # type: ignore[union-attr]
    assert found.training.early_stop.metric == "auto"  # a function of the user's own is not at hand
    assert (found.training.seed, found.training.early_stop.patience) == (7, 2)
    found.check()


def test_numbers_to_predict_are_compared_with_linear_regression(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    table = events(600)
    table = table.with_columns(spent=table["price"].cast(float) * 2.0)
    table.drop("click").write_parquet("events.parquet")
    label = ziggurat.Label(name="spent", task=Task.REGRESSION)
    ziggurat.write_schema(dataclasses.replace(SCHEMA, labels=(label,)), "my.toml")
    train = ["train", "table_dlrm", "--data.train", "events.parquet", "--schema", "my.toml", "--out", "runs/a"]
    assert main([*train, "--epochs", "1", *SMALL, *TINY, "--verbose"]) == 0
    shown = capsys.readouterr().out
    assert "better than linear regression?" in shown
    width = EVALUATION.read(RunFolder(Path("runs/a")).evaluation("test"))["half_widths"]["rmse"]
    assert f" ± {width:.5f}" in next(line for line in shown.splitlines() if line.startswith("test "))

    assert main(["report", "runs/a", "--baseline"]) == 0
    shown = capsys.readouterr().out
    page = Path("runs/a/report.html").read_text()
    assert "linear regression on the same rows" in shown
    assert "linear regression" in page
    assert "logistic" not in shown
    assert "logistic" not in page.replace("table_logistic", "")


def test_the_baseline_is_as_good_as_scikit_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """3,000 rows, twenty numbers and three ids: at the rate of a network numbers had not been learned at the end."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(5)
    numbers = {f"number_{index}": draw.lognormal(size=3000) for index in range(20)}
    ids = {f"id_{index}": draw.integers(30, size=3000) for index in range(3)}
    logits = sum(draw.normal(scale=0.4) * np.log(each) for each in numbers.values()) - 0.5
    logits += sum(draw.normal(scale=0.3, size=30)[each] for each in ids.values())
    label = (draw.random(3000) < 1 / (1 + np.exp(-logits))).astype(np.int64)
    pl.DataFrame({**numbers, **ids, "label": label}).write_parquet("rows.parquet")
    features = [*(ziggurat.Dense(name=name) for name in numbers), *(ziggurat.Categorical(name=name) for name in ids)]
    schema = ziggurat.Schema(features=tuple(features), labels=(ziggurat.Label(name="label"),))
    run = table_run(LogisticRegressionConfig(), schema)
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, train=("rows.parquet",)))
    run = dataclasses.replace(run, training=dataclasses.replace(run.training, threads=1))
    data = prepare_run(run)
    ours = train_run(baseline_config(run, data=data), folder="run").evaluations["test"].metrics["auc"]

    def rows(dataset: Any) -> tuple[Any, np.ndarray]:
        tables = [dataset.read_group(index) for index in range(len(dataset.group_sizes))]
        columns = {name: np.concatenate([table[name].to_numpy() for table in tables]) for name in (*numbers, *ids)}
        one_hot = [np.eye(40)[columns[name]] for name in ids]
        values = np.concatenate([np.stack([columns[name] for name in numbers], axis=1), *one_hot], axis=1)
        return values, np.concatenate([table["label:label"].to_numpy() for table in tables])

    theirs = LogisticRegression(max_iter=1000).fit(*rows(data.train))
    values, labels = rows(data.test)
    assert ours >= roc_auc_score(labels, theirs.decision_function(values)) - 0.003
