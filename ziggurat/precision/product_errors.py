"""Measure kernels on the operands of one product: error against FP64, and time against FP32.

    error    MERE = mean over elements of |out − ref| / |ref|     drawn operands, reference in FP64
    speedup  median over turns of FP32's time / the kernel's      matrices of the shapes of a step

An element whose reference is 0 is left out of the mean; one that is not finite makes the error infinite. Operands are
drawn from the statistics of a probe; `normal_error` is what N(0, 1) operands of the same shapes would have shown.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ziggurat.numerics.probe import Direction, ProductStatistics
from ziggurat.precision.kernels import ProductKernel

NUM_PAIRS = 8
_TURNS = 9
_TURN_BUDGET_S = 0.2  # of all turns of one product; at least three are made


@dataclass(frozen=True, kw_only=True)
class KernelError:
    """Error of a kernel in one product.

    Args:
        error: on operands drawn from a probe.
        normal_error: on N(0, 1) operands of the same shapes.
    """

    error: float
    normal_error: float


def relative_error(kernel: ProductKernel, left: Tensor, right: Tensor) -> float:
    """Return the mean relative error of the elements of a product, against FP64."""
    exact = left.double() @ right.double()
    found = kernel.multiply(left, right).double()
    if not bool(found.isfinite().all()):
        return math.inf
    counted = exact != 0
    if not bool(counted.any()):
        return 0.0
    return float(((found - exact)[counted] / exact[counted]).abs().mean())


def measure_errors(
    product: ProductStatistics,
    direction: Direction,
    kernels: Sequence[ProductKernel],
    *,
    device: torch.device,
    num_pairs: int = NUM_PAIRS,
    seed: int = 0,
) -> dict[str, KernelError]:
    """Measure the errors of kernels in one direction of a product, on the same pairs of operands for all.

    Args:
        product: its statistics.
        direction: which of its three products.
        kernels: that run on the device.
        device: where.
        num_pairs: of operands; the error is their mean.
        seed: of the draws.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = list[tuple[Tensor, Tensor]]()
    normal = list[tuple[Tensor, Tensor]]()
    for index in range(num_pairs):
        drawn.append(_on(device, product.operands(direction, generator=generator, index=index)))
        normal.append(_on(device, product.normal_operands(direction, generator=generator)))
    found = dict[str, KernelError]()
    for kernel in kernels:
        left, right = drawn[0]
        if kernel.refuses(tuple(left.shape), tuple(right.shape)):
            continue
        found[kernel.name] = KernelError(
            error=statistics.mean(relative_error(kernel, *pair) for pair in drawn),
            normal_error=statistics.mean(relative_error(kernel, *pair) for pair in normal),
        )
    return found


def measure_speedups(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], kernels: Sequence[ProductKernel], *, device: torch.device
) -> dict[str, float]:
    """Measure how many times as fast as FP32 kernels multiply matrices of two shapes, in turns."""
    fp32 = ProductKernel.FP32
    others = [kernel for kernel in kernels if kernel is not fp32]
    fast = [kernel for kernel in others if kernel.is_fast and not kernel.refuses(*shapes)]
    left, right = (torch.randn(shape, device=device) for shape in shapes)
    times_s = dict[str, list[float]]()
    begin = time.perf_counter()
    for turn in range(1 + _TURNS):
        for kernel in (fp32, *fast):
            seconds = _seconds(kernel, left, right)
            if turn:  # the first warms up
                times_s.setdefault(kernel.name, []).append(seconds)
        if turn >= 3 and time.perf_counter() - begin > _TURN_BUDGET_S:
            break
    return {fp32.name: 1.0} | {kernel.name: _median_ratio(times_s, kernel.name) for kernel in fast}


def _seconds(kernel: ProductKernel, left: Tensor, right: Tensor) -> float:
    _wait(left.device)
    begin = time.perf_counter()
    kernel.multiply(left, right)
    _wait(left.device)
    return time.perf_counter() - begin


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _median_ratio(times_s: Mapping[str, Sequence[float]], name: str) -> float:
    pairs = zip(times_s[ProductKernel.FP32.name], times_s[name], strict=True)
    return statistics.median(fp32 / other for fp32, other in pairs)


def _on(device: torch.device, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return pair[0].to(device), pair[1].to(device)
