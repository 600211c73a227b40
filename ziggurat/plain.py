"""Plain data: what a JSON or TOML file holds, and the steps from it to typed values.

`JSON` is the one name of it. A reader of a file narrows it at once, so that the type checker follows from there on:

    data = as_group(read_json(path))        dict[str, JSON], or a TypeError that says what stands there
    rows = as_whole(data["rows"])           int

Whole dataclasses are read by `ziggurat.typed.Reader`, which names the place of a mistake; these functions are for the
few values that a format keeps beside them. Their errors are Python's own: whoever reads a file turns them into an error
in four parts that names the file (`Format.decode` does so for migrations).
"""

from __future__ import annotations

from typing import TypeAlias

JSON: TypeAlias = dict[str, "JSON"] | list["JSON"] | str | int | float | bool | None


def as_group(data: JSON) -> dict[str, JSON]:
    """Return plain data that is a group of names with values.

    Raises:
        TypeError: it is none.
    """
    if isinstance(data, dict):
        return data
    raise TypeError(f"a group of names with values is expected, not {type(data).__name__}")


def as_list(data: JSON) -> list[JSON]:
    """Return plain data that is a list.

    Raises:
        TypeError: it is none.
    """
    if isinstance(data, list):
        return data
    raise TypeError(f"a list is expected, not {type(data).__name__}")


def as_text(data: JSON) -> str:
    """Return plain data that is text.

    Raises:
        TypeError: it is none.
    """
    if isinstance(data, str):
        return data
    raise TypeError(f"text is expected, not {type(data).__name__}")


def as_whole(data: JSON) -> int:
    """Return plain data that is a whole number.

    Raises:
        TypeError: it is none.
    """
    # Not isinstance alone: to Python, true is an int.
    if isinstance(data, int) and not isinstance(data, bool):
        return data
    raise TypeError(f"a whole number is expected, not {type(data).__name__}")


def as_number(data: JSON) -> float:
    """Return plain data that is a number; a whole one becomes a float.

    Raises:
        TypeError: it is none.
    """
    if isinstance(data, int | float) and not isinstance(data, bool):
        return float(data)
    raise TypeError(f"a number is expected, not {type(data).__name__}")
