"""Embedding tables by Triton, on CUDA devices: lookups, and exact updates by sorted runs of rows."""

from ziggurat.ops.lookup.triton.kernel import TritonKernel

__all__ = ["TritonKernel"]
