"""Masks of the latest filters, and copies of the rows of those that come again; bounded by bytes.

A mask of a million items takes 50 to 250 µs to compute and 125 kB to keep; a search takes 60 µs. A filter that lets few
rows pass is answered from a copy of these rows (`RowBlock`) from its second use on.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from jaxtyping import Int64
from torch import Tensor

from ziggurat.ops.bitmask import count
from ziggurat.retrieval.vectors import RowBlock


@dataclass(kw_only=True, eq=False)
class CachedFilter:
    """A filter that was used.

    Args:
        mask: the rows that pass.
        passing: how many.
        uses: searches with it.
        block: its rows side by side, if they are kept.
    """

    mask: Int64[Tensor, "W"]
    passing: int
    uses: int = 0
    block: RowBlock | None = None

    def num_bytes(self) -> int:
        """Memory of the mask and the rows."""
        return self.mask.nbytes + (self.block.num_bytes() if self.block else 0)


class FilterCache:
    """Forgets what was not used for longest, as soon as all takes more than `most_bytes`; threads may share it.

    Args:
        most_bytes: bound of masks and blocks together.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.num_bytes = 0
        self.hits = 0
        self.misses = 0
        self._kept: OrderedDict[Hashable, CachedFilter] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, *, make: Callable[[], Int64[Tensor, "W"]]) -> tuple[CachedFilter, bool]:
        """The mask of a filter, and whether it was there."""
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                found.uses += 1
                self.hits += 1
                return found, True
            self.misses += 1
        # Outside the lock, so that other threads do not wait for it. Two may make the same mask; the first one is kept.
        mask = make()
        made = CachedFilter(mask=mask, passing=int(count(mask)), uses=1)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = made
                self.num_bytes += made.num_bytes()
                self._shrink()
        return made, False

    def keep_block(self, key: Hashable, kept: CachedFilter, block: RowBlock) -> None:
        """Keep the rows of a filter side by side."""
        with self._lock:
            # Evicted or replaced meanwhile, the filter would add bytes here that no eviction takes away again.
            if self._kept.get(key) is kept and kept.block is None:
                kept.block = block
                self.num_bytes += block.num_bytes()
                self._shrink()

    def clear(self) -> None:
        """Forget everything: other rows pass from now on."""
        with self._lock:
            self._kept.clear()
            self.num_bytes = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def _shrink(self) -> None:
        while self.num_bytes > self.most_bytes and self._kept:
            self.num_bytes -= self._kept.popitem(last=False)[1].num_bytes()
