"""The process of a shard, and the keeper that starts it, and starts it again when it ends or hangs (`child.py`).

    keeper (in the process that holds the ports) ──fork──► shard: load, "ready", search … until the keeper is gone
         └─ several times a second: has one ended? is one silent? ──► another one at the same address

The keeper owns the listening sockets, so a shard has the same address after every death, and connections that are not
accepted yet survive. A shard has versions of the export loaded side by side (`app.py`); with `watch` it follows the
folder or link by itself, as shards of other machines must.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from ziggurat.errors import ConfigError, ZigguratError
from ziggurat.plain import JSON
from ziggurat.serving.export.export_folder import identity_of
from ziggurat.serving.server.config import ServerConfig
from ziggurat.serving.server.connections import DrainingServer, uvicorn_config
from ziggurat.serving.server.processes.child import Backoff, Child, Children
from ziggurat.serving.server.processes.control import BrokenMessageError, Control, error_from_json, in_lines
from ziggurat.serving.server.processes.worker import WATCH_S, load_error, set_threads
from ziggurat.serving.server.shards.app import ShardApp, ShardVersions, load_shard
from ziggurat.typed import quoted

_log = logging.getLogger("ziggurat.server")
_MAX_BODY_BYTES = 1 << 30  # of a question or a change of items
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
    """Search for the keeper until it ends; return the exit status of the process."""
    set_threads(task.config)
    config = replace(task.config, max_body_bytes=_MAX_BODY_BYTES)
    load = functools.partial(load_shard, shard=task.shard, num_shards=task.num_shards)
    versions = ShardVersions(load)
    app = ShardApp(versions, shard=task.shard, num_shards=task.num_shards, config=config, api_key=task.api_key)
    # Before it is loaded: what is published meanwhile is another one.
    seen = identity_of(task.export)
    try:
        versions.load(task.export if task.copy is None else task.copy())
    except Exception as problem:
        control.send(failed=load_error(problem, export=task.export, beside=task.export.parent).to_json())
        return 1
    if control.send(ready=True):
        asyncio.run(_serve(app, task, config, control, seen=seen))
    return 0


async def _serve(app: ShardApp, task: ShardTask, config: ServerConfig, control: Control, *, seen: object) -> None:
    settings = uvicorn_config(
        app,
        config=config,
        metrics=app.metrics,
        has_key=bool(task.api_key),
    )
    server = DrainingServer(settings, limits=config, listener=task.listener)
    loop = asyncio.get_running_loop()

    def end() -> None:
        server.should_exit = True

    def read_messages() -> None:
        try:
            is_alone = control.receive() is None
        except BrokenMessageError:
            is_alone = True
        if is_alone:  # the keeper has ended
            loop.remove_reader(control.socket.fileno())
            end()

    loop.add_signal_handler(signal.SIGTERM, end)
    control.socket.setblocking(False)
    loop.add_reader(control.socket.fileno(), read_messages)
    beside = [loop.create_task(_send_heartbeats(control, config))]
    if config.watch:
        beside.append(loop.create_task(_watch(app.versions, task.export, seen=seen)))
    await server.serve()
    for each in beside:
        each.cancel()


async def _send_heartbeats(control: Control, config: ServerConfig) -> None:
    while True:
        control.send(alive=True)
        await asyncio.sleep(config.hang_s / 5)


async def _watch(versions: ShardVersions, export: Path, *, seen: object) -> None:
    """Load the version that the path leads to, whenever that changes.

    Args:
        versions: into which it is loaded.
        export: the path.
        seen: its identity before the first version was loaded.
    """
    while True:
        await asyncio.sleep(WATCH_S)
        if (now := identity_of(export)) is None or now == seen:
            continue
        seen = now  # a bad one is tried once
        try:
            await asyncio.to_thread(versions.load, export)
        # Whatever it is, the next version must be seen again.
        except (ZigguratError, OSError) as error:
            _log.error("%s is refused, the old version stays\n%s", quoted(str(export)), in_lines(error))


@dataclass(kw_only=True, eq=False)
class _Shard(Child):
    number: int
    listener: socket.socket
    ready: bool = False
    backoff: Backoff = field(default_factory=Backoff)

    @property
    def name(self) -> str:
        return f"shard {self.number}"


class ShardKeeper:
    """Processes of shards, started, and started again, by an owner that calls `reconcile` often.

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
        self._shards = [_Shard(number=shard, listener=listener) for shard, listener in listeners.items()]
        self._running: Children[_Shard] = Children(
            hang_s=config.hang_s,
            on_message=self._handle_message,
            on_exit=self._handle_exit,
        )

    @property
    def ready(self) -> bool:
        """True if all shards have loaded the export."""
        return all(shard.ready for shard in self._shards)

    def reconcile(
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
            in_child: closes what belongs to the caller, in a process that was started.
        """
        self._running.excuse_pause()
        for shard in self._shards:
            if shard in self._running:
                self._running.read_messages(shard)
            elif shard.backoff.is_over:
                self._start(shard, export, copy, in_child)
        for shard in self._running:
            if shard.ready:
                self._running.kill_if_silent(shard)
            else:  # a shard that loads is silent by nature; but one that is stopped is no help
                self._running.kill_if_stopped(shard)

    def close_inherited(self) -> None:
        """Close what belongs to the keeper, in a child of the keeper's process."""
        for shard in self._shards:
            shard.listener.close()
        self._running.close_inherited()  # else the end of the keeper would not be seen by its shards

    def end(self) -> None:
        """End all of them, now."""
        for shard in self._shards:
            shard.listener.close()
        self._running.end()

    def _start(
        self, shard: _Shard, export: Path, copy: Callable[[], Path] | None, in_child: Callable[[], None]
    ) -> None:
        task = ShardTask(
            shard=shard.number,
            num_shards=self.num_shards,
            export=export,
            copy=copy,
            listener=shard.listener,
            config=self.config,
            api_key=self._api_key,
        )

        def run(control: Control) -> int:
            in_child()
            for other in self._shards:
                if other is not shard:
                    other.listener.close()
            return run_shard(task, control)

        shard.ready = False
        self._running.fork(shard, run)

    def _handle_message(self, shard: _Shard, message: dict[str, JSON]) -> None:
        if "ready" in message:
            shard.ready = True
            shard.backoff.succeed()
        elif "failed" in message:
            self.failure = error_from_json(message["failed"])
            _log.error("shard %d could not load the export\n%s", shard.number, in_lines(self.failure))

    def _handle_exit(self, shard: _Shard, code: int) -> None:
        if not shard.ready:
            shard.backoff.fail()
            self.failure = self.failure or ConfigError(
                expected=f"shard {shard.number} of {self.num_shards}, which loads the export",
                found=f"a process that ended with status {code}",
                where="shards",
                ways_out=("see the messages above", "the machine may lack memory"),
            )
        _log.warning("shard %d ended (status %d); another one takes its place", shard.number, code)


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
    is_reported = False
    try:
        while not ended:
            keeper.reconcile(export)
            if keeper.ready and not is_reported:
                is_reported = True
                keeper.failure = None
                on_ready()
            if keeper.failure is not None and not is_reported:
                raise keeper.failure
            time.sleep(_TICK_S)
    finally:
        keeper.end()
        for name, handler in before.items():
            signal.signal(name, handler)
