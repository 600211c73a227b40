"""Random catalogues and random filters, each filter with the items for which plain Python finds it true or false.

Nothing here uses the package: values are compared as Python objects, dates as the text that they have in ISO 8601. Sets
of items are whole numbers, bit i for item i.
"""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import polars as pl

GENRES = ["Drama", "Comedy", "Sci-Fi", "Children's", "Film Noir", "(odd)", 'say "no"', "AND", "ø"]
LANGUAGES = ["de", "en", "fr", "pt BR", "not", "x:y"]


@dataclass(frozen=True)
class Said:
    """A filter in text, the items for which it is true, and those for which it is false."""

    text: str
    true: int
    false: int


def catalogue(n: int, *, seed: int) -> pl.DataFrame:
    """Items with attributes of every kind, each of them missing now and then."""
    draw = random.Random(seed)

    def column(make: Callable[[], object], missing: float = 0.1) -> list[object]:
        return [None if draw.random() < missing else make() for _ in range(n)]

    def several(make: Callable[[], object], most: int) -> Callable[[], list[object]]:
        return lambda: [make() for _ in range(draw.randrange(most + 1))]

    day = dt.date(1999, 1, 1)
    clock = dt.datetime(2019, 12, 30)
    return pl.DataFrame(
        {
            "genres": column(several(lambda: draw.choice([*GENRES, None]), 4)),
            "lang": pl.Series(column(lambda: draw.choice(LANGUAGES)), dtype=pl.Categorical),
            "creator": column(lambda: f"creator {int(draw.paretovariate(0.4)) % 500}", 0.02),
            "tags": column(several(lambda: f"tag{int(draw.paretovariate(0.5)) % 300}", 6)),
            "in_stock": column(lambda: draw.random() < 0.7),
            "year": pl.Series(column(lambda: draw.randrange(1919, 2001)), dtype=pl.Int16),
            "votes": column(lambda: draw.choice([0, draw.randrange(-10_000, 10_000)]), 0.0),
            "rating": column(lambda: draw.randrange(1, 6)),
            "price": column(lambda: draw.choice([0.0, 9.99, float("nan"), draw.uniform(0, 100)])),
            "weight": pl.Series(column(lambda: draw.choice([0.1, 0.2, draw.random()])), dtype=pl.Float32),
            "shelves": column(several(lambda: draw.randrange(100), 4)),
            "released": column(lambda: day + dt.timedelta(days=draw.randrange(700))),
            "seen at": column(lambda: clock + dt.timedelta(seconds=draw.randrange(0, 400_000, 20))),
            "kind": ["film"] * n,
            "nothing": pl.Series([None] * n, dtype=pl.String),
        }
    )


class Filters:
    """Random filters about the items of a frame, of at most so many different predicates."""

    def __init__(self, items: pl.DataFrame, *, seed: int, most_terms: int = 400) -> None:
        self._draw, self._most_terms = random.Random(seed), most_terms
        self._items = {name: items[name].to_list() for name in items.columns}
        self._float32 = {name for name, dtype in items.schema.items() if dtype == pl.Float32}
        self._all = (1 << len(items)) - 1
        self._known: list[Said] = []

    def draw(self, depth: int) -> Said:
        """A filter with so many levels of AND, OR and NOT at most."""
        if depth == 0 or self._draw.random() < 0.25:
            return self._term()
        kind = self._draw.random()
        if kind < 0.25:
            inner = self.draw(depth - 1)
            return Said(f"{self._word('NOT')} {self._group(inner.text)}", inner.false, inner.true)
        parts = [self.draw(depth - 1) for _ in range(self._draw.choice([2, 2, 3]))]
        is_and = kind < 0.65
        text = self._word(" AND " if is_and else " OR ").join(self._group(part.text) for part in parts)
        true, false = parts[0].true, parts[0].false
        for part in parts[1:]:
            true = true & part.true if is_and else true | part.true
            false = false | part.false if is_and else false & part.false
        return Said(text, true, false)

    def _group(self, text: str) -> str:
        return self._draw.choice([f"({text})", f"( {text} )"])

    def _word(self, keyword: str) -> str:
        return self._draw.choice([keyword, keyword, keyword.lower()])

    def _term(self) -> Said:
        if len(self._known) >= self._most_terms:
            return self._draw.choice(self._known)
        self._known.append(self._new_term())
        return self._known[-1]

    def _new_term(self) -> Said:
        name = self._draw.choice(list(self._items))
        attribute = self._draw.choice(["'seen at'", '"seen at"']) if name == "seen at" else name
        kind = self._draw.random()
        if kind < 0.1:
            missing = sum(1 << row for row, value in enumerate(self._items[name]) if _is_missing(value))
            text, negated = self._draw.choice([("IS MISSING", False), ("is not missing", True)])
            there = self._all & ~missing
            return Said(f"{attribute} {text}", *((there, missing) if negated else (missing, there)))
        if kind < 0.25:
            members = [self._member(name) for _ in range(self._draw.randrange(1, 4))]
            text = ", ".join(text for text, _ in members)
            negated = self._draw.random() < 0.3
            found = self._said("", name, lambda value: any(holds(value) for _, holds in members))
            text = f"{attribute} {'NOT ' if negated else ''}IN ({text})"
            return Said(text, *((found.false, found.true) if negated else (found.true, found.false)))
        if kind < 0.7 or name in ("genres", "lang", "creator", "tags", "in_stock", "kind", "nothing"):
            text, holds = self._member(name)
            sign = self._draw.choice([":", ":", "=", ":=", " == ", "!=", ":!="])
            found = self._said("", name, holds)
            true, false = (found.false, found.true) if "!" in sign else (found.true, found.false)
            return Said(f"{attribute}{sign}{text}", true, false)
        sign = self._draw.choice(["<", "<=", ">", ">="])
        text, compare = self._bound(name)
        check = {"<": lambda c: c < 0, "<=": lambda c: c <= 0, ">": lambda c: c > 0, ">=": lambda c: c >= 0}[sign]
        full = f"{attribute}{self._draw.choice([':', '', ' '])}{sign}{self._draw.choice(['', ' '])}{text}"
        return self._said(full, name, lambda value: check(compare(value)))

    def _said(self, text: str, name: str, holds: Callable[[object], bool]) -> Said:
        true = false = 0
        for row, value in enumerate(self._items[name]):
            if _is_missing(value):
                continue
            values = [each for each in value if each is not None] if isinstance(value, list) else [value]
            if any(holds(each) for each in values):
                true |= 1 << row
            else:
                false |= 1 << row
        return Said(text, true, false)

    def _member(self, name: str) -> tuple[str, Callable[[object], bool]]:
        """A value or a range, and what is in it."""
        if name in ("genres", "lang", "creator", "tags", "kind", "nothing"):
            wanted = self._draw.choice([self._some(name) or "x", "no such value"])
            return self._quoted(str(wanted)), lambda value: value == wanted
        if name == "in_stock":
            wanted = self._draw.random() < 0.5
            return self._draw.choice([str(wanted), str(wanted).lower()]), lambda value: value is wanted
        text, compare = self._bound(name)
        kind = self._draw.random()
        if kind < 0.4:
            return text, lambda value: compare(value) == 0
        if kind < 0.55:
            return f"{text}..", lambda value: compare(value) >= 0
        if kind < 0.7:
            return f"..{text}", lambda value: compare(value) <= 0
        other, compare_other = self._bound(name)
        ends = sorted(
            [(_sortable(name, text), text, compare), (_sortable(name, other), other, compare_other)], key=lambda e: e[0]
        )
        dots = self._draw.choice(["..", " .. "])
        low, high = ends[0][2], ends[1][2]
        return f"{ends[0][1]}{dots}{ends[1][1]}", lambda value: low(value) >= 0 and high(value) <= 0

    def _bound(self, name: str) -> tuple[str, Callable[[object], int]]:
        """A number or time in text, and how values compare with it: -1, 0 or 1."""
        value = self._some(name)
        if isinstance(value, dt.datetime):
            text = f"{value.isoformat()}.000000"[: self._draw.choice([4, 7, 10, 16, 19, 21, 26])]
            return self._time_quoted(text), lambda value: _compare(f"{value.isoformat()}.000000"[: len(text)], text)
        if isinstance(value, dt.date):
            text = value.isoformat()[: self._draw.choice([4, 7, 10])]
            return text, lambda value: _compare(value.isoformat()[: len(text)], text)
        text = self._draw.choice([str(value or 0), str((value or 0) + self._draw.randrange(-2, 3)), "0", "-3.5", "1e3"])
        if name in self._float32:
            number = float(np.float32(text))
            return text, lambda value: _compare(value, number)
        exact = Fraction(text) if name in ("year", "votes", "rating", "shelves") else float(text)
        return text, lambda value: _compare(value, exact)

    def _some(self, name: str) -> object:
        value = self._draw.choice(self._items[name])
        if isinstance(value, list):
            value = self._draw.choice(value) if value else None
        if value is None and name in ("released", "seen at"):
            return dt.date(1999, 6, 5) if name == "released" else dt.datetime(2020, 1, 1, 12, 0, 20)
        return None if value is not None and value != value else value

    def _quoted(self, text: str) -> str:
        mark = self._draw.choice("\"'")
        quoted = mark + text.replace("\\", "\\\\").replace(mark, f"\\{mark}") + mark
        needs_quotes = any(each in ' (),"' for each in text) or text[:1] in "'"
        return quoted if needs_quotes or self._draw.random() < 0.2 else text

    def _time_quoted(self, text: str) -> str:
        return self._draw.choice([text, f'"{text}"', f"'{text.replace('T', ' ')}'"])


def rows_of(bits: int) -> list[int]:
    """The numbers of the set bits."""
    return [row for row, bit in enumerate(bin(bits)[:1:-1]) if bit == "1"]


def _is_missing(value: object) -> bool:
    return value is None or value != value  # NaN


def _compare(value: object, bound: object) -> int:
    return (value > bound) - (value < bound)  # type: ignore[operator]


def _sortable(name: str, text: str) -> str | float:
    return text.strip("\"'").replace("T", " ") if name in ("released", "seen at") else float(text)
