"""The best of what was found, in one order for everything: by score, then by the smaller position.

Answers repeat bit for bit only if equal scores have an order too. Scores of −∞ are places that nothing was found for;
their position is −1.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ziggurat.ops.scan import Found


def best_of(scores: Float[Tensor, "Q M"], positions: Int64[Tensor, "Q M"], *, k: int) -> Found:
    """The best k (or M, if that is less) by score, then by the smaller position."""
    by_position = positions.argsort(dim=1, stable=True)
    scores, positions = scores.gather(1, by_position), positions.gather(1, by_position)
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
    scores, positions = scores.gather(1, order), positions.gather(1, order)
    return Found(scores, positions.masked_fill(scores == -torch.inf, -1))


def nothing(queries: Float[Tensor, "Q D"], k: int) -> Found:
    """An answer in which nothing was found."""
    return Found(torch.full((len(queries), k), -torch.inf), torch.full((len(queries), k), -1, dtype=torch.int64))


def recall_of(found: Int64[Tensor, "Q K"], exact: Int64[Tensor, "Q K"]) -> float:
    """Share of the exact positions that were found; 1 where there are none."""
    wanted = exact >= 0
    hits = (found.unsqueeze(1) == exact.unsqueeze(2)).any(-1) & wanted
    return float(hits.sum() / wanted.sum()) if wanted.any() else 1.0
