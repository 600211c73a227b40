"""The main segment answers: plan each query, then one pass of the kernel for all that read clusters or scattered rows.

filter ──► mask: cached, or from the planes of the attributes ──► plan ─┬─► all, clusters, rows: one call for all
                                                                       ├─► block: rows side by side, one call
          (large catalogues) ──► estimate ──► most rows pass ──────────┴─► post_filter: search, then filter
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ziggurat.ops.bitmask import rows_of_mask
from ziggurat.ops.scan import Found
from ziggurat.retrieval.filter_cache import FilterCache
from ziggurat.retrieval.filters import Filter
from ziggurat.retrieval.planner import Plan, PlanKind, Planner
from ziggurat.retrieval.segment import Segment
from ziggurat.retrieval.vectors import RowBlock, VectorIndex, search_blocks
from ziggurat.retrieval.vectors.best import best_of

_BLOCK_USES = 2  # a filter's rows are copied when it comes for the second time
Wanted = Filter | str | None


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """A plan, and what it needs.

    Args:
        plan: how the query is answered.
        mask: the rows that pass; None: all, or they are in the block.
        block: the rows that pass, side by side.
        wanted: the filter, for a plan that filters afterwards.
    """

    plan: Plan
    mask: Tensor | None = None
    block: RowBlock | None = None
    wanted: Wanted = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MainQuery:
    """The request to the main segment for every query of a batch.

    Args:
        k: positions wanted.
        probes: clusters to look into without a filter.
        planner: of the segment.
    """

    k: int
    probes: int
    planner: Planner


class MainSearch:
    """Searches the clustered segment of an index.

    Args:
        cache: masks and rows of frequent filters.
    """

    def __init__(self, cache: FilterCache) -> None:
        self._cache = cache

    def __call__(
        self,
        main: Segment,
        queries: Float[Tensor, "Q D"],
        *,
        k: int,
        filters: Sequence[Wanted],
        exclude: Sequence[Tensor | None],
        probes: int,
    ) -> tuple[Found, tuple[Plan, ...]]:
        """Find the best k positions of each query, and say how.

        Args:
            main: what is searched.
            queries: finite numbers.
            k: positions wanted.
            filters: one a query.
            exclude: numbers of items never to return, one tensor a query.
            probes: clusters to look into without a filter.
        """
        vectors = main.vectors
        asked = MainQuery(k=k, probes=probes, planner=main.planner)
        planned = [self._plan(main, wanted, seen, asked) for wanted, seen in zip(filters, exclude, strict=True)]
        blocks = [each.block for each in planned if each.block is not None]
        if len(blocks) == len(planned):
            return _in_blocks(vectors, queries, blocks, k=k), tuple(each.plan for each in planned)
        in_block = [i for i, each in enumerate(planned) if each.block is not None]
        together = [i for i, each in enumerate(planned) if each.block is None and each.wanted is None]
        if len(together) == len(planned):
            found = _scan(vectors, queries, planned, k=k)
            return found, tuple(each.plan for each in planned)
        scores = torch.empty(len(planned), k)
        positions = torch.empty(len(planned), k, dtype=torch.int64)
        if together:
            scores[together], positions[together] = _scan(
                vectors, queries[together], [planned[i] for i in together], k=k
            )
        if in_block:
            scores[in_block], positions[in_block] = _in_blocks(vectors, queries[in_block], blocks, k=k)
        for i, each in enumerate(planned):
            if each.wanted is not None:
                one, planned[i] = self._post_filter(main, queries[i : i + 1], each, asked)
                scores[i], positions[i] = one.scores[0], one.positions[0]
        return Found(scores, positions), tuple(each.plan for each in planned)

    def _plan(self, main: Segment, wanted: Wanted, seen: Tensor | None, asked: MainQuery) -> Planned:
        has_seen = seen is not None and len(seen) > 0
        if wanted is None and not has_seen and main.alive is None:
            return Planned(asked.planner.unfiltered(k=asked.k, probes=asked.probes))
        if asked.planner.may_post_filter() and wanted is not None and main.filters is not None and not has_seen:
            # A share of 0 rules out filtering afterwards: the mask is there already and costs nothing.
            share = 0.0 if (main, wanted) in self._cache else main.filters.selectivity(wanted)
            plan = asked.planner.post_filter(k=asked.k, probes=asked.probes, share=share)
            if plan is not None:
                return Planned(plan, wanted=wanted)
        return self._masked(main, wanted, seen if has_seen else None, asked)

    def _masked(self, main: Segment, wanted: Wanted, seen: Tensor | None, asked: MainQuery) -> Planned:
        if wanted is None:
            mask = main.base_mask()
            passing = main.num_alive()
            cached = False
            kept = None
        else:
            # The segment is part of the key: a change makes a new one, so masks of the old one are never found for it.
            kept, cached = self._cache.get((main, wanted), make=lambda: main.mask(wanted))
            mask = kept.mask
            passing = kept.passing
        if seen is not None:
            # The cached mask serves other queries too; a mask without a filter is a copy already.
            mask = mask if kept is None else mask.clone()
            main.clear(mask, seen)
        plan = asked.planner.filtered(k=asked.k, probes=asked.probes, passing=passing, cached=cached)
        if kept is not None and seen is None and plan.kind is PlanKind.ROWS and kept.uses >= _BLOCK_USES:
            block = kept.block or main.vectors.row_block(rows_of_mask(mask))
            self._cache.keep_block((main, wanted), kept, block)
            return Planned(asked.planner.block(passing=passing), block=block)
        return Planned(plan, mask=mask)

    def _post_filter(self, main: Segment, query: Tensor, planned: Planned, asked: MainQuery) -> tuple[Found, Planned]:
        """Search without the filter, then keep what passes; with a mask after all if that is too little."""
        assert main.filters is not None
        plan = planned.plan
        found = main.vectors.search(query, k=plan.least, masks=main.alive, probes=plan.probes, least=plan.least)
        positions = found.positions[0]
        # The filter is evaluated only in the words of 64 items where something was found.
        words = (positions[positions >= 0] // 64).unique()
        mask = main.filters.masks([planned.wanted], spans=torch.stack([words, words + 1], dim=1))[0]
        # A position of -1 reads the last word of the mask; the last condition drops it.
        passes = ((mask[positions // 64] >> (positions % 64)) & 1 == 1) & (positions >= 0)
        if int(passes.sum()) >= asked.k:
            return best_of(found.scores.masked_fill(~passes, -torch.inf), found.positions, k=asked.k), planned
        planned = self._masked(main, planned.wanted, None, asked)
        if planned.block is not None:
            return _in_blocks(main.vectors, query, [planned.block], k=asked.k), planned
        return _scan(main.vectors, query, [planned], k=asked.k), planned


def _in_blocks(vectors: VectorIndex, queries: Tensor, blocks: Sequence[RowBlock], *, k: int) -> Found:
    """Search the block of each query."""
    if not vectors.has_kept:
        return search_blocks(blocks, queries, k=k)
    return vectors.rescored(queries, search_blocks(blocks, queries, k=3 * k), k=k)


def _scan(vectors: VectorIndex, queries: Tensor, planned: Sequence[Planned], *, k: int) -> Found:
    is_masked = any(each.mask is not None for each in planned)
    return vectors.search(
        queries,
        k=k,
        masks=[each.mask for each in planned] if is_masked else None,
        probes=_one_or_each([each.plan.probes or max(1, vectors.num_clusters) for each in planned]),
        least=_one_or_each([each.plan.least for each in planned]),
    )


def _one_or_each(numbers: list[int]) -> int | Tensor:
    if not numbers:
        return 1
    return numbers[0] if min(numbers) == max(numbers) else torch.tensor(numbers)
