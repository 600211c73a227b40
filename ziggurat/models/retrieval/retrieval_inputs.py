"""What a model that finds items needs of its inputs: items, features of both sides, binary labels, pooled lists."""

from __future__ import annotations

from ziggurat.errors import ConfigError, SchemaError
from ziggurat.features.batches.permutation import feature_names
from ziggurat.features.inputs import InputSpec
from ziggurat.features.items import Items


def check_retrieval_inputs(inputs: InputSpec, *, model: str = "two_tower") -> Items:
    """The items of the inputs, after a look at what vectors of users and items need.

    Args:
        inputs: of the model.
        model: its name, for errors.

    Raises:
        SchemaError: there are no items, no user feature, or a label that is not binary.
        ConfigError: a list that is not pooled.
    """
    items = inputs.items
    if items is None:
        raise SchemaError(
            expected="a schema that says which features describe the item",
            found="no items",
            where=f"inputs of model {model}",
            ways_out=(
                'in the schema: [items], and below it id = "movie_id", features = ["movie_id", "genres"]',
                "take a ranking model: dlrm, dcn_v2",
            ),
        )
    if not set(feature_names(inputs)) - set(items.features):
        raise SchemaError(
            expected="at least one feature of the user or the moment",
            found=f"item features only: {', '.join(items.features)}",
            where=f"inputs of model {model}",
            ways_out=("take features out of [items]", "add a feature of the user, or a history of items"),
        )
    numbers = [f"{label.name} has task = {label.task}" for label in inputs.labels if not label.task.has_positives]
    if numbers:
        raise SchemaError(
            expected="binary labels: a positive sample is a question whose answer is its item",
            found=", ".join(numbers),
            where=f"labels of the schema, model {model}",
            ways_out=("say what is liked: positive_from = 4.0", "take a ranking model"),
        )
    if inputs.sequences:
        raise ConfigError(
            expected="lists that are pooled: the encoders read one vector a feature",
            found=f"pooling = none for {', '.join(spec.name for spec in inputs.sequences)}",
            where=f"features of the schema, model {model}",
            ways_out="set pooling = mean or sum in the schema",
        )
    return items
