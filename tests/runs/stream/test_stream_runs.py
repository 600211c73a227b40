"""A stream from files to scores: each window is a test before it is trained, and each row is trained once."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import ziggurat as zg
from ziggurat.cli.main import main
from ziggurat.cli.runs.stream_verb import add_stream_arguments
from ziggurat.data.encoded.dataset import MemoryDataset
from ziggurat.data.encoded.ledger import expected_sum, read_ledger
from ziggurat.data.encoded.records import encoded_schema
from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.raw.bad_rows import BadRowPolicy
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.streams.arrivals import Arrivals
from ziggurat.data.streams.label_delay import DelayConfig, LabelDelay
from ziggurat.data.streams.stability import COUNTS
from ziggurat.data.streams.windows import LateRows, StreamConfig
from ziggurat.errors import CheckpointError, ConfigError, DataError, SchemaError
from ziggurat.features.schema import Encoding, table_of
from ziggurat.features.schema_io import schema_to_toml
from ziggurat.precision import PLAIN
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs import verify
from ziggurat.runs.execute import train_run
from ziggurat.runs.load import load_run
from ziggurat.runs.stream.run import StreamResult, stream_run
from ziggurat.training.checkpoint import CheckpointStore
from ziggurat.training.checkpoint.retention import complete_steps
from ziggurat.training.config import AverageOver, DamagedRecords, Decay, ScheduleConfig
from ziggurat.training.evaluation.evaluate import scores_of
from ziggurat.training.records.run_folder import RunFolder
from ziggurat.training.records.windows import WindowsFile, read_windows
from ziggurat.training.report.page import write_report
from ziggurat.training.report.progress import NoProgress
from ziggurat.training.trainer import Trainer

DAY = 86_400
START = 957_139_200  # 2000-05-01
SCHEMA = zg.Schema(
    features=(zg.Categorical(name="user"), zg.Categorical(name="item"), zg.Dense(name="age")),
    labels=(zg.Label(name="click"),),
    time="at",
)


def events(num_rows: int, *, days: int = 5, first_day: int = 0, seed: int = 0) -> pl.DataFrame:
    """Clicks whose users come and go, and whose rule turns round after half of the days; in no order."""
    rng = np.random.default_rng(seed)
    day = first_day + rng.integers(0, days, num_rows)
    user = rng.integers(0, 20, num_rows) + 5 * day
    item = rng.integers(0, 12, num_rows)
    turned = day >= first_day + days // 2
    chance = np.where((item % 2 == 0) ^ turned, 0.8, 0.2)
    return pl.DataFrame(
        {
            "user": [f"u{each}" for each in user],
            "item": item,
            "age": rng.normal(size=num_rows),
            "click": (rng.random(num_rows) < chance).astype(int),
            "at": START + day * DAY + rng.integers(0, DAY, num_rows),
        }
    )


def config_of(*files: Path, schema: zg.Schema = SCHEMA, **training: Any) -> RunConfig:
    model = zg.DLRMConfig(
        embedding_dim=4, bottom=zg.MLPConfig(hidden_dims=(8,)), top=zg.MLPConfig(hidden_dims=(8,), dropout=0.1)
    )
    run = zg.table_run(model, schema)
    loader = dataclasses.replace(run.training.loader, batch_size=32, shuffle_buffer_rows=100)
    training = {"threads": 1, "precision": PLAIN, "checkpoint_every": 2, "log_every": 1, **training}
    training = {"learning_rate": 0.02, "table_learning_rate": 0.3, **training}
    return dataclasses.replace(
        run,
        data=dataclasses.replace(run.data, train=tuple(map(str, files))),
        training=dataclasses.replace(run.training, loader=loader, **training),
    )


def stream(folder: Path, *files: Path, config: RunConfig | None = None, **settings: Any) -> StreamResult:
    return stream_run(config or config_of(*files), folder=folder, stream=StreamConfig(**settings))


def content_of(folder: Path) -> list[dict[str, Any]]:
    """Lines of windows.jsonl, but for the clock's and their checks."""
    lines = [json.loads(line) for line in (folder / "windows.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in ("timing", "check")} for line in lines]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_run(folder).model.state_dict())


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(second[name], value) for name, value in first.items())


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("events") / "events.parquet"
    events(600).write_parquet(path)
    return path


@pytest.fixture(scope="module")
def whole(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    stream(folder, file)
    return folder


def test_every_window_is_scored_by_what_was_trained_before_it(file: Path, whole: Path, tmp_path: Path) -> None:
    """The same by hand: all rows in memory, a trainer, and metrics written out."""
    frame = pl.read_parquet(file)
    day = (frame["at"].to_numpy() - START) // DAY
    chunk = RawChunk.of(frame)
    days = [chunk.filter(day == each) for each in range(5)]
    preprocessing = Preprocessing.fit(SCHEMA, days[:1])
    inputs = preprocessing.inputs
    datasets = [MemoryDataset(preprocessing.encode(each), inputs) for each in days]
    config = config_of(file)
    model = zg.build_model(config.model, inputs, seed=config.training.seed)
    share = float(frame.filter(pl.Series(day == 0))["click"].mean())  # type: ignore[arg-type]
    with torch.no_grad():
        model.output_biases()[0].add_(math.log(share / (1 - share)))
    empty = MemoryDataset(encoded_schema(inputs).empty_table(), inputs)
    training = dataclasses.replace(config.training, epochs=1, unknown_ids=())
    trainer = Trainer(model, config=training, train=empty, folder=tmp_path)
    records = read_windows(whole / "windows.jsonl")
    assert [record.name for record in records] == [f"2000-05-0{each + 1}" for each in range(5)]
    with trainer.over_windows():
        for number, (dataset, record) in enumerate(zip(datasets, records, strict=True), start=1):
            assert (record.window, record.rows, record.step) == (number, dataset.num_rows, trainer.position.step)
            if number == 1:
                assert record.metrics == {}
            else:
                rows = [dataset.read_group(index) for index in range(len(dataset.group_sizes))]
                batch = preprocessing.batch(days[number - 1].frame, with_labels=True)
                assert sum(table.num_rows for table in rows) == batch.batch_size
                (_, scores) = next(iter(scores_of(model, [batch])))
                labels = batch.labels[:, 0].numpy().astype(np.float64)
                p = scores[:, 0].astype(np.float64)
                log_loss = -np.mean(labels * np.log(p) + (1 - labels) * np.log(1 - p))
                base = labels.mean()
                entropy = -(base * math.log(base) + (1 - base) * math.log(1 - base))
                assert record.metrics["log_loss"] == pytest.approx(log_loss, rel=1e-5)
                assert record.metrics["ne"] == pytest.approx(log_loss / entropy, rel=1e-5)
                assert record.metrics["calibration"] == pytest.approx(p.mean() / base, rel=1e-5)
                unknown = float(np.mean(batch.single[0].numpy() == 1))
                assert record.unknown["user"] == pytest.approx(unknown)
            for _ in trainer.steps(dataset, number=number):
                pass
    assert same(weights_of(whole), dict(model.state_dict()))


def test_the_ledger_holds_every_row_once(whole: Path) -> None:
    ledger = read_ledger(whole / "ledger.bin")
    for record in read_windows(whole / "windows.jsonl"):
        own = ledger[ledger["epoch"] == record.window - 1]
        assert int(own["num_rows"].sum()) == record.rows
        assert int(own["sum"].sum(dtype=np.uint64)) == int(record.row_sum, 16)
    assert int(ledger["sum"].sum(dtype=np.uint64)) == expected_sum(np.arange(600))


def test_given_again_it_has_nothing_to_do_and_goes_on_with_new_files(file: Path, whole: Path, tmp_path: Path) -> None:
    stream(tmp_path / "run", file)
    before = content_of(tmp_path / "run")
    assert before == content_of(whole)
    result = stream(tmp_path / "run", file)
    assert content_of(tmp_path / "run") == before
    assert same(weights_of(tmp_path / "run"), weights_of(whole))
    more = tmp_path / "more.parquet"
    pl.concat([events(50, days=1, first_day=5, seed=3), events(10, days=1, seed=4)]).write_parquet(more)
    again = stream(tmp_path / "run", file, more)
    assert again.steps > result.steps
    *_, last = content_of(tmp_path / "run")
    assert content_of(tmp_path / "run")[:-1] == before
    assert (last["name"], last["rows"], last["late"]) == ("2000-05-06", 60, 10)
    assert "10 of them late" in (tmp_path / "run/run.log").read_text()


def test_the_frozen_control_is_trained_on_the_history_alone(file: Path, whole: Path, tmp_path: Path) -> None:
    stream(tmp_path / "frozen", file, frozen=True)
    frozen = content_of(tmp_path / "frozen")
    live = content_of(whole)
    assert frozen[1] == {**live[1], "is_trained": False}
    assert [record["step"] for record in frozen[1:]] == [frozen[1]["step"]] * 4
    assert frozen[-1]["metrics"]["ne"] > live[-1]["metrics"]["ne"] + 0.01, "the rule has turned round"
    before = (tmp_path / "frozen/windows.jsonl").read_bytes()
    stream(tmp_path / "frozen", file, frozen=True)
    assert (tmp_path / "frozen/windows.jsonl").read_bytes() == before
    with pytest.raises(ConfigError, match=r"--frozen True, given \(none\)"):
        stream(tmp_path / "frozen", file)


@pytest.mark.parametrize("settings", [{"weight_average": 0.9}, {"average_over": AverageOver.WINDOW}])
def test_averaged_weights_are_scored_beside_the_others_and_are_what_a_run_is_loaded_with(
    file: Path, whole: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    stream(tmp_path / "run", file, config=config_of(file, **settings))
    records = read_windows(tmp_path / "run/windows.jsonl")
    # Training itself is as it was.
    assert [record.metrics for record in records] == [
        record.metrics for record in read_windows(whole / "windows.jsonl")
    ]
    assert records[0].averaged == {}
    for record in records[1:]:
        assert record.averaged.keys() == record.metrics.keys()
        assert record.averaged["ne"] != record.metrics["ne"]
    saved = CheckpointStore(tmp_path / "run/checkpoints").load().tensors
    loaded = load_run(tmp_path / "run").model.state_dict()
    plain = load_run(whole).model.state_dict()
    live = {name.removeprefix("live."): value for name, value in saved.items() if name.startswith("live.")}
    assert all(torch.equal(value, plain[name]) for name, value in live.items())
    assert any(not torch.equal(loaded[name], value) for name, value in live.items())
    assert all(torch.equal(loaded[name], plain[name]) for name in loaded.keys() - live.keys())


def test_tables_may_grow_in_the_place_of_vocabularies(file: Path, whole: Path, tmp_path: Path) -> None:
    config = config_of(file)
    stream(tmp_path / "run", config=config, growing=100, begin="2000-05-02")
    records = read_windows(tmp_path / "run/windows.jsonl")
    assert records[0].name == "before 2000-05-02"
    fixed = read_windows(whole / "windows.jsonl")
    # Of 20 users a day 5 are new.
    assert records[-1].unknown["user"] < 0.4 < fixed[-1].unknown["user"]
    assert len(load_run(tmp_path / "run").preprocessing.grown["user"].numbers) == 40


def test_a_run_that_streamed_is_loaded_scored_and_not_trained_otherwise(file: Path, whole: Path) -> None:
    run = load_run(whole)
    assert run.step == read_ledger(whole / "ledger.bin")["step"][-1]
    assert run.evaluate(file).num_rows == 600
    for split in ("valid", "train"):
        with pytest.raises(ConfigError, match=r"windows\.jsonl"):
            run.evaluate_split(split)
    assert main(["report", str(whole), "--baseline"]) == 2
    with pytest.raises(ConfigError, match="ziggurat stream"):
        train_run(config_of(file), folder=whole, resume=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schedule": ScheduleConfig(decay=Decay.COSINE)}, "needs no end"),
        ({"max_steps": 3}, "training.max-steps"),
    ],
)
def test_settings_without_a_place_in_a_stream_are_refused(
    file: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        stream(tmp_path / "run", config=config_of(file, **changes))
    assert not (tmp_path / "run").exists()


def test_no_row_before_from_is_an_error_that_names_the_first_window(file: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="2000-05-01") as refused:
        stream(tmp_path / "run", file, begin="2000-04")
    assert "rows before --from 2000-04" in refused.value.expected
    # Nothing was trained, so that the command may be corrected.
    stream(tmp_path / "run", file, begin="2000-05-02", until="2000-05-03")
    with pytest.raises(ConfigError, match="--from 2000-05-02, given 2000-05-03"):
        stream(tmp_path / "run", file, begin="2000-05-03", until="2000-05-03T12")


def test_no_row_before_until_is_an_error_with_ways_out_of_its_own(file: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"600 rows left out, from --until 1999 on") as refused:
        stream(tmp_path / "run", file, until="1999")
    assert not any("--from" in way for way in refused.value.ways_out)
    assert len(stream(tmp_path / "run", file, until="2000-05-02").windows) == 1


def test_a_bad_row_of_a_window_that_was_taken_has_ways_out_that_work(tmp_path: Path) -> None:
    """Neither the file nor the schema may be corrected by then."""
    file = tmp_path / "first.parquet"
    bad = tmp_path / "second.parquet"
    events(100, days=1).write_parquet(file)
    events(100, days=1, first_day=1).with_columns(
        age=pl.when(pl.int_range(100) == 3).then(pl.lit("old")).otherwise(pl.col("age").cast(pl.String))
    ).write_parquet(bad)
    with pytest.raises(DataError, match="'old'") as refused:
        stream(tmp_path / "run", file, bad)
    first, *others = refused.value.ways_out
    assert first.endswith("--data.bad-rows quarantine")
    assert all("--out ANOTHER_FOLDER" in way for way in others)
    config = config_of(file, bad)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, bad_rows=BadRowPolicy.QUARANTINE))
    assert [(window.rows, window.bad) for window in stream(tmp_path / "run", config=config).windows] == [
        (100, 0),
        (99, 1),
    ]


def test_a_bad_row_of_the_history_may_be_corrected(tmp_path: Path) -> None:
    file = tmp_path / "first.parquet"
    events(100, days=1).with_columns(click=pl.lit(2)).write_parquet(file)
    with pytest.raises(DataError, match="'2'") as refused:
        stream(tmp_path / "run", file)
    assert "correct the row" in refused.value.ways_out
    events(100, days=1).write_parquet(file)
    assert stream(tmp_path / "run", file).windows[0].rows == 100


class Said(NoProgress):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def said_of(folder: Path, file: Path) -> str:
    said = Said()
    stream_run(config_of(file), folder=folder, stream=StreamConfig(), progress=said)
    return "\n".join(said.lines)


def test_a_history_that_is_no_sample_of_what_comes_is_said(file: Path, tmp_path: Path) -> None:
    """A row of 1970 is the whole history, and a history with one class says nothing of the other."""
    frame = events(100, days=2)
    path = tmp_path / "rows.parquet"
    pl.concat([frame, frame[:1].with_columns(at=pl.lit(0, dtype=pl.Int64))]).write_parquet(path)
    said = said_of(tmp_path / "zero", path)
    assert re.search(r"fitted to 1970-01-01 alone, 1 row, where 2000-05-0\d has \d\d", said)
    assert "--from MOMENT" in said
    first = pl.col("at") < START + DAY
    frame.with_columns(click=pl.when(first).then(0).otherwise("click")).write_parquet(path)
    assert "label 'click' is 0 in all rows of 2000-05-01" in said_of(tmp_path / "negatives", path)
    assert "warning" not in said_of(tmp_path / "usual", file).replace("warning: ids that", "")


def test_windows_smaller_than_a_batch_are_said(file: Path, tmp_path: Path) -> None:
    """Each is learned in one step, as happens to a recipe for many rows that does not know how few come."""
    config = config_of(file)
    loader = dataclasses.replace(config.training.loader, batch_size=4096)
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, loader=loader))
    said = Said()
    stream_run(config, folder=tmp_path / "run", stream=StreamConfig(), progress=said)
    found = next(line for line in said.lines if "less than one batch of 4,096" in line)
    proposed = re.search(r"--batch-size (\d+) ", found)
    assert proposed is not None
    loader = dataclasses.replace(loader, batch_size=int(proposed[1]))
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, loader=loader))
    again = Said()
    stream_run(config, folder=tmp_path / "again", stream=StreamConfig(), progress=again)
    assert not [line for line in again.lines if "less than one batch" in line]


def test_the_short_form_of_a_warm_start_is_refused_by_its_name(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was read as a group of settings, and the first way out led to the next refusal."""
    schema = tmp_path / "my.toml"
    schema.write_text(schema_to_toml(SCHEMA))
    command = ["stream", "table_dlrm", "--data.train", str(file), "--schema", str(schema), "--warm-start", "runs/last"]
    assert main([*command, "--out", str(tmp_path / "run")]) == 2
    assert "leave --warm-start out" in capsys.readouterr().err


def test_rows_that_are_to_come_are_bad_rows_unless_they_are_made(tmp_path: Path) -> None:
    """One of them calls all windows done, so that whatever comes in their days is late, for good."""
    path = tmp_path / "rows.parquet"
    frame = events(40, days=2)
    pl.concat([frame, frame[:1].with_columns(at=pl.lit(4_070_908_800, dtype=pl.Int64))]).write_parquet(path)
    with pytest.raises(DataError, match=r"2099-01-01") as caught:
        said_of(tmp_path / "run", path)
    assert any("--future take" in way for way in caught.value.ways_out)
    config = config_of(path)
    aside = dataclasses.replace(config, data=dataclasses.replace(config.data, bad_rows=BadRowPolicy.QUARANTINE))
    result = stream(tmp_path / "run", config=aside)
    assert [window.name[:4] for window in result.windows] == ["2000", "2000"]
    said = Said()
    taken = stream_run(config, folder=tmp_path / "made", stream=StreamConfig(), progress=said, takes_future=True)
    assert [window.name[:4] for window in taken.windows] == ["2000", "2000", "2099"]
    assert [line for line in said.lines if "warning: the newest is of 2099-01-01 00:00, which is to come" in line]


@pytest.mark.parametrize("rows", ["in", "in/*/*.parquet", "in/**/*.parquet"])
def test_a_stream_is_not_kept_among_its_rows(tmp_path: Path, rows: str) -> None:
    """The next look took its records for rows, and the stream could not go on."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a").mkdir()
    events(40, days=2).write_parquet(tmp_path / "in" / "a" / "rows.parquet")
    config = config_of(tmp_path / "in" / "a" / "rows.parquet")
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, train=(f"{tmp_path}/{rows}",)))
    for call in (stream_run, zg.train_run):
        with pytest.raises(ConfigError, match="apart from the rows"):
            call(config, folder=tmp_path / "in" / "run")
    assert not (tmp_path / "in" / "run").exists()


def test_a_glob_that_matches_no_record_may_stand_beside_a_stream(tmp_path: Path) -> None:
    events(40, days=2).write_parquet(tmp_path / "rows.parquet")
    config = config_of(tmp_path / "rows.parquet")
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, train=(f"{tmp_path}/*.parquet",)))
    assert stream(tmp_path / "run", config=config).windows


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["--growing", "-1"], "--growing"),
        (["--publish", "live", "--publish-every", "0"], "--publish-every"),
        (["--publish", "live", "--publish-keep", "0"], "--publish-keep"),
    ],
)
def test_errors_name_the_flag_and_not_the_setting_in_code(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], flag: str
) -> None:
    schema = tmp_path / "my.toml"
    schema.write_text(schema_to_toml(SCHEMA))
    command = ["stream", "table_dlrm", "--data.train", str(file), "--schema", str(schema)]
    assert main([*command, "--out", str(tmp_path / "run"), *words]) == 2
    said = capsys.readouterr().err
    assert re.search(rf"where: +{flag}\n", said)
    assert "Config, setting" not in said


@pytest.mark.parametrize(
    ("schema", "delay", "way"),
    [
        (dataclasses.replace(SCHEMA, time="at_"), DelayConfig(), 'time = "at"'),
        (SCHEMA, DelayConfig(policy=LabelDelay.WAIT, column="at_"), "--label-time at"),
    ],
)
def test_a_column_of_times_that_is_not_there_is_no_feature(
    file: Path, tmp_path: Path, schema: zg.Schema, delay: DelayConfig, way: str
) -> None:
    config = dataclasses.replace(config_of(file), table_schema=schema)
    with pytest.raises(SchemaError) as refused:
        stream(tmp_path / "run", config=config, delay=delay)
    assert refused.value.ways_out[0] == way
    assert not [each for each in refused.value.ways_out if "feature" in each]


def test_other_growing_tables_are_refused_by_their_flag(file: Path, tmp_path: Path) -> None:
    """It was called another schema, and the way out of that led to the next error."""
    stream(tmp_path / "run", file)
    with pytest.raises(ConfigError, match="growing") as refused:
        stream(tmp_path / "run", file, growing=600)
    assert refused.value.ways_out[0] == "leave --growing out"


def test_a_window_that_is_there_twice_is_refused(file: Path, tmp_path: Path) -> None:
    stream(tmp_path / "run", file)
    path = tmp_path / "run" / "windows.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], *lines[1:]]))
    with pytest.raises(CheckpointError, match="several of window 2"):
        stream(tmp_path / "run", file)


def test_files_for_validation_are_refused(file: Path, tmp_path: Path) -> None:
    config = config_of(file)
    split = zg.SplitConfig(by=zg.SplitBy.FILES)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, valid=(str(file),), split=split))
    with pytest.raises(ConfigError, match=r"data\.valid"):
        stream(tmp_path / "run", config=config)


def test_other_settings_of_training_are_refused_when_it_goes_on(file: Path, tmp_path: Path) -> None:
    stream(tmp_path / "run", file, until="2000-05-02")
    with pytest.raises(ConfigError, match="learning-rate"):
        stream(tmp_path / "run", config=config_of(file, learning_rate=0.5), until="2000-05-02")


@pytest.mark.parametrize(
    "gone",
    ["stream/stream.json", "stream/stream.jsonl", "stream/counts.json", "preprocessing", "config.json", "checkpoints"],
)
def test_what_is_gone_of_a_stream_is_not_made_anew_of_other_rows(
    whole: Path, file: Path, tmp_path: Path, gone: str
) -> None:
    """Without its journal windows were numbered anew, without vocabularies these were fitted to rows that are gone."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    path = folder / gone
    path.unlink() if path.is_file() else shutil.rmtree(path)
    with pytest.raises(CheckpointError, match="has begun") as refused:
        stream(folder, file)
    assert refused.value.where in (str(path), str(path.parent))


@pytest.mark.parametrize("days", [1, 3])
@pytest.mark.parametrize("harm", ["remove", "alter", "older"])
def test_counts_that_are_not_those_that_were_kept_are_refused(tmp_path: Path, days: int, harm: str) -> None:
    """Windows would be compared with others, or with none, and shifts be other ones without a word."""
    first = tmp_path / "first.parquet"
    second = tmp_path / "second.parquet"
    events(100 * days, days=days).write_parquet(first)
    events(200, days=2, first_day=days, seed=2).write_parquet(second)
    stream(tmp_path / "run", first)
    shutil.copytree(tmp_path / "run", tmp_path / "harmed")
    path = tmp_path / "harmed/stream/counts.json"
    kept = path.read_bytes()
    if harm == "remove":
        path.unlink()
    elif harm == "alter":
        path.write_bytes(kept.replace(b"1", b"2", 1))
    else:  # a copy of before the last window, with a right checksum
        content = COUNTS.read(path)
        del content["windows"][str(days)]
        COUNTS.write(path, content)
    with pytest.raises(CheckpointError) as refused:
        stream(tmp_path / "harmed", first, second)
    assert refused.value.where.startswith(str(path))
    path.write_bytes(kept)
    stream(tmp_path / "harmed", first, second)
    stream(tmp_path / "run", first, second)
    assert content_of(tmp_path / "harmed") == content_of(tmp_path / "run")
    assert content_of(tmp_path / "run")[days]["shift"]


def test_counts_of_before_the_journal_knew_them_are_taken_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tmp_path / "first.parquet"
    second = tmp_path / "second.parquet"
    events(200, days=2).write_parquet(first)
    events(200, days=2, first_day=2, seed=2).write_parquet(second)
    with monkeypatch.context() as patch:
        patch.setattr(Arrivals, "keep_counted", lambda self, number, digest: None)
        stream(tmp_path / "run", first)
    shutil.copytree(tmp_path / "run", tmp_path / "gone")
    stream(tmp_path / "run", first, second)
    assert all(line["shift"] for line in content_of(tmp_path / "run")[1:])
    # That there were counts is seen in the windows that were compared.
    (tmp_path / "gone/stream/counts.json").unlink()
    with pytest.raises(CheckpointError, match="has begun, with its counts"):
        stream(tmp_path / "gone", first, second)


def test_a_history_whose_rows_were_all_put_aside_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    events(40, days=2).with_columns(click=pl.when(pl.col("at") < START + DAY).then(2).otherwise("click")).write_parquet(
        file
    )
    config = config_of(file)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, bad_rows=BadRowPolicy.QUARANTINE))
    with pytest.raises(DataError, match="rows of the history, 2000-05-01") as refused:
        stream(tmp_path / "run", config=config)
    assert any(Path(refused.value.where).iterdir())
    events(40, days=2).write_parquet(file)
    assert len(stream(tmp_path / "run", config=config).windows) == 2


def test_a_damaged_ledger_names_the_command_of_a_stream(whole: Path, file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    ledger = folder / "ledger.bin"
    ledger.write_bytes(ledger.read_bytes()[:200])
    with pytest.raises(CheckpointError, match="ledger") as refused:
        stream(folder, file)
    ways = " ".join(refused.value.ways_out)
    assert "ziggurat train" not in ways
    assert "the same ziggurat stream command with --training.damaged-records start_new" in ways
    config = config_of(file, damaged_records=DamagedRecords.START_NEW)
    assert stream(folder, config=config).windows == stream(whole, file).windows


@pytest.mark.parametrize("lost", [slice(0, 4), slice(0, 1), slice(1, 2), slice(3, 4)])
def test_a_line_that_is_gone_is_no_record_of_fewer_windows(file: Path, tmp_path: Path, lost: slice) -> None:
    """A line is on the disk before a row of its window is trained, so a kill loses none of a window that was."""
    stream(tmp_path / "run", file, until="2000-05-05")
    path = tmp_path / "run/windows.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    del lines[lost]
    path.write_text("".join(lines))
    with pytest.raises(CheckpointError, match=f"none of window {lost.start + 1}") as refused:
        stream(tmp_path / "run", file, until="2000-05-05")
    assert refused.value.where == str(path)


def test_a_damaged_line_of_windows_is_named(file: Path, tmp_path: Path) -> None:
    stream(tmp_path / "run", file, until="2000-05-04")
    path = tmp_path / "run/windows.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], lines[1].replace("2000-05-02", "2000-05-09"), lines[2]]))
    with pytest.raises(CheckpointError, match="check") as refused:
        stream(tmp_path / "run", file, until="2000-05-04")
    assert refused.value.where == f"{path}, line 2"


def test_the_command_line_streams_text_files_of_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "incoming").mkdir()
    events(200, days=2).write_csv("incoming/a.csv")
    events(100, days=1, first_day=2).write_csv("incoming/b.csv")
    Path("my.toml").write_text(schema_to_toml(SCHEMA))
    command = ["stream", "table_logistic_regression", "--data.train", "incoming", "--schema", "my.toml"]
    assert main([*command, "--by", "day", "--threads", "1"]) == 0
    out = capsys.readouterr().out
    assert "windows  3, 300 rows trained" in out
    folder = next(Path("runs").iterdir())
    assert folder.name == "table_logistic_regression_incoming_stream"
    assert main([*command, "--by", "day", "--threads", "1"]) == 0
    capsys.readouterr()
    assert main([*command, "--by", "month"]) == 2
    assert "--by day, given month" in capsys.readouterr().err
    Path("my.toml").write_text(schema_to_toml(dataclasses.replace(SCHEMA, features=SCHEMA.features[:2])))
    assert main([*command, "--by", "day"]) == 2
    assert "another schema" in capsys.readouterr().err


def test_the_command_line_refuses_what_a_stream_would_not_look_at_and_says_what_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    events(200, days=2).write_csv("a.csv")
    Path("my.toml").write_text(schema_to_toml(SCHEMA))
    command = ["stream", "table_logistic_regression", "--data.train", "a.csv", "--schema", "my.toml", "--out", "run"]
    for name in ("training.epochs", "training.early-stop.patience", "data.split.by"):
        assert main([*command, f"--{name}", "3"]) == 2
        assert f"no {name} in a stream" in capsys.readouterr().err
    assert main([*command, "--data.split.date-order", "day_first", "--settings"]) == 0  # by which times are read
    assert main([*command, "--publish", ""]) == 2
    assert "an empty text" in capsys.readouterr().err
    assert main([*command, "--publish", "live", "--server", "ftp://host/x"]) == 2
    assert "ftp" in capsys.readouterr().err
    assert main([*command, "--publish", "live", "--server", "http://host:99999"]) == 2
    assert "99999" in capsys.readouterr().err
    assert not Path("run").exists()
    assert main([*command, "--batch-size", "64"]) == 0
    capsys.readouterr()
    assert main([*command, "--batch-size", "32"]) == 0
    assert "changed: training.loader.batch-size 64 → 32" in capsys.readouterr().err
    shutil.rmtree("run/stream")
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "a stream without it" in error
    assert "ziggurat train" not in error


def test_flags_that_would_do_nothing_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    events(200, days=2).write_csv("a.csv")
    Path("my.toml").write_text(schema_to_toml(SCHEMA))
    command = ["stream", "table_logistic_regression", "--data.train", "a.csv", "--schema", "my.toml", "--out", "run"]
    parser = argparse.ArgumentParser()
    add_stream_arguments(parser)
    values = {"--idle-close-s": "60", "--publish-value": "click", "--server": "a.sock"}
    found = 0
    # The help of a flag says what it belongs to, so that none is forgotten here.
    for action in parser._actions:
        main_flag = re.match(r"with (--[a-z]+):", action.help or "")
        if main_flag is None:
            continue
        found += 1
        flag = action.option_strings[0]
        value = values.get(flag, "2")
        assert main([*command, flag, value]) == 2
        error = capsys.readouterr().err
        assert f"found: {flag} {value}, and no {main_flag[1]}" in " ".join(error.split())
    assert found == 6
    assert main([*command, "--frozen", "--publish", "live", "--publish-every", "2"]) == 2
    assert "--publish-every 2" in capsys.readouterr().err
    assert main([*command, "--publish", "", "--publish-keep", "2"]) == 2
    assert "an empty text" in capsys.readouterr().err
    assert not Path("run").exists()
    assert main([*command, "--idle-close-s", "x", "--follow"]) == 2
    assert "seconds, 0 or more" in capsys.readouterr().err


def test_settings_of_what_the_schema_does_not_have_are_refused(file: Path, tmp_path: Path) -> None:
    hashed = dataclasses.replace(
        SCHEMA,
        tables=tuple(
            zg.Table(name=name, encoding=Encoding.HASHING, num_rows=50)
            for name in dict.fromkeys(filter(None, map(table_of, SCHEMA.features)))
        ),
    )
    with pytest.raises(ConfigError, match="in the place of which one grows") as refused:
        stream(tmp_path / "run", config=config_of(file, schema=hashed), growing=100)
    assert refused.value.where == "--growing"
    timeless = dataclasses.replace(SCHEMA, time="")
    with pytest.raises(ConfigError, match="rows that can be late"):
        stream(tmp_path / "run", config=config_of(file, schema=timeless), by="rows:100", late=LateRows.DROP)


def test_late_rows_that_are_left_out_stand_in_the_next_window_and_in_the_report(tmp_path: Path) -> None:
    events(120, days=2).write_parquet(tmp_path / "a.parquet")
    stream(tmp_path / "run", tmp_path / "a.parquet", late=LateRows.DROP)
    events(80, days=3, first_day=0, seed=1).write_parquet(tmp_path / "b.parquet")
    days = (pl.read_parquet(tmp_path / "b.parquet")["at"].to_numpy() - START) // DAY
    result = stream(tmp_path / "run", tmp_path / "a.parquet", tmp_path / "b.parquet", late=LateRows.DROP)
    num_late = int((days < 2).sum())
    assert [(window.late, window.dropped) for window in result.windows] == [(0, 0), (0, 0), (0, num_late)]
    assert result.windows[-1].rows == int((days == 2).sum())
    assert f"{num_late:,} rows came late and were left out" in result.report.read_text()
    assert f"{num_late:,} late, left out" in (tmp_path / "run/run.log").read_text()


@pytest.mark.draws
def test_the_report_shows_windows_beside_those_of_a_control(
    file: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream(tmp_path / "frozen", file, frozen=True)
    assert main(["report", str(whole), "--beside", str(tmp_path / "frozen")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    live = read_windows(whole / "windows.jsonl")
    frozen = read_windows(tmp_path / "frozen/windows.jsonl")
    for ours, theirs in zip(live[1:], frozen[1:], strict=True):
        assert f"{ours.metrics['ne']:.5f} {theirs.metrics['ne']:.5f}" in out
    won = sum(
        float(ours.metrics["ne"] or 0) < float(theirs.metrics["ne"] or 0)
        for ours, theirs in zip(live[1:], frozen[1:], strict=True)
    )
    assert f"NE: better than frozen in {won} of 4 windows" in out
    page = (whole / "report.html").read_text()
    assert "NE of each window" in page
    # Of a log in which few steps stand, the checkpoint knows them all.
    log = tmp_path / "frozen/metrics.jsonl"
    log.unlink(missing_ok=True)
    steps = max(complete_steps(tmp_path / "frozen/checkpoints"))
    assert steps > 0
    assert f"· {steps} steps<" in write_report(tmp_path / "frozen").read_text()
    assert f"NE: better than the control in {won:,} of 4 windows" in page
    assert main(["report", str(whole), "--beside", str(tmp_path)]) == 2
    assert "windows.jsonl" in capsys.readouterr().err


def test_verify_says_which_window_lacks_a_row(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream(tmp_path / "run", file)
    assert main(["verify", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.count("every row exactly once") == 5
    path = tmp_path / "run/windows.jsonl"
    records = read_windows(path)
    path.unlink()
    for record in records:
        WindowsFile(path, last_step=record.step).append(dataclasses.replace(record, rows=record.rows + 1))
    assert main(["verify", str(tmp_path / "run")]) == 1
    assert "NOT every row exactly once" in capsys.readouterr().out


def test_a_stream_that_goes_on_while_it_is_verified_has_no_steps_of_unknown_windows(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(shutil.copytree(whole, tmp_path / "run"))
    lines = run.windows.read_bytes().splitlines(keepends=True)
    run.windows.write_bytes(b"".join(lines[:-2]))
    read = verify.read_ledger

    def behind_the_stream(path: Path) -> np.ndarray:
        run.windows.write_bytes(b"".join(lines))
        return read(path)

    monkeypatch.setattr(verify, "read_ledger", behind_the_stream)
    verdict = verify.verify_windows(run)
    assert verdict.good, verdict.lines
    assert len(verdict.lines) == len(lines)
