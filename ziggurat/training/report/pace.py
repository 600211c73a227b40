"""Pace: how many samples a second a run trains, as a whole and since it was last asked.

The first step is kept apart: it compiles, allocates and warms caches, and would make a short run look slow.
"""

from __future__ import annotations


class Pace:
    """Seconds and samples of the steps of one process.

    Attributes:
        first_step_s: how long the first step took; 0 before it.
    """

    def __init__(self) -> None:
        self.first_step_s = 0.0
        self._whole = (0.0, 0)
        self._last = (0.0, 0)

    def count(self, seconds: float, *, rows: int) -> None:
        """One step, of so many seconds and samples."""
        if not self.first_step_s:
            self.first_step_s = seconds
            return
        self._whole = (self._whole[0] + seconds, self._whole[1] + rows)
        self._last = (self._last[0] + seconds, self._last[1] + rows)

    @property
    def samples_per_s(self) -> float:
        """Samples a second of all steps but the first; 0 before the second."""
        return _rate(self._whole)

    def since_last(self) -> float:
        """The same since this was last called."""
        rate, self._last = _rate(self._last), (0.0, 0)
        return rate


def _rate(counted: tuple[float, int]) -> float:
    seconds, rows = counted
    return rows / seconds if seconds else 0.0
