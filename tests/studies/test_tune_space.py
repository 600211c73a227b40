"""The space of a study: named on the command line, narrowed, fixed, and started from what a model was given."""

from __future__ import annotations

import pytest

from ziggurat.errors import ConfigError
from ziggurat.models import MaskNetConfig
from ziggurat.models.contract.search_space import Choices, Floats, Integers
from ziggurat.recipes.model_settings import FRAPPE, settings_named
from ziggurat.recipes.protocols import bars_model, bars_training
from ziggurat.studies.tune_space import TuningSpace, for_model, nearest, refuse_unknown, tuning_space

DCN = bars_model(settings_named("dcn_v2", among=FRAPPE).model)
TRAINING = bars_training(embedding_l2=0.05)


def space(*narrowed: str, fixed: tuple[str, ...] = ()) -> TuningSpace:
    return tuning_space(DCN, TRAINING, narrowed=narrowed, fixed=fixed)


def dimension(found: TuningSpace, name: str):
    return next((each for each in found.dimensions if each.name == name), None)


@pytest.mark.parametrize("settings", FRAPPE, ids=lambda each: each.model.kind)
def test_the_first_try_is_what_a_model_was_given_as_near_as_its_space_allows(settings) -> None:
    found = tuning_space(bars_model(settings.model), bars_training(embedding_l2=settings.embedding_l2))
    start = found.start()
    model, training = found.apply(start)
    assert training.embedding_l2 == settings.embedding_l2
    assert training.learning_rate == 1e-3
    for each in found.dimensions:
        given = found.given(each.name)
        if each.name in start and given is not None and each.holds(given) and each.name != "dropout":
            assert str(start[each.name]) == str(given), each.name
    assert model.kind == settings.model.kind


def test_values_reach_model_and_training() -> None:
    model, training = space().apply(
        {
            "model.cross.kind": "low_rank",
            "model.cross.rank": 16,
            "model.deep.width": 64,
            "model.deep.depth": 2,
            "training.learning_rate": 2e-4,
            "dropout": 0.25,
            "training.loader.batch_size": "2048",
        }
    )
    assert (model.cross.kind, model.cross.rank) == ("low_rank", 16)
    assert (model.deep.hidden_dims, model.deep.dropout) == ((64, 64), 0.25)
    assert (training.learning_rate, training.loader.batch_size) == (2e-4, 2048)


def test_conditions_hold_below_the_names_of_the_command_line() -> None:
    def choose(kind: str) -> set[str]:
        return set(space().ask(lambda each: kind if each.name == "model.cross.kind" else each.largest))

    assert "model.cross.rank" not in choose("full")
    assert choose("mixture") - choose("low_rank") == {"model.cross.num_experts"}


def test_choices_of_numbers_take_a_range() -> None:
    found = space("training.loader.batch_size=512..8192")
    (dimension,) = [each for each in found.dimensions if each.name == "training.loader.batch_size"]
    assert dimension == Integers("training.loader.batch_size", 512, 8192, log=True)


def test_a_range_keeps_the_scale_of_the_dimension_that_it_narrows() -> None:
    found = space("training.learning_rate=1e-3..2e-3", "model.deep.width=100..200")
    assert dimension(found, "training.learning_rate") == Floats("training.learning_rate", 1e-3, 2e-3, log=True)
    assert dimension(found, "model.deep.width") == Integers("model.deep.width", 100, 200, log=True)


def test_values_and_new_settings() -> None:
    found = space("model.cross.num_layers=2,3", "training.weight-decay=1e-6..1e-3", "model.deep.hidden_dims=64,32|128")
    assert dimension(found, "model.cross.num_layers") == Choices("model.cross.num_layers", ("2", "3"))
    assert dimension(found, "training.weight_decay") == Floats("training.weight_decay", 1e-6, 1e-3, log=True)
    assert dimension(found, "model.deep.hidden_dims") == Choices("model.deep.hidden_dims", ("64,32", "128"))


def test_fixing_takes_a_dimension_out() -> None:
    found = space("dropout=0.5", fixed=("model.deep.width=32", "training.learning_rate=0.01"))
    assert {"dropout", "model.deep.width", "training.learning_rate"}.isdisjoint(each.name for each in found.dimensions)
    assert found.training.learning_rate == 0.01
    model, _ = found.apply(found.start())
    assert set(model.deep.hidden_dims) == {32}
    assert model.deep.dropout == 0.5


@pytest.mark.parametrize(
    ("narrowed", "match"),
    [
        ("training.learning_rate=1e-2..1e-4", "two numbers"),
        ("training.learning_rate=a..b", "two numbers"),
        ("model.cross.num_layers=2.5", "a whole number"),
        ("model.cross.num_layers=0,1", "1 or more"),
        ("model.cross.kind=full..mixture", "some values"),
        ("model.cross.kind=full,half", "low_rank"),
        ("dropout", "NAME=VALUES"),
        ("dropout=2", "0"),
    ],
)
def test_impossible_values_are_refused_before_anything_runs(narrowed: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        space(narrowed)
    assert caught.value.ways_out
    assert "command line" in caught.value.where


def test_the_way_out_of_a_range_turned_round_works() -> None:
    with pytest.raises(ConfigError) as caught:
        space("training.learning_rate=1e-2..1e-4")
    space(caught.value.ways_out[0].partition("--space ")[2])


def test_an_unknown_name_is_refused_and_the_nearest_named() -> None:
    models = {"dcn_v2": DCN}
    with pytest.raises(ConfigError, match=r"did you mean model.cross.num_layers") as caught:
        refuse_unknown(("model.cross.num_layer=2",), models, TRAINING)
    assert "dcn_v2" in caught.value.expected
    refuse_unknown(("model.cross.num_layers=2", "dropout=0", "training.epochs=3"), models, TRAINING)


def test_a_model_takes_what_it_has() -> None:
    texts = ("model.cross.num_layers=2", "model.num_blocks=2", "training.epochs=3")
    assert for_model(texts, DCN, TRAINING) == (texts[0], texts[2])
    assert for_model(texts, MaskNetConfig(), TRAINING) == (texts[1], texts[2])


def test_the_nearest_value() -> None:
    assert nearest(Integers("n", 8, 32, step=2), 11) in (10, 12)
    assert nearest(Integers("n", 8, 32, step=2), 100) == 32
    assert nearest(Floats("x", 1.0, 100.0, log=True), None) == pytest.approx(10.0)
    assert nearest(Choices("c", ("16", "64")), 50) == "64"
    assert nearest(Choices("c", ("a", "b")), "c") == "a"
