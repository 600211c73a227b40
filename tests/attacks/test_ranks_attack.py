"""A seeded sample of the attack on ranks, and the table that counts all attacks; `make attack` tries many more."""

from __future__ import annotations

import random

from tests.attacks.__main__ import table
from tests.attacks.files import DEFECTS, Case
from tests.attacks.ranks import attack_differing


def test_ranks_that_differ_are_named() -> None:
    found = attack_differing(random.Random(5), count=8)
    assert len(found) == 8
    assert not [each for each in found if each[1] in DEFECTS]


def test_what_must_not_be_is_counted() -> None:
    outcomes = ["found", "rebuilt", "same", "same", "silent", "hung"]
    text = table([Case(number, "a class", "", outcome, "") for number, outcome in enumerate(outcomes)])
    assert text.splitlines()[0] == "| class | tried | found | equal | accepted | silent | crashed | hung |"
    assert text.splitlines()[2] == "| a class | 6 | 1 | 3 | 0 | 1 | 0 | 1 |"
    assert text.splitlines()[3] == "| all | 6 | 1 | 3 | 0 | 1 | 0 | 1 |"
