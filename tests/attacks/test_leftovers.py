"""A seeded sample of the attack on leftovers; `python -m tests.attacks.leftovers` tries as many as one likes."""

from __future__ import annotations

import pytest

from tests.attacks.files import DEFECTS
from tests.attacks.leftovers import attack
from tests.attacks.verbs import VERBS


@pytest.mark.slow
def test_a_sample_of_kills_and_damage_is_found_or_made_good() -> None:
    cases = attack(count=2 * len(VERBS), seed=11, seconds=3000)
    bad = [case for case in cases if case.outcome in DEFECTS]
    assert not bad, bad
    assert len(cases) == 2 * len(VERBS)
    assert sum(case.outcome == "found" for case in cases) > 2
