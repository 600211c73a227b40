"""Pace: how many samples a second a run trains, and how much of its ranks' time is lost to the slowest of them.

The first step is kept apart: it compiles, allocates and warms caches, and would make a short run look slow.

A step takes as long as its slowest rank. With b_r the seconds that rank r was busy in a step, the others wait for it:

    share lost = 1 − Σ_steps mean_r(b_r) / Σ_steps max_r(b_r)

Busy is processor time of the forward and backward pass, so ranks that share cores do not count each other's work. What
ranks wait for beside that (the wire, the data) is not in it. A device has another clock: nothing is shown then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ziggurat.data.balance.partition import straggler_share


class Pace:
    """Seconds and samples of the steps of one process.

    Attributes:
        first_step_s: how long the first step took; 0 before it.
    """

    def __init__(self) -> None:
        self.first_step_s = 0.0
        self._whole = (0.0, 0)
        self._last = (0.0, 0)
        self._busy: list[Sequence[float]] = []
        self._shown = ""

    def count(self, seconds: float, *, rows: int, busy_s: Sequence[float] = ()) -> None:
        """One step, of so many seconds and samples, and the seconds that each rank was busy."""
        if not self.first_step_s:
            self.first_step_s = seconds
            return
        self._whole = (self._whole[0] + seconds, self._whole[1] + rows)
        self._last = (self._last[0] + seconds, self._last[1] + rows)
        if len(busy_s) > 1 and any(busy_s):
            self._busy.append(busy_s)

    @property
    def samples_per_s(self) -> float:
        """Samples a second of all steps but the first; 0 before the second."""
        return _rate(self._whole)

    def text(self) -> str:
        """Rate, and what is lost to stragglers as of the last log line, in words; the first step has no rate."""
        if not self.samples_per_s:
            return "first step"
        return f"{self.samples_per_s:,.0f} samples/s{self._shown}"

    def since_last(self, facts: Mapping[str, object] | None = None) -> dict[str, object]:
        """Since this was last called: samples_per_s; on ranks straggler_share, and busy_s a step by rank.

        Args:
            facts: what the step says of itself (`TrainStep.facts`); passed on, and shown where it looks ahead.
        """
        rate = _rate(self._last)
        self._last = (0.0, 0)
        busy = self._busy
        self._busy = []
        found = {"samples_per_s": rate, **(facts or {})}
        if busy:
            share = straggler_share(np.array(busy))
            mean_s = [round(value, 6) for value in np.mean(busy, axis=0).tolist()]
            found |= {"straggler_share": round(share, 6), "busy_s": mean_s}
            self._shown = f" · {100 * share:.0f} % lost to stragglers"
            self._shown += _exchange_text(facts) if facts and "exposed_ms" in facts else ""
        return found


def _exchange_text(exchange: Mapping[str, Any]) -> str:
    """Exposed time and collisions, for the live line."""
    text = f" · {exchange['exposed_ms']:.1f} ms exposed"
    if "collisions" in exchange:
        text += f", {100 * exchange['collisions']:.0f} % collisions"
    return text if exchange["prioritised_share"] else f"{text}, plain exchange"


def _rate(counted: tuple[float, int]) -> float:
    seconds, rows = counted
    return rows / seconds if seconds else 0.0
