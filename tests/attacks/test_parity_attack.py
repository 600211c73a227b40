"""A seeded sample of the parity attack; `python -m tests.attacks.parity` runs as many as asked for."""

from __future__ import annotations

import pytest

from tests.attacks.parity import Case, attack, draw


@pytest.mark.parametrize(("world_size", "seeds"), [(1, range(4)), (2, range(100, 105)), (4, range(200, 205))])
def test_random_configurations_equal_fp64(world_size: int, seeds: range) -> None:
    found = attack([draw(seed, world_size=world_size) for seed in seeds])
    bad = [(outcome, words, case) for case, outcome, words in found if outcome in ("different", "crashed")]
    assert not bad
    assert any(outcome == "equal" for _, outcome, _ in found)


@pytest.mark.slow
def test_five_hundred_random_configurations_equal_fp64() -> None:
    bad: list[tuple[str, str, Case]] = []
    for world_size in (1, 2, 3, 4):
        found = attack(
            [draw(seed, world_size=world_size) for seed in range(1000 * world_size, 1000 * world_size + 125)]
        )
        bad += [(outcome, words, case) for case, outcome, words in found if outcome in ("different", "crashed")]
    assert not bad
