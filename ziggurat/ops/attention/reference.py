"""Attention over jagged sequences, sequence by sequence in torch: the definition of what the kernels compute.

    s_ij = α ⟨q_i, k_j⟩ + b_ij            b_ij = w_pos[j − p_i + R − 1] + w_time[bucket(|t_i − t_j|)]
    silu      o_i = Σ_j SiLU(s_ij) v_j / n                                       n: a constant of the model
    relu      o_i = Σ_j ReLU(s_ij) v_j / n
    softmax   o_i = Σ_j exp(s_ij − m_i) v_j / Σ_j exp(s_ij − m_i)                j over what i sees (`problem.py`)

n does not depend on the batch, so neither does a result. FP32 and FP64; lower dtypes are computed in FP32 and rounded
once at the end. Gradients are autograd's. Cost: Σ L² · H · (d + d_v) products, and that memory for one sequence.

Sources: arXiv 2402.17152, equation 2 and section 3.2 (silu); Kang and McAuley, arXiv 1808.09781, equation 2 (softmax).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from ziggurat.ops.attention.problem import (
    AttentionBias,
    AttentionForm,
    JaggedLayout,
    SequencePart,
    Visible,
    parts_of,
    visible,
)
from ziggurat.ops.attention.time_buckets import time_buckets


def jagged_attention_reference(
    q: Float[Tensor, "M H d"],
    k: Float[Tensor, "N H d"],
    v: Float[Tensor, "N H dv"],
    *,
    layout: JaggedLayout,
    form: AttentionForm,
    scale: float,
    divisor: float = 1.0,
    bias: AttentionBias | None = None,
) -> Float[Tensor, "M H dv"]:
    """Attend sequence by sequence.

    Args:
        q: queries.
        k: keys.
        v: values.
        layout: where sequences begin, and what sees what.
        form: how scores become weights.
        scale: α.
        divisor: n; 1 for softmax.
        bias: of position and time.
    """
    exact = q.dtype if q.dtype is torch.float64 else torch.float32
    parts = [(q[:0].sum(-1, keepdim=True) * v[:0]).to(exact)]  # no rows, and differentiable: a batch may be empty
    for part in parts_of(layout):
        scores_HMN, mask_MN = part_scores(q.to(exact), k.to(exact), part=part, layout=layout, scale=scale, bias=bias)
        if form is not AttentionForm.SOFTMAX:
            weights_HMN = torch.where(mask_MN, pointwise(form, scores_HMN) / divisor, 0.0)
        else:
            sees_M1 = mask_MN.any(dim=-1, keepdim=True)
            masked_HMN = scores_HMN.masked_fill(~mask_MN & sees_M1, -torch.inf)
            weights_HMN = torch.where(sees_M1, torch.softmax(masked_HMN, dim=-1), 0.0)
        parts.append(torch.einsum("hmn,nhd->mhd", weights_HMN, v[part.keys].to(exact)))
    return torch.cat(parts).to(v.dtype)


def pointwise(form: AttentionForm, scores: Tensor) -> Tensor:
    """The scores of a form without softmax, before they are divided by n."""
    return F.silu(scores) if form is AttentionForm.SILU else F.relu(scores)


def part_scores(
    q: Float[Tensor, "M H d"],
    k: Float[Tensor, "N H d"],
    *,
    part: SequencePart,
    layout: JaggedLayout,
    scale: float,
    bias: AttentionBias | None,
) -> tuple[Float[Tensor, "H m n"], Bool[Tensor, "m n"]]:
    """The scores of one sequence, and which of them count.

    Args:
        q: queries of all sequences.
        k: keys of all sequences.
        part: the sequence.
        layout: of which it is a part.
        scale: α.
        bias: of position and time.
    """
    seen = visible(part, mask=layout.rule)
    scores_HMN = scale * torch.einsum("mhd,nhd->hmn", q[part.queries], k[part.keys])
    if bias is not None:
        scores_HMN = scores_HMN + _bias(bias, seen, part=part, like=q)
    length = part.keys.stop - part.keys.start
    return scores_HMN, seen.dense(length, first=part.key_start).to(q.device)


def _bias(bias: AttentionBias, seen: Visible, *, part: SequencePart, like: Tensor) -> Tensor:
    """What is added to the scores (M, N) of one sequence."""
    length, dtype = part.keys.stop - part.keys.start, like.dtype
    columns = torch.arange(part.key_start, part.key_start + length)
    added = like.new_zeros(len(seen.rows), length)
    if bias.w_pos is not None:
        reach = (len(bias.w_pos) + 1) // 2
        distance = columns.clamp(max=part.history) - seen.position[:, None]
        distance = distance.clamp(-reach + 1, reach - 1)  # no query sees what lies further
        added = added + bias.w_pos.to(dtype)[(distance + reach - 1).to(bias.w_pos.device)]
    if bias.w_time is not None:
        assert bias.query_times is not None
        assert bias.key_times is not None
        durations = bias.query_times[part.queries][:, None] - bias.key_times[part.keys][None, :]
        added = added + bias.w_time.to(dtype)[time_buckets(durations, num_buckets=len(bias.w_time))]
    return added
