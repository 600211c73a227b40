"""Vectors that are written as text, as in CSV: "[0.1, 0.2]", "0.1 0.2", "0.1|0.2", "0.1;0.2".

One mark divides a text, so that no comma before a fraction is taken for one between numbers: where a comma with a space
behind it occurs, a comma without one divides nothing, and "0,5 0,2" is no vector of four numbers but an error.
"""

from __future__ import annotations

import polars as pl

_IN_BRACKETS = r"(?s)^[\[(]\s*(.*?)\s*[\])]$"
_DIVIDER = "|"


def vectors_of_texts(series: pl.Series) -> pl.Series:
    """Read texts as lists of Float64: null where a text is null or blank, a null element where a part is no number."""
    text = pl.col("text").str.strip_chars().str.replace(_IN_BRACKETS, "${1}")
    divided = (
        pl.when(text.str.contains(r"[;|]"))
        .then(text.str.replace_all(r"\s*[;|]\s*", _DIVIDER))
        .when(text.str.contains(r",\s"))
        .then(text.str.replace_all(r"\s*,\s+", _DIVIDER))
        .when(text.str.contains(r"\s"))
        .then(text.str.replace_all(r"\s+", _DIVIDER))
        .otherwise(text.str.replace_all(",", _DIVIDER, literal=True))
    )
    numbers = divided.str.split(_DIVIDER).cast(pl.List(pl.Float64), strict=False)
    blank = pl.col("text").str.strip_chars() == ""
    found = pl.when(blank).then(None).when(text == "").then(pl.lit([], dtype=pl.List(pl.Float64))).otherwise(numbers)
    return pl.DataFrame({"text": series}).select(found).to_series().alias(series.name)


def length_of_vectors(texts: pl.Series) -> int:
    """Return of how many numbers each text is, if all are vectors of fractions of one length; else 0.

    Two numbers without brackets may be anything, a place or a range; whole numbers are ids.
    """
    lists = vectors_of_texts(texts)
    lengths = lists.list.len()
    if not len(lists) or lists.null_count() or lengths.n_unique() != 1 or lists.explode().null_count():
        return 0
    length = int(lengths[0])
    in_brackets = bool(texts.str.contains(_IN_BRACKETS).all())
    has_fractions = bool(texts.str.contains(r"\d\.\d|\de-?\d").any())
    return length if has_fractions and length >= (2 if in_brackets else 3) else 0
