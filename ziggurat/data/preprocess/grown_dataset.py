"""GrownDataset: encoded data whose numbers of ids are read as the rows that a checkpoint gave them.

Training decides itself which row an id has, and reads encoded data as it is. Whoever reads the data of a finished run
(evaluation of its own splits, importance, probes) wants the rows that the run ended with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import numpy as np
import pyarrow as pa

from ziggurat.data.encoded.loader import Dataset
from ziggurat.data.preprocess.values.grown import GrownVocabulary

D = TypeVar("D", bound="Dataset | None")


class GrownDataset:
    """A data set with rows in place of numbers; everything else is that of the data set.

    Args:
        dataset: encoded data.
        grown: by table, what training has made of growing vocabularies.
    """

    def __init__(self, dataset: Dataset, grown: Mapping[str, GrownVocabulary]) -> None:
        self._dataset = dataset
        self._grown = grown
        self.inputs = dataset.inputs
        self.num_rows = dataset.num_rows
        self.with_labels = dataset.with_labels
        self.group_sizes = dataset.group_sizes
        self.row_sum = dataset.row_sum
        self.sessions = dataset.sessions

    def read_group(self, index: int) -> pa.Table:
        """The encoded rows of one group."""
        table = self._dataset.read_group(index).combine_chunks()
        for spec in self._dataset.inputs.lookups:
            if spec.table not in self._grown:
                continue
            place = table.column_names.index(spec.name)
            column = table.column(place)
            numbers = column.chunk(0) if column.num_chunks else pa.array([], type=column.type)
            table = table.set_column(place, table.schema.field(place), self._rows(spec.table, numbers))
        return table

    def _rows(self, table: str, numbers: pa.Array) -> pa.Array:
        vocabulary = self._grown[table]
        if not pa.types.is_list(numbers.type):
            return pa.array(vocabulary.rows(np.asarray(numbers)))
        rows = pa.array(vocabulary.rows(np.asarray(numbers.values)))
        return pa.ListArray.from_arrays(numbers.offsets, rows, type=numbers.type)


def with_grown_rows(dataset: D, grown: Mapping[str, GrownVocabulary]) -> D | GrownDataset:
    """The data set as it is where no vocabulary grew, else a `GrownDataset`."""
    return GrownDataset(dataset, grown) if grown and dataset is not None else dataset
