"""An index divided among several processes or machines, and their answers put together again.

    index ──part_of──► shard 0: the items whose number is a multiple of N      each with all centroids,
                       shard 1: those whose number leaves 1 …                  the rows of its own items,
                                                                               and the attributes of these
    queries ──► every shard ──► its best k, with their positions in the whole index ──► merged: the best k

*Who has an item*: shard `number % N`. So nothing must be looked up to find the owner of an item, new items included,
and the items of one cluster are spread over all shards: each query costs every shard about as much, and no shard is
busier because its items are in fashion.

*Exactness.* Every shard has all centroids, so it looks into the clusters that the whole index would look into. Its
rows are the same bytes, so an item's score has the same bits. Among equal scores the earlier position in the whole
index comes first, as there. What the whole index ranks among its best k, the item's shard ranks no worse, so where
the answer of the whole index is exact, the merged one is the same bit for bit. Otherwise it is at least as good in
each cluster: the first pass and the second look (`candidates`, `rerank`) keep as many rows of each shard as they
would keep of all.

Cost: the centroids and their scan are in each shard (4·√N vectors), the rest is divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl
import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from ziggurat.errors import ConfigError
from ziggurat.ops.scan import Found
from ziggurat.retrieval.changes import Live
from ziggurat.retrieval.filter_cache import FilterCache
from ziggurat.retrieval.filters import FilterIndex
from ziggurat.retrieval.item_index import ItemIndex
from ziggurat.retrieval.main_search import MainSearch, Wanted
from ziggurat.retrieval.segment import Segment
from ziggurat.retrieval.shard_numbers import check_shard
from ziggurat.retrieval.vectors import VectorIndex
from ziggurat.retrieval.vectors.best import best_of

_OF_ROWS = ("upper", "lower", "scales", "stored_order", "kept")  # buffers of a vector index with one entry a row


def is_of_shard(numbers: Int64[Tensor, "R"], *, shard: int, num_shards: int) -> Bool[Tensor, "R"]:
    """Mark the items that a shard has, by their numbers."""
    return numbers % num_shards == shard


@dataclass(frozen=True, kw_only=True, eq=False)
class PartFound:
    """The results that one shard found.

    Args:
        main: scores, and positions in the whole index, of items as they were when the index was built.
        fresh: scores and numbers of items that changed since; None: none did.
        plans: how each query was answered.
    """

    main: Found
    fresh: Found | None
    plans: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardChange:
    """The difference between the items of a shard and those that the index was built of.

    Args:
        numbers: items that are new or have changed.
        vectors: theirs.
        items: their lines of the catalogue.
        gone: numbers of items that were deleted.
    """

    numbers: Int64[Tensor, "M"]
    vectors: Float32[Tensor, "M D"]
    items: pl.DataFrame
    gone: Int64[Tensor, "G"]


class ShardIndex:
    """The items of one shard, with their positions in the whole index.

    Args:
        live: the items.
        positions: of the rows of its main segment, in the whole index.
        cache: of masks.
    """

    def __init__(self, live: Live, *, positions: Tensor, cache: FilterCache) -> None:
        self._live = live
        self._positions = positions
        self._cache = cache
        self._search_main = MainSearch(cache)

    @staticmethod
    def part_of(index: ItemIndex, *, items: pl.DataFrame | None, shard: int, num_shards: int) -> ShardIndex:
        """Take the items of one shard out of an index. Copies their rows, and indexes their attributes.

        Args:
            index: the whole, as it was built.
            items: the catalogue by number; needed where the index has filters.
            shard: from 0.
            num_shards: of the division.

        Raises:
            ConfigError: there is no such shard, or the catalogue is missing.
        """
        check_shard(shard, num_shards)
        whole = index.vectors
        numbers = whole.order
        positions = is_of_shard(numbers, shard=shard, num_shards=num_shards).nonzero().flatten()
        vectors = _rows_of(whole, positions)
        numbers = numbers[positions]
        filters = None
        if index.filters is not None:
            if items is None:
                raise ConfigError(
                    expected="the catalogue, to index the attributes of a shard's items",
                    found="none, and an index with filters",
                    where="ShardIndex.part_of, argument 'items'",
                    ways_out="give the frame that the index was built of",
                )
            own = index.filters
            # These lines are in the order of the shard's rows already, so no `order` is given.
            filters = FilterIndex.build(items[numbers.numpy()], config=own.config, schema=own.schema)
        main = Segment(vectors=vectors, filters=filters)
        live = Live(main=main, next_number=index.num_numbers)
        return ShardIndex(live, positions=positions, cache=FilterCache(index.config.cache_bytes))

    def __len__(self) -> int:
        live = self._live
        return live.main.num_alive() + (live.fresh.num_alive() if live.fresh else 0)

    @property
    def dim(self) -> int:
        """Numbers of a vector."""
        return self._live.main.vectors.dim

    def changed(self, change: ShardChange) -> ShardIndex:
        """The shard with other items; this one, which must be as it was built, stays as it is.

        Raises:
            DataError: vectors or lines do not fit.
        """
        live = self._live
        if len(change.gone):
            live = live.without(change.gone)
        if len(change.numbers):
            live = live.with_items(change.numbers, vectors=change.vectors, items=change.items)
        # A cache of its own: the masks in the other one are of the items as they were.
        return ShardIndex(live, positions=self._positions, cache=FilterCache(self._cache.most_bytes))

    def search(
        self,
        queries: Float[Tensor, "Q D"],
        *,
        k: int,
        filters: Sequence[Wanted],
        exclude: Sequence[Tensor | None],
        probes: int,
    ) -> PartFound:
        """Find the best k items of the shard for each query.

        Args:
            queries: finite numbers.
            k: items wanted.
            filters: one a query; None for all items.
            exclude: numbers of items never to return, one tensor a query; those of other shards do nothing.
            probes: clusters to look into without a filter.

        Raises:
            FilterError, DataError, ConfigError: as `ItemIndex.search`.
        """
        live = self._live
        found, plans = self._search_main(live.main, queries, k=k, filters=filters, exclude=exclude, probes=probes)
        whole = found.positions
        if len(self._positions):
            # Empty places are −1, which would read the last position: looked up as 0, and then made −1 again.
            whole = self._positions[found.positions.clamp(min=0)].masked_fill(found.positions < 0, -1)
        fresh = None
        if live.fresh is not None:
            fresh = live.fresh.search_whole(queries, k=k, filters=filters, exclude=exclude)
        return PartFound(main=Found(found.scores, whole), fresh=fresh, plans=tuple(map(str, plans)))


def merged(parts: Sequence[PartFound], *, order: Tensor, k: int) -> Found:
    """The best k of what some shards found; the positions of the result are numbers of items.

    Args:
        parts: one a shard that answered, at least one.
        order: numbers of the items by their position in the whole index.
        k: items wanted.
    """
    # By score, and among equal ones by position in the whole index: the order of one index that has all rows.
    found = best_of(
        torch.cat([part.main.scores for part in parts], 1), torch.cat([part.main.positions for part in parts], 1), k=k
    )
    numbers = found.positions
    if len(order):
        # As above: −1 is no position to look up.
        numbers = order[found.positions.clamp(min=0)].to(torch.int64).masked_fill(found.positions < 0, -1)
    fresh = [part.fresh for part in parts if part.fresh is not None]
    if not fresh:
        return Found(found.scores, numbers)
    scores = torch.cat([found.scores, *(each.scores for each in fresh)], 1)
    return best_of(scores, torch.cat([numbers, *(each.positions for each in fresh)], 1), k=k)


def _rows_of(whole: VectorIndex, positions: Int64[Tensor, "R"]) -> VectorIndex:
    """The index of some rows, with all clusters of the whole one; those that have none of the rows are empty."""
    state = dict(whole.state_dict())
    for name in _OF_ROWS:
        if len(state[name]) == len(whole):  # vectors may not be kept
            state[name] = state[name][positions]
    # Positions ascend, so a cluster's rows stay side by side; as many positions lie below its bound as rows before it.
    bounds = torch.searchsorted(positions, state["offsets"])
    state["offsets"] = bounds.to(state["offsets"].dtype)
    part = VectorIndex()
    part.load_state_dict(state, assign=True)
    return part
