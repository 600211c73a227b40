"""The choice of the exchange: what is measured, what is kept, and that all ranks keep the same."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ziggurat.parallel.prioritised.choice import Exchange, ExchangeChoice


def chosen(*, ahead_s: float, plain_s: float, steps: int = 60, exchange: Exchange = Exchange.PRIORITISED):
    """A choice after some steps of these durations, the first of a turn a second longer; and what steps took."""
    asked: list[Sequence[float]] = []

    def add_up(numbers: Sequence[float]) -> list[float]:
        asked.append(numbers)
        return [2 * number for number in numbers]

    choice, taken, before = ExchangeChoice(exchange, add_up=add_up), [], True
    for _ in range(steps):
        is_on = choice.is_on
        taken.append(is_on)
        choice.count((ahead_s if is_on else plain_s) + (is_on is not before))
        before = is_on
    return choice, taken, asked


@pytest.mark.parametrize(("ahead_s", "is_on"), [(0.5, True), (1.5, False), (1.0, False)])
def test_the_faster_exchange_is_kept_and_plain_where_nothing_is_gained(ahead_s: float, is_on: bool):
    choice, taken, asked = chosen(ahead_s=ahead_s, plain_s=1.0)
    assert asked == [[ahead_s, 1.0]]
    assert choice.is_on is is_on
    assert choice.line.startswith("prioritised:" if is_on else "plain, the faster one here:")
    assert set(taken[:28]) == {True, False}
    assert set(taken[28:]) == {is_on}


def test_it_is_measured_again():
    _, _, asked = chosen(ahead_s=0.5, plain_s=1.0, steps=2_100)
    assert len(asked) == 2


def test_what_is_asked_for_is_not_measured():
    for exchange, is_on in ((Exchange.PRIORITISED_ALWAYS, True), (Exchange.PLAIN, False)):
        _, taken, asked = chosen(ahead_s=2.0, plain_s=1.0, exchange=exchange)
        assert set(taken) == {is_on}
        assert not asked
