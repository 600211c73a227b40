"""Candidates of event logs against plain Python: who is asked what behind which history, and what is refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest

from ziggurat.data.events.sequences import sequence_schema, sequences_of
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.prepare import prepare
from ziggurat.data.preprocess.splits import SplitBy, SplitConfig
from ziggurat.errors import ConfigError, DataError, SchemaError
from ziggurat.features.events import Events
from ziggurat.features.items import Items
from ziggurat.features.schema import Categorical, Label, Schema, Task
from ziggurat.features.schema_io import schema_from_toml, schema_to_toml

START = 1_600_000_000


def schema_of(**settings: Any) -> Schema:
    names = ("item", "kind", "verb", "stars", "country")
    given = {"actions": ("verb", "stars"), "context": ("country",), **settings}
    return Schema(
        features=tuple(Categorical(name=name) for name in names),
        labels=(Label(name="like", column="stars", positive_from=4.0), Label(name="stars", task=Task.REGRESSION)),
        group="user",
        time="time",
        items=Items(id="item", features=("item", "kind")),
        events=Events(**given),
    )


def random_log(seed: int, *, users: int = 30) -> pl.DataFrame:
    """Users with one event to twenty; a third of the events have no stars, and many have one time."""
    rng = random.Random(seed)
    rows = []
    for user in range(users):
        for _ in range(rng.choice([1, 2, 3, rng.randint(4, 20)])):
            item = rng.randrange(12)
            verb = rng.choice(["seen", "saved", "rated", "rated"])
            stars = rng.randint(1, 5) if verb != "saved" else None
            moment = START + rng.randrange(40)
            rows.append((f"u{user}", f"i{item}", f"k{item % 3}", verb, stars, rng.choice(["x", "y"]), moment))
    rng.shuffle(rows)
    names = ["user", "item", "kind", "verb", "stars", "country", "time"]
    return pl.DataFrame(rows, schema=names, orient="row")


def wanted(frame: pl.DataFrame, *, split: SplitConfig, events: Events) -> list[list[tuple[Any, ...]]]:
    """The samples of all splits, event by event, without the number of the question."""
    mine: dict[str, list[dict[str, Any]]] = {}
    for row in frame.iter_rows(named=True):
        mine.setdefault(row["user"], []).append(row)
    for each in mine.values():
        each.sort(key=lambda event: event["time"])  # stable
    known = sorted(
        {
            (row["time"] - frame["time"].min()) // (events.window or 1)
            for row in frame.iter_rows(named=True)
            if row["stars"]
        }
    )
    times = sorted(frame["time"])
    cuts = [
        times[min(len(times) - 1, round(len(times) * (1 - share)))]
        for share in (split.valid_fraction + split.test_fraction, split.test_fraction)
    ]
    parts: list[list[tuple[Any, ...]]] = [[], [], []]
    for user, log in mine.items():
        asked = [at for at, event in enumerate(log) if event["stars"] is not None]
        blocks: list[tuple[Any, int, list[int]]] = []
        asked = [at for at in asked if at >= events.min_history]
        for number, at in enumerate(asked):
            behind, moment = len(asked) - 1 - number, log[at]["time"]
            if split.by is SplitBy.LEAVE_ONE_OUT:
                validates = behind == 1 and len(asked) > 2 and split.valid_fraction > 0
                part = key = 2 if behind == 0 and len(asked) > 1 else 1 if validates else 0
            elif split.by is SplitBy.TIME:
                part = key = (moment >= cuts[0]) + (moment >= cuts[1])
            else:
                key = (moment - frame["time"].min()) // events.window
                part = 2 if key == known[-1] else 1 if key == known[-2] else 0
            if blocks and blocks[-1][0] == key and len(blocks[-1][2]) < events.candidates:
                blocks[-1][2].append(at)
            else:
                blocks.append((key, part, [at]))
        for _, part, block in blocks:
            before = log[max(0, block[0] - events.reach) if events.reach else 0 : block[0]]
            if events.pools:
                share = events.max_length // len(events.pools)
                kept = [
                    at
                    for pool in events.pools
                    for at in [i for i, e in enumerate(before) if e["verb"] == pool][-share:]
                ]
                history = [before[at] for at in sorted(kept)]
            else:
                history = before[-events.max_length :]
            for at in block:
                parts[part].append(
                    (
                        user, log[at]["item"], log[at]["kind"], log[block[0]]["country"],
                        *(tuple(event[name] for event in history) for name in ("item", "kind", "verb")),
                        tuple(None if event["stars"] is None else str(event["stars"]) for event in history),
                        tuple(event["time"] for event in history),
                        log[block[0]]["time"], log[at]["stars"],
                    )
                )  # fmt: skip
    return parts


COLUMNS = ("user", "item", "kind", "country", "history", "history_kind", "history_verb", "history_stars")


def found(path: Path) -> list[tuple[Any, ...]]:
    table = pq.read_table(path)
    rows = table.select([*COLUMNS, "history_times", "asked_at", "stars", "question"]).to_pylist()
    return [
        tuple(tuple(value) if isinstance(value, list) else value for name, value in row.items() if name != "question")
        for row in ({**row, "asked_at": row["asked_at"][0]} for row in rows)
    ]


@pytest.mark.parametrize(
    ("seed", "by", "settings"),
    [
        (0, "leave_one_out", {"candidates": 3, "max_length": 4}),
        (5, "leave_one_out, nothing validates", {"candidates": 3, "max_length": 4}),
        (1, "time", {"candidates": 2, "max_length": 50}),
        (2, "time", {"candidates": 100, "max_length": 7, "pool_by": "verb", "pools": ("seen", "saved", "rated")}),
        (3, "windows", {"candidates": 4, "max_length": 6, "window": 7}),
        (4, "windows", {"candidates": 1, "max_length": 5, "window": 10, "pool_by": "verb", "pools": ("saved",)}),
        (5, "time", {"candidates": 2, "max_length": 6, "min_history": 3, "reach": 4}),
        (
            7,
            "leave_one_out",
            {"max_length": 4, "min_history": 5, "reach": 3, "pool_by": "verb", "pools": ("seen", "rated")},
        ),
    ],
)
def test_candidates_are_those_of_plain_python(seed: int, by: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Above all: no history or context has anything that came after its question began."""
    frame = random_log(seed)
    frame.write_parquet(tmp_path / "events.parquet")
    name, _, validates = by.partition(", ")
    split = SplitConfig(by=SplitBy(name), valid_fraction=0.0 if validates else 0.2, test_fraction=0.2)
    schema = schema_of(**settings)
    assert schema.events is not None
    made = sequences_of(
        DataConfig(train=(str(tmp_path / "events.parquet"),), split=split), schema, folder=tmp_path / "cache"
    )
    files = (made.config.train, made.config.valid, made.config.test)
    mine = [found(Path(names[0])) if names else [] for names in files]
    for samples, others in zip(mine, wanted(frame, split=split, events=schema.events), strict=True):
        assert sorted(samples, key=repr) == sorted(others, key=repr)
    before = pl.int_range(pl.len()).over("user")
    can_be_asked = frame.sort("user", "time", maintain_order=True).select(
        pl.col("stars").is_not_null() & (before >= schema.events.min_history)
    )
    assert sum(map(len, mine)) == can_be_asked.to_series().sum()  # each candidate once
    assert any("no candidates" in line for line in made.warnings) == bool(schema.events.min_history)
    if by == "windows":
        asked = [(row[-2] - frame["time"].min()) // settings["window"] for row in mine[0]]
        assert asked == sorted(asked)
    questions = pq.read_table(made.config.train[0]).column("question").to_numpy()
    assert np.array_equal(questions, np.sort(questions))
    assert any("no labels" in line for line in made.warnings)


def test_schemas_of_candidates_are_written_and_read_as_toml() -> None:
    schema = schema_of(candidates=7, window=86_400, min_history=9, reach=90, pool_by="verb", pools=("seen", "rated"))
    assert schema_from_toml(schema_to_toml(schema), "test") == schema
    assert schema_from_toml(schema_to_toml(sequence_schema(schema)), "test") == sequence_schema(schema)
    plain = Events(actions=("verb",))
    assert set(plain.to_state()) == {"actions", "max_length", "windows", "equal_times", "future_times"}


@pytest.mark.parametrize(
    ("labels", "settings", "words"),
    [
        (("kind",), {}, "column 'kind', which is also 'kind'"),
        (("country",), {}, "column 'country'"),
        (("time",), {}, "known after the event alone"),
        (("history",), {}, "other names"),
        ((), {"window": 5}, "context, window, and no [[label]]"),
        ((), {"min_history": 5}, "context, min_history, and no [[label]]"),
        (("stars",), {"pool_by": "kind", "pools": ("a",)}, "one of the actions"),
        (("stars",), {"pool_by": "verb"}, "pools, different values"),
        (("stars",), {"pool_by": "verb", "pools": ("a", "b", "c"), "max_length": 2}, "max_length"),
        (("stars",), {"context": ("nobody",)}, "'nobody'"),
        (("stars",), {"context": ("country", "kind")}, "in more than one place"),
    ],
)
def test_impossible_schemas_of_candidates_are_refused(labels: Any, settings: dict[str, Any], words: str) -> None:
    def impossible() -> None:
        whole = schema_of(**settings)
        given = {name: getattr(whole, name) for name in ("features", "group", "time", "items", "events")}
        Schema(**given, labels=tuple(Label(name=name) for name in labels))

    with pytest.raises(SchemaError) as raised:
        impossible()
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("change", "by", "window", "words"),
    [
        ({"stars": pl.lit(None, pl.Int64)}, "time", 0, "none with a value in stars"),
        ({"time": pl.lit(START)}, "time", 0, "distinct times"),
        ({}, "windows", 0, "window = 86400"),
        ({}, "windows", 1_000, "1 windows of length 1,000"),
        ({}, "random", 0, "leave_one_out or time or windows"),
    ],
)
def test_logs_that_give_no_candidates_are_refused(
    change: dict[str, Any], by: str, window: int, words: str, tmp_path: Path
) -> None:
    random_log(6).with_columns(**change).write_parquet(tmp_path / "events.parquet")
    config = DataConfig(train=(str(tmp_path / "events.parquet"),), split=SplitConfig(by=SplitBy(by)))
    with pytest.raises((ConfigError, DataError)) as raised:
        prepare(config, schema=schema_of(window=window), folder=tmp_path / "cache")
    assert words in str(raised.value)
    assert raised.value.ways_out


def test_a_log_without_so_long_a_history_is_refused(tmp_path: Path) -> None:
    random_log(6).write_parquet(tmp_path / "events.parquet")
    config = DataConfig(train=(str(tmp_path / "events.parquet"),))
    with pytest.raises(DataError, match="20 events of its user before it") as raised:
        prepare(config, schema=schema_of(min_history=20), folder=tmp_path / "cache")
    assert "a smaller min_history" in raised.value.ways_out


@pytest.mark.parametrize(
    ("label", "stars", "words"),
    [
        (Label(name="like", column="stars"), pl.lit(3), "0 or 1"),
        (Label(name="like", column="stars", positive="y", negative="n"), pl.lit("maybe"), "'y' or 'n'"),
        (Label(name="stars", task=Task.REGRESSION), pl.lit(float("inf")), "a finite number"),
    ],
)
def test_a_wrong_label_is_named_by_its_own_file_and_row(
    label: Label, stars: pl.Expr, words: str, tmp_path: Path
) -> None:
    frame = random_log(8).with_columns(stars=pl.when(pl.int_range(pl.len()) == 5).then(stars))  # others: no label
    frame.write_parquet(tmp_path / "events.parquet")
    whole = schema_of()
    schema = Schema(
        features=whole.features, group="user", time="time", items=whole.items, events=whole.events, labels=(label,)
    )
    config = DataConfig(train=(str(tmp_path / "events.parquet"),))
    with pytest.raises(DataError) as raised:
        prepare(config, schema=schema, folder=tmp_path / "cache")
    assert words in str(raised.value)
    assert "events.parquet, row 5" in str(raised.value)


def test_an_event_has_all_labels_or_none(tmp_path: Path) -> None:
    frame = random_log(7).with_columns(share=pl.when(pl.int_range(pl.len()) == 3).then(None).otherwise(0.5))
    frame.with_columns(stars=pl.lit(3)).write_parquet(tmp_path / "events.parquet")
    whole = schema_of()
    labels = (Label(name="stars", task=Task.REGRESSION), Label(name="share", task=Task.REGRESSION))
    schema = Schema(
        features=whole.features, group="user", time="time", items=whole.items, events=whole.events, labels=labels
    )
    config = DataConfig(train=(str(tmp_path / "events.parquet"),))
    with pytest.raises(DataError, match="none for share") as raised:
        prepare(config, schema=schema, folder=tmp_path / "cache")
    assert "row 3" in str(raised.value)
