"""A ranker of events, from TOML to scores: what it learns, what a planted leak does not teach it, what it scores."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from tests.serving.server.test_app import talk
from tests.studies.own_cache import cache_with_kernels
from ziggurat.cli.main import main
from ziggurat.data.events.sequences import sequences_of
from ziggurat.errors import ConfigError, DataError, RequestError, SchemaError
from ziggurat.runs.load import Run, load_run
from ziggurat.runs.quality.baselines import check_baseline
from ziggurat.runs.quality.importance import ImportanceConfig
from ziggurat.serving.recommender import Recommender

SCHEMA = """
[[feature]]
name = "film"
kind = "categorical"

[[feature]]
name = "genre"
kind = "categorical"

[[feature]]
name = "verb"
kind = "categorical"

[[feature]]
name = "tossed"
kind = "categorical"

[[feature]]
name = "country"
kind = "categorical"

[[label]]
name = "like"
column = "verb"
positive = "liked"

[[label]]
name = "coin"
column = "tossed"

[items]
id = "film"
features = ["film", "genre"]

[roles]
group = "user"
time = "time"

[events]
actions = ["verb", "tossed"]
context = ["country"]
max_length = 12
candidates = 5
window = 60
"""


def events(*, users: int, seed: int) -> pl.DataFrame:
    """Everybody likes one of two genres; and five events of a user in a window share the toss of a coin."""
    rng = random.Random(seed)
    rows = []
    for user in range(users):
        taste = rng.randrange(2)
        for window in range(5):
            coin = rng.randrange(2)
            for place in range(5):
                film = rng.randrange(20)
                verb = "liked" if film % 2 == taste else "seen"
                moment = 1_600_000_000 + 60 * window + 5 * place
                rows.append((f"u{user}", f"f{film}", f"g{film % 2}", verb, coin, f"c{user % 3}", moment))
    return pl.DataFrame(rows, schema=["user", "film", "genre", "verb", "tossed", "country", "time"], orient="row")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("ranker")
    with pytest.MonkeyPatch.context() as patch:
        cache_with_kernels(folder / "cache", patch)
        (folder / "events.toml").write_text(SCHEMA)
        events(users=80, seed=0).write_parquet(folder / "events.parquet")
        settings = {
            "data.train": folder / "events.parquet", "schema": folder / "events.toml", "data.split.by": "windows",
            "out": folder / "run", "model.embedding-dim": 8, "model.num-layers": 1, "model.dropout": 0.0,
            "training.threads": 1, "training.precision": "fp32", "model.embedding.kernel": "torch",
            "training.epochs": 2, "training.early-stop.patience": 0, "training.loader.batch-size": 100,
            "training.learning-rate": 0.02, "training.table-learning-rate": 0.05,
        }  # fmt: skip
        command = [str(part) for name, value in settings.items() for part in (f"--{name}", value)]
        assert main(["train", "table_sequence_ranker", *command]) == 0
        yield load_run(folder / "run")


def test_tastes_are_learned_and_what_candidates_have_in_common_is_not(run: Run) -> None:
    """A history that held one candidate of its question would tell the coin of them all."""
    metrics = run.evaluate_split("test").metrics
    assert metrics["auc/like"] > 0.9
    assert 0.25 < metrics["auc/coin"] < 0.75  # 1 where a history holds a candidate of its question


def test_importance_deals_out_events_and_keeps_lengths(run: Run) -> None:
    """Histories of training rows have 0 to 12 events; all lists of one history are as long as each other."""
    config = ImportanceConfig(rounds=1, samples=300, metric="auc/like")
    found = {each.name: each.mean for each in run.importance(split="train", config=config).features}
    assert min(found["genre"], found["history_genre"], found["history_verb"]) > 0.1
    assert max(abs(found[name]) for name in ("country", "history_tossed")) < 0.05


def test_every_event_has_a_score_and_open_ones_are_no_history(run: Run, tmp_path: Path) -> None:
    log = events(users=4, seed=1)
    later = log.filter(pl.col("time") >= 1_600_000_240)
    nobody_knows: dict[str, Any] = {"verb": pl.lit(None, pl.String), "tossed": pl.lit(None, pl.Int64)}
    opened = pl.concat([log.filter(pl.col("time") < 1_600_000_240), later.with_columns(**nobody_knows)])
    known, asked = run.predict(log, keep=("film",)), run.predict(opened, keep=("film",))
    assert known.columns == ["row", "film", "like", "coin"]
    assert known["row"].to_list() == list(range(len(log)))
    assert known["film"].to_list() == log["film"].to_list()
    # Rows of `opened` in the order of `log`: the last window of each user was asked as one question either way.
    rows = log.with_row_index().filter(pl.col("time") >= 1_600_000_240)["index"]
    np.testing.assert_allclose(asked["like"][-20:], known["like"].gather(rows), rtol=0, atol=1e-6)
    shuffled = opened.with_row_index().sample(fraction=1, shuffle=True, seed=0)
    again = run.predict(shuffled)
    np.testing.assert_allclose(asked["like"].gather(shuffled["index"]), again["like"], rtol=0, atol=1e-6)

    path, out = tmp_path / "open.csv", tmp_path / "scores.parquet"
    opened.with_columns(film=pl.when(pl.int_range(pl.len()) == 7).then(pl.lit("unheard")).otherwise("film")).write_csv(
        path
    )
    assert main(["predict", str(run.folder), str(path), "--out", str(out)]) == 0
    scores = pl.read_parquet(out)
    assert scores.columns == ["row", "like", "coin"]
    np.testing.assert_allclose(scores["like"][0:5], asked["like"][0:5], rtol=0, atol=1e-6)  # before the unheard one
    assert scores["like"].is_between(0, 1).all()


def test_open_candidates_of_one_at_a_time_have_their_own_context(run: Run) -> None:
    """Crosses of a candidate are context: where a question had several, all had those of its first."""
    schema = run.config.table_schema
    assert schema.events is not None
    apart = replace(schema, events=replace(schema.events, candidates=1))
    alone = replace(run, config=replace(run.config, table_schema=apart))
    log = events(users=2, seed=2)
    is_open = pl.col("time") >= 1_600_000_240
    opened = log.with_columns(
        verb=pl.when(~is_open).then("verb"),
        tossed=pl.when(~is_open).then("tossed"),
        country=pl.format("c{}", pl.int_range(pl.len()) % 3),
    )
    scored: Any = alone.predict(opened)
    found = scored["like"]
    numbered = opened.with_row_index()
    for row in numbered.filter(is_open)["index"]:
        only = numbered.filter(~is_open | (pl.col("index") == row))
        expected: Any = alone.predict(only.drop("index"))
        at = only["index"].to_list().index(row)
        assert abs(found[row] - expected["like"][at]) < 1e-6
    together: Any = run.predict(opened)
    assert (together["like"] - found).abs().max() > 1e-4


def test_an_export_scores_as_its_run_what_a_request_tells_of_a_history(run: Run, tmp_path: Path) -> None:
    export = tmp_path / "export"
    assert main(["export", str(run.folder), "--out", str(export), "--value", "like"]) == 0
    rec, log = Recommender.load(export), events(users=4, seed=1)
    nobody_knows: dict[str, Any] = {"verb": pl.lit(None, pl.String), "tossed": pl.lit(None, pl.Int64)}
    for user in ("u0", "u3"):
        mine = log.filter(pl.col("user") == user)
        past, asked = mine.head(20), mine.tail(5)
        expected = run.predict(pl.concat([past, asked.with_columns(**nobody_knows)]))["like"][-5:]
        lists = {"history": "film", "history_genre": "genre", "history_verb": "verb", "history_tossed": "tossed"}
        request: dict[str, Any] = {name: past[column].to_list()[-12:] for name, column in lists.items()}
        request |= {"history_times": past["time"].to_list()[-12:], "asked_at": asked["time"].to_list()[:1]}
        found = rec.rank(request | {"country": asked["country"][0]}, asked["film"].to_list())
        scores = {item.id: item.tasks["like"] for item in found.items}
        np.testing.assert_allclose([scores[film] for film in asked["film"]], expected, rtol=0, atol=1e-6)
    with pytest.raises(RequestError, match="history_genre"):
        rec.rank({"history": ["f1"], "history_times": [5], "history_verb": ["seen"], "history_tossed": [1]}, ["f2"])
    with pytest.raises(RequestError, match="name at least one item") as empty:
        rec.rank({}, [])
    assert "request, field 'items'" in str(empty.value)
    assert len(rec.rank({}, ["f2"]).items) == 1  # no history is no error


def test_an_event_without_a_label_moves_no_question_of_those_that_have_one(run: Run) -> None:
    log = events(users=1, seed=3).head(10)  # two questions of five
    unknown = {"tossed": pl.lit(None, pl.Int64)}
    history_alone = log[6:7].with_columns(**unknown, time=pl.col("time") + 1)  # between candidates of the second
    scores = run.predict(pl.concat([log, history_alone]))
    asked = log[5:].with_columns(**unknown, verb=pl.lit(None, pl.String))
    apart = run.predict(pl.concat([log[:5], asked]))
    np.testing.assert_allclose(scores["like"][:10], apart["like"], rtol=0, atol=1e-6)


def test_an_empty_list_of_candidates_is_no_question_and_an_empty_log_is_refused(run: Run) -> None:
    log = events(users=2, seed=4)
    nobody_knows: dict[str, Any] = {"verb": pl.lit(None, pl.String), "tossed": pl.lit(None, pl.Int64)}
    known, opened = log.filter(pl.col("user") == "u0"), log.filter(pl.col("user") == "u1")
    opened = opened.with_columns(**nobody_knows)  # a user whose events are all open: candidates behind no history
    together = run.predict(pl.concat([known, opened]))
    alone = run.predict(known)  # the service asks nothing of the second user, nor adds a candidate of the first
    assert len(together) == 2 * len(alone) == len(log)
    np.testing.assert_allclose(together["like"][: len(known)], alone["like"], rtol=0, atol=1e-6)
    with pytest.raises(DataError, match="at least one event") as refused:
        run.predict(opened.clear())
    assert "ways out" in str(refused.value)


def test_a_log_whose_labels_are_all_empty_has_no_candidates(run: Run, tmp_path: Path) -> None:
    unlabelled = events(users=8, seed=5).with_columns(verb=pl.lit(None, pl.String), tossed=pl.lit(None, pl.Int64))
    unlabelled.write_parquet(tmp_path / "unlabelled.parquet")
    config = replace(run.config.data, train=(str(tmp_path / "unlabelled.parquet"),))
    with pytest.raises(DataError, match="events with labels: candidates to rank") as refused:
        sequences_of(config, run.config.table_schema, folder=tmp_path / "cache")
    assert "fill the columns of the labels" in str(refused.value)
    assert not list((tmp_path / "cache").glob("events_*/*.parquet"))


def test_a_log_without_events_and_columns_that_are_not_there_are_refused(run: Run) -> None:
    log = events(users=2, seed=2)
    with pytest.raises(DataError, match="at least one event"):
        run.predict(log.clear())
    with pytest.raises(ConfigError, match="each named once"):
        run.predict(log, keep=("film", "film"))
    with pytest.raises(SchemaError, match="verb"):
        run.predict(log.drop("verb"))
    with pytest.raises(ConfigError, match="a run on samples"):
        check_baseline(run.config)
    with torch.no_grad():
        one = run.predict(log.head(1))  # a user of one event, asked from nothing
    assert len(one) == 1


def next_schema() -> str:
    """The same log without labels, and without what the ranker alone reads of it."""
    blocks = [each for each in SCHEMA.split("\n\n") if not re.search(r'label|"tossed"\nkind|"country"\nkind', each)]
    text = "\n\n".join(blocks).replace('actions = ["verb", "tossed"]', 'actions = ["verb"]')
    return re.sub(r"(context|candidates|window) = .*\n", "", text).replace("max_length = 12", "max_length = 7")


def likes(run: Run, log: pl.DataFrame, films: list[str]) -> pl.Series:
    """What the run itself says of films that one user may see now."""
    asked = (
        log[-1:]
        .select(
            "user", film=pl.lit(films), verb=pl.lit(None, pl.String), tossed=pl.lit(None, pl.Int64), country="country"
        )
        .explode("film")
    )
    asked = asked.with_columns(genre="g" + (pl.col("film").str.slice(1).cast(pl.Int64) % 2).cast(pl.String))
    asked = asked.with_columns(time=pl.lit(log["time"][-1], pl.Int64))
    return run.predict(pl.concat([log, asked.select(log.columns)]))["like"][-len(films) :]


def test_lists_have_the_scores_that_the_ranker_gives_behind_histories_of_the_log(run: Run, tmp_path: Path) -> None:
    log = events(users=80, seed=0).filter(pl.col("time") < 1_600_000_120)  # ten events a user
    log.write_parquet(tmp_path / "events.parquet")
    (tmp_path / "next.toml").write_text(next_schema())
    found, both, users, lists = (str(tmp_path / name) for name in ("next", "both", "users.csv", "lists.parquet"))
    data = ("--data.train", str(tmp_path / "events.parquet"), "--schema", str(tmp_path / "next.toml"))
    sizes = {"model.embedding-dim": 8, "model.num-layers": 1, "model.embedding.kernel": "torch", "training.threads": 1}
    settings = [str(part) for name, value in sizes.items() for part in (f"--{name}", value)]
    assert main(["train", "table_hstu", *data, *settings, "--training.epochs", "1", "--out", found]) == 0
    assert main(["export", found, "--ranker", str(run.folder), "--value", "like", "--out", both]) == 0
    Path(users).write_text("user\nu0\nu3\n")
    assert main(["recommend", both, users, "--k", "6", "--out", lists]) == 0
    rec = Recommender.load(both)
    answers = {row["user"]: row for row in pl.read_parquet(lists).iter_rows(named=True)}
    for user in ("u0", "u3"):
        mine = log.filter(pl.col("user") == user)
        films, scores = answers[user]["items"], answers[user]["scores"]
        assert len(films) == 6
        assert not set(films) & set(mine["film"])
        np.testing.assert_allclose(scores, likes(run, mine, films), rtol=0, atol=1e-6)
        assert scores == sorted(scores, reverse=True)
        asked: dict[str, Any] = {"user": {"user": user}, "k": 6}
        answer = talk(lambda http, asked=asked: http.post("/recommend", json=asked), answerer=rec, deadline_ms=1e4)
        assert [item["id"] for item in answer.json()["items"]] == films
