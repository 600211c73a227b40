"""The process of a shard, and the keeper that starts it, and starts it again when it ends or hangs.

    keeper (in the process that holds the ports) ──fork──► shard: load, "ready", search … until the keeper is gone
         └─ a look several times a second: who ended? who shows no sign of life? ──► another one at the same address

The listening sockets are the keeper's, so a shard has the same address after every death, and connections that
nobody has accepted yet survive. A shard holds versions of the export side by side (`app.py`); with `watch` it
follows the folder or link by itself, as shards of other machines must.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ziggurat.errors import ConfigError, ZigguratError
from ziggurat.serving.export.export_folder import identity_of
from ziggurat.serving.server.config import ServerConfig
from ziggurat.serving.server.connections import DrainingServer, uvicorn_config
from ziggurat.serving.server.processes.control import BrokenMessageError, Control, error_from_json
from ziggurat.serving.server.processes.worker import WATCH_S, become, set_threads
from ziggurat.serving.server.shards.app import ShardApp, ShardVersions, load_shard

_log = logging.getLogger("ziggurat.server")
_MOST_BYTES = 1 << 30  # of a question or a change of items
_LEAST_PAUSE_S = 0.1
_MOST_PAUSE_S = 30.0
_TICK_S = 0.1


@dataclass(frozen=True, kw_only=True)
class ShardTask:
    """The task of the process of a shard.

    Args:
        shard: its number, from 0.
        num_shards: of the index.
        export: folder to begin with.
        copy: makes the server's own copy of it, and returns what is loaded; None: the folder itself is.
        listener: socket to accept from.
        config: of the server; `threads` are those of this shard.
        api_key: "" for none.
    """

    shard: int
    num_shards: int
    export: Path
    copy: Callable[[], Path] | None
    listener: socket.socket
    config: ServerConfig
    api_key: str


def run_shard(task: ShardTask, control: Control) -> int:
    """Be a shard until the keeper is gone; returns the status of the process."""
    set_threads(task.config)
    config = replace(task.config, max_body_bytes=_MOST_BYTES)
    load = functools.partial(load_shard, shard=task.shard, num_shards=task.num_shards)
    versions = ShardVersions(load)
    app = ShardApp(versions, shard=task.shard, num_shards=task.num_shards, config=config, api_key=task.api_key)
    try:
        versions.load(task.export if task.copy is None else task.copy())
    except ZigguratError as error:
        control.send(failed=error.to_json())
        return 1
    if control.send(ready=True):
        asyncio.run(_serve(app, task, config, control))
    return 0


async def _serve(app: ShardApp, task: ShardTask, config: ServerConfig, control: Control) -> None:
    settings = uvicorn_config(
        app,
        config=config,
        metrics=app.metrics,  # type: ignore[arg-type]  # it counts what is closed
        has_key=bool(task.api_key),
    )
    server = DrainingServer(settings, limits=config, listener=task.listener)
    loop = asyncio.get_running_loop()

    def end() -> None:
        server.should_exit = True

    def hear() -> None:
        try:
            is_alone = control.receive() is None
        except BrokenMessageError:
            is_alone = True
        if is_alone:  # no keeper any more
            loop.remove_reader(control.socket.fileno())
            end()

    loop.add_signal_handler(signal.SIGTERM, end)
    control.socket.setblocking(False)
    loop.add_reader(control.socket.fileno(), hear)
    beside = [loop.create_task(_show_life(control, config))]
    if config.watch:
        beside.append(loop.create_task(_watch(app.versions, task.export)))
    await server.serve()
    for each in beside:
        each.cancel()


async def _show_life(control: Control, config: ServerConfig) -> None:
    while True:
        control.send(alive=True)
        await asyncio.sleep(config.hang_s / 5)


async def _watch(versions: ShardVersions, export: Path) -> None:
    """Hold the version that the path leads to, whenever that changes."""
    seen = identity_of(export)
    while True:
        await asyncio.sleep(WATCH_S)
        if (now := identity_of(export)) is None or now == seen:
            continue
        seen = now  # a bad one is tried once
        try:
            await asyncio.to_thread(versions.load, export)
        except ZigguratError as error:
            _log.error("%s is refused, the old version stays\n%s", export, error)


@dataclass(kw_only=True, eq=False)
class _Kept:
    shard: int
    listener: socket.socket
    control: Control | None = None
    pid: int = 0
    seen: float = 0.0
    ready: bool = False
    not_before: float = 0.0
    pause_s: float = 0.0


class ShardKeeper:
    """Processes of shards, started and started again by whoever calls `tend` often.

    Args:
        listeners: bound socket of each shard that runs here, by its number.
        num_shards: of the index.
        config: of the server.
        api_key: "" for none.
    """

    def __init__(
        self, listeners: dict[int, socket.socket], *, num_shards: int, config: ServerConfig, api_key: str = ""
    ) -> None:
        self.num_shards = num_shards
        self.config = config
        self.failure: ZigguratError | None = None
        self._api_key = api_key
        self._kept = [_Kept(shard=shard, listener=listener) for shard, listener in listeners.items()]

    @property
    def ready(self) -> bool:
        """True if all shards have loaded the export."""
        return all(each.ready for each in self._kept)

    def tend(
        self,
        export: Path,
        *,
        copy: Callable[[], Path] | None = None,
        in_child: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the shards that do not run, and end those that hang.

        Args:
            export: folder that they begin with.
            copy: makes the server's own copy of it in the process that loads it; None: the folder itself is loaded.
            in_child: lets go of what belongs to the caller, in a process that was started.
        """
        now = time.monotonic()
        for each in self._kept:
            if each.control is None:
                if now >= each.not_before:
                    self._start(each, export, copy, in_child)
            else:
                self._hear(each, each.control, now)

    def _hear(self, each: _Kept, control: Control, now: float) -> None:
        try:
            messages = control.receive()
            if messages is None:
                self._bury(each, control)
            else:
                self._heed(each, messages, now)
        except BrokenMessageError as problem:
            _log.error("shard %d sends what is no message; it is killed: %s", each.shard, problem)
            with contextlib.suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGKILL)

    def let_go(self) -> None:
        """Close what belongs to the keeper, in a child of the keeper's process."""
        for each in self._kept:
            each.listener.close()
            if each.control is not None:
                each.control.close()  # else the end of the keeper would not be seen by its shards

    def end(self) -> None:
        """End all of them, now."""
        for each in self._kept:
            each.listener.close()
            if each.control is not None:
                each.control.close()
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each.pid, signal.SIGKILL)
                os.waitpid(each.pid, 0)
                each.control = None

    def _start(self, each: _Kept, export: Path, copy: Callable[[], Path] | None, in_child: Callable[[], None]) -> None:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                in_child()
                ours.close()
                for other in self._kept:
                    if other is not each:
                        other.listener.close()
                    if other.control is not None:
                        other.control.close()
                task = ShardTask(
                    shard=each.shard,
                    num_shards=self.num_shards,
                    export=export,
                    copy=copy,
                    listener=each.listener,
                    config=self.config,
                    api_key=self._api_key,
                )
                control = Control(end=theirs)
                become(lambda: run_shard(task, control))
            finally:
                os._exit(1)  # a child must never go on as a second keeper
        theirs.close()
        ours.setblocking(False)
        each.control = Control(end=ours)
        each.pid = pid
        each.seen = time.monotonic()
        each.ready = False

    def _heed(self, each: _Kept, messages: Sequence[dict[str, object]], now: float) -> None:
        for message in messages:
            each.seen = now
            if "ready" in message:
                each.ready = True
                each.pause_s = 0.0
            elif "failed" in message:
                self.failure = error_from_json(message["failed"])
                _log.error("shard %d could not load the export\n%s", each.shard, self.failure)
        if each.ready and now - each.seen > self.config.hang_s:
            _log.error("shard %d shows no sign of life; it is killed", each.shard)
            with contextlib.suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGKILL)
            each.seen = now

    def _bury(self, each: _Kept, control: Control) -> None:
        control.close()
        each.control = None
        _, status = os.waitpid(each.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if not each.ready:
            each.pause_s = min(_MOST_PAUSE_S, max(_LEAST_PAUSE_S, 2 * each.pause_s))
            self.failure = self.failure or ConfigError(
                expected=f"shard {each.shard} of {self.num_shards}, which loads the export",
                found=f"a process that ended with status {code}",
                where="shards",
                ways_out=("see the messages above", "the machine may lack memory"),
            )
        each.not_before = time.monotonic() + each.pause_s
        _log.warning("shard %d ended (status %d); another one takes its place", each.shard, code)


def keep_shard(keeper: ShardKeeper, export: Path, *, on_ready: Callable[[], None] = lambda: None) -> None:
    """Keep the shards of a keeper until SIGTERM or SIGINT.

    Args:
        keeper: of the shards.
        export: folder, or a link to one.
        on_ready: called once, when all of them have loaded it.

    Raises:
        ZigguratError: the export could not be loaded at the start.
    """
    ended: list[int] = []
    before = {
        name: signal.signal(name, lambda number, frame: ended.append(number))
        for name in (signal.SIGTERM, signal.SIGINT)
    }
    is_told = False
    try:
        while not ended:
            keeper.tend(export)
            if keeper.ready and not is_told:
                is_told = True
                keeper.failure = None
                on_ready()
            if keeper.failure is not None and not is_told:
                raise keeper.failure
            time.sleep(_TICK_S)
    finally:
        keeper.end()
        for name, handler in before.items():
            signal.signal(name, handler)
