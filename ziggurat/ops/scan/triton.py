"""Search of INT8 rows by Triton: for CUDA devices. What is found equals `reference.py` bit for bit.

    round_kernel    a program a query: its INT8 numbers, and whether it is finite
    best_kernel     a program for 1,024 rows of a query: which cluster and row each is (binary search among the clusters
                    that were chosen), its bit of the mask, its dot product; sorts, and writes the best as keys.
                    Few queries have smaller blocks, so that more programs work for each
    merge_kernel    few queries: a program for each sorted list; a key's place is counted by binary search in the others
    exact_kernel    few queries: a program a query scores its candidates by all bits, sorts them, writes what was found
    passing_kernel  a program for 32 clusters of a mask: how many rows pass, to know how many clusters are needed
    choose_kernel   a program a query: the clusters that are needed, from the sorted keys of all
    list_kernel, found_kernel   what keys say, for the next pass and for the caller
    torch           picks the best of the blocks' best for many queries (`topk`, whose radix selection takes as long for
                    one query as for a hundred)

A key is one 64-bit number: the score in the order of its bits, then the complement of the position. The largest keys
are the best rows, of equal scores the smaller position, so no sort needs a second look. Clusters are read through one
numbering of all their rows: blocks are full however ragged clusters are, and no list of rows is written.

`best_kernel` runs three times: over the centroids, over the rows by their upper bits, over the candidates by all bits.
Sums are of integers, and each rounding is written down; products and sums of floats are not fused
(`enable_fp_fusion=False`).

**Waits.** A launch has to know how many rows the longest query reads. For up to 64 queries the host does not ask: it
knows a bound (the largest clusters together; under a mask all rows), programs that have nothing to do end at once, and
where the bound is large a program goes through several blocks. So nothing waits for the device but the question whether
queries are finite, which comes last, and the rest can be captured as a CUDA graph (`retrieval/vectors/graphs.py`). More
queries wait once, and have launches of the size that they need.

Sources: clusters, mask and distance in one kernel: SilverTorch (arXiv 2511.14881, section 4); Triton: Tillet, Kung and
Cox, MAPL 2019.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor

from ziggurat.errors import MissingDependencyError
from ziggurat.ops.kernel_choice import kernels_of, power_of_two, why_no_triton
from ziggurat.ops.scan.reference import empty_found, not_finite
from ziggurat.ops.scan.rows import Found, Masks, Rows, ScanTables

TRITON_KERNELS = "ziggurat.ops.scan.triton_kernels"
_BLOCK = 1024  # rows of a program
_COLUMNS = 16  # bytes of a row that are multiplied at a time
_MAX_KEYS = 2**25  # that are in memory at a time: 256 MB
_NONE = -(2**63)  # the key of no row
_FEW_QUERIES = 64  # for which nothing waits
_MAX_PROGRAMS = 256  # of few queries together: a list each, all of which are searched for the place of a key
_FEWEST_PROGRAMS = 64  # of a query then
_FEWEST_QUERIES = 8  # for which programs have few rows, so that they end sooner
_SMALL_BLOCK = 256  # rows of such a program
_MERGED_MEMBERS = 16  # keys whose places are found at a time
_MERGED_OTHERS = 32  # among so many other lists
_COUNTED_CLUSTERS = 32  # whose rows that pass a mask are counted by a program
_COUNTED_WORDS = 8  # of each, 64 rows in a word, at a time


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
    found, are_finite = search_clusters(
        tables, queries, k=k, probes=probes, least=least, masks=masks, candidates=candidates
    )
    refuse_not_finite(queries, are_finite)
    return found


def search_clusters(
    tables: ScanTables,
    queries: Float[Tensor, "Q D"],
    *,
    k: int,
    probes: int | Int64[Tensor, "Q"],
    least: int | Int64[Tensor, "Q"],
    masks: Masks = None,
    candidates: int = 0,
) -> tuple[Found, Bool[Tensor, "Q"]]:
    """Find what `scan_clusters_triton` finds, and which queries are finite: what others got means nothing.

    Nothing waits for the device where there are few queries, so this can be captured as a CUDA graph.

    Raises:
        MissingDependencyError: Triton cannot run here.
    """
    _refuse_without_triton(queries)
    if not len(queries) or not tables.num_rows:
        return empty_found(queries, k), queries.isfinite().all(dim=1)
    # Two planes of half bytes lie in `upper` and `lower`: twice their width is the number of columns.
    asked = _Rounded.of(queries, row_bytes=2 * tables.rows.upper.shape[1])
    given = _Masks.of(masks, queries)
    spans = _chosen_clusters(
        tables, asked, probes=probes, least=least, masks=given, by_upper=candidates > 0, most=max(k, candidates)
    )
    return _search(tables.rows, asked, spans, k=k, candidates=candidates), asked.are_finite


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
    # −1 says that a query has no list of its own and reads all rows.
    starts = []
    end = 0
    for each in rows:
        starts.append(-1 if each is None else end)
        end += 0 if each is None else len(each)
    lists = [each for each in rows if each is not None]
    spans = _Spans(
        totals=torch.tensor(counts, device=queries.device),
        longest=max(counts),
        # A pointer has to be given; with no list it is not read.
        rows=torch.cat(lists) if lists else queries.new_zeros(1, dtype=torch.int64),
        row_starts=torch.tensor(starts, device=queries.device),
    )
    asked = _Rounded.of(queries, row_bytes=2 * tables.rows.upper.shape[1])
    found = _search(tables.rows, asked, spans, k=k, candidates=candidates)
    refuse_not_finite(queries, asked.are_finite)
    return found


def is_without_wait(num_queries: int, *, knows_sizes: bool, most: int) -> bool:
    """Return whether `search_clusters` launches everything without waiting for the device.

    Args:
        num_queries: Q.
        knows_sizes: the number of clusters is the same for all queries, and there are no masks.
        most: rows that a pass keeps: k, or the candidates.
    """
    return num_queries <= _FEW_QUERIES and (knows_sizes or most <= _BLOCK)


class _Rounded(NamedTuple):
    """Queries in INT8, and which of them are finite."""

    codes: Int32[Tensor, "Q R"]
    sums: Int32[Tensor, "Q"]
    scales: Float[Tensor, "Q"]
    lengths: Float[Tensor, "Q"]
    are_finite: Bool[Tensor, "Q"]

    @staticmethod
    def of(queries: Float[Tensor, "Q D"], *, row_bytes: int) -> _Rounded:
        """Round queries as the reference does, and fill them up with zeros to the width of the rows."""
        queries = queries.detach()
        if queries.stride(1) != 1:
            queries = queries.contiguous()
        num, dim = queries.shape
        numbers = functools.partial(torch.empty, device=queries.device)
        asked = _Rounded(
            codes=numbers(num, row_bytes, dtype=torch.int32),
            sums=numbers(num, dtype=torch.int32),
            scales=numbers(num, dtype=torch.float32),
            lengths=numbers(num, dtype=torch.float32),
            are_finite=numbers(num, dtype=torch.bool),
        )
        kernels_of(TRITON_KERNELS).round_kernel[(num,)](
            queries,
            *asked,
            queries.stride(0),
            dim=dim,
            width=row_bytes,
            padded=power_of_two(row_bytes),
            enable_fp_fusion=False,
        )
        return asked


class _Masks(NamedTuple):
    """Masks side by side, and which of them each query has; −1: none."""

    words: Int64[Tensor, "M W"]
    row_of_query: Int64[Tensor, "Q"]

    @staticmethod
    def of(masks: Masks, queries: Tensor) -> _Masks | None:
        if masks is None:
            return None
        num = len(queries)
        device = queries.device
        if isinstance(masks, Tensor):
            is_shared = masks.dim() == 1
            each = torch.zeros(num, dtype=torch.int64, device=device) if is_shared else torch.arange(num, device=device)
            return _Masks(masks.view(-1, masks.shape[-1]).contiguous(), each)
        # By identity: comparing the bits would make the host wait.
        given = {id(mask): mask for mask in masks if mask is not None}  # one that several queries have is taken once
        if not given:
            return None
        # Dictionaries keep the order in which masks came, which is that of the stack below.
        rows = {each: row for row, each in enumerate(given)}
        places = [-1 if mask is None else rows[id(mask)] for mask in masks]
        return _Masks(torch.stack(list(given.values())), torch.tensor(places, device=device))


class _Spans(NamedTuple):
    """The rows of each query, numbered through: all, those of a list, or those of chosen clusters that pass a mask."""

    totals: Int64[Tensor, "Q"]
    longest: int  # of totals, or a bound
    rows: Tensor | None = None
    row_starts: Tensor | None = None
    order: Int64[Tensor, "Q C"] | None = None
    ends: Int64[Tensor, "Q C"] | None = None
    chosen: Int64[Tensor, "Q"] | None = None
    offsets: Int64[Tensor, "C+1"] | None = None
    masks: _Masks | None = None


def _chosen_clusters(
    tables: ScanTables,
    asked: _Rounded,
    *,
    probes: int | Int64[Tensor, "Q"],
    least: int | Int64[Tensor, "Q"],
    masks: _Masks | None,
    by_upper: bool,
    most: int,
) -> _Spans:
    """The clusters of each query, best first, and how many of them are needed."""
    num = len(asked.codes)
    device = asked.codes.device
    clusters = tables.num_clusters
    # The first pass searches the centroids: each query looks at all of them.
    every = torch.full((num,), clusters, device=device)
    knows_sizes = False
    # Unless the host knows better: under a mask, or with numbers by query, all clusters might be needed.
    needed = clusters
    bound = tables.num_rows
    if masks is None and isinstance(probes, int) and isinstance(least, int):
        knows_sizes = True
        needed = tables.most_clusters(probes, least=least)
        bound = tables.most_rows(probes, least=least)
    keys = _best_keys(
        tables.centroids,
        asked,
        _Spans(totals=every, longest=clusters),
        by_upper=by_upper,
        most=needed,
        reach=tables.centroid_reach,
    )
    passing = None if masks is None else _passing(tables, masks)
    order = torch.empty_like(keys)
    ends = torch.empty_like(keys)
    chosen = torch.empty_like(every)
    totals = torch.empty_like(every)
    given_probes, given_least = (
        each.to(device).contiguous() if isinstance(each, Tensor) else each for each in (probes, least)
    )
    kernels_of(TRITON_KERNELS).choose_kernel[(num,)](
        keys,
        tables.offsets,
        # A launch needs a tensor for every pointer; these are not read.
        keys if passing is None else passing,
        keys if masks is None else masks.row_of_query,
        given_probes,
        given_least,
        order,
        ends,
        chosen,
        totals,
        needed,
        each_probes=isinstance(probes, Tensor),
        each_least=isinstance(least, Tensor),
        has_passing=passing is not None,
        padded=power_of_two(needed),
        # Few clusters fit in one warp, which sorts and scans without barriers.
        num_warps=1 if needed <= _SMALL_BLOCK else 8,
    )
    is_bound = is_without_wait(num, knows_sizes=knows_sizes, most=most)
    return _Spans(
        totals=totals,
        # The only wait of a search, and only with many queries, whose launches it makes smaller.
        longest=bound if is_bound else int(totals.max()),
        order=order,
        ends=ends,
        chosen=chosen,
        offsets=tables.offsets,
        masks=masks,
    )


def _passing(tables: ScanTables, masks: _Masks) -> Int64[Tensor, "M C"]:
    """The rows of each cluster that pass each mask."""
    num, words = masks.words.shape
    clusters = tables.num_clusters
    counts = torch.empty(num, clusters, dtype=torch.int64, device=masks.words.device)
    kernels_of(TRITON_KERNELS).passing_kernel[(-(-clusters // _COUNTED_CLUSTERS), num)](
        tables.offsets, masks.words, words, counts, clusters, members=_COUNTED_CLUSTERS, block=_COUNTED_WORDS
    )
    return counts


def _search(rows: Rows, asked: _Rounded, spans: _Spans, *, k: int, candidates: int) -> Found:
    """The best k of the rows of each query; with candidates, the best k of those by the upper bits."""
    # Two passes: half of the bits choose the candidates, all bits score these.
    if candidates:
        keys = _best_keys(rows, asked, spans, by_upper=True, most=max(candidates, k))
        num, width = keys.shape
        # One program has all candidates of a query: no pass that lists them, none that merges.
        if num <= _FEW_QUERIES and max(width, k) <= _BLOCK:
            return _exact(rows, asked, keys, k=k)
        best = torch.empty_like(keys)
        counts = torch.empty_like(keys[:, 0])
        starts = torch.empty_like(counts)
        kernels_of(TRITON_KERNELS).list_kernel[(num,)](keys, best, counts, starts, width, padded=power_of_two(width))
        spans = _Spans(totals=counts, longest=width, rows=best, row_starts=starts)
    keys = _best_keys(rows, asked, spans, by_upper=False, most=k)
    num, width = keys.shape
    scores = torch.empty(num, k, device=keys.device)
    positions = torch.empty(num, k, dtype=torch.int64, device=keys.device)
    kernels_of(TRITON_KERNELS).found_kernel[(num,)](
        keys, asked.scales, scores, positions, width, k, padded=power_of_two(k)
    )
    return Found(scores, positions)


def _exact(rows: Rows, asked: _Rounded, candidates: Int64[Tensor, "Q M"], *, k: int) -> Found:
    """The best k of the candidates of each query, by all bits."""
    num, width = candidates.shape
    scores = torch.empty(num, k, device=candidates.device)
    positions = torch.empty(num, k, dtype=torch.int64, device=candidates.device)
    kernels_of(TRITON_KERNELS).exact_kernel[(num,)](
        *rows,
        asked.codes,
        asked.sums,
        asked.scales,
        candidates,
        scores,
        positions,
        width,
        k,
        plane_bytes=rows.upper.shape[1],
        columns=_COLUMNS,
        block=power_of_two(max(width, k)),
        enable_fp_fusion=False,
    )
    return Found(scores, positions)


class _Sizes(NamedTuple):
    """The sizes of a pass over the rows of each query.

    Args:
        block: rows that a program looks at at a time.
        programs: of a query.
        keep: keys that a program writes.
        has_more: a program goes through several blocks.
        is_merged: lists of sorted keys are merged, instead of sorted together.
    """

    block: int
    programs: int
    keep: int
    has_more: bool
    is_merged: bool

    @staticmethod
    def of(num_queries: int, spans: _Spans, *, most: int) -> _Sizes:
        """Return the sizes by which `most` keys of each query are found."""
        # Blocks are sorted in the kernel, which wants powers of two.
        longest = power_of_two(spans.longest)
        if num_queries <= _FEW_QUERIES:
            block = min(longest, _SMALL_BLOCK if num_queries <= _FEWEST_QUERIES else _BLOCK)
            blocks = max(1, -(-spans.longest // block))
            programs = min(blocks, max(_FEWEST_PROGRAMS, _MAX_PROGRAMS // num_queries))
            if programs < blocks:  # a program keeps the best of all its blocks, so one has to hold as many
                block = max(block, power_of_two(most))
                blocks = max(1, -(-spans.longest // block))
                programs = min(programs, blocks)
            # Where more keys are wanted than a block may have, lists cannot be merged, and `topk` chooses.
            if block <= _BLOCK:
                return _Sizes(block, programs, min(block, power_of_two(most)), programs < blocks, is_merged=True)
        block = min(longest, _BLOCK)
        programs = max(1, -(-spans.longest // block))
        return _Sizes(block, programs, min(block, power_of_two(most)), has_more=False, is_merged=False)


def _best_keys(
    rows: Rows, asked: _Rounded, spans: _Spans, *, by_upper: bool, most: int, reach: Tensor | None = None
) -> Int64[Tensor, "Q _"]:
    """The largest keys of each query, `most` at most, largest first; as many queries at a time as memory allows."""
    num = len(asked.codes)
    sizes = _Sizes.of(num, spans, most=most)
    width = sizes.programs * sizes.keep
    # There may be fewer rows than are wanted.
    wanted = min(most, width)
    # One query at least, however many keys it has.
    at_a_time = max(1, min(num, _MAX_KEYS // width))
    parts = []
    for first in range(0, num, at_a_time):
        some = slice(first, first + at_a_time)
        keys = torch.empty((len(asked.codes[some]), width), dtype=torch.int64, device=asked.codes.device)
        _launch(rows, asked, spans, some, reach=reach, found=keys, by_upper=by_upper, sizes=sizes)
        if sizes.is_merged:
            parts.append(_merged(keys, spans.totals[some], sizes=sizes, most=wanted))
        else:
            # Keys tell rows apart, so there are no ties that an unstable selection could break.
            parts.append(keys.topk(wanted, dim=1).values)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _merged(
    lists: Int64[Tensor, "Q L"], totals: Int64[Tensor, "Q"], *, sizes: _Sizes, most: int
) -> Int64[Tensor, "Q most"]:
    """The largest keys of each query's sorted lists, largest first."""
    merged = lists.new_empty(len(lists), most)
    kernels_of(TRITON_KERNELS).merge_kernel[(sizes.programs, len(lists))](
        lists,
        totals,
        merged,
        most,
        keep=sizes.keep,
        block=sizes.block,
        steps=sizes.keep.bit_length(),
        members=min(_MERGED_MEMBERS, sizes.keep),
        others=min(_MERGED_OTHERS, power_of_two(sizes.programs, least=1)),
    )
    return merged


def _launch(
    rows: Rows,
    asked: _Rounded,
    spans: _Spans,
    some: slice,
    *,
    reach: Tensor | None,
    found: Tensor,
    by_upper: bool,
    sizes: _Sizes,
) -> None:
    # Stands for every tensor that is not there, and is not read.
    none = spans.totals
    clusters = 1 if spans.order is None else spans.order.shape[1]
    of_clusters = [spans.order, spans.ends, spans.chosen]
    masks = spans.masks
    kernels_of(TRITON_KERNELS).best_kernel[(sizes.programs, len(found))](
        *rows,
        asked.codes[some],
        asked.sums[some],
        none if reach is None else reach,
        asked.lengths[some],
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
        # Steps of a binary search among so many ends.
        steps=clusters.bit_length(),
        block=sizes.block,
        keep=sizes.keep,
        has_more=sizes.has_more,
        is_sorted=sizes.is_merged,
        enable_fp_fusion=False,
    )


def refuse_not_finite(queries: Float[Tensor, "Q D"], are_finite: Bool[Tensor, "Q"]) -> None:
    """Wait for the device, and raise where a query is not finite.

    Raises:
        DataError: names the first such number.
    """
    # Here the host waits; callers that capture graphs read the flags themselves later.
    if not bool(are_finite.all()):
        raise not_finite(queries, int((~are_finite).nonzero()[0]))


def _refuse_without_triton(queries: Tensor) -> None:
    if reason := why_not_triton(queries):
        raise MissingDependencyError(
            expected="a CUDA device and the package triton",
            found=reason,
            where="search of INT8 rows by Triton",
            ways_out=("call scan_clusters or scan_rows: the same answers", "move the index to a CUDA device"),
        )
