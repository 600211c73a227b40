"""Dot products as a unit for shared microexponents computes them: the slow reference that faster paths are held to.

    integers       p_i = a_i · b_i                              exact, 2m bits
    second level   p_i >> (τ_a + τ_b)                           in the adder tree: exact, its bits below are kept
    block          Σ p_i over k1                                exact
    unit           blocks aligned to the largest exponent       fixed point of f bits: what lies below is cut off
    sum            the unit's sum to FP32, added in FP32        unit after unit

Source: "With Shared Microexponents, A Little Shifting Goes a Long Way" (arXiv 2302.08007), its dot-product unit: 64
numbers at a time, f = min(25, the bits of all that could occur). The text does not say how the cut rounds; here it does
so toward minus infinity, as an arithmetic shift does.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ziggurat.errors import ConfigError
from ziggurat.numerics import blocks
from ziggurat.numerics.block_format import BlockFormat
from ziggurat.numerics.quantise import checked, refuse_what_does_not_fit

_FIXED_BITS = 25


def dot(
    left: Float[Tensor, "*B n"], right: Float[Tensor, "*B n"], format: BlockFormat, *, unit: int = 64
) -> Float[Tensor, "*B"]:
    """Return Σ left · right over the last axis, of numbers rounded to a format of integers in blocks.

    Args:
        left: numbers.
        right: as many.
        format: of both.
        unit: numbers that a unit takes at a time, whole blocks.

    Raises:
        ConfigError: elements are no integers, scales no powers of two, or the unit takes no whole blocks.
        NumericsError: an infinity.
    """
    if not (format.element.is_integer and format.has_scale and format.has_power_of_two_scales):
        raise ConfigError(
            expected="integers in blocks whose scales are powers of two, as the unit multiplies them",
            found=f"{format}",
            where="dot, format",
            ways_out=(
                "take one of them: BlockFormat.named('mx9')",
                "round both sides and multiply in FP32: (quantise(left, …) * quantise(right, …)).sum(-1)",
            ),
        )
    length = blocks.block_length(format, left.shape[-1])
    if unit % length:
        raise ConfigError(
            expected=f"a unit of whole blocks of {length}",
            found=f"{unit} numbers",
            where="dot, unit",
            ways_out=f"unit={-(-unit // length) * length}",
        )
    integers, exponents, is_nan = zip(*(_integers(each, format) for each in (left, right)), strict=True)
    sums = (integers[0] * integers[1]).sum(dim=-1)
    block_exponents = exponents[0] + exponents[1]
    total = torch.zeros(len(sums))
    for start in range(0, sums.shape[1], unit // length):
        part = slice(start, start + unit // length)
        total += _unit_sum(sums[:, part], block_exponents[:, part], format, unit=unit)
    total[is_nan[0] | is_nan[1]] = torch.nan
    return total.view(left.shape[:-1])


def _integers(x: Float[Tensor, "*B n"], format: BlockFormat) -> tuple[Int64[Tensor, "R m k"], Tensor, Tensor]:
    """Return integers in units of the lowest second level, the exponents of these units, and which rows hold NaN."""
    x = checked(x, -1, name="an operand")
    refuse_what_does_not_fit(x, format, name="an operand")
    coded = blocks.encode(x.reshape(-1, x.shape[-1]), format)
    assert coded.scales is not None
    integers = torch.where(coded.signs, -coded.elements, coded.elements)
    exponents = coded.scales + format.element.min_exponent - format.element.fraction_bits
    if coded.seconds is not None:
        lifted = format.max_second - coded.seconds.repeat_interleave(format.k2, dim=-1)
        integers = integers << lifted
        exponents = exponents - format.max_second
    return integers, exponents, coded.is_nan.flatten(1).any(dim=1)


def _unit_sum(
    sums: Int64[Tensor, "R m"], exponents: Int64[Tensor, "R m"], format: BlockFormat, *, unit: int
) -> Float[Tensor, "R"]:
    """Return the sum of blocks in fixed point, in FP32."""
    top = exponents.amax(dim=1, keepdim=True)
    widest = 2 * (format.element.fraction_bits + 1 + format.max_second) + math.ceil(math.log2(unit)) + 1
    spare = _FIXED_BITS - widest  # bits below those of the block with the largest exponent; negative: some are cut off
    fixed = torch.ldexp(sums.double(), spare + exponents - top).floor()
    return torch.ldexp(fixed.sum(dim=1), (top - spare).squeeze(1)).float()
