"""Kill processes in the midst of their work, beside a reader that looks all the time at what they write."""

from __future__ import annotations

import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Self

_NAP_S = 0.001


def mark_begin(folder: Path) -> None:
    """Say in this process that its work begins: what is imported before is no part of a life."""
    (folder / f"begun-{os.getpid()}").touch()


def wait_for_begin(process: BaseProcess, folder: Path) -> None:
    """Wait until a process has called `mark_begin`, or is over."""
    while process.is_alive() and not (folder / f"begun-{process.pid}").exists():
        time.sleep(_NAP_S)


def kill_after(process: BaseProcess, seconds: float, *, longest_s: float) -> bool:
    """Kill a process after so many seconds; False if it came to its end before, which must be a good one.

    Args:
        process: that was started.
        seconds: from now.
        longest_s: that its end may take.
    """
    end = time.monotonic() + seconds
    while process.is_alive() and time.monotonic() < end:
        time.sleep(_NAP_S)
    is_killed = process.is_alive()
    if is_killed:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
    process.join(longest_s)
    assert is_killed or process.exitcode == 0
    return is_killed


class Polling(ABC):
    """Looks again and again, in a thread, while the block runs.

    Args:
        pause_s: between two looks.
    """

    def __init__(self, *, pause_s: float) -> None:
        self.problems: list[str] = []
        self._pause_s = pause_s
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join(60)

    def _run(self) -> None:
        while not self._ends.wait(self._pause_s):
            self.look()

    @abstractmethod
    def look(self) -> None:
        """Look once, and keep what is wrong in `problems`."""
