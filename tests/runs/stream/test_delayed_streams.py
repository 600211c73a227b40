"""Streams whose labels are known later than their rows: what is trained when, through kills, on ranks, and as proof."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import ziggurat as zg
from tests.runs.stream.test_killed_streams import Moments
from tests.runs.stream.test_stream_runs import SCHEMA, START, Said, config_of, content_of, events, same, weights_of
from ziggurat.cli.main import main
from ziggurat.data.encoded.ledger import expected_sum, read_ledger
from ziggurat.data.raw.bad_rows import BadRowPolicy
from ziggurat.data.streams.label_delay import DelayConfig, LabelDelay
from ziggurat.data.streams.windows import StreamConfig
from ziggurat.errors import ConfigError
from ziggurat.features.schema_io import schema_to_toml
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs.execute import train_run
from ziggurat.runs.stream.publish import PublishConfig
from ziggurat.runs.stream.run import StreamResult, stream_run
from ziggurat.runs.verify import verify_run
from ziggurat.serving.export.published_folder import read_pointer
from ziggurat.serving.recommender import Recommender
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.delayed_feedback import DelayedConfig
from ziggurat.training.delayed_losses import DelayedLoss
from ziggurat.training.hooks.hook import Hook
from ziggurat.training.judging import MadeStep
from ziggurat.training.records.windows import read_windows
from ziggurat.training.trainer import Trainer

DAY = 86_400
AGAIN = 1 << 60


def delayed_events(num_rows: int, *, days: int = 5, seed: int = 0) -> pl.DataFrame:
    frame = events(num_rows, days=days, seed=seed)
    rng = np.random.default_rng(seed + 100)
    delays = np.where(frame["click"] == 1, rng.exponential(DAY, num_rows).clip(0, 2 * DAY), 2 * DAY).astype(int)
    return frame.with_columns(known=pl.col("at") + pl.Series(delays))


def delay_of(policy: LabelDelay = LabelDelay.CORRECT, **settings: Any) -> DelayConfig:
    return DelayConfig(policy=policy, column="known", **settings)


def stream(config: RunConfig, folder: Path, *, delay: DelayConfig, loss: str = "none", **more: Any) -> StreamResult:
    config = dataclasses.replace(config, delayed=DelayedConfig(loss=DelayedLoss(loss)))
    return stream_run(config, folder=folder, stream=StreamConfig(by="day", delay=delay), **more)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("events") / "events.parquet"
    delayed_events(600).write_parquet(path)
    return path


class Rows(Hook):
    """Keeps row ids and labels of every step."""

    def __init__(self) -> None:
        self.trained: list[tuple[int, float]] = []

    def on_step(self, trainer: Trainer, made: MadeStep) -> None:
        del trainer
        self.trained += zip(made.batch.row_ids.tolist(), made.batch.labels[:, 0].tolist(), strict=True)


def moments_of(file: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Day, day in which the label is known, and label of each row."""
    frame = pl.read_parquet(file)
    return (
        (frame["at"].to_numpy() - START) // DAY,
        (frame["known"].to_numpy() - START) // DAY,
        frame["click"].to_numpy(),
    )


def test_rows_wait_for_their_labels_and_are_scored_when_they_come(file: Path, tmp_path: Path) -> None:
    hook = Rows()
    stream(config_of(file), tmp_path / "run", delay=delay_of(LabelDelay.WAIT), hooks=[hook])
    day, known, click = moments_of(file)
    expected = [(row, float(click[row])) for row in range(600) if known[row] <= 4]
    assert sorted(hook.trained) == expected
    records = read_windows(tmp_path / "run/windows.jsonl")
    for number, record in enumerate(records):
        assert record.rows == int((day == number).sum())
        assert record.trained["known"] == record.trained_rows == int((known == number).sum())
        assert record.labelled == pytest.approx(float((known[day == number] == number).mean()), abs=1e-6)
        assert bool(record.metrics) == (number > 0)
    assert verify_run(tmp_path / "run").good


@pytest.mark.parametrize(
    ("known_after", "attribution", "first"), [(2.0, 0.0, [0, 0]), (0.0, 1.5, [0]), (0.0, 2.0, [0, 0])]
)
def test_a_history_of_which_no_label_is_known_yet_trains_nothing_and_says_so(
    file: Path, tmp_path: Path, known_after: float, attribution: float, first: list[int]
) -> None:
    """Its rows are trained with later windows; before any of them is, scores are those of the model as it was drawn.

    Labels are known days after their rows, by the label time of the rows or because positives are waited for.
    """
    later = pl.read_parquet(file)
    if known_after:
        later = later.with_columns(known=pl.col("at") + int(known_after * DAY))
    later.write_parquet(tmp_path / "later.parquet")
    said = Said()
    delay = delay_of(LabelDelay.WAIT, attribution_s=attribution * DAY)
    result = stream(config_of(tmp_path / "later.parquet"), tmp_path / "run", delay=delay, progress=said)
    trained = [window.trained_rows for window in result.windows]
    day, known, _ = moments_of(tmp_path / "later.parquet")
    if known_after:
        assert trained == [int((known == number).sum()) for number in range(5)]
    assert trained[: len(first)] == first
    assert sum(trained) > 0
    assert [window.rows for window in result.windows] == [int((day == number).sum()) for number in range(5)]
    assert any("no label of 2000-05-01 is known at its end" in line for line in said.lines), said.lines
    assert verify_run(tmp_path / "run").good


def test_assumed_negatives_are_corrected_when_positives_come(file: Path, tmp_path: Path) -> None:
    hook = Rows()
    stream(config_of(file), tmp_path / "run", delay=delay_of(), hooks=[hook])
    _, known, click = moments_of(file)
    corrected = [row for row in range(600) if click[row] and known[row] <= 4]
    assert sorted(hook.trained) == [*((row, 0.0) for row in range(600)), *((2 * AGAIN + row, 1.0) for row in corrected)]
    ledger = read_ledger(tmp_path / "run/ledger.bin")
    rows = np.array([*range(600), *(2 * AGAIN + row for row in corrected)])
    assert int(ledger["sum"].sum(dtype=np.uint64)) == expected_sum(rows)
    records = read_windows(tmp_path / "run/windows.jsonl")
    assert sum(record.trained["corrected"] for record in records) == len(corrected)
    assert sum(record.trained["assumed"] for record in records) == 600
    verdict = verify_run(tmp_path / "run")
    assert verdict.good
    assert any("assumed" in line and "corrected" in line for line in verdict.lines)


def test_a_wait_for_labels_that_are_known_at_once_is_a_plain_stream(tmp_path: Path) -> None:
    events(300, days=3).with_columns(known="at").write_parquet(tmp_path / "events.parquet")
    config = config_of(tmp_path / "events.parquet")
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, start_at_base_rate=False))
    stream(config, tmp_path / "waits", delay=delay_of(LabelDelay.WAIT))
    stream_run(config, folder=tmp_path / "plain", stream=StreamConfig(by="day"))
    assert same(weights_of(tmp_path / "waits"), weights_of(tmp_path / "plain"))
    assert (tmp_path / "waits/ledger.bin").read_bytes() == (tmp_path / "plain/ledger.bin").read_bytes()


def test_other_labels_of_a_row_are_learned_once(tmp_path: Path) -> None:
    frame = delayed_events(200, days=4).with_columns(seen=pl.Series(np.arange(200) % 2))
    frame.write_parquet(tmp_path / "events.parquet")
    schema = zg.Schema(
        features=(zg.Categorical(name="user"), zg.Dense(name="age")),
        labels=(zg.Label(name="seen"), zg.Label(name="click")),
        time="at",
    )
    seen: list[tuple[int, float, float]] = []

    class Both(Hook):
        def on_step(self, trainer: Trainer, made: MadeStep) -> None:
            labels = made.batch.labels.tolist()
            seen.extend((row, *of_row) for row, of_row in zip(made.batch.row_ids.tolist(), labels, strict=True))

    config = config_of(tmp_path / "events.parquet", schema=schema)
    with pytest.raises(ConfigError, match=r"--delayed\.label click"):
        stream(config, tmp_path / "none", delay=delay_of())
    stream(config, tmp_path / "run", delay=delay_of(label="click"), loss="defuse", hooks=[Both()])
    firsts = [row for row, first, _ in seen if not np.isnan(first)]
    assert sorted(firsts) == list(range(200))
    again = {(row // AGAIN, click) for row, _, click in seen if row >= AGAIN}
    assert again == {(2, 1.0), (3, 0.0)}


def live(folder: Path, file: Path, *, loss: str) -> None:
    config = config_of(file)
    observe = 0.0 if loss in ("fnw", "fnc", "none") else DAY / 3
    stream(config, folder, delay=delay_of(observe_s=observe), loss=loss)


@pytest.mark.parametrize("loss", ["defuse", pytest.param("fnw", marks=pytest.mark.slow)])
def test_a_stream_with_corrections_that_dies_again_and_again_ends_with_the_same_bits(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    live(tmp_path / "whole", file, loss=loss)
    rng = random.Random(5)
    with monkeypatch.context() as patch:
        moments = Moments(patch)
        lives = moments.die_until_done(lambda: live(tmp_path / "cut", file, loss=loss), rng=rng, least=4, most=40)
    assert lives > 4
    assert content_of(tmp_path / "cut") == content_of(tmp_path / "whole")
    assert same(weights_of(tmp_path / "cut"), weights_of(tmp_path / "whole"))
    assert (tmp_path / "cut/ledger.bin").read_bytes() == (tmp_path / "whole/ledger.bin").read_bytes()
    assert verify_run(tmp_path / "cut").good


def test_a_stream_goes_on_with_files_whose_labels_correct_rows_of_before(file: Path, tmp_path: Path) -> None:
    stream(config_of(file), tmp_path / "run", delay=delay_of(), loss="fnc")
    later = delayed_events(80, days=1, seed=7).with_columns(pl.col("at") + 6 * DAY, pl.col("known") + 6 * DAY)
    later.write_parquet(tmp_path / "later.parquet")
    hook = Rows()
    stream(config_of(file, tmp_path / "later.parquet"), tmp_path / "run", delay=delay_of(), loss="fnc", hooks=[hook])
    _, known, click = moments_of(file)
    waited = [2 * AGAIN + row for row in range(600) if click[row] and known[row] > 4]
    assert sorted(row for row, _ in hook.trained if row >= AGAIN and row % AGAIN < 600) == waited
    assert verify_run(tmp_path / "run").good


def config_in(base: Path, *, world_size: int) -> RunConfig:
    """Without dropout, of which each rank would draw its own; the global batch is that of one device."""
    config = config_of(base / "events.parquet")
    model = zg.DLRMConfig(embedding_dim=4, bottom=zg.MLPConfig(hidden_dims=(8,)), top=zg.MLPConfig(hidden_dims=(8,)))
    loader = dataclasses.replace(config.training.loader, batch_size=32 // world_size)
    return dataclasses.replace(config, model=model, training=dataclasses.replace(config.training, loader=loader))


def on_ranks(rank: int, base: str, loss: str) -> int:
    delay = delay_of(observe_s=0.0 if loss == "fnw" else DAY / 3)
    return stream(config_in(Path(base), world_size=2), Path(base) / "ranks", delay=delay, loss=loss).steps


@pytest.mark.parametrize("loss", ["es_dfm", pytest.param("fnw", marks=pytest.mark.slow)])
def test_two_ranks_learn_as_one_device_does(tmp_path: Path, loss: str) -> None:
    delayed_events(401, days=4).write_parquet(tmp_path / "events.parquet")
    delay = delay_of(observe_s=0.0 if loss == "fnw" else DAY / 3)
    one = stream(config_in(tmp_path, world_size=1), tmp_path / "one", delay=delay, loss=loss)
    assert run_ranks(on_ranks, 2, str(tmp_path), loss, timeout_s=120.0) == [one.steps] * 2
    ours = read_windows(tmp_path / "one/windows.jsonl")
    theirs = read_windows(tmp_path / "ranks/windows.jsonl")
    for first, second in zip(ours, theirs, strict=True):
        assert dataclasses.replace(second, metrics={}, timing={}) == dataclasses.replace(first, metrics={}, timing={})
        assert second.metrics == pytest.approx(first.metrics, rel=1e-4)
    assert verify_run(tmp_path / "ranks").good
    found = weights_of(tmp_path / "ranks")
    for name, weight in weights_of(tmp_path / "one").items():
        torch.testing.assert_close(found[name], weight, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("delay", "loss", "match"),
    [
        (DelayConfig(), "fnw", "--delay correct, with --delayed.loss fnw"),
        (delay_of(LabelDelay.WAIT), "defuse", "--delay correct"),
        (delay_of(observe_s=60.0), "fnc", "--observe-s 0 with fnc"),
    ],
)
def test_losses_that_do_not_go_with_the_rows_are_refused(
    file: Path, tmp_path: Path, delay: DelayConfig, loss: str, match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        stream(config_of(file), tmp_path / "run", delay=delay, loss=loss)


def test_a_loss_of_delayed_labels_is_refused_outside_of_streams(file: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(config_of(file), delayed=DelayedConfig(loss=DelayedLoss.FNW))
    with pytest.raises(ConfigError, match="--delay correct"):
        train_run(config, folder=tmp_path / "run")


def test_the_command_line_has_it(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my.toml").write_text(
        schema_to_toml(zg.Schema(features=(zg.Dense(name="age"),), labels=(zg.Label(name="click"),), time="at"))
    )
    command = ["stream", "table_dlrm", "--data.train", str(file), "--schema", str(tmp_path / "my.toml")]
    delay = ["--delay", "correct", "--label-time", "known", "--observe-s", "3600", "--delayed.loss", "es-dfm"]
    assert main([*command, *delay, "--out", str(tmp_path / "run")]) == 0
    rows = sum(record.trained_rows for record in read_windows(tmp_path / "run/windows.jsonl"))
    assert f"windows  5, {rows:,} rows trained" in capsys.readouterr().out
    log = (tmp_path / "run/run.log").read_text()
    for words in ("assumed", "corrected", "confirmed", "es_dfm of click", "rows wait for windows"):
        assert words in log
    assert main([*command, "--label-time", "known", "--out", str(tmp_path / "other")]) == 2
    assert "--delay wait, assume-negative or correct" in capsys.readouterr().err
    assert main([*command, *delay[:4], "--observe-s", "-1", "--out", str(tmp_path / "other")]) == 2
    assert "seconds, 0 or more" in capsys.readouterr().err


def test_the_same_command_goes_on_with_a_loss_that_names_its_label_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.toml").write_text(schema_to_toml(SCHEMA))
    Path("days").mkdir()
    frame = delayed_events(120, days=4).sort("at")
    frame[:80].write_csv("days/first.csv")
    words = ["stream", "table_dlrm", "--schema", "my.toml", "--batch-size", "32", "--training.threads", "1"]
    words += ["--data.train", "days", "--out", "live", "--delay", "correct", "--label-time", "known"]
    words += ["--delayed.loss", "fnw"]
    assert main(words) == 0
    before = len(read_windows(Path("live/windows.jsonl")))
    frame[80:].write_csv("days/second.csv")
    assert main(words) == 0
    assert len(read_windows(Path("live/windows.jsonl"))) > before


def test_a_hundred_years_are_the_longest_wait(file: Path, tmp_path: Path) -> None:
    for delay in (delay_of(LabelDelay.WAIT, attribution_s=1e30), delay_of(observe_s=1e30)):
        with pytest.raises(ConfigError, match="a hundred years"):
            stream(config_of(file), tmp_path / "run", delay=delay)


@pytest.mark.parametrize("loss", ["es-dfm", "defuse"])
def test_the_network_of_a_loss_is_not_published(file: Path, tmp_path: Path, loss: str) -> None:
    publish = PublishConfig(folder=str(tmp_path / "live"), max_delta_share=100.0)
    result = stream(config_of(file), tmp_path / "run", delay=delay_of(observe_s=3600.0), loss=loss, publish=publish)
    loaded = Recommender.load(tmp_path / "live")
    assert not any(name.startswith("student.") for name in loaded.chain.needed_ranker.packed.model.state_dict())
    pointer = read_pointer(tmp_path / "live")
    assert pointer.newest.step == result.steps
    assert pointer.newest.deltas


def test_labels_of_the_far_future_are_counted_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    frame = delayed_events(600, days=3)
    rows = np.arange(600)
    # In the year 2200: seconds as the others are, of a clock that is wrong.
    is_far = (rows % 100 == 7) & ((frame["at"].to_numpy() - START) // DAY == 1)
    assert 0 < is_far.sum() < 6
    frame = frame.with_columns(known=pl.Series(np.where(is_far, 7_258_118_400, frame["known"].to_numpy())))
    frame.write_parquet("far.parquet")
    Path("my.toml").write_text(schema_to_toml(SCHEMA))
    command = ["stream", "table_logistic_regression", "--data.train", "far.parquet", "--schema", "my.toml"]
    assert main([*command, "--delay", "wait", "--label-time", "known", "--out", "run"]) == 0
    said = capsys.readouterr().err
    assert f"{is_far.sum()} labels of the future, which wait" in said
    assert "the last of them 2200-01-01" in said
    assert [each.labels_ahead for each in read_windows(Path("run/windows.jsonl"))] == [0, int(is_far.sum()), 0]
    assert f"{is_far.sum()} labels have a time of more than a day after" in Path("run/report.html").read_text()


def test_the_share_of_known_labels_is_that_of_scored_rows(tmp_path: Path) -> None:
    """Of rows that were put aside no label counts; late rows count with the window that they came in."""
    frame = pl.DataFrame(
        {
            "user": [f"u{row % 3}" for row in range(20)],
            "item": [row % 4 for row in range(20)],
            "age": [float(row) for row in range(20)],
            "click": [str(row // 2 % 2) if row % 2 else "x" for row in range(20)],
            "at": [START + row for row in range(20)],
        }
    )
    frame.with_columns(known="at").write_csv(tmp_path / "a.csv")
    config = config_of(tmp_path / "a.csv")
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, bad_rows=BadRowPolicy.QUARANTINE))
    delay = delay_of(LabelDelay.WAIT)
    stream(config, tmp_path / "run", delay=delay)
    [record] = read_windows(tmp_path / "run/windows.jsonl")
    assert (record.rows, record.bad, record.labelled) == (10, 10, 1.0)
    # Two late rows come with one of the next day: one label is known on that day, and one a week later.
    late = frame[1:6:2].with_columns(
        at=pl.Series([START + 7, START + 8, START + DAY]),
        known=pl.Series([START + DAY, START + 8 * DAY, START + 8 * DAY]),
    )
    late.write_csv(tmp_path / "b.csv")
    data = dataclasses.replace(config.data, train=(*config.data.train, str(tmp_path / "b.csv")))
    stream(dataclasses.replace(config, data=data), tmp_path / "run", delay=delay)
    record = read_windows(tmp_path / "run/windows.jsonl")[-1]
    assert (record.rows, record.late) == (3, 2)
    assert record.labelled == pytest.approx(1 / 3, abs=1e-6)


@pytest.mark.parametrize("policy", [LabelDelay.ASSUME_NEGATIVE, LabelDelay.CORRECT])
def test_positives_that_came_with_their_rows_are_trained_once_as_positives(tmp_path: Path, policy: LabelDelay) -> None:
    events(100, days=2).with_columns(known="at").write_parquet(tmp_path / "events.parquet")
    hook = Rows()
    said = Said()
    config = config_of(tmp_path / "events.parquet")
    stream(config, tmp_path / "run", delay=delay_of(policy), hooks=[hook], progress=said)
    click = pl.read_parquet(tmp_path / "events.parquet")["click"].to_list()
    assert sorted(hook.trained) == [(row, float(click[row])) for row in range(100)]
    assert not any("no positive of" in line for line in said.lines)


def test_a_history_whose_positives_are_all_assumed_negatives_is_named(file: Path, tmp_path: Path) -> None:
    later = pl.read_parquet(file).with_columns(known=pl.col("at") + 3600)
    later.write_parquet(tmp_path / "later.parquet")
    for observe_s, is_named in ((0.0, True), (3600.0, False)):
        said = Said()
        delay = delay_of(LabelDelay.ASSUME_NEGATIVE, observe_s=observe_s)
        stream(config_of(tmp_path / "later.parquet"), tmp_path / f"run-{is_named}", delay=delay, progress=said)
        assert any("no positive of 2000-05-01 had come 0 seconds" in line for line in said.lines) == is_named
