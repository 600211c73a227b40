"""Vectors as INT8 rows in two planes of four bits, and the tables of rows that a search reads.

    number     −127 … 127, times the row's scale;  stored: number + 128 = 16 · upper + lower
    plane      N × R/2 bytes, R = D rounded up to a multiple of 16; byte j of a row holds number j and number j + R/2

The upper bits alone are a row of four bits a number: 15/2 stands for the lower ones. A search that looks at these first
reads half of the memory, and no number is stored twice.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Float32, Int64, UInt8
from torch import Tensor

ROW_MULTIPLE = 16
ZERO = 128  # what a stored number has too much
LARGEST_CODE = 127
# Rows that are rounded together; beside them only the result is in memory.
_AT_A_TIME = 262_144
MIN_LARGEST = 1e-30  # vectors that are smaller than this everywhere are rounded to zeros

Masks = Int64[Tensor, "Q W"] | Int64[Tensor, "W"] | Sequence[Int64[Tensor, "W"] | None] | None


class Found(NamedTuple):
    """The best rows of each query, best first; −∞ and −1 where fewer than k were found.

    Args:
        scores: inner products with the rows as they are stored.
        positions: numbers of the rows.
    """

    scores: Float32[Tensor, "Q K"]
    positions: Int64[Tensor, "Q K"]


class Rows(NamedTuple):
    """Vectors in INT8, `scales · (16 · upper + lower − 128)`, padded with zeros to a multiple of 16 columns.

    Args:
        upper: the upper four bits of the numbers, two in a byte.
        lower: the lower four bits, likewise.
        scales: what one is worth.
    """

    upper: UInt8[Tensor, "N H"]
    lower: UInt8[Tensor, "N H"]
    scales: Float32[Tensor, "N"]

    def at(self, positions: Int64[Tensor, "M"] | slice) -> Rows:
        """Some of the rows."""
        return Rows(self.upper[positions], self.lower[positions], self.scales[positions])


@dataclass(frozen=True, kw_only=True, eq=False)
class ScanTables:
    """Tensors that a search reads; all contiguous. A table of rows alone has no clusters.

    Args:
        dim: numbers of a vector.
        rows: sorted by cluster.
        offsets: cluster c holds the rows `offsets[c]` to `offsets[c + 1] − 1`.
        centroids: means of the clusters.
        centroid_reach: what the best row of a cluster is expected to add to the mean's product, by the query's length.
    """

    dim: int
    rows: Rows
    offsets: Int64[Tensor, "C+1"]
    centroids: Rows
    centroid_reach: Float32[Tensor, "C"]

    @functools.cached_property
    def num_rows(self) -> int:
        """Rows of the table."""
        return len(self.rows.scales)

    @functools.cached_property
    def num_clusters(self) -> int:
        """Clusters of the table."""
        return len(self.offsets) - 1

    def most_rows(self, probes: int, *, least: int) -> int:
        """Return a bound on the rows of the clusters that a search looks into where all rows pass.

        Args:
            probes: clusters to look into, at least one.
            least: look into further clusters until so many rows have passed.
        """
        ends = self._largest_clusters
        by_probes = ends[min(max(probes, 1), len(ends)) - 1]
        by_least = least - 1 + ends[0]  # what passed before the last cluster was too little
        return min(self.num_rows, max(by_probes, by_least))

    def most_clusters(self, probes: int, *, least: int) -> int:
        """Return a bound on the clusters that a search looks into where all rows pass; arguments as for `most_rows`."""
        by_least = bisect.bisect_left(self._smallest_clusters, least)
        return min(self.num_clusters, max(probes, by_least, 1))

    @functools.cached_property
    def _smallest_clusters(self) -> list[int]:
        """Rows before the first of the smallest clusters, before the second, …"""
        ends = self._largest_clusters
        return [self.num_rows - end for end in reversed(ends)]

    @functools.cached_property
    def _largest_clusters(self) -> list[int]:
        """Rows of the largest cluster, of the two largest together, …; asked of the device once."""
        return self.offsets.diff().sort(descending=True).values.cumsum(0).tolist()

    @functools.cached_property
    def pointer(self) -> ctypes._Pointer[_Tables]:
        """The pointer that `csrc/scan.cpp` takes."""
        # The order of Tables in scan.cpp; the addresses stay good since the tensors are fields of a frozen object.
        addresses = [each.data_ptr() for each in (*self.rows, *self.centroids, self.offsets, self.centroid_reach)]
        return ctypes.pointer(_Tables(*addresses, *self.rows.upper.shape, self.dim, self.num_clusters))

    @functools.cached_property
    def address(self) -> int:
        """The address that `pointer` points to, for a list of pointers."""
        return ctypes.addressof(self.pointer.contents)


class _Tables(ctypes.Structure):  # as Tables in scan.cpp
    _fields_ = [(f"pointer_{i}", c_void_p) for i in range(8)] + [(f"number_{i}", c_int64) for i in range(4)]


def quantize_rows(vectors: Float[Tensor, "N D"], *, order: Int64[Tensor, "M"] | None = None) -> Rows:
    """Round every vector to INT8, its largest number to ±127; the padding is zeros.

    Args:
        vectors: finite numbers.
        order: numbers of the vectors that become rows; all in their order unless given. Rows are then written where
            they stay, some at a time, so that nothing else is as large as they are.
    """
    if order is None:
        return _rounded(vectors)
    whole = Rows(*(each.new_empty(len(order), *each.shape[1:]) for each in _rounded(vectors[:0])))
    for begin in range(0, len(order), _AT_A_TIME):
        some = slice(begin, begin + _AT_A_TIME)
        for buffer, part in zip(whole, _rounded(vectors[order[some]]), strict=True):
            buffer[some] = part
    return whole


def _rounded(vectors: Tensor) -> Rows:
    largest = vectors.abs().amax(dim=1).float().clamp(min=MIN_LARGEST) if len(vectors) else vectors.new_zeros(0)
    codes = torch.round(vectors.float() * (LARGEST_CODE / largest).unsqueeze(1)).to(torch.int16) + ZERO
    missing = -vectors.shape[1] % ROW_MULTIPLE
    padded = torch.nn.functional.pad(codes.to(torch.uint8), (0, missing), value=ZERO)
    return Rows(*split_codes(padded), (largest / LARGEST_CODE).float())


def split_codes(codes: UInt8[Tensor, "N R"]) -> tuple[UInt8[Tensor, "N H"], UInt8[Tensor, "N H"]]:
    """Stored numbers of eight bits as the planes of their upper and of their lower four."""
    half = codes.shape[1] // 2
    # Numbers j and j + R/2 share a byte: both halves of a row then unpack without a shuffle.
    upper, lower = ((plane[:, :half] | (plane[:, half:] << 4)) for plane in (codes >> 4, codes & 15))
    return upper, lower


def plane_numbers(plane: UInt8[Tensor, "N H"]) -> UInt8[Tensor, "N R"]:
    """The numbers of a plane, 0 to 15, in order."""
    return torch.cat([plane & 15, plane >> 4], dim=1)


def dequantize_rows(rows: Rows, *, dim: int) -> Float32[Tensor, "N D"]:
    """The vectors that INT8 rows stand for."""
    codes = 16.0 * plane_numbers(rows.upper)[:, :dim] + plane_numbers(rows.lower)[:, :dim]
    return (codes - ZERO) * rows.scales.unsqueeze(1)
