"""two_tower through the command line: trained, resumed, scored and evaluated as any model, on one rank and on two."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import ziggurat as zg
from tests.end_to_end.test_many_ranks import run as run_on_ranks
from ziggurat.cache import cache_folder
from ziggurat.cli.main import main
from ziggurat.data.histories import HistoryConfig, with_histories

SCHEMA = zg.Schema(
    features=(
        zg.Sequence(name="history", table="item", max_length=5),
        zg.Dense(name="hour"),
        zg.Categorical(name="item"),
        zg.Categorical(name="kind"),
    ),
    labels=(zg.Label(name="click"),),
    group="user",
    time="t",
    items=zg.Items(id="item", features=("kind",)),
)
DATA = ["--data.train", "events.parquet", "--schema", "my.toml"]
SMALL = ["--model.user.hidden.hidden-dims", "16", "--model.item.hidden.hidden-dims", "16", "--model.output-dim", "8"]
FAST = [
    *SMALL,
    "--training.precision",
    "fp32",
    "--model.embedding.kernel",
    "torch",
    "--training.threads",
    "1",
    "--training.log-every",
    "1",
]
RATES = ["--lr", "0.01", "--table-lr", "0.1", "--model.negatives-block", "64", "--patience", "0"]
START = ["train", "table_two_tower", *DATA, *FAST, *RATES]


def events(num_rows: int) -> pl.DataFrame:
    """Users who take items of one kind in three, and nearly never the same one again."""
    rng = np.random.default_rng(5)
    user = rng.integers(0, 80, num_rows)
    item = rng.integers(0, 20, num_rows) * 3 + user % 3
    frame = pl.DataFrame({"user": user, "item": [f"i{n}" for n in item], "kind": item % 3})
    frame = frame.with_columns(t=np.arange(num_rows), hour=rng.random(num_rows), click=rng.integers(0, 4, num_rows) > 0)
    return with_histories(frame, HistoryConfig(user="user", item="item", time="t", max_length=5))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    kernels = cache_folder() / "kernels"
    monkeypatch.setenv("ZIGGURAT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    if kernels.is_dir():
        (tmp_path / "cache" / "kernels").symlink_to(kernels)
    events(2500).write_parquet("events.parquet")
    zg.write_schema(SCHEMA, "my.toml")
    return tmp_path


def metrics_of(path: str) -> dict[str, float]:
    return json.loads(Path(path).read_text())["metrics"]


def log_of(name: str) -> list[dict]:
    return [json.loads(line) for line in Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()]


def test_the_whole_story(place: Path) -> None:
    assert main([*START, "--batch-size", "128", "--epochs", "2", "--out", "runs/a"]) == 0
    decided = json.loads(Path("runs/a/startup.json").read_text())["Training"]["best checkpoint"]
    assert decided.startswith("by full_recall@50 of 250 validation rows, higher is better")
    assert decided.endswith("chosen because the model finds items among all")
    found = metrics_of("runs/a/evaluations/test.json")
    assert found["full_ndcg@10"] > 2.5 * 0.0758  # of 60 items in any order: Σ 1 / log₂(r + 1) / 60 over ten places
    assert main([*START, "--batch-size", "128", "--epochs", "1", "--out", "runs/b"]) == 0
    assert main(["train", "runs/b", "--resume", "--training.epochs", "2"]) == 0
    assert metrics_of("runs/b/evaluations/test.json") == found
    assert main(["evaluate", "runs/a", "--split", "test", "--json", "again.json"]) == 0
    assert metrics_of("again.json") == pytest.approx(found, abs=1e-6)
    assert main(["predict", "runs/a", "events.parquet", "--out", "scores.parquet"]) == 0
    frame = pl.read_parquet("events.parquet")
    frame.tail(200).write_parquet("late.parquet")
    assert main(["evaluate", "runs/a", "late.parquet", "--full-ranking", "--json", "late.json"]) == 0
    assert metrics_of("late.json")["full_recall@10"] > 0.3

    run = zg.load_run("runs/a")
    assert int(run.model.item_counts.sum()) == 2000
    item = pl.read_parquet("events.parquet").head(2000)["item"].value_counts().sort("count").row(-1)
    row = 3 + run.preprocessing.vocabularies["item"].ids.to_list().index(item[0])
    assert int(run.model.item_counts[row]) == item[1]  # of the item itself, not of the histories that share its table
    batch = run.preprocessing.batch(frame.head(7))
    users, items = run.model.user_vectors(batch), run.model.item_vectors(batch)
    scores = 1 / (1 + np.exp(-(users * items).sum(1).detach().numpy() / 0.1))
    assert pl.read_parquet("scores.parquet")["click"].head(7).to_list() == pytest.approx(scores, abs=1e-5)


@pytest.mark.slow
def test_two_ranks_do_what_one_does(place: Path) -> None:
    """Counts of items, blocks of negatives and full ranking: none depends on the number of ranks."""
    assert main([*START, "--batch-size", "128", "--epochs", "1", "--out", "runs/one"]) == 0
    assert run_on_ranks(2, place, *START, "--batch-size", "64", "--epochs", "1", "--out", "runs/two") == [0, 0]
    one, two = (metrics_of(f"runs/{name}/evaluations/test.json") for name in ("one", "two"))
    assert two == pytest.approx(one, abs=0.02)  # two equal scores, rounded otherwise, change places
    losses = [[each["loss"] for each in log_of(name) if each["kind"] == "train"] for name in ("one", "two")]
    assert len(losses[0]) == 16
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_what_cannot_be_is_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*START, "--batch-size", "100", "--out", "runs/a"]) == 2
    assert "--batch-size 128" in capsys.readouterr().err
    zg.write_schema(zg.Schema(features=SCHEMA.features, labels=SCHEMA.labels, group="user", time="t"), "my.toml")
    assert main([*START, "--batch-size", "128", "--out", "runs/a"]) == 2
    assert "[items]" in capsys.readouterr().err
    assert not os.path.exists("runs/a/checkpoints")
