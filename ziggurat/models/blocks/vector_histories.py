"""Histories of vectors, pooled into one vector a sample: what a teacher has said of a user before this row.

    vectors (B, L, D) ─► norm ─┬─► mean of those there are ──────────────────► D ─┐
                               ├─► k = W_k v + r_l ─► softmax(q kᵀ/√d) · v ──► D ─┼─► (B, 2D + 1)
    fields, numbers ─► q = W_q x                       ln(1 + n)/ln(1 + L) ──► 1 ─┘

The mean says what the user is like, the attention what of it concerns this row: its query is everything else that is
known of the row, as in target attention (DIN, arXiv 1706.06978). LoopFM (arXiv 2605.29280) feeds "FM intermediate
embeddings as input features (e.g., user history sequence)"; which network stands above them is not in the part of the
paper that was at hand, so this one is ours. r_l is learned for each place, so that late vectors may count more. Vectors
come from networks whose numbers have any size, so each is brought to mean 0 and variance 1 first. A sample without a
history has zeros, and says so by its last number.

Cost a sample: 2·(L·D + X)·d for keys and query, 4·L·D for the rest; with L = 16, D = 64, X = 256: 55,000 FLOPs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int32
from torch import Tensor, nn

from ziggurat.features.inputs import HistoryPooling, InputSpec, VectorHistory
from ziggurat.ops.vector_histories import unpack_histories
from ziggurat.precision.products import Linear

_KEY_DIM = 16


class VectorHistories(nn.Module):
    """Pools every history of vectors of a batch.

    Args:
        inputs: which there are.
        query_dim: numbers of fields and dense features, side by side.
    """

    def __init__(self, inputs: InputSpec, *, query_dim: int) -> None:
        super().__init__()
        self.names = tuple(spec.name for spec in inputs.vector_histories)
        histories = [spec.history for spec in inputs.vector_histories if spec.history is not None]
        self.pools = nn.ModuleList(HistoryPool(each, query_dim=query_dim) for each in histories)

    def forward(
        self, vectors: Mapping[str, Tensor], *, dense_BN: Float[Tensor, "B N"], fields_BX: Float[Tensor, "B X"]
    ) -> dict[str, Float[Tensor, "B V"]]:
        """Return all vectors by name, histories pooled."""
        query_BQ = torch.cat([dense_BN, fields_BX.to(dense_BN.dtype)], dim=1)
        pooled = {name: pool(vectors[name], query_BQ) for name, pool in zip(self.names, self.pools, strict=True)}
        return {**vectors, **pooled}


class HistoryPool(nn.Module):
    """Pools one history of vectors.

    Args:
        history: its sizes.
        query_dim: numbers that are known of a row.
    """

    def __init__(self, history: VectorHistory, *, query_dim: int) -> None:
        super().__init__()
        self.history = history
        has_attention = history.pooling is HistoryPooling.ATTENTION
        self.query = Linear(query_dim, _KEY_DIM) if has_attention else None
        self.key = Linear(history.dim, _KEY_DIM, bias=False) if has_attention else None
        self.places = nn.Parameter(torch.zeros(history.length)) if has_attention else None

    def forward(self, words_BW: Int32[Tensor, "B W"], query_BQ: Float[Tensor, "B Q"]) -> Float[Tensor, "B V"]:
        """Return pooled vectors, and how many there were."""
        vectors_BLD, is_there_BL = unpack_histories(words_BW, history=self.history)
        vectors_BLD = F.layer_norm(vectors_BLD, (self.history.dim,)) * is_there_BL.unsqueeze(2)
        num_B1 = is_there_BL.sum(dim=1, keepdim=True).to(vectors_BLD.dtype)
        parts = [vectors_BLD.sum(dim=1) / num_B1.clamp(min=1)]
        if self.query is not None and self.key is not None and self.places is not None:
            keys_BLK = self.key(vectors_BLD)
            scores_BL = (keys_BLK @ self.query(query_BQ).unsqueeze(2)).squeeze(2) / math.sqrt(_KEY_DIM) + self.places
            # Where nothing is there all weights are alike, and the sum is that of zeros.
            scores_BL = scores_BL.float().masked_fill(~is_there_BL, -1e9)
            parts.insert(0, (scores_BL.softmax(dim=1).unsqueeze(1) @ vectors_BLD).squeeze(1))
        return torch.cat([*parts, num_B1.log1p() / math.log1p(self.history.length)], dim=1)
