"""What some of the keys add to attention, and its gradient: the unit of work where keys lie on several ranks.

    silu      o_i = Σ_parts o_i(part)                                 no softmax: what parts add is added
    softmax   o_i = Σ_parts e^{l_i(part) − l_i} o_i(part)             l_i(part) = ln Σ_{j in part} e^{s_ij}
              l_i = ln Σ_parts e^{l_i(part)}

Backward, each part needs the gradient of the whole result, and for softmax the whole result and its l: the derivative
of a score is w_ij (⟨dO_i, v_j⟩ − ⟨dO_i, O_i⟩) with w_ij = e^{s_ij − l_i}, whoever has the other keys.

These functions are no part of a graph of autograd: who puts parts together also says what the gradient is.

Sources: the merge by logarithms: Dao et al., arXiv 2205.14135, section 3.1; equation 4 of Yang et al.,
arXiv 2411.01783.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ziggurat.ops.attention.cpp import attention_backward_op, attention_op, why_not
from ziggurat.ops.attention.problem import AttentionBias, AttentionForm, JaggedLayout, parts_of
from ziggurat.ops.attention.reference import part_scores, pointwise
from ziggurat.ops.attention.triton import (
    attention_triton_backward_op,
    attention_triton_op,
    triton_inputs,
    why_not_triton,
)


@dataclass(frozen=True, kw_only=True)
class AttentionSettings:
    """Settings that make scores and turn them into weights; see `jagged_attention`."""

    form: AttentionForm
    scale: float
    divisor: float = 1.0


class Gathered(NamedTuple):
    """Outputs of queries over some of the keys, and for softmax the logarithms of the sums (−∞: nothing seen)."""

    out: Float[Tensor, "M H dv"]
    lse: Float[Tensor, "M H"] | None


class PartGradients(NamedTuple):
    """Gradients of q, k and v, and of the biases that there are."""

    dq: Float[Tensor, "M H d"]
    dk: Float[Tensor, "N H d"]
    dv: Float[Tensor, "N H dv"]
    d_pos: Tensor | None
    d_time: Tensor | None


def gather_part(
    q: Float[Tensor, "M H d"],
    k: Float[Tensor, "N H d"],
    v: Float[Tensor, "N H dv"],
    *,
    layout: JaggedLayout,
    settings: AttentionSettings,
    bias: AttentionBias,
) -> Gathered:
    """Compute the outputs of queries over these keys.

    Args:
        q: queries.
        k: keys.
        v: values.
        layout: with spans, where these are parts.
        settings: form, scale, divisor.
        bias: of position and time.
    """
    is_softmax = settings.form is AttentionForm.SOFTMAX
    with torch.no_grad():
        if _is_for_triton(q, v):
            out, lse = attention_triton_op(q, k, v, *_triton_inputs(layout, bias, settings))
            return Gathered(out, lse if is_softmax else None)
        if why_not(q):
            return _gather_reference(q, k, v, layout=layout, settings=settings, bias=bias)
        out, lse = attention_op(q, k, v, *_tensors(layout, bias), *_numbers(layout, settings))
    return Gathered(out, lse if is_softmax else None)


def part_gradients(
    grad: Float[Tensor, "M H dv"],
    whole: Gathered,
    qkv: tuple[Float[Tensor, "M H d"], Float[Tensor, "N H d"], Float[Tensor, "N H dv"]],
    *,
    layout: JaggedLayout,
    settings: AttentionSettings,
    bias: AttentionBias,
) -> PartGradients:
    """The gradients that these keys cause and get.

    Args:
        grad: of the whole result.
        whole: result over all keys; read for softmax alone.
        qkv: as in `gather_part`.
        layout: as in `gather_part`.
        settings: as in `gather_part`.
        bias: as in `gather_part`.
    """
    with torch.no_grad():
        if not _is_for_triton(qkv[0], qkv[2]) and why_not(qkv[0]):
            return _gradients_reference(grad, whole, qkv, layout=layout, settings=settings, bias=bias)
        # Operations take a tensor in any case; pointwise forms do not read it.
        lse = grad.new_empty(0, 0, dtype=torch.float32) if whole.lse is None else whole.lse
        if _is_for_triton(qkv[0], qkv[2]):
            given = _triton_inputs(layout, bias, settings)
            found = attention_triton_backward_op(grad, whole.out, lse.float(), *qkv, *given)
        else:
            given = (*_tensors(layout, bias), *_numbers(layout, settings))
            found = attention_backward_op(grad, whole.out, lse, *qkv, *given)
        dq, dk, dv, d_pos, d_time = found
    of_biases = (None if bias.w_pos is None else d_pos, None if bias.w_time is None else d_time)
    return PartGradients(dq, dk, dv, *of_biases)


def merge(whole: Gathered, part: Gathered, *, rows: slice | Tensor) -> None:
    """Put what further keys add to some rows into a result, in place.

    Args:
        whole: the result so far, FP32 or FP64; zeros and −∞ to begin with.
        part: what some of its rows gather from further keys.
        rows: which.
    """
    if whole.lse is None or part.lse is None:
        # Pointwise weights have no common denominator: what parts add is added.
        if isinstance(rows, slice):
            whole.out[rows] += part.out
        else:
            whole.out.index_add_(0, rows, part.out.to(whole.out.dtype))
        return
    # May be a view, as `whole.out[rows]` below is: logarithms are written last, when the shares of both are used up.
    before = whole.lse[rows]
    added = part.lse.to(whole.lse.dtype)
    both = torch.logaddexp(before, added)
    safe = torch.where(both.isneginf(), 0.0, both)  # a row that saw nothing yet stays as it is
    shares = ((each - safe).exp().unsqueeze(-1) for each in (before, added))
    whole.out[rows] = sum(share * out for share, out in zip(shares, (whole.out[rows], part.out), strict=True))
    whole.lse[rows] = both


def _is_for_triton(q: Tensor, v: Tensor) -> bool:
    return q.device.type == "cuda" and not why_not_triton(q, v)


def _triton_inputs(
    layout: JaggedLayout, bias: AttentionBias, settings: AttentionSettings
) -> tuple[Tensor | float | str | None, ...]:
    return triton_inputs(layout, bias, form=settings.form, scale=settings.scale, divisor=settings.divisor)


def _tensors(layout: JaggedLayout, bias: AttentionBias) -> tuple[Tensor | None, ...]:
    is_timed = bias.w_time is not None
    return (
        *(layout.offsets, layout.query_offsets, layout.num_targets, bias.w_pos, bias.w_time),
        *(bias.query_times if is_timed else None, bias.key_times if is_timed else None),
        None if layout.spans is None else layout.spans.stacked(),
    )


def _numbers(layout: JaggedLayout, settings: AttentionSettings) -> tuple[float, float, bool, int, int, int, bool]:
    is_softmax = settings.form is AttentionForm.SOFTMAX
    is_relu = settings.form is AttentionForm.RELU
    rule = layout.rule
    # −1: the widest instructions of this processor.
    return settings.scale, settings.divisor, is_softmax, rule.context, rule.max_attention_length, -1, is_relu


def _gather_reference(
    q: Tensor, k: Tensor, v: Tensor, *, layout: JaggedLayout, settings: AttentionSettings, bias: AttentionBias
) -> Gathered:
    exact = q.dtype if q.dtype is torch.float64 else torch.float32
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=exact, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=exact, device=q.device)
    for part in parts_of(layout):
        scores_HMN, mask_MN = part_scores(
            q.to(exact), k.to(exact), part=part, layout=layout, scale=settings.scale, bias=bias
        )
        if settings.form is not AttentionForm.SOFTMAX:
            weights_HMN = torch.where(mask_MN, pointwise(settings.form, scores_HMN) / settings.divisor, 0.0)
        else:
            masked_HMN = scores_HMN.masked_fill(~mask_MN, -torch.inf)
            sums_HM = masked_HMN.logsumexp(dim=-1)
            lse[part.queries] = sums_HM.T
            weights_HMN = torch.where(mask_MN, (masked_HMN - sums_HM.unsqueeze(-1)).exp(), 0.0)
        out[part.queries] = torch.einsum("hmn,nhd->mhd", weights_HMN, v[part.keys].to(exact))
    return Gathered(out.to(v.dtype), lse if settings.form is AttentionForm.SOFTMAX else None)


def _gradients_reference(
    grad: Tensor,
    whole: Gathered,
    qkv: tuple[Tensor, Tensor, Tensor],
    *,
    layout: JaggedLayout,
    settings: AttentionSettings,
    bias: AttentionBias,
) -> PartGradients:
    """Autograd's gradients of Σ w_ij (⟨dO_i, v_j⟩ − ⟨dO_i, O_i⟩) with dO, O and l as constants."""
    exact = qkv[0].dtype if qkv[0].dtype is torch.float64 else torch.float32
    biases = [None if each is None else each.detach().requires_grad_() for each in (bias.w_pos, bias.w_time)]
    leaves = [each.detach().to(exact).requires_grad_() for each in qkv]
    # Leaves of their own: the caller's tensors may stand in a graph that must not grow.
    own = AttentionBias(w_pos=biases[0], w_time=biases[1], query_times=bias.query_times, key_times=bias.key_times)
    grad = grad.to(exact)
    gathered = whole.out.to(exact)
    with torch.enable_grad():
        # Every leaf stands in the graph, also where there is no sequence: `grad` refuses one that does not.
        shares = (each.sum() * 0.0 for each in (*leaves, *biases) if each is not None)
        total = sum(shares, start=grad.new_zeros(()))
        for part in parts_of(layout):
            scores_HMN, mask_MN = part_scores(
                leaves[0], leaves[1], part=part, layout=layout, scale=settings.scale, bias=own
            )
            slopes_HMN = torch.einsum("mhd,nhd->hmn", grad[part.queries], leaves[2][part.keys])
            if whole.lse is None:
                weights_HMN = pointwise(settings.form, scores_HMN) / settings.divisor
            else:
                sums_HM = whole.lse[part.queries].to(exact).T
                # By the sum over all keys, not these alone: w of the whole result.
                weights_HMN = (scores_HMN.masked_fill(~mask_MN, -torch.inf) - sums_HM.unsqueeze(-1)).exp()
                mean_MH = (grad[part.queries] * gathered[part.queries]).sum(dim=-1)
                # The whole result's share of the slope, which no part can know alone.
                slopes_HMN = slopes_HMN - mean_MH.T.unsqueeze(-1)
            total = total + torch.where(mask_MN, weights_HMN * slopes_HMN, 0.0).sum()
        wanted = [*leaves, *(each for each in biases if each is not None)]
        found = iter(torch.autograd.grad(total, wanted))
    dq, dk, dv = (next(found).to(given.dtype) for given in qkv)
    of_biases = [None if each is None else next(found) for each in biases]
    return PartGradients(dq, dk, dv, of_biases[0], of_biases[1])
