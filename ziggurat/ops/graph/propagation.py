"""Propagation over a graph: weighted sums of the rows of neighbours, and the average over layers of them.

    propagate        y_r = Σ_e w_e · x_{column e}            over the edges e of row r
    layer_average    1 / (K + 1) · (x + A x + A² x + … + A^K x)      LightGCN (arXiv 2002.02126, equations 3, 4 and 8)

*Why not torch.sparse?* Its product (MKL) reads rows of 256 bytes one after the other and waits for each. Here the sums
of a row stand in registers while its edges pass by, and the rows of edges to come are asked for meanwhile. Features in
BF16 are half the bytes; sums are FP32 either way. Layers lie on pages of 2 MiB where the system gives them.

*The average by Horner's rule.* x + A (x + A (x + A x)) needs one matrix beside x, and each product starts its sums with
x in place of zero: no pass over memory for the sum of the layers. Of the last product only the rows that are asked for
are computed.

*Backward.* The gradient of the average is the average of the gradient over the transposed graph: the same products,
with the same kernel; a graph of users and items is its own transpose.

The references define both. C++ serves FP32 and BF16 on the CPU, outside of torch.compile; a row is summed by one thread
in the order of its edges, so results do not depend on the number of threads. On GPUs Triton does (`triton.py`).
`propagation_kernel()` says which runs on the CPU.

Cost of a product: 2·E·D FLOPs and E·D·4 bytes read (2 in BF16) from wherever x lies.
"""

from __future__ import annotations

import ctypes
import warnings
from ctypes import c_float, c_int64, c_void_p
from pathlib import Path
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ziggurat.ops.cpp_build import CppLibrary, CppSource
from ziggurat.ops.function_ctx import SavedCtx
from ziggurat.ops.graph.edge_sampling import EdgeSampling, EdgeStrategy, sampled
from ziggurat.ops.graph.graph import Graph
from ziggurat.ops.graph.triton import propagate_triton, why_not_triton
from ziggurat.ops.kernel_choice import library_for
from ziggurat.ops.machine.huge_pages import advise_huge_pages

_SOURCE = CppSource(
    path=Path(__file__).parents[1] / "csrc" / "graph.cpp",
    flags=("-fopenmp", "-fno-math-errno"),
    depends_on=torch.__version__,  # whose OpenMP it shares
    without="go on without: torch.sparse computes the same sums, slower",
)
_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
_STRATEGY = {EdgeStrategy.BUCKET: 0, EdgeStrategy.FAST_RAND: 1}


def propagate_reference(
    graph: Graph,
    x_CD: Float[Tensor, "C D"],
    *,
    rows: Int64[Tensor, "Q"] | None = None,
    base: Float[Tensor, "Q D"] | None = None,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    sampling: EdgeSampling | None = None,
) -> Float[Tensor, "Q D"]:
    """Return scale · (base + A x) for some rows of A, by torch.sparse.

    Args:
        graph: A, R rows and C columns.
        x_CD: features of the columns, FP32 or BF16.
        rows: which rows of A; None: all.
        base: FP32, one row for each of those; None: zeros.
        scale: of the sum.
        dtype: of the result, float32 or bfloat16.
        sampling: which edges of long rows take part; None: all.
    """
    if sampling is not None:
        graph = sampled(graph, sampling)
    sums_RD = _matrix(graph) @ x_CD.float()
    if rows is not None:
        sums_RD = sums_RD[rows]
    if base is not None:
        sums_RD = base + sums_RD
    return (scale * sums_RD).to(dtype)


def propagate(
    graph: Graph,
    x_CD: Float[Tensor, "C D"],
    *,
    rows: Int64[Tensor, "Q"] | None = None,
    base: Float[Tensor, "Q D"] | None = None,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    sampling: EdgeSampling | None = None,
) -> Float[Tensor, "Q D"]:
    """Compute `propagate_reference` by the fastest implementation that serves these inputs; knows no gradients.

    `rows` must be rows of the graph: the kernel does not look.
    """
    asked: dict[str, Any] = {"rows": rows, "base": base, "scale": scale, "dtype": dtype, "sampling": sampling}
    fits = x_CD.shape[0] == graph.num_columns
    if fits and not why_not_triton(x_CD, base=base, dtype=dtype):
        return propagate_triton(graph, x_CD, **asked)
    library = _library(x_CD, base, dtype)
    if library is None or not fits:
        return propagate_reference(graph, x_CD, **asked)
    num_rows = graph.num_rows if rows is None else len(rows)
    x_CD = x_CD.contiguous()
    base = None if base is None else base.contiguous()
    out_QD = torch.empty(num_rows, x_CD.shape[1], dtype=dtype)
    # The next product reads its rows in the order of edges.
    advise_huge_pages(out_QD)
    function = getattr(library, f"ziggurat_propagate_{_SUFFIX[x_CD.dtype]}_{_SUFFIX[dtype]}")
    function(
        graph.offsets.data_ptr(),
        graph.columns.data_ptr(),
        graph.weights.data_ptr(),
        graph.num_edges,
        x_CD.data_ptr(),
        x_CD.shape[1],
        None if rows is None else rows.contiguous().data_ptr(),
        num_rows,
        None if base is None else base.data_ptr(),
        scale,
        out_QD.data_ptr(),
        0 if sampling is None else sampling.width,
        0 if sampling is None else _STRATEGY[sampling.strategy],
        int(sampling is not None and sampling.rescales),
        0 if sampling is None else sampling.key,
        torch.get_num_threads(),
    )
    return out_QD


def layer_average_reference(
    graph: Graph, x_ND: Float[Tensor, "N D"], *, num_layers: int, rows: Int64[Tensor, "Q"] | None = None
) -> Float[Tensor, "Q D"]:
    """Return rows of the mean of x, A x, …, A^K x: layer after layer, differentiable, by torch.sparse."""
    matrix = _matrix(graph)
    layer_ND = x_ND
    total_ND = x_ND
    for _ in range(num_layers):
        layer_ND = matrix @ layer_ND
        total_ND = total_ND + layer_ND
    mean_ND = total_ND / (num_layers + 1)
    return mean_ND if rows is None else mean_ND[rows]


def layer_average(
    graph: Graph,
    x_ND: Float[Tensor, "N D"],
    *,
    num_layers: int,
    rows: Int64[Tensor, "Q"] | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Float[Tensor, "Q D"], Float[Tensor, "Q D"]]:
    """Compute rows of `layer_average_reference` and of x by the fastest implementation, differentiable by x.

    Args:
        graph: A, a square matrix.
        x_ND: layer 0, FP32.
        num_layers: K.
        rows: of both results, any number of times each; None: all.
        dtype: in which layers are kept, float32 or bfloat16; sums are FP32.

    Returns:
        The average of the layers, and layer 0 itself, whose gradient is added without a pass over all rows.
    """
    if rows is None:
        return _LayerAverage.apply(x_ND, graph, None, num_layers, dtype)[0], x_ND
    # Popular rows have many edges: each is summed once.
    distinct_U, inverse_Q = torch.unique(rows, return_inverse=True)
    mean_UD, first_UD = _LayerAverage.apply(x_ND, graph, distinct_U, num_layers, dtype)
    return mean_UD.index_select(0, inverse_Q), first_UD.index_select(0, inverse_Q)


def propagation_kernel() -> str:
    """Return the line of `ziggurat doctor` about these kernels."""
    return _LIBRARY.kernel_line()


class _AverageCtx(SavedCtx, Protocol):
    graph: Graph
    num_layers: int
    dtype: torch.dtype
    has_rows: bool


class _LayerAverage(torch.autograd.Function):
    """The average of layers and layer 0 in distinct rows, by Horner's rule forward and backward."""

    @staticmethod
    def forward(
        ctx: _AverageCtx, x_ND: Tensor, graph: Graph, rows: Tensor | None, num_layers: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        ctx.graph = graph
        ctx.num_layers = num_layers
        ctx.dtype = dtype
        ctx.has_rows = rows is not None
        ctx.save_for_backward(*(() if rows is None else (rows,)))
        first_UD = x_ND.new_empty(0) if rows is None else x_ND.index_select(0, rows)
        return _average(graph, x_ND, rows=rows, first=first_UD, num_layers=num_layers, dtype=dtype), first_UD

    @staticmethod
    def backward(ctx: _AverageCtx, grad_UD: Tensor, first_UD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad_ND = grad_UD
        if ctx.has_rows:
            (rows,) = ctx.saved_tensors
            grad_ND = grad_UD.new_zeros(ctx.graph.num_rows, grad_UD.shape[1])
            # Rows are distinct, so that a copy is a sum.
            grad_ND.index_copy_(0, rows, grad_UD)
        graph = ctx.graph.transposed()
        grad_ND = _average(graph, grad_ND, rows=None, first=grad_ND, num_layers=ctx.num_layers, dtype=ctx.dtype)
        if ctx.has_rows:
            grad_ND.index_add_(0, ctx.saved_tensors[0], first_UD)
        return grad_ND, None, None, None, None


def _average(
    graph: Graph, x_ND: Tensor, *, rows: Tensor | None, first: Tensor, num_layers: int, dtype: torch.dtype
) -> Tensor:
    """Return rows of x + A (x + A (x + …)), divided by K + 1; `first` are those of x."""
    base_QD = x_ND if rows is None else first
    if not num_layers:
        return base_QD.clone()
    layer_ND = x_ND
    if dtype is not x_ND.dtype:
        layer_ND = torch.empty_like(x_ND, dtype=dtype)
        advise_huge_pages(layer_ND)
        layer_ND.copy_(x_ND)
    for _ in range(num_layers - 1):
        layer_ND = propagate(graph, layer_ND, base=x_ND, dtype=dtype)
    return propagate(graph, layer_ND, rows=rows, base=base_QD, scale=1.0 / (num_layers + 1))


def _matrix(graph: Graph) -> Tensor:
    size = (graph.num_rows, graph.num_columns)
    with warnings.catch_warnings():
        # torch says once that its CSR tensors are in beta state.
        warnings.simplefilter("ignore")
        # torch.sparse wants both kinds of indices in one type.
        return torch.sparse_csr_tensor(graph.offsets, graph.columns.long(), graph.weights, size, check_invariants=False)


def _library(x_CD: Tensor, base: Tensor | None, dtype: torch.dtype) -> ctypes.CDLL | None:
    """Return the library, if it serves these types: BF16 results are those of BF16 features."""
    is_known = x_CD.dtype in _SUFFIX and dtype in _SUFFIX and (base is None or base.dtype is torch.float32)
    if not is_known or (x_CD.dtype is torch.float32 and dtype is torch.bfloat16):
        return None
    return library_for(x_CD, _LIBRARY)


def _declare(library: ctypes.CDLL) -> None:
    for name in ("f32_f32", "bf16_bf16", "bf16_f32"):
        function = getattr(library, f"ziggurat_propagate_{name}")
        function.argtypes = [
            *[c_void_p] * 3,
            c_int64,
            c_void_p,
            c_int64,
            c_void_p,
            c_int64,
            c_void_p,
            c_float,
            c_void_p,
            *[c_int64] * 5,
        ]
        function.restype = None


_LIBRARY = CppLibrary(_SOURCE, declare=_declare)
