"""Numbers as people write them: one setting for a file, found from whole columns, and the same number everywhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ziggurat.data.inspect.inspect_file import inspect_file
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.values.parsing import parse_chunk
from ziggurat.data.raw.bad_rows import BadRows
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.raw.written_numbers import (
    DecimalMark,
    NumberSigns,
    ThousandsMark,
    WrittenNumbers,
    find_marks,
    in_one_line,
)
from ziggurat.errors import ConfigError, DataError
from ziggurat.features.schema import Dense, Schema

GERMAN = WrittenNumbers(decimal=DecimalMark.COMMA, thousands=ThousandsMark.POINT)
ENGLISH = WrittenNumbers(thousands=ThousandsMark.COMMA)
SWISS = WrittenNumbers(thousands=ThousandsMark.APOSTROPHE)
FRENCH = WrittenNumbers(decimal=DecimalMark.COMMA, thousands=ThousandsMark.SPACE)
MARKS = {GERMAN: (".", ","), ENGLISH: (",", "."), SWISS: ("'", "."), FRENCH: ("\u202f", ",")}


@settings(max_examples=100, deadline=None)
@given(
    numbers=st.lists(st.decimals(-(10**9), 10**9, places=2), min_size=1, max_size=8),
    marks=st.sampled_from(list(MARKS)),
)
def test_what_is_written_with_marks_is_the_number_that_it_was(numbers, marks):
    thousands, decimal = MARKS[marks]
    texts = [f"{each:,.2f}".translate(str.maketrans(",.", thousands + decimal)) for each in numbers]
    assert marks.cast(pl.Series(texts)).to_list() == [float(each) for each in numbers]


def test_marks_in_the_wrong_places_make_no_number():
    assert ENGLISH.cast(pl.Series(["1,20", "12,3456", ",123", "1,234,56", "1,234", "1,20,000"])).to_list() == [
        *[None] * 4,
        1234.0,
        120000.0,
    ]
    german = GERMAN.cast(pl.Series(["1.23", "3.5", "1.234", "3,5", "0,123"]))
    assert german.to_list() == [None, None, 1234.0, 3.5, 0.123]
    signs = WrittenNumbers(signs=NumberSigns.STRIP)
    texts = ["$12.5", "-$3", "$-3", "12 €", "12%", "12.5 %", "12 kg", "%", "$"]
    assert signs.cast(pl.Series(texts)).to_list() == [12.5, -3.0, -3.0, 12.0, 0.12, 0.125, None, None, None]
    with pytest.raises(ConfigError, match=r"1\.234,5: --data\.decimal comma --data\.thousands point"):
        WrittenNumbers(decimal=DecimalMark.COMMA, thousands=ThousandsMark.COMMA)


@pytest.mark.parametrize(
    ("texts", "separator", "found"),
    [
        (["1,200", "950", "3,864", "5,933", "1,010", "8,000"], ",", ENGLISH),
        (["4.731", "950", "3.864", "5.933", "1.010", "8.000"], ";", GERMAN),
        (["1.234,5", "9,1"], ";", GERMAN),
        (["1.234,5", "9,1"], ",", GERMAN),
        (["1'200", "7"], ";", SWISS),
        (["1\u202f200,5", "7"], ";", FRENCH),
        (["1,234,567", "7"], ";", ENGLISH),
        (["3,5", "7,25"], ";", WrittenNumbers(decimal=DecimalMark.COMMA)),
        (["3.5", "7.25", "1200"], ",", WrittenNumbers()),
        (["4.731", "950", "3.86"], ";", WrittenNumbers()),
        (["101 205 333", "101", "205 101"], ",", WrittenNumbers()),
        (["101,205,333", "101", "205,101"], ";", WrittenNumbers()),
        (["a1,200", "950"], ",", WrittenNumbers()),
    ],
)
def test_how_numbers_are_written_follows_the_column(texts, separator, found):
    assert find_marks({"x": pl.Series(texts)}, separator=separator).numbers == found


def test_what_can_be_read_in_two_ways_is_said():
    fixed = pl.Series(["4.731", "5.120", "1.113", "2.222", "9.310"])
    (note,) = find_marks({"x": fixed}, separator=";").warnings
    assert note == "'x': '4.731' is read as 4.731; where it is 4731 say --data.decimal comma --data.thousands point"
    other = {"x": pl.Series(["4.731", "950", "3.864", "5.933", "1.010", "8.000"]), "y": pl.Series(["3.5", "7.25"])}
    found = find_marks(other, separator=";")
    assert found.numbers == WrittenNumbers()
    assert found.own == {"x": WrittenNumbers(decimal=DecimalMark.COMMA, thousands=ThousandsMark.POINT)}
    assert "'x': numbers such as '4.731'" in found.own_notes["x"][0]
    assert "that this is 4731: [[number]]" in found.own_notes["x"][0]
    mixed = find_marks({"x": pl.Series(["$3", "€4", "5%"])}, separator=",")
    assert mixed.numbers.signs is NumberSigns.STRIP
    assert any("$ and €" in note for note in mixed.warnings)
    assert any("cells with % count as hundredths" in note for note in mixed.warnings)


def test_an_error_names_the_setting_that_reads_the_whole_column():
    schema = Schema(features=(Dense(name="x"),))
    prices = pl.DataFrame({"x": ["1,200", "950", "3,864", "5,933", "1,010", "8,000"]})
    with pytest.raises(DataError, match=r"if '1,200' is 1200: --data\.thousands comma") as caught:
        parse_chunk(schema, RawChunk.of(prices), bad_rows=BadRows())
    assert "--data.decimal comma" not in " ".join(caught.value.ways_out)
    thousands = WrittenNumbers(thousands=ThousandsMark.COMMA)
    assert any(in_one_line("x", written=thousands) in way for way in caught.value.ways_out)
    one_bad_cell = pl.DataFrame({"x": ["1,2", "3.5", "4"]})
    with pytest.raises(DataError) as caught:
        parse_chunk(schema, RawChunk.of(one_bad_cell), bad_rows=BadRows())
    assert not any("--data.decimal" in way or "--data.thousands" in way for way in caught.value.ways_out)


@pytest.mark.parametrize(("form", "marks"), [("{:,}", ENGLISH), ("${}", None), ("{}%", None), ("{:,}.50", ENGLISH)])
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_inspect_makes_numbers_of_them_and_says_how_to_read_them(form, marks, suffix, tmp_path: Path):
    values = [row * 37 % 90_000 + 900 for row in range(400)]
    frame = pl.DataFrame({"user_id": [row % 40 for row in range(400)], "click": [row % 2 for row in range(400)]})
    frame = frame.with_columns(views=pl.Series([form.format(each) for each in values]))
    path = tmp_path / f"t.{suffix}"
    frame.write_csv(path) if suffix == "csv" else frame.write_parquet(path)
    found = inspect_file(path)
    assert found.schema.feature("views").kind == "dense"
    assert found.numbers == (marks or WrittenNumbers(signs=NumberSigns.STRIP))
    assert any("numbers are read with --data." in warning for warning in found.warnings)
    config = DataConfig(train=(str(path),), thousands=found.numbers.thousands, signs=found.numbers.signs)
    (chunk,) = config.source(config.train).frames(columns=["views"], numbers=["views"])
    read = parse_chunk(Schema(features=(Dense(name="views"),)), chunk, bad_rows=BadRows()).features["views"]
    expected = [each / 100 if "%" in form else each + (0.5 if ".50" in form else 0) for each in values]
    assert read.tolist() == expected


def test_settings_of_numbers_are_younger_than_prepared_data():
    assert "thousands" not in DataConfig().to_state()
    assert DataConfig(thousands=ThousandsMark.COMMA).to_state()["thousands"] == "comma"
    assert DataConfig(signs=NumberSigns.STRIP).text.numbers == WrittenNumbers(signs=NumberSigns.STRIP)


@pytest.mark.parametrize("mark", [" ", "'", "."])
def test_whole_numbers_between_marks_fit_columns_with_a_decimal_comma(mark: str) -> None:
    columns = {
        "price": pl.Series([f"2{mark}347,56", "17,5"]),
        "views": pl.Series([f"2{mark}323{mark}712", f"120{mark}331"]),
    }
    found = find_marks(columns, separator=";")
    assert found.marked == {"price", "views"}
    (note,) = found.warnings
    assert "in another way" not in note
    assert found.numbers.cast(columns["views"]).to_list() == [2_323_712.0, 120_331.0]


def test_a_column_without_thousands_is_read_as_one_that_has_them() -> None:
    """Prices below a thousand say nothing against the point that another column has between its thousands."""
    columns = {
        "Umsatz": pl.Series(["601,6", "1.683,0", "12.345,25", "7,5", "99,1", "2.000,0"]),
        "Preis": pl.Series(["$26,94", "$12,50", "$7,00", "$950,10"]),
    }
    found = find_marks(columns, separator=";")
    assert found.numbers == WrittenNumbers(
        decimal=DecimalMark.COMMA, thousands=ThousandsMark.POINT, signs=NumberSigns.STRIP
    )
    assert found.marked == {"Umsatz", "Preis"}
    assert not any("another way" in warning for warning in found.warnings)
    assert found.numbers.cast(columns["Preis"]).to_list() == [26.94, 12.5, 7.0, 950.1]
    assert found.numbers.cast(columns["Umsatz"]).to_list()[:3] == [601.6, 1683.0, 12345.25]


@pytest.mark.parametrize("odd", ["english", "german"])
def test_a_line_of_python_writes_numbers_of_a_column_that_differs(
    odd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = [1000.5 + row * 37 for row in range(200)]
    english = [f"{each:,.1f}" for each in values]
    german = [each.translate(str.maketrans(",.", ".,")) for each in english]
    mine, others = (english, german) if odd == "english" else (german, english)
    columns = {"click": [row % 2 for row in range(200)], "odd": mine, "one": others, "two": others}
    monkeypatch.chdir(tmp_path)
    pl.DataFrame(columns).write_csv("t.csv", separator=";")
    (own,) = inspect_file("t.csv").schema.numbers
    assert own.column == "odd"
    line = in_one_line("odd", written=WrittenNumbers.of_column(own))
    exec(line, {"pl": pl, "df": pl.read_csv("t.csv", separator=";", infer_schema=False)})
    found = inspect_file("numbers.parquet")
    assert not any("another way" in each for each in found.warnings)
    marks = found.numbers
    config = DataConfig(train=("numbers.parquet",), thousands=marks.thousands, decimal=marks.decimal)
    names = ["odd", "one", "two"]
    (chunk,) = config.source(config.train).frames(columns=names, numbers=names)
    schema = Schema(features=tuple(Dense(name=name) for name in names))
    read = parse_chunk(schema, chunk, bad_rows=BadRows()).features
    assert {name: list(np.asarray(read[name])) for name in names} == dict.fromkeys(names, values)


def test_signs_of_currencies_are_taken_off_by_the_line_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written = WrittenNumbers(signs=NumberSigns.STRIP, thousands=ThousandsMark.COMMA)
    exec(in_one_line("x", written=written), {"pl": pl, "df": pl.DataFrame({"x": ["$1,200.5", "3 €"]})})
    assert pl.read_parquet("numbers.parquet")["x"].to_list() == [1200.5, 3.0]
