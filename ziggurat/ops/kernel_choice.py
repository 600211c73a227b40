"""Which kernel can serve a tensor: a C++ library on the CPU, Triton on CUDA devices; each has a torch twin otherwise.

Triton's kernels live in modules of their own, which import triton; those are imported when a kernel is asked for, so
the package works without triton. On the CPU they run under Triton's interpreter alone (`TRITON_INTERPRET=1`): that is
how `make test-triton` holds them to their references.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
from collections.abc import Callable
from types import ModuleType
from typing import TypeVar

import torch
from torch import Tensor

from ziggurat.cache import keep_compiled_code
from ziggurat.errors import MissingDependencyError
from ziggurat.ops.cpp_build import CppLibrary

_Function = TypeVar("_Function", bound=Callable[..., object])


def constant_when_compiled(function: _Function) -> _Function:
    """Let torch.compile ask a function once and take its answer for a constant, without a look inside.

    Sets the mark that `torch.compiler.assume_constant_result` sets, which imports the compiler for it: half as much
    again as torch itself, for processes that compile nothing.
    """
    function.__dict__["_dynamo_marked_constant"] = True
    return function


def library_for(tensor: Tensor, library: CppLibrary) -> ctypes.CDLL | None:
    """The C++ library that serves a tensor; None on other devices, under torch.compile, and where it was not built.

    Args:
        tensor: an input.
        library: built only if the tensor is on the CPU.
    """
    if tensor.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    return library.or_none()


def why_no_triton(module: str, tensor: Tensor, *, what: str) -> str:
    """The reason why the kernels of a module cannot serve a tensor; "" if they can.

    Args:
        module: name of the module with the kernels.
        tensor: an input.
        what: the input, for people: "queries".
    """
    return _why_no_triton_on(tensor.device.type, module, what)


@constant_when_compiled
def _why_no_triton_on(device: str, module: str, what: str) -> str:
    """The reason; torch.compile asks once and does not look inside."""
    if reason := kernels_or_reason(module)[1]:
        return reason
    if is_interpreted():
        return ""
    if device != "cuda":
        return f"{what} on {device!r}"
    return "" if torch.cuda.is_available() else "no CUDA device"


@constant_when_compiled
def is_interpreted() -> bool:
    """Return whether kernels run on the CPU, by Triton's interpreter."""
    # Triton's own variable, which it reads when it is imported.
    return os.environ.get("TRITON_INTERPRET") == "1"


def kernels_of(module: str) -> ModuleType:
    """The module with the kernels.

    Raises:
        MissingDependencyError: they cannot run here; `why_no_triton` says so before.
    """
    kernels, reason = kernels_or_reason(module)
    if kernels is not None:
        return kernels
    raise MissingDependencyError(
        expected="the package triton, which compiles the kernels of GPUs",
        found=reason,
        where=module,
        ways_out=("install it: pip install triton", "choose a kernel that needs none: torch"),
    )


def kernels_or_reason(module: str) -> tuple[ModuleType | None, str]:
    """A module with kernels, or why they cannot run here; the import is tried once a process."""
    return _imported(module)


@functools.cache
def _imported(module: str) -> tuple[ModuleType | None, str]:
    keep_compiled_code()  # before a first kernel is compiled, so that all lie in one place, whoever asks first
    try:
        return importlib.import_module(module), ""
    except ImportError as error:
        return None, f"no package triton ({error})"


def power_of_two(size: int, *, least: int = 16) -> int:
    """The next power of two, `least` at least: 16 is the smallest side of a Triton product."""
    return max(least, 1 << (size - 1).bit_length())
