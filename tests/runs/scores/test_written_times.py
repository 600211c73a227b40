"""A log whose times are text, from the schema that is guessed to the answers of an export."""

from __future__ import annotations

import datetime as dt
import random
from pathlib import Path

import polars as pl
import pytest

from tests.studies.own_cache import cache_with_kernels
from ziggurat.cli.main import main
from ziggurat.features.date_order import DateOrder
from ziggurat.features.events import Events
from ziggurat.features.items import Items
from ziggurat.features.schema import Categorical, Label, Schema
from ziggurat.features.schema_io import write_schema
from ziggurat.runs.load import load_run
from ziggurat.serving.recommender import Recommender

SMALL = [
    *("--training.epochs", "1", "--training.threads", "1", "--training.precision", "fp32"),
    *("--model.embedding-dim", "8", "--model.num-layers", "1", "--model.embedding.kernel", "torch"),
]


def events() -> pl.DataFrame:
    """Sixty users who go round a circle of items, and nothing in their dates shows the day or the month."""
    rng = random.Random(0)
    rows = []
    for user in range(60):
        first = rng.randrange(12)
        at = dt.datetime(2024, rng.randint(1, 3), rng.randint(1, 3), 9)
        for step in range(8):
            rows.append((f"u{user}", f"i{(first + step) % 12}", rng.choice(["yes", "no"]), at))
            at += dt.timedelta(minutes=rng.randint(1, 60))
    rng.shuffle(rows)
    return pl.DataFrame(rows, schema=["user", "item", "like", "time"], orient="row")


def in_words(frame: pl.DataFrame, template: str) -> pl.DataFrame:
    return frame.with_columns(pl.col("time").dt.strftime(template))


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pl.DataFrame:
    cache_with_kernels(tmp_path / "cache", monkeypatch)
    monkeypatch.chdir(tmp_path)
    frame = events()
    in_words(frame, "%m/%d/%Y %I:%M %p").write_csv("log.csv")
    return frame


def test_from_a_guess_to_what_an_export_recommends(log: pl.DataFrame, capsys: pytest.CaptureFixture[str]) -> None:
    in_words(log.drop("like"), "%m/%d/%Y %I:%M %p").write_csv("log.csv")
    assert main(["data", "inspect", "log.csv", "--write-schema", "log.toml"]) == 0
    command = capsys.readouterr().out.splitlines()[-1].split()
    assert command[-2:] == ["--data.split.date-order", "day_first"]  # nothing shows it, and inspect says so
    asked = [*command[1:-1], "month_first", "--model.num-negatives", "8", *SMALL]
    assert main([*asked, "--out", "run"]) == 0
    run = load_run("run")
    assert run.preprocessing.schema.feature("history_times").seen_date_order is DateOrder.MONTH_FIRST
    assert run.evaluate_split("test").num_rows == 60
    # However the log that it is asked about is written, it is the same log.
    pandas = pytest.importorskip("pandas")
    wanted = run.next_items(log, k=3)
    texts = in_words(log, "%m/%d/%Y %I:%M %p")
    for other in (
        texts,
        "log.csv",
        in_words(log, "%Y-%m-%dT%H:%M:%SZ").to_arrow(),
        pandas.DataFrame(in_words(log, "%d.%m.%Y %H:%M").to_dict(as_series=False)).astype({"time": "category"}),
        pandas.DataFrame(log.to_dict(as_series=False)),
    ):
        assert run.next_items(other, k=3).equals(wanted)
    bad = texts.with_columns(time=pl.when(pl.int_range(pl.len()) == 7).then(pl.lit("noon")).otherwise("time"))
    bad.write_csv("bad.csv")
    capsys.readouterr()
    assert main(["predict", "run", "bad.csv", "--out", "next.parquet"]) == 2
    said = capsys.readouterr().err
    assert "bad.csv, line 9, row 7, column 'time'" in said
    assert "a date like 2024-05-31 12:00:00" in said
    assert main(["predict", "run", "bad.csv", "--out", "next.parquet", "--bad-rows", "quarantine"]) == 0
    assert "1 row put aside: run/quarantine/bad.csv" in capsys.readouterr().err
    # Of twelve items everybody has had eight, and who lost an event seven.
    assert pl.read_parquet("next.parquet").height == 60 * 4 + 1
    # An export, and what it is asked.
    assert main(["export", "run", "--out", "export"]) == 0
    export = Recommender.load("export")
    mine = log.filter(pl.col("user") == "u5").sort("time")
    ways = [
        mine["time"].dt.epoch("us").to_list(),
        mine["time"].to_list(),
        in_words(mine, "%m/%d/%Y %I:%M %p")["time"].to_list(),
        in_words(mine, "%Y-%m-%d %H:%M:%S")["time"].to_list(),
    ]
    requests: list[dict[str, object]] = [{"history": mine["item"].to_list(), "history_times": each} for each in ways]
    answers = [export.recommend(request, k=3).items for request in requests]
    assert [item.id for item in answers[0]] == wanted.filter(pl.col("user") == "u5")["item"].to_list()
    assert all(items == answers[0] for items in answers)


def test_a_ranker_of_events_reads_them_too(log: pl.DataFrame) -> None:
    schema = Schema(
        features=(Categorical(name="item"), Categorical(name="like")),
        labels=(Label(name="liked", column="like", positive="yes"),),
        group="user",
        time="time",
        items=Items(id="item"),
        events=Events(actions=("like",)),
    )
    write_schema(schema, "log.toml")
    data = ["--data.train", "log.csv", "--schema", "log.toml", "--data.split.date-order", "month_first"]
    assert main(["train", "table_sequence_ranker", *data, *SMALL, "--out", "run"]) == 0
    run = load_run("run")
    found = [run.predict(each) for each in (log, in_words(log, "%m/%d/%Y %I:%M %p"), in_words(log, "%d.%m.%Y %H:%M"))]
    scored = [each["liked"].to_list() for each in found if isinstance(each, pl.DataFrame)]
    assert len(scored[0]) == log.height
    assert scored == [scored[0]] * 3
    # Its samples, as they were made of the log; their times as numbers, dates and texts.
    samples = pl.read_parquet(next(Path("cache").rglob("events_*/test.parquet")))
    scores = run.scores(samples)
    dated = samples.with_columns(pl.col("history_times", "asked_at").cast(pl.List(pl.Datetime("us"))))
    each = pl.element().dt.strftime("%m/%d/%Y %H:%M")
    texts = dated.with_columns(pl.col("history_times", "asked_at").list.eval(each))
    assert (run.scores(dated) == scores).all()
    assert (run.scores(texts) == scores).all()
