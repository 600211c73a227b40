"""Time several things in turns, so that what disturbs the machine for a while disturbs all of them alike.

    turn 0   a  b  c        warms up: kernels are compiled and loaded, memory is mapped; not counted
    turn 1   b  c  a        who is first changes, since the first of a turn finds the caches of the last
    turn 2   c  a  b

Ratios are taken turn by turn, and their median counts: it does not hang on one slow moment.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch


def seconds_in_turns(
    contestants: Sequence[Callable[[int], float]],
    *,
    turns: int,
    budget_s: float = float("inf"),
    min_turns: int = 3,
) -> list[list[float]]:
    """Return the seconds of each contestant, turn by turn.

    Args:
        contestants: do something once and return the seconds that it took; called with the number of the turn, from 0.
        turns: how many are counted.
        budget_s: seconds after which no further turn begins.
        min_turns: how many are counted all the same.
    """
    found: list[list[float]] = [[] for _ in contestants]
    begin = time.perf_counter()
    for turn in range(1 + turns):
        for place in range(len(contestants)):
            which = (place + turn) % len(contestants)
            seconds = contestants[which](turn)
            if turn:
                found[which].append(seconds)
        if turn >= min_turns and time.perf_counter() - begin > budget_s:
            break
    return found


def median_ratio(base_s: Sequence[float], other_s: Sequence[float]) -> float:
    """Return how many times as fast as a base another contestant is: the median of the ratios of all turns."""
    return statistics.median(of_base / other for of_base, other in zip(base_s, other_s, strict=True))


def repeats_in_turn(once_s: float, *, least_s: float) -> int:
    """Return how often to do something in a turn, so that a turn is long enough for the clock's own steps not to count.

    Args:
        once_s: seconds that it takes once.
        least_s: of a turn.
    """
    return max(1, math.ceil(least_s / max(once_s, 1e-6)))


def seconds_of(work: Callable[[], object], *, repeats: int, device: torch.device) -> float:
    """Return the seconds that some work takes once, as the mean of so many repeats; see `time_on`."""
    begin_s = time_on(device)
    for _ in range(repeats):
        work()
    return (time_on(device) - begin_s) / repeats


def time_on(device: torch.device) -> float:
    """Return a time in seconds, after all that a device was given to do.

    One thread on a CPU counts its own time, since on a core that is shared the clock tells the time of others; several
    threads wait for one another, which the clock alone sees.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif torch.get_num_threads() == 1:
        return time.thread_time()
    return time.perf_counter()
