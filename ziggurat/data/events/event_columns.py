"""Columns of events as Arrow arrays: the values of any events, in any order."""

from __future__ import annotations

import numpy as np
import polars as pl
import pyarrow as pa


class EventColumn:
    """A column of categories as numbers and texts, whatever else the process has categories of.

    Args:
        series: the values of all events.
    """

    def __init__(self, series: pl.Series) -> None:
        missing = series.is_null().to_numpy()
        _, firsts, codes = np.unique(
            series.to_physical().drop_nulls().to_numpy(), return_index=True, return_inverse=True
        )
        self.codes = np.zeros(len(series), dtype=np.int32)
        self.codes[~missing] = codes
        self._missing = missing if missing.any() else None
        self.texts = pa.array(series.drop_nulls().gather(firsts).cast(pl.String).to_list(), pa.large_string())

    def at(self, places: np.ndarray, *, hidden: bool = False) -> pa.DictionaryArray:
        """The values of these events; none where they are hidden."""
        if hidden:
            return pa.DictionaryArray.from_arrays(pa.nulls(len(places), pa.int32()), self.texts)
        mask = None if self._missing is None else self._missing[places]
        return pa.DictionaryArray.from_arrays(pa.array(self.codes[places], mask=mask), self.texts)

    def places_of(self, text: str) -> np.ndarray:
        """The events with this value, rising."""
        code = self.texts.to_pylist().index(text) if text in self.texts.to_pylist() else -1
        found = self.codes == code
        return np.flatnonzero(found if self._missing is None else found & ~self._missing)


def runs(begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers from each begin to its end, one run after the other, and where each run begins."""
    lengths = ends - begins
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return np.arange(offsets[-1]) + np.repeat(begins - offsets[:-1], lengths), offsets
