"""The Triton kernel of `fm_norm.py`. Importing this needs the package triton; only `fm_norm.py` does, when asked to.

Products are those of matrix instructions in the dtype of the fields: T = Xᵀ Y is rounded to it, as torch rounds it
between two batched products. Weights stay in registers while a program goes through its samples.
"""

# pyright: reportMissingImports=false, reportUnknownMemberType=false

import triton
import triton.language as tl

from ziggurat.ops.bits_triton import rounded_to


@triton.jit
def _factor(x, stored: tl.constexpr, interpreted: tl.constexpr):
    """Numbers in the dtype of products; the interpreter multiplies FP32 numbers, rounded alike."""
    x = rounded_to(x, stored, interpreted)
    if interpreted:
        x = x.to(tl.float32)
    return x


@triton.jit
def fm_norm_kernel(
    fields, weight, scale, shift, out, eps, batch_size,
    num_fields: tl.constexpr, dim: tl.constexpr, rank: tl.constexpr, padded_num_fields: tl.constexpr,
    padded_dim: tl.constexpr, padded_rank: tl.constexpr, samples: tl.constexpr, stages: tl.constexpr,
    interpreted: tl.constexpr,
):  # fmt: skip
    """LN(flatten(X (Xᵀ Y))) of `samples` samples, one after the other; `padded_…` are powers of two of 16 or more."""
    f = tl.arange(0, padded_num_fields)[:, None]
    d = tl.arange(0, padded_dim)[None, :]
    r = tl.arange(0, padded_rank)[None, :]
    inside = (f < num_fields) & (d < dim)
    chosen = (f < num_fields) & (r < rank)
    at = f * rank + r
    count: tl.constexpr = num_fields * rank
    stored: tl.constexpr = fields.dtype.element_ty
    y = _factor(tl.load(weight + at, mask=chosen, other=0.0).to(tl.float32), stored, interpreted)
    gamma = tl.load(scale + at, mask=chosen, other=0.0).to(tl.float32)
    beta = tl.load(shift + at, mask=chosen, other=0.0).to(tl.float32)
    for number in tl.range(0, samples, num_stages=stages):
        sample = tl.program_id(0).to(tl.int64) * samples + number
        there = sample < batch_size
        x = tl.load(fields + sample * num_fields * dim + f * dim + d, mask=inside & there, other=0.0)
        x = _factor(x.to(tl.float32), stored, interpreted)
        mixed = _factor(tl.dot(tl.trans(x), y, input_precision="ieee"), stored, interpreted)
        products = tl.dot(x, mixed, input_precision="ieee")
        mean = tl.sum(products) / count  # over both axes at once: Triton 3.6 cannot compile two sums for sm_100
        # Padding is 0 − mean, which would count as deviation.
        centred = tl.where(chosen, products - mean, 0.0)
        variance = tl.sum(centred * centred) / count
        normal = centred / tl.sqrt(variance + eps) * gamma + beta
        tl.store(out + sample * count + at, rounded_to(normal, stored, interpreted), mask=chosen & there)
