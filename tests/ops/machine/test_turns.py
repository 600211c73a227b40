"""Things that are timed in turns: who is first, what is counted, and when it ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ziggurat.ops.machine.turns import median_ratio, seconds_in_turns


def contestant(name: str, *, calls: list[tuple[str, int]], seconds: float) -> Callable[[int], float]:
    def once(turn: int) -> float:
        calls.append((name, turn))
        return seconds + turn

    return once


def test_each_is_first_in_turn_and_the_first_turn_is_not_counted() -> None:
    calls: list[tuple[str, int]] = []
    found = seconds_in_turns(
        [contestant(name, calls=calls, seconds=10.0 * at) for at, name in enumerate("abc")], turns=3
    )
    assert found == [[1.0, 2.0, 3.0], [11.0, 12.0, 13.0], [21.0, 22.0, 23.0]]
    assert "".join(name for name, _ in calls) == "abc" + "bca" + "cab" + "abc"


@pytest.mark.parametrize("min_turns", [1, 3])
def test_no_turn_begins_when_the_time_is_over_but_for_the_fewest(min_turns: int) -> None:
    calls: list[tuple[str, int]] = []
    (found,) = seconds_in_turns([contestant("a", calls=calls, seconds=0.0)], turns=9, budget_s=0.0, min_turns=min_turns)
    assert len(found) == min_turns
    assert len(calls) == 1 + min_turns


def test_one_slow_moment_does_not_move_the_ratio() -> None:
    assert median_ratio([2.0, 2.0, 50.0], [1.0, 1.0, 1.0]) == 2.0
    with pytest.raises(ValueError, match="zip"):
        median_ratio([2.0], [1.0, 1.0])
