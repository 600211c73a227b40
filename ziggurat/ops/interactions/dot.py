"""Pairwise dot products of the fields of a sample: the reference in torch, and a C++ kernel for the CPU.

    fields (F, D)                 products Z = X Xᵀ (F, F)         pairs, row by row (P = F(F−1)/2)

    x0 ──────                         0   1   2   3
    x1 ──────                     0   ·  01  02  03
    x2 ──────           →         1       ·  12  13      →         [01 02 03 12 13 23]
    x3 ──────                     2           ·  23
                                  3               ·

*Reference.* Picking with a pair of index tensors (`z[:, rows, columns]`) gathers element by element and scatters back
with accumulation, and autograd treats the two factors of X Xᵀ as different tensors: two batched products backward, and
a sum. Here the picking is `torch.gather` with precomputed places, and with g the gradient of the pairs,

    dX = (G + Gᵀ) X,   where (G + Gᵀ)_ij = g_pair(i, j), 0 on the diagonal,

so backward is one more gather and one batched product. Nothing is ever scattered.

*Kernel.* A sample's F × F products fit into registers and the first-level cache, but torch writes all of them to
memory, half of them for nothing, and calls BLAS for each 27 × 16 matrix. `csrc/dot.cpp` computes a sample at a time,
and of it the upper triangle only. At F = 27, batch 2048, one thread of a Zen 3: forward and backward in 2.3 ms instead
of 5.9 (D = 16), 9.7 instead of 15.8 (D = 64). It is a torch custom op: it runs inside compiled graphs as it is, and it
can be differentiated twice.

`pairwise_dot` takes the kernel for FP32 and FP64 on the CPU, if it can be built, for F ≤ 64 and D ≤ 128 that fills
whole vectors (a multiple of 8 in FP32); else the reference. `dot_kernel()` says which, for the start-up report.

Cost: 2·F²·D FLOPs a sample forward and as much backward; the kernel half of that forward.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_int64, c_void_p
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ziggurat.ops.cpp_build import CppLibrary, CppSource, kernel_line
from ziggurat.ops.function_ctx import SavedCtx
from ziggurat.ops.kernel_choice import constant_when_compiled

_SOURCE = CppSource(
    path=Path(__file__).parents[1] / "csrc" / "dot.cpp",
    flags=("-fopenmp", "-fno-math-errno"),
    depends_on=torch.__version__,  # whose OpenMP it shares
    without="go on without: torch's own operations give the same products, slower",
)
# As dot.cpp has them: it has no path for part of a vector, and arrays of this size on its stack.
_VECTOR_BYTES, _MAX_FIELDS, _MAX_DIM = 32, 64, 128
_SUFFIX = {torch.float32: "f32", torch.float64: "f64"}


class PairPlaces(NamedTuple):
    """Positions of pairs in the F × F products, and the inverse map.

    Args:
        pairs: for each pair i < j, row by row: i·F + j.
        full: for each (i, j), flat: the number of its pair; any number on the diagonal.
    """

    pairs: Int64[Tensor, "P"]
    full: Int64[Tensor, "F*F"]


class DotShape(NamedTuple):
    """Shape of all pieces together, and the columns beside the pairs.

    Args:
        num_fields: F.
        dim: D; the pieces have F·D columns together.
        passed: columns of the first piece that go on themselves, before the pairs.
        padding: columns of zeros after the pairs.
    """

    num_fields: int
    dim: int
    passed: int = 0
    padding: int = 0

    @property
    def width(self) -> int:
        """Columns of the result."""
        return self.passed + self.num_fields * (self.num_fields - 1) // 2 + self.padding


def pair_places(num_fields: int, *, device: torch.device | str = "cpu") -> PairPlaces:
    """The places for F fields."""
    rows, columns = torch.triu_indices(num_fields, num_fields, offset=1, device=device)
    full = torch.zeros((num_fields, num_fields), dtype=torch.int64, device=device)
    # Both ways round: a pair's gradient stands at (i, j) and at (j, i).
    full[rows, columns] = full[columns, rows] = torch.arange(len(rows), device=device)
    return PairPlaces(rows * num_fields + columns, full.flatten())


def pairwise_dot_reference(fields_BFD: Float[Tensor, "B F D"], *, places: PairPlaces) -> Float[Tensor, "B P"]:
    """The products in the order (0,1), (0,2), …, (1,2), …; any device and dtype."""
    return _Reference.apply(fields_BFD, *places)


def pairwise_dot(fields_BFD: Float[Tensor, "B F D"], *, places: PairPlaces) -> Float[Tensor, "B P"]:
    """`pairwise_dot_reference` by the fastest implementation that serves this input."""
    if why_not(fields_BFD):
        return pairwise_dot_reference(fields_BFD, places=places)
    return _dot(fields_BFD)


def why_not(fields_BFD: Tensor) -> str:
    """The reason why the kernel does not serve an input; "" if it does."""
    num_fields, dim = fields_BFD.shape[1:]
    if fields_BFD.device.type != "cpu":
        return f"it is for the CPU, not {fields_BFD.device.type!r}"
    if fields_BFD.dtype not in _SUFFIX:
        return f"it is for FP32 and FP64, not {fields_BFD.dtype}"
    return why_not_shape(num_fields, dim, dtype=fields_BFD.dtype)


def why_not_shape(num_fields: int, dim: int, *, dtype: torch.dtype) -> str:
    """The reason why the kernel does not compute F fields of D numbers of a dtype; "" if it does."""
    lanes = _VECTOR_BYTES // dtype.itemsize
    if num_fields > _MAX_FIELDS or dim > _MAX_DIM or dim % lanes:
        most = f"F <= {_MAX_FIELDS} and D <= {_MAX_DIM}, a multiple of {lanes}"
        return f"it is for {most}, not F = {num_fields}, D = {dim}"
    return _why_not_here()


def dot_kernel() -> str:
    """Say which implementation serves FP32 on this CPU, and why; build the kernel if need be."""
    return kernel_line(_why_not_here())


def _declare(library: ctypes.CDLL) -> None:
    """Say which arguments the functions of the library take."""
    for name in _SUFFIX.values():
        forward = getattr(library, f"ziggurat_dot_{name}")
        backward = getattr(library, f"ziggurat_dot_backward_{name}")
        forward.restype = backward.restype = None
        forward.argtypes = [c_void_p, c_void_p, *[c_int64] * 4]
        backward.argtypes = [c_void_p, c_void_p, c_void_p, *[c_int64] * 4]
    for name in ("ziggurat_dot_interaction", "ziggurat_dot_interaction_backward"):
        function = getattr(library, name)
        function.restype = None
        function.argtypes = [c_void_p, c_int64, c_void_p, *[c_int64] * 7]


_LIBRARY = CppLibrary(_SOURCE, declare=_declare)


@constant_when_compiled
def _why_not_here() -> str:
    """The reason for having no library, "" if there is one; torch.compile asks once and does not look inside."""
    return _LIBRARY.reason


def dot_library() -> ctypes.CDLL:
    """The compiled library, where `why_not_shape` has no objection."""
    return _LIBRARY.needed()


def _function(name: str, dtype: torch.dtype) -> Callable[..., object]:
    return getattr(dot_library(), f"{name}_{_SUFFIX[dtype]}")


@torch.library.custom_op("ziggurat::pairwise_dot", mutates_args=())
def _dot(fields_BFD: Tensor) -> Tensor:
    fields_BFD = fields_BFD.contiguous()
    size, num_fields, dim = fields_BFD.shape
    pairs_BP = fields_BFD.new_empty(size, num_fields * (num_fields - 1) // 2)
    function = _function("ziggurat_dot", fields_BFD.dtype)
    function(fields_BFD.data_ptr(), pairs_BP.data_ptr(), size, num_fields, dim, torch.get_num_threads())
    return pairs_BP


@torch.library.custom_op("ziggurat::pairwise_dot_backward", mutates_args=())
def _dot_backward(fields_BFD: Tensor, gradient_BP: Tensor) -> Tensor:
    fields_BFD = fields_BFD.contiguous()
    gradient_BP = gradient_BP.contiguous()
    size, num_fields, dim = fields_BFD.shape
    out_BFD = torch.empty_like(fields_BFD)
    function = _function("ziggurat_dot_backward", fields_BFD.dtype)
    pointers = fields_BFD.data_ptr(), gradient_BP.data_ptr(), out_BFD.data_ptr()
    function(*pointers, size, num_fields, dim, torch.get_num_threads())
    return out_BFD


@_dot.register_fake
def _(fields_BFD: Tensor) -> Tensor:
    size, num_fields, _ = fields_BFD.shape
    return fields_BFD.new_empty(size, num_fields * (num_fields - 1) // 2)


@_dot_backward.register_fake
def _(fields_BFD: Tensor, gradient_BP: Tensor) -> Tensor:
    return fields_BFD.new_empty(fields_BFD.shape)


def _keep_fields(ctx: SavedCtx, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _first_derivative(ctx: SavedCtx, gradient_BP: Tensor) -> Tensor:
    (fields_BFD,) = ctx.saved_tensors
    return _dot_backward(fields_BFD, gradient_BP)


def _second_derivative(ctx: SavedCtx, direction_BFD: Tensor) -> tuple[Tensor, Tensor]:
    """Differentiate S X, S the symmetric gradient: S v for X, and ⟨v_i, x_j⟩ + ⟨x_i, v_j⟩ for the pair (i, j)."""
    fields_BFD, gradient_BP = ctx.saved_tensors
    # Rare enough for torch's operations: a second derivative is asked for by checks of gradients.
    crossed_BFF = torch.bmm(direction_BFD, fields_BFD.mT)
    rows, columns = torch.triu_indices(fields_BFD.shape[1], fields_BFD.shape[1], offset=1)
    return _dot_backward(direction_BFD, gradient_BP), (crossed_BFF + crossed_BFF.mT)[:, rows, columns]


_dot.register_autograd(_first_derivative, setup_context=_keep_fields)
_dot_backward.register_autograd(_second_derivative, setup_context=_keep_fields)


@register_flop_formula([torch.ops.ziggurat.pairwise_dot, torch.ops.ziggurat.pairwise_dot_backward])
def _flops(fields_shape: tuple[int, ...], *others: object, **named: object) -> int:
    """Return the FLOPs of the reference, one product of 2·F²·D forward, one backward."""
    size, num_fields, dim = fields_shape
    return 2 * size * num_fields**2 * dim


class _Reference(torch.autograd.Function):
    """`gather(bmm(X, Xᵀ))` with the symmetric backward pass of the module docstring."""

    @staticmethod
    def forward(fields_BFD: Tensor, pair_P: Int64[Tensor, "P"], full_FF: Int64[Tensor, "F*F"]) -> Tensor:
        products_BFF = torch.bmm(fields_BFD, fields_BFD.mT)
        return products_BFF.flatten(1).gather(1, pair_P.expand(fields_BFD.shape[0], -1))

    @staticmethod
    def setup_context(ctx: SavedCtx, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        fields_BFD, _, full_FF = inputs
        ctx.save_for_backward(fields_BFD, full_FF)

    @staticmethod
    def backward(ctx: SavedCtx, *gradients: Tensor) -> tuple[Tensor, None, None]:
        fields_BFD, full_FF = ctx.saved_tensors
        batch_size, num_fields, _ = fields_BFD.shape
        symmetric_BFF = gradients[0].gather(1, full_FF.expand(batch_size, -1)).view(-1, num_fields, num_fields)
        # `full` names any pair on the diagonal, and no field is paired with itself.
        symmetric_BFF.diagonal(dim1=1, dim2=2).zero_()
        return torch.bmm(symmetric_BFF, fields_BFD), None, None
