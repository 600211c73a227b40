"""Find rows of an evaluation that the run was trained on, by what they hold.

    share  = rows of the evaluation that equal a training row / rows that were looked at
    chance = the same of the run's own validation rows, which no step has trained

Rows are compared as they are encoded: features, labels, weight and group; neither their order nor the kind of file
matters. Few ids and no group make rows equal that are not the same, so `chance` stands beside the share, and nothing is
said unless the share is well above it.

Cost: 16,384 rows of the evaluation are looked at, spread over its chunks, and the run's encoded training rows are read
once, up to 4 million of them. They are looked up where the run's data is still prepared; raw files are not read again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from ziggurat.cache import cache_folder
from ziggurat.data.encoded.records import ROW_COLUMN, SESSION_COLUMN
from ziggurat.data.preprocess.prepare import find_prepared
from ziggurat.data.preprocess.prepared import PreparedData
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs.quality.below_chance import some_rows

_LOOKED_AT = 16_384  # rows in all, which give a share to within half a per cent
_OF_A_CHUNK = 2_048  # a file may be sorted, so that no chunk of it is to speak for all
_MAX_TRAINING_ROWS = 4_000_000  # beyond, they are not read, so that the comparison stays short
_WELL_ABOVE = 0.05


@dataclass(frozen=True, kw_only=True)
class TrainedShare:
    """The share of an evaluation's rows that equal training rows.

    Args:
        share: of the rows that were looked at.
        chance: of the run's own validation rows; None where it has none.
        num_rows: rows that were looked at.
    """

    share: float
    chance: float | None
    num_rows: int

    @property
    def is_notable(self) -> bool:
        """Return whether more rows are equal than chance makes equal."""
        return self.share > (self.chance or 0.0) + _WELL_ABOVE

    def text(self) -> str:
        """Say how many rows were trained on, and how many would be by chance."""
        beside = "" if self.chance is None else f"; of its own validation rows {self.chance:.1%} do by chance"
        return (
            f"{self.share:.1%} of these rows were trained on: they equal training rows of the run in features, labels "
            f"and group ({self.num_rows:,} looked at{beside}); metrics of such rows flatter"
        )


class SeenRows:
    """Keeps a sample of the encoded rows that pass, to be compared with those of training afterwards."""

    def __init__(self) -> None:
        self._hashes: list[NDArray[np.uint64]] = []
        self._num_rows = 0

    def watching(self, chunks: Iterable[tuple[RawChunk, pa.Table]]) -> Iterator[tuple[RawChunk, pa.Table]]:
        """Pass chunks on, keeping what some of their rows hold."""
        for chunk, table in chunks:
            wanted = min(_OF_A_CHUNK, _LOOKED_AT - self._num_rows, len(table))
            if wanted > 0:
                places = np.unique(np.linspace(0, len(table) - 1, wanted).astype(np.int64))
                self._hashes.append(_hashes(table.take(places)))
                self._num_rows += len(places)
            yield chunk, table

    def compared_with(self, config: RunConfig) -> TrainedShare | None:
        """Compare the rows with those that a run was trained on; None where these are not at hand.

        Args:
            config: of the run.
        """
        prepared = _prepared_rows(config)
        if prepared is None or not self._num_rows or prepared.train.num_rows > _MAX_TRAINING_ROWS:
            return None
        train = prepared.train
        trained = [_hashes(train.read_group(index)) for index in range(len(train.group_sizes))]
        # The empty part is for data without a group of rows: nothing to join is an error.
        known = np.unique(np.concatenate([*trained, np.empty(0, np.uint64)]))
        chance = None
        if prepared.valid is not None and prepared.valid.num_rows:
            chance = float(np.isin(_hashes(some_rows(prepared.valid)), known).mean())
        share = float(np.isin(np.concatenate(self._hashes), known).mean())
        return TrainedShare(share=share, chance=chance, num_rows=self._num_rows)


def _prepared_rows(config: RunConfig) -> PreparedData | None:
    """The run's encoded rows, where they are files of the user's own that were prepared and are there still."""
    # Ids that come and go have other numbers now; rows of events are questions, which no file holds.
    if config.dataset.name or config.table_schema.events is not None or not config.data.train:
        return None
    prepared = find_prepared(config.data, schema=config.table_schema, folder=cache_folder() / "prepared")
    return None if prepared is None or prepared.inputs.numbered else prepared


def _hashes(table: pa.Table) -> NDArray[np.uint64]:
    """(rows,) a hash of what each encoded row holds, but for where it stands."""
    # A hash depends on the order of columns, and files may have them in any.
    held = [name for name in sorted(table.column_names) if name not in (ROW_COLUMN, SESSION_COLUMN)]
    return pl.DataFrame(table.select(held)).hash_rows(seed=0).to_numpy()
