"""The results of the latest calls, by name: filters that were read, programs that are ready, masks."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """A cache that forgets what was not asked for longest; several threads may use it.

    A copy begins empty, since what is kept may hold addresses or belong to the module that was copied.

    Args:
        most: results to keep.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K, *, make: Callable[[], V]) -> V:
        """The result of a key, made if it is not there. Two threads may both make it."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        # Outside the lock, so that other threads do not wait for it.
        made = make()
        with self._lock:
            self._kept[key] = made
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return made

    def clear(self) -> None:
        """Forget everything that is kept."""
        with self._lock:
            self._kept.clear()

    def __len__(self) -> int:
        return len(self._kept)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._most,)
