"""Kinds of feature: what a column may mean to a model. One file each; this is the one list of them.

    dense         a number, transformed; or a row, by its bucket
    categorical   one id, looked up in a table
    multi_hot     a list of ids, order without meaning
    sequence      a list of ids, latest last
    vector        a pretrained vector
    moments       a list of times, latest last
    teacher_history   vectors that a teacher has logged of earlier rows of the same user

A kind of your own derives from `Feature` and is listed by `Feature.add` (docs/guides/extending.md).
"""

from __future__ import annotations

from ziggurat.features.kinds.categorical import Categorical
from ziggurat.features.kinds.dense import Dense
from ziggurat.features.kinds.feature import Cells, Encoded, Feature, Fitted, Parsed, RequestReader
from ziggurat.features.kinds.id_lists import IdLists, Spaces
from ziggurat.features.kinds.moments import Moments
from ziggurat.features.kinds.multi_hot import MultiHot
from ziggurat.features.kinds.numbers import FittedNumbers, NumberFit
from ziggurat.features.kinds.sequence import Sequence
from ziggurat.features.kinds.teacher_history import TeacherHistory
from ziggurat.features.kinds.vector import Vector
from ziggurat.features.transforms import NumericTransform

Feature.add(Dense)
Feature.add(Categorical)
Feature.add(MultiHot)
Feature.add(Sequence)
Feature.add(Vector)
Feature.add(Moments)
Feature.add(TeacherHistory)


def feature_of_ids(name: str, *, column: str = "") -> Feature:
    """Return the feature that a column of ids is, one a row, where nothing more is said of it.

    Args:
        name: of the feature.
        column: that it reads; "" for the column of its name.
    """
    return Categorical(name=name, column=column)


__all__ = [
    "Categorical",
    "Cells",
    "Dense",
    "Encoded",
    "Feature",
    "Fitted",
    "FittedNumbers",
    "IdLists",
    "Moments",
    "MultiHot",
    "NumberFit",
    "NumericTransform",
    "Parsed",
    "RequestReader",
    "Sequence",
    "Spaces",
    "TeacherHistory",
    "Vector",
    "feature_of_ids",
]
