"""Messages become the rows that a CSV file with the same cells has, and what is no row is named."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from ziggurat.data.raw.bad_rows import BadReason
from ziggurat.data.raw.source import RawSource
from ziggurat.data.streams.brokers.broker import Messages
from ziggurat.data.streams.brokers.messages import BadMessage, rows_of

CELLS = st.one_of(st.none(), st.text(alphabet="ab7. ", max_size=3))
ROWS = st.lists(st.fixed_dictionaries({"a": CELLS, "b": CELLS}), max_size=9)


def frame_of(messages: Messages, *, columns: list[str]) -> tuple[pl.DataFrame, list[int], list[BadMessage]]:
    bad: list[BadMessage] = []
    parts = list(rows_of(messages, columns=columns, report=bad.append))
    places = [int(place) for part in parts for place in part.messages]
    frames = [part.frame.cast(pl.String) for part in parts]
    return pl.concat(frames) if frames else pl.DataFrame(), places, bad


@settings(deadline=None)
@given(rows=ROWS)
def test_cells_are_texts_and_empty_ones_are_missing(rows: list[dict[str, str | None]]) -> None:
    entries = [(str(i), {k: v for k, v in row.items() if v is not None}) for i, row in enumerate(rows)]
    frame, places, bad = frame_of(Messages.of(entries, position="x"), columns=["a", "b"])
    empty = [index for index, (_, fields) in enumerate(entries) if not fields]
    assert [each.index for each in bad] == empty
    assert places == [index for index in range(len(rows)) if index not in empty]
    expected = [{k: v or None for k, v in row.items()} for index, row in enumerate(rows) if index not in empty]
    assert frame.to_dicts() == expected


def test_an_empty_field_is_what_an_empty_cell_of_a_file_is(tmp_path: Path) -> None:
    path = tmp_path / "cells.csv"
    path.write_text("a,b\n1,\n,2\n")
    (chunk,) = RawSource([path]).frames()
    messages = Messages.of([("0", {"a": "1", "b": ""}), ("1", {"a": b"", "b": b"2"})], position="x")
    assert frame_of(messages, columns=["a", "b"])[0].equals(chunk.frame)


def stream_of(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def test_kinds_of_messages_stay_in_their_order() -> None:
    arrow = stream_of(pa.table({"b": ["u", "v"], "a": [3, 4], "c": [0, 0]}))
    messages = Messages.of(
        [
            ("0", {"a": "1", "b": "r"}),
            ("1", {"json": '{"a": 1.10, "b": "s", "x": []}'}),
            ("2", {"arrow": arrow}),
            ("3", {"json": json.dumps({"a": True, "b": ["t", 7]})}),
            ("4", {"b": "w"}),
        ],
        position="4",
    )
    bad: list[BadMessage] = []
    parts = list(rows_of(messages, columns=["a", "b"], report=bad.append))
    assert bad == []
    assert [part.messages.tolist() for part in parts] == [[0], [1], [2, 2], [3], [4]]
    found = [list(row.values()) for part in parts for row in part.frame.to_dicts()]
    assert found == [["1", "r"], ["1.10", "s"], [3, "u"], [4, "v"], ["true", ["t", "7"]], [None, "w"]]


def test_a_field_that_a_message_may_do_without_has_a_cell_of_its_own_there() -> None:
    """As the label of a record of labels, without which it is a positive; one that is empty is a missing value."""
    entries = [
        ("0", {"a": "r"}),
        ("1", {"a": "s", "b": "0"}),
        ("2", {"a": "t", "b": ""}),
        ("3", {"b": "0"}),
        ("4", {"json": '{"a": "u"}'}),
        ("5", {"json": '{"a": "v", "b": null}'}),
        ("6", {"json": '{"c": "v"}'}),
        ("7", {"arrow": stream_of(pa.table({"a": ["w"]}))}),
    ]
    bad: list[BadMessage] = []
    messages = Messages.of(entries, position="7")
    parts = list(rows_of(messages, columns=["a", "b"], report=bad.append, default_cells={"b": "1"}))
    found = [tuple(row.values()) for part in parts for row in part.frame.to_dicts()]
    assert found == [("r", "1"), ("s", "0"), ("t", None), ("u", "1"), ("v", None), ("w", "1")]
    assert [each.index for each in bad] == [3, 6], "without any field that it needs"


def test_one_list_among_texts_makes_no_lists_of_the_others() -> None:
    """A column has one type, and as lists none of the messages beside it could be read."""
    values: list[object] = ["r", None, ["s"], "t", "u"]
    entries = [(str(place), {"json": json.dumps({"a": place, "b": value})}) for place, value in enumerate(values)]
    bad: list[BadMessage] = []
    parts = list(rows_of(Messages.of(entries, position="4"), columns=["a", "b"], report=bad.append))
    assert [part.messages.tolist() for part in parts] == [[0, 1], [2], [3, 4]]
    assert [part.frame["b"].to_list() for part in parts] == [["r", None], [["s"]], ["t", "u"]]
    assert not bad


def test_a_column_of_the_schema_may_be_called_json() -> None:
    frame, _, bad = frame_of(Messages.of([("0", {"json": "1"})], position="0"), columns=["json"])
    assert frame.to_dicts() == [{"json": "1"}]
    assert bad == []


def test_what_is_no_row_is_named() -> None:
    whole = stream_of(pa.table({"a": [1], "b": ["u"]}))
    entries = [
        ("0", {"a": b"\xff", "b": "1"}, BadReason.INVALID_UTF8),
        ("1", {"a": "x\0y"}, BadReason.NUL_BYTE),
        ("2", {"z": "1"}, BadReason.NUM_FIELDS),
        ("3", {"json": "[1]"}, BadReason.UNPARSABLE),
        ("4", {"json": "{"}, BadReason.UNPARSABLE),
        ("5", {"json": '{"z": 1}'}, BadReason.NUM_FIELDS),
        ("6", {"json": "[" * 100_000}, BadReason.UNPARSABLE),
        ("7", {"arrow": whole[:-30]}, BadReason.UNPARSABLE),
        ("8", {"arrow": b""}, BadReason.UNPARSABLE),
        ("9", {"arrow": stream_of(pa.table({"a": [1]}))}, BadReason.NUM_FIELDS),
        ("10", {"json": r'{"a": "\ud800"}'}, BadReason.INVALID_UTF8),
        ("11", {"json": r'{"a": "1", "other": ["\udfff"]}'}, BadReason.INVALID_UTF8),
        ("12", {"json": rb'{"a": "\ud800"}'}, BadReason.INVALID_UTF8),
        ("13", {"json": b'{"a": "\xed\xa0\x80"}'}, BadReason.INVALID_UTF8),
        ("14", {"json": '{"a": "\ud800"}'.encode("utf-16-le", "surrogatepass")}, BadReason.INVALID_UTF8),
    ]
    good = ("15", {"json": r'{"a": "\ud83d\ude00"}'})
    messages = Messages.of([*((id, fields) for id, fields, _ in entries), good], position="15")
    frame, places, bad = frame_of(messages, columns=["a", "b"])
    assert {each.index: each.reason for each in bad} == {index: reason for index, (_, _, reason) in enumerate(entries)}
    assert places == [15]
    assert frame.to_dicts() == [{"a": "😀", "b": None}]


@settings(deadline=None)
@given(data=st.binary(max_size=60))
def test_no_bytes_are_more_than_a_bad_message(data: bytes) -> None:
    for name in ("json", "arrow", "a"):
        frame, places, bad = frame_of(Messages.of([("0", {name: data})], position="0"), columns=["a"])
        assert len(bad) + len(set(places)) <= 1 or name == "arrow"
        assert frame.height == len(places)
