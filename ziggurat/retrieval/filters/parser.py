"""The parser of filters: their texts become expressions.

    filter     := all ("OR" all)*
    all        := one ("AND" one)*
    one        := "NOT" one | "(" filter ")" | predicate
    predicate  := name ":" range                         genres:Drama   year:1995..1999   year:1995..
                | name [":"] comparison value            year >= 1995   year:>=1995       lang != de
                | name ["NOT"] "IN" "(" range, … ")"     lang IN (de, en)
                | name "IS" ["NOT"] "MISSING"            year IS MISSING
    range      := value | value ".." [value] | ".." value
    comparison := "=" | "==" | "!=" | "<" | "<=" | ">" | ">="

So NOT binds tighter than AND, and AND tighter than OR. Keywords may be written in any case. A value or name with
spaces, commas or parentheses, or one that begins with a quote, stands in quotes of either kind; a backslash in quotes
stands before a quote or a backslash. Every error points at the column where reading stopped.

Cost: 10 to 20 microseconds a predicate. Texts, nesting and numbers of predicates are bounded, since filters come from
outside.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from ziggurat.errors import FilterError
from ziggurat.retrieval.filters.expression import And, Equals, Expression, Filter, Missing, Not, Number, Or, Within
from ziggurat.retrieval.filters.literals import above, below, boolean_of, range_of
from ziggurat.retrieval.filters.schema import Attribute, AttributeKind, FilterSchema
from ziggurat.typed import nearest, quoted

MAX_CHARACTERS = 16_384
MAX_TERMS = 1_024
MAX_NESTING = 64

T = TypeVar("T")

_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[^\s()\"',:<>=!]+")
_WORD = re.compile(r"[^\s()\"',][^\s()\",]*")  # an apostrophe may stand within
_BOUND = re.compile(r"[^\s()\"',.](?:[^\s()\",.]|\.(?!\.))*|\.(?!\.)(?:[^\s()\",.]|\.(?!\.))+")  # stops before ".."
# Longer ones first: an alternative that matches is taken.
_COMPARISON = re.compile(r"<=|>=|!=|==|<|>|=")
_KEYWORDS = ("AND", "OR", "NOT", "IN", "IS")


def parse_filter(text: str, *, schema: FilterSchema, left_out: Mapping[str, str] | None = None) -> Filter:
    """Turn the text of a filter into its meaning.

    Args:
        text: as users write it.
        schema: the attributes of the items.
        left_out: columns that no filter can name, and why, for the error that says so.

    Raises:
        FilterError: it cannot be read, or does not fit the attributes; points at the column.
    """
    if not isinstance(text, str):
        raise FilterError(
            expected="a filter as text",
            found=f"{quoted(text)} ({type(text).__name__})",
            where="a filter",
            ways_out='write it as text, such as "genres:Drama AND NOT year:1995..1999"',
        )
    if len(text) > MAX_CHARACTERS:
        raise FilterError(
            expected=f"a filter of at most {MAX_CHARACTERS:,} characters",
            found=f"{len(text):,} characters",
            where="a filter",
            ways_out=("ask for less at a time", "give items never to return as `exclude`, not in the filter"),
        )
    return Filter(text, _Parser(text, schema, left_out or {}).parse())


class _Parser:
    def __init__(self, text: str, schema: FilterSchema, left_out: Mapping[str, str]) -> None:
        self._text = text
        self._left_out = left_out
        self._attributes = {attribute.name: attribute for attribute in schema.attributes}
        self._at = 0
        self._terms = 0

    def parse(self) -> Expression:
        self._skip()
        if self._ended:
            raise self._error(0, "a filter", "no more than spaces" if self._text else "an empty text", _EMPTY)
        expression = self._any(0)
        if not self._ended:
            found = self._rest()
            way = "close every parenthesis that is open, and no other" if found == "')'" else _JOIN
            raise self._error(self._at, "AND, OR, or the end", found, way)
        return expression

    def _any(self, depth: int) -> Expression:
        children = [self._all(depth)]
        # A level of the grammar for each operator is what makes AND bind tighter than OR.
        while self._keyword("OR"):
            children.append(self._all(depth))
        return children[0] if len(children) == 1 else Or(tuple(children))

    def _all(self, depth: int) -> Expression:
        children = [self._one(depth)]
        while self._keyword("AND"):
            children.append(self._one(depth))
        return children[0] if len(children) == 1 else And(tuple(children))

    def _one(self, depth: int) -> Expression:
        # Python's own recursion ends with a traceback, long before such a filter means anything.
        if depth > MAX_NESTING:
            raise self._error(self._at, f"at most {MAX_NESTING} NOTs and parentheses in each other", "one more", _FLAT)
        start = self._at
        if self._take("("):
            inside = self._any(depth + 1)
            if not self._take(")"):
                way = f"close the parenthesis of column {start + 1}"
                raise self._error(self._at, "')', AND or OR", self._rest(), way)
            return inside
        if self._keyword("NOT"):
            return Not(self._one(depth + 1))
        # Counted here, where each predicate passes once, however deep it stands.
        self._terms += 1
        if self._terms > MAX_TERMS:
            raise self._error(start, f"at most {MAX_TERMS:,} predicates", "one more", _SHORTER)
        return self._predicate()

    def _predicate(self) -> Expression:
        attribute = self._attribute()
        if self._take(":"):
            # year:>=1995 and year >= 1995 are the same, so a comparison may follow the colon.
            comparison = self._comparison()
            return self._range(attribute) if comparison is None else self._compared(attribute, *comparison)
        comparison = self._comparison()
        if comparison is not None:
            return self._compared(attribute, *comparison)
        is_negated = self._keyword("NOT")
        if self._keyword("IN"):
            found = self._members(attribute)
            # NOT IN is the negation of IN, and both have one form behind the parser.
            return Not(found) if is_negated else found
        if not is_negated and self._keyword("IS"):
            is_negated = self._keyword("NOT")
            if self._keyword("MISSING"):
                missing = Missing(attribute.name, f"{attribute.name} IS MISSING")
                return Not(missing) if is_negated else missing
            raise self._error(self._at, "MISSING", self._rest(), f"write {attribute.name} IS MISSING")
        expected = "IN" if is_negated else "':', a comparison, IN, or IS"
        raise self._error(self._at, expected, self._rest(), f"write {_sample(attribute)}")

    def _attribute(self) -> Attribute:
        start = self._at
        if self._text[start : start + 1] in ('"', "'"):
            name = self._quoted()
        else:
            match = _NAME.match(self._text, start)
            # Before a colon, even the word of an operator is the name of an attribute.
            if match is None or (match[0].upper() in _KEYWORDS and not self._text.startswith(":", match.end())):
                ways = ("begin with the attribute's name", "put it in quotes if it is the name of an attribute")
                raise self._error(start, "an attribute, NOT or '('", self._rest(), *ways)
            name = self._advance(match)
        if name not in self._attributes:
            known = ", ".join(self._attributes) or "none"
            near = nearest(name, self._attributes, instead="use one of the attributes that the items have")
            reason = f", a column that was left out: {self._left_out[name]}" if name in self._left_out else ""
            raise self._error(start, f"one of the attributes {known:.500}", quoted(name) + reason, *near)
        return self._attributes[name]

    def _comparison(self) -> tuple[str, int] | None:
        at = self._at
        match = _COMPARISON.match(self._text, self._at)
        return None if match is None else (self._advance(match), at)

    def _members(self, attribute: Attribute) -> Expression:
        if not self._take("("):
            raise self._error(self._at, "'(' after IN", self._rest(), f"write {attribute.name} IN (…, …)")
        members = [self._range(attribute)]
        while self._take(","):
            # Each value costs as much as a predicate.
            self._terms += 1
            if self._terms > MAX_TERMS:
                raise self._error(self._at, f"at most {MAX_TERMS:,} values and predicates", "one more", _SHORTER)
            members.append(self._range(attribute))
        if not self._take(")"):
            raise self._error(self._at, "',' or ')'", self._rest(), "separate values by commas", _QUOTE)
        return members[0] if len(members) == 1 else Or(tuple(members))

    def _range(self, attribute: Attribute) -> Equals | Within:
        """A value, or a range where there is an order."""
        name = attribute.name
        start = self._at
        if not attribute.kind.is_ordered:
            value, at = self._value(attribute)
            return Equals(name, self._converted(_text_or_boolean, value, attribute, at), self._said(attribute, start))
        # ..1999: open below.
        low = None if self._text.startswith("..", self._at) else self._bound(attribute)
        has_dots = self._take("..")
        if low is not None and not has_dots:
            return Within(name, *low, self._said(attribute, start))
        # What follows the dots ends the range, or is its upper end.
        if self._ended or self._text[self._at] in ")," or _is_keyword(_WORD.match(self._text, self._at)):
            if low is None:
                raise self._error(self._at, "a value before or after '..'", self._rest(), "write 1995..1999, or 1995..")
            return Within(name, low[0], None, self._said(attribute, start))
        at = self._at
        if self._text.startswith(".", at):
            raise self._error(at, "two dots between the ends of a range", "three", "write 0.5, not .5, after the dots")
        high = self._bound(attribute)
        # Ends are ranges themselves (a year has days): only ends that do not overlap are in the wrong order.
        if low is not None and low[0] > high[1] and low[1] > high[0]:
            found = f"{self._text[start : self._at].rstrip()!r:.80}, which is from the greater to the smaller"
            raise self._error(at, "a range that ends where it begins or later", found, "write the smaller value first")
        return Within(name, low[0] if low else None, high[1], self._said(attribute, start))

    def _compared(self, attribute: Attribute, comparison: str, at: int) -> Expression:
        if comparison in ("=", "==", "!="):
            # An equality is a range of one value, and a date one of its moments.
            found = self._range(attribute)
            return Not(found) if comparison == "!=" else found
        if not attribute.kind.is_ordered:
            expected = f"':', '=' or '!=' for {attribute.name!r}, which is {attribute.describe()}"
            raise self._error(at, expected, repr(comparison), "only numbers, dates and times have an order")
        # A value may stand for a range of numbers, as a date for all moments of its day.
        low, high = self._bound(attribute)
        text = self._said(attribute, at)
        if comparison[0] == "<":
            # `<` ends before the first moment of the value, `<=` with its last one.
            return Within(attribute.name, None, high if comparison == "<=" else below(low), text)
        return Within(attribute.name, low if comparison == ">=" else above(high), None, text)

    def _bound(self, attribute: Attribute) -> tuple[Number, Number]:
        value, at = self._value(attribute)
        return self._converted(range_of, value, attribute, at)

    def _value(self, attribute: Attribute) -> tuple[str, int]:
        start = self._at
        if self._text[start : start + 1] in ('"', "'"):
            return self._quoted(), start
        match = (_BOUND if attribute.kind.is_ordered else _WORD).match(self._text, start)
        if match is None:
            raise self._error(start, f"a value of {attribute.name!r}", self._rest(), _QUOTE)
        return self._advance(match), start

    def _quoted(self) -> str:
        start = self._at
        mark = self._text[self._at]
        parts = []
        at = start + 1
        while at < len(self._text) and self._text[at] != mark:
            # A backslash is taken away, and the sign behind it stays.
            if self._text[at] == "\\":
                at += 1
                if self._text[at : at + 1] not in ('"', "'", "\\"):
                    way = "write two backslashes where you mean one"
                    raise self._error(at - 1, "a quote or a backslash after a backslash in quotes", "another", way)
            parts.append(self._text[at])
            at += 1
        if at >= len(self._text):
            raise self._error(start, f"a closing {mark} for the quote that opens here", "the end", "close it")
        self._at = at + 1
        self._skip()
        return "".join(parts)

    def _converted(self, convert: Callable[[str, Attribute], T], value: str, attribute: Attribute, at: int) -> T:
        try:
            return convert(value, attribute)
        except ValueError as problem:
            expected = f"{problem}, since {attribute.name!r} is {attribute.describe()}"
            raise self._error(at, expected, quoted(value), "correct the value") from None

    @property
    def _ended(self) -> bool:
        return self._at >= len(self._text)

    def _skip(self) -> None:
        if match := _SPACE.match(self._text, self._at):
            self._at = match.end()

    def _advance(self, match: re.Match[str]) -> str:
        self._at = match.end()
        self._skip()
        return match[0]

    def _take(self, text: str) -> bool:
        if not self._text.startswith(text, self._at):
            return False
        self._at += len(text)
        self._skip()
        return True

    def _keyword(self, keyword: str) -> bool:
        match = _NAME.match(self._text, self._at)
        # `name:` is an attribute, whatever its name.
        if match is None or match[0].upper() != keyword or self._text.startswith(":", match.end()):
            return False
        self._advance(match)
        return True

    def _said(self, attribute: Attribute, start: int) -> str:
        return f"{attribute.name}:{self._text[start : self._at].rstrip()}"

    def _rest(self) -> str:
        if self._ended:
            return "the end"
        # A sign that begins no name is shown by itself.
        match = _NAME.match(self._text, self._at)
        return quoted(match[0] if match else self._text[self._at])

    def _error(self, at: int, expected: str, found: str, *ways_out: str) -> FilterError:
        # A window around the mistake, since a filter may be longer than any screen is wide.
        begin = max(0, at - 60)
        # One sign for each sign, so that the mark below stands under the right one.
        line = "".join(each if each.isprintable() else " " for each in self._text[begin : at + 40])
        where = f"column {at + 1} of the filter\n            {line}\n            {' ' * (at - begin)}^"
        return FilterError(expected=expected, found=found, where=where, ways_out=ways_out)


def _text_or_boolean(value: str, attribute: Attribute) -> str:
    return boolean_of(value) if attribute.kind is AttributeKind.BOOLEAN else value


def _is_keyword(match: re.Match[str] | None) -> bool:
    return match is not None and match[0].upper() in _KEYWORDS


def _sample(attribute: Attribute) -> str:
    samples = {
        AttributeKind.TEXT: f"{attribute.name}:word or {attribute.name} IN (word, word)",
        AttributeKind.BOOLEAN: f"{attribute.name}:true",
        AttributeKind.DATE: f"{attribute.name}:>=1999-12-31",
        AttributeKind.DATETIME: f"{attribute.name}:>=1999-12-31T23:59",
    }
    return samples.get(attribute.kind, f"{attribute.name}:1..5 or {attribute.name}:>=1")


_EMPTY = "give None where every item may pass"
_JOIN = "join predicates by AND or OR, and put values with spaces in quotes"
_QUOTE = 'put values with spaces, commas, quotes or parentheses in quotes: "New York"'
_FLAT = "write the filter with fewer parentheses"
_SHORTER = "ask for less at a time"
