"""Attention over jagged sequences for GPUs, in torch: all sequences at once, as long as the longest.

The reference goes from sequence to sequence: its host reads where each begins, and launches a dozen operations for it.
Here sequences are padded, and the same dozen operations serve them all; the host is told how long they may be
(`JaggedLayout.longest`) and reads nothing. What is seen, and the biases, are the reference's own (`problem.py`,
`reference.py`), of positions with one more axis.

Cost: products and memory of B · L² · H for L the longest, where the reference has Σ L². For lengths that differ by much
the kernel is the way (`triton.py`).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ziggurat.errors import DataError
from ziggurat.ops.attention.problem import AttentionBias, AttentionForm, JaggedLayout, Visible, seen_of
from ziggurat.ops.attention.reference import added_bias, weights_of
from ziggurat.ops.pad_lists import inside, pad_rows, padded_places


def jagged_attention_padded(
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
    """Compute `jagged_attention_reference` for a layout that bounds the length of sequences.

    Args:
        q: queries.
        k: keys.
        v: values.
        layout: where sequences begin, what sees what, and `longest`.
        form: how scores become weights.
        scale: α.
        divisor: n; 1 for softmax.
        bias: of position and time.
    """
    if layout.longest is None:
        raise DataError(
            expected="a layout with `longest`: how long sequences may be, which the host would have to wait for",
            found="None",
            where="padded attention",
            ways_out=("JaggedLayout(…, longest=…)", "jagged_attention_reference, which needs no bound"),
        )
    # FP64 stays, for checks of gradients; all else is computed in FP32 and rounded once, at the end.
    exact = q.dtype if q.dtype is torch.float64 else torch.float32
    sizes = {"num_lists": len(layout.offsets) - 1, "longest": layout.longest}
    queries_M = padded_places(layout.of_queries, num_rows=len(q), longest=layout.longest)
    keys_N = padded_places(layout.offsets, num_rows=len(k), longest=layout.longest)
    q_BLHd = pad_rows(q.to(exact), queries_M, **sizes)
    k_BLHd, v_BLHd = (pad_rows(each.to(exact), keys_N, **sizes) for each in (k, v))
    seen, columns_BL, history_B1 = _seen(layout, layout.longest)
    # By position alone a mask would see padding behind the end of a sequence.
    mask_BLL = seen.sees(columns_BL) & inside(layout.offsets, layout.longest).unsqueeze(1)
    scores_BHLL = scale * torch.einsum("bmhd,bnhd->bhmn", q_BLHd, k_BLHd)
    if bias is not None:
        times = bias.times
        if times is not None:
            times = pad_rows(times[0], queries_M, **sizes), pad_rows(times[1], keys_N, **sizes)
        added_BLL = added_bias(
            bias, columns=columns_BL, position=seen.position, history=history_B1, times=times, like=scores_BHLL
        )
        scores_BHLL = scores_BHLL + added_BLL.unsqueeze(1)
    weights_BHLL = weights_of(scores_BHLL, mask_BLL.unsqueeze(1), form=form, divisor=divisor)
    out_BLHd = torch.einsum("bhmn,bnhd->bmhd", weights_BHLL, v_BLHd)
    return out_BLHd.flatten(0, 1)[queries_M].to(v.dtype)


def _seen(layout: JaggedLayout, longest: int) -> tuple[Visible, Tensor, Tensor]:
    """Return what each query sees, positions (B, L) of keys, and the events of histories (B, 1) that are no targets."""
    lengths_B = layout.offsets.diff() if layout.spans is None else layout.spans.lengths
    if layout.spans is None:
        # Whole sequences are asked from their end: earlier queries were answered before.
        query_starts_B = lengths_B - layout.of_queries.diff()
        key_starts_B = torch.zeros_like(lengths_B)
    else:
        query_starts_B = layout.spans.query_starts
        key_starts_B = layout.spans.key_starts
    history_B = lengths_B if layout.num_targets is None else lengths_B - layout.num_targets
    places_L = torch.arange(longest, device=lengths_B.device)
    rows_BL, columns_BL = (starts.unsqueeze(1) + places_L for starts in (query_starts_B, key_starts_B))
    return seen_of(rows_BL, history=history_B.unsqueeze(1), mask=layout.rule), columns_BL, history_B.unsqueeze(1)
