"""Supervise the child processes of a server: fork them, read their messages, kill those that hang, reap those that end.

    parent: Children ──fork──► child: run(control) … until its work ends, or the parent's end of the socket closes
         ├─ message             last_seen = now, then on_message(child, message)
         ├─ no message any more: the socket closed ──► reap, on_exit(child, status); the owner forks another one
         ├─ broken message      kill -9; the end is then seen like any other
         └─ silent for `hang_s`, or stopped by a signal for as long ──► kill -9, likewise

`Children` has no thread and no loop: its owner calls it several times a second, and decides which children there should
be and what a message means. The workers of a server and the shards of an index are two owners. A child is noticed to
have ended by its control socket, and a parent likewise; so each child closes the sockets of its siblings after the
fork, or the end of the parent would not be seen.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

from ziggurat.plain import JSON
from ziggurat.serving.server.processes.control import BrokenMessageError, Control

_log = logging.getLogger("ziggurat.server")
_MIN_PAUSE_S = 0.1  # before a process is started in the place of one that could not start
_MAX_PAUSE_S = 30.0
_STOPPED_S = 2.0  # between two turns: this process was stopped, and its children most likely, too
_SWITCH_S = 0.0005  # so that the event loop gets the GIL soon while a batch computes


@dataclass(kw_only=True, eq=False)
class Child:
    """A process that this one forked; `Children.fork` fills the fields below.

    Attributes:
        pid: process id; 0 before the first fork.
        control: this process's end of the pair of sockets.
        last_seen: monotonic time of the start, or of the last message.
        stopped_since: monotonic time at which it was first found stopped by a signal; 0 while it runs.
    """

    pid: int = field(default=0, init=False)
    control: Control = field(init=False)
    last_seen: float = field(default=0.0, init=False)
    stopped_since: float = field(default=0.0, init=False)

    @property
    def name(self) -> str:
        """Return its name in the log."""
        return f"process {self.pid}"

    def kill(self) -> None:
        """End it at once; `Children.read_messages` sees that it ended."""
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            os.kill(self.pid, signal.SIGKILL)


ChildT = TypeVar("ChildT", bound=Child)


class Children(Generic[ChildT]):
    """The running children of one owner.

    Args:
        hang_s: seconds of silence after which a child counts as hung.
        on_message: acts on one message; raises BrokenMessageError for one that no child sends.
        on_exit: acts on the exit of a child, which is no member any more; gets its exit code, negative for a signal.
        selector: wakes the owner when a child sends; the data of its keys are the children. None: the owner polls.
    """

    def __init__(
        self,
        *,
        hang_s: float,
        on_message: Callable[[ChildT, dict[str, JSON]], None],
        on_exit: Callable[[ChildT, int], None],
        selector: selectors.BaseSelector | None = None,
    ) -> None:
        self._hang_s = hang_s
        self._on_message = on_message
        self._on_exit = on_exit
        self._selector = selector
        self._running: list[ChildT] = []
        self._turn_at = time.monotonic()

    def __iter__(self) -> Iterator[ChildT]:
        """Return the children in the order of their starts."""
        return iter(self._running)

    def __len__(self) -> int:
        """Return how many run."""
        return len(self._running)

    def __contains__(self, child: object) -> bool:
        """Return whether this child runs, or ended and was not reaped yet."""
        return child in self._running

    def fork(
        self,
        child: ChildT,
        run: Callable[[Control], int],
        *,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Start a process.

        Args:
            child: becomes a member; one that was reaped may be started again.
            run: called in the new process with its end of the sockets; closes what else it inherited and should not
                hold, works, and returns the exit status.
            at_end: called last in the new process, whatever happened.
        """
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                # The descriptor is the parent's: a signal to this child would wake it.
                signal.set_wakeup_fd(-1)
                ours.close()
                self.close_inherited()
                become(functools.partial(run, Control(end=theirs)), at_end=at_end)
            finally:
                os._exit(1)  # a child must never go on as a second parent
        # Else this process would hold the child's end open, and never see that the child has ended.
        theirs.close()
        # A child that stops reading must not stop its parent.
        ours.setblocking(False)
        child.pid = pid
        child.control = Control(end=ours)
        child.last_seen = time.monotonic()
        child.stopped_since = 0.0
        self._running.append(child)
        if self._selector is not None:
            self._selector.register(ours, selectors.EVENT_READ, child)

    def close_inherited(self) -> None:
        """Close the sockets of all children, in a process that was forked."""
        for child in self._running:
            child.control.close()

    def read_messages(self, child: ChildT) -> None:
        """Act on what a child has sent: reap it if it ended, kill it if it sends what is no message."""
        try:
            messages = child.control.receive()
            if messages is None:
                self._reap(child)
                return
            if messages:
                child.last_seen = time.monotonic()
            for message in messages:
                self._on_message(child, message)
        except BrokenMessageError as problem:
            _log.error("%s sends what is no message; it is killed: %s", child.name, problem)
            child.kill()

    def flush(self) -> None:
        """Send what waits to be sent to the children, as far as their sockets take it."""
        for child in self._running:
            child.control.flush()

    def excuse_pause(self) -> float:
        """Count no time as silence of a child in which this process did not run itself; called once a turn.

        Returns:
            The seconds since the last call, if this process was stopped meanwhile, else 0.
        """
        now = time.monotonic()
        paused_s = now - self._turn_at
        self._turn_at = now
        if paused_s <= min(_STOPPED_S, self._hang_s / 2):
            return 0.0
        for child in self._running:
            child.last_seen += paused_s
            child.stopped_since += paused_s if child.stopped_since else 0.0
        return paused_s

    def kill_if_silent(self, child: ChildT) -> None:
        """Kill a child that should send signs of life, and has sent none for `hang_s`."""
        now = time.monotonic()
        if now - child.last_seen > self._hang_s:
            _log.error("%s shows no sign of life; it is killed", child.name)
            child.kill()
            child.last_seen = now  # logged once, although its end may be seen some turns later

    def kill_if_stopped(self, child: ChildT) -> None:
        """Kill a child that was stopped by a signal for `hang_s`; for those that are silent by nature."""
        now = time.monotonic()
        if not _is_stopped(child.pid):
            child.stopped_since = 0.0
            return
        child.stopped_since = child.stopped_since or now
        if now - child.stopped_since > self._hang_s:
            _log.error("%s is stopped; it is killed", child.name)
            child.kill()

    def end(self) -> None:
        """Kill and reap all of them, without a call of `on_exit`."""
        for child in self._running:
            child.kill()
        while self._running:
            self._wait(self._running[0])

    def _reap(self, child: ChildT) -> None:
        status = self._wait(child)
        self._on_exit(child, status)

    def _wait(self, child: ChildT) -> int:
        """Take a child out, and return its exit code."""
        if self._selector is not None:
            self._selector.unregister(child.control.socket)
        child.control.close()
        self._running.remove(child)
        # Its socket closes as it ends, so this does not wait.
        _, status = os.waitpid(child.pid, 0)
        return os.waitstatus_to_exitcode(status)


class Backoff:
    """The time to wait before the next try: 0.1 s after one that failed, doubled with each further one.

    Args:
        max_pause_s: it never waits longer.

    Attributes:
        pause_s: seconds between the last failure and the next try.
    """

    def __init__(self, *, max_pause_s: float = _MAX_PAUSE_S) -> None:
        self.pause_s = 0.0
        self._max_pause_s = max_pause_s
        self._not_before = 0.0

    @property
    def is_over(self) -> bool:
        """Return whether the next try may be made."""
        return time.monotonic() >= self._not_before

    def fail(self) -> None:
        """Count a try that failed."""
        # Slower and slower: what fails for good, as an export that does not load, would else keep a core busy.
        self.pause_s = min(self._max_pause_s, max(_MIN_PAUSE_S, 2 * self.pause_s))
        self._not_before = time.monotonic() + self.pause_s

    def succeed(self) -> None:
        """Begin again with the shortest time."""
        self.pause_s = 0.0


def become(run: Callable[[], int], *, at_end: Callable[[], None] = lambda: None) -> NoReturn:
    """Let a process that was just forked do something, and end with the status that it returns.

    Args:
        run: the work of the process.
        at_end: called last, whatever happened.
    """
    status = 1
    try:
        for name in (signal.SIGINT, signal.SIGHUP):  # meant for the supervisor, which a terminal's group shares
            signal.signal(name, signal.SIG_IGN)
        # The parent's handler, which was inherited, would only note it for a loop that does not run here.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.setswitchinterval(_SWITCH_S)
        status = run()
    except BaseException:
        _log.exception("a worker failed")
    finally:
        # Whatever fails here, the process has to end, and with its own status.
        with contextlib.suppress(Exception):
            at_end()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(status)  # nothing of the supervisor's is ended here


def _is_stopped(pid: int) -> bool:
    """Return whether a process was stopped by a signal (SIGSTOP)."""
    try:
        # The name of the program stands in brackets before it, and may hold brackets and blanks itself.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):  # it has ended
        return False
    return state in "Tt"
