"""Folders that belong to one running server and go with it, however it ends.

    /tmp/ziggurat-serve-x7k2a9/        lock   metrics/   admin.sock
    exports/.ziggurat-served-p0q8d1/   lock   1/films/…

The server and all processes that it forks hold the kernel's lock of the folder, through one descriptor that they
inherit. So the lock says whether any of them still runs, after `kill -9`, too, and needs no process ids, which are used
again. A server that ends deletes its folder. What a killed one left, the last of its workers deletes when it has
answered what it took; where these were killed as well, the next server that makes such a folder in the same place does.

The folder itself is locked as well: systemd-tmpfiles, which deletes what is old in /tmp, passes over locked folders.
Other programs do not, so `make_again` makes a folder that is gone a second time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_LOCK = "lock"
_TEMPORARY = ".new-"  # without a lock yet: no server may take it for an abandoned one


class OwnFolder:
    """A folder that no other server uses; made when it is constructed.

    Args:
        parent: the folder in which it is made.
        prefix: of its name.

    Raises:
        OSError: there is no room, or no permission.
    """

    def __init__(self, *, parent: Path, prefix: str) -> None:
        delete_abandoned(parent, prefix=prefix)
        # Under another name until it is locked, so that no other server takes it for a dead one's.
        temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY + prefix, dir=parent))
        self._lock_folder(temporary)
        self.path = temporary.with_name(temporary.name.removeprefix(_TEMPORARY))
        temporary.rename(self.path)

    def make_again(self) -> bool:
        """Make the folder again, empty, if somebody has deleted it; return whether somebody had.

        Raises:
            OSError: there is no room, or something else stands at its path.
        """
        # Never through a link: in a folder for all users somebody else may have put one at the path.
        with contextlib.suppress(FileNotFoundError):
            if self._folder != -1 and os.path.samestat(self.path.lstat(), os.fstat(self._folder)):
                return False
        self.path.mkdir(mode=0o700)
        self.release()
        try:
            self._lock_folder(self.path)
        except OSError:
            self.release()
            shutil.rmtree(self.path, ignore_errors=True)
            raise
        return True

    def _lock_folder(self, folder: Path) -> None:
        self._lock = self._folder = -1
        self._lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a file system may lock no folders
            fcntl.flock(self._folder, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def delete(self) -> None:
        """Delete the folder: its server ends."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Release the lock of the folder in this process."""
        for descriptor in (self._lock, self._folder):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._lock = -1
        self._folder = -1

    def delete_if_last(self) -> None:
        """Delete the folder if this process is the last one with its lock; the server has ended."""
        self.release()
        _delete_if_unlocked(self.path)


def delete_abandoned(parent: Path, *, prefix: str) -> None:
    """Delete the folders of servers that were killed with all their workers.

    Args:
        parent: the folder in which they are.
        prefix: of their names.
    """
    with contextlib.suppress(OSError):
        for each in sorted(parent.glob(f"{prefix}*")):
            if each.is_dir() and not each.is_symlink() and each.stat().st_uid == os.geteuid():
                _delete_if_unlocked(each)


def _delete_if_unlocked(folder: Path) -> None:
    """Delete a folder whose lock no process has; one without a lock file is not a server's."""
    try:
        # No link is followed: in a folder for all users it may lead to a file of somebody else.
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # a running process has it
        return
    else:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
