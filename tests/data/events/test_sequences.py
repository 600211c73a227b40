"""Samples of event logs against plain Python: who is asked what, from which history, and what is refused."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from ziggurat.data.encoded.records import halves_of, table_to_batch
from ziggurat.data.encoded.stored_once import plain_lists, shared_lists, store_once
from ziggurat.data.events import sequences
from ziggurat.data.events.sequences import find_sequences, sequence_schema, sequences_of
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.prepare import prepare
from ziggurat.data.preprocess.splits import SplitBy, SplitConfig
from ziggurat.errors import ConfigError, DataError, SchemaError
from ziggurat.features.events import EARLIER, HISTORY, EqualTimes, Events, TrainingWindows, of_history
from ziggurat.features.items import Items
from ziggurat.features.schema import Categorical, Label, Moments, Schema
from ziggurat.features.schema_io import schema_from_toml, schema_to_toml

LIKE = Label(name="like", column="action", positive="liked")


def schema_of(**settings: Any) -> Schema:
    names = ("item", "kind", "action")
    return Schema(
        features=tuple(Categorical(name=name) for name in names),
        group="user",
        time="time",
        items=Items(id="item", features=("item", "kind")),
        events=Events(actions=("action",), **settings),
    )


def random_log(seed: int, *, users: int = 25, items: int = 12) -> pl.DataFrame:
    """Users with one event to twenty, in any order, many of them at one time."""
    rng = random.Random(seed)
    rows = []
    for user in range(users):
        for _ in range(rng.choice([1, 2, 3, 4, rng.randint(5, 20)])):
            item = rng.randrange(items)
            action = rng.choice(["seen", "liked", None])
            rows.append((f"u{user}", f"i{item}", f"k{item % 3}", action, 1_600_000_000 + rng.randrange(9)))
    rng.shuffle(rows)
    return pl.DataFrame(rows, schema=["user", "item", "kind", "action", "time"], orient="row")


Sample = tuple[str, tuple[str, ...], tuple[str | None, ...], tuple[int, ...], str, int, frozenset[str]]


def wanted(
    frame: pl.DataFrame,
    *,
    max_length: int,
    windows: TrainingWindows,
    cuts: tuple[int, int] | None,
    validates: bool = True,
) -> list[list[Sample]]:
    """The samples of all splits, event by event; with cuts by these two times."""
    events: dict[str, list[tuple[int, str, str | None]]] = {}
    for user, item, _, action, moment in frame.iter_rows():
        events.setdefault(user, []).append((moment, item, action))
    parts: list[list[Sample]] = [[], [], []]
    for user, mine in events.items():
        mine.sort(key=lambda event: event[0])  # stable
        if cuts is None and not validates:
            splits = [0] * (len(mine) - 1) + [2]
        elif cuts is None:
            splits = [0] * (len(mine) - 2) + [1] * (len(mine) > 1) + [2]
            if len(mine) == 2:
                splits = [-1, 2]
        else:
            splits = [(event[0] >= cuts[0]) + (event[0] >= cuts[1]) for event in mine]
        train = [at for at, split in enumerate(splits) if split == 0]
        asked = [(at, split) for at, split in enumerate(splits) if split > 0 and at > 0]
        if len(train) >= 2:
            ends = range(len(train) - 1, 0, -max_length) if windows is TrainingWindows.ALL else [len(train) - 1]
            asked += [(end, 0) for end in ends]
        for at, split in asked:
            begin = max(0, at - max_length)
            history = mine[begin:at]
            earlier = frozenset(item for _, item, _ in mine[:begin]) if split else frozenset()
            moments, items, actions = (tuple(each) for each in zip(*history, strict=True))
            parts[split].append((user, items, actions, moments, mine[at][1], mine[at][0], earlier))
    return parts


def found(data: Any, frame: pl.DataFrame) -> list[list[Sample]]:
    """The samples of encoded data, in words again."""
    parts = []
    users = {key: name for name in frame["user"].unique() for key in [group_of(data, name)]}
    for dataset in (data.train, data.valid, data.test):
        rows: list[Sample] = []
        for number in range(len(dataset.group_sizes) if dataset is not None else 0):
            batch = table_to_batch(dataset.read_group(number), data.inputs)
            names = [spec.name for spec in data.inputs.jagged]
            words = {
                "item": dict(enumerate(data.preprocessing.vocabularies["item"].ids, start=3)),
                "action": dict(enumerate(data.preprocessing.vocabularies["action"].ids, start=3)) | {2: None},
            }

            def texts(name: str, table: str, at: int, batch: Any = batch, names: Any = names, words: Any = words):
                lists = batch.jagged.of(names.index(name), batch_size=batch.batch_size)
                return tuple(
                    words[table].get(row, "?")
                    for row in lists.values[lists.offsets[at] : lists.offsets[at + 1]].tolist()
                )

            times, asked = batch.sequences["history_times"], batch.sequences["asked_at"]
            item = [spec.name for spec in data.inputs.single].index("item")
            for at in range(batch.batch_size):
                rows.append(
                    (
                        users[int(batch.groups[at])],
                        texts(HISTORY, "item", at),
                        texts(of_history("action"), "action", at),
                        tuple(times.values["time"][times.offsets[at] : times.offsets[at + 1]].tolist()),
                        words["item"].get(int(batch.single[item, at]), "?"),
                        int(asked.values["time"][at]),
                        frozenset(texts(EARLIER, "item", at)),
                    )
                )
        parts.append(rows)
    return parts


def group_of(data: Any, name: str) -> int:
    row = {"user": [name], "item": [None], "kind": [None], "next_item": [1.0]}
    lists = {
        each: [[]] for each in (HISTORY, of_history("kind"), of_history("action"), EARLIER, "history_times", "asked_at")
    }
    return int(data.preprocessing.batch({**row, **lists}).groups[0])


def unknown_as(samples: list[Sample], known: set[str]) -> list[Sample]:
    """Items that training never saw are one row."""

    def name(item: str) -> str:
        return item if item in known else "?"

    renamed = [
        (user, tuple(map(name, items)), actions, times, name(item), asked, frozenset(map(name, earlier)))
        for user, items, actions, times, item, asked, earlier in samples
    ]
    return sorted(renamed, key=lambda sample: repr(sample[:-1]))


@pytest.mark.parametrize(
    ("seed", "max_length", "windows", "by"),
    [
        (0, 3, "last", "leave_one_out"),
        (1, 4, "all", "leave_one_out"),
        (2, 50, "last", "time"),
        (3, 2, "all", "time"),
        (4, 3, "last", "leave_one_out, nothing validates"),
        (5, 4, "all", "leave_one_out, nothing validates"),
    ],
)
def test_samples_are_those_of_plain_python(seed: int, max_length: int, windows: str, by: str, tmp_path: Path) -> None:
    """Above all: no history has anything of its question, or of what came after it."""
    frame = random_log(seed)
    frame.write_parquet(tmp_path / "events.parquet")
    name, _, nothing = by.partition(", ")
    split = SplitConfig(by=SplitBy(name), valid_fraction=0.0 if nothing else 0.2, test_fraction=0.2)
    config = DataConfig(train=(str(tmp_path / "events.parquet"),), split=split)
    schema = schema_of(max_length=max_length, windows=TrainingWindows(windows))
    data = prepare(config, schema=schema, folder=tmp_path / "cache")
    cuts = None
    if by == "time":
        times = frame["time"].sort()
        cuts = (times[round(len(times) * 0.6)], times[round(len(times) * 0.8)])
    parts = wanted(
        frame, max_length=max_length, windows=TrainingWindows(windows), cuts=cuts, validates=bool(split.valid_fraction)
    )
    assert bool(parts[1]) == bool(split.valid_fraction)
    known = set(data.preprocessing.vocabularies["item"].ids)
    for mine, theirs in zip(found(data, frame), parts, strict=True):
        assert unknown_as(mine, known) == unknown_as(theirs, known)
    assert data.summary.warnings  # users of one event, and equal times, are told
    again = prepare(config, schema=schema, folder=tmp_path / "cache")
    assert again.reused
    assert again.summary == data.summary
    assert data.summary_lines()[0].endswith("from 1 raw file")  # and not from those of samples


def test_files_of_a_folder_of_events_that_are_no_data_are_told(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    random_log(0).write_parquet(tmp_path / "log" / "events.parquet")
    (tmp_path / "log" / "README.txt").write_text("what this is")
    config = DataConfig(train=(str(tmp_path / "log"),), split=SplitConfig(by=SplitBy.LEAVE_ONE_OUT))
    summary = prepare(config, schema=schema_of(), folder=tmp_path / "cache").summary
    assert summary.raw_files == 1
    assert summary.left_out == (str(tmp_path / "log" / "README.txt"),)


def test_files_of_events_with_and_without_a_zone_are_said(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    dated = random_log(0).with_columns(pl.from_epoch(pl.int_range(pl.len()) + 1_700_000_000).alias("time"))
    first, second = dated.head(40), dated.slice(40)
    first.write_parquet(tmp_path / "log" / "1.parquet")
    second.with_columns(pl.col("time").dt.replace_time_zone("UTC")).write_parquet(tmp_path / "log" / "2.parquet")
    config = DataConfig(train=(str(tmp_path / "log"),), split=SplitConfig(by=SplitBy.LEAVE_ONE_OUT))
    warnings = prepare(config, schema=schema_of(), folder=tmp_path / "cache").summary.warnings
    assert any(f"40 of {dated.height:,} dates name no time zone" in warning for warning in warnings)


def test_samples_change_with_the_number_of_their_rules_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever changes the samples of a log, or what is refused, raises the number; older samples are then left."""
    random_log(0).write_parquet(tmp_path / "events.parquet")
    config = DataConfig(train=(str(tmp_path / "events.parquet"),), split=SplitConfig(by=SplitBy.LEAVE_ONE_OUT))
    found = {"rules": sequences._FORMAT}
    for name, schema in (("next", schema_of()), ("candidates", replace(schema_of(), labels=(LIKE,)))):
        made = sequences_of(config, schema, folder=tmp_path)
        files = (made.config.train, made.config.valid, made.config.test)
        found[name] = zlib.crc32("".join(str(pl.read_parquet(path).rows()) for (path,) in files).encode())
    assert found == {"rules": 3, "next": 693826509, "candidates": 866011674}
    assert [each.seen for each in made.schema.features if isinstance(each, Moments)] == [
        (1_600_000_000, 1_600_000_008)
    ] * 2
    assert find_sequences(config, schema_of(), folder=tmp_path) is not None
    monkeypatch.setattr(sequences, "_FORMAT", sequences._FORMAT + 1)
    assert find_sequences(config, schema_of(), folder=tmp_path) is None


def test_events_are_written_and_read_as_toml() -> None:
    schema = schema_of(max_length=7, windows=TrainingWindows.ALL, equal_times=EqualTimes.REFUSE)
    assert schema_from_toml(schema_to_toml(schema), "test") == schema
    assert schema_from_toml(schema_to_toml(sequence_schema(schema)), "test") == sequence_schema(schema)


LATER = int(time.time()) + 10 * 86_400


@pytest.mark.parametrize(
    ("change", "settings", "words"),
    [
        ({"time": pl.Series([1.5e9, 1.6e9, 1.7e9, 1.7e9])}, {}, "whole numbers, or dates"),
        ({"time": pl.Series(["1600000000.5", "1", "2", "3"])}, {}, "a time as a whole number"),
        ({"time": pl.Series([1, 2, 2**63 + 5, 3], dtype=pl.UInt64)}, {}, "a time as a whole number of 64 bits"),
        ({"time": pl.Series([1, 2, None, 3])}, {}, "the time of each event"),
        ({"time": pl.Series([1, 2, LATER, 3])}, {}, "past by the clock"),
        ({"time": pl.Series([1, 2, LATER * 1000, 3])}, {}, "past by the clock"),
        ({"time": pl.Series([14, 15, 16_000, 16]) * 10**8}, {}, "all times of the log in one unit"),
        ({"user": pl.Series(["a", None, "a", "a"])}, {}, "the user of each event"),
        ({"item": pl.Series(["x", None, "y", "z"])}, {}, "feature 'item' of each event"),
        ({"time": pl.Series([1, 2, 2, 3])}, {"equal_times": EqualTimes.REFUSE}, "user 'a', time 2"),
        ({"user": pl.Series(["a", "b", "c", "d"])}, {}, "a user with events to train on"),
    ],
)
def test_bad_events_are_refused_with_their_place(
    change: dict[str, pl.Series], settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    columns = {
        "user": ["a"] * 4,
        "item": ["x", "y", "z", "x"],
        "kind": ["k"] * 4,
        "action": ["v"] * 4,
        "time": [1, 2, 3, 4],
    }
    frame = pl.DataFrame(columns).with_columns(**change)
    frame.write_parquet(tmp_path / "events.parquet")
    config = DataConfig(train=(str(tmp_path / "events.parquet"),))
    with pytest.raises((DataError, SchemaError)) as raised:
        prepare(config, schema=schema_of(**settings), folder=tmp_path / "cache")
    assert words in str(raised.value)
    assert raised.value.ways_out
    assert not list((tmp_path / "cache").glob("events_*/facts.json"))


@pytest.mark.parametrize(("role", "column"), [("group", "user"), ("time", "time")])
def test_an_absent_column_of_a_role_is_named_as_one(role: str, column: str, tmp_path: Path) -> None:
    random_log(0).rename({column: f"{column}s"}).write_parquet(tmp_path / "events.parquet")
    config = DataConfig(train=(str(tmp_path / "events.parquet"),))
    with pytest.raises(SchemaError, match=rf"\[roles\] {role} of the schema") as raised:
        prepare(config, schema=schema_of(), folder=tmp_path / "cache")
    assert raised.value.ways_out[0] == f'{role} = "{column}s"'


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"group": ""}, "no roles: group"),
        ({"items": None}, "no [items]"),
        ({"weight": "action"}, "weight"),
        ({"events": Events()}, "'action'"),
        ({"group": "history"}, "'history'"),
        ({"group": "item"}, "'item'"),
        ({"events": Events(actions=("action", "kind"))}, "in more than one place"),
    ],
)
def test_a_schema_of_events_has_its_parts(change: dict[str, Any], words: str) -> None:
    whole = schema_of()
    given = {name: getattr(whole, name) for name in ("features", "group", "time", "items", "events")}
    with pytest.raises(SchemaError) as raised:
        Schema(**(given | change))
    assert words in str(raised.value)


def test_events_are_split_by_their_own_time(tmp_path: Path) -> None:
    frame = random_log(5).with_columns(noted=-pl.col("time"))
    frame.write_parquet(tmp_path / "events.parquet")
    files = (str(tmp_path / "events.parquet"),)
    split = SplitConfig(by=SplitBy.TIME, column="noted")
    with pytest.raises(ConfigError, match=r"by their own time, column 'time'(?s:.*)time = \"noted\""):
        sequences_of(DataConfig(train=files, split=split), schema_of(), folder=tmp_path)
    same = sequences_of(
        DataConfig(train=files, split=SplitConfig(by=SplitBy.TIME, column="time")), schema_of(), folder=tmp_path
    )
    assert same.split == "by time column 'time'"


def test_leave_one_out_wants_events_and_events_want_such_a_split(tmp_path: Path) -> None:
    frame = random_log(5)
    frame.write_parquet(tmp_path / "events.parquet")
    files = (str(tmp_path / "events.parquet"),)
    samples = Schema(features=(Categorical(name="item"),), labels=(Label(name="kind", positive="k1"),))
    cases: list[tuple[Schema, SplitBy]] = [(samples, SplitBy.LEAVE_ONE_OUT), (schema_of(), SplitBy.RANDOM)]
    for schema, by in cases:
        with pytest.raises(ConfigError, match="split"):
            prepare(DataConfig(train=files, split=SplitConfig(by=by)), schema=schema, folder=tmp_path / "cache")


def test_a_history_of_hundreds_of_thousands_of_events_is_cut(tmp_path: Path) -> None:
    """What is kept of it does not grow with it; its items before are there once each."""
    size = 300_000
    frame = pl.DataFrame({"user": pl.repeat("a", size, eager=True), "item": pl.int_range(size, eager=True) % 997})
    frame = frame.with_columns(kind=pl.lit("k"), action=pl.lit("v"), time=pl.int_range(size))
    frame.write_parquet(tmp_path / "events.parquet")
    config = DataConfig(train=(str(tmp_path / "events.parquet"),))
    data = prepare(config, schema=schema_of(max_length=100), folder=tmp_path / "cache")
    batch = table_to_batch(data.test.read_group(0), data.inputs) if data.test else None
    assert batch is not None
    lengths = dict(zip((spec.name for spec in data.inputs.jagged), batch.jagged.offsets.diff().tolist(), strict=True))
    assert lengths[HISTORY] == 100
    assert lengths[EARLIER] == 997
    assert int(batch.sequences["asked_at"].values["time"][0]) == size - 1
    assert batch.sequences["history_times"].values["time"].tolist() == list(range(size - 101, size - 1))


_MILLION = """
import resource, sys
from pathlib import Path
from ziggurat.data.encoded.records import table_to_batch
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.prepare import prepare
from ziggurat.features.events import HISTORY
from ziggurat.features.schema_io import read_schema

folder = Path(sys.argv[1])
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

for name in ("few", "many"):
    data = DataConfig(train=(str(folder / f"{name}.parquet"),))
    made = prepare(data, schema=read_schema(folder / sys.argv[2]), folder=folder / "cache")
    batch = table_to_batch(made.test.read_group(0), made.inputs)
    places = [spec.name for spec in made.inputs.jagged]
    lengths = batch.jagged.offsets.diff().view(len(places), -1)
    print(peak(), int(lengths[places.index(HISTORY)].max()), made.train.num_rows, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("label", [None, LIKE], ids=["next item", "candidates"])
def test_one_user_with_a_million_events_takes_bounded_memory(tmp_path: Path, label: Label | None) -> None:
    """Peak memory of a process that reads such a log, sorts it, makes samples, encodes them and reads a batch."""
    schema = schema_of(max_length=100, windows=TrainingWindows.LAST)
    schema = schema if label is None else replace(schema, labels=(label,))
    (tmp_path / "schema.toml").write_text(schema_to_toml(schema))
    for name, size in (("few", 20_000), ("many", 1_000_000)):
        number = pl.int_range(size, eager=True)
        frame = pl.DataFrame({"user": pl.repeat("a", size, eager=True), "item": number * 7919 % 997})
        # With labels the last 20,000 events are candidates: the million is in their histories.
        liked = pl.when(number >= size - 20_000).then(
            pl.when(number % 3 == 0).then(pl.lit("liked")).otherwise(pl.lit("seen"))
        )
        frame = frame.with_columns(kind=pl.lit("k"), action=liked, time=number)
        frame.sample(fraction=1, shuffle=True, seed=0).write_parquet(tmp_path / f"{name}.parquet")
    ran = subprocess.run(
        [sys.executable, "-c", _MILLION, str(tmp_path), "schema.toml"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    (few, _, _), (many, longest, _) = (map(int, line.split()) for line in ran.stdout.strip().splitlines()[-2:])
    assert longest == 100
    assert many - few < 400, f"{few} MiB with 20,000 events, {many} MiB with a million"


def test_bad_events_can_be_put_aside(tmp_path: Path) -> None:
    from ziggurat.data.raw.bad_rows import BadRowPolicy

    frame = random_log(6).with_row_index()
    frame = frame.with_columns(time=pl.when(pl.col("index") == 3).then(None).otherwise("time"))
    frame.write_parquet(tmp_path / "events.parquet")
    config = DataConfig(train=(str(tmp_path / "events.parquet"),), bad_rows=BadRowPolicy.QUARANTINE)
    data = prepare(config, schema=schema_of(), folder=tmp_path / "cache")
    assert any("1 events were put aside" in line for line in data.summary.warnings)


def test_times_that_differ_in_their_upper_half_alone_are_not_stored_as_one() -> None:
    lists = [[5, 9], [5, 9], [5 + 2**32, 9], [], [], [7]]
    kind = pa.list_(pa.field("item", pa.int64(), nullable=False))
    plain = pa.table({"times": pa.array(lists, type=kind)})
    stored = store_once(plain)
    assert stored.column("times").null_count == 2
    assert plain_lists(stored, schema=plain.schema).equals(plain)
    values, begins, sizes = halves_of(shared_lists(stored).column("times").chunk(0))
    ends = begins + sizes
    assert [values[first:last].view(np.int64).tolist() for first, last in zip(begins, ends, strict=True)] == lists


def test_of_two_processes_one_makes_the_samples_and_the_other_waits_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal files in their place would be others to whoever prepares data of them already."""
    random_log(3).write_parquet(tmp_path / "log.parquet")
    config = DataConfig(train=(str(tmp_path / "log.parquet"),))
    write = sequences._write
    waits = threading.Event()
    made: list[object] = []

    def while_another_waits(*arguments: Any, **settings: Any) -> None:
        made.append(arguments)
        assert waits.wait(60)
        write(*arguments, **settings)

    monkeypatch.setattr(sequences, "_write", while_another_waits)
    with ThreadPoolExecutor(2) as pool:
        pending = [
            pool.submit(sequences_of, config, schema_of(), folder=tmp_path / "cache", waiting=waits.set)
            for _ in range(2)
        ]
        one, other = (each.result() for each in pending)
    assert one == other
    assert len(made) == 1
    assert not list((tmp_path / "cache").glob(".*"))
