"""Labels: which columns a model learns to predict, and what their values mean."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum

from ziggurat.errors import SchemaError
from ziggurat.features.events import ASKED_AT, NEXT_ITEM
from ziggurat.features.tasks import USUAL, Task
from ziggurat.plain import JSON, as_group, as_text
from ziggurat.typed import checked

# Texts that answer yes, in small letters: of a pair of others nobody can say which is the positive.
YES_WORDS = frozenset(["yes", "y", "true", "t", "1", "ja", "oui", "si", "positive", "pos", "clicked", "bought"])
_checked = functools.partial(checked, error=SchemaError)


class MissingLabel(StrEnum):
    """Say what becomes of a row in which a label is empty."""

    BAD_ROW = "bad_row"  # as `data.bad_rows` says of every bad row
    LEFT_OUT = "left_out"  # the row stays; this label learns nothing from it and is not judged on it, others are


class Outcomes(StrEnum):
    """Choices of the values that the rows of a label have."""

    ANY = "any"  # those of its task
    POSITIVE_ONLY = "positive_only"  # 1 in every row: what was chosen is there, and what was not is drawn


@dataclass(frozen=True, kw_only=True)
@_checked
class Label:
    """A column that the model learns to predict.

    Args:
        name: unique among labels.
        column: the column; defaults to the name.
        task: binary (0/1 or false/true after `positive_from` or `positive`), regression, or one of your own.
        positive_from: if set, a binary label is 1 where the column is at least this (rating >= 4 is a like).
        positive: if set, a binary label is 1 where the column holds this text ("yes"), and 0 where it holds another;
            one that says the same in other words ("Yes", "true") is a bad row, unless it is the one called `negative`.
        negative: if set, only this text is 0 ("no"), and every third one is a bad row. Needs `positive`.
        positive_weight: what a positive counts in the loss, beside its sample weight; a negative counts 1. Metrics and
            scores know nothing of it, so scores above those observed are its due (calibration above 1).
        negative_rate: share of the negatives that training keeps; scores are corrected for it (`data.negative_rate`).
        outcomes: positive_only where every row is a positive (what was chosen; models draw what was not): another value
            is a bad row, and full ranking alone judges it.
        weight: what the label counts in the loss, beside the others of the schema.
        missing: left_out for a label that is known of some rows only (bought, where somebody clicked).

    Example:
        >>> zg.Label(name="like", column="stars", positive_from=4.0).task.value
        'binary'
    """

    name: str
    column: str = ""
    task: Task = USUAL
    positive_from: float | None = None
    positive: str = ""
    negative: str = ""
    positive_weight: float = 1.0
    negative_rate: float = 1.0
    outcomes: Outcomes = Outcomes.ANY
    weight: float = 1.0
    missing: MissingLabel = MissingLabel.BAD_ROW

    def __post_init__(self) -> None:
        where = f"label {self.name!r}"
        impossible = not 0 < self.positive_weight < math.inf or not 0 < self.negative_rate <= 1
        is_plain = self.positive_weight == self.negative_rate == 1
        if impossible or not (self.task.has_positives or is_plain):
            raise SchemaError(
                expected="a positive positive_weight and a negative_rate above 0 and up to 1, of a binary label",
                found=f"positive_weight = {self.positive_weight}, negative_rate = {self.negative_rate}, "
                f"task = {self.task.value!r}",
                where=where,
                ways_out=("positive_weight = 10.0", "negative_rate = 0.1", "leave both out"),
            )
        if not 0 < self.weight < math.inf:
            raise SchemaError(
                expected="a weight above 0",
                found=f"weight = {self.weight}",
                where=where,
                ways_out=("weight = 0.5", "to learn nothing of a label, take it out of the schema"),
            )
        if self.outcomes is Outcomes.POSITIVE_ONLY and self.missing is not MissingLabel.BAD_ROW:
            raise SchemaError(
                expected='missing = "bad_row" of a label that is always positive',
                found=f"missing = {self.missing.value!r}",
                where=where,
                ways_out=("take missing out", "take outcomes out"),
            )
        if self.outcomes is Outcomes.POSITIVE_ONLY and not self.task.has_positives:
            raise SchemaError(
                expected='outcomes = "positive_only" of a binary label',
                found=f"task = {self.task.value!r}",
                where=where,
                ways_out=(f'take task = "{self.task}" out', "take outcomes out"),
            )
        numbers_and_texts = self.positive_from is not None and self.positive
        if self.positive and not self.task.has_positives:
            raise SchemaError(
                expected='positive with task = "binary" only',
                found=f"task = {self.task.value!r}",
                where=where,
                ways_out=(f'take task = "{self.task}" out', "take positive out"),
            )
        if numbers_and_texts or (self.negative and not self.positive) or (self.positive == self.negative != ""):
            raise SchemaError(
                expected="positive_from alone, or positive alone, or positive and another text as negative",
                found=f"positive_from = {self.positive_from}, positive = {self.positive!r}, "
                f"negative = {self.negative!r}",
                where=where,
                ways_out=('texts: positive = "yes", negative = "no"', "numbers: positive_from = 4.0"),
            )


def refuse_threshold_of_number(labels: Iterable[Label], *, where: str) -> None:
    """Refuse `positive_from` of a label without positives, which nothing would read.

    It is asked where a schema is new, and not by `Label`: runs of schemas that have it were trained, and are loaded.

    Args:
        labels: of a schema that is new.
        where: opens the location in errors.

    Raises:
        SchemaError: names the label.
    """
    for label in labels:
        if label.positive_from is not None and not label.task.has_positives:
            raise SchemaError(
                expected='positive_from with task = "binary" only',
                found=f"positive_from = {label.positive_from:g}, task = {label.task.value!r}",
                where=f"{where}, label {label.name!r}",
                ways_out=(
                    f'take task = "{label.task}" out: then the label is 1 from {label.positive_from:g} on, and else 0',
                    "take positive_from out: then the number itself is predicted",
                ),
            )


def is_number(label: Label) -> bool:
    """Return whether a label is a number, whose mean and deviation are fitted on the training rows."""
    return label.task.is_number


def linear_model_name(tasks: Iterable[Task]) -> str:
    """Return the name of a model that adds one weight a feature, by the tasks of the labels that it learns."""
    names = {task.linear_model for task in tasks}
    return names.pop() if len(names) == 1 else Task.linear_model


def is_what_came_next(name: str, *, moments: Collection[str]) -> bool:
    """Return True if a label is the one of samples that are made of events without labels.

    Args:
        name: of the label.
        moments: names of the samples' features that are times.
    """
    return name == NEXT_ITEM and ASKED_AT in moments


def with_outcomes(labels: Iterable[JSON], *, moments: Collection[str]) -> list[JSON]:
    """Labels as they are written now, from files that did not say their outcomes.

    Args:
        labels: plain data of each.
        moments: as in `is_what_came_next`.
    """
    written: list[JSON] = []
    for data in labels:
        label = as_group(data)
        if is_what_came_next(as_text(label["name"]), moments=moments):
            label = {**label, "outcomes": Outcomes.POSITIVE_ONLY.value}
        written.append(label)
    return written
