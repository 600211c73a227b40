"""A live bar on a terminal. It needs the package rich, which machines for training alone may not have."""

from __future__ import annotations

import contextlib
import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichBar


class BarProgress:
    """A live bar with rate, ETA and a note, for terminals."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: RichBar | None = None
        self._task = None

    def begin(self, what: str, *, total: int | None) -> None:
        """Show a new bar."""
        self.end()
        self._bar = RichBar(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self._console,
            refresh_per_second=4,
        )
        with contextlib.suppress(OSError):  # the terminal is gone; the work goes on
            self._bar.start()
        self._task = self._bar.add_task(what, total=total, note="")

    def update(self, done: int, *, note: str = "") -> None:
        """Move the bar."""
        if self._bar is not None and self._task is not None:
            with contextlib.suppress(OSError):
                self._bar.update(self._task, completed=done, note=note)

    def say(self, text: str) -> None:
        """Print above the bar."""
        with contextlib.suppress(OSError):
            self._console.print(text, highlight=False, markup=False)

    def end(self) -> None:
        """Leave the finished bar on the screen."""
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.stop()
        self._bar = self._task = None


def bar_on_terminal() -> BarProgress | None:
    """A bar on standard error; None where that is no terminal."""
    if sys.stderr is None:  # closed when the process began
        return None
    console = Console(stderr=True)
    return BarProgress(console) if console.is_terminal else None
