"""Arguments of public functions: what is given is compared with the annotations before the function runs.

    @check_arguments
    def read_schema(path: str | os.PathLike[str]) -> Schema: …

    read_schema(3)                                  ConfigError: text or a path as 'path', found int 3

Only what is certainly wrong is refused. A number may be of numpy or a tensor without dimensions, a path any
`os.PathLike`, an object any subclass; nothing is converted. Arrays, and what containers
hold, are not looked at.
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
import numbers
import os
import pathlib
import types
import typing
from typing import Any, ParamSpec, TypeVar, Union

from ziggurat.errors import ConfigError
from ziggurat.typed import quoted

P = ParamSpec("P")
R = TypeVar("R")

_WIDER: dict[type, type] = {int: numbers.Integral, float: numbers.Real, pathlib.Path: os.PathLike}
_WORDS = {
    numbers.Integral: "a whole number",
    numbers.Real: "a number",
    os.PathLike: "a path",
    str: "text",
    bool: "True or False",
    type(None): "None",
}


def check_arguments(function: typing.Callable[P, R]) -> typing.Callable[P, R]:
    """Function decorator: refuse arguments that are not what the annotations say, before the function runs.

    Raises:
        ConfigError: an argument is something else; names it.
    """
    # Once, when the function is made, and not at each call.
    signature = inspect.signature(function)

    @functools.wraps(function)
    def check_and_call(*args: P.args, **kwargs: P.kwargs) -> R:
        # Defaults are not looked at: only what was given can be wrong.
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            classes = _classes_of_arguments(function).get(name, ())
            if classes and not _is_one_of(value, classes):
                raise _wrong(function, name, value, classes)
        return function(*args, **kwargs)

    return check_and_call


def _is_one_of(value: object, classes: tuple[type, ...]) -> bool:
    if isinstance(value, classes):
        return True
    is_scalar = getattr(value, "ndim", None) == 0  # of numpy or torch
    return is_scalar and any(issubclass(cls, numbers.Number) for cls in classes)


def _wrong(function: typing.Callable[..., object], name: str, value: object, classes: tuple[type, ...]) -> ConfigError:
    kind = type(value).__name__
    shown = quoted(value) if isinstance(value, str | int | float | list | tuple | dict | None) else ""
    words = " or ".join(dict.fromkeys(_WORDS.get(cls, f"a {cls.__name__}") for cls in classes))
    owner = function.__qualname__.removesuffix(".__init__")
    return ConfigError(
        expected=f"{words} as {name!r}",
        found=f"{kind} {shown}".rstrip(),
        where=f"{owner}, argument {name!r}",
        ways_out=(f"give {words}", f"help(ziggurat.{owner}) says what each argument is"),
    )


@functools.cache
def _classes_of_arguments(function: typing.Callable[..., object]) -> dict[str, tuple[type, ...]]:
    """The classes that each argument may be an instance of; () where that cannot be told."""
    return {name: _classes_of(hint) for name, hint in typing.get_type_hints(function).items()}


def _classes_of(hint: object) -> tuple[type, ...]:
    members = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    found: list[type] = []
    for member in members:
        cls = typing.get_origin(member) or member
        if cls in (collections.abc.Sequence, collections.abc.Iterable):
            cls = collections.abc.Iterable  # an array is no `Sequence` by name
        if cls is Any or not isinstance(cls, type) or cls.__module__.startswith("jaxtyping"):
            return ()
        if getattr(cls, "_is_protocol", False) and not getattr(cls, "_is_runtime_protocol", False):
            return ()
        found.append(_WIDER.get(cls, cls))
    return tuple(found)
