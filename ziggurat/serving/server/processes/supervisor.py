"""The process that holds the port: it starts workers, replaces dead ones, swaps versions, and ends them all in order.

It computes nothing and answers nothing, so that nothing can crash it, and has one thread, so that it may fork.

    start    first worker loads ──ready──► serve       others and spares follow, one loading at a time
    death    the control socket closes ──► a spare serves (milliseconds); a new spare is started
    hang     no sign of life for `hang_s` ──► kill -9, then as above
    swap     workers of the new version load beside the old ones; when all are ready: new ones serve, old ones drain.
             If one cannot load, the new ones end, the swap is refused, and the old version stays
    SIGHUP   swap to whatever the path of the command leads to now; --watch does so when that changes
    SIGTERM  all drain, then end; who comes meanwhile is told 503 at once (`stand_in.py`)
    pause    Ctrl-Z or a frozen cgroup stops workers and supervisor alike: time in which this process did not run
             counts for nobody as silence

The listening socket is this process's and is inherited: connections that nobody has accepted yet survive every death,
swap and restart of workers. An answer comes from one worker, and a worker has one version: no answer mixes two. Workers
of a generation load one private copy of the export (`private_export.py`) and prove it: the first says which version it
has loaded, and one that has loaded another version does not serve.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ziggurat.errors import ConfigError, ZigguratError
from ziggurat.serving.export.export_folder import identity_of
from ziggurat.serving.server.config import ServerConfig
from ziggurat.serving.server.metrics import forget_metrics
from ziggurat.serving.server.processes.control import (
    BrokenMessageError,
    Control,
    error_from_json,
    in_lines,
)
from ziggurat.serving.server.processes.own_folder import OwnFolder
from ziggurat.serving.server.processes.private_export import PrivateExport, PrivateExports
from ziggurat.serving.server.processes.stand_in import StandIn
from ziggurat.serving.server.processes.worker import WATCH_S, Load, Loaded, WorkerTask, work
from ziggurat.typed import quoted

if TYPE_CHECKING:
    from ziggurat.serving.server.shards.process import ShardKeeper

_log = logging.getLogger("ziggurat.server")
_TICK_S = 0.2  # between two turns, where nothing is heard
_LEAST_PAUSE_S = 0.1  # before a worker is started in the place of one that could not load
_MOST_PAUSE_S = 30.0
_STOPPED_S = 2.0  # between two turns: this process was stopped, and its workers most likely, too
_UNSERVED_S = 1.0  # without a worker that serves; for less, clients wait for the next one
_TO_CLOSE_S = 1.0  # for workers to take no more connections, when the server ends


class State(StrEnum):
    """The stage of a worker in its life cycle."""

    LOADING = "loading"
    READY = "ready"
    SERVING = "serving"
    DRAINING = "draining"


@dataclass(kw_only=True, eq=False)
class _Child:
    pid: int
    slot: int
    control: Control
    generation: int
    state: State = State.LOADING
    seen: float = 0.0
    loaded: Loaded | None = None
    served: bool = False  # it took connections
    closed: bool = False  # it takes no more connections
    stopped_since: float = 0.0


@dataclass(kw_only=True)
class _Swap:
    """A swap that is under way, and who is told of its end (worker and number; none for a signal)."""

    export: Path
    folder: Path
    generation: int
    asked_by: _Child | None
    number: int
    promoted: bool = False
    accept_loss: bool = False


class Supervisor:
    """Workers of one export behind one socket.

    Args:
        load: makes the answerer of a folder; called in the workers.
        export: the folder.
        listener: bound socket.
        own: folder for what its processes share.
        config: of the server.
        admin: bound socket of the admin routes; None: there are none.
        api_key: "" for none.
        on_ready: called once, when the first worker serves, with what it has loaded.

    Attributes:
        keeper: of shards of the index, which are to run as long as the workers do; None: there are none.
    """

    keeper: ShardKeeper | None = None

    def __init__(
        self,
        *,
        load: Load,
        export: Path,
        listener: socket.socket,
        own: OwnFolder,
        config: ServerConfig,
        admin: socket.socket | None = None,
        api_key: str = "",
        on_ready: Callable[[Loaded], None] = lambda loaded: None,
    ) -> None:
        self.load = load
        self.export = export
        self.listener = listener
        self.config = config
        self.admin = admin
        self.own = own
        self._api_key = api_key
        self._on_ready = on_ready
        self._children: list[_Child] = []
        self._folder = export.resolve()  # a link may lead elsewhere later: workers of a version load the same folder
        self._command = export  # what SIGHUP and --watch follow, whatever /admin/swap has loaded meanwhile
        self._generation = self._newest = 0
        self._private = PrivateExports()
        self._versions: dict[int, str] = {}  # of each generation, as its first worker has loaded it
        self._swap: _Swap | None = None
        self._wants_reload = False
        self._started = self._ending = False
        self._served: Loaded | None = None  # what is served now
        self._failure: ZigguratError | None = None
        self._pause_s = 0.0
        self._not_before = 0.0
        self._closed_by = self._end_by = 0.0
        self._seen_export: object = None
        self._signals: list[int] = []
        self._selector = selectors.DefaultSelector()
        self._stand_in = StandIn(listener=listener, selector=self._selector)
        self._served_at = self._turn_at = time.monotonic()
        self._metrics = own.path / "metrics"
        self._metrics.mkdir()

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT.

        Raises:
            ZigguratError: the export could not be loaded at the start.
        """
        waker = self._catch_signals()
        self._seen_export = identity_of(self._command)
        watched = self._turn_at = time.monotonic()
        try:
            while not (self._ending and not self._children):
                self._tend_shards()
                self._tend()
                self._stand_in.turn(on=self._needs_stand_in())
                for key, _ in self._selector.select(_TICK_S):
                    if key.data is None:
                        waker.recv(4096)
                    elif isinstance(key.data, StandIn):
                        key.data.hear(key.fileobj)
                    elif key.data in self._children:  # one that ended in this turn has no socket any more
                        self._hear(key.data)
                self._heed_signals()
                self._reload_if_wanted()
                for child in self._children:
                    child.control.flush()
                self._forgive_a_pause()
                self._end_the_hung()
                if self.config.watch and time.monotonic() - watched > WATCH_S:
                    watched = time.monotonic()
                    self._look_at_export()
            self._stand_in.end()
        finally:
            for child in self._children:
                _kill(child, signal.SIGKILL)
            self._private.delete()
            if self.keeper is not None:
                self.keeper.end()
        if self._failure is not None:
            raise self._failure

    # ---- children

    def _needs_stand_in(self) -> bool:
        """Return whether connections come that no worker will take soon."""
        now = time.monotonic()
        if self._ending:
            is_closed = all(child.closed for child in self._children if child.served)
            return self._started and (is_closed or now > self._closed_by)
        if not self._started or any(child.state is State.SERVING for child in self._children):
            self._served_at = now
        return now - self._served_at > _UNSERVED_S

    def _forgive_a_pause(self) -> None:
        """Count no time as silence of a worker in which this process itself did not run."""
        now = time.monotonic()
        paused_s = now - self._turn_at
        self._turn_at = now
        if paused_s > min(_STOPPED_S, self.config.hang_s / 2):
            _log.warning("the server was stopped for %.1f s, and goes on", paused_s)
            self._end_by += paused_s
            for child in self._children:
                child.seen += paused_s
                child.stopped_since += paused_s if child.stopped_since else 0.0

    def _fork(self, export: Path, generation: int) -> None:
        private = self._private.of(export, generation=generation)
        ours, theirs = socket.socketpair()
        slot = next(number for number in range(10_000) if all(child.slot != number for child in self._children))
        forget_metrics(folder=self._metrics, slot=slot)
        pid = os.fork()
        if pid == 0:
            try:
                self._become_worker(private, slot, ours, theirs)
            finally:
                os._exit(1)  # a child must never go on as a second supervisor
        theirs.close()
        ours.setblocking(False)
        child = _Child(pid=pid, slot=slot, control=Control(end=ours), generation=generation, seen=time.monotonic())
        self._children.append(child)
        self._selector.register(ours, selectors.EVENT_READ, child)

    def _become_worker(self, export: PrivateExport, slot: int, ours: socket.socket, theirs: socket.socket) -> None:
        """Release in the child what belongs to the supervisor, and start work."""
        ours.close()
        self._let_go()
        if self.keeper is not None:
            self.keeper.let_go()
        task = WorkerTask(
            load=self.load,
            export=export,
            listener=self.listener,
            admin=self.admin,
            leave=self._leave_orphaned,
            config=self.config,
            api_key=self._api_key,
            slot=slot,
            metrics=self._metrics,
        )
        work(task, control=Control(end=theirs))

    def _let_go(self) -> None:
        """Close in a child what belongs to the supervisor."""
        # The descriptor is the supervisor's: a signal to this child would wake it.
        signal.set_wakeup_fd(-1)
        for child in self._children:
            child.control.close()  # else the end of this supervisor would not be seen by its workers
        self._stand_in.close_inherited()
        self._selector.close()

    def _leave_orphaned(self) -> None:
        """Delete what a dead supervisor left, in a child that ends, if no other child is there."""
        self.own.leave_orphaned()
        self._private.leave_orphaned()

    def _tend_shards(self) -> None:
        if self.keeper is None:
            return
        private = self._private.of(self._folder, generation=self._generation)
        self.keeper.tend(self._folder, copy=private.make, in_child=self._let_go)
        if self.keeper.failure is not None and not self._started and not self._ending:
            self._failure = self.keeper.failure
            self._end()

    def _of(self, generation: int, *states: State) -> list[_Child]:
        return [child for child in self._children if child.generation == generation and child.state in states]

    def _tend(self) -> None:
        """Start, promote and end workers, until there is what should be."""
        if self._ending:
            return
        swap = self._swap
        if swap is not None:
            self._tend_swap(swap)
        serving = len(self._of(self._generation, State.SERVING))
        ready = self._of(self._generation, State.READY)
        while serving < self.config.workers and ready:
            self._promote(ready.pop())
            serving += 1
        wanted = self.config.workers + self.config.spares - serving - len(ready)
        if wanted > 0 and not self._of(self._generation, State.LOADING) and time.monotonic() >= self._not_before:
            self._fork(self._folder, self._generation)

    def _promote(self, child: _Child) -> None:
        child.state = State.SERVING
        child.served = True
        child.seen = time.monotonic()
        child.control.send(serve=True)

    def _hear(self, child: _Child) -> None:
        try:
            messages = child.control.receive()
            if messages is None:
                self._bury(child)
                return
            child.seen = time.monotonic()
            for message in messages:
                self._take_message(child, message)
        except BrokenMessageError as problem:
            _log.error("worker %d sends what is no message; it is killed: %s", child.pid, problem)
            _kill(child, signal.SIGKILL)  # its end is seen as that of any other worker

    def _take_message(self, child: _Child, message: dict[str, Any]) -> None:
        """Act on a message of a worker, whose every field is looked at before it is used.

        Raises:
            BrokenMessageError: it is none that a worker sends.
        """
        if "ready" in message:
            self._take_ready(child, Loaded.from_message(message["ready"]))
        elif "draining" in message:
            child.closed = True
        elif "failed" in message:
            self._could_not_load(child, error_from_json(message["failed"]))
        elif "serving" in message:
            if not self._started and child.loaded is not None:
                self._started = True
                self._served = child.loaded
                self._on_ready(child.loaded)
        elif "swap" in message:
            export = message["swap"]
            number = message.get("number")
            if not isinstance(export, str) or not isinstance(number, int):
                raise BrokenMessageError(f"{message!r:.80}: no swap")
            self._begin_swap(Path(export), child, number, accept_loss=message.get("accept_loss") is True)
        elif "alive" not in message:
            raise BrokenMessageError(f"{message!r:.80}: no message of a worker")

    def _take_ready(self, child: _Child, loaded: Loaded) -> None:
        """A worker has loaded an export: it may serve if that is the version of its generation."""
        if child.state is not State.LOADING:  # it is to end
            return
        version = self._versions.setdefault(child.generation, loaded.version)
        if loaded.version != version:
            error = ConfigError(
                expected=f"version {version}, which the other workers have loaded",
                found=f"version {loaded.version}: the export was replaced while it is served",
                where=str(self._folder),
                ways_out=("kill -HUP of this server: it swaps to the new version", "put the old version back"),
            )
            self._could_not_load(child, error)
            _kill(child, signal.SIGKILL)
            return
        swap = self._swap
        if swap is not None and child.generation == swap.generation and not swap.accept_loss:
            lost = loaded.lacks(self._served) if self._served is not None else []
            if lost:
                self._could_not_load(child, _answers_less(swap.export, lost))
                _kill(child, signal.SIGKILL)
                return
        child.state = State.READY
        child.loaded = loaded
        if child.generation == self._generation:
            self._pause_s = 0.0

    def _bury(self, child: _Child) -> None:
        """A child ended: take it out; `_tend` finds another one for its place."""
        self._selector.unregister(child.control.socket)
        child.control.close()
        self._children.remove(child)
        # Its socket closes as it ends, so this does not wait.
        _, status = os.waitpid(child.pid, 0)
        self._forget_copies()
        forget_metrics(folder=self._metrics, slot=child.slot)
        code = os.waitstatus_to_exitcode(status)
        if child.state is State.LOADING and not self._ending:
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"
            swap = self._swap
            export = swap.export if swap is not None and child.generation == swap.generation else self.export
            error = ConfigError(
                expected="a worker that loads the export",
                found=f"one that ended with {how}",
                where=str(export),
                ways_out=("see the messages above", "the machine may lack memory"),
            )
            self._could_not_load(child, error)
        elif child.state is State.SERVING and not self._ending:
            _log.warning("worker %d ended (status %d); another one takes its place", child.pid, code)

    def _forget_copies(self) -> None:
        """Delete the copies of exports that no worker serves or loads any more."""
        used = {self._generation, *(child.generation for child in self._children)}
        if self._swap is not None:
            used.add(self._swap.generation)
        self._private.keep(used)

    def _could_not_load(self, child: _Child, error: ZigguratError) -> None:
        if child.state is not State.LOADING:
            return
        child.state = State.DRAINING  # it ends by itself
        swap = self._swap
        if swap is not None and child.generation == swap.generation:
            self._refuse_swap(swap, error)
        elif not self._started:
            self._failure = self._failure or error
            self._end()
        else:
            self._pause_s = min(_MOST_PAUSE_S, max(_LEAST_PAUSE_S, 2 * self._pause_s))
            self._not_before = time.monotonic() + self._pause_s
            _log.error("a worker could not load the export; next trial in %.1f s\n%s", self._pause_s, in_lines(error))

    def _end_the_hung(self) -> None:
        now = time.monotonic()
        for child in self._children:
            if child.state is State.SERVING and now - child.seen > self.config.hang_s:
                _log.error("worker %d shows no sign of life; it is killed", child.pid)
                _kill(child, signal.SIGKILL)
            elif child.state is State.DRAINING and now - child.seen > self.config.drain_s + self.config.hang_s:
                _kill(child, signal.SIGKILL)
            elif child.state in (State.LOADING, State.READY):  # silent by nature; but who is stopped is no help
                child.stopped_since = (child.stopped_since or now) if _is_stopped(child.pid) else 0.0
                if child.stopped_since and now - child.stopped_since > self.config.hang_s:
                    _log.error("worker %d is stopped; it is killed", child.pid)
                    _kill(child, signal.SIGKILL)
        if self._ending and now > self._end_by:
            for child in self._children:
                _kill(child, signal.SIGKILL)

    # ---- another version

    def _begin_swap(self, export: Path, asked_by: _Child | None, number: int, *, accept_loss: bool = False) -> None:
        if self._swap is not None or self._ending:
            error = ConfigError(
                expected="one swap at a time",
                found=f"a swap to {self._swap.export} that is under way" if self._swap else "a server that is ending",
                where="swap",
                ways_out="ask again when it is done",
            )
            if asked_by is not None:
                asked_by.control.send(refused=error.to_json(), number=number)
            return
        if export == self._command:
            self._seen_export = identity_of(export)  # a bad one is tried once
        self._newest += 1
        swap = _Swap(export=export, folder=export, generation=self._newest, asked_by=asked_by, number=number)
        swap.accept_loss = accept_loss
        self._swap = swap
        try:
            swap.folder = export.resolve()
        except (OSError, RuntimeError, ValueError) as problem:  # a loop of links, a name that no file can have
            self._refuse_swap(
                swap,
                ConfigError(
                    expected="the folder of an export",
                    found=f"{quoted(str(export))}: {problem}",
                    where="swap",
                    ways_out="name a folder that `ziggurat export` has made",
                ),
            )
            return
        _log.info("loading %s", quoted(str(export)))

    def _tend_swap(self, swap: _Swap) -> None:
        ready = self._of(swap.generation, State.READY)
        serving = self._of(swap.generation, State.SERVING)
        if not swap.promoted:
            if len(ready) >= self.config.workers:
                for child in ready:
                    self._promote(child)
                swap.promoted = True
            elif not self._of(swap.generation, State.LOADING):
                self._fork(swap.folder, swap.generation)
            return
        old = [child for child in self._children if child.generation < swap.generation]
        for child in old:
            if child.state is not State.DRAINING:
                child.state = State.DRAINING
                child.seen = time.monotonic()
                child.control.send(drain=True)
        self._generation = swap.generation
        self._swap = None
        self.export = swap.export
        self._folder = swap.folder
        self._forget_copies()
        self._served = next((child.loaded for child in serving if child.loaded is not None), self._served)
        version = self._versions.get(swap.generation, "")
        _log.info("serving version %s of %s", version, quoted(str(swap.export)))
        if swap.asked_by is not None:
            swap.asked_by.control.send(swapped=version, number=swap.number)

    def _refuse_swap(self, swap: _Swap, error: ZigguratError) -> None:
        self._swap = None
        for child in self._of(swap.generation, State.READY, State.LOADING):
            child.state = State.DRAINING
            _kill(child, signal.SIGKILL)
        self._forget_copies()
        _log.error("%s is refused, the old version stays\n%s", quoted(str(swap.export)), in_lines(error))
        if swap.asked_by is not None:
            swap.asked_by.control.send(refused=error.to_json(), number=swap.number)

    def _look_at_export(self) -> None:
        identity = identity_of(self._command)
        if identity is not None and identity != self._seen_export and self._swap is None and not self._ending:
            self._begin_swap(self._command, None, 0)

    # ---- signals

    def _catch_signals(self) -> socket.socket:
        waker, waked = socket.socketpair()
        waker.setblocking(False)
        waked.setblocking(False)
        self._waked = waked  # kept: a wakeup socket must not be closed
        signal.set_wakeup_fd(waked.fileno(), warn_on_full_buffer=False)
        for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(name, lambda number, frame: self._signals.append(number))
        self._selector.register(waker, selectors.EVENT_READ, None)
        return waker

    def _heed_signals(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            if number == signal.SIGHUP:
                self._wants_reload = True
            elif self._ending and number == signal.SIGINT:
                self._end_by = -math.inf  # the second Ctrl-C
            else:
                self._end()

    def _reload_if_wanted(self) -> None:
        """Do what SIGHUP asks, after the swap that is under way."""
        if self._wants_reload and self._swap is None and self._started and not self._ending:
            self._wants_reload = False
            self._begin_swap(self._command, None, 0)

    def _end(self) -> None:
        if self._ending:
            return
        self._ending = True
        if self._swap is not None:
            self._refuse_swap(
                self._swap,
                ConfigError(
                    expected="a server that goes on serving",
                    found="one that is ending",
                    where="swap",
                    ways_out="start it again with this export",
                ),
            )
        self._closed_by = time.monotonic() + _TO_CLOSE_S
        self._end_by = time.monotonic() + self.config.drain_s + self.config.linger_s + 1
        self._seen_export = None
        for child in self._children:
            if child.state is State.LOADING:
                _kill(child, signal.SIGKILL)
            else:
                child.control.send(drain=True)
            child.state = State.DRAINING


def _kill(child: _Child, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        os.kill(child.pid, number)


def _answers_less(export: Path, lost: list[str]) -> ConfigError:
    return ConfigError(
        expected="an export that answers all that the served one answers",
        found=f"an export without {', '.join(lost):.200}",
        where=quoted(str(export)),
        ways_out=(
            'through the admin socket: {"export": "FOLDER", "accept_loss": true}',
            "start a server of its own with it",
        ),
    )


def _is_stopped(pid: int) -> bool:
    """Return whether a process was stopped by a signal (SIGSTOP)."""
    try:
        # The name of the program stands in brackets before it, and may hold brackets and blanks itself.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):  # it has ended
        return False
    return state in "Tt"
