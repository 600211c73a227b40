"""Keep in run.log all that a run says: the start-up report, every evaluation, every warning.

    trainer ─► KeptProgress ─┬─► the screen: ten lines, or all of them with --verbose
                             └─► run.log: all of them, each with its time

The file is only ever added to: a run that goes on writes below what it said before, and a file of this name that is
somebody's own keeps what is in it. A start that is refused leaves no trace: its lines wait in memory until `open`.
"""

from __future__ import annotations

import time
from pathlib import Path

from ziggurat.training.report.progress import Progress


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

    def keep(self, text: str) -> None:
        """Write a line into the file alone."""
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        lines = [f"{now}  {line}\n" for line in text.strip("\n").split("\n")]
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
