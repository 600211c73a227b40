"""How fast this device multiplies matrices and copies memory: the limits that a step runs against, measured.

Whether BF16 pays cannot be read off a version number: CPUs without AVX512_BF16 or AMX emulate it up to a hundred
times slower than FP32, and say nothing. So it is measured, in a few milliseconds, at the shape of a hidden layer.

A ratio of two rates is measured in turns (`measure_ratio`): FP32, BF16, FP32, BF16, …. What disturbs the machine for a
while disturbs neighbours alike, and the median of the ratios of neighbours does not hang on one slow moment.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ziggurat.ops.machine.turns import median_ratio, seconds_in_turns

_LARGE = 4096  # 0.5 TFLOP a product


@dataclass(frozen=True, kw_only=True)
class MatmulRates:
    """Rates that were measured in turns.

    Args:
        fp32: median rate, GFLOP/s.
        bf16: the same.
        ratio: median of BF16's rate over FP32's, turn by turn.
        turns: how many turns there were.
    """

    fp32: float
    bf16: float
    ratio: float
    turns: int


def matmul_gflop_per_s(
    dtype: torch.dtype, *, device: str = "cpu", size: int | None = None, budget_s: float = 0.05
) -> float:
    """Rate of a (4·size × size) · (size × size) product in 10⁹ floating-point operations a second.

    `size` is 512 on a CPU. A GPU multiplies such matrices in less time than it takes to ask: there it is 4,096.

    The fastest of as many products as fit in `budget_s` (at least three) after one to warm up: other work on the
    machine can only add to a time.
    """
    size = size or (512 if torch.device(device).type == "cpu" else _LARGE)
    product = _product(dtype, device=device, size=size)
    times_s: list[float] = []
    begin = time.perf_counter()
    while len(times_s) < 4 or time.perf_counter() - begin < budget_s:
        times_s.append(product(len(times_s)))
        # Emulated products may take seconds each: two of them say enough.
        if time.perf_counter() - begin > 20 * budget_s and len(times_s) >= 2:
            break
    return _gflop(size) / min(times_s[1:])


def measure_ratio(
    *, device: str = "cpu", size: int | None = None, turns: int = 9, budget_s: float = 0.3
) -> MatmulRates:
    """FP32 and BF16 in turns, after one turn to warm up: 0.1 s on one core, seconds where BF16 is emulated.

    Args:
        device: where.
        size: as in `matmul_gflop_per_s`; 256 on a CPU.
        turns: how many; fewer where `budget_s` is spent, but at least two.
        budget_s: seconds after which no further turn begins.
    """
    size = size or (256 if torch.device(device).type == "cpu" else _LARGE)
    products = [_product(dtype, device=device, size=size) for dtype in (torch.float32, torch.bfloat16)]
    # Where BF16 is emulated a turn takes seconds.
    fp32_s, bf16_s = seconds_in_turns(products, turns=turns, budget_s=budget_s, min_turns=2)
    return MatmulRates(
        fp32=_gflop(size) / statistics.median(fp32_s),
        bf16=_gflop(size) / statistics.median(bf16_s),
        ratio=median_ratio(fp32_s, bf16_s),
        turns=len(fp32_s),
    )


def copy_gb_per_s(*, device: str = "cpu", num_bytes: int = 1 << 28, budget_s: float = 0.05) -> float:
    """Rate of a copy inside the device's memory, bytes read and bytes written, in 10⁹ bytes a second; the fastest.

    What only moves memory (a lookup, an update) can reach this and no more. `num_bytes` should be many times the last
    cache of the device.
    """
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times_s: list[float] = []
    begin = time.perf_counter()
    while len(times_s) < 4 or time.perf_counter() - begin < budget_s:
        start = time.perf_counter()
        target.copy_(source)
        _wait(device)
        times_s.append(time.perf_counter() - start)
    # Each byte is read and written. The first copy warms up.
    return 2 * num_bytes / min(times_s[1:]) / 1e9


def link_bytes_per_s(device: torch.device, *, num_bytes: int = 1 << 26) -> float:
    """Rate of a copy from the memory of the host to a device, locked where that is a GPU; the fastest of three."""
    is_cuda = device.type == "cuda"
    source = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
    target = torch.zeros_like(source, device=device)
    times_s: list[float] = []
    for _ in range(4):
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        _wait(device.type)
        times_s.append(time.perf_counter() - start)
    return num_bytes / min(times_s[1:])


def fp8_gflop_per_s(*, device: str, size: int = 512, budget_s: float = 0.05) -> float:
    """Rate of FP8 products (e4m3, one scale a matrix) as `matmul_gflop_per_s` measures it.

    Raises:
        RuntimeError: torch or the device has none.
    """
    left = torch.ones(4 * size, size, device=device).to(torch.float8_e4m3fn)
    # `_scaled_mm` wants its second matrix column by column.
    right = torch.ones(size, size, device=device).to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=device)
    times_s: list[float] = []
    begin = time.perf_counter()
    while len(times_s) < 4 or time.perf_counter() - begin < budget_s:
        start = time.perf_counter()
        torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        _wait(device)
        times_s.append(time.perf_counter() - start)
    return _gflop(size) / min(times_s[1:])


def _wait(device: str) -> None:
    """Until the device has computed what it was given."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def _product(dtype: torch.dtype, *, device: str, size: int) -> Callable[[int], float]:
    """A function that multiplies once and returns the seconds."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    left = torch.randn(4 * size, size, generator=generator).to(device=device, dtype=dtype)
    right = torch.randn(size, size, generator=generator).to(device=device, dtype=dtype)

    def once(turn: int) -> float:
        del turn
        start = time.perf_counter()
        torch.mm(left, right)
        _wait(device)
        return time.perf_counter() - start

    return once


def _gflop(size: int) -> float:
    return 2.0 * (4 * size) * size * size / 1e9
