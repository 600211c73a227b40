"""Public functions and classes called with the wrong kinds of values end in errors with four parts."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import polars as pl
import pytest

import ziggurat
from ziggurat.errors import ZigguratError

WRONG: list[Any] = ["no-such", None, -1, pl.DataFrame({"a": [1]}), [1], {"a": 1}]
# Values of a library's own kind, tensors, or classes of which users make none by hand.
LEFT_OUT = {"loss_sums", "TowerLayer", "TowerModuleKind", "SplitBy", "show_progress", "Model", "DataSource"}
LEFT_OUT |= {"Embedded", "Outputs", "LossSums", "Unpooled", "Batch", "Loader", "Run", "Topology", "ModelConfig"}


def required(function: Any) -> dict[str, inspect.Parameter]:
    """The arguments that have no default."""
    every = inspect.signature(function).parameters
    return {name: each for name, each in every.items() if each.default is each.empty and "VAR" not in each.kind.name}


def calls(name: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Every required argument at once, or every field of a config alone, with each wrong value."""
    function = getattr(ziggurat, name)
    for value in WRONG:
        if needed := required(function):
            yield function, dict.fromkeys(needed, value)
        elif dataclasses.is_dataclass(function):
            yield from ((function, {field.name: value}) for field in dataclasses.fields(function) if field.init)


@pytest.mark.parametrize("name", sorted(set(ziggurat.__all__) - LEFT_OUT - {"MODEL_CONFIGS", "ZigguratError"}))
def test_wrong_kinds_are_named(name: str) -> None:
    refused = list[ZigguratError]()
    for function, arguments in calls(name):
        try:
            function(**arguments)
        except ZigguratError as error:
            refused += [error]
    assert refused
    assert all(error.expected and error.found and error.where and error.ways_out for error in refused)
