"""A chunk of raw rows as values per feature: checked against the schema, bad rows taken out. No fitting, no tables.

Fitting and encoding both start here, so a row that is bad for one is bad for the other: what a vocabulary counts is
exactly what gets encoded. A chunk with bad rows is read twice: once to find and report them, once without them.

    RawChunk ──► columns present? types right? ──► cells ──► faults? ──► report, filter, again ──► ParsedChunk

Ids of `identity` tables become rows right here, since they need no fitting and their range is checked here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import polars as pl

from ziggurat.data.preprocess.fit.moments import read_moments
from ziggurat.data.preprocess.values.cells import (
    LARGEST_FLOAT32,
    Faults,
    IdLists,
    MissingValues,
    canonical_strings,
    canonical_text,
    read_id_lists,
    read_ids,
    read_numbers,
    read_vectors,
    with_nulls,
    with_truths,
    wrong_type,
)
from ziggurat.data.preprocess.values.vocabulary import Ids, NumberedIds, Rows
from ziggurat.data.raw.bad_rows import BadReason, BadRows
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.raw.names import missing_column
from ziggurat.features.batch import NO_GROUP
from ziggurat.features.labels import is_number
from ziggurat.features.schema import (
    MISSING_ROW,
    NUM_RESERVED_ROWS,
    UNKNOWN_ROW,
    Categorical,
    Dense,
    Encoding,
    Label,
    MissingLabel,
    Moments,
    MultiHot,
    Outcomes,
    OutOfRange,
    Schema,
    Sequence,
    Table,
    Task,
    Vector,
    column_of,
    table_of,
)

_BINARY_WAYS = (
    'a label of texts: positive = "yes", negative = "no"',
    "a label of numbers: positive_from = 4.0",
    'a number to predict: task = "regression"',
)
_UNKNOWN_WAYS = (
    "take rows without a label out of the file: nothing is learned from a label that nobody knows",
    'keep them for the other labels of the schema: missing = "left_out" in the [[label]]',
)
_LARGEST_INTEGER = np.iinfo(np.int64).max


@dataclass(frozen=True, kw_only=True)
class ParsedLists:
    """The lists of ids of a feature: all values one after the other, and the (N,) length of each list."""

    values: Ids | NumberedIds | Rows
    lengths: np.ndarray


@dataclass(kw_only=True)
class ParsedChunk:
    """The usable rows of a chunk, by feature name.

    Args:
        global_rows: (N,) int64 numbers of the rows that are left.
        numbers: (N,) float64 of dense features, NaN where missing.
        ids: ids of categorical features, but not those of identity tables; numbered ones also of dense features that
            are looked up by their bucket.
        rows: (N,) int32 rows of categorical features with identity tables.
        lists: lists of multi-hot and sequence features, cut to their max_length.
        vectors: (N, dim) float32.
        moments: times of all lists of a feature, and the (N,) length of each list, both int64.
        labels: (N,) by label name; float32 of a binary one, float64 of one that is a number.
        weights: (N,) float32, or None.
        groups: (N,) int64 hashes of the group column (0 where it is missing), or None.
        sessions: the same of the session column; of training data alone.
        out_of_range: by feature, ids that were moved or sent to the unknown row.
        truncated: by feature, lists that were cut.
    """

    global_rows: np.ndarray
    numbers: dict[str, np.ndarray] = field(default_factory=dict)
    ids: dict[str, Ids | NumberedIds] = field(default_factory=dict)
    rows: dict[str, np.ndarray] = field(default_factory=dict)
    lists: dict[str, ParsedLists] = field(default_factory=dict)
    vectors: dict[str, np.ndarray] = field(default_factory=dict)
    moments: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    labels: dict[str, np.ndarray] = field(default_factory=dict)
    weights: np.ndarray | None = None
    groups: np.ndarray | None = None
    sessions: np.ndarray | None = None
    out_of_range: dict[str, int] = field(default_factory=dict)
    truncated: dict[str, int] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Rows of the chunk."""
        return len(self.global_rows)


def parse_chunk(schema: Schema, chunk: RawChunk, *, bad_rows: BadRows, with_labels: bool = True) -> ParsedChunk:
    """Read a chunk as the schema says.

    Args:
        schema: features, labels and roles.
        chunk: raw rows.
        bad_rows: where rows with faults go.
        with_labels: False for data to predict: labels and weights are not read, and the group column may be absent.

    Raises:
        SchemaError: a column is missing or of the wrong type.
        DataError: a bad row (policy ERROR).
        BoundsError: an id outside an identity table (policy ERROR).
    """
    chunk = with_truths(with_nulls(chunk, schema.missing_texts))
    faults = Faults(chunk=chunk)
    parsed = _parse(schema, chunk, faults, with_labels=with_labels)
    if not faults.found:
        return parsed
    clean = chunk.filter(faults.report(bad_rows))
    faults = Faults(chunk=clean)
    parsed = _parse(schema, clean, faults, with_labels=with_labels)
    assert not faults.found
    return parsed


def _parse(schema: Schema, chunk: RawChunk, faults: Faults, *, with_labels: bool) -> ParsedChunk:
    parsed = ParsedChunk(global_rows=chunk.global_rows)
    id_columns = [column_of(feature) for feature in schema.features if isinstance(feature, Categorical)]
    texts = canonical_strings(chunk.frame, [*id_columns, schema.group, schema.session])
    for feature in schema.features:
        column = column_of(feature)
        if isinstance(feature, Categorical) and _is_hashed(schema, feature) and column in chunk.spans:
            parsed.ids[feature.name] = Ids.of(chunk.spans[column])
            continue
        series = needed_column(chunk, column)
        role = f"{feature.kind} feature {feature.name!r}"
        if isinstance(feature, Dense):
            numbers = read_numbers(series, faults=faults, role=role)
            parsed.numbers[feature.name] = _without_missing(numbers, schema)
        elif isinstance(feature, Categorical):
            series = texts.get(column, series)
            _parse_categorical(parsed, feature, series, table=schema.table(table_of(feature)), faults=faults)
        elif isinstance(feature, Vector):
            parsed.vectors[feature.name] = read_vectors(series, dim=feature.dim, faults=faults, role=role)
        elif isinstance(feature, Moments):
            times, lengths = read_moments(series, faults=faults, role=role, seen=feature.seen)
            if len(lengths) and int(lengths.max()) > feature.max_length:
                parsed.truncated[feature.name] = int((lengths > feature.max_length).sum())
                times = times[_kept_positions(lengths, max_length=feature.max_length, keep_last=True)]
                lengths = np.minimum(lengths, feature.max_length)
            parsed.moments[feature.name] = (times, lengths)
        else:
            _parse_list(parsed, feature, series, table=schema.table(table_of(feature)), faults=faults)
    if with_labels:
        for label in schema.labels:
            parsed.labels[label.name] = parse_label(label, needed_column(chunk, column_of(label)), faults)
        if schema.weight:
            parsed.weights = _parse_weights(needed_column(chunk, schema.weight, role="weight"), faults)
        if schema.session:
            parsed.sessions = _parse_groups(schema.session, chunk, texts, faults, role="the session")
    if schema.group:
        if chunk.has_column(schema.group) or with_labels:
            parsed.groups = _parse_groups(schema.group, chunk, texts, faults)
        else:
            parsed.groups = np.full(chunk.num_rows, NO_GROUP, dtype=np.int64)
    return parsed


def _without_missing(numbers: np.ndarray, schema: Schema) -> np.ndarray:
    """NaN for numbers that the schema takes for nothing, also where text wrote them in another way ("-1.00")."""
    missing = MissingValues.of(schema.missing_texts).numbers
    if not missing or not (found := np.isin(numbers, missing)).any():
        return numbers
    return np.where(found, np.nan, numbers)


def needed_column(chunk: RawChunk, name: str, *, role: str = "") -> pl.Series:
    """A column that a chunk must have; a frame of the user's own may lack it.

    Args:
        chunk: raw rows.
        name: of the column.
        role: what it is for, in the error.

    Raises:
        SchemaError: it is not there.
    """
    if not chunk.has_column(name):
        raise missing_column(chunk.path, name, chunk.columns, asked=role)
    return chunk.column(name)


def _is_hashed(schema: Schema, feature: Categorical) -> bool:
    """Return whether a feature needs no more than the hashes of its ids."""
    return schema.table(table_of(feature)).encoding is not Encoding.IDENTITY


def _parse_categorical(
    parsed: ParsedChunk, feature: Categorical, series: pl.Series, *, table: Table, faults: Faults
) -> None:
    role = f"categorical feature {feature.name!r}"
    ids = read_ids(series, faults=faults, role=role)
    if table.encoding is not Encoding.IDENTITY:
        parsed.ids[feature.name] = Ids.of(ids)
        return
    owner = np.arange(len(ids))
    parsed.rows[feature.name], moved = identity_rows(ids, owner=owner, table=table, feature=feature, faults=faults)
    parsed.out_of_range[feature.name] = moved


def _parse_list(
    parsed: ParsedChunk, feature: MultiHot | Sequence, series: pl.Series, *, table: Table, faults: Faults
) -> None:
    role = f"{feature.kind} feature {feature.name!r}"
    separator = feature.separator or faults.chunk.list_separator
    lists = read_id_lists(
        series,
        separator=separator,
        faults=faults,
        role=role,
        spaces=feature.spaces,
        padding=feature.padding,
    )
    if len(lists.lengths) and int(lists.lengths.max()) > feature.max_length:
        parsed.truncated[feature.name] = int((lists.lengths > feature.max_length).sum())
        lists = _cut_lists(lists, max_length=feature.max_length, keep_last=isinstance(feature, Sequence))
    if table.encoding is Encoding.IDENTITY:
        owner = np.repeat(np.arange(len(lists.lengths)), lists.lengths)
        rows, moved = identity_rows(lists.values, owner=owner, table=table, feature=feature, faults=faults)
        parsed.out_of_range[feature.name] = moved
        parsed.lists[feature.name] = ParsedLists(values=Rows(rows), lengths=lists.lengths)
    else:
        parsed.lists[feature.name] = ParsedLists(values=Ids.of(lists.values), lengths=lists.lengths)


def _cut_lists(lists: IdLists, *, max_length: int, keep_last: bool) -> IdLists:
    keep = _kept_positions(lists.lengths, max_length=max_length, keep_last=keep_last)
    return IdLists(values=lists.values.filter(pl.Series(keep)), lengths=np.minimum(lists.lengths, max_length))


def _kept_positions(lengths: np.ndarray, *, max_length: int, keep_last: bool) -> np.ndarray:
    """Mark the values of lists that stay when each list is cut."""
    position = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    if keep_last:
        position = np.repeat(lengths, lengths) - 1 - position
    return position < max_length


def identity_rows(
    ids: pl.Series, *, owner: np.ndarray, table: Table, feature: Categorical | MultiHot | Sequence, faults: Faults
) -> tuple[np.ndarray, int]:
    """Rows of an identity table.

    Args:
        ids: (M,) canonical texts.
        owner: (M,) row of the chunk that each id belongs to.
        table: range and policy.
        feature: named in errors.
        faults: takes ids that are no integers, and those out of range if the policy is ERROR.

    Returns:
        (M,) int32 rows, and how many ids were out of range.
    """
    missing = ids.is_null().to_numpy()
    cast = ids.cast(pl.Int64, strict=False)
    numbers = cast.fill_null(0).to_numpy().copy()
    unread = cast.is_null().to_numpy() & ~missing
    column = column_of(feature)
    for index in np.flatnonzero(unread).tolist():
        text = ids[index]
        digits = text[1:] if text[:1] in "+-" else text
        if digits.isascii() and digits.isdigit():  # beyond 64 bits: certainly out of range
            numbers[index] = -1 if text[0] == "-" else _LARGEST_INTEGER
        else:
            faults.add(
                int(owner[index]),
                column=column,
                reason=BadReason.NOT_AN_INTEGER,
                expected=f"an integer 0 … {table.num_rows - 1} (identity table {table.name!r})",
                found=text,
                ways_out=('set encoding = "vocabulary" or "hashing" for the table',),
            )
    outside = ((numbers < 0) | (numbers >= table.num_rows)) & ~missing
    rows = np.clip(numbers, 0, table.num_rows - 1).astype(np.int32) + np.int32(NUM_RESERVED_ROWS)
    if outside.any():
        if table.out_of_range is OutOfRange.UNKNOWN:
            rows[outside] = UNKNOWN_ROW
        elif table.out_of_range is OutOfRange.ERROR:
            for index in np.flatnonzero(outside).tolist():
                faults.add(
                    int(owner[index]),
                    column=column,
                    reason=BadReason.OUT_OF_RANGE,
                    expected=f"an id 0 … {table.num_rows - 1} for feature {feature.name!r}",
                    found=ids[index],
                    ways_out=(f'raise num_rows of table {table.name!r}, or set out_of_range = "unknown" or "clamp"',),
                )
    rows[missing] = MISSING_ROW
    return rows, int(outside.sum())


def parse_label(label: Label, series: pl.Series, faults: Faults) -> np.ndarray:
    """Return the numbers of a label as `ParsedChunk.labels` has them; cells that are none, or nothing, are faults.

    Args:
        label: what it means.
        series: the raw column.
        faults: takes what cannot be a label.

    Raises:
        SchemaError: a column of another type altogether.
    """
    if label.positive:
        return _parse_label_of_texts(label, series, faults)
    ways = _BINARY_WAYS if label.task is Task.BINARY else ()
    values = read_numbers(series, faults=faults, role=f"label {label.name!r}", ways_out=ways)
    known = np.isfinite(values)
    if label.task is Task.BINARY and label.positive_from is not None:
        labels = (values >= label.positive_from).astype(np.float32)
        right = known
        expected = "a number"
    elif label.task is Task.BINARY:
        labels = values
        right = (values == 0) | (values == 1)
        expected = "0 or 1"
    else:
        labels = values
        right = known
        expected = "a finite number"
    if label.outcomes is Outcomes.POSITIVE_ONLY:
        right &= labels == 1
        expected += ", and a positive: outcomes = positive_only"
    unknown = np.zeros(len(series), dtype=bool)
    for index in np.flatnonzero(~right).tolist():
        cell = series[index]
        unknown[index] = cell is None or cell != cell or str(cell).strip().lower() in ("", "nan")
        if unknown[index] and label.missing is MissingLabel.LEFT_OUT:
            continue
        faults.add(
            index,
            column=series.name,
            reason=BadReason.BAD_LABEL,
            expected=f"{expected}, for {label.task.value} label {label.name!r}",
            found="nothing" if cell is None else cell,
            ways_out=_UNKNOWN_WAYS if unknown[index] else ways,
        )
    return _with_unknown(label, np.nan_to_num(labels), unknown=unknown)


def _with_unknown(label: Label, labels: np.ndarray, *, unknown: np.ndarray) -> np.ndarray:
    """Return the labels in their type, NaN where they are unknown and the rows stay all the same."""
    if label.missing is MissingLabel.LEFT_OUT:
        labels = np.where(unknown, np.nan, labels)
    return labels.astype(np.float64 if is_number(label) else np.float32)


def _parse_label_of_texts(label: Label, series: pl.Series, faults: Faults) -> np.ndarray:
    """1 where the canonical text is `positive`, 0 elsewhere; a third text is a fault if `negative` is set."""
    texts = canonical_text(series)
    if texts is None:
        raise wrong_type(series, faults.chunk, role=f"label {label.name!r}", expected="texts, numbers or booleans")
    texts = texts.str.strip_chars()
    wanted = canonical_text(pl.Series([label.positive, label.negative], dtype=pl.String))
    assert wanted is not None
    positive = (texts == wanted[0]).fill_null(False).to_numpy()
    unknown = (texts.is_null() | (texts == "")).fill_null(True).to_numpy()
    wrong = texts.is_null().to_numpy()
    if label.outcomes is Outcomes.POSITIVE_ONLY:
        wrong = wrong | ~positive
    if label.negative:
        wrong = wrong | ~(positive | (texts == wanted[1]).fill_null(False).to_numpy())
    if label.missing is MissingLabel.LEFT_OUT:
        wrong = wrong & ~unknown
    for index in np.flatnonzero(wrong).tolist():
        faults.add(
            index,
            column=series.name,
            reason=BadReason.BAD_LABEL,
            expected=f"{label.positive!r} or {label.negative or 'another text'!r}, for label {label.name!r}",
            found="nothing" if texts[index] is None else texts[index],
            ways_out=("take `negative` out of the label: then every other text is 0",) if label.negative else (),
        )
    return _with_unknown(label, positive, unknown=unknown)


def _parse_weights(series: pl.Series, faults: Faults) -> np.ndarray:
    values = read_numbers(series, faults=faults, role="the weight")
    for index in np.flatnonzero(~((values >= 0) & (values <= LARGEST_FLOAT32))).tolist():
        faults.add(
            index,
            column=series.name,
            reason=BadReason.BAD_WEIGHT,
            expected="a finite weight >= 0",
            found="nothing" if series[index] is None else series[index],
        )
    return np.nan_to_num(values).astype(np.float32)


def _parse_groups(
    name: str, chunk: RawChunk, texts: dict[str, pl.Series], faults: Faults, *, role: str = "the group"
) -> np.ndarray:
    """Groups (or sessions) as hashes of their ids; missing ones are group 0."""
    if name in chunk.spans:
        ids = Ids.of(chunk.spans[name])
    else:
        series = texts[name] if name in texts else needed_column(chunk, name, role=role.removeprefix("the "))
        ids = Ids.of(read_ids(series, faults=faults, role=role))
    groups = ids.keys.view(np.int64)
    return groups if ids.missing is None else np.where(ids.missing, NO_GROUP, groups)
