"""Configs survive a trip through JSON, and bad settings are named."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

import pytest

from ziggurat.config import from_json, override, settings, to_json
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.errors import ConfigError, ZigguratError
from ziggurat.ops.row_formats import RowFormat
from ziggurat.recipes.run_config import RanksConfig
from ziggurat.training.config import TrainingConfig


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True)
class Circle:
    kind: Literal["circle"] = "circle"
    radius: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Square:
    kind: Literal["square"] = "square"
    side_lengths: tuple[int, ...] = (1, 2)


@dataclass(frozen=True, kw_only=True)
class Scene:
    shape: Circle | Square = field(default_factory=Circle)
    colour: Colour = Colour.RED
    limit: float | None = None
    visible: bool = True
    names: tuple[str, ...] = ()
    colours: dict[str, Colour] = field(default_factory=dict)


def test_round_trip_through_json_text() -> None:
    scene = Scene(
        shape=Square(side_lengths=(3,)), colour=Colour.BLUE, limit=2.5, names=("a", "b"), colours={"x": Colour.BLUE}
    )
    assert from_json(Scene, json.loads(json.dumps(to_json(scene))), where="file") == scene


def test_a_file_with_the_old_name_of_a_field_is_read() -> None:
    data = to_json(RanksConfig(ranks_per_host=2))
    old = {{"ranks_per_host": "ranks_a_host"}.get(name, name): value for name, value in data.items()}
    assert "ranks_a_host" in old
    assert from_json(RanksConfig, old, where="file") == RanksConfig(ranks_per_host=2)
    with pytest.raises(ConfigError, match="ranks_a_host"):
        from_json(RanksConfig, {**data, "ranks_a_host": 4}, where="file")


def test_values_by_name_are_given_listed_and_refused_where_they_are_none() -> None:
    scene = override(Scene(), {"colours": "roof = red, a=b.c=blue"})
    assert scene.colours == {"roof": Colour.RED, "a=b.c": Colour.BLUE}
    assert ("colours", "list of NAME=red|blue", "roof=red,a=b.c=blue") in list(settings(scene))
    for text in ("roof", "=red", "roof=red,roof=blue"):
        with pytest.raises(ConfigError, match="each name once"):
            override(Scene(), {"colours": text})
    with pytest.raises(ConfigError, match="red"):
        override(Scene(), {"colours": "roof=green"})


def test_overrides_of_every_type() -> None:
    changes = {"shape.radius": "2", "colour": "blue", "limit": "0.5", "visible": "no", "names": "x, y"}
    scene = override(Scene(), changes)
    assert scene == Scene(shape=Circle(radius=2.0), colour=Colour.BLUE, limit=0.5, visible=False, names=("x", "y"))
    assert override(scene, {"limit": "none"}).limit is None
    assert override(Scene(shape=Square()), {"shape.side-lengths": "512,256"}).shape == Square(side_lengths=(512, 256))


def test_a_share_may_be_in_per_cent_and_no_other_number() -> None:
    assert override(TablesConfig(weights=RowFormat.INT8), {"cache": "5%"}).cache == 0.05
    assert override(DataConfig(), {"split.valid-fraction": "2.5 %"}).split.valid_fraction == 0.025
    for config, changes in (
        (TablesConfig(weights=RowFormat.INT8), {"cache": "500%"}),
        (TablesConfig(weights=RowFormat.INT8), {"cache": "all%"}),
        (Scene(), {"shape.radius": "5%"}),
    ):
        with pytest.raises(ConfigError, match="a number"):
            override(config, changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"colur": "red"}, "did you mean --colour red?"),
        ({"radius": "2"}, "did you mean --shape.radius 2?"),
        ({"colour.radius": "2"}, "no dot"),
        ({"colour": "green"}, "red, blue"),
        ({"shape.radius": "wide"}, "a number"),
        ({"shape": "circle"}, "group"),
        ({"visible": "perhaps"}, "true or false"),
        ({"colour.deep": "1"}, "no dot"),
    ],
)
def test_bad_overrides_are_named(changes: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        override(Scene(), changes)
    assert words in str(caught.value)
    assert next(iter(changes)) in caught.value.where


def test_a_name_of_a_group_below_is_led_to_the_group() -> None:
    with pytest.raises(ConfigError) as caught:
        from_json(TrainingConfig, {"batch_size": 256}, where="config.json")
    assert caught.value.ways_out[0] == "write it into the group 'loader', which has a setting of that name"


@pytest.mark.parametrize(
    ("data", "path"),
    [
        ({"shape": {"kind": "triangle"}}, "shape.kind"),
        ({"shape": {"kind": "circle", "radios": 1}}, "shape.radios"),
        ({"limit": "much"}, "limit"),
        ({"visible": 1}, "visible"),
        ({"names": "abc"}, "names"),
    ],
)
def test_bad_files_are_named(data: dict, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_json(Scene, data, where="run.json")
    assert path in caught.value.where
    assert "run.json" in caught.value.where


def test_settings_list_every_leaf() -> None:
    leaves = {"shape.radius", "colour", "limit", "visible", "names", "colours"}
    assert {path for path, _, _ in settings(Scene())} == leaves


def test_errors_have_four_parts_and_builtin_parents() -> None:
    error = ConfigError(expected="e", found="f", where="w", ways_out=("one", "two"))
    assert isinstance(error, ValueError)
    assert isinstance(error, ZigguratError)
    assert str(error) == "expected: e\nfound:    f\nwhere:    w\nways out:\n  1. one\n  2. two"


def test_a_wrong_word_lists_all_of_them_without_quotes() -> None:
    with pytest.raises(ConfigError) as caught:
        override(Scene(), {"colour": "qqq"})
    assert caught.value.ways_out[-1].endswith(": red, blue")
