"""`ziggurat compare` and `scale` on a table of one's own, and on finished runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from tests.runs.scores.test_next_items import SCHEMA as EVENTS
from tests.runs.scores.test_next_items import events
from tests.studies.own_cache import cache_with_kernels
from ziggurat.cli.main import main
from ziggurat.data.datasets import schema_for
from ziggurat.errors import ConfigError
from ziggurat.features.schema import Categorical, Dense, Label, Schema, Task
from ziggurat.models import BSTConfig
from ziggurat.models.sequence.layers.hstu import PositionTimeBias
from ziggurat.models.sequence.next_item import NextItemConfig
from ziggurat.models.sequence.next_item_loss import NextItemLoss
from ziggurat.recipes.catalogue import recipe_named
from ziggurat.recipes.protocols import Protocol
from ziggurat.recipes.run_config import load_config
from ziggurat.studies import compare_runs
from ziggurat.studies.compare import CompareConfig, compare
from ziggurat.studies.compare_own import main_metric, own_data, own_models
from ziggurat.studies.compare_questions import questions_of
from ziggurat.studies.compare_statistics import mean_difference, squared_errors

SCHEMA = """
[[feature]]
kind = "categorical"
name = "user"

[[feature]]
kind = "categorical"
name = "item"

[[feature]]
kind = "dense"
name = "price"

[[label]]
name = "click"
"""


def write_table(path: Path, *, seed: int = 0, rows: int = 3000) -> None:
    rng = np.random.default_rng(seed)
    user, item, price = rng.integers(0, 30, rows), rng.integers(0, 20, rows), rng.random(rows)
    chance = 1 / (1 + np.exp(-(rng.normal(size=30)[user] + rng.normal(size=20)[item] - price)))
    click = (rng.random(rows) < chance).astype(int)
    pl.DataFrame({"user": user, "item": item, "price": price, "click": click, "paid": 2 * chance}).write_parquet(path)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory):
    patch, folder = pytest.MonkeyPatch(), tmp_path_factory.mktemp("own")
    cache_with_kernels(folder / "cache", patch)
    write_table(folder / "shop.parquet")
    (folder / "my.toml").write_text(SCHEMA)
    patch.chdir(folder)
    yield folder
    patch.undo()


OWN = ["--data.train", "shop.parquet", "--schema", "my.toml"]
QUICK = ["--epochs", "1", "--batch-size", "256", "--threads", "1"]


def test_compares_on_a_table_of_ones_own(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["compare", "table", *OWN, *QUICK, "--models", "logistic_regression,dnn", "--seeds", "1", "--trials", "2"]
    given += ["--dim", "4", "--model.deep.hidden-dims", "8"]
    assert main(given) == 0
    shown = capsys.readouterr().out
    assert "DeLong over rows, p" in shown
    data = json.loads((place / "runs/compare/shop-recipe/comparison.json").read_text())
    assert data["run"]["training"]["loader"]["batch_size"] == 256
    by_name = {model["name"]: model for model in data["models"]}
    assert f"{by_name['dnn']['runs'][0]['test']['auc']:.5f}" in shown
    config = load_config(place / "runs/compare/shop-recipe/dnn/variant0_seed0")
    assert config.model.embedding_dim == 4  # pyright: ignore[reportAttributeAccessIssue]
    assert config.model.deep.hidden_dims == (8,)  # pyright: ignore[reportAttributeAccessIssue]
    second = load_config(place / "runs/compare/shop-recipe/dnn/variant1_seed0").training
    assert (second.learning_rate, second.table_learning_rate) == (
        2 * config.training.learning_rate,
        2 * config.training.table_learning_rate,
    )

    def never(*_: object, **__: object) -> None:
        raise AssertionError("everything is there")

    monkeypatch.setattr(compare_runs, "_trainer", never)
    assert main(given) == 0  # goes on where it was: nothing is left to train
    write_table(place / "other.parquet", seed=1)
    (place / "shop.parquet").rename(place / "kept.parquet")
    (place / "other.parquet").rename(place / "shop.parquet")
    capsys.readouterr()
    assert main(given) == 2
    shown = capsys.readouterr().err
    assert "other rows in train" in shown
    assert "files of an equal name were compared before" in shown
    (place / "kept.parquet").replace(place / "shop.parquet")


def test_numbers_are_compared_by_their_errors(place: Path) -> None:
    features = (Categorical(name="user"), Categorical(name="item"), Dense(name="price"))
    schema = Schema(features=features, labels=(Label(name="paid", task=Task.REGRESSION),))
    changes = {"data.train": str(place / "shop.parquet"), "training.epochs": "1"}
    own = own_data(recipe_named("table_dnn", schema=schema), changes)
    config = CompareConfig(data=own, models=("dlrm", "dnn"), seeds=1, protocol=Protocol.RECIPE)
    assert config.metric == main_metric(schema) == "rmse"
    found = compare(config, out=place / "numbers")
    difference = found.differences["dlrm", "dnn"]
    assert 0.0 <= difference.rows_p <= 1.0
    assert difference.mean == pytest.approx(found.models[0].values("rmse")[0] - found.models[1].values("rmse")[0])


def test_squared_errors_are_tested_over_rows() -> None:
    rng = np.random.default_rng(0)
    labels = rng.normal(size=2000)
    good, bad = labels + 0.1 * rng.normal(size=2000), labels + 0.5 * rng.normal(size=2000)
    difference, error, p = mean_difference(squared_errors([good], labels), squared_errors([bad], labels))
    assert difference == pytest.approx(0.01 - 0.25, abs=0.03)
    assert 0 < error < 0.02
    assert p < 1e-6


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["compare", "tabel"], "did you mean 'table'"),
        (["compare", "table", "--data.train", "shop.parquet"], "data inspect"),
        (["compare", "table", *OWN, "--models", "dnm"], "models out of"),
        (["compare", "table", *OWN, "--models", "dcnv2"], "did you mean 'dcn_v2'?"),
        (["compare", "synthetic", "--models", "DCN-v2"], "did you mean 'dcn_v2'?"),
        (["scale", "dcnv2"], "did you mean 'dcn_v2'?"),
        (["compare", "table", *OWN, "--training.seed", "3"], "--seeds"),
        (["compare", "table", *OWN, "--training.epoch", "3"], "did you mean --training.epochs?"),
        (["compare", "table", *OWN, "--model.depth", "3"], "model.depth"),
        (["compare", "table", *OWN, "--protocol", "bars", "--epochs", "3"], "the protocol bars sets them"),
        (["compare", "synthetic", "--epochs", "3"], "built-in set"),
        (["compare", "synthetic", "--protocol", "recipe"], "--protocol bars"),
        (["compare", "nowhere", "nothing"], "nowhere/config.json"),
        (["scale", "dnn", "--data", "table", *OWN, "--model.embedding-dim", "3"], "sizes of models itself"),
    ],
)
def test_mistakes_are_explained(
    place: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr().err
    assert "ways out:\n  1. " in shown
    assert words in shown


def test_settings_reach_the_models_that_have_them() -> None:
    schema = Schema(features=(Categorical(name="user"),), labels=(Label(name="click"),))
    own = own_data(recipe_named("table_dcn_v2", schema=schema), {"model.cross.num-layers": "1", "training.epochs": "7"})
    models = own_models(("dnn", "dcn_v2"), own)
    assert models["dcn_v2"].cross.num_layers == 1  # pyright: ignore[reportAttributeAccessIssue]
    assert own.run.training.epochs == 7
    with pytest.raises(ConfigError, match="cross"):
        own_models(("dnn",), own)


def test_next_items_are_judged_among_all_items(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events(users=40, seed=0).write_parquet(place / "events.parquet")
    (place / "events.toml").write_text(EVENTS)
    given = ["compare", "table_hstu", "--data.train", "events.parquet", "--schema", "events.toml", "--seeds", "1"]
    given += ["--models", "gsasrec,hstu_no_bias", "--epochs", "1", "--dim", "8", "--model.num-layers", "1"]
    assert main([*given, "--training.precision", "fp32", "--model.embedding.kernel", "torch"]) == 0
    shown = capsys.readouterr().out
    assert "hit rate at 10" in shown
    assert "NDCG at 10" in shown
    folder = place / "runs/compare/events-recipe"
    found = {each["name"]: each["runs"][0] for each in json.loads((folder / "comparison.json").read_text())["models"]}
    assert all(0.0 < run["test"]["full_ndcg@10"] < run["test"]["full_recall@10"] <= 1.0 for run in found.values())
    model = load_config(folder / "gsasrec/variant0_seed0").model
    assert isinstance(model, NextItemConfig)
    assert (model.loss, model.temperature, model.num_layers) == (NextItemLoss.GBCE, 1.0, 1)
    assert (folder / "hstu_no_bias/variant0_seed0/evaluations/test.json").is_file()


def test_candidates_of_a_log_are_judged_by_their_label() -> None:
    schema = schema_for("movielens-1m-events")
    assert main_metric(schema) == "full_recall@10"
    assert main_metric(recipe_named("movielens_hstu_ranker").table_schema) == "auc"


SMALL = ["--seeds", "1", "--dim", "4", "--epochs", "1", "--model.embedding.kernel", "torch", "--model.num-layers", "1"]


def labelled_log(place: Path, *, users: int = 40) -> list[str]:
    """A log whose label is known by the film: stars are an answer, and what was done before is in the history."""
    log = events(users=users, seed=0)
    number = pl.col("film").str.slice(1).cast(pl.Int64)
    log = log.with_columns(stars=1.0 + number % 5)
    log.write_parquet(place / "likes.parquet")
    label = '[[label]]\nname = "like"\ncolumn = "stars"\npositive_from = 4.0\n'
    (place / "likes.toml").write_text(EVENTS + label)
    return ["--data.train", "likes.parquet", "--schema", "likes.toml", "--threads", "1", "--training.precision", "fp32"]


def test_next_items_and_rankers_of_one_log_stand_in_two_tables(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["compare", "table_hstu", *labelled_log(place), *SMALL, "--models", "sasrec,bst", "--out", "both"]
    assert main(given) == 0
    shown = capsys.readouterr().out
    folder = place / "both/likes-recipe"
    found = json.loads((folder / "comparison.json").read_text())
    ranking = found["ranking"]
    assert (found["metric"], ranking["metric"]) == ("full_recall@10", "auc")
    assert [each["name"] for each in found["models"]] == ["sasrec"]
    assert [each["name"] for each in ranking["models"]] == ["bst", "sequence_ranker"]
    for text in (shown, (folder / "comparison.md").read_text()):
        assert "Which item comes next?" in text
        assert "How does a user answer to a given item? By the label like" in text
        assert "different questions" in text
        assert "DeLong over rows, p" in text
        assert "sequence_ranker (HSTU) was not named" in text
    asked, ranked = ({each: run[each] for each in ("data", "dataset")} for run in (found["run"], ranking["run"]))
    assert asked == ranked  # the same files and split
    _, labels = compare_runs.test_scores(folder / "bst/variant0_seed0")
    assert len(labels) == 40  # the last event of each user, as for next items
    bst = load_config(folder / "bst/variant0_seed0").model
    assert isinstance(bst, BSTConfig)
    assert (bst.history.actions, bst.history.times, bst.num_layers) == (("history_verb",), "history_times", 1)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("everything is there")

    monkeypatch.setattr(compare_runs, "_trainer", never)
    assert main(given) == 0  # goes on where it was, in both tables


@pytest.mark.slow
def test_every_ranker_of_histories_reads_a_log_with_labels(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = "din,dien,transact,onetrans,rankmixer,sequence_ranker"
    given = ["compare", "table_hstu", *labelled_log(place), *SMALL, "--models", names, "--out", "rankers"]
    assert main(given) == 0
    shown = capsys.readouterr().out
    assert "How does a user answer" in shown
    assert "different questions" not in shown  # there is one table
    found = json.loads((place / "rankers/likes-recipe/comparison.json").read_text())
    assert ",".join(each["name"] for each in found["models"]) == names
    assert "ranking" not in found


def test_the_ratings_of_movielens_are_what_its_rankers_are_asked() -> None:
    own = own_data(recipe_named("movielens_hstu"), {"training.epochs": "2", "model.bias": "none"}, name="sequences")
    models = ("sasrec", "gsasrec", "hstu_research", "stu", "bst", "din", "dien", "transact")
    following, ranked = questions_of(models, own)
    assert following.models == models[:4]
    assert ranked.models == (*models[4:], "sequence_ranker")
    assert following.data.run.table_schema == own.run.table_schema
    run = ranked.data.run
    assert (run.dataset, run.data, run.training.epochs) == (own.run.dataset, own.run.data, 2)
    assert [label.name for label in run.table_schema.labels] == ["like"]
    assert CompareConfig(data=ranked.data, models=ranked.models, protocol=Protocol.RECIPE).metric == "auc"
    assert own_models(ranked.models, ranked.data)["sequence_ranker"].bias == PositionTimeBias.NONE  # pyright: ignore
    told = own_data(recipe_named("movielens_hstu"), {"training.early_stop.metric": "full_ndcg@10"})
    following, ranked = questions_of(("sasrec", "bst"), told)
    assert (following.data.metric, ranked.data.metric) == ("full_ndcg@10", "")
    assert ranked.data.run.training.early_stop.metric == "auc"


def test_rankers_on_a_log_without_labels_stop_all_before_the_first_is_trained(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events(users=40, seed=0).write_parquet(place / "events.parquet")
    (place / "events.toml").write_text(EVENTS)
    given = ["compare", "table_hstu", "--data.train", "events.parquet", "--schema", "events.toml", "--out", "unfit"]
    assert main([*given, "--models", "sasrec,bst,din", "--seeds", "1", "--dim", "8"]) == 2
    shown = capsys.readouterr().err
    assert "--models bst,din" in shown
    assert "[[label]]" in shown
    assert "leave bst,din out of --models" in shown
    assert "compare sequences" in shown
    assert not list((place / "unfit").rglob("config.json"))


def test_a_model_that_does_not_fit_the_data_stops_all_before_the_first_is_trained(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["compare", "table_hstu", *labelled_log(place), "--models", "sasrec,bst,two_tower", "--out", "unfit"]
    assert main([*given, "--seeds", "1", "--dim", "8"]) == 2
    shown = capsys.readouterr().err
    assert "model two_tower, " in shown
    assert "leave two_tower out of --models" in shown
    assert not list((place / "unfit").rglob("config.json"))


@pytest.mark.slow
def test_scales_on_a_table_of_ones_own(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["scale", "dnn", "--data", "table", *OWN, "--compute", "1x..4x", "--points", "3"]
    assert main([*given, "--training.loader.batch-size", "300"]) == 0
    assert "dnn" in capsys.readouterr().out
    data = json.loads((place / "runs/scale/shop/scaling.json").read_text())
    assert len(data["models"][0]["points"]) == 3
    stored = next((place / "runs/scale").glob("shop-scale-*/dnn/1x_seed0/config.json"))
    config = load_config(stored.parent)
    assert config.training.loader.batch_size == 300


def test_finished_runs_side_by_side(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, extra in {"a": [], "b": ["--seed", "1", "--lr", "0.01"], "c": ["--data.split.seed", "5"]}.items():
        assert main(["train", "table_dnn", *OWN, *QUICK, *extra, "--dim", "4", "--out", f"runs/{name}"]) == 0
    capsys.readouterr()
    assert main(["compare", "runs/a", "runs/b", "--json", "both.json"]) == 0
    shown = capsys.readouterr().out
    found = json.loads((place / "both.json").read_text())
    assert ["training.learning-rate", "0.001", "0.01"] in found["settings"]
    metrics = [json.loads((place / f"runs/{name}/evaluations/test.json").read_text())["metrics"] for name in "ab"]
    for each in metrics:
        assert f"{each['auc']:.5f}" in shown
    assert found["tests"][0]["difference"] == pytest.approx(metrics[0]["auc"] - metrics[1]["auc"], abs=1e-6)
    assert found["tests"][0]["error"] > 0
    assert main(["compare", "runs/a", "runs/c"]) == 2
    assert "data.split.seed" in capsys.readouterr().err
    assert main(["compare", "runs/a", "runs/b", "--epochs", "3"]) == 2
    assert "finished runs have their settings" in capsys.readouterr().err
