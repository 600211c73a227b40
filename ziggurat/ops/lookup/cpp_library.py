"""Compile ziggurat/ops/csrc/lookup.cpp on first use (`ops/cpp_build.py`), and declare what is in it.

OpenMP. Two OpenMP runtimes in one process spin against each other for the same cores. The library is linked against
libgomp, but its symbols bind to the runtime that torch has loaded already, so there is one pool of threads.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from pathlib import Path

import torch

from ziggurat.ops.cpp_build import CppSource

_SOURCE = CppSource(
    path=Path(__file__).parents[1] / "csrc" / "lookup.cpp",
    # No fused multiply-add: paths for other processors then round the same sums to the same bits.
    flags=("-fopenmp", "-ffp-contract=off", "-fno-math-errno"),
    depends_on=torch.__version__,
    without='choose kernel = "torch" or "auto": every kernel gives the same result up to rounding',
)


class CPart(Structure):
    """The struct `Part` of lookup.cpp."""

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
    """The struct `Rule` of lookup.cpp."""

    _fields_ = (
        ("kind", c_int64),
        ("learning_rate", c_float),
        ("scale", c_float),
        ("eps", c_float),
        ("weight_decay", c_float),
        ("beta1", c_float),
        ("beta2", c_float),
    )


# Without these ctypes would pass numbers and addresses as 32 bits.
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
    "ziggurat_sorted_rows": (None, [c_void_p, c_void_p, c_int64]),
    "ziggurat_update_places": (
        None,
        [c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, POINTER(CRule), c_int64],
    ),
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
    library = _SOURCE.load(folder=folder)
    for name, (result, arguments) in _PROTOTYPES.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


def library_fingerprint() -> str:
    """A hash of the source, the compiler, its flags, torch's version and the processor."""
    return _SOURCE.fingerprint()
