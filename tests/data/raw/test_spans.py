"""Spans: hashing and parsing in place gives what polars and Python give; key tables number like a dict."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ziggurat.data.preprocess.preprocessing import Preprocessing, id_columns, numeric_columns
from ziggurat.data.preprocess.values.key_table import KeyTable
from ziggurat.data.preprocess.values.vocabulary import Ids
from ziggurat.data.raw.source import RawSource
from ziggurat.data.raw.spans import TextSpans
from ziggurat.data.raw.text_blocks import TextOptions
from ziggurat.features.hashing import hash_ids
from ziggurat.features.schema import Categorical, Dense, Encoding, Label, MultiHot, NumericTransform, Schema, Table
from ziggurat.ops.text.choose import text_kernel
from ziggurat.ops.text.kernel import TextKind


@settings(deadline=None)
@given(
    st.lists(st.text(st.characters(exclude_characters="\t\n\r", exclude_categories=["Cs"]), max_size=20), max_size=20)
)
def test_spans_of_a_block(texts: list[str]):
    kernel = text_kernel()
    data = "".join(f"{text}\tx\n" for text in texts).encode()
    fields = kernel.split(data, delimiter=ord("\t"), kinds=np.array([TextKind.ID, TextKind.OTHER]))
    assert fields is not None
    spans = TextSpans(data, kernel, fields.starts[0], fields.lengths[0], fields.values[0])
    assert spans.hashes.tolist() == hash_ids(np.array(texts, dtype=object)).tolist()
    assert spans.series("a").to_list() == [text or None for text in texts]
    assert Ids.of(spans).texts_at(np.arange(len(texts))[::-1]).to_list() == [text or None for text in reversed(texts)]


NUMBERS = st.sampled_from(["", "5", "-7", "12345678", "0.25", "1e3"])
FIELDS = st.sampled_from(
    ["", "a", "68fd1e64", "longer than eight", "7.0", "12", "-3", "1.5", "ü", "99999999", "123456789"]
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.tuples(FIELDS, FIELDS, NUMBERS), min_size=1),
    end=st.sampled_from(["\n", "\r\n"]),
    block_bytes=st.sampled_from([128, 1 << 20]),
    chunk_rows=st.integers(1, 9),
)
def test_spans_change_no_value(
    tmp_path: Path, rows: list[tuple[str, str, str]], end: str, block_bytes: int, chunk_rows: int
):
    """Fitting and encoding give the same, whether ids stay spans and numbers are parsed in place, or all is text."""
    path = tmp_path / "a.csv"
    path.write_text(end.join(["a,b,c", *(",".join(row) for row in rows), ""]), newline="")
    schema = Schema(
        features=(
            Categorical(name="a"),
            Categorical(name="hashed", column="b", table="hashed"),
            Dense(name="c", transform=NumericTransform.STANDARDISE),
        ),
        tables=(Table(name="hashed", encoding=Encoding.HASHING, num_rows=50),),
        group="a",
    )
    source = RawSource(path, text=TextOptions(block_bytes=block_bytes, max_record_bytes=128))
    hints = {"numbers": numeric_columns(schema), "ids": id_columns(schema)}
    as_text = list(source.frames(columns=schema.columns))
    as_spans = list(source.frames(columns=schema.columns, chunk_rows=chunk_rows, **hints))
    fits = [Preprocessing.fit(schema, chunks) for chunks in (as_text, as_spans)]
    assert fits[0].fingerprint == fits[1].fingerprint
    encoded = [pl.concat([pl.DataFrame(fits[0].encode(chunk)) for chunk in chunks]) for chunks in (as_text, as_spans)]
    assert encoded[0].equals(encoded[1])
    assert [chunk.line(0) for chunk in as_spans][:1] == [2]
    columns = {name: pl.concat([chunk.column(name) for chunk in as_spans]) for name in ("a", "b")}
    assert columns["a"].to_list() == [row[0] or None for row in rows]
    assert columns["b"].to_list() == [row[1] or None for row in rows]


def test_spans_are_filtered_and_sliced(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_text("a,b\n" + "".join(f"id{i},{i}\n" for i in range(10)))
    chunks = list(RawSource(path).frames(ids=["a", "b"], chunk_rows=4))
    assert [chunk.num_rows for chunk in chunks] == [4, 4, 2]
    assert chunks[1].columns == ("a", "b")
    kept = chunks[1].filter(np.array([True, False, False, True]))
    assert kept.column("a").to_list() == ["id4", "id7"]
    assert kept.global_rows.tolist() == [4, 7]
    assert kept.where(1) == f"{path}, line 9, row 7"
    with pytest.raises(KeyError):
        kept.column("c")


def test_which_columns_are_hints():
    schema = Schema(
        features=(
            Categorical(name="user"),
            Categorical(name="slot"),
            Categorical(name="both"),
            Dense(name="price"),
            Dense(name="number", column="both"),
            MultiHot(name="tags", separator="|"),
        ),
        labels=(Label(name="y"),),
        tables=(Table(name="slot", encoding=Encoding.IDENTITY, num_rows=5),),
        weight="w",
        group="g",
        time="t",
    )
    assert id_columns(schema) == ("g", "user")
    assert numeric_columns(schema) == ("price", "w", "y")
    assert numeric_columns(schema, with_labels=False) == ("price",)


# ---------------------------------------------------------------- key tables

KEYS = st.lists(
    st.sampled_from([0, 1, 2, 5, 2**64 - 1, 2**63, 2**54, 2**54 + 1]) | st.integers(0, 2**64 - 1), max_size=50
)


@settings(deadline=None)
@given(st.lists(KEYS, max_size=6), KEYS)
def test_key_table_numbers_like_a_dict(batches: list[list[int]], asked: list[int]):
    table = KeyTable()
    known: dict[int, int] = {}
    for batch in batches:
        keys = np.array(batch, dtype=np.uint64)
        numbers, places = table.add(keys)
        fresh = {max(key, 1) for key in batch} - known.keys()
        assert {max(int(key), 1) for key in keys[places]} == fresh
        for place in places.tolist():
            known[max(batch[place], 1)] = len(known)
        assert numbers.tolist() == [known[max(key, 1)] for key in batch]
    assert len(table) == len(known)
    found = table.find(np.array(asked, dtype=np.uint64))
    assert found.tolist() == [known.get(max(key, 1), -1) for key in asked]


def test_key_table_grows_and_wraps():
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 2**64, 100_000, dtype=np.uint64)
    keys[:300] = np.uint64(2**64 - 1) - np.arange(300, dtype=np.uint64)  # all at home in the last slot
    table = KeyTable()
    for start in range(0, len(keys), 7000):
        table.add(keys[start : start + 7000])
    numbers, places = table.add(keys)
    assert len(places) == 0
    assert len(np.unique(numbers)) == len(table) == len(np.unique(keys))
    assert (table.find(rng.integers(0, 2**64, 10_000, dtype=np.uint64)) == -1).all()
