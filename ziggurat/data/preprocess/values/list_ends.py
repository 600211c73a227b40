"""Lists as other programs fill them up: ids of nothing at their ends, and spaces around what divides them.

    pad_sequences, DeepCTR    [9, 12, 0, 0, 0]      0 is no item: a model would read three of them as history
    people                    Drama | Comedy        "Drama " and "Drama" would be two ids

Nothing fails with either, and what is learned is worse. So a schema says `padding = "0"` or `spaces = "strip"` for a
list; `data inspect` writes it where the lists show it, and training says it of a schema that does not.
"""

from __future__ import annotations

import numpy as np
import polars as pl
from jaxtyping import Int64

from ziggurat.data.raw.chunk import RawChunk
from ziggurat.features.schema import Schema, Spaces, column_of

_PADDINGS = ("0", "-1", "<pad>", "<PAD>", "[PAD]", "pad", "PAD")
_MIN_PADDED = 0.2  # share of lists that end, or begin, with padding
_MAX_LOOKED_AT = 5000


def without_padding(
    values: pl.Series, lengths: Int64[np.ndarray, " N"], *, padding: str
) -> tuple[pl.Series, Int64[np.ndarray, " N"]]:
    """Take padding away from the ends of lists; inside of a list it is an id.

    Args:
        values: of all lists, one after the other.
        lengths: of each list.
        padding: the canonical text of the id that fills up.

    Returns:
        Values and lengths of what is left.
    """
    is_id = (values != padding).fill_null(True).to_numpy()
    if is_id.all():
        return values, lengths
    owner = np.repeat(np.arange(len(lengths)), lengths)
    places = np.flatnonzero(is_id)
    first = np.full(len(lengths), len(values), dtype=np.int64)
    last = np.full(len(lengths), -1, dtype=np.int64)
    np.minimum.at(first, owner[places], places)
    np.maximum.at(last, owner[places], places)
    every = np.arange(len(values))
    keep = (every >= first[owner]) & (every <= last[owner])
    return values.filter(pl.Series(keep)), np.bincount(owner[keep], minlength=len(lengths)).astype(np.int64)


def find_padding(lists: pl.Series) -> str:
    """Return the id that fills all lists up to one length, or "": it stands at their ends alone, in many of them.

    Args:
        lists: of ids, of any type.
    """
    rows = lists.drop_nulls().head(_MAX_LOOKED_AT).cast(pl.List(pl.String), strict=False).to_list()
    if len(rows) < 2 or len({len(row) for row in rows}) > 1 or len(rows[0]) < 2:
        return ""
    for padding in _PADDINGS:
        padded = sum(row[0] == padding or row[-1] == padding for row in rows)
        if padded < _MIN_PADDED * len(rows):
            continue
        stripped, lengths = without_padding(
            pl.Series([each for row in rows for each in row], dtype=pl.String),
            np.array([len(row) for row in rows], dtype=np.int64),
            padding=padding,
        )
        # An id of its own would stand among others, too, and not fill unlike lists up to the same length.
        if not (stripped == padding).any() and len(np.unique(lengths)) > 1:
            return padding
    return ""


def has_spaces(lists: pl.Series) -> bool:
    """Return whether an id in lists of texts begins or ends with a space."""
    elements = lists.drop_nulls().explode()
    return elements.dtype == pl.String and bool(elements.str.contains(r"^\s+\S|\S\s+$").any())


def doubts_about_lists(schema: Schema, chunk: RawChunk) -> list[str]:
    """Say which lists of a schema are padded, or have spaces in their ids, where the schema does not say so.

    Args:
        schema: features.
        chunk: the first rows.
    """
    notes: list[str] = []
    for feature in schema.features:
        name = column_of(feature)
        lists = feature.id_lists
        if lists is None or not chunk.has_column(name):
            continue
        series = lists.divided(chunk.column(name))
        if not isinstance(series.dtype, pl.List) or series.dtype.inner.is_nested():
            continue
        padding = "" if lists.padding else find_padding(series)
        if padding:
            notes.append(
                f"the lists of feature {feature.name!r} are filled up with {padding!r}, which is learned as an id of "
                f'theirs; padding = "{padding}" in the schema takes it away'
            )
        if lists.spaces is Spaces.KEEP and has_spaces(series):
            notes.append(
                f"ids in the lists of feature {feature.name!r} begin or end with spaces, and are others than the same "
                'ids without; spaces = "strip" in the schema takes the spaces away'
            )
    return notes
