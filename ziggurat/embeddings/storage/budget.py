"""MemoryBudget: memory for rows that are held in front of a slower one, shared by the storages of a process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from ziggurat.ops.machine.memory import size_text

MIN_PLACES = 1024  # rows that a storage may hold, however little was asked for


class Holds(Protocol):
    """A storage that holds some of its rows."""

    num_rows: int

    @property
    def held_row_bytes(self) -> int:
        """The bytes of a row that is held, with the optimizer's numbers."""
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
        """Return how many rows a storage may hold."""
        return max(MIN_PLACES, self._asked(storage))

    def held_text(self, storage: Holds, *, num_places: int, num_bytes: int) -> str:
        """Say how many rows a storage holds, for the start-up report, and where that is more than was asked for.

        Args:
            storage: that holds them.
            num_places: how many it may hold.
            num_bytes: what they take.
        """
        held = min(num_places, storage.num_rows)
        text = f"{held:,} of {storage.num_rows:,} rows ({size_text(num_bytes)})"
        asked = self._asked(storage)
        if held <= asked:
            return text
        return f"{text}: {asked:,} {'was' if asked == 1 else 'were'} asked for, and {MIN_PLACES:,} are the fewest"

    def share_of(self, whole_bytes: int) -> float:
        """The share of the rows that may be held, where all of them would take so many bytes."""
        return self.share if self.num_bytes is None else min(1.0, self.num_bytes / max(whole_bytes, 1))

    def _asked(self, storage: Holds) -> int:
        """Return the number of rows of a storage that the memory is enough for."""
        if self.num_bytes is None:
            return int(self.share * storage.num_rows)
        whole = sum(each.num_rows * each.held_row_bytes for each in self._members)
        return int(storage.num_rows * self.share_of(whole))
