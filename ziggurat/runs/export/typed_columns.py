"""typed_columns: the columns of a catalogue with the types that the schema, or their values, give them.

Filters and value models ask for items by numbers, dates and elements of lists; a text file knows texts alone.

    feature of the schema       categorical  the canonical text of the id (1021.0 is 1021)
                                multi_hot, sequence with a separator  a list
                                dense        a number
    further columns of text     a number if every value is one (00123 is none), a date if every one is (ISO's form)

Models read such a catalogue as they read the file: raw types do not matter to them (`data/preprocess/values/cells.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from ziggurat.data.preprocess.values.cells import canonical_text
from ziggurat.data.raw.written_numbers import WrittenColumns, WrittenNumbers
from ziggurat.features.schema import Feature, Schema, column_of
from ziggurat.ops.written_decimals import with_decimals

_NOT_PLAIN = r"^\s*[+-]?0[0-9]"  # an id with leading zeros, no number


def typed_columns(
    frame: pl.DataFrame, *, schemas: Sequence[Schema], is_text: bool, written: WrittenColumns
) -> pl.DataFrame:
    """The same rows, with columns of texts that are numbers, dates or lists as such.

    Args:
        frame: the catalogue, raw.
        schemas: of the models that read it; the first one that has a feature of a column decides.
        is_text: it comes from a text file, so that types of further columns are guessed.
        written: how numbers in text are written, by column.
    """
    features: dict[str, Feature] = {}
    for schema in schemas:
        for feature in schema.features:
            features.setdefault(column_of(feature), feature)
    columns = [
        _typed(series, features.get(series.name), is_text=is_text, written=written.of(series.name))
        for series in frame.get_columns()
    ]
    return pl.DataFrame(columns)


def _typed(series: pl.Series, feature: Feature | None, *, is_text: bool, written: WrittenNumbers) -> pl.Series:
    if series.dtype != pl.String:
        return with_decimals(series)
    if feature is not None and feature.is_id:
        text = canonical_text(series)
        return series if text is None else text
    if feature is not None and feature.id_lists is not None:
        return feature.id_lists.divided(series)
    if feature is not None and feature.reads_numbers:
        return _numbers(series, written=written)
    if feature is None and is_text:
        numbers = series if series.str.contains(_NOT_PLAIN).any() else _numbers(series, written=written)
        return _dates(series) if numbers.dtype == pl.String else numbers
    return series


def _numbers(series: pl.Series, *, written: WrittenNumbers) -> pl.Series:
    texts = series.set(series == "", None).str.strip_chars()
    numbers = written.cast(texts)
    return numbers if numbers.null_count() == texts.null_count() < len(series) else series


def _dates(series: pl.Series) -> pl.Series:
    texts = series.set(series == "", None)
    dates = texts.str.to_date("%Y-%m-%d", strict=False)
    return dates if dates.null_count() == texts.null_count() < len(series) else series
