"""RawSource: every format gives the same rows in the same order, with exact numbers, whatever the chunk size."""

from __future__ import annotations

import csv
import gzip
import io
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ziggurat.data.raw.bad_rows import BadReason, BadRowPolicy, BadRows
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.raw.source import FileFormat, RawSource
from ziggurat.data.raw.text_blocks import TextOptions
from ziggurat.errors import ConfigError, DataError, MissingFileError, SchemaError
from ziggurat.testing.data import shared_data

ONE_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r"), max_size=8)


def _read(source: RawSource, **options) -> tuple[pl.DataFrame, np.ndarray, np.ndarray | None]:
    chunks = list(source.frames(**options))
    assert all(chunk.num_rows for chunk in chunks)
    frame = pl.concat([chunk.frame for chunk in chunks])
    rows = np.concatenate([chunk.global_rows for chunk in chunks])
    lines = None if chunks[0].lines is None else np.concatenate([chunk.lines for chunk in chunks])
    return frame, rows, lines


def _quarantine(folder: Path) -> BadRows:
    return BadRows(BadRowPolicy.QUARANTINE, folder=folder)


# ---------------------------------------------------------------- text


def test_csv_gives_text_and_exact_numbers(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_text("user,price\n007,1.5\n,2\nx,\n")
    frame, rows, lines = _read(RawSource(path))
    assert frame.rows() == [("007", "1.5"), (None, "2"), ("x", None)]
    assert rows.tolist() == [0, 1, 2]
    assert lines is not None
    assert lines.tolist() == [2, 3, 4]
    assert RawSource(path).columns() == {"user": pl.String(), "price": pl.String()}


def test_columns_in_the_order_asked_and_numbers_as_floats(tmp_path: Path):
    path = tmp_path / "a.tsv"
    path.write_text("a\tb\tc\n1\t2\t3\n4\t\t6\n")
    frame, _, _ = _read(RawSource(path), columns=["c", "a"], numbers=["c"])
    assert frame.to_dict(as_series=False) == {"c": [3.0, 6.0], "a": ["1", "4"]}
    frame, _, _ = _read(RawSource(path), columns=["b"], numbers=["b"])
    assert frame["b"].to_list() == [2.0, None]


@pytest.mark.parametrize("value", ["x", "1e400", "inf", "1 "])
def test_numbers_that_are_none_leave_the_block_as_text(tmp_path: Path, value: str):
    path = tmp_path / "a.csv"
    path.write_text(f"a,b\n1,2\n{value},3\n")
    frame, _, _ = _read(RawSource(path), numbers=["a", "b"])
    assert frame["a"].to_list() == ["1", value]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("tail", ["", "\n", "\n\n\n", "\r\n\r\n"])
def test_line_ends_and_blank_lines_at_the_end(tmp_path: Path, end: str, tail: str):
    path = tmp_path / "a.csv"
    path.write_bytes(end.join(["a,b", "1,2", "3,4"]).encode() + tail.encode())
    frame, _, lines = _read(RawSource(path, text=TextOptions(block_bytes=5, max_record_bytes=5)))
    assert frame.rows() == [("1", "2"), ("3", "4")]
    assert lines is not None
    assert lines.tolist() == [2, 3]


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.tuples(ONE_TEXT, ONE_TEXT, ONE_TEXT), max_size=25),
    delimiter=st.sampled_from([",", "\t", ";", "|"]),
    quote=st.sampled_from(['"', "'"]),
    always=st.booleans(),
    end=st.sampled_from(["\n", "\r\n"]),
    compress=st.booleans(),
    chunk_rows=st.integers(1, 5),
)
def test_text_round_trip(tmp_path: Path, rows, delimiter, quote, always, end, compress, chunk_rows):
    """What Python's csv module writes comes back, in tiny blocks and in one, plain and gzip."""
    buffer = io.StringIO()
    writer = csv.writer(
        buffer,
        delimiter=delimiter,
        quotechar=quote,
        lineterminator=end,
        quoting=csv.QUOTE_ALL if always else csv.QUOTE_MINIMAL,
    )
    writer.writerow(["a", "b", "c"])
    writer.writerows(rows)
    content = buffer.getvalue().encode()
    path = tmp_path / ("a.csv.gz" if compress else "a.csv")
    path.write_bytes(gzip.compress(content) if compress else content)
    expected_lines = []
    reader = csv.reader(io.StringIO(buffer.getvalue(), newline=""), delimiter=delimiter, quotechar=quote)
    before = 0
    for _ in reader:
        expected_lines.append(before + 1)
        before = reader.line_num
    for block_bytes in (256, 1 << 20):  # no record has more than 3 · (8 · 4 + 2) + 4 bytes
        text = TextOptions(delimiter=delimiter, quote=quote, block_bytes=block_bytes, max_record_bytes=256)
        chunks = list(RawSource(path, format=FileFormat.CSV, text=text).frames(chunk_rows=chunk_rows))
        found = [tuple(value or "" for value in row) for chunk in chunks for row in chunk.frame.rows()]
        assert found == rows
        assert [line for chunk in chunks for line in chunk.lines.tolist()] == expected_lines[1:]
        assert [row for chunk in chunks for row in chunk.file_rows.tolist()] == list(range(len(rows)))
        assert all(chunk.num_rows <= chunk_rows for chunk in chunks)


def test_quotes_in_the_middle_of_a_field_are_literal(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_text('a,b\n5" disk,"x, ""y"""\nz,say "hi"\n')
    frame, _, _ = _read(RawSource(path))
    assert frame.rows() == [('5" disk', 'x, "y"'), ("z", 'say "hi"')]


def test_quotes_can_be_switched_off(tmp_path: Path):
    path = tmp_path / "a.tsv"
    path.write_text('a\tb\n"x\ty\n')
    frame, _, _ = _read(RawSource(path, text=TextOptions(quote="")))
    assert frame.rows() == [('"x', "y")]


def test_null_values_and_byte_order_mark(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"\xef\xbb\xbfa,b\nNA,1\n,\\N\n")
    frame, _, _ = _read(RawSource(path, text=TextOptions(null_values=("NA", "\\N"))))
    assert frame.to_dict(as_series=False) == {"a": [None, None], "b": ["1", None]}


FAULTS = [
    ("1,2,3", BadReason.NUM_FIELDS, "2 fields"),
    ("1", BadReason.NUM_FIELDS, "not 1 field"),
    ("", BadReason.NUM_FIELDS, "a blank line"),
    ("1,a\0b", BadReason.NUL_BYTE, "without NUL"),
    ("1,\udcff", BadReason.INVALID_UTF8, "valid UTF-8"),
    ("1," + "x" * 3000, BadReason.TOO_LONG, "at most 1,000 bytes"),
    ('1,"a"b', BadReason.BAD_QUOTES, "a quote that closes"),
    ('1,"ab', BadReason.BAD_QUOTES, "a quote that closes"),
]


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize(("line", "reason", "expected"), FAULTS)
def test_each_fault_in_text(tmp_path: Path, line: str, reason: BadReason, expected: str, position: int):
    good = ["a,b", "c,d"]
    lines = [*good[:position], line, *good[position:]]
    if position == 2:
        lines.append("e,f")  # blank lines at the very end are no fault
    path = tmp_path / "a.csv"
    path.write_bytes("\n".join(["h,i", *lines, ""]).encode(errors="surrogateescape"))
    text = TextOptions(block_bytes=2048, max_record_bytes=1000)
    with pytest.raises(DataError) as caught:
        list(RawSource(path, text=text).frames())
    assert expected in caught.value.expected
    assert caught.value.where == f"{path}, line {position + 2}, row {position}"
    bad_rows = _quarantine(tmp_path)
    frame, rows, found_lines = _read(RawSource(path, text=text, bad_rows=bad_rows))
    kept = [number for number in range(len(lines)) if number != position]
    assert frame.rows() == [tuple(lines[number].split(",")) for number in kept]
    assert rows.tolist() == kept
    assert found_lines is not None
    assert found_lines.tolist() == [number + 2 for number in kept]
    assert bad_rows.counts == {reason: 1}


def test_ten_megabyte_field_is_skipped_and_what_follows_is_numbered(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"a,b\n1,2\n3," + b"x" * 10_000_000 + b"\n5,6\n")
    bad_rows = _quarantine(tmp_path)
    for block_bytes in (2048, 1 << 24):
        text = TextOptions(block_bytes=block_bytes, max_record_bytes=1024)
        frame, rows, lines = _read(RawSource(path, text=text, bad_rows=bad_rows))
        assert frame.rows() == [("1", "2"), ("5", "6")]
        assert rows.tolist() == [0, 2]
        assert lines is not None
        assert lines.tolist() == [2, 4]
    assert bad_rows.counts == {BadReason.TOO_LONG: 1}


def test_a_stray_quote_costs_its_own_line_only(tmp_path: Path):
    path = tmp_path / "a.csv"
    lines = [f'{i},"text {i}"' for i in range(50)]
    lines[10] = '10,"text'
    path.write_text("\n".join(["n,t", *lines, ""]))
    bad_rows = _quarantine(tmp_path)
    frame, _, _ = _read(RawSource(path, bad_rows=bad_rows))
    assert frame.height == 49
    assert bad_rows.is_known(path, 10)
    assert bad_rows.num_rows == 1


def test_numbers_go_on_over_files_and_bad_rows(tmp_path: Path):
    for name, content in (("p10", "a\n1\n2\n"), ("p2", "a\n3\n\n4\n"), ("p1", "a\n")):
        (tmp_path / f"{name}.csv").write_text(content)
    bad_rows = _quarantine(tmp_path / "q")
    chunks = list(RawSource(tmp_path / "*.csv", bad_rows=bad_rows).frames())
    assert [chunk.path.name for chunk in chunks] == ["p2.csv", "p10.csv"]
    assert [chunk.global_rows.tolist() for chunk in chunks] == [[0, 2], [3, 4]]
    assert [chunk.start for chunk in chunks] == [0, 3]
    assert chunks[0].where(1, column="a") == f"{tmp_path / 'p2.csv'}, line 4, row 2, column 'a'"


def test_last_record_too_long_still_counts(tmp_path: Path):
    (tmp_path / "1.csv").write_text("a\nx\n" + "y" * 5000)
    (tmp_path / "2.csv").write_text("a\nz\n")
    text = TextOptions(block_bytes=128, max_record_bytes=100)
    _, rows, _ = _read(RawSource(tmp_path / "*.csv", text=text, bad_rows=_quarantine(tmp_path)))
    assert rows.tolist() == [0, 2]


# ---------------------------------------------------------------- Criteo


def test_criteo_sample_equals_a_plain_split():
    path = shared_data("criteo_sample") / "criteo_first10k.tsv.gz"
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    expected = [tuple(value or None for value in line.split("\t")) for line in lines]
    frame, rows, _ = _read(RawSource(path), chunk_rows=3000)
    assert frame.columns[:2] == ["label", "I1"]
    assert frame.columns[-1] == "C26"
    assert frame.rows() == expected
    assert rows.tolist() == list(range(10_000))
    numbers = [f"I{i}" for i in range(1, 14)]
    frame, _, _ = _read(RawSource(path, format=FileFormat.CRITEO), columns=numbers, numbers=numbers)
    assert frame.rows() == [tuple(float(value) if value else None for value in row[1:14]) for row in expected]


def test_criteo_without_label(tmp_path: Path):
    path = tmp_path / "test.txt"
    path.write_text("\t".join(["1"] * 13 + ["68fd1e64"] * 26) + "\n")
    frame, _, _ = _read(RawSource(path))
    assert frame.columns[0] == "I1"
    assert frame.width == 39


# ---------------------------------------------------------------- Parquet


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_rows=st.integers(1, 40),
    rows_per_group=st.integers(1, 15),
    chunk_rows=st.integers(1, 50),
)
def test_parquet_round_trip(tmp_path: Path, num_rows: int, rows_per_group: int, chunk_rows: int):
    frame = pl.DataFrame(
        {
            "i": range(num_rows),
            "s": [None if i % 3 == 0 else f"ü{i}" for i in range(num_rows)],
            "l": [None if i % 5 == 0 else list(range(i % 4)) for i in range(num_rows)],
        },
        schema_overrides={"l": pl.List(pl.Int64)},
    )
    path = tmp_path / "a.parquet"
    pq.write_table(frame.to_arrow(), path, row_group_size=rows_per_group, write_page_checksum=True)
    source = RawSource(path)
    found, rows, lines = _read(source, columns=["s", "i", "l"], chunk_rows=chunk_rows)
    assert found.equals(frame.select("s", "i", "l"))
    assert rows.tolist() == list(range(num_rows))
    assert lines is None
    sizes = [chunk.num_rows for chunk in source.frames(chunk_rows=chunk_rows)]
    assert set(sizes[:-1]) <= {chunk_rows}
    assert source.num_rows_hint() == num_rows
    assert source.columns() == dict(frame.schema)


def test_parquet_text_that_is_not_utf8_is_a_bad_row(tmp_path: Path):
    texts = pa.array([b"ok", b"\xff\xfe", b"fine"], pa.binary())
    broken = pa.Array.from_buffers(pa.string(), 3, texts.buffers())
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"n": [1, 2, 3], "s": broken}), path)
    with pytest.raises(DataError) as caught:
        list(RawSource(path).frames())
    assert caught.value.where == f"{path}, row 1, column 's'"
    bad_rows = _quarantine(tmp_path)
    frame, rows, _ = _read(RawSource(path, bad_rows=bad_rows))
    assert frame.rows() == [(1, "ok"), (3, "fine")]
    assert rows.tolist() == [0, 2]
    assert bad_rows.counts == {BadReason.INVALID_UTF8: 1}


def test_parquet_page_checksum_names_row_group_and_column(tmp_path: Path):
    path = tmp_path / "a.parquet"
    table = pa.table({"a": np.arange(1000), "b": np.arange(1000) * 0.5})
    pq.write_table(table, path, row_group_size=250, write_page_checksum=True, compression="none", use_dictionary=False)
    column = pq.ParquetFile(path).metadata.row_group(2).column(1)
    content = bytearray(path.read_bytes())
    content[column.data_page_offset + column.total_compressed_size - 9] ^= 4
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        list(RawSource(path).frames())
    assert caught.value.where == f"{path}, row group 2, column 'b'"


def test_parquet_dictionary_columns_and_dotted_names(tmp_path: Path):
    path = tmp_path / "a.parquet"
    table = pa.table({"a.b": pa.array(["x", "y", "x"]).dictionary_encode(), "a": [1, 2, 3]})
    pq.write_table(table, path)
    frame, _, _ = _read(RawSource(path), columns=["a.b", "a"])
    assert frame["a.b"].cast(pl.String).to_list() == ["x", "y", "x"]
    assert frame["a"].to_list() == [1, 2, 3]


# ---------------------------------------------------------------- names, drift, damage


def test_missing_column_suggests_the_nearest(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_text("User_ID,item\n1,2\n")
    with pytest.raises(SchemaError) as caught:
        list(RawSource(path).frames(columns=["item", "user_id"]))
    assert "'user_id'" in caught.value.expected
    assert "'User_ID'" in caught.value.ways_out[0]
    assert str(path) in caught.value.where


def test_drift_in_a_later_file_names_that_file(tmp_path: Path):
    pq.write_table(pa.table({"a": [1], "b": [2]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"b": [2]}), tmp_path / "2.parquet")
    with pytest.raises(SchemaError) as caught:
        list(RawSource(tmp_path).frames(columns=["a", "b"]))
    assert "2.parquet" in caught.value.where


def test_column_order_may_change_between_files(tmp_path: Path):
    (tmp_path / "1.csv").write_text("a,b\n1,2\n")
    (tmp_path / "2.csv").write_text("b,a\n4,3\n")
    frame, rows, _ = _read(RawSource(tmp_path), columns=["a", "b"])
    assert frame.rows() == [("1", "2"), ("3", "4")]
    assert rows.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("a.csv", b"", "an empty file"),
        ("a.csv", b"\n\na,b\n", "a blank first line"),
        ("a.csv", b"a,a\n1,2\n", "more than once"),
        ("a.csv", "a,b\n1,2\n".encode("utf-16"), "UTF-16"),
        ("a.csv", b"a,\xff\n1,2\n", "utf-8"),
        ("a.csv", b"\0\1\2\n\3", "NUL"),
        ("a.csv.gz", b"a,b\n1,2\n", "1f 8b"),
        ("a.csv.gz", b"", "missing"),
        ("a.csv.gz", gzip.compress(b"a,b\n" + b"1,2\n" * 5000, mtime=0)[:40], "cut short"),
        ("a.csv.gz", gzip.compress(b"a,b\n1,2\n", mtime=0)[:-8] + b"\0" * 8, "damaged"),
        ("a.parquet", b"PAR1 not really PAR1", ""),
        ("a.parquet", b"", ""),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: bytes, found: str):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        list(RawSource(path, bad_rows=_quarantine(tmp_path)).frames())
    assert str(path) in caught.value.where
    assert found in caught.value.found


def test_gzip_of_several_members(tmp_path: Path):
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"a,b\n1,") + gzip.compress(b"2\n3,4\n") + b"\0" * 100)
    frame, _, _ = _read(RawSource(path))
    assert frame.rows() == [("1", "2"), ("3", "4")]


def test_paths_that_lead_nowhere(tmp_path: Path):
    for path in (tmp_path / "none.csv", tmp_path / "*.csv", tmp_path):
        with pytest.raises(MissingFileError):
            RawSource(path)
    with pytest.raises(MissingFileError):
        RawSource([])
    (tmp_path / "a.xyz").write_text("hello")
    with pytest.raises(ConfigError) as caught:
        RawSource(tmp_path / "a.xyz").columns()
    assert any("csv" in way for way in caught.value.ways_out)


def test_hints(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_text("a\n" + "12345\n" * 400_000)
    hint = RawSource(path).num_rows_hint()
    assert hint is not None
    assert abs(hint - 400_000) < 8000
    for end in ("\n", ""):  # a file that is read whole for the hint has no more rows than it says
        path.write_text("a,b\n" + "\n".join(["1,2"] * 5000) + end)
        assert RawSource(path).num_rows_hint() == 5000
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n' * 5000)
    assert RawSource(tmp_path / "a.jsonl").num_rows_hint() == 5000
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"a\n1\n"))
    assert RawSource(tmp_path / "a.csv.gz").num_rows_hint() is None


def test_filter_keeps_numbers():
    chunk = RawChunk.of(pl.DataFrame({"a": [1, 2, 3, 4]}), start=100)
    kept = chunk.filter(np.array([False, True, False, True]))
    assert kept.frame["a"].to_list() == [2, 4]
    assert kept.global_rows.tolist() == [101, 103]
    assert kept.filter(np.array([False, True])).global_rows.tolist() == [103]
    assert kept.filter(np.array([False, False])).num_rows == 0
    with_rows = RawChunk(frame=chunk.frame, path=Path("f"), first_row=5, start=50, rows=np.array([5, 7, 8, 9]))
    assert with_rows.filter(np.array([False, True, True, False])).global_rows.tolist() == [52, 53]


def test_memory_stays_within_blocks(tmp_path: Path):
    """Reading does not gather the file: at most a few chunks are alive."""
    path = tmp_path / "a.csv"
    path.write_text("a,b\n" + "x,1\n" * 50_000)
    text = TextOptions(block_bytes=4096, max_record_bytes=1024)
    alive = [chunk.num_rows for chunk in RawSource(path, text=text).frames(chunk_rows=100)]
    assert sum(alive) == 50_000
    assert max(alive) == 100


def test_a_mark_of_byte_order_in_the_first_field_of_a_row_is_kept(tmp_path):
    (tmp_path / "a.csv").write_bytes("a,b\n\ufeffx,1\n\ufeffy,2\n".encode())
    for block_bytes in (12, 1 << 20):
        text = TextOptions(block_bytes=block_bytes, max_record_bytes=10)
        frames = [chunk.frame for chunk in RawSource(tmp_path / "a.csv", text=text).frames(chunk_rows=1)]
        assert pl.concat(frames)["a"].to_list() == ["\ufeffx", "\ufeffy"]
