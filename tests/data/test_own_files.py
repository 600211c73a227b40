"""Files as people have them: separators, decimal commas, texts for nothing, yes and no, quotes, Windows line ends.

The reference is Python's `csv` and `float`, cell by cell; both text kernels must give the same.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ziggurat.data.inspect.inspect_file import inspect_file
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.prepare import prepare
from ziggurat.data.preprocess.preprocessing import Preprocessing, id_columns, numeric_columns
from ziggurat.data.preprocess.values.parsing import parse_chunk
from ziggurat.data.raw import text_source
from ziggurat.data.raw.bad_rows import BadReason, BadRowPolicy, BadRows
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.raw.source import RawSource
from ziggurat.data.raw.text_blocks import TextOptions
from ziggurat.data.raw.written_numbers import DecimalMark
from ziggurat.errors import ConfigError, DataError, SchemaError
from ziggurat.features.hashing import hash_ids
from ziggurat.features.schema import MISSING_TEXTS, Categorical, Dense, Label, MultiHot, Schema, Task
from ziggurat.ops.text.cpp import CppTextKernel
from ziggurat.ops.text.reference import NumpyTextKernel

SCHEMA = Schema(
    features=(Categorical(name="id"), Dense(name="x"), MultiHot(name="tags", separator="+")),
    labels=(Label(name="y", positive="yes", negative="no"),),
    group="id",
    missing_texts=MISSING_TEXTS,
)
ids = st.sampled_from(
    ["", "a", "NULL", "n/a", "-", "N", "7", "68fd1e64", "Köln", 'say "so"', "a;b", "a,b", "NULL ", "\\N"]
)
numbers = st.sampled_from(["", "0", "12", "-7", "NA", "3.5", "-0.25", "1e3", "NaN", "None", "123456789", "12345678.5"])
tags = st.sampled_from(["", "r+s", "r", "NULL", "-"])
labels = st.sampled_from(["yes", "no"])


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.tuples(ids, numbers, tags, labels), min_size=1, max_size=12),
    separator=st.sampled_from([";", "\t", "|", ","]),
    decimal=st.sampled_from(DecimalMark),
    end=st.sampled_from(["\n", "\r\n"]),
    mark=st.booleans(),
    block_bytes=st.sampled_from([128, 1 << 20]),
)
def test_cells_are_what_python_reads(tmp_path: Path, rows, separator, decimal, end, mark, block_bytes):
    if decimal is DecimalMark.COMMA:
        rows = [(a, x.replace(".", ","), t, y) for a, x, t, y in rows]
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=separator, lineterminator=end)
    writer.writerows([("id", "x", "tags", "y"), *rows])
    path = tmp_path / "own.csv"
    path.write_bytes((b"\xef\xbb\xbf" if mark else b"") + text.getvalue().encode())
    options = TextOptions(delimiter=separator, decimal=decimal, block_bytes=block_bytes, max_record_bytes=128)
    source = RawSource(path, text=options)
    for kernel in (NumpyTextKernel(), CppTextKernel()):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(text_source, "text_kernel", lambda kernel=kernel: kernel)
            for hints in ({}, {"numbers": numeric_columns(SCHEMA), "ids": id_columns(SCHEMA)}):
                parts = [parse_chunk(SCHEMA, chunk, bad_rows=BadRows()) for chunk in source.frames(**hints)]
                _check(parts, rows)


def _check(parts: list, rows: list[tuple[str, str, str, str]]) -> None:
    missing = np.array([row[0] in ("", *MISSING_TEXTS) for row in rows])
    found = np.concatenate(
        [
            np.zeros(part.num_rows, bool) if part.features["id"].missing is None else part.features["id"].missing
            for part in parts
        ]
    )
    assert found.tolist() == missing.tolist()
    keys = np.concatenate([part.features["id"].keys for part in parts])
    expected = hash_ids(np.array([row[0] for row in rows], dtype=object))
    assert keys[~missing].tolist() == expected[~missing].tolist()
    numbers = [float("nan") if x in ("", *MISSING_TEXTS) else float(x.replace(",", ".")) for _, x, _, _ in rows]
    np.testing.assert_array_equal(np.concatenate([part.features["x"] for part in parts]), numbers)
    lengths = [0 if t in ("", *MISSING_TEXTS) else t.count("+") + 1 for _, _, t, _ in rows]
    assert np.concatenate([part.features["tags"].lengths for part in parts]).tolist() == lengths
    assert np.concatenate([part.labels["y"] for part in parts]).tolist() == [float(row[3] == "yes") for row in rows]


def test_what_is_missing_is_a_setting_of_the_schema_and_goes_with_it():
    frame = pl.DataFrame({"id": ["NA", "a", "-"], "x": ["?", "1", "NULL"]})
    plain = Schema(features=(Categorical(name="id"), Dense(name="x")))
    with pytest.raises(DataError, match="add it to `missing` in the schema"):
        parse_chunk(plain, RawChunk.of(frame), bad_rows=BadRows())
    own = Schema(features=plain.features, missing_texts=("?", "NULL"))
    fitted = Preprocessing.fit(own, [RawChunk.of(frame)])
    assert sorted(fitted.vocabularies["id"].ids.to_list()) == ["-", "NA", "a"]
    batch = fitted.batch({"id": ["?", "a"], "x": ["NULL", "1"]})  # in service too
    assert batch.single[0, 0] == 2
    assert batch.single[0, 1] >= 3
    categories = pl.DataFrame({"id": pl.Series(["?", "a"], dtype=pl.Categorical), "x": [1, 2]})
    assert fitted.batch(categories).single[0].tolist() == batch.single[0].tolist()
    assert fitted.fingerprint != Preprocessing.fit(plain, [RawChunk.of(frame.with_columns(x=pl.lit(1)))]).fingerprint


def test_a_point_among_decimal_commas_is_a_fault_and_so_is_a_comma_among_points(tmp_path: Path):
    schema = Schema(features=(Dense(name="x"),))
    path = tmp_path / "a.csv"
    path.write_text('x;z\n1,5;1\n1.234;2\n"1.234,5";3\n12;4\n')
    options = TextOptions(delimiter="semicolon", decimal=DecimalMark.COMMA)
    aside = BadRows(BadRowPolicy.QUARANTINE, folder=tmp_path / "aside")
    with aside:
        parts = [
            parse_chunk(schema, chunk, bad_rows=aside)
            for chunk in RawSource(path, text=options).frames(columns=["x"], numbers=["x"])
        ]
    assert parts[0].features["x"].tolist() == [1.5, 12.0]
    assert aside.counts == {BadReason.NOT_A_NUMBER: 2}
    source = RawSource(path, text=TextOptions(delimiter=";"))
    with pytest.raises(DataError, match=r"--data\.decimal comma") as caught:
        parse_chunk(schema, next(source.frames(columns=["x"])), bad_rows=BadRows())
    assert caught.value.found == "'1,5'"


def test_labels_of_texts():
    def read(label: Label, values: list) -> list[float]:
        chunk = RawChunk.of(pl.DataFrame({"f": ["a"] * len(values), "y": values}, strict=False))
        schema = Schema(features=(Categorical(name="f"),), labels=(label,))
        return parse_chunk(schema, chunk, bad_rows=BadRows()).labels["y"].tolist()

    assert read(Label(name="y", positive="won"), ["won", "lost", " won ", "draw"]) == [1, 0, 1, 0]
    assert read(Label(name="y", positive="2"), [1, 2, 2]) == [0, 1, 1]
    assert read(Label(name="y", positive="true"), [True, False]) == [1, 0]
    assert read(Label(name="y", positive="yes", negative="Yes"), ["yes", "Yes"]) == [1, 0]
    assert read(Label(name="y", positive="clicked"), ["clicked", "bought", "0"]) == [1, 0, 0]
    for positive, same in (
        ("yes", 1),
        ("yes", True),
        ("yes", "Yes"),
        ("yes", "true"),
        ("clicked", "1"),
        ("won", "Won"),
    ):
        with pytest.raises(DataError, match=f"{positive!r} or another text") as alike:
            read(Label(name="y", positive=positive), ["no", same])
        assert "would count as 0" in alike.value.ways_out[0]
    with pytest.raises(DataError, match="'maybe'") as caught:
        read(Label(name="y", positive="yes", negative="no"), ["yes", "maybe"])
    assert "'yes' or 'no'" in caught.value.expected
    with pytest.raises(DataError, match="nothing"):
        read(Label(name="y", positive="yes"), ["yes", None])
    with pytest.raises(DataError, match='positive = "yes"'):
        read(Label(name="y"), ["yes", "no"])
    for wrong in (
        {"positive": "a", "positive_from": 1.0},
        {"negative": "no"},
        {"positive": "a", "negative": "a"},
        {"positive": "a", "task": Task.REGRESSION},
    ):
        with pytest.raises(SchemaError):
            Label(name="y", **wrong)


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A table as an office program writes it: mark, semicolons, commas, quotes, Windows line ends."""
    rng = np.random.default_rng(0)
    lines = ["kunde_id;ort;preis;is_mobile;Bought?"]
    for row in range(600):
        price = "N/A" if row % 20 == 0 else f"{rng.lognormal(3, 1):.2f}".replace(".", ",")
        place = '"Ulm; ""Neu"""' if row % 3 else "-"
        lines.append(f"u{row % 37};{place};{price};{rng.integers(2)};{'yes' if rng.random() < 0.3 else 'no'}")
    path = tmp_path / "shop.csv"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join([*lines, ""]).encode())
    return path


def test_inspect_guesses_what_is_needed_to_read_the_file(shop: Path, tmp_path: Path):
    found = inspect_file(shop)
    assert found.settings() == ("--data.separator", "semicolon", "--data.decimal", "comma")
    assert found.schema.labels == (Label(name="Bought?", positive="yes", negative="no"),)
    assert found.schema.feature("preis").kind == "dense"
    assert "also written 'N/A'" in found.explanations["preis"]
    config = DataConfig(train=(str(shop),), separator="semicolon", decimal=DecimalMark.COMMA)
    data = prepare(config, schema=found.schema, folder=tmp_path / "prepared")
    assert sum(split.rows for split in data.summary.splits.values()) == 600
    assert data.preprocessing.vocabularies["ort"].ids.to_list() == ['Ulm; "Neu"']
    assert inspect_file(shop, label="is_mobile").schema.labels == (Label(name="is_mobile"),)
    assert inspect_file(shop, label="preis").schema.labels == (Label(name="preis", task=Task.REGRESSION),)
    with pytest.raises(SchemaError, match="Bought"):
        inspect_file(shop, label="bought")
    with pytest.raises(DataError, match="a label of two values"):
        inspect_file(shop, label="kunde_id")


def test_a_wrong_separator_is_said_with_the_right_one(shop: Path, tmp_path: Path):
    schema = Schema(features=(Categorical(name="ort"),))
    with pytest.raises(SchemaError, match=r"--data\.separator semicolon"):
        prepare(DataConfig(train=(str(shop),)), schema=schema, folder=tmp_path / "prepared")
    with pytest.raises(ConfigError, match="semicolon"):
        DataConfig(train=("a.csv",), separator="::")


def test_documents_beside_data_are_left_out_and_parquet_needs_no_name(tmp_path: Path):
    (tmp_path / "README.txt").write_text("These are our data.\n")
    (tmp_path / "b.txt").write_text("id\tx\na\t1\n")
    pl.DataFrame({"id": ["c"], "x": [2]}).write_parquet(tmp_path / "part-00000")
    source = RawSource(tmp_path)
    assert [path.name for path in source.paths] == ["b.txt"]
    assert [path.name for path in source.left_out] == ["README.txt"]
    assert list(RawSource(tmp_path / "part-00000").columns()) == ["id", "x"]
    (tmp_path / "odd.dat").write_text("id,x\na,1\n")
    with pytest.raises(ConfigError, match="rename the file"):
        RawSource(tmp_path / "odd.dat").columns()
