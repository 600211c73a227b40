"""JSON Lines: the fast way keeps to Python's `json`, bad lines are named, and a log is a table like any other."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ziggurat.data.inspect.inspect_file import inspect_file
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.prepare import prepare
from ziggurat.data.preprocess.values.cells import canonical_text
from ziggurat.data.raw.bad_rows import BadReason, BadRowPolicy, BadRows
from ziggurat.data.raw.json_lines import parse_line_by_line, parse_lines
from ziggurat.data.raw.source import FileFormat, RawSource
from ziggurat.data.raw.text_blocks import TextOptions
from ziggurat.errors import DataError
from ziggurat.features.schema import Categorical, Dense, Label, MultiHot, Schema

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-9, 9),
    st.floats(-1e6, 1e6).map(lambda value: round(value, 3)),
    st.just(1e18),
    st.text(max_size=6),
    st.sampled_from(["", "007", "True", "NaN", "\x00", "\u2028", 'say "so"', "\\", "ü"]),
)
values = st.one_of(scalars, st.lists(scalars, max_size=3))
lines = st.one_of(
    st.dictionaries(st.sampled_from(["a", "b", "ü"]), values, max_size=3).map(
        lambda each: json.dumps(each, ensure_ascii=len(each) % 2 == 0)
    ),
    st.sampled_from(
        [
            *('{"a": 1}', '{"a": 2.5}', '{"a": "x"}', '{"a": true}', '{"a": null}', '{"a": [1, 2]}', '{"a": 1'),
            *(
                "",
                "   ",
                "[1]",
                "3",
                '{"a": NaN}',
                '{"a": Infinity}',
                '{"a": 1e400}',
                '{"a": "\\ud800"}',
                "{}",
                '{"a": {"b": 1}}',
                '{"a": "\\ud83d\\ude00"}',
                '{"a": "\\ude00\\ud83d"}',
            ),
            *('{"a": 1} {"a": 2}', '{"a": 1, "a": 2}', '{"a": 9007199254740993}', '{"a": 1.50}', '{"a": "x"}\r'),
        ]
    ),
)


def _plain(series: pl.Series) -> list:
    """Every cell as the id that it is, lists as lists of such."""
    if isinstance(series.dtype, pl.List):
        return [None if each is None else _plain(each) for each in series]
    text = canonical_text(series)
    return series.to_list() if text is None else text.to_list()


@settings(max_examples=300, deadline=None)
@given(first=st.lists(lines, max_size=3), block=st.lists(lines, min_size=1, max_size=6))
def test_polars_and_python_read_the_same_lines_alike(first, block):
    start = "".join(f"{line}\n" for line in first).encode(errors="surrogatepass")
    types = dict(parse_line_by_line(start, columns=None, types={}).frame.schema) if first else {}
    data = "".join(f"{line}\n" for line in block).encode(errors="surrogatepass")
    columns = list(types) or ["a"]
    fast = parse_lines(data, columns=columns, types=types)
    slow = parse_line_by_line(data, columns=columns, types=types)
    assert fast.places.tolist() == slow.places.tolist()
    assert [fault.place for fault in fast.faults] == [fault.place for fault in slow.faults]
    for name in columns:
        if fast.frame[name].dtype == slow.frame[name].dtype == pl.Struct:
            continue  # no feature is made of it
        assert _plain(fast.frame[name]) == _plain(slow.frame[name]), (fast.frame, slow.frame)


def _source(path: Path, *rows: str, text: TextOptions | None = None) -> RawSource:
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return RawSource(path, text=text)


def test_values_keep_their_types_and_lines_are_numbered(tmp_path: Path):
    rows = [f'{{"id": "00{row}", "n": {row}, "x": {row}.5, "tags": ["a", "b{row}"]}}' for row in range(50)]
    source = _source(tmp_path / "t.jsonl", *rows, "", text=TextOptions(block_bytes=256, max_record_bytes=256))
    chunks = list(source.frames(chunk_rows=20))
    frame = pl.concat([chunk.frame for chunk in chunks])
    assert frame.schema == {"id": pl.String, "n": pl.Int64, "x": pl.Float64, "tags": pl.List(pl.String)}
    assert frame["id"][7] == "007"
    assert frame["tags"][7].to_list() == ["a", "b7"]
    assert [chunk.num_rows for chunk in chunks] == [20, 20, 10]
    assert chunks[1].line(0) == 21
    assert source.num_read == 50
    packed = tmp_path / "t.ndjson.gz"
    packed.write_bytes(gzip.compress((tmp_path / "t.jsonl").read_bytes()))
    assert pl.concat([chunk.frame for chunk in RawSource(packed).frames()]).equals(frame)
    assert [chunk.frame.columns for chunk in source.frames(columns=["x", "id"])] == [["x", "id"]]


def test_bad_lines_are_named_and_put_aside_as_those_of_csv(tmp_path: Path):
    rows = ['{"a": 1, "b": [1]}', '{"a": 2', "", '{"a": 3, "b": 4}', "[5]", '{"a": 6, "b": null}', '{"a": "\\ud800"}']
    rows += ['{"a": "' + "x" * 300 + '"}', '{"a": 9}']
    source = _source(tmp_path / "t.jsonl", *rows, text=TextOptions(block_bytes=200, max_record_bytes=200))
    with pytest.raises(DataError, match="a JSON object") as caught:
        list(source.frames())
    assert caught.value.where.endswith("t.jsonl, line 2, row 1")
    with BadRows(BadRowPolicy.QUARANTINE, folder=tmp_path) as aside:
        source = RawSource(tmp_path / "t.jsonl", bad_rows=aside, text=source.text)
        chunks = list(source.frames(columns=["a", "b"]))
    ids = [text for chunk in chunks for text in _plain(chunk.frame["a"])]
    assert ids == ["1", "6", "9"]
    assert [row for chunk in chunks for row in chunk.global_rows] == [0, 5, 8]
    assert aside.counts == {BadReason.UNPARSABLE: 4, BadReason.INVALID_UTF8: 1, BadReason.TOO_LONG: 1}
    (written,) = (tmp_path / "quarantine").iterdir()
    assert [json.loads(line)["line"] for line in written.read_text().splitlines()] == [2, 3, 4, 5, 7, 8]


def test_other_files_are_named(tmp_path: Path):
    path = tmp_path / "t.jsonl"
    for content, words in (
        (b"", "an empty file"),
        (b'[{"a": 1},\n{"a": 2}]\n', "read_json"),
        (b"\xff\xfe{\x00", "UTF-16"),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=words):
            RawSource(path).columns()
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n')
    assert list(RawSource(path).columns()) == ["a"]
    json_file = tmp_path / "t.json"
    json_file.write_text('{"a": 1}\n{"a": 2}\n')
    assert next(RawSource(json_file).frames()).frame["a"].to_list() == [1, 2]


def test_a_log_of_json_lines_is_a_table_like_any_other(tmp_path: Path):
    n = pl.int_range(400, eager=True)
    frame = pl.DataFrame({"user_id": n % 40, "item_id": "i" + (n * 7 % 30).cast(pl.String), "price": n * 37 % 90 + 0.5})
    frame = frame.with_columns(tags=pl.Series([["a", "b"][: 1 + row % 2] for row in range(400)]), click=n // 2 % 2)
    schemas = []
    prepared = []
    for suffix in ("parquet", "jsonl"):
        path = tmp_path / f"t.{suffix}"
        frame.write_parquet(path) if suffix == "parquet" else frame.write_ndjson(path)
        found = inspect_file(path)
        assert found.num_rows == 400
        schemas.append(found.schema)
        config = DataConfig(train=(str(path),))
        prepared.append(prepare(config, schema=found.schema, folder=tmp_path / f"prepared-{suffix}"))
    assert schemas[0] == schemas[1]
    assert {type(each) for each in schemas[1].features} == {Categorical, Dense, MultiHot}
    assert schemas[1].labels == (Label(name="click"),)
    assert prepared[0].preprocessing.fingerprint == prepared[1].preprocessing.fingerprint


def test_a_column_of_several_types_is_one_of_ids(tmp_path: Path):
    rows = ['{"a": 1, "b": 1}', '{"a": "x", "b": 2.5}', '{"a": true, "b": 3}', '{"a": 2.0}']
    source = _source(tmp_path / "t.jsonl", *rows)
    (chunk,) = source.frames()
    assert _plain(chunk.frame["a"]) == ["1", "x", "true", "2"]
    assert chunk.frame["b"].to_list() == [1.0, 2.5, 3.0, None]
    assert RawSource(tmp_path / "t.jsonl", format=FileFormat.JSONL).columns()["b"] == pl.Float64
    assert Schema(features=(Categorical(name="a"),)).columns == ("a",)


@pytest.mark.parametrize(
    "line",
    [
        '{"user": 9, "item": 3, "user": 10}',
        '{"item": 3, "user" : null, "user":10}',
        '{"us\\u0065r": 9, "item": 3, "user": 10}',
    ],
)
def test_a_name_that_stands_twice_in_a_line_is_a_bad_row(tmp_path: Path, line: str):
    path = tmp_path / "log.jsonl"
    path.write_text('{"user": 1, "item": 1}\n{"user": null, "item": 2}\n' + line + '\n{"item": 4}\n')
    source = RawSource([path])
    with pytest.raises(DataError, match="each name once in a line: 'user' stands in it twice") as refused:
        list(source.frames())
    assert "3" in refused.value.where
    # Whoever does not ask for it is not stopped by it, and what has it once is read as before.
    (chunk,) = RawSource([path]).frames(columns=("item",))
    assert chunk.frame["item"].to_list() == [1, 2, 3, 4]


def test_names_in_values_and_in_objects_are_no_second_name(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"user": "user", "more": {"user": 1}}\n{"user": "\\"user\\": 2", "more": {"user": 1}}\n')
    (chunk,) = RawSource([path]).frames(columns=("user",))
    assert chunk.frame["user"].to_list() == ["user", '"user": 2']


_DOUBLED = '{"user": 1, "user": 2, "click": 1}\n'


@pytest.mark.parametrize(
    ("content", "expected", "where", "way_out"),
    [
        (_DOUBLED, "'user' stands in it twice", "line 1, row 0, column 'user'", "correct the file"),
        (_DOUBLED * 3, "'user' stands in it twice", "line 1, row 0, column 'user'", "correct the file"),
        ('{"user": "\\u0000"}\n', "without NUL bytes", "line 1, row 0", "correct the file"),
        ('[{"user": 1},\n{"user": 2}]\n', "a JSON object", "line 1", "convert it"),
        ('{\n"user": 1\n}\n', "a JSON object", "line 1", "convert it"),
        ("{}\n", "a JSON object", "line 1", "write one object"),
        ("user,click\n1,0\n", "a JSON object", "line 1", "--data.format csv"),
    ],
)
def test_a_file_without_a_line_of_use_is_refused_by_its_first_fault(
    tmp_path: Path, content: str, expected: str, where: str, way_out: str
) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(content)
    with pytest.raises(DataError) as refused:
        RawSource([path]).columns()
    assert expected in refused.value.expected
    assert refused.value.where == f"{path}, {where}"
    assert way_out in refused.value.ways_out[0]
    assert ("--data.format csv" in str(refused.value)) == content.startswith("user")


@pytest.mark.parametrize("odd", [0, 7, 19])
def test_one_list_among_texts_is_the_bad_row(tmp_path: Path, odd: int) -> None:
    """It made the column one of lists, so that all other rows were the bad ones."""
    path = tmp_path / "rows.jsonl"
    rows = [{"user": f"u{place}", "item": place} for place in range(20)]
    rows[odd] = {"user": ["u1"], "item": odd}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=rf"(?s)no list.*\[\"u1\"\].*line {odd + 1}"):
        list(RawSource(path).frames())
    with BadRows(BadRowPolicy.QUARANTINE, folder=tmp_path) as bad_rows:
        chunk = next(RawSource(path, bad_rows=bad_rows).frames())
    assert chunk.frame["item"].to_list() == [place for place in range(20) if place != odd]
    assert chunk.frame["user"].dtype == pl.String
    assert bad_rows.num_rows == 1


def test_one_text_among_lists_is_the_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"tags": "a"}, {"tags": None}, {"tags": ["b"]}, {"tags": ["c", "d"]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with BadRows(BadRowPolicy.QUARANTINE, folder=tmp_path) as bad_rows:
        chunk = next(RawSource(path, bad_rows=bad_rows).frames())
    assert chunk.frame["tags"].to_list() == [None, ["b"], ["c", "d"]]
    assert bad_rows.num_rows == 1


@pytest.mark.parametrize("odd", [0, 7, 19])
@pytest.mark.parametrize("value", [["a", ["b"]], [{"a": 1}]])
def test_one_list_of_lists_among_lists_is_the_bad_row(tmp_path: Path, odd: int, value: list[object]) -> None:
    """It made the column one of texts, so that all other rows were the bad ones."""
    path = tmp_path / "rows.jsonl"
    rows: list[dict[str, object]] = [{"tags": [f"t{place}", None]} for place in range(20)]
    rows[odd] = {"tags": value}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=rf"(?s)a list of single values, as in most of the first lines.*line {odd + 1}"):
        list(RawSource(path).frames())
    with BadRows(BadRowPolicy.QUARANTINE, folder=tmp_path) as bad_rows:
        chunk = next(RawSource(path, bad_rows=bad_rows).frames())
    assert chunk.frame["tags"].to_list() == [[f"t{place}", None] for place in range(20) if place != odd]
    assert bad_rows.num_rows == 1


def test_a_torn_last_line_is_said_to_be_of_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    with pytest.raises(DataError) as refused:
        list(RawSource(path).frames())
    assert "perhaps the file is half written" in refused.value.ways_out[0]
    path.write_text('{"a": 1}\n{"a"\n{"a": 2}')
    with pytest.raises(DataError) as refused:
        list(RawSource(path).frames())
    assert "half written" not in refused.value.ways_out[0]
