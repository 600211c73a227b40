"""A segment: vectors and attributes of some items in one order, and who of them is still there.

    main segment     clusters, many items, never changed in place      ┐  searched together, best k of both
    fresh segment    one cluster, the latest items, built anew         ┘
    tombstones       a bit an item: deleted, or a newer version is in the fresh segment

Segments are values: a change makes new ones, so a search that is under way sees one state from begin to end.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ziggurat.errors import ConfigError
from ziggurat.ops.bitmask import count, full_mask
from ziggurat.ops.mask_program import clear_rows
from ziggurat.ops.scan import Found
from ziggurat.retrieval.filters import Filter, FilterIndex
from ziggurat.retrieval.planner import Planner
from ziggurat.retrieval.vectors import VectorIndex


@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """Items that are searched together.

    Args:
        vectors: their index; its `order` holds the items' numbers.
        filters: their attributes, by position; None: no filters.
        alive: bits of the positions that may be found; None: all.
    """

    vectors: VectorIndex
    filters: FilterIndex | None
    alive: Int64[Tensor, "W"] | None = None

    @functools.cached_property
    def planner(self) -> Planner:
        """The planner that chooses how a query of these items is answered."""
        own = self.vectors
        return Planner(num_rows=len(own), num_clusters=own.num_clusters, row_bytes=own.row_bytes)

    def num_alive(self) -> int:
        """Items that are not deleted."""
        return len(self.vectors) if self.alive is None else int(count(self.alive))

    def base_mask(self) -> Int64[Tensor, "W"]:
        """A copy of the bits of the items that are not deleted."""
        return full_mask(len(self.vectors)) if self.alive is None else self.alive.clone()

    def mask(self, wanted: Filter | str) -> Int64[Tensor, "W"]:
        """The items that pass a filter and are not deleted.

        Raises:
            ConfigError: the index was built without attributes.
            FilterError: the filter cannot be read.
        """
        mask = self._filters(wanted).masks([wanted])[0]
        return mask if self.alive is None else mask & self.alive

    def explain(self, wanted: Filter | str, position: int) -> str:
        """Explain why an item passes a filter, or does not."""
        return self._filters(wanted).explain(wanted, position)

    def is_alive(self, position: int) -> bool:
        """Return whether the item at a position is not deleted."""
        return self.alive is None or bool((self.alive[position // 64] >> (position % 64)) & 1)

    def positions_of(self, numbers: Int64[Tensor, "R"]) -> Int64[Tensor, "R"]:
        """The positions of items; −1 for those that are not here."""
        order, by_number = self._sorted_numbers()
        if not len(order):
            return torch.full_like(numbers, -1)
        # A number above all others would be looked for behind the end.
        places = torch.searchsorted(order, numbers.to(order.dtype)).clamp(max=len(order) - 1)
        return torch.where(order[places] == numbers, by_number[places], -1)

    def without(self, numbers: Int64[Tensor, "R"]) -> Segment:
        """The segment in which these items are deleted, those of them that are in it."""
        positions = self.positions_of(numbers)
        positions = positions[positions >= 0]
        if not len(positions):
            return self
        alive = self.base_mask()
        clear_rows(alive, positions)
        gone = replace(self, alive=alive)
        # A deletion changes no number, so the sorted ones are shared instead of sorted again.
        if "_numbers" in self.__dict__:
            object.__setattr__(gone, "_numbers", self.__dict__["_numbers"])
        return gone

    def clear(self, mask: Int64[Tensor, "W"], numbers: Int64[Tensor, "R"] | Sequence[int]) -> None:
        """Take items out of a mask, those of them that are here."""
        positions = self.positions_of(torch.as_tensor(numbers, dtype=torch.int64))
        clear_rows(mask, positions[positions >= 0])

    def numbers_at(self, positions: Int64[Tensor, "*S"]) -> Int64[Tensor, "*S"]:
        """The numbers of items at positions; −1 where a position is −1."""
        order = self.vectors.stored_order
        if not len(order):
            return positions
        return order[positions].to(torch.int64).masked_fill_(positions < 0, -1)

    def search_whole(
        self,
        queries: Float[Tensor, "Q D"],
        *,
        k: int,
        filters: Sequence[Filter | str | None],
        exclude: Sequence[Tensor | None],
    ) -> Found:
        """Find the best k of all items of the segment; the positions of the result are numbers of items."""
        masks = []
        for wanted, seen in zip(filters, exclude, strict=True):
            mask = self.base_mask() if wanted is None else self.mask(wanted)
            if seen is not None and len(seen):
                self.clear(mask, seen)
            masks.append(mask)
        found = self.vectors.search(queries, k=k, masks=masks, probes=max(1, self.vectors.num_clusters))
        return Found(found.scores, self.numbers_at(found.positions))

    def _filters(self, wanted: Filter | str) -> FilterIndex:
        if self.filters is None:
            raise ConfigError(
                expected="an index with the attributes of its items",
                found=f"the filter {wanted!s:.80}, and an index of vectors alone",
                where="ItemIndex",
                ways_out=("build with ItemIndex.build(vectors, items=frame)", "search without a filter"),
            )
        return self.filters

    def _sorted_numbers(self) -> tuple[Tensor, Tensor]:
        """The items' numbers, ascending, and the position of each; made when first asked for."""
        if "_numbers" not in self.__dict__:
            numbers, positions = self.vectors.order.sort()
            object.__setattr__(self, "_numbers", (numbers.to(torch.int32), positions))
        return self.__dict__["_numbers"]
