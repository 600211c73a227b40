"""Layer norm, and its product with a gate, as HSTU layers have them between their maps: one trip through memory.

    normed(x)                       LN(x)
    gated_norm(u, a)                g ⊙ LN(a), or [g, a, g ⊙ LN(a)], or [g, LN(a), g ⊙ LN(a)], with g = u or SiLU(u)

In torch under autocast a norm is a cast to FP32, the norm, and a cast for the product that follows; three parts in BF16
take 6.6 times the bytes of u, a and the result, as counted. The Triton kernels (`gated_norm_triton.py`) read u and a
once, compute in FP32 and write in the dtype of the product that follows; backward they read them again, so that nothing
else is kept. Sums for γ and β are made of blocks of rows, in order: the same bits on every repeat.

`gated_norm_reference` is the definition. The kernels are for CUDA devices, where they were faster than torch's
operations when both were timed (`ops/machine/measured_choice.py`), and not inside of torch.compile, which fuses by
itself; and for the CPU under Triton's interpreter, which is how their test runs.

Cost: bytes of u, a and the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypedDict

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ziggurat.ops.function_ctx import Ctx
from ziggurat.ops.kernel_choice import kernels_of, power_of_two, why_no_triton
from ziggurat.ops.machine.measured_choice import fastest, timed_size

GATED_NORM_KERNELS = "ziggurat.ops.gated_norm_triton"
_MAX_DIM = 8192  # numbers of a row that a program holds
_NUMBERS = 2048  # of a tile of rows
_TILES = 16  # of the backward pass, that a program goes through; they are the order of the sums over rows
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Beside(StrEnum):
    """Choices of what stands beside the gated norm in a result."""

    NOTHING = "nothing"
    RAW = "raw"  # the gate, and what was normed
    NORMED = "normed"  # the gate, and the norm


@dataclass(frozen=True, kw_only=True)
class GatedNormForm:
    """Say what is computed from rows.

    Args:
        eps: ε of the norm.
        activates: the gate is SiLU(u), not u.
        beside: what stands beside the gated norm.
    """

    eps: float
    activates: bool = False
    beside: Beside = Beside.NOTHING


def gated_norm_reference(
    gate_ND: Float[Tensor, "N D"] | None,
    values_ND: Float[Tensor, "N D"],
    weight: Float[Tensor, "D"] | None,
    bias: Float[Tensor, "D"] | None,
    *,
    form: GatedNormForm,
) -> Float[Tensor, "N P"]:
    """Norm rows and gate them, by torch's operations.

    Args:
        gate_ND: u; None: the norm alone.
        values_ND: a.
        weight: γ.
        bias: β.
        form: what is computed.
    """
    normed_ND = F.layer_norm(values_ND, values_ND.shape[1:], weight, bias, form.eps)
    if gate_ND is None:
        return normed_ND
    gate_ND = F.silu(gate_ND) if form.activates else gate_ND
    gated_ND = gate_ND * normed_ND
    if form.beside is Beside.NOTHING:
        return gated_ND
    beside_ND = normed_ND if form.beside is Beside.NORMED else values_ND
    return torch.cat([gate_ND, beside_ND, gated_ND], dim=1)


def gated_norm(
    gate_ND: Float[Tensor, "N D"] | None,
    values_ND: Float[Tensor, "N D"],
    weight: Float[Tensor, "D"] | None,
    bias: Float[Tensor, "D"] | None,
    *,
    form: GatedNormForm,
) -> Float[Tensor, "N P"]:
    """Norm rows and gate them, by the kernels where they are faster.

    The kernels give the dtype that autocast has, which the product that follows takes; torch's may give FP32.

    Args:
        gate_ND: u; None: the norm alone.
        values_ND: a.
        weight: γ.
        bias: β.
        form: what is computed.
    """
    # First the cheap questions: what follows may time both on the GPU.
    if torch.compiler.is_compiling() or values_ND.device.type != "cuda":
        return gated_norm_reference(gate_ND, values_ND, weight, bias, form=form)
    if why_not_triton(gate_ND, values_ND) or _is_slower(gate_ND, values_ND, weight, form):
        return gated_norm_reference(gate_ND, values_ND, weight, bias, form=form)
    return gated_norm_triton(gate_ND, values_ND, weight, bias, form=form)


def why_not_triton(gate_ND: Tensor | None, values_ND: Tensor) -> str:
    """The reason why the kernels cannot serve these rows; "" if they can."""
    if reason := why_no_triton(GATED_NORM_KERNELS, values_ND, what="rows"):
        return reason
    for each in (values_ND, gate_ND):
        if each is not None and each.dtype not in _DTYPES:
            return f"rows of {each.dtype}"
    return f"rows of {values_ND.shape[1]} numbers" if values_ND.shape[1] > _MAX_DIM else ""


def gated_norm_triton(
    gate_ND: Float[Tensor, "N D"] | None,
    values_ND: Float[Tensor, "N D"],
    weight: Float[Tensor, "D"] | None,
    bias: Float[Tensor, "D"] | None,
    *,
    form: GatedNormForm,
) -> Float[Tensor, "N P"]:
    """Norm rows and gate them, by Triton; see `gated_norm`."""
    device = values_ND.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else values_ND.dtype
    return _GatedNorm.apply(gate_ND, values_ND, weight, bias, form, dtype)


class _GatedNormCtx(Ctx, Protocol):
    form: GatedNormForm

    @property
    def saved_tensors(self) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None]: ...


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _GatedNormCtx,
        gate_ND: Tensor | None,
        values_ND: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        form: GatedNormForm,
        dtype: torch.dtype,
    ) -> Tensor:
        values_ND = _with_dense_rows(values_ND)
        gate_ND = None if gate_ND is None else _with_dense_rows(gate_ND)
        ctx.form = form
        # Inputs alone: backward computes the norm again, which costs less than to keep and read it.
        ctx.save_for_backward(gate_ND, values_ND, weight, bias)
        num_rows, dim = values_ND.shape
        parts = 1 if form.beside is Beside.NOTHING else 3
        out = values_ND.new_empty(num_rows, parts * dim, dtype=dtype)
        constants = _constants(gate_ND, values_ND, weight, form)
        if num_rows:
            kernels_of(GATED_NORM_KERNELS).gated_norm_kernel[(-(-num_rows // constants["rows_tile"]),)](
                *_given(gate_ND, values_ND, weight, bias),
                out,
                num_rows,
                values_ND.stride(0) if gate_ND is None else gate_ND.stride(0),
                values_ND.stride(0),
                form.eps,
                **constants,
            )
        return out

    @staticmethod
    def backward(ctx: _GatedNormCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gate_ND, values_ND, weight, bias = ctx.saved_tensors
        if torch.is_grad_enabled():  # gradients of these gradients are asked for
            return _differentiated(ctx, gradients[0])
        num_rows, dim = values_ND.shape
        constants = _constants(gate_ND, values_ND, weight, ctx.form)
        blocks = -(-num_rows // (constants["rows_tile"] * _TILES))
        of_values = values_ND.new_empty(num_rows, dim)
        # Without a gate it is not written; a launch needs a tensor all the same.
        of_gate = of_values if gate_ND is None else gate_ND.new_empty(num_rows, dim)
        # A row a block of rows, summed in order at the end: the same bits on every repeat.
        of_weight = values_ND.new_empty(blocks, dim if weight is not None else 0, dtype=torch.float32)
        of_bias = torch.empty_like(of_weight)
        if num_rows:
            kernels_of(GATED_NORM_KERNELS).gated_norm_backward_kernel[(blocks,)](
                *_given(gate_ND, values_ND, weight, bias),
                gradients[0].contiguous(),
                of_gate,
                of_values,
                of_weight,
                of_bias,
                num_rows,
                values_ND.stride(0) if gate_ND is None else gate_ND.stride(0),
                values_ND.stride(0),
                ctx.form.eps,
                tiles=_TILES,
                **constants,
            )
        of_norm = (None, None)
        if weight is not None:
            of_norm = (of_weight.sum(0).to(weight.dtype), of_bias.sum(0).to(weight.dtype))
        return None if gate_ND is None else of_gate, of_values, *of_norm, None, None


def _differentiated(ctx: _GatedNormCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Return gradients by torch's operations, which can be differentiated."""
    gate_ND, values_ND, weight, bias = ctx.saved_tensors
    inputs = (gate_ND, values_ND, weight, bias)
    # Not strict: `needs_input_grad` also has the form and the dtype.
    wanted = [each for each, need in zip(inputs, ctx.needs_input_grad, strict=False) if each is not None and need]
    out = gated_norm_reference(gate_ND, values_ND, weight, bias, form=ctx.form).to(gradient.dtype)
    found = iter(torch.autograd.grad(out, wanted, gradient, create_graph=True))
    return (*(next(found) if need else None for need in ctx.needs_input_grad[:4]), None, None)


def _with_dense_rows(rows_ND: Tensor) -> Tensor:
    return rows_ND if rows_ND.stride(1) == 1 else rows_ND.contiguous()


def _given(gate_ND: Tensor | None, values_ND: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, ...]:
    """Pointers of a kernel; what is not there is not read."""
    return (
        values_ND if gate_ND is None else gate_ND,
        values_ND,
        values_ND if weight is None else weight,
        values_ND if bias is None else bias,
    )


class _Constants(TypedDict):
    """Arguments of both kernels that Triton compiles them for."""

    dim: int
    padded: int
    rows_tile: int
    is_affine: bool
    gates: bool
    activates: bool
    beside: str


def _constants(gate_ND: Tensor | None, values_ND: Tensor, weight: Tensor | None, form: GatedNormForm) -> _Constants:
    dim = values_ND.shape[1]
    padded = power_of_two(dim)
    return {
        "dim": dim,
        "padded": padded,
        "rows_tile": max(1, _NUMBERS // padded),
        "is_affine": weight is not None,
        "gates": gate_ND is not None,
        "activates": form.activates,
        "beside": form.beside.value,
    }


def _is_slower(gate_ND: Tensor | None, values_ND: Tensor, weight: Tensor | None, form: GatedNormForm) -> bool:
    """Say whether torch's operations are faster than the kernels, as timed on this GPU once for each kind of rows."""
    device = values_ND.device
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else values_ND.dtype
    key = (timed_size(len(values_ND)), values_ND.shape[1], values_ND.dtype, gate_ND is not None, weight is not None)
    return _measured(*key, dtype, form, device) == "torch"


def _measured(
    num_rows: int,
    dim: int,
    of_values: torch.dtype,
    is_gated: bool,
    is_affine: bool,
    dtype: torch.dtype,
    form: GatedNormForm,
    device: torch.device,
) -> str:
    """Time both, forward and backward; the name of the faster one."""

    @functools.cache
    # Made at the first run and not before: an answer that was kept needs none of it.
    def scratch() -> list[Tensor | None]:
        draw = torch.Generator(device).manual_seed(0)
        rows = [torch.randn(num_rows, dim, generator=draw, device=device) for _ in range(2)]
        affine = [torch.randn(dim, generator=draw, device=device).requires_grad_() for _ in range(2)]
        gate = rows[0].to(dtype).requires_grad_() if is_gated else None
        values = rows[1].to(of_values).requires_grad_()
        return [gate, values, *(affine if is_affine else (None, None))]

    def run(function: Callable[..., Tensor]) -> object:
        gate, values, weight, bias = scratch()
        # A first call may come from an evaluation, without gradients, and the answer also serves training.
        with torch.enable_grad(), torch.autocast(device.type, dtype=dtype, enabled=dtype is not torch.float32):
            found = function(gate, values, weight, bias, form=form).to(dtype)
        leaves = [each for each in scratch() if each is not None]
        return torch.autograd.grad(found, leaves, torch.ones_like(found))

    contestants: dict[str, Callable[[], object]] = {
        "torch": functools.partial(run, gated_norm_reference),
        "triton": functools.partial(run, gated_norm_triton),
    }
    answer = fastest(
        "gated_norm",
        contestants,
        shape=f"{num_rows} rows of {dim}, {of_values} to {dtype}, gate {is_gated}, affine {is_affine}, {form}",
        kernels=GATED_NORM_KERNELS,
        device=device,
    )
    return answer.name
