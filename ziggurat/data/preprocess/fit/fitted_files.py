"""FittedFiles: what was learnt from the shards, on disk, and the rows that are encoded by it.

    shard-0/state.arrow ─┐              ┌─► preprocessing/     vocabularies and statistics
    shard-1/state.arrow ─┴─► merge once ┴─► fitted/rows-0.npy  which row each number of an id became, shard by shard

A single shard needs no state: what it has learnt is what there is to learn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from jaxtyping import Int32

from ziggurat.config import JSON
from ziggurat.data.preprocess.fit.draft import DraftFacts, read_draft
from ziggurat.data.preprocess.fit.fit_state import FitState, read_state, write_state
from ziggurat.data.preprocess.fit.fitter import Fitted, Fitter, vocabulary_tables
from ziggurat.data.preprocess.fit.shard_fit import draft_of
from ziggurat.data.preprocess.preprocessing import FeatureCounters, Preprocessing
from ziggurat.data.preprocess.preprocessing_io import load_preprocessing, save_preprocessing
from ziggurat.data.preprocess.values.numeric import NumericState
from ziggurat.features.schema import Schema

_STATE_FILE = "state.arrow"


class FittedFiles:
    """Results learnt from shards.

    Args:
        work: folder of the work.
        schema: of the rows.
        out: folder of the preprocessing.
        given_numbers: statistics of dense features to keep in place of those that were learnt.
    """

    def __init__(
        self, work: Path, *, schema: Schema, out: Path, given_numbers: Mapping[str, NumericState] | None = None
    ) -> None:
        self._work = work
        self._schema = schema
        self._out = out
        self._given_numbers = given_numbers
        self._preprocessing: Preprocessing | None = None
        self._rows_of: tuple[int, dict[str, np.ndarray]] | None = None  # of the shard that was asked for last
        self._reading = threading.Lock()

    def keep_only(self, fitter: Fitter) -> None:
        """Keep what the only shard has taught."""
        self._keep(fitter.finish(), numbers=None)

    def keep_state(self, fitter: Fitter, *, folder: Path, first_row: int, num_rows: int) -> None:
        """Keep what one of several shards has taught, in its folder."""
        state = FitState(schema=self._schema, first_row=first_row, num_rows=num_rows, parts=fitter.parts())
        write_state(state, folder / _STATE_FILE)

    def merge(self, shards: Sequence[Path]) -> dict[str, JSON]:
        """Merge the states of all shards, in the order of their rows."""
        fitter = Fitter(self._schema)
        numbers = [fitter.absorb(read_state(shard / _STATE_FILE, schema=self._schema).parts) for shard in shards]
        self._keep(fitter.finish(), numbers=numbers)
        return {}

    def files(self, num_shards: int) -> list[Path]:
        """Return what is kept of so many shards together."""
        return [self._out, *(self._rows_file(shard) for shard in range(num_shards))]

    def preprocessing(self) -> Preprocessing:
        """Return the preprocessing learnt from all shards together."""
        if self._preprocessing is None:
            self._preprocessing = load_preprocessing(self._out)
        return self._preprocessing

    def row_of_number(self, shard: int) -> dict[str, Int32[np.ndarray, " K"]]:
        """Return by table the row that each number of an id in the training draft of a shard became."""
        with self._reading:
            if self._rows_of is None or self._rows_of[0] != shard:
                with np.load(self._rows_file(shard), allow_pickle=False) as found:
                    tables = enumerate(vocabulary_tables(self._schema))
                    self._rows_of = (shard, {name: found[f"{index}"] for index, name in tables})
            return self._rows_of[1]

    def _keep(self, fitted: Fitted, *, numbers: Sequence[Mapping[str, np.ndarray]] | None) -> None:
        self._out.parent.mkdir(parents=True, exist_ok=True)
        kept = fitted.numbers if self._given_numbers is None else self._given_numbers
        self._preprocessing = Preprocessing(self._schema, vocabularies=fitted.vocabularies, numbers=kept)
        save_preprocessing(self._preprocessing, self._out)
        tables = vocabulary_tables(self._schema)
        for shard, of_table in enumerate([None] if numbers is None else numbers):
            rows = {
                f"{index}": fitted.row_of_number[name]
                if of_table is None
                else fitted.row_of_number[name][of_table[name]]
                for index, name in enumerate(tables)
            }
            np.savez(self._rows_file(shard), **rows)  # pyright: ignore[reportArgumentType]

    def _rows_file(self, shard: int) -> Path:
        return self._work / f"fitted-{shard:04}.npz"


class DraftEncoder:
    """Encodes the drafts of all shards of one split, any rows of it.

    Args:
        fitted: what was learnt.
        drafts: folder and facts of the draft of each shard, in the order of the rows.
        split: number of the split; ids of the first one's drafts are numbered.
        count: called with the number of rows when some were encoded.
    """

    def __init__(
        self,
        fitted: FittedFiles,
        *,
        drafts: Sequence[tuple[Path, DraftFacts]],
        split: int,
        count: Callable[[int], None],
    ) -> None:
        self._fitted = fitted
        self._drafts = drafts
        self._split = split
        self._count = count
        known = fitted.preprocessing()
        # One of its own: it counts what these rows hold.
        self._encoder = Preprocessing(known.schema, vocabularies=known.vocabularies, numbers=known.numbers)

    @property
    def counters(self) -> dict[str, FeatureCounters]:
        """Counters of what the rows so far held."""
        return self._encoder.counters

    def tables(self, rows: range) -> Iterator[pa.Table]:
        """Rows of the split, encoded; as many as there are."""
        begin = 0
        for shard, (folder, facts) in enumerate(self._drafts):
            first = max(rows.start - begin, 0)
            last = min(rows.stop - begin, facts.num_rows)
            begin += facts.num_rows
            if first >= last:
                continue
            row_of_number = self._fitted.row_of_number(shard) if self._split == 0 else None
            for parsed in read_draft(draft_of(folder, self._split), facts, first=first, last=last):
                table = self._encoder.encode_parsed(parsed, row_of_number=row_of_number)
                self._count(table.num_rows)
                yield table
