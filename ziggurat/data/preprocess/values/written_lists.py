"""Lists that a program wrote as text, `['a', 'b']`: split at a separator alone, their ids would be `['a'` and ` 'b']`.

Nothing would fail: each id would have a row, and the one at the start of a list another than the same one in its
middle. So a column all of whose texts are in brackets, with a quote or a separator inside one of them, is refused.
"""

from __future__ import annotations

import polars as pl

from ziggurat.data.raw.chunk import RawChunk
from ziggurat.errors import SchemaError

_IN_BRACKETS = r"^\s*\[[^\[\]]*\]\s*$"


def refuse_brackets(series: pl.Series, chunk: RawChunk, *, role: str, separator: str) -> None:
    """Refuse texts that are whole lists with their brackets; ids that have brackets of their own pass.

    Args:
        series: texts that are to be split.
        chunk: that they are of.
        role: what the column is for, in errors.
        separator: between ids.

    Raises:
        SchemaError: all texts are in one pair of brackets, and at least one has several ids, or ids in quotes.
    """
    texts = series.filter((series != "").fill_null(False))
    if not texts.len() or not texts.head(1).str.contains(_IN_BRACKETS).all():
        return  # nearly always
    inner = texts.str.strip_chars(" \t[]")
    is_list = (inner.str.contains(separator, literal=True) | inner.str.contains("^['\"]")) & (inner != "")
    if not texts.str.contains(_IN_BRACKETS).all() or not is_list.any():
        return
    raise SchemaError(
        expected=f"ids with {separator!r} between them and nothing around them, for {role}",
        found=f"lists with their brackets, for example {texts.filter(is_list)[0][:100]!r}: ids would begin with '['",
        where=f"{chunk.path}, column {series.name!r}",
        ways_out=(
            'write the column without brackets and quotes: a|b, with separator = "|" in the schema',
            "write Parquet, in which a column holds lists, and leave `separator` out of the schema",
        ),
    )
