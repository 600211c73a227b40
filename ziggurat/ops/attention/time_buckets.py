"""Buckets of durations: ⌊ln(max(1, |Δ|)) / 0.301⌋, at most the last one.

The duration is rounded to FP32 and compared with the FP32 number at which each bucket begins, so that every kernel
puts every duration into the same bucket, whatever its logarithm rounds to.

A kernel finds the bucket from 512 *cells*: the upper bits of the FP32 number (exponent, and three bits of mantissa).
A cell is 12.5 % wide at most and a bucket 35 %, so at most one bucket begins inside a cell: bucket = that of the
cell's first number, and one more if the duration reaches the cell's threshold.

Source: `research/modeling/sequential/hstu.py` of meta-recsys/generative-recommenders: the base 0.301, and 128 as the
last bucket.
"""

from __future__ import annotations

import functools
import math

import torch
from jaxtyping import Float32, Int32, Int64
from torch import Tensor

BASE = 0.301
NUM_CELLS = 512
_CELL_SHIFT = 20  # bits of the mantissa that a cell ignores
_ONE = 127 << 3  # the cell of 1.0


def time_buckets(durations: Int64[Tensor, "*shape"], *, num_buckets: int) -> Int64[Tensor, "*shape"]:
    """The bucket of each duration; the sign does not matter."""
    begins = bucket_begins(num_buckets)
    if durations.device.type == "cuda":
        begins = _begins_on(num_buckets, durations.device)
    return torch.bucketize(durations.abs().to(torch.float32).clamp(min=1.0), begins, right=True)


@functools.cache
def bucket_begins(num_buckets: int) -> Float32[Tensor, "K-1"]:
    """Return where bucket 1, 2, … begins."""
    # In FP64, rounded once: kernels and reference compare with the very same FP32 numbers.
    exact = [math.exp(BASE * bucket) for bucket in range(1, num_buckets)]
    return torch.tensor(exact, dtype=torch.float64).to(torch.float32)


@functools.cache
def bucket_limits(num_buckets: int) -> Int64[Tensor, "K-1"]:
    """Return the shortest duration of bucket 1, 2, …; 2⁶³ − 1 where a bucket begins further on."""
    begins = bucket_begins(num_buckets)
    low = torch.zeros(len(begins), dtype=torch.int64)
    high = torch.full_like(low, torch.iinfo(torch.int64).max)
    for _ in range(63):  # halves the interval in which it lies
        middle = low + (high - low) // 2
        reaches = middle.to(torch.float32) >= begins
        high = torch.where(reaches, middle, high)
        low = torch.where(reaches, low, middle + 1)
    return high


@functools.cache
def _begins_on(num_buckets: int, device: torch.device) -> Float32[Tensor, "K-1"]:
    """`bucket_begins` on a GPU, made once: a copy to it makes the host wait."""
    return bucket_begins(num_buckets).to(device)


@functools.cache
def bucket_cells(num_buckets: int) -> tuple[Int32[Tensor, "512"], Float32[Tensor, "512"]]:
    """The bucket at the start of each cell, and the number inside the cell at which the next one begins (or ∞)."""
    bits = (torch.arange(NUM_CELLS, dtype=torch.int32) + _ONE) << _CELL_SHIFT
    first = bits.view(torch.float32)
    last = (bits + (1 << _CELL_SHIFT) - 1).view(torch.float32)
    begins = bucket_begins(num_buckets)
    buckets, after = (torch.bucketize(edge, begins, right=True) for edge in (first, last))
    next_begin = torch.cat([begins, torch.tensor([math.inf])])[buckets]
    # A cell in which no bucket begins is never passed.
    thresholds = torch.where(after > buckets, next_begin, math.inf)
    return buckets.to(torch.int32), thresholds
