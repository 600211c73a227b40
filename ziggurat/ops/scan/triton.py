"""Search of INT8 rows by Triton: for CUDA devices. What is found equals `reference.py` bit for bit.

    best_kernel     a program for 1,024 rows of a query: which cluster and row each is (binary search among the clusters
                    that were chosen), its bit of the mask, its dot product; sorts, and writes the best as keys
    passing_kernel  a program for a cluster of a query: how many rows pass, to know how many clusters are needed
    torch           rounds queries, sorts the centroids' keys and cuts them, picks the best of the blocks' best

A key is one 64-bit number: the score in the order of its bits, then the complement of the position. The largest keys
are the best rows, of equal scores the smaller position, so no sort needs a second look. Clusters are read through one
numbering of all their rows: blocks are full however ragged clusters are, and no list of rows is written.

`best_kernel` runs three times: over the centroids, over the rows by their upper bits, over the candidates by all bits.
Sums are of integers, and each rounding is written down; products and sums of floats are not fused
(`enable_fp_fusion=False`). Two waits for the device a search: the number of rows of the longest query, and whether
queries are finite. Its time on a GPU has not been measured; the kernels are held to the reference by Triton's
interpreter (`make test-triton`).

Sources: clusters, mask and distance in one kernel: SilverTorch (arXiv 2511.14881, section 4); Triton: Tillet, Kung and
Cox, MAPL 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from ziggurat.errors import MissingDependencyError
from ziggurat.ops.kernel_choice import kernels_of, power_of_two, why_no_triton
from ziggurat.ops.scan.reference import empty_found, round_query
from ziggurat.ops.scan.rows import Found, Masks, Rows, ScanTables

TRITON_KERNELS = "ziggurat.ops.scan.triton_kernels"
_BLOCK = 1024  # rows of a program
_COLUMNS = 16  # bytes of a row that are multiplied at a time
_MOST_KEYS = 2**25  # that are in memory at a time: 256 MB
_NONE = -(2**63)  # the key of no row


def why_not_triton(tensor: Tensor) -> str:
    """The reason why Triton cannot search these queries; "" if it can."""
    return why_no_triton(TRITON_KERNELS, tensor, what="queries")


def scan_clusters_triton(
    tables: ScanTables,
    queries: Float[Tensor, "Q D"],
    *,
    k: int,
    probes: int | Int64[Tensor, "Q"],
    least: int | Int64[Tensor, "Q"],
    masks: Masks = None,
    candidates: int = 0,
) -> Found:
    """Find what `scan_clusters_reference` finds, by Triton.

    Raises:
        MissingDependencyError: Triton cannot run here.
    """
    _refuse_without_triton(queries)
    if not len(queries) or not tables.num_rows:
        return empty_found(queries, k)
    asked = _Rounded.of(queries, row_bytes=2 * tables.rows.upper.shape[1])
    given = _Masks.of(masks, queries)
    spans = _chosen_clusters(tables, asked, probes=probes, least=least, masks=given, by_upper=candidates > 0)
    return _search(tables.rows, asked, spans, k=k, candidates=candidates)


def scan_rows_triton(
    tables: ScanTables,
    queries: Float[Tensor, "Q D"],
    *,
    k: int,
    rows: Sequence[Int64[Tensor, "_"] | None],
    candidates: int = 0,
) -> Found:
    """Find what `scan_rows_reference` finds, by Triton.

    Raises:
        MissingDependencyError: Triton cannot run here.
    """
    _refuse_without_triton(queries)
    num = tables.num_rows
    if not len(queries) or not num:
        return empty_found(queries, k)
    counts = [num if each is None else len(each) for each in rows]
    starts, end = [], 0
    for each in rows:
        starts.append(-1 if each is None else end)
        end += 0 if each is None else len(each)
    lists = [each for each in rows if each is not None]
    spans = _Spans(
        totals=torch.tensor(counts, device=queries.device),
        longest=max(counts),
        rows=torch.cat(lists) if lists else queries.new_zeros(1, dtype=torch.int64),
        row_starts=torch.tensor(starts, device=queries.device),
    )
    asked = _Rounded.of(queries, row_bytes=2 * tables.rows.upper.shape[1])
    return _search(tables.rows, asked, spans, k=k, candidates=candidates)


class _Rounded(NamedTuple):
    """Queries in INT8."""

    codes: Int32[Tensor, "Q R"]
    sums: Int32[Tensor, "Q"]
    scales: Float[Tensor, "Q"]
    lengths: Float[Tensor, "Q"]

    @staticmethod
    def of(queries: Float[Tensor, "Q D"], *, row_bytes: int) -> _Rounded:
        """Round queries as the reference does, and fill them up with zeros to the width of the rows."""
        codes, scales, lengths = round_query(queries.detach())
        padded = torch.nn.functional.pad(codes, (0, row_bytes - codes.shape[1])).to(torch.int32)
        return _Rounded(padded, codes.sum(1).to(torch.int32), scales, lengths)


class _Masks(NamedTuple):
    """Masks side by side, and which of them each query has; −1: none."""

    words: Int64[Tensor, "M W"]
    row_of_query: Int64[Tensor, "Q"]

    @staticmethod
    def of(masks: Masks, queries: Tensor) -> _Masks | None:
        if masks is None:
            return None
        num, device = len(queries), queries.device
        if isinstance(masks, Tensor):
            each = torch.zeros(num, dtype=torch.int64) if masks.dim() == 1 else torch.arange(num)
            return _Masks(masks.view(-1, masks.shape[-1]).contiguous(), each.to(device))
        given = [mask for mask in masks if mask is not None]
        if not given:
            return None
        places = [-1 if mask is None else sum(other is not None for other in masks[:i]) for i, mask in enumerate(masks)]
        return _Masks(torch.stack(given), torch.tensor(places, device=device))


class _Spans(NamedTuple):
    """The rows of each query, numbered through: all, those of a list, or those of chosen clusters that pass a mask."""

    totals: Int64[Tensor, "Q"]
    longest: int
    rows: Tensor | None = None
    row_starts: Tensor | None = None
    order: Int64[Tensor, "Q C"] | None = None
    ends: Int64[Tensor, "Q C"] | None = None
    chosen: Int64[Tensor, "Q"] | None = None
    offsets: Int64[Tensor, "C+1"] | None = None
    masks: _Masks | None = None


def _chosen_clusters(
    tables: ScanTables, asked: _Rounded, *, probes: Any, least: Any, masks: _Masks | None, by_upper: bool
) -> _Spans:
    """The clusters of each query, best first, and how many of them are needed."""
    num, device, sizes = len(asked.codes), asked.codes.device, tables.offsets.diff()
    every = torch.full((num,), tables.num_clusters, device=device)
    keys = _best_keys(
        tables.centroids,
        asked,
        _Spans(totals=every, longest=tables.num_clusters),
        by_upper=by_upper,
        most=tables.num_clusters,
        reach=tables.centroid_reach,
    )
    order = _positions(keys)
    sizes_in_order = sizes[order]
    passing = sizes_in_order if masks is None else _passing(tables, masks).gather(1, order)
    before = passing.cumsum(1) - passing  # rows that passed when a cluster's turn comes
    ranks = torch.arange(tables.num_clusters, device=device)
    probes, least = (torch.as_tensor(each, device=device).view(-1, 1) for each in (probes, least))
    chosen = ((ranks < probes.clamp(min=1)) | (before < least)).sum(1)
    ends = sizes_in_order.cumsum(1)
    totals = ends.gather(1, chosen.unsqueeze(1) - 1).squeeze(1)
    return _Spans(
        totals=totals,
        longest=int(totals.max()),
        order=order.contiguous(),
        ends=ends.contiguous(),
        chosen=chosen,
        offsets=tables.offsets,
        masks=masks,
    )


def _passing(tables: ScanTables, masks: _Masks) -> Int64[Tensor, "Q C"]:
    num, clusters = len(masks.row_of_query), tables.num_clusters
    counts = torch.empty(num, clusters, dtype=torch.int64, device=masks.words.device)
    words = masks.words.shape[1]
    grid = (clusters, num)
    kernels_of(TRITON_KERNELS).passing_kernel[grid](
        tables.offsets, masks.words, masks.row_of_query, words, counts, block=16, num_warps=1
    )
    return counts


def _search(rows: Rows, asked: _Rounded, spans: _Spans, *, k: int, candidates: int) -> Found:
    """The best k of the rows of each query; with candidates, the best k of those by the upper bits."""
    if candidates:
        best = _positions(_best_keys(rows, asked, spans, by_upper=True, most=max(candidates, k)))
        counts = (best >= 0).sum(1)  # rows that were found stand first
        starts = torch.arange(len(best), device=best.device) * best.shape[1]
        spans = _Spans(totals=counts, longest=best.shape[1], rows=best.contiguous(), row_starts=starts)
    keys = _best_keys(rows, asked, spans, by_upper=False, most=k)
    found = torch.full((len(keys), k), _NONE, device=keys.device)
    found[:, : keys.shape[1]] = keys
    return Found(_scores(found) * asked.scales.unsqueeze(1), _positions(found))


def _best_keys(
    rows: Rows, asked: _Rounded, spans: _Spans, *, by_upper: bool, most: int, reach: Tensor | None = None
) -> Int64[Tensor, "Q _"]:
    """The largest keys of each query, `most` at most, largest first; as many queries at a time as memory allows."""
    num, block = len(asked.codes), min(_BLOCK, power_of_two(spans.longest))
    blocks = max(1, -(-spans.longest // block))
    keep = min(block, power_of_two(most))
    at_a_time = max(1, min(num, _MOST_KEYS // (blocks * keep)))
    parts = []
    for first in range(0, num, at_a_time):
        some = slice(first, first + at_a_time)
        keys = torch.full((len(asked.codes[some]), blocks * keep), _NONE, device=asked.codes.device)
        _launch(rows, asked, spans, some, reach=reach, found=keys, sizes=(by_upper, blocks, block, keep))
        parts.append(keys.topk(min(most, blocks * keep), dim=1).values)
    return torch.cat(parts)


def _launch(
    rows: Rows, asked: _Rounded, spans: _Spans, some: slice, *, reach: Tensor | None, found: Tensor, sizes: Any
) -> None:
    by_upper, blocks, block, keep = sizes
    none = spans.totals
    clusters = 1 if spans.order is None else spans.order.shape[1]
    lengths = 2 * asked.lengths if by_upper else asked.lengths
    of_clusters = [spans.order, spans.ends, spans.chosen]
    masks = spans.masks
    kernels_of(TRITON_KERNELS).best_kernel[(blocks, len(found))](
        *rows,
        asked.codes[some],
        asked.sums[some],
        none if reach is None else reach,
        lengths[some],
        none if spans.rows is None else spans.rows,
        none if spans.row_starts is None else spans.row_starts[some],
        spans.totals[some],
        *(none if each is None else each[some] for each in of_clusters),
        none if spans.offsets is None else spans.offsets,
        *((none, none) if masks is None else (masks.words, masks.row_of_query[some])),
        1 if masks is None else masks.words.shape[1],
        clusters,
        found,
        plane_bytes=rows.upper.shape[1],
        columns=_COLUMNS,
        by_upper=by_upper,
        has_reach=reach is not None,
        has_rows=spans.rows is not None,
        has_clusters=spans.order is not None,
        has_masks=masks is not None,
        steps=clusters.bit_length(),
        block=block,
        keep=keep,
        enable_fp_fusion=False,
    )


def _positions(keys: Int64[Tensor, "Q M"]) -> Int64[Tensor, "Q M"]:
    """The positions in keys; −1 for no row."""
    return torch.where(keys == _NONE, -1, 0xFFFFFFFF - (keys & 0xFFFFFFFF))


def _scores(keys: Int64[Tensor, "Q M"]) -> Float[Tensor, "Q M"]:
    """The scores in keys; −∞ for no row."""
    ordered = keys >> 32
    bits = torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(torch.int32)
    return bits.view(torch.float32).masked_fill(keys == _NONE, -torch.inf)


def _refuse_without_triton(queries: Tensor) -> None:
    if reason := why_not_triton(queries):
        raise MissingDependencyError(
            expected="a CUDA device and the package triton",
            found=reason,
            where="search of INT8 rows by Triton",
            ways_out=("call scan_clusters or scan_rows: the same answers", "move the index to a CUDA device"),
        )
