"""Propagation by Triton: a program holds a row of the result, and a block of its edges at a time.

The edges that take part of a long row are chosen inside the kernel, as ES-SpMM does on a GPU (arXiv 2104.10716): what
is not chosen is never read. Sums of a block are added in the order of a tree, so the result is that of the reference up
to the rounding of FP32, and the same each time. Held to the reference by Triton's interpreter; not timed on a GPU yet.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ziggurat.ops.graph.edge_sampling import PRIME, EdgeSampling, EdgeStrategy
from ziggurat.ops.graph.graph import Graph
from ziggurat.ops.kernel_choice import is_interpreted, kernels_of, power_of_two, why_no_triton

GRAPH_KERNELS = "ziggurat.ops.graph.triton_kernels"
_EDGES = 32  # of a block: their features stand in registers
_MOST_COLUMNS = 128  # of a program
_SERVED = (torch.float32, torch.bfloat16)


def why_not_triton(x_CD: Tensor, *, base: Tensor | None, dtype: torch.dtype) -> str:
    """Return the reason why the kernel cannot serve features; "" if it can.

    Args:
        x_CD: features.
        base: what sums start with, or None.
        dtype: of the result.
    """
    if x_CD.dtype not in _SERVED or dtype not in _SERVED or (base is not None and base.dtype != torch.float32):
        return f"features in {x_CD.dtype}, a result in {dtype}"
    return why_no_triton(GRAPH_KERNELS, x_CD, what="features")


def propagate_triton(
    graph: Graph,
    x_CD: Float[Tensor, "C D"],
    *,
    rows: Int64[Tensor, "Q"] | None,
    base: Float[Tensor, "Q D"] | None,
    scale: float,
    dtype: torch.dtype,
    sampling: EdgeSampling | None,
) -> Float[Tensor, "Q D"]:
    """Compute `propagate_reference` where `why_not_triton` has no reason against it."""
    num_rows = graph.num_rows if rows is None else len(rows)
    dim = x_CD.shape[1]
    out_QD = torch.empty(num_rows, dim, dtype=dtype, device=x_CD.device)
    if not out_QD.numel():
        return out_QD
    x_CD = x_CD.contiguous()
    block_dim = min(_MOST_COLUMNS, power_of_two(dim))
    kernels_of(GRAPH_KERNELS).propagate_kernel[(num_rows, -(-dim // block_dim))](
        graph.offsets,
        graph.columns,
        graph.weights,
        x_CD,
        # Pointers that are not read, where there is nothing to point at.
        graph.offsets if rows is None else rows.contiguous(),
        graph.weights if base is None else base.contiguous(),
        out_QD,
        dim,
        1 if sampling is None else sampling.width,
        0 if sampling is None else sampling.key,
        PRIME,
        scale,
        has_rows=rows is not None,
        has_base=base is not None,
        is_sampled=sampling is not None,
        is_random=sampling is not None and sampling.strategy is EdgeStrategy.FAST_RAND,
        rescales=sampling is not None and sampling.rescales,
        block_edges=_EDGES,
        block_dim=block_dim,
        interpreted=is_interpreted(),
    )
    return out_QD
