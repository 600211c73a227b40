"""Hold a file that only one process at a time may hold, over all processes that see the folder.

The system gives the lock (`flock`) back when a process ends, however it ends, so nothing has to be cleaned up after a
kill. Whoever gives it back deletes the file. A lock on a file that was deleted meanwhile guards nothing, so whoever
gets one looks whether the name still leads to the file that it locked, and takes that of the name where it does not.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ziggurat.errors import FileError, ZigguratError
from ziggurat.files.writing import writing_to

_MAX_HOLDER_BYTES = 200
_POLL_S = 0.02


class FileLock:
    """A lock file, which says who holds it.

    Args:
        path: of the file; its folder exists.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1

    @property
    def is_held(self) -> bool:
        """True between a successful `take` and `release` of this object."""
        return self._descriptor >= 0

    def take(self) -> bool:
        """Take the lock if nobody has it; returns whether this object holds it now.

        Raises:
            OSError: the system refuses to make the file, or cannot lock files there.
        """
        while True:
            # O_NOFOLLOW: through a link in its place, the truncation below would empty somebody else's file.
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            is_taken = False
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Whoever held it deletes the file while giving it back: what was locked here may have no name any
                # more. Nobody holds it then, so the file that has the name now is tried.
                if self._is_at_its_name(descriptor):
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
                    self._descriptor = descriptor
                    is_taken = True
                    return True
            except BlockingIOError:
                return False
            finally:
                if not is_taken:
                    os.close(descriptor)

    def take_within(self, patience_s: float) -> bool:
        """Take the lock, for which whoever has it is waited; return whether this object holds it now.

        Args:
            patience_s: how long to wait; `math.inf` for as long as it takes.

        Raises:
            OSError: as `take`.
        """
        end = time.monotonic() + patience_s
        while not self.take():
            if time.monotonic() > end:
                return False
            time.sleep(_POLL_S)
        return True

    def release(self) -> None:
        """Give the lock back; harmless if it is not held."""
        if not self.is_held:
            return
        # The name goes before the lock: the other way round, it would be taken away from whoever locks it in between.
        with contextlib.suppress(OSError):  # a name that stays locks nobody out
            self.path.unlink()
        descriptor = self._descriptor
        self._descriptor = -1
        with contextlib.suppress(OSError):  # Linux gives the descriptor back, and with it the lock, even then
            os.close(descriptor)

    def holder(self) -> str:
        """Return who holds it, for a message."""
        try:
            return self.path.read_bytes()[:_MAX_HOLDER_BYTES].decode(errors="replace") or "a process"
        except OSError:
            return "a process"

    def _is_at_its_name(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self.path.stat(follow_symlinks=False))
        except FileNotFoundError:
            return False


@contextlib.contextmanager
def locked(
    path: Path,
    *,
    busy: Callable[[str], ZigguratError] | None = None,
    patience_s: float = 0.0,
    waiting: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Hold a lock file inside the block.

    Args:
        path: of the file; its folder exists.
        busy: returns the error that is raised where it does not become free, of who holds it; None: wait for as long
            as it takes.
        patience_s: how long to wait; without effect where there is no `busy`.
        waiting: called once, where it is not free at once.

    Raises:
        FileError: the system refuses to make the file, or cannot lock files there.
    """
    lock = FileLock(path)
    with writing_to(path, FileError):
        if not lock.take():
            if waiting is not None:
                waiting()
            is_taken = lock.take_within(math.inf if busy is None else patience_s)
            if not is_taken and busy is not None:
                raise busy(lock.holder())
    try:
        yield
    finally:
        lock.release()
