"""The keeper of shards with shards that only send messages: pauses, stopped shards, new starts, its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.serving.server.running import wait_until
from ziggurat.serving.server.config import ServerConfig
from ziggurat.serving.server.processes import child
from ziggurat.serving.server.processes.control import Control
from ziggurat.serving.server.shards import process
from ziggurat.serving.server.shards.process import ShardKeeper, ShardTask


def wait_for_end(control: Control) -> int:
    while control.receive() is not None:
        pass
    return 0


def is_ready_at_once(task: ShardTask, control: Control) -> int:
    control.send(ready=True)
    return wait_for_end(control)


def loads_forever(task: ShardTask, control: Control) -> int:
    return wait_for_end(control)


@pytest.fixture
def keeper() -> Iterator[ShardKeeper]:
    listeners = {shard: socket.socket() for shard in range(2)}
    keeper = ShardKeeper(listeners, num_shards=2, config=ServerConfig(hang_s=1.0))
    yield keeper
    keeper.end()


def pids(keeper: ShardKeeper) -> list[int]:
    return [each.pid for each in keeper._running]


def turned(keeper: ShardKeeper, folder: Path) -> bool:
    keeper.reconcile(folder)
    return True


def test_a_pause_of_the_keeper_kills_no_shard(
    keeper: ShardKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "run_shard", is_ready_at_once)
    wait_until(lambda: turned(keeper, tmp_path) and keeper.ready)
    before = pids(keeper)
    now = time.monotonic()
    monkeypatch.setattr(child.time, "monotonic", lambda: now + 100)  # as after Ctrl-Z and fg
    keeper.reconcile(tmp_path)
    monkeypatch.undo()
    assert "no sign of life" not in caplog.text
    keeper.reconcile(tmp_path)
    assert pids(keeper) == before


def test_a_shard_that_is_stopped_while_it_loads_is_replaced(
    keeper: ShardKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "run_shard", loads_forever)
    keeper.reconcile(tmp_path)
    stopped, loading = pids(keeper)
    os.kill(stopped, signal.SIGSTOP)
    wait_until(lambda: turned(keeper, tmp_path) and stopped not in pids(keeper))
    wait_until(lambda: turned(keeper, tmp_path) and len(pids(keeper)) == 2)
    assert loading in pids(keeper)


def test_a_shard_that_ends_is_started_again_at_the_same_address(
    keeper: ShardKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[int, list[Any]] = {0: [], 1: []}
    starts = keeper._running.fork

    def note(shard: Any, *arguments: Any, **settings: Any) -> None:
        seen[shard.number].append(shard.listener)
        starts(shard, *arguments, **settings)

    monkeypatch.setattr(keeper._running, "fork", note)
    monkeypatch.setattr(process, "run_shard", is_ready_at_once)
    wait_until(lambda: turned(keeper, tmp_path) and keeper.ready)
    killed, other = pids(keeper)
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: turned(keeper, tmp_path) and len(seen[0]) == 2 and keeper.ready)
    assert other in pids(keeper)
    assert killed not in pids(keeper)
    assert seen[0][0] is seen[0][1]
    assert keeper.failure is None


def test_what_is_published_while_a_shard_loads_is_loaded_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index takes minutes to load, and the folder that it lies in leads elsewhere by then."""
    export = tmp_path / "export"
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    export.symlink_to("first")
    loaded: list[Path] = []

    def load(versions: process.ShardVersions, folder: Path) -> str:
        loaded.append(folder.resolve())
        export.unlink()
        export.symlink_to("second")
        return folder.resolve().name

    async def serve(app: Any, task: ShardTask, config: ServerConfig, control: Control, **settings: Any) -> None:
        watching = asyncio.create_task(process._watch(app.versions, task.export, **settings))
        end = time.monotonic() + 10
        while len(loaded) < 2 and time.monotonic() < end:
            await asyncio.sleep(0.01)
        watching.cancel()

    monkeypatch.setattr(process.ShardVersions, "load", load)
    monkeypatch.setattr(process, "_serve", serve)
    monkeypatch.setattr(process, "WATCH_S", 0.0)
    task = ShardTask(
        shard=0, num_shards=1, export=export, copy=None, listener=socket.socket(), config=ServerConfig(), api_key=""
    )
    with contextlib.closing(task.listener):
        assert process.run_shard(task, SimpleNamespace(send=lambda **message: True)) == 0  # type: ignore[arg-type]
    assert [each.name for each in loaded[:2]] == ["first", "second"]
