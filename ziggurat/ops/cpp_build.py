"""Build a small C++ library on first use and keep it: plain C interface, no torch headers, a few seconds once.

The file in the cache is named after everything that decides its content (source, its headers, compiler, flags,
processor), so a change of any of them builds anew, and a cache shared by unlike machines stays right.

    lookup-4f….so      what the compiler made │ ZIGGKERN │ SHA-256 of name and content
                       (the loader reads this)

A library that is cut, flipped, empty or another one's would end the process (SIGBUS, SIGSEGV), or leave it with the
slow twin for ever. So its digest stands behind it in the same file, is compared before the file is mapped, and what
does not fit is built again. A file is published whole: written beside, flushed, renamed, flushed; readable for whoever
may read the cache.

Processes that need the same library at the same time build it once; the others wait. A build is given long enough for a
machine that is busy, and is spoken of when it is slow. One that ran out of time all the same is remembered for a day,
so that not every start waits for it again.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ziggurat.cache import cache_folder
from ziggurat.commands import pasted
from ziggurat.errors import FileError, MissingDependencyError
from ziggurat.files import FileLock, remove_left_behind, temporary_beside, write_bytes

_log = logging.getLogger(__name__)

_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared")  # a wheel would have to choose one instruction set
_COMPILERS = ("g++", "c++", "clang++")
_BUILD_LIMIT_S = 900.0  # alone it takes 2 to 20 s; beside a full machine's other work, minutes
_SLOW_S = 15.0  # from here on the user is told what is waited for
_REMEMBERED_S = 86_400.0
_POLL_S = 0.05
_MARK = b"ZIGGKERN"
_DIGEST_BYTES = 32
_listeners: list[Callable[[bool], None]] = []


@dataclass(frozen=True, kw_only=True)
class CppSource:
    """A C++ file and how to compile it.

    Args:
        path: one file with an `extern "C"` interface.
        flags: besides the usual ones.
        depends_on: what else decides the result (the version of a library), for the fingerprint.
        without: a sentence for users: what they can do if it cannot be built.
    """

    path: Path
    flags: tuple[str, ...] = ()
    depends_on: str = ""
    without: str = ""

    def fingerprint(self) -> str:
        """20 hex digits that change with the source, what it includes, the compiler, its flags, the processor."""
        compiler = _compiler()
        # Without a compiler there is nothing to ask; the fingerprint still has the rest.
        command = [compiler, "--version"] if compiler else ["true"]
        version = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        texts = _with_included(self.path)
        parts = [*texts, version, " ".join((*_FLAGS, *self.flags)), self.depends_on, _processor()]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:20]

    def load(self, *, folder: Path | None = None) -> ctypes.CDLL:
        """The compiled library, from the cache or built now.

        Args:
            folder: where compiled libraries are kept; the cache folder's `kernels` unless given.

        Raises:
            MissingDependencyError: there is no compiler, it fails, or the result does not load; says which and why.
        """
        compiler = _compiler()
        if compiler is None:
            raise self.unavailable(f"none of {', '.join(_COMPILERS)} is on the PATH")
        try:
            # Inside the try: where the cache cannot be reached, the library is missing, and its twin serves.
            path = (folder or cache_folder() / "kernels") / f"{self.path.stem}-{self.fingerprint()}.so"
            # Without the lock: a library that is there is read by many processes at once.
            if _is_intact(path):
                return ctypes.CDLL(str(path))
            with _announced(), _one_builder(path):
                if not _is_intact(path):  # else another process has built it meanwhile
                    self._refuse_remembered(path)
                    library = self._build(compiler, path)
                    if library is not None:
                        return library
            return ctypes.CDLL(str(path))
        except OSError as error:
            raise self.unavailable(str(error)) from error

    def unavailable(self, reason: str) -> MissingDependencyError:
        """The error that says why the library cannot be used here."""
        openmp = " with OpenMP" if "-fopenmp" in self.flags else ""
        return MissingDependencyError(
            expected=f"a C++17 compiler{openmp}, to build {self.path.name}",
            found=reason,
            where=f"building {self.path.name}",
            ways_out=("install g++ (Debian, Ubuntu: apt-get install g++)", self.without),
        )

    def _build(self, compiler: str, path: Path) -> ctypes.CDLL | None:
        """Compile and publish as `path`; the library itself where the cache cannot be written, and it is not kept."""
        if path.exists():
            _log.warning("%s is damaged; it is built again", path)
        with _build_folder(path.parent) as folder:
            made = folder / path.name
            self._compile(compiler, made, remember=_failure(path))
            try:
                # Published by a rename: whoever maps it sees a whole file.
                write_bytes(path, _sealed(made.read_bytes(), name=path.name))
            except FileError as error:
                _log.warning("%s was compiled, and cannot be kept: %s", self.path.name, error.found)
                # Mapped before its folder is removed, which the mapping outlives.
                return ctypes.CDLL(str(made))
        return None

    def _compile(self, compiler: str, made: Path, *, remember: Path) -> None:
        command = [compiler, *_FLAGS, *self.flags, str(self.path), "-o", str(made)]
        output = made.with_suffix(".txt")
        begin = time.monotonic()
        is_told = False
        with output.open("wb") as file:
            # A group of its own, so that the compilers that it starts can be ended with it.
            process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
            try:
                while process.poll() is None:
                    waited = time.monotonic() - begin
                    if waited > _BUILD_LIMIT_S:
                        text = f"{compiler} took longer than {_BUILD_LIMIT_S:.0f} s"
                        with contextlib.suppress(FileError):
                            write_bytes(remember, text.encode())
                        raise self.unavailable(text)
                    if waited > _SLOW_S and not is_told:
                        is_told = True
                        what = "%s is being compiled, once for this processor: %.0f s so far, at most %.0f s"
                        _log.warning(what, self.path.name, waited, _BUILD_LIMIT_S)
                    time.sleep(_POLL_S)
            finally:
                if process.poll() is None:  # with the compilers that it started
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if process.returncode != 0:
            # The end of the output has the error that stopped the compiler.
            text = output.read_text(errors="replace").strip()[-2000:]
            raise self.unavailable(f"{' '.join(command)} failed:\n{text}")

    def _refuse_remembered(self, path: Path) -> None:
        failure = _failure(path)
        with contextlib.suppress(OSError):  # there is none
            age_s = time.time() - failure.stat().st_mtime
            # A clock that was set back would make a failure last for ever: one from the future does not count.
            if 0 <= age_s < _REMEMBERED_S:
                text = failure.read_bytes()[:500].decode(errors="replace")
                raise self.unavailable(f"{text}, {age_s / 3600:.1f} hours ago; to try again now: rm {pasted(failure)}")


class CppLibrary:
    """A library that torch or numpy stand in for where it cannot be built: built on first use, tried once a process.

    Args:
        source: what to build.
        declare: says which arguments the functions of the library take.
    """

    def __init__(self, source: CppSource, *, declare: Callable[[ctypes.CDLL], None]) -> None:
        self._source = source
        self._declare = declare

    @classmethod
    def missing(cls, reason: str) -> CppLibrary:
        """One that could not be built, for tests of what stands in."""
        library = cls(CppSource(path=Path()), declare=lambda library: None)
        library._found = None, reason
        return library

    @property
    def reason(self) -> str:
        """The reason why there is no library, or ""."""
        return self._found[1]

    def or_none(self) -> ctypes.CDLL | None:
        """The library, if it could be built."""
        return self._found[0]

    def needed(self) -> ctypes.CDLL:
        """The library, where `reason` is "".

        Raises:
            MissingDependencyError: it could not be built.
        """
        library, reason = self._found
        if library is None:
            raise self._source.unavailable(reason)
        return library

    def kernel_line(self) -> str:
        """Return the line of `ziggurat doctor` about this library."""
        return kernel_line(self.reason)

    @functools.cached_property
    def _found(self) -> tuple[ctypes.CDLL | None, str]:
        try:
            library = self._source.load()
        except MissingDependencyError as error:
            return None, error.found
        self._declare(library)
        return library, ""


@contextmanager
def telling_of_builds(tell: Callable[[bool], None]) -> Iterator[None]:
    """Inside, call `tell(True)` when this process begins to build a library or waits for one, `tell(False)` at its end.

    For whoever watches the process with a limit of time: a build has its own.
    """
    _listeners.append(tell)
    try:
        yield
    finally:
        _listeners.remove(tell)


@contextmanager
def _announced() -> Iterator[None]:
    # A copy: whoever was told of the beginning is told of the end, even if it has left the list meanwhile.
    listeners = tuple(_listeners)
    for tell in listeners:
        tell(True)
    try:
        yield
    finally:
        for tell in listeners:
            tell(False)


def _failure(path: Path) -> Path:
    return path.with_suffix(".failed")


def _sealed(content: bytes, *, name: str) -> bytes:
    """A library with its digest behind it; loaders do not look there."""
    return content + _MARK + _digest(content, name=name)


def _is_intact(path: Path) -> bool:
    """Is there the library that was built under this name, to the last bit?"""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    end = len(content) - len(_MARK) - _DIGEST_BYTES
    if end <= 0 or content[end : end + len(_MARK)] != _MARK:
        return False
    return content[end + len(_MARK) :] == _digest(content[:end], name=path.name)


def _digest(content: bytes, *, name: str) -> bytes:
    # The name is part of it: a file that was renamed to another library's name does not fit.
    return hashlib.sha256(name.encode() + b"\0" + content).digest()


@contextmanager
def _one_builder(path: Path) -> Iterator[None]:
    """Build alone, or wait until whoever builds the same library is done; without locks there are several builders."""
    lock = FileLock(path.with_suffix(".lock"))
    begin = time.monotonic()
    is_told = False
    # A cache that cannot be written has no locks: everyone builds then.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Polled, since the builder may be killed: its lock is then free, and whoever waits builds.
        while not lock.take():
            # The mark of another builder's success is the library itself; a lock alone would not tell.
            if _is_intact(path):
                break
            if time.monotonic() - begin > _SLOW_S and not is_told:
                is_told = True
                _log.warning("%s is being compiled by %s; waiting for it", path.name, lock.holder())
            time.sleep(_POLL_S)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _build_folder(cache: Path) -> Iterator[Path]:
    """A folder to compile in, beside what it is for; that of the system where the cache cannot be written.

    Those that killed processes left are removed an hour later.
    """
    wanted = cache / "build"
    remove_left_behind(wanted)
    folder = temporary_beside(wanted)
    try:
        folder.mkdir()
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="ziggurat-build-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _with_included(path: Path) -> list[str]:
    """The text of a source, and of all files that it includes by name, each once."""
    found: dict[Path, str] = {}
    # Headers change the result as much as the file does.
    waiting = [path]
    while waiting:
        file = waiting.pop().resolve()
        if file not in found:
            found[file] = file.read_text()
            # Quoted names alone: what stands in <…> belongs to the compiler, whose version counts already.
            waiting += [file.parent / name for name in re.findall(r'^#include "(.+)"', found[file], re.MULTILINE)]
    return list(found.values())


def kernel_line(reason: str) -> str:
    """Return the line of `ziggurat doctor` on a kernel with a twin in torch; `reason` is why C++ is missing, or ""."""
    return f"torch, slower: C++ is not available: {reason}" if reason else "C++ on the CPU"


def _compiler() -> str | None:
    return next((path for name in _COMPILERS if (path := shutil.which(name))), None)


def _processor() -> str:
    """Return the facts that decide the meaning of -march=native: architecture, model and instruction sets."""
    lines = [platform.machine(), platform.processor()]
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        wanted = ("model name", "flags", "Features", "cpu family", "model\t")
        # A set: the facts stand once for each core.
        lines += sorted({line for line in cpuinfo.read_text().splitlines() if line.startswith(wanted)})
    return "\n".join(lines)
