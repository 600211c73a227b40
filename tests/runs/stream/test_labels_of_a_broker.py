"""Rows and labels in two logs of a broker train what the same records in files do, bit for bit, whatever dies.

The everyday tests interleave the two logs at random, let a stream die inside of reading, taking, saving and
acknowledging either log, and let another one take over; the long ones kill processes and servers, and cut connections.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing as mp
import os
import random
import shlex
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tests.data.streams.brokers.redis_server import RedisServer, Wire, require_server, url_of
from tests.killing import mark_begin
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
from tests.runs.stream.test_streams_of_a_broker import Faults, Lines, config_from, num_pending, send
from ziggurat.cli.main import main
from ziggurat.data.raw.bad_rows import BadRowPolicy
from ziggurat.data.streams import receiving
from ziggurat.data.streams.arrivals import Arrivals
from ziggurat.data.streams.brokers import redis_streams
from ziggurat.data.streams.journal import Journal, JournalFile
from ziggurat.data.streams.label_delay import DelayConfig, LabelDelay
from ziggurat.data.streams.label_intake import LabelIntake
from ziggurat.data.streams.late_labels import AFTER, EARLY, NO_ROW, TWICE
from ziggurat.data.streams.receiving import Receiving
from ziggurat.data.streams.windows import StreamConfig
from ziggurat.errors import ConfigError, DataError
from ziggurat.features.schema_io import schema_to_toml
from ziggurat.runs.stream.run import StreamResult, stream_run
from ziggurat.runs.stream.source import FollowConfig
from ziggurat.runs.verify import verify_run
from ziggurat.testing.ranks import preload, run_ranks
from ziggurat.training.checkpoint.retention import complete_steps
from ziggurat.training.records.answers import read_scored_windows
from ziggurat.training.records.run_folder import RunFolder

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


def frame_of(num_rows: int = 200, *, seed: int = 0) -> pl.DataFrame:
    return delayed_events(num_rows, days=4, seed=seed)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stream of files of the records of `frame_of()`, with which those of a broker are compared."""
    base = tmp_path_factory.mktemp("whole")
    write_logs(base, frame_of(), num_files=1)
    live_from_files(base, base / "run")
    return base / "run"


@pytest.mark.parametrize("policy", [LabelDelay.WAIT, LabelDelay.ASSUME_NEGATIVE, LabelDelay.CORRECT])
def test_two_logs_of_a_broker_train_what_files_and_one_log_do(
    server: RedisServer, tmp_path: Path, policy: LabelDelay
) -> None:
    delay = delay_of(policy, observe_s=0.0 if policy is LabelDelay.WAIT else DAY / 4)
    frame = frame_of()
    logs = Logs.of(server, f"same-{policy.value}", frame)
    logs.send()
    logs.write(tmp_path)
    ours = Rows()
    live(logs, tmp_path / "run", delay=delay, hooks=[ours])
    theirs = Rows()
    live_from_files(tmp_path, tmp_path / "files", delay=delay, hooks=[theirs])
    assert ours.trained == theirs.trained
    rows = [row for _, row, _ in ours.trained]
    assert len(set(rows)) == len(rows), "a correction has an id of its own"
    assert_same_streams(tmp_path / "run", tmp_path / "files")
    # One log of rows with both columns.
    both = f"both-{policy.value}"
    send(server, both, frame)
    of_both = Rows()
    one_log = StreamConfig(by="day", delay=dataclasses.replace(delay, key=""))
    stream_run(config_from(server.url(both)), folder=tmp_path / "both", stream=one_log, hooks=[of_both])
    assert ours.trained == of_both.trained
    assert same(weights_of(tmp_path / "run"), weights_of(tmp_path / "both"))


class Producer:
    """Sends two logs bit by bit, one step at each moment at which a stream that is followed waits; then ends it."""

    def __init__(self, patch: pytest.MonkeyPatch, logs: Logs, *, seed: int, faults: Sequence[Callable[[], None]] = ()):
        rng = random.Random(seed)
        self.steps: list[Callable[[], None]] = []
        # Each log in pieces of its own, now one ahead and now the other one.
        sides = ((0, logs.rows), (1, logs.labels))
        pieces: list[list[Callable[[], None]]] = [[], []]
        for side, log in sides:
            edges = sorted({0, log.height, *(rng.randint(0, log.height) for _ in range(rng.randint(2, 12)))})
            for begin, end in itertools.pairwise(edges):
                pieces[side].append(self._sending(logs, side, slice(begin, end)))
        while any(pieces):
            side = rng.choice([side for side in (0, 1) if pieces[side]])
            # A few at once: one log runs far ahead.
            for _ in range(rng.randint(1, 4)):
                if pieces[side]:
                    self.steps.append(pieces[side].pop(0))
        for fault in faults:
            self.steps.insert(rng.randint(1, len(self.steps)), fault)
        make_empty(logs)
        patch.setattr("ziggurat.runs.stream.source.StreamWindows._wait", self._wait)

    @staticmethod
    def _sending(logs: Logs, side: int, part: slice) -> Callable[[], None]:
        def sent() -> None:
            send(logs.server, logs.keys[side], (logs.rows, logs.labels)[side][part])

        return sent

    def _wait(self, is_asked: Callable[[], bool]) -> bool:
        if self.steps:
            self.steps.pop(0)()
        else:
            os.kill(os.getpid(), signal.SIGTERM)
        return not is_asked()


def make_empty(logs: Logs) -> None:
    """Make both streams before their first entry, as the error of one that is absent says."""
    with logs.server.client() as client:
        for key in logs.keys:
            client.xgroup_create(key, "ziggurat", "0", mkstream=True)


def follow_to_the_end(logs: Logs | tuple[str, str], folder: Path, **more: Any) -> None:
    """Follow until the producer ends the stream, and take what is left as one that is not followed."""
    live(logs, folder, follow=FollowConfig(poll_s=0.01), **more)
    live(logs, folder, **more)


def check_interleaving(server: RedisServer, base: Path, whole: Path, *, seed: int) -> None:
    logs = Logs.of(server, f"mixed-{seed}", frame_of())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ziggurat.data.streams.receiving._FULL_ROWS", random.Random(seed).choice([10, 40, 65_536]))
        Producer(patch, logs, seed=seed)
        follow_to_the_end(logs, base / "run")
    assert_same_streams(base / "run", whole)


@pytest.mark.parametrize("seed", [1, 2])
def test_no_interleaving_of_the_two_logs_changes_a_bit(
    server: RedisServer, tmp_path: Path, whole: Path, seed: int
) -> None:
    check_interleaving(server, tmp_path, whole, seed=seed)


@pytest.mark.slow
def test_thirty_interleavings_change_no_bit(server: RedisServer, tmp_path: Path, whole: Path) -> None:
    for seed in range(100, 130):
        check_interleaving(server, tmp_path / str(seed), whole, seed=seed)


def test_a_stream_of_two_logs_that_dies_again_and_again_ends_with_the_bits_of_files(
    server: RedisServer, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dies also before and behind the XACK of either log, so between checkpoint and XACK, and between the two."""
    logs = Logs.of(server, "dies", frame_of())
    logs.send()
    rng = random.Random(7)
    subscription = redis_streams._RedisSubscription
    calls = (*Moments.CALLS, (Arrivals, "receive"), (LabelIntake, "receive"), (Receiving, "acknowledge"))
    monkeypatch.setattr(Moments, "CALLS", (*calls, (subscription, "read"), (subscription, "acknowledge")))
    monkeypatch.setattr("ziggurat.data.streams.receiving._FULL_ROWS", 40)
    monkeypatch.setattr("ziggurat.data.streams.receiving._MOST", 30)
    with monkeypatch.context() as patch:
        moments = Moments(patch)
        lives = moments.die_until_done(
            lambda: live(logs, tmp_path / "run", options={"takeover_s": DEAD_S}), rng=rng, least=4, most=60, waits=True
        )
    assert lives > 4
    assert {"LabelIntake.receive", "Receiving.acknowledge", "_RedisSubscription.acknowledge"} & moments.died_in
    assert_same_streams(tmp_path / "run", whole)


class Acknowledged:
    """Notes how far each log was acknowledged, and by which checkpoint."""

    def __init__(self, patch: pytest.MonkeyPatch, logs: Logs, folder: Path) -> None:
        self.found: list[tuple[int, str, int]] = []
        call = redis_streams._RedisSubscription.acknowledge

        def acknowledge(subscription: Any, position: str) -> None:
            side = logs.keys.index(subscription._settings.key)
            newest = max(complete_steps(RunFolder(folder).checkpoints), default=-1)
            self.found.append((side, position.partition(" ")[0], newest))
            call(subscription, position)

        patch.setattr(redis_streams._RedisSubscription, "acknowledge", acknowledge)


def test_rows_and_labels_are_acknowledged_behind_the_checkpoint_that_has_them(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = frame_of()
    logs = Logs.of(server, "acknowledged", frame)
    # Taken in small parts: each is acknowledged as a whole.
    monkeypatch.setattr("ziggurat.data.streams.receiving._FULL_ROWS", 10)
    monkeypatch.setattr("ziggurat.data.streams.receiving._MOST", 5)
    logs.send()
    noted = Acknowledged(monkeypatch, logs, tmp_path / "run")
    result = live(logs, tmp_path / "run")
    assert {side for side, _, _ in noted.found} == {0, 1}
    records = read_scored_windows(RunFolder(tmp_path / "run"))
    ends = [*(each.step for each in records[1:]), result.steps]  # the step at which each window was trained
    with server.client() as client:
        ids = [[entry.decode() for entry, _ in client.xrange(key)] for key in logs.keys]
    by_id = dict(zip(frame["id"], frame.select("at", "known").iter_rows(), strict=True))
    for side, position, newest in noted.found:
        trained = sum(end <= newest for end in ends)
        until = records[trained - 1].name if trained else ""
        # By then it was trained, and corrected.
        for key in (logs.rows, logs.labels)[side]["id"][: ids[side].index(position) + 1]:
            at, known = by_id[key]
            last = max(at + DAY / 4, known or 0)
            day = time.strftime("%Y-%m-%d", time.gmtime(last))
            assert day <= until, (side, key, newest)
    # The label of the last row, days behind all others, may still come: it is left with what was taken with it, and so
    # are labels from the oldest of these rows on.
    assert 1 <= num_pending(server, logs.keys[0]) <= 10
    oldest = frame["at"][-10]
    assert 1 <= num_pending(server, logs.keys[1]) <= int((logs.labels["known"] >= oldest).sum()) + 10
    assert num_pending(server, logs.keys[1]) < logs.labels.height


def test_what_a_dead_reader_left_of_both_logs_is_taken_over(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = delayed_events(240, days=6)
    logs = Logs.of(server, "left", frame)
    monkeypatch.setattr("ziggurat.data.streams.receiving._FULL_ROWS", 5)
    monkeypatch.setattr("ziggurat.data.streams.receiving._MOST", 5)
    rows = int((frame["at"] < START + 5.5 * DAY).sum())
    labels = int((logs.labels["known"] < START + 5.5 * DAY).sum())
    options = {"takeover_s": DEAD_S}
    logs.send(slice(rows), slice(labels))
    live(logs, tmp_path / "first", options=options)
    with server.client() as client:
        left = [
            {entry["message_id"] for entry in client.xpending_range(key, "ziggurat", "-", "+", 10_000)}
            for key in logs.keys
        ]
        assert all(0 < len(ids) < count for ids, count in zip(left, (rows, labels), strict=True))
        logs.send(slice(rows, None), slice(labels, None))
        base = tmp_path / "files"
        for name, key, ids, log in zip(("rows", "labels"), logs.keys, left, (logs.rows, logs.labels), strict=True):
            entries = client.xrange(key)
            chosen = [
                entry in ids or place >= len(entries) - (log.height - (rows, labels)[name == "labels"])
                for place, (entry, _) in enumerate(entries)
            ]
            (base / name).mkdir(parents=True)
            log.filter(pl.Series(chosen)).write_parquet(base / name / "0.parquet")
    lines = Lines()
    live(logs, tmp_path / "second", options=options, progress=lines)
    assert sum("takes over from" in line for line in lines.said) == 2, lines.said
    live_from_files(base, tmp_path / "whole")
    assert_same_streams(tmp_path / "second", tmp_path / "whole")
    counts = [journal_of(tmp_path / each).label_counts for each in ("second", "whole")]
    assert counts[0] == counts[1]
    with pytest.raises(DataError, match="still its own"):
        live(logs, tmp_path / "first", options=options)


def test_a_broker_that_is_started_again_and_connections_that_are_cut_change_no_bit(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RedisServer(tmp_path / "redis") as server:
        wire = Wire(server.port)
        logs = Logs.of(server, "cut", frame_of())

        def restart() -> None:
            server.kill()
            server.start()

        cuts = [lambda: wire.cut_after(300), lambda: wire.cut_after(2_000)]
        monkeypatch.setattr("ziggurat.data.streams.receiving._FULL_ROWS", 30)
        Producer(monkeypatch, logs, seed=3, faults=[restart, wire.cut, *cuts, restart])
        rows, labels = (url_of(wire.port, key, takeover_s=DEAD_S) for key in logs.keys)
        lines = Lines()
        live((rows, labels), tmp_path / "run", follow=FollowConfig(poll_s=0.01), progress=lines)
        wire._left = None
        live((rows, labels), tmp_path / "run")
        wire.close()
        assert wire.num_cuts > 1
        assert any("does not answer" in line for line in lines.said), lines.said
        assert any("answers again" in line for line in lines.said), lines.said
    assert_same_streams(tmp_path / "run", whole)


def fates() -> tuple[pl.DataFrame, pl.DataFrame, dict[str, int]]:
    """Rows of three days, records of every fate, and the counts of these."""
    at = [START + day * DAY + hour * 3600 for day in range(3) for hour in range(1, 21)]
    rows = pl.DataFrame(
        {
            "id": [f"e{row}" for row in range(len(at))],
            "user": [f"u{row % 7}" for row in range(len(at))],
            "item": [row % 5 for row in range(len(at))],
            "age": [0.1 * row for row in range(len(at))],
            "at": at,
        }
    )
    hour = 3600
    records = [(f"e{row}", at[row] + hour, row % 2) for row in range(0, 60, 3)]
    records += [
        ("e0", at[0] + 2 * hour, 1),  # another word on a row that has one, and disagrees
        ("e3", at[3] + 2 * hour, 1),  # the same once more
        ("e4", at[4] + int(REACH) + 1, 1),  # too late
        ("e7", at[7] - hour, 1),  # known before its row
        ("nobody", at[5], 1),
    ]
    labels = pl.DataFrame(records, schema=["id", "known", "click"], orient="row").sort("known", maintain_order=True)
    return rows, labels, {TWICE: 2, AFTER: 1, EARLY: 1, NO_ROW: 1}


def test_labels_that_come_twice_too_early_too_late_or_for_nobody_are_counted_as_with_files(
    server: RedisServer, tmp_path: Path
) -> None:
    rows, labels, expected = fates()
    far = pl.DataFrame({"id": ["last"], "user": ["u1"], "item": [1], "age": [0.0], "at": [START + 11 * DAY]})
    logs = Logs(
        server=server,
        name="fates",
        rows=pl.concat([rows, far.cast(dict(rows.schema))]),
        labels=pl.concat([labels, pl.DataFrame({"id": ["last"], "known": [START + 11 * DAY], "click": [1]})]),
    )
    logs.send()
    logs.write(tmp_path)
    aside = {"bad_rows": BadRowPolicy.QUARANTINE}
    lines = Lines()
    live(logs, tmp_path / "run", data=aside, progress=lines)
    config = config_of(tmp_path / "rows")
    stream_run(
        dataclasses.replace(config, data=dataclasses.replace(config.data, **aside)),
        folder=tmp_path / "files",
        stream=StreamConfig(by="day", delay=CORRECT),
        labels=(str(tmp_path / "labels"),),
    )
    assert_same_streams(tmp_path / "run", tmp_path / "files")
    found = journal_of(tmp_path / "run").label_counts
    assert found == journal_of(tmp_path / "files").label_counts
    assert {name: found.get(name, 0) for name in expected} == expected
    for name in (TWICE, AFTER):
        assert any(name in line for line in lines.said), (name, lines.said)


def test_a_stream_that_is_asked_to_end_amid_the_labels_ends_with_the_same_bits(
    server: RedisServer, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was not read yet must not count as what never comes."""
    logs = Logs.of(server, "asked", frame_of())
    logs.send()
    monkeypatch.setattr("ziggurat.data.streams.receiving._MOST", 20)
    monkeypatch.setattr("ziggurat.data.streams.receiving._FULL_ROWS", 20)
    for owner in (Arrivals, LabelIntake):
        call = owner.receive
        with monkeypatch.context() as patch:

            def receive(self: Any, rows: Any, *, call: Any = call, **more: Any) -> Any:
                os.kill(os.getpid(), signal.SIGTERM)
                patch.undo()
                return call(self, rows, **more)

            patch.setattr(owner, "receive", receive)
            assert live(logs, tmp_path / "run").ended_early
        assert len(journal_of(tmp_path / "run").done) <= 1, "the first day alone is behind both logs"
    live(logs, tmp_path / "run")
    assert_same_streams(tmp_path / "run", whole)


@pytest.mark.parametrize("is_of_rows", [True, False])
def test_one_log_may_be_of_a_broker_and_the_other_one_of_files(
    server: RedisServer, tmp_path: Path, whole: Path, is_of_rows: bool
) -> None:
    logs = Logs.of(server, f"mixed-{is_of_rows}", frame_of())
    logs.send()
    logs.write(tmp_path)
    rows, labels = logs.urls()
    config = config_from(rows) if is_of_rows else config_of(tmp_path / "rows")
    stream_run(
        config,
        folder=tmp_path / "run",
        stream=StreamConfig(by="day", delay=CORRECT),
        labels=(str(tmp_path / "labels") if is_of_rows else labels,),
    )
    assert_same_streams(tmp_path / "run", whole)
    # What has begun with files goes on with files, and the reverse.
    other = labels if is_of_rows else str(tmp_path / "labels")
    with pytest.raises(ConfigError, match="as before") as refused:
        stream_run(config, folder=tmp_path / "run", stream=StreamConfig(by="day", delay=CORRECT), labels=(other,))
    named = refused.value.ways_out[0].removeprefix("--labels ")
    stream_run(config, folder=tmp_path / "run", stream=StreamConfig(by="day", delay=CORRECT), labels=(named,))
    assert_same_streams(tmp_path / "run", whole)


class _World:
    """Two small logs, with which errors are tried out."""

    def __init__(self, server: RedisServer, name: str, base: Path) -> None:
        self.server = server
        self.logs = Logs.of(server, name, delayed_events(60, days=2))
        self.base = base

    def live(self, rows: str, labels: str, folder: str = "run", **more: Any) -> StreamResult:
        return live((rows, labels), self.base / folder, **more)

    def add(self, fields: dict[Any, Any], *, side: int = 1) -> str:
        with self.server.client() as client:
            return client.xadd(self.logs.keys[side], fields).decode()

    def do(self, way: str) -> None:
        """Execute the command of redis-cli that a way out names."""
        words = shlex.split(way.partition("redis-cli ")[2])
        with self.server.client() as client:
            client.execute_command(*words[4:])


def test_a_log_of_labels_that_is_not_there_is_refused_before_the_first_row(server: RedisServer, tmp_path: Path) -> None:
    world = _World(server, "absent", tmp_path)
    rows, labels = world.logs.urls()
    with server.client() as client:
        client.xgroup_create(world.logs.keys[0], "ziggurat", "0", mkstream=True)
    with pytest.raises(DataError, match="a stream that is there") as refused:
        world.live(rows, labels, follow=FollowConfig(poll_s=0.01))
    assert refused.value.where == labels
    way = next(each for each in refused.value.ways_out if "XGROUP CREATE" in each)
    world.do(way)
    world.logs.send(labels=slice(0))
    world.live(rows, labels)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:6379", "localhost"])
def test_one_stream_for_rows_and_labels_is_refused(tmp_path: Path, host: str) -> None:
    pytest.importorskip("redis")
    with pytest.raises(ConfigError, match="and another one for labels") as refused:
        live(("redis://127.0.0.1:6379/clicks", f"redis://{host}/clicks?takeover-s=60"), tmp_path / "run")
    assert refused.value.found == "clicks for both"


def test_another_group_for_the_labels_is_refused(server: RedisServer, tmp_path: Path) -> None:
    world = _World(server, "groups", tmp_path)
    world.logs.send()
    rows, labels = world.logs.urls()
    world.live(rows, labels)
    # A second model, in a group of its own for the rows alone: it would get what the first one left of the labels.
    with pytest.raises(ConfigError, match="one consumer group") as refused:
        world.live(f"{rows}?group=second", labels, "second")
    ways = ("?group=second behind the URL of --labels", "?group=ziggurat behind the URL of --data.train")
    assert refused.value.ways_out == ways
    world.live(f"{rows}?group=second", f"{labels}?group=second", "second")
    assert_same_streams(tmp_path / "second", tmp_path / "run")


def test_a_reader_that_lives_in_the_group_of_the_labels_is_named(server: RedisServer, tmp_path: Path) -> None:
    world = _World(server, "lives", tmp_path)
    world.logs.send()
    rows, labels = world.logs.urls(takeover_s=5)
    with server.client() as client:
        client.xgroup_create(world.logs.keys[1], "ziggurat", "0")
    begun = threading.Event()
    ends = threading.Event()

    def read() -> None:
        with server.client() as client:
            while not ends.wait(0.1):
                client.xreadgroup("ziggurat", "somebody", {world.logs.keys[1]: "18446744073709551615-0"}, count=1)
                begun.set()

    other = threading.Thread(target=read)
    other.start()
    try:
        assert begun.wait(60)
        with pytest.raises(DataError, match="one trainer in the group") as refused:
            world.live(rows, labels)
    finally:
        ends.set()
        other.join()
    assert "somebody" in refused.value.found
    assert refused.value.where == labels
    world.live(rows.replace("takeover-s=5", "takeover-s=1"), labels.replace("takeover-s=5", "takeover-s=1"))


def test_a_log_of_labels_of_which_most_are_put_aside_is_warned_of(server: RedisServer, tmp_path: Path) -> None:
    """Every row was trained as a negative, and its labels were called complete, without a word."""
    world = _World(server, "most", tmp_path)
    world.logs.send(labels=slice(0))
    rows, labels = world.logs.urls()
    for id, known in world.logs.labels.iter_rows():
        world.add({"impression": id, "known": known})
    lines = Lines()
    world.live(rows, labels, data={"bad_rows": BadRowPolicy.QUARANTINE}, progress=lines)
    num = world.logs.labels.height
    assert any(f"warning: {num:,} of {num:,} labels were put aside" in line for line in lines.said), lines.said


def test_messages_that_are_no_labels_are_named_by_their_entry_or_put_aside(server: RedisServer, tmp_path: Path) -> None:
    world = _World(server, "bad", tmp_path)
    world.logs.send()
    rows, labels = world.logs.urls()
    at = int(world.logs.labels["known"][0])
    bad = {
        world.add({"known": at}): "a key, by which a label finds its row",
        world.add({"id": "e1"}): "time",
        world.add({"id": "e1", "known": "soon"}): "time",
        world.add({"id": "e1", "known": at, "click": "perhaps"}): "",
        world.add({"id": "e1", "known": at, "click": ""}): "",
        world.add({"id": b"\xff", "known": at}): "UTF-8",
        world.add({"json": '{"id": "e1", "known": '}): "an object of JSON",
        world.add({"json": f'{{"id": ["e1"], "known": {at}}}'}): "texts or numbers, for the key",
        world.add({"json": f'{{"id": "e1", "known": [{at}]}}'}): "a number",
        world.add({"json": f'{{"id": "e1", "known": {at}, "click": [1]}}'}): "",
        world.add({"arrow": b"none"}): "an Arrow stream",
        world.add({"impression": "e1", "bought_at": at}): "fields named as columns",
        world.add({"id": "e1", "known": at * 1000}): "time",
    }
    aside = {"bad_rows": BadRowPolicy.QUARANTINE}
    world.live(f"{rows}?group=aside", f"{labels}?group=aside", "aside", data=aside)
    kept = (tmp_path / "aside/stream").glob("labels-*/quarantine/*.jsonl")
    lines = [json.loads(line) for path in kept for line in path.read_text().splitlines()]
    assert sorted(line["message"] for line in lines) == sorted(bad)
    while bad:
        with pytest.raises(DataError) as refused:
            world.live(rows, labels)
        where = refused.value.where
        entry = next(each for each in bad if f"{labels}, entry {each}" in where)
        assert bad.pop(entry) in refused.value.expected
        assert refused.value.found
        world.do(next(way for way in refused.value.ways_out if f"XDEL {world.logs.keys[1]} {entry}" in way))
    world.live(rows, labels)
    assert same(weights_of(tmp_path / "run"), weights_of(tmp_path / "aside"))


def test_other_labels_are_refused_by_a_stream_that_goes_on(server: RedisServer, tmp_path: Path) -> None:
    world = _World(server, "goes-on", tmp_path)
    world.logs.send()
    rows, labels = world.logs.urls()
    send(server, "other-labels", world.logs.labels)
    world.live(rows, labels)
    for other in (server.url("other-labels"), f"{labels}?db=1"):
        with pytest.raises(ConfigError, match="as before: positions in them") as refused:
            world.live(rows, other)
        assert refused.value.ways_out[0] == f"--labels {labels}"
    world.live(rows, f"{labels}?takeover-s=60")


def test_labels_that_were_trimmed_are_an_error_or_counted(server: RedisServer, tmp_path: Path) -> None:
    if not server.counts_entries:
        pytest.skip("this server does not count what was trimmed")
    world = _World(server, "trimmed", tmp_path)
    half = world.logs.labels.height // 2
    world.logs.send(labels=slice(half))
    rows, labels = world.logs.urls()
    world.live(rows, labels)
    world.logs.send(slice(0), slice(half, None))
    with server.client() as client:
        client.xtrim(world.logs.keys[1], maxlen=3, approximate=False)
    lost = world.logs.labels.height - half - 3
    with pytest.raises(DataError, match=f"{lost} of them were trimmed") as refused:
        world.live(rows, labels)
    assert any("?trimmed=count" in way for way in refused.value.ways_out)
    lines = Lines()
    world.live(rows, f"{labels}?trimmed=count", progress=lines)
    assert any(f"{lost} messages with labels were trimmed, and are lost" in line for line in lines.said), lines.said
    assert json.loads((tmp_path / "run/startup.json").read_text())


def test_what_is_kept_of_two_logs_is_bounded_by_the_attribution_window(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = delayed_events(300, days=20)[:-1]
    logs = Logs.of(server, "long", frame)
    make_empty(logs)
    monkeypatch.setattr("ziggurat.data.streams.receiving._FULL_ROWS", 5)
    most: Counter[str] = Counter()
    folder = tmp_path / "run"
    day = 0

    def wait(is_asked: Callable[[], bool]) -> bool:
        nonlocal day
        if day:
            journal = journal_of(folder)
            kept = {"rows": num_pending(server, logs.keys[0]), "labels": num_pending(server, logs.keys[1])}
            kept |= {"held": len(journal.held), "logs": len(journal.logs), "files": len(journal.files)}
            kept |= {"label_files": len(journal.label_files), "parts": len(list(folder.glob("stream/arrived/*")))}
            for name, count in kept.items():
                most[f"{name} {'early' if day <= 8 else 'late'}"] = max(
                    count, most[f"{name} {'early' if day <= 8 else 'late'}"]
                )
        if day == 20:
            os.kill(os.getpid(), signal.SIGTERM)
            return not is_asked()
        for key, log, column in ((logs.keys[0], logs.rows, "at"), (logs.keys[1], logs.labels, "known")):
            since = START + day * DAY
            send(server, key, log.filter(pl.col(column) >= since, pl.col(column) < since + DAY))
        day += 1
        return not is_asked()

    monkeypatch.setattr("ziggurat.runs.stream.source.StreamWindows._wait", staticmethod(wait))
    live(logs, folder, follow=FollowConfig(poll_s=0.01))
    for name in ("held", "logs", "files", "label_files", "parts"):
        assert most[f"{name} late"] <= 1.5 * most[f"{name} early"] + 5, most
    # How many messages are unacknowledged at one moment depends on how fast the logs are read and on how the
    # days differ, so both are held to the records of six days: the attribution window is a day and a half.
    for name, log, column in (("rows", logs.rows, "at"), ("labels", logs.labels, "known")):
        days = ((log[column] - START) // DAY).to_list()
        six_days = max(sum(day <= other < day + 6 for other in days) for day in range(20))
        assert six_days < len(days) / 2
        assert max(most[f"{name} early"], most[f"{name} late"]) <= six_days, (six_days, most)


def take_few() -> None:
    """Take messages by few, in this process: what is acknowledged is all that was taken together."""
    receiving._FULL_ROWS = 10
    receiving._MOST = 5


def live_marked(base: str, urls: tuple[str, str], die_at: str) -> None:
    """Stream on, and die by SIGKILL before or behind the n-th XACK of a log: `rows before 2`."""
    log, moment, number = die_at.split()
    left = int(number)
    call = redis_streams._RedisSubscription.acknowledge

    def acknowledge(subscription: Any, position: str) -> None:
        nonlocal left
        if subscription._settings.key.endswith(log):
            left -= 1
        is_now = not left and subscription._settings.key.endswith(log)
        if is_now and moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        call(subscription, position)
        if is_now:
            os.kill(os.getpid(), signal.SIGKILL)

    redis_streams._RedisSubscription.acknowledge = acknowledge
    take_few()
    live(urls, Path(base) / "run")


@pytest.mark.slow
def test_kills_before_and_behind_each_xack_change_no_bit(
    server: RedisServer, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preload()
    monkeypatch.setattr(receiving, "_FULL_ROWS", 10)
    monkeypatch.setattr(receiving, "_MOST", 5)
    kills = 0
    for place, (log, moment) in enumerate(itertools.product(("rows", "labels"), ("before", "behind"))):
        base = tmp_path / str(place)
        base.mkdir()
        logs = Logs.of(server, f"xack-{place}", frame_of())
        logs.send()
        for number in (1, 2, 1):
            urls = logs.urls(takeover_s=DEAD_S)
            process = _context.Process(target=live_marked, args=(str(base), urls, f"{log} {moment} {number}"))
            process.start()
            process.join(MAX_LIFE_S)
            kills += process.exitcode == -signal.SIGKILL
        live(logs, base / "run", options={"takeover_s": DEAD_S})
        assert_same_streams(base / "run", whole)
    assert kills >= 8, kills
    print(f"\n{kills} kills before and behind XACK")


def follow_marked(urls: tuple[str, str], folder: str) -> None:
    """Follow both logs from wherever the folder stands."""
    mark_begin(Path(folder).parent)
    live(urls, Path(folder), follow=FollowConfig(poll_s=0.02))


class FaultsOfTwo(Faults):
    """The same with two logs."""

    @property
    def urls(self) -> tuple[str, str]:
        rows, labels = (url_of(self.wire.port, f"{self.key}-{name}", takeover_s=DEAD_S) for name in ("rows", "labels"))
        return rows, labels

    def _made(self) -> Any:
        return _context.Process(target=follow_marked, args=(self.urls, str(self.folder)))


@pytest.mark.slow
def test_forty_faults_of_two_logs_change_no_bit(tmp_path: Path) -> None:
    """Kill processes and servers, cut connections and move folders, while both logs grow, each by parts of its own."""
    preload()
    num_faults = 40
    frame = delayed_events(1200, days=8)
    world = FaultsOfTwo(tmp_path, key="two", seed=5)
    logs = Logs.of(world.server, "two", frame)
    logs.write(tmp_path)
    make_empty(logs)
    edges = [
        sorted({0, log.height, *(world.rng.randint(0, log.height) for _ in range(num_faults))})
        for log in (logs.rows, logs.labels)
    ]
    parts = [[slice(*each) for each in itertools.pairwise(found)] for found in edges]
    logs.send(parts[0].pop(0), slice(0))
    world.start()
    deadline = time.monotonic() + MAX_LIFE_S
    # A stream that has not begun refuses a broker that is away.
    while not (world.folder / "stream/stream.json").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    for number in range(num_faults):
        world.start()
        time.sleep(world.rng.uniform(0.0, 3.0))
        for side, left in enumerate(parts):
            now = slice(0, world.rng.randint(0, 2)) if number < num_faults - 1 else slice(None)
            for part in left[now]:
                logs.send(part if not side else slice(0), part if side else slice(0))
            del left[now]
        time.sleep(world.rng.uniform(0.0, 0.8))
        world.start()
        world.do(world.rng.choice(world.KINDS))
    world.wire._left = None
    if world.process.is_alive():
        world.kill()
    live(world.urls, world.folder)
    live_from_files(tmp_path, tmp_path / "files")
    assert_same_streams(world.folder, tmp_path / "files")
    print(f"\n{dict(world.counts)}, {world.num_lives} lives: the bits of files")
    world.server.kill()
    world.wire.close()


def on_rank(rank: int, urls: tuple[str, str], folder: str) -> list[str]:
    """Stream on one of several ranks."""
    del rank
    return [window.name for window in live(urls, Path(folder)).windows]


@pytest.mark.slow
def test_the_first_of_several_ranks_reads_both_logs(server: RedisServer, tmp_path: Path, whole: Path) -> None:
    logs = Logs.of(server, "ranks", frame_of())
    logs.send()
    run_ranks(on_rank, 2, logs.urls(), str(tmp_path / "run"), timeout_s=240.0)
    for key in logs.keys:
        with server.client() as client:
            assert len(client.xinfo_consumers(key, "ziggurat")) == 1
    facts = ("window", "name", "rows", "late", "trained", "labelled")  # metrics differ in the order of sums
    runs = (tmp_path / "run", whole)
    found, expected = ([[each[fact] for fact in facts] for each in content_of(run)] for run in runs)
    assert found == expected


def test_the_command_line_has_it(
    server: RedisServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    logs = Logs.of(server, "verb", frame_of())
    logs.send()
    Path("my.toml").write_text(schema_to_toml(SCHEMA))
    rows, labels = logs.urls()
    command = ["stream", "table_dlrm", "--data.train", rows, "--labels", labels, "--label-key", "id"]
    command += ["--label-time", "known", "--delay", "correct", "--attribution-s", str(REACH), "--by", "day"]
    assert main([*command, "--schema", "my.toml", "--threads", "1", "--out", "run"]) == 0
    capsys.readouterr()
    log = Path("run/run.log").read_text()
    records = logs.labels.height
    for words in ("200 rows received", f"{records} labels received", f"{records} records of {labels} by id"):
        assert words in log, (words, log)
    assert "labels of 1 rows may still come" in log
    assert verify_run(Path("run")).good
