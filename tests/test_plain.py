"""Plain data is narrowed to what it is, and refused where it is something else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ziggurat.errors import BoundsError, ConfigError, error_from_json
from ziggurat.plain import JSON, as_group, as_list, as_number, as_text, as_whole


@pytest.mark.parametrize(
    ("narrow", "value", "wrong"),
    [
        (as_group, {"a": 1}, [1]),
        (as_list, [1, "a"], {"a": 1}),
        (as_text, "a", 1),
        (as_whole, 3, 3.0),
        (as_whole, 0, False),
        (as_number, 2, "2"),
        (as_number, 2.5, True),
    ],
)
def test_values_are_narrowed_or_refused(narrow: Callable[[JSON], object], value: JSON, wrong: JSON) -> None:
    assert narrow(value) == value
    with pytest.raises(TypeError, match=f"not {type(wrong).__name__}"):
        narrow(wrong)
    with pytest.raises(TypeError, match="not NoneType"):
        narrow(None)


def test_an_error_comes_back_of_its_kind() -> None:
    error = BoundsError(expected="a row", found="row 7", where="table 'film'", ways_out=("one", "two"))
    again = error_from_json(error.to_json())
    assert isinstance(again, BoundsError)
    assert again.args == error.args
    assert type(error_from_json({**ConfigError(**_parts()).to_json(), "kind": "Path"})).__name__ == "ZigguratError"


def _parts() -> dict[str, str]:
    return {"expected": "a", "found": "b", "where": "c", "ways_out": "d"}
