"""The main job through the command line, as a user would: inspect, train, resume, repeat, evaluate, predict, verify."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import ziggurat
from ziggurat.cli.main import main
from ziggurat.runs.load import load_run


def events(num_rows: int, *, seed: int = 0) -> pl.DataFrame:
    rng = np.random.default_rng(seed)
    user, item = rng.integers(0, 200, num_rows), rng.integers(0, 60, num_rows)
    price = np.round(rng.lognormal(2, 1, num_rows), 2)
    logit = 1.5 * (user % 2) + 2.0 * (item % 3 == 0) - 2.0 + 0.3 * np.log(price)
    return pl.DataFrame(
        {
            "user_id": user,
            "item": [f"i{value}" for value in item],
            "price": price,
            "tags": [[f"t{value}" for value in rng.integers(0, 9, rng.integers(0, 4))] for _ in range(num_rows)],
            "timestamp": 1_700_000_000 + np.arange(num_rows) * 60,
            "click": (rng.random(num_rows) < 1 / (1 + np.exp(-logit))).astype(np.int8),
        }
    )


SMALL = ["--training.loader.batch-size", "256", "--training.threads", "1", "--training.early-stop.patience", "0"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZIGGURAT_CACHE", str(tmp_path / "cache"))
    events(6000).write_parquet("events.parquet")
    return tmp_path


def run(*arguments: str) -> None:
    assert main(list(arguments)) == 0


@pytest.mark.draws
def test_the_whole_story(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("data", "inspect", "events.parquet", "--write-schema", "my.toml")
    schema = ziggurat.read_schema("my.toml")
    assert [label.column or label.name for label in schema.labels] == ["click"]
    assert schema.time == "timestamp"
    assert {"user_id", "item", "price", "tags"} <= {feature.name for feature in schema.features}

    command = ["train", "table_dlrm", "--data.train", "events.parquet", "--schema", "my.toml", "--out", "runs/a"]
    run(*command, "--epochs", "3", *SMALL)
    assert (place / "runs/a/report.html").stat().st_size > 10_000
    page = (place / "runs/a/report.html").read_text()
    for title in ("Loss", "Validation AUC", "Throughput", "Calibration, test", "Start-up report"):
        assert title in page
    metrics = json.loads((place / "runs/a/evaluations/test.json").read_text())["metrics"]
    assert metrics["auc"] > 0.7

    run("verify", "runs/a")
    shown = capsys.readouterr().out
    assert "intact" in shown
    assert "every row exactly once" in shown

    run("train", "--config", "runs/a/config.json", "--out", "runs/b")
    left, right = (load_run(place / name).model.state_dict() for name in ("runs/a", "runs/b"))
    assert all(left[name].equal(right[name]) for name in left)

    run("train", "runs/a", "--resume", "--training.epochs", "4")
    assert load_run(place / "runs/a").config.training.epochs == 4

    run("evaluate", "runs/a", "events.parquet", "--json", "out.json")
    evaluation = json.loads((place / "out.json").read_text())
    assert evaluation["num_rows"] == 6000

    run("predict", "runs/a", "events.parquet", "--out", "scores.parquet")
    scores = pl.read_parquet("scores.parquet")
    assert scores["row"].to_list() == list(range(6000))
    labels = events(6000)["click"].to_numpy()
    from sklearn.metrics import roc_auc_score

    assert roc_auc_score(labels, scores["click"].to_numpy()) == pytest.approx(evaluation["metrics"]["auc"], abs=1e-9)

    with pytest.raises(AssertionError):
        run("train", "table_dlrm", "--data.train", "events.parquet", "--schema", "my.toml", "--out", "runs/a")
    assert "--resume" in capsys.readouterr().err

    (place / "runs/a/checkpoints").rename(place / "gone")
    with pytest.raises(AssertionError):
        run("verify", "runs/a")
    assert "checkpoints: MISSING" in capsys.readouterr().out


def test_prediction_needs_no_label_and_knows_what_it_never_saw(place: Path) -> None:
    run("data", "inspect", "events.parquet", "--write-schema", "my.toml")
    run("train", "table_dcn_v2", "--data.train", "events.parquet", "--schema", "my.toml", "--out", "runs/a", *SMALL)
    trained = load_run(place / "runs/a")
    new = pl.DataFrame(
        {
            "user_id": [10**12, 5, None],
            "item": ["never seen", "i3", None],
            "price": [1e30, float("nan"), None],
            "tags": [["never"], [], None],
        }
    )
    scores = trained.scores(new)
    assert scores.shape == (3, 1)
    assert np.isfinite(scores).all()
    new.write_parquet("new.parquet")
    run("predict", "runs/a", "new.parquet", "--out", "scores.parquet")
    np.testing.assert_array_equal(pl.read_parquet("scores.parquet")["click"].to_numpy(), scores[:, 0])


def test_bad_rows_are_an_error_or_put_aside(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("data", "inspect", "events.parquet", "--write-schema", "my.toml")
    bad = events(500).with_columns(click=pl.Series([2] + [0, 1] * 249 + [1], dtype=pl.Int8))
    bad.write_parquet("bad.parquet")
    run("train", "table_dnn", "--data.train", "events.parquet", "--schema", "my.toml", "--out", "runs/a", *SMALL)
    assert main(["evaluate", "runs/a", "bad.parquet"]) == 2
    shown = capsys.readouterr().err
    assert "bad.parquet" in shown
    assert "'click'" in shown
    run("evaluate", "runs/a", "bad.parquet", "--bad-rows", "quarantine", "--json", "out.json")
    assert json.loads((place / "out.json").read_text())["num_rows"] == 499
    kept = list((place / "runs/a/quarantine").iterdir())
    assert len(kept) == 1


def test_schema_drift_names_the_column(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("data", "inspect", "events.parquet", "--write-schema", "my.toml")
    run("train", "table_dnn", "--data.train", "events.parquet", "--schema", "my.toml", "--out", "runs/a", *SMALL)
    events(50).rename({"item": "items"}).write_parquet("renamed.parquet")
    assert main(["predict", "runs/a", "renamed.parquet", "--out", "scores.parquet"]) == 2
    shown = capsys.readouterr().err
    assert "items" in shown
    assert not (place / "scores.parquet").exists()


def test_twelve_lines_of_python(place: Path) -> None:
    schema = ziggurat.Schema(
        features=(
            ziggurat.Categorical(name="user_id"),
            ziggurat.Categorical(name="item"),
            ziggurat.Dense(name="price"),
        ),
        labels=(ziggurat.Label(name="click"),),
        time="timestamp",
    )
    data = ziggurat.prepare(ziggurat.DataConfig(train=("events.parquet",)), schema=schema, folder="prepared")
    model = ziggurat.build_model(ziggurat.DLRMConfig(embedding_dim=8), data.inputs, seed=0)
    training = ziggurat.TrainingConfig(epochs=2, loader=ziggurat.LoaderConfig(batch_size=256))
    trainer = ziggurat.Trainer(model, config=training, train=data.train, valid=data.valid, folder="runs/mine")
    result = trainer.fit()
    assert result.best_value is not None
    assert trainer.evaluate(data.test).metrics["auc"] > 0.65
