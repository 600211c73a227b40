"""beam_search: NeuroShard's search, as a baseline and a reference (Zha et al., arXiv 2305.01868, algorithms 1 and 2).

    beam = [no cuts]
    10 times:  for each plan of the beam, for each of the 10 largest and the 10 most expensive parts:
                   halve its columns, place all parts by `grid`, note the cost
               beam = the 3 cheapest of all
    answer = the cheapest plan ever seen

Halves may meet again on one device, as in the original, unless the space forbids it. Ours is written from the
description; `grid` prices the plans of its 11 limits in one call. Cost: up to 10 · 3 · 20 grids, each 11 · M greedy
steps: 4 to 14 s for 20 to 40 tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ziggurat.planning.search.greedy import grid
from ziggurat.planning.search.space import SearchSpace, Shard

# As in NeuroShard's algorithms.
_WIDTH = 3
_CANDIDATES = 10
_ROUNDS = 10


def beam_search(space: SearchSpace, *, until: Callable[[], bool] = lambda: False) -> list[Shard] | None:
    """Search over halvings of columns.

    Args:
        space: the problem; its rule for parts holds.
        until: asked after each grid; True stops.

    Returns:
        The cheapest plan; None if nothing fits.
    """
    cuts = tuple((table, 0) for table in range(space.num_tables))
    best, best_cost = grid(space, shards=cuts)
    beam = [cuts]
    for _ in range(_ROUNDS):
        found: list[tuple[float, tuple[tuple[int, int], ...]]] = []
        seen: set[tuple[tuple[int, int], ...]] = set()
        for parent in beam:
            for index in _promising(space, parent):
                table, level = parent[index]
                child = (*parent[:index], (table, level + 1), *parent[index + 1 :], (table, level + 1))
                key = tuple(sorted(child))
                if key in seen:
                    continue
                seen.add(key)
                plan, cost = grid(space, shards=child)
                found.append((cost, child))
                if plan is not None and cost < best_cost:
                    best = plan
                    best_cost = cost
                if until():
                    return best
        if not found:
            break
        found.sort(key=lambda each: each[0])
        beam = [child for _, child in found[:_WIDTH]]
    return best


def _promising(space: SearchSpace, parts: Sequence[tuple[int, int]]) -> list[int]:
    """Parts that may be halved: the largest, and the most expensive alone."""
    kinds = [int(space.column_kind[table, level]) for table, level in parts]
    alone = space.cost_model.local(space.encodings[kinds])[:, 0]
    by_bytes = np.argsort(-space.bytes[kinds], kind="stable")[:_CANDIDATES]
    by_cost = np.argsort(-alone, kind="stable")[:_CANDIDATES]
    return [index for index in sorted({*by_bytes.tolist(), *by_cost.tolist()}) if _divisible(space, parts[index])]


def _divisible(space: SearchSpace, part: tuple[int, int]) -> bool:
    table, level = part
    return level < space.most_levels[table]
