"""Splits: which rows train, which choose the model (valid), which judge it (test).

    AUTO        the default: TIME where the schema has a time, else RANDOM
    TIME        the future is predicted from the past: the earliest rows train, the latest test
                │ train ──────────────────────── │ valid ── │ test ── │      cut between two distinct times,
                                             valid_from  test_from           so rows of one instant stay together
    TIME_ORDER  the same for files that are in order of time without saying when (Criteo): cut by row number
    RANDOM      by a hash of (seed, global row): the same rows whatever the chunk size, and the test rows stay test rows
                when valid_fraction changes
    COLUMN      a column says "train", "valid" or "test"
    FILES       the files were split before: DataConfig.train, valid, test
    LEAVE_ONE_OUT   for events ([events] in the schema): the last one of each user is the test, the one before it
                validates, the others train; AUTO means this where there are events, which TIME splits too
    WINDOWS     for events with labels: time is cut into windows of one length ([events] window); the last one is the
                test, the one before it validates, and the others train, window after window

A random split of data with a time in it lets the model see the future; its metrics are better than what it will do in
service. Use TIME where there is a time.

Cost: TIME and TIME_ORDER read the raw data once more (one column of it), in bounded memory: distinct times are counted,
and from 4 million distinct ones on, neighbours are counted together, which moves a cut by under 0.001 % of the rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
import polars as pl

from ziggurat.config import JSON
from ziggurat.data.mixing import derive_seed, splitmix64
from ziggurat.data.preprocess.values.time_units import two_units
from ziggurat.data.preprocess.values.times import (
    kind_of_times,
    report_unreadable,
    time_keys,
    with_date_order,
    without_categories,
)
from ziggurat.data.raw.bad_rows import BadRows
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.raw.dates import ZoneSigns
from ziggurat.errors import ConfigError, DataError
from ziggurat.features.date_order import DateOrder
from ziggurat.features.schema import Schema
from ziggurat.plain import as_list, as_text
from ziggurat.typed import Fraction, checked

# Times that are told apart; with their counts they take 64 MiB.
_MAX_DISTINCT = 1 << 22


class Split(StrEnum):
    """The three parts, in the order of their numbers 0, 1, 2."""

    TRAIN = "train"
    VALID = "valid"
    TEST = "test"


SPLITS = tuple(Split)
_NAMES = {"train": 0, "valid": 1, "val": 1, "validation": 1, "test": 2}


BY_FILES = "by files"
AT_RANDOM = "at random"  # the first words of what is said of such a split


class SplitBy(StrEnum):
    """Ways to assign rows; see the module's docstring.

    Example:
        >>> zg.SplitBy("time") is zg.SplitBy.TIME
        True
    """

    AUTO = "auto"
    RANDOM = "random"
    TIME = "time"
    TIME_ORDER = "time_order"
    COLUMN = "column"
    FILES = "files"
    LEAVE_ONE_OUT = "leave_one_out"
    WINDOWS = "windows"


@dataclass(frozen=True, kw_only=True)
@checked
class SplitConfig:
    """Settings for how rows are divided into training, validation and test data.

    Args:
        by: see `SplitBy`; AUTO decides by the schema.
        valid_fraction: share of the rows for validation; 0 for none. Not used by COLUMN and FILES; of LEAVE_ONE_OUT
            every share but 0 is the event before the last one.
        test_fraction: share of the rows for the test; 0 for none. Not used by COLUMN, FILES and LEAVE_ONE_OUT.
        seed: for RANDOM.
        column: for COLUMN, and for TIME where it is not the schema's `time`.
        date_order: for TIME, what stands first in dates like 01/03/2024; auto: as the dates of the column show.

    Example:
        >>> zg.SplitConfig(by=zg.SplitBy.RANDOM, valid_fraction=0.1, test_fraction=0.2).test_fraction
        0.2
    """

    by: SplitBy = SplitBy.AUTO
    valid_fraction: Fraction = 0.1
    test_fraction: Fraction = 0.1
    seed: int = 0
    column: str = ""
    date_order: DateOrder = DateOrder.AUTO

    def __post_init__(self) -> None:
        fractions = (self.valid_fraction, self.test_fraction)
        if not sum(fractions) < 1:
            raise ConfigError(
                expected="fractions that leave something to train on",
                found=f"valid_fraction = {self.valid_fraction}, test_fraction = {self.test_fraction}",
                where="split settings",
                ways_out="use 0.1 and 0.1",
            )
        takes_column = self.by in (SplitBy.COLUMN, SplitBy.TIME)
        if (self.by is SplitBy.COLUMN and not self.column) or (self.column and not takes_column):
            raise ConfigError(
                expected="a column for by = column, optionally one for by = time, and none for the others",
                found=f"by = {self.by.value}, column = {self.column!r}",
                where="split settings",
                ways_out=("set by = column and the column's name", "leave column empty"),
            )

    def resolved(self, schema: Schema) -> SplitConfig:
        """The same without AUTO: by the schema's time if it has one, else at random."""
        if self.by is not SplitBy.AUTO:
            return self
        if schema.events is not None:
            return replace(self, by=SplitBy.LEAVE_ONE_OUT)
        return replace(self, by=SplitBy.TIME if schema.time else SplitBy.RANDOM)


@dataclass(frozen=True, kw_only=True)
class Splitter:
    """A split that is ready to assign rows; made by `fit_splitter`.

    Args:
        config: how.
        column: the column it reads, or "".
        valid_from: times (seconds-like numbers, microseconds since 1970 for dates) or row numbers from here on are not
            training; infinite if there are none.
        test_from: from here on they are test.
        is_date: whether times are dates.
        date_order: of dates like 01/03/2024; AUTO if there are none.
        notes: what should be known of the times.
    """

    config: SplitConfig
    column: str = ""
    valid_from: float = np.inf
    test_from: float = np.inf
    is_date: bool = False
    date_order: DateOrder = DateOrder.AUTO
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, JSON]:
        """Return what was fitted, as plain data; cuts may be infinite."""
        return {
            "column": self.column,
            # As text in hex: nothing is rounded, and JSON has no infinity.
            "valid_from": self.valid_from.hex(),
            "test_from": self.test_from.hex(),
            "is_date": self.is_date,
            "date_order": self.date_order.value,
            "notes": list(self.notes),
        }

    @staticmethod
    def from_json(data: dict[str, JSON], *, config: SplitConfig) -> Splitter:
        """Read what `to_json` made."""
        return Splitter(
            config=config,
            column=as_text(data["column"]),
            valid_from=float.fromhex(as_text(data["valid_from"])),
            test_from=float.fromhex(as_text(data["test_from"])),
            is_date=data["is_date"] is True,
            date_order=DateOrder(data["date_order"]),
            notes=tuple(as_text(note) for note in as_list(data.get("notes", []))),
        )

    def assign(self, chunk: RawChunk, *, bad_rows: BadRows) -> np.ndarray:
        """The split of each row: (n,) int8 indices into `SPLITS`, or -1 for a bad row that was quarantined.

        Raises:
            DataError: a time or split name cannot be read (policy ERROR).
            SchemaError: the column has an impossible type.
        """
        by = self.config.by
        if by is SplitBy.RANDOM:
            return self.assign_random(chunk.global_rows)
        if by is SplitBy.TIME_ORDER:
            keys = chunk.global_rows
        elif by is SplitBy.TIME:
            keys = time_keys(chunk, self.column, bad_rows=bad_rows, is_date=self.is_date, order=self.date_order)
        else:
            assert by is SplitBy.COLUMN
            return self._assign_by_name(chunk, bad_rows)
        # A row from `test_from` on passes both comparisons, which makes 2.
        codes = (keys >= self.valid_from).astype(np.int8) + (keys >= self.test_from)
        # NaN compares as False, and would be training.
        return np.where(np.isnan(keys), -1, codes).astype(np.int8)

    def assign_random(self, rows: np.ndarray) -> np.ndarray:
        """Assign rows by their numbers in all files together: the split of each by RANDOM, as `assign` says it."""
        # By the number of the row alone: whoever reads the row, in whatever order, assigns it alike.
        hashes = splitmix64(np.ascontiguousarray(rows).view(np.uint64) + np.uint64(derive_seed(self.config.seed, 2)))
        shares = hashes / 2.0**64
        # The test has the lowest shares, so that its rows do not depend on the share of validation.
        test = self.config.test_fraction
        valid = self.config.test_fraction + self.config.valid_fraction
        return np.where(shares < test, 2, np.where(shares < valid, 1, 0)).astype(np.int8)

    def _assign_by_name(self, chunk: RawChunk, bad_rows: BadRows) -> np.ndarray:
        series = chunk.frame[self.column]
        names = series.cast(pl.String).str.strip_chars().str.to_lowercase()
        # A name that is null or unknown is −1, a bad row.
        codes = names.replace_strict(_NAMES, default=-1, return_dtype=pl.Int8).fill_null(-1).to_numpy()
        expected = f"one of {', '.join(_NAMES)}"
        report_unreadable(chunk, np.flatnonzero(codes < 0), column=self.column, expected=expected, bad_rows=bad_rows)
        return codes

    def describe(self) -> str:
        """The split in one line, for the start-up report."""
        by = self.config.by
        config = self.config
        if by is SplitBy.RANDOM:
            return (
                f"{AT_RANDOM}: valid {config.valid_fraction:.3g}, test {config.test_fraction:.3g}, seed {config.seed}"
            )
        if by is SplitBy.COLUMN:
            return f"by column {self.column!r}"
        if by is SplitBy.FILES:
            return BY_FILES
        name = f"time column {self.column!r}" if by is SplitBy.TIME else "row number"
        if self.date_order is not DateOrder.AUTO:
            name += f" (dates with the {self.date_order.value.replace('_', ' ')})"
        parts = [f"{split} from {self._shown(cut)}" for split, cut in self._cuts() if np.isfinite(cut)]
        return f"by {name}: {', '.join(parts) or 'everything trains'}"

    def _cuts(self) -> tuple[tuple[str, float], ...]:
        # Where all later rows are test, no row is validation.
        valid_from = self.valid_from if self.valid_from < self.test_from else np.inf
        return (("valid", valid_from), ("test", self.test_from))

    def _shown(self, cut: float) -> str:
        if self.is_date:
            return str(np.datetime64(int(cut), "us").item())
        return f"{int(cut):,}" if self.config.by is SplitBy.TIME_ORDER else f"{cut:.15g}"


def fit_splitter(
    config: SplitConfig,
    chunks: Iterable[RawChunk],
    *,
    schema: Schema,
    bad_rows: BadRows | None = None,
    where: str = "the raw data",
) -> Splitter:
    """Find the cuts of a split. Reads `chunks` for TIME and TIME_ORDER only.

    Args:
        config: how to split.
        chunks: all raw rows; for TIME with the time column, for TIME_ORDER with any column.
        schema: names the time column.
        bad_rows: where rows without a time go; by default the first one is an error.
        where: the files, for errors.

    Raises:
        ConfigError: no time column is named, there are too few distinct times, or dates whose order nothing shows.
        DataError: a row has no time (policy ERROR), times are of two units, or there is no row at all.
        SchemaError: the column cannot be a time.
    """
    config = config.resolved(schema)
    if config.by in (SplitBy.LEAVE_ONE_OUT, SplitBy.WINDOWS):
        raise ConfigError(
            expected="a schema with [events] for a split that leaves the last event of each user out, or of windows",
            found="a schema of samples",
            where="split settings",
            ways_out=("add [events] to the schema: see docs/guides/long-histories.md", "set by = time, or by = random"),
        )
    column = split_column(config, schema)
    if config.by is SplitBy.TIME:
        return _fit_time(config, chunks, column, bad_rows or BadRows(), where=where)
    if config.by is not SplitBy.TIME_ORDER:
        return Splitter(config=config, column=column)
    # The last row of the last chunk is the highest, since chunks come in order.
    num_rows = max((int(chunk.global_rows[-1]) + 1 for chunk in chunks), default=0)
    _refuse_empty(num_rows, where=where, bad_rows=bad_rows)
    valid_from = round(num_rows * (1 - config.valid_fraction - config.test_fraction))
    test_from = round(num_rows * (1 - config.test_fraction))
    return Splitter(config=config, valid_from=float(valid_from), test_from=float(test_from))


def split_column(config: SplitConfig, schema: Schema) -> str:
    """The raw column that a split reads, or "".

    Raises:
        ConfigError: TIME without a time column.
    """
    if config.resolved(schema).by is not SplitBy.TIME:
        return config.column
    if not (config.column or schema.time):
        raise ConfigError(
            expected="a time column for a split by time",
            found="none in the schema, none in the split settings",
            where="split settings",
            ways_out=(
                'add time = "COLUMN" to the schema',
                "set by = time_order if the rows are in order of time",
                "set by = random",
            ),
        )
    return config.column or schema.time


def _fit_time(
    config: SplitConfig, chunks: Iterable[RawChunk], column: str, bad_rows: BadRows, *, where: str
) -> Splitter:
    counts = _DistinctCounts()
    is_date: bool | None = None
    order = config.date_order
    zones = ZoneSigns()
    for chunk, order in with_date_order(chunks, column, order=config.date_order):
        zones.add(without_categories(chunk.frame[column]))
        if is_date is None:
            # The first chunk decides for all files.
            is_date = kind_of_times(chunk.frame[column], file=str(chunk.path))
        keys = time_keys(chunk, column, bad_rows=bad_rows, is_date=bool(is_date), order=order)
        counts.add(keys[~np.isnan(keys)])
    values, numbers = counts.finish()
    _refuse_empty(len(values), where=where, bad_rows=bad_rows)
    if not is_date:
        _refuse_two_units(values, column=column)
    wanted = 1 + (config.valid_fraction > 0) + (config.test_fraction > 0)
    if len(values) < wanted:
        raise ConfigError(
            expected=f"at least {wanted} distinct times, one for each split",
            found=f"{len(values)} distinct in {int(numbers.sum()):,} rows",
            where=f"split by time, column {column!r}",
            ways_out=("name the right time column", "set valid_fraction or test_fraction to 0", "set by = random"),
        )
    # A cut at place i has `before[i]` rows in front of it.
    before = np.concatenate([[0], np.cumsum(numbers)])  # rows before each distinct value, and all of them
    total = float(before[-1])
    last = len(values)
    test = last
    if config.test_fraction:
        # At least one distinct time is left for each part before the test, and one for itself.
        test = _nearest(before, total * (1 - config.test_fraction), low=wanted - 1, high=last - 1)
    valid = test
    if config.valid_fraction:
        valid = _nearest(before, total * (1 - config.test_fraction - config.valid_fraction), low=1, high=test - 1)
    # A place behind the last time means that no row is on that side: its cut is infinite.
    cuts = np.append(values, np.inf)
    return Splitter(
        config=config,
        column=column,
        valid_from=float(cuts[valid]),
        test_from=float(cuts[test]),
        is_date=bool(is_date),
        date_order=order if is_date else DateOrder.AUTO,
        notes=(f"split by time, {zones.note(column)}",) if zones.are_mixed else (),
    )


def _refuse_two_units(times: np.ndarray, *, column: str) -> None:
    """Refuse seconds beside milliseconds, whose order is none; times counted from a moment of their own pass."""
    # Numbers that no 64-bit integer holds have no unit to compare.
    whole = times[np.abs(times) < 2**62].astype(np.int64)
    if len(whole) == len(times) and (units := two_units(whole)):
        raise DataError(
            expected="all times of the column in one unit",
            found=f"times from {whole[0]} to {whole[-1]}: {units}, by their sizes",
            where=f"split by time, column {column!r}",
            ways_out=("write the times of all files in one unit", "set by = random, if their order does not matter"),
        )


def _nearest(before: np.ndarray, target: float, *, low: int, high: int) -> int:
    """The cut from low to high that has the number of rows before it nearest to `target`."""
    return low + int(np.argmin(np.abs(before[low : high + 1] - target)))


def _refuse_empty(count: int, *, where: str, bad_rows: BadRows | None) -> None:
    if count:
        return
    found = "none"
    put_aside: tuple[str, ...] = ()
    if bad_rows is not None and bad_rows.num_rows:
        found = f"none but {bad_rows.num_rows:,} that were put aside ({bad_rows.summary()})"
        put_aside = (
            f"look at the rows that were put aside, in {bad_rows.kept_in}, and correct what they have in common",
        )
    raise DataError(
        expected="at least one row",
        found=found,
        where=where,
        ways_out=(*put_aside, "check the files: a header alone is no row", "name other files: --data.train FILE"),
    )


class _DistinctCounts:
    """Distinct numbers and how often each came, in bounded memory."""

    def __init__(self) -> None:
        self.values = np.empty(0, dtype=np.float64)
        self.counts = np.empty(0, dtype=np.int64)
        self._pending: list[np.ndarray] = []
        self._num_pending = 0

    def add(self, keys: np.ndarray) -> None:
        self._pending.append(keys)
        self._num_pending += len(keys)
        if self._num_pending >= _MAX_DISTINCT:
            self._merge()

    def _merge(self) -> None:
        # `concatenate` refuses an empty list, which is what is pending where there was no row.
        values, counts = np.unique(np.concatenate([np.empty(0), *self._pending]), return_counts=True)
        self._pending = []
        self._num_pending = 0
        every = np.concatenate([self.values, values])
        self.values, places = np.unique(every, return_inverse=True)
        weights = np.concatenate([self.counts, counts])
        self.counts = np.zeros(len(self.values), dtype=np.int64)
        # Not `counts[places] += weights`, which would count a place once however often it comes.
        np.add.at(self.counts, places, weights)
        while len(self.values) > _MAX_DISTINCT:
            # Neighbours are counted together under the smaller one: cuts still fall between distinct values.
            self.counts = np.add.reduceat(self.counts, np.arange(0, len(self.counts), 2))
            self.values = self.values[::2]

    def finish(self) -> tuple[np.ndarray, np.ndarray]:
        self._merge()
        return self.values, self.counts
