"""The best of what was found, in one order for everything: by score, then by the smaller position.

Answers repeat bit for bit only if equal scores have an order too. Scores of −∞ are places that nothing was found for;
their position is −1.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ziggurat.ops.bitmask import full_mask, unpack_mask
from ziggurat.ops.scan import Found, Masks, empty_found

_BLOCK = 65_536


def best_of(scores: Float[Tensor, "Q M"], positions: Int64[Tensor, "Q M"], *, k: int) -> Found:
    """The best k (or M, if that is less) by score, then by the smaller position."""
    # By the second key first, then stably by the first one: equal scores stay in the order of positions.
    by_position = positions.argsort(dim=1, stable=True)
    scores = scores.gather(1, by_position)
    positions = positions.gather(1, by_position)
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
    scores = scores.gather(1, order)
    positions = positions.gather(1, order)
    return Found(scores, positions.masked_fill(scores == -torch.inf, -1))


def exact_search(vectors: Float[Tensor, "N D"], queries: Float[Tensor, "Q D"], *, k: int, masks: Masks = None) -> Found:
    """Find the best k of all vectors by FP32 products, in blocks; any floating-point vectors.

    Args:
        vectors: by position.
        queries: finite numbers.
        k: positions wanted.
        masks: as for `scan_clusters`.
    """
    passes: Tensor | None = None
    if isinstance(masks, Tensor):
        passes = unpack_mask(masks, len(vectors))
    elif masks is not None:
        full = full_mask(len(vectors), device=queries.device)
        passes = unpack_mask(torch.stack([full if mask is None else mask for mask in masks]), len(vectors))
    best = empty_found(queries, k)
    for begin in range(0, len(vectors), _BLOCK):
        part = vectors[begin : begin + _BLOCK].float()
        scores = queries.float() @ part.t()
        if passes is not None:
            scores = scores.masked_fill(~passes[..., begin : begin + len(part)], -torch.inf)
        scores, columns = scores.topk(min(k, len(part)), dim=1)
        best = best_of(torch.cat([best.scores, scores], 1), torch.cat([best.positions, columns + begin], 1), k=k)
    return best


def recall_of(found: Int64[Tensor, "Q K"], exact: Int64[Tensor, "Q K"]) -> float:
    """Share of the exact positions that were found; 1 where there are none."""
    wanted = exact >= 0
    hits = (found.unsqueeze(1) == exact.unsqueeze(2)).any(-1) & wanted
    return float(hits.sum() / wanted.sum()) if wanted.any() else 1.0
