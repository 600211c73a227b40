"""The Triton kernels of `gated_norm.py`. Importing this needs the package triton; only that module does.

A program has whole rows in its registers: they are read once, and mean and variance are computed from what was read,
in the backward pass once more.
"""

# pyright: reportMissingImports=false, reportUnknownMemberType=false

import triton
import triton.language as tl

SIZES = ("num_rows",)  # a kernel is not compiled again when a batch has another one


@triton.jit
def _normed(a, weight, bias, columns, eps, dim: tl.constexpr, is_affine: tl.constexpr):
    """Compute x̂ of rows, their norms, 1/σ of each row, and γ."""
    is_column = (columns < dim)[None, :]
    mean = tl.sum(a, axis=1) / dim
    # Padding would count as 0 − mean.
    centred = tl.where(is_column, a - mean[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=1) / dim + eps)
    standard = centred * inverse[:, None]
    scale = tl.full((columns.shape[0],), 1.0, dtype=tl.float32)
    normed = standard
    if is_affine:
        scale = tl.load(weight + columns, mask=columns < dim, other=0.0).to(tl.float32)
        shift = tl.load(bias + columns, mask=columns < dim, other=0.0).to(tl.float32)
        normed = standard * scale[None, :] + shift[None, :]
    return standard, normed, inverse, scale


@triton.jit
def _gate_of(u, activates: tl.constexpr):
    """Compute the gate and its derivative."""
    gate = u
    slope = tl.full(u.shape, 1.0, dtype=tl.float32)
    if activates:
        logistic = 1.0 / (1.0 + tl.exp(-u))
        gate = u * logistic
        slope = logistic + gate * (1.0 - logistic)
    return gate, slope


@triton.jit(do_not_specialize=SIZES)
def gated_norm_kernel(
    u, a, weight, bias, out, num_rows, u_row, a_row, eps,
    dim: tl.constexpr, padded: tl.constexpr, rows_tile: tl.constexpr,
    is_affine: tl.constexpr, gates: tl.constexpr, activates: tl.constexpr, beside: tl.constexpr,
):  # fmt: skip
    """Write LN(a), or the gate, what stands beside it, and the gated norm, of `rows_tile` rows."""
    rows = (tl.program_id(0) * rows_tile + tl.arange(0, rows_tile)).to(tl.int64)
    columns = tl.arange(0, padded)
    mask = (rows < num_rows)[:, None] & (columns < dim)[None, :]
    raw = tl.load(a + rows[:, None] * a_row + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    _standard, normed, _inverse, _scale = _normed(raw, weight, bias, columns, eps, dim, is_affine)
    dtype = out.dtype.element_ty
    width = dim if beside == "nothing" else 3 * dim
    to = out + rows[:, None] * width + columns[None, :]
    if gates:
        gate = tl.load(u + rows[:, None] * u_row + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        gate, _slope = _gate_of(gate, activates)
        if beside != "nothing":
            tl.store(to, gate.to(dtype), mask=mask)
            tl.store(to + dim, (raw if beside == "raw" else normed).to(dtype), mask=mask)
            to += 2 * dim
        normed *= gate
    tl.store(to, normed.to(dtype), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def gated_norm_backward_kernel(
    u, a, weight, bias, grad, du, da, d_weight, d_bias, num_rows, u_row, a_row, eps,
    dim: tl.constexpr, padded: tl.constexpr, rows_tile: tl.constexpr, tiles: tl.constexpr,
    is_affine: tl.constexpr, gates: tl.constexpr, activates: tl.constexpr, beside: tl.constexpr,
):  # fmt: skip
    """Write gradients of `tiles` times `rows_tile` rows, and their sums for γ and β."""
    columns = tl.arange(0, padded)
    of_weight = tl.zeros((padded,), dtype=tl.float32)
    of_bias = tl.zeros((padded,), dtype=tl.float32)
    width = dim if beside == "nothing" else 3 * dim
    for tile in range(tiles):
        rows = ((tl.program_id(0) * tiles + tile) * rows_tile + tl.arange(0, rows_tile)).to(tl.int64)
        mask = (rows < num_rows)[:, None] & (columns < dim)[None, :]
        raw = tl.load(a + rows[:, None] * a_row + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        standard, normed, inverse, scale = _normed(raw, weight, bias, columns, eps, dim, is_affine)
        at = grad + rows[:, None] * width + columns[None, :]
        of_raw = tl.zeros(raw.shape, dtype=tl.float32)
        if gates:
            gate = tl.load(u + rows[:, None] * u_row + columns[None, :], mask=mask, other=0.0).to(tl.float32)
            gate, slope = _gate_of(gate, activates)
            of_gate = tl.zeros(raw.shape, dtype=tl.float32)
            of_beside = tl.zeros(raw.shape, dtype=tl.float32)
            if beside != "nothing":
                of_gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
                of_beside = tl.load(at + dim, mask=mask, other=0.0).to(tl.float32)
                at += 2 * dim
            of_gated = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            of_gate += of_gated * normed
            of_normed = of_gated * gate
            if beside == "raw":
                of_raw = of_beside
            else:
                of_normed += of_beside
            of_u = (of_gate * slope).to(du.dtype.element_ty)
            tl.store(du + rows[:, None] * dim + columns[None, :], of_u, mask=mask)
        else:
            of_normed = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        if is_affine:
            of_weight += tl.sum(of_normed * standard, axis=0)
            of_bias += tl.sum(of_normed, axis=0)
        of_standard = of_normed * scale[None, :]
        mean = tl.sum(of_standard, axis=1) / dim
        # A norm passes on only what changes neither mean nor variance of the row.
        along = tl.sum(of_standard * standard, axis=1) / dim
        of_raw += (of_standard - mean[:, None] - standard * along[:, None]) * inverse[:, None]
        tl.store(da + rows[:, None] * dim + columns[None, :], of_raw.to(da.dtype.element_ty), mask=mask)
    if is_affine:
        to = tl.program_id(0) * dim + columns
        tl.store(d_weight + to, of_weight, mask=columns < dim)
        tl.store(d_bias + to, of_bias, mask=columns < dim)
