"""Check that the labels of a schema are those that a model wants, beside what holds for all models.

A funnel, say, needs later labels that are known of every row. The config of such a model has a method `check_labels`.
"""

from __future__ import annotations

from ziggurat.features.schema import Schema
from ziggurat.models import ModelConfig


def check_labels(schema: Schema, *, model: ModelConfig) -> None:
    """Let a model that wants certain labels (`check_labels` of its config) refuse others, before a file is read.

    Raises:
        ConfigError: it does.
    """
    check = getattr(model, "check_labels", None)
    if check is not None:
        check(schema.labels)
