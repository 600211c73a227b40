"""Measure kernels on the operands of one product: error against FP64, and time against FP32.

    error    MERE = mean over elements of |out − ref| / |ref|     drawn operands, reference in FP64
    speedup  median over turns of FP32's time / the kernel's      matrices of the shapes of a step

An element whose reference is 0 is left out of the mean; one that is not finite makes the error infinite, and `why`
says how large the numbers were. Operands are drawn from the statistics of a probe; `normal_error` is what N(0, 1)
operands of the same shapes would have shown.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ziggurat.numerics.probe import Direction, ProductStatistics
from ziggurat.ops.machine.turns import median_ratio, seconds_in_turns, time_on
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
        why: the error is infinite; "" where it is not.
    """

    error: float
    normal_error: float
    why: str = ""


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


def overflow_of(kernel: ProductKernel, left: Tensor, right: Tensor) -> str:
    """Say why a product of finite matrices is not finite in a kernel; "" where it is."""
    if bool(kernel.multiply(left, right).isfinite().all()):
        return ""
    largest = max(float(left.abs().max()), float(right.abs().max()))
    of_product = float((left.double() @ right.double()).abs().max())
    return f"overflows {kernel}: operands up to {largest:.2g}, {kernel.holds}; their product up to {of_product:.2g}"


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
    if not product.is_finite:
        why = "operands or gradients are too large for statistics in FP32, in which their squares overflow"
        return {kernel.name: KernelError(error=math.inf, normal_error=math.nan, why=why) for kernel in kernels}
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
        error = statistics.mean(relative_error(kernel, *pair) for pair in drawn)
        why = "" if math.isfinite(error) else next(filter(None, (overflow_of(kernel, *pair) for pair in drawn)), "")
        found[kernel.name] = KernelError(
            error=error,
            normal_error=statistics.mean(relative_error(kernel, *pair) for pair in normal),
            why=why,
        )
    return found


def measure_speedups(
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    kernels: Sequence[ProductKernel],
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> dict[str, float]:
    """Measure how many times as fast as the kernel of their own dtype kernels multiply matrices, in turns.

    Args:
        shapes: of both matrices.
        kernels: that run on the device.
        device: where.
        dtype: of operands and of the product: FP32, against the kernel fp32, or BF16, against bf16.
    """
    base = ProductKernel.named("bf16") if dtype is torch.bfloat16 else ProductKernel.FP32
    others = [kernel for kernel in kernels if kernel is not base]
    fast = [kernel for kernel in others if kernel.is_fast and not kernel.refuses(*shapes)]
    left, right = (torch.randn(shape, device=device).to(dtype) for shape in shapes)
    contestants = [base, *fast]
    base_s, *others_s = seconds_in_turns(
        [functools.partial(_seconds, kernel, left, right) for kernel in contestants],
        turns=_TURNS,
        budget_s=_TURN_BUDGET_S,
    )
    found = {kernel.name: median_ratio(base_s, other_s) for kernel, other_s in zip(fast, others_s, strict=True)}
    return {base.name: 1.0} | found


def _seconds(kernel: ProductKernel, left: Tensor, right: Tensor, turn: int) -> float:
    del turn
    begin_s = time_on(left.device)
    kernel.product(left, right, dtype=left.dtype)
    return time_on(left.device) - begin_s


def _on(device: torch.device, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return pair[0].to(device), pair[1].to(device)
