"""Late labels: records of labels that come in files of their own, joined with the rows that they are about, by a key.

    rows     key, t, features ─► on the disk, by window of t ───────┐ label column and label time are put beside, as far
    records  key, u, label    ─► in memory ──────── first of a key ─┴ as they are known, and the rows go on as those of
                                                                      a file that had both (`awaiting_labels.py`)

A row whose record has t ≤ u ≤ t + A has its label, known at u. One without such a record is a negative, known at t + A.
Records may come before their rows and after them, in files of any size. A record that came before its row waits for
it, and is used. Not used, counted and named are those with u > t + A or that came when the labels of their window were
complete; those of a key that has a record already; and those of whose key no row has come when both logs are newer than
u + A. One with u < t makes its row a bad row, as a label time before its row does in one file with both.

Memory: 24 bytes for each row (16 of them a digest of its key) and 25 for each record. Keys of rows are kept for twice
the attribution window, so that a record which is too late or a second row of a key is named as what it is; records for
once. Both longer where a window is longer than that. On the disk the same lies in logs, from which memory is filled
again by a process that goes on.

Cost: sorted runs whose sizes double, so n keys are sorted log n times, and each look-up searches log n runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa
from jaxtyping import Bool, Float64

from ziggurat.data.preprocess.values.cells import Faults, canonical_text, with_nulls, with_truths, wrong_type
from ziggurat.data.preprocess.values.parsing import needed_column, parse_label
from ziggurat.data.raw.bad_rows import BadReason, BadRow, BadRows
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.streams.windows import Clock
from ziggurat.data.teachers.side_table import example_ids
from ziggurat.errors import SchemaError
from ziggurat.features.labels import Label
from ziggurat.features.schema import Schema, column_of

LOG_SCHEMA = pa.schema({"key": pa.binary(16), "time": pa.float64(), "is_positive": pa.bool_()})
BEFORE = "before their rows"
AFTER = "after the attribution window"
TWICE = "twice"
NO_ROW = "of no row"
EARLY = "put aside, with a time before that of their row"
LATE = "behind the end of their window"
_KEY = "S16"  # a digest; numpy compares texts of one length as bytes


@dataclass(frozen=True, kw_only=True)
class Keyed:
    """Rows, or records of labels, by the digest of their key.

    Args:
        keys: (N,) digests, of 16 bytes each.
        times: (N,) in the units of the time column.
        is_positive: (N,) whether the label is a positive; of rows nothing.
    """

    keys: np.ndarray
    times: Float64[np.ndarray, " N"]
    is_positive: Bool[np.ndarray, " N"]

    @staticmethod
    def of(
        keys: np.ndarray, times: Float64[np.ndarray, " N"], is_positive: Bool[np.ndarray, " N"] | None = None
    ) -> Keyed:
        """Return rows, or records where it is said which of them are positives."""
        found = np.zeros(len(keys), dtype=np.bool_) if is_positive is None else is_positive
        return Keyed(keys=keys, times=times, is_positive=found)

    @staticmethod
    def joined(parts: list[Keyed]) -> Keyed:
        """Return all of several together, in their order."""
        return Keyed(
            keys=np.concatenate([np.empty(0, _KEY), *(part.keys for part in parts)]),
            times=np.concatenate([np.empty(0), *(part.times for part in parts)]),
            is_positive=np.concatenate([np.empty(0, np.bool_), *(part.is_positive for part in parts)]),
        )

    @staticmethod
    def from_table(table: pa.Table) -> Keyed:
        """Return what `table` made a table of."""
        content = b"".join(table.column("key").to_pylist())
        return Keyed(
            keys=np.frombuffer(content, dtype=_KEY),
            times=table.column("time").to_numpy(),
            is_positive=table.column("is_positive").to_numpy(),
        )

    def __len__(self) -> int:
        return len(self.keys)

    def table(self) -> pa.Table:
        """Return them as a table, for a log on the disk."""
        # numpy leaves out zeros at the end of a text, and a digest may have some.
        keys = pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(16), len(self), [None, pa.py_buffer(np.ascontiguousarray(self.keys).tobytes())]
        )
        return pa.Table.from_arrays(
            [keys, pa.array(self.times), pa.array(self.is_positive, type=pa.bool_())], schema=LOG_SCHEMA
        )

    def where(self, chosen: np.ndarray) -> Keyed:
        """Return those of a mask or of an order."""
        return Keyed(keys=self.keys[chosen], times=self.times[chosen], is_positive=self.is_positive[chosen])

    def newest(self) -> float:
        """Return the latest time; minus infinity of none."""
        return float(self.times.max(initial=-np.inf))


class KeyedRuns:
    """Finds rows or records by their key: sorted runs, each more than twice as long as the next."""

    def __init__(self) -> None:
        self._runs: list[Keyed] = []

    def __len__(self) -> int:
        return sum(map(len, self._runs))

    def add(self, more: Keyed) -> None:
        """Add some; those of a key that is there already are not found before the earlier ones are cut off."""
        if not len(more):
            return
        self._runs.append(_in_order(more))
        while len(self._runs) > 1 and len(self._runs[-2]) <= 2 * len(self._runs[-1]):
            last = self._runs.pop()
            self._runs[-1] = _in_order(Keyed.joined([self._runs[-1], last]))

    def find(self, keys: np.ndarray) -> Keyed:
        """Return the first that came of each key; its time is NaN where there is none."""
        times = np.full(len(keys), np.nan)
        is_positive = np.zeros(len(keys), dtype=np.bool_)
        # Later runs first: what an earlier one has stands in its place.
        for run in reversed(self._runs):
            at = np.searchsorted(run.keys, keys).clip(max=len(run) - 1)
            is_there = run.keys[at] == keys
            times[is_there] = run.times[at[is_there]]
            is_positive[is_there] = run.is_positive[at[is_there]]
        return Keyed(keys=keys, times=times, is_positive=is_positive)

    def of_keys(self, keys: np.ndarray) -> Keyed:
        """Return all of some keys; those of one key in the order in which they came."""
        return Keyed.joined([run.where(np.isin(run.keys, keys)) for run in self._runs])

    def between(self, first: float, end: float) -> Keyed:
        """Return those of a moment or later, and before another one."""
        return Keyed.joined([run.where((run.times >= first) & (run.times < end)) for run in self._runs])

    def before(self, time: float) -> Keyed:
        """Return those whose time is before a moment."""
        return Keyed.joined([run.where(run.times < time) for run in self._runs])

    def cut(self, time: float) -> None:
        """Forget those whose time is before a moment."""
        kept = [run.where(run.times >= time) for run in self._runs]
        self._runs = [run for run in kept if len(run)]

    def remove(self, keys: np.ndarray) -> None:
        """Forget those of some keys."""
        kept = [run.where(~np.isin(run.keys, keys)) for run in self._runs]
        self._runs = [run for run in kept if len(run)]


def _in_order(keyed: Keyed) -> Keyed:
    # Stable, and `find` takes the first of several: that is the one that came first.
    return keyed.where(np.argsort(keyed.keys, kind="stable"))


class LateLabels:
    """Joins records of labels with rows; what it knows follows from what was added, in its order.

    Nothing is read or written here: `awaiting_labels.py` keeps rows and logs.
    """

    def __init__(self) -> None:
        self._rows = KeyedRuns()
        self._records = KeyedRuns()

    def __len__(self) -> int:
        return len(self._records)

    def are_known(self, keys: np.ndarray) -> Bool[np.ndarray, " N"]:
        """Return which keys have a row."""
        return ~np.isnan(self._rows.find(keys).times)

    def add_rows(self, rows: Keyed, *, reach: float) -> Counter[str]:
        """Add rows; return counts of the records that had come before them.

        Args:
            rows: of keys that have no row.
            reach: the attribution window, in the units of times.
        """
        self._rows.add(rows)
        records = self._records.of_keys(rows.keys)
        if not len(records):
            return Counter()
        in_order = _in_order(rows)
        times = in_order.times[np.searchsorted(in_order.keys, records.keys)]
        is_after = records.times > times + reach
        is_second = _has_one_before(records.keys, ~is_after)
        is_used = ~is_after & ~is_second
        if not is_used.all():
            keys = np.unique(records.keys[~is_used])
            self._records.remove(keys)
            self._records.add(records.where(is_used & np.isin(records.keys, keys)))
        return Counter(
            {
                BEFORE: int(is_used.sum()),
                AFTER: int((is_after & ~is_second).sum()),
                TWICE: int(is_second.sum()),
            }
        )

    def judged(self, records: Keyed, *, reach: float, over: Bool[np.ndarray, " N"]) -> tuple[Keyed, Counter[str]]:
        """Return those records of a file that may be used, and counts of those that may not. Nothing is added.

        Of a row the first record counts that is not beyond its attribution window. All records of a key are kept until
        its row comes: before that nobody knows which of them that is.

        Args:
            records: in their order.
            reach: the attribution window, in the units of times.
            over: whether the attribution window of the row of each was closed before.
        """
        times = self.row_times(records.keys)
        is_after = (records.times > times + reach) | over  # False where no row is there: its time is NaN
        has_record = ~np.isnan(self._records.find(records.keys).times)
        has_row = ~np.isnan(times) | over
        is_second = has_row & (has_record | _has_one_before(records.keys, ~is_after))
        counts = Counter({AFTER: int((is_after & ~is_second).sum()), TWICE: int(is_second.sum())})
        return records.where(~is_after & ~is_second), counts

    def row_times(self, keys: np.ndarray) -> Float64[np.ndarray, " N"]:
        """Return the times of the rows of keys; NaN where no row is there."""
        return self._rows.find(keys).times

    def records_between(self, first: float, end: float) -> Keyed:
        """Return the records whose label is known at a moment or later, and before another one."""
        return self._records.between(first, end)

    def add_records(self, records: Keyed) -> None:
        """Add records that `judged` returned."""
        self._records.add(records)

    def of_rows(
        self, keys: np.ndarray, times: Float64[np.ndarray, " N"], *, reach: float
    ) -> tuple[Float64[np.ndarray, " N"], Bool[np.ndarray, " N"]]:
        """Return when the label of each row is known, NaN where no record came, and which of them are positives.

        Args:
            keys: of the rows.
            times: of the rows.
            reach: the attribution window, in the units of times.
        """
        found = self._records.find(keys)
        known = np.where(found.times > times + reach, np.nan, found.times)
        return known, found.is_positive & ~np.isnan(known)

    def cut(self, *, rows_before: float, records_before: float) -> int:
        """Forget rows and records of before two moments; return how many of these records were of no row."""
        gone = self._records.before(records_before)
        num_of_no_row = int((~self.are_known(gone.keys)).sum())
        self._records.cut(records_before)
        self._rows.cut(rows_before)
        return num_of_no_row


def _has_one_before(keys: np.ndarray, chosen: Bool[np.ndarray, " N"]) -> Bool[np.ndarray, " N"]:
    """Return for each of some keys whether a chosen one of the same key stands before it."""
    places = np.flatnonzero(chosen)
    found, firsts = np.unique(keys[places], return_index=True)
    if not len(found):
        return np.zeros(len(keys), dtype=np.bool_)
    at = np.searchsorted(found, keys).clip(max=len(found) - 1)
    return (found[at] == keys) & (places[firsts[at]] < np.arange(len(keys)))


def keys_of(chunk: RawChunk, column: str) -> tuple[np.ndarray, Bool[np.ndarray, " N"]]:
    """Return the digests of the keys of rows or records, and which of them have one.

    Args:
        chunk: the rows.
        column: of the key; 7, 7.0 and the text "7" are one key.

    Raises:
        SchemaError: a column of lists.
    """
    refuse_unreadable_keys(chunk, column)
    texts = canonical_text(chunk.column(column))
    assert texts is not None, "its type was looked at"
    texts = texts.str.strip_chars().fill_null("")
    digests = example_ids(RawChunk.of(pl.DataFrame({column: texts})), [column])
    return np.ascontiguousarray(digests).view(_KEY).reshape(-1), (texts != "").to_numpy()


def refuse_unreadable_keys(chunk: RawChunk, column: str) -> None:
    """Refuse a column of keys whose type is none of texts or numbers, by its type alone.

    Raises:
        SchemaError: a column of lists.
    """
    series = needed_column(chunk, column, role="the key of labels")
    if canonical_text(series.head(1)) is None:
        raise wrong_type(series, chunk, role="the key of labels", expected="texts or numbers")


def records_of(
    chunk: RawChunk,
    *,
    key: str,
    label: Label,
    schema: Schema,
    clock: Clock,
    bad_rows: BadRows,
    latest_s: float,
    by_row: bool = False,
) -> Keyed:
    """Return the records of labels of a chunk.

    Args:
        chunk: rows of a file of labels.
        key: column of the key.
        label: whose column may be there: without it each record is a positive.
        schema: says which texts are no value.
        clock: of the column of label times.
        bad_rows: where records without a key, a time or a label go.
        latest_s: seconds since 1970; a later record has a wrong clock, and would end all waiting.
        by_row: whether each record has a writer of its own; see `Clock.times`.

    Raises:
        DataError: such a record (policy ERROR), or times in another unit than those of rows.
        SchemaError: a column of a type that cannot be read; no record was reported then.
    """
    clean = with_nulls(chunk, schema.missing_texts)
    keys, has_key = keys_of(clean, key)
    faults = Faults(chunk=clean)
    is_positive = np.ones(chunk.num_rows, dtype=np.bool_)
    is_labelled = is_positive.copy()
    if clean.has_column(column_of(label)):
        read = with_truths(clean).with_number_columns(schema.numbers)
        values = parse_label(label, read.column(column_of(label)), faults)
        is_positive = values > 0.5
        is_labelled = ~np.isnan(values)
    times = clock.times(clean, bad_rows=bad_rows, latest_s=latest_s, by_row=by_row)
    report_keyless(faults, has_key, column=key)
    is_good = faults.report(bad_rows) & ~np.isnan(times) & is_labelled
    return Keyed.of(keys, times, is_positive).where(is_good)


def report_unreadable(chunk: RawChunk, error: SchemaError, *, bad_rows: BadRows) -> None:
    """Report all rows of a chunk, each of a writer of its own, as bad rows: a column has a type that cannot be read."""
    for row in chunk.file_rows.tolist():
        bad_rows.report(
            BadRow(
                path=chunk.path,
                row=row,
                line=None,
                column="",
                reason=BadReason.NOT_READABLE,
                expected=error.expected,
                found=error.found,
            )
        )


def report_keyless(faults: Faults, has_key: Bool[np.ndarray, " N"], *, column: str) -> None:
    """Note rows without a key as faults."""
    for index in np.flatnonzero(~has_key).tolist():
        faults.add(
            index,
            column=column,
            reason=BadReason.MISSING,
            expected="a key, by which a label finds its row",
            found="",
            ways_out=("write the id of the example there",),
        )


def report_second_rows(faults: Faults, is_second: Bool[np.ndarray, " N"], *, column: str) -> None:
    """Note rows whose key another row has as faults: nobody knows which of them a label is about."""
    for index in np.flatnonzero(is_second).tolist():
        faults.add(
            index,
            column=column,
            reason=BadReason.SAME_KEY,
            expected="a key that no row before has, as a label is about one row",
            found=str(faults.chunk.column(column)[index]),
            ways_out=("name a column that differs for each row: --label-key COLUMN, in another folder (--out)",),
        )


def label_cells(label: Label, is_positive: Bool[np.ndarray, " N"]) -> pl.Series:
    """Return the cells of a column of labels that mean these, as a file of rows would have them."""
    if label.positive:
        negative = label.negative or f"not {label.positive}"
        return pl.Series(column_of(label), np.where(is_positive, label.positive, negative))
    least = 1.0 if label.positive_from is None else label.positive_from
    other = 0.0 if label.positive_from is None else float(np.nextafter(least, -np.inf))
    return pl.Series(column_of(label), np.where(is_positive, least, other))


def counts_in_words(counts: Mapping[str, int]) -> str:
    """Return counts of records for a person."""
    return ", ".join(f"{what}: {count:,}" for what, count in sorted(counts.items()) if count)
