"""Block formats: how numbers are kept in few bits that share scales, as plain data.

    first level     k1 numbers share a scale of d1 bits     a power of two, or an FP32 number (d1 = 32)
    second level    k2 of them share d2 bits more           2^-τ below a power of two, an integer below an FP32 number
    element         each number has a sign and a code       an integer, or a small floating-point number

    bits of a number  =  1 + bits of the code + d1 / k1 + d2 / k2

These few fields cover block data representations ("With Shared Microexponents, A Little Shifting Goes a Long Way",
arXiv 2302.08007: MX9, MX6, MX4, MSFP, INT, FP8, VSQ) and OCP Microscaling (MX 1.0: MXFP8, MXFP6, MXFP4, MXINT8).
The two share authors and the letters MX, and nothing else: the paper's MX has a second level of one bit for each pair
of integers in a block of 16; OCP's has one level, over 32 floating-point numbers. `family` says which one a name means.

One element serves both, because an integer of m bits is a floating-point number with one exponent bit: its subnormal
half holds the lower integers and its normal half the upper ones, at the same distance. Codes of magnitudes are in the
order of the magnitudes, so that they count up through all binades.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from ziggurat.errors import ConfigError, nearest_names

_FP32_BITS = 32
_LARGEST_FP32 = math.ldexp(2**24 - 1, 104)


class Scope(StrEnum):
    """Numbers that share a first-level scale, where that is no fixed count."""

    AXIS = "axis"  # all along the axis: a row, for products
    TENSOR = "tensor"


class ScaleRule(StrEnum):
    """Rules by which the power of two that a block is divided by follows from its largest magnitude."""

    FLOOR = "floor"  # the binade of the largest; OCP MX 1.0, and the paper
    CEIL = "ceil"  # one binade more, unless the largest is a power of two: nothing saturates
    EVEN = "even"  # the binade of the largest after it was rounded to the element's fraction
    RCEIL = "rceil"  # the smallest one under which the largest fits the element


class Rounding(StrEnum):
    """Roundings of a number between two codes."""

    NEAREST_EVEN = "nearest-even"
    TRUNCATE = "truncate"  # toward zero


@dataclass(frozen=True, kw_only=True)
class Element:
    """Codes of single numbers, in units of their scale: sign, exponent, fraction, with subnormal numbers.

    Args:
        exponent_bits: 1 for integers (`Element.integer`).
        fraction_bits: explicit bits below the leading one.
        bias: of the exponent; 2^(exponent_bits - 1) - 1 unless given.
        largest: magnitude; that of the largest code unless given. Larger numbers saturate.
        is_twos_complement: stored so, without a negative zero; else sign and magnitude.
    """

    exponent_bits: int
    fraction_bits: int
    bias: int = -1
    largest: float = math.inf
    is_twos_complement: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.exponent_bits <= 8 or not 0 <= self.fraction_bits <= 15:
            raise ConfigError(
                expected="an element of 1 to 8 exponent bits and 0 to 15 fraction bits",
                found=f"{self.exponent_bits} and {self.fraction_bits}",
                where="Element, exponent_bits and fraction_bits",
                ways_out=("Element.integer(m) for integers of m bits", "Element(exponent_bits=4, fraction_bits=3)"),
            )
        if self.bias < 0:
            # The way past a frozen dataclass's guard, while it is being made.
            object.__setattr__(self, "bias", 2 ** (self.exponent_bits - 1) - 1)
        if math.isinf(self.largest):
            object.__setattr__(self, "largest", self.magnitude(2 ** (self.bits - 1) - 1))
        if self.largest <= 0 or self.magnitude(self.code(self.largest)) != self.largest:
            raise ConfigError(
                expected="the largest magnitude of an element among its codes",
                found=f"{self.largest}",
                where="Element, largest",
                ways_out="leave it out: the largest code then counts",
            )

    @classmethod
    def integer(cls, mantissa_bits: int, *, is_twos_complement: bool = False) -> Element:
        """Return the element of integers of so many bits and a sign, of which the largest is just below 2."""
        # One exponent bit: subnormal and normal half have the same distance (module text).
        return cls(exponent_bits=1, fraction_bits=mantissa_bits - 1, bias=1, is_twos_complement=is_twos_complement)

    @property
    def bits(self) -> int:
        """The bits of a code, with its sign."""
        return 1 + self.exponent_bits + self.fraction_bits

    @property
    def is_integer(self) -> bool:
        """True if all codes have the same distance."""
        return self.exponent_bits == 1

    @property
    def min_exponent(self) -> int:
        """The binade of the smallest normal number; subnormal numbers have its distance."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """The binade of the largest number."""
        # `frexp` gives a fraction in [0.5, 1): one binade above that of 1.x · 2^e.
        return math.frexp(self.largest)[1] - 1

    @property
    def smallest(self) -> float:
        """The smallest magnitude above zero."""
        return math.ldexp(1.0, self.min_exponent - self.fraction_bits)

    def code(self, magnitude: float) -> int:
        """Return the code of a magnitude, without its sign; one between two codes has the lower one."""
        if magnitude == 0:
            return 0
        exponent = max(math.frexp(magnitude)[1] - 1, self.min_exponent)
        steps = int(math.ldexp(magnitude, self.fraction_bits - exponent))
        # Normal codes hold their leading bit in `steps`, which makes the binade's code one larger, as it should be.
        return steps + ((exponent - self.min_exponent) << self.fraction_bits)

    def magnitude(self, code: int) -> float:
        """Return the magnitude of a code without its sign."""
        # Binade 0 has two halves of codes: subnormal ones (0) and the first normal ones (1).
        binade = max(code >> self.fraction_bits, 1) - 1
        steps = code - (binade << self.fraction_bits)
        return math.ldexp(steps, self.min_exponent + binade - self.fraction_bits)


@dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """Format of numbers in blocks. See the module's docstring.

    Args:
        name: what reports, files and command lines call it.
        element: codes of single numbers.
        k1: numbers that share a first-level scale, along the axis that a product sums over.
        k2: numbers of these that share a second-level scale.
        d1: bits of the first-level scale: a power of two in up to 8 bits, FP32 in 32, no scale in 0.
        d2: bits of the second-level scale; 0: there is none.
        scale_rule: of a first level of powers of two.
        rounding: of single numbers.
        family: whose definition it is, for tables: the same letters mean different formats.
    """

    name: str
    element: Element
    k1: int | Scope = 1
    k2: int = 1
    d1: int = 0
    d2: int = 0
    scale_rule: ScaleRule = ScaleRule.FLOOR
    rounding: Rounding = Rounding.NEAREST_EVEN
    family: str = "own"

    _listed: ClassVar[dict[str, BlockFormat]] = {}

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z]\w*", self.name):
            raise self._refused("a name of letters, digits and underscores", repr(self.name), "name")
        if isinstance(self.k1, int) and self.k1 < 1:
            raise self._refused("at least one number in a block", str(self.k1), "k1")
        if self.d1 not in (0, *range(2, 9), _FP32_BITS):
            raise self._refused("first-level scales of 0, 2 to 8 or 32 bits", str(self.d1), "d1")
        if self.d1 == 0 and self.k1 != 1:
            raise self._refused("k1 = 1 where numbers share no scale (d1 = 0)", f"k1 = {self.k1}", "k1")
        if not 0 <= self.d2 <= 8 or (self.d2 and not self.d1):
            raise self._refused("second-level scales of 0 to 8 bits, below a first level", str(self.d2), "d2")
        if self.k2 < 1 or (isinstance(self.k1, int) and self.k1 % self.k2):
            raise self._refused(f"second-level blocks that divide the {self.k1} of the first", str(self.k2), "k2")
        if not self.d2 and self.k2 != 1:
            raise self._refused("k2 = 1 where there is no second level (d2 = 0)", str(self.k2), "k2")
        if self.d1 == 0 and self.element.code(self.element.largest) == 2 ** (self.element.bits - 1) - 1:
            found = f"largest = {self.element.largest}, the last code"
            raise self._refused(
                "a code that is left for NaN where there is no scale that could say it", found, "element"
            )

    @property
    def bits_per_element(self) -> float:
        """The bits that a number takes, scales shared out; those over an axis or a tensor count nothing."""
        shared = self.d1 / self.k1 if isinstance(self.k1, int) else 0.0
        return self.element.bits + shared + self.d2 / self.k2

    @property
    def has_scale(self) -> bool:
        """True if numbers share a scale; without one, what the element cannot hold is refused."""
        return self.d1 > 0

    @property
    def has_power_of_two_scales(self) -> bool:
        """True if scales of both levels are powers of two, or absent; else they are FP32 numbers and integers."""
        return self.d1 != _FP32_BITS

    @property
    def has_integer_factors(self) -> bool:
        """True if the second level is integers, which are chosen anew when numbers are rounded again."""
        return self.d2 > 0 and not self.has_power_of_two_scales

    @property
    def max_scale_exponent(self) -> int:
        """The largest exponent of a power of two that is a scale, and the negative of the smallest."""
        return 2 ** (self.d1 - 1) - 1 if self.d1 else 0

    @functools.cached_property
    def largest_held(self) -> float:
        """The largest FP32 magnitude that does not overflow: any where numbers share a scale, which grows with them."""
        if self.has_scale:
            return _LARGEST_FP32
        element = self.element
        step = element.largest - element.magnitude(element.code(element.largest) - 1)
        if self.rounding is Rounding.TRUNCATE:
            # Truncation lets everything below the next code saturate without overflow.
            return _fp32_below(element.largest + step)
        half_way = element.largest + step / 2
        # Ties go to the even code: to the largest one if that is even, else beyond it.
        ties_stay = element.code(element.largest) % 2 == 0
        return half_way if ties_stay else _fp32_below(half_way)

    @property
    def binades_in_a_block(self) -> float:
        """The binades from the smallest to the largest magnitude that one first-level scale allows."""
        below = self.max_second if self.has_power_of_two_scales else math.log2(max(self.max_second, 1))
        return math.log2(self.element.largest / self.element.smallest) + below

    @property
    def max_second(self) -> int:
        """The largest second-level code: binades that a block within a block may lie lower, or an integer factor."""
        return 2**self.d2 - 1

    def with_scale_rule(self, rule: ScaleRule) -> BlockFormat:
        """Return the format with another scale rule, named after it: mxfp4_rceil."""
        return dataclasses.replace(self, name=f"{self.name}_{rule.value}", scale_rule=rule)

    @classmethod
    def add(cls, format: BlockFormat) -> BlockFormat:
        """List a format, so that it is found by its name; returns it.

        Raises:
            ConfigError: an unlike format has that name.
        """
        known = cls._listed.setdefault(format.name, format)
        if known != format:
            raise ConfigError(
                expected="a block format with a name of its own",
                found=f"two unlike ones named {format.name!r}",
                where="BlockFormat.add",
                ways_out="give one of them another name",
            )
        return known

    @classmethod
    def named(cls, name: str) -> BlockFormat:
        """Return the listed format of a name.

        Raises:
            ConfigError: no listed format has it.
        """
        if name in cls._listed:
            return cls._listed[name]
        near = nearest_names(name, cls._listed)
        raise ConfigError(
            expected="the name of a block format",
            found=repr(name),
            where="BlockFormat.named",
            ways_out=(*([f"did you mean {' or '.join(near)}?"] if near else []), "see them: ziggurat numerics formats"),
        )

    @classmethod
    def listed(cls) -> tuple[BlockFormat, ...]:
        """Return all listed formats, in the order of their listing."""
        return tuple(cls._listed.values())

    def __str__(self) -> str:
        return self.name

    def _refused(self, expected: str, found: str, field: str) -> ConfigError:
        return ConfigError(
            expected=expected,
            found=found,
            where=f"block format {self.name!r}, {field}",
            ways_out="see how the listed ones are made: ziggurat/numerics/catalogue.py",
        )


def _fp32_below(magnitude: float) -> float:
    """Return the FP32 number below one."""
    exponent = math.frexp(magnitude)[1] - 1
    if math.ldexp(1.0, exponent) == magnitude:
        # Below a power of two numbers lie half as far apart.
        exponent -= 1
    return magnitude - math.ldexp(1.0, exponent - 23)
