"""The language of filters: what each form means, and errors that point at the column."""

from __future__ import annotations

import datetime as dt
import random

import polars as pl
import pytest

from ziggurat.errors import FilterError
from ziggurat.retrieval.filters import FilterSchema, parse_filter
from ziggurat.retrieval.filters.expression import And, Equals, Expression, Missing, Not, Or, Within, truth

SCHEMA, _ = FilterSchema.of_frame(
    pl.DataFrame(
        {
            "genres": [["a"]],
            "lang": ["de"],
            "year": [1990],
            "price": [1.5],
            "weight": pl.Series([0.1], dtype=pl.Float32),
            "ok": [True],
            "day": [dt.date(2000, 1, 1)],
            "time": [dt.datetime(2000, 1, 1)],
            "there": pl.Series([dt.datetime(2000, 1, 1)]).dt.replace_time_zone("Europe/Berlin"),
            "my attr": ["x"],
            "in": [1],
        }
    )
)
A, B, C = Equals("lang", "a"), Equals("lang", "b"), Equals("lang", "c")
HOUR = 3600 * 1_000_000


def meaning(text: str) -> Expression:
    return parse_filter(text, schema=SCHEMA).expression


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lang:a AND lang:b OR lang:c", Or((And((A, B)), C))),
        ("lang:a OR lang:b AND lang:c", Or((A, And((B, C))))),
        ("NOT lang:a AND lang:b", And((Not(A), B))),
        ("not (lang:a and (lang:b))", Not(And((A, B)))),
        ("lang IN (a, b)", Or((A, B))),
        ("lang not in(a)", Not(A)),
        ("lang!=a", Not(A)),
        ("lang IS MISSING", Missing("lang")),
        ("lang is not missing", Not(Missing("lang"))),
        ("lang:it's", Equals("lang", "it's")),
        ('lang:"say \\"no\\" \\\\"', Equals("lang", 'say "no" \\')),
        ("lang:a..b", Equals("lang", "a..b")),
        ("lang:x:y", Equals("lang", "x:y")),
        ("'my attr':x", Equals("my attr", "x")),
        ("in:1", Within("in", 1, 1)),
        ('"in" IN (1)', Within("in", 1, 1)),
        ("lang:AND", Equals("lang", "AND")),
        ("ok:TRUE", Equals("ok", "true")),
        ("year:1995..1999", Within("year", 1995, 1999)),
        ("year:1995 .. 1999", Within("year", 1995, 1999)),
        ("year:-3..-1", Within("year", -3, -1)),
        ("year:1995.. AND lang:a", And((Within("year", 1995, None), A))),
        ("year IN (..5, 7)", Or((Within("year", None, 5), Within("year", 7, 7)))),
        ("year>5", Within("year", 6, None)),
        ("year :< 5", Within("year", None, 4)),
        ("year:3.5", Within("year", 4, 3)),
        ("year:<3.5", Within("year", None, 3)),
        ("year:>=3.5", Within("year", 4, None)),
        ("year:1e3", Within("year", 1000, 1000)),
        ("price:<1.5", Within("price", None, 1.4999999999999998)),
        ("weight:0.1", Within("weight", 0.10000000149011612, 0.10000000149011612)),
        ("day:1970-01", Within("day", 0, 30)),
        ("day:1970..1970-01-02", Within("day", 0, 1)),
        ("day:>1970", Within("day", 365, None)),
        ("time:1970-01-01T01", None),
        ("time:1970-01-01T01:00", Within("time", HOUR, HOUR + 60_000_000 - 1)),
        ("time:<='1970-01-01 01:00:00.5'", Within("time", None, HOUR + 599_999)),
        ("day:1970-03..1970", Within("day", 59, 364)),
        ("day:1970-01-15..1970-01", Within("day", 14, 30)),
        ("year:3.2..3.4", Within("year", 4, 3)),
        ("there:1970-01-01T01:00:00.000000", Within("there", 0, 0)),
        ("there:1970-01-01T01:00:00.000000Z", Within("there", HOUR, HOUR)),
        ("there:1970-01-01T03:00:00.000000+02:00", Within("there", HOUR, HOUR)),
    ],
)
def test_what_a_filter_means(text: str, expected: Expression | None) -> None:
    if expected is None:
        with pytest.raises(FilterError):
            meaning(text)
    else:
        assert meaning(text) == expected


@pytest.mark.parametrize(
    ("zone", "day"),
    [
        ("Europe/Berlin", "2024-10-27"),  # 25 hours
        ("Europe/Berlin", "2024-03-31"),  # 23 hours
        ("America/Havana", "2024-03-10"),  # begins at 01:00
        ("America/Havana", "2024-11-03"),  # shows 00:00 to 01:00 twice
        ("America/Sao_Paulo", "2018-02-17"),  # shows its last hour twice
        ("Pacific/Apia", "2011-12-30"),  # is no day there
    ],
)
def test_a_day_of_a_zone_has_the_hours_that_it_had(zone: str, day: str) -> None:
    frame = pl.DataFrame({"at": pl.Series([dt.datetime(2000, 1, 1)]).dt.replace_time_zone(zone)})
    found = parse_filter(f"at:{day}", schema=FilterSchema.of_frame(frame)[0]).expression
    assert isinstance(found, Within)
    noon = dt.datetime.fromisoformat(f"{day}T12:00:00+00:00")
    minutes = pl.Series([noon + dt.timedelta(minutes=each) for each in range(-2880, 2880)])
    local = minutes.dt.convert_time_zone(zone).dt.date() == dt.date.fromisoformat(day)
    inside = minutes.dt.epoch("us").is_between(found.low, found.high)
    assert inside.to_list() == local.to_list()


def test_a_day_that_went_back_into_the_day_before_is_refused() -> None:
    frame = pl.DataFrame({"at": pl.Series([dt.datetime(2000, 1, 1)]).dt.replace_time_zone("America/St_Johns")})
    schema = FilterSchema.of_frame(frame)[0]
    with pytest.raises(FilterError, match=r"2010-11-07T00:00-02:30 \(the clock went back"):
        parse_filter("at:2010-11-07..", schema=schema)
    assert parse_filter("at:2010", schema=schema)


@pytest.mark.parametrize(
    ("text", "column", "says"),
    [
        ("", 1, "an empty text"),
        ("   ", 1, "no more than spaces"),
        ("lang:a AND yaer:1995", 12, 'did you mean "year"?'),
        ("lang:a lang:b", 8, "AND, OR, or the end"),
        ("(lang:a", 8, "the parenthesis of column 1"),
        ("lang:a)", 7, "no other"),
        ("lang:a AND", 11, "the end"),
        ("AND lang:a", 1, "begin with the attribute's name"),
        ("lang", 5, "write lang:word"),
        ("lang:", 6, "a value of 'lang'"),
        ("lang:<b", 6, "have an order"),
        ("lang:'a", 6, "a closing '"),
        ("lang:'a\\n'", 8, "two backslashes"),
        ("lang IN a", 9, "'(' after IN"),
        ("lang IN ()", 10, "a value"),
        ("lang IN (a b)", 12, "',' or ')'"),
        ("lang NOT a", 10, "expected: IN"),
        ("lang IS null", 9, "MISSING"),
        ("year:x", 6, "a number, such as"),
        ("year:1..x", 9, "a number, such as"),
        ("year:..", 8, "before or after"),
        ("year:1...3", 9, "two dots"),
        ("year:1999..1995", 12, "smaller value first"),
        ("day:2003..2002-09", 11, "smaller value first"),
        ("year:١٩٩٥", 6, "a number, such as"),
        ("day:٢٠٠٢", 5, "a date, such as"),
        ("time:2002-01-01T٠١:٠٠", 6, "a date with a time"),
        ("there:2024-10-27T02:30", 7, "2024-10-27T02:30+02:00 or 2024-10-27T02:30+01:00 (the clock showed it twice)"),
        ("there:2024-03-31T02:30", 7, "(the clock skipped it)"),
        ("year:nan", 6, "a number"),
        ("price:1e999", 7, "that a float holds"),
        ("weight:1e39", 8, "that a float holds"),
        ("ok:maybe", 4, "true or false"),
        ("day:1999-13", 5, "the calendar has"),
        ("day:1999-12-31T00:00", 5, "a date, such as"),
        ("time:1999-12-31T25:00", 6, "the clock has"),
        ("time:1999-12-31T12:00Z", 6, "without a zone"),
        ("there:0001-01-01", 7, "between the years"),
        ("(" * 70 + "lang:a" + ")" * 70, 66, "in each other"),
        ("NOT " * 70 + "lang:a", 261, "in each other"),
        (" OR ".join(["lang:a"] * 1025), 10241, "at most 1,024"),
        (f"year IN ({','.join('1' * 1025)})", 2058, "at most 1,024"),
    ],
)
def test_errors_point_at_the_column(text: str, column: int, says: str) -> None:
    with pytest.raises(FilterError) as caught:
        meaning(text)
    assert says in str(caught.value)
    first, line, caret = caught.value.where.splitlines()
    assert first == f"column {column} of the filter"
    place = caret.index("^")
    assert line.ljust(place + 1)[place] == (text + " ")[column - 1]


def test_a_filter_that_is_too_long_is_refused() -> None:
    with pytest.raises(FilterError, match="at most 16,384 characters"):
        meaning("lang:" + "a" * 20_000)


def test_text_of_any_kind_is_read_or_refused() -> None:
    draw = random.Random(0)
    words = ["AND", "OR", "NOT", "IN", "IS", "MISSING", "lang", "year", "time", "..", ":", "1", "1999-12", "a"]
    places = []
    for _ in range(4000):
        text = "".join(
            draw.choice([*words, *"()\"':=<>!.,\\ \n\t\x00\ud800ø-", " "]) for _ in range(draw.randrange(14))
        )
        try:
            meaning(text)
        except FilterError as error:
            places.append(error.where)
    assert 3000 < len(places) < 4000
    assert all(place.startswith("column ") for place in places)


@pytest.mark.parametrize(
    ("text", "values", "expected"),
    [
        ("lang:a", {"lang": None}, None),
        ("NOT lang:a", {"lang": None}, None),
        ("lang IS MISSING", {"lang": None}, True),
        ("lang:a AND year:1", {"lang": None, "year": 2}, False),
        ("lang:a AND year:1", {"lang": None, "year": 1}, None),
        ("lang:a OR year:1", {"lang": None, "year": 1}, True),
        ("lang:a OR year:1", {"lang": None, "year": 2}, None),
        ("genres:a", {"genres": ["b", "a"]}, True),
        ("NOT genres:a", {"genres": []}, True),
    ],
)
def test_missing_values_make_a_filter_unknown(text: str, values: dict[str, object], expected: bool | None) -> None:
    assert truth(meaning(text), values) is expected  # type: ignore[arg-type]
