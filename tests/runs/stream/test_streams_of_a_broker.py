"""A stream of Redis trains what the same rows from a file do, bit for bit, whatever dies, restarts, is cut or moves.

The everyday tests let one stream die inside of reading, taking, training, saving and acknowledging, and follow another
one; the long one kills processes and servers, cuts connections and moves folders, sixty times.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing as mp
import os
import random
import re
import shlex
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import ziggurat as zg
from tests.data.streams.brokers.redis_server import RedisServer, Wire, require_server, url_of
from tests.killing import mark_begin, wait_for_begin
from tests.runs.stream.test_killed_streams import Moments
from tests.runs.stream.test_stream_runs import SCHEMA, config_of, content_of, events, same, weights_of
from ziggurat.cli.main import main
from ziggurat.data.encoded.ledger import expected_sum, read_ledger
from ziggurat.data.raw.bad_rows import BadRowPolicy
from ziggurat.data.streams.arrivals import Arrivals
from ziggurat.data.streams.brokers import broker_of, redis_streams
from ziggurat.data.streams.windows import StreamConfig
from ziggurat.errors import ConfigError, DataError, MissingDependencyError, SchemaError, UnavailableError
from ziggurat.features.schema_io import schema_to_toml
from ziggurat.recipes.run_config import RunConfig, load_config
from ziggurat.runs.execute import train_run
from ziggurat.runs.stream.run import StreamResult, stream_run
from ziggurat.runs.stream.source import FollowConfig
from ziggurat.runs.verify import verify_run
from ziggurat.testing.ranks import preload, run_ranks
from ziggurat.training.records.windows import read_windows
from ziggurat.training.report.progress import NoProgress

_context = mp.get_context("forkserver")
STREAM = StreamConfig(by="day", growing=60)
DEAD_S = 1.0
MAX_LIFE_S = 120.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis"), program=require_server()) as made:
        yield made


def config_from(url: str, **data: Any) -> RunConfig:
    config = config_of(Path("unused.csv"))
    return dataclasses.replace(config, data=dataclasses.replace(config.data, train=(url,), **data))


def interleaved(num_rows: int, *, days: int, seed: int = 0, first_day: int = 0) -> pl.DataFrame:
    """Rows day by day, and in no order within a day, as several producers send them."""
    frame = events(num_rows, days=days, seed=seed, first_day=first_day).sample(fraction=1.0, shuffle=True, seed=seed)
    return frame.with_columns(day=pl.col("at") // 86_400).sort("day", maintain_order=True).drop("day")


def send(server: RedisServer, key: str, frame: pl.DataFrame) -> None:
    with server.client() as client:
        pipeline = client.pipeline(transaction=False)
        for row in frame.iter_rows(named=True):
            pipeline.xadd(key, {name: value for name, value in row.items() if value is not None})
        pipeline.execute()


def file_of(server: RedisServer, key: str, path: Path) -> Path:
    """All entries of a stream as a CSV file, in their order."""
    with server.client() as client:
        rows = [{k.decode(): v.decode() for k, v in fields.items()} for _, fields in client.xrange(key)]
    pl.DataFrame(rows).write_csv(path)
    return path


def num_pending(server: RedisServer, key: str) -> int:
    with server.client() as client:
        return client.xpending(key, "ziggurat")["pending"]


def assert_same_as_from_a_file(server: RedisServer, key: str, folder: Path, *, num_rows: int) -> None:
    whole = folder.parent / f"whole-{key}"
    stream_run(config_of(file_of(server, key, folder.parent / f"{key}.csv")), folder=whole, stream=STREAM)
    assert content_of(folder) == content_of(whole)
    assert same(weights_of(folder), weights_of(whole))
    assert (folder / "ledger.bin").read_bytes() == (whole / "ledger.bin").read_bytes()
    ledger = read_ledger(folder / "ledger.bin")
    assert int(ledger["sum"].sum(dtype=np.uint64)) == expected_sum(np.arange(num_rows))
    assert verify_run(folder).good


def test_a_stream_that_dies_again_and_again_ends_with_the_bits_of_a_file(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "dies"
    send(server, key, interleaved(400, days=5))
    config = config_from(server.url(key, takeover_s=DEAD_S))
    rng = random.Random(5)
    calls = (*Moments.CALLS, (Arrivals, "receive"))
    calls += ((redis_streams._RedisSubscription, "read"), (redis_streams._RedisSubscription, "acknowledge"))
    monkeypatch.setattr(Moments, "CALLS", calls)
    monkeypatch.setattr("ziggurat.data.streams.receiving._FULL_ROWS", 50)
    monkeypatch.setattr("ziggurat.data.streams.receiving._MOST", 30)
    with monkeypatch.context() as patch:
        moments = Moments(patch)
        lives = moments.die_until_done(
            lambda: stream_run(config, folder=tmp_path / "run", stream=STREAM), rng=rng, least=1, most=30
        )
    assert lives > 6
    assert {"_RedisSubscription.read", "Arrivals.receive"} & moments.died_in, moments.died_in
    assert num_pending(server, key) == 0
    assert_same_as_from_a_file(server, key, tmp_path / "run", num_rows=400)


class Lines(NoProgress):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def follow(
    config: RunConfig, folder: Path, *, until: Callable[[], bool], lines: Lines | None = None, idle_close_s: float = 0.0
) -> StreamResult:
    """Follow a stream, and end it by SIGTERM once a condition holds."""
    failed: list[bool] = []

    def end() -> None:
        deadline = time.monotonic() + MAX_LIFE_S
        while not until():
            if time.monotonic() > deadline:
                failed.append(True)
                break
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    ender = threading.Thread(target=end)
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # of a run that ended by itself
    ender.start()
    try:
        waits = FollowConfig(poll_s=0.02, idle_close_s=idle_close_s)
        return stream_run(config, folder=folder, stream=STREAM, follow=waits, progress=lines)
    finally:
        ender.join()
        signal.signal(signal.SIGTERM, before)
        assert not failed


def num_windows(folder: Path) -> int:
    path = folder / "windows.jsonl"
    return len(read_windows(path)) if path.exists() else 0


def test_a_stream_that_is_followed_acknowledges_behind_checkpoints_and_goes_on_after_a_signal(
    server: RedisServer, tmp_path: Path
) -> None:
    key = "followed"
    frame = interleaved(300, days=4, seed=1)
    cut = [int(each) for each in np.searchsorted((frame["at"] // 86_400).to_numpy() - 11_078, [1, 2, 3])]
    config = config_from(server.url(key, takeover_s=DEAD_S))
    folder = tmp_path / "run"
    send(server, key, frame[: cut[1] + 1])
    lines = Lines()
    # Two days are done; the first row of the third is open, and with it what was taken together with it.
    result = follow(config, folder, until=lambda: num_windows(folder) == 2, lines=lines)
    assert result.ended_early
    assert any(f"{cut[1] + 1} rows received" in line for line in lines.said), lines.said
    assert num_pending(server, key) == cut[1] + 1, "all of it was taken together with a row that is not trained"
    send(server, key, frame[cut[1] + 1 :])
    follow(config, folder, until=lambda: num_windows(folder) == 3)
    stream_run(config, folder=folder, stream=STREAM)
    assert num_pending(server, key) == 0
    assert_same_as_from_a_file(server, key, folder, num_rows=300)


def test_quiet_hours_close_a_window_and_later_rows_of_it_are_late(server: RedisServer, tmp_path: Path) -> None:
    key = "quiet"
    frame = interleaved(200, days=2, seed=2)
    send(server, key, frame[:150])
    config = config_from(server.url(key))
    folder = tmp_path / "run"
    follow(config, folder, until=lambda: num_windows(folder) == 2 and not num_pending(server, key), idle_close_s=0.3)
    send(server, key, frame[150:])
    result = stream_run(config, folder=folder, stream=STREAM)
    assert [(window.name, window.late) for window in result.windows][2:] == [("late rows", 50)]
    ledger = read_ledger(folder / "ledger.bin")
    assert int(ledger["sum"].sum(dtype=np.uint64)) == expected_sum(np.arange(200))


def test_bad_entries_are_named_or_put_aside_and_counted(server: RedisServer, tmp_path: Path) -> None:
    key = "bad"
    send(server, key, interleaved(60, days=1, seed=3))
    with server.client() as client:
        wrong = client.xadd(key, {"user": b"\xff", "item": 1, "age": 1, "click": 1, "at": 957139300}).decode()
        other = client.xadd(key, {"usr": "u1"}).decode()
        timeless = client.xadd(key, {"user": "u1", "item": 1, "click": 1}).decode()
    url = server.url(key)
    aside = config_from(f"{url}?group=aside", bad_rows=BadRowPolicy.QUARANTINE)
    result = stream_run(aside, folder=tmp_path / "aside", stream=STREAM)
    assert [window.rows for window in result.windows] == [60]
    kept = (tmp_path / "aside/stream").glob("*/quarantine/*.jsonl")
    assert [json.loads(line)["row"] for path in kept for line in path.read_text().splitlines()] == [60, 61, 62]
    for entry, expected in ((wrong, "UTF-8"), (other, "columns of the schema"), (timeless, "time")):
        with pytest.raises(DataError) as refused:
            stream_run(config_from(url), folder=tmp_path / "run", stream=STREAM)
        assert f"entry {entry}" in refused.value.where
        assert expected in refused.value.expected
        with server.client() as client:
            client.xdel(key, entry)
    result = stream_run(config_from(url), folder=tmp_path / "run", stream=STREAM)
    assert [window.rows for window in result.windows] == [60]


def test_files_in_the_place_of_a_broker_are_refused_and_the_reverse(server: RedisServer, tmp_path: Path) -> None:
    frame = interleaved(60, days=1, seed=3)
    frame.write_parquet(tmp_path / "a.parquet")
    send(server, "source", frame)
    url = server.url("source")
    for folder, first, second in (
        ("run", config_from(url), config_of(tmp_path / "a.parquet")),
        ("files", config_of(tmp_path / "a.parquet"), config_from(f"{url}?group=other")),
    ):
        stream_run(first, folder=tmp_path / folder, stream=STREAM)
        with pytest.raises(ConfigError, match="as before: files are known by content"):
            stream_run(second, folder=tmp_path / folder, stream=STREAM)
        result = stream_run(first, folder=tmp_path / folder, stream=STREAM)
        assert [window.rows for window in result.windows] == [60]


def test_an_entry_whose_time_is_of_another_type_or_unit_is_a_bad_row(server: RedisServer, tmp_path: Path) -> None:
    """Each entry has a writer of its own: what helps with files, to convert them, helps nobody here."""
    key = "types"
    send(server, key, interleaved(60, days=1, seed=3))
    url = server.url(key)
    config = config_from(url)
    aside = config_from(f"{url}?group=aside", bad_rows=BadRowPolicy.QUARANTINE)
    stream_run(config, folder=tmp_path / "run", stream=STREAM)
    wrong: list[str] = []
    for at in ("2000-05-02 10:00:00", "957261600000"):
        with server.client() as client:
            entry = client.xadd(key, {"user": "u1", "item": 1, "age": 1, "click": 1, "at": at}).decode()
        wrong.append(entry)
        with pytest.raises(DataError) as refused:
            stream_run(config, folder=tmp_path / "run", stream=STREAM)
        assert refused.value.where.endswith(f"entry {entry}, column 'at'")
        assert "quarantine" in str(refused.value.ways_out)
        assert f"XDEL {key} {entry}" in str(refused.value.ways_out)
        assert "file" not in str(refused.value.ways_out)
        result = stream_run(aside, folder=tmp_path / "aside", stream=STREAM)
        assert sum(window.rows for window in result.windows) == 60
        with server.client() as client:
            client.xdel(key, entry)
        stream_run(config, folder=tmp_path / "run", stream=STREAM)
    kept = (tmp_path / "aside/stream").glob("*/quarantine/*.jsonl")
    lines = [json.loads(line) for path in kept for line in path.read_text().splitlines()]
    assert sorted(line["message"] for line in lines) == wrong
    assert {line["reason"] for line in lines} == {"unparsable", "other_unit"}


def test_an_entry_whose_time_is_a_list_or_a_truth_is_a_bad_row(server: RedisServer, tmp_path: Path) -> None:
    key = "time-types"
    send(server, key, interleaved(60, days=1, seed=3))
    with server.client() as client:
        for at in ("[957139300]", "true"):
            client.xadd(key, {"json": f'{{"user": "u1", "item": 1, "age": 1, "click": 1, "at": {at}}}'})
    config = config_from(server.url(key), bad_rows=BadRowPolicy.QUARANTINE)
    result = stream_run(config, folder=tmp_path / "run", stream=STREAM)
    assert [window.rows for window in result.windows] == [60]
    kept = (tmp_path / "run/stream").glob("*/quarantine/*.jsonl")
    assert [json.loads(line)["row"] for path in kept for line in path.read_text().splitlines()] == [60, 61]


def test_a_stream_that_goes_on_refuses_the_messages_of_another_key(server: RedisServer, tmp_path: Path) -> None:
    for key in ("first", "second"):
        send(server, key, interleaved(60, days=1, seed=3))
    first = server.url("first")
    stream_run(config_from(first), folder=tmp_path / "run", stream=STREAM)
    for other in (server.url("second"), f"{first}?db=1"):
        with pytest.raises(ConfigError, match="the messages of first, as before") as refused:
            stream_run(config_from(other), folder=tmp_path / "run", stream=STREAM)
        assert refused.value.ways_out[0] == f"--data.train {first}"
        assert "XGROUP" not in str(refused.value)
    # Options of reading are no other messages.
    stream_run(config_from(f"{first}?takeover-s=60"), folder=tmp_path / "run", stream=STREAM)


def test_the_batch_of_a_recipe_fits_the_windows_of_a_broker(
    server: RedisServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    send(server, "sizes", interleaved(600, days=2, seed=3))
    Path("my.toml").write_text(schema_to_toml(SCHEMA))
    command = ["stream", "table_dlrm", "--data.train", server.url("sizes"), "--schema", "my.toml", "--threads", "1"]
    assert main([*command, "--out", "run"]) == 0
    said = capsys.readouterr().err
    assert "batch    16 rows instead of 2,048" in said
    assert "less than one batch" not in said
    assert load_config(Path("run")).training.loader.batch_size == 16
    assert main([*command, "--out", "run"]) == 0
    assert "changed" not in capsys.readouterr().err
    # A size that somebody has named stays, with the warning.
    other = [*command, "--out", "named", "--data.train", f"{server.url('sizes')}?group=b"]
    assert main([*other, "--batch-size", "2048"]) == 0
    assert "less than one batch of 2,048" in capsys.readouterr().err


def test_a_column_that_no_message_has_is_refused_before_anything_is_fitted(server: RedisServer, tmp_path: Path) -> None:
    key = "misspelt"
    send(server, key, interleaved(60, days=1, seed=3).rename({"item": "itme"}))
    lines = Lines()
    with pytest.raises(SchemaError, match="a field 'item'") as refused:
        stream_run(config_from(server.url(key)), folder=tmp_path / "run", stream=STREAM, progress=lines)
    assert 'column = "itme" in the schema' in refused.value.ways_out
    assert any("left out: itme" in line for line in lines.said), lines.said


def test_a_broker_that_is_not_there_is_refused_by_a_stream_that_begins(tmp_path: Path) -> None:
    pytest.importorskip("redis")
    with pytest.raises(UnavailableError, match="a broker that answers"):
        stream_run(config_from("redis://127.0.0.1:1/clicks"), folder=tmp_path / "run", stream=STREAM)


def live(url: str, folder: str, follows: bool) -> None:
    """Stream on from wherever the folder stands."""
    mark_begin(Path(folder).parent)
    waits = FollowConfig(poll_s=0.02) if follows else None
    stream_run(config_from(url), folder=folder, stream=STREAM, follow=waits)


class Faults:
    """A server, a wire to it and a process that follows a stream, all of which fail."""

    KINDS = ("kill", "kill", "cut", "cut inside", "restart the broker", "kill both", "move")

    def __init__(self, base: Path, *, key: str, seed: int) -> None:
        self.base = base
        self.server = RedisServer(base / "redis")
        self.wire = Wire(self.server.port)
        self.key = key
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.num_lives = 0
        self.folder = base / "run-0"
        self.process: Any = None

    @property
    def url(self) -> str:
        return url_of(self.wire.port, self.key, takeover_s=DEAD_S)

    def start(self) -> None:
        if self.process is not None and self.process.is_alive():
            return
        assert self.process is None or self.process.exitcode == -signal.SIGKILL, self.process.exitcode
        self.process = self._made()
        self.process.start()
        self.num_lives += 1
        wait_for_begin(self.process, self.base)

    def _made(self) -> Any:
        return _context.Process(target=live, args=(self.url, str(self.folder), True))

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(MAX_LIFE_S)

    def do(self, kind: str) -> None:
        self.counts[kind] += 1
        if kind.startswith("kill") or kind == "move":
            self.kill()
        if kind == "cut":
            self.wire.cut()
        elif kind == "cut inside":
            self.wire.cut_after(self.rng.randint(1, 5000))
        elif kind in ("restart the broker", "kill both"):
            self.server.kill()
            time.sleep(self.rng.uniform(0.0, 0.3))
            self.server.start()
        elif kind == "move" and self.folder.exists():
            moved = self.base / f"run-{self.counts[kind]}"
            self.folder.rename(moved)
            self.folder = moved


def check_faults(base: Path, *, faults: int, num_rows: int, days: int, seed: int, longest_s: float) -> Counter[str]:
    """Send rows bit by bit, let something fail after each, and compare the end with a file of the same rows."""
    preload()
    world = Faults(base, key="clicks", seed=seed)
    frame = interleaved(num_rows, days=days, seed=seed)
    edges = np.linspace(0, num_rows, faults + 2).astype(int).tolist()
    send(world.server, world.key, frame[: edges[1]])
    for begin, end in itertools.pairwise(edges[1:]):
        world.start()
        time.sleep(world.rng.uniform(0.0, longest_s))
        send(world.server, world.key, frame[begin:end])
        time.sleep(world.rng.uniform(0.0, longest_s / 4))
        world.start()
        world.do(world.rng.choice(world.KINDS))
    world.wire._left = None
    if world.process.is_alive():
        world.kill()
    live(world.url, str(world.folder), False)
    assert num_pending(world.server, world.key) == 0
    assert_same_as_from_a_file(world.server, world.key, world.folder, num_rows=num_rows)
    world.server.kill()
    world.wire.close()
    return world.counts


@pytest.mark.slow
def test_sixty_faults_change_no_bit(tmp_path: Path) -> None:
    counts = check_faults(tmp_path, faults=60, num_rows=3000, days=12, seed=1, longest_s=4.0)
    assert len(counts) == 6, counts
    print(f"\n{dict(counts)}: all rows once, and the bits of a file")


def on_rank(rank: int, url: str, folder: str) -> list[str]:
    """Stream on one of several ranks, and say who reads."""
    result = stream_run(config_from(url), folder=folder, stream=STREAM)
    return [window.name for window in result.windows]


@pytest.mark.slow
def test_the_first_of_several_ranks_reads(server: RedisServer, tmp_path: Path) -> None:
    key = "ranks"
    send(server, key, interleaved(300, days=3, seed=4))
    run_ranks(on_rank, 2, server.url(key), str(tmp_path / "run"), timeout_s=240.0)
    ledger = read_ledger(tmp_path / "run/ledger.bin")
    assert int(ledger["sum"].sum(dtype=np.uint64)) == expected_sum(np.arange(300))
    assert num_pending(server, key) == 0
    with server.client() as client:
        assert len(client.xinfo_consumers(key, "ziggurat")) == 1
    whole = tmp_path / "whole"
    stream_run(config_of(file_of(server, key, tmp_path / "rows.csv")), folder=whole, stream=STREAM)
    facts = ("window", "name", "rows", "late", "row_sum")  # metrics differ in the order of sums
    runs = (tmp_path / "run", whole)
    found, expected = ([[each[fact] for fact in facts] for each in content_of(run)] for run in runs)
    assert found == expected


def test_producers_of_the_guide_send_rows_that_are_received(server: RedisServer, tmp_path: Path) -> None:
    """The lines of Python in the guide, with the port of this server."""
    guide = (Path(__file__).parents[3] / "docs/guides/learning-that-goes-on.md").read_text()
    section = guide.partition("### A broker: Redis Streams")[2].partition("\n### ")[0]
    blocks = re.findall(r"```py\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block.replace("redis.Redis()", f"redis.Redis(port={server.port})"), names)  # of our own guide
    with server.client() as client:
        command = re.search(r"redis-cli (XADD .*)", section)
        assert command is not None
        client.execute_command(*shlex.split(command[1]))
        assert client.xlen("clicks") == 4
    features = (zg.Categorical(name="user"), zg.Categorical(name="item"))
    schema = zg.Schema(features=features, labels=(zg.Label(name="click"),), time="at")
    config = dataclasses.replace(config_from(server.url("clicks")), table_schema=schema)
    result = stream_run(config, folder=tmp_path / "run", stream=StreamConfig(by="day"))
    assert [window.rows for window in result.windows] == [5]


def test_other_verbs_say_that_streams_alone_read_from_a_broker(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="URLs of stores") as refused:
        train_run(config_from("redis://localhost/clicks"), folder=tmp_path / "run")
    assert "the verb `stream` alone" in refused.value.found


def test_the_client_is_named_where_it_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(MissingDependencyError, match="the package redis") as refused:
        broker_of(["redis://localhost/clicks"])
    assert 'pip install "ziggurat-rec[redis]"' in refused.value.ways_out
