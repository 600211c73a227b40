"""Layer norm of flattened factorization machine products: LN(flatten(X (Xᵀ Y))), the start of Wukong's block.

    X (n, d) ─► T = Xᵀ Y (d, k) ─► P = X T (n, k) ─► (P − mean) / sqrt(var + ε) · γ + β        mean, var over all n·k

In torch these are two batched products of small matrices, a copy and a norm: on a GPU five launches that each read and
write (B, n, k) or (B, n, d). The Triton kernel (`fm_norm_triton.py`) gives one program a sample: X and Y are read once,
T and P stay in registers, and n·k numbers are written. Y is the same for all samples and comes from the L2 cache.
Matrices are padded to powers of two of 16 or more with zeros, which change neither the products nor, being masked, the
norm.

The backward pass runs autograd over the reference (recomputation: X and Y are kept, nothing else).

`fm_norm_reference` is the definition. The kernel is for CUDA devices, and for the CPU under Triton's interpreter
(`TRITON_INTERPRET=1`), which is how its test runs. `auto` takes it where it was 1.3 times as fast as torch's
operations, forward and backward, when both were timed on the GPU (`ops/machine/measured_choice.py`); in compiled
networks torch.compile does it. Where it cannot run, asking for it by name is an error.

Reference: arXiv 2403.02545, sections 3.4 to 3.6; Triton: Tillet, Kung and Cox, MAPL 2019. Cost: 4·n·d·k FLOPs a sample.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ziggurat.errors import MissingDependencyError
from ziggurat.ops.function_ctx import SavedCtx
from ziggurat.ops.interactions.fields import field_mix
from ziggurat.ops.kernel_choice import is_interpreted, kernels_of, power_of_two, why_no_triton
from ziggurat.ops.machine.measured_choice import Answer, fastest, timed_size

_KERNELS = "ziggurat.ops.interactions.fm_norm_triton"
_MAX_PADDED = 128 * 128  # numbers of X that one program holds
_MIN_GAIN = 1.3  # over torch's operations, forward and backward: less is not worth other last bits


class FMKernel(StrEnum):
    """Implementations of products and norm."""

    AUTO = "auto"  # the faster one, measured on the GPU; torch on the CPU and under torch.compile
    TORCH = "torch"  # torch's operations, and on the CPU those of `fields.py`
    TRITON = "triton"  # one fused kernel; CUDA


@dataclass(frozen=True, kw_only=True)
class FMLaunch:
    """Launch settings of the kernel; the order of sums, and so the last bits, depend on them.

    Args:
        samples: of a program, one after the other.
        warps: of a program.
        stages: samples that are on their way at a time; 1: the next is read when this one is done.
    """

    samples: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"triton, {self.samples} samples, {self.warps} warps, {self.stages} stages"


_LAUNCHES = {
    str(each): each
    for each in (
        FMLaunch(samples=1, warps=4, stages=1),
        FMLaunch(samples=8, warps=4, stages=3),
        FMLaunch(samples=8, warps=2, stages=2),
    )
}


def fm_norm_reference(
    fields_BFD: Float[Tensor, "B F D"],
    weight_Fr: Float[Tensor, "F r"],
    *,
    scale_P: Float[Tensor, "P"],
    shift_P: Float[Tensor, "P"],
    eps: float,
) -> Float[Tensor, "B P"]:
    """LN(flatten(X (Xᵀ Y))), P = F·r.

    Args:
        fields_BFD: X of every sample.
        weight_Fr: Y.
        scale_P: γ of the norm.
        shift_P: β of the norm.
        eps: ε of the norm.
    """
    # `field_mix` gives (Xᵀ Y)ᵀ, r fields of D numbers; X times its transpose are the products.
    products_BP = torch.bmm(fields_BFD, field_mix(fields_BFD, weight_Fr.t()).mT).flatten(1)
    return F.layer_norm(products_BP, scale_P.shape, scale_P, shift_P, eps)


def fm_norm(
    fields_BFD: Float[Tensor, "B F D"],
    weight_Fr: Float[Tensor, "F r"],
    *,
    scale_P: Float[Tensor, "P"],
    shift_P: Float[Tensor, "P"],
    eps: float,
    kernel: FMKernel = FMKernel.TORCH,
) -> Float[Tensor, "B P"]:
    """`fm_norm_reference`, by the kernel that is asked for.

    Args:
        fields_BFD: X of every sample.
        weight_Fr: Y.
        scale_P: γ of the norm.
        shift_P: β of the norm.
        eps: ε of the norm.
        kernel: what computes it.

    Raises:
        MissingDependencyError: `triton` was asked for and cannot run here.
    """
    chosen = _chosen(fields_BFD, weight_Fr, kernel)
    if chosen == FMKernel.TORCH.value:
        return fm_norm_reference(fields_BFD, weight_Fr, scale_P=scale_P, shift_P=shift_P, eps=eps)
    reason = why_not_triton(fields_BFD, weight_Fr)
    if reason:
        raise MissingDependencyError(
            expected="a CUDA device, the triton package and FP32, FP16 or BF16 fields, for kernel = triton",
            found=reason,
            where="factorization machine products",
            ways_out=("set model.kernel = torch: the same numbers", "move the model to a CUDA device"),
        )
    return _FusedFMNorm.apply(fields_BFD, weight_Fr, scale_P, shift_P, eps, _LAUNCHES[chosen])


def why_not_triton(fields_BFD: Tensor, weight_Fr: Tensor) -> str:
    """The reason why the Triton kernel cannot serve these inputs; "" if it can."""
    if reason := why_no_triton(_KERNELS, fields_BFD, what="fields"):
        return reason
    if fields_BFD.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"fields of {fields_BFD.dtype}"
    (_, num_fields, dim), rank = fields_BFD.shape, weight_Fr.shape[1]
    # Xᵀ Y and X (Xᵀ Y) are in registers together, padded to powers of two.
    if power_of_two(num_fields) * max(power_of_two(dim), power_of_two(rank)) > _MAX_PADDED:
        return f"{num_fields} fields of {dim}, rank {rank}: more than one program holds"
    return ""


def _chosen(fields_BFD: Tensor, weight_Fr: Tensor, kernel: FMKernel) -> str:
    """Return what computes these products: torch, or a launch of the kernel, by name."""
    is_asked_for = kernel is FMKernel.TRITON
    if kernel is FMKernel.TORCH or (torch.compiler.is_compiling() and not is_asked_for):
        return FMKernel.TORCH.value
    first = next(iter(_LAUNCHES)) if is_asked_for else FMKernel.TORCH.value
    # Under the interpreter there is no time to be measured.
    if why_not_triton(fields_BFD, weight_Fr) or fields_BFD.device.type != "cuda":
        return first
    shape = (timed_size(fields_BFD.shape[0]), *fields_BFD.shape[1:])
    answer = measured_form(shape, weight_Fr.shape[1], fields_BFD.dtype, fields_BFD.device)
    if not is_asked_for:
        return answer.name
    # Asked for by name, the kernel runs even where torch is faster: of its launches then the best one.
    return min(_LAUNCHES, key=lambda name: answer.times_ms.get(name, math.inf))


def measured_form(shape: tuple[int, ...], rank: int, dtype: torch.dtype, device: torch.device) -> Answer:
    """Time the kernel and torch's operations, forward and backward.

    Args:
        shape: of X: samples, F, D.
        rank: r.
        dtype: of all numbers.
        device: a GPU.
    """
    _, num_fields, dim = shape

    @functools.cache
    def scratch() -> tuple[list[Tensor], Tensor]:
        draw = torch.Generator(device).manual_seed(0)
        shapes = (shape, (num_fields, rank), (num_fields * rank,), (num_fields * rank,))
        drawn = [torch.randn(each, generator=draw, device=device) for each in shapes]
        upstream = torch.randn(shape[0], num_fields * rank, generator=draw, device=device)
        return [each.to(dtype).requires_grad_() for each in drawn], upstream.to(dtype)

    def run(launch: FMLaunch | None) -> object:
        leaves, upstream = scratch()
        fields_BFD, weight_Fr, scale_P, shift_P = leaves
        # Timed as it is used, backward included; without autocast, since operands have their dtype already.
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            if launch is None:
                found = fm_norm_reference(fields_BFD, weight_Fr, scale_P=scale_P, shift_P=shift_P, eps=1e-5)
            else:
                found = _FusedFMNorm.apply(*leaves, 1e-5, launch)
            return torch.autograd.grad(found, leaves, upstream)

    contestants: dict[str, Callable[[], object]] = {FMKernel.TORCH.value: functools.partial(run, None)}
    contestants |= {name: functools.partial(run, launch) for name, launch in _LAUNCHES.items()}
    return fastest(
        "fm_norm",
        contestants,
        shape=f"{shape[0]} samples, {num_fields} fields of {dim}, rank {rank}, {dtype}",
        kernels=_KERNELS,
        device=device,
        least_gain=_MIN_GAIN,
    )


def fm_norm_triton(inputs: Sequence[Tensor], out_BP: Tensor, *, eps: float, launch: FMLaunch) -> None:
    """Write the normalised products of all samples.

    Args:
        inputs: X (B, F, D), Y (F, r), γ and β, contiguous; B of 1 or more.
        out_BP: what is written, in the dtype of X.
        eps: ε of the norm.
        launch: of the kernel.
    """
    (size, num_fields, dim), rank = inputs[0].shape, inputs[1].shape[1]
    kernels_of(_KERNELS).fm_norm_kernel[(-(-size // launch.samples),)](
        *inputs,
        out_BP,
        eps,
        size,
        num_fields=num_fields,
        dim=dim,
        rank=rank,
        padded_num_fields=power_of_two(num_fields),
        padded_dim=power_of_two(dim),
        padded_rank=power_of_two(rank),
        samples=launch.samples,
        stages=launch.stages,
        interpreted=is_interpreted(),
        num_warps=launch.warps,
    )


class _FMNormCtx(SavedCtx, Protocol):
    eps: float


class _FusedFMNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _FMNormCtx,
        fields_BFD: Tensor,
        weight_Fr: Tensor,
        scale_P: Tensor,
        shift_P: Tensor,
        eps: float,
        launch: FMLaunch,
    ) -> Tensor:
        ctx.eps = eps
        ctx.save_for_backward(fields_BFD, weight_Fr, scale_P, shift_P)
        size, num_fields, _ = fields_BFD.shape
        out_BP = fields_BFD.new_empty(size, num_fields * weight_Fr.shape[1])
        # A grid of no programs is an error of the launch.
        if size:
            inputs = [each.contiguous() for each in (fields_BFD, weight_Fr, scale_P, shift_P)]
            fm_norm_triton(inputs, out_BP, eps=eps, launch=launch)
        return out_BP

    @staticmethod
    def backward(ctx: _FMNormCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        is_again = torch.is_grad_enabled()
        # Without a graph to extend, leaves of their own: autograd must not walk on into the model's graph.
        inputs = ctx.saved_tensors if is_again else [each.detach().requires_grad_() for each in ctx.saved_tensors]
        needed = ctx.needs_input_grad[:4]
        fields_BFD, weight_Fr, scale_P, shift_P = inputs
        # Backward runs outside of the autocast that the kernel stood for: fields in BF16 meet a weight in FP32 here.
        lower = torch.autocast(fields_BFD.device.type, fields_BFD.dtype, enabled=fields_BFD.dtype != weight_Fr.dtype)
        with torch.enable_grad(), lower:
            result = fm_norm_reference(fields_BFD, weight_Fr, scale_P=scale_P, shift_P=shift_P, eps=ctx.eps)
        wanted = [each for each, need in zip(inputs, needed, strict=True) if need]
        upstream = gradients[0].to(result.dtype)
        found = iter(torch.autograd.grad(result, wanted, upstream, create_graph=is_again))
        return (*(next(found) if need else None for need in needed), None, None)
