"""lightgcn through the command line: trained, resumed bit for bit, evaluated, exported and asked."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

import ziggurat as zg
from tests.end_to_end.test_many_ranks import run as run_on_ranks
from ziggurat.cache import cache_folder
from ziggurat.cli.main import main

SCHEMA = zg.Schema(
    features=(zg.Categorical(name="user"), zg.Categorical(name="item")),
    labels=(zg.Label(name="click", outcomes="positive_only"),),
    group="user",
    items=zg.Items(id="item"),
)
START = [
    *("train", "table_lightgcn", "--data.train", "events.parquet", "--schema", "my.toml"),
    *("--model.embedding-dim", "16", "--batch-size", "256", "--lr", "0.02", "--patience", "0"),
    *("--training.threads", "1", "--training.log-every", "1"),
]


def events() -> pl.DataFrame:
    """Users who take items of one kind in three, each once."""
    rng = np.random.default_rng(3)
    pairs = np.unique(np.stack([rng.integers(0, 60, 900), rng.integers(0, 30, 900)], axis=1), axis=0)
    pairs = pairs[rng.permutation(len(pairs))]
    user = pairs[:, 0]
    return pl.DataFrame(
        {"user": user, "item": [f"i{n}" for n in pairs[:, 1] * 3 + user % 3], "click": np.ones(len(user))}
    )


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    kernels = cache_folder() / "kernels"
    monkeypatch.setenv("ZIGGURAT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    if kernels.is_dir():
        (tmp_path / "cache" / "kernels").symlink_to(kernels)
    events().write_parquet("events.parquet")
    zg.write_schema(SCHEMA, "my.toml")
    return tmp_path


def metrics_of(path: str) -> dict[str, float]:
    return json.loads(Path(path).read_text())["metrics"]


def test_the_whole_story(place: Path) -> None:
    assert main([*START, "--epochs", "6", "--out", "runs/a"]) == 0
    decided = json.loads(Path("runs/a/startup.json").read_text())["Training"]["best checkpoint"]
    assert decided.startswith("by full_user_recall@20")
    found = metrics_of("runs/a/evaluations/test.json")
    # 20 of 90 items, less what was had: at random a quarter; of the own kind at random two thirds.
    assert found["full_user_recall@20"] > 0.8
    assert 0 < found["full_user_ndcg@20"] <= 1
    assert main([*START, "--epochs", "3", "--out", "runs/b"]) == 0
    assert main(["train", "runs/b", "--resume", "--training.epochs", "6"]) == 0
    assert metrics_of("runs/b/evaluations/test.json") == found
    one, other = (zg.load_run(f"runs/{name}").model.state_dict() for name in "ab")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert main(["evaluate", "runs/a", "--split", "test", "--json", "again.json"]) == 0
    assert metrics_of("again.json") == pytest.approx(found, abs=1e-6)


def test_an_export_holds_the_propagated_vectors_and_answers(place: Path) -> None:
    assert main([*START, "--epochs", "4", "--out", "runs/a"]) == 0
    assert main(["export", "runs/a", "--out", "exports/a"]) == 0
    model = json.loads(Path("exports/a/encoder/model.json").read_text())
    assert json.dumps(model).count('"num_layers": 0') == 1
    run = zg.load_run("runs/a")
    rec = zg.Recommender.load("exports/a")
    found = rec.recommend({"user": 7}, k=5).items
    assert len(found) == 5
    assert all(int(str(each.id)[1:]) % 3 == 7 % 3 for each in found)
    # By brute force of the run's own vectors, without what the user had.
    items = [f"i{n}" for n in range(90)]
    batch = run.preprocessing.batch(pl.DataFrame({"user": [7] * 90, "item": items}))
    with torch.no_grad():
        scores = (run.model.user_vectors(batch) * run.model.item_vectors(batch)).sum(1)
    had = set(events().filter(pl.col("user") == 7)["item"].to_list())
    best = [items[n] for n in scores.argsort(descending=True).tolist() if items[n] not in had]
    assert [each.id for each in found] == best[:5]


@pytest.mark.slow
def test_two_ranks_do_what_one_does(place: Path) -> None:
    sparse = ["--model.embedding.optimizer", "sparse_adam", "--table-lr", "0.02", "--epochs", "2"]
    assert main([*START, *sparse, "--out", "runs/one"]) == 0
    start = [*START[: START.index("256")], "128", *START[START.index("256") + 1 :]]
    assert run_on_ranks(2, place, *start, *sparse, "--out", "runs/two") == [0, 0]
    one, two = (metrics_of(f"runs/{name}/evaluations/test.json") for name in ("one", "two"))
    assert two == pytest.approx(one, abs=0.02)
