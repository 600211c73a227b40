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
