"""Which exchange a run takes: the plain one, the prioritised one, or whichever is faster here.

Both give the same bits, so a run may change between them at any step. `prioritised` measures both in turns and keeps
the faster; that depends on what the wire carries, on how long a step computes and on how many rows collide:

    steps      0 … 3      4 … 9        10 … 15   16 … 21        22 … 27   28 …                    + 2,000
    exchange   prior.     prioritised  plain     prioritised    plain     the faster, by medians   measured again
               (warm)     the first two steps of a turn finish the turn before and do not count

All ranks decide by the same number: the sum over ranks of the median seconds of each. The plain one is kept unless the
other is faster, so a run never loses more than it takes to measure.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from enum import StrEnum

_WARM, _TURN, _TURNS, _SKIPPED = 4, 6, 4, 2
_AGAIN_AFTER = 2_000


class Exchange(StrEnum):
    """The time when rows of the next batch travel."""

    PLAIN = "plain"  # when their batch has its turn
    PRIORITISED = "prioritised"  # while the step before computes, where that is measured to be faster
    PRIORITISED_ALWAYS = "prioritised_always"  # the same without measuring


class ExchangeChoice:
    """Chooses the exchange of every step, alike on all ranks.

    Args:
        exchange: as asked for.
        add_up: sums numbers over all ranks; collective.

    Attributes:
        is_on: whether the next step is to look ahead.
        line: what was chosen and why, for people; "" as long as that is open.
        num_fallbacks: how many times the plain exchange was measured to be faster.
    """

    def __init__(self, exchange: Exchange, *, add_up: Callable[[Sequence[float]], list[float]]) -> None:
        self._exchange = exchange
        self._add_up = add_up
        self.is_on = exchange is not Exchange.PLAIN
        self.line = ""
        self.num_fallbacks = 0
        self._step = 0
        self._seconds: tuple[list[float], list[float]] = ([], [])
        if exchange is Exchange.PRIORITISED_ALWAYS:
            self.line = "prioritised, as asked for, without measuring"

    def count(self, seconds: float) -> None:
        """Hear how long a step took, and choose for the next one; collective at the end of a measurement."""
        if self._exchange is not Exchange.PRIORITISED:
            return
        place = self._step - _WARM
        self._step += 1
        if 0 <= place < _TURN * _TURNS and place % _TURN >= _SKIPPED:
            self._seconds[0 if self.is_on else 1].append(seconds)
        place += 1
        if place == _TURN * _TURNS:
            self._decide()
        elif 0 <= place < _TURN * _TURNS:
            self.is_on = place // _TURN % 2 == 0
        elif place >= _TURN * _TURNS + _AGAIN_AFTER:
            self._step = 0
            self.is_on = True
            self._seconds = ([], [])

    def _decide(self) -> None:
        ahead, plain = self._add_up([statistics.median(each) for each in self._seconds])
        self.is_on = ahead < plain
        self.num_fallbacks += not self.is_on
        name = "prioritised" if self.is_on else "plain, the faster one here"
        self.line = f"{name}: a step took {ahead / max(plain, 1e-9):.2f} of the plain step's time, measured in turns"
