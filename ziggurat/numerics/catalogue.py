"""The listed block formats. A package of the user's own adds more: `BlockFormat.add(BlockFormat(name=…, …))`.

    mx9, mx6, mx4                    shared microexponents of the paper (arXiv 2302.08007)
    mxfp8_…, mxfp6_…, mxfp4, mxint8  OCP Microscaling Formats 1.0; another scale rule is a suffix: mxfp4_rceil
    msfp12 … msfp16                  one shared exponent for 16 integers (block floating point)
    int8, int4                       an FP32 scale for all numbers along the axis
    fp8_…_tensor, …_row, …_128       an FP32 scale for a tensor, for all along the axis, for 128 numbers
    vsq4, vsq6, vsq8                 an FP32 scale along the axis, an integer factor for 16 (arXiv 2102.04503)
    bf16, fp16, tf32, fp8_…          every number by itself

An FP32 scale is never below 2^-126, the smallest normal number. Numbers whose largest magnitude is below 2^-126 times
that of the element (5e-36 for E4M3, 2.3e-38 for int8) have a scale that cannot follow them down: integers keep fewer
bits, floats the lower binades alone, and both become zero at last. A factor before rounding keeps them apart.

Names of one family never mean those of another: `mx…` is the paper's, `mxfp…` and `mxint…` are OCP's.
"""

from __future__ import annotations

from ziggurat.numerics.block_format import BlockFormat, Element, Rounding, ScaleRule, Scope

PAPER = "shared microexponents (2302.08007)"
OCP = "OCP MX 1.0"
MSFP = "MSFP"
FP32_SCALE = "FP32 scale"
NO_SCALE = "no scale"

E4M3 = Element(exponent_bits=4, fraction_bits=3, largest=448.0)
E5M2 = Element(exponent_bits=5, fraction_bits=2, largest=57344.0)
E3M2 = Element(exponent_bits=3, fraction_bits=2)
E2M3 = Element(exponent_bits=2, fraction_bits=3)
E2M1 = Element(exponent_bits=2, fraction_bits=1)


def _paper(name: str, mantissa_bits: int) -> BlockFormat:
    element = Element.integer(mantissa_bits)
    return BlockFormat.add(BlockFormat(name=name, element=element, k1=16, k2=2, d1=8, d2=1, family=PAPER))


def _ocp(name: str, element: Element) -> BlockFormat:
    format = BlockFormat.add(BlockFormat(name=name, element=element, k1=32, d1=8, family=OCP))
    for rule in (ScaleRule.CEIL, ScaleRule.EVEN, ScaleRule.RCEIL):
        BlockFormat.add(format.with_scale_rule(rule))
    return format


MX9 = _paper("mx9", 7)
MX6 = _paper("mx6", 4)
MX4 = _paper("mx4", 2)

MXFP8_E4M3 = _ocp("mxfp8_e4m3", E4M3)
MXFP8_E5M2 = _ocp("mxfp8_e5m2", E5M2)
MXFP6_E2M3 = _ocp("mxfp6_e2m3", E2M3)
MXFP6_E3M2 = _ocp("mxfp6_e3m2", E3M2)
MXFP4 = _ocp("mxfp4", E2M1)
MXINT8 = _ocp("mxint8", Element.integer(7, is_twos_complement=True))

for _bits in (16, 15, 14, 13, 12):
    _element = Element.integer(_bits - 9)  # beside 8 bits of a shared exponent and a sign
    BlockFormat.add(BlockFormat(name=f"msfp{_bits}", element=_element, k1=16, d1=8, family=MSFP))

for _bits in (8, 4):
    _element = Element.integer(_bits - 1, is_twos_complement=True)
    BlockFormat.add(BlockFormat(name=f"int{_bits}", element=_element, k1=Scope.AXIS, d1=32, family=FP32_SCALE))

for _name, _element in (("fp8_e4m3", E4M3), ("fp8_e5m2", E5M2)):
    for _suffix, _k1 in (("tensor", Scope.TENSOR), ("row", Scope.AXIS), ("128", 128)):
        _full = f"{_name}_{_suffix}"
        BlockFormat.add(BlockFormat(name=_full, element=_element, k1=_k1, d1=32, family=FP32_SCALE))

for _bits in (8, 6, 4):
    _element = Element.integer(_bits - 1)
    BlockFormat.add(
        BlockFormat(name=f"vsq{_bits}", element=_element, k1=Scope.AXIS, k2=16, d1=32, d2=_bits, family=FP32_SCALE)
    )

_BF16 = Element(exponent_bits=8, fraction_bits=7, largest=(2 - 2**-7) * 2.0**127)
_FP16 = Element(exponent_bits=5, fraction_bits=10, largest=65504.0)
_TF32 = Element(exponent_bits=8, fraction_bits=10, largest=(2 - 2**-10) * 2.0**127)
BlockFormat.add(BlockFormat(name="tf32", element=_TF32, family=NO_SCALE))
BlockFormat.add(BlockFormat(name="bf16", element=_BF16, family=NO_SCALE))
BlockFormat.add(BlockFormat(name="bf16_truncated", element=_BF16, rounding=Rounding.TRUNCATE, family=NO_SCALE))
BlockFormat.add(BlockFormat(name="fp16", element=_FP16, family=NO_SCALE))
BlockFormat.add(BlockFormat(name="fp8_e4m3", element=E4M3, family=NO_SCALE))
BlockFormat.add(BlockFormat(name="fp8_e5m2", element=E5M2, family=NO_SCALE))
