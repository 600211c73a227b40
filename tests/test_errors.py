"""Errors in four parts: as plain data, and with the names near a wrong one."""

from __future__ import annotations

import json

from ziggurat.errors import DataError, ZigguratError, error_from_json, nearest_names


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


def test_an_error_crosses_to_another_process_with_its_kind_and_parts() -> None:
    error = DataError(expected="a number", found="'x'", where="row 7", ways_out=("correct it", "leave it out"))
    again = error_from_json(json.loads(json.dumps(error.to_json())))
    assert type(again) is DataError
    assert str(again) == str(error)


def test_a_kind_that_this_process_does_not_know_is_an_error_in_four_parts_all_the_same() -> None:
    class OwnError(DataError):
        pass

    data = OwnError(expected="a", found="b", where="c", ways_out="d").to_json()
    assert type(error_from_json(data)) is ZigguratError
    assert type(error_from_json(data, more=(OwnError,))) is OwnError
    assert type(error_from_json(data | {"kind": "Sequence"})) is ZigguratError
