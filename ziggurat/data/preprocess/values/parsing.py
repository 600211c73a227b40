"""A chunk of raw rows as values per feature: checked against the schema, bad rows taken out. No fitting, no tables.

Fitting and encoding both start here, so a row that is bad for one is bad for the other: what a vocabulary counts is
exactly what gets encoded. A chunk with bad rows is read twice: once to find and report them, once without them.

    RawChunk ──► columns present? types right? ──► cells ──► faults? ──► report, filter, again ──► ParsedChunk

Ids of `identity` tables become rows right here, since they need no fitting and their range is checked here.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import polars as pl
import torch
from jaxtyping import Float32, Float64, Int32, Int64

from ziggurat.data.preprocess.fit.moments import read_moments
from ziggurat.data.preprocess.values.cells import (
    LARGEST_FLOAT32,
    Faults,
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
from ziggurat.data.preprocess.values.cells import IdLists as RawIdLists
from ziggurat.data.preprocess.values.vocabulary import Ids, NumberedIds, Rows
from ziggurat.data.raw.bad_rows import BadReason, BadRows
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.raw.names import missing_column
from ziggurat.errors import SchemaError, ZigguratError
from ziggurat.features.batch import NO_GROUP
from ziggurat.features.date_order import DateOrder
from ziggurat.features.inputs import LARGEST_OF_VECTORS, VectorHistory
from ziggurat.features.kinds import IdLists, TeacherHistory
from ziggurat.features.labels import YES_WORDS, is_number
from ziggurat.features.schema import (
    MISSING_ROW,
    NUM_RESERVED_ROWS,
    UNKNOWN_ROW,
    Encoding,
    Extra,
    Feature,
    Label,
    MissingLabel,
    Outcomes,
    OutOfRange,
    Schema,
    Table,
    column_of,
    table_of,
)
from ziggurat.ops import logarithm
from ziggurat.ops.vector_histories import pack_histories, unpack_histories

_UNKNOWN_WAYS = (
    "take rows without a label out of the file: nothing is learned from a label that nobody knows",
    'keep them for the other labels of the schema: missing = "left_out" in the [[label]]',
)
_SAME_WORDS = {
    "yes": frozenset(["y", "true"]),
    "y": frozenset(["yes", "true"]),
    "true": frozenset(["t", "yes"]),
    "t": frozenset(["true", "yes"]),
}
_MAX_TEXTS = 100  # of a label that are counted one by one in a chunk
_OTHER_TEXTS = "…"
_LOOKED_AT = 1000  # cells, to tell which texts a label has
_FEW_TEXTS = 50  # of more, none is likely to be the positive
_LARGEST_INTEGER = np.iinfo(np.int64).max


@dataclass(frozen=True, kw_only=True)
class ParsedLists:
    """The lists of ids of a feature: all values one after the other, and the (N,) length of each list."""

    values: Ids | NumberedIds | Rows
    lengths: np.ndarray


@dataclass(frozen=True, kw_only=True)
class ParsedTimes:
    """The times of the lists of a feature, one after the other, and the (N,) length of each list, both int64."""

    values: Int64[np.ndarray, " M"]
    lengths: Int64[np.ndarray, " N"]


# The values of a feature: numbers (N,) float64, NaN where missing; vectors (N, dim) float32; an id a row, or the row of
# an identity table; lists of ids, cut to their max_length; lists of times.
ParsedValues: TypeAlias = np.ndarray | Ids | NumberedIds | Rows | ParsedLists | ParsedTimes


@dataclass(kw_only=True)
class ParsedChunk:
    """The usable rows of a chunk, by feature name.

    Args:
        global_rows: (N,) int64 numbers of the rows that are left.
        features: values by feature name, in the order of the schema.
        labels: (N,) by label name; float32 of a binary one, float64 of one that is a number.
        extras: by name, (N,) or (N, dim) float32, NaN where missing.
        weights: (N,) float32, or None.
        groups: (N,) int64 hashes of the group column (0 where it is missing), or None.
        sessions: the same of the session column; of training data alone.
        out_of_range: by feature, ids that were moved or sent to the unknown row.
        truncated: by feature, lists that were cut.
        negatives: by label that has a `positive` and no `negative`, how often each other text stands there.
    """

    global_rows: np.ndarray
    features: dict[str, ParsedValues] = field(default_factory=dict)
    labels: dict[str, np.ndarray] = field(default_factory=dict)
    extras: dict[str, np.ndarray] = field(default_factory=dict)
    weights: np.ndarray | None = None
    groups: np.ndarray | None = None
    sessions: np.ndarray | None = None
    out_of_range: dict[str, int] = field(default_factory=dict)
    truncated: dict[str, int] = field(default_factory=dict)
    negatives: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Rows of the chunk."""
        return len(self.global_rows)


def parse_chunk(
    schema: Schema, chunk: RawChunk, *, bad_rows: BadRows, with_labels: bool = True, needs_extras: bool = True
) -> ParsedChunk:
    """Read a chunk as the schema says.

    Args:
        schema: features, labels and roles.
        chunk: raw rows.
        bad_rows: where rows with faults go.
        with_labels: False for data to predict: labels, extras and weights are not read, and the group column may be
            absent.
        needs_extras: False where no loss is computed: columns of extras may be absent, and are then missing.

    Raises:
        SchemaError: a column is missing or of the wrong type.
        DataError: a bad row (policy ERROR).
        BoundsError: an id outside an identity table (policy ERROR).
    """
    chunk = with_truths(with_nulls(chunk, schema.missing_texts)).with_number_columns(schema.numbers)
    # Rows are only noted here: whether one is an error or put aside is the policy of `bad_rows`.
    faults = Faults(chunk=chunk)
    parsed = _parse(schema, chunk, faults, with_labels=with_labels, needs_extras=needs_extras)
    if not faults.found:
        return parsed
    # Parsed again without them: counts of cut lists and of ids out of range speak of the rows that stay.
    clean = chunk.filter(faults.report(bad_rows))
    faults = Faults(chunk=clean)
    parsed = _parse(schema, clean, faults, with_labels=with_labels, needs_extras=needs_extras)
    # A cell that can be read does not depend on other rows, so the second look finds nothing new.
    assert not faults.found
    return parsed


def refuse_wrong_types(schema: Schema, chunk: RawChunk, *, with_labels: bool = True) -> None:
    """Refuse a chunk that has a column of a type which the schema makes nothing of; cells are not judged.

    Args:
        schema: features, labels and roles.
        chunk: raw rows.
        with_labels: False where labels are not in the chunk.

    Raises:
        SchemaError: a column is missing or of the wrong type.
    """
    # All cells of a column have one type, so a single row shows it; and all rows, where it has no cell to be shown.
    for rows in (chunk.filter(np.arange(chunk.num_rows) < 1), chunk):
        read = with_truths(with_nulls(rows, schema.missing_texts)).with_number_columns(schema.numbers)
        try:
            _parse(schema, read, Faults(chunk=read), with_labels=with_labels, needs_extras=False)
            return
        except SchemaError:
            if rows is chunk:
                raise


def _parse(schema: Schema, chunk: RawChunk, faults: Faults, *, with_labels: bool, needs_extras: bool) -> ParsedChunk:
    parsed = ParsedChunk(global_rows=chunk.global_rows)
    id_columns = [column_of(feature) for feature in schema.features if feature.is_id]
    # All columns of ids in one query: most need no change, which one look at all of them finds.
    texts = canonical_strings(chunk.frame, [*id_columns, schema.group, schema.session])
    missing = [name for name in map(column_of, schema.features) if not chunk.has_column(name)]
    if missing:
        raise missing_column(chunk.path, missing[0], chunk.columns, others=missing[1:])
    for feature in schema.features:
        cells = FeatureCells(feature, schema=schema, chunk=chunk, texts=texts, faults=faults)
        try:
            values = feature.parse(cells)
        except ZigguratError:
            raise
        except Exception as problem:
            # What one of our own kinds raises is a defect of ours, and its traceback says more.
            if type(feature).__module__.startswith("ziggurat."):
                raise
            raise _failed_parse(feature, problem, schema=schema, chunk=chunk) from problem
        # Our own kinds are looked at, too: it costs nothing beside parsing, and finds what a change of theirs breaks.
        _refuse_other_values(feature, values, num_rows=chunk.num_rows)
        parsed.features[feature.name] = values
        if cells.truncated:
            parsed.truncated[feature.name] = cells.truncated
        if cells.out_of_range is not None:
            parsed.out_of_range[feature.name] = cells.out_of_range
    if with_labels:
        for label in schema.labels:
            series = needed_column(chunk, column_of(label))
            parsed.labels[label.name] = parse_label(label, series, faults)
            if label.positive and not label.negative:
                parsed.negatives[label.name] = negative_texts(label, series)
        for extra in schema.extras:
            column = column_of(extra)
            if needs_extras or chunk.has_column(column):
                parsed.extras[extra.name] = _parse_extra(extra, needed_column(chunk, column), faults)
            else:
                # As if every cell was missing: the loss, which alone reads extras, is not computed.
                shape = (chunk.num_rows, extra.dim) if extra.dim else (chunk.num_rows,)
                parsed.extras[extra.name] = np.full(shape, np.nan, dtype=np.float32)
        if schema.weight:
            parsed.weights = _parse_weights(needed_column(chunk, schema.weight, role="weight"), faults)
        if schema.session:
            # Only with labels, because sessions serve training alone.
            parsed.sessions = _parse_groups(schema.session, chunk, texts, faults, role="the session")
    if schema.group:
        if chunk.has_column(schema.group) or with_labels:
            parsed.groups = _parse_groups(schema.group, chunk, texts, faults)
        else:
            # One group for all rows: metrics by group need labels, and there are none.
            parsed.groups = np.full(chunk.num_rows, NO_GROUP, dtype=np.int64)
    return parsed


def _failed_parse(feature: Feature, problem: Exception, *, schema: Schema, chunk: RawChunk) -> SchemaError:
    """Return the error for a kind from outside the package that raises, with the first row that it cannot parse."""
    where = f"{type(feature).__module__}.{type(feature).__qualname__}.parse, feature {feature.name!r}"
    of_none = _problem_of(feature, schema=schema, chunk=chunk.filter(np.zeros(chunk.num_rows, dtype=np.bool_)))
    if type(of_none) is type(problem) and str(of_none) == str(problem):
        # No cell is to blame where the same fails without any: the kind has a slip, or calls `cells` wrongly.
        frames = traceback.extract_tb(problem.__traceback__)
        file = getattr(sys.modules.get(type(feature).__module__), "__file__", None)
        last = next((frame for frame in reversed(frames) if frame.filename == file), frames[-1])
        return SchemaError(
            expected="a kind that parses any chunk, also one of no rows",
            found=f"{type(problem).__name__}: {problem!s:.200}, of a chunk without a row, too",
            where=f"{where}, at {last.filename}:{last.lineno}",
            ways_out="correct the kind; docs/guides/extending.md says what `parse` may call, and what it returns",
        )
    parsed = 0
    failing = chunk.num_rows
    # Bisection: a log of the rows as many trials, each of a chunk that grows or shrinks from its beginning.
    while failing - parsed > 1:  # the first `parsed` rows can be parsed, the first `failing` cannot
        middle = (parsed + failing) // 2
        if _problem_of(feature, schema=schema, chunk=chunk.filter(np.arange(chunk.num_rows) < middle)) is None:
            parsed = middle
        else:
            failing = middle
    place = chunk.where(failing - 1, column=column_of(feature)) if chunk.num_rows else str(chunk.path)
    return SchemaError(
        expected="a kind that parses every cell, or reads it by the methods of `cells`, which name a bad one",
        found=f"{type(problem).__name__}: {problem!s:.200}",
        where=f"{where}; {place}",
        ways_out=("correct the kind", "correct the cell", f"leave the feature {feature.name!r} out of the schema"),
    )


def _problem_of(feature: Feature, *, schema: Schema, chunk: RawChunk) -> Exception | None:
    """Return what a kind from outside the package raises when it parses a chunk; None where it parses it."""
    texts = canonical_strings(chunk.frame, [column_of(feature)] if feature.is_id else [])
    try:
        feature.parse(FeatureCells(feature, schema=schema, chunk=chunk, texts=texts, faults=Faults(chunk=chunk)))
    except Exception as problem:  # code of a user's may fail in any way
        return problem
    return None


def _refuse_other_values(feature: Feature, values: object, *, num_rows: int) -> None:
    """Refuse what a kind from outside the package may have parsed, and nothing after it can keep.

    Raises:
        SchemaError: no values of N rows in a form that is known, or no numbers where numbers are fitted.
    """
    fit = feature.fitted_numbers
    ways = ["return values.astype(np.float64) for numbers, with NaN where one is missing"]
    if isinstance(values, np.ma.MaskedArray):
        ways = ["return np.ma.filled(values.astype(np.float64), np.nan): a number that is missing is NaN"]
    elif values is None and isinstance(feature, IdLists):
        ways = [f"return cells.id_lists(self, keep_last={feature.is_ordered}) for the lists of the column"]
    elif values is None and feature.is_id:
        ways = ["return cells.ids() for the ids of the column"]
    if isinstance(values, list | tuple | pl.Series):
        settings = "self" if isinstance(feature, IdLists) else "zg.MultiHot(name=self.name)"
        ways.append(
            f"return cells.id_lists({settings}, keep_last=True, lists=pl.Series(values, dtype=pl.List(pl.String))) for "
            "lists of ids that the kind made itself"
        )
    if isinstance(values, np.ndarray):
        # `astype` alone would hand on the values behind the mask.
        is_plain = not isinstance(values, np.ma.MaskedArray)
        is_numbers = is_plain and values.ndim == 1 and values.dtype == np.float64
        is_known = is_numbers or (is_plain and values.ndim == 2 and values.dtype == np.float32)
        is_known = is_known or (is_plain and isinstance(feature, TeacherHistory) and values.ndim == 2)
        found = f"{'an' if is_plain else 'a masked'} array {values.shape} of {values.dtype}"
        size = len(values)
    else:
        is_numbers = fit is None or fit.transform.makes_ids
        is_known = isinstance(values, Ids | Rows | ParsedLists | ParsedTimes)
        found = f"a {type(values).__name__}"
        size = len(values.lengths) if isinstance(values, ParsedLists | ParsedTimes) else num_rows
    if is_known and size == num_rows and (fit is None or is_numbers):
        return
    raise SchemaError(
        expected=f"numbers ({num_rows},) of float64, vectors ({num_rows}, dim) of float32, or what `Cells` returned"
        + ("" if fit is None else "; numbers, as `fitted_numbers` wants to learn of them"),
        found=found,
        where=f"{type(feature).__module__}.{type(feature).__qualname__}.parse, feature {feature.name!r}",
        ways_out=(*ways, "correct the kind"),
    )


def offsets_of(lengths: np.ndarray) -> Int32[np.ndarray, " N"]:
    """Return where lists of these lengths begin, and where the last one ends."""
    # One more than lists, so that list i is values[offsets[i] : offsets[i + 1]].
    offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
    # Written behind the leading 0, in int32: a cumulative sum by itself would be int64.
    np.cumsum(lengths, out=offsets[1:])
    return offsets


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


def words_of_lists(series: pl.Series, history: VectorHistory) -> Int32[np.ndarray, "N W"]:
    """Pack lists of vectors, the latest first, of a request or of a table in memory; null is none.

    Raises:
        SchemaError: the column holds anything else.
    """
    num_rows = len(series)
    if series.null_count() == num_rows:
        return np.zeros((num_rows, history.words), dtype=np.int32)
    is_nested = isinstance(series.dtype, pl.List | pl.Array) and isinstance(series.dtype.inner, pl.List | pl.Array)
    vectors = series.explode().drop_nulls() if is_nested else None
    lengths_N = (
        series.list.len().fill_null(0).to_numpy().astype(np.int64) if isinstance(series.dtype, pl.List) else None
    )
    if (
        vectors is None
        or lengths_N is None
        or (lengths_N > history.length).any()
        or ((vectors.list.len() if isinstance(vectors.dtype, pl.List) else vectors.arr.len()) != history.dim).any()
    ):
        raise SchemaError(
            expected=f"lists of at most {history.length} vectors of {history.dim} numbers, the latest first",
            found=f"{series.dtype}, such as {series.drop_nulls()[0]!s:.80}",
            where=f"column {series.name!r}",
            ways_out=("let the join make it: leave the column out of the rows", "send null where nothing is known"),
        )
    flat_VD = vectors.explode().cast(pl.Float32).to_numpy().reshape(-1, history.dim)
    is_fit_V = (np.abs(flat_VD) <= LARGEST_OF_VECTORS).all(axis=1)  # False for NaN
    if not is_fit_V.all():
        raise SchemaError(
            expected=f"vectors of numbers of at most {LARGEST_OF_VECTORS:g}",
            found=f"{flat_VD[~is_fit_V][0]!s:.80}",
            where=f"column {series.name!r}",
            ways_out=("let the join make it: leave the column out of the rows", "send null where nothing is known"),
        )
    padded_NLD = np.zeros((num_rows, history.length, history.dim), dtype=np.float32)
    rows_V = np.repeat(np.arange(num_rows), lengths_N)
    places_V = np.arange(len(flat_VD)) - np.repeat(np.cumsum(lengths_N) - lengths_N, lengths_N)
    padded_NLD[rows_V, places_V] = flat_VD
    return pack_histories(torch.from_numpy(padded_NLD), torch.from_numpy(lengths_N), history=history).numpy()


def vectors_of_words(series: pl.Series, history: VectorHistory) -> pl.Series:
    """Return packed histories as lists of vectors, which `words_of_lists` packs into the same words."""
    vectors_NLD, is_there_NL = unpack_histories(torch.from_numpy(series.to_numpy().copy()), history=history)
    lists = [vectors_LD[:num].tolist() for vectors_LD, num in zip(vectors_NLD, is_there_NL.sum(dim=1), strict=True)]
    return pl.Series(series.name, lists, dtype=pl.List(pl.List(pl.Float32)))


class FeatureCells:
    """The column of one feature in a chunk, and ways to read it: `Cells` of `features/kinds/feature.py`.

    Args:
        feature: whose column it is.
        schema: of the feature.
        chunk: raw rows, in which texts that mean nothing are null.
        texts: columns of ids that are text, in canonical form.
        faults: takes the cells that cannot be read.

    Attributes:
        truncated: lists that were cut.
        out_of_range: ids of an identity table that were moved or sent to the unknown row; None of other tables.
    """

    def __init__(
        self, feature: Feature, *, schema: Schema, chunk: RawChunk, texts: Mapping[str, pl.Series], faults: Faults
    ) -> None:
        self.truncated = 0
        self.out_of_range: int | None = None
        self._feature = feature
        self._schema = schema
        self._chunk = chunk
        self._texts = texts
        self._faults = faults
        self._column = column_of(feature)
        self._role = f"{feature.kind} feature {feature.name!r}"

    @property
    def series(self) -> pl.Series:
        """The raw column, of whatever type the file has."""
        return needed_column(self._chunk, self._column)

    def numbers(self) -> Float64[np.ndarray, " N"]:
        """Return a number a row, NaN where missing."""
        numbers = read_numbers(self.series, faults=self._faults, role=self._role)
        # Text may write a number that the schema takes for nothing in another way ("-1.00").
        missing = MissingValues.of(self._schema.missing_texts).numbers
        # `isin` costs as much as parsing where almost no cell is missing, so most chunks end here.
        if not missing or not (found := np.isin(numbers, missing)).any():
            return numbers
        return np.where(found, np.nan, numbers)

    def ids(self) -> Ids | Rows:
        """Return an id a row; of an identity table its row, whose range is checked here."""
        table = self._schema.table(table_of(self._feature))
        is_identity = table.encoding is Encoding.IDENTITY
        if not is_identity and self._column in self._chunk.spans:
            return Ids.of(self._chunk.spans[self._column])
        series = self._texts.get(self._column)
        if series is None:
            series = self.series
        ids = read_ids(series, faults=self._faults, role=self._role)
        return self._identity(ids, owner=np.arange(len(ids)), table=table) if is_identity else Ids.of(ids)

    def ids_of_buckets(self, numbers: Float64[np.ndarray, " N"]) -> Ids:
        """Return the bucket of each number as an id, by the transform of `Feature.fitted_numbers`."""
        fit = self._feature.fitted_numbers
        if fit is None or not fit.transform.makes_ids:
            raise SchemaError(
                expected="a transform that makes ids of numbers",
                found="no fitted_numbers" if fit is None else f"transform = {fit.transform}",
                where=self._role,
                ways_out='return NumberFit(name=self.name, transform=NumericTransform("criteo_buckets"))',
            )
        buckets = pl.Series(fit.transform.bucket_ids(numbers, logarithm)).cast(pl.String)
        # NaN falls into some bucket too, so missing ones are taken out behind the transform.
        missing = np.isnan(numbers)
        return Ids.of(buckets.set(pl.Series(missing), None) if missing.any() else buckets)

    def id_lists(self, settings: IdLists, *, keep_last: bool, lists: pl.Series | None = None) -> ParsedLists:
        """Return a list of ids a row, cut to its first or its last ids.

        Raises:
            SchemaError: the column, or the kind's own `lists`, are no lists of ids of so many rows.
        """
        # A kind may hand over lists of its own making, which nobody has looked at yet.
        if lists is not None:
            self._refuse_other_lists(lists)
        raw = read_id_lists(
            self.series if lists is None else lists,
            separator=settings.separator or self._chunk.list_separator,
            faults=self._faults,
            role=self._role,
            spaces=settings.spaces,
            padding=settings.padding,
        )
        keep = self._kept(raw.lengths, max_length=settings.max_length, keep_last=keep_last)
        # The filter is on flat values, so lengths are cut separately and still agree with it.
        if keep is not None:
            lengths = np.minimum(raw.lengths, settings.max_length)
            raw = RawIdLists(values=raw.values.filter(pl.Series(keep)), lengths=lengths)
        table = self._schema.table(table_of(self._feature))
        if table.encoding is not Encoding.IDENTITY:
            return ParsedLists(values=Ids.of(raw.values), lengths=raw.lengths)
        # A fault in a flat value must be told by the row of the chunk that it stands in.
        owner = np.repeat(np.arange(len(raw.lengths)), raw.lengths)
        return ParsedLists(values=self._identity(raw.values, owner=owner, table=table), lengths=raw.lengths)

    def _refuse_other_lists(self, lists: object) -> None:
        """Refuse what is no column with a list for each row of the chunk."""
        found = f"a {type(lists).__name__}"
        if isinstance(lists, pl.Series):
            found = f"{len(lists):,} values of {lists.dtype}"
            inner = lists.dtype.inner if isinstance(lists.dtype, pl.List | pl.Array) else None
            inner = pl.Null() if lists.dtype == pl.Null else inner
            if _holds_ids(inner) and len(lists) == self._chunk.num_rows:
                return
        kind = type(self._feature)
        raise SchemaError(
            expected=f"a polars column with a list of ids (texts, integers, booleans) for each of "
            f"{self._chunk.num_rows:,} rows",
            found=found,
            where=f"{kind.__module__}.{kind.__qualname__}.parse, feature {self._feature.name!r}, "
            "argument 'lists' of cells.id_lists",
            ways_out=("give pl.Series(lists, dtype=pl.List(pl.String)), null or an empty list where there is none",),
        )

    def vectors(self, dim: int) -> Float32[np.ndarray, "N dim"]:
        """Return a vector a row, zeros where missing."""
        return read_vectors(self.series, dim=dim, faults=self._faults, role=self._role)

    def vector_histories(self, history: VectorHistory) -> Int32[np.ndarray, "N W"]:
        """Return the packed vectors of each row, none where missing."""
        series = self.series
        if series.dtype == pl.Array(pl.Int32, history.words) and not series.null_count():
            return series.to_numpy()
        return words_of_lists(series, history)

    def times(self, *, max_length: int, seen: tuple[int, ...], date_order: DateOrder = DateOrder.AUTO) -> ParsedTimes:
        """Return a list of times a row, cut to its last times; dates count microseconds."""
        times, lengths = read_moments(
            self.series, faults=self._faults, role=self._role, seen=seen, date_order=date_order
        )
        keep = self._kept(lengths, max_length=max_length, keep_last=True)
        if keep is not None:
            times = times[keep]
            lengths = np.minimum(lengths, max_length)
        return ParsedTimes(values=times, lengths=lengths)

    def refuse(self, row: int, *, expected: str, ways_out: tuple[str, ...] = ()) -> None:
        """Note that the cell in a row cannot be read: its row is a bad row.

        Args:
            row: from 0 on, of the rows at hand.
            expected: what it should be.
            ways_out: of the error.

        Raises:
            SchemaError: there is no such row.
        """
        # A bool is an int in Python, and True would be taken for row 1.
        if isinstance(row, bool) or not isinstance(row, int | np.integer) or not 0 <= row < self._chunk.num_rows:
            kind = type(self._feature)
            raise SchemaError(
                expected=f"a row from 0 to {self._chunk.num_rows - 1:,}",
                found=f"{row!r:.40}",
                where=f"{kind.__module__}.{kind.__qualname__}.parse, feature {self._feature.name!r}, cells.refuse",
                ways_out="give the place of the cell in cells.series",
            )
        self._faults.add(
            row,
            column=self._column,
            reason=BadReason.NOT_READABLE,
            expected=f"{expected}, for {self._role}",
            found=self.series[row],
            ways_out=ways_out,
        )

    def _kept(self, lengths: np.ndarray, *, max_length: int, keep_last: bool) -> np.ndarray | None:
        """Mark the values of lists that stay, and count the lists that are cut; None where none is."""
        if not len(lengths) or int(lengths.max()) <= max_length:
            return None
        self.truncated = int((lengths > max_length).sum())
        return _kept_positions(lengths, max_length=max_length, keep_last=keep_last)

    def _identity(self, ids: pl.Series, *, owner: np.ndarray, table: Table) -> Rows:
        rows, self.out_of_range = identity_rows(
            ids, owner=owner, table=table, feature=self._feature, faults=self._faults
        )
        return Rows(rows)


def _kept_positions(lengths: np.ndarray, *, max_length: int, keep_last: bool) -> np.ndarray:
    """Mark the values of lists that stay when each list is cut."""
    # Counts from 0 within each list: the running index less the index at which the list begins.
    position = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    if keep_last:
        # Counted from the end instead, so that the last values have the small numbers.
        position = np.repeat(lengths, lengths) - 1 - position
    return position < max_length


def identity_rows(
    ids: pl.Series, *, owner: np.ndarray, table: Table, feature: Feature, faults: Faults
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
    # A view of polars' buffer may be read-only, and numbers are written into below.
    numbers = cast.fill_null(0).to_numpy().copy()
    # Null behind the cast, but not before it: text that is no 64-bit integer.
    unread = cast.is_null().to_numpy() & ~missing
    column = column_of(feature)
    for index in np.flatnonzero(unread).tolist():
        text = ids[index]
        digits = text[1:] if text[:1] in "+-" else text
        if digits.isascii() and digits.isdigit():  # beyond 64 bits: certainly out of range
            # Clipping, or the unknown row, then treats it like any other id beyond the table.
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
    # Reserved rows stand in front, so id 0 is the first row behind them.
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
    # Last of all, because a missing id was read as 0 above.
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
    ways = _ways_to_name_the_positive(label, series)
    ways = ways or label.task.ways_out
    values = read_numbers(series, faults=faults, role=f"label {label.name!r}", ways_out=ways)
    # NaN and infinity are no known labels, in whatever way the text wrote them.
    known = np.isfinite(values)
    if label.task.has_positives and label.positive_from is not None:
        labels = (values >= label.positive_from).astype(np.float32)
        right = known
        expected = "a number"
    else:
        labels = values
        right = known & label.task.possible(values)
        expected = label.task.expected
    if label.outcomes is Outcomes.POSITIVE_ONLY:
        right &= labels == 1
        expected += ", and a positive: outcomes = positive_only"
    unknown = np.zeros(len(series), dtype=bool)
    for index in np.flatnonzero(~right).tolist():
        cell = series[index]
        # Comparing a cell with itself finds NaN among floats; a text may spell it.
        unknown[index] = cell is None or cell != cell or str(cell).strip().lower() in ("", "nan")
        if unknown[index] and label.missing is MissingLabel.LEFT_OUT:
            continue
        faults.add(
            index,
            column=series.name,
            reason=BadReason.BAD_LABEL,
            expected=f"{expected}, for {label.task.value} label {label.name!r}",
            found="" if cell is None else cell,
            ways_out=_UNKNOWN_WAYS if unknown[index] else ways,
        )
    # A place of an unknown label needs some number before the cast; NaN is put back after it.
    return _with_unknown(label, np.nan_to_num(labels), unknown=unknown)


def _with_unknown(label: Label, labels: np.ndarray, *, unknown: np.ndarray) -> np.ndarray:
    """Return the labels in their type, NaN where they are unknown and the rows stay all the same."""
    if label.missing is MissingLabel.LEFT_OUT:
        labels = np.where(unknown, np.nan, labels)
    return labels.astype(np.float64 if is_number(label) else np.float32)


def _parse_label_of_texts(label: Label, series: pl.Series, faults: Faults) -> np.ndarray:
    """1 where the canonical text is `positive`, 0 elsewhere; a third text is a fault if `negative` is set."""
    texts = canonical_text(series)
    # Through the same canonical form as the cells, so that 1 in the schema meets 1.0 in a column of floats.
    wanted = canonical_text(pl.Series([label.positive, label.negative], dtype=pl.String))
    if texts is None or wanted is None:
        raise wrong_type(series, faults.chunk, role=f"label {label.name!r}", expected="texts, numbers or booleans")
    texts = texts.str.strip_chars()
    # A comparison with null is null, and a null label is never a positive.
    positive = (texts == wanted[0]).fill_null(False).to_numpy()
    unknown = (texts.is_null() | (texts == "")).fill_null(True).to_numpy()
    wrong = unknown.copy()
    if label.outcomes is Outcomes.POSITIVE_ONLY:
        wrong = wrong | ~positive
    if label.negative:
        wrong = wrong | ~(positive | (texts == wanted[1]).fill_null(False).to_numpy())
    if label.missing is MissingLabel.LEFT_OUT:
        wrong = wrong & ~unknown
    same_meaning = _says_positive(label, texts) & ~positive
    wrong = wrong | same_meaning
    other = repr(label.negative) if label.negative else "another text"
    for index in np.flatnonzero(wrong).tolist():
        ways_out: tuple[str, ...] = ()
        if unknown[index]:
            ways_out = _UNKNOWN_WAYS
        elif label.negative:
            ways_out = ("take `negative` out of the label: then every other text is 0",)
        elif same_meaning[index]:
            ways_out = (
                f"write {label.positive!r} there too: it seems to mean the same, and would count as 0",
                f"where it is a negative, name it: negative = {texts[index]!r}",
            )
        faults.add(
            index,
            column=series.name,
            reason=BadReason.BAD_LABEL,
            expected=f"{label.positive!r} or {other}, for label {label.name!r}",
            found=texts[index] or "",
            ways_out=ways_out,
        )
    return _with_unknown(label, positive, unknown=unknown)


def _ways_to_name_the_positive(label: Label, series: pl.Series) -> tuple[str, ...]:
    """Say how a schema names the positive of a binary label of few texts, by these texts; () of other columns."""
    if series.dtype != pl.String or not label.task.has_positives or label.positive_from is not None:
        return ()
    # A look at the beginning is enough for a way out in an error.
    texts = series.head(_LOOKED_AT).drop_nulls().str.strip_chars()
    texts = texts.filter((texts != "") & texts.cast(pl.Float64, strict=False).is_null())
    values = texts.unique().sort().to_list()
    if not 2 <= len(values) <= _FEW_TEXTS:
        return ()
    # False sorts before True, so words like "yes" come first.
    likely = sorted(values, key=lambda text: text.lower() not in YES_WORDS)[:3]
    ways: list[str] = []
    for value in likely:
        other = next(text for text in values if text != value)
        negative = f", negative = {json.dumps(other, ensure_ascii=False)}" if len(values) == 2 else ""
        ways.append(f"in the [[label]] of the schema: positive = {json.dumps(value, ensure_ascii=False)}{negative}")
    return tuple(ways)


def negative_texts(label: Label, series: pl.Series) -> dict[str, int]:
    """Count the texts of a label that are not its `positive`; of many only the most frequent ones, the rest as one.

    Args:
        label: with a `positive`.
        series: the raw column.
    """
    texts = canonical_text(series)
    assert texts is not None, "read as a label before"
    texts = texts.str.strip_chars()
    positive = canonical_text(pl.Series([label.positive], dtype=pl.String))
    others = texts.filter(((texts != "") & (texts != positive[0])).fill_null(False)) if positive is not None else texts
    counts = others.value_counts(sort=True)
    found = {str(text): int(count) for text, count in counts.head(_MAX_TEXTS).iter_rows()}
    # The slice is empty where there are few texts, and its sum is then 0.
    if rest := int(counts["count"][_MAX_TEXTS:].sum()):
        # A label may really have this text, which then counts among the rest.
        found[_OTHER_TEXTS] = found.get(_OTHER_TEXTS, 0) + rest
    return found


def third_texts_note(label: Label, negatives: Mapping[str, int], *, num_rows: int) -> str:
    """Say which texts count as 0 beside the most frequent negative of a label; "" where there is one negative alone.

    Args:
        label: with a `positive` and no `negative`.
        negatives: how often each text stands there that is not the positive.
        num_rows: all rows of the label.
    """
    if len(negatives) < 2:
        return ""
    # Ties are broken by the text, so that the note is the same on every run.
    usual = max((text for text in negatives if text != _OTHER_TEXTS), key=lambda text: (negatives[text], text))
    thirds = {text: count for text, count in negatives.items() if text != usual}
    most = sorted(thirds, key=lambda text: -thirds[text])[:3]
    total = sum(thirds.values())
    return (
        f"label {label.name!r}: {total:,} of {num_rows:,} rows ({total / max(num_rows, 1):.2%}) are neither "
        f"{label.positive!r} nor {usual!r}, such as {', '.join(map(repr, most))}: they count as 0; where that is "
        f"wrong, negative = {json.dumps(usual, ensure_ascii=False)} in the [[label]] makes them bad rows"
    )


def _says_positive(label: Label, texts: pl.Series) -> np.ndarray:
    """Mark texts that say what `positive` says in other letters or words; none where the schema names the negative.

    "1" beside "yes" is a label of another file, and no negative. Where `positive` is a number, numbers are classes.
    """
    if label.negative:
        return np.zeros(len(texts), dtype=bool)
    wanted = label.positive.strip().lower()
    same = {wanted}
    # Where the positive is a number, 1 may well be another class.
    if not _is_number_text(wanted):
        same |= {"1", "true"}
    same |= _SAME_WORDS.get(wanted, frozenset())
    return texts.str.to_lowercase().is_in(sorted(same)).fill_null(False).to_numpy()


def _is_number_text(text: str) -> bool:
    """Return whether a text is a number."""
    return text.lstrip("+-").replace(".", "", 1).isdigit()


def _parse_extra(extra: Extra, series: pl.Series, faults: Faults) -> Float32[np.ndarray, "N ..."]:
    """Return the numbers of an extra column, NaN where a cell is missing; cells that are none are faults."""
    role = f"extra {extra.name!r}"
    if not extra.dim:
        return read_numbers(series, faults=faults, role=role).astype(np.float32)
    vectors = read_vectors(series, dim=extra.dim, faults=faults, role=role)
    # `read_vectors` gives zeros for a null, which a loss could not tell from true zeros.
    vectors[series.is_null().to_numpy()] = np.nan
    return vectors


def _parse_weights(series: pl.Series, faults: Faults) -> np.ndarray:
    values = read_numbers(series, faults=faults, role="the weight")
    # Written as a negation, because NaN fails every comparison and must be found too.
    for index in np.flatnonzero(~((values >= 0) & (values <= LARGEST_FLOAT32))).tolist():
        faults.add(
            index,
            column=series.name,
            reason=BadReason.BAD_WEIGHT,
            expected="a finite weight >= 0",
            found="" if series[index] is None else series[index],
        )
    return np.nan_to_num(values).astype(np.float32)


def _parse_groups(
    name: str, chunk: RawChunk, texts: dict[str, pl.Series], faults: Faults, *, role: str = "the group"
) -> np.ndarray:
    """Groups (or sessions) as hashes of their ids; missing ones are group 0."""
    if name in chunk.spans:
        ids = Ids.of(chunk.spans[name])
    else:
        # Ids are usually converted in one query with the features, and are then in `texts`.
        series = texts[name] if name in texts else needed_column(chunk, name, role=role.removeprefix("the "))
        ids = Ids.of(read_ids(series, faults=faults, role=role))
    # The same 64 bits read as signed: the stored column is int64, and only equality counts.
    groups = ids.keys.view(np.int64)
    return groups if ids.missing is None else np.where(ids.missing, NO_GROUP, groups)


def _holds_ids(inner: object) -> bool:
    """Return whether lists of this type may be ids."""
    if isinstance(inner, pl.DataType) and (inner.is_integer() or isinstance(inner, pl.Categorical | pl.Enum)):
        return True
    return inner in (pl.String, pl.Boolean, pl.Null)
