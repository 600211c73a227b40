"""What a search of INT8 rows finds, step by step in torch: the definition that every kernel equals bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ziggurat.errors import DataError
from ziggurat.ops.bitmask import unpack_mask_reference
from ziggurat.ops.scan.rows import LARGEST_CODE, MIN_LARGEST, ZERO, Found, Masks, Rows, ScanTables, plane_numbers


def scan_clusters_reference(
    tables: ScanTables,
    queries: Float[Tensor, "Q D"],
    *,
    k: int,
    probes: int | Int64[Tensor, "Q"],
    least: int | Int64[Tensor, "Q"],
    masks: Masks = None,
    candidates: int = 0,
) -> Found:
    """Define what `scan_clusters` finds, step by step in torch."""
    found = empty_found(queries, k)
    num = len(tables.rows.scales)
    probes, least = (_tensor(each, like=queries) for each in (probes, least))
    sizes = tables.offsets.diff()
    cluster_of = torch.repeat_interleave(sizes)
    each_mask = mask_of_each(masks, len(queries)) or [None] * len(queries)
    for q, (query, mask) in enumerate(zip(queries, each_mask, strict=True)):
        every = torch.ones(num, dtype=torch.bool, device=queries.device)
        passes = every if mask is None else unpack_mask_reference(mask, num)
        codes, scale, norm = round_query(query)
        order = best_first(cluster_scores(tables, codes, norm=norm, by_upper=candidates > 0))
        passing = torch.zeros_like(sizes).index_add_(0, cluster_of, passes.long())[order]
        before = passing.cumsum(0) - passing  # rows that passed when a cluster's turn comes
        ranks = torch.arange(len(order), device=queries.device)
        wanted = order[(ranks < probes[q].clamp(min=1)) | (before < least[q])]
        own = (passes & torch.isin(cluster_of, wanted)).nonzero().view(-1)
        _keep_best(found, q, tables.rows, codes, scale, own, candidates)
    return found


def scan_rows_reference(
    tables: ScanTables,
    queries: Float[Tensor, "Q D"],
    *,
    k: int,
    rows: Sequence[Int64[Tensor, "_"] | None],
    candidates: int = 0,
) -> Found:
    """Define what `scan_rows` finds, step by step in torch."""
    found = empty_found(queries, k)
    for q, (query, own) in enumerate(zip(queries, rows, strict=True)):
        codes, scale, _ = round_query(query)
        # Ascending, so that of equal scores the smaller position comes first.
        own = torch.arange(len(tables.rows.scales), device=queries.device) if own is None else own.sort().values
        _keep_best(found, q, tables.rows, codes, scale, own, candidates)
    return found


def round_query(query: Float[Tensor, "*Q D"]) -> tuple[Int64[Tensor, "*Q D"], Float[Tensor, "*Q"], Float[Tensor, "*Q"]]:
    """The INT8 numbers of a query (or of each of several), what one of them is worth, and their length."""
    largest = query.float().abs().amax(-1).clamp(min=MIN_LARGEST)
    # Divided as tensors, as the kernels do it; the two roundings differ.
    inverse = torch.full_like(largest, LARGEST_CODE).div(largest)  # not LARGEST_CODE / x, which multiplies by 1 / x
    codes = torch.round(query.float() * inverse.unsqueeze(-1)).to(torch.int64)
    return codes, largest / LARGEST_CODE, (codes * codes).sum(-1).float().sqrt()


def exact_scores(rows: Rows, codes: Int64[Tensor, "D"]) -> Float[Tensor, "N"]:
    """Exact dot products, rounded to FP32 once, times the scales. FP64 holds the sums exactly."""
    numbers = 16 * plane_numbers(rows.upper).double() + plane_numbers(rows.lower) - ZERO
    dots = numbers[:, : len(codes)] @ codes.double()
    return dots.float() * rows.scales + 0.0  # −0 is 0


def upper_scores(rows: Rows, codes: Int64[Tensor, "D"]) -> Float[Tensor, "N"]:
    """Twice the scores by the upper bits, with 15/2 for the lower ones: twice, since that is an integer."""
    numbers = 32 * plane_numbers(rows.upper).double() + 15 - 2 * ZERO
    dots = numbers[:, : len(codes)] @ codes.double()
    return dots.float() * rows.scales + 0.0


def cluster_scores(
    tables: ScanTables, codes: Int64[Tensor, "D"], *, norm: Tensor, by_upper: bool
) -> Float[Tensor, "C"]:
    """Bound the score of each cluster's best row from above; twice that by the upper bits."""
    if by_upper:
        return upper_scores(tables.centroids, codes) + 2 * norm * tables.centroid_reach
    return exact_scores(tables.centroids, codes) + norm * tables.centroid_reach


def best_first(scores: Tensor) -> Tensor:
    """Places of scores, best first, of equal ones the first."""
    return scores.sort(descending=True, stable=True).indices


def _keep_best(found: Found, q: int, rows: Rows, codes: Tensor, scale: Tensor, own: Tensor, candidates: int) -> None:
    """Write the best of the rows `own`, which are ascending."""
    k = found.scores.shape[1]
    if candidates:
        # In ascending order again, for the same rule among equal scores.
        own = own[best_first(upper_scores(rows.at(own), codes))[: max(candidates, k)]].sort().values
    scores = exact_scores(rows.at(own), codes)
    order = best_first(scores)[:k]
    found.scores[q, : len(order)] = scores[order] * scale
    found.positions[q, : len(order)] = own[order]


def mask_of_each(masks: Masks, num: int) -> list[Tensor | None] | None:
    """The mask of each query, in contiguous memory that the result keeps."""
    if masks is None:
        return None
    if isinstance(masks, Tensor):
        masks = [masks] * num if masks.dim() == 1 else list(masks)
    return [None if mask is None else mask.contiguous() for mask in masks]


def empty_found(queries: Float[Tensor, "Q D"], k: int) -> Found:
    """The answer to every query before anything was found: −∞ and −1."""
    shape = (len(queries), k)
    device = queries.device
    positions = torch.full(shape, -1, dtype=torch.int64, device=device)
    return Found(torch.full(shape, -torch.inf, device=device), positions)


def not_finite(queries: Tensor, row: int) -> DataError:
    """Return the error that names the first number of a query that is not finite."""
    column = int((~queries[row].isfinite()).nonzero()[0])
    return DataError(
        expected="query vectors of finite numbers",
        found=f"{queries[row, column].item()} in column {column}",
        where=f"search, query {row}",
        ways_out=("look for NaN in what the user encoder reads", "look whether the training of the encoder diverged"),
    )


def _tensor(value: int | Tensor, *, like: Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else torch.full((len(like),), value, device=like.device)
