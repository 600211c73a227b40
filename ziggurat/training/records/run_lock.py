"""Let one process at a time write to the folder of a run, over all processes that see the folder.

Two resumes of one run would cut each other's log and ledger, and the one that ends last would win without a word. So
the process that trains holds `.lock` in the folder (`files/locking.py`) from before its first file to its end.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from ziggurat.errors import ConfigError, FileError
from ziggurat.files import FileLock, writing_to

_NAME = ".lock"
_PATIENCE_S = 5.0  # a process that was just killed gives its lock back when its last write has returned
_POLL_S = 0.05


class RunLock:
    """The right to write to a run's folder; a context manager that gives it back, whoever took it inside.

    Args:
        folder: of the run; made when the lock is taken, and removed again if nothing else came to be in it.
        patience_s: how long to wait for another process to end.
    """

    def __init__(self, folder: Path, *, patience_s: float = _PATIENCE_S) -> None:
        self._folder = folder
        self._patience_s = patience_s
        self._lock = FileLock(folder / _NAME)
        self._made: list[Path] = []

    @property
    def is_held(self) -> bool:
        """True between `acquire` and `release` of this object."""
        return self._lock.is_held

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            ConfigError: another process writes to this folder.
            FileError: the system refuses to make the folder or to lock a file there.
        """
        end = time.monotonic() + self._patience_s
        with writing_to(self._lock.path, FileError):
            while not self._is_taken():
                if time.monotonic() > end:
                    raise ConfigError(
                        expected="one process at a time that writes to the folder of a run",
                        found=f"another one that does: {self._lock.holder()}",
                        where=str(self._folder),
                        ways_out=(
                            "wait until it ends, or end it",
                            "train into another folder: --out runs/another_name",
                        ),
                    )
                time.sleep(_POLL_S)

    def _is_taken(self) -> bool:
        self._made = [each for each in (self._folder, *self._folder.parents) if not each.exists()]
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            return self._lock.take()
        except FileNotFoundError:
            # A process that was refused has removed the folder, which it had made, in this moment: made again.
            if self._folder.exists():
                raise
            return False

    def release(self) -> None:
        """Give the lock back; harmless if it is not held."""
        if not self.is_held:
            return
        self._lock.release()
        for folder in self._made:  # innermost first; stays if anything is in it
            with contextlib.suppress(OSError):
                folder.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
