"""Items by vector and filter: vectors, attributes, the planner of a query, and changes while it serves, in one module.

    query, filter ──► mask (from the cache, or the attributes' planes) ──► plan ──► main segment ─┐
                                                                                                 ├─► best k ──► numbers
                                                            every row ──► fresh segment ─────────┘

An item's *number* is its line in the catalogue that the index was built of; items that are added get the numbers that
follow. Numbers stay what they are through changes and `merged`.

*Changes.* `add`, `update` and `delete` make a new fresh segment and new tombstones, and put both in place at once: a
search sees the state before or after, never between. The fresh segment is small and read whole. `merged` builds a new
index of everything that is alive, in the background if the caller has a thread for it; what changed meanwhile is
brought over by `catch_up`. Every change raises `version`.

The state (`state_dict`, `from_state`) is the main segment with its tombstones; with a fresh segment it is refused,
since what an export holds must be clustered: merge first.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import polars as pl
import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor, nn

from ziggurat.data.raw.frames import as_polars
from ziggurat.errors import ConfigError, DataError
from ziggurat.retrieval.changes import Live
from ziggurat.retrieval.checks import checked_numbers, one_a_query
from ziggurat.retrieval.filter_cache import FilterCache
from ziggurat.retrieval.filters import Filter, FilterConfig, FilterIndex
from ziggurat.retrieval.main_search import MainSearch, Wanted
from ziggurat.retrieval.planner import Plan
from ziggurat.retrieval.segment import Segment
from ziggurat.retrieval.vectors import VectorIndex, VectorIndexConfig
from ziggurat.retrieval.vectors.best import best_of
from ziggurat.retrieval.vectors.checks import as_matrix, check_count
from ziggurat.typed import Range, checked


@dataclass(frozen=True, kw_only=True)
@checked
class ItemIndexConfig:
    """Settings for building an index of items.

    Args:
        vectors: clusters, and what is kept to score candidates again.
        filters: attributes and their planes.
        cache_bytes: bound of the masks and rows that are kept for frequent filters; 0: none are.
    """

    vectors: VectorIndexConfig = field(default_factory=VectorIndexConfig)
    filters: FilterConfig = field(default_factory=FilterConfig)
    cache_bytes: Annotated[int, Range(0, 2**40)] = 256 * 2**20


@dataclass(frozen=True, kw_only=True, eq=False)
class Answers:
    """The best items of each query, best first.

    Args:
        scores: inner products; −∞ where fewer than k items pass.
        items: numbers of the items; −1 there.
        plans: how each query was answered, in the main segment.
        version: state of the index that answered.
    """

    scores: Float32[Tensor, "Q K"]
    items: Int64[Tensor, "Q K"]
    plans: tuple[Plan, ...]
    version: int


class ItemIndex(nn.Module):
    """Finds items by inner product and filter; `build` makes one, `from_state` loads one.

    Args:
        vectors: index of the vectors; its order holds the numbers of the items.
        filters: attributes of the items, in the same order; None: no filters.
        alive: bits of the positions that may be found; None: all.
        config: settings; those of the cache count.
    """

    def __init__(
        self,
        vectors: VectorIndex,
        *,
        filters: FilterIndex | None = None,
        alive: Tensor | None = None,
        config: ItemIndexConfig | None = None,
    ) -> None:
        super().__init__()
        self.config = config or ItemIndexConfig()
        self.vectors = vectors
        self.filters = filters
        self.cache = FilterCache(self.config.cache_bytes)
        main = Segment(vectors=vectors, filters=filters, alive=alive)
        # Behind the largest number that was ever given, so that none comes twice.
        next_number = int(vectors.stored_order.max()) + 1 if len(vectors) else 0
        self._live = Live(main=main, next_number=next_number)
        self._writing = threading.Lock()
        self._search_main = MainSearch(self.cache)

    @classmethod
    def build(
        cls,
        vectors: Float[Tensor, "N D"],
        *,
        items: object = None,
        numbers: Int64[Tensor, "N"] | None = None,
        config: ItemIndexConfig | None = None,
    ) -> ItemIndex:
        """Index vectors, and the attributes of their items.

        Args:
            vectors: one row an item, finite.
            items: a frame of one line an item, in the same order; without it there are no filters.
            numbers: what items are called in answers, each once; 0, 1, 2, … unless given.
            config: settings.

        Raises:
            DataError: vectors are not finite, or items and vectors are not as many.
        """
        config = config or ItemIndexConfig()
        vectors = as_matrix(vectors, argument="vectors")
        items = None if items is None else as_polars(items, where="ItemIndex.build, argument 'items'")
        if items is not None and len(items) != len(vectors):
            raise DataError(
                expected=f"one line for each of {len(vectors):,} vectors",
                found=f"{len(items):,} lines",
                where="ItemIndex.build, argument 'items'",
                ways_out="give the catalogue that the vectors were computed from, in its order",
            )
        index = VectorIndex.build(vectors, config=config.vectors)
        # Before `rename`: until then the order holds lines of `items`, afterwards the caller's numbers.
        filters = None if items is None else FilterIndex.build(items, order=index.order, config=config.filters)
        if numbers is not None:
            index.rename(numbers)
        return cls(index, filters=filters, config=config)

    @classmethod
    def from_state(
        cls, state: Mapping[str, Tensor], *, prefix: str = "", config: ItemIndexConfig | None = None
    ) -> ItemIndex:
        """The index whose `state_dict` this is; tensors are kept, not copied. Items get numbers behind the largest."""
        own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        vectors = VectorIndex()
        parts = {name.removeprefix("vectors."): value for name, value in own.items() if name.startswith("vectors.")}
        vectors.load_state_dict(parts, assign=True)
        filters = FilterIndex.from_state(own, prefix="filters.") if "filters.about" in own else None
        return cls(vectors, filters=filters, alive=own.get("alive"), config=config)

    def __len__(self) -> int:
        """Items that are alive."""
        live = self._live
        return live.main.num_alive() + (live.fresh.num_alive() if live.fresh else 0)

    @property
    def num_numbers(self) -> int:
        """The number that the next new item gets."""
        return self._live.next_number

    @property
    def version(self) -> int:
        """Number of changes since the index was built."""
        return self._live.version

    @property
    def num_unmerged(self) -> int:
        """Items that changed since the main segment was built: those in the fresh one, and those deleted here."""
        live = self._live
        gone = len(live.main.vectors) - live.main.num_alive()
        return gone + (live.fresh.num_alive() if live.fresh else 0)

    def fork(self) -> ItemIndex:
        """An index of the same items that changes on its own; nothing is copied but what its changes will make."""
        index = ItemIndex(self.vectors, filters=self.filters, config=self.config)
        # The state is never changed in place, so both may hold the same one until either changes.
        index._live = self._live
        return index

    def search(
        self,
        queries: Float[Tensor, "Q D"],
        *,
        k: int,
        filters: Sequence[Wanted] | None = None,
        exclude: Sequence[Int64[Tensor, "_"] | None] | None = None,
        probes: int | None = None,
    ) -> Answers:
        """Find the best k items of each query among those that pass its filter.

        Args:
            queries: finite numbers.
            k: items wanted.
            filters: one a query (text, a parsed filter, or None).
            exclude: numbers of items never to return, one tensor a query (already seen); unknown numbers do nothing.
            probes: clusters to look into without a filter; with one, more by its selectivity. None: the index chooses.

        Raises:
            FilterError: a filter cannot be read.
            DataError: queries are of another width, or not finite.
            ConfigError: k or probes is impossible, or filters or exclude are not as many as queries.
        """
        if probes is not None:
            check_count(probes, 0, 2**31 - 1, name="probes", ways_out="leave it out: the index chooses")
        queries = as_matrix(queries, argument="queries")
        # Taken once: a change puts another state in place, and this search goes on with its own.
        live = self._live
        num = len(queries)
        wanted = one_a_query(filters, num, name="filters")
        seen = one_a_query(exclude, num, name="exclude")
        base = probes or self.vectors.probes_for(k)
        found, plans = self._search_main(live.main, queries, k=k, filters=wanted, exclude=seen, probes=base)
        items = live.main.numbers_at(found.positions)
        scores = found.scores
        if live.fresh is not None:
            own = live.fresh.search_whole(queries, k=k, filters=wanted, exclude=seen)
            # Both segments have their own best, and the best of both are among these.
            scores, items = best_of(torch.cat([scores, own.scores], 1), torch.cat([items, own.positions], 1), k=k)
        return Answers(scores=scores, items=items, plans=plans, version=live.version)

    def add(self, vectors: Float[Tensor, "M D"], *, items: object = None) -> Int64[Tensor, "M"]:
        """Add items; searches that begin from now on find them.

        Args:
            vectors: one row an item.
            items: their lines, with the columns that the index was built with.

        Returns:
            The numbers of the new items.

        Raises:
            DataError: vectors are of another width or not finite, or the lines do not fit.
        """
        vectors = as_matrix(vectors, argument="vectors")
        items = None if items is None else as_polars(items, where="ItemIndex.add, argument 'items'")
        # One change at a time, as each begins from the state that it finds.
        with self._writing:
            begin = self._live.next_number
            numbers = torch.arange(begin, begin + len(vectors))
            self._put(numbers, vectors, items)
        return numbers

    def update(self, numbers: Int64[Tensor, "M"], vectors: Float[Tensor, "M D"], *, items: object = None) -> None:
        """Give items new vectors and attributes; items that were deleted come back.

        Raises:
            DataError: as for `add`; or a number was never given to an item, or comes twice.
        """
        vectors = as_matrix(vectors, argument="vectors")
        items = None if items is None else as_polars(items, where="ItemIndex.update, argument 'items'")
        numbers = checked_numbers(numbers, self._live.next_number)
        with self._writing:
            self._put(numbers, vectors, items)

    def reserve(self, num: int) -> None:
        """Count all numbers below `num` as given, so that `update` may name them."""
        with self._writing:
            self._live = replace(self._live, next_number=max(self._live.next_number, num))

    def delete(self, numbers: Int64[Tensor, "M"] | Sequence[int]) -> None:
        """Take items out of every search that begins from now on; unknown numbers are refused.

        Raises:
            DataError: a number was never given to an item, or comes twice.
        """
        numbers = checked_numbers(numbers, self._live.next_number)
        with self._writing:
            self._become(self._live.without(numbers))

    def passing(self, wanted: Wanted, *, exclude: Int64[Tensor, "R"] | None = None) -> Bool[Tensor, "N"]:
        """Mark the items that pass a filter and are not excluded, by number."""
        return self._live.passing(wanted, exclude=exclude)

    def vectors_of(self, numbers: Int64[Tensor, "n"]) -> Float32[Tensor, "n D"]:
        """The vectors of items, as searches multiply them."""
        return self._live.vectors_of(numbers)

    def notes(self, wanted: Filter | str) -> tuple[str, ...]:
        """Values in a filter that no item has, with the nearest that some have."""
        of_segments = [each.filters.notes(wanted) for each in self._live.segments() if each.filters is not None]
        # Of a segment that has the value nothing is said, so it is absent only where all segments say so.
        absent = [{note.partition(";")[0] for note in notes} for notes in of_segments[1:]]
        first = of_segments[0] if of_segments else []
        return tuple(note for note in first if all(note.partition(";")[0] in each for each in absent))

    def mask(self, wanted: Wanted) -> Int64[Tensor, "W"]:
        """The positions of the main segment that pass a filter and are not deleted, as bits."""
        main = self._live.main
        return main.base_mask() if wanted is None else main.mask(wanted)

    def explain(self, wanted: Filter | str, number: int) -> str:
        """Say why an item passes a filter or does not, or that it is deleted.

        Raises:
            DataError: no item has this number.
            ConfigError: the index has no attributes.
        """
        live = self._live
        # The fresh segment first: an item that was updated stands in both.
        for segment in (live.fresh, live.main):
            position = -1 if segment is None else int(segment.positions_of(torch.tensor([number]))[0])
            if segment is not None and position >= 0 and segment.is_alive(position):
                return segment.explain(wanted, position)
        checked_numbers([number], live.next_number)
        return f"item {number} is deleted"

    def merged(self, items: pl.DataFrame | None = None) -> ItemIndex:
        """Build an index of everything that is alive now, while this one serves; numbers stay.

        Args:
            items: the lines of the catalogue by number, those of added and updated items included (lines of deleted
                items are passed over); needed if the index has filters.

        Raises:
            DataError: there are fewer lines than numbers.
        """
        live = self._live
        vectors, numbers = live.all_alive()
        lines = None
        if self.filters is not None:
            if items is None or len(items) < live.next_number:
                raise DataError(
                    expected=f"the lines of all {live.next_number:,} items by number",
                    found="none" if items is None else f"{len(items):,} lines",
                    where="ItemIndex.merged, argument 'items'",
                    ways_out="give the catalogue with the lines of added items behind the others",
                )
            lines = items[numbers.numpy()]
        index = ItemIndex.build(vectors, items=lines, numbers=numbers, config=self._config_as_built())
        grown = index.vectors.num_clusters / max(1, self.vectors.num_clusters)  # the same share of more clusters
        probes = math.ceil(self.vectors.default_probes * max(1.0, grown))
        index.vectors.keep_tuned(probes, k=self.vectors.tuned_k)
        index._live = replace(index._live, version=live.version, next_number=live.next_number)
        return index

    def catch_up(self, other: ItemIndex) -> None:
        """Repeat the changes that `other` has seen since this one was made of it by `merged`.

        Raises:
            ConfigError: this index is newer than `other`.
        """
        if self.version > other.version:
            raise ConfigError(
                expected="the index that this one was merged from",
                found=f"version {other.version}, older than {self.version}",
                where="ItemIndex.catch_up",
                ways_out="call merged.catch_up(old), not the other way round",
            )
        for change in other._live.log:
            if change.version > self.version:
                with self._writing:
                    if change.vectors is None:
                        self._become(self._live.without(change.numbers))
                    else:
                        self._put(change.numbers, change.vectors, change.items)

    def _put(self, numbers: Tensor, vectors: Tensor, items: pl.DataFrame | None) -> None:
        self._become(self._live.with_items(numbers, vectors=vectors, items=items))

    def _become(self, live: Live) -> None:
        tombstones_changed = live.main is not self._live.main
        self._live = live
        if tombstones_changed:
            self.cache.clear()  # masks hold the bits of deleted items; a search that runs now made its own before

    def _config_as_built(self) -> ItemIndexConfig:
        """The settings, with what the stored index says where it was loaded from a state."""
        own = replace(self.config.vectors, kept=self.vectors.kept_kind, probes=self.vectors.default_probes)
        filters = self.config.filters if self.filters is None else self.filters.config
        return replace(self.config, vectors=own, filters=filters)

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        live = self._live
        if live.fresh is not None:
            raise ConfigError(
                expected="an index without items that were added since it was built",
                found=f"{live.fresh.num_alive():,} items in the fresh segment",
                where="the state of an ItemIndex",
                ways_out="save index.merged(items) instead",
            )
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if live.main.alive is not None:
            destination[prefix + "alive"] = live.main.alive
