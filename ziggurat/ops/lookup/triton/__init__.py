"""Embedding tables by Triton, on CUDA devices: lookups, and exact updates by sorted runs of rows."""

from ziggurat.ops.lookup.triton.kernel import TritonKernel, sums_without_waiting

__all__ = ["TritonKernel", "sums_without_waiting"]
