"""Guessing the schema of a table of one's own, with the reason for every guess.

    inspection = inspect_file("ratings.parquet")
    inspection.schema            # ready for training, or for a correction
    inspection.explanations      # column → one sentence: what it becomes, and the evidence
    write_schema(inspection.schema, "my.toml", comments=inspection.explanations)

A guess is a start, not a truth: the file is written with its reasons as comments, to be read and corrected. What may
harm silently is left out and said so: constants, row ids, dates, and columns that give the label away.

A sample decides what columns are (for Parquet from ten places of the file, for text files from its beginning). Counts
of distinct values and nulls are exact where that is cheap: files of up to five million rows and fifty million cells in
Parquet, and any file that fits in the sample. Cost: about a second for a million rows of ten columns.

Column rules are in `column_rules.py`, labels, roles and leaks in `column_roles.py`.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

import numpy as np
import polars as pl
from polars.exceptions import PanicException, PolarsError

from ziggurat.arguments import check_arguments
from ziggurat.commands import in_python, pasted
from ziggurat.data.inspect.column_facts import ColumnFacts, find_marks_in, measure, numbers_in_text, percent
from ziggurat.data.inspect.column_roles import (
    RoleGuess,
    columns_with,
    find_group,
    find_labels,
    find_session,
    find_time,
    find_weight,
    known_of_some,
    label_of,
    other_outcomes,
    other_weight,
)
from ziggurat.data.inspect.column_rules import FeatureGuess, guess_feature
from ziggurat.data.inspect.interaction_log import InteractionLog, find_log
from ziggurat.data.inspect.other_columns import refuse_leaks, share_tables
from ziggurat.data.preprocess.values.cells import canonical_text
from ziggurat.data.raw.arrow_source import ArrowFile
from ziggurat.data.raw.bad_rows import PUT_ASIDE, BadRowPolicy
from ziggurat.data.raw.frames import as_polars, is_frame
from ziggurat.data.raw.json_lines import JsonLinesFile
from ziggurat.data.raw.names import missing_column, name_of_separator, partition_keys
from ziggurat.data.raw.source import RawSource
from ziggurat.data.raw.text_blocks import TextOptions
from ziggurat.data.raw.written_numbers import PLAIN_NUMBERS, WrittenNumbers
from ziggurat.errors import ConfigError, DataError, SchemaError, ZigguratError, nearest_names
from ziggurat.features.date_order import DateOrder
from ziggurat.features.labels import MissingLabel
from ziggurat.features.schema import (
    MISSING_TEXTS,
    Schema,
)
from ziggurat.features.schema_checks import refuse_too_many_columns
from ziggurat.files.stores import DataPath, StoreFile

_NO_LABEL = (
    "no label found: name it with --label COLUMN, or add a [[label]] block; a log of what users did needs none: say "
    "[events] in its schema, and train table_sasrec (docs/guides/long-histories.md)"
)

_ARGUMENTS = ("label", "positive", "session", "separator")
_EXACT_ROWS = 5_000_000
_EXACT_CELLS = 50_000_000
_PLACES = 10
_SHOWN_COLUMNS = 30


@dataclass(frozen=True)
class ColumnGuess:
    """One line of the table: what was found in a column and what it becomes."""

    column: str
    dtype: str
    becomes: str
    num_distinct: int
    null_share: float
    examples: tuple[str, ...]
    reason: str
    evidence: str

    @property
    def explanation(self) -> str:
        """One sentence: what it becomes, why, and what was measured."""
        return f"{self.becomes}: {self.reason} ({self.evidence})"


@dataclass(frozen=True)
class Inspection:
    """A guessed schema with its reasons.

    Args:
        schema: the guess.
        explanations: raw column → one sentence, and "" → what was read; as `write_schema(comments=…)` takes them.
        columns: every column of the file, in its order.
        warnings: what should be looked at before training.
        num_rows: rows of the file; estimated for text files.
        num_sampled: rows that were read.
        separator: what divides the fields of a text file, if it is not the one that its name says; else "".
        numbers: how the numbers in its texts are written.
        date_order: what stands first in the dates of its time column, where nothing in the file shows it.
        recipe: that learns from the schema; "": a label is missing, or `auto` tries a few.
    """

    schema: Schema
    explanations: dict[str, str]
    columns: tuple[ColumnGuess, ...]
    warnings: tuple[str, ...]
    num_rows: int
    num_sampled: int
    separator: str = ""
    numbers: WrittenNumbers = PLAIN_NUMBERS
    date_order: DateOrder = DateOrder.AUTO
    recipe: str = ""

    def settings(self) -> tuple[str, ...]:
        """List the settings that must be given on a command line, besides the schema, to read the file."""
        separator = ("--data.separator", name_of_separator(self.separator)) if self.separator else ()
        order = ("--data.split.date-order", self.date_order.value) if self.date_order is not DateOrder.AUTO else ()
        aside = ("--data.bad-rows", BadRowPolicy.QUARANTINE.value) if self._has_unlabelled_rows() else ()
        return (*separator, *self.numbers.settings(), *order, *aside)

    def _has_unlabelled_rows(self) -> bool:
        """Return whether some rows have no label, and the schema has nothing to learn from them."""
        needed = {label.column or label.name for label in self.schema.labels if label.missing is MissingLabel.BAD_ROW}
        return any(guess.null_share > 0 for guess in self.columns if guess.column in needed)

    def table(self) -> list[tuple[str, ...]]:
        """Header and lines of text, one line a column, for printing."""
        lines: list[tuple[str, ...]] = [("column", "type", "becomes", "distinct", "nulls", "examples", "why")]
        for guess in self.columns:
            distinct = f"{guess.num_distinct:,}" if guess.num_distinct else ""
            examples = ", ".join(guess.examples)
            nulls = percent(guess.null_share)
            lines.append((guess.column, guess.dtype, guess.becomes, distinct, nulls, examples, guess.reason))
        return lines

    def __repr__(self) -> str:
        lines = [f"    {guess.column}: {guess.becomes}" for guess in self.columns[:_SHOWN_COLUMNS]]
        more = len(self.columns) - len(lines)
        head = f"Inspection({self.num_rows:,} rows, {len(self.columns)} columns, {len(self.warnings)} warnings"
        return "\n".join([head, *lines, *([f"    and {more:,} more"] if more else [])]) + ")"

    def _repr_html_(self) -> str:
        head, *lines = self.table()
        rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
        notes = "".join(f"<p>{escape(warning)}</p>" for warning in self.warnings)
        return f"<table><tr>{''.join(f'<th>{name}</th>' for name in head)}</tr>{rows}</table>{notes}"


@dataclass(frozen=True, kw_only=True)
class Named:
    """Hold what somebody named of a table; "" is guessed.

    Args:
        label: the column to predict.
        positive: its value that is the positive.
        session: the column of the session.
    """

    label: str = ""
    positive: str = ""
    session: str = ""


@check_arguments
def inspect_file(
    path: object,
    *,
    label: str = "",
    positive: str = "",
    session: str = "",
    separator: str = "",
    sample_rows: int = 100_000,
) -> Inspection:
    """Guess the schema of a Parquet, Arrow, JSON Lines, CSV or TSV file (gzip too), or of a table in memory.

    Args:
        path: the file, or its URL in a store; of a folder or glob the first file is read. Or a frame of polars or
            pandas, an Arrow table, a dict of columns.
        label: the column to predict; "" guesses.
        positive: the value of that column that is the positive ("yes"); the label is 0 where another stands. "" guesses
            it of a column of two values.
        session: the column of the session, which is no feature; "" guesses.
        separator: of a text file, as in `TextOptions`; "" guesses it from the first line.
        sample_rows: rows to decide on.

    Raises:
        MissingFileError: no such file.
        ConfigError: a suffix that says no format.
        SchemaError: no such label or session, or more columns than a schema may have features.
        DataError: the file is damaged, has no rows or no header, no column of it can be a feature, or `label` names one
            that cannot be a label or lacks `positive`.

    Example:
        >>> found = zg.inspect_file({"user": ["ann", "bob"] * 50, "price": [1.5, 2] * 50, "bought": [0, 1, 1, 0] * 25})
        >>> [feature.name for feature in found.schema.features], found.schema.labels[0].name
        (['user', 'price'], 'bought')
    """
    named = Named(label=label, positive=positive, session=session)
    try:
        return inspect_named(path, named, separator=separator, sample_rows=sample_rows)
    except ZigguratError as error:
        # Errors are written for the command line, and whoever calls this function has arguments and no flags.
        error.where = in_python(error.where, arguments=_ARGUMENTS)
        error.ways_out = tuple(in_python(way, arguments=_ARGUMENTS) for way in error.ways_out)
        raise


def inspect_named(path: object, named: Named, *, separator: str = "", sample_rows: int = 100_000) -> Inspection:
    """Guess the schema as `inspect_file` does, with errors that name flags of the command line.

    Args:
        path: as there.
        named: what somebody named of the table.
        separator: as there.
        sample_rows: as there.
    """
    if is_frame(path):
        return _inspect_frame(as_polars(path, where="frame to look into"), named=named, sample_rows=sample_rows)
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(
            expected="the name of a file, or a frame (polars, pandas, Arrow, a dict of columns)",
            found=type(path).__name__,
            where="inspect_file, argument 'path'",
            ways_out=('zg.inspect_file("ratings.parquet")', "zg.inspect_file(frame)"),
        )
    try:
        return _inspect_files(path, named=named, separator=separator, sample_rows=sample_rows)
    except ZigguratError as error:
        # Who looks into a file has no quarantine: nothing is prepared.
        error.ways_out = tuple(way for way in error.ways_out if way != PUT_ASIDE)
        raise


def _inspect_files(path: str | os.PathLike[str], *, named: Named, separator: str, sample_rows: int) -> Inspection:
    files = RawSource(path if isinstance(path, StoreFile) else os.fspath(path)).paths
    file = files[0]
    text = TextOptions(delimiter=separator or RawSource(file).better_separator())
    source = RawSource(file, text=text)
    dtypes = source.columns()
    refuse_too_many_columns(len(dtypes), what="columns to look at", where=str(file))
    from_text = source.is_text(file)
    _refuse_wrong_names(named, columns=tuple(dtypes), file=file)
    # The first file has one value of each key of partitions alone, so those of all files are looked at.
    of_files = [partition_keys(path) for path in files]
    keys = {
        name: pl.Series(name, [each.get(name) for each in of_files], dtype=pl.String) for name in source.keys_of(file)
    }
    own = [name for name in dtypes if name not in keys]
    num_rows, sample, exact = _read(source, own, sample_rows=sample_rows)
    sample = sample.drop(list(keys), strict=False)
    if from_text:
        _require_header(file, sample, separator=source.separator_of(file), is_known=bool(named.label or named.session))
    found = _measured_and_guessed(
        # Repeated to the height of the sample: it only counts which values there are.
        sample.with_columns(series.gather(np.arange(sample.height) % len(series)) for series in keys.values()),
        file=file,
        num_rows=num_rows,
        exact=exact,
        named=named,
        separator=source.separator_of(file) if from_text else "",
        from_text=from_text,
        estimated=not source.knows_rows(file) and sample.height < num_rows,
    )
    notes = [*_of_other_files(files)]
    if not all(name.strip() and name in sample.columns for name in own):
        notes.append(
            "a column without a name is left out; pandas writes an index so, and not with to_csv(FILE, index=False)"
        )
    return replace(found, warnings=(*notes, *found.warnings), separator=text.delimiter)


def _measured_and_guessed(
    sample: pl.DataFrame,
    *,
    file: DataPath,
    num_rows: int,
    exact: Mapping[str, tuple[int, int]],
    named: Named,
    separator: str = "",
    from_text: bool = False,
    estimated: bool = False,
) -> Inspection:
    """The guess for a sample of a file or table; columns without a name are left out."""
    marks = find_marks_in(sample, separator=separator)
    columns = [
        measure(
            sample[name],
            from_text=from_text,
            num_rows=num_rows,
            exact=exact.get(name),
            written=marks.of(name),
            is_marked=name in marks.marked,
        )
        for name in sample.columns
        if name.strip()
    ]
    found = _guess(columns, file=file, num_sampled=sample.height, estimated=estimated, named=named)
    notes = [] if from_text else numbers_in_text(columns)
    read = found.schema.number_columns
    own = tuple(written.as_column(name) for name, written in marks.own.items() if name in read)
    schema = replace(found.schema, numbers=own) if own else found.schema
    of_own = [note for each in own for note in marks.own_notes[each.column]]
    warnings = (*marks.warnings, *of_own, *notes, *found.warnings)
    return replace(found, schema=schema, warnings=warnings, numbers=marks.numbers)


def _refuse_wrong_names(named: Named, *, columns: tuple[str, ...], file: DataPath) -> None:
    """Refuse a label or a session that is no column, and one column for both."""
    label = named.label
    session = named.session
    if label and label not in columns:
        near = nearest_names(label, list(columns))
        raise SchemaError(
            expected="a label out of the columns " + ", ".join(columns[:30]),
            found=repr(label),
            where=str(file),
            ways_out=(*(f"--label {pasted(name)}" for name in near), "leave --label out: it is guessed"),
        )
    if session and session not in columns:
        raise missing_column(file, session, columns, asked="--session")
    if session and session == label:
        raise SchemaError(
            expected="a label and a session of different columns",
            found=f"{label!r} for both",
            where=f"--label and --session, in {file}",
            ways_out=("name another label", "name another session"),
        )


def _inspect_frame(frame: pl.DataFrame, *, named: Named, sample_rows: int) -> Inspection:
    """The guess for a table in memory: that for the Parquet file with the same rows."""
    # Stands for a file in errors and notes; nothing is opened.
    file = Path("frame")
    refuse_too_many_columns(frame.width, what="columns to look at", where=str(file))
    _refuse_wrong_names(named, columns=tuple(frame.columns), file=file)
    sample = frame
    exact = {}
    if frame.height > sample_rows:
        size = max(sample_rows // _PLACES, 1)
        # The first place begins at row 0, and the last one ends with the last row.
        starts = [place * (frame.height - size) // (_PLACES - 1) for place in range(_PLACES)]
        sample = pl.concat([frame.slice(start, size) for start in starts])
        exact = _exact_counts(frame.lazy(), frame.schema) if _is_cheap(frame.height, frame.width) else {}
    return _measured_and_guessed(sample, file=file, num_rows=frame.height, exact=exact, named=named)


# ----------------------------------------------------------------------------------------------------------- reading


def _read(
    source: RawSource, names: Sequence[str], *, sample_rows: int
) -> tuple[int, pl.DataFrame, Mapping[str, tuple[int, int]]]:
    """Rows of the file, a sample, and exact (distinct, nulls) of columns where that is cheap."""
    file = source.paths[0]
    hint = source.num_rows_hint()
    if not source.knows_rows(file) or hint is None or hint <= sample_rows:
        parts = []
        height = 0
        # One row more than wanted tells whether the file goes on behind the sample.
        for chunk in source.frames(chunk_rows=sample_rows + 1):
            parts.append(chunk.frame)
            height += chunk.num_rows
            if height > sample_rows:
                break
        if not parts:
            raise _no_rows(file)
        sample = _joined(parts)
        if sample.height <= sample_rows:
            return sample.height, sample, {}
        # What a text file seems to hold is an estimate, which may be below what was read.
        return max(hint or 0, sample.height), sample.head(sample_rows), {}
    with source.open_table(file) as table:
        assert not isinstance(table, JsonLinesFile)  # it does not know its rows
        if isinstance(file, StoreFile) or isinstance(table, ArrowFile):
            return hint, table.sample(columns=names, num_rows=sample_rows), {}
    try:
        lazy = pl.scan_parquet(file).select(names)
        size = max(sample_rows // _PLACES, 1)
        # The first place begins at row 0, and the last one ends with the last row.
        starts = [place * (hint - size) // (_PLACES - 1) for place in range(_PLACES)]
        sample = pl.concat([lazy.slice(start, size).collect() for start in starts])
        return hint, sample, _exact_counts(lazy, sample.schema) if _is_cheap(hint, len(names)) else {}
    # A damaged file may end in a panic of polars, which is none of its errors.
    except (PolarsError, PanicException, OSError) as error:
        raise DataError(
            expected="a whole Parquet file",
            found=str(error)[:300],
            where=str(file),
            ways_out=("write or download the file again", "inspect another file of the data set"),
        ) from error


def _joined(parts: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Join pieces of one file; a column whose type differs between them becomes texts of ids."""
    unlike = {
        name
        for name in parts[0].columns
        # A piece in which a column is all null fits the type of any other.
        if len({part.schema[name] for part in parts if part.schema[name] != pl.Null}) > 1
    }
    if not unlike:
        # Relaxed, for the columns that are all null in one piece.
        return pl.concat(parts, how="vertical_relaxed")
    texts: list[pl.DataFrame] = []
    for part in parts:
        columns = []
        for series in part.get_columns():
            text = canonical_text(series) if series.name in unlike else series
            columns.append(series.cast(pl.String, strict=False) if text is None else text)
        texts.append(pl.DataFrame(columns))
    return pl.concat(texts, how="vertical_relaxed")


def _is_cheap(num_rows: int, num_columns: int) -> bool:
    return num_rows <= _EXACT_ROWS and num_rows * num_columns <= _EXACT_CELLS


def _exact_counts(lazy: pl.LazyFrame, schema: pl.Schema) -> dict[str, tuple[int, int]]:
    """(distinct values without null, nulls) of every scalar column. NaN counts as null, as everywhere."""
    scalars = [name for name, dtype in schema.items() if not dtype.is_nested() and dtype != pl.Null]
    columns = {name: pl.col(name).fill_nan(None) if schema[name].is_float() else pl.col(name) for name in scalars}
    # Numbered, since the name of one column may be what another's count would be called.
    expressions = [column.drop_nulls().n_unique().alias(f"d{i}") for i, column in enumerate(columns.values())]
    expressions += [column.null_count().alias(f"n{i}") for i, column in enumerate(columns.values())]
    counts = lazy.select(expressions).collect().row(0, named=True)
    return {name: (counts[f"d{i}"], counts[f"n{i}"]) for i, name in enumerate(scalars)}


def _require_header(file: DataPath, sample: pl.DataFrame, *, separator: str, is_known: bool) -> None:
    """Refuse a text file whose first line looks like a row, or comes again.

    Args:
        file: the file.
        sample: its first rows, texts alone.
        separator: what divides its fields.
        is_known: somebody named one of the columns, so that they do have names.

    Raises:
        DataError: there is no header, or it stands between rows as well.
    """
    names = sample.columns
    is_header = pl.Series([True]).new_from_index(0, sample.height)
    for name in names:
        is_header &= (sample[name] == name).fill_null(value=False)
    again = is_header.arg_true()
    others = sample.filter(~is_header)
    # A name that is no number above cells that all are: such a first line is a header for sure.
    named = [name for name in names if not _is_number(name) and _are_numbers(others[name])]
    if len(again) and (named or is_known):
        code = "NR == 1 {header = $0} NR == 1 || $0 != header"
        raise DataError(
            expected="a header in the first line alone",
            found=f"the same line again as row {again[0]}" + (f", and {len(again) - 1} more" if len(again) > 1 else ""),
            where=str(file),
            ways_out=f"take such lines out: awk {pasted(code)} {pasted(file)} > data.csv",
        )
    if is_known or named:
        return
    words = " ".join(names).split()
    as_values = [name for name in names if (sample[name] == name).any()]
    numbers = [word for word in words if _is_number(word)]
    # One column alone gives its values too little to show.
    if len(numbers) * 2 <= len(words) and (len(names) < 2 or len(as_values) * 2 < len(names)):
        return
    header = separator.join(f"column_{place + 1}" for place in range(len(names)))
    raise DataError(
        expected="a first line with the names of the columns",
        found=f"names that look like values: {', '.join(names[:8])}",
        where=f"{file}, line 1",
        ways_out=(
            f"add a header line, with names of your own: (echo {pasted(header)}; cat {pasted(file)}) > data.csv",
            f"if these are the names, name one: --label {pasted(names[-1])}",
        ),
    )


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).replace("-", "", 1).isdigit()


def _are_numbers(series: pl.Series) -> bool:
    present = series.filter((series != "").fill_null(value=False))
    return bool(len(present)) and present.cast(pl.Float64, strict=False).null_count() == 0


def _no_rows(file: DataPath) -> DataError:
    return DataError(
        expected="rows to look at", found="none", where=str(file), ways_out="name a file of the training data"
    )


# ---------------------------------------------------------------------------------------------------------- guessing


def _of_other_files(files: Sequence[DataPath]) -> list[str]:
    """Return notes on a folder or glob, of which one file alone was read."""
    if len(files) == 1:
        return []
    shown = [file.name for file in files[:6]]
    if len(set(shown)) < len(shown):  # day=1/part.parquet and day=2/part.parquet
        folder = posixpath.commonpath([posixpath.dirname(str(file)) for file in files[:6]])
        shown = [posixpath.relpath(str(file), folder) for file in files[:6]]
    others = ", ".join(shown[1:]) + (", …" if len(files) > 6 else "")
    return [f"only {shown[0]}, the first of {len(files):,} files, was looked at, and not {others}"]


def _guess(
    columns: list[ColumnFacts], *, file: DataPath, num_sampled: int, estimated: bool, named: Named
) -> Inspection:
    """Roles first, then features among the rest, then what gives the label away, then shared tables."""
    label = named.label
    if not columns or not columns[0].num_rows:
        raise _no_rows(file)
    by_name = {facts.name: facts for facts in columns}
    # The named label may look like a time or a weight, and is neither.
    roles = _find_roles([facts for facts in columns if facts.name != label], session=named.session)
    rest = [facts for facts in columns if facts.name not in {role.column for role in roles.values()}]
    if label:
        others = [facts for facts in rest if facts.name != label]
        found = [label_of(by_name[label], positive=named.positive, others=others)]
    else:
        if named.positive:
            raise _positive_of_no_label(named.positive, rest, file=file)
        found = find_labels(rest)
    labels = known_of_some(found, by_name)
    group = find_group([facts for facts in rest if facts.name != label])
    outcomes = {label.column for label in labels}
    guesses = {facts.name: guess_feature(facts) for facts in rest if facts.name not in outcomes}
    warnings = [guess.warning for guess in labels if guess.warning]
    warnings += [role.warning for role in roles.values() if role.warning]
    log = None
    if not labels:
        log = find_log(
            columns,
            user=group.column if group else "",
            time=roles["time"].column if "time" in roles else "",
            guesses=guesses,
            missing_texts=_missing_texts(columns),
        )
        warnings.append(_NO_LABEL if log is None else log.note)
    warnings += refuse_leaks(guesses, by_name, labels)
    if log is None:
        kept = [by_name[name] for name, guess in guesses.items() if guess.feature is not None]
        warnings += [note for note in (other_outcomes(kept, labels), other_weight(kept)) if note]
        warnings += [warning for guess in guesses.values() for warning in guess.warnings]
        share_tables(guesses, by_name)
    lines = tuple(_line(facts, roles, labels, guesses.get(facts.name), group) for facts in columns)
    if log is not None:
        lines = tuple(_line_of_log(line, log) for line in lines)
        schema = log.schema
    else:
        schema = _schema_of(columns, roles=roles, labels=labels, guesses=guesses, group=group, file=file, lines=lines)
    num_rows = columns[0].num_rows
    head = (
        f"Guessed from {file.name}: {'about ' if estimated else ''}{num_rows:,} rows, {num_sampled:,} of them read. "
        "Above each block stands its reason; correct what is wrong."
    )
    explanations = {"": " ".join([head, *(f"Note: {warning}." for warning in warnings)])}
    explanations |= {line.column: line.explanation for line in lines}
    # None: all dates can be read in both orders. One is then named openly, for a person to correct.
    is_unclear = schema.time != "" and by_name[schema.time].date_order is None
    order = DateOrder.DAY_FIRST if is_unclear else DateOrder.AUTO
    recipe = "" if log is None else log.recipe
    return Inspection(
        schema, explanations, lines, tuple(warnings), num_rows, num_sampled, date_order=order, recipe=recipe
    )


def _schema_of(
    columns: Sequence[ColumnFacts],
    *,
    roles: Mapping[str, RoleGuess],
    labels: Sequence[RoleGuess],
    guesses: Mapping[str, FeatureGuess],
    group: RoleGuess | None,
    file: DataPath,
    lines: Sequence[ColumnGuess],
) -> Schema:
    """The schema of a table of samples."""
    features = tuple(guess.feature for guess in guesses.values() if guess.feature is not None)
    if not features:
        raise _no_features(file, lines)
    role_columns = {role: guess.column for role, guess in roles.items()}
    return Schema(
        features=features,
        labels=tuple(guess.label for guess in labels if guess.label is not None),
        group=group.column if group else "",
        time=role_columns.get("time", ""),
        session=role_columns.get("session", ""),
        weight=role_columns.get("weight", ""),
        missing_texts=_missing_texts(columns),
    )


def _line_of_log(line: ColumnGuess, log: InteractionLog) -> ColumnGuess:
    becomes, reason = log.becomes[line.column]
    if becomes == "time" and line.becomes == "time":
        reason = f"{reason}; {line.reason.removeprefix('no feature: ')}"
    return replace(line, becomes=becomes, reason=reason)


def _find_roles(columns: Sequence[ColumnFacts], *, session: str) -> dict[str, RoleGuess]:
    """The columns with a role that are no features: time, session, weight; each column has one at most."""
    roles = {"session": RoleGuess(session, "no feature: named as the session")} if session else {}
    for role, find in (("time", find_time), ("session", find_session), ("weight", find_weight)):
        if role in roles:
            continue
        taken = {guess.column for guess in roles.values()}
        guess = find([facts for facts in columns if facts.name not in taken])
        if guess is not None:
            roles[role] = guess
    return roles


def _line(
    facts: ColumnFacts,
    roles: Mapping[str, RoleGuess],
    labels: Sequence[RoleGuess],
    feature: FeatureGuess | None,
    group: RoleGuess | None,
) -> ColumnGuess:
    """The line of one column: it is a role, a label, or a feature."""
    if feature is not None:
        becomes = feature.feature.kind if feature.feature else "left out"
        reason = feature.reason
    else:
        named = [*roles.items(), *(("label", label) for label in labels)]
        becomes, reason = next((role, guess.reason) for role, guess in named if guess.column == facts.name)
    if group is not None and group.column == facts.name:
        becomes = f"{becomes}, group"
        reason = f"{reason}; {group.reason}"
    return ColumnGuess(
        column=facts.name,
        dtype=facts.dtype,
        becomes=becomes,
        num_distinct=facts.num_distinct,
        null_share=facts.null_share,
        examples=facts.examples,
        reason=reason,
        evidence=(feature.evidence if feature else "") or facts.evidence,
    )


def _missing_texts(columns: Sequence[ColumnFacts]) -> tuple[str, ...]:
    """The texts that mean no value: the usual ones, and others that stand among numbers."""
    found = [text for facts in columns for text in facts.missing_texts]
    return tuple(dict.fromkeys([*MISSING_TEXTS, *sorted(found)]))


def _positive_of_no_label(positive: str, columns: Sequence[ColumnFacts], *, file: DataPath) -> SchemaError:
    labels = columns_with(columns, positive)[:3]
    return SchemaError(
        expected="the label to which the positive belongs",
        found=f"the positive {positive!r} alone",
        where=str(file),
        ways_out=(*(f"name the label, too: --label {pasted(name)}" for name in labels), "leave --positive out"),
    )


def _no_features(file: DataPath, lines: Sequence[ColumnGuess]) -> DataError:
    return DataError(
        expected="at least one column that can be a feature",
        found="; ".join(f"{line.column}: {line.becomes}, {line.reason}" for line in lines[:6]) or "no columns",
        where=str(file),
        ways_out=(
            "name the file with the joined table",
            "write the schema by hand (docs/guides/bring-your-own-data.md)",
        ),
    )
