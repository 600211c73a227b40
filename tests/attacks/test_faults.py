"""A seeded sample of the attack on writing; `python -m tests.attacks.faults` tries as many as one likes."""

from __future__ import annotations

import pytest

from tests.attacks.faults import VERBS, attack
from tests.attacks.files import DEFECTS


@pytest.mark.slow
def test_a_sample_of_failing_writes_is_found_and_leaves_nothing_that_is_believed() -> None:
    cases = attack(count=2 * len(VERBS), seed=11, seconds=3000)
    bad = [case for case in cases if case.outcome in DEFECTS]
    assert not bad, bad
    assert len(cases) == 2 * len(VERBS)
    assert sum(case.outcome == "found" for case in cases) > len(VERBS)
