"""prepare: fitted on training rows alone, every row in one split, cached, checked, atomic, safe among processes."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from ziggurat.config import from_json, override, to_json
from ziggurat.data.encoded.loader import Loader, LoaderConfig
from ziggurat.data.preprocess import build as build_module
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.prepare import prepare
from ziggurat.data.preprocess.prepared import PreparedData
from ziggurat.data.preprocess.splits import SplitBy, SplitConfig
from ziggurat.data.raw.bad_rows import BadRowPolicy
from ziggurat.data.raw.source import RawSource
from ziggurat.errors import CheckpointError, ConfigError, DataError, MissingFileError, SchemaError
from ziggurat.features.batch import validate_batch
from ziggurat.features.schema import UNKNOWN_ROW, Categorical, Dense, Label, MultiHot, Schema, Task
from ziggurat.ops.text.choose import text_kernel

SCHEMA = Schema(
    features=(Dense(name="price"), Categorical(name="user"), MultiHot(name="tags")),
    labels=(Label(name="click"),),
    time="time",
)
NUM_ROWS = 1000


def raw_frame(num_rows: int = NUM_ROWS, *, start: int = 0) -> pl.DataFrame:
    """Row n has time n and user u<n // 10>: late users are never seen early."""
    rows = np.arange(start, start + num_rows)
    return pl.DataFrame(
        {
            "user": [f"u{row // 10}" for row in rows],
            "price": rows / 10,
            "tags": [[f"t{row % 7}"] * (row % 3) for row in rows.tolist()],
            "click": rows % 2,
            "time": rows,
            "part": np.array(["train", "train", "valid", "test"])[rows % 4],
        }
    )


@pytest.fixture
def raw(tmp_path) -> str:
    path = tmp_path / "raw.parquet"
    raw_frame().write_parquet(path)
    return str(path)


def time_split(path: str, **settings) -> DataConfig:
    return DataConfig(train=(path,), split=SplitConfig(by=SplitBy.TIME), rows_per_group=100, **settings)


def rows_of(dataset) -> list[int]:
    if dataset is None:
        return []
    groups = [dataset.read_group(index) for index in range(len(dataset.group_sizes))]
    return pa.concat_tables(groups).column("row:").to_pylist()


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def test_time_split_fits_on_the_past_alone(tmp_path, raw):
    prepared = prepare(time_split(raw), schema=SCHEMA, folder=tmp_path / "cache")
    assert rows_of(prepared.train) == list(range(800))
    assert rows_of(prepared.valid) == list(range(800, 900))
    assert rows_of(prepared.test) == list(range(900, 1000))
    assert prepared.inputs == prepared.train.inputs
    assert prepared.inputs.table("user").num_rows == 80 + 3  # the users of the training rows
    assert prepared.test.read_group(0).column("user").to_pylist() == [UNKNOWN_ROW] * 100
    assert prepared.train.read_group(0).column("user").to_numpy().min() >= 3
    assert not prepared.reused


@pytest.mark.parametrize("by", [SplitBy.RANDOM, SplitBy.TIME_ORDER, SplitBy.COLUMN])
def test_every_row_is_in_one_split_with_its_own_values(tmp_path, raw, by):
    split = SplitConfig(by=by, column="part" if by is SplitBy.COLUMN else "")
    prepared = prepare(DataConfig(train=(raw,), split=split), schema=SCHEMA, folder=tmp_path / "cache")
    parts = [prepared.train, prepared.valid, prepared.test]
    assert sorted(row for part in parts for row in rows_of(part)) == list(range(NUM_ROWS))
    (chunk,) = RawSource(raw).frames()
    whole = prepared.preprocessing.encode(chunk)
    for part in parts:
        assert part is not None
        table = pa.concat_tables([part.read_group(index) for index in range(len(part.group_sizes))])
        expected = whole.take(table.column("row:"))
        assert table.to_pylist() == expected.to_pylist()
        assert len(rows_of(part)) > 50
    batch = next(iter(Loader(prepared.train, config=LoaderConfig(batch_size=64)).batches(epoch=0)))
    validate_batch(batch, prepared.inputs)


def test_splits_by_files_are_numbered_through(tmp_path):
    for name, start, rows in (("a", 0, 50), ("b", 50, 30), ("c", 80, 20)):
        raw_frame(rows, start=start).write_parquet(tmp_path / f"{name}.parquet")
    config = DataConfig(
        train=(str(tmp_path / "a.parquet"),),
        valid=(str(tmp_path / "b.parquet"),),
        test=(str(tmp_path / "c.parquet"),),
        split=SplitConfig(by=SplitBy.FILES),
    )
    prepared = prepare(config, schema=SCHEMA, folder=tmp_path / "cache")
    assert rows_of(prepared.train) == list(range(50))
    assert rows_of(prepared.valid) == list(range(50, 80))
    assert rows_of(prepared.test) == list(range(80, 100))
    assert prepared.inputs.table("user").num_rows == 5 + 3


def test_splits_without_rows_are_none(tmp_path, raw):
    config = DataConfig(train=(raw,), split=SplitConfig(by=SplitBy.FILES))
    prepared = prepare(config, schema=SCHEMA, folder=tmp_path / "cache")
    assert (prepared.train.num_rows, prepared.valid, prepared.test) == (NUM_ROWS, None, None)


def test_text_files_give_the_same_as_parquet(tmp_path, raw):
    schema = Schema(features=SCHEMA.features[:2], labels=SCHEMA.labels, time="time")
    frame = raw_frame().drop("tags")
    frame.write_csv(tmp_path / "raw.csv")
    text = prepare(time_split(str(tmp_path / "raw.csv")), schema=schema, folder=tmp_path / "cache")
    binary = prepare(time_split(raw), schema=schema, folder=tmp_path / "cache")
    assert text.folder != binary.folder
    assert text.preprocessing.fingerprint == binary.preprocessing.fingerprint
    for left, right in ((text.train, binary.train), (text.valid, binary.valid), (text.test, binary.test)):
        assert left is not None
        assert right is not None
        assert left.read_group(0).equals(right.read_group(0))


def test_second_time_reads_no_raw_file(tmp_path, raw, monkeypatch):
    first = prepare(time_split(raw), schema=SCHEMA, folder=tmp_path / "cache")
    monkeypatch.setattr(RawSource, "frames", lambda *_, **__: pytest.fail("read again"))
    second = prepare(time_split(raw), schema=SCHEMA, folder=tmp_path / "cache")
    assert second.reused
    assert second.folder == first.folder
    assert second.summary == first.summary
    assert second.preprocessing.fingerprint == first.preprocessing.fingerprint
    assert second.summary_lines()[-1].endswith("(reused)")


def test_whatever_changes_the_result_changes_the_fingerprint(tmp_path, raw):
    folders = {prepare(time_split(raw), schema=SCHEMA, folder=tmp_path / "cache").folder}
    other_schema = Schema(features=SCHEMA.features[:2], labels=SCHEMA.labels, time="time")
    folders.add(prepare(time_split(raw), schema=other_schema, folder=tmp_path / "cache").folder)
    other_split = DataConfig(train=(raw,), split=SplitConfig(seed=1))
    folders.add(prepare(other_split, schema=SCHEMA, folder=tmp_path / "cache").folder)
    raw_frame(NUM_ROWS + 1).write_parquet(raw)
    changed = prepare(time_split(raw), schema=SCHEMA, folder=tmp_path / "cache")
    folders.add(changed.folder)
    assert len(folders) == 4
    assert changed.summary.splits["train"].rows == 801


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "prepared.json").unlink(),
        lambda folder: (folder / "prepared.json").write_text("{"),
        lambda folder: shutil.rmtree(folder / "valid"),
        lambda folder: (folder / "train" / "part-00000.parquet").write_bytes(b"PAR1"),
        lambda folder: next((folder / "preprocessing").glob("*.parquet")).unlink(),
    ],
)
def test_damaged_cache_is_made_anew_and_says_so(tmp_path, raw, damage):
    first = prepare(time_split(raw), schema=SCHEMA, folder=tmp_path / "cache")
    expected = first.train.read_group(0)
    damage(first.folder)
    second = prepare(time_split(raw), schema=SCHEMA, folder=tmp_path / "cache")
    assert not second.reused
    assert "damaged and was made anew" in second.summary_lines()[-1]
    assert second.train.read_group(0).equals(expected)
    assert prepare(time_split(raw), schema=SCHEMA, folder=tmp_path / "cache").reused


def test_preprocessing_of_another_cache_is_not_accepted(tmp_path, raw):
    first = prepare(time_split(raw), schema=SCHEMA, folder=tmp_path / "cache")
    at_random = DataConfig(train=(raw,), split=SplitConfig(by=SplitBy.RANDOM))
    other = prepare(at_random, schema=SCHEMA, folder=tmp_path / "cache")
    shutil.rmtree(first.folder / "preprocessing")
    shutil.copytree(other.folder / "preprocessing", first.folder / "preprocessing")
    assert "another one" in prepare(time_split(raw), schema=SCHEMA, folder=tmp_path / "cache").note


@pytest.mark.parametrize("phase", ["find the split", "fit", "encode"])
def test_after_an_interruption_the_next_one_goes_on(tmp_path, raw, phase):
    def interrupt(now: str, done: int, total: int | None) -> None:
        if now == phase and done:
            raise KeyboardInterrupt

    cache = tmp_path / "cache"
    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        prepare(time_split(raw), schema=SCHEMA, folder=cache, progress=interrupt)
    assert not [each for each in set(threading.enumerate()) - before if each.name.startswith("ziggurat-")]
    assert [name for name in entries(cache) if not name.startswith(".")] == [], "nothing that looks finished"
    prepared = prepare(time_split(raw), schema=SCHEMA, folder=cache)
    assert prepared.train.num_rows == 800
    assert ("went on" in prepared.note) == (phase != "find the split")
    assert entries(cache) == [prepared.folder.name]


@pytest.mark.parametrize("longer_first", [True, False])
def test_progress_of_estimated_rows_ends_whole_and_never_passes_its_total(tmp_path, longer_first):
    # The first megabyte has lines of another length than the rest, so the rows are more, or fewer, than estimated.
    lengths = [(40, 30_000), (8, 100_000)]
    rows = [f"{'x' * length}{row % 9},{row % 2}\n" for length, count in lengths for row in range(count)]
    path = tmp_path / "t.csv"
    path.write_text("id,y\n" + "".join(rows if longer_first else rows[::-1]))
    schema = Schema(features=(Categorical(name="id"),), labels=(Label(name="y"),))
    seen: list[tuple[str, int, int | None]] = []
    config = DataConfig(train=(str(path),))
    prepare(config, schema=schema, folder=tmp_path / "cache", progress=lambda *now: seen.append(now))
    assert all(total is None or done <= total for _, done, total in seen)
    for phase in ("fit", "encode"):
        assert [each for each in seen if each[0] == phase][-1] == (phase, 130_000, 130_000)


def test_progress_is_reported_by_phase(tmp_path, raw, monkeypatch):
    seen: list[tuple[str, int, int | None]] = []
    prepare(time_split(raw), schema=SCHEMA, folder=tmp_path / "cache", progress=lambda *now: seen.append(now))
    assert list(dict.fromkeys(phase for phase, _, _ in seen)) == ["find the split", "fit", "encode"]
    for phase in ("find the split", "fit", "encode"):
        done = [count for name, count, _ in seen if name == phase]
        assert done == sorted(done)
        assert (done[0], done[-1]) == (0, NUM_ROWS)


def test_bad_rows_are_an_error_or_counted(tmp_path):
    path = tmp_path / "raw.csv"
    frame = raw_frame().drop("tags").with_columns(pl.col("price").cast(pl.String))
    lines = frame.write_csv().splitlines()
    lines[5] = lines[5].replace("0.4", "cheap")
    lines[900] = "too,few"
    path.write_text("\n".join(lines) + "\n")
    schema = Schema(features=SCHEMA.features[:2], labels=SCHEMA.labels, time="time")
    with pytest.raises(DataError, match=r"raw\.csv, line"):
        prepare(time_split(str(path)), schema=schema, folder=tmp_path / "cache")
    config = time_split(str(path), bad_rows=BadRowPolicy.QUARANTINE)
    prepared = prepare(config, schema=schema, folder=tmp_path / "cache")
    assert sum(prepared.summary.quarantined.values()) == 2
    every = [row for part in (prepared.train, prepared.valid, prepared.test) for row in rows_of(part)]
    assert sorted(every) == [row for row in range(NUM_ROWS) if row not in (4, 899)]
    records = [
        json.loads(line)
        for file in Path(prepared.summary.quarantine).iterdir()
        for line in file.read_text().splitlines()
    ]
    assert sorted(record["row"] for record in records) == [4, 899]
    assert any(line.startswith("bad rows: 2 (") for line in prepared.summary_lines())
    tight = time_split(str(path), bad_rows=BadRowPolicy.QUARANTINE, bad_row_budget=1)
    with pytest.raises(DataError, match="at most 1 bad rows"):
        prepare(tight, schema=schema, folder=tmp_path / "cache")


def test_summary_tells_what_is_worth_a_look(tmp_path, raw):
    prepared = prepare(time_split(raw), schema=SCHEMA, folder=tmp_path / "cache")
    lines = prepared.summary_lines()
    assert lines[0] == "rows: train 800, valid 100, test 100 from 1 raw file"
    assert lines[1] == "split: by time column 'time': valid from 800, test from 900"
    assert lines[2] == "bad rows: none"
    assert lines[3] == "tables: 93 rows in 2: user 83, tags 10"
    assert "unknown in test: user 100.0%" in lines
    assert f"text kernel: {text_kernel().name}" in lines
    assert not any("train" in line for line in lines[4:])


def test_summary_says_what_missing_numbers_count_as(tmp_path: Path, raw: str) -> None:
    frame = raw_frame().with_columns(price=pl.when(pl.int_range(pl.len()) % 4 > 0).then("price"))
    frame.write_parquet(raw)
    schema = dataclasses.replace(SCHEMA, features=(Dense(name="price", missing=2.5), *SCHEMA.features[1:]))
    prepared = prepare(time_split(raw), schema=schema, folder=tmp_path / "cache")
    assert "missing in train: price 25.0% (counts as 2.5)" in prepared.summary_lines()


def test_impossible_settings_and_data(tmp_path, raw):
    with pytest.raises(ConfigError, match=r"data\.train is empty"):
        prepare(DataConfig(), schema=SCHEMA, folder=tmp_path)
    with pytest.raises(ConfigError, match=r"split\.by = files"):
        DataConfig(train=(raw,), valid=(raw,))
    with pytest.raises(ConfigError, match="rows_per_group"):
        DataConfig(train=(raw,), rows_per_group=0)
    with pytest.raises(MissingFileError, match="absent"):
        prepare(DataConfig(train=(str(tmp_path / "absent.csv"),)), schema=SCHEMA, folder=tmp_path)
    with pytest.raises(SchemaError, match="usr"):
        prepare(DataConfig(train=(raw,)), schema=Schema(features=(Categorical(name="usr"),)), folder=tmp_path)
    raw_frame().with_columns(part=pl.lit("test")).write_parquet(raw)
    by_column = DataConfig(train=(raw,), split=SplitConfig(by=SplitBy.COLUMN, column="part"))
    with pytest.raises(DataError, match="at least one training row"):
        prepare(by_column, schema=SCHEMA, folder=tmp_path)


def test_file_that_changes_meanwhile_is_refused(tmp_path, raw):
    def touch(phase: str, done: int, total: int | None) -> None:
        if phase == "encode":
            os.utime(raw, ns=(1, 1))

    with pytest.raises(DataError, match="stay as they are"):
        prepare(time_split(raw), schema=SCHEMA, folder=tmp_path / "cache", progress=touch)
    assert entries(tmp_path / "cache") == []


def test_folder_that_cannot_be_written_is_named(tmp_path, raw):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(CheckpointError, match="cache"):
        prepare(time_split(raw), schema=SCHEMA, folder=tmp_path / "cache")


def test_full_disk_leaves_nothing(tmp_path, raw, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build_module, "publish", full)
    with pytest.raises(CheckpointError, match="No space left"):
        prepare(time_split(raw), schema=SCHEMA, folder=tmp_path / "cache")
    assert entries(tmp_path / "cache") == []


def test_config_survives_json_and_the_command_line():
    config = DataConfig(train=("a", "b"), split=SplitConfig(by=SplitBy.TIME, valid_fraction=0.2))
    assert from_json(DataConfig, json.loads(json.dumps(to_json(config))), where="test") == config
    changed = override(config, {"split.by": "random", "rows-per-group": "10", "bad-rows": "quarantine"})
    assert (changed.split.by, changed.rows_per_group) == (SplitBy.RANDOM, 10)
    assert changed.bad_rows is BadRowPolicy.QUARANTINE


CHILD = """
import json, sys, time
from ziggurat.config import from_json
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.prepare import prepare
from ziggurat.data.preprocess.prepared import PreparedData
from ziggurat.features.schema import Schema
config, schema, cache, slow_s = json.loads(sys.argv[1])
def progress(phase, done, total):
    print(phase, flush=True)
    time.sleep(slow_s)
config, schema = from_json(DataConfig, config, where="test"), from_json(Schema, schema, where="test")
prepared = prepare(config, schema=schema, folder=cache, progress=progress)
print("prepared", prepared.reused, prepared.train.num_rows, prepared.train.row_sum, flush=True)
"""


def start(raw: str, cache: Path, *, slow_s: float) -> subprocess.Popen[str]:
    """Another process that prepares the same data, and prints what came out."""
    arguments = json.dumps([to_json(time_split(raw)), to_json(SCHEMA), str(cache), slow_s])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"}
    command = [sys.executable, "-c", CHILD, arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def test_two_at_once_prepare_once(tmp_path, raw):
    def work() -> None:
        prepared.append(prepare(time_split(raw), schema=SCHEMA, folder=tmp_path / "cache", progress=slowly))

    def slowly(phase: str, done: int, total: int | None) -> None:
        phases.add(phase)
        time.sleep(0.02)

    prepared: list[PreparedData] = []
    phases: set[str] = set()
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(entry.reused for entry in prepared), "nothing was there when they came"
    assert len({entry.train.row_sum for entry in prepared}) == 1
    assert len(entries(tmp_path / "cache")) == 1
    assert "waiting for another process that prepares the same data" in phases


@pytest.mark.slow
def test_two_processes_at_once_prepare_once(tmp_path, raw):
    processes = [start(raw, tmp_path / "cache", slow_s=0.1) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0].splitlines()[-1].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0][2:] == outputs[1][2:]
    assert len(entries(tmp_path / "cache")) == 1


def test_kill_9_while_encoding_leaves_nothing_that_looks_whole(tmp_path, raw):
    cache = tmp_path / "cache"
    process = start(raw, cache, slow_s=0.2)
    assert process.stdout is not None
    while process.stdout.readline().strip() != "encode":
        pass
    time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert entries(cache)  # the temporary folder
    prepared = prepare(time_split(raw), schema=SCHEMA, folder=cache)
    assert not prepared.reused
    assert prepared.train.num_rows == 800
    assert entries(cache) == [prepared.folder.name]


def test_without_a_word_the_schema_decides_how_to_split(raw, tmp_path):
    by_time = prepare(DataConfig(train=(raw,)), schema=SCHEMA, folder=tmp_path / "cache")
    assert "by time column" in "\n".join(by_time.summary_lines())
    assert "(the schema has a time)" in "\n".join(by_time.summary_lines())
    asked = prepare(
        DataConfig(train=(raw,), split=SplitConfig(by=SplitBy.TIME)), schema=SCHEMA, folder=tmp_path / "cache"
    )
    assert asked.reused
    assert "(the schema has a time)" not in "\n".join(asked.summary_lines())
    without = dataclasses.replace(SCHEMA, time="")
    at_random = prepare(DataConfig(train=(raw,)), schema=without, folder=tmp_path / "cache")
    assert "at random" in "\n".join(at_random.summary_lines())


def test_a_role_without_a_column_is_named_as_the_role(tmp_path, raw):
    schema = dataclasses.replace(SCHEMA, group="usr")
    with pytest.raises(SchemaError) as caught:
        prepare(time_split(raw), schema=schema, folder=tmp_path / "cache")
    assert caught.value.where.startswith("[roles] group")
    assert caught.value.ways_out[0] == 'group = "user"'
    assert not any("feature" in way for way in caught.value.ways_out)


def test_a_threshold_that_nothing_reads_is_refused_where_a_schema_is_new(tmp_path: Path) -> None:
    frame = pl.DataFrame({"user": ["a", "b"] * 50, "stars": [1.0, 5.0] * 50})
    frame.write_parquet(tmp_path / "raw.parquet")
    label = Label(name="stars", task=Task.REGRESSION, positive_from=4.0)
    schema = Schema(features=(Categorical(name="user"),), labels=(label,))
    config = DataConfig(train=(str(tmp_path / "raw.parquet"),))
    with pytest.raises(SchemaError, match="positive_from"):
        prepare(config, schema=schema, folder=tmp_path / "new")
    # A run that goes on gives its statistics, and keeps the schema that it was trained with.
    assert prepare(config, schema=schema, folder=tmp_path / "old", numbers={}).train.num_rows > 0
