"""Show a person how a run goes on: a live bar in a notebook or on a terminal, lines elsewhere.

The trainer speaks to a `Progress`; `show_progress()` picks the right one. Silence is `NoProgress`.

    say       what everybody must see: warnings, what is being trained, where a run goes on
    detail    what explains a run: the start-up report, every evaluation; shown with `--verbose`, kept in run.log

Without `--verbose` a phase that ends leaves nothing behind, and in a log the time between two lines of progress grows
from ten seconds to a minute: a run of seconds prints its result, a run of hours is still seen to live.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Protocol, TextIO

from ziggurat.files.streams import say_to
from ziggurat.training.report.notebook_progress import bar_in_notebook

_LONGEST_PAUSE_S = 60.0


class Progress(Protocol):
    """The interface that long work reports to."""

    def begin(self, what: str, *, total: int | None) -> None:
        """A new phase of `total` units (None: unknown) starts."""
        ...

    def update(self, done: int, *, note: str = "", total: int | None = None) -> None:
        """Show that `done` units of the phase are done.

        Args:
            done: so far.
            note: rate, loss and the like.
            total: units of the phase, where they are now known better than when it began.
        """
        ...

    def say(self, text: str) -> None:
        """Show a line that nobody may miss: a warning, a checkpoint that was damaged."""
        ...

    def detail(self, text: str) -> None:
        """Show a line to whoever asked for all of them: the start-up report, an evaluation."""
        ...

    def end(self) -> None:
        """The phase is over."""
        ...


class NoProgress:
    """A progress display that shows nothing."""

    def begin(self, what: str, *, total: int | None) -> None:
        """Show nothing."""

    def update(self, done: int, *, note: str = "", total: int | None = None) -> None:
        """Show nothing."""

    def say(self, text: str) -> None:
        """Show nothing."""

    def detail(self, text: str) -> None:
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
        self._progress = progress
        self._num_ranks = num_ranks
        self._total = total

    def begin(self, what: str, *, total: int | None) -> None:
        """A new phase."""
        self._progress.begin(what, total=total)

    def update(self, done: int, *, note: str = "", total: int | None = None) -> None:
        """Show `done` units of the first rank as those of all."""
        self._progress.update(min(done * self._num_ranks, self._total), note=note)

    def say(self, text: str) -> None:
        """Print a line."""
        self._progress.say(text)

    def detail(self, text: str) -> None:
        """Print a line to whoever asked for all of them."""
        self._progress.detail(text)

    def end(self) -> None:
        """All ranks have done their part."""
        self._progress.update(self._total)
        self._progress.end()


class LineProgress:
    """Plain lines for logs and pipes.

    Args:
        stream: where they go.
        every_s: seconds from the beginning, or from the last line of progress, to the next one.
        verbose: show details and the end of each phase too, and a line of progress every `every_s` seconds; otherwise
            this time doubles with each line, up to a minute.
        clock: seconds.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        every_s: float = 10.0,
        verbose: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._every_s = every_s
        self._verbose = verbose
        self._clock = clock
        self._what = ""
        self._total = None
        self._last = clock()
        self._latest = ""

    def begin(self, what: str, *, total: int | None) -> None:
        """Remember the phase."""
        self._what = what
        self._total = total
        self._latest = ""
        if self._verbose:
            self._last = self._clock()

    def update(self, done: int, *, note: str = "", total: int | None = None) -> None:
        """Print if the last line is old enough."""
        self._total = self._total if total is None else total
        share = f"{done:,}/{self._total:,} ({100 * done / self._total:.0f} %)" if self._total else f"{done:,}"
        self._latest = f"{self._what}: {share} {note}".rstrip()
        if self._clock() - self._last >= self._every_s:
            self._last = self._clock()
            if not self._verbose:
                self._every_s = min(2 * self._every_s, max(_LONGEST_PAUSE_S, self._every_s))
            self.say(self._latest)

    def say(self, text: str) -> None:
        """Print one line; where nobody can read it (a full disk, a closed pipe), the work goes on without."""
        say_to(self._stream, text + "\n")

    def detail(self, text: str) -> None:
        """Print one line to whoever asked for all of them."""
        if self._verbose:
            self.say(text)

    def end(self) -> None:
        """Print the last state to whoever asked for everything."""
        if self._latest:
            self.detail(self._latest)
        self._latest = ""


def show_progress(*, verbose: bool = False) -> Progress:
    """Show a bar in a notebook or on a terminal, lines elsewhere and where the package rich is not there.

    Bars of terminals and lines go to standard error: standard output stays free for what is piped.

    Args:
        verbose: show details as well; see `Progress.detail`.
    """
    if (bar := bar_in_notebook(verbose=verbose)) is not None:
        return bar
    try:
        from ziggurat.training.report.progress_bar import bar_on_terminal
    except ImportError:
        return _lines(verbose=verbose)
    return bar_on_terminal(verbose=verbose) or _lines(verbose=verbose)


def _lines(*, verbose: bool) -> Progress:
    # Python has no standard error where the process was started with it closed.
    return NoProgress() if sys.stderr is None else LineProgress(sys.stderr, verbose=verbose)
