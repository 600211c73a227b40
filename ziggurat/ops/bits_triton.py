"""FP32 and BF16 as bits, and mixed bits, for Triton kernels of several folders. Importing this needs triton."""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl


@triton.jit
def mixed(z):
    """Return the finaliser of splitmix64, with the bits of `ops/mixed_bits.py`."""
    z = z ^ (z >> 30)
    z = z * 0xBF58476D1CE4E5B9
    z = z ^ (z >> 27)
    z = z * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def numbers_of(stored):
    """FP32 numbers of what is kept: FP32, BF16, FP16, or the upper halves of FP32 numbers as integers."""
    if stored.dtype == tl.int16:
        return (stored.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return stored.to(tl.float32)


@triton.jit
def upper_halves(number, added):
    """BF16 as integers, `added` below the last bit; infinity and NaN stay."""
    bits = number.to(tl.uint32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    upper = tl.where(finite, bits + added, bits) >> 16
    return tl.where(is_nan, upper * 0 + 0x7FC0, upper).to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit
def bf16_of(number):
    """BF16 as integers, to the nearest, ties to even."""
    return upper_halves(number, 0x7FFF + ((number.to(tl.uint32, bitcast=True) >> 16) & 1))


@triton.jit
def rounded_to(x, stored: tl.constexpr, interpreted: tl.constexpr):
    """FP32 numbers as another type, to the nearest (to BF16 Triton's interpreter cuts off)."""
    if stored == tl.bfloat16 and interpreted:
        return bf16_of(x).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(stored)
