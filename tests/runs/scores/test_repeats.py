"""Evaluation and answers follow one protocol for what a user had: people who take their favourites again and again."""

from __future__ import annotations

import random
from pathlib import Path

import polars as pl
import pytest

import ziggurat as zg
from tests.studies.own_cache import cache_with_kernels
from ziggurat.cli.main import main
from ziggurat.runs.load import load_run
from ziggurat.serving.recommender import Recommender

SCHEMA = """
[[feature]]
name = "item"
kind = "categorical"

[items]
id = "item"
{repeats}

[roles]
group = "user"
time = "time"

[events]
max_length = 16
"""
SIZES = {"model.embedding-dim": 16, "model.num-layers": 1, "model.num-negatives": 32}
LIMITS = {"training.threads": 1, "training.precision": "fp32", "model.embedding.kernel": "torch"}
TRAINING = {"training.epochs": 6, "training.learning-rate": 0.02, "training.loader.batch-size": 64}
SETTINGS = [text for name, value in (SIZES | LIMITS | TRAINING).items() for text in (f"--{name}", str(value))]


def favourites(*, users: int = 400, items: int = 300) -> pl.DataFrame:
    """Users with six favourites each, of which they take one after the other at random."""
    rng = random.Random(0)
    rows = []
    for user in range(users):
        mine = rng.sample(range(items), 6)
        rows += [(f"u{user}", f"i{rng.choice(mine)}", 978_300_000 + 60 * step) for step in range(20)]
    return pl.DataFrame(rows, schema=["user", "item", "time"], orient="row")


def trained(folder: Path, *, repeats: str) -> Path:
    """A run on the events under a protocol; "" for the one that nobody named."""
    line = f'repeats = "{repeats}"' if repeats else ""
    (folder / "events.toml").write_text(SCHEMA.format(repeats=line))
    favourites().write_parquet(folder / "events.parquet")
    data = ["--data.train", str(folder / "events.parquet"), "--schema", str(folder / "events.toml")]
    assert main(["train", "table_hstu", *data, *SETTINGS, "--out", str(folder / "run")]) == 0
    return folder / "run"


def share_found(answers: pl.DataFrame, targets: pl.DataFrame) -> float:
    """The share of users whose answer holds their target: recall@k of the answers themselves."""
    return targets.join(answers, on=["user", "item"], how="semi").height / targets.height


@pytest.mark.parametrize("repeats", ["", "allow", "leave_out"])
def test_evaluation_is_of_the_answers_that_are_given(
    repeats: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache_with_kernels(tmp_path / "cache", monkeypatch)
    folder = trained(tmp_path, repeats=repeats)
    said = capsys.readouterr()
    run = load_run(folder)
    log = favourites()
    is_last = pl.int_range(pl.len()).over("user") == pl.len().over("user") - 1
    before = log.filter(~is_last)
    targets = log.filter(is_last)
    metrics = run.evaluate_split("test").metrics
    of_answers = share_found(run.next_items(before, k=10), targets)
    repeated = targets.join(before, on=["user", "item"], how="semi").height / targets.height
    assert metrics["full_repeated"] == pytest.approx(repeated)
    assert repeated > 0.9
    assert metrics["full_answered@10"] == pytest.approx(of_answers, abs=0.01)
    headline = next(line for line in said.out.splitlines() if line.startswith("test "))
    shown = f"full_recall@10 {metrics['full_recall@10']:.5f}"
    assert shown in headline
    assert ("(of answers, without what a user had: 0.0" in " ".join(said.out.split())) is (repeats == "")
    assert f"{repeated:.1%} of the targets are repeated" in (folder / "run.log").read_text()
    if repeats:
        # Evaluation asks when the target happened, an answer when the last event before it did: a user may differ.
        assert metrics["full_recall@10"] == pytest.approx(of_answers, abs=0.01)
        assert "answers can never hold" not in said.err + said.out
    else:
        assert metrics["full_recall@10"] > of_answers + 0.2
        assert "answers can never hold" in said.err + said.out
    assert (of_answers > 0.2) is (repeats == "allow")
    check_export(folder, repeats=repeats, out=tmp_path / "export")
    assert "answers may repeat what a user had" in (folder / "report.html").read_text() or repeats != "allow"


def check_export(folder: Path, *, repeats: str, out: Path) -> None:
    """An export answers as its run does, unless a request says otherwise."""
    zg.export_run(folder, out=out)
    rec = Recommender.load(out)
    run = load_run(folder)
    mine = favourites().filter(pl.col("user") == "u7")
    had = set(mine["item"])
    found = [item.id for item in rec.recommend({"user": "u7"}, k=10).items]
    assert found == run.next_items(mine, k=10)["item"].to_list()
    assert bool(had & set(found)) is (repeats == "allow")
    assert not had & {item.id for item in rec.recommend({"user": "u7"}, k=10, exclude_seen=True).items}
    assert had & {item.id for item in rec.recommend({"user": "u7"}, k=10, exclude_seen=False).items}
    assert rec.info().repeats == (repeats or "leave_out_but_target")
