"""A schema with events and a model of samples, or the other way round, is refused with the recipe that fits."""

from __future__ import annotations

import dataclasses

import pytest

from ziggurat.errors import SchemaError
from ziggurat.features.events import Events
from ziggurat.features.items import Items
from ziggurat.features.schema import Categorical, Label, Schema
from ziggurat.recipes.catalogue import recipe_named
from ziggurat.recipes.history_rankers import history_rankers

SAMPLES = Schema(
    features=(Categorical(name="item"), Categorical(name="verb")),
    labels=(Label(name="like"),),
    group="user",
    time="at",
    items=Items(id="item"),
)
CANDIDATES = dataclasses.replace(SAMPLES, events=Events(actions=("verb",)))
EVENTS = dataclasses.replace(CANDIDATES, labels=())


@pytest.mark.parametrize(
    ("recipe", "schema", "fitting"),
    [
        ("table_dlrm", CANDIDATES, "table_sequence_ranker"),
        ("table_two_tower", EVENTS, "table_hstu"),
        ("table_hstu", SAMPLES, "table_dlrm"),
        ("table_hstu", CANDIDATES, "table_sequence_ranker"),
        ("table_sequence_ranker", SAMPLES, "table_dlrm"),
        ("table_sequence_ranker", EVENTS, "table_hstu"),
    ],
)
def test_the_recipe_that_fits_is_named(recipe: str, schema: Schema, fitting: str) -> None:
    config = recipe_named(recipe, schema=schema)
    with pytest.raises(SchemaError) as refused:
        config.check()
    assert f"ziggurat train {fitting} " in " ".join(refused.value.ways_out)
    assert refused.value.where == f"the schema, for model {config.model.kind!r}"
    recipe_named(fitting, schema=schema).check()


def test_what_reads_a_history_takes_candidates() -> None:
    config = recipe_named("table_sequence_ranker", schema=CANDIDATES)
    for model in history_rankers(CANDIDATES).values():
        dataclasses.replace(config, model=model).check()
