"""Search of INT8 rows: clusters near a query, those of their rows that pass a mask, dot products, best k, in one pass.

    rows      two planes N × R/2 of four bits a number (`rows.py`), and a scale a row
    offsets   C + 1 int64: cluster c holds the rows offsets[c] … offsets[c + 1] − 1
    centroids the same form, and the reach of each cluster: what its best row is expected to add

A query is rounded to INT8 too (largest number → 127). Then, for each query:

1. score every cluster: dot · scale + |query| · reach; look into the `probes` best, and into
   more while fewer than `least` rows pass;
2. list the rows of these clusters whose bit is set in the mask (64 a word; bits as in `ops.bitmask`);
3. score sixteen rows at a time by their upper four bits, and keep the best `candidates` of them; then score these
   by all eight bits. Clusters are chosen by the upper bits too. With `candidates` of zero all bits count everywhere;
4. a score is an exact 32-bit dot product, rounded to FP32 once, times the row's scale. The best k by (score, smaller
   position) stay in a buffer of 3k keys of 64 bits, cut when full: no sort of all scores.

All sums are of integers, and each rounding is written down, so the kernel equals the reference (`reference.py`) bit for
bit, whatever instructions it uses: AVX-512 VNNI (64 products an instruction), AVX2, or plain C++, chosen when it runs.

Rows are not interleaved by sixteen, as is usual for such kernels: summing across a row costs three cycles more, but
a scan waits for memory, not for sums, and a filter that lets 1 % pass then reads 1 % of the rows, not all of them. For
the same reason the upper bits come first: half of the memory for all rows but the candidates.

Sources: cluster-sorted rows with a mask in the same order: SilverTorch (arXiv 2511.14881, section 4); inverted file:
Jégou et al., "Product quantization for nearest neighbor search", 2011; few bits first, all bits for the best: the
two-step search of ScaNN (Guo et al., arXiv 1908.10396), whose few bits are a product quantisation.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from ctypes import c_int64, c_void_p
from enum import IntEnum
from pathlib import Path

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ziggurat.ops.cpp_build import CppLibrary, CppSource, kernel_line
from ziggurat.ops.kernel_choice import kernels_or_reason, library_for
from ziggurat.ops.scan.reference import (
    empty_found,
    mask_of_each,
    not_finite,
    scan_clusters_reference,
    scan_rows_reference,
)
from ziggurat.ops.scan.rows import Found, Masks, ScanTables
from ziggurat.ops.scan.triton import TRITON_KERNELS, scan_clusters_triton, scan_rows_triton, why_not_triton

_SOURCE = CppSource(
    path=Path(__file__).parents[1] / "csrc" / "scan.cpp",
    flags=("-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-w"),
    depends_on=torch.__version__,  # whose OpenMP it shares
    without="go on without: torch's own operations find the same, slower",
)


class ScanPath(IntEnum):
    """Instructions of the kernel; the numbers are those of `csrc/scan.cpp`."""

    PLAIN = 0
    AVX2 = 1
    AVX512_VNNI = 2


# The order of these fields is the order in memory.
class _Asked(ctypes.Structure):  # as Asked in scan.cpp
    _fields_ = [
        ("queries", c_void_p),
        ("num_queries", c_int64),
        ("k", c_int64),
        ("candidates", c_int64),
        ("scores", c_void_p),
        ("positions", c_void_p),
        ("path", c_int64),
        ("threads", c_int64),
        ("probes", c_void_p),
        ("least", c_void_p),
        ("probes_of_all", c_int64),
        ("least_of_all", c_int64),
        ("masks", c_void_p),
    ]


def scan_clusters(
    tables: ScanTables,
    queries: Float[Tensor, "Q D"],
    *,
    k: int,
    probes: int | Int64[Tensor, "Q"],
    least: int | Int64[Tensor, "Q"],
    masks: Masks = None,
    candidates: int = 0,
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
        candidates: rows that the upper bits choose, k at least; 0: all bits of all rows are read.
        path: instructions to use, for tests; the best that the processor has, if not given.

    Raises:
        DataError: a query has a number that is not finite.
    """
    library = library_for(queries, _LIBRARY)
    if library is None:
        if _takes_triton(queries):
            return scan_clusters_triton(
                tables, queries, k=k, probes=probes, least=least, masks=masks, candidates=candidates
            )
        _refuse_not_finite(queries)
        return scan_clusters_reference(
            tables, queries, k=k, probes=probes, least=least, masks=masks, candidates=candidates
        )
    asked = _Asked(k=k, candidates=candidates, path=_best_path() if path is None else path)
    kept: list[object] = []  # what the pointers lead to
    # The library reads one number for all, or an array where there is an address.
    if isinstance(probes, Tensor):
        each_probes = probes.to(torch.int64).contiguous()
        kept.append(each_probes)
        asked.probes = each_probes.data_ptr()
    else:
        asked.probes_of_all = probes
    if isinstance(least, Tensor):
        each_least = least.to(torch.int64).contiguous()
        kept.append(each_least)
        asked.least = each_least.data_ptr()
    else:
        asked.least_of_all = least
    if masks is not None:
        each_mask = mask_of_each(masks, len(queries)) or ()
        pointers = (c_void_p * len(queries))(*(None if mask is None else mask.data_ptr() for mask in each_mask))
        kept += [each_mask, pointers]
        asked.masks = ctypes.addressof(pointers)
    return _search(library.ziggurat_scan_clusters, queries, asked, tables.pointer)


def scan_rows(
    tables: ScanTables,
    queries: Float[Tensor, "Q D"],
    *,
    k: int,
    rows: Sequence[Int64[Tensor, "_"] | None],
    candidates: int = 0,
    path: ScanPath | None = None,
) -> Found:
    """`scan_rows_reference` by the fastest implementation that serves this input.

    Args:
        tables: what is searched; its clusters are not read.
        queries: finite numbers.
        k: rows wanted for each query.
        rows: numbers of the rows to score for each query; None: all.
        candidates: as for `scan_clusters`.
        path: instructions to use, for tests; the best that the processor has, if not given.

    Raises:
        DataError: a query has a number that is not finite.
    """
    library = library_for(queries, _LIBRARY)
    if library is None:
        if _takes_triton(queries):
            return scan_rows_triton(tables, queries, k=k, rows=rows, candidates=candidates)
        _refuse_not_finite(queries)
        return scan_rows_reference(tables, queries, k=k, rows=rows, candidates=candidates)
    # Held by a name until the search is over: the library gets addresses alone.
    lists = [None if each is None else each.contiguous() for each in rows]
    num = len(queries)
    total = len(tables.rows.scales)
    # An empty list has no address, and none means all rows: any other number will do, since nothing is read there.
    pointers = (c_void_p * num)(*(None if each is None else each.data_ptr() or 1 for each in lists))
    counts = (c_int64 * num)(*(total if each is None else len(each) for each in lists))
    asked = _Asked(k=k, candidates=candidates, path=_best_path() if path is None else path)
    return _search(library.ziggurat_scan_rows, queries, asked, tables.pointer, pointers, counts)


def scan_tables(
    tables: Sequence[ScanTables],
    queries: Float[Tensor, "Q D"],
    *,
    k: int,
    numbers: Sequence[Int64[Tensor, "_"]],
    candidates: int = 0,
    path: ScanPath | None = None,
) -> Found:
    """Search all rows of a table of its own for each query, in one call: `scan_rows` of each, by the rows' numbers.

    A call for each query costs more than the search of some hundred rows, and does not share queries among threads.

    Args:
        tables: one a query, all of vectors of the same size; their clusters are not read.
        queries: finite numbers.
        k: rows wanted for each query.
        numbers: of the rows of each table, contiguous; found positions are these.
        candidates: as for `scan_clusters`.
        path: instructions to use, for tests; the best that the processor has, if not given.

    Raises:
        DataError: a query has a number that is not finite.
    """
    num = len(tables)
    library = library_for(queries, _LIBRARY)
    if library is None or not num:
        return _each_table(tables, queries, k=k, numbers=numbers, candidates=candidates)
    # Of structs that the tables keep; the caller holds the tables until the search is over.
    pointers = (c_void_p * num)(*[each.address for each in tables])
    names = (c_void_p * num)(*[each.data_ptr() for each in numbers])
    asked = _Asked(k=k, candidates=candidates, path=_best_path() if path is None else path)
    return _search(library.ziggurat_scan_tables, queries, asked, pointers, names)


def _each_table(
    tables: Sequence[ScanTables],
    queries: Float[Tensor, "Q D"],
    *,
    k: int,
    numbers: Sequence[Int64[Tensor, "_"]],
    candidates: int,
) -> Found:
    """Define what `scan_tables` finds."""
    if not _takes_triton(queries):
        _refuse_not_finite(queries)
    found = empty_found(queries, k)
    for i, (table, own_numbers) in enumerate(zip(tables, numbers, strict=True)):
        # One row of queries: the table is the query's own.
        own = scan_rows(table, queries[i : i + 1], k=k, rows=[None], candidates=candidates)
        # −1 stands behind the last row that was found, and is the number of none.
        is_found = own.positions[0] >= 0
        found.scores[i] = own.scores[0]
        found.positions[i, is_found] = own_numbers[own.positions[0, is_found]]
    return found


def _search(function: Callable[..., int], queries: Tensor, asked: _Asked, *arguments: object) -> Found:
    """Call an entry of the library: queries in, the best out, complaints.

    Args:
        function: the entry; it takes the arguments and what is asked.
        queries: finite numbers.
        asked: what is asked, without queries and results.
        arguments: where the function searches.
    """
    # Most queries are right as they come: they are not touched.
    if queries.dtype is not torch.float32 or queries.requires_grad or not queries.is_contiguous():
        queries = queries.detach().to(torch.float32).contiguous()
    asked.num_queries = num = len(queries)
    scores = torch.empty(num, asked.k)
    positions = torch.empty(num, asked.k, dtype=torch.int64)
    asked.queries = queries.data_ptr()
    asked.scores = scores.data_ptr()
    asked.positions = positions.data_ptr()
    # Threads share out queries: one query would only wake them up.
    asked.threads = 1 if num == 1 else torch.get_num_threads()
    bad = function(*arguments, ctypes.byref(asked))
    if bad >= 0:
        raise not_finite(queries, bad)
    return Found(scores, positions)


def best_path() -> ScanPath:
    """The widest instructions that this processor has."""
    return ScanPath(_best_path())


@functools.cache
def _best_path() -> int:
    library = _LIBRARY.or_none()
    return int(ScanPath.PLAIN) if library is None else int(library.ziggurat_scan_path())


def scan_kernel() -> str:
    """Say which implementations search here, and why; build the kernel for the CPU if need be."""
    reason = _LIBRARY.reason
    on_cpu = kernel_line(reason) if reason else f"{kernel_line('')}, {best_path().name.replace('_', ' ')}"
    without = kernels_or_reason(TRITON_KERNELS)[1]
    return f"{on_cpu}; on CUDA devices " + (f"torch, slower: {without}" if without else "Triton")


def _takes_triton(queries: Tensor) -> bool:
    # Launches of ours are no part of a compiled graph.
    is_cuda = queries.device.type == "cuda" and not torch.compiler.is_compiling()
    return is_cuda and not why_not_triton(queries)


def _refuse_not_finite(queries: Tensor) -> None:
    bad = ~queries.isfinite().all(dim=1)
    if bad.any():
        raise not_finite(queries, int(bad.nonzero()[0]))


def _declare(library: ctypes.CDLL) -> None:
    """Say which arguments the functions of the library take."""
    pointer = c_void_p
    library.ziggurat_scan_clusters.argtypes = [pointer, pointer]
    library.ziggurat_scan_rows.argtypes = [pointer, pointer, pointer, pointer]
    library.ziggurat_scan_tables.argtypes = [pointer, pointer, pointer]
    library.ziggurat_scan_path.argtypes = []
    for name in ("scan_clusters", "scan_rows", "scan_tables", "scan_path"):
        getattr(library, f"ziggurat_{name}").restype = c_int64


_LIBRARY = CppLibrary(_SOURCE, declare=_declare)
