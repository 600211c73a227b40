"""Why an item passes a filter or not, part by part, and what in a filter no item can fulfil.

this item does not pass: genres:Drama AND NOT year:1995..1999
no       genres:Drama AND NOT year:1995..1999
yes        genres:Drama               genres is Comedy, Drama
no         NOT year:1995..1999
yes          year:1995..1999          year is 1997
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from ziggurat.errors import nearest_names
from ziggurat.retrieval.filters.attribute_index import AttributeIndex
from ziggurat.retrieval.filters.expression import And, Equals, Expression, Filter, Missing, Not, Or, terms_of, truth
from ziggurat.retrieval.filters.literals import show_value
from ziggurat.typed import quoted

_WORDS = {True: "yes", False: "no", None: "unknown"}
_MAX_SHOWN = 8
_MAX_COMPARED = 2_000  # values that are compared with those of a filter: 10 to 20 ms at most
_MAX_NOTES = 8


def explain_item(wanted: Filter, attributes: Mapping[str, AttributeIndex], *, position: int, planes: Tensor) -> str:
    """Each part of a filter with its truth for one item, and the item's values.

    Args:
        wanted: the filter.
        attributes: of the index, by name.
        position: of the item.
        planes: of the index.
    """
    names = {term.attribute for term in terms_of(wanted.expression)}
    values = {name: attributes[name].values_of(position, planes=planes) for name in names}
    passes = truth(wanted.expression, values)
    lines = [f"this item {'passes' if passes else 'does not pass'}: {wanted}"]
    if passes is None:
        lines.append("It is unknown whether it would, since a value is missing; only what is sure passes.")
    lines += _lines(wanted.expression, values, attributes, depth=0)
    return "\n".join([*lines, *notes_of(wanted, attributes)])


def notes_of(wanted: Filter, attributes: Mapping[str, AttributeIndex]) -> list[str]:
    """The values that a filter asks for and no item has; the first ones, and how many there are."""
    absent = {
        term.text: term
        for term in terms_of(wanted.expression)
        if not isinstance(term, Missing) and _is_empty(attributes[term.attribute].codes_of(term))
    }
    notes = []
    left = _MAX_COMPARED
    for text, term in list(absent.items())[:_MAX_NOTES]:
        note = f"no item has {text:.200}"
        if isinstance(term, Equals):
            attribute = attributes[term.attribute]
            known = [str(attribute.value(code)) for code in range(min(attribute.stored.num_values, left))]
            left -= len(known)
            near = nearest_names(term.value, known, most=1)
            note += f"; the nearest is {quoted(near[0])}" if near else ""
        notes.append(note)
    more = len(absent) - len(notes)
    return [*notes, f"no item has {more:,} further values of the filter"] if more else notes


def _is_empty(codes: tuple[int, int]) -> bool:
    return codes[0] >= codes[1]


def _lines(
    expression: Expression, values: Mapping[str, list | None], attributes: Mapping[str, AttributeIndex], *, depth: int
) -> Iterator[str]:
    answer = f"  {_WORDS[truth(expression, values)]:<8} {'  ' * depth}"
    if isinstance(expression, Not):
        yield f"{answer}NOT"
        yield from _lines(expression.child, values, attributes, depth=depth + 1)
    elif isinstance(expression, And | Or):
        yield f"{answer}{'all of' if isinstance(expression, And) else 'any of'}"
        for child in expression.children:
            yield from _lines(child, values, attributes, depth=depth + 1)
    else:
        shown = _shown(values[expression.attribute], attributes[expression.attribute])
        yield f"{answer}{expression.text}   ({expression.attribute} is {shown})"


def _shown(values: list | None, attribute: AttributeIndex) -> str:
    if values is None:
        return "missing"
    texts = [show_value(value, attribute.stored.attribute) for value in values]
    more = [f"and {len(texts) - _MAX_SHOWN} more"] if len(texts) > _MAX_SHOWN else []
    return ", ".join([*texts[:_MAX_SHOWN], *more]) or "an empty list"
