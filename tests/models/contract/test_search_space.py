"""Search spaces: what models state of themselves can be built everywhere, and what others get is derived."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import pytest

from ziggurat.embeddings import EmbeddingConfig
from ziggurat.errors import ConfigError
from ziggurat.models import DCNv2Config, DNNConfig, FinalMLPConfig, MLPConfig, WukongConfig
from ziggurat.models.build import MODEL_CONFIGS, build_model, kind_of
from ziggurat.models.contract.search_space import (
    Choices,
    Dimension,
    Floats,
    Integers,
    derived,
    given_value,
    is_asked,
    layers,
    space_of,
    with_values,
)
from ziggurat.testing.batches import small_inputs

STATING = [cls for cls in MODEL_CONFIGS if hasattr(cls, "search")]


def ends_of(dimension: Dimension) -> tuple[int | float | str, ...]:
    if isinstance(dimension, Choices):
        return dimension.values
    return dimension.low, dimension.high


@pytest.mark.parametrize("cls", STATING, ids=kind_of)
def test_every_end_of_what_a_model_states_can_be_built(cls: type) -> None:
    config = cls()
    space = space_of(config)
    largest = {dimension.name: dimension.largest for dimension in space}
    build_model(with_values(config, largest), small_inputs(), seed=0, draw_tables=False)
    for dimension in space:
        for value in ends_of(dimension):
            changed = with_values(config, {**largest, dimension.name: value})
            build_model(changed, small_inputs(), seed=0, draw_tables=False)
            assert str(given_value(changed, dimension.name)) == str(value)


@pytest.mark.parametrize("cls", STATING, ids=kind_of)
def test_a_condition_names_a_dimension_before_it(cls: type) -> None:
    seen: list[str] = []
    for dimension in space_of(cls()):
        if dimension.only is not None:
            assert dimension.only[0] in seen
        seen.append(dimension.name)
    assert len(set(seen)) == len(seen)


def test_heads_of_finalmlp_divide_every_width_that_its_space_has() -> None:
    by_name = {each.name: each for each in space_of(FinalMLPConfig())}
    width = by_name["first.width"]
    heads = by_name["num_heads"]
    assert isinstance(width, Integers)
    assert isinstance(heads, Choices)
    for size in range(width.low, width.high + 1, width.step):
        assert all(size % int(number) == 0 for number in heads.values)


def test_a_dimension_is_asked_for_where_its_condition_holds() -> None:
    config = DCNv2Config()
    rank = next(each for each in space_of(config) if each.name == "cross.rank")
    assert is_asked(rank, {"cross.kind": "low_rank"}, config=config)
    assert not is_asked(rank, {"cross.kind": "full"}, config=config)
    assert not is_asked(rank, {}, config=config)  # the config has full


@dataclass(frozen=True, kw_only=True)
class Own:
    """A config of a user's, which states nothing."""

    kind: Literal["own"] = "own"
    embedding_dim: int = 12
    deep: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(64, 32)))
    linear: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=()))
    share: float = 0.5
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)


@dataclass(frozen=True, kw_only=True)
class Stating(Own):
    """One that does."""

    search: ClassVar[tuple[Dimension, ...]] = (Floats("share", 0.1, 0.9), *layers("deep", width=(8, 16), depth=(1, 2)))


def test_a_config_that_states_nothing_is_searched_by_its_types() -> None:
    assert derived(Own()) == space_of(Own())
    assert derived(Own()) == (
        Choices("embedding_dim", ("6", "12", "24")),
        Integers("deep.width", 16, 128, log=True),
        Integers("deep.depth", 1, 3),
    )


def test_a_config_from_outside_states_its_own() -> None:
    config = Stating()
    assert [each.name for each in space_of(config)] == ["share", "deep.width", "deep.depth"]
    changed = with_values(config, {"share": 0.25, "deep.width": 8, "deep.depth": 2})
    assert changed.deep.hidden_dims == (8, 8)
    assert changed.share == 0.25


def test_dropout_reaches_every_mlp() -> None:
    changed = with_values(WukongConfig(), {"dropout": 0.3})
    assert {changed.mlp.dropout, changed.head.dropout, changed.bottom.dropout} == {0.3}
    assert given_value(changed, "dropout") == 0.3


def test_a_width_alone_keeps_the_depth() -> None:
    assert with_values(DNNConfig(), {"deep.width": 8}).deep.hidden_dims == (8, 8)
    assert with_values(DNNConfig(), {"deep.depth": 3}).deep.hidden_dims == (512, 512, 512)
    assert given_value(DNNConfig(), "deep.width") is None  # 512 and 256


@pytest.mark.parametrize(
    "make",
    [
        lambda: Integers("n", 4, 2),
        lambda: Integers("n", 0, 2, log=True),
        lambda: Integers("n", 1, 4, step=2),
        lambda: Floats("x", 0.0, 1.0, log=True),
        lambda: Floats("x", 1.0, 0.0),
        lambda: Choices("c", ()),
        lambda: Choices("c", ("a", "a")),
    ],
)
def test_a_range_that_cannot_be_is_refused(make) -> None:
    with pytest.raises(ConfigError, match="correct the range"):
        make()
