"""The C++ kernel of jagged attention: blocks of 48 queries and 64 keys that stay in the first-level cache.

    for each band of 48 queries                      backward: for each block of 64 keys, each band that sees it
      for each block of 64 keys that it sees           S = Q Kᵀ, G = dO Vᵀ          two products, as in forward
        S = Q Kᵀ              6 × 64 in registers      P, dS from S and G            dw_pos, dw_time: sums of dS
        P = SiLU(α S + b)/n   or online softmax        dQ += dS K,  dKᵀ += Qᵀ dS,  dVᵀ += dOᵀ P
        O += P V              6 × 64 in registers

Nothing is padded and no L × L matrix is written; blocks that a mask hides are not computed, and at the diagonal no
column beyond the next multiple of 16. The bias is computed from w_pos, w_time and the times where it is needed. With
AVX-512 16 durations find bucket and weight at once, in tables of 128 numbers in registers (`BucketTables`);
without it, where 16 events that follow each other fall into one bucket, the bucket is looked for once.

FP32 inputs are multiplied in FP32. BF16 inputs are multiplied in pairs (vdpbf16ps), added up in FP32, and weights are
rounded to BF16 before they meet the values; where a processor has no such instruction, in FP32. Sums run in the order
of the columns, one thread a head of a sequence: the same bits on every run, with any number of threads, and whatever
else is in the batch. Only the gradient of the biases is a sum over sequences; it is added up in their order.

Cost: 2 · (d + d_v) FLOPs forward and 2 · (3 d + 2 d_v) backward for each pair that sees each other.

Sources: blocks and online softmax: Dao et al., FlashAttention, arXiv 2205.14135; pointwise form without padding: arXiv
2402.17152, section 3.2.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ziggurat.ops.attention.kept_inputs import AttentionCtx, keep_inputs
from ziggurat.ops.attention.problem import (
    AttentionBias,
    AttentionMask,
    JaggedLayout,
    Spans,
    attended_pairs,
    check_problem,
)
from ziggurat.ops.attention.time_buckets import bucket_begins, bucket_cells
from ziggurat.ops.cpp_build import CppLibrary, CppSource, kernel_line
from ziggurat.ops.kernel_choice import constant_when_compiled

_SOURCE = CppSource(
    path=Path(__file__).parent.parent / "csrc" / "attention.cpp",
    flags=("-fopenmp", "-fno-math-errno", "-w"),
    depends_on=torch.__version__,  # whose OpenMP it shares
    without="go on without: torch's own operations compute the same attention, slower",
)
_SLACK = 64  # zeros behind w_pos and its gradient, as in attention.cpp
_POINTERS = (
    *("q", "k", "v", "out", "grad", "lse", "result", "lse_result", "dq", "dk", "dv", "dw"),
    *("offsets", "query_offsets", "targets", "query_times", "key_times", "w_pos", "w_time"),
    *("cell_bucket", "cell_next", "bucket_begins"),
    *("query_starts", "key_starts", "lengths"),
)
_NUMBERS = (
    *(
        "sequences",
        "heads",
        "dim",
        "value_dim",
        "positions",
        "buckets",
        "context",
        "reach",
        "softmax",
        "bf16",
        "threads",
        "relu",
    ),
)


class AttentionPath(IntEnum):
    """Instructions of the kernel; the numbers are those of `csrc/attention.cpp`."""

    PLAIN = 0
    AVX2 = 1
    AVX512 = 2
    AVX512_BF16 = 3


class _Problem(ctypes.Structure):  # as Problem in attention.h
    _fields_ = [
        *((name, c_void_p) for name in _POINTERS),
        *((f"{name}_stride", c_int64 * 2) for name in "qkv"),
        *((name, c_int64) for name in _NUMBERS),
        ("scale", c_float),
        ("inverse", c_float),
    ]


def attention_kernel() -> str:
    """Say which implementation serves attention over sequences on this CPU, and why; build the kernel if need be."""
    reason = why_not_here()
    return kernel_line(reason) if reason else f"{kernel_line(reason)}, {best_path().name.replace('_', ' ')}"


def best_path() -> AttentionPath:
    """The widest instructions that this processor has."""
    return AttentionPath(_LIBRARY.needed().ziggurat_attention_path())


def why_not(q: Tensor) -> str:
    """The reason why the kernel does not serve queries; "" if it does."""
    if q.device.type != "cpu":
        return f"it is for the CPU, not {q.device.type!r}"
    if q.dtype not in (torch.float32, torch.bfloat16):
        return f"it is for FP32 and BF16, not {q.dtype}"
    return why_not_here()


@constant_when_compiled
def why_not_here() -> str:
    """The reason for having no library, "" if there is one; torch.compile asks once and does not look inside."""
    return _LIBRARY.reason


def _declare(library: ctypes.CDLL) -> None:
    library.ziggurat_attention_path.restype = c_int64
    library.ziggurat_attention_forward.argtypes = [c_void_p, c_int64]
    library.ziggurat_attention_backward.argtypes = [c_void_p, c_int64, c_void_p]
    library.ziggurat_attention_forward.restype = library.ziggurat_attention_backward.restype = None


_LIBRARY = CppLibrary(_SOURCE, declare=_declare)


def _describe(tensors: dict[str, Tensor | None], options: dict[str, float]) -> tuple[_Problem, list[Tensor]]:
    """The problem for the library, and the tensors that must live as long as it."""
    kept: list[Tensor] = []
    problem = _Problem()
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        # Events and heads may lie any distance apart, the numbers of one head may not.
        if name in ("q", "k", "v"):
            tensor = tensor if tensor.stride(2) == 1 or tensor.shape[2] == 1 else tensor.contiguous()
            setattr(problem, f"{name}_stride", (c_int64 * 2)(*tensor.stride()[:2]))
        else:
            tensor = tensor.contiguous()
        # The struct has bare addresses: a copy that was made here has to outlive the call.
        kept.append(tensor)
        setattr(problem, name, tensor.data_ptr())
    for name, value in (options | {"threads": torch.get_num_threads()}).items():
        # ctypes takes no float for an integer field.
        setattr(problem, name, int(value) if name in _NUMBERS else value)
    return problem, kept


def _inputs(
    qkv: tuple[Tensor, Tensor, Tensor],
    places: tuple[Tensor | None, ...],
    biases: tuple[Tensor | None, ...],
    spans: Tensor | None,
) -> dict[str, Tensor | None]:
    """The tensors that forward and backward both read, by their names in `_Problem`."""
    w_pos, w_time, query_times, key_times = biases
    names = ("q", "k", "v", "offsets", "query_offsets", "targets")
    found: dict[str, Tensor | None] = dict(zip(names, (*qkv, *places), strict=True))
    if found["query_offsets"] is None:
        # Every event is then a query.
        found["query_offsets"] = found["offsets"]
    if spans is not None:
        found |= dict(zip(("query_starts", "key_starts", "lengths"), spans, strict=True))
    if w_pos is not None:
        # The kernel reads whole vectors of numbers, also behind the last place.
        found["w_pos"] = torch.nn.functional.pad(w_pos.detach().float(), (0, _SLACK))
    if w_time is not None:
        cells = bucket_cells(len(w_time))
        found |= {"w_time": w_time.detach().float(), "query_times": query_times, "key_times": key_times}
        found |= {"cell_bucket": cells[0], "cell_next": cells[1]}
        found["bucket_begins"] = bucket_begins(len(w_time))
    return found


def _options(
    q: Tensor,
    v: Tensor,
    *,
    offsets: Tensor,
    biases: tuple[Tensor | None, ...],
    numbers: tuple[float, float, bool, bool],
    mask: tuple[int, int],
) -> dict[str, float]:
    scale, divisor, softmax, relu = numbers
    context, reach = mask
    positions, buckets = (0 if weight is None else len(weight) for weight in biases[:2])
    return {
        "heads": q.shape[1],
        "dim": q.shape[2],
        "value_dim": v.shape[2],
        "bf16": q.dtype is torch.bfloat16,
        "sequences": len(offsets) - 1,
        "positions": positions,
        "buckets": buckets,
        "context": context,
        "reach": reach,
        "softmax": softmax,
        "relu": relu,
        "scale": scale,
        "inverse": 1.0 / divisor,
    }


@torch.library.custom_op("ziggurat::jagged_attention", mutates_args=())
def attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    query_offsets: Tensor | None,
    targets: Tensor | None,
    w_pos: Tensor | None,
    w_time: Tensor | None,
    query_times: Tensor | None,
    key_times: Tensor | None,
    spans: Tensor | None,
    scale: float,
    divisor: float,
    softmax: bool,
    context: int,
    reach: int,
    path: int,
    relu: bool = False,
) -> tuple[Tensor, Tensor]:
    """Results (M, H, d_v), and for softmax the logarithms of the sums (M, H)."""
    mask = AttentionMask(context=context, max_attention_length=reach)
    parts = None if spans is None else Spans(query_starts=spans[0], key_starts=spans[1], lengths=spans[2])
    layout = JaggedLayout(offsets=offsets, query_offsets=query_offsets, num_targets=targets, mask=mask, spans=parts)
    bias = AttentionBias(w_pos=w_pos, w_time=w_time, query_times=query_times, key_times=key_times)
    check_problem(q, k, v, layout=layout, bias=bias)
    biases = (w_pos, w_time, query_times, key_times)
    result = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    lse = q.new_empty(q.shape[:2] if softmax else (0, 0), dtype=torch.float32)
    tensors = _inputs((q, k, v), (offsets, query_offsets, targets), biases, spans)
    tensors |= {"result": result, "lse_result": lse}
    options = _options(
        q, v, offsets=offsets, biases=biases, numbers=(scale, divisor, softmax, relu), mask=(context, reach)
    )
    problem, _kept = _describe(tensors, options)
    _LIBRARY.needed().ziggurat_attention_forward(ctypes.byref(problem), _path(path))
    return result, lse


@torch.library.custom_op("ziggurat::jagged_attention_backward", mutates_args=())
def attention_backward_op(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    query_offsets: Tensor | None,
    targets: Tensor | None,
    w_pos: Tensor | None,
    w_time: Tensor | None,
    query_times: Tensor | None,
    key_times: Tensor | None,
    spans: Tensor | None,
    scale: float,
    divisor: float,
    softmax: bool,
    context: int,
    reach: int,
    path: int,
    relu: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, w_pos and w_time; the last two are empty where there is no such bias."""
    biases = (w_pos, w_time, query_times, key_times)
    dq, dk, dv = (torch.empty(each.shape, dtype=each.dtype) for each in (q, k, v))
    padded = 0 if w_pos is None else len(w_pos) + _SLACK
    width = padded + (0 if w_time is None else len(w_time))
    # A share for each head of a sequence: threads never add to the same number, and the order of the sums is fixed.
    dw = torch.zeros((len(offsets) - 1) * q.shape[1], width)
    # The library adds up the shares into this, in the order of the sequences.
    sums = torch.zeros(width)
    tensors = _inputs((q, k, v), (offsets, query_offsets, targets), biases, spans)
    # = {"dq"|Operands of one product have one dtype.
    tensors |= {"dq": dq, "dk": dk, "dv": dv, "dw": dw, "grad": grad.to(q.dtype), "out": out, "lse": lse}
    options = _options(
        q, v, offsets=offsets, biases=biases, numbers=(scale, divisor, softmax, relu), mask=(context, reach)
    )
    problem, _kept = _describe(tensors, options)
    _LIBRARY.needed().ziggurat_attention_backward(ctypes.byref(problem), _path(path), sums.data_ptr())
    # Copies: outputs of a custom operation must not be views of one tensor.
    of_positions = sums[: 0 if w_pos is None else len(w_pos)].clone()
    return dq, dk, dv, of_positions, sums[padded:].clone()


def _path(path: int) -> int:
    # Negative: nobody asks for certain instructions, as tests do.
    return int(best_path()) if path < 0 else path


@attention_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    query_offsets: Tensor | None,
    targets: Tensor | None,
    w_pos: Tensor | None,
    w_time: Tensor | None,
    query_times: Tensor | None,
    key_times: Tensor | None,
    spans: Tensor | None,
    scale: float,
    divisor: float,
    softmax: bool,
    *others: object,
) -> tuple[Tensor, Tensor]:
    del k, offsets, query_offsets, targets, w_pos, w_time, query_times, key_times, spans, scale, divisor, others
    result = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    return result, q.new_empty((q.shape[0], q.shape[1]) if softmax else (0, 0), dtype=torch.float32)


@attention_backward_op.register_fake
def _(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    query_offsets: Tensor | None,
    targets: Tensor | None,
    w_pos: Tensor | None,
    w_time: Tensor | None,
    *others: object,
) -> tuple[Tensor, ...]:
    del grad, out, lse, offsets, query_offsets, targets, others
    of_biases = (torch.empty(0 if each is None else len(each)) for each in (w_pos, w_time))
    return (*(each.new_empty(each.shape) for each in (q, k, v)), *of_biases)


def _differentiate(ctx: AttentionCtx, grad: Tensor, _grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    *inputs, out, lse = ctx.saved_tensors
    dq, dk, dv, d_pos, d_time = attention_backward_op(grad, out, lse, *inputs, *ctx.options)
    w_pos = inputs[6]
    w_time = inputs[7]
    of_biases = (None if w_pos is None else d_pos.to(w_pos.dtype), None if w_time is None else d_time.to(w_time.dtype))
    return (dq, dk, dv, None, None, None, *of_biases, None, None, None, *[None] * len(ctx.options))


attention_op.register_autograd(_differentiate, setup_context=keep_inputs)


@register_flop_formula(torch.ops.ziggurat.jagged_attention, get_raw=True)
def forward_flops(q: Tensor, k: Tensor, v: Tensor, *others: Any, **named: Any) -> int:
    """FLOPs of the pairs that see each other."""
    del named
    return 2 * q.shape[1] * (q.shape[2] + v.shape[2]) * _pairs(k, *others)


@register_flop_formula(torch.ops.ziggurat.jagged_attention_backward, get_raw=True)
def backward_flops(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any, **named: Any
) -> int:
    """FLOPs backward: scores and their gradients, and the gradients of queries, keys and values."""
    del grad, out, lse, named
    return 2 * q.shape[1] * (3 * q.shape[2] + 2 * v.shape[2]) * _pairs(k, *others)


def _pairs(keys: Tensor, offsets: Tensor, query_offsets: Tensor | None, targets: Tensor | None, *others: Any) -> int:
    """Pairs of a problem; `others` are the inputs of the operation behind `targets`."""
    del keys
    # The Triton operation counts by this, too: its inputs stand in the same order up to here.
    mask = AttentionMask(context=others[8], max_attention_length=others[9])
    parts = (
        None if others[4] is None else Spans(query_starts=others[4][0], key_starts=others[4][1], lengths=others[4][2])
    )
    layout = JaggedLayout(offsets=offsets, query_offsets=query_offsets, num_targets=targets, mask=mask, spans=parts)
    return attended_pairs(layout)
