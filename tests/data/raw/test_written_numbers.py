"""Numbers as people write them: one setting for a file, found from whole columns, and the same number everywhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import example, given, settings
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
    WrittenColumns,
    WrittenNumbers,
    find_marks,
    in_one_line,
)
from ziggurat.errors import ConfigError, DataError, RequestError
from ziggurat.features.schema import Dense, Schema
from ziggurat.serving.request_rows import in_plain_numbers

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


def by_hand(text: str, *, thousands: str, decimal: str) -> float | None:
    """The slow twin: cut at the marks, and look at each group of digits."""
    body = text[1:] if text[:1] in ("+", "-") else text
    whole, _, fraction = body.partition(decimal)
    if not all(each in "0123456789" for each in fraction) or not whole + fraction:
        return None
    first, *others = whole.split(thousands)
    if others:
        even = all(len(group) == 3 for group in others)
        indian = thousands == "," and all(len(group) == 2 for group in others[:-1]) and len(others[-1]) == 3
        if not (even and 1 <= len(first) <= 3) and not (indian and 1 <= len(first) <= 2):
            return None
        if first.startswith("0"):
            return None
    digits = "".join([first, *others])
    if not all(each in "0123456789" for each in digits):
        return None
    sign = -1 if text[:1] == "-" else 1
    return sign * float(f"{digits or 0}.{fraction or 0}")


@settings(max_examples=80, deadline=None)
@given(
    groups=st.lists(st.text("0123456789", min_size=1, max_size=4), min_size=1, max_size=4),
    fraction=st.text("0123456789", max_size=4),
    sign=st.sampled_from(["", "-"]),
    marks=st.sampled_from(list(MARKS)),
)
@example(groups=["0", "500"], fraction="", sign="", marks=GERMAN)
@example(groups=["000", "500"], fraction="", sign="-", marks=ENGLISH)
@example(groups=["1", "12", "345"], fraction="", sign="", marks=GERMAN)
@example(groups=["1", "12", "345"], fraction="", sign="", marks=ENGLISH)
def test_files_frames_and_requests_read_marks_as_a_hand_does(groups, fraction, sign, marks):
    thousands, decimal = MARKS[marks]
    text = sign + thousands.join(groups) + (decimal + fraction if fraction else "")
    expected = by_hand(text, thousands=thousands, decimal=decimal)
    assert marks.cast(pl.Series([text])).to_list() == [expected]
    chunk = replace(RawChunk.of(pl.DataFrame({"x": [text]})), numbers=marks)
    asked = WrittenColumns(files=marks)
    if expected is None:
        with pytest.raises(DataError):
            parse_chunk(Schema(features=(Dense(name="x"),)), chunk, bad_rows=BadRows())
        with pytest.raises(RequestError):
            in_plain_numbers({"x": text}, columns={"x"}, written=asked)
        return
    read = parse_chunk(Schema(features=(Dense(name="x"),)), chunk, bad_rows=BadRows()).features["x"]
    assert np.asarray(read).tolist() == [expected]
    assert in_plain_numbers({"x": text}, columns={"x"}, written=asked) == {"x": expected}


def test_ways_out_name_the_numbers_that_a_text_is_by_other_marks():
    with pytest.raises(RequestError) as refused:
        in_plain_numbers({"price": "0.500"}, columns={"price"}, written=WrittenColumns(files=GERMAN))
    assert refused.value.ways_out[0] == 'if it is 0.5, send the number itself: {"price": 0.5}'
    assert "not 0.200" in refused.value.expected
    texts = pl.DataFrame({"x": ["1.234,5", "0.500", "2.000"]})
    chunk = replace(RawChunk.of(texts), numbers=GERMAN)
    schema = Schema(features=(Dense(name="x"),))
    with pytest.raises(DataError) as bad_row:
        parse_chunk(schema, chunk, bad_rows=BadRows())
    assert "if '0.500' is 0.5, write it as '0,5'" in bad_row.value.ways_out
    mended = replace(chunk, frame=texts.with_columns(x=pl.Series(["1.234,5", "0,5", "2.000"])))
    read = parse_chunk(schema, mended, bad_rows=BadRows()).features["x"]
    assert np.asarray(read).tolist() == [1234.5, 0.5, 2000.0]


@pytest.mark.parametrize(("separator", "below_one", "large"), [(";", "0.{}", "{}.266,9"), (",", "0,{}", "{},266.9")])
def test_a_column_below_one_is_no_column_of_thousands(separator: str, below_one: str, large: str, tmp_path: Path):
    rows = range(100, 900, 7)
    columns = {"y": [row % 2 for row in rows], "k0": [below_one.format(row) for row in rows]}
    columns["th"] = [large.format(row) for row in rows]
    pl.DataFrame(columns).write_csv(tmp_path / "t.csv", separator=separator)
    found = inspect_file(tmp_path / "t.csv", label="y")
    assert {each.name: each.kind for each in found.schema.features} == {"k0": "dense", "th": "dense"}
    assert len(found.schema.numbers) == 1, "one of the two columns is written in a way of its own"
    written = WrittenColumns(files=found.numbers).with_own(found.schema.numbers)
    texts = pl.DataFrame(columns)
    assert written.of("k0").cast(texts["k0"]).to_list() == [row / 1000 for row in rows]
    assert written.of("th").cast(texts["th"]).to_list() == [row * 1000 + 266.9 for row in rows]


def test_doubt_is_said_of_three_digits_beside_columns_with_thousands():
    columns = {
        "dec": pl.Series(["4.079", "9.660", "6.629"]),
        "english": pl.Series(["1,841.57", "12.5"]),
        "more": pl.Series(["2,841.57", "12.5"]),
        "german": pl.Series(["1.841,57", "12,5"]),
    }
    found = find_marks(columns, separator=",")
    assert found.numbers == ENGLISH
    assert found.warnings[-1] == (
        "'dec': '4.079' is read as 4.079; where it is 4079 say in the schema [[number]], and below it "
        'column = "dec" and decimal = "comma" and thousands = "point"'
    )
    assert found.of("dec") == ENGLISH
    columns = {"dec": columns["dec"], "sure": pl.Series(["607.266", "1.607.266"])}
    found = find_marks(columns, separator=";")
    assert found.marked == {"dec", "sure"}, "no ids have marks between their thousands"
    assert found.warnings[-1] == (
        "'dec': '4.079' is read as 4079; where it is 4.079 say in the schema [[number]], and below it column = \"dec\""
    )


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_decimal_commas_between_commas_are_numbers_and_lists_stay_lists(suffix: str, tmp_path: Path):
    rows = range(400)
    values = [row * 37 % 900 / 10 + 1 for row in rows]
    comma = [f"{each:.1f}".replace(".", ",") for each in values]
    columns = {
        "y": [row % 2 for row in rows],
        "percent": [f"{each}%" for each in comma],
        "euro": [f"{each.replace('.', ',')} €" for each in map("{:.2f}".format, values)],
        "plain": comma,
        "negative": [f"{each - 40:.2f}".replace(".", ",") for each in values],
        "pairs": [f"{10 + row % 13},{30 + row % 17}" for row in rows],
        "lists": [",".join(str(20 * step + row // 7**step % 7) for step in range(1 + row % 3)) for row in rows],
        "short": [f"{1 + row % 9},{11 + row % 7}" if row % 5 else str(1 + row % 9) for row in rows],
        "z": values,
    }
    table = pl.DataFrame(columns)
    path = tmp_path / f"t.{suffix}"
    table.write_csv(path) if suffix == "csv" else table.write_parquet(path)
    found = inspect_file(path, label="y")
    kinds = {each.name: each.kind for each in found.schema.features}
    numbers = ("percent", "euro", "plain", "negative")
    assert {name: kinds.pop(name) for name in (*numbers, "z")} == dict.fromkeys((*numbers, "z"), "dense")
    assert kinds == {"pairs": "multi_hot", "lists": "multi_hot", "short": "multi_hot"}
    written = WrittenColumns(files=found.numbers).with_own(found.schema.numbers)
    assert written.of("plain").cast(table["plain"]).to_list() == [round(each, 1) for each in values]
    assert any("'plain': '1,0' is read as 1; where it is a list of the ids 1 and 0" in each for each in found.warnings)
    assert any("'short': '2,12' is read as text or as two ids" in each for each in found.warnings)
    assert not any(each.startswith("'lists'") for each in found.warnings)
    marks = found.numbers
    config = DataConfig(train=(str(path),), decimal=marks.decimal, thousands=marks.thousands, signs=marks.signs)
    (chunk,) = config.source(config.train).frames(columns=[*numbers, "z"], numbers=[*numbers, "z"])
    chunk = replace(chunk, number_columns=found.schema.numbers)
    schema = Schema(features=tuple(Dense(name=name) for name in (*numbers, "z")), numbers=found.schema.numbers)
    read = parse_chunk(schema, chunk, bad_rows=BadRows()).features
    assert np.asarray(read["percent"]) == pytest.approx([each / 100 for each in values], rel=1e-6)
    assert np.asarray(read["euro"]) == pytest.approx(values, rel=1e-6)
    assert np.asarray(read["negative"]) == pytest.approx([each - 40 for each in values], rel=1e-6)
    assert np.asarray(read["z"]) == pytest.approx(values, rel=1e-6)


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
