"""A resumed run goes on as it was: other settings, schemas, recipes and data are refused, and leave no trace."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path

import polars as pl
import pytest

import ziggurat
from tests.end_to_end.test_main_job import SMALL, events
from ziggurat.cli.main import main
from ziggurat.config import override, to_json
from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.preprocess.preprocessing_io import load_preprocessing, save_preprocessing
from ziggurat.embeddings import PooledDtype
from ziggurat.errors import ConfigError
from ziggurat.features.items import Items
from ziggurat.features.schema import Task
from ziggurat.files import digest_of
from ziggurat.parallel.device import choose_device
from ziggurat.recipes.catalogue import recipe_named
from ziggurat.recipes.run_config import load_config, run_config_to_json
from ziggurat.runs.data_record import DataRecord
from ziggurat.runs.execute import prepare_run
from ziggurat.runs.load import load_run
from ziggurat.runs.resume import config_to_resume
from ziggurat.training.records.run_folder import CONFIG, RunFolder

SCHEMA = ziggurat.Schema(
    features=(
        ziggurat.Categorical(name="user_id"),
        ziggurat.Categorical(name="item"),
        ziggurat.Dense(name="price"),
    ),
    labels=(ziggurat.Label(name="click"),),
    time="timestamp",
)
TRAIN = ["train", "table_dlrm", "--data.train", "events.parquet", "--schema", "my.toml"]
TINY = ["--model.top.hidden-dims", "8", "--model.bottom.hidden-dims", "8", "--model.embedding-dim", "4"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with data, a schema, and a finished run of one epoch in runs/a."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZIGGURAT_CACHE", str(tmp_path / "cache"))
    events(2000).write_parquet("events.parquet")
    ziggurat.write_schema(SCHEMA, "my.toml")
    assert main([*TRAIN, "--out", "runs/a", "--training.epochs", "1", *SMALL, *TINY]) == 0
    return tmp_path


def contents(folder: Path) -> dict[str, str]:
    """Every file of a folder with its digest."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def resume(*arguments: str) -> int:
    return main(["train", "runs/a", "--resume", *arguments])


def test_what_does_not_fit_is_named_and_leaves_no_trace(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(place / "runs/a")
    smaller = ziggurat.Schema(features=SCHEMA.features[:2], labels=SCHEMA.labels, time="timestamp")
    ziggurat.write_schema(smaller, "smaller.toml")
    price = ziggurat.Label(name="price", task=Task.REGRESSION)  # the run's metric, auc, does not go with it
    ziggurat.write_schema(dataclasses.replace(SCHEMA, features=SCHEMA.features[:2], labels=(price,)), "number.toml")
    events(2000, seed=7).write_parquet("other.parquet")  # as many rows, users and items; other rows
    half = events(2000).with_columns(price=pl.col("price") + 1.0)
    half.write_parquet("prices.parquet")  # the same ids: only values differ
    refused = {
        ("--model.embedding-dim", "8"): "model.embedding-dim: 4 in the run, 8 given",
        ("--training.learning-rate", "0.5"): "training.learning-rate: 0.001 in the run, 0.5 given",
        ("--data.split.by", "random"): 'data.split.by: "time" in the run, "random" given',
        ("--schema", "smaller.toml"): "another schema; table-schema.features.2",
        ("--schema", "number.toml"): "expected: the schema that the run was started with",
        ("--data.train", "other.parquet"): "data train content",
        ("--data.train", "prices.parquet"): "data train content",
        ("--data.train", "gone.parquet"): "gone.parquet",
    }
    for arguments, words in refused.items():
        capsys.readouterr()
        assert resume(*arguments) == 2, arguments
        shown = capsys.readouterr().err
        assert words in shown, shown
        assert "ways out:" in shown
        assert contents(place / "runs/a") == before, arguments
    assert main(["train", "table_dcn_v2", "--schema", "my.toml", "--resume", "--out", "runs/a"]) == 2
    assert "'table_dlrm'" in capsys.readouterr().err
    half.write_parquet("events.parquet")  # the file itself was replaced: equal counts, other values
    assert resume("--training.epochs", "2") == 2
    assert "data train content" in capsys.readouterr().err
    assert contents(place / "runs/a") == before
    run = load_run("runs/a")
    assert run.scores(events(5).select("user_id", "item", "price")).shape == (5, 1)


def test_a_finished_run_says_so_and_records_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(place / "runs/a")
    assert resume("--training.log-every", "3") == 0  # allowed, and without use
    said = capsys.readouterr()
    assert "finished: all epochs done (1), 7 steps" in said.out + said.err
    assert "--resume --training.epochs 2" in said.out + said.err
    after = contents(place / "runs/a")
    same = {"config.json", "inputs.json", "data.json", "startup.json", "metrics.jsonl", "ledger.bin"}
    assert {name: after[name] for name in same} == {name: before[name] for name in same}
    assert load_config("runs/a").training.log_every == 50


def test_what_may_change_is_said_and_recorded(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.rename("events.parquet", "moved.parquet")
    assert resume("--training.epochs", "2", "--data.train", "moved.parquet") == 0
    said = "".join(capsys.readouterr())
    assert "vocabularies of its preprocessing/" in said
    assert "changed: training.epochs 1 → 2" in said
    assert "changed: data.train" in said
    stored = load_config("runs/a")
    assert stored.training.epochs == 2
    assert stored.data.train == (str(place / "moved.parquet"),)
    assert main(["verify", "runs/a"]) == 0


def test_a_run_from_a_gpu_goes_on_without_one_unless_the_command_asks_for_it(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ziggurat.parallel.device._missing", lambda num_ranks: "no GPU")
    run = RunFolder(place / "runs" / "a")
    CONFIG.write(run.config, run_config_to_json(override(load_config(run.path), {"device": "cuda"})))
    before = contents(run.path)
    assert resume("--training.epochs", "2", "--device", "cuda") == 2
    assert "--device auto takes the CPU" in "".join(capsys.readouterr())
    assert contents(run.path) == before
    assert resume("--training.epochs", "2") == 0
    said = "".join(capsys.readouterr())
    assert 'changed: device "cuda" → "auto"' in said
    assert "computes on cpu (no GPU)" in said
    assert load_config(run.path).device == "auto"


def test_early_stop_is_said_at_first_and_at_resume(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    never = ["--training.early-stop.patience", "1", "--training.early-stop.min-delta", "0.9", "--training.epochs", "5"]
    assert main([*TRAIN, "--out", "runs/b", *SMALL, *TINY, *never]) == 0
    said = "".join(capsys.readouterr())
    decides = json.loads(Path("runs/b/startup.json").read_text())
    assert (
        "higher is better (as is known of it); chosen because the label 'click' is binary"
        in Path("runs/b/run.log").read_text()
    )
    assert "after 1 evaluations in a row that do not improve it by 0.9" in json.dumps(decides)
    assert "end      early stop at step 14: auc no better in 1 evaluations (patience 1); best at step 7" in said
    assert main(["train", "runs/b", "--resume"]) == 0
    said = "".join(capsys.readouterr())
    assert "finished: early stop at step 14" in said
    assert "--training.early-stop.patience 2" in said


def test_from_another_folder_and_runs_of_before(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = json.loads((place / "runs/a/config.json").read_text())
    assert stored["data"]["train"] == [str(place / "events.parquet")]
    del stored["sha256"]
    stored["data"]["train"] = ["events.parquet"]  # as it was written before, with no record of the data
    (place / "runs/a/config.json").write_text(json.dumps(stored))
    (place / "runs/a/data.json").unlink()
    elsewhere = place / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    run = str(place / "runs/a")
    assert main(["verify", run]) == 0
    assert main(["towers", "partition", run, "--towers", "2", "--samples", "500"]) == 0
    assert main(["train", run, "--resume", "--training.epochs", "2"]) == 0
    assert load_config(run).data.train == (str(place / "events.parquet"),)


def test_lost_data_says_where_it_was_sought(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = json.loads((place / "runs/a/config.json").read_text())
    stored["data"]["train"] = ["lost.parquet"]
    del stored["sha256"]
    (place / "runs/a/config.json").write_text(json.dumps(stored))
    capsys.readouterr()
    assert main(["verify", "runs/a"]) == 2
    shown = capsys.readouterr().err
    assert "lost.parquet" in shown
    assert str(place / "runs/a") in shown
    assert "--data.train FILE" in shown


def test_a_folder_that_cannot_be_written_is_refused_before_preparing(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "file").write_text("")
    events(300, seed=3).write_parquet("fresh.parquet")
    prepared = set((place / "cache" / "prepared").iterdir())
    capsys.readouterr()
    arguments = [*TRAIN[:3], "fresh.parquet", *TRAIN[4:], "--out"]
    for out in ("file/run", "/proc/1/run"):
        assert main([*arguments, out]) == 2
        shown = capsys.readouterr().err
        assert shown.startswith("FileError")
        assert "--out runs/another_name" in shown
    assert set((place / "cache" / "prepared").iterdir()) == prepared


def test_an_auto_that_comes_to_what_is_stored_is_no_difference(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    given = recipe_named("table_dlrm", schema=SCHEMA)
    chosen = {"training.precision": "bf16", "training.threads": "7", "training.early-stop.metric": "auc"}
    chosen |= {"model.embedding.kernel": "torch", "data.split.by": "time", "device": choose_device().device.type}
    CONFIG.write(run.config, to_json(override(given, chosen)))
    assert given.training.early_stop.metric == str(given.training.precision) == given.device == "auto"
    config, changes = config_to_resume(run, given)
    assert not changes
    assert config.training.early_stop.metric == "auc"
    CONFIG.write(run.config, to_json(override(given, {**chosen, "training.early-stop.metric": "logloss"})))
    with pytest.raises(ConfigError, match=r'early-stop.metric: "logloss" in the run, "auc" given'):
        config_to_resume(run, given)
    CONFIG.write(run.config, to_json(override(given, {**chosen, "device": "cuda"})))
    assert [change.setting for change in config_to_resume(run, given)[1]] == ["device"], "runs move between machines"


def test_a_run_from_before_items_goes_on_without_them(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    config = recipe_named("table_dlrm", schema=SCHEMA)
    stored = to_json(config)
    del stored["table_schema"]["items"]
    CONFIG.write(run.config, stored)
    given = dataclasses.replace(config, table_schema=dataclasses.replace(SCHEMA, items=Items(id="item")))
    resumed, changes = config_to_resume(run, given)
    assert not changes
    assert resumed.table_schema.items is None
    CONFIG.write(run.config, to_json(given))
    with pytest.raises(ConfigError, match="another schema"):
        config_to_resume(run, config)


def test_a_run_keeps_the_type_of_pooled_fields_that_it_was_trained_with(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    given = recipe_named("table_dlrm", schema=SCHEMA)
    stored = to_json(given)
    assert stored["model"]["embedding"].pop("pooled") == "auto"
    CONFIG.write(run.config, stored)
    config, changes = config_to_resume(run, given)
    assert not changes
    assert config.model.embedding.pooled is PooledDtype.FP32, "as runs had it before there was a choice"
    CONFIG.write(run.config, to_json(override(given, {"model.embedding.pooled": "fp32"})))
    config, changes = config_to_resume(run, given)
    assert not changes
    assert config.model.embedding.pooled is PooledDtype.FP32
    CONFIG.write(run.config, to_json(given))
    with pytest.raises(ConfigError, match=r'embedding.pooled: "auto" in the run, "computed" given'):
        config_to_resume(run, override(given, {"model.embedding.pooled": "computed"}))


def with_statistics(folder: Path, *, factor: float) -> Preprocessing:
    """What the run was fitted to, with another standard deviation, as if another processor had computed it."""
    fitted = load_preprocessing(folder)
    numbers = {name: dataclasses.replace(state, sd=state.sd * factor) for name, state in fitted.numbers.items()}
    moved = Preprocessing(fitted.schema, vocabularies=fitted.vocabularies, numbers=numbers)
    save_preprocessing(moved, folder)
    return moved


def test_statistics_of_another_processor_are_kept_and_others_are_refused(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder(place / "runs" / "a")
    stored = json.loads(run.data.read_text())
    theirs = with_statistics(run.preprocessing, factor=1 + 4e-16)
    prepared = prepare_run(load_config(run.path), fitted=theirs)
    assert prepared.preprocessing.numbers == theirs.numbers
    # Version 1 has digests of values that followed the processor: the raw files decide.
    del stored["sha256"], stored["rounding"]
    for entry in stored["splits"]:
        entry["digest"] = hashlib.sha256(entry["digest"].encode()).hexdigest()
    stored["version"] = 1
    stored["vocabulary"] = theirs.fingerprint
    stored["sha256"] = digest_of(stored)
    run.data.write_text(json.dumps(stored))
    capsys.readouterr()
    assert resume("--training.epochs", "2") == 0
    assert "the raw files are those of the run" in "".join(capsys.readouterr())
    assert load_preprocessing(run.preprocessing).numbers == theirs.numbers
    assert json.loads(run.data.read_text())["rounding"] == "exact"
    assert resume("--training.epochs", "3") == 0
    run.data.write_text(json.dumps(stored))
    events(2000, seed=5).write_parquet("events.parquet")
    assert resume("--training.epochs", "4") == 2
    run.data.unlink()
    with_statistics(run.preprocessing, factor=1.01)
    events(2000).write_parquet("events.parquet")
    assert resume("--training.epochs", "4") == 2
    assert "vocabulary" in capsys.readouterr().err


@pytest.mark.parametrize(("stored", "read"), [("exact", "labels_in_32_bits"), ("processor", "processor")])
def test_a_record_of_version_2_had_numbers_to_predict_in_32_bits(tmp_path: Path, stored: str, read: str) -> None:
    record = DataRecord(vocabulary="a", splits=(), raw_files=())
    record.save(tmp_path / "data.json")
    content = json.loads((tmp_path / "data.json").read_text())
    assert content["rounding"] == "exact"
    del content["sha256"]
    content |= {"version": 2, "rounding": stored}
    content["sha256"] = digest_of(content)
    (tmp_path / "data.json").write_text(json.dumps(content))
    loaded = DataRecord.load(tmp_path / "data.json")
    assert loaded is not None
    assert loaded.rounding == read
