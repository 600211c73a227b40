"""Measure the error of formats as a ratio of signal to noise, as the paper on shared microexponents does.

    QSNR = −10 · log10( mean over vectors of ‖Q(x) − x‖² / ‖x‖² )      in dB; 6.02 dB are one bit

Vectors are normal, and what a format meets in training is that their sizes differ: `Spread` says how. The paper's
Theorem 1 gives a lower bound for formats of integers in blocks, which no vector may fall below (`lower_bound`).

Source: "With Shared Microexponents, A Little Shifting Goes a Long Way" (arXiv 2302.08007), more than 10⁴ vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import StrEnum

import torch
from jaxtyping import Float
from torch import Tensor

from ziggurat.errors import ConfigError
from ziggurat.numerics.block_format import BlockFormat, ScaleRule
from ziggurat.numerics.blocks import block_length
from ziggurat.numerics.quantise import quantise

NUM_VECTORS = 10_000
VECTOR_LENGTH = 1024
_VECTORS_AT_A_TIME = 500


class Spread(StrEnum):
    """Standard deviations of the normal numbers that are rounded."""

    ONE = "one"
    VECTOR = "vector"  # |N(0, 1)|, one for each vector: the paper's
    ELEMENT = "element"  # |N(0, 1)|, one for each number


def noise_ratios(x: Float[Tensor, "N D"], rounded: Float[Tensor, "N D"]) -> Float[Tensor, "N"]:
    """Return ‖Q(x) − x‖² / ‖x‖² of vectors, in FP64."""
    x = x.double()
    return (rounded.double() - x).square().sum(dim=1) / x.square().sum(dim=1)


def decibels(ratio: float) -> float:
    """Return a ratio of noise to signal as QSNR."""
    return -10 * math.log10(ratio) if ratio > 0 else math.inf


def measure_qsnr(
    formats: Sequence[BlockFormat],
    *,
    spread: Spread = Spread.VECTOR,
    num_vectors: int = NUM_VECTORS,
    length: int = VECTOR_LENGTH,
    seed: int = 0,
    on_vectors: Callable[[int], None] | None = None,
) -> list[float]:
    """Return the QSNR of formats, in dB, all on the same vectors.

    Args:
        formats: to measure.
        spread: of the vectors.
        num_vectors: how many.
        length: of each.
        seed: of their numbers.
        on_vectors: is told how many are done, now and then.
    """
    generator = torch.Generator().manual_seed(seed)
    totals = [0.0] * len(formats)
    for start in range(0, num_vectors, _VECTORS_AT_A_TIME):
        x = torch.randn(min(_VECTORS_AT_A_TIME, num_vectors - start), length, generator=generator)
        if spread is not Spread.ONE:
            columns = 1 if spread is Spread.VECTOR else length
            x *= torch.randn(len(x), columns, generator=generator).abs()
        signal = x.double().square().sum(dim=1)
        for index, format in enumerate(formats):
            noise = torch.linalg.vector_norm(quantise(x, format, 1) - x, dim=1, dtype=torch.float64).square()
            totals[index] += float((noise / signal).sum())
        if on_vectors is not None:
            on_vectors(start + len(x))
    return [decibels(total / num_vectors) for total in totals]


def lower_bound(format: BlockFormat, n: int) -> float:
    """Return the QSNR in dB that no vector of n numbers falls below (Theorem 1), whatever its numbers.

    It holds where the exponent of every block is one that its scale has: not below the smallest one.

    Raises:
        ConfigError: the theorem does not speak of such a format.
    """
    is_of_theorem = format.element.is_integer and format.has_scale and format.has_power_of_two_scales
    if not is_of_theorem or format.scale_rule is not ScaleRule.FLOOR:
        raise ConfigError(
            expected="integers in blocks whose scale is the binade of their largest",
            found=f"{format}",
            where="lower_bound, format",
            ways_out=("take one of them: BlockFormat.named('mx9')", "measure it: measure_qsnr([format])"),
        )
    mantissa_bits = format.element.bits - 1
    depth = 4.0**format.max_second
    block = min(n, block_length(format, n))
    return 20 * math.log10(2) * mantissa_bits + 10 * math.log10(depth / (block + (depth - 1) * format.k2))
