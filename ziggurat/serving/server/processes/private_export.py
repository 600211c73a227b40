"""The copy of an export that a server serves, so that nobody can change it under the server.

    exports/films/                                what `ziggurat export --out exports/films` may replace at any time
    exports/.ziggurat-served-host-x7k2a9/1/films/ what the workers of the first generation load

Without it, a worker that takes the place of a dead one loads what the path leads to by then, and two versions answer
side by side; and a file that is overwritten *in place* (`cp`, `rsync --inplace`) changes under those that have mapped
it. The copy lies beside the export, on the same file system. Its files share their blocks with the export's where the
system can (btrfs, XFS, bcachefs: `FICLONE`), which costs nothing; else their bytes are copied, once a version.

Where less than twice the export's bytes are free, its files are hard links to the export's, and the server says so:
they outlive any replacement of the export, but show what is written in place. Where nothing can be made (a read-only
volume), the server says so and loads the export itself. The supervisor lets only workers of one version into one
generation all the same.

A version of a published folder (`published_folder.py`) is never written in place: its copy is hard links, whatever
room there is. While workers load it or serve it, it is held, so that who publishes does not remove it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import socket
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ziggurat.errors import ZigguratError
from ziggurat.serving.export.published_folder import Lease, is_version
from ziggurat.serving.server.processes.own_folder import OwnFolder
from ziggurat.typed import quoted

_log = logging.getLogger("ziggurat.server")
_PREFIX = ".ziggurat-served-"
_FICLONE = 0x40049409  # of linux/fs.h: share the blocks of another file
_ROOM = 2  # times the bytes of an export that must be free, so that a copy fills nobody's disk


@dataclass(frozen=True, kw_only=True)
class PrivateExport:
    """The place of a copy, which the first process that needs it makes.

    Args:
        source: folder of the export, without links in its path.
        place: of the copy; the same as `source` where there can be none.
    """

    source: Path
    place: Path

    def make(self) -> Path:
        """Return the folder to load: the copy, made if it is not there yet; the export where there can be none.

        Processes that make it at the same time make it once.
        """
        if self.place == self.source or self.place.is_dir():
            return self.place
        try:
            self.place.parent.mkdir(exist_ok=True)
            lock = os.open(self.place.parent / "making", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                # Workers start one after the other and together: the first one copies, the others wait for it.
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not self.place.is_dir():
                    self._make()
            finally:
                os.close(lock)
        except OSError as problem:
            _warn_no_copy(self.source, problem)
            # Without a copy it can be served all the same, as long as nobody writes into it.
            return self.source
        return self.place

    def _make(self) -> None:
        temporary = self.place.with_name("being-made")
        shutil.rmtree(temporary, ignore_errors=True)  # what a killed process left
        folder = os.open(self.source, os.O_RDONLY | os.O_DIRECTORY)
        try:
            source = Path(f"/proc/self/fd/{folder}")  # the same folder, if its path leads elsewhere now
            room = shutil.disk_usage(self.place.parent).free
            num_bytes = _bytes_in(source)
            is_final = is_version(self.source)
            files = _Files(may_copy=_ROOM * num_bytes <= room and not is_final)
            _copy_folder(source, temporary, files)
            if files.num_links and not is_final:
                _log.warning(
                    "%s: %s bytes are free, too few for a copy of %s: it is served through hard links. "
                    "Replace it as you like, but do not write into its files",
                    *(quoted(str(self.source)), f"{room:,}", f"{num_bytes:,}"),
                )
        finally:
            os.close(folder)
        # The name comes last: a process that finds the folder under it finds it complete.
        temporary.rename(self.place)

    def of_source(self, error: ZigguratError) -> ZigguratError:
        """Return an error with the export's own path for that of the copy."""

        def named(text: str) -> str:
            return text.replace(str(self.place), str(self.source))

        return type(error)(
            expected=named(error.expected),
            found=named(error.found),
            where=named(error.where),
            ways_out=tuple(named(way) for way in error.ways_out),
        )


class PrivateExports:
    """The copies of one server, by generation."""

    def __init__(self) -> None:
        self._folders: dict[Path, OwnFolder | None] = {}
        self._places: dict[int, PrivateExport] = {}
        self._leases: dict[int, Lease] = {}

    def of(self, source: Path, *, generation: int) -> PrivateExport:
        """Return the place for the copy of an export.

        Args:
            source: folder of the export, without links in its path.
            generation: of workers that load it.
        """
        if generation not in self._places:
            self._leases[generation] = Lease(source)
            own = self._own_folder(source.parent)
            place = source if own is None else own.path / str(generation) / source.name
            self._places[generation] = PrivateExport(source=source, place=place)
        return self._places[generation]

    def keep(self, generations: Collection[int]) -> None:
        """Delete the copies of all other generations: nobody serves them any more."""
        # A list of its own, since the loop takes entries out.
        for generation in [each for each in self._places if each not in generations]:
            export = self._places.pop(generation)
            self._leases.pop(generation).release()
            # Never the export itself, which is no copy of ours.
            if export.place != export.source:
                shutil.rmtree(export.place.parent, ignore_errors=True)

    def delete(self) -> None:
        """Delete all copies: the server ends."""
        for lease in self._leases.values():
            lease.release()
        for own in self._folders.values():
            if own is not None:
                own.delete()

    def delete_if_last(self) -> None:
        """Delete them if this process is the last of the server."""
        for own in self._folders.values():
            if own is not None:
                own.delete_if_last()

    def _own_folder(self, parent: Path) -> OwnFolder | None:
        """Return the server's folder beside exports, or None where none can be made."""
        if parent not in self._folders:
            machine = re.sub(r"[^A-Za-z0-9]", "", socket.gethostname())[:40]  # locks of another machine may not be seen
            try:
                self._folders[parent] = OwnFolder(parent=parent, prefix=f"{_PREFIX}{machine}-")
            except OSError as problem:
                _warn_no_copy(parent, problem)
                self._folders[parent] = None
        return self._folders[parent]


def _warn_no_copy(where: Path, problem: OSError) -> None:
    # The path may have come with a request, and a line end in it must begin no line of the log.
    shown = quoted(str(where))
    _log.warning("no private copy of an export in %s (%s): do not replace or change what is served", shown, problem)


@dataclass(kw_only=True)
class _Files:
    """The way in which the files of a copy are made.

    Args:
        may_copy: there is room for their bytes.
        num_links: files that are hard links, since they could neither share blocks nor be copied.
    """

    may_copy: bool
    num_links: int = 0

    def make(self, source: Path, to: Path) -> None:
        """Share the blocks of a file, or else copy it, or else link it."""
        if _shared(source, to):
            return
        # A link costs no room, but who writes into the file changes it here, too.
        if not self.may_copy:
            with contextlib.suppress(OSError):
                os.link(source, to, follow_symlinks=False)
                self.num_links += 1
                return
        # Also where a link was refused: the room was only estimated.
        shutil.copyfile(source, to, follow_symlinks=False)


def _shared(source: Path, to: Path) -> bool:
    """Make a file that shares the blocks of another one; False, and no file, where the file system cannot."""
    with source.open("rb") as from_file, to.open("xb") as to_file:
        try:
            fcntl.ioctl(to_file.fileno(), _FICLONE, from_file.fileno())
        except OSError:  # another file system, or one that shares no blocks
            pass
        else:
            return True
    # The empty file would be in the way of the copy or link that is made next.
    to.unlink()
    return False


def _bytes_in(folder: Path) -> int:
    """Return the size of all files below a folder."""
    total = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                total += _bytes_in(Path(entry.path))
            elif entry.is_file(follow_symlinks=False):
                total += entry.stat(follow_symlinks=False).st_size
    return total


def _copy_folder(source: Path, to: Path, files: _Files) -> None:
    """Copy files and folders; links stay links, for who loads them to refuse; pipes and devices are left out."""
    to.mkdir()
    with os.scandir(source) as entries:
        for entry in entries:
            target = to / entry.name
            if entry.is_symlink():
                target.symlink_to(os.readlink(entry.path))
            elif entry.is_dir(follow_symlinks=False):
                _copy_folder(Path(entry.path), target, files)
            elif entry.is_file(follow_symlinks=False):
                files.make(Path(entry.path), target)
