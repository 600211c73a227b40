"""Attention over jagged sequences by Triton, forward and backward: what CUDA devices take.

    forward_kernel    a program for a tile of queries of a head: the keys that they see, by tensor cores
    queries_kernel    the same tiles: dQ
    keys_kernel       a program for a tile of keys: the queries that see them; dK and dV in registers
    biases_kernel     a program for a block diagonal of a sequence: dS of all heads, by place and by bucket
    places_kernel     adds up the shares of places

Only tiles in the interval that is seen are read, those that are seen whole without a mask; nothing is padded and no
L × L matrix is written. Scores are computed again in the backward pass, so that what is kept is q, k, v, for softmax
also the results and the logarithms of the sums: memory is linear in L. Every number of a result is summed by one
program in one order, and shares of the biases' gradients are added in the order of the sequences: no atomics, the same
bits on repeat.

BF16 and FP16 are multiplied by tensor cores and summed in FP32; weights are rounded to the dtype before they meet the
values. FP32 is multiplied in TF32 where torch is set to (`torch.backends.cuda.matmul`), else in FP32.

`jagged_attention_reference` is the definition; the kernels run on the CPU under Triton's interpreter
(`TRITON_INTERPRET=1`), which is how their test runs. How they are launched: `launches.py`.

Sources: arXiv 2402.17152, section 3.2; tiles, online softmax and the recomputed scores: Dao, FlashAttention-2, arXiv
2307.08691; Triton: Tillet, Kung and Cox, MAPL 2019.
"""

from __future__ import annotations

import functools

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ziggurat.errors import MissingDependencyError
from ziggurat.ops.attention.cpp import backward_flops, forward_flops
from ziggurat.ops.attention.kept_inputs import AttentionCtx, keep_inputs
from ziggurat.ops.attention.launches import HOPPER_BYTES, AttentionLaunch, AttentionPart, kind_of, launch_of
from ziggurat.ops.attention.problem import (
    AttentionBias,
    AttentionForm,
    AttentionMask,
    JaggedLayout,
    Spans,
    check_problem,
)
from ziggurat.ops.attention.time_buckets import bucket_begins, bucket_limits
from ziggurat.ops.kernel_choice import is_interpreted, kernels_of, power_of_two, why_no_triton
from ziggurat.ops.to_device import to_device

ATTENTION_KERNELS = "ziggurat.ops.attention.triton_kernels"
_MAX_DIM = 256
_MAX_PIECES = 4
_PROGRAMS = 512  # of biases_kernel: longer diagonals are cut until there are so many
_MAX_STEPS = 16  # of buckets that the kernels look at behind one
_PLACES = 64  # of w_pos that a program of places_kernel sums


def jagged_attention_triton(
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
    """Attend as `jagged_attention_reference` does, with Triton.

    Under torch.compile and torch.export it is one operation, `ziggurat::jagged_attention_triton`.

    Args:
        q: queries.
        k: keys.
        v: values.
        layout: where sequences begin, and what sees what.
        form: how scores become weights.
        scale: α.
        divisor: n; 1 for softmax.
        bias: of position and time.

    Raises:
        MissingDependencyError: Triton cannot run here.
        DataError: shapes, offsets, targets or times do not belong together.
    """
    reason = why_not_triton(q, v)
    if reason:
        raise MissingDependencyError(
            expected=f"a CUDA device, the package triton, FP32, FP16 or BF16, and heads of at most {_MAX_DIM}",
            found=reason,
            where="jagged attention by Triton",
            ways_out=("call jagged_attention: the same numbers", "move the model to a CUDA device"),
        )
    given = triton_inputs(layout, bias or AttentionBias(), form=form, scale=scale, divisor=divisor)
    return attention_triton_op(q, k, v, *given)[0]


def why_not_triton(q: Tensor, v: Tensor) -> str:
    """The reason why the Triton kernels cannot serve these inputs; "" if they can."""
    if reason := why_no_triton(ATTENTION_KERNELS, q, what="queries"):
        return reason
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"queries of {q.dtype}"
    if max(q.shape[2], v.shape[2]) > _MAX_DIM:
        return f"heads of {q.shape[2]} and {v.shape[2]}"
    return ""


def triton_inputs(
    layout: JaggedLayout, bias: AttentionBias, *, form: AttentionForm, scale: float, divisor: float
) -> tuple[Tensor | float | str | None, ...]:
    """Inputs of `attention_triton_op` behind q, k and v.

    Args:
        layout: where sequences begin, and what sees what.
        bias: of position and time.
        form: how scores become weights.
        scale: α.
        divisor: n.
    """
    is_timed = bias.w_time is not None
    return (
        layout.offsets,
        # None where every event is a query: the operation is given no second copy of the offsets.
        layout.query_offsets,
        layout.num_targets,
        bias.w_pos,
        bias.w_time,
        bias.query_times if is_timed else None,
        bias.key_times if is_timed else None,
        None if layout.spans is None else layout.spans.stacked(),
        scale,
        divisor,
        form.value,
        layout.rule.context,
        layout.rule.max_attention_length,
        # −1 stands for None: "ask the device".
        -1 if layout.longest is None else layout.longest,
    )


@torch.library.custom_op("ziggurat::jagged_attention_triton", mutates_args=())
def attention_triton_op(
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
    form: str,
    context: int,
    reach: int,
    longest: int,
) -> tuple[Tensor, Tensor]:
    """Results (M, H, d_v), and for softmax the logarithms of the sums (M, H)."""
    mask = AttentionMask(context=context, max_attention_length=reach)
    parts = None if spans is None else Spans(query_starts=spans[0], key_starts=spans[1], lengths=spans[2])
    layout = JaggedLayout(
        offsets=offsets,
        query_offsets=query_offsets,
        num_targets=targets,
        mask=mask,
        spans=parts,
        longest=None if longest < 0 else longest,
    )
    bias = AttentionBias(w_pos=w_pos, w_time=w_time, query_times=query_times, key_times=key_times)
    check_problem(q, k, v, layout=layout, bias=bias)
    # Mostly views of one projection: events may lie apart, and are read where they lie.
    q, k, v = (_last_is_dense(each) for each in (q, k, v))
    call = _Call(q, v, layout=layout, bias=bias, form=form, scale=scale, divisor=divisor, spans=spans)
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    # Pointwise forms have no sums, but the operation has to return as many tensors.
    lse = q.new_empty(q.shape[:2] if form == AttentionForm.SOFTMAX else (0, 0), dtype=torch.float32)
    launch = call.launch(AttentionPart.FORWARD)
    tiles = call.tiles(launch.rows)
    call.run(
        "forward_kernel",
        launch,
        programs=tiles * call.sequences * call.heads,
        tensors=(q, k, v, out, lse),
        numbers=(call.sequences, tiles, *call.numbers, *_strides(q, k, v, out)),
    )
    return out, lse


@torch.library.custom_op("ziggurat::jagged_attention_triton_backward", mutates_args=())
def attention_triton_backward_op(
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
    form: str,
    context: int,
    reach: int,
    longest: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, w_pos and w_time; the last two are empty where there is no such bias."""
    layout = JaggedLayout(
        offsets=offsets,
        query_offsets=query_offsets,
        num_targets=targets,
        mask=AttentionMask(context=context, max_attention_length=reach),
        longest=None if longest < 0 else longest,
    )
    bias = AttentionBias(w_pos=w_pos, w_time=w_time, query_times=query_times, key_times=key_times)
    # Operands of a tensor core's product have one dtype, and autograd may hand over another one.
    grad = grad.to(q.dtype)
    lse = lse.contiguous()
    q, k, v, grad, out = (_last_is_dense(each) for each in (q, k, v, grad, out))
    call = _Call(q, v, layout=layout, bias=bias, form=form, scale=scale, divisor=divisor, spans=spans)
    # Forward checked these inputs; here only what kernels read is put in order.
    dq, dk, dv = (each.new_empty(each.shape) for each in (q, k, v))
    # Filled by queries_kernel and read by the kernels after it, so the order of launches is not free.
    delta = torch.empty_like(lse)
    launch = call.launch(AttentionPart.QUERIES)
    tiles = call.tiles(launch.rows)
    call.run(
        "queries_kernel",
        launch,
        programs=tiles * call.sequences * call.heads,
        tensors=(q, k, v, grad, out, lse, delta, dq),
        numbers=(call.sequences, tiles, *call.numbers, *_strides(q, k, v, grad, out)),
    )
    launch = call.launch(AttentionPart.KEYS)
    tiles = call.tiles(launch.columns)
    call.run(
        "keys_kernel",
        launch,
        programs=tiles * call.sequences * call.heads,
        tensors=(q, k, v, grad, lse, delta, dk, dv),
        numbers=(call.sequences, tiles, *call.numbers, *_strides(q, k, v, grad)),
    )
    d_pos, d_time = _bias_gradients(call, (q, k, v, grad, lse, delta), has_earlier=query_offsets is not None)
    return dq, dk, dv, d_pos, d_time


class _Call:
    """Arguments that all kernels take besides their own tensors."""

    def __init__(
        self,
        q: Tensor,
        v: Tensor,
        *,
        layout: JaggedLayout,
        bias: AttentionBias,
        form: str,
        scale: float,
        divisor: float,
        spans: Tensor | None,
    ) -> None:
        self.device = q.device
        self.heads = q.shape[1]
        self.sequences = len(layout.offsets) - 1
        self.longest = _longest(layout) if self.sequences else 0
        self.context = layout.rule.context
        self.has_targets = layout.num_targets is not None
        self.has_spans = spans is not None
        self.positions = 0 if bias.w_pos is None else len(bias.w_pos)
        self.buckets = 0 if bias.w_time is None else len(bias.w_time)
        places = layout.offsets  # this and `weights` stand for what is not there, and are not read
        weights = q
        self.places = (
            layout.offsets,
            layout.of_queries,
            places if layout.num_targets is None else layout.num_targets,
            places if spans is None else spans,
        )
        self.biases = (
            # In FP32, since `_read` of the kernels loads 4 bytes a number.
            weights if bias.w_pos is None else bias.w_pos.detach().float().contiguous(),
            weights if bias.w_time is None else bias.w_time.detach().float().contiguous(),
            places if bias.query_times is None else bias.query_times.contiguous(),
            places if bias.key_times is None else bias.key_times.contiguous(),
            *((weights, places) if bias.w_time is None else _borders_on(self.buckets, q.device)),
        )
        half = (self.positions - 1) // 2
        self.half = max(0, half)
        self.numbers = (layout.rule.context, layout.rule.max_attention_length, self.half, scale, 1.0 / divisor)
        precision = _precision(q)
        is_biased = bool(self.positions or self.buckets)
        self.kind = kind_of(q.dtype, width=max(q.shape[2], v.shape[2]), is_biased=is_biased, precision=precision)
        self._bounds: dict[int, tuple[Tensor, int]] = {}
        self.constants: dict[str, object] = {
            "heads": self.heads,
            "dim": q.shape[2],
            "value_dim": v.shape[2],
            # Triton's ranges are powers of two; the columns behind `dim` are masked.
            "padded": power_of_two(q.shape[2]),
            "padded_value": power_of_two(v.shape[2]),
            "has_targets": self.has_targets,
            "has_spans": self.has_spans,
            "has_pos": self.positions > 0,
            "has_time": self.buckets > 0,
            "buckets": self.buckets,
            "form": form,
            "precision": precision,
        }

    def launch(self, part: AttentionPart) -> AttentionLaunch:
        """Return how a part is launched."""
        return launch_of(part, self.kind, shared_bytes=_shared_bytes(self.device))

    def tiles(self, size: int) -> int:
        """Tiles of the longest sequence."""
        return -(-self.longest // size)

    def bounds(self, tile: int) -> tuple[Tensor, int]:
        """Return the earliest and latest times of tiles of queries and keys, computed once, and how many tiles."""
        # A pointer that is not read, and no tiles.
        if not self.buckets:
            return self.places[0], 0
        if tile not in self._bounds:
            tiles = self.tiles(tile)
            found = torch.empty(2, self.sequences, tiles, 2, dtype=torch.int64, device=self.device)
            kernels_of(ATTENTION_KERNELS).bounds_kernel[(self.sequences * tiles,)](
                *self.biases[2:4], found, *self.places[:2], self.sequences, tiles, tile=tile
            )
            self._bounds[tile] = found, tiles
        return self._bounds[tile]

    def run(
        self,
        name: str,
        launch: AttentionLaunch,
        *,
        programs: int,
        tensors: tuple[Tensor, ...],
        numbers: tuple[float, ...],
    ) -> None:
        """Launch a kernel that goes through tiles of rows and columns."""
        if not programs:
            return
        kernel = getattr(kernels_of(ATTENTION_KERNELS), name)
        # Both are powers of two: bounds of the smaller tile serve the larger one as well.
        tile = min(launch.rows, launch.columns)
        kernel[(programs,)](
            *tensors,
            *self.places,
            *self.biases,
            *self.bounds(tile),
            *numbers,
            **self.constants,
            rows_tile=launch.rows,
            columns_tile=launch.columns,
            times_tile=tile,
            **launch.options,
        )


def _bias_gradients(call: _Call, inputs: tuple[Tensor, ...], *, has_earlier: bool) -> tuple[Tensor, Tensor]:
    """Gradients of w_pos and w_time; empty where there is no such bias."""
    device = call.device
    d_pos = torch.zeros(call.positions, device=device)
    d_time = torch.zeros(call.buckets, device=device)
    launch = call.launch(AttentionPart.BIASES)
    tile = launch.rows
    tiles = call.tiles(tile)
    if not tiles or not (call.positions or call.buckets):
        return d_pos, d_time
    # Where all rows see only what is before them, no tile right of the diagonal is seen.
    lead = tiles - 1 if call.context or call.has_spans or has_earlier else 0
    bands = tiles + lead
    # Few, short sequences would leave most of a GPU idle with one program a diagonal.
    pieces = min(_MAX_PIECES, max(1, _PROGRAMS // (tiles * call.sequences)), tiles)
    shares = call.sequences * pieces
    # Zeros, not empty: programs without a tile return before they write.
    of_places = torch.zeros(shares * bands * 2 * tile if call.positions else 1, device=device)
    of_columns = torch.zeros(shares * tiles * tile if call.positions and call.has_targets else 1, device=device)
    of_own = torch.zeros(shares * tiles if call.positions and call.has_targets else 1, device=device)
    kernels = kernels_of(ATTENTION_KERNELS)
    q, k, v, grad = inputs[:4]
    # Gradients of targets are sums of columns, those of other rows sums of diagonals: a launch for each.
    for of_targets in (False, True) if call.positions and call.has_targets else (False,):
        programs = (tiles if of_targets else bands) * shares
        # A slot for each program, added up below in one order: atomics would add in any order.
        of_time = torch.zeros(programs if call.buckets else 0, max(1, call.buckets), device=device)
        kernels.biases_kernel[(programs,)](
            *inputs,
            of_places,
            of_columns,
            of_own,
            of_time,
            *call.places,
            *call.biases,
            *call.bounds(tile),
            call.sequences,
            tiles,
            lead,
            pieces,
            *call.numbers,
            *_strides(q, k, v, grad),
            **call.constants,
            tile=tile,
            padded_buckets=power_of_two(max(1, call.buckets)),
            of_targets=of_targets,
            **launch.options,
        )
        if call.buckets:
            d_time += of_time.sum(0)
    if call.positions:
        kernels.places_kernel[(-(-call.positions // _PLACES),)](
            of_places,
            of_columns,
            d_pos,
            *call.places,
            call.sequences,
            tiles,
            lead,
            call.half,
            call.positions,
            has_targets=call.has_targets,
            has_spans=call.has_spans,
            pieces=pieces,
            tile=tile,
            block=_PLACES,
        )
        if call.has_targets:
            d_pos[call.half] += of_own.sum()  # all targets stand at one position
    return d_pos, d_time


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    """Return the shared memory that a program may have on a device."""
    if device.type != "cuda":
        return HOPPER_BYTES
    # What a kernel may ask for (`optin`), which is more than the 48 KB that it gets unasked.
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def _precision(q: Tensor) -> str:
    """Return how FP32 is multiplied: as torch is set."""
    # The interpreter multiplies by numpy, which has no TF32.
    if q.dtype is not torch.float32 or is_interpreted():
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def _last_is_dense(tensor: Tensor) -> Tensor:
    """The same numbers, those of a head side by side."""
    return tensor if tensor.stride(2) == 1 or tensor.shape[2] == 1 else tensor.contiguous()


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    # Of rows and heads; the last dimension is dense (`_last_is_dense`).
    return tuple(tensor.stride(dim) for tensor in tensors for dim in (0, 1))


@functools.cache
def _borders_on(num_buckets: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return where buckets begin, and their shortest durations, padded by as many as kernels look at; made once."""
    begins = torch.cat([torch.zeros(1), bucket_begins(num_buckets)])
    # The kernels look beyond the last bucket without asking where it is: no duration is as long as these.
    none_begins = torch.full((_MAX_STEPS,), torch.iinfo(torch.int64).max)
    limits = torch.cat([torch.zeros(1, dtype=torch.int64), bucket_limits(num_buckets), none_begins])
    return to_device(begins, device), to_device(limits, device)


def _longest(layout: JaggedLayout) -> int:
    """The most rows of a sequence, of keys or queries; asks the device where the host was not told."""
    if layout.longest is not None:
        return layout.longest
    # One transfer for both instead of two.
    lengths = torch.stack([layout.offsets.diff(), layout.of_queries.diff()])
    return int(lengths.max())


@attention_triton_op.register_fake
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
    form: str,
    *others: object,
) -> tuple[Tensor, Tensor]:
    result = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    del k, offsets, query_offsets, targets, w_pos, w_time, query_times, key_times, spans, scale, divisor, others
    is_softmax = form == AttentionForm.SOFTMAX
    return result, q.new_empty((q.shape[0], q.shape[1]) if is_softmax else (0, 0), dtype=torch.float32)


@attention_triton_backward_op.register_fake
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
    of_biases = (q.new_empty(0 if each is None else len(each), dtype=torch.float32) for each in (w_pos, w_time))
    return (*(each.new_empty(each.shape) for each in (q, k, v)), *of_biases)


def _differentiate(ctx: AttentionCtx, grad: Tensor, _grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    *inputs, out, lse = ctx.saved_tensors
    dq, dk, dv, d_pos, d_time = attention_triton_backward_op(grad, out, lse, *inputs, *ctx.options)
    # Inputs are in the order of the operation: q, k, v, two offsets, targets, w_pos, w_time.
    w_pos = inputs[6]
    w_time = inputs[7]
    of_biases = (None if w_pos is None else d_pos.to(w_pos.dtype), None if w_time is None else d_time.to(w_time.dtype))
    return (dq, dk, dv, None, None, None, *of_biases, None, None, None, *[None] * len(ctx.options))


attention_triton_op.register_autograd(_differentiate, setup_context=keep_inputs)
register_flop_formula(torch.ops.ziggurat.jagged_attention_triton, get_raw=True)(forward_flops)
register_flop_formula(torch.ops.ziggurat.jagged_attention_triton_backward, get_raw=True)(backward_flops)
