"""Errors in four parts: as plain data, and with the names near a wrong one."""

from __future__ import annotations

import argparse
import builtins
import json
import signal
from typing import Any

import pytest

from ziggurat.errors import ConfigError, DataError, ZigguratError, error_from_json, nearest_names, refusing_exits


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


def test_code_that_ends_the_program_is_named_by_its_own_line() -> None:
    with pytest.raises(ConfigError, match="found:    SystemExit: 0") as caught, refusing_exits():
        builtins.exit(0)  # a function in a file of Python's own
    assert caught.value.where.startswith(f"{__file__}:")


def test_a_signal_and_a_command_line_of_the_users_end_the_program_as_they_say() -> None:
    def end(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGUSR1, end)
    try:
        with pytest.raises(SystemExit) as caught, refusing_exits():
            signal.raise_signal(signal.SIGUSR1)
        assert caught.value.code == 128 + signal.SIGUSR1
    finally:
        signal.signal(signal.SIGUSR1, before)
    with pytest.raises(SystemExit), refusing_exits():
        argparse.ArgumentParser().parse_args(["--help"])
