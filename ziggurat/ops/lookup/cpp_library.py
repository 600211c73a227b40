"""Compile ziggurat/ops/csrc/lookup.cpp on first use, and load it.

A wheel would have to choose one instruction set; compiling here uses the processor's own (`-march=native`), takes a
few seconds once, and needs no torch headers, since the interface is plain C called through ctypes. The library is
kept in the cache folder under a name made of the source, the compiler and its flags, and the processor: a change of
any of them compiles anew, and a cache shared by unlike machines stays right. Processes that compile at the same time
do not disturb each other: each writes a file of its own and renames it.

OpenMP. Two OpenMP runtimes in one process spin against each other for the same cores. The library is linked against
libgomp, but its symbols bind to the runtime that torch has loaded already, so there is one pool of threads.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from pathlib import Path

import torch

from ziggurat.cache import cache_folder
from ziggurat.errors import MissingDependencyError

_SOURCE = Path(__file__).parents[1] / "csrc" / "lookup.cpp"
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-ffp-contract=off", "-fno-math-errno")
_COMPILERS = ("g++", "c++", "clang++")
_BUILD_LIMIT_S = 120


class CPart(Structure):
    """`Part` of lookup.cpp."""

    _fields_ = (
        ("slots", c_void_p),
        ("num_slots", c_int64),
        ("single", c_void_p),
        ("values", c_void_p),
        ("offsets", c_void_p),
        ("num_values", c_int64),
        ("batch_size", c_int64),
        ("width", c_int64),
        ("grad", c_void_p),
    )


class CRule(Structure):
    """`Rule` of lookup.cpp."""

    _fields_ = (
        ("kind", c_int64),
        ("learning_rate", c_float),
        ("scale", c_float),
        ("eps", c_float),
        ("weight_decay", c_float),
        ("beta1", c_float),
        ("beta2", c_float),
    )


_PROTOTYPES = {
    "ziggurat_workspace_new": (c_void_p, []),
    "ziggurat_workspace_delete": (None, [c_void_p]),
    "ziggurat_lookup": (c_int64, [c_void_p, POINTER(CPart), c_int64, c_void_p, c_int64, c_int64]),
    "ziggurat_divide_means": (c_int64, [POINTER(CPart), c_int64, c_void_p, c_void_p, c_int64]),
    "ziggurat_update": (
        c_int64,
        [c_void_p, POINTER(CPart), c_int64, c_void_p, c_void_p, c_void_p, c_int64, POINTER(CRule), c_int64],
    ),
    "ziggurat_sort": (c_int64, [c_void_p, POINTER(CPart), c_int64, POINTER(c_int64), c_int64]),
    "ziggurat_sum": (None, [c_void_p, c_int64, c_void_p, c_void_p, c_int64]),
    "ziggurat_apply": (
        None,
        [c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64, POINTER(CRule), c_int64],
    ),
}


@functools.cache
def load_library(folder: Path | None = None) -> ctypes.CDLL:
    """The compiled library, from the cache or compiled now; loaded once a process.

    Args:
        folder: where compiled libraries are kept; the cache folder's `kernels` unless given.

    Raises:
        MissingDependencyError: there is no compiler, it fails, or the result does not load; says which and why.
    """
    compiler = _compiler()
    if compiler is None:
        raise _unavailable(f"none of {', '.join(_COMPILERS)} is on the PATH")
    path = (folder or cache_folder() / "kernels") / f"lookup-{library_fingerprint()}.so"
    try:
        if not path.exists():
            _compile(compiler, path)
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise _unavailable(str(error)) from error
    for name, (result, arguments) in _PROTOTYPES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def library_fingerprint() -> str:
    """A hash of the source, the compiler, its flags, torch's version and the processor."""
    compiler = _compiler()
    command = [compiler, "--version"] if compiler else ["true"]
    version = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    parts = [_SOURCE.read_text(), version, " ".join(_FLAGS), torch.__version__, _processor()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:20]


def _compiler() -> str | None:
    return next((path for name in _COMPILERS if (path := shutil.which(name))), None)


def _compile(compiler: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(handle)
    try:
        command = [compiler, *_FLAGS, str(_SOURCE), "-o", temporary]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_LIMIT_S, check=False)
        if done.returncode != 0:
            raise _unavailable(f"{' '.join(command)} failed:\n{done.stderr.strip()[-2000:]}")
        os.replace(temporary, path)
    except subprocess.TimeoutExpired as error:
        raise _unavailable(f"{compiler} took longer than {_BUILD_LIMIT_S} s") from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def _processor() -> str:
    """What decides the meaning of -march=native: architecture, model and instruction sets."""
    lines = [platform.machine(), platform.processor()]
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        wanted = ("model name", "flags", "Features", "cpu family", "model\t")
        lines += sorted({line for line in cpuinfo.read_text().splitlines() if line.startswith(wanted)})
    return "\n".join(lines)


def _unavailable(reason: str) -> MissingDependencyError:
    return MissingDependencyError(
        expected="a C++17 compiler with OpenMP, to build the C++ lookup kernel",
        found=reason,
        where=f"building {_SOURCE.name}",
        ways_out=(
            "install g++ (Debian, Ubuntu: apt-get install g++)",
            'choose kernel = "torch" or "auto": every kernel gives the same result up to rounding',
        ),
    )
