"""fit: a table in memory becomes a trained run, as the files that the commands train on do."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from tests.data.raw.test_frames import columns
from tests.studies.own_cache import cache_with_kernels
from ziggurat.cli.main import main
from ziggurat.data.inspect.inspect_file import inspect_file
from ziggurat.errors import ConfigError, DataError, SchemaError, ZigguratError
from ziggurat.features.schema import Categorical, Schema
from ziggurat.models import LogisticRegressionConfig, NextItemConfig
from ziggurat.recipes.catalogue import table_run
from ziggurat.runs.execute import train_run
from ziggurat.runs.load import Run, load_run
from ziggurat.studies import fit as fit_module
from ziggurat.studies.fit import fit
from ziggurat.training.report.progress import NoProgress

MODEL = LogisticRegressionConfig()
UNLABELLED = Schema(features=(Categorical(name="user"),))
QUIET: dict[str, Any] = {"progress": NoProgress(), "model": MODEL}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_with_kernels(tmp_path / "cache", monkeypatch)
    monkeypatch.chdir(tmp_path)


def weights_of(run: Run) -> dict[str, Any]:
    return {name: value.numpy() for name, value in run.model.state_dict().items()}


def test_a_table_in_memory_trains_to_the_same_weights_as_its_file_and_goes_on(tmp_path: Path) -> None:
    table = columns(300)
    ours = fit(table, "bought", **QUIET)
    assert ours.folder == Path("runs/fit")
    pl.DataFrame(table).write_parquet("table.parquet")
    files = fit("table.parquet", label="bought", out="runs/files", **QUIET)
    assert ours.config.table_schema == files.config.table_schema
    assert dataclasses.replace(ours.config.data, train=()) == dataclasses.replace(files.config.data, train=())
    for name, value in weights_of(files).items():
        np.testing.assert_array_equal(weights_of(ours)[name], value)
    wanted = ours.predict("table.parquet")["bought"].to_numpy()
    frame = pl.DataFrame(table)
    for same in (frame, frame.to_pandas(), frame.to_arrow(), table):
        np.testing.assert_array_equal(ours.scores(same)[:, 0], wanted)
        assert ours.evaluate(same).metrics == ours.evaluate("table.parquet").metrics
    assert ours.importance(table).features == ours.importance("table.parquet").features
    # The rows are kept with the run, so all that a run of files can do it can.
    assert ours.evaluate_split("test").num_rows == files.evaluate_split("test").num_rows > 0
    assert main(["evaluate", "runs/fit", "--split", "test"]) == 0
    shown = ours._repr_html_()
    assert "<th>valid</th><th>test</th>" in shown
    assert "<td>auc</td>" in shown
    assert "<svg" in shown
    assert "Loss" in shown
    assert repr(ours).startswith("Run('runs/fit', logistic_regression on train.parquet, step")
    longer = dataclasses.replace(ours.config.training, epochs=ours.config.training.epochs + 1, max_steps=0)
    config = dataclasses.replace(ours.config, training=longer)
    train_run(config, folder="runs/fit", resume=True, data=table)
    with pytest.raises(DataError, match="another one"):
        train_run(config, folder="runs/fit", resume=True, data={**table, "price": table["price"] + 1})
    with pytest.raises(ConfigError, match="a run that was started before"):
        fit(table, "bought", out="runs/fit", **QUIET)


def test_without_a_model_the_same_is_tried_as_by_train_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def first_model(candidates: Any, *, folder: Path, progress: Any, hooks: Any = ()) -> None:
        asked[str(folder)] = candidates

    monkeypatch.setattr(fit_module, "train_first_model", first_model)
    monkeypatch.setattr(fit_module, "load_run", lambda folder: folder)
    monkeypatch.setattr("ziggurat.studies.first_model.train_first_model", first_model)
    table = columns()
    pl.DataFrame(table).write_parquet("table.parquet")
    assert fit(table, label="bought", progress=NoProgress()) == Path("runs/fit")
    assert main(["data", "inspect", "table.parquet", "--label", "bought", "--write-schema", "s.toml"]) == 0
    with pytest.raises(AttributeError):  # nothing was trained: there is no result to print
        main(["train", "auto", "--data.train", "table.parquet", "--schema", "s.toml", "--out", "cli"])
    ours = asked["runs/fit"]
    theirs = asked["cli"]
    assert [each.name for each in ours] == [each.name for each in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one.config.data.train == (str(Path("runs/fit/raw/train.parquet").absolute()),)
        named = dataclasses.replace(one.config, data=dataclasses.replace(one.config.data, train=("table.parquet",)))
        assert named == other.config


def test_validation_tables_of_ones_own_are_kept_and_evaluated() -> None:
    table = pl.DataFrame(columns())
    run = fit(table.head(400), "bought", valid=table[400:500], test=table[500:], **QUIET)
    assert sorted(path.name for path in (run.folder / "raw").iterdir()) == [
        "test.parquet",
        "train.parquet",
        "valid.parquet",
    ]
    assert run.evaluate_split("valid").num_rows == 100
    table[400:500].write_parquet("valid.parquet")
    with pytest.raises(ConfigError, match="frames for all splits, or files for all"):
        fit(table, "bought", valid="valid.parquet", **QUIET)


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"data": 3}, ConfigError, "a frame"),
        ({"data": []}, ConfigError, "a frame"),
        ({"label": "bougth"}, SchemaError, "bougth"),
        ({"data": {"user": ["a", "b"] * 9, "item": ["x", "y", "z"] * 6}}, SchemaError, "a column to predict"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_before_anything_is_written(
    given: dict[str, Any], error: Any, match: str
) -> None:
    with pytest.raises(error, match=match):
        fit(**{"data": columns(), **given, **QUIET})
    assert not Path("runs").exists()


def test_files_and_a_table_together_are_refused_and_tables_by_split_need_one_to_train_on() -> None:
    table = columns()
    config = table_run(MODEL, inspect_file(table).schema)
    named = dataclasses.replace(config, data=dataclasses.replace(config.data, train=("table.parquet",)))
    with pytest.raises(ConfigError, match="either files or a table"):
        train_run(named, folder="other", data=table)
    with pytest.raises(ConfigError, match="frames by split"):
        train_run(config, folder="other", data={"valid": table})
    assert not Path("other").exists()


@pytest.mark.parametrize(
    ("given", "way"),
    [
        ({"label": "bougth"}, 'label="bought"'),
        ({"label": "price3"}, 'positive="it\'s 1"'),
        ({"label": "", "positive": "it's 1"}, 'label="price3"'),
        ({"out": "kept.csv"}, 'choose another: out="runs/kept"'),
        ({"out": "old"}, 'choose another folder: out="runs/another_name"'),
        ({"data": "kept.csv"}, 'settings={"data.bad-rows": "quarantine"}'),
        ({"settings": {"training": 3}}, 'settings={"training.epochs": "3"}'),
        ({"settings": {"model.embedding-dim": 4}, "model": None}, "model=zg.DLRMConfig()"),
        ({"schema": UNLABELLED, "label": "", "model": None}, 'labels=(zg.Label(name="COLUMN"),)'),
        ({"model": NextItemConfig()}, "model=zg.DLRMConfig() learns from rows that are samples"),
        ({"settings": {"training.epocs": 3}}, 'did you mean settings={"training.epochs": "3"}?'),
        ({"settings": {"training.batch-size": 256}}, 'settings={"training.loader.batch-size": "256"}'),
        ({"settings": {"batch_size": 256}}, 'settings={"training.loader.batch-size": "256"}'),
        ({"settings": {"lr": 0.1}}, 'settings={"training.learning-rate": "0.1"}'),
        ({"settings": {"table_lr": 1}}, 'settings={"training.table-learning-rate": "1"}'),
        ({"settings": {"--epochs": 2}}, 'settings={"training.epochs": "2"}'),
    ],
)
def test_errors_name_arguments_of_python_and_no_flags(given: dict[str, Any], way: str) -> None:
    table = pl.DataFrame(columns(300))
    price = pl.when(pl.int_range(300) == 200).then(pl.lit("inf")).otherwise(pl.col("price").cast(pl.String))
    table.select("user", "bought", price=price).write_csv("kept.csv")
    table = table.with_columns(price3=pl.format("it's {}", pl.int_range(300) % 3))
    Path("old").mkdir()
    Path("old/metrics.jsonl").write_text("")
    with pytest.raises(ZigguratError) as refused:
        fit(**{"data": table, "label": "bought", **QUIET, **given})
    assert any(way in each for each in refused.value.ways_out[:2])
    assert not any(re.search(r"--[a-z]", each) for each in refused.value.ways_out if "`ziggurat" not in each)
    assert "command line" not in refused.value.where


def test_the_way_out_of_a_bad_row_and_of_a_log_of_events_works() -> None:
    table = pl.DataFrame(columns(300))
    price = pl.when(pl.int_range(300) == 200).then(float("inf")).otherwise(pl.col("price").cast(pl.Float64))
    settings = {"data.bad-rows": "quarantine", "training.epochs": 1}
    run = fit(table.with_columns(price=price), "bought", settings=settings, **QUIET)
    assert run.config.training.epochs == 1
    log = pl.DataFrame({"user": [n % 20 for n in range(200)], "item": [n % 7 for n in range(200)]})
    log = log.with_columns(time=1_700_000_000 + pl.int_range(200))
    with pytest.raises(ConfigError) as refused:
        fit(log, progress=NoProgress())
    assert refused.value.ways_out == ("fit(data, model=zg.NextItemConfig())",)
    model = NextItemConfig(embedding_dim=8, num_layers=1)
    assert fit(log, model=model, settings={"training.epochs": 1}, progress=NoProgress()).step > 0


def test_a_run_that_was_moved_reads_the_rows_that_it_kept_where_it_is_now() -> None:
    table = pl.DataFrame(columns(300))
    run = fit(table, "bought", out="first/run", **QUIET)
    wanted = run.evaluate_split("test").metrics
    Path("second").mkdir()
    Path("first/run").rename("second/moved")
    fit(table.reverse(), "bought", out="first/run", **QUIET)  # other rows lie now where those of the first run did
    moved = load_run("second/moved")
    assert moved.evaluate_split("test").metrics == wanted
    assert main(["verify", "second/moved"]) == 0
    assert main(["train", "second/moved", "--resume", "--training.epochs", "12"]) == 0
    config = dataclasses.replace(moved.config, training=dataclasses.replace(moved.config.training, epochs=13))
    train_run(config, folder="second/moved", resume=True, data=table)


def test_a_setting_of_training_changes_that_setting_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[Any] = []
    monkeypatch.setattr(fit_module, "train_run", lambda config, **others: trained.append(config))
    monkeypatch.setattr(fit_module, "load_run", lambda folder, **others: folder)
    for number, settings in enumerate(({}, {"training.epochs": 2})):
        fit(columns(), label="bought", settings=settings, out=f"runs/{number}", **QUIET)
    fitted, asked = (config.training for config in trained)
    assert asked.epochs == 2 != fitted.epochs
    assert asked.loader.batch_size == fitted.loader.batch_size
    assert asked.early_stop == fitted.early_stop
