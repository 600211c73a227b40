"""What a filter says, as a tree, and what it means for one item.

    genres:Drama AND NOT year:1995..1999      And((Equals("genres", "Drama"), Not(Within("year", 1995, 1999))))

A predicate about an attribute that an item lacks is neither true nor false: it is *unknown*, as in SQL, and so is its
negation. AND is false if one side is, OR true if one side is, and else unknown if one side is. Only items for which
the whole is true pass. So neither `year:1995` nor `NOT year:1995` lets an item without a year pass; `year IS MISSING`,
which is always true or false, does.

`truth` is the definition: plain Python on the values of one item. The index must let the same items pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

Value = str | bool | int | float | None
Number = int | float


@dataclass(frozen=True, slots=True)
class Missing:
    """An item has no value for an attribute.

    Args:
        attribute: its name.
        text: how the filter says it.
    """

    attribute: str
    text: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Equals:
    """An attribute of text or truth has a value; one of an item's values, if it can have several.

    Args:
        attribute: its name.
        value: the text; "true" or "false" for a truth.
        text: how the filter says it.
    """

    attribute: str
    value: str
    text: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Within:
    """An attribute of numbers or times lies in a range; one of an item's values does, if it can have several.

    Args:
        attribute: its name.
        low: the least value that is inside; None if there is no least one.
        high: the greatest value that is inside; None if there is no greatest one. Nothing is inside if it is below
            `low`.
        text: how the filter says it.
    """

    attribute: str
    low: Number | None
    high: Number | None
    text: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Not:
    """The expression inside is false."""

    child: Expression


@dataclass(frozen=True, slots=True)
class And:
    """All expressions inside are true."""

    children: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Or:
    """True if at least one expression inside is true."""

    children: tuple[Expression, ...]


Term = Missing | Equals | Within
Expression = Term | Not | And | Or


@dataclass(frozen=True, slots=True)
class Filter:
    """A filter that was read: its text and its meaning for the attributes of one schema.

    Args:
        text: as it was given.
        expression: what it means.
    """

    text: str
    expression: Expression = field(
        hash=False
    )  # the text tells filters apart well enough, and a long tree hashes slowly

    def __str__(self) -> str:
        return self.text


def terms_of(expression: Expression) -> Iterator[Term]:
    """The predicates of an expression, from left to right."""
    if isinstance(expression, Not):
        yield from terms_of(expression.child)
    elif isinstance(expression, And | Or):
        for child in expression.children:
            yield from terms_of(child)
    else:
        yield expression


def truth(expression: Expression, values: Mapping[str, Value | Sequence[Value]]) -> bool | None:
    """Return whether an expression is true for one item; None if that is unknown.

    Args:
        expression: of a filter.
        values: of the item, by attribute: None where it has no value, a list where it can have several. Times are in
            the numbers that the schema uses for them, truths "true" and "false".
    """
    if isinstance(expression, Not):
        inner = truth(expression.child, values)
        return None if inner is None else not inner
    if isinstance(expression, And | Or):
        decides = isinstance(expression, Or)
        found = [truth(child, values) for child in expression.children]
        # Such a part decides, whatever is unknown beside it.
        if decides in found:
            return decides
        return None if None in found else not decides
    value = values[expression.attribute]
    if isinstance(expression, Missing):
        return value is None
    if value is None:
        return None
    values_of_item: Sequence[Value] = value if isinstance(value, list | tuple) else [value]  # type: ignore[list-item]
    return any(_holds(expression, each) for each in values_of_item)


def _holds(term: Equals | Within, value: Value) -> bool:
    if isinstance(term, Equals):
        return value == term.value
    # A range is of numbers alone: the parser refuses one of texts.
    if not isinstance(value, int | float):
        return False
    return (term.low is None or value >= term.low) and (term.high is None or value <= term.high)
