"""Changes of an index while it serves: each makes a new state, which shares with the old one what did not change.

    add 3 items      fresh segment: built anew of what it had and the 3
    update 2         the 2 are deleted in both segments, then added under their old numbers
    delete 1         a bit is cleared in a copy of the tombstones of its segment

An addition costs time in proportion to the fresh segment (its attributes are indexed anew: a few milliseconds for a
thousand items), so give many items at once and merge when it has grown to some ten thousand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import polars as pl
import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from ziggurat.errors import DataError
from ziggurat.ops.bitmask import rows_of_mask
from ziggurat.retrieval.filters import Filter, FilterIndex
from ziggurat.retrieval.segment import Segment
from ziggurat.retrieval.vectors import VectorIndex, VectorIndexConfig


@dataclass(frozen=True, kw_only=True, eq=False)
class Change:
    """One change, to be repeated on an index that was merged meanwhile.

    Args:
        version: of the index after it.
        numbers: items that changed.
        vectors: their new vectors; None: they were deleted.
        items: their new lines.
    """

    version: int
    numbers: Int64[Tensor, "M"]
    vectors: Float[Tensor, "M D"] | None = None
    items: pl.DataFrame | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Live:
    """The state of an index at one moment.

    Args:
        main: the clustered segment.
        next_number: what the next new item is called.
        version: number of changes since it was built.
        fresh: the latest items; None: there are none.
        fresh_vectors: as they were given, in the order of `fresh_numbers`.
        fresh_items: their lines.
        fresh_numbers: their numbers.
        log: all changes since the index was built.
    """

    main: Segment
    next_number: int
    version: int = 0
    fresh: Segment | None = None
    fresh_vectors: Float[Tensor, "M D"] | None = None
    fresh_items: pl.DataFrame | None = None
    fresh_numbers: Int64[Tensor, "M"] | None = None
    log: tuple[Change, ...] = ()

    def without(self, numbers: Int64[Tensor, "M"]) -> Live:
        """The state in which these items are deleted."""
        version = self.version + 1
        log = (*self.log, Change(version=version, numbers=numbers))
        fresh = None if self.fresh is None else self.fresh.without(numbers)
        return replace(self, main=self.main.without(numbers), fresh=fresh, version=version, log=log)

    def with_items(
        self, numbers: Int64[Tensor, "M"], *, vectors: Float[Tensor, "M D"], items: pl.DataFrame | None
    ) -> Live:
        """The state in which these items are as given, and nothing else of that number.

        Raises:
            DataError: vectors or lines do not fit the index.
        """
        self._check(vectors, items, len(numbers))
        vectors = vectors.detach().to("cpu", torch.float32)
        kept_vectors = vectors
        kept_numbers = numbers
        kept_items = items
        if self.fresh_vectors is not None and self.fresh_numbers is not None and self.fresh is not None:
            # The fresh segment is built anew anyway, so its deleted items are dropped here.
            stays = ~torch.isin(self.fresh_numbers, numbers) & self._is_alive(self.fresh_numbers)
            kept_vectors = torch.cat([self.fresh_vectors[stays], vectors])
            kept_numbers = torch.cat([self.fresh_numbers[stays], numbers])
            if items is not None and self.fresh_items is not None:
                kept_items = pl.concat([self.fresh_items.filter(pl.Series(stays.numpy())), items])
        version = self.version + 1
        return replace(
            self,
            main=self.main.without(numbers),
            next_number=max(self.next_number, int(numbers.max()) + 1 if len(numbers) else 0),
            version=version,
            fresh=self._segment(kept_vectors, kept_numbers, kept_items),
            fresh_vectors=kept_vectors,
            fresh_items=kept_items,
            fresh_numbers=kept_numbers,
            log=(*self.log, Change(version=version, numbers=numbers, vectors=vectors, items=items)),
        )

    def all_alive(self) -> tuple[Float[Tensor, "N D"], Int64[Tensor, "N"]]:
        """Vectors and numbers of every item that is alive, by number."""
        alive = rows_of_mask(self.main.base_mask())
        vectors = self.main.vectors.vectors(alive)
        numbers = self.main.numbers_at(alive)
        if self.fresh_vectors is not None and self.fresh_numbers is not None:
            stays = self._is_alive(self.fresh_numbers)
            vectors = torch.cat([vectors, self.fresh_vectors[stays]])
            numbers = torch.cat([numbers, self.fresh_numbers[stays]])
        order = numbers.argsort()
        return vectors[order], numbers[order]

    def passing(self, wanted: Filter | str | None, *, exclude: Int64[Tensor, "R"] | None = None) -> Bool[Tensor, "N"]:
        """Mark the items that pass a filter, are alive and are not excluded, by number."""
        found = torch.zeros(self.next_number, dtype=torch.bool)
        for segment in self.segments():
            mask = segment.base_mask() if wanted is None else segment.mask(wanted)
            if exclude is not None and len(exclude):
                segment.clear(mask, exclude)
            found[segment.numbers_at(rows_of_mask(mask))] = True
        return found

    def vectors_of(self, numbers: Int64[Tensor, "n"]) -> Float32[Tensor, "n D"]:
        """The vectors of items as searches multiply them; those of deleted items are what they were last."""
        found = torch.empty(len(numbers), self.main.vectors.dim)
        for segment in self.segments():
            # The fresh segment comes last, so that its newer version of an item overwrites that of the main one.
            positions = segment.positions_of(numbers)
            found[positions >= 0] = segment.vectors.vectors(positions[positions >= 0])
        return found

    def segments(self) -> tuple[Segment, ...]:
        """The main segment, then the fresh one, which holds the newer version of an item that is in both."""
        return (self.main,) if self.fresh is None else (self.main, self.fresh)

    def _is_alive(self, numbers: Tensor) -> Tensor:
        # Without a fresh segment nothing is alive in it.
        if self.fresh is None:
            return torch.zeros(len(numbers), dtype=torch.bool)
        positions = rows_of_mask(self.fresh.base_mask())
        return torch.isin(numbers, self.fresh.numbers_at(positions))

    def _segment(self, vectors: Tensor, numbers: Tensor, items: pl.DataFrame | None) -> Segment:
        config = VectorIndexConfig(num_clusters=1, kept=self.main.vectors.kept_kind)
        index = VectorIndex.build(vectors, config=config)
        filters = None
        if items is not None and self.main.filters is not None:
            own = self.main.filters
            filters = FilterIndex.build(items, order=index.order, config=own.config, schema=own.schema)
        index.rename(numbers)
        return Segment(vectors=index, filters=filters)

    def _check(self, vectors: Tensor, items: pl.DataFrame | None, num: int) -> None:
        dim = self.main.vectors.dim
        has_filters = self.main.filters is not None
        lines = 0 if items is None else len(items)
        if vectors.dim() != 2 or vectors.shape != (num, dim) or (has_filters and lines != num):
            expected = f"{num:,} vectors of {dim} numbers" + (", and a line for each" if has_filters else "")
            raise DataError(
                expected=expected,
                found=f"a tensor of shape {tuple(vectors.shape)}, {lines:,} lines",
                where="a change of an ItemIndex",
                ways_out="give one row and one line for each item, with the columns that the index was built with",
            )
