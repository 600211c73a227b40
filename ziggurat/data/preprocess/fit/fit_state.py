"""FitState: what some rows have taught; states of parts of the data merge into what all of it would have taught.

    shard 0 ─► fit ─► state ─┐
    shard 1 ─► fit ─► state ─┼─► merge ─► state ─► finish ─► Preprocessing, equal bit for bit to one fit of all rows
    shard 2 ─► fit ─► state ─┘

Counts of ids add up, sums of numbers are exact (`ops/exact_sums.py`), and quantiles come from the rows whose numbers
hash lowest: so states may be merged in any order and grouping, and each row must be in one of them. Nothing is cut off
before the end: `min_count` and `max_rows` look at the counts of all rows. Ids seen equally often are in the order of
their UTF-8 bytes. (Should two ids have the same 64-bit hash, the text of the part with the lowest row number is kept.)

A state travels and lies as a row of an Arrow table (`to_table`, `from_table`) or as bytes. Its size is that of the
different ids: about 25 bytes each, and their texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa

from ziggurat.config import JSON
from ziggurat.data.preprocess.fit.fitter import FittedParts, Fitter
from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.preprocess.values.numeric import NumericParts
from ziggurat.data.preprocess.values.vocabulary import CountedIds
from ziggurat.errors import ConfigError, DataError
from ziggurat.features.schema import Schema
from ziggurat.files import Format
from ziggurat.ops.exact_sums import ExactSums

_HEAD = "ziggurat.fit_state"
HEAD = Format(
    name=_HEAD, what="a fitted state", ways_out=("fit the part again", "use one version of ziggurat on all machines")
)


@dataclass(frozen=True, kw_only=True)
class FitState:
    """State learnt from some rows; made by `fit_table`, merged by `merge_states`.

    Args:
        schema: of the rows.
        first_row: the lowest number of a row.
        num_rows: rows that were learnt from.
        parts: counts, sums and samples.
    """

    schema: Schema
    first_row: int
    num_rows: int
    parts: FittedParts

    def __reduce__(self) -> tuple[object, ...]:
        return _one_state, (self.to_table(), self.schema)

    def finish(self) -> Preprocessing:
        """The preprocessing that all rows of the state have taught.

        Raises:
            DataError: there was no row.
        """
        if not self.num_rows:
            raise DataError(
                expected="at least one row to fit on",
                found="none",
                where="fitted state",
                ways_out=("fit on parts that have rows", "look at the quarantine, if there is one"),
            )
        fitter = Fitter(self.schema)
        fitter.absorb(self.parts)
        fitted = fitter.finish()
        return Preprocessing(self.schema, vocabularies=fitted.vocabularies, numbers=fitted.numbers)

    def to_table(self) -> pa.Table:
        """The state as a table of one row; tables of several states may be concatenated."""
        sums = {
            # Exact sums have more digits than readers of JSON keep of a number: as text, in hex.
            name: [f"{each.count:x}", f"{each.total:x}", f"{each.squares:x}"]
            for name, each in self.parts.numbers.sums.items()
        }
        head: dict[str, JSON] = {
            "schema": self.schema.to_state(),
            "first_row": self.first_row,
            "num_rows": self.num_rows,
            "sums": {name: list(each) for name, each in sums.items()},
        }
        columns: dict[str, pa.Array] = {"head": pa.array([HEAD.encode(head)], type=pa.binary())}
        for name, ids in self.parts.ids.items():
            columns[f"keys:{name}"] = _one_list(pa.array(ids.keys))
            columns[f"counts:{name}"] = _one_list(pa.array(ids.counts))
            columns[f"texts:{name}"] = _one_list(_large_strings(ids.texts))
        columns["sample"] = _one_list(pa.array(self.parts.numbers.sample_keys))
        for name, values in self.parts.numbers.sample.items():
            columns[f"sample:{name}"] = _one_list(pa.array(values))
        return pa.table(columns)

    def to_bytes(self) -> bytes:
        """The state as bytes, for systems whose tables have no unsigned numbers (Spark's)."""
        table = self.to_table()
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return sink.getvalue().to_pybytes()

    @staticmethod
    def from_bytes(content: bytes, *, schema: Schema) -> FitState:
        """Read what `to_bytes` made.

        Raises:
            DataError: a state that is damaged, or of another schema or version.
        """
        try:
            with pa.ipc.open_stream(content) as reader:
                (state,) = FitState.from_table(reader.read_all(), schema=schema)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise _damaged(f"{error}"[:200]) from error
        return state

    @staticmethod
    def from_table(table: pa.Table, *, schema: Schema) -> list[FitState]:
        """The states that rows of a table are.

        Args:
            table: from `to_table`, or several of those concatenated.
            schema: that the states must be of.

        Raises:
            DataError: a state is damaged, or of another schema or version.
        """
        return [_read_state(table.slice(index, 1), schema) for index in range(table.num_rows)]


def merge_states(states: Iterable[FitState]) -> FitState:
    """Merge what was learnt from the rows of all states; the order does not matter.

    Raises:
        ConfigError: there is no state, or they are of different schemas.
    """
    # Of two ids with the same hash, the text of the part with the lowest row is kept.
    ordered = sorted(states, key=lambda state: state.first_row)
    if not ordered or any(state.schema != ordered[0].schema for state in ordered):
        raise ConfigError(
            expected="at least one state, all of the same schema",
            found=f"{len(ordered)} states of {len({str(state.schema.to_state()) for state in ordered})} schemas",
            where="merge_states",
            ways_out="fit all parts with the same schema",
        )
    fitter = Fitter(ordered[0].schema)
    for state in ordered:
        fitter.absorb(state.parts)
    return FitState(
        schema=ordered[0].schema,
        first_row=ordered[0].first_row,
        num_rows=sum(state.num_rows for state in ordered),
        parts=fitter.parts(),
    )


def write_state(state: FitState, path: Path) -> None:
    """Write a state into a file of Arrow's."""
    table = state.to_table()
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def read_state(path: Path, *, schema: Schema) -> FitState:
    """Read a state that `write_state` wrote into a file.

    Raises:
        DataError: the file is damaged, or its state is of another schema.
    """
    try:
        with pa.OSFile(str(path)) as file, pa.ipc.open_file(file) as reader:
            table = reader.read_all()
    except (pa.ArrowException, OSError) as error:
        raise _damaged(f"{error}"[:200], where=str(path)) from error
    (state,) = FitState.from_table(table, schema=schema)
    return state


def _one_state(table: pa.Table, schema: Schema) -> FitState:
    return FitState.from_table(table, schema=schema)[0]


def _read_state(row: pa.Table, schema: Schema) -> FitState:
    try:
        head = HEAD.decode(row.column("head")[0].as_py(), where="fitted state")
        # Before the numbers: under another schema they would be read as something that they are not.
        if head["schema"] != schema.to_state():
            raise _damaged("one of another schema")

        def values(name: str) -> pa.Array:
            return row.column(name).combine_chunks().flatten()

        # What a state of this schema has to have: names that it lacks are a KeyError, and others are not looked for.
        empty = Fitter(schema).parts()
        ids = {
            name: CountedIds(
                texts=_series(values(f"texts:{name}")),
                keys=values(f"keys:{name}").to_numpy(),
                counts=values(f"counts:{name}").to_numpy(),
            )
            for name in empty.ids
        }
        sums = {name: _sums(head["sums"][name]) for name in empty.numbers.sums}
        numbers = NumericParts(
            sums=sums,
            sample_keys=values("sample").to_numpy(),
            sample={name: values(f"sample:{name}").to_numpy() for name in empty.numbers.sample},
        )
    except (KeyError, ValueError, TypeError, pa.ArrowException) as error:
        raise _damaged(f"{type(error).__name__}: {error}"[:200]) from error
    parts = FittedParts(ids=ids, numbers=numbers)
    return FitState(schema=schema, first_row=head["first_row"], num_rows=head["num_rows"], parts=parts)


def _sums(entry: Sequence[str]) -> ExactSums:
    count, total, squares = (int(number, 16) for number in entry)
    return ExactSums(count=count, total=total, squares=squares)


def _series(texts: pa.Array) -> pl.Series:
    return pl.Series(texts)


def _large_strings(texts: pl.Series) -> pa.Array:
    array = texts.rechunk().to_arrow(compat_level=pl.CompatLevel.oldest())
    return array.cast(pa.large_string())


def _one_list(values: pa.Array) -> pa.Array:
    return pa.LargeListArray.from_arrays(pa.array(np.array([0, len(values)], dtype=np.int64)), values)


def _damaged(found: str, *, where: str = "fitted state") -> DataError:
    return DataError(
        expected="a state that was fitted with this schema, by this version",
        found=found,
        where=where,
        ways_out=HEAD.ways_out,
    )
