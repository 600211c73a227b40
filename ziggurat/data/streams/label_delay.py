"""Label delay: when a row of a stream is trained, and by which label, where its label is known later than the row.

    time t ──────────── o = t + observe_s ───────── label time u ──►   u: a positive came, or the time for one ended
      │ scored in its own window     │                     │
      wait             ·             ·                     known: trained once, by its label
      assume-negative  ·             u ≤ o: known; else assumed: trained as a negative, and never corrected
      correct          ·             the same              u > o, positive: corrected, trained again as a positive
                                                           u > o, negative: confirmed, for what learns of delays

A file holds the label that a row has in the end, and a column holds the moment u from which on it is known. So every
window is scored by true labels, as is possible in hindsight, and trained by those that were known. When a row is
trained, and as what, follows from t, u and the label alone; `arrivals.py` puts it into the window of that moment.

With `wait`, positives are known before the negatives of the same day are, so the first windows would learn positives
alone. Where `attribution_s` says how long a positive may take, all rows wait so long, and no class is ahead.

With `observe_s` of 0 a row is trained as what is known at its own time: a positive that came then is known, each later
one is assumed to be a negative. With more it is the stream of elapsed-time sampling (Yang et al., arXiv 2012.03245).
Fake-negative weighting (Ktena et al., arXiv 1907.06558) wants every positive as a negative first, also one that came at
once, and corrects it then: `negatives_first`. The losses for both stand in `training/delayed_feedback.py`.

What is trained again has a row id of its own, `row + number of the state · 2^60`: the ledger proves of each of the two
that it was trained once. Other labels of the row are missing there, so that they are not learned twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float64

from ziggurat.data.encoded.records import ROW_COLUMN, encoded_schema, extra_column, label_column
from ziggurat.data.preprocess.values.cells import Faults, with_nulls, with_truths
from ziggurat.data.preprocess.values.parsing import needed_column, parse_label
from ziggurat.data.preprocess.values.times import readable_times
from ziggurat.data.raw.bad_rows import BadReason, BadRows
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.errors import ConfigError, nearest_names
from ziggurat.features.inputs import ExtraSpec, InputSpec
from ziggurat.features.label_state import LABEL_STATE, LabelState
from ziggurat.features.schema import Label, Schema, column_of
from ziggurat.typed import FloatOrZero, checked

if TYPE_CHECKING:
    from ziggurat.data.streams.windows import Clock

_AGAIN = 1 << 60  # above all row ids of files


class LabelDelay(StrEnum):
    """Choices of what becomes of a row whose label is known later."""

    NONE = "none"  # it is trained with the window that it came in, by the label in its file
    WAIT = "wait"  # it is trained in the window in which its label is known
    ASSUME_NEGATIVE = "assume-negative"  # it is trained when it was observed, as a negative unless it was known
    CORRECT = "correct"  # the same, and once more as a positive when that is known


_LONGEST_S = 100 * 365.25 * 86_400.0


@dataclass(frozen=True, kw_only=True)
@checked
class DelayConfig:
    """Settings of labels that are known later than their rows.

    Args:
        policy: what becomes of a row until its label is known.
        column: raw column with the time at which the label is known, in the unit of the time of the row.
        observe_s: seconds after which a row is trained by what is known of it then.
        attribution_s: seconds in which a positive may come. Rows without a label time are negatives that are known
            then, and with `wait` all rows are trained then. 0: each row has a label time.
        label: the label that comes later; "": the only one of the schema.
        key: raw column by which a record of a label finds its row, where labels have records of their own
            (`late_labels.py`), which then have `column`; "": rows have their labels and label times.
        confirms: whether negatives that were assumed are given to training once more when they are certain; losses
            that learn of delays need it.
        negatives_first: whether every positive is trained as a negative first, however soon it comes; losses of
            fake negatives need it.
    """

    policy: LabelDelay = LabelDelay.NONE
    column: str = ""
    observe_s: FloatOrZero = 0.0
    attribution_s: FloatOrZero = 0.0
    label: str = ""
    key: str = ""
    confirms: bool = False
    negatives_first: bool = False

    @property
    def has_records(self) -> bool:
        """True if labels have records of their own, which are joined with rows by a key."""
        return bool(self.key)

    @property
    def is_on(self) -> bool:
        """True if rows are trained at another time than the one at which they came."""
        return self.policy is not LabelDelay.NONE

    def check(self, schema: Schema, *, by: str, is_by_time: bool) -> None:
        """Refuse settings that contradict each other, the windows or the schema.

        Args:
            schema: of the rows.
            by: how the stream is cut.
            is_by_time: whether windows are stretches of the calendar.

        Raises:
            ConfigError: says which.
        """
        if not self.is_on:
            others = [each.name for each in fields(self) if getattr(self, each.name) != each.default]
            if others:
                raise ConfigError(
                    expected="--delay wait, assume-negative or correct, with settings of labels that come later",
                    found=", ".join(f"{name} = {getattr(self, name)}" for name in others),
                    where="settings of the stream, delay",
                    ways_out=("--delay correct", "leave these settings out: labels are then known with their rows"),
                )
            return
        if not self.column:
            raise ConfigError(
                expected=f"the column that says when a label is known, for --delay {self.policy.value}",
                found="none",
                where="settings of the stream, delay",
                ways_out=("--label-time COLUMN",),
            )
        if not is_by_time or not schema.time:
            raise ConfigError(
                expected="windows of the calendar, as a label is known in the window that holds its time",
                found=f"--by {by}" if schema.time else "a schema without a time",
                where=f"--delay {self.policy.value}",
                ways_out=("--by hour", "--by day", 'time = "COLUMN" under [roles] of the schema'),
            )
        for flag, seconds in (("--observe-s", self.observe_s), ("--attribution-s", self.attribution_s)):
            if seconds > _LONGEST_S:  # moments so far away have no window, and no 64-bit count
                raise ConfigError(
                    expected=f"at most {_LONGEST_S:,.0f} seconds, a hundred years",
                    found=f"{flag} {seconds:g}",
                    where="settings of the stream, delay",
                    ways_out=(f"{flag} 604800, a week", f"leave {flag} out"),
                )
        if self.policy is LabelDelay.WAIT and self.observe_s:
            raise ConfigError(
                expected="no --observe-s with --delay wait, which waits for labels however long they take",
                found=f"--observe-s {self.observe_s:g}",
                where="settings of the stream, delay",
                ways_out=("leave --observe-s out", "--delay correct"),
            )
        label = delayed_label(schema, self.label)
        if self.has_records:
            self._check_records(schema, label)

    def _check_records(self, schema: Schema, label: Label) -> None:
        """Refuse settings with which rows would wait for records for ever, or without need."""
        if not self.attribution_s:
            raise ConfigError(
                expected="the seconds in which a positive may come: a row without a record is a negative then",
                found="--attribution-s 0, with labels in files of their own",
                where="settings of the stream, delay",
                ways_out=("--attribution-s 604800, a week", "--attribution-s 86400, a day"),
            )
        if self.key in (column_of(label), self.column):
            raise ConfigError(
                expected="a key that rows and records of labels have, such as the id of an impression",
                found=f"--label-key {self.key}, which only records have",
                where="settings of the stream, delay",
                ways_out=("--label-key COLUMN_OF_BOTH",),
            )
        others = [column_of(each) for each in (*schema.features, *schema.labels) if each is not label]
        for name in (column_of(label), self.column):
            if name in others or name == schema.time:
                raise ConfigError(
                    expected="columns for label and label time that records of labels alone have",
                    found=f"{name!r}, which the schema reads from rows for something else",
                    where="settings of the stream, delay",
                    ways_out=("call the column otherwise in records of labels: --label-time OTHER_COLUMN",),
                )


def delayed_label(schema: Schema, name: str) -> Label:
    """Return the label that comes later.

    Args:
        schema: of the rows.
        name: of the label; "": the only one.

    Raises:
        ConfigError: there is none, there are several, or it is no binary one.
    """
    names = [label.name for label in schema.labels]
    found = [label for label in schema.labels if label.name == (name or label.name)]
    if len(found) != 1:
        near = [f"did you mean --delayed.label {each}?" for each in nearest_names(name, names)] if name else []
        near += [] if names else ['add it to the schema: [[label]] name = "bought"', "--delay none, and no --labels"]
        raise ConfigError(
            expected=f"the label that comes later, one of {', '.join(names) or 'none: the schema has no label'}",
            found=repr(name) if name else f"{len(names)} labels, and none is named",
            where="settings of the stream, delay",
            ways_out=(*near, *(f"--delayed.label {each}" for each in names)),
        )
    label = found[0]
    if not (label.task.has_positives and label.task.gives_probabilities):
        raise ConfigError(
            expected="a binary label, which is a negative until a positive comes",
            found=f"label {label.name!r} of the task {label.task.value}",
            where="settings of the stream, delay",
            ways_out=("name a binary label: --delayed.label NAME", "--delay none, and no --labels"),
        )
    return label


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """Rows of a chunk that are trained in one state.

    Args:
        state: what is known of their labels.
        mask: (N,) which rows.
        at_s: (N,) seconds since 1970 at which each may be trained.
    """

    state: LabelState
    mask: Bool[np.ndarray, " N"]
    at_s: Float64[np.ndarray, " N"]


def lessons(
    times_s: Float64[np.ndarray, " N"],
    known_s: Float64[np.ndarray, " N"],
    is_positive: Bool[np.ndarray, " N"],
    *,
    config: DelayConfig,
) -> Iterator[Lesson]:
    """Yield when rows are trained and as what; see the drawing of the module.

    Args:
        times_s: t, seconds since 1970; NaN of rows that were put aside, which are in no lesson.
        known_s: u, likewise.
        is_positive: the label in the end.
        config: what becomes of rows until their labels are known.

    Example:
        >>> import numpy as np
        >>> config = DelayConfig(policy="correct", column="known_at", observe_s=10.0)
        >>> times, known = np.array([0.0, 0.0, 0.0]), np.array([5.0, 20.0, 100.0])
        >>> found = lessons(times, known, np.array([True, True, False]), config=config)
        >>> [(lesson.state.value, lesson.at_s[lesson.mask].tolist()) for lesson in found]
        [('known', [10.0]), ('assumed', [10.0, 10.0]), ('corrected', [20.0])]
    """
    is_there = ~np.isnan(times_s)
    if config.policy is LabelDelay.WAIT:
        yield Lesson(state=LabelState.KNOWN, mask=is_there, at_s=known_s)
        return
    observed_s = times_s + config.observe_s
    is_known = known_s <= observed_s
    if config.negatives_first:
        is_known = is_known & ~is_positive
    yield Lesson(state=LabelState.KNOWN, mask=is_there & is_known, at_s=observed_s)
    yield Lesson(state=LabelState.ASSUMED, mask=is_there & ~is_known, at_s=observed_s)
    if config.policy is not LabelDelay.CORRECT:
        return
    yield Lesson(state=LabelState.CORRECTED, mask=is_there & ~is_known & is_positive, at_s=known_s)
    if config.confirms:
        yield Lesson(state=LabelState.CONFIRMED, mask=is_there & ~is_known & ~is_positive, at_s=known_s)


def positives_of(chunk: RawChunk, schema: Schema, label: Label) -> Bool[np.ndarray, " N"]:
    """Return which rows are positives; cells that are no label are none, and are reported where rows are encoded."""
    clean = with_truths(with_nulls(chunk, schema.missing_texts)).with_number_columns(schema.numbers)
    labels = parse_label(label, needed_column(clean, column_of(label)), Faults(chunk=clean))
    return labels > 0.5


def label_times(
    chunk: RawChunk,
    times: Float64[np.ndarray, " N"],
    is_positive: Bool[np.ndarray, " N"],
    *,
    clock: Clock,
    schema: Schema,
    config: DelayConfig,
    bad_rows: BadRows,
    by_row: bool = False,
) -> Float64[np.ndarray, " N"]:
    """Return when labels are known, in the units of the time column; NaN of rows that were put aside.

    Args:
        chunk: the rows.
        times: of the rows; NaN of rows that were put aside.
        is_positive: the label in the end.
        clock: of the label times.
        schema: says which texts are no value.
        config: says which column it is, and what rows without a value are.
        bad_rows: where rows without a usable label time go.
        by_row: whether each row has a writer of its own; see `Clock.times`.

    Raises:
        DataError: a label time is missing, cannot be read, or is before the time of its row (policy ERROR).
    """
    clean = with_nulls(chunk, schema.missing_texts)
    series = needed_column(clean, config.column, role="the label time")
    is_empty = series.is_null().to_numpy()
    if series.dtype.is_float():
        is_empty = is_empty | series.is_nan().fill_null(True).to_numpy()
    wanted = ~np.isnan(times) & ~is_empty
    known = np.full(chunk.num_rows, np.nan)
    known[wanted] = clock.times(clean.filter(wanted), bad_rows=bad_rows, by_row=by_row)
    reach = config.attribution_s * clock.per_second
    is_late_negative = is_empty & ~is_positive & (reach > 0.0)
    known[is_late_negative] = times[is_late_negative] + reach
    lacks = ~np.isnan(times) & is_empty & ~is_late_negative
    for index in np.flatnonzero(lacks).tolist():
        expected = "a time at which the label is known"
        ways = ("--attribution-s 604800: rows without one are negatives, which are known a week later",)
        if is_positive[index]:
            expected += ", of a positive"
            ways = ("write when the positive came",)
        bad_rows.report(
            chunk.bad_row(index, column=config.column, reason=BadReason.MISSING, expected=expected, ways_out=ways)
        )
    is_early = known < times
    for index in np.flatnonzero(is_early).tolist():
        bad_rows.report(
            chunk.bad_row(
                index,
                column=config.column,
                reason=BadReason.EARLY_LABEL,
                expected=f"a label that is known at the time of its row, {clock.shown(times[index])}, or later",
                found=clock.shown(known[index]),
                ways_out=("write the time of the row where the label is known at once", "set the two clocks alike"),
            )
        )
    known[is_early] = np.nan
    return _after_reach(known, times, reach=reach, policy=config.policy)


def known_from(
    found: Float64[np.ndarray, " N"], times: Float64[np.ndarray, " N"], *, reach: float, policy: LabelDelay
) -> Float64[np.ndarray, " N"]:
    """Return when labels are known of rows that are negatives until a record says otherwise.

    Args:
        found: by records, in the units of the time column; NaN of rows without one.
        times: of the rows.
        reach: the attribution window, in these units.
        policy: what becomes of rows until their labels are known.
    """
    known = np.where(np.isnan(found), times + reach, found)
    return _after_reach(known, times, reach=reach, policy=policy)


def _after_reach(
    known: Float64[np.ndarray, " N"], times: Float64[np.ndarray, " N"], *, reach: float, policy: LabelDelay
) -> Float64[np.ndarray, " N"]:
    if policy is LabelDelay.WAIT and reach > 0.0:
        # Positives wait as long as negatives do, or they would be ahead of them.
        return np.where(np.isnan(known), np.nan, np.maximum(known, times + reach))
    return known


def labels_ahead(chunk: RawChunk, *, clock: Clock, config: DelayConfig, latest_s: float) -> int:
    """Return how many rows have a label time that nobody can know yet, though the row itself has been.

    Such rows wait until that time, which is far where a clock is wrong. Times within `attribution_s` of their row are
    none of these: a producer may write the end of that time for each negative.

    Args:
        chunk: the rows.
        clock: of the times of the rows.
        config: says which column has the label times.
        latest_s: seconds since 1970; later times are of the future.
    """
    if not clock.per_second:
        return 0
    times, known = (
        readable_times(chunk.frame[column], order=clock.date_order, is_date=clock.is_date)
        for column in (clock.column, config.column)
    )
    latest = latest_s * clock.per_second
    reach = times + config.attribution_s * clock.per_second
    return int(((times <= latest) & (known > np.maximum(latest, reach))).sum())


def without_label(table: pa.Table, label: str) -> pa.Table:
    """Return encoded rows whose label nobody knows: it is missing.

    Args:
        table: encoded with cells that say nothing.
        label: its name.
    """
    at = table.schema.get_field_index(label_column(label))
    field = table.schema.field(at)
    return table.set_column(at, field, pa.array(np.full(table.num_rows, np.nan), type=field.type))


def inputs_with_state(inputs: InputSpec) -> InputSpec:
    """Return the inputs of data that is trained, which has a column of states beside those of the schema."""
    return replace(inputs, extras=(*inputs.extras, ExtraSpec(name=LABEL_STATE)))


def with_state(table: pa.Table, state: LabelState, *, label: str, inputs: InputSpec) -> pa.Table:
    """Return encoded rows as they are trained in a state.

    Args:
        table: encoded by the label that the rows have in the end.
        state: what is known of it.
        label: its name.
        inputs: from `inputs_with_state`.
    """
    columns = {name: table.column(name) for name in table.column_names}
    columns[extra_column(LABEL_STATE)] = pa.array(np.full(table.num_rows, float(state.number), dtype=np.float32))
    for spec in inputs.labels:
        name = label_column(spec.name)
        values = columns[name].to_numpy()
        if spec.name == label and state is LabelState.ASSUMED:
            # A label that is missing stays so: nothing is assumed of it.
            values = np.where(np.isnan(values), values, 0.0)
        elif spec.name != label and state in (LabelState.CORRECTED, LabelState.CONFIRMED):
            values = np.full_like(values, np.nan)
        columns[name] = pa.array(values.astype(columns[name].type.to_pandas_dtype()))
    if state in (LabelState.CORRECTED, LabelState.CONFIRMED):
        columns[ROW_COLUMN] = pa.array(columns[ROW_COLUMN].to_numpy() + state.number * _AGAIN)
    schema = encoded_schema(inputs)
    return pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)
