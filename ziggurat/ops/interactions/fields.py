"""Linear combinations of fields, and "add, then layer norm", without trips through memory that torch needs.

    field_mix      o_b = W x_b                            W (m, n), x (B, n, d): fields are combined, columns stay apart
    sum_norm       LN([first | second] + kept) over d     what closes a layer of Wukong and DHEN

*Mix.* The sum runs over the middle axis. BLAS wants it at an end, so torch turns x around (a copy), multiplies, and
turns back; three times a layer, and again for the gradients. A sample is only n·d numbers, 5 to 20 KiB:
`csrc/fields.cpp` takes one at a time from the cache, four rows by two vectors of sums in registers.

*Sum and norm.* Torch joins, adds and normalises in three passes over (B, m, d), and autograd keeps two copies. Here it
is one pass, which keeps the normalised numbers; the gradient of the sum is one tensor, of which `first` and `second`
get views.

The references define both. The kernels serve FP32 and FP64 on the CPU, for a d of whole vectors (a multiple of 8 in
FP32), outside of torch.compile (which fuses by itself) and of autocast. Second derivatives go through the references.
`fields_kernel()` says which runs, for the start-up report. Measured effect: `docs/experiments`.

Cost: 2·n·m·d FLOPs a sample for a mix, twice that backward.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_double, c_int64, c_void_p
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ziggurat.ops.cpp_build import CppLibrary, CppSource
from ziggurat.ops.function_ctx import Ctx, SavedCtx

_SOURCE = CppSource(
    path=Path(__file__).parents[1] / "csrc" / "fields.cpp",
    flags=("-fopenmp", "-fno-math-errno"),
    depends_on=torch.__version__,  # whose OpenMP it shares
    without="go on without: torch's own operations compute the same, slower",
)
_VECTOR_BYTES = 32
_SUFFIX = {torch.float32: "f32", torch.float64: "f64"}
_ARGUMENTS = {
    "mix": [*[c_void_p] * 3, *[c_int64] * 5],
    "mix_weight": [*[c_void_p] * 3, *[c_int64] * 5],
    "sum_norm": [*[c_void_p] * 8, *[c_int64] * 4, c_double, c_int64],
    "sum_norm_backward": [*[c_void_p] * 7, *[c_int64] * 4],
}


def field_mix_reference(fields_BFD: Float[Tensor, "B F D"], weight_MF: Float[Tensor, "M F"]) -> Float[Tensor, "B M D"]:
    """W x_b for every sample; any device and dtype."""
    return torch.matmul(weight_MF, fields_BFD)


def field_mix(fields_BFD: Float[Tensor, "B F D"], weight_MF: Float[Tensor, "M F"]) -> Float[Tensor, "B M D"]:
    """`field_mix_reference` by the fastest implementation that serves this input."""
    if why_not(fields_BFD, weight_MF):
        return field_mix_reference(fields_BFD, weight_MF)
    return _FieldMix.apply(fields_BFD, weight_MF)


def sum_norm_reference(
    parts: Sequence[Float[Tensor, "B _ D"]],
    kept_BMD: Float[Tensor, "B M D"],
    *,
    weight_D: Float[Tensor, "D"],
    bias_D: Float[Tensor, "D"],
    eps: float,
) -> Float[Tensor, "B M D"]:
    """LN(concat(parts) + kept) over D.

    Args:
        parts: fields that stand one after the other, M together.
        kept_BMD: what is added.
        weight_D: scale of the norm.
        bias_D: shift of the norm.
        eps: ε of the norm.
    """
    joined_BMD = parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)
    return F.layer_norm(joined_BMD + kept_BMD, weight_D.shape, weight_D, bias_D, eps)


def sum_norm(
    parts: Sequence[Float[Tensor, "B _ D"]],
    kept_BMD: Float[Tensor, "B M D"],
    *,
    weight_D: Float[Tensor, "D"],
    bias_D: Float[Tensor, "D"],
    eps: float,
) -> Float[Tensor, "B M D"]:
    """`sum_norm_reference` by the fastest implementation that serves these inputs."""
    # The kernel knows two parts; more are joined behind the first.
    parts = parts if len(parts) <= 2 else (parts[0], torch.cat(list(parts[1:]), dim=1))
    if why_not(*parts, kept_BMD, weight_D, bias_D):
        return sum_norm_reference(parts, kept_BMD, weight_D=weight_D, bias_D=bias_D, eps=eps)
    # A part of no fields, since the kernel takes two pointers.
    second = parts[1] if len(parts) == 2 else parts[0][:, :0]
    return _SumNorm.apply(parts[0], second, kept_BMD, weight_D, bias_D, eps)


def why_not(*inputs: Tensor) -> str:
    """The reason why the kernels do not serve these inputs, the first of which ends in d columns; "" if they do."""
    first = inputs[0]
    if torch.compiler.is_compiling():
        return "torch.compile fuses by itself"
    if first.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return "it is for the CPU without autocast"
    if first.dtype not in _SUFFIX or any(each.dtype is not first.dtype for each in inputs):
        return f"it is for FP32 and FP64 throughout, not {', '.join(sorted({str(each.dtype) for each in inputs}))}"
    # The kernel has no loop for columns that fill no whole vector.
    lanes = _VECTOR_BYTES // first.element_size()
    if first.shape[-1] % lanes:
        return f"it is for a multiple of {lanes} columns, not {first.shape[-1]}"
    return _LIBRARY.reason


def fields_kernel() -> str:
    """Say which implementation serves FP32 on this CPU, and why; build the kernel if need be."""
    return _LIBRARY.kernel_line()


def _declare(library: ctypes.CDLL) -> None:
    """Say which arguments the functions of the library take."""
    for name, arguments in _ARGUMENTS.items():
        for suffix in _SUFFIX.values():
            function = getattr(library, f"ziggurat_{name}_{suffix}")
            function.restype = None
            function.argtypes = arguments


_LIBRARY = CppLibrary(_SOURCE, declare=_declare)


def _call(name: str, tensors: Sequence[Tensor], *numbers: float) -> None:
    function = getattr(_LIBRARY.needed(), f"ziggurat_{name}_{_SUFFIX[tensors[0].dtype]}")
    function(*(each.data_ptr() for each in tensors), *numbers, torch.get_num_threads())


class _FieldMix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: SavedCtx, fields_BFD: Tensor, weight_MF: Tensor) -> Tensor:
        fields_BFD = fields_BFD.contiguous()
        ctx.save_for_backward(fields_BFD, weight_MF)
        size, num_fields, dim = fields_BFD.shape
        outputs = weight_MF.shape[0]
        out_BMD = fields_BFD.new_empty(size, outputs, dim)
        # For each input the kernel reads the weights of four outputs: neighbours, once W is turned.
        _call("mix", (fields_BFD, weight_MF.t().contiguous(), out_BMD), size, num_fields, outputs, dim)
        return out_BMD

    @staticmethod
    def backward(ctx: SavedCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        fields_BFD, weight_MF = ctx.saved_tensors
        # create_graph=True: what follows has to be differentiable once more.
        if torch.is_grad_enabled():
            return _through_reference(ctx, field_mix_reference, (fields_BFD, weight_MF), gradients[0])
        gradient_BMD = gradients[0].contiguous()
        (size, num_fields, dim), outputs = fields_BFD.shape, weight_MF.shape[0]
        fields_gradient = weight_gradient = None
        if ctx.needs_input_grad[0]:
            fields_gradient = torch.empty_like(fields_BFD)
            # The kernel takes weights turned: those of Wᵀ are W as it lies.
            _call("mix", (gradient_BMD, weight_MF.contiguous(), fields_gradient), size, outputs, num_fields, dim)
        if ctx.needs_input_grad[1]:
            # Inputs first, as the kernel writes it; the gradient is a view of it.
            turned_FM = fields_BFD.new_empty(num_fields, outputs)
            _call("mix_weight", (fields_BFD, gradient_BMD, turned_FM), size, num_fields, outputs, dim)
            weight_gradient = turned_FM.t()
        return fields_gradient, weight_gradient


class _SumNormCtx(SavedCtx, Protocol):
    eps: float


class _SumNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _SumNormCtx,
        first_BPD: Tensor,
        second_BQD: Tensor,
        kept_BMD: Tensor,
        weight_D: Tensor,
        bias_D: Tensor,
        eps: float,
    ) -> Tensor:
        ctx.eps = eps
        size, num_fields, dim = kept_BMD.shape
        # The normalised numbers and a scale a field are all that backward needs of the sum.
        out, normal = (torch.empty(kept_BMD.shape, dtype=kept_BMD.dtype) for _ in range(2))
        scales = out.new_empty(size, num_fields)
        inputs = [each.contiguous() for each in (first_BPD, second_BQD, kept_BMD, weight_D, bias_D)]
        _call("sum_norm", (*inputs, out, normal, scales), size, num_fields, first_BPD.shape[1], dim, eps)
        ctx.save_for_backward(first_BPD, second_BQD, kept_BMD, weight_D, bias_D, normal, scales)
        return out

    @staticmethod
    def backward(ctx: _SumNormCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, normal, scales = ctx.saved_tensors
        # As above: gradients of these gradients are asked for.
        if torch.is_grad_enabled():

            def reference(first: Tensor, second: Tensor, kept: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
                return sum_norm_reference((first, second), kept, weight_D=weight, bias_D=bias, eps=ctx.eps)

            return *_through_reference(ctx, reference, inputs, gradients[0]), None
        gradient = gradients[0].contiguous()
        weight_D = inputs[3].contiguous()
        sums = torch.empty_like(normal)
        weight_gradient = torch.empty_like(weight_D)
        bias_gradient = torch.empty_like(weight_D)
        size, num_fields, dim = normal.shape
        tensors = (gradient, normal, scales, weight_D, sums, weight_gradient, bias_gradient)
        _call("sum_norm_backward", tensors, size, num_fields, dim)
        split = inputs[0].shape[1]
        # One gradient for all three: what was added has the gradient of the sum.
        return sums[:, :split], sums[:, split:], sums, weight_gradient, bias_gradient, None


def _through_reference(
    ctx: Ctx, reference: Callable[..., Tensor], inputs: Sequence[Tensor], gradient: Tensor
) -> tuple[Tensor | None, ...]:
    """The same gradients by autograd, which can be differentiated again."""
    result = reference(*inputs)
    needed = ctx.needs_input_grad[: len(inputs)]
    wanted = [each for each, need in zip(inputs, needed, strict=True) if need]
    found = iter(torch.autograd.grad(result, wanted, gradient, create_graph=True))
    return tuple(next(found) if need else None for need in needed)
