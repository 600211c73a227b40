"""The dense network compiled: which form of torch.compile, and whether its kernels are started as CUDA graphs.

    eager           the host starts every kernel: at small batches a GPU waits for it
    compiled        fewer kernels
    CUDA graphs     one start for the forward pass, one for the backward pass; the same shapes every time, so for full
                    batches alone: the last batch of an epoch, and evaluations, stay eager

Graphs end where the dense network does. Lookups, and updates of tables, depend on which rows a batch has; exchanges and
reductions of many ranks are hooks on weights and outputs, between the graphs. A graph writes what it gives into the
same memory each time, so every step begins by telling torch that it is through with that of the step before.
"""

from __future__ import annotations

import torch

from ziggurat.cache import keep_compiled_code
from ziggurat.models import Embedded, Outputs
from ziggurat.parallel.dense import DenseForward
from ziggurat.training.config import Compile


def why_no_graphs(mode: Compile, *, device: torch.device) -> str:
    """Say why full batches are not started as CUDA graphs, or return "" if they are."""
    if mode is not Compile.CUDA_GRAPHS:
        return f"compile is {mode.value}"
    return "" if device.type == "cuda" else f"the run computes on {device.type}"


def compiled_dense(forward_dense: DenseForward, mode: Compile, *, device: torch.device) -> DenseForward:
    """The dense network of a model, compiled as asked; artifacts are cached for the next process."""
    if mode is Compile.OFF:
        return forward_dense
    keep_compiled_code()
    has_graphs = not why_no_graphs(mode, device=device)
    inductor_mode = "max-autotune-no-cudagraphs" if mode is Compile.MAX_AUTOTUNE else None
    inductor_mode = "reduce-overhead" if has_graphs else inductor_mode
    compiled = torch.compile(forward_dense, fullgraph=True, dynamic=False, mode=inductor_mode)
    if not has_graphs:
        return compiled

    def graphed(embedded: Embedded) -> Outputs:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(embedded)

    return graphed
