"""Types of a catalogue that was read from text: what the schema says, then what every value is."""

from datetime import date

import polars as pl

from ziggurat.data.raw.written_numbers import DecimalMark, WrittenColumns, WrittenNumbers
from ziggurat.features.schema import Categorical, Dense, MultiHot, Schema
from ziggurat.runs.export.typed_columns import typed_columns

SCHEMA = Schema(features=(Categorical(name="sku"), MultiHot(name="tags", separator="|"), Dense(name="price")))
TEXT = pl.DataFrame(
    {
        "sku": ["1021.0", "1022", "a"],
        "tags": ["sale|kids", "", None],
        "price": ["3.5", None, "7"],
        "launched": ["2020-01-31", None, "2021-02-01"],
        "weight": ["1", "2.5", ""],
        "code": ["0012", "13", "14"],
        "brand": ["Ä", "7", None],
    }
)


def test_columns_get_the_types_of_the_schema_then_of_their_values():
    typed = typed_columns(TEXT, schemas=[SCHEMA], is_text=True, written=WrittenColumns())
    assert typed["sku"].to_list() == ["1021", "1022", "a"]
    assert typed["tags"].to_list() == [["sale", "kids"], None, None]
    assert typed["price"].to_list() == [3.5, None, 7.0]
    assert typed["launched"].to_list() == [date(2020, 1, 31), None, date(2021, 2, 1)]
    assert typed["weight"].to_list() == [1.0, 2.5, None]
    assert typed["code"].to_list() == ["0012", "13", "14"]
    assert typed["brand"].to_list() == ["Ä", "7", None]


def test_further_columns_of_typed_files_stay_what_they_are():
    typed = typed_columns(TEXT, schemas=[SCHEMA], is_text=False, written=WrittenColumns())
    assert typed.schema == {**TEXT.schema, "tags": pl.List(pl.String), "price": pl.Float64}


def test_numbers_with_a_comma():
    frame = pl.DataFrame({"price": ["3,5", "1,25"]})
    written = WrittenColumns(files=WrittenNumbers(decimal=DecimalMark.COMMA))
    typed = typed_columns(frame, schemas=[SCHEMA], is_text=True, written=written)
    assert typed["price"].to_list() == [3.5, 1.25]
