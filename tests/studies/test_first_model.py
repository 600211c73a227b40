"""Training without a recipe: a few models are tried, and the best goes on."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

import ziggurat as zg
from tests.studies.own_cache import cache_with_kernels
from ziggurat.cli.main import main
from ziggurat.data.preprocess.splits import SplitConfig
from ziggurat.embeddings import TableInit
from ziggurat.errors import ConfigError
from ziggurat.features.schema import Outcomes, Pooling, Task
from ziggurat.features.schema_io import write_schema
from ziggurat.recipes.catalogue import fit_to_rows
from ziggurat.recipes.run_config import RunConfig, load_config
from ziggurat.runs.execute import prepare_run, train_run
from ziggurat.runs.quality import trees
from ziggurat.runs.quality.trees import TreesResult, boosted_trees
from ziggurat.studies import first_model
from ziggurat.studies.first_model import (
    BUDGET,
    Candidate,
    FirstModel,
    Tried,
    candidates_of,
    train_first_model,
    without_unknown,
)
from ziggurat.training.evaluation.evaluate import PairsGain
from ziggurat.training.records.run_folder import CONFIG, RunFolder
from ziggurat.training.report.progress import NoProgress

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


class _Heard(NoProgress):
    """Keeps what everybody is shown."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


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


def test_pairs_add_nothing_to_a_candidate_that_is_worse_than_no_model_or_a_sum_of_weights() -> None:
    gain = PairsGain(metric="r2", value=4.2, half_width=0.1, num_rows=4000)
    names = {"dlrm": gain, "linear_regression": gain, "deepfm": gain, "dcn_v2": replace(gain, below_floor=True)}
    tried = [
        Tried(
            name=name,
            valid=1.0 + index,
            pairs=each,
            steps=9,
            best_step=9,
            seconds=1.0,
            is_linear=name == "linear_regression",
        )
        for index, (name, each) in enumerate(names.items())
    ]
    found = FirstModel(metric="rmse", tried=tuple(tried), result=None, config=None)  # type: ignore[arg-type]
    assert [found.pairs_text(each) for each in tried] == [
        "+4.2000 ± 0.1000",
        "+4.2000 ± 0.1000",
        "– (worse than linear regression)",
        "– (worse than no model)",
    ]


def test_a_sum_of_weights_is_called_by_what_it_learns() -> None:
    number = replace(SCHEMA, labels=(zg.Label(name="stars", task=Task.REGRESSION),))
    both = replace(SCHEMA, labels=(*SCHEMA.labels, *number.labels))
    found = [candidates_of(schema)[0].name for schema in (SCHEMA, number, both)]
    assert found == ["logistic_regression", "linear_regression", "linear_model"]


def test_a_budget_ends_a_candidate_and_not_the_training_that_follows() -> None:
    candidate = candidates_of(SCHEMA, change=lambda each: each)[3]
    assert candidate.within_budget(1000) == candidate.config
    limited = candidate.within_budget(10_000_000).training
    assert limited.max_steps * limited.loader.batch_size <= BUDGET
    assert candidate.config.training.max_steps == 0


def test_the_best_one_is_not_trained_twice_where_its_budget_was_its_whole_training(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.parquet", pairs=0.0)
    heard = _Heard()
    found = train_first_model(quick(tmp_path / "rows.parquet")[:2], folder=tmp_path / "run", progress=heard)
    candidate = tmp_path / "run/candidates" / found.tried[0].name
    starts = [line.split()[0] for line in heard.lines]
    assert [starts.count(head) for head in ("data", "model", "machine", "kernel")] == [1, 1, 1, 1]
    assert not any(line.startswith(("resum", "finished", "to go on")) for line in heard.lines)
    assert (tmp_path / "run/metrics.jsonl").read_text() == (candidate / "metrics.jsonl").read_text()
    assert found.result.evaluations["valid"].metrics["auc"] == found.tried[0].valid
    assert found.result.fit.steps == found.tried[0].steps
    assert zg.load_run(tmp_path / "run").step == found.tried[0].best_step


@pytest.mark.parametrize("piece", ["config.json", "metrics.jsonl", "checkpoints", "evaluations"])
def test_a_start_that_is_cut_off_as_the_best_is_taken_over_goes_on_as_it_says(
    tmp_path: Path, piece: str, monkeypatch
) -> None:
    write_rows(tmp_path / "rows.parquet", pairs=0.0)
    candidates = quick(tmp_path / "rows.parquet")[:1]
    folder = tmp_path / "run"
    for name in ("copy2", "copytree"):
        real = getattr(first_model.shutil, name)

        def cut_off(entry: Path, *given: Path, real=real, **more: bool) -> None:
            if entry.name == piece and entry.parent.parent.name == "candidates":
                raise KeyboardInterrupt
            real(entry, *given, **more)

        monkeypatch.setattr(first_model.shutil, name, cut_off)
    with pytest.raises(KeyboardInterrupt):
        train_first_model(candidates, folder=folder)
    monkeypatch.undo()
    if RunFolder(folder).has_begun():  # by which a command line says how to go on
        train_run(load_config(folder), folder=folder, resume=True)
    else:
        train_first_model(candidates, folder=folder)
    (candidate,) = (folder / "candidates").iterdir()
    kept = zg.load_run(candidate)
    found = zg.load_run(folder)
    assert found.step == kept.step
    weights = kept.model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in found.model.state_dict().items())


def test_one_of_the_dlrms_starts_with_larger_ids_so_that_validation_says_whether_pairs_matter(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.parquet", pairs=0.0)

    def change(config: RunConfig) -> RunConfig:
        return fit_to_rows(replace(config, data=replace(config.data, train=(str(tmp_path / "rows.parquet"),))))

    found = {each.name: each.config.model.embedding for each in candidates_of(SCHEMA, change=change)}
    assert (found["dlrm"].init, found["dlrm"].init_std) == (TableInit.NORMAL, 0.05)
    assert {found[name].init for name in found if name != "dlrm"} == {TableInit.UNIFORM}


def test_candidates_follow_the_schema() -> None:
    seen = zg.Sequence(name="seen", table="item", pooling=Pooling.NONE)
    with_list = {each.name: each.config for each in candidates_of(replace(SCHEMA, features=(*SCHEMA.features, seen)))}
    assert {"din", "bst"} <= set(with_list)
    assert with_list["din"].table_schema.features[2] == seen
    summed = with_list["dlrm"].table_schema.features[2]
    assert isinstance(summed, zg.Sequence)
    assert summed.pooling is Pooling.SUM
    alone = {each.name for each in candidates_of(replace(SCHEMA, features=SCHEMA.features[:1]))}
    assert "logistic_regression" in alone
    assert "factorisation_machine" not in alone
    assert "din" not in alone


def test_where_most_users_are_new_a_model_without_them_takes_part(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    frame = pl.DataFrame(
        {
            "user": np.arange(1500) // 5,
            "item": draw.integers(9, size=1500),
            "price": draw.random(1500),
            "click": draw.integers(2, size=1500),
            "time": np.arange(1500),
        }
    )
    frame.write_parquet(tmp_path / "rows.parquet")
    features = (*SCHEMA.features, zg.Dense(name="price"))
    schema = replace(SCHEMA, features=features, time="time", tables=(zg.Table(name="user"), zg.Table(name="item")))

    def change(config: RunConfig) -> RunConfig:
        return replace(config, data=replace(config.data, train=(str(tmp_path / "rows.parquet"),)))

    candidates = candidates_of(schema, change=change)
    more = without_unknown(candidates, prepare_run(candidates[0].config))
    assert [each.name for each in more] == [*(each.name for each in candidates), "dlrm_without_user"]
    fewer = more[-1].config.table_schema
    assert [each.name for each in fewer.features] == ["item", "price"]
    assert [each.name for each in fewer.tables] == ["item"]
    known = replace(schema, time="")
    at_random = candidates_of(known, change=change)
    assert without_unknown(at_random, prepare_run(at_random[0].config)) == at_random


@pytest.mark.parametrize("library", ["sklearn", "lightgbm"])
def test_trees_learn_what_depends_on_a_pair_and_are_compared_by_the_same_metric(tmp_path: Path, library: str) -> None:
    pytest.importorskip(library)
    write_rows(tmp_path / "rows.parquet", pairs=4.0)
    prepared = prepare_run(quick(tmp_path / "rows.parquet")[0].config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trees, "trees_library", lambda: library)
        grown = boosted_trees(prepared, metric="auc", threads=1, seed=0)
        assert boosted_trees(prepared, metric="gauc", threads=1, seed=0) is None
        patch.setattr(trees, "trees_library", lambda: "")
        assert boosted_trees(prepared, metric="auc", threads=1, seed=0) is None
    assert grown is not None
    assert grown.valid > 0.75
    assert grown.test > 0.75


def test_trees_that_win_are_named_and_not_kept() -> None:
    best = Tried(name="dlrm", valid=0.7, pairs=None, steps=3, best_step=3, seconds=1.0)
    grown = TreesResult(library="LightGBM 4.7.0", valid=0.71, test=0.7, trees=20, seconds=1.0)
    _, better = first_model._trees_lines(grown, best=best, metric="auc", is_upwards=True)
    assert "trees are better than dlrm by 0.01000" in better
    assert "with LightGBM itself" in better
    assert len(first_model._trees_lines(grown, best=best, metric="rmse", is_upwards=False)) == 1


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
    next_line = next(line for line in shown.out.splitlines() if line.startswith("next "))
    assert "score rows: ziggurat predict" in next_line
    assert "FOLDER" not in next_line
    assert main(shlex.split(next_line.partition("ziggurat ")[2])) == 0
    assert main(["train", "auto", *given, *quick]) == 2  # nothing is overwritten
    assert "a run that was started before" in capsys.readouterr().err
    assert main(["train", *given, "--model.top.hidden-dims", "5", "--out", str(tmp_path / "other")]) == 2
    assert "name a recipe" in capsys.readouterr().err
