"""Rows are matched by raw id, whatever the encodings are: compared with a plain dict of id → vector."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ziggurat as zg
from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.preprocess.values.grown import GrownVocabulary
from ziggurat.data.preprocess.values.vocabulary import Ids
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.features.schema import Encoding, NumericTransform, Table
from ziggurat.runs.warm_start.matches import GrownIds, RowMatch, _match_growing, match_rows
from ziggurat.runs.warm_start.take import _num_met

ENCODINGS = {
    "vocabulary": Table(name="user"),
    "frequent": Table(name="user", min_count=2),
    "hashing": Table(name="user", encoding=Encoding.HASHING, num_rows=16),
    "more hashing": Table(name="user", encoding=Encoding.HASHING, num_rows=48),
    "identity": Table(name="user", encoding=Encoding.IDENTITY, num_rows=40),
    "growing": Table(name="user", encoding=Encoding.GROWING, num_rows=64),
}
NEVER = {
    ("more hashing", "hashing"),  # of the parent, of the run: 16 rows cannot tell what 48 told apart
    ("hashing", "growing"),
    ("more hashing", "growing"),
    ("growing", "hashing"),
    ("growing", "more hashing"),
}


def fitted(encoding: str, users: list[int]) -> Preprocessing:
    schema = zg.Schema(features=(zg.Categorical(name="user"),), tables=(ENCODINGS[encoding],))
    found = Preprocessing.fit(schema, [RawChunk.of(pl.DataFrame({"user": users}))])
    if encoding != "growing":
        return found
    numbers = np.array(list(dict.fromkeys(found.rows("user", texts(users), {}).tolist())))
    return found.with_grown({"user": GrownVocabulary.of(numbers)})


def texts(users: list[int]) -> Ids:
    return Ids.of(pl.Series([str(user) for user in users], dtype=pl.String))


def rows(preprocessing: Preprocessing, users: list[int], match: RowMatch | None = None) -> list[int]:
    """Return the rows of users: of a run, after it began with the ids that a match gives its growing table."""
    if preprocessing.schema.table("user").encoding is Encoding.IDENTITY:
        return [user + 3 for user in users]
    found = preprocessing
    if match is not None and match.grown is not None:
        found = Preprocessing(preprocessing.schema, vocabularies={}, numbers={})
        found = found.with_grown({"user": GrownVocabulary.of(match.grown.numbers)})
    return [int(row) for row in found.rows("user", texts(users), {})]


@pytest.mark.parametrize("theirs", ENCODINGS)
@pytest.mark.parametrize("mine", ENCODINGS)
@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(0, 39), min_size=1, max_size=60),
    st.lists(st.integers(0, 39), min_size=1, max_size=60),
)
def test_a_row_is_that_of_its_id(theirs: str, mine: str, before: list[int], now: list[int]) -> None:
    parent = fitted(theirs, before)
    child = fitted(mine, now)
    if mine == "growing":
        child = Preprocessing(child.schema, vocabularies={}, numbers={})
    match = match_rows("user", mine=child, theirs=parent)
    assert len(match.mine) == len(set(match.mine.tolist()))
    if (theirs, mine) in NEVER:
        assert match.why_not
        assert not match.num_taken
        return
    assert not match.why_not
    taken = dict(zip(match.mine.tolist(), match.theirs.tolist(), strict=True))
    everyone = list(range(40))
    by_their_row = dict(zip(everyone, rows(parent, everyone), strict=True))
    by_my_row: dict[int, list[int]] = {}
    for user, row in zip(everyone, rows(child, everyone, match), strict=True):
        by_my_row.setdefault(row, []).append(user)
    for row, users in by_my_row.items():
        theirs_of = {by_their_row[user] for user in users if by_their_row[user] >= 3}
        if row < 3:
            assert row not in taken
        elif len(users) == 1 or mine == theirs:
            assert {taken[row]} == theirs_of if theirs_of else row not in taken, (row, users)
        elif theirs_of:  # several ids in one row of a hash: it is that of one of them
            assert taken[row] in theirs_of
    known = {row for row in by_their_row.values() if row >= 3}
    assert match.num_gone == match.num_theirs - len(set(taken.values()))
    assert set(taken.values()) <= known | set(range(3, 3 + match.num_theirs))


def test_buckets_are_matched_by_what_falls_into_them() -> None:
    transform = NumericTransform("quantile_buckets")
    schema = zg.Schema(features=(zg.Dense(name="price", transform=transform, num_buckets=4),))
    parent, child = (
        Preprocessing.fit(schema, [RawChunk.of(pl.DataFrame({"price": values}))])
        for values in (np.arange(0.0, 100.0), np.arange(0.0, 400.0))
    )
    match = match_rows("price", mine=child, theirs=parent)
    # Edges of the parent are near 25, 50 and 75; of the run near 100, 200 and 300: all but the first are its last.
    assert dict(zip(match.mine.tolist(), match.theirs.tolist(), strict=True)) == {3: 3, 4: 6, 5: 6, 6: 6}
    same = match_rows("price", mine=parent, theirs=parent)
    assert same.mine.tolist() == same.theirs.tolist() == [3, 4, 5, 6]


@pytest.mark.parametrize("at_once", [1 << 20, 7_000])
def test_a_table_of_many_ids_is_matched_in_bulk(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    for module in ("ziggurat.data.preprocess.values.vocabulary", "ziggurat.runs.warm_start.matches"):
        monkeypatch.setattr(f"{module}._IDS_AT_ONCE", at_once)
    ids = [f"user-{number}" for number in range(200_000)]
    schema = zg.Schema(features=(zg.Categorical(name="user"),))
    parent, child = (
        Preprocessing.fit(schema, [RawChunk.of(pl.DataFrame({"user": some}))]) for some in (ids[:150_000], ids[50_000:])
    )
    match = match_rows("user", mine=child, theirs=parent)
    assert (match.num_taken, match.num_gone) == (100_000, 50_000)
    mine = child.vocabularies["user"].ids.gather(match.mine - 3)
    assert mine.equals(parent.vocabularies["user"].ids.gather(match.theirs - 3))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(3, 30), st.integers(1, 400)), max_size=25),
    st.integers(1, 30),
    st.randoms(use_true_random=False),
)
def test_a_growing_table_begins_with_the_most_frequent_ids(
    ids: list[tuple[int, int]], num_rows: int, random: random.Random
) -> None:
    """Of ids that share a number the first one counts; ids that are as frequent stand in the order of their rows."""
    table = Table(name="user", encoding=Encoding.GROWING, num_rows=num_rows)
    their_rows = list(range(3, 3 + len(ids)))
    random.shuffle(their_rows)
    numbers = np.array([number for number, _ in ids], dtype=np.int64)
    frequency = np.array([count for _, count in ids], dtype=np.int64)
    match = _match_growing(table, numbers=numbers, rows=np.array(their_rows, dtype=np.int32), frequency=frequency)
    first: dict[int, tuple[int, int]] = {}
    for (number, count), row in zip(ids, their_rows, strict=True):
        first.setdefault(number, (row, min(count, 255)))
    wanted = sorted(first.items(), key=lambda each: (-each[1][1], each[1][0]))[:num_rows]
    assert match.grown is not None
    assert match.grown.numbers.tolist() == [number for number, _ in wanted]
    assert match.theirs.tolist() == [row for _, (row, _) in wanted]
    assert match.mine.tolist() == list(range(3, 3 + len(wanted)))
    assert match.grown.frequency.tolist() == [count for _, (_, count) in wanted]
    assert match.num_gone == len(first) - len(wanted)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(3, 60), unique=True, max_size=30), st.lists(st.integers(3, 80), max_size=40))
def test_look_ups_that_meet_a_row_are_counted(taken: list[int], looked_up: list[int]) -> None:
    rows = np.array(looked_up, dtype=np.int64)
    wanted = sum(row in taken for row in looked_up)
    known = np.array(taken, dtype=np.int64)
    by_row = RowMatch(table="user", theirs=known, mine=known)
    assert _num_met(rows, by_row) == wanted
    grown = GrownIds(numbers=known, frequency=np.ones(len(known), dtype=np.uint8))
    assert _num_met(rows, replace(by_row, grown=grown)) == wanted
