"""What a person sees while a run goes on: a live bar on a terminal, a line every ten seconds elsewhere.

The trainer speaks to a `Progress`; `show_progress()` picks the right one. Silence is `NoProgress`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Protocol, TextIO

from ziggurat.files.streams import say_to


class Progress(Protocol):
    """What long work reports to."""

    def begin(self, what: str, *, total: int | None) -> None:
        """A new phase of `total` units (None: unknown) starts."""
        ...

    def update(self, done: int, *, note: str = "") -> None:
        """`done` units of the phase are done; `note` holds rate, loss and the like."""
        ...

    def say(self, text: str) -> None:
        """A line worth keeping (an evaluation, a checkpoint that was damaged)."""
        ...

    def end(self) -> None:
        """The phase is over."""
        ...


class NoProgress:
    """A progress display that shows nothing."""

    def begin(self, what: str, *, total: int | None) -> None:
        """Show nothing."""

    def update(self, done: int, *, note: str = "") -> None:
        """Show nothing."""

    def say(self, text: str) -> None:
        """Show nothing."""

    def end(self) -> None:
        """Show nothing."""


class RowsOfAll:
    """Shows what all ranks have done together, given what the first of them has done: they go on in step.

    Args:
        progress: where to show it.
        num_ranks: how many work alike.
        total: units of all of them.
    """

    def __init__(self, progress: Progress, *, num_ranks: int, total: int) -> None:
        self._progress, self._num_ranks, self._total = progress, num_ranks, total

    def begin(self, what: str, *, total: int | None) -> None:
        """A new phase."""
        self._progress.begin(what, total=total)

    def update(self, done: int, *, note: str = "") -> None:
        """`done` units of the first rank."""
        self._progress.update(min(done * self._num_ranks, self._total), note=note)

    def say(self, text: str) -> None:
        """Print a line."""
        self._progress.say(text)

    def end(self) -> None:
        """All ranks have done their part."""
        self._progress.update(self._total)
        self._progress.end()


class LineProgress:
    """Plain lines for logs and pipes: one every `every_s` seconds and one at each end."""

    def __init__(self, stream: TextIO, *, every_s: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._every_s, self._clock = stream, every_s, clock
        self._what, self._total, self._last = "", None, 0.0
        self._latest = ""

    def begin(self, what: str, *, total: int | None) -> None:
        """Remember the phase."""
        self._what, self._total, self._last, self._latest = what, total, self._clock(), ""

    def update(self, done: int, *, note: str = "") -> None:
        """Print if the last line is old enough."""
        share = f"{done:,}/{self._total:,} ({100 * done / self._total:.0f} %)" if self._total else f"{done:,}"
        self._latest = f"{self._what}: {share} {note}".rstrip()
        if self._clock() - self._last >= self._every_s:
            self._last = self._clock()
            self.say(self._latest)

    def say(self, text: str) -> None:
        """Print one line; where nobody can read it (a full disk, a closed pipe), the work goes on without."""
        say_to(self._stream, text + "\n")

    def end(self) -> None:
        """Print the last state."""
        if self._latest:
            self.say(self._latest)
        self._latest = ""


def show_progress() -> Progress:
    """A bar on a terminal, lines elsewhere and where the package rich is not there; both on standard error.

    Standard output stays free for what is piped.
    """
    try:
        from ziggurat.training.report.progress_bar import bar_on_terminal
    except ImportError:
        return _lines()
    return bar_on_terminal() or _lines()


def _lines() -> Progress:
    # Python has no standard error where the process was started with it closed.
    return NoProgress() if sys.stderr is None else LineProgress(sys.stderr)
