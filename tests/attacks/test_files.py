"""A seeded sample of the attack on files; `python -m tests.attacks.files` tries as many as one likes."""

from __future__ import annotations

from tests.attacks.files import DEFECTS, LOADERS, attack, table


def test_a_sample_of_damage_is_found_or_rebuilt() -> None:
    cases = attack(count=len(LOADERS), seed=11, seconds=600)
    bad = [case for case in cases if case.outcome in DEFECTS]
    assert not bad, bad
    assert len(cases) == len(LOADERS)
    assert "found" in table(cases)
