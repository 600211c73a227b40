"""Pointwise attention over jagged sequences by Triton, forward and backward: for CUDA devices, and asked for by name.

    forward_kernel    a program for 32 queries of a head of a sequence: goes through its keys
    keys_kernel       a program for 32 keys: goes through the queries, sums dK and dV in registers
    queries_kernel    a program for a head of a sequence: goes through its queries, sums dQ, and adds dS by place and by
                      bucket to a share of dw_pos and dw_time that is its own; shares are added up afterwards

No atomics: the same bits on repeat. `jagged_attention_reference` is the definition; the kernels run on the CPU under
Triton's interpreter (`TRITON_INTERPRET=1`), which is how their test runs. They were not measured on a GPU yet, so
`jagged_attention` does not choose them: call `jagged_attention_triton`. Where it cannot run, that is an error.

Sources: arXiv 2402.17152, section 3.2; Triton: Tillet, Kung and Cox, MAPL 2019.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ziggurat.errors import ConfigError, MissingDependencyError
from ziggurat.ops.attention.problem import AttentionBias, JaggedLayout, check_problem
from ziggurat.ops.attention.time_buckets import bucket_cells
from ziggurat.ops.kernel_choice import kernels_of, power_of_two, why_no_triton
from ziggurat.ops.to_device import to_device

_KERNELS = "ziggurat.ops.attention.triton_kernels"
_BLOCK = 32
_MOST_DIM = 256


def jagged_attention_triton(
    q: Float[Tensor, "M H d"],
    k: Float[Tensor, "N H d"],
    v: Float[Tensor, "N H dv"],
    *,
    layout: JaggedLayout,
    scale: float,
    divisor: float,
    bias: AttentionBias | None = None,
) -> Float[Tensor, "M H dv"]:
    """Attend by the pointwise form of `jagged_attention_reference`, with Triton.

    Args:
        q: queries.
        k: keys.
        v: values.
        layout: where sequences begin, and what sees what.
        scale: α.
        divisor: n.
        bias: of position and time.

    Raises:
        MissingDependencyError: Triton cannot run here.
        ConfigError: the sequences are parts.
        DataError: shapes, offsets, targets or times do not belong together.
    """
    reason = why_not_triton(q, v)
    if reason:
        raise MissingDependencyError(
            expected=f"a CUDA device, the package triton, FP32, FP16 or BF16, and heads of at most {_MOST_DIM}",
            found=reason,
            where="jagged attention by Triton",
            ways_out=("call jagged_attention: the same numbers", "move the model to a CUDA device"),
        )
    check_problem(q, k, v, layout=layout, bias=bias)
    if layout.spans is not None:
        raise ConfigError(
            expected="whole sequences",
            found="parts of sequences (spans)",
            where="jagged attention by Triton",
            ways_out=("call jagged_attention, which knows parts",),
        )
    return _Pointwise.apply(q, k, v, layout, bias or AttentionBias(), *_weights(bias), (scale, divisor))


def why_not_triton(q: Tensor, v: Tensor) -> str:
    """The reason why the Triton kernels cannot serve these inputs; "" if they can."""
    if reason := why_no_triton(_KERNELS, q, what="queries"):
        return reason
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"queries of {q.dtype}"
    if max(q.shape[2], v.shape[2]) > _MOST_DIM:
        return f"heads of {q.shape[2]} and {v.shape[2]}"
    return ""


def _weights(bias: AttentionBias | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if bias is None else (bias.w_pos, bias.w_time)


class _Call:
    """What all kernels take besides their own tensors."""

    def __init__(self, q: Tensor, v: Tensor, *, layout: JaggedLayout, bias: AttentionBias, numbers: Any) -> None:
        scale, divisor = numbers
        empty = torch.zeros(1, dtype=torch.int64, device=q.device)
        zero = torch.zeros(1, device=q.device)
        cells = bucket_cells(len(bias.w_time)) if bias.w_time is not None else (empty, zero)
        positions = 0 if bias.w_pos is None else len(bias.w_pos)
        self.heads, self.sequences = q.shape[1], len(layout.offsets) - 1
        lengths = layout.offsets.diff(), layout.of_queries.diff()
        self.blocks, self.query_blocks = (-(-_longest(each, layout) // _BLOCK) for each in lengths)
        tensors = (
            *(layout.offsets, layout.of_queries, empty if layout.num_targets is None else layout.num_targets),
            *(zero if each is None else each.detach().float().contiguous() for each in _weights(bias)),
            *(empty if each is None else each for each in (bias.query_times, bias.key_times)),
            *(to_device(each, q.device) for each in cells),
        )
        rule = layout.rule
        numbers = (self.heads, rule.context, rule.max_attention_length, (positions - 1) // 2, scale, 1.0 / divisor)
        self.arguments = (*tensors, *numbers)
        self.constants = {
            "dim": q.shape[2],
            "value_dim": v.shape[2],
            "padded": power_of_two(q.shape[2]),
            "padded_value": power_of_two(v.shape[2]),
            "has_targets": layout.num_targets is not None,
            "has_pos": bias.w_pos is not None,
            "has_time": bias.w_time is not None,
            "block": _BLOCK,
        }


def _longest(lengths: Tensor, layout: JaggedLayout) -> int:
    """The most rows of a sequence; asks the device where the host was not told."""
    if layout.longest is not None:
        return layout.longest
    return int(lengths.max()) if len(lengths) else 0


class _Pointwise(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]  # torch declares *args
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: JaggedLayout,
        bias: AttentionBias,
        w_pos: Tensor | None,
        w_time: Tensor | None,
        numbers: tuple[float, float],
    ) -> Tensor:
        q, k, v = (each.contiguous() for each in (q, k, v))
        call = _Call(q, v, layout=layout, bias=bias, numbers=numbers)
        ctx.save_for_backward(q, k, v)
        ctx.call, ctx.weights = call, (w_pos, w_time)
        out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
        if call.query_blocks:
            grid = (call.query_blocks, call.sequences * call.heads)
            kernels_of(_KERNELS).forward_kernel[grid](q, k, v, out, *call.arguments, **call.constants)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v = ctx.saved_tensors
        call, (w_pos, w_time) = ctx.call, ctx.weights
        positions, buckets = (0 if each is None else len(each) for each in (w_pos, w_time))
        grad = grad.to(q.dtype).contiguous()
        dq, dk, dv = (torch.zeros_like(each) for each in (q, k, v))
        tasks = call.sequences * call.heads
        d_pos, d_time = (torch.zeros(max(1, tasks), max(1, size), device=q.device) for size in (positions, buckets))
        if call.query_blocks:
            inputs, kernels = (q, k, v, grad), kernels_of(_KERNELS)
            sizes = {"positions": positions, "buckets": buckets}
            kernels.queries_kernel[(tasks,)](*inputs, dq, d_pos, d_time, *call.arguments, **call.constants, **sizes)
            kernels.keys_kernel[(call.blocks, tasks)](*inputs, dk, dv, *call.arguments, **call.constants)
        of_weights = (
            None if weight is None else found.sum(0).to(weight.dtype)
            for weight, found in ((w_pos, d_pos), (w_time, d_time))
        )
        return dq, dk, dv, None, None, *of_weights, None
