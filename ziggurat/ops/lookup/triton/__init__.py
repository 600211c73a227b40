"""Embedding tables by Triton, on CUDA devices: lookups, and exact updates by sorted runs of rows."""

from ziggurat.ops.lookup.triton.kernel import TritonKernel, finite_without_waiting, sums_without_waiting

__all__ = ["TritonKernel", "finite_without_waiting", "sums_without_waiting"]
