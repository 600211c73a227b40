"""Write files and folders whole or not at all, so that a crash or a full disk leaves the old one or the new one.

temporary name in the same folder ─► fsync ─► rename ─► fsync of the folder
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ziggurat.cache import cache_folder
from ziggurat.errors import FileError, ZigguratError
from ziggurat.files.system_text import text_of

# A process of another machine that shares the disk cannot be seen from here; one that lives writes within an hour.
_LEFT_S = 3600.0
# Polars and safetensors say what the system refused in errors of their own.
_WRITERS = ("polars", "safetensors", "safetensors_rust")
_REFUSED = re.compile(r"I/?O error|os error \d+", re.IGNORECASE)
# Of Linux's fcntl.h and fs.h; Python has no names for them.
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def write_bytes(path: str | os.PathLike[str], content: bytes, *, error: type[ZigguratError] = FileError) -> Path:
    """Write a file so that a crash leaves the old one or the new one; makes the folder; returns the path.

    Raises:
        error: the system refuses (no room, no permission, a folder of that name); the old file is left as it was.
    """
    # Small files are written again and again, some in folders of thousands: nobody looks for what others left there.
    with replacing(path, error=error, removes_left=False) as temporary:
        temporary.write_bytes(content)
    return Path(path)


def write_text(path: str | os.PathLike[str], text: str, *, error: type[ZigguratError] = FileError) -> Path:
    """`write_bytes` of UTF-8 text."""
    return write_bytes(path, text.encode("utf-8"), error=error)


@contextmanager
def replacing(
    path: str | os.PathLike[str], *, error: type[ZigguratError] = FileError, removes_left: bool = True
) -> Iterator[Path]:
    """A temporary path in the folder of `path`, which takes the place of `path` if the block ends without an error.

    What is written there is flushed to the disk before and after the rename. A device or a pipe (`/dev/stdout`) is
    written to directly, for nothing can be put in its place.

    Args:
        path: to write.
        error: the kind of error.
        removes_left: remove the temporary files that killed writers of this path left, as `left_behind` finds them.
    """
    given = Path(path)
    refuse_url(given, error=error)
    with writing_to(given, error):
        target = Path(os.path.realpath(given))  # through a symbolic link, which stays
        direct = target.exists() and not (target.is_file() or target.is_dir())
        target.parent.mkdir(parents=True, exist_ok=True)
    if direct:
        with writing_to(given, error):
            yield target
        return
    if removes_left:
        for each in left_behind(target):
            if not each.is_dir():  # of a folder that had this name: who writes folders knows what is in them
                remove(each)
    temporary = temporary_beside(target)
    try:
        with writing_to(given, error):
            yield temporary
            sync(temporary)
            os.replace(temporary, target)
            # The new name is safe from a power cut only when the folder is on the disk, too.
            sync(target.parent)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextmanager
def replacing_folder(path: str | os.PathLike[str], *, error: type[ZigguratError] = FileError) -> Iterator[Path]:
    """A temporary folder that becomes `path` when the block ends without an error; replaces a folder that was there."""
    folder = Path(path)
    refuse_url(folder, error=error)
    temporary = temporary_beside(folder)
    try:
        with writing_to(folder, error):
            folder.parent.mkdir(parents=True, exist_ok=True)
            temporary.mkdir()
            yield temporary
            publish(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def make_room(path: str | os.PathLike[str], *, error: type[ZigguratError] = FileError) -> None:
    """Make the folder that a file or folder is to lie in, and show that something can be written there.

    Raises:
        error: the path is the URL of a store, or the system refuses.
    """
    refuse_url(path, error=error)
    given = Path(path)
    with writing_to(given, error):
        given.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_beside(given)
        temporary.touch()
        temporary.unlink()


def refuse_url(path: str | os.PathLike[str], *, error: type[ZigguratError] = FileError) -> None:
    """Refuse to write to the URL of a store, as which a folder `s3:` would be made here.

    Raises:
        error: it begins like a URL.
    """
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", os.fspath(path)):
        raise error(
            expected="a place on this machine: stores are read, not written",
            found="a URL",
            where=os.fspath(path),
            ways_out="write here, and copy it with the store's own tool (aws s3 cp --recursive)",
        )


def publish(temporary: Path, folder: Path) -> None:
    """Flush a temporary folder's files to the disk and rename it: after a kill or a power cut it is whole or absent.

    A folder that is there is replaced in one step, so that at every instant the old or the new one is at its path.
    """
    # Content before names: the other way round, a power cut could leave the new name on empty files.
    for path in (*temporary.rglob("*"), temporary):
        sync(path)
    if not folder.exists() and _renamed(temporary, folder):
        sync(folder.parent)
        return
    # Folders with content cannot be renamed over each other; where the file system cannot exchange them either (some
    # network file systems), the old one steps aside first, and for an instant there is none.
    if _exchanged(temporary, folder):
        sync(folder.parent)
        if temporary.is_symlink():  # the path was a link to the folder that it named
            temporary.unlink()
        shutil.rmtree(temporary, ignore_errors=True)
        return
    old = temporary_beside(folder)
    folder.rename(old)
    try:
        temporary.rename(folder)
    except OSError:
        old.rename(folder)
        raise
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _renamed(temporary: Path, folder: Path) -> bool:
    """Rename a folder to a path where none was; False where another process has put one there meanwhile."""
    try:
        temporary.rename(folder)
    except OSError as problem:
        if problem.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def _exchanged(one: Path, other: Path) -> bool:
    """Let two paths exchange what they name, in one step (`renameat2`, Linux 3.15); False where that is unknown."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    # EINVAL: a file system that knows the call, but not the exchange.
    if number in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(other))


_TEMPORARY = re.compile(r"\..{1,120}\.\d{1,9}\.[0-9a-f]{8}\.tmp", re.DOTALL)


def temporary_beside(path: Path) -> Path:
    """A name beside `path` that no other process uses."""
    # Cut, so that the rest still fits the 255 bytes of a file's name.
    return path.with_name(f".{path.name[:120]}.{os.getpid()}.{os.urandom(4).hex()}.tmp")


def is_temporary(name: str) -> bool:
    """Return whether a file of this name is one that is being written here, or was when its process was killed."""
    return _TEMPORARY.fullmatch(name) is not None


def left_behind(path: Path, *, is_alone: bool = False) -> list[Path]:
    """Temporary files and folders beside `path` that a killed process left: it is gone, and wrote nothing for an hour.

    A process of another machine that shares the disk looks as if it were gone; it writes within an hour.

    Args:
        path: that was to be written.
        is_alone: nobody writes there now, as a lock says: whatever is there was left, however new.
    """
    name = re.compile(rf"\.{re.escape(path.name[:120])}\.(\d{{1,9}})\.[0-9a-f]{{8}}\.tmp")
    found = []
    with suppress(OSError):  # what cannot be listed stays
        for each in path.parent.iterdir():
            match = name.fullmatch(each.name)
            if match is None or each.is_symlink():
                continue
            with suppress(OSError):  # its process removed it meanwhile
                if is_alone or (not _runs(int(match[1])) and _is_old(each)):
                    found.append(each)
    return found


def remove_left_behind(path: Path, *, is_alone: bool = False) -> None:
    """Remove what killed processes left beside `path`; see `left_behind`. What cannot be removed stays."""
    for each in left_behind(path, is_alone=is_alone):
        remove(each)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it; what cannot be removed stays."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        path.unlink()


def take_away(folder: Path) -> None:
    """Remove a folder: first its name, so that nobody sees a part of it, then what is in it.

    What cannot be removed stays. A kill in between leaves a temporary folder (`left_behind`).
    """
    aside = temporary_beside(folder)
    with suppress(OSError):
        folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def _is_old(path: Path) -> bool:
    entries = (path, *path.rglob("*")) if path.is_dir() else (path,)
    latest = max(each.lstat().st_mtime for each in entries)
    return time.time() - latest > _LEFT_S


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)  # signal 0 is not sent: it only asks
    except ProcessLookupError:
        return False
    except PermissionError:  # it is somebody else's
        return True
    return True


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writing_to(path: Path, error: type[ZigguratError]) -> Iterator[None]:
    """Raise what the system says against writing inside the block as an error that names the path."""
    try:
        yield
    except ZigguratError:
        raise
    except Exception as problem:
        if not isinstance(problem, OSError) and not _is_of_a_writer(problem):
            raise
        raise error(
            expected=f"to write {path.name}",
            found=_found(problem, path),
            where=str(path),
            ways_out=ways_to_write(problem, path),
        ) from problem


def ways_to_write(problem: Exception, path: Path) -> tuple[str, ...]:
    """Return the ways out of what the system refused to write, most likely first.

    Args:
        problem: an `OSError`, or an error of a library that writes.
        path: of the file or folder that was to be written.
    """
    ways_out = _ways_to_write(problem, path)
    cache = cache_folder().absolute()
    if path.absolute().is_relative_to(cache):
        return (f"keep the cache in another folder than {cache}: ZIGGURAT_CACHE=FOLDER", *ways_out)
    return ways_out


def _ways_to_write(problem: Exception, path: Path) -> tuple[str, ...]:
    number = problem.errno if isinstance(problem, OSError) else None
    if number == errno.EISDIR:
        return (f"it is a folder: name a file in it, {path / 'FILE'}", "choose another path")
    if number in (errno.EEXIST, errno.ENOTDIR):
        blocking = _file_in_place_of_a_folder(path) or path
        return (f"{blocking} is a file, and a folder is needed there: choose another path",)
    if number in (errno.ENOSPC, errno.EDQUOT):
        return ("free space on this disk", "choose another path")
    if number == errno.EFBIG:
        return ("raise the limit on file sizes (ulimit -f)",)
    if number in (errno.EACCES, errno.EPERM):
        return ("correct the permissions of the folder", "choose another path")
    if number in (errno.ENOENT, errno.ENOTSUP, errno.EINVAL):
        return (f"choose a path in another folder: {path.parent} takes no new files",)
    return ("free space on this disk, or correct the permissions of the folder", "choose another path")


def _found(problem: Exception, path: Path) -> str:
    """Return what stood in the way of writing a path, in few words."""
    if not isinstance(problem, OSError):
        return str(problem)[:300]
    if problem.errno in (errno.EEXIST, errno.ENOTDIR) and (blocking := _file_in_place_of_a_folder(path)):
        return f"{blocking} is a file"
    return text_of(problem)


def _file_in_place_of_a_folder(path: Path) -> Path | None:
    """Return the part of a path that is a file; None where there is none."""
    return next((each for each in (path, *path.parents) if each.exists() and not each.is_dir()), None)


def _is_of_a_writer(problem: Exception) -> bool:
    return type(problem).__module__.split(".")[0] in _WRITERS and bool(_REFUSED.search(str(problem)))
