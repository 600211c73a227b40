"""A run on an event log, from TOML to the next items; stopped and resumed to the same bits."""

from __future__ import annotations

import contextlib
import io
import random
from pathlib import Path

import polars as pl
import pytest
import torch

from tests.studies.own_cache import cache_with_kernels
from ziggurat.cli.main import main
from ziggurat.errors import ConfigError, DataError, RequestError
from ziggurat.ops.row_formats import RowFormat
from ziggurat.runs import load
from ziggurat.runs.execute import prepare_run
from ziggurat.runs.load import Run, load_run
from ziggurat.runs.tables.quantisation import QuantisationConfig, quantisation_report
from ziggurat.serving.recommender import Recommender

SCHEMA = """
[[feature]]
name = "film"
kind = "categorical"

[[feature]]
name = "verb"
kind = "categorical"

[items]
id = "film"

[roles]
group = "user"
time = "time"

[events]
actions = ["verb"]
max_length = 8
"""
SIZES = {"model.embedding-dim": 8, "model.num-layers": 1, "model.num-negatives": 16}
LIMITS = {"training.threads": 1, "training.precision": "fp32", "model.embedding.kernel": "torch"}
SETTINGS = [text for name, value in (SIZES | LIMITS).items() for text in (f"--{name}", str(value))]


def events(*, users: int, seed: int) -> pl.DataFrame:
    """Everybody goes round a circle of films, from anywhere: what comes next is certain."""
    rng = random.Random(seed)
    rows = []
    for user in range(users):
        first = rng.randrange(20)
        rows += [
            (f"u{user}", f"f{(first + step) % 20}", "seen", 978_300_000 + 60 * step)
            for step in range(rng.randint(5, 10))
        ]
    return pl.DataFrame(rows, schema=["user", "film", "verb", "time"], orient="row")


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_run(run, step=step).model.state_dict()


def test_from_events_to_what_comes_next(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache_with_kernels(tmp_path / "cache", monkeypatch)
    (tmp_path / "events.toml").write_text(SCHEMA)
    events(users=150, seed=0).write_parquet(tmp_path / "events.parquet")
    data = ("--data.train", str(tmp_path / "events.parquet"), "--schema", str(tmp_path / "events.toml"))
    sizes = ("--training.epochs", "3", "--training.learning-rate", "0.02", "--training.loader.batch-size", "16")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    command = ["train", "table_hstu", *data, *SETTINGS, *sizes]
    assert main([*command, "--out", str(whole)]) == 0
    report = quantisation_report(whole, config=QuantisationConfig(formats=(RowFormat.INT4,)))
    assert report.within == "", "no AUC says which format an export takes"
    assert report.cells()[-1][-1] == "", "a score of what is always 1 says nothing"
    assert "leave one out" in capsys.readouterr().err
    assert main([*command, "--training.max-steps", "13", "--out", str(parts)]) == 0
    assert main(["train", str(parts), "--resume", "--training.max-steps", "0"]) == 0
    mine, others = weights(whole, 30), weights(parts, 30)
    assert all(torch.equal(mine[name], others[name]) for name in mine)

    prepared: list[str] = []
    monkeypatch.setattr(load, "prepare_run", lambda config, **more: prepared.append("") or prepare_run(config, **more))
    evaluation = load_run(whole).evaluate_split("test").metrics
    assert len(prepared) == 1  # what preparing warns of is said once
    assert evaluation["full_recall@10"] > 0.9  # chance: about a half of the twenty films
    assert all(name.startswith("full_") for name in evaluation)  # the label is always 1: nothing else says anything
    assert main(["importance", str(whole)]) == 2
    assert "full ranking alone" in capsys.readouterr().err
    fresh = events(users=9, seed=1)
    fresh = fresh.with_columns(film=pl.when(pl.int_range(pl.len()) == 0).then(pl.lit("unheard of")).otherwise("film"))
    fresh.write_parquet(tmp_path / "fresh.parquet")
    assert main(["predict", str(whole), str(tmp_path / "fresh.parquet"), "--out", str(tmp_path / "next.csv")]) == 0
    found = pl.read_csv(tmp_path / "next.csv")
    assert found.columns == ["user", "rank", "film", "score"]
    run, last = load_run(whole), fresh.group_by("user", maintain_order=True).agg(pl.col("film"))
    for user, had in last.iter_rows():
        answer = found.filter(pl.col("user") == user)
        assert answer["rank"].to_list() == list(range(1, answer.height + 1))
        assert answer["score"].is_sorted(descending=True)
        assert not set(answer["film"]) & set(had)
        wanted = f"f{(int(had[-1][1:]) + 1) % 20}"
        assert wanted in answer["film"].to_list()[:3]
    one = run.next_items(fresh.filter(pl.col("user") == "u3"), k=2)
    assert one["film"].to_list() == found.filter(pl.col("user") == "u3")["film"].to_list()[:2]
    with pytest.raises(ConfigError, match="samples with history"):
        run.evaluate(fresh)
    for ask, log in ((run.scores, fresh), (run.evaluate, [tmp_path / "events.parquet"])):
        with pytest.raises(ConfigError, match=r"what comes next(?s:.*)predict"):
            ask(log)
    assert not caplog.messages, "nothing is said of rows that are not evaluated"
    with pytest.raises(ConfigError, match="no columns to keep"):
        run.predict(fresh, keep=("user",))
    with pytest.raises(ConfigError, match="k of 1 or more"):
        run.next_items(fresh, k=0)
    check_times(run, fresh, caplog)
    check_export(run, fresh, out=tmp_path / "export")


def check_times(run: Run, fresh: pl.DataFrame, caplog: pytest.LogCaptureFixture) -> None:
    """Times of another unit than those of training are refused, and those far from them are said."""
    with pytest.raises(DataError, match=r"expected: .*seconds, from 978300000 to (?s:.*)milliseconds"):
        run.predict(fresh.with_columns(time=pl.col("time") * 1_000))
    assert not caplog.messages
    later = fresh.with_columns(time=pl.col("time") + 86_400)
    assert run.next_items(later, k=3)["film"].equals(run.next_items(fresh, k=3)["film"])  # durations are the same
    assert "far from those of training, 978300000 to " in caplog.messages[0]
    caplog.clear()
    turned = run.next_items(pl.concat([fresh.reverse(), fresh[:1]]), k=3)
    assert set(turned["user"]) == set(fresh["user"])
    assert "stood after a later one of their user: now sorted" in caplog.messages[0]
    assert "1 event has the time of the one before of their user" in caplog.messages[1]


def check_export(run: Run, fresh: pl.DataFrame, *, out: Path) -> None:
    """An export answers as its run: known users by their id, others by a history in the request."""
    log = pl.read_parquet(out.parent / "events.parquet")
    extra = pl.DataFrame({"user": ["x", "x"], "film": ["f0", "only here"], "verb": ["seen"] * 2, "time": [1, 2]})
    pl.concat([log, extra]).write_parquet(out.parent / "events.parquet")
    assert main(["export", str(run.folder), "--out", str(out), "--keep", "verb"]) == 0
    rec = Recommender.load(out)
    for user in ("u0", "u7", "u149"):
        expected = run.next_items(log.filter(pl.col("user") == user), k=5)
        found = rec.recommend({"user": user}, k=5).items
        assert [item.id for item in found] == expected["film"].to_list()
        assert [item.score for item in found] == pytest.approx(expected["score"].to_list(), abs=1e-5)
    answers = run.next_items(fresh, k=5)
    for (user,), events_of in fresh.group_by("user", maintain_order=True):
        told = {"history": "film", "history_verb": "verb", "history_times": "time"}
        request = {name: events_of[column].to_list()[-8:] for name, column in told.items()}
        had = tuple(events_of["film"].to_list())
        expected = answers.filter(pl.col("user") == user)["film"].to_list()
        assert [item.id for item in rec.recommend(request, k=5, exclude=had).items] == expected
    with pytest.raises(RequestError, match="history_verb"):
        rec.recommend({"history": ["f1"], "history_times": [5]}, k=3)
    turned = {"history": ["f1", "f2"], "history_verb": ["seen"] * 2, "history_times": [978_300_060, 978_300_000]}
    with pytest.raises(RequestError, match="978300060 before 978300000"):
        rec.recommend(turned, k=3)
    with pytest.raises(RequestError, match="times in seconds"):
        rec.recommend({"history": ["f1"], "history_verb": ["seen"], "history_times": [978_300_000_000]}, k=3)
    assert "only here" not in {item.id for item in rec.recommend({}, k=100).items}
    pl.DataFrame({"user": ["u0"]}).write_csv(out.parent / "users.csv")
    users, lists = str(out.parent / "users.csv"), str(out.parent / "lists.parquet")
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main(["recommend", str(out), users, "--k", "1", "--out", lists]) == 0
    assert "lists of 1 user, 1 item, in" in said.getvalue()
