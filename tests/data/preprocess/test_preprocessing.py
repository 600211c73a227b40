"""Preprocessing: equal to the slow reference, whatever the chunks, the raw types, and a save and load between."""

from __future__ import annotations

import datetime
import json
import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.preprocess.preprocessing_reference import Reference, Row, canonical
from ziggurat.data.preprocess.preprocessing import Preprocessing, numeric_columns
from ziggurat.data.preprocess.preprocessing_io import load_preprocessing, save_preprocessing
from ziggurat.data.preprocess.values.cells import canonical_text
from ziggurat.data.preprocess.values.parsing import parse_chunk
from ziggurat.data.preprocess.values.vocabulary import Ids
from ziggurat.data.raw.bad_rows import BadReason, BadRowPolicy, BadRows
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.raw.source import RawSource
from ziggurat.data.raw.text_blocks import TextOptions
from ziggurat.errors import BoundsError, CheckpointError, DataError, SchemaError
from ziggurat.features.batch import validate_batch
from ziggurat.features.labels import MissingLabel
from ziggurat.features.schema import (
    Categorical,
    Dense,
    Encoding,
    Label,
    Moments,
    MultiHot,
    NumericTransform,
    Outcomes,
    OutOfRange,
    Schema,
    Sequence,
    Table,
    Task,
    Vector,
)
from ziggurat.runs.scores.scoring import ids_out_of_range
from ziggurat.testing.data import shared_data

EVERYTHING = Schema(
    features=(
        Dense(name="plain", column="x", transform=NumericTransform.IDENTITY, missing=-1.0),
        Dense(name="log", column="x", transform=NumericTransform.LOG1P),
        Dense(name="std", column="x", transform=NumericTransform.STANDARDISE),
        Dense(name="both", column="y", transform=NumericTransform.LOG1P_STANDARDISE, missing=2.0),
        Dense(name="bucket", column="y", transform=NumericTransform.CRITEO_BUCKETS, min_count=2),
        Categorical(name="user"),
        Categorical(name="item", table="items"),
        Categorical(name="page", table="pages"),
        Categorical(name="day", table="days"),
        Categorical(name="hour", table="hours"),
        MultiHot(name="tags", separator="|", max_length=3),
        Sequence(name="history", table="items", separator=" ", max_length=2),
        MultiHot(name="days", column="more_days", table="days", separator=","),
    ),
    labels=(Label(name="click"), Label(name="spent", task=Task.REGRESSION)),
    tables=(
        Table(name="user", min_count=2),
        Table(name="items", max_rows=4),
        Table(name="pages", encoding=Encoding.HASHING, num_rows=7),
        Table(name="days", encoding=Encoding.IDENTITY, num_rows=5, out_of_range=OutOfRange.CLAMP),
        Table(name="hours", encoding=Encoding.IDENTITY, num_rows=4, out_of_range=OutOfRange.UNKNOWN),
    ),
    weight="w",
    group="user",
)
TEXT_IDS = st.sampled_from(["a", "b", "ü", "7", "7.0", "-7.0", "-0.0", "007", "x.0", "", "c d", "null"]) | st.none()
TEXT_LISTS = st.sampled_from(["a", "a|b", "b||a", "|", "", "a|b|c|a|b", "7.0|7"]) | st.none()
TEXT_DAYS = st.sampled_from(["0", "4", "4.0", "5", "-1", "99999999999999999999", "-99999999999999999999"]) | st.none()
TEXT_NUMBERS = (
    st.floats(-1e6, 1e6).map(lambda value: repr(value if abs(value) > 1e-100 else 0.0))  # squares: see exact_sums.py
    | st.integers(-5, 30).map(str)
    | st.sampled_from([" 3 ", "nan", "", "1e3", "+2"])
    | st.none()
)
TEXT_ROWS = st.fixed_dictionaries(
    {
        "x": TEXT_NUMBERS,
        "y": TEXT_NUMBERS,
        "user": TEXT_IDS,
        "item": TEXT_IDS,
        "page": TEXT_IDS,
        "day": TEXT_DAYS,
        "hour": TEXT_DAYS,
        "tags": TEXT_LISTS,
        "history": st.sampled_from(["a", "b a 7", "b", "a a a a c", ""]) | st.none(),
        "more_days": st.sampled_from(["0,1", "7,,3", "-2", ""]) | st.none(),
        "click": st.sampled_from(["0", "1", "1.0", "true"]),
        "spent": st.floats(-100, 100).map(repr),
        "w": st.sampled_from(["0", "1", "0.5"]),
    }
)


def _frame(rows: list[Row]) -> pl.DataFrame:
    names = EVERYTHING.columns
    return pl.DataFrame({name: [row[name] for row in rows] for name in names}, schema=dict.fromkeys(names, pl.String))


def _chunks(frame: pl.DataFrame, size: int) -> Iterator[RawChunk]:
    for start in range(0, frame.height, size):
        part = frame.slice(start, size)
        yield RawChunk(frame=part, path=Path("frame"), first_row=start, start=start)


def _encode(preprocessing: Preprocessing, frame: pl.DataFrame, size: int) -> pl.DataFrame:
    tables = [preprocessing.encode(chunk) for chunk in _chunks(frame, size)]
    return pl.concat([_polars(table) for table in tables])


def _polars(table: Any) -> pl.DataFrame:
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame


def _fit(schema: Schema, frame: pl.DataFrame) -> Preprocessing:
    return Preprocessing.fit(schema, [RawChunk.of(frame)])


# ---------------------------------------------------------------- against the reference


@settings(max_examples=30, deadline=None)
@given(
    train=st.lists(TEXT_ROWS, min_size=1, max_size=25),
    other=st.lists(TEXT_ROWS, min_size=1, max_size=10),
    fit_size=st.integers(1, 30),
    encode_size=st.integers(1, 30),
)
def test_equals_the_reference(train: list[Row], other: list[Row], fit_size: int, encode_size: int):
    reference = Reference(EVERYTHING, train)
    preprocessing = Preprocessing.fit(EVERYTHING, _chunks(_frame(train), fit_size))
    for rows in (train, other):
        encoded = _encode(preprocessing, _frame(rows), encode_size)
        for found, row in zip(encoded.to_dicts(), rows, strict=True):
            expected = reference.encode(row)
            for name, value in expected.items():
                assert found[name] == pytest.approx(value, rel=1e-6, abs=1e-6), name
        clicks = [1.0 if row["click"] == "true" else float(row["click"]) for row in rows]
        assert encoded["label:click"].to_list() == clicks
        assert encoded["label:spent"].to_list() == [np.float32(row["spent"]) for row in rows]
        assert encoded["weight:"].to_list() == [float(row["w"]) for row in rows]
        assert encoded["row:"].to_list() == list(range(len(rows)))
        users = [canonical(row["user"]) for row in rows]
        groups = encoded["group:"].to_list()
        assert all((users[i] == users[0]) == (groups[i] == groups[0]) for i in range(len(rows)))


@settings(max_examples=25, deadline=None)
@given(train=st.lists(TEXT_ROWS, min_size=1, max_size=40), size=st.integers(1, 40))
def test_chunk_size_changes_nothing(train: list[Row], size: int):
    frame = _frame(train)
    whole, parts = _fit(EVERYTHING, frame), Preprocessing.fit(EVERYTHING, _chunks(frame, size))
    assert whole.fingerprint == parts.fingerprint
    assert whole.numbers == parts.numbers
    assert _encode(whole, frame, len(train)).equals(_encode(parts, frame, size))
    assert whole.counters == parts.counters


def test_chunk_size_changes_no_bit_of_the_statistics():
    """Over more values than one block of the moments, and more rows than the sample of quantiles."""
    schema = Schema(
        features=(
            Dense(name="a", column="x", transform=NumericTransform.STANDARDISE),
            Dense(name="b", column="x", transform=NumericTransform.QUANTILE),
            Dense(name="c", column="x", transform=NumericTransform.QUANTILE_BUCKETS, num_buckets=10),
        )
    )
    frame = pl.DataFrame({"x": np.random.default_rng(0).normal(3.0, 2.0, 600_000)})
    fits = [Preprocessing.fit(schema, _chunks(frame, size)) for size in (600_000, 65_536, 99_991)]
    assert len({fit.fingerprint for fit in fits}) == 1
    state = fits[0].numbers["a"]
    assert state.mean == pytest.approx(float(frame["x"].mean()), rel=1e-12)  # type: ignore[arg-type]
    assert state.sd == pytest.approx(float(frame["x"].to_numpy().std()), rel=1e-12)
    encoded = _encode(fits[0], frame, 100_000)
    ranks = np.argsort(np.argsort(frame["x"].to_numpy())) / (600_000 - 1)
    assert np.abs(encoded["b"].to_numpy() - ranks).max() < 0.005
    counts = Counter(encoded["c"].to_list())
    assert set(counts) == set(range(3, 13))
    assert all(abs(count - 60_000) < 3000 for count in counts.values())


# ---------------------------------------------------------------- ids of any raw type


def _series(values: list[Any], dtype: Any = None) -> pl.Series:
    return pl.Series("id", values, dtype=dtype)


@pytest.mark.parametrize(
    ("raw", "texts"),
    [
        (_series([7, None, -1], pl.Int64), ["7", None, "-1"]),
        (_series([7, 255], pl.UInt8), ["7", "255"]),
        (_series([2**64 - 1], pl.UInt64), ["18446744073709551615"]),
        (_series([7.0, None, float("nan"), -0.0]), ["7", None, None, "0"]),
        (_series([7.5, 1e300, 3.0]), ["7.5", "1e+300", "3"]),
        (_series([0.1, 7.0], pl.Float32), ["0.1", "7"]),
        (
            _series(["7", "7.0", "", None, "007", "7.00", "v7.0", " 7"]),
            ["7", "7", None, None, "007", "7.00", "v7.0", " 7"],
        ),
        (_series(["-3.0", "-0.0", "-0", "--1.0"]), ["-3", "0", "-0", "--1.0"]),
        (_series([True, False, None]), ["true", "false", None]),
        (_series(["x", None, "y"], pl.Categorical), ["x", None, "y"]),
        (_series(["x", "y"], pl.Enum(["y", "x"])), ["x", "y"]),
        (_series([Decimal("7.00"), Decimal("7.50")], pl.Decimal(10, 2)), ["7", "7.5"]),
        (_series([datetime.date(2024, 5, 1)]), ["2024-05-01"]),
        (_series([None, None], pl.Null), [None, None]),
    ],
)
def test_canonical_text(raw: pl.Series, texts: list[str | None]):
    found = canonical_text(raw)
    assert found is not None
    assert found.to_list() == texts


USERS = Schema(features=(Categorical(name="user"), MultiHot(name="seen", table="user")))


@pytest.mark.parametrize("dtype", [pl.Int64, pl.Int16, pl.Float64, pl.String, pl.Categorical, pl.UInt32])
@pytest.mark.parametrize("encoding", [Encoding.VOCABULARY, Encoding.HASHING, Encoding.IDENTITY])
def test_raw_type_of_ids_does_not_matter(dtype: Any, encoding: Encoding):
    num_rows = 0 if encoding is Encoding.VOCABULARY else 1000
    schema = Schema(
        features=(Categorical(name="user"), MultiHot(name="seen", table="user")),
        tables=(Table(name="user", encoding=encoding, num_rows=num_rows),),
    )
    users, seen = [3, None, 7, 3], [[7], [3, 7], None, []]
    integers = pl.DataFrame({"user": users, "seen": seen}, schema={"user": pl.Int64, "seen": pl.List(pl.Int64)})
    text = pl.Series(users, dtype=pl.Int64).cast(pl.String)
    raw_user = text.cast(dtype) if dtype in (pl.Categorical, pl.String) else text.cast(pl.Int64).cast(dtype)
    inner = pl.Float64 if dtype in (pl.Categorical,) else dtype
    raw = pl.DataFrame({"user": raw_user, "seen": integers["seen"].cast(pl.List(inner))})
    preprocessing = _fit(schema, integers)
    expected = preprocessing.encode(RawChunk.of(integers))
    assert preprocessing.encode(RawChunk.of(raw)).equals(expected)
    assert _fit(schema, raw).fingerprint == preprocessing.fingerprint


def test_integers_with_nulls_written_by_pandas_as_floats(tmp_path: Path):
    (tmp_path / "a.csv").write_text('user\n3.0\n""\n7.0\n')
    schema = Schema(features=(Categorical(name="user"),))
    fitted = _fit(schema, pl.DataFrame({"user": [3, 7, 7]}))
    (chunk,) = RawSource(tmp_path / "a.csv").frames()
    assert fitted.encode(chunk)["user"].to_pylist() == [4, 2, 3]


# ---------------------------------------------------------------- vocabularies


def test_order_min_count_max_rows_and_sharing():
    schema = Schema(
        features=(Categorical(name="a", table="t"), Sequence(name="b", table="t")),
        tables=(Table(name="t", min_count=2, max_rows=3),),
    )
    frame = pl.DataFrame({"a": ["p", "q", "q", None], "b": [["r", "r"], ["p", None], ["s", "s", "t"], []]})
    vocabulary = _fit(schema, frame).vocabularies["t"]
    assert vocabulary.ids.to_list() == ["p", "q", "r"]  # all seen twice, like s, which max_rows cuts
    assert vocabulary.counts.to_list() == [2, 2, 2]
    preprocessing = _fit(schema, frame)
    encoded = preprocessing.encode(RawChunk.of(frame))
    assert encoded["a"].to_pylist() == [3, 4, 4, 2]
    assert encoded["b"].to_pylist() == [[5, 5], [3, 2], [1, 1, 1], []]
    assert preprocessing.inputs.table("t").num_rows == 6
    assert preprocessing.counters["b"].unknown == 3
    assert preprocessing.counters["b"].missing == 1
    assert preprocessing.counters["a"].missing == 1
    assert preprocessing.counters["b"].ids == 7


def test_large_vocabulary_is_found_again():
    ids = [f"id{i}" for i in range(200_000)]
    schema = Schema(features=(Categorical(name="a"),))
    preprocessing = _fit(schema, pl.DataFrame({"a": ids}))
    vocabulary = preprocessing.vocabularies["a"]
    assert vocabulary.rows(Ids.of(vocabulary.ids)).tolist() == list(range(3, 200_003))
    unseen = pl.Series([f"no{i}" for i in range(200_000)])
    assert set(vocabulary.rows(Ids.of(unseen)).tolist()) == {1}


@pytest.mark.parametrize("negative", ["", "no"])
@pytest.mark.parametrize("blank", [None, "", "  "])
def test_a_blank_label_of_texts_is_named_so_and_may_be_left_out(blank: str | None, negative: str) -> None:
    label = Label(name="bought", positive="yes", negative=negative)
    schema = Schema(features=(Categorical(name="u"),), labels=(label,))
    chunk = RawChunk.of(pl.DataFrame({"u": ["a", "b", "c"], "bought": ["yes", blank, "no"]}))
    with pytest.raises(DataError) as caught:
        parse_chunk(schema, chunk, bad_rows=BadRows())
    assert caught.value.found == "nothing: it is empty"
    assert any('missing = "left_out"' in way for way in caught.value.ways_out)
    left_out = replace(schema, labels=(replace(label, missing=MissingLabel.LEFT_OUT),))
    found = parse_chunk(left_out, chunk, bad_rows=BadRows()).labels["bought"]
    np.testing.assert_array_equal(found, [1, np.nan, 0])


def test_empty_vocabulary():
    schema = Schema(features=(Categorical(name="a"),), tables=(Table(name="a", min_count=9),))
    preprocessing = _fit(schema, pl.DataFrame({"a": ["x", None]}))
    assert preprocessing.encode(RawChunk.of(pl.DataFrame({"a": ["x", None, "y"]})))["a"].to_pylist() == [1, 2, 1]
    assert preprocessing.inputs.table("a").num_rows == 3


# ---------------------------------------------------------------- numbers


def test_constant_missing_and_extreme_numbers_stay_finite():
    transforms = list(NumericTransform)
    schema = Schema(features=tuple(Dense(name=item.value, column="x", transform=item) for item in transforms))
    for train in ([5.0, 5.0], [None, None], [0.1] * 1000, [1e30, -1e30]):
        preprocessing = _fit(schema, pl.DataFrame({"x": train}, schema={"x": pl.Float64}))
        values = [3.4e38, -3.4e38, 0.0, None, float("nan"), 1e-300]
        encoded = _polars(preprocessing.encode(RawChunk.of(pl.DataFrame({"x": values}))))
        for item in transforms:
            column = encoded[item.value]
            assert column.is_finite().all() if not item.makes_rows else bool((column >= 1).all()), item
    assert preprocessing.counters["log1p"].missing == 2


def test_quantiles_of_ties_and_beyond_the_range():
    schema = Schema(features=(Dense(name="q", transform=NumericTransform.QUANTILE),))
    preprocessing = _fit(schema, pl.DataFrame({"q": [0.0] * 50 + [1.0] * 50}))
    encoded = preprocessing.encode(RawChunk.of(pl.DataFrame({"q": [-9.0, 0.0, 1.0, 9.0]})))["q"].to_pylist()
    assert encoded[0] == 0.0
    assert encoded[3] == 1.0
    assert encoded[1] == pytest.approx(0.25, abs=0.01)
    assert encoded[2] == pytest.approx(0.75, abs=0.01)


def test_quantile_buckets_have_the_rows_of_the_table():
    schema = Schema(features=(Dense(name="q", transform=NumericTransform.QUANTILE_BUCKETS, num_buckets=4),))
    preprocessing = _fit(schema, pl.DataFrame({"q": [1.0, 2.0, 3.0, 4.0, 5.0, None]}))
    raw = pl.DataFrame({"q": [-100.0, 1.9, 2.0, 3.5, 4.0, 100.0, None]})
    assert preprocessing.encode(RawChunk.of(raw))["q"].to_pylist() == [3, 3, 4, 5, 6, 6, 2]
    assert preprocessing.inputs.table("q").num_rows == 7


def test_text_and_floats_give_the_same_numbers(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_text("x,y\n1.25,3\n,1e-3\n-7,0.1\n")
    schema = Schema(features=(Dense(name="x"), Dense(name="y", transform=NumericTransform.QUANTILE)))
    source = RawSource(path)
    assert numeric_columns(schema) == ("x", "y")
    (as_text,), (as_floats,) = source.frames(), source.frames(numbers=numeric_columns(schema))
    assert as_floats.frame.dtypes == [pl.Float64, pl.Float64]
    fits = [Preprocessing.fit(schema, [chunk]) for chunk in (as_text, as_floats)]
    assert fits[0].fingerprint == fits[1].fingerprint
    assert fits[0].encode(as_floats).equals(fits[0].encode(as_text))


# ---------------------------------------------------------------- bad cells


def _one(schema_feature: Any = None, **label: Any) -> Schema:
    features = (schema_feature or Dense(name="x"),)
    return Schema(features=features, labels=(Label(name="y", **label),) if label else ())


BAD_CELLS = [
    (_one(), {"x": ["1", "12x"]}, BadReason.NOT_A_NUMBER, "12x"),
    (_one(), {"x": ["1", "1e400"]}, BadReason.NOT_FINITE, "1e400"),
    (_one(), {"x": [1.0, float("-inf")]}, BadReason.NOT_FINITE, "-inf"),
    (_one(), {"x": ["1", "1e39"]}, BadReason.TOO_LARGE, "1e39"),
    (_one(), {"x": [1.0, 1e39]}, BadReason.TOO_LARGE, "1e+39"),
    (_one(Categorical(name="x")), {"x": [1.0, float("inf")]}, BadReason.NOT_FINITE, "inf"),
    (_one(Categorical(name="x")), {"x": [b"ok", b"\xff"]}, BadReason.INVALID_UTF8, "xff"),
    (_one(MultiHot(name="x")), {"x": [[1.0], [2.0, float("inf")]]}, BadReason.NOT_FINITE, "inf"),
    (_one(Vector(name="x", dim=2)), {"x": [[1.0, 2.0], [1.0]]}, BadReason.WRONG_LENGTH, "1 numbers"),
    (_one(Vector(name="x", dim=2)), {"x": [[1.0, 2.0], [1.0, None]]}, BadReason.NOT_FINITE, "None"),
    (_one(Vector(name="x", dim=2)), {"x": [[1.0, 2.0], [1.0, 1e39]]}, BadReason.NOT_FINITE, "1e+39"),
    (_one(task=Task.BINARY), {"x": [1, 1], "y": [1, 2]}, BadReason.BAD_LABEL, "2"),
    (_one(task=Task.BINARY), {"x": [1, 1], "y": [1, None]}, BadReason.BAD_LABEL, "nothing"),
    (_one(positive_from=4.0), {"x": [1, 1], "y": [5.0, float("nan")]}, BadReason.BAD_LABEL, "nan"),
    (_one(outcomes=Outcomes.POSITIVE_ONLY), {"x": [1, 1], "y": [1, 0]}, BadReason.BAD_LABEL, "0"),
    (_one(outcomes=Outcomes.POSITIVE_ONLY, positive="a"), {"x": [1, 1], "y": ["a", "b"]}, BadReason.BAD_LABEL, "b"),
    (_one(Moments(name="x", seen=(10**9, 10**9))), {"x": [[10**9], [10**12]]}, BadReason.OTHER_UNIT, "1000000000000"),
    (_one(task=Task.REGRESSION), {"x": [1, 1], "y": ["0.5", "abc"]}, BadReason.NOT_A_NUMBER, "abc"),
    (Schema(features=(Dense(name="x"),), weight="w"), {"x": [1, 1], "w": [0, -1]}, BadReason.BAD_WEIGHT, "-1"),
    (Schema(features=(Dense(name="x"),), weight="w"), {"x": [1, 1], "w": [0, None]}, BadReason.BAD_WEIGHT, "nothing"),
]


@pytest.mark.parametrize(("schema", "data", "reason", "found"), BAD_CELLS)
def test_each_bad_cell(tmp_path: Path, schema: Schema, data: dict[str, list[Any]], reason: BadReason, found: str):
    frame = pl.DataFrame(data, strict=False)
    chunk = RawChunk(frame=frame, path=Path("f.parquet"), first_row=10, start=1000)
    bad_column = [name for name in frame.columns if name != "x"][-1:] or ["x"]
    for use in (lambda **rows: Preprocessing.fit(schema, [chunk], **rows), _fit(schema, frame.head(1)).encode):
        arguments = () if use.__name__ == "<lambda>" else (chunk,)
        with pytest.raises(DataError) as caught:
            use(*arguments)
        assert caught.value.where == f"f.parquet, row 11, column {bad_column[0]!r}"
        assert found in caught.value.found
    bad_rows = BadRows(BadRowPolicy.QUARANTINE, folder=tmp_path)
    fitted = Preprocessing.fit(schema, [chunk], bad_rows=bad_rows)
    assert fitted.fingerprint == _fit(schema, frame.head(1)).fingerprint
    encoded = fitted.encode(chunk, bad_rows=bad_rows)
    assert encoded["row:"].to_pylist() == [1000]
    assert bad_rows.counts == {reason: 1}


def test_lists_that_were_written_with_their_brackets_are_no_ids() -> None:
    schema = Schema(features=(MultiHot(name="tags", separator=","),), labels=(Label(name="y"),))

    def fit(*texts: str | None) -> Preprocessing:
        frame = pl.DataFrame({"tags": texts, "y": [0] * len(texts)}, schema={"tags": pl.String, "y": pl.Int8})
        return Preprocessing.fit(schema, [RawChunk.of(frame)])

    for texts in (("['a', 'b']", "[]", None), ("[1, 2]", "[3]"), ("['a']", "", "[ ]")):
        with pytest.raises(SchemaError, match="lists with their brackets") as caught:
            fit(*texts)
        assert "separator" in " ".join(caught.value.ways_out)
    for texts in (("[a],[b]", "[a]"), ("[sale]", "[new]"), ("a,b", "[a,b]"), ("[a,b", "c]"), ("", None)):
        fit(*texts)  # ids with brackets of their own


@pytest.mark.parametrize("cells", [["1", "nan"], [1.0, float("nan")], ["1", None]])
def test_ways_out_of_an_unknown_label_are_not_those_of_another_kind_of_label(cells: list[Any]) -> None:
    with pytest.raises(DataError) as caught:
        Preprocessing.fit(_one(task=Task.BINARY), [RawChunk.of(pl.DataFrame({"x": [1, 1], "y": cells}))])
    assert "take rows without a label out of the file" in caught.value.ways_out[0]
    assert "regression" not in " ".join(caught.value.ways_out)


def test_labels_of_every_form():
    schema = Schema(
        features=(Dense(name="x"),),
        labels=(Label(name="like", column="rating", positive_from=4), Label(name="click"), Label(name="text")),
    )
    frame = pl.DataFrame({"x": [1, 2], "rating": [4, 3], "click": [True, False], "text": ["False", "1"]})
    encoded = _fit(schema, frame).encode(RawChunk.of(frame))
    assert [encoded[f"label:{name}"].to_pylist() for name in ("like", "click", "text")] == [[1, 0], [1, 0], [0, 1]]


IDENTITY = Table(name="x", encoding=Encoding.IDENTITY, num_rows=10)


@pytest.mark.parametrize("bad", [-1, 10, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("as_text", [False, True])
def test_out_of_range(bad: int, as_text: bool):
    raw = [str(3), str(bad)] if as_text else [3, bad]
    chunk = RawChunk.of(pl.DataFrame({"x": raw, "l": [[raw[0]], [raw[0], raw[1]]]}))
    features = (Categorical(name="one", column="x", table="x"), MultiHot(name="list", column="l", table="x"))

    def fitted(policy: OutOfRange) -> Preprocessing:
        table = Table(name="x", encoding=Encoding.IDENTITY, num_rows=10, out_of_range=policy)
        return _fit(Schema(features=features, tables=(table,)), chunk.frame.head(1))

    with pytest.raises(BoundsError) as caught:
        fitted(OutOfRange.ERROR).encode(chunk)
    assert "0 … 9" in caught.value.expected
    assert "'one'" in caught.value.expected
    assert str(bad) in caught.value.found
    assert "row 1" in caught.value.where
    unknown = fitted(OutOfRange.UNKNOWN)
    encoded = unknown.encode(chunk)
    assert encoded["one"].to_pylist() == [6, 1]
    assert encoded["list"].to_pylist() == [[6], [6, 1]]
    assert unknown.counters["one"].out_of_range == 1
    assert unknown.counters["list"].out_of_range == 1
    nearest = 3 if bad < 0 else 12
    assert fitted(OutOfRange.CLAMP).encode(chunk)["list"].to_pylist() == [[6], [6, nearest]]


def test_identity_ids_that_are_no_integers(tmp_path: Path):
    schema = Schema(features=(Categorical(name="x"),), tables=(IDENTITY,))
    for raw in (["3", "3.5"], ["3", "abc"], [3.0, 3.5], ["3", "-"]):
        bad_rows = BadRows(BadRowPolicy.QUARANTINE, folder=tmp_path)
        encoded = _fit(schema, pl.DataFrame({"x": ["0"]})).encode(
            RawChunk.of(pl.DataFrame({"x": raw})), bad_rows=bad_rows
        )
        assert encoded["x"].to_pylist() == [6]
        assert bad_rows.counts == {BadReason.NOT_AN_INTEGER: 1}


def test_first_bad_row_is_named_first():
    schema = Schema(features=(Dense(name="a"), Dense(name="b")))
    frame = pl.DataFrame({"a": ["1", "1", "x"], "b": ["1", "y", "1"]})
    with pytest.raises(DataError) as caught:
        _fit(schema, frame)
    assert "row 1, column 'b'" in caught.value.where


# ---------------------------------------------------------------- drift


@pytest.mark.parametrize(
    ("feature", "column", "expected", "way_out"),
    [
        (Categorical(name="x"), [[1], [2]], "one id a row", "multi_hot"),
        (Categorical(name="x"), [datetime.datetime(2024, 1, 1)], "ids", "convert"),
        (MultiHot(name="x"), ["a|b"], "lists of ids", "before training: set separator"),
        (MultiHot(name="x"), ["a|b"], "lists of ids", "for a trained run: convert the column"),
        (Sequence(name="x"), [1, 2], "lists of ids", "categorical"),
        (MultiHot(name="x"), [[[1]]], "lists of", "convert"),
        (Dense(name="x"), [[1.0]], "numbers", "convert"),
        (Dense(name="x"), [datetime.date(2024, 1, 1)], "numbers", "convert"),
        (Vector(name="x", dim=2), [1.0], "lists of 2 numbers", "convert"),
        (Vector(name="x", dim=2), [["a", "b"]], "lists of 2 numbers", "convert"),
    ],
)
def test_retyped_column(feature: Any, column: list[Any], expected: str, way_out: str):
    with pytest.raises(SchemaError) as caught:
        _fit(Schema(features=(feature,)), pl.DataFrame({"x": column}))
    assert expected in caught.value.expected
    assert "'x'" in caught.value.expected
    assert "type " in caught.value.found
    assert "column 'x'" in caught.value.where
    assert any(way_out in way for way in caught.value.ways_out)


def test_missing_and_renamed_column():
    preprocessing = _fit(Schema(features=(Categorical(name="user_id"),)), pl.DataFrame({"user_id": [1]}))
    with pytest.raises(SchemaError) as caught:
        preprocessing.encode(RawChunk.of(pl.DataFrame({"UserId": [1], "b": [2]}), name="new.parquet"))
    assert "new.parquet" in caught.value.where
    assert "'UserId'" in caught.value.ways_out[0]


def test_tables_that_cannot_be():
    buckets = Dense(name="x", transform=NumericTransform.CRITEO_BUCKETS)
    for schema in (
        Schema(features=(buckets, Categorical(name="y", table="x"))),
        Schema(features=(buckets,), tables=(Table(name="x", encoding=Encoding.HASHING, num_rows=5),)),
        Schema(features=(Categorical(name="x"),), tables=(Table(name="x", encoding=Encoding.HASHING, num_rows=2**31),)),
    ):
        with pytest.raises(SchemaError):
            _fit(schema, pl.DataFrame({"x": [1], "y": [1]}))


# ---------------------------------------------------------------- small and empty frames


def test_empty_frames_null_columns_and_one_row():
    rows: Row = dict.fromkeys(EVERYTHING.columns) | {"click": "1", "spent": "0", "w": "1"}
    one = _frame([rows])
    preprocessing = _fit(EVERYTHING, one)
    encoded = _polars(preprocessing.encode(RawChunk.of(one)))
    assert encoded["user"].to_list() == [2]
    assert encoded["tags"].to_list() == [[]]
    nothing = preprocessing.encode(RawChunk.of(one.clear()))
    assert nothing.num_rows == 0
    assert nothing.schema == preprocessing.encode(RawChunk.of(one)).schema
    never_fitted = Preprocessing.fit(EVERYTHING, [])
    assert never_fitted.encode(RawChunk.of(one)).num_rows == 1
    untyped = pl.DataFrame(
        {name: [None] for name in EVERYTHING.columns}, schema=dict.fromkeys(EVERYTHING.columns, pl.Null)
    )
    assert preprocessing.encode(RawChunk.of(untyped), with_labels=False)["user"].to_pylist() == [2]


def test_batch_for_prediction():
    schema = Schema(
        features=(
            Dense(name="x", transform=NumericTransform.IDENTITY),
            Categorical(name="user"),
            Vector(name="v", dim=2),
            MultiHot(name="tags"),
        ),
        labels=(Label(name="y"),),
        weight="w",
        group="user",
    )
    frame = pl.DataFrame(
        {"x": [1.0, None], "user": [5, 6], "v": [[1.0, 2.0], None], "tags": [["a", "b"], []], "y": [0, 1], "w": [1, 2]}
    )
    preprocessing = _fit(schema, frame)
    for raw in (frame.drop("y", "w"), frame.drop("y", "w").to_arrow(), frame.drop("y", "w").to_dict(as_series=False)):
        batch = validate_batch(preprocessing.batch(raw), preprocessing.inputs)
        assert batch.dense.tolist() == [[1.0], [0.0]]
        assert batch.single.tolist() == [[3, 4]]
        assert batch.vectors["v"].tolist() == [[1.0, 2.0], [0.0, 0.0]]
        assert batch.jagged.values.tolist() == [3, 4]
        assert batch.jagged.offsets.tolist() == [0, 2, 2]
        assert batch.labels.shape == (2, 0)
        assert batch.weights is None
    labelled = preprocessing.batch(frame, with_labels=True)
    assert labelled.labels.tolist() == [[0.0], [1.0]]
    assert labelled.weights is not None
    assert preprocessing.batch(frame.clear()).batch_size == 0


# ---------------------------------------------------------------- saving


def _fitted_everything() -> tuple[Preprocessing, pl.DataFrame]:
    rows = [
        {
            "x": str(i), "y": str(i * 0.1), "user": f"u{i % 3}", "item": f"ü{i % 5}", "page": f"p{i}", "day": "1",
            "hour": "2", "tags": "a|b", "history": "ü1 ü2", "more_days": "1,2", "click": "1", "spent": "2.5", "w": "1",
        }
        for i in range(20)
    ]  # fmt: skip
    frame = _frame(rows)
    return _fit(EVERYTHING, frame), frame


def test_save_and_load(tmp_path: Path):
    preprocessing, frame = _fitted_everything()
    save_preprocessing(preprocessing, tmp_path / "p")
    save_preprocessing(preprocessing, tmp_path / "p")  # again, over the old one
    loaded = load_preprocessing(tmp_path / "p")
    assert loaded.fingerprint == preprocessing.fingerprint
    assert loaded.schema == preprocessing.schema
    assert loaded.inputs == preprocessing.inputs
    assert loaded.numbers == preprocessing.numbers
    assert loaded.encode(RawChunk.of(frame)).equals(preprocessing.encode(RawChunk.of(frame)))
    assert sorted(path.suffix for path in (tmp_path / "p").iterdir()) == [".json"] + [".parquet"] * 4
    assert list(tmp_path.iterdir()) == [tmp_path / "p"]


def test_every_flipped_bit_of_a_saved_preprocessing_is_found(tmp_path: Path):
    preprocessing, _ = _fitted_everything()
    save_preprocessing(preprocessing, tmp_path)
    rng = np.random.default_rng(0)
    for path in sorted(tmp_path.iterdir()):
        content = path.read_bytes()
        bits = rng.choice(len(content) * 8, size=min(60, len(content) * 8), replace=False)
        for bit in bits.tolist():
            damaged = bytearray(content)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError) as caught:
                load_preprocessing(tmp_path)
            assert str(path) in caught.value.where
        path.write_bytes(content[: len(content) // 2])
        with pytest.raises(CheckpointError):
            load_preprocessing(tmp_path)
        path.write_bytes(content)
    assert load_preprocessing(tmp_path).fingerprint == preprocessing.fingerprint


def test_missing_swapped_and_future_files(tmp_path: Path):
    preprocessing, _ = _fitted_everything()
    save_preprocessing(preprocessing, tmp_path)
    first, second = sorted(tmp_path.glob("*.parquet"))[:2]
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)
    with pytest.raises(CheckpointError, match=first.name):
        load_preprocessing(tmp_path)
    first.unlink()
    with pytest.raises(CheckpointError, match=first.name):
        load_preprocessing(tmp_path)
    with pytest.raises(CheckpointError, match=r"preprocessing\.json"):
        load_preprocessing(tmp_path / "nowhere")


def test_saving_where_nothing_can_be_written(tmp_path: Path):
    preprocessing, _ = _fitted_everything()
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError):
        save_preprocessing(preprocessing, tmp_path / "file" / "p")


def test_fingerprint_depends_on_what_matters():
    frame = pl.DataFrame({"x": [1.0, 2.0], "u": ["a", "b"]})
    schema = Schema(features=(Dense(name="x"), Categorical(name="u")))
    base = _fit(schema, frame).fingerprint
    assert base == _fit(schema, frame.reverse()).fingerprint
    assert base != _fit(schema, frame.with_columns(pl.col("x") + 1)).fingerprint
    assert base != _fit(schema, frame.with_columns(pl.col("u") + "1")).fingerprint
    other = Schema(features=(Dense(name="x", missing=1.0), Categorical(name="u")))
    assert base != _fit(other, frame).fingerprint


# ---------------------------------------------------------------- time


# ---------------------------------------------------------------- real data


def test_criteo_sample_equals_the_reference():
    path = shared_data("criteo_sample") / "criteo_first10k.tsv.gz"
    buckets = NumericTransform.CRITEO_BUCKETS
    schema = Schema(
        features=(
            *(Dense(name=f"I{i}") for i in range(1, 14)),
            *(Dense(name=f"B{i}", column=f"I{i}", transform=buckets) for i in (1, 2)),
            *(Categorical(name=f"C{i}") for i in range(1, 27)),
        ),
        labels=(Label(name="label"),),
        tables=tuple(Table(name=f"C{i}", min_count=2) for i in range(1, 20))
        + tuple(Table(name=f"C{i}", encoding=Encoding.HASHING, num_rows=1000) for i in range(20, 27)),
    )
    source = RawSource(path)
    (whole,) = source.frames(columns=schema.columns)
    rows = whole.frame.to_dicts()
    reference = Reference(schema, rows)
    chunks = source.frames(columns=schema.columns, numbers=numeric_columns(schema), chunk_rows=1234)
    preprocessing = Preprocessing.fit(schema, chunks)
    encoded = _polars(preprocessing.encode(whole))
    assert {name: len(vocabulary) for name, vocabulary in preprocessing.vocabularies.items()} == {
        name: len(vocabulary) for name, vocabulary in reference.vocabularies.items()
    }
    for index in range(0, 10_000, 97):
        found = encoded.row(index, named=True)
        for name, value in reference.encode(rows[index]).items():
            assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert encoded["label:label"].sum() == sum(int(row["label"]) for row in rows)


def test_trivago_sessions_equal_the_reference():
    path = shared_data("trivago_sessions") / "trivago_val_100k.parquet"
    schema = Schema(
        features=(
            Categorical(name="city"),
            Categorical(name="platform"),
            MultiHot(name="filters", column="current_filters", separator="|"),
            Sequence(name="impressions", separator="|", max_length=10, table="hotels"),
            Categorical(name="reference", table="hotels"),
            Dense(name="step", transform=NumericTransform.QUANTILE_BUCKETS),
        ),
        tables=(Table(name="hotels", min_count=3), Table(name="city", max_rows=500)),
        group="user_id",
    )
    chunks = list(RawSource(path).frames(columns=schema.columns, chunk_rows=30_000))
    preprocessing = Preprocessing.fit(schema, chunks)
    rows = [row for chunk in chunks for row in chunk.frame.to_dicts()]
    plain = Schema(features=schema.features[:-1], tables=schema.tables)
    reference = Reference(plain, rows)
    position = 0
    for chunk in chunks:
        encoded = _polars(preprocessing.encode(chunk))
        for index in range(0, chunk.num_rows, 61):
            found = encoded.row(index, named=True)
            for name, value in reference.encode(rows[position + index]).items():
                assert found[name] == value, name
        position += chunk.num_rows
    assert preprocessing.counters["impressions"].truncated > 1000
    assert preprocessing.inputs.table("hotels").num_rows == 3 + len(reference.vocabularies["hotels"])


def test_frappe_log_equals_the_reference(tmp_path: Path):
    import zipfile

    archive = shared_data("frappe") / "Mobile_Frappe.zip"
    with zipfile.ZipFile(archive) as content:
        path = tmp_path / "frappe.tsv"
        lines = content.read("Mobile_Frappe/frappe/frappe.csv").splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:30_001]))
    names = ("user", "item", "daytime", "weekday", "isweekend", "homework", "cost", "weather", "country", "city")
    schema = Schema(features=tuple(Categorical(name=name) for name in names), group="user")
    chunks = list(RawSource(path).frames(columns=schema.columns))
    rows = [row for chunk in chunks for row in chunk.frame.to_dicts()]
    assert len(rows) == 30_000
    preprocessing, reference = Preprocessing.fit(schema, chunks), Reference(schema, rows)
    encoded = pl.concat([_polars(preprocessing.encode(chunk)) for chunk in chunks])
    for index in range(0, len(rows), 89):
        found = encoded.row(index, named=True)
        assert {name: found[name] for name in names} == reference.encode(rows[index])
    assert encoded["group:"].n_unique() == len({row["user"] for row in rows})


def test_saved_form_is_plain_json(tmp_path: Path):
    preprocessing, _ = _fitted_everything()
    save_preprocessing(preprocessing, tmp_path)
    payload = json.loads((tmp_path / "preprocessing.json").read_text())
    assert payload["version"] == 2
    assert math.isfinite(payload["numbers"]["std"]["mean"])
    frame = pq.read_table(tmp_path / payload["vocabularies"]["items"]["file"])
    assert frame.column_names == ["id", "count"]
    assert os.listdir(tmp_path)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_lists_in_text_are_divided_where_the_schema_knew_lists_alone(tmp_path: Path, kind: str):
    schema = Schema(features=(MultiHot(name="tags"), Sequence(name="seen", separator=",")), labels=(Label(name="y"),))
    lists = pl.DataFrame({"tags": [["a", "b"], [], ["a"]], "seen": ["u,v", "", "u"], "y": [1, 0, 1]})
    preprocessing = Preprocessing.fit(schema, [RawChunk.of(lists)])
    path = tmp_path / f"new.{kind}"
    text = lists.with_columns(pl.col("tags").list.join("|"))
    text.write_csv(path) if kind == "csv" else text.write_parquet(path)
    (chunk,) = RawSource(path, text=TextOptions(list_separator="pipe")).frames()
    assert preprocessing.encode(chunk).equals(preprocessing.encode(RawChunk.of(lists)))
    (chunk,) = RawSource(path).frames()
    with pytest.raises(SchemaError, match="list-separator"):
        preprocessing.encode(chunk)


@pytest.mark.parametrize(("policy", "said"), [("clamp", "took the row of the nearest id"), ("unknown", "are unknown")])
def test_ids_out_of_range_are_counted_and_said(policy: str, said: str):
    table = Table(name="page", encoding=Encoding.IDENTITY, num_rows=4, out_of_range=OutOfRange(policy))
    schema = Schema(features=(Categorical(name="page"),), tables=(table,))
    preprocessing = _fit(schema, pl.DataFrame({"page": [0, 1]}))
    preprocessing.encode(RawChunk.of(pl.DataFrame({"page": [0, 9, -3, 3]})))
    assert [str(each) for each in ids_out_of_range(preprocessing)] == [f"page 2 of 4 (50.0%), which {said}"]
