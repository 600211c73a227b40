"""The process that holds the port: it starts workers, replaces dead ones, swaps versions, and ends them all in order.

It computes nothing and answers no request, so that no request can crash it, and has one thread, so that it may fork.
Its workers are children in the sense of `child.py`.

    start    first worker loads ──ready──► serve       others and spares follow, one loading at a time
    death    the control socket closes ──► a spare serves (milliseconds); a new spare is started
    hang     no sign of life for `hang_s` ──► kill -9, then as above
    swap     workers of the new version load beside the old ones; when all are ready: new ones serve, old ones drain.
             If one cannot load, the new ones end, the swap is refused, and the old version stays.
             Who asked for it is answered when no old one takes connections any more
    SIGHUP   swap to whatever the path of the command leads to now; --watch does so when that changes, and for a
             published folder (`published_folder.py`) that is done without a word, each `poll_s`
    SIGTERM  all drain, then end; new connections get 503 at once (`stand_in.py`)
    pause    Ctrl-Z or a frozen cgroup stops workers and supervisor alike: time in which this process did not run
             counts for no child as silence

This process owns the listening socket, and workers inherit it: connections that are not accepted yet survive every
death, swap and restart of workers. An answer comes from one worker, and a worker has one version: no answer mixes two.
Workers of a generation load one private copy of the export (`private_export.py`) and prove it: the first reports which
version it has loaded, and one that has loaded another version does not serve.
"""

from __future__ import annotations

import logging
import math
import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from ziggurat.errors import ConfigError, ExportError, ZigguratError
from ziggurat.files.system_text import text_of
from ziggurat.plain import JSON
from ziggurat.serving.answers import export_version
from ziggurat.serving.export.export_folder import identity_of
from ziggurat.serving.export.published_folder import (
    PointerState,
    is_followed,
    is_version,
    pointer_state,
    served_folder,
)
from ziggurat.serving.server.config import ServerConfig
from ziggurat.serving.server.metrics import forget_metrics
from ziggurat.serving.server.processes.child import Backoff, Child, Children
from ziggurat.serving.server.processes.control import BrokenMessageError, Control, error_from_json, in_lines
from ziggurat.serving.server.processes.own_folder import OwnFolder
from ziggurat.serving.server.processes.private_export import PrivateExports
from ziggurat.serving.server.processes.stand_in import StandIn
from ziggurat.serving.server.processes.worker import WATCH_S, Load, Loaded, WorkerTask, work
from ziggurat.typed import quoted

if TYPE_CHECKING:
    from ziggurat.serving.server.shards.process import ShardKeeper

_log = logging.getLogger("ziggurat.server")
_TICK_S = 0.2  # between two turns, while no message arrives
_UNSERVED_S = 1.0  # without a worker that serves; for less, clients wait for the next one
_CLOSE_S = 1.0  # for workers to take no more connections, when the server ends
_SWAPPED_S = 5.0  # for old workers likewise, before a swap is answered


class State(StrEnum):
    """The stage of a worker in its life cycle."""

    LOADING = "loading"
    READY = "ready"
    SERVING = "serving"
    DRAINING = "draining"


@dataclass(kw_only=True, eq=False)
class _Worker(Child):
    slot: int
    generation: int
    state: State = State.LOADING
    loaded: Loaded | None = None
    served: bool = False  # it took connections
    closed: bool = False  # it takes no more connections

    @property
    def name(self) -> str:
        return f"worker {self.pid}"


@dataclass(kw_only=True)
class _Swap:
    """A swap in progress, and the worker and number of its request (no worker for a signal)."""

    export: Path
    folder: Path
    generation: int
    asked_by: _Worker | None
    number: int
    promoted: bool = False
    accept_loss: bool = False


@dataclass(frozen=True, kw_only=True)
class _SwapAnswer:
    """The answer to a swap that is done, due when all old workers are closed, or at a time."""

    to: _Worker
    number: int
    version: str
    old: list[_Worker]
    deadline: float


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
        keeper: of shards of the index, which run as long as the workers do; None: there are none.
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
        # Before the folder: what is published in between is seen as another one.
        self._last_identity = identity_of(export)
        # A link or a pointer may lead elsewhere later: workers of a version load the same folder.
        self._folder = served_folder(export.resolve())
        self._command = export  # what SIGHUP and --watch follow, whatever /admin/swap has loaded meanwhile
        self._generation = self._last_generation = 0
        self._private = PrivateExports()
        self._versions: dict[int, str] = {}  # of each generation, as its first worker has loaded it
        self._swap: _Swap | None = None
        self._swap_answers: list[_SwapAnswer] = []
        self._wants_reload = False
        self._started = self._ending = False
        self._own_problem = ""
        self._served: Loaded | None = None  # what is served now
        self._failure: ZigguratError | None = None
        self._backoff = Backoff()
        self._close_deadline = self._end_deadline = 0.0
        self._pointer = PointerState.GOOD
        self._signals: list[int] = []
        self._selector = selectors.DefaultSelector()
        self._workers: Children[_Worker] = Children(
            hang_s=config.hang_s,
            on_message=self._handle_message,
            on_exit=self._handle_exit,
            selector=self._selector,
        )
        self._stand_in = StandIn(listener=listener, selector=self._selector)
        self._served_at = time.monotonic()
        self._metrics = own.path / "metrics"
        self._metrics.mkdir()

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT.

        Raises:
            ZigguratError: the export could not be loaded at the start.
        """
        wakeup = self._catch_signals()
        watched = time.monotonic()
        self._workers.excuse_pause()  # the first turn begins now
        try:
            while not (self._ending and not self._workers):
                self._keep_own_folder()
                self._reconcile_shards()
                self._reconcile()
                self._stand_in.turn(on=self._needs_stand_in())
                # Not until something arrives: a worker that hangs, and a link that is changed, wake nobody.
                for key, _ in self._selector.select(_TICK_S):
                    if key.data is None:
                        # Its bytes only wake this loop; which signals came, the handler has noted.
                        wakeup.recv(4096)
                    elif isinstance(key.data, StandIn):
                        key.data.handle_ready(key.fileobj)
                    elif key.data in self._workers:  # one that ended in this turn has no socket any more
                        self._workers.read_messages(key.data)
                self._handle_signals()
                self._answer_swaps()
                self._reload_if_wanted()
                self._workers.flush()
                self._excuse_pause()
                self._kill_the_hung()
                pause_s = self._look_each_s()
                if pause_s and time.monotonic() - watched > pause_s:
                    watched = time.monotonic()
                    self._check_export()
            self._stand_in.end()
        finally:
            self._workers.end()
            self._private.delete()
            if self.keeper is not None:
                self.keeper.end()
        # Raised behind the clean-up: no child of a server that could not start is left.
        if self._failure is not None:
            raise self._failure

    # ---- workers

    def _needs_stand_in(self) -> bool:
        """Return whether connections arrive that no worker will accept soon."""
        now = time.monotonic()
        if self._ending:
            is_closed = all(worker.closed for worker in self._workers if worker.served)
            return self._started and (is_closed or now > self._close_deadline)
        if not self._started or any(worker.state is State.SERVING for worker in self._workers):
            # Before the start nobody is refused: connections wait in the backlog until the first worker has loaded.
            self._served_at = now
        return now - self._served_at > _UNSERVED_S

    def _excuse_pause(self) -> None:
        """Count no time as silence of a worker in which this process itself did not run."""
        paused_s = self._workers.excuse_pause()
        if paused_s:
            _log.warning("the server was stopped for %.1f s, and goes on", paused_s)
            # Else workers that drain would be killed for time in which they could not run either.
            self._end_deadline += paused_s

    def _fork(self, export: Path, generation: int) -> None:
        private = self._private.of(export, generation=generation)
        # The lowest number that is free: figures are files by slot, so that new numbers for ever would be files for
        # ever.
        slot = next(number for number in range(10_000) if all(worker.slot != number for worker in self._workers))
        forget_metrics(folder=self._metrics, slot=slot)
        task = WorkerTask(
            load=self.load,
            export=private,
            listener=self.listener,
            admin=self.admin,
            config=self.config,
            api_key=self._api_key,
            slot=slot,
            metrics=self._metrics,
        )

        def run(control: Control) -> int:
            self._close_inherited()
            if self.keeper is not None:
                self.keeper.close_inherited()
            return work(task, control=control)

        self._workers.fork(_Worker(slot=slot, generation=generation), run, at_end=self._delete_if_last)

    def _keep_own_folder(self) -> None:
        """Make the folder of the processes again if it was deleted: no worker could start without it."""
        if self._ending:
            return
        try:
            is_new = self.own.make_again()
            self._metrics.mkdir(exist_ok=True)
            if is_new:
                _log.warning(
                    "%s was deleted, and is made again: /metrics counts the workers that start from now on, and an "
                    "admin socket in it is gone until the server starts again",
                    self.own.path,
                )
        except OSError as problem:
            # Once for each problem: this runs at every turn, several times a second.
            if self._own_problem != str(problem):
                self._own_problem = str(problem)
                _log.error("%s was deleted, and cannot be made again: %s", self.own.path, problem)

    def _close_inherited(self) -> None:
        """Close what belongs to the supervisor, in a process that it forked."""
        self._workers.close_inherited()  # else the end of this supervisor would not be seen by its workers
        self._stand_in.close_inherited()
        self._selector.close()

    def _delete_if_last(self) -> None:
        """Delete what a dead supervisor left, in a worker that ends, if no other worker is there."""
        self.own.delete_if_last()
        self._private.delete_if_last()

    def _reconcile_shards(self) -> None:
        if self.keeper is None:
            return
        private = self._private.of(self._folder, generation=self._generation)
        self.keeper.reconcile(self._folder, copy=private.make, in_child=self._close_inherited)
        if self.keeper.failure is not None and not self._started and not self._ending:
            self._failure = self.keeper.failure
            self._shut_down()

    def _workers_in(self, generation: int, *states: State) -> list[_Worker]:
        return [worker for worker in self._workers if worker.generation == generation and worker.state in states]

    def _reconcile(self) -> None:
        """Start, promote and drain workers, until as many serve and wait as the settings say."""
        if self._ending:
            return
        swap = self._swap
        if swap is not None:
            self._advance_swap(swap)
        serving = len(self._workers_in(self._generation, State.SERVING))
        ready = self._workers_in(self._generation, State.READY)
        while serving < self.config.workers and ready:
            self._promote(ready.pop())
            serving += 1
        wanted = self.config.workers + self.config.spares - serving - len(ready)
        if wanted > 0 and not self._workers_in(self._generation, State.LOADING) and self._backoff.is_over:
            self._fork(self._folder, self._generation)

    def _promote(self, worker: _Worker) -> None:
        worker.state = State.SERVING
        worker.served = True
        # While it waited it gave no signs of life, so silence counts from here.
        worker.last_seen = time.monotonic()
        worker.control.send(serve=True)

    def _handle_message(self, worker: _Worker, message: dict[str, JSON]) -> None:
        """Act on a message of a worker; every field is checked before it is used.

        Raises:
            BrokenMessageError: a worker sends no such message.
        """
        if "ready" in message:
            self._handle_ready(worker, Loaded.from_message(message["ready"]))
        elif "draining" in message:
            worker.closed = True
        elif "failed" in message:
            self._handle_load_failure(worker, error_from_json(message["failed"]))
        elif "serving" in message:
            if self._pointer is not PointerState.GOOD:
                worker.control.send(pointer=self._pointer.value)
            if not self._started and worker.loaded is not None:
                self._started = True
                self._served = worker.loaded
                self._on_ready(worker.loaded)
        elif "swap" in message:
            export = message["swap"]
            number = message.get("number")
            if not isinstance(export, str) or not isinstance(number, int):
                raise BrokenMessageError(f"{message!r:.80}: no swap")
            # Nothing but a true agrees to lose answers; any other value of JSON is none.
            self._start_swap(Path(export), worker, number, accept_loss=message.get("accept_loss") is True)
        elif "alive" not in message:
            raise BrokenMessageError(f"{message!r:.80}: no message of a worker")

    def _handle_ready(self, worker: _Worker, loaded: Loaded) -> None:
        """Let a worker that has loaded an export serve, if the version is that of its generation."""
        if worker.state is not State.LOADING:  # it is to end
            return
        version = self._versions.setdefault(worker.generation, loaded.version)
        # Changes of items are numbers behind the version: workers that start later have loaded more of them.
        if export_version(loaded.version) != export_version(version):
            error = ConfigError(
                expected=f"version {version}, which the other workers have loaded",
                found=f"version {loaded.version}: the export was replaced while it is served",
                where=str(self._folder),
                ways_out=("kill -HUP of this server: it swaps to the new version", "put the old version back"),
            )
            self._handle_load_failure(worker, error)
            # It believes that it is ready, and would not end by itself as one that could not load does.
            worker.kill()
            return
        swap = self._swap
        if swap is not None and worker.generation == swap.generation and not swap.accept_loss:
            lost = loaded.lacks(self._served) if self._served is not None else []
            if lost:
                self._handle_load_failure(worker, _answers_less(swap.export, lost))
                worker.kill()
                return
        worker.state = State.READY
        worker.loaded = loaded
        if worker.generation == self._generation:
            self._backoff.succeed()

    def _handle_exit(self, worker: _Worker, code: int) -> None:
        """Release what a worker that ended has used; `_reconcile` starts another one in its place."""
        self._delete_unused_copies()
        forget_metrics(folder=self._metrics, slot=worker.slot)
        if worker.state is State.LOADING and not self._ending:
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"
            swap = self._swap
            export = swap.export if swap is not None and worker.generation == swap.generation else self.export
            error = ConfigError(
                expected="a worker that loads the export",
                found=f"one that ended with {how}",
                where=str(export),
                ways_out=("see the messages above", "the machine may lack memory"),
            )
            self._handle_load_failure(worker, error)
        elif worker.state is State.SERVING and not self._ending:
            _log.warning("worker %d ended (status %d); another one takes its place", worker.pid, code)

    def _delete_unused_copies(self) -> None:
        """Delete the copies of exports that no worker serves or loads any more."""
        # The served generation counts also while it has no worker: the next one is forked onto its copy.
        used = {self._generation, *(worker.generation for worker in self._workers)}
        if self._swap is not None:
            used.add(self._swap.generation)
        self._private.keep(used)

    def _handle_load_failure(self, worker: _Worker, error: ZigguratError) -> None:
        if worker.state is not State.LOADING:
            return
        worker.state = State.DRAINING  # it ends by itself
        swap = self._swap
        if swap is not None and worker.generation == swap.generation:
            self._refuse_swap(swap, error)
        elif not self._started:
            self._failure = self._failure or error
            self._shut_down()
        else:
            self._backoff.fail()
            pause_s = self._backoff.pause_s
            _log.error("a worker could not load the export; next trial in %.1f s\n%s", pause_s, in_lines(error))

    def _kill_the_hung(self) -> None:
        now = time.monotonic()
        for worker in self._workers:
            if worker.state is State.SERVING:
                self._workers.kill_if_silent(worker)
            elif worker.state is State.DRAINING:
                # It sends no signs of life any more, and may answer what it has for `drain_s`.
                if now - worker.last_seen > self.config.drain_s + self.config.hang_s:
                    worker.kill()
            else:  # one that loads or waits is silent by nature; but one that is stopped is no help
                self._workers.kill_if_stopped(worker)
        if self._ending and now > self._end_deadline:
            for worker in self._workers:
                worker.kill()

    # ---- another version

    def _start_swap(self, export: Path, asked_by: _Worker | None, number: int, *, accept_loss: bool = False) -> None:
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
        if export.absolute() == self._command.absolute():
            self._last_identity = identity_of(self._command)  # a bad one is tried once
        # Counted on even where a swap is refused: its workers, which may still end, belong to no later one.
        self._last_generation += 1
        swap = _Swap(export=export, folder=export, generation=self._last_generation, asked_by=asked_by, number=number)
        swap.accept_loss = accept_loss
        self._swap = swap
        try:
            swap.folder = served_folder(export.resolve())
            found = "" if swap.folder.is_dir() else "no such folder"
        except ExportError as problem:  # the pointer of a published folder
            self._refuse_swap(swap, problem)
            return
        except (OSError, RuntimeError, ValueError) as problem:  # a loop of links, a name that no file can have
            found = text_of(problem) if isinstance(problem, OSError) else str(problem)
        # Here, and not in a worker: none has to start to see that there is nothing to load.
        if found:
            self._refuse_swap(
                swap,
                ConfigError(
                    expected="the folder of an export",
                    found=f"{quoted(str(export))}: {found}",
                    where="swap",
                    ways_out="name a folder that `ziggurat export` has made",
                ),
            )
            return
        if swap.folder == self._folder and is_version(swap.folder):
            self._answer_unchanged(swap)
            return
        _log.info("loading %s", quoted(str(swap.folder if is_version(swap.folder) else export)))

    def _answer_unchanged(self, swap: _Swap) -> None:
        """End a swap to the version of a published folder that is served already: a version never changes."""
        self._swap = None
        if swap.asked_by is not None:
            version = self._versions.get(self._generation, "")
            swap.asked_by.control.send(swapped=version, number=swap.number)

    def _advance_swap(self, swap: _Swap) -> None:
        ready = self._workers_in(swap.generation, State.READY)
        serving = self._workers_in(swap.generation, State.SERVING)
        if not swap.promoted:
            # All at once, and only when enough have loaded: until then the old version serves with all its workers.
            if len(ready) >= self.config.workers:
                for worker in ready:
                    self._promote(worker)
                swap.promoted = True
            elif not self._workers_in(swap.generation, State.LOADING):
                self._fork(swap.folder, swap.generation)
            return
        old = [worker for worker in self._workers if worker.generation < swap.generation]
        for worker in old:
            if worker.state is not State.DRAINING:
                worker.state = State.DRAINING
                # From here on `_kill_the_hung` measures how long it drains.
                worker.last_seen = time.monotonic()
                worker.control.send(drain=True)
        self._generation = swap.generation
        self._swap = None
        self.export = swap.export
        self._folder = swap.folder
        self._delete_unused_copies()
        self._served = next((worker.loaded for worker in serving if worker.loaded is not None), self._served)
        version = self._versions.get(swap.generation, "")
        published = self._served.published if self._served is not None else ""
        known_as = f": {published}" if published else ""
        _log.info("serving version %s of %s%s", version, quoted(str(swap.export)), known_as)
        if swap.asked_by is not None:
            answer = _SwapAnswer(
                to=swap.asked_by,
                number=swap.number,
                version=version,
                # Of one that never took connections nobody can get an old answer.
                old=[worker for worker in old if worker.served],
                deadline=time.monotonic() + _SWAPPED_S,
            )
            self._swap_answers.append(answer)

    def _answer_swaps(self) -> None:
        """Answer the swaps after which no old worker takes connections any more: who asks now gets the new version."""
        now = time.monotonic()
        for answer in list(self._swap_answers):
            is_over = all(worker.closed or worker not in self._workers for worker in answer.old)
            if is_over or now > answer.deadline or self._ending:
                self._swap_answers.remove(answer)
                answer.to.control.send(swapped=answer.version, number=answer.number)

    def _refuse_swap(self, swap: _Swap, error: ZigguratError) -> None:
        self._swap = None
        # Killed, not drained: none of them has ever accepted a connection.
        for worker in self._workers_in(swap.generation, State.READY, State.LOADING):
            worker.state = State.DRAINING
            worker.kill()
        self._delete_unused_copies()
        _log.error("%s is refused, the old version stays\n%s", quoted(str(swap.export)), in_lines(error))
        if swap.asked_by is not None:
            swap.asked_by.control.send(refused=error.to_json(), number=swap.number)

    def _look_each_s(self) -> float:
        """Seconds between two looks at what the path of the command leads to; 0: nobody looks."""
        if is_followed(self._command):
            return self.config.poll_s
        return WATCH_S if self.config.watch else 0.0

    def _check_export(self) -> None:
        self._check_pointer()
        if self._pointer is not PointerState.GOOD:
            return
        identity = identity_of(self._command)
        # A link that leads nowhere is one that is just being replaced, or a mistake: the served version stays.
        if identity is not None and identity != self._last_identity and self._swap is None and not self._ending:
            self._start_swap(self._command, None, 0)

    def _check_pointer(self) -> None:
        """Say it once where the pointer of a published folder cannot be followed, and once where it can be again."""
        state, error = pointer_state(self._command)
        if state is self._pointer:
            return
        self._pointer = state
        if error is None:
            _log.info("%s is followed again", quoted(str(self._command)))
        else:
            _log.warning(
                "%s cannot be followed, the old version stays\n%s", quoted(str(self._command)), in_lines(error)
            )
        for worker in self._workers_in(self._generation, State.SERVING):
            worker.control.send(pointer=state.value)

    # ---- signals

    def _catch_signals(self) -> socket.socket:
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        self._wakeup_socket = writer  # a reference, since a wakeup socket must not be closed
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(name, lambda number, frame: self._signals.append(number))
        self._selector.register(reader, selectors.EVENT_READ, None)
        return reader

    def _handle_signals(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            if number == signal.SIGHUP:
                self._wants_reload = True
            elif self._ending and number == signal.SIGINT:
                self._end_deadline = -math.inf  # the second Ctrl-C
            else:
                self._shut_down()

    def _reload_if_wanted(self) -> None:
        """Start the swap that SIGHUP asks for, after the one in progress."""
        if self._wants_reload and self._swap is None and self._started and not self._ending:
            self._wants_reload = False
            self._start_swap(self._command, None, 0)

    def _shut_down(self) -> None:
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
        self._close_deadline = time.monotonic() + _CLOSE_S
        self._end_deadline = time.monotonic() + self.config.drain_s + self.config.linger_s + 1
        self._last_identity = None
        for worker in self._workers:
            if worker.state is State.LOADING:
                worker.kill()
            else:
                worker.control.send(drain=True)
            worker.state = State.DRAINING


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
