"""How many rows the upper four bits must keep, so that the best by all bits are among them.

    a hundred wanted ──► the best hundred by all bits
                    └──► candidates by the upper bits: 150, 200, … 800 ──► their share of that hundred ≥ 0.998?

Measured with vectors of the index as queries, over all rows. The share depends on the vectors: those with one number
much larger than the others, or that are all nearly alike, differ in bits that are not read first. Where 800 do not
suffice, and for indexes of few rows, all bits of all rows are read.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from ziggurat.ops.scan import Found
from ziggurat.retrieval.vectors.best import recall_of

_FEWEST_ROWS = 16_384
_TRIED_PERCENT = (150, 200, 250, 300, 400, 600, 800)
_KEPT_SHARE = 0.998
_NUM_QUERIES = 64
_MORE = 16  # candidates, so that small k have some too


def candidates_for(k: int, *, percent: int) -> int:
    """Rows that the upper bits choose for the best k; 0: all bits of all rows are read.

    Args:
        k: rows wanted.
        percent: candidates for a hundred of them; 0: none.
    """
    return k * percent // 100 + _MORE if percent else 0


def measure_candidates(
    search: Callable[..., Found], *, vectors: Float[Tensor, "N D"], num_clusters: int, seed: int
) -> int:
    """Find the fewest candidates for a hundred wanted rows that hold 99.8 % of them; 0: there are too many.

    Args:
        search: `VectorIndex.search`.
        vectors: those that the index was built of.
        num_clusters: of the index.
        seed: of the draw of queries.
    """
    if len(vectors) < _FEWEST_ROWS:
        return 0
    draw = torch.Generator().manual_seed(seed)
    queries = vectors[torch.randint(0, len(vectors), (_NUM_QUERIES,), generator=draw)]
    exact = search(queries, k=100, rerank=0, probes=num_clusters, candidates=0).positions
    for percent in _TRIED_PERCENT:
        candidates = candidates_for(100, percent=percent)
        found = search(queries, k=100, rerank=0, probes=num_clusters, candidates=candidates).positions
        if recall_of(found, exact) >= _KEPT_SHARE:
            return percent
    return 0
