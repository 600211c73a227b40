"""Score raw data: files or a frame in, a file or a frame of the same kind out.

    run.predict(["day.parquet"], out="scores.csv", keep=("user_id",))     files in, file out, in bounded memory
    run.predict(frame, keep=("user_id",))                                 polars, pandas, Arrow, dict in; the same out
    replace(run, reading=FileReading(separator=";")).predict(files)       files that are written in another way

    row │ user_id │ click          `row` is the position in the data: bad rows that were put aside keep their numbers
    ────┼─────────┼──────
      0 │ u17     │ 0.113

A kept column comes as the data has it: text files hold text, so `007` stays `007`. A kept column with the name of a
label (the label itself) leaves its name to the data; the scores are then called `LABEL_score`.

What counts as a frame is said in `data/raw/frames.py`.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
import pyarrow as pa

from ziggurat.commands import pasted
from ziggurat.data.encoded.records import table_to_batch
from ziggurat.data.preprocess.preprocessing import Preprocessing, numeric_columns
from ziggurat.data.preprocess.values.parsing import third_texts_note
from ziggurat.data.raw.bad_rows import BadRow, BadRowPolicy, BadRows
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.raw.frames import as_polars, is_frame, is_pandas
from ziggurat.data.raw.names import in_terms_of_frame, in_terms_of_run
from ziggurat.data.raw.source import FileFormat, RawSource
from ziggurat.data.raw.text_blocks import TextOptions
from ziggurat.data.raw.written_numbers import DecimalMark, NumberSigns, ThousandsMark
from ziggurat.errors import BoundsError, ConfigError, DataError, SchemaError, ZigguratError, nearest_names
from ziggurat.features.batch import Batch
from ziggurat.features.events import HISTORY
from ziggurat.features.labels import Label
from ziggurat.features.schema import OutOfRange, column_of, table_of
from ziggurat.runs.scores.given_data import files_in
from ziggurat.runs.teachers.rows import history_join_of, raw_columns, with_histories
from ziggurat.training.evaluation.evaluate import gathered_scores_of
from ziggurat.training.report.progress import Progress
from ziggurat.typed import checked

if TYPE_CHECKING:
    from ziggurat.recipes.run_config import RunConfig
    from ziggurat.runs.load import Run

CHUNK_ROWS = 65_536
ROW = "row"


@dataclass(frozen=True, kw_only=True)
@checked
class FileReading:
    """The way to read files to score: like those that the run was trained on, unless set otherwise.

    Which texts mean no value is said by the schema, and goes with the run.

    Args:
        format: of the files.
        separator: what divides the fields of text files, as in `DataConfig`.
        decimal: what stands before the fraction of numbers in text.
        thousands: what stands between the thousands of numbers in text, as in 1,200.
        signs: whether signs of currencies and per cent may stand around numbers in text; 12% is then 0.12.
        list_separator: what divides the ids of a list that is written as text, as in tag1|tag2, for features that came
            as lists when the run was trained; those with a separator in the schema keep theirs.
    """

    format: FileFormat = FileFormat.AUTO
    separator: str = ""
    decimal: DecimalMark = DecimalMark.POINT
    thousands: ThousandsMark = ThousandsMark.NONE
    signs: NumberSigns = NumberSigns.REFUSE
    list_separator: str = ""

    def __post_init__(self) -> None:
        self.text  # noqa: B018  refuses an impossible separator

    @staticmethod
    def of(config: RunConfig) -> FileReading:
        """Return how the run's own files are read; known data sets are cached as Parquet, so others may be anything."""
        data = config.data
        form = FileFormat.AUTO if config.dataset.name else data.format
        return FileReading(
            format=form,
            separator=data.separator,
            decimal=data.decimal,
            thousands=data.thousands,
            signs=data.signs,
        )

    @property
    def text(self) -> TextOptions:
        """The options by which text files are read."""
        return TextOptions(
            delimiter=self.separator,
            decimal=self.decimal,
            thousands=self.thousands,
            signs=self.signs,
            list_separator=self.list_separator,
        )


@dataclass(frozen=True, kw_only=True)
class UnknownIds:
    """The number of ids of a feature that are not in its vocabulary: all are scored by the row of unknown ids.

    Args:
        feature: name.
        unknown: ids that training did not see, or saw less than `min_count` times.
        ids: ids looked up.
    """

    feature: str
    unknown: int
    ids: int

    def __str__(self) -> str:
        return f"{self.feature} {self.unknown:,} of {self.ids:,} ({self.unknown / self.ids:.1%})"


def unknown_ids(preprocessing: Preprocessing) -> list[UnknownIds]:
    """Features with unknown ids in what was encoded since the run was loaded."""
    counters = preprocessing.counters.items()
    return [UnknownIds(feature=name, unknown=it.unknown, ids=it.ids) for name, it in counters if it.unknown]


@contextlib.contextmanager
def saying_unknown_ids(run: Run, progress: Progress | None) -> Iterator[None]:
    """Say after a call how many ids of its rows training did not know; who shows progress says it himself.

    Also says which texts of labels count as 0 beside their negative.

    Args:
        run: whose preprocessing encodes the rows.
        progress: of the call.
    """
    # Counters run on from call to call, so what this one added is a difference.
    before = {name: (each.unknown, each.ids) for name, each in run.preprocessing.counters.items()}
    texts_before = {name: Counter(counts) for name, counts in run.preprocessing.negatives.items()}
    rows_before = run.preprocessing.num_labelled
    yield
    if run.team.is_first:
        for label in run.preprocessing.schema.labels:
            counts = run.preprocessing.negatives[label.name] - texts_before[label.name]
            note = third_texts_note(label, counts, num_rows=run.preprocessing.num_labelled - rows_before)
            if note:
                run.warn(note, progress)
    if progress is not None or not run.team.is_first:
        return
    found: list[str] = []
    for name, counted in run.preprocessing.counters.items():
        unknown, ids = before[name]
        # Compared with the count of before, since an older call may have met unknown ids as well.
        if counted.unknown > unknown:
            found.append(str(UnknownIds(feature=name, unknown=counted.unknown - unknown, ids=counted.ids - ids)))
    if found:
        run.warn(f"unknown ids: {', '.join(found)}", None)


@dataclass(frozen=True, kw_only=True)
class IdsOutOfRange:
    """The number of ids of a feature that lie outside its identity table, and what became of them.

    Args:
        feature: name.
        outside: ids below 0, or not below `num_rows`.
        ids: ids looked up.
        became: what the table makes of them.
    """

    feature: str
    outside: int
    ids: int
    became: OutOfRange

    def __str__(self) -> str:
        became = "took the row of the nearest id" if self.became is OutOfRange.CLAMP else "are unknown"
        return f"{self.feature} {self.outside:,} of {self.ids:,} ({self.outside / self.ids:.1%}), which {became}"


def ids_out_of_range(preprocessing: Preprocessing) -> list[IdsOutOfRange]:
    """Features with ids outside their identity table in what was encoded since the run was loaded."""
    found: list[IdsOutOfRange] = []
    for feature in preprocessing.schema.features:
        counters = preprocessing.counters[feature.name]
        if counters.out_of_range:
            table = preprocessing.schema.table(table_of(feature))
            found.append(
                IdsOutOfRange(
                    feature=feature.name,
                    outside=counters.out_of_range,
                    ids=counters.ids,
                    became=table.out_of_range,
                )
            )
    return found


def like(frame: pl.DataFrame, given: object) -> object:
    """A polars frame as the kind of table that was given; a frame of pandas keeps its index."""
    if isinstance(given, pa.Table):
        # The oldest level: strings as views are unknown to many readers of Arrow.
        return frame.to_arrow(compat_level=pl.CompatLevel.oldest())
    if isinstance(given, Mapping):
        return frame.to_dict(as_series=False)
    if is_pandas(given):
        found = frame.to_pandas()
        index = getattr(given, "index", None)
        if index is not None:
            # By the number of the row, because bad rows have no score and leave gaps in the index.
            found.index = index[frame[ROW].to_numpy()]
        return found
    return frame


@contextlib.contextmanager
def collecting_bad_rows(run: Run, policy: BadRowPolicy, *, progress: Progress | None) -> Iterator[BadRows]:
    """Collect the bad rows of data to score inside the block; afterwards, say how many were put aside, and where.

    Args:
        run: whose folder keeps them.
        policy: stop at one, or put it aside.
        progress: shows the count; without it the count goes to the log.
    """
    with contextlib.ExitStack() as stack:
        # All ranks find the same bad rows; one keeps them.
        elsewhere = "" if run.team.is_first else stack.enter_context(tempfile.TemporaryDirectory())
        collector = stack.enter_context(BadRows(policy, folder=Path(elsewhere) if elsewhere else run.folder))
        yield collector
    if collector.num_rows:
        rows = "1 row" if collector.num_rows == 1 else f"{collector.num_rows:,} rows"
        run.warn(f"{rows} put aside: {collector.kept_in}", progress)


def encoded_chunks(
    run: Run,
    data: object,
    *,
    with_labels: bool,
    bad_rows: BadRowPolicy,
    progress: Progress | None,
    keep: Sequence[str] = (),
) -> Iterator[tuple[RawChunk, pa.Table]]:
    """Raw chunks of files or of a frame, with the encoded rows of each; on many ranks every rank gets all of them."""
    refuse_events(run, data)
    schema = run.preprocessing.schema
    # A column may serve several features, and is wanted once.
    features = tuple(dict.fromkeys(column_of(feature) for feature in schema.features))
    join = history_join_of(run, data)
    if join is not None and (note := join.unchecked_note):
        run.warn(note, progress)
    columns = raw_columns([*(schema.columns if with_labels else features), *keep], join=join)
    with collecting_bad_rows(run, bad_rows, progress=progress) as collector:
        if is_frame(data):
            text = run.reading.text
            frame = as_polars(data, written=run.written)
            if with_labels:
                _refuse_no_label_in_frame(run, frame)
            chunks = chunks_of_frame(frame, text=text)
        else:
            source = RawSource(files_in(data), format=run.reading.format, bad_rows=collector, text=run.reading.text)
            if with_labels:
                _refuse_no_label(run, source)
            # What is kept stands in the output as the files write it, so it is not read as numbers.
            numbers = set(numeric_columns(schema, with_labels=with_labels)) - set(keep)
            chunks = source.frames(columns=columns, numbers=sorted(numbers), chunk_rows=CHUNK_ROWS)
        try:
            for chunk in with_histories(chunks, join):
                encoded = run.preprocessing.encode(
                    chunk, bad_rows=collector, with_labels=with_labels, needs_extras=False
                )
                yield chunk, encoded
        except SchemaError as error:
            raise in_terms_of_run(error, run.folder) from error
        except (DataError, BoundsError) as error:
            in_frame = is_frame(data)
            # Before the words of a frame: for a trained run the label cannot be changed in the schema.
            label = _label_of(run, error)
            if label is not None:
                raise _wrong_label(error, label, in_frame=in_frame) from error
            if not in_frame:
                raise
            raise in_terms_of_frame(error) from error


def _refuse_no_label(run: Run, source: RawSource) -> None:
    """Refuse files without the labels that metrics need: the schema of a trained run is not to be changed."""
    known = tuple(source.columns())
    schema = run.preprocessing.schema
    features = set(map(column_of, schema.features))
    if not features <= set(known):
        return  # who reads the columns says more: of a misspelt one, or of another separator
    free = [name for name in known if name not in features]
    for label in schema.labels:
        name = column_of(label)
        if name in known:
            continue
        near = [f"rename {each!r} to {name!r}: that is the nearest name" for each in nearest_names(name, free)[:1]]
        raise SchemaError(
            expected=f"a column {name!r}, the label {label.name!r} of the run: metrics compare its values with scores",
            found=f"columns {', '.join(known[:30])}",
            where=str(source.paths[0]),
            ways_out=(
                *near,
                "add the column to the file",
                "take the run's own rows, which have it: --split test in place of files",
                f"scores alone, which need no label: ziggurat predict {pasted(run.folder)} FILE --out scores.parquet",
            ),
        )


def _refuse_no_label_in_frame(run: Run, frame: pl.DataFrame) -> None:
    """Refuse a frame without the labels that metrics need, in words of Python."""
    schema = run.preprocessing.schema
    features = set(map(column_of, schema.features))
    if not features <= set(frame.columns):
        return  # who reads the columns names the one that is not there
    free = [name for name in frame.columns if name not in features]
    for label in schema.labels:
        name = column_of(label)
        if name in frame.columns:
            continue
        near = [f"rename {each!r} to {name!r}: that is the nearest name" for each in nearest_names(name, free)[:1]]
        raise SchemaError(
            expected=f"a column {name!r}, the label {label.name!r} of the run: metrics compare its values with scores",
            found=f"columns {', '.join(frame.columns[:30])}",
            where="frame to evaluate",
            ways_out=(
                *near,
                f"add the column {name!r} to the frame",
                'take the run\'s own rows, which have it: run.evaluate_split("test")',
                "scores alone, which need no label: run.predict(frame)",
            ),
        )


def _label_of(run: Run, error: ZigguratError) -> Label | None:
    """Return the label that an error about a row is about, if it is about one."""
    bad = BadRow.of(error)
    if bad is None:
        return None
    return next((label for label in run.preprocessing.schema.labels if column_of(label) == bad.column), None)


def _wrong_label(error: ZigguratError, label: Label, *, in_frame: bool) -> ZigguratError:
    """Return the error of a value of a label for a trained run, whose label means what it meant in training.

    Args:
        error: about a row.
        label: that its value is one of.
        in_frame: whether the rows are those of a frame, and not of files.
    """
    name = column_of(label)
    found = error.found.strip("'")
    ways: list[str] = []
    # Numbers and truths are what programs write where the files of the run had two words.
    if label.positive and label.negative and found.lower() in ("0", "1", "0.0", "1.0", "false", "true"):
        yes = label.positive
        no = label.negative
        if in_frame:
            texts = f"[{{1: {yes!r}, 0: {no!r}}}[value] for value in frame[{name!r}]]"
            ways.append(f"where 1 or True is {yes!r}, in pandas: frame[{name!r}] = {texts}")
            ways.append(f"in polars: frame.with_columns(pl.Series({name!r}, {texts}))")
        else:
            ways.append(f"write {yes!r} and {no!r} into the column, as in the files that the run was trained on")
    elif (bad := BadRow.of(error)) is not None and not bad.found and in_frame:
        ways.append(f"leave out rows without a label, in pandas: frame.dropna(subset=[{name!r}])")
        ways.append(f"in polars: frame.drop_nulls({name!r})")
    ways.append("correct the value")
    if not in_frame:
        ways.append("put such rows aside and go on: --bad-rows quarantine")
    return type(error)(expected=error.expected, found=error.found, where=error.where, ways_out=ways)


def refuse_events(run: Run, data: object) -> None:
    """Refuse an event log where samples are wanted: what its last events are asked by is the run's to say."""
    if run.config.table_schema.events is None:
        return
    if is_frame(data):
        known = as_polars(data, written=run.written).columns
    else:
        known = list(RawSource(files_in(data), format=run.reading.format).columns())
    if HISTORY not in known:
        raise ConfigError(
            expected=f"samples with {HISTORY}, as the run has made them of its events",
            found=f"columns {', '.join(known[:20])}",
            where=f"{run.folder}, whose schema has [events]",
            ways_out=(
                "what comes next for each user of the log: run.predict(log)",
                'its own questions: run.evaluate_split("test")',
            )
            if is_frame(data)
            else (
                f"its own questions: ziggurat evaluate {pasted(run.folder)} --split test",
                f"what comes next: ziggurat predict {pasted(run.folder)} FILE --out next.parquet",
            ),
        )


def chunks_of_frame(frame: pl.DataFrame, *, text: TextOptions) -> Iterator[RawChunk]:
    """Cut a table in memory into raw chunks.

    Args:
        frame: the table.
        text: how numbers and lists in its columns of text are written.
    """
    for start in range(0, frame.height, CHUNK_ROWS):
        yield RawChunk(
            frame=frame.slice(start, CHUNK_ROWS),
            path=Path("frame"),
            first_row=start,
            start=start,  # rows are numbered through
            numbers=text.numbers,
            list_separator=text.list_separator,
        )


def own_rows(run: Run, table: pa.Table) -> Batch:
    """The rows of an encoded chunk that this rank scores, as a batch."""
    rank = run.team.rank
    world_size = run.team.world_size
    # Ends of all ranks by one formula: no row is left out, and none scored twice.
    first, last = (len(table) * (rank + end) // world_size for end in (0, 1))
    # A slice of Arrow keeps its parent's chunks, and a batch needs each column in one piece.
    return table_to_batch(table.slice(first, last - first).combine_chunks(), run.preprocessing.inputs)


def output_schema(run: Run, data: object, *, keep: Sequence[str]) -> pl.Schema:
    """Columns of the scores: row, the kept ones, one a label.

    Raises:
        ConfigError: a kept column is named twice, or called like the row number.
        SchemaError: the data has no such column.
    """
    if len(set(keep)) < len(keep) or ROW in keep:
        raise ConfigError(
            expected=f"columns to keep, each named once, and none called {ROW!r}: that is the position in the data",
            found=", ".join(keep),
            where="keep",
            ways_out=("name each column once", f"rename the column {ROW!r}"),
        )
    scores: dict[str, pl.DataType] = {}
    for label in run.preprocessing.inputs.labels:
        name = f"{label.name}_score" if label.name in keep else label.name
        scores[name] = pl.Float64() if label.task.is_number else pl.Float32()
    if not keep:
        return pl.Schema({ROW: pl.Int64(), **scores})
    if is_frame(data):
        path = Path("frame")
        types = dict(as_polars(data, written=run.written).schema)
    else:
        source = RawSource(files_in(data), format=run.reading.format, text=run.reading.text)
        path = source.paths[0]
        types = source.columns()
    for name in keep:
        if name not in types:
            raise SchemaError(
                expected=f"columns to keep that {path} has",
                found=repr(name),
                where="keep",
                ways_out=(
                    *(f"did you mean {near!r}?" for near in nearest_names(name, tuple(types))),
                    f"columns: {', '.join(list(types)[:20])}",
                ),
            )
    if twice := [name for name in scores if name in keep]:
        raise ConfigError(
            expected="names of their own for kept columns and scores",
            found=f"{', '.join(twice)} for both",
            where="keep",
            ways_out="rename the column in the data",
        )
    # The codes of a categorical differ from file to file, and its texts do not.
    kept = {name: pl.String() if isinstance(types[name], pl.Categorical | pl.Enum) else types[name] for name in keep}
    return pl.Schema({ROW: pl.Int64(), **kept, **scores})


def scored_frames(
    run: Run, data: object, *, schema: pl.Schema, keep: Sequence[str], bad_rows: BadRowPolicy, progress: Progress | None
) -> Iterator[pl.DataFrame]:
    """The scores of each chunk in the columns of `schema`; none on ranks but the first."""
    # Scoring may read ahead of its scores: chunks wait here for theirs.
    waiting: deque[RawChunk] = deque()

    def batches() -> Iterator[Batch]:
        for chunk, table in encoded_chunks(
            run, data, with_labels=False, bad_rows=bad_rows, progress=progress, keep=keep
        ):
            waiting.append(chunk)
            yield own_rows(run, table)

    names = [name for name in schema if name != ROW and name not in keep]
    # Collective: ranks that write nothing send their part of the scores to the first.
    gathered = gathered_scores_of(run.model, batches(), progress=progress, process_group=run.team.process_group)
    for rows, scores in gathered:
        # On each rank, or the deque would grow with the file.
        chunk = waiting.popleft()
        if not run.team.is_first:
            continue
        # Rows that were put aside have no score, so that each is found by its number.
        at = np.searchsorted(chunk.global_rows, rows)
        columns = {ROW: pl.Series(rows, dtype=pl.Int64)}
        columns |= {name: _cast(chunk.column(name).gather(at), schema[name], chunk) for name in keep}
        columns |= {name: pl.Series(scores[:, index]).cast(schema[name]) for index, name in enumerate(names)}
        yield pl.DataFrame(columns)


def _cast(series: pl.Series, kind: pl.DataType, chunk: RawChunk) -> pl.Series:
    try:
        cast = series.cast(kind)
        # A cast to integers drops fractions without a word: the way back shows it.
        lost = series.dtype.is_float() and kind.is_integer() and bool((cast.cast(series.dtype) != series).any())
        problem = "with fractions" if lost else ""
    except pl.exceptions.PolarsError as error:
        cast = series
        problem = str(error).splitlines()[0]
    if problem:
        raise DataError(
            expected=f"the type of the first file for the kept column {series.name!r}: {kind}",
            found=f"{series.dtype}, {problem}",
            where=str(chunk.path),
            ways_out=("give the files one type", "score them one by one", "do not keep the column"),
        )
    return cast
