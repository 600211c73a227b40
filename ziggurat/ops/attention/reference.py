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
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from ziggurat.ops.attention.problem import (
    AttentionBias,
    AttentionForm,
    JaggedLayout,
    SequencePart,
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
        weights_HMN = weights_of(scores_HMN, mask_MN, form=form, divisor=divisor)
        parts.append(torch.einsum("hmn,nhd->mhd", weights_HMN, v[part.keys].to(exact)))
    return torch.cat(parts).to(v.dtype)


def weights_of(
    scores: Float[Tensor, "*B M N"], mask: Bool[Tensor, "*B M N"], *, form: AttentionForm, divisor: float
) -> Float[Tensor, "*B M N"]:
    """Turn scores into weights; zeros for keys that are not seen, and for queries that see nothing.

    Args:
        scores: of pairs.
        mask: which of them count.
        form: how they become weights.
        divisor: n; 1 for softmax.
    """
    if form is not AttentionForm.SOFTMAX:
        return torch.where(mask, pointwise(form, scores) / divisor, 0.0)
    sees = mask.any(dim=-1, keepdim=True)
    # A row that sees nothing keeps its scores: the softmax of −∞ alone is NaN, and `where` would not hide its gradient.
    masked = scores.masked_fill(~mask & sees, -torch.inf)
    return torch.where(sees, torch.softmax(masked, dim=-1), 0.0)


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
    columns_N = torch.arange(part.key_start, part.key_start + part.keys.stop - part.keys.start)
    if bias is not None:
        times = bias.times
        if times is not None:
            times = times[0][part.queries], times[1][part.keys]
        history = torch.tensor(part.history)
        options = {"columns": columns_N, "position": seen.position, "history": history, "times": times}
        scores_HMN = scores_HMN + added_bias(bias, like=scores_HMN, **options)
    return scores_HMN, seen.sees(columns_N).to(q.device)


def added_bias(
    bias: AttentionBias,
    *,
    columns: Int64[Tensor, "*B N"],
    position: Int64[Tensor, "*B M"],
    history: Int64[Tensor, "*B 1"],
    times: tuple[Int64[Tensor, "*B M"], Int64[Tensor, "*B N"]] | None,
    like: Tensor,
) -> Float[Tensor, "*B M N"]:
    """Return the bias that is added to scores.

    Args:
        bias: numbers by position and time.
        columns: positions of the keys.
        position: of the queries, as the bias counts it (`Visible.position`).
        history: events of the sequence that are no targets.
        times: of queries and keys; None where there is no bias by time.
        like: a tensor of the dtype and on the device of the scores.
    """
    added = like.new_zeros(*position.shape, columns.shape[-1])
    if bias.w_pos is not None:
        reach = (len(bias.w_pos) + 1) // 2
        # Targets are as far away as the first event after the history would be.
        distance = torch.minimum(columns, history).unsqueeze(-2) - position.unsqueeze(-1)
        distance = distance.clamp(-reach + 1, reach - 1)  # no query sees what lies further
        added = added + bias.w_pos.to(like.dtype)[(distance + reach - 1).to(bias.w_pos.device)]
    # `AttentionBias.times` gives the times exactly where there is a bias by time, and refuses it without.
    if bias.w_time is not None and times is not None:
        durations = times[0].unsqueeze(-1) - times[1].unsqueeze(-2)
        added = added + bias.w_time.to(like.dtype)[time_buckets(durations, num_buckets=len(bias.w_time))]
    return added
