"""Block formats of numbers, as data: rounding to them, their bits, their error."""

from __future__ import annotations

from ziggurat.numerics import catalogue as catalogue
from ziggurat.numerics.block_format import BlockFormat, Element, Rounding, ScaleRule, Scope
from ziggurat.numerics.quantise import quantise, quantise_reference

__all__ = [
    "BlockFormat",
    "Element",
    "Rounding",
    "ScaleRule",
    "Scope",
    "quantise",
    "quantise_reference",
]
