"""The Triton kernel of `fm_norm.py`. Importing this needs the package triton; only `fm_norm.py` does, when asked to."""

# pyright: reportMissingImports=false, reportUnknownMemberType=false

import triton
import triton.language as tl


@triton.jit
def fm_norm_kernel(
    fields,
    weight,
    scale,
    shift,
    out,
    eps,
    num_fields: tl.constexpr,
    dim: tl.constexpr,
    rank: tl.constexpr,
    padded_num_fields: tl.constexpr,
    padded_dim: tl.constexpr,
    padded_rank: tl.constexpr,
):
    """LN(flatten(X (Xᵀ Y))) of one sample; `padded_…` are powers of two of 16 or more."""
    sample = tl.program_id(0).to(tl.int64)
    f = tl.arange(0, padded_num_fields)[:, None]
    d = tl.arange(0, padded_dim)[None, :]
    r = tl.arange(0, padded_rank)[None, :]
    inside = (f < num_fields) & (d < dim)
    chosen = (f < num_fields) & (r < rank)
    at = f * rank + r
    x = tl.load(fields + sample * num_fields * dim + f * dim + d, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(weight + at, mask=chosen, other=0.0).to(tl.float32)
    mixed = tl.dot(tl.trans(x), y, input_precision="ieee")
    products = tl.dot(x, mixed, input_precision="ieee")
    count = num_fields * rank
    mean = tl.sum(tl.sum(products, axis=1), axis=0) / count
    centred = tl.where(chosen, products - mean, 0.0)
    variance = tl.sum(tl.sum(centred * centred, axis=1), axis=0) / count
    gamma = tl.load(scale + at, mask=chosen, other=0.0).to(tl.float32)
    beta = tl.load(shift + at, mask=chosen, other=0.0).to(tl.float32)
    normal = centred / tl.sqrt(variance + eps) * gamma + beta
    tl.store(out + sample * count + at, normal.to(out.dtype.element_ty), mask=chosen)
