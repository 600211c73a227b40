"""A run of a study trains what its config says, as a run of its own does."""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import ziggurat as zg
from tests.training.test_label_weights import run_config
from ziggurat.cli.main import main
from ziggurat.data.preprocess.splits import SplitBy, SplitConfig
from ziggurat.errors import ConfigError, DataError
from ziggurat.recipes.protocols import Protocol
from ziggurat.runs.execute import prepare_run
from ziggurat.studies.compare import CompareConfig, compare
from ziggurat.studies.compare_own import own_data, settings_for_rows
from ziggurat.studies.compare_report import model_columns, model_rows
from ziggurat.studies.compare_runs import RunRequest, finish_run, refuse_one_class, require_splits
from ziggurat.studies.compare_runs import test_scores as scores_of_test
from ziggurat.training.label_weights import LabelWeights
from ziggurat.training.records.run_lock import RunLock
from ziggurat.training.report.progress import NoProgress


def test_a_compared_run_learns_them_as_a_run_of_its_own_does(tmp_path: Path) -> None:
    """Studies trained without the learned weights, and their configs said that they had them."""
    config = run_config(tmp_path)
    config = dataclasses.replace(
        config, data=dataclasses.replace(config.data, split=zg.SplitConfig(by=zg.SplitBy.RANDOM))
    )
    prepared = prepare_run(config)
    labels = {}
    for weights in LabelWeights:
        each = dataclasses.replace(config, label_weights=weights)
        folder = tmp_path / f"compared-{weights.value}"
        request = RunRequest(
            model="mmoe", variant=0, config=each, folder=folder, metric="auc/click", protocol=Protocol.RECIPE
        )
        record = finish_run(request, data=prepared, read_test=True, progress=NoProgress())
        zg.train_run(each, folder=tmp_path / f"own-{weights.value}")
        evaluation = zg.load_run(tmp_path / f"own-{weights.value}").evaluate_split("test")
        for name in ("log_loss/click", "log_loss/like"):
            assert record.test[name] == pytest.approx(evaluation.metrics[name], rel=1e-6)
        labels[weights] = (record.test["log_loss/click"], record.digest)
    given, learned = labels[LabelWeights.GIVEN], labels[LabelWeights.UNCERTAINTY]
    assert given[0] != learned[0]
    assert given[1] != learned[1], "a folder of the one is no folder of the other"


def request_of(config: zg.RunConfig, folder: Path) -> RunRequest:
    return RunRequest(
        model="mmoe", variant=0, config=config, folder=folder, metric="auc/click", protocol=Protocol.RECIPE
    )


def at_random(config: zg.RunConfig) -> zg.RunConfig:
    return dataclasses.replace(config, data=dataclasses.replace(config.data, split=SplitConfig(by=SplitBy.RANDOM)))


def test_a_run_that_another_process_trains_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way out was to remove the run that the other one was training."""
    config = at_random(run_config(tmp_path))
    prepared = prepare_run(config)
    request = request_of(config, tmp_path / "run")
    monkeypatch.setattr("ziggurat.training.records.run_lock._PATIENCE_S", 0.1)
    with RunLock(request.folder) as other:
        other.acquire()
        with pytest.raises(ConfigError, match="another one that does") as error:
            finish_run(request, data=prepared, read_test=True, progress=NoProgress())
        assert "rm -r" not in str(error.value)
    record = finish_run(request, data=prepared, read_test=True, progress=NoProgress())
    with RunLock(request.folder) as other:
        other.acquire()
        again = finish_run(request, data=prepared, read_test=True, progress=NoProgress())
    assert again.digest == record.digest, "what is finished is read, whoever holds the folder"


def test_scores_that_were_cut_off_are_named_and_the_way_out_works(tmp_path: Path) -> None:
    config = at_random(run_config(tmp_path))
    prepared = prepare_run(config)
    request = request_of(config, tmp_path / "run")
    finish_run(request, data=prepared, read_test=True, progress=NoProgress())
    scores, _ = scores_of_test(request.folder)
    path = request.folder / "test_scores.npy"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match=f"rm -r {request.folder}"):
        scores_of_test(request.folder)
    shutil.rmtree(request.folder)
    finish_run(request, data=prepared, read_test=True, progress=NoProgress())
    np.testing.assert_array_equal(scores_of_test(request.folder)[0], scores)


@pytest.mark.parametrize("split", ["valid", "test"])
def test_rows_of_one_class_are_refused_before_anything_is_trained(tmp_path: Path, split: str) -> None:
    config = run_config(tmp_path)
    frame = pl.read_parquet(tmp_path / "rows.parquet")
    parts = {"train": frame[:300], "valid": frame[300:350], "test": frame[350:]}
    parts[split] = parts[split].with_columns(click=pl.lit(0))
    for name, part in parts.items():
        part.write_parquet(tmp_path / f"{name}.parquet")
    files = {name: (str(tmp_path / f"{name}.parquet"),) for name in parts}
    data = dataclasses.replace(config.data, split=SplitConfig(by=SplitBy.FILES), **files)
    prepared = prepare_run(dataclasses.replace(config, data=data))
    with pytest.raises(DataError, match=f"{split} rows of which some are positive") as error:
        refuse_one_class(prepared, metric="auc/click", splits=("valid", "test"))
    assert "none that is positive among 50" in str(error.value)
    refuse_one_class(prepared, metric="auc/like", splits=("valid", "test"))
    without = dataclasses.replace(prepared, valid=None)
    with pytest.raises(ConfigError, match="no validation rows") as missing:
        require_splits(without, with_test=True)
    assert "--data.valid FILE" in str(missing.value)


def test_few_rows_are_said_to_be_trained_as_many(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    asked = dataclasses.replace(config, training=zg.table_run(config.model, config.table_schema).training)
    said = settings_for_rows(own_data(asked, {}))
    assert "batches of 2,048, 3 epochs" in said
    assert "--batch-size 64" in said
    given = {"training.loader.batch-size": "64", "training.epochs": "20"}
    assert not settings_for_rows(own_data(asked, given)), "who says it knows it"


def test_a_comparison_shows_the_metric_of_every_label(tmp_path: Path) -> None:
    """Of several labels the table showed the one that decides alone."""
    config = at_random(run_config(tmp_path, label_weights=LabelWeights.GIVEN))
    found = compare(
        CompareConfig(data=own_data(config, {}, name="rows"), models=("mmoe",), seeds=2, protocol=Protocol.RECIPE),
        out=tmp_path / "compared",
    )
    columns = model_columns(found)
    (row,) = model_rows(found)
    assert len(columns) == len(row)
    mean, _ = found.models[0].mean_sd("auc/like")
    assert row[columns.index("test AUC of like")].startswith(f"{mean:.5f}")
    assert "test AUC of click" in columns


def test_runs_of_a_study_are_no_finished_runs_and_the_way_out_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error advised to delete a file, which led to another error."""
    config = at_random(run_config(tmp_path, label_weights=LabelWeights.GIVEN))
    finish_run(request_of(config, tmp_path / "run"), data=prepare_run(config), read_test=True, progress=NoProgress())
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    assert main(["compare", str(tmp_path / "run"), str(tmp_path / "other")]) == 2
    shown = capsys.readouterr().err
    assert "a run of a comparison" in shown
    command = next(line for line in shown.splitlines() if "ziggurat train --config" in line).partition("ziggurat ")[2]
    words = [str(tmp_path / "own") if word == "runs/own" else word for word in shlex.split(command)]
    assert main(words) == 0
    evaluation = zg.load_run(tmp_path / "own").evaluate_split("test")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["test"]["auc/click"] == pytest.approx(evaluation.metrics["auc/click"])
