"""Training without a recipe: a few models are tried, and the best goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import ziggurat as zg
from tests.studies.own_cache import cache_with_kernels
from ziggurat.cli.main import main
from ziggurat.data.preprocess.splits import SplitConfig
from ziggurat.errors import ConfigError
from ziggurat.features.schema import Outcomes, Pooling
from ziggurat.features.schema_io import write_schema
from ziggurat.recipes.run_config import RunConfig
from ziggurat.studies import first_model
from ziggurat.studies.first_model import BUDGET, Candidate, candidates_of, train_first_model
from ziggurat.training.records.run_folder import CONFIG

SCHEMA = zg.Schema(
    features=(zg.Categorical(name="user"), zg.Categorical(name="item")), labels=(zg.Label(name="click"),)
)


def write_rows(path: Path, *, pairs: float) -> None:
    """1,200 rows whose clicks follow from a user's and an item's own weight, and by `pairs` from their pair."""
    draw = np.random.default_rng(2)
    user, item = draw.integers(8, size=1200), draw.integers(8, size=1200)
    table = draw.normal(size=(8, 8))
    table -= table.mean(axis=0)
    logits = draw.normal(size=8)[user] + draw.normal(size=8)[item] + pairs * table[user, item]
    click = (draw.random(1200) < 1 / (1 + np.exp(-logits))).astype(np.int64)
    pl.DataFrame({"user": user, "item": item, "click": click}).write_parquet(path)


def quick(path: Path) -> list[Candidate]:
    """The candidates on a file, with few and fast steps."""

    def change(config: RunConfig) -> RunConfig:
        training = replace(config.training, epochs=1, threads=1, loader=replace(config.training.loader, batch_size=64))
        return replace(config, data=replace(config.data, train=(str(path),)), training=training)

    return candidates_of(SCHEMA, change=change)


def test_every_candidate_is_tried_and_the_best_by_validation_goes_on(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.parquet", pairs=0.0)
    candidates = quick(tmp_path / "rows.parquet")
    names = {"logistic_regression", "factorisation_machine", "deepfm", "dlrm", "dlrm_penalised", "dcn_v2"}
    assert {each.name for each in candidates} == names
    assert len({str(each.config.model) for each in candidates}) == len(names)
    found = train_first_model(candidates[:2], folder=tmp_path / "run")
    names = {"logistic_regression", "factorisation_machine"}
    assert {each.name for each in found.tried} == names
    assert {each.name for each in (tmp_path / "run/candidates").iterdir()} == names
    values = [each.valid for each in found.tried]
    assert values == sorted(values, reverse=True)
    assert found.result.evaluations["valid"].metrics["auc"] >= values[0] - 0.005
    best = CONFIG.read(tmp_path / f"run/candidates/{found.tried[0].name}/config.json")
    assert best["recipe"] == found.config.recipe


def test_a_budget_ends_a_candidate_and_not_the_training_that_follows() -> None:
    candidate = candidates_of(SCHEMA, change=lambda each: each)[3]
    assert candidate.within_budget(1000) == candidate.config
    limited = candidate.within_budget(10_000_000).training
    assert limited.max_steps * limited.loader.batch_size <= BUDGET
    assert candidate.config.training.max_steps == 0


def test_candidates_that_are_there_are_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "rows.parquet", pairs=0.0)
    candidates = quick(tmp_path / "rows.parquet")[:1]
    trained: list[Path] = []
    real = first_model.train_run

    def train_run(config: RunConfig, *, folder: Path, **given: object) -> zg.RunResult:
        if Path(folder).name == "run":
            raise KeyboardInterrupt
        trained.append(Path(folder))
        return real(config, folder=folder, **given)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(first_model, "train_run", train_run)
    with pytest.raises(KeyboardInterrupt):
        train_first_model(candidates, folder=tmp_path / "run")
    logs = [(path / "metrics.jsonl").read_text() for path in trained]
    monkeypatch.setattr(first_model, "train_run", real)
    found = train_first_model(candidates, folder=tmp_path / "run")
    assert len(found.tried) == 1
    assert [(path / "metrics.jsonl").read_text() for path in trained] == logs


@pytest.mark.parametrize(
    ("change", "way_out"),
    [
        ({"labels": (zg.Label(name="click", outcomes=Outcomes.POSITIVE_ONLY),)}, "table_two_tower"),
        ({"labels": ()}, "--label COLUMN"),
        ({"features": (zg.Sequence(name="seen", pooling=Pooling.NONE),)}, "table_din"),
    ],
)
def test_tables_that_need_another_kind_of_model_are_refused_before_they_are_read(change, way_out: str) -> None:
    with pytest.raises(ConfigError, match=way_out):
        candidates_of(replace(SCHEMA, **change), change=lambda config: config)


def test_a_split_without_validation_and_ranks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "rows.parquet", pairs=0.0)
    whole = [
        replace(
            each, config=replace(each.config, data=replace(each.config.data, split=SplitConfig(valid_fraction=0.0)))
        )
        for each in quick(tmp_path / "rows.parquet")
    ]
    with pytest.raises(ConfigError, match="valid-fraction"):
        train_first_model(whole, folder=tmp_path / "run")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="leave torchrun out"):
        train_first_model(quick(tmp_path / "rows.parquet"), folder=tmp_path / "run")


def test_the_command_line_says_what_was_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    cache_with_kernels(tmp_path / "cache", monkeypatch)
    write_rows(tmp_path / "rows.parquet", pairs=2.0)
    write_schema(SCHEMA, tmp_path / "my.toml")
    given = ["--data.train", str(tmp_path / "rows.parquet"), "--schema", str(tmp_path / "my.toml")]
    monkeypatch.setattr(first_model, "candidates_of", lambda *given, **named: candidates_of(*given, **named)[:2])
    quick = ["--epochs", "1", "--threads", "1", "--out", str(tmp_path / "run")]
    assert main(["train", *given, *quick]) == 0
    shown = capsys.readouterr()
    assert "2 models are tried" in shown.out + shown.err
    assert "factorisation_machine" in shown.out
    assert "the best one's whole training, table_" in shown.out
    assert main(["train", "auto", *given, *quick]) == 2  # nothing is overwritten
    assert "a run that was started before" in capsys.readouterr().err
    assert main(["train", *given, "--model.top.hidden-dims", "5", "--out", str(tmp_path / "other")]) == 2
    assert "name a recipe" in capsys.readouterr().err
