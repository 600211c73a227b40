"""Work: a folder of finished units of work, which any number of processes fill, and which outlives them.

Preparing takes hours, and processes end early: they are killed, machines restart. So a preparation is cut into units
(a shard of raw files, a file of the result). Whoever comes takes a unit that nobody works on; what a unit leaves counts
from the moment its note is written, the last thing of it. The same command run again goes on from the notes, and ranks
of a job, or processes on several machines that see the folder, share the units without a word to each other:

    process 1   shard 0 ─────► shard 2 ──► encode 0 ──► encode 2 ──► publish
    process 2   shard 1 ──────────────────► encode 1 ──► (killed)              its unit is taken by another

    .NAME.work/shard-0/…      what the unit left
    .NAME.work/shard-0.json   its note: done, with its result and the SHA-256 of every file that it left; checksummed
    .NAME.work/shard-0.lock   held by whoever works on it; the system lets go when the process ends, however it does

Whoever comes to work that others have begun compares what their units left with the notes before anything is read or
mapped: a unit whose files differ in a bit is done again, and that is said. A power cut may lose what was written,
though not flushed, before it: notes of this machine from before its last start are not believed. The system's file
locks must work on the file system; those of Linux and of NFS do.

A folder of that name without our mark is somebody else's: it is refused, never used or removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO, TypeAlias, TypedDict

from ziggurat.errors import FileError, ZigguratError
from ziggurat.files import Format, remove_left_behind, sha256_of, temporary_beside, writing_to
from ziggurat.files.boot import boot_id
from ziggurat.plain import JSON

NOTE = Format(
    name="ziggurat.unit",
    what="a note of finished work",
    # Version 1 did not say what the files of a unit held, 2 not of which unit it is, and drafts of 3 kept numbers where
    # ids of buckets are kept now: none of these is believed.
    version=4,
    ways_out=("delete the folder of the work",),
    max_bytes=1 << 30,
)
PLAN = "plan"  # the unit that only says which ones there are
_MARK = "work"  # the note that says whose folder it is
_POLL_S = 0.1
# What a unit has made, as it stands in its note: plain data, whose readers know what the unit writes.
Note: TypeAlias = dict[str, JSON]


class _Content(TypedDict):
    """Content of the file of a note."""

    unit: str
    by: tuple[str, str]  # host and boot of the process that wrote it
    result: Note
    left: dict[str, tuple[int, str]]  # bytes and SHA-256 of each file of the unit


class Work:
    """The units of one piece of work that ends in a published folder or file; use as a context manager.

    Args:
        target: what will be there in the end. Its work lies beside it, under a name that starts with a dot.
        waiting: called again and again while another process has what is needed.

    Attributes:
        folder: of the work.
        resumed: whether finished units were found on coming.
        damaged: the units whose files were not as their notes say, on coming; they are done again.
        stopped: set when the making of units is to end early.
    """

    _lock: TextIO  # of the work, from `__enter__` on

    def __init__(self, target: Path, *, waiting: Callable[[], None]) -> None:
        self.target = target
        self._waiting = waiting
        self.folder = target.with_name(f".{target.name}.work")
        self.resumed = False
        self.damaged: list[str] = []
        self.stopped = threading.Event()
        self._making: set[str] = set()  # by threads of this process, one of which will finish it

    def __enter__(self) -> Work:
        path = self.target.with_name(f".{self.target.name}.lock")
        while True:
            with writing_to(path, FileError):
                # A file for the lock alone: the folder of the work may be removed under those who wait.
                self._lock = path.open("w")
            # Shared among all who work: only who throws the work away must be alone.
            while not self._locked(fcntl.LOCK_SH):
                self.wait()
            with contextlib.suppress(FileNotFoundError):  # the last one of others may have taken it away
                # The file may have been removed before it was locked: a lock on a file without a name keeps nobody out.
                if os.fstat(self._lock.fileno()).st_ino == path.stat().st_ino:
                    return self
            self._lock.close()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Leave; the last one throws the work away if it is over, failed for good, or nothing was finished."""
        failed = isinstance(error, ZigguratError | OSError)
        nothing = not self._finished()
        # Nobody else is in it: an exclusive lock is refused while others hold theirs.
        if (self.target.exists() or failed or nothing) and self._locked(fcntl.LOCK_EX):
            self.throw_away()
            with contextlib.suppress(OSError):
                self.target.with_name(f".{self.target.name}.lock").unlink()
        with contextlib.suppress(OSError):  # nothing is in it; Linux gives it back, and with it the lock, even then
            self._lock.close()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else is in the work while the block runs."""
        while not self._locked(fcntl.LOCK_EX):
            self.wait()
        try:
            yield
        finally:
            # Back to sharing, so that others may come in.
            while not self._locked(fcntl.LOCK_SH):
                self.wait()

    def start(self) -> None:
        """Make the folder, or take up what is there: forget notes whose files are not as they say.

        Raises:
            FileError: a folder of that name is somebody else's.
        """
        if not self._is_ours():
            self._make_folder()
        # Another process may have made it meanwhile, and then it is marked.
        if not self._is_ours():
            raise FileError(
                expected="no folder, or one of unfinished work",
                found="a folder that nobody marked as one of unfinished work",
                where=str(self.folder),
                ways_out=("give that folder another name", "choose another name for the result"),
            )
        for name in self._finished():
            note = self._read(name)
            if note is not None and not self._is_as_noted(note["left"]):
                # What another process publishes is moved away from under those that look at it.
                if self.target.exists():
                    raise PublishedError
                (self.folder / f"{name}.json").unlink(missing_ok=True)
                self.damaged.append(name)
        self.resumed = any(self.note(name) is not None for name in self._finished())

    def _make_folder(self) -> None:
        """Put a marked folder in the place of none, or of an empty one, unless another process is faster."""
        remove_left_behind(self.folder)
        temporary = temporary_beside(self.folder)
        with writing_to(self.folder, FileError):
            temporary.mkdir()
        self._write_note(temporary, _MARK, {}, {})
        try:
            # The mark is in it before it has its name: no process sees a folder without one.
            temporary.rename(self.folder)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)

    def throw_away(self) -> None:
        """Remove the folder of the work, if it is ours."""
        if self._is_ours():
            shutil.rmtree(self.folder, ignore_errors=True)

    def _is_ours(self) -> bool:
        """Has a process of ours marked the folder; one of a version before had notes only."""
        for path in self.folder.glob("*.json"):
            with contextlib.suppress(OSError, ValueError):
                # By its beginning: a note may be long, and is not believed here but recognised.
                if b'"format": "ziggurat.unit"' in path.read_bytes()[:200]:
                    return True
        return False

    def _is_as_noted(self, left: dict[str, tuple[int, str]]) -> bool:
        for name, (num_bytes, digest) in left.items():
            path = self.folder / name
            try:
                if path.stat().st_size != num_bytes or sha256_of(path) != digest:
                    return False
            except OSError:
                return False
        return True

    def _finished(self) -> list[str]:
        """Names of units that took time."""
        return [path.stem for path in self.folder.glob("*.json") if path.stem not in (PLAN, _MARK)]

    def note(self, name: str) -> Note | None:
        """The result of a unit that is done; None of one that is not."""
        content = self._read(name)
        return None if content is None else content["result"]

    def _read(self, name: str) -> _Content | None:
        path = self.folder / f"{name}.json"
        if not path.exists():
            return None
        try:
            content: _Content = NOTE.read(path)
            host, boot = content["by"]
            if content["unit"] != name or not isinstance(content["left"], dict) or "result" not in content:
                return None
            # After a power cut, what the note speaks of may never have reached the disk.
            return None if host == platform.node() and boot != boot_id() else content
        except (ZigguratError, KeyError, ValueError, TypeError):
            return None  # torn, or of a version before: the unit is done again

    def once(self, name: str, make: Callable[[], Note], *, leaves: Callable[[], Iterable[Path]] = tuple) -> Note:
        """The result of a unit: made now, or by another process, or before. An error of `make` is the caller's.

        Args:
            name: of the unit.
            make: makes it.
            leaves: the files and folders that it has left, below `folder`, once it is made.
        """
        # Asked again after each wait, as the process that has the unit may die.
        while (found := self.note(name)) is None:
            with self.claimed(name) as is_mine:
                # Another process may have finished it between the look above and the claim.
                if is_mine and self.note(name) is None:
                    self.keep(name, make(), left=leaves())
            if not is_mine:
                self.wait()
        return found

    def each(
        self,
        names: Sequence[str],
        make: Callable[[str], Note],
        *,
        leaves: Callable[[str], Iterable[Path]] = lambda name: (),
        threads: int = 1,
        tick: Callable[[], None] = lambda: None,
    ) -> list[Note]:
        """The results of units, of which those that nobody works on are made here; returns when all are done.

        Args:
            names: of the units.
            make: makes one of them; called in another thread if there are several, and asked to end by `stopped`.
            leaves: the files and folders that a unit has left, below `folder`, once it is made.
            threads: that make units at the same time.
            tick: called from time to time, in this thread.
        """
        if threads == 1:
            self._work_off(names, make, leaves)
        else:
            self._work_off_in_threads(names, make, leaves=leaves, threads=threads, tick=tick)
        # Read back for all, since other processes have made some of them.
        results = []
        for name in names:
            result = self.note(name)
            if result is None:
                raise FileError(
                    expected="the note of a unit that is done",
                    found="it cannot be read back",
                    where=str(self.folder / f"{name}.json"),
                    ways_out="give the same command again: it goes on with the units that are done",
                )
            results.append(result)
        return results

    def _work_off_in_threads(
        self,
        names: Sequence[str],
        make: Callable[[str], Note],
        *,
        leaves: Callable[[str], Iterable[Path]],
        threads: int,
        tick: Callable[[], None],
    ) -> None:
        self.stopped.clear()
        with ThreadPoolExecutor(threads, thread_name_prefix="ziggurat-unit") as pool:
            workers = {pool.submit(self._work_off, names, make, leaves) for _ in range(threads)}
            try:
                while workers:
                    done, workers = wait(workers, timeout=_POLL_S, return_when=FIRST_COMPLETED)
                    for worker in done:
                        # The first error of a thread ends the others.
                        worker.result()
                    tick()
            except BaseException:
                self.stopped.set()
                raise

    def _work_off(
        self,
        names: Sequence[str],
        make: Callable[[str], Note],
        leaves: Callable[[str], Iterable[Path]],
    ) -> None:
        rest = list(names)
        while rest and not self.stopped.is_set():
            for name in rest:
                with self.claimed(name) as is_mine:
                    if is_mine and self.note(name) is None and not self.stopped.is_set():
                        self._making.add(name)
                        result = make(name)
                        self.keep(name, result, left=leaves(name))
                        self._making.discard(name)
            # Those that another thread makes are not waited for here: that thread will finish them.
            rest = [name for name in rest if self.note(name) is None and name not in self._making]
            if rest and not self.stopped.is_set():
                self.wait()

    @contextmanager
    def claimed(self, name: str) -> Iterator[bool]:
        """Work on a unit, if nobody else does."""
        # Others have published the whole work, and its folder is gone or will be.
        if self.target.exists() or not self.folder.exists():
            raise PublishedError
        with writing_to(self.target, FileError):
            file = (self.folder / f"{name}.lock").open("w")
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True
        finally:
            with contextlib.suppress(OSError):  # as above
                file.close()

    def keep(self, name: str, result: Note, *, left: Iterable[Path] = ()) -> None:
        """Note that a unit is done, and what its files hold."""
        # Sorted, so that a note is the same whatever order the file system lists in.
        files = [each for path in left for each in ([path] if path.is_file() else sorted(path.rglob("*")))]
        held = {
            str(path.relative_to(self.folder)): (path.stat().st_size, sha256_of(path))
            for path in files
            if path.is_file()
        }
        self._write_note(self.folder, name, result, held)

    def _write_note(self, folder: Path, name: str, result: Note, held: dict[str, tuple[int, str]]) -> None:
        content = {"unit": name, "by": [platform.node(), boot_id()], "result": result, "left": held}
        NOTE.write(folder / f"{name}.json", content)

    def _locked(self, kind: int) -> bool:
        try:
            # Never blocking: who waits says so, and can be told to end.
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


def damaged_line(units: Sequence[str]) -> str:
    """Say which units were damaged, for a person."""
    return f"of what was left, this was damaged, and is made anew: {', '.join(units)}"
