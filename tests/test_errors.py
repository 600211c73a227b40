"""Names near a wrong one, for the ways out of errors."""

from __future__ import annotations

from ziggurat.errors import nearest_names


def test_the_nearest_names_are_found_whatever_their_capitals_and_dashes() -> None:
    known = ["learning-rate", "User_ID", "user_age", "movie"]
    assert nearest_names("user_id", known, most=1) == ["User_ID"]
    assert nearest_names("learning_rat", known) == ["learning-rate"]
    assert nearest_names("USER-AGE", known, most=2) == ["user_age", "User_ID"]
    assert nearest_names("title", known) == []
    assert nearest_names("", known) == []


def test_a_long_name_and_many_known_ones_are_looked_at_in_part() -> None:
    assert nearest_names("a" * 100_000, ["a" * 100, "b"], most=1) == ["a" * 100]
    assert nearest_names("needle", [*map(str, range(10_000)), "needle"]) == []
