"""Attention over jagged sequences by the fastest implementation that serves the input."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from ziggurat.errors import ConfigError
from ziggurat.ops.attention.cpp import AttentionPath, attention_op, why_not
from ziggurat.ops.attention.padded import jagged_attention_padded
from ziggurat.ops.attention.problem import AttentionBias, AttentionForm, JaggedLayout, check_problem
from ziggurat.ops.attention.reference import jagged_attention_reference
from ziggurat.ops.attention.triton import jagged_attention_triton, why_not_triton


def jagged_attention(
    q: Float[Tensor, "M H d"],
    k: Float[Tensor, "N H d"],
    v: Float[Tensor, "N H dv"],
    *,
    layout: JaggedLayout,
    form: AttentionForm,
    scale: float,
    divisor: float = 1.0,
    bias: AttentionBias | None = None,
    path: AttentionPath | None = None,
) -> Float[Tensor, "M H dv"]:
    """`jagged_attention_reference` by the fastest implementation: C++ on the CPU, Triton on a CUDA device.

    Where neither serves, torch's own operations do: padded where the host knows how long sequences are, else the
    reference itself.

    Products are in the dtype of q, k and v (BF16 with sums in FP32). Under torch.compile and torch.export the kernel is
    one operation, `ziggurat::jagged_attention` or `ziggurat::jagged_attention_triton`.

    Args:
        q: queries.
        k: keys.
        v: values.
        layout: where sequences begin, and what sees what.
        form: how scores become weights.
        scale: α.
        divisor: n of the pointwise form, a constant of the model.
        bias: of position and time.
        path: instructions to use, for tests; the best that the processor has, if not given.

    Raises:
        ConfigError: the divisor is 0 or not finite, or softmax is given one.
        DataError: shapes, offsets, targets or times do not belong together.
    """
    is_right = divisor == 1.0 if form is AttentionForm.SOFTMAX else divisor > 0 and math.isfinite(divisor)
    if not is_right:
        raise ConfigError(
            expected="a finite divisor above 0 for silu and relu, and 1 for softmax",
            found=f"{divisor} for {form.value}",
            where="jagged attention",
            ways_out=("give the largest length that the model is made for", "leave it out for softmax"),
        )
    if q.device.type == "cuda" and not why_not_triton(q, v):
        return jagged_attention_triton(q, k, v, layout=layout, form=form, scale=scale, divisor=divisor, bias=bias)
    if why_not(q):
        # The check reads offsets, whose values a graph that is being traced does not have.
        if not torch.compiler.is_compiling():
            check_problem(q, k, v, layout=layout, bias=bias)
        options = {"form": form, "scale": scale, "divisor": divisor, "bias": bias}
        compute = jagged_attention_reference if layout.longest is None else jagged_attention_padded
        return compute(q, k, v, layout=layout, **options)
    given = bias or AttentionBias()
    result, _ = attention_op(
        q,
        k,
        v,
        layout.offsets,
        layout.query_offsets,
        layout.num_targets,
        given.w_pos,
        given.w_time,
        # Times without weights for them would be saved for the backward pass, and read by nobody.
        given.query_times if given.w_time is not None else None,
        given.key_times if given.w_time is not None else None,
        None if layout.spans is None else layout.spans.stacked(),
        scale,
        divisor,
        form is AttentionForm.SOFTMAX,
        layout.rule.context,
        layout.rule.max_attention_length,
        -1 if path is None else int(path),
        form is AttentionForm.RELU,
    )
    return result
