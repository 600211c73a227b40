"""One process that answers: load the export, warm up, wait for the message to start, serve, drain.

    fork ─► load ─► warm up ─► "ready" ─► (a spare waits here) ─► "serve" ─► accept, answer ─► "drain" ─► end
                └► "failed": the export is damaged

The export is loaded after the fork: the thread pools of polars and OpenMP do not survive a fork, and a child that
inherits used ones hangs. The index is shared all the same, since it is mapped from its file. A spare follows changes of
items while it waits, and once more before it accepts anything, so it never answers from a state of long ago.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import gc
import logging
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ziggurat.config import from_json
from ziggurat.errors import ConfigError, FileError, RequestError, ZigguratError
from ziggurat.files.system_text import text_of
from ziggurat.plain import JSON, as_text
from ziggurat.serving.answers import Answerer, Info, RankRequest, RecommendRequest
from ziggurat.serving.server.app import ServerApp
from ziggurat.serving.server.changed_items.live import FOLLOW_S, LiveItems
from ziggurat.serving.server.config import ServerConfig
from ziggurat.serving.server.connections import DrainingServer, uvicorn_config
from ziggurat.serving.server.metrics import share_metrics
from ziggurat.serving.server.openapi import example_of, example_ranking, example_request
from ziggurat.serving.server.processes.control import BrokenMessageError, Control, error_from_json
from ziggurat.serving.server.processes.private_export import PrivateExport
from ziggurat.serving.server.queue.engine import Request
from ziggurat.serving.server.reading import RefusedRequestError, refused, refused_as
from ziggurat.serving.server.tracing import export_traces, flush_traces

_log = logging.getLogger("ziggurat.server")
WATCH_S = 0.5
Load = Callable[[Path], Answerer]


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The description that a worker gives of the export that it has loaded.

    Args:
        version: of the export.
        num_items: of its catalogue.
        labels: of its ranker.
        products: format of the weights of dense products, by part.
        routes: that it answers.
        user_columns: that a request may have.
        item_columns: that items of a request may have.
        filters: attributes that filters may name.
        path: the route that `example` is for.
        example: a request that it answers.
        published: number, window and watermark for people, of a version of a published folder; "" of other exports.
    """

    version: str
    num_items: int = 0
    labels: tuple[str, ...] = ()
    products: dict[str, str] = field(default_factory=dict)
    routes: tuple[str, ...] = ()
    user_columns: tuple[str, ...] = ()
    item_columns: tuple[str, ...] = ()
    filters: tuple[str, ...] = ()
    path: str = "/recommend"
    example: dict[str, object] = field(default_factory=dict)
    published: str = ""

    @staticmethod
    def of(info: Info) -> Loaded:
        """Return the facts of an export's description."""
        routes = {"/recommend": info.can_recommend, "/rank": info.can_rank, "/items": bool(info.item_id)}
        return Loaded(
            version=info.version,
            num_items=info.num_items,
            labels=info.labels,
            products=info.products,
            routes=tuple(route for route, is_there in routes.items() if is_there),
            user_columns=tuple(column.name for column in info.user_columns),
            item_columns=tuple(column.name for column in info.item_columns),
            filters=tuple(info.filters),
            path="/recommend" if info.can_recommend else "/rank",
            example=example_request(info) if info.can_recommend else example_ranking(info),
            published="" if info.published is None else info.published.text(),
        )

    def lacks(self, other: Loaded) -> list[str]:
        """Return what another export answers and this one does not: routes, scores, and names in requests."""
        lost = [route for route in other.routes if route not in self.routes]
        lost += [f"scores for {name!r:.80}" for name in other.labels if name not in self.labels]
        lost += [f"the user's {name!r:.80}" for name in other.user_columns if name not in self.user_columns]
        lost += [f"the item's {name!r:.80}" for name in other.item_columns if name not in self.item_columns]
        lost += [f"filters by {name!r:.80}" for name in other.filters if name not in self.filters]
        return lost

    @staticmethod
    def from_message(data: JSON) -> Loaded:
        """Parse the message of a worker; raises BrokenMessageError for one that no worker sends."""
        try:
            return from_json(Loaded, data, where="message of a worker")
        except ConfigError as error:
            raise BrokenMessageError(f"{data!r:.80}: {error.found}") from None


@dataclass(frozen=True, kw_only=True)
class WorkerTask:
    """The task of a worker.

    Args:
        load: makes the answerer of a folder.
        export: the folder, of which the server's own copy is loaded.
        listener: socket to accept from.
        admin: socket of the admin routes, likewise; None: there are none.
        config: of the server.
        api_key: "" for none.
        slot: number of this worker among the living ones.
        metrics: folder that all workers write figures to.
    """

    load: Load
    export: PrivateExport
    listener: socket.socket
    admin: socket.socket | None
    config: ServerConfig
    api_key: str
    slot: int
    metrics: Path


def set_threads(config: ServerConfig) -> None:
    """Let this thread compute with as many threads as the settings say."""
    # Without torch nothing of ours has threads to set, and to import it here would take seconds.
    if "torch" in sys.modules:  # torch keeps the number of threads for each thread that calls it
        sys.modules["torch"].set_num_threads(config.threads_of_worker)


def work(task: WorkerTask, *, control: Control) -> int:
    """Serve until the supervisor sends "drain" or ends; return the exit status of the process.

    Args:
        task: what to do.
        control: this worker's end of the pair.
    """
    prepare_thread = functools.partial(set_threads, task.config)
    # Also of this thread, in which the export is loaded and warmed up.
    prepare_thread()
    worker = _Worker(task, control)
    try:
        # Before the first counter is made: where it keeps its value is decided then.
        share_metrics(folder=task.metrics, slot=task.slot)
        answerer = task.load(task.export.make())
        worker.live = LiveItems.of(answerer, beside=task.export.source)
        if worker.live is not None:
            # Before "ready": a worker that joins must not answer with items that others have changed.
            worker.live.follow()
        if task.config.trace:
            export_traces()
        app = ServerApp(
            answerer=answerer,
            config=task.config,
            api_key=task.api_key,
            swap=worker.swap_by_admin,
            change=worker.live.change if worker.live else None,
            prepare_thread=prepare_thread,
        )
        # The first requests would else pay for kernels that are loaded and memory that is mapped on first use.
        app.engine.warm_up(examples(app.info))
    except Exception as problem:
        error = load_error(problem, export=task.export.source, beside=task.metrics)
        control.send(failed=task.export.of_source(error).to_json())
        return 1
    # What loading has left is taken away first, or it would be kept for ever.
    gc.collect()
    gc.freeze()  # the export's objects are never garbage: collections need not look at them
    if not control.send(ready=asdict(Loaded.of(app.info))):
        return 0
    if not wait_for_start(control, live=worker.live):
        return 0
    asyncio.run(worker.serve(app))
    if task.config.trace:
        flush_traces()
    return 0


def load_error(problem: Exception, *, export: Path, beside: Path) -> ZigguratError:
    """Return why an export could not be loaded, in four parts.

    Args:
        problem: what was raised.
        export: its folder.
        beside: folder of the server's own that may lack room, where the system names no file.
    """
    if isinstance(problem, ZigguratError):
        return problem
    if isinstance(problem, OSError):  # the system's refusal says nothing of the export, which may be sound
        return FileError(
            expected="files that can be opened and written while an export is loaded",
            found=text_of(problem),
            where=str(problem.filename or beside),
            ways_out=("free space there", "name another folder: TMPDIR=FOLDER ziggurat serve …"),
        )
    _log.error("an export could not be loaded", exc_info=problem)
    return RequestError(
        expected="an export that loads",
        found=f"{type(problem).__name__}: {problem!s:.200}",
        where=str(export),
        ways_out="export it again",
    )


def wait_for_start(control: Control, *, live: LiveItems | None, pause_s: float = FOLLOW_S) -> bool:
    """Wait until the supervisor says "serve", with the items as they are then; False where it says "drain" or is gone.

    Args:
        control: this worker's end of the pair.
        live: followed meanwhile; None where items cannot change.
        pause_s: seconds between two looks at the journal.
    """
    with selectors.DefaultSelector() as selector:
        selector.register(control.socket, selectors.EVENT_READ)
        while True:
            has_message = selector.select(None if live is None else pause_s)
            if live is not None and not has_message:
                live.keep_up()
                continue
            try:
                messages = control.receive()
            except BrokenMessageError:  # no supervisor sends such bytes
                return False
            if messages is None or any("drain" in message for message in messages):
                return False
            if any("serve" in message for message in messages):
                # The journal may have gone on while this worker waited.
                if live is not None:
                    live.keep_up()
                return True


def examples(info: Info) -> list[Request]:
    """Requests to warm up with, from the export's own examples."""
    found: list[Request] = []
    for example in info.examples:
        if "recommend" in example:
            found.append(RecommendRequest.from_json(example["recommend"]))
        if "rank" in example:
            found.append(RankRequest.from_json(example["rank"]))
    user = example_of(info.user_columns)
    # The user of the examples alone, if the export keeps no request.
    if info.can_recommend and not any(isinstance(each, RecommendRequest) for each in found):
        found.append(RecommendRequest(user=user))
    if info.can_rank:
        item = example_of(info.item_columns)
        # Three sizes, since the cost of ranking is a line over the number of items.
        found += [RankRequest(user=user, items=(item,) * size) for size in (1, 20, 100)]
    return found


class _Worker:
    """The serving part of a worker's life."""

    _server: _Server  # from `serve` on

    def __init__(self, task: WorkerTask, control: Control) -> None:
        self.task = task
        self.control = control
        self._pending_swaps: dict[int, asyncio.Future[str]] = {}
        self.live: LiveItems | None = None

    async def serve(self, app: ServerApp) -> None:
        task = self.task
        config = uvicorn_config(app, config=task.config, metrics=app.metrics, has_key=bool(task.api_key))
        server = self._server = _Server(config, limits=task.config, listener=task.listener, admin=task.admin)
        server.app = app
        server.control = self.control
        server.out_of_time = functools.partial(self._give_up_swaps, _ends_before_swap(task.config))
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(_log_accept_error)
        loop.add_signal_handler(signal.SIGTERM, self._drain)
        # It blocked while this worker waited to be started; in an event loop it must not.
        self.control.socket.setblocking(False)
        loop.add_reader(self.control.socket.fileno(), self._read_messages)
        alive = loop.create_task(self._send_heartbeats(app))
        following = loop.create_task(self._follow_items())
        await server.serve()
        alive.cancel()
        following.cancel()

    def _drain(self) -> None:
        self._server.app.draining = True
        self._server.should_exit = True

    def _read_messages(self) -> None:
        try:
            messages = self.control.receive()
        except BrokenMessageError:
            messages = None
        if messages is None:  # the supervisor has ended
            # Or the loop would be woken for ever by a socket whose other end is closed.
            asyncio.get_running_loop().remove_reader(self.control.socket.fileno())
            self._drain()
            self._give_up_swaps(_no_supervisor())
            return
        for message in messages:
            number = message.get("number")
            # Taken out, so that an answer which comes twice finds nobody.
            future = self._pending_swaps.pop(number, None) if isinstance(number, int) else None
            if "drain" in message:
                self._drain()
            elif "pointer" in message:
                self._server.app.pointer = as_text(message["pointer"])
            elif future is None or future.done():
                continue
            elif "swapped" in message:
                future.set_result(as_text(message["swapped"]))
            else:
                future.set_exception(error_from_json(message["refused"]))

    def _give_up_swaps(self, error: ZigguratError) -> None:
        """Answer those who wait for the end of a swap with an error."""
        for future in self._pending_swaps.values():
            if not future.done():
                future.set_exception(error)

    def _send(self, **message: JSON) -> bool:
        """Send a message to the supervisor; what its socket does not take now follows when it does."""
        is_accepted = self.control.send(**message)
        if is_accepted and self.control.has_unsent:
            # The socket is full: the rest is sent when the loop finds it writable.
            asyncio.get_running_loop().add_writer(self.control.socket.fileno(), self._flush)
        return is_accepted

    def _flush(self) -> None:
        if not self.control.flush() or not self.control.has_unsent:
            asyncio.get_running_loop().remove_writer(self.control.socket.fileno())

    async def _send_heartbeats(self, app: ServerApp) -> None:
        while True:
            # A computation that hangs must look dead, although this loop still runs.
            if app.engine.computing_s < self.task.config.hang_s and not self.control.has_unsent:
                self._send(alive=True)
            # Five times within the silence that is allowed, so that a late one is no death.
            await asyncio.sleep(self.task.config.hang_s / 5)

    async def _follow_items(self) -> None:
        while self.live is not None:
            # In a thread, because a change of many items takes longer than a request may wait.
            await asyncio.to_thread(self.live.keep_up)
            await asyncio.sleep(FOLLOW_S)

    async def swap_by_admin(self, folder: str, accept_loss: bool) -> str:
        """Ask the supervisor for another version; its version, or RefusedRequestError."""
        # Answers may come in another order than questions: each carries the number of its own.
        number = max(self._pending_swaps, default=0) + 1
        future = self._pending_swaps[number] = asyncio.get_running_loop().create_future()
        if not self._send(swap=folder, number=number, accept_loss=accept_loss):
            # No answer will come to a question that could not be sent.
            del self._pending_swaps[number]
            raise _no_supervisor()
        try:
            return await future
        except RefusedRequestError:
            raise
        except ZigguratError as error:
            raise refused_as(409, error) from None


def _log_accept_error(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    """Log in one line that no connection could be accepted; asyncio tries again in a second."""
    problem = context.get("exception")
    if isinstance(problem, OSError) and problem.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
        _log.error("a connection could not be accepted: %s (ulimit -n)", problem.strerror)
        return
    loop.default_exception_handler(context)


def _no_supervisor() -> RefusedRequestError:
    return refused(
        503,
        expected="a supervisor that hears this worker",
        found="none, or one that takes no message at present",
        where="swap",
        ways_out=("ask again", "start the server again with this export"),
    )


def _ends_before_swap(config: ServerConfig) -> RefusedRequestError:
    return refused(
        503,
        expected=f"a swap that is over within drain_s = {config.drain_s:g} s of the end of the worker that was asked",
        found="one that still loads: it goes on, and its end is in the server's log",
        where="swap",
        ways_out=("see the version that is served: GET /readyz", "a larger --server.drain-s"),
    )


class _Server(DrainingServer):
    """The worker's server, which reports to the supervisor when it accepts connections and when it stops."""

    app: ServerApp
    control: Control

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.control.send(serving=True)

    def closed_to_new(self) -> None:
        self.control.send(draining=True)
