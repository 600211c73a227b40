"""Let one process at a time write to the folder of a run, over all processes that see the folder.

Two resumes of one run would cut each other's log and ledger, and the one that ends last would win without a word. So
the process that trains holds `.lock` in the folder (`flock`) from before its first file to its end. The system gives
the lock back when a process ends, however it ends: nothing has to be cleaned up after a kill.

    .lock      who holds it, for the message; deleted at the end by the process that held it

A lock on a file that was deleted meanwhile guards nothing, so whoever gets one looks whether the name still leads to
the file that it locked, and begins again where it does not.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from ziggurat.errors import ConfigError, FileError
from ziggurat.files import writing_to

_NAME = ".lock"
_PATIENCE_S = 5.0  # a process that was just killed gives its lock back when its last write has returned
_POLL_S = 0.05
_MAX_HOLDER_BYTES = 200


class RunLock:
    """The right to write to a run's folder; a context manager that gives it back, whoever took it inside.

    Args:
        folder: of the run; made when the lock is taken, and removed again if nothing else came to be in it.
        patience_s: how long to wait for another process to end.
    """

    def __init__(self, folder: Path, *, patience_s: float = _PATIENCE_S) -> None:
        self._folder = folder
        self._path = folder / _NAME
        self._patience_s = patience_s
        self._descriptor = -1
        self._made: list[Path] = []

    @property
    def is_held(self) -> bool:
        """True between `acquire` and `release` of this object."""
        return self._descriptor >= 0

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            ConfigError: another process writes to this folder.
            FileError: the system refuses to make the folder or to lock a file there.
        """
        with writing_to(self._path, FileError):
            self._made = [each for each in (self._folder, *self._folder.parents) if not each.exists()]
            self._folder.mkdir(parents=True, exist_ok=True)
        end = time.monotonic() + self._patience_s
        while not self._try():
            if time.monotonic() > end:
                raise ConfigError(
                    expected="one process at a time that writes to the folder of a run",
                    found=f"another one that does: {self._holder()}",
                    where=str(self._folder),
                    ways_out=(
                        "wait until it ends, or end it",
                        "train into another folder: --out runs/another_name",
                    ),
                )
            time.sleep(_POLL_S)

    def release(self) -> None:
        """Give the lock back; harmless if it is not held."""
        if not self.is_held:
            return
        with contextlib.suppress(OSError):  # a name that stays locks nobody out
            self._path.unlink()
        descriptor = self._descriptor
        self._descriptor = -1
        with contextlib.suppress(OSError):  # Linux gives the descriptor back, and with it the lock, even then
            os.close(descriptor)
        for folder in self._made:  # innermost first; stays if anything is in it
            with contextlib.suppress(OSError):
                folder.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _try(self) -> bool:
        with writing_to(self._path, FileError):
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            with writing_to(self._path, FileError):
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
                if not self._is_at_its_name(descriptor):
                    return False
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
            self._descriptor = descriptor
            return True
        finally:
            if not self.is_held:
                os.close(descriptor)

    def _is_at_its_name(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self._path.stat(follow_symlinks=False))
        except FileNotFoundError:
            return False

    def _holder(self) -> str:
        try:
            return self._path.read_bytes()[:_MAX_HOLDER_BYTES].decode(errors="replace") or "a process"
        except OSError:
            return "a process"
