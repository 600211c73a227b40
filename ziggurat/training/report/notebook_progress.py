"""A live bar in a notebook: one output that changes in its place, where lines would fill the page.

    epoch 2/5  [=======        ]  41,984/99,000  loss 0.4310 · 61,000 samples/s

IPython is never imported here: where a notebook runs, it is there already. What is said stands above the bar as text.
"""

from __future__ import annotations

import sys
import time
from html import escape
from typing import Protocol

_EVERY_S = 0.25


class _Shown(Protocol):
    """Output that can be replaced where it stands: IPython's `DisplayHandle`."""

    def update(self, shown: object, /) -> object:
        """Put something else in its place."""
        ...


class _Display(Protocol):
    """The part of the module `IPython.display` that is used."""

    def display(self, shown: object, /, *, display_id: bool) -> _Shown | None:
        """Show something in the cell's output."""
        ...

    def HTML(self, text: str, /) -> object:  # noqa: N802  # its own name
        """Make a piece of HTML that can be shown."""
        ...


class NotebookProgress:
    """Shows phases of long work in the output of a notebook's cell.

    Args:
        display: module `IPython.display`.
        verbose: print details as well; see `Progress.detail`.
    """

    def __init__(self, display: _Display, *, verbose: bool = False) -> None:
        self._display = display
        self._verbose = verbose
        self._shown: _Shown | None = None
        self._what = ""
        self._total: int | None = None
        self._done = 0
        self._note = ""
        self._drawn_at = 0.0

    def begin(self, what: str, *, total: int | None) -> None:
        """Show a phase, in the place of the one before it."""
        self._what = what
        self._total = total
        self._done = 0
        self._note = ""
        if self._shown is None:
            self._shown = self._display.display(self._html(), display_id=True)
        self._draw()

    def update(self, done: int, *, note: str = "", total: int | None = None) -> None:
        """Move the bar, at most four times a second; see `Progress.update`."""
        self._total = self._total if total is None else total
        self._done = done
        self._note = note
        if time.monotonic() - self._drawn_at >= _EVERY_S:
            self._draw()

    def say(self, text: str) -> None:
        """Print a line."""
        sys.stdout.write(f"{text}\n")

    def detail(self, text: str) -> None:
        """Print a line that explains a run, where it is asked for."""
        if self._verbose:
            self.say(text)

    def end(self) -> None:
        """Show the phase as it is at its end."""
        self._draw()

    def _draw(self) -> None:
        if self._shown is not None:
            self._shown.update(self._html())
            self._drawn_at = time.monotonic()

    def _html(self) -> object:
        share = f"{self._done:,}/{self._total:,}" if self._total else f"{self._done:,}"
        bounds = f' value="{min(self._done, self._total)}" max="{self._total}"' if self._total else ""
        words = escape(" ".join(filter(None, (share, self._note))))
        return self._display.HTML(f"<div>{escape(self._what)} <progress{bounds}></progress> <code>{words}</code></div>")


def bar_in_notebook(*, verbose: bool = False) -> NotebookProgress | None:
    """A bar in the output of a notebook's cell; None where this process is none's kernel."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if getattr(shell, "kernel", None) is None:
        return None
    import IPython.display  # pyright: ignore[reportMissingImports]  it is there: this is its kernel

    return NotebookProgress(IPython.display, verbose=verbose)
