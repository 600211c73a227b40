"""Slices: the metrics of one evaluation once more, for parts of the rows.

A mean hides who pays for it: a model may be good for users it knows and useless for new ones. A column of the raw
files (or a feature, by its name) divides the rows:

    known, unknown, missing     ids of a categorical feature with a vocabulary, as training saw them
    a value each                of the `top` most frequent values that have `min_rows` rows
    others                      the rows of all other values together

Metrics of a slice are exact: those of a file that holds its rows and no others (GAUC and ranking metrics too).

On many ranks every rank reads all raw rows before it takes its share, so each gives every value the same number in
order of appearance, and counts it; only the numbers are gathered beside the scores, never the texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa
from jaxtyping import Int64
from numpy.typing import NDArray
from torch import Tensor

from ziggurat.data.encoded.records import ROW_COLUMN
from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.preprocess.values.cells import MissingValues, canonical_text
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.errors import ConfigError
from ziggurat.features.schema import MISSING_ROW, UNKNOWN_ROW, column_of, table_of

MISSING = "(missing)"
_STATES = ("known", "unknown", "missing")


@dataclass(frozen=True, kw_only=True)
class SliceConfig:
    """Settings of what to slice by.

    Args:
        columns: names of features, or of other columns of the raw files.
        top: values of a column that get a slice of their own, the most frequent ones.
        min_rows: rows that such a value must have.
    """

    columns: tuple[str, ...] = ()
    top: int = 10
    min_rows: int = 100


class Slicer:
    """Numbers the values of the columns while rows are read, and names the slices at the end.

    Args:
        config: what to slice by.
        preprocessing: of the run.

    Raises:
        ConfigError: a column is named twice, or a count is not positive.
    """

    def __init__(self, config: SliceConfig, *, preprocessing: Preprocessing) -> None:
        if len(set(config.columns)) < len(config.columns) or min(config.top, config.min_rows) < 1:
            raise ConfigError(
                expected="different columns, and positive counts",
                found=f"columns {', '.join(config.columns)}, top {config.top}, min_rows {config.min_rows}",
                where="slices",
                ways_out="--slices user_id,hour",
            )
        features = {feature.name: feature for feature in preprocessing.schema.features}
        self.config = config
        self._missing = MissingValues.of(preprocessing.schema.missing_texts).texts | {""}
        self._column = {name: column_of(features[name]) if name in features else name for name in config.columns}
        self._with_vocabulary = [
            name
            for name in config.columns
            if (feature := features.get(name)) is not None
            and feature.is_id
            and table_of(feature) in preprocessing.vocabularies
        ]
        self._number_of: dict[str, dict[str, int]] = {name: {} for name in config.columns}
        self._counts: dict[str, NDArray[np.int64]] = {name: np.zeros(0, np.int64) for name in config.columns}
        self._state_counts = {name: np.zeros(len(_STATES), np.int64) for name in self._with_vocabulary}
        self._pieces: list[NDArray[np.int64]] = []

    @property
    def raw_columns(self) -> tuple[str, ...]:
        """The columns of the raw files that are read."""
        return tuple(self._column.values())

    def add(self, chunk: RawChunk, encoded: pa.Table, *, own: Int64[Tensor, " N"]) -> None:
        """Number the values of a chunk.

        Args:
            chunk: raw rows.
            encoded: those of them that are usable.
            own: rows of `encoded` that this rank scores, by their number in the data (`Batch.row_ids`).
        """
        rows = encoded.column(ROW_COLUMN).to_numpy()
        # Bad rows are missing from `encoded`: each row is found in the chunk by its number.
        places = np.searchsorted(chunk.global_rows, rows)
        columns = [self._values(name, chunk.column(self._column[name]))[places] for name in self.config.columns]
        for name, numbers in zip(self.config.columns, columns, strict=True):
            counts = np.bincount(numbers, minlength=len(self._number_of[name]))
            # Values that this chunk showed first have no counts yet; those before keep their places.
            counts[: self._counts[name].size] += self._counts[name]
            self._counts[name] = counts
        for name in self._with_vocabulary:
            looked_up = encoded.column(name).to_numpy()
            states = np.where(looked_up == UNKNOWN_ROW, 1, np.where(looked_up == MISSING_ROW, 2, 0))
            self._state_counts[name] += np.bincount(states, minlength=len(_STATES))
            columns.append(states)
        # All rows were counted above; kept are those that this rank scores.
        self._pieces.append(np.stack(columns, axis=1)[np.searchsorted(rows, own.numpy())].astype(np.int64))

    def numbers(self) -> NDArray[np.int64]:
        """(rows of this rank, columns) the number of each row's value."""
        width = len(self.config.columns) + len(self._with_vocabulary)
        return np.concatenate([np.empty((0, width), np.int64), *self._pieces])

    def slices(self) -> Iterator[tuple[str, str, int, int, list[int]]]:
        """(column, value, rows of all ranks, column of `numbers`, numbers that belong), the same on all ranks."""
        for index, name in enumerate(self.config.columns):
            if name in self._with_vocabulary:
                place = len(self.config.columns) + self._with_vocabulary.index(name)
                for state, count in enumerate(self._state_counts[name].tolist()):
                    if count:
                        yield name, _STATES[state], count, place, [state]
            counts = self._counts[name].tolist()
            # Equal counts by text, so that the order of rows plays no part.
            by_count = sorted(self._number_of[name].items(), key=lambda item: (-counts[item[1]], item[0]))
            own = [item for item in by_count if counts[item[1]] >= self.config.min_rows][: self.config.top]
            for value, number in own:
                yield name, f"= {value}", counts[number], index, [number]
            others = [number for _, number in by_count[len(own) :] if counts[number]]
            if others:
                plural = "s" if len(others) > 1 else ""
                label = f"others ({len(others):,} value{plural})"
                yield name, label, sum(counts[number] for number in others), index, others

    def _values(self, name: str, column: pl.Series) -> NDArray[np.int64]:
        """The number of each row's value; new values get the next ones."""
        if column.dtype.is_nested():
            raise ConfigError(
                expected="a column with one value a row",
                found=f"lists, in column {self._column[name]!r}",
                where="slices",
                ways_out="slice by another column",
            )
        # Texts are made once for each different value, which are far fewer than rows.
        unique = column.unique(maintain_order=True)
        number_of = self._number_of[name]
        found = canonical_text(unique)  # as ids: whatever type a file has for the column
        texts = [self._text(value) for value in (unique if found is None else found).to_list()]
        numbers = np.array([number_of.setdefault(text, len(number_of)) for text in texts], dtype=np.int64)
        places = pl.DataFrame({"value": column}).join(
            pl.DataFrame({"value": unique, "number": numbers}),
            on="value",
            how="left",
            nulls_equal=True,
            maintain_order="left",
        )
        return places["number"].to_numpy()

    def _text(self, value: object) -> str:
        return MISSING if value is None or str(value) in self._missing else str(value)
