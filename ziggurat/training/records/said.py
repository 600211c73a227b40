"""Keep in run.log all that a run says: the start-up report, every evaluation, every warning.

    trainer ─► KeptProgress ─┬─► the screen: ten lines, or all of them with --verbose
                             └─► run.log: all of them, each with its time

The file is only ever added to: a run that goes on writes below what it said before, and a file of this name that is
somebody's own keeps what is in it. A start that is refused leaves no trace: its lines wait in memory until `open`.

A run that fails ends with its error, in all its parts. On ranks whoever failed writes it: all append to the one file,
an error that all of them raise stands there once, and that a rank is gone is said by the first rank alone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from ziggurat.errors import TopologyError
from ziggurat.training.report.progress import Progress

_STAMP = "%Y-%m-%d %H:%M:%S"


class KeptProgress:
    """Shows progress, and appends every line that is said to a file.

    Args:
        progress: where to show it.
        path: of the file, in a folder that is there when it is opened.
    """

    def __init__(self, progress: Progress, *, path: Path) -> None:
        self._progress = progress
        self._path = path
        self._waiting: list[str] = []
        self._is_open = False
        self._is_lost = False

    def open(self) -> None:
        """Write what was said so far, and everything from now on: the run begins, or goes on."""
        self._is_open = True
        waiting = self._waiting
        self._waiting = []
        self._write(waiting)

    def begin(self, what: str, *, total: int | None) -> None:
        """Begin a phase, of which the file says nothing."""
        self._progress.begin(what, total=total)

    def update(self, done: int, *, note: str = "", total: int | None = None) -> None:
        """Show progress."""
        self._progress.update(done, note=note, total=total)

    def say(self, text: str) -> None:
        """Show a line, and keep it."""
        self._progress.say(text)
        self.keep(text)

    def detail(self, text: str) -> None:
        """Show a line to whoever asked for all of them, and keep it."""
        self._progress.detail(text)
        self.keep(text)

    def end(self) -> None:
        """End a phase."""
        self._progress.end()

    @contextlib.contextmanager
    def keeping_error(self, *, rank: int | None) -> Iterator[None]:
        """Write an error that is raised in here into the file, and let it pass.

        Args:
            rank: of this process; None for a run on one device.
        """
        start = self._path.stat().st_size if self._path.is_file() else 0
        try:
            yield
        except Exception as error:
            is_of_others = bool(rank) and isinstance(error, TopologyError)
            if self._path.is_file() and not is_of_others and not self._has(str(error), start=start):
                who = "" if rank is None else f"rank {rank}: "
                self._write(_stamped(f"{who}{type(error).__name__}\n{error}"))
            raise

    def _has(self, text: str, *, start: int) -> bool:
        """Return whether another rank has written this into the file, from a byte of it on."""
        with self._path.open("rb") as file:
            file.seek(start)
            lines = file.read().decode(errors="replace").splitlines()
        return text in "\n".join(line[len(time.strftime(_STAMP)) + 2 :] for line in lines)

    def keep(self, text: str) -> None:
        """Write a line into the file alone."""
        lines = _stamped(text)
        if self._is_open:
            self._write(lines)
        else:
            self._waiting += lines

    def _write(self, lines: list[str]) -> None:
        """Add lines to the file; where that cannot be, say so once: the run has other files to fail by."""
        if self._is_lost:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(lines)
        except OSError as error:
            self._is_lost = True
            self._progress.say(f"warning: {self._path} is not written any more: {error.strerror or error}")


def _stamped(text: str) -> list[str]:
    """Return the lines of a text with the time before each."""
    now = time.strftime(_STAMP)
    return [f"{now}  {line}\n" for line in text.strip("\n").split("\n")]
