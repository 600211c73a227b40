"""Search of INT8 rows: clusters near a query, those of their rows that pass a mask, dot products, best k, in one pass.

    rows      N × R uint8    number + 128, R = D rounded up to a multiple of 16; a row fills whole cache lines
    scales    N FP32         row = scale · (stored − 128)
    offsets   C + 1 int64    cluster c holds the rows offsets[c] … offsets[c + 1] − 1
    centroids C × R, C, C    the same form, and the reach of each cluster: what its best row is expected to add

A query is rounded to INT8 too (largest number → 127). Then, for each query:

1. score every cluster: dot · scale + |query| · reach; look into the `probes` best, and into
   more while fewer than `least` rows pass;
2. list the rows of these clusters whose bit is set in the mask (64 a word; bits as in `ops.bitmask`);
3. score sixteen rows at a time: exact 32-bit dot product, one rounding to FP32, one product with the row's scale;
4. keep the best k by (score, smaller position) in a buffer of 3k keys of 64 bits, cut when full: no sort of all scores.

All sums are of integers, and each rounding is written down, so the kernel equals the reference below bit for bit,
whatever instructions it uses: AVX-512 VNNI (64 products an instruction), AVX2, or plain C++, chosen when it runs.

Rows are not interleaved by sixteen, as is usual for such kernels: summing across a row costs three cycles more, but
a scan waits for memory, not for sums, and a filter that lets 1 % pass then reads 1 % of the rows, not all of them.

Sources: cluster-sorted rows with a mask in the same order: SilverTorch (arXiv 2511.14881, section 4); inverted file:
Jégou et al., "Product quantization for nearest neighbor search", 2011.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Float32, Int64, UInt8
from torch import Tensor

from ziggurat.errors import DataError
from ziggurat.ops.bitmask import unpack_mask_reference
from ziggurat.ops.cpp_build import CppSource, kernel_line

ROW_MULTIPLE = 16
_ZERO = 128  # what a stored number has too much
_LARGEST_CODE = 127
_LEAST_LARGEST = 1e-30  # vectors that are smaller than this everywhere are rounded to zeros

_SOURCE = CppSource(
    path=Path(__file__).parent / "csrc" / "scan.cpp",
    flags=("-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-w"),
    depends_on=torch.__version__,  # whose OpenMP it shares
    without="go on without: torch's own operations find the same, slower",
)


Masks = Int64[Tensor, "Q W"] | Int64[Tensor, "W"] | Sequence[Int64[Tensor, "W"] | None] | None


class ScanPath(IntEnum):
    """Instructions of the kernel; the numbers are those of `csrc/scan.cpp`."""

    PLAIN = 0
    AVX2 = 1
    AVX512_VNNI = 2


class Found(NamedTuple):
    """The best rows of each query, best first; −∞ and −1 where fewer than k were found.

    Args:
        scores: inner products with the rows as they are stored.
        positions: numbers of the rows.
    """

    scores: Float32[Tensor, "Q K"]
    positions: Int64[Tensor, "Q K"]


class Rows(NamedTuple):
    """Vectors in INT8: `scales · (codes − 128)`, padded with zeros to a multiple of 16 columns."""

    codes: UInt8[Tensor, "N R"]
    scales: Float32[Tensor, "N"]


@dataclass(frozen=True, kw_only=True, eq=False)
class ScanTables:
    """What a search reads; all contiguous. A table of rows alone has no clusters."""

    dim: int
    rows: Rows
    offsets: Int64[Tensor, "C+1"]
    centroids: Rows
    centroid_reach: Float32[Tensor, "C"]

    @functools.cached_property
    def _pointer(self) -> Any:
        tensors = (*self.rows, self.offsets, *self.centroids, self.centroid_reach)
        addresses = (each.data_ptr() for each in tensors)
        return ctypes.pointer(_Tables(*addresses, *self.rows.codes.shape, self.dim, len(self.offsets) - 1))


class _Tables(ctypes.Structure):  # as Tables in scan.cpp
    _fields_ = [(f"pointer_{i}", c_void_p) for i in range(6)] + [(f"number_{i}", c_int64) for i in range(4)]


def quantize_rows(vectors: Float[Tensor, "N D"]) -> Rows:
    """Round every vector to INT8, its largest number to ±127; the padding is zeros."""
    largest = vectors.abs().amax(dim=1).float().clamp(min=_LEAST_LARGEST) if len(vectors) else vectors.new_zeros(0)
    codes = torch.round(vectors.float() * (_LARGEST_CODE / largest).unsqueeze(1)).to(torch.int16) + _ZERO
    missing = -vectors.shape[1] % ROW_MULTIPLE
    padded = torch.nn.functional.pad(codes.to(torch.uint8), (0, missing), value=_ZERO)
    return Rows(padded.contiguous(), (largest / _LARGEST_CODE).float())


def dequantize_rows(rows: Rows, *, dim: int) -> Float32[Tensor, "N D"]:
    """The vectors that INT8 rows stand for."""
    return (rows.codes[:, :dim].float() - _ZERO) * rows.scales.unsqueeze(1)


def scan_clusters(
    tables: ScanTables,
    queries: Float[Tensor, "Q D"],
    *,
    k: int,
    probes: int | Int64[Tensor, "Q"],
    least: int | Int64[Tensor, "Q"],
    masks: Masks = None,
    path: ScanPath | None = None,
) -> Found:
    """`scan_clusters_reference` by the fastest implementation that serves this input.

    Args:
        tables: what is searched.
        queries: finite numbers.
        k: rows wanted for each query.
        probes: clusters to look into, at least one, for all queries or for each.
        least: look into further clusters until so many rows have passed.
        masks: bits of the rows that may be returned: one mask for all queries, or one each; None: all rows.
        path: instructions to use, for tests; the best that the processor has, if not given.

    Raises:
        DataError: a query has a number that is not finite.
    """
    library = _library_for(queries)
    if library is None:
        _refuse_not_finite(queries)
        return scan_clusters_reference(tables, queries, k=k, probes=probes, least=least, masks=masks)
    queries = _plain(queries)
    num, pointers = len(queries), None
    (looked_into, probes_stride), (passing, least_stride) = _numbers(probes), _numbers(least)
    scores, positions = torch.empty(num, k), torch.empty(num, k, dtype=torch.int64)
    each_mask = _mask_of_each(masks, num)
    if each_mask is not None:
        pointers = (c_void_p * num)(*(None if mask is None else mask.data_ptr() for mask in each_mask))
    bad = library.ziggurat_scan_clusters(
        tables._pointer,
        queries.data_ptr(),
        num,
        pointers,
        _address(looked_into),
        probes_stride,
        _address(passing),
        least_stride,
        k,
        scores.data_ptr(),
        positions.data_ptr(),
        _best_path() if path is None else path,
        torch.get_num_threads(),
    )
    if bad >= 0:
        raise _not_finite(queries, bad)
    return Found(scores, positions)


def scan_rows(
    tables: ScanTables,
    queries: Float[Tensor, "Q D"],
    *,
    k: int,
    rows: Sequence[Int64[Tensor, "_"] | None],
    path: ScanPath | None = None,
) -> Found:
    """`scan_rows_reference` by the fastest implementation that serves this input.

    Args:
        tables: what is searched; its clusters are not read.
        queries: finite numbers.
        k: rows wanted for each query.
        rows: numbers of the rows to score for each query; None: all.
        path: instructions to use, for tests; the best that the processor has, if not given.

    Raises:
        DataError: a query has a number that is not finite.
    """
    library = _library_for(queries)
    if library is None:
        _refuse_not_finite(queries)
        return scan_rows_reference(tables, queries, k=k, rows=rows)
    queries, num = _plain(queries), len(queries)
    lists = [None if each is None else each.contiguous() for each in rows]
    scores, positions = torch.empty(num, k), torch.empty(num, k, dtype=torch.int64)
    bad = library.ziggurat_scan_rows(
        tables._pointer,
        queries.data_ptr(),
        num,
        (c_void_p * num)(*(None if each is None else each.data_ptr() or 1 for each in lists)),
        (c_int64 * num)(*(len(tables.rows.codes) if each is None else len(each) for each in lists)),
        k,
        scores.data_ptr(),
        positions.data_ptr(),
        _best_path() if path is None else path,
        torch.get_num_threads(),
    )
    if bad >= 0:
        raise _not_finite(queries, bad)
    return Found(scores, positions)


def scan_clusters_reference(
    tables: ScanTables,
    queries: Float[Tensor, "Q D"],
    *,
    k: int,
    probes: int | Int64[Tensor, "Q"],
    least: int | Int64[Tensor, "Q"],
    masks: Masks = None,
) -> Found:
    """Define what `scan_clusters` finds, step by step in torch."""
    found, num = _empty(queries, k), len(tables.rows.codes)
    probes, least = (_tensor(each, like=queries) for each in (probes, least))
    sizes = tables.offsets.diff()
    cluster_of = torch.repeat_interleave(sizes)
    each_mask = _mask_of_each(masks, len(queries)) or [None] * len(queries)
    for q, (query, mask) in enumerate(zip(queries, each_mask, strict=True)):
        every = torch.ones(num, dtype=torch.bool, device=queries.device)
        passes = every if mask is None else unpack_mask_reference(mask, num)
        codes, scale, norm = _round_query(query)
        order = _best_first(_scores(tables.centroids, codes) + norm * tables.centroid_reach)
        passing = torch.zeros_like(sizes).index_add_(0, cluster_of, passes.long())[order]
        before = passing.cumsum(0) - passing  # rows that passed when a cluster's turn comes
        ranks = torch.arange(len(order), device=queries.device)
        wanted = order[(ranks < probes[q].clamp(min=1)) | (before < least[q])]
        _keep_best(found, q, tables, codes, scale, (passes & torch.isin(cluster_of, wanted)).nonzero().view(-1))
    return found


def scan_rows_reference(
    tables: ScanTables, queries: Float[Tensor, "Q D"], *, k: int, rows: Sequence[Int64[Tensor, "_"] | None]
) -> Found:
    """Define what `scan_rows` finds, step by step in torch."""
    found = _empty(queries, k)
    for q, (query, own) in enumerate(zip(queries, rows, strict=True)):
        codes, scale, _ = _round_query(query)
        own = torch.arange(len(tables.rows.codes), device=queries.device) if own is None else own.sort().values
        _keep_best(found, q, tables, codes, scale, own)
    return found


def best_path() -> ScanPath:
    """The widest instructions that this processor has."""
    return ScanPath(_best_path())


@functools.cache
def _best_path() -> int:
    library = _library_or_reason()[0]
    return int(ScanPath.PLAIN) if library is None else int(library.ziggurat_scan_path())


def scan_kernel() -> str:
    """Which implementation searches on the CPU here, and why; builds the kernel if need be."""
    reason = _library_or_reason()[1]
    return kernel_line(reason) if reason else f"{kernel_line('')}, {best_path().name.replace('_', ' ')}"


def _round_query(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The INT8 numbers of a query, what one of them is worth, and their length."""
    largest = query.float().abs().max().clamp(min=_LEAST_LARGEST)
    codes = torch.round(query.float() * (_LARGEST_CODE / largest)).to(torch.int64)
    return codes, largest / _LARGEST_CODE, (codes * codes).sum().float().sqrt()


def _scores(rows: Rows, codes: Tensor) -> Tensor:
    """Exact dot products, rounded to FP32 once, times the scales. FP64 holds the sums exactly."""
    dots = (rows.codes[:, : len(codes)].double() - _ZERO) @ codes.double()
    return dots.float() * rows.scales + 0.0  # −0 is 0


def _best_first(scores: Tensor) -> Tensor:
    return scores.sort(descending=True, stable=True).indices


def _keep_best(found: Found, q: int, tables: ScanTables, codes: Tensor, scale: Tensor, own: Tensor) -> None:
    """Write the best of the rows `own`, which are ascending."""
    scores = _scores(Rows(tables.rows.codes[own], tables.rows.scales[own]), codes)
    order = _best_first(scores)[: found.scores.shape[1]]
    found.scores[q, : len(order)] = scores[order] * scale
    found.positions[q, : len(order)] = own[order]


def _plain(queries: Tensor) -> Tensor:
    if queries.dtype is torch.float32 and queries.is_contiguous() and not queries.requires_grad:
        return queries
    return queries.detach().to(torch.float32).contiguous()


def _mask_of_each(masks: Masks, num: int) -> list[Tensor | None] | None:
    """The mask of each query, in contiguous memory that the result keeps."""
    if masks is None:
        return None
    if isinstance(masks, Tensor):
        masks = [masks] * num if masks.dim() == 1 else list(masks)
    return [None if mask is None else mask.contiguous() for mask in masks]


def _numbers(value: int | Tensor) -> tuple[Any, int]:
    """The numbers of the queries, and how far apart they are: one for all, or one each."""
    if isinstance(value, Tensor):
        value = value.to(torch.int64).contiguous()
        return value, 1
    return c_int64(value), 0


def _address(numbers: Any) -> Any:
    return numbers.data_ptr() if isinstance(numbers, Tensor) else ctypes.byref(numbers)


def _tensor(value: int | Tensor, *, like: Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else torch.full((len(like),), value, device=like.device)


def _empty(queries: Tensor, k: int) -> Found:
    shape, device = (len(queries), k), queries.device
    positions = torch.full(shape, -1, dtype=torch.int64, device=device)
    return Found(torch.full(shape, -torch.inf, device=device), positions)


def _refuse_not_finite(queries: Tensor) -> None:
    bad = ~queries.isfinite().all(dim=1)
    if bad.any():
        raise _not_finite(queries, int(bad.nonzero()[0]))


def _not_finite(queries: Tensor, row: int) -> DataError:
    column = int((~queries[row].isfinite()).nonzero()[0])
    return DataError(
        expected="query vectors of finite numbers",
        found=f"{queries[row, column].item()} in column {column}",
        where=f"search, query {row}",
        ways_out=("look for NaN in what the user encoder reads", "look whether the training of the encoder diverged"),
    )


def _library_for(queries: Tensor) -> ctypes.CDLL | None:
    if queries.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    return _library_or_reason()[0]


@functools.cache
def _library_or_reason() -> tuple[ctypes.CDLL | None, str]:
    """The compiled library, or why there is none; tried once a process."""
    return _SOURCE.load_or_reason(_declare)


def _declare(library: ctypes.CDLL) -> None:
    """Say which arguments the functions of the library take."""
    pointer, number = c_void_p, c_int64
    library.ziggurat_scan_clusters.argtypes = [
        *(pointer, pointer, number, pointer, pointer, number, pointer, number),
        *(number, pointer, pointer, number, number),
    ]
    library.ziggurat_scan_rows.argtypes = [
        *(pointer, pointer, number, pointer, pointer),
        *(number, pointer, pointer, number, number),
    ]
    library.ziggurat_scan_path.argtypes = []
    for name in ("scan_clusters", "scan_rows", "scan_path"):
        getattr(library, f"ziggurat_{name}").restype = c_int64
