"""Show a live bar on a terminal. It needs the package rich, which machines for training alone may not have.

    120 columns   epoch 3/27 ━━━━━━━━━━━━━ 2,560/4,800 loss 0.5487 · 21,914 samples/s 0:00:03 ETA 0:00:02
    80 columns    epoch 3/27  53% loss 0.5487 · 21,914 samples/s ETA 0:00:02
    40 columns    epoch 3/27  53% ETA 0:00:02

A narrow terminal gets fewer parts, each of them whole: half a number is a wrong number.
"""

from __future__ import annotations

import contextlib
import sys

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichBar

from ziggurat.files.streams import folded

_WIDE = 100
_MIDDLE = 60
_BAR = 20
_BETWEEN = " · "


class BarProgress:
    """A live bar with rate, ETA and a note, for terminals.

    Args:
        console: the terminal.
        verbose: show details too, and leave finished bars on the screen.
    """

    def __init__(self, console: Console, *, verbose: bool = False) -> None:
        self._console = console
        self._verbose = verbose
        self._bar: RichBar | None = None
        self._task = None
        self._room = 0  # columns for the note

    def begin(self, what: str, *, total: int | None) -> None:
        """Show a new bar."""
        self.end()
        self._bar = RichBar(
            *_columns(self._console.width),
            console=self._console,
            refresh_per_second=4,
            transient=not self._verbose,
        )
        with contextlib.suppress(OSError):  # the terminal is gone; the work goes on
            self._bar.start()
        self._task = self._bar.add_task(what, total=total, note="")
        self._room = _room_of_note(self._console.width, what=what, total=total)

    def update(self, done: int, *, note: str = "", total: int | None = None) -> None:
        """Move the bar."""
        if self._bar is not None and self._task is not None:
            with contextlib.suppress(OSError):
                self._bar.update(self._task, completed=done, note=_fitting(note, self._room), total=total)

    def say(self, text: str) -> None:
        """Print above the bar; a word that is longer than a line is left to the terminal, which folds it whole."""
        with contextlib.suppress(OSError):
            self._console.print(folded(text, width=self._console.width), highlight=False, markup=False, soft_wrap=True)

    def detail(self, text: str) -> None:
        """Print above the bar for whoever asked for everything."""
        if self._verbose:
            self.say(text)

    def end(self) -> None:
        """Remove the bar, or leave it on the screen of whoever asked for everything."""
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.stop()
        self._bar = self._task = None


def _columns(width: int) -> list[ProgressColumn]:
    """The parts of a bar that a terminal has room for."""
    what = TextColumn("[bold]{task.description}")
    rest = TimeRemainingColumn()
    if width < _MIDDLE:
        return [what, TaskProgressColumn(), TextColumn("ETA"), rest]
    if width < _WIDE:
        return [what, TaskProgressColumn(), TextColumn("{task.fields[note]}"), TextColumn("ETA"), rest]
    counts = MofNCompleteColumn()
    note = TextColumn("{task.fields[note]}")
    return [what, BarColumn(_BAR), counts, note, TimeElapsedColumn(), TextColumn("ETA"), rest]


def _room_of_note(width: int, *, what: str, total: int | None) -> int:
    """Return how many columns the other parts of a bar leave for its note."""
    room = width - len(what) - len("100% ETA 0:00:00   ")
    if width < _WIDE:
        return room
    return room - _BAR - len(f" {total or 10**9}/{total or 10**9} ") - len("0:00:00 ")


def _fitting(note: str, room: int) -> str:
    """Leave out the last parts of a note, so that what is shown is whole."""
    parts = note.split(_BETWEEN)
    while parts and len(_BETWEEN.join(parts)) > room:
        parts.pop()
    return _BETWEEN.join(parts)


def bar_on_terminal(*, verbose: bool = False) -> BarProgress | None:
    """Return a bar on standard error; None where that is no terminal."""
    if sys.stderr is None:  # closed when the process began
        return None
    console = Console(stderr=True)
    return BarProgress(console, verbose=verbose) if console.is_terminal else None
