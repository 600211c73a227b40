"""Build a small C++ library on first use and keep it: plain C interface, no torch headers, a few seconds once.

The file in the cache is named after everything that decides its content (source, its headers, compiler, flags,
processor), so a change of any of them builds anew, and a cache shared by unlike machines stays right. It is written
under another name and renamed, so processes that build at the same time do not disturb each other.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ziggurat.cache import cache_folder
from ziggurat.errors import MissingDependencyError

_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared")  # a wheel would have to choose one instruction set
_COMPILERS = ("g++", "c++", "clang++")
_BUILD_LIMIT_S = 120


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
            path = (folder or cache_folder() / "kernels") / f"{self.path.stem}-{self.fingerprint()}.so"
            if not path.exists():
                self._compile(compiler, path)
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

    def _compile(self, compiler: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".so")
        os.close(handle)
        try:
            command = [compiler, *_FLAGS, *self.flags, str(self.path), "-o", temporary]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_LIMIT_S, check=False)
            if done.returncode != 0:
                raise self.unavailable(f"{' '.join(command)} failed:\n{done.stderr.strip()[-2000:]}")
            os.replace(temporary, path)
        except subprocess.TimeoutExpired as error:
            raise self.unavailable(f"{compiler} took longer than {_BUILD_LIMIT_S} s") from error
        finally:
            Path(temporary).unlink(missing_ok=True)


class CppLibrary:
    """A library that torch or numpy stand in for where it cannot be built: built on first use, tried once a process.

    Args:
        source: what to build.
        declare: says which arguments the functions of the library take.
    """

    def __init__(self, source: CppSource, *, declare: Callable[[ctypes.CDLL], None]) -> None:
        self._source, self._declare = source, declare

    @classmethod
    def missing(cls, reason: str) -> CppLibrary:
        """One that could not be built, for tests of what stands in."""
        library = cls(CppSource(path=Path()), declare=lambda library: None)
        library._found = None, reason
        return library

    @property
    def reason(self) -> str:
        """Why there is none, or ""."""
        return self._found[1]

    def or_none(self) -> ctypes.CDLL | None:
        """The library, if it could be built."""
        return self._found[0]

    def needed(self) -> Any:
        """The library, where `reason` is ""."""
        library, reason = self._found
        assert library is not None, reason
        return library

    def kernel_line(self) -> str:
        """What `ziggurat doctor` says of it."""
        return kernel_line(self.reason)

    @functools.cached_property
    def _found(self) -> tuple[ctypes.CDLL | None, str]:
        try:
            library = self._source.load()
        except MissingDependencyError as error:
            return None, error.found
        self._declare(library)
        return library, ""


def _with_included(path: Path) -> list[str]:
    """The text of a source, and of all files that it includes by name, each once."""
    found: dict[Path, str] = {}
    waiting = [path]
    while waiting:
        file = waiting.pop().resolve()
        if file not in found:
            found[file] = file.read_text()
            waiting += [file.parent / name for name in re.findall(r'^#include "(.+)"', found[file], re.MULTILINE)]
    return list(found.values())


def kernel_line(reason: str) -> str:
    """What `ziggurat doctor` says of a kernel with a twin in torch; `reason` is why C++ is missing, or ""."""
    return f"torch, slower: C++ is not available: {reason}" if reason else "C++ on the CPU"


def _compiler() -> str | None:
    return next((path for name in _COMPILERS if (path := shutil.which(name))), None)


def _processor() -> str:
    """What decides the meaning of -march=native: architecture, model and instruction sets."""
    lines = [platform.machine(), platform.processor()]
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        wanted = ("model name", "flags", "Features", "cpu family", "model\t")
        lines += sorted({line for line in cpuinfo.read_text().splitlines() if line.startswith(wanted)})
    return "\n".join(lines)
