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
from jaxtyping import Float
from torch import Tensor

from ziggurat.ops.attention.problem import AttentionBias, AttentionForm, JaggedLayout, Visible, visible
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
    begins, ends = layout.offsets.tolist(), layout.of_queries.tolist()
    targets = [0] * (len(begins) - 1) if layout.num_targets is None else layout.num_targets.tolist()
    for b in range(len(begins) - 1):
        keys, queries = slice(begins[b], begins[b + 1]), slice(ends[b], ends[b + 1])
        length, asked = begins[b + 1] - begins[b], ends[b + 1] - ends[b]
        seen = visible(length, asked, num_targets=targets[b], mask=layout.rule)
        scores_HMN = scale * torch.einsum("mhd,nhd->hmn", q[queries].to(exact), k[keys].to(exact))
        if bias is not None:
            scores_HMN = scores_HMN + _bias(bias, seen, queries=queries, keys=keys, dtype=exact)
        mask_MN = seen.dense(length).to(q.device)
        if form is not AttentionForm.SOFTMAX:
            pointwise = F.silu if form is AttentionForm.SILU else F.relu
            weights_HMN = torch.where(mask_MN, pointwise(scores_HMN) / divisor, 0.0)
        else:
            weights_HMN = torch.softmax(scores_HMN.masked_fill(~mask_MN, -torch.inf), dim=-1)
        parts.append(torch.einsum("hmn,nhd->mhd", weights_HMN, v[keys].to(exact)))
    return torch.cat(parts).to(v.dtype)


def _bias(bias: AttentionBias, seen: Visible, *, queries: slice, keys: slice, dtype: torch.dtype) -> Tensor:
    """What is added to the scores (M, N) of one sequence."""
    length = keys.stop - keys.start
    columns = torch.arange(length)
    added = torch.zeros(len(seen.rows), length, dtype=dtype, device=_device(bias))
    if bias.w_pos is not None:
        reach = (len(bias.w_pos) + 1) // 2
        distance = columns.clamp(max=int(seen.position[-1]) if len(seen.rows) else 0) - seen.position[:, None]
        added = added + bias.w_pos.to(dtype)[(distance + reach - 1).to(bias.w_pos.device)]
    if bias.w_time is not None:
        assert bias.query_times is not None
        assert bias.key_times is not None
        durations = bias.query_times[queries][:, None] - bias.key_times[keys][None, :]
        added = added + bias.w_time.to(dtype)[time_buckets(durations, num_buckets=len(bias.w_time))]
    return added


def _device(bias: AttentionBias) -> torch.device:
    given = bias.w_pos if bias.w_pos is not None else bias.w_time
    return given.device if given is not None else torch.device("cpu")
