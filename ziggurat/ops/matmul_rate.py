"""How fast this device multiplies matrices: the limit that dense networks run against, measured.

Whether BF16 pays cannot be read off a version number: CPUs without AVX512_BF16 or AMX emulate it up to a hundred
times slower than FP32, and say nothing. So it is measured, in a few milliseconds, at the shape of a hidden layer.
"""

from __future__ import annotations

import time

import torch


def matmul_gflop_per_s(dtype: torch.dtype, *, device: str = "cpu", size: int = 512, budget_s: float = 0.05) -> float:
    """Rate of a (4·size × size) · (size × size) product in 10⁹ floating-point operations a second.

    The fastest of as many products as fit in `budget_s` (at least three) after one to warm up: other work on the
    machine can only add to a time, and a choice that hangs on a rate must not hang on a neighbour.
    """
    generator = torch.Generator(device="cpu").manual_seed(0)
    left = torch.randn(4 * size, size, generator=generator).to(device=device, dtype=dtype)
    right = torch.randn(size, size, generator=generator).to(device=device, dtype=dtype)
    times_s: list[float] = []
    begin = time.perf_counter()
    while len(times_s) < 4 or time.perf_counter() - begin < budget_s:
        start = time.perf_counter()
        torch.mm(left, right)
        if device != "cpu":
            torch.cuda.synchronize()
        times_s.append(time.perf_counter() - start)
        if time.perf_counter() - begin > 20 * budget_s and len(times_s) >= 2:
            break
    return 2.0 * (4 * size) * size * size / min(times_s[1:]) / 1e9
