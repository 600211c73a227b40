"""MemoryBudget: memory for rows that are held in front of a slower one, shared by the storages of a process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

LEAST_PLACES = 1024


class Holds(Protocol):
    """A storage that holds some of its rows."""

    num_rows: int

    @property
    def held_row_bytes(self) -> int:
        """Of a row that is held, with the optimizer's numbers."""
        ...


@dataclass(eq=False)
class MemoryBudget:
    """Memory for rows that are held, shared by the storages of a process in proportion to their rows.

    Args:
        num_bytes: in all; or None.
        share: of all rows, where no bytes are given.
    """

    num_bytes: int | None = None
    share: float = 0.1
    _members: list[Holds] = field(default_factory=list)

    def join(self, storage: Holds) -> None:
        """Take part from now on."""
        self._members.append(storage)

    def places(self, storage: Holds) -> int:
        """How many rows a storage may hold."""
        if self.num_bytes is None:
            return max(LEAST_PLACES, int(self.share * storage.num_rows))
        whole = sum(each.num_rows * each.held_row_bytes for each in self._members)
        return max(LEAST_PLACES, int(storage.num_rows * self.share_of(whole)))

    def share_of(self, whole_bytes: int) -> float:
        """The share of the rows that may be held, where all of them would take so many bytes."""
        return self.share if self.num_bytes is None else min(1.0, self.num_bytes / max(whole_bytes, 1))
