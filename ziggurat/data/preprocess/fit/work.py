"""Work: a folder of finished units of work, which any number of processes fill, and which outlives them.

Preparing takes hours, and processes end early: they are killed, machines restart. So a preparation is cut into units
(a shard of raw files, a file of the result). Whoever comes takes a unit that nobody works on; what a unit leaves counts
from the moment its note is written, the last thing of it. The same command run again goes on from the notes, and ranks
of a job, or processes on several machines that see the folder, share the units without a word to each other:

    process 1   shard 0 ─────► shard 2 ──► encode 0 ──► encode 2 ──► publish
    process 2   shard 1 ──────────────────► encode 1 ──► (killed)              its unit is taken by another

    .NAME.work/shard-0/…      what the unit left
    .NAME.work/shard-0.json   its note: done, with its result; checksummed
    .NAME.work/shard-0.lock   held by whoever works on it; the system lets go when the process ends, however it does

A power cut may lose what was written, though not flushed, before it: notes of this machine from before its last start
are not believed. The system's file locks must work on the file system; those of Linux and of NFS do.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from ziggurat.errors import ZigguratError
from ziggurat.files import Format

NOTE = Format(
    name="ziggurat.unit", what="a note of finished work", ways_out=("delete the folder of the work",), max_bytes=1 << 30
)
PLAN = "plan"  # the unit that only says which ones there are
_POLL_S = 0.1
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Work:
    """The units of one piece of work that ends in a published folder or file; use as a context manager.

    Args:
        target: what will be there in the end. Its work lies beside it, under a name that starts with a dot.
        waiting: called again and again while another process has what is needed.

    Attributes:
        folder: of the work.
        resumed: whether finished units were found on coming.
        stopped: set when the making of units is to end early.
    """

    def __init__(self, target: Path, *, waiting: Callable[[], None]) -> None:
        self.target, self._waiting = target, waiting
        self.folder = target.with_name(f".{target.name}.work")
        self.resumed = False
        self.stopped = threading.Event()
        self._making: set[str] = set()  # by threads of this process, one of which will finish it
        self._lock: TextIO | None = None

    def __enter__(self) -> Work:
        path = self.target.with_name(f".{self.target.name}.lock")
        while True:
            self._lock = path.open("w")
            while not self._locked(fcntl.LOCK_SH):
                self.wait()
            with contextlib.suppress(FileNotFoundError):  # the last one of others may have taken it away
                if os.fstat(self._lock.fileno()).st_ino == path.stat().st_ino:
                    return self
            self._lock.close()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Leave; the last one throws the work away if it is over, failed for good, or nothing was finished."""
        assert self._lock is not None
        failed = isinstance(error, ZigguratError | OSError)
        nothing = not self._finished()
        if (self.target.exists() or failed or nothing) and self._locked(fcntl.LOCK_EX):
            shutil.rmtree(self.folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                self.target.with_name(f".{self.target.name}.lock").unlink()
        self._lock.close()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else is in the work while the block runs."""
        while not self._locked(fcntl.LOCK_EX):
            self.wait()
        try:
            yield
        finally:
            while not self._locked(fcntl.LOCK_SH):
                self.wait()

    def start(self) -> None:
        """Make the folder, and forget notes that a power cut may have made untrue."""
        self.folder.mkdir(exist_ok=True)
        self.resumed = any(self.note(name) is not None for name in self._finished())

    def _finished(self) -> list[str]:
        """Names of units that took time."""
        return [path.stem for path in self.folder.glob("*.json") if path.stem != PLAN]

    def note(self, name: str) -> dict[str, Any] | None:
        """The result of a unit that is done; None of one that is not."""
        path = self.folder / f"{name}.json"
        if not path.exists():
            return None
        try:
            content = NOTE.read(path)
            host, boot = content["by"]
            return None if host == platform.node() and boot != _boot() else content["result"]
        except (ZigguratError, KeyError, ValueError, TypeError):
            return None  # torn: the unit is done again

    def once(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result of a unit: made now, or by another process, or before. An error of `make` is the caller's."""
        while (found := self.note(name)) is None:
            with self.claimed(name) as is_mine:
                if is_mine and self.note(name) is None:
                    self.keep(name, make())
            if not is_mine:
                self.wait()
        return found

    def each(
        self,
        names: Sequence[str],
        make: Callable[[str], dict[str, Any]],
        *,
        threads: int = 1,
        tick: Callable[[], None] = lambda: None,
    ) -> list[dict[str, Any]]:
        """The results of units, of which those that nobody works on are made here; returns when all are done.

        Args:
            names: of the units.
            make: makes one of them; called in another thread if there are several, and asked to end by `stopped`.
            threads: that make units at the same time.
            tick: called from time to time, in this thread.
        """
        if threads == 1:
            self._work_off(names, make)
        else:
            self._work_off_in_threads(names, make, threads=threads, tick=tick)
        found = [self.note(name) for name in names]
        return [result for result in found if result is not None]

    def _work_off_in_threads(
        self,
        names: Sequence[str],
        make: Callable[[str], dict[str, Any]],
        *,
        threads: int,
        tick: Callable[[], None],
    ) -> None:
        self.stopped.clear()
        with ThreadPoolExecutor(threads, thread_name_prefix="ziggurat-unit") as pool:
            workers = {pool.submit(self._work_off, names, make) for _ in range(threads)}
            try:
                while workers:
                    done, workers = wait(workers, timeout=_POLL_S, return_when=FIRST_COMPLETED)
                    for worker in done:
                        worker.result()
                    tick()
            except BaseException:
                self.stopped.set()
                raise

    def _work_off(self, names: Sequence[str], make: Callable[[str], dict[str, Any]]) -> None:
        rest = list(names)
        while rest and not self.stopped.is_set():
            for name in rest:
                with self.claimed(name) as is_mine:
                    if is_mine and self.note(name) is None and not self.stopped.is_set():
                        self._making.add(name)
                        self.keep(name, make(name))
                        self._making.discard(name)
            rest = [name for name in rest if self.note(name) is None and name not in self._making]
            if rest and not self.stopped.is_set():
                self.wait()

    @contextmanager
    def claimed(self, name: str) -> Iterator[bool]:
        """Work on a unit, if nobody else does."""
        if self.target.exists() or not self.folder.exists():
            raise PublishedError
        with (self.folder / f"{name}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True

    def keep(self, name: str, result: dict[str, Any]) -> None:
        """Note that a unit is done."""
        NOTE.write(self.folder / f"{name}.json", {"by": [platform.node(), _boot()], "result": result})

    def _locked(self, kind: int) -> bool:
        assert self._lock is not None
        try:
            fcntl.flock(self._lock, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def wait(self) -> None:
        """Say that another process is waited for, and wait a little."""
        self._waiting()
        time.sleep(_POLL_S)


class PublishedError(Exception):
    """Another process has finished the whole work meanwhile."""


def _boot() -> str:
    with contextlib.suppress(OSError):
        return _BOOT.read_text().strip()
    return ""
