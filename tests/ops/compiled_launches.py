"""Launches of Triton's kernels that compile for a GPU that is not there, and do nothing."""

# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock


class Asked:
    """Specialisations that launches asked for.

    Attributes:
        kernels: hashes of what was compiled, by the name of the kernel.
        launches: how often each kernel was launched.
    """

    def __init__(self) -> None:
        self.kernels: dict[str, set[str]] = {}
        self.launches: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """Number of specialisations."""
        return sum(map(len, self.kernels.values()))

    def __str__(self) -> str:
        """Kernels, and how many specialisations of each."""
        return ", ".join(f"{name} {len(found)}" for name, found in sorted(self.kernels.items()))


@contextlib.contextmanager
def compiled_only(architecture: int) -> Iterator[Asked]:
    """Let launches compile as they would on a GPU, by what they are given; gives what was asked for.

    Args:
        architecture: 90 is sm_90.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    asked = Asked()
    launch = JITFunction.run

    def compiled(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        del warmup
        name = self.fn.__name__
        asked.launches[name] += 1
        kernel = launch(self, *arguments, grid=grid, warmup=True, **options)
        asked.kernels.setdefault(name, set()).add(kernel.hash)
        return kernel

    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device=None: 0,
            get_current_target=lambda: GPUTarget("cuda", architecture, 32),
        )
    )
    with mock.patch.object(JITFunction, "run", compiled):
        yield asked
