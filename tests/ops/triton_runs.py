"""Python of a process of its own, as Triton decides at its import whether kernels are interpreted."""

from __future__ import annotations

import os
import subprocess
import sys


def run_python(*arguments: str, interpreted: bool) -> subprocess.CompletedProcess[str]:
    """Run Python with arguments to its end; output is kept, and its status is for the caller to judge.

    Args:
        arguments: for example "-m", MODULE, "cpu".
        interpreted: kernels run under Triton's interpreter.
    """
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if interpreted else {})
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


# The start of a program whose kernels are compiled for sm_90 by the call that launches them, and are not launched.
LAUNCHING_NOTHING = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class Pretended:  # a driver whose kernels are compiled and not launched

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


compiled = []
run = JITFunction.run


def run_without_launch(self, *arguments, grid, warmup, **options):
    compiled.append(self.fn.__name__)
    return run(self, *arguments, grid=grid, warmup=True, **options)


driver.set_active(Pretended())
JITFunction.run = run_without_launch

"""
