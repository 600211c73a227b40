"""Rows and labels in two logs of a broker train what the same records in files do, bit for bit, whatever dies or is cut.

The everyday tests interleave the two logs at random, let a stream die inside of reading, taking, saving and
acknowledging either log, and let another one take over; the long ones kill processes and servers, and cut connections.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import multiprocessing as mp
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from tests.data.streams.brokers.redis_server import RedisServer, require_server
from tests.killing import mark_begin, wait_for_begin
from tests.runs.stream.test_killed_streams import Moments
from tests.runs.stream.test_late_label_streams import (
    DAY,
    REACH,
    Rows,
    assert_same_streams,
    delay_of,
    delayed_events,
    write_logs,
)
from tests.runs.stream.test_stream_runs import SCHEMA, START, config_of, content_of, same, weights_of
from tests.runs.stream.test_streams_of_a_broker import Faults, Lines, config_from, num_pending, num_windows, send
from ziggurat.cli.main import main
from ziggurat.data.encoded.ledger import expected_sum, read_ledger
from ziggurat.data.raw.bad_rows import BadRowPolicy
from ziggurat.data.streams.arrivals import Arrivals
from ziggurat.data.streams.brokers import redis_streams
from ziggurat.data.streams.journal import Journal, JournalFile
from ziggurat.data.streams.label_delay import DelayConfig, LabelDelay
from ziggurat.data.streams.label_intake import LabelIntake
from ziggurat.data.streams.late_labels import AFTER, BEFORE, EARLY, NO_ROW, TWICE
from ziggurat.data.streams.receiving import Receiving
from ziggurat.data.streams.windows import StreamConfig
from ziggurat.errors import ConfigError, DataError, ZigguratError
from ziggurat.features.schema_io import schema_to_toml
from ziggurat.runs.stream.run import StreamResult, stream_run
from ziggurat.runs.stream.source import FollowConfig
from ziggurat.runs.verify import verify_run
from ziggurat.testing.ranks import preload, run_ranks
from ziggurat.training.hooks.hook import Hook
from ziggurat.training.records.answers import read_scored_windows
from ziggurat.training.records.run_folder import RunFolder
from ziggurat.training.trainer import Trainer

_context = mp.get_context("forkserver")
DEAD_S = 1.0
MAX_LIFE_S = 120.0
CORRECT = delay_of(observe_s=DAY / 4)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis"), program=require_server()) as made:
        yield made


@dataclasses.dataclass(frozen=True, kw_only=True)
class Logs:
    """Two logs, and what of them was sent to two streams of a broker."""

    server: RedisServer
    name: str
    rows: pl.DataFrame
    labels: pl.DataFrame

    @staticmethod
    def of(server: RedisServer, name: str, frame: pl.DataFrame) -> Logs:
        """Rows without labels, and records of the positives in order of their time."""
        labels = frame.drop_nulls("known").sort("known").select("id", "known")
        return Logs(server=server, name=name, rows=frame.drop("click", "known"), labels=labels)

    @property
    def keys(self) -> tuple[str, str]:
        return f"{self.name}-rows", f"{self.name}-labels"

    def urls(self, **options: Any) -> tuple[str, str]:
        rows, labels = self.keys
        return self.server.url(rows, **options), self.server.url(labels, **options)

    def send(self, rows: slice = slice(None), labels: slice = slice(None)) -> None:
        send(self.server, self.keys[0], self.rows[rows])
        send(self.server, self.keys[1], self.labels[labels])

    def write(self, base: Path) -> None:
        """The same records as files, one of each log."""
        for name, log in (("rows", self.rows), ("labels", self.labels)):
            (base / name).mkdir(parents=True)
            log.write_parquet(base / name / "0.parquet")


def live(
    logs: Logs | tuple[str, str], folder: Path, *, delay: DelayConfig = CORRECT, options: Any = None, **more: Any
) -> StreamResult:
    rows, labels = logs if isinstance(logs, tuple) else logs.urls(**(options or {}))
    data = more.pop("data", {})
    return stream_run(
        config_from(rows, **data), folder=folder, stream=StreamConfig(by="day", delay=delay), labels=(labels,), **more
    )


def live_from_files(base: Path, folder: Path, *, delay: DelayConfig = CORRECT, **more: Any) -> StreamResult:
    return stream_run(
        config_of(base / "rows"),
        folder=folder,
        stream=StreamConfig(by="day", delay=delay),
        labels=(str(base / "labels"),),
        **more,
    )


def journal_of(folder: Path) -> Journal:
    found = JournalFile(folder / "stream").read()
    assert found is not None
    return found


def assert_all_once(folder: Path, *, num_rows: int) -> None:
    """Each row trained once in its first state, and each correction once."""
    ledger = read_ledger(folder / "ledger.bin")
    records = read_scored_windows(RunFolder(folder))
    firsts = sum(each.trained["known"] + each.trained["assumed"] for each in records)
    corrected = sum(each.trained["corrected"] for each in records)
    assert int(ledger["rows"].sum()) == firsts + corrected
    assert sum(each.rows for each in records) == num_rows


@pytest.mark.parametrize("policy", list(LabelDelay)[1:])
def test_two_logs_of_a_broker_train_what_files_and_one_log_do(
    server: RedisServer, tmp_path: Path, policy: LabelDelay
) -> None:
    delay = delay_of(policy, observe_s=0.0 if policy is LabelDelay.WAIT else DAY / 4)
    frame = delayed_events(400)
    logs = Logs.of(server, f"same-{policy.value}", frame)
    logs.send()
    logs.write(tmp_path)
    ours = Rows()
    live(logs, tmp_path / "run", delay=delay, hooks=[ours])
    theirs = Rows()
    live_from_files(tmp_path, tmp_path / "files", delay=delay, hooks=[theirs])
    assert ours.trained == theirs.trained
    assert_same_streams(tmp_path / "run", tmp_path / "files")
    # One log of rows with both columns.
    both = f"both-{policy.value}"
    send(server, both, frame)
    of_both = Rows()
    one_log = StreamConfig(by="day", delay=dataclasses.replace(delay, key=""))
    stream_run(config_from(server.url(both)), folder=tmp_path / "both", stream=one_log, hooks=[of_both])
    assert ours.trained == of_both.trained
    assert same(weights_of(tmp_path / "run"), weights_of(tmp_path / "both"))
    assert_all_once(tmp_path / "run", num_rows=400)
