"""Public functions and classes called with the wrong kinds of values end in errors with four parts."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import ziggurat
from ziggurat.errors import ConfigError, ZigguratError
from ziggurat.features.schema import Categorical, Label, Schema
from ziggurat.testing.batches import small_inputs

SCHEMA = Schema(labels=(Label(name="click"),), features=(Categorical(name="user"),))

WRONG: list[Any] = ["no-such", None, -1, pl.DataFrame({"a": [1]}), [1], {"a": 1}]
# Values of a library's own kind, tensors, or classes of which users make none by hand.
LEFT_OUT = {"loss_sums", "TowerLayer", "TowerModuleKind", "SplitBy", "show_progress", "Model", "DataSource"}
LEFT_OUT |= {
    "Embedded",
    "Outputs",
    "LossSums",
    "Unpooled",
    "Batch",
    "Loader",
    "Run",
    "Recommender",
    "Topology",
    "ModelConfig",
}


def required(function: Any) -> dict[str, inspect.Parameter]:
    """The arguments that have no default."""
    every = inspect.signature(function).parameters
    return {name: each for name, each in every.items() if each.default is each.empty and "VAR" not in each.kind.name}


def calls(name: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Every required argument at once, or where there is none each other one alone, with each wrong value."""
    function = getattr(ziggurat, name)
    for value in WRONG:
        if needed := required(function):
            yield function, dict.fromkeys(needed, value)
        elif dataclasses.is_dataclass(function):
            yield from ((function, {field.name: value}) for field in dataclasses.fields(function) if field.init)
        else:
            yield from ((function, {each: value}) for each in inspect.signature(function).parameters)


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


class AnyPath:
    """A path that is neither text nor a `Path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)


def test_what_acts_like_the_right_kind_is_taken(tmp_path: Path) -> None:
    path = ziggurat.write_schema(SCHEMA, AnyPath(tmp_path / "my.toml"))
    assert ziggurat.read_schema(AnyPath(path)) == SCHEMA
    inputs, config = small_inputs(), ziggurat.DLRMConfig(embedding_dim=4)
    for seed in (np.int64(3), np.array(3), torch.tensor(3)):
        model = ziggurat.build_model(config, inputs, seed=seed)  # pyright: ignore[reportArgumentType]
        assert torch.equal(next(model.parameters()), next(ziggurat.build_model(config, inputs, seed=3).parameters()))
    with pytest.raises(ConfigError) as caught:
        ziggurat.build_model(config, inputs, seed=2.5)  # pyright: ignore[reportArgumentType]
    assert caught.value.found == "float 2.5"
    assert caught.value.where == "build_model, argument 'seed'"
