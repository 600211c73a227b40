"""The arithmetic of block formats in torch, exact: what the kernels and the packed bits are held to.

    rows of numbers ──► blocks of k1, the last one filled up with zeros ──► the largest magnitude of each
                    ──► scales of both levels ──► number / scale, rounded to the element, saturated ──► × scale

Scales that are powers of two cost no rounding: numbers are divided in FP64, where this is exact, so each number is
rounded once. FP32 scales round twice more, as every implementation of them does: y = x / s and q · s are FP32
operations. A scale is never below 2^-126, the smallest normal number.

NaN: a scale that says so makes NaN of all numbers that share it, because few elements have a code for it; formats
without scales keep it where it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from ziggurat.numerics.block_format import BlockFormat, Element, Rounding, ScaleRule, Scope

SMALLEST_NORMAL = 2.0**-126
LARGEST = torch.finfo(torch.float32).max
_ZERO = -(2**20)  # the binade of zero: below all others


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Rows of numbers, coded: R rows of n numbers, in m blocks of k, with s second-level blocks in each.

    Args:
        elements: codes of magnitudes, in units of their scales; the last block is filled up with zeros.
        signs: whether a number is negative, or the negative zero.
        scales: powers of two (their exponents), or the bits of FP32 numbers; None where there are none.
        seconds: codes of the second level; None where there is none.
        is_nan: of whole blocks; of numbers, where there are no scales.
    """

    elements: Int64[Tensor, "R m k"]
    signs: Bool[Tensor, "R m k"]
    scales: Int64[Tensor, "R m"] | None
    seconds: Int64[Tensor, "R m s"] | None
    is_nan: Bool[Tensor, "R m k"]


def block_length(format: BlockFormat, n: int) -> int:
    """Return the numbers of a block, in rows of n."""
    return max(n, 1) if isinstance(format.k1, Scope) else format.k1


def encode(rows: Float[Tensor, "R n"], format: BlockFormat) -> Blocks:
    """Round rows of numbers to a format. Infinities must not be among them."""
    values = _filled(rows, format)
    magnitudes = values.abs()
    # NaN if any number of the block is: `amax` passes it on.
    largest = magnitudes.amax(dim=-1)
    is_nan = (largest if format.has_scale else magnitudes).isnan()
    if format.has_scale:
        is_nan = is_nan.unsqueeze(-1).expand_as(values)
    # 0, so that the codes of the others stay defined; decoding makes NaN of the block.
    magnitudes = torch.where(is_nan, 0.0, magnitudes)
    largest = torch.nan_to_num(largest, nan=0.0)
    scales = _scales(largest, format)
    seconds = _seconds(magnitudes, scales, format)
    each = _scale_of_each(scales, seconds, format, length=values.shape[-1])
    if format.has_power_of_two_scales:
        # FP64 holds every FP32 number divided by a power of two exactly.
        in_units = torch.ldexp(magnitudes.double(), -each)
    else:
        # Divided in FP32: that rounding is part of the definition.
        in_units = (magnitudes / each).double()
    elements = element_codes(in_units, format.element, format.rounding)
    return Blocks(elements=elements, signs=values.signbit(), scales=scales, seconds=seconds, is_nan=is_nan)


def decode(blocks: Blocks, format: BlockFormat, *, n: int) -> Float[Tensor, "R n"]:
    """Return the numbers of coded rows."""
    each = _scale_of_each(blocks.scales, blocks.seconds, format, length=blocks.elements.shape[-1])
    in_units = element_magnitudes(blocks.elements, format.element)
    if format.has_power_of_two_scales:
        # Rounding up may reach 2^128, which FP32 has no number for.
        magnitudes = torch.ldexp(in_units, each).clamp(max=LARGEST).float()
    else:
        magnitudes = (in_units.float() * each).clamp(max=LARGEST)
    values = torch.where(blocks.signs, -magnitudes, magnitudes)
    if format.element.is_twos_complement:
        values = values + 0.0  # it has one zero
    values = torch.where(blocks.is_nan, torch.nan, values)
    return values.flatten(1)[:, :n]


def element_codes(in_units: Float[Tensor, "*B"], element: Element, rounding: Rounding) -> Int64[Tensor, "*B"]:
    """Return the codes of FP64 magnitudes in units of their scales, saturated at the largest."""
    # Below the smallest normal binade all steps are those of the subnormal numbers.
    exponents = binades(in_units).clamp(min=element.min_exponent)
    steps = torch.ldexp(in_units, element.fraction_bits - exponents)
    steps = steps.round() if rounding is Rounding.NEAREST_EVEN else steps.floor()
    # A step that was rounded up to the next binade carries into the exponent by itself.
    codes = steps.long() + ((exponents - element.min_exponent) << element.fraction_bits)
    return codes.clamp(max=element.code(element.largest))


def element_magnitudes(codes: Int64[Tensor, "*B"], element: Element) -> Float[Tensor, "*B"]:
    """Return the FP64 magnitudes of codes, in units of their scales."""
    lifted = (codes >> element.fraction_bits).clamp(min=1) - 1
    steps = codes - (lifted << element.fraction_bits)
    return torch.ldexp(steps.double(), lifted + element.min_exponent - element.fraction_bits)


def binades(magnitudes: Float[Tensor, "*B"]) -> Int64[Tensor, "*B"]:
    """Return floor(log2 |x|), exactly; that of zero lies below all others."""
    exponents = torch.frexp(magnitudes.double()).exponent.long() - 1
    return torch.where(magnitudes > 0, exponents, _ZERO)


def scale_bits_of(scales: Int64[Tensor, "*B"]) -> Float[Tensor, "*B"]:
    """Return the FP32 numbers of bits."""
    return scales.to(torch.int32).view(torch.float32)


def _filled(rows: Float[Tensor, "R n"], format: BlockFormat) -> Float[Tensor, "R m k"]:
    """Cut rows into blocks, the last of which is filled up with zeros to whole blocks of both levels."""
    n = rows.shape[1]
    length = -(-block_length(format, n) // format.k2) * format.k2
    num_blocks = -(-n // length)
    filled = torch.nn.functional.pad(rows, (0, num_blocks * length - n))
    return filled.view(len(rows), num_blocks, length)


def _scales(largest: Float[Tensor, "R m"], format: BlockFormat) -> Int64[Tensor, "R m"] | None:
    """Return the first-level scales of blocks by their largest magnitudes."""
    if not format.has_scale:
        return None
    element = format.element
    if not format.has_power_of_two_scales:
        scales = largest / element.largest
        # Factors reach up to `max_second`, so the unit below them is that much smaller.
        if format.d2:
            scales = scales / format.max_second
        return scales.clamp(min=SMALLEST_NORMAL).view(torch.int32).long()
    exponents = _scale_exponents(largest, format)
    # `_ZERO` is below all exponents: the clamp makes the smallest scale of it.
    exponents = torch.where(largest > 0, exponents, _ZERO)
    return exponents.clamp(-format.max_scale_exponent, format.max_scale_exponent)


def _scale_exponents(largest: Float[Tensor, "R m"], format: BlockFormat) -> Int64[Tensor, "R m"]:
    element = format.element
    rule = format.scale_rule
    if rule is ScaleRule.RCEIL:
        return _ceiling_of_log2(largest / element.largest)
    if rule is ScaleRule.CEIL:
        return _ceiling_of_log2(largest) - element.max_exponent
    exponents = binades(largest)
    if rule is ScaleRule.EVEN:  # half a step of the element below the next binade, and it counts as there
        mantissas = torch.frexp(largest).mantissa
        exponents = exponents + (mantissas >= 1 - 2.0 ** -(element.fraction_bits + 2))
    return exponents - element.max_exponent


def _ceiling_of_log2(magnitudes: Float[Tensor, "*B"]) -> Int64[Tensor, "*B"]:
    # `frexp`'s mantissa is 0.5 for powers of two: those need no binade more.
    return binades(magnitudes) + (torch.frexp(magnitudes).mantissa > 0.5)


def _seconds(
    magnitudes: Float[Tensor, "R m k"], scales: Int64[Tensor, "R m"] | None, format: BlockFormat
) -> Int64[Tensor, "R m s"] | None:
    """Return the second-level codes: binades below the first level, or integer factors."""
    if not format.d2 or scales is None:
        return None
    largest = magnitudes.unflatten(-1, (-1, format.k2)).amax(dim=-1)
    if format.has_power_of_two_scales:
        top = scales + format.element.max_exponent
        # Binades that the largest of a pair lies below that of the block, as many as d2 bits can say.
        return (top.unsqueeze(-1) - binades(largest)).clamp(0, format.max_second)
    factors = largest / format.element.largest / scale_bits_of(scales).unsqueeze(-1)
    # At least 1: a factor of 0 would leave nothing to divide by.
    return factors.round().clamp(1, format.max_second).long()


def _scale_of_each(
    scales: Int64[Tensor, "R m"] | None, seconds: Int64[Tensor, "R m s"] | None, format: BlockFormat, *, length: int
) -> Tensor:
    """Return what each number is divided by: exponents of powers of two, or FP32 numbers."""
    if scales is None:
        return torch.zeros((), dtype=torch.int64)
    if format.has_power_of_two_scales:
        each = scales.unsqueeze(-1)
        each = each if seconds is None else each - seconds
    else:
        each = scale_bits_of(scales).unsqueeze(-1)
        each = each if seconds is None else each * seconds
    return each.repeat_interleave(length // each.shape[-1], dim=-1)
