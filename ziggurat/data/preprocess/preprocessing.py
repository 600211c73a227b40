"""Preprocessing: fitted on the training rows once, then raw values in, the same rows out, for ever.

    source = RawSource("train.parquet")
    preprocessing = Preprocessing.fit(schema, source.frames(columns=schema.columns))
    table = preprocessing.encode(chunk)                    # Arrow, see data/encoded/records.py
    batch = preprocessing.batch({"user": ["u7"], …})       # a few rows for a model
    save_preprocessing(…, folder); load_preprocessing(folder) # JSON and Parquet, checksummed

Fitting streams over the rows in one pass: it counts ids (a table shared by several features counts them all, lists
too) and gathers the numbers' statistics. Neither fitting nor encoding depends on the size of the chunks, and the raw
type of an id (integer, float with nulls, text) does not matter: see `cells.py`.

What the reserved rows mean, and what happens to ids out of range, is said in `features/schema.py`.

Cost, on two cores: fitting and encoding about 1 µs a row of Criteo each; memory: the ids of the vocabularies.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import polars as pl
import pyarrow as pa
from jaxtyping import Float32, Float64, Int32

from ziggurat.config import to_json
from ziggurat.data.encoded.records import (
    GROUP_COLUMN,
    ROW_COLUMN,
    SESSION_COLUMN,
    WEIGHT_COLUMN,
    encoded_schema,
    extra_column,
    extra_type,
    label_column,
    label_type,
    table_to_batch,
)
from ziggurat.data.preprocess.fit.fitter import Fitter
from ziggurat.data.preprocess.values.grown import GrownVocabulary
from ziggurat.data.preprocess.values.numeric import NumericState, to_bucket_rows, to_floats
from ziggurat.data.preprocess.values.parsing import ParsedChunk, offsets_of, parse_chunk
from ziggurat.data.preprocess.values.vocabulary import Ids, NumberedIds, Rows, Vocabulary
from ziggurat.data.raw.bad_rows import BadRows
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.raw.written_numbers import PLAIN_NUMBERS, WrittenNumbers
from ziggurat.errors import SchemaError, ZigguratError
from ziggurat.features.batch import Batch
from ziggurat.features.growing import NUM_NUMBERS, Growing
from ziggurat.features.inputs import (
    ExtraSpec,
    InputSpec,
    JaggedSpec,
    LabelSpec,
    MomentsSpec,
    NumberSpec,
    SingleSpec,
    TableSpec,
    VectorSpec,
)
from ziggurat.features.kinds.feature import Encoded, Spec
from ziggurat.features.schema import (
    MISSING_ROW,
    NUM_RESERVED_ROWS,
    UNKNOWN_ROW,
    Encoding,
    Feature,
    Label,
    Schema,
    column_of,
    table_of,
)

_PARALLEL_ROWS = 65_536  # below, handing a feature to a thread costs more than encoding it


@dataclass(kw_only=True)
class FeatureCounters:
    """Counts of what encoding met in one feature since the `Preprocessing` was made.

    Args:
        ids: ids looked up (rows, for numbers).
        unknown: ids that are not in the vocabulary.
        missing: nulls (in lists: null elements).
        out_of_range: ids outside an identity table that were moved or made unknown.
        truncated: lists that were cut to max_length.
    """

    ids: int = 0
    unknown: int = 0
    missing: int = 0
    out_of_range: int = 0
    truncated: int = 0


def numeric_columns(schema: Schema, *, with_labels: bool = True, with_extras: bool = False) -> tuple[str, ...]:
    """Return the columns that the schema reads as numbers alone: what `RawSource.frames(numbers=…)` wants.

    Those whose numbers are written in a way of their own are not among them: readers of files know nothing of it.
    """
    dense = {column_of(item) for item in schema.features if item.reads_numbers}
    if with_labels:
        dense |= {column_of(label) for label in schema.labels if not label.positive} | ({schema.weight} - {""})
    if with_extras:
        dense |= {column_of(extra) for extra in schema.extras if not extra.dim}
    others = {column_of(item) for item in schema.features if not item.reads_numbers}
    others |= {column_of(label) for label in schema.labels if label.positive}
    others |= {column_of(extra) for extra in schema.extras if extra.dim}
    others |= {each.column for each in schema.numbers}
    # A column that is read in another way as well has to stay as the file writes it.
    return tuple(sorted(dense - others - {schema.group, schema.session, schema.time}))


def id_columns(schema: Schema) -> tuple[str, ...]:
    """Columns that the schema only hashes or looks up: what `RawSource.frames(ids=…)` wants."""
    hashed: set[str] = {schema.group, schema.session} - {""}
    others: set[str] = {schema.weight, schema.time} | {column_of(item) for item in (*schema.labels, *schema.extras)}
    for feature in schema.features:
        is_hashed = feature.is_id and schema.table(table_of(feature)).encoding is not Encoding.IDENTITY
        (hashed if is_hashed else others).add(column_of(feature))
    # Text is needed as soon as anything reads the column otherwise than by its hash.
    return tuple(sorted(hashed - others))


class Preprocessing:
    """Fitted vocabularies and statistics of one schema; made by `fit` or `load_preprocessing` (`preprocessing_io.py`).

    Args:
        schema: what the columns mean.
        vocabularies: by table name, for every table with a vocabulary.
        numbers: by feature name, for every dense feature; by `label_column`, for every label that is a number.
        grown: by table name, what training made of growing vocabularies; without it their ids are encoded as numbers.
            The fingerprint, which says how data is encoded for training, knows nothing of it.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        vocabularies: Mapping[str, Vocabulary],
        numbers: Mapping[str, NumericState],
        grown: Mapping[str, GrownVocabulary] | None = None,
    ) -> None:
        self.schema = schema
        self.vocabularies = dict(vocabularies)
        self.grown = dict(grown or {})
        self.numbers = dict(numbers)
        self.inputs = inputs_of_schema(schema, self.vocabularies, numbers=self.numbers)
        self._types = {entry.name: entry.type for entry in encoded_schema(self.inputs, with_labels=False)}
        self.counters: dict[str, FeatureCounters] = {item.name: FeatureCounters() for item in schema.features}
        self.negatives: dict[str, Counter[str]] = {item.name: Counter() for item in schema.labels}
        self.num_labelled = 0
        # Made when it is asked for: it hashes every vocabulary.
        self._fingerprint = ""

    def with_grown(self, grown: Mapping[str, GrownVocabulary], *, where: str = "a grown vocabulary") -> Preprocessing:
        """The same, with rows for the ids of growing vocabularies, read from `where`.

        Raises:
            CheckpointError: they name ids by numbers of a version before.
        """
        for table, each in grown.items():
            each.refuse_older(table, where=where)
        return Preprocessing(self.schema, vocabularies=self.vocabularies, numbers=self.numbers, grown=grown)

    @staticmethod
    def fit(schema: Schema, chunks: Iterable[RawChunk], *, bad_rows: BadRows | None = None) -> Preprocessing:
        """Fit on the training rows, in one pass.

        Args:
            schema: what the columns mean; its labels are checked too.
            chunks: the training rows, in order.
            bad_rows: where rows with faults go; by default the first one is an error.

        Raises:
            SchemaError: a column is missing or of the wrong type.
            DataError: a bad row (policy ERROR).
        """
        fitter = Fitter(schema)
        bad_rows = bad_rows or BadRows()
        for chunk in chunks:
            # Nothing is fitted to extras, and a stream joins those of a teacher only when it encodes.
            fitter.add(parse_chunk(schema, chunk, bad_rows=bad_rows, needs_extras=False))
        fitted = fitter.finish()
        return Preprocessing(schema, vocabularies=fitted.vocabularies, numbers=fitted.numbers)

    def encode(
        self,
        chunk: RawChunk,
        *,
        bad_rows: BadRows | None = None,
        with_labels: bool = True,
        needs_extras: bool = True,
    ) -> pa.Table:
        """Raw rows to encoded rows.

        Args:
            chunk: raw rows; columns that the schema does not name are ignored.
            bad_rows: where rows with faults go; by default the first one is an error.
            with_labels: False for data to predict, which needs neither labels nor weights nor extras.
            needs_extras: False where no loss is computed: columns of extras may be absent, and are then missing.

        Returns:
            A table with the columns of `records.encoded_schema`; without the bad rows.

        Raises:
            SchemaError: a column is missing or of the wrong type.
            DataError: a bad row (policy ERROR).
            BoundsError: an id outside an identity table (policy ERROR); names feature and row.
        """
        parsed = parse_chunk(
            self.schema, chunk, bad_rows=bad_rows or BadRows(), with_labels=with_labels, needs_extras=needs_extras
        )
        if with_labels:
            # Behind the parse: of a chunk with a bad row nothing is counted where that is an error.
            self.num_labelled += parsed.num_rows
            for name, counts in parsed.negatives.items():
                self.negatives[name].update(counts)
        return self.encode_parsed(parsed, with_labels=with_labels)

    def encode_parsed(
        self,
        parsed: ParsedChunk,
        *,
        with_labels: bool = True,
        row_of_number: Mapping[str, Int32[np.ndarray, " K"]] | None = None,
    ) -> pa.Table:
        """Parsed rows to encoded rows: the second half of `encode`.

        Args:
            parsed: from `parse_chunk`, or from `Fitter.add`.
            with_labels: as in `encode`.
            row_of_number: from `Fitter.finish`, for rows from `Fitter.add`.
        """
        rows_of = row_of_number or {}
        if parsed.num_rows < _PARALLEL_ROWS:
            encoded = [self._encode_feature(feature, parsed, rows_of) for feature in self.schema.features]
        else:
            # Threads, since hashing and look-ups run in native code; each feature has counters of its own.
            with ThreadPoolExecutor(pl.thread_pool_size()) as pool:
                encoded = list(
                    pool.map(lambda feature: self._encode_feature(feature, parsed, rows_of), self.schema.features)
                )
        columns = {feature.name: column for feature, column in zip(self.schema.features, encoded, strict=True)}
        for name, labels in parsed.labels.items():
            columns[label_column(name)] = pa.array(labels, type=label_type(self.inputs))
        for name, extras in parsed.extras.items():
            columns[extra_column(name)] = _array(extras, extra_type(extras.shape[1] if extras.ndim == 2 else 0))
        if parsed.weights is not None:
            columns[WEIGHT_COLUMN] = pa.array(parsed.weights)
        if parsed.groups is not None:
            columns[GROUP_COLUMN] = pa.array(parsed.groups)
        if parsed.sessions is not None:
            columns[SESSION_COLUMN] = pa.array(parsed.sessions)
        columns[ROW_COLUMN] = pa.array(parsed.global_rows)
        schema = encoded_schema(self.inputs, with_labels=with_labels)
        return pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)

    def batch(
        self,
        frame: pl.DataFrame | pa.Table | Mapping[str, Sequence[object] | pl.Series | np.ndarray],
        *,
        with_labels: bool = False,
        first_row: int = 0,
        numbers: WrittenNumbers = PLAIN_NUMBERS,
        list_separator: str = "",
    ) -> Batch:
        """A few raw rows as a batch for a model.

        Args:
            frame: the columns of the schema's features (and labels, with `with_labels`).
            with_labels: whether to read labels and weights too.
            first_row: number of the first row in errors, for a part of a frame.
            numbers: how numbers are written in columns of text; columns of numbers are taken as they are.
            list_separator: what divides lists in columns of text, where the schema does not say it.

        Raises:
            SchemaError, DataError, BoundsError: as `encode`.
        """
        rows = frame if isinstance(frame, pl.DataFrame) else pl.DataFrame(frame)
        chunk = replace(RawChunk.of(rows), first_row=first_row, numbers=numbers, list_separator=list_separator)
        table = self.encode(chunk, with_labels=with_labels)
        return table_to_batch(table, self.inputs)

    @property
    def fingerprint(self) -> str:
        """32 hex digits that change with the schema or anything fitted, and with nothing else."""
        if not self._fingerprint:
            state = {
                "schema": self.schema.to_state(),
                "numbers": {name: to_json(state) for name, state in sorted(self.numbers.items())},
                "vocabularies": {name: item.digest() for name, item in sorted(self.vocabularies.items())},
            }
            # Keys are sorted, or equal states could be written in two orders.
            content = json.dumps(state, sort_keys=True).encode()
            self._fingerprint = hashlib.blake2b(content, digest_size=16).hexdigest()
        return self._fingerprint

    def difference(self, other: Preprocessing) -> str:
        """Say in what another preprocessing differs; "" where it was fitted to the same rows by the same schema.

        Schema and vocabularies must be equal. Statistics are floating-point numbers, and only have to be close.
        """
        if self.schema.to_state() != other.schema.to_state():
            return "the schema"
        for table, vocabulary in self.vocabularies.items():
            if vocabulary.digest() != other.vocabularies[table].digest():
                return f"the vocabulary of table {table!r}"
        for feature, state in self.numbers.items():
            if not state.is_close(other.numbers[feature]):
                return f"the statistics of feature {feature!r}"
        return ""

    def _encode_feature(
        self,
        feature: Feature,
        parsed: ParsedChunk,
        row_of_number: Mapping[str, np.ndarray],
    ) -> pa.Array:
        name = feature.name
        counters = self.counters[feature.name]
        counters.out_of_range += parsed.out_of_range.get(name, 0)
        counters.truncated += parsed.truncated.get(name, 0)
        values = parsed.features[name]
        fitted = _FittedFeature(self, feature, row_of_number=row_of_number)
        # A kind of the user's own may fail in any way; in ours it would be a mistake, whose traceback is wanted.
        is_own = not type(feature).__module__.startswith("ziggurat.")
        try:
            encoded = feature.encode(values, fitted)
        except ZigguratError:
            raise
        except Exception as problem:
            if not is_own:
                raise
            found = f"{type(problem).__name__}: {problem!s:.200}"
            raise _other_form(feature, found, kind=self._types[name], num_rows=parsed.num_rows) from problem
        if is_own:
            # Ours are tested to keep to this, and the look would cost each of their chunks.
            _refuse_other_arrays(feature, encoded, kind=self._types[name], num_rows=parsed.num_rows)
            self._refuse_other_rows(feature, encoded)
            _refuse_undefined(feature, encoded, parsed)
        # Of lists the flat values, so that an element counts like an id of a row.
        flat = encoded[0] if isinstance(encoded, tuple) else encoded
        # Counted in what was encoded, where a reserved row says that an id is missing or unknown.
        counters.ids += len(flat)
        if table_of(feature):
            counters.missing += int(np.count_nonzero(flat == MISSING_ROW))
            counters.unknown += int(np.count_nonzero(flat == UNKNOWN_ROW))
        elif isinstance(values, np.ndarray) and values.ndim == 1:
            counters.missing += int(np.count_nonzero(np.isnan(values)))
        return _column(encoded, self._types[name], feature=feature, num_rows=parsed.num_rows)

    def _refuse_other_rows(self, feature: Feature, encoded: Encoded) -> None:
        """Refuse rows that the feature's table does not have, of a kind from outside the package."""
        table = table_of(feature)
        # A growing table has numbers of 64 bits here, which no number of rows bounds.
        if not table or table in self.grown or self.schema.table(table).encoding is Encoding.GROWING:
            return
        rows = encoded[0] if isinstance(encoded, tuple) else encoded
        num_rows = next(spec.num_rows for spec in self.inputs.tables if spec.name == table)
        outside = rows[(rows < 0) | (rows >= num_rows)]
        if len(outside):
            raise SchemaError(
                expected=f"rows of table {table!r}, from 0 to {num_rows - 1:,}",
                found=f"{len(outside):,} others, the first is {outside[0]}",
                where=f"{type(feature).__module__}.{type(feature).__qualname__}.encode, feature {feature.name!r}",
                ways_out=("return what `fitted.rows` gave", "correct the kind"),
            )

    def rows(
        self, table_name: str, ids: Ids | NumberedIds | Rows, row_of_number: Mapping[str, np.ndarray]
    ) -> np.ndarray:
        """Return (N,) int32 rows of ids, by number, vocabulary or hashing; numbers of 64 bits where the table grows."""
        if isinstance(ids, Rows):
            return ids.rows
        # Ids that the fitter has numbered: one look-up in its table, in place of another search.
        if isinstance(ids, NumberedIds):
            return row_of_number[table_name].take(ids.numbers)
        if table_name in self.vocabularies:
            return self.vocabularies[table_name].rows(ids)
        table = self.schema.table(table_name)
        num_rows, kind = (NUM_NUMBERS, np.int64) if table.encoding is Encoding.GROWING else (table.num_rows, np.int32)
        # Hashed: the key of an id, modulo the rows behind the reserved ones.
        rows = (ids.keys % np.uint64(num_rows)).astype(kind) + kind(NUM_RESERVED_ROWS)
        if ids.missing is not None:
            rows[ids.missing] = MISSING_ROW
        return self.grown[table_name].rows(rows) if table_name in self.grown else rows


def _refuse_other_arrays(feature: Feature, encoded: object, *, kind: pa.DataType, num_rows: int) -> None:
    """Refuse what is neither an array nor an array with the length of each list, of a kind from outside the package."""
    found = _why_no_array(encoded)
    if isinstance(encoded, tuple) and not found:
        values, lengths = encoded
        if lengths.dtype.kind not in "iu" or lengths.ndim != 1:
            found = f"lengths of {lengths.dtype} in {lengths.ndim} dimensions"
        elif len(lengths) != num_rows or (lengths < 0).any() or int(lengths.sum()) != len(values):
            found = f"{len(values):,} values, and {len(lengths):,} lengths that add up to {int(lengths.sum()):,}"
    if found:
        raise _other_form(feature, found, kind=kind, num_rows=num_rows)


def _why_no_array(encoded: object) -> str:
    """Return what stands in the place of arrays of numbers; "" if nothing does."""
    if isinstance(encoded, tuple) and len(encoded) != 2:
        return f"a tuple of {len(encoded)}"
    for each in encoded if isinstance(encoded, tuple) else (encoded,):
        if not isinstance(each, np.ndarray) or isinstance(each, np.ma.MaskedArray):
            return f"{type(each).__name__} {each!r:.60}"
        if each.dtype.kind not in "iufb" or not each.ndim:
            return f"an array of {each.dtype} in {each.ndim} dimensions"
    return ""


def _column(encoded: Encoded, kind: pa.DataType, *, feature: Feature, num_rows: int) -> pa.Array:
    """Return what a feature encoded as a column of its type.

    Raises:
        SchemaError: a kind from outside the package encoded something else than its `spec` says.
    """
    try:
        array = _array(encoded, kind)
    except (pa.ArrowException, ValueError, AttributeError) as problem:
        raise _other_form(feature, str(problem).partition("\n")[0], kind=kind, num_rows=num_rows) from problem
    if len(array) != num_rows or array.type != kind:
        raise _other_form(feature, f"{len(array)} of {array.type}", kind=kind, num_rows=num_rows)
    return array


def _array(encoded: Encoded, kind: pa.DataType) -> pa.Array:
    if isinstance(encoded, tuple):
        values, lengths = encoded
        # Offsets instead of lists: the flat values become the column without a copy for each row.
        return pa.ListArray.from_arrays(pa.array(offsets_of(lengths)), pa.array(values), type=kind)
    if encoded.ndim == 2:
        # Row after row, which is how Arrow lays out lists of one length.
        return pa.FixedSizeListArray.from_arrays(pa.array(encoded.reshape(-1)), type=kind)
    return pa.array(encoded)


def _other_form(feature: Feature, found: str, *, kind: pa.DataType, num_rows: int) -> SchemaError:
    return SchemaError(
        expected=f"{num_rows} of {kind}, as `spec` says: {feature.spec()}",
        found=found,
        where=f"{type(feature).__module__}.{type(feature).__qualname__}.encode, feature {feature.name!r}",
        ways_out=("return arrays of float32, or of the rows that `fitted.rows` gave", "correct the kind"),
    )


def _refuse_undefined(feature: Feature, encoded: Encoded, parsed: ParsedChunk) -> None:
    """Refuse NaN and infinity of a kind from outside the package: they would be the loss of every batch they are in."""
    values = encoded[0] if isinstance(encoded, tuple) else encoded
    if not isinstance(values, np.ndarray) or values.dtype.kind != "f" or np.isfinite(values).all():
        return
    # A vector is one value, so its numbers are looked at together.
    place = int(np.flatnonzero(~np.isfinite(values.reshape(len(values), -1)).all(1))[0])
    lengths = encoded[1] if isinstance(encoded, tuple) else np.ones(len(values), dtype=np.int64)
    # To the right: a place that equals a sum belongs to the next list, and empty lists are passed over.
    row = int(np.searchsorted(np.cumsum(lengths), place, side="right"))
    raise SchemaError(
        expected="numbers; a kind says by zeros, or by a column of its own, that a value is missing",
        found=f"{values[place]} for row {int(parsed.global_rows[row]):,} of the data",
        where=f"{type(feature).__module__}.{type(feature).__qualname__}.encode, feature {feature.name!r}",
        ways_out=("return np.nan_to_num(values)", "correct the kind"),
    )


class _FittedFeature:
    """Give what was learned from the training rows, for one feature: `Fitted` of `features/kinds/feature.py`."""

    def __init__(
        self, preprocessing: Preprocessing, feature: Feature, *, row_of_number: Mapping[str, np.ndarray]
    ) -> None:
        self._preprocessing = preprocessing
        self._feature = feature
        self._row_of_number = row_of_number

    def rows(self, ids: Ids | NumberedIds | Rows) -> np.ndarray:
        """Return the rows of ids in the table of the feature."""
        return self._preprocessing.rows(table_of(self._feature), ids, self._row_of_number)

    def transformed(self, numbers: Float64[np.ndarray, " N"]) -> Float32[np.ndarray, " N"]:
        """Return numbers after the transform of `Feature.fitted_numbers`."""
        fit = self._feature.fitted_numbers
        if fit is None:  # of a kind from outside the package
            raise SchemaError(
                expected="a kind whose numbers are fitted, where it asks for transformed ones",
                found="no fitted_numbers",
                where=f"{type(self._feature).__module__}.{type(self._feature).__qualname__}.encode, "
                f"feature {self._feature.name!r}",
                ways_out='fitted_numbers: return NumberFit(name=self.name, transform=NumericTransform("standardise"))',
            )
        return to_floats(numbers, fit, self._preprocessing.numbers[fit.name])

    def bucket_rows(self, numbers: Float64[np.ndarray, " N"]) -> Int32[np.ndarray, " N"]:
        """Return the rows of the quantile buckets that numbers fall into."""
        return to_bucket_rows(numbers, self._preprocessing.numbers[self._feature.name])


def inputs_of_schema(
    schema: Schema, vocabularies: Mapping[str, Sized], *, numbers: Mapping[str, NumericState] | None = None
) -> InputSpec:
    """Return the inputs of a model: features by their tensor form, in the order of the schema.

    Args:
        schema: features and tables.
        vocabularies: by table; only the number of ids counts (a planner has nothing else).
        numbers: as in `Preprocessing`; None: labels that are numbers are taken as they are.
    """
    states = numbers or {}
    specs: list[Spec] = []
    tables: dict[str, TableSpec] = {}
    for feature in schema.features:
        specs.append(feature.spec())
        name = table_of(feature)
        # Features may share a table; the first one decides where it stands among them.
        if name and name not in tables:
            tables[name] = _table_spec(schema, feature, name, vocabularies)
    return InputSpec(
        dense=tuple(spec.name for spec in specs if isinstance(spec, NumberSpec)),
        single=tuple(spec for spec in specs if isinstance(spec, SingleSpec)),
        jagged=tuple(spec for spec in specs if isinstance(spec, JaggedSpec)),
        vectors=tuple(spec for spec in specs if isinstance(spec, VectorSpec)),
        moments=tuple(spec for spec in specs if isinstance(spec, MomentsSpec)),
        tables=tuple(tables.values()),
        labels=tuple(_label_spec(label, states.get(label_column(label.name))) for label in schema.labels),
        extras=tuple(ExtraSpec(name=extra.name, dim=extra.dim) for extra in schema.extras),
        has_weights=bool(schema.weight),
        has_groups=bool(schema.group),
        has_sessions=bool(schema.session),
        items=schema.items,
    )


def _label_spec(label: Label, state: NumericState | None) -> LabelSpec:
    return LabelSpec(
        name=label.name,
        task=label.task,
        offset=0.0 if state is None else state.mean,
        scale=1.0 if state is None else state.sd,
        # Without statistics a label is taken as it is: 0 and 1 change nothing.
        weight=label.weight,
        positive_weight=label.positive_weight,
        negative_rate=label.negative_rate,
        outcomes=label.outcomes,
    )


def _table_spec(
    schema: Schema,
    feature: Feature,
    name: str,
    vocabularies: Mapping[str, Sized],
) -> TableSpec:
    table = schema.table(name)
    if feature.num_rows is not None:
        num_ids = feature.num_rows
    else:
        # A table without a vocabulary is hashed, or its ids are rows: the schema says how many.
        num_ids = len(vocabularies[name]) if name in vocabularies else table.num_rows
    growing = None
    if table.encoding is Encoding.GROWING:
        growing = Growing(num_ids=table.num_rows, admit_after=table.min_count, evict=table.evict)
    num_rows = num_ids + NUM_RESERVED_ROWS
    return TableSpec(name=name, num_rows=num_rows, embedding_dim=table.embedding_dim, growing=growing)
