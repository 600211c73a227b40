"""cluster_by_session: rows of one session next to each other, so that what repeats compresses and is read once.

A log is written in the order of time: the rows of a session lie apart, and no codec sees that they are alike. Zhao et
al. (RecD, MLSys 2023, arXiv 2211.05239, section 4.1) store them side by side; their storage shrank 3.7 times.

    raw files ─► chunks ─► buckets on disk, by hash of the session ─► each bucket in memory, sorted ─► one Parquet file
                           (rows in file order)                        sessions by their first row, rows by time

A call that is killed leaves its work beside the file, under a name that starts with a dot; the same call goes on with
the buckets if they were complete, and gives the same bytes.

Memory: a chunk and one bucket of about `bucket_bytes`, whatever the size of the data. A bucket that is larger all the
same (one giant session, say) is sorted in pieces of that size; sessions that a piece boundary cuts are counted.

Rows of a session are in the order of `time`, equal times (and without `time` all rows) in the order of the files; rows
whose clock ran backwards are counted, and so are those without a readable time, which follow the others. A row without
a session (null, NaN, empty text) is a session of its own. Sessions of different buckets
are in no order, so the file as a whole is in no order of time: split by a time column, which looks at values.

Each column is written as it is smallest: with a dictionary or plain, measured on the first rows, then ZSTD. Plain
wins for lists that repeat as a whole, because equal bytes lie one list apart there; a dictionary packs ids to a number
of bits that hides it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from ziggurat.data.column_encodings import Codec, smallest_encodings
from ziggurat.data.preprocess.fit.work import PublishedError, Work, damaged_line
from ziggurat.data.preprocess.values.times import is_date_column, readable_times
from ziggurat.data.raw.dates import OrderSigns
from ziggurat.data.raw.parquet_seal import is_sealed_and_whole, seal_parquet
from ziggurat.data.raw.source import RawSource
from ziggurat.data.session_columns import source_with_sessions
from ziggurat.errors import DataError
from ziggurat.features.date_order import DateOrder
from ziggurat.files import digest_of, make_room, replacing, writing_to
from ziggurat.files.parquet import ParquetFile
from ziggurat.files.stores import DataPath, facts_of
from ziggurat.files.table_endings import refuse_text
from ziggurat.plain import JSON, as_list, as_text, as_whole

BUCKET_BYTES = 128 << 20
_ROWS_PER_GROUP = 65_536
CODEC: Codec = {"compression": "zstd", "compression_level": 3}
_ROW, _FIRST, _TIME = "row:", "first:", "time:"
_MADE = b"ziggurat.clustered"  # in the metadata of the file: what it was made of, and what was counted
_COUNTS = ("num_rows", "num_sessions", "without_session", "without_time", "backwards", "cut")

Progress = Callable[[str, int, int | None], None]


@dataclass(frozen=True, kw_only=True)
class Clustered:
    """Findings of clustering in the rows, and the bytes of the columns before and after.

    Args:
        num_rows: rows written.
        num_sessions: sessions; rows without one count each.
        without_session: rows whose session is null, NaN or an empty text.
        without_time: rows whose time is missing or cannot be read; the last of their session.
        backwards: rows with an earlier time than the row before of their session.
        cut: sessions that are in several pieces, because their bucket does not fit in memory.
        bytes_before: of each column in the input files; empty where they are not Parquet.
        bytes_after: of each column in the output.
        reused: whether the file was there already, of the same files and settings.
    """

    num_rows: int
    num_sessions: int
    without_session: int
    without_time: int
    backwards: int
    cut: int
    bytes_before: dict[str, int]
    bytes_after: dict[str, int]
    reused: bool = False


def cluster_by_session(
    files: Sequence[str | DataPath],
    *,
    session: str,
    out: str | Path,
    time: str = "",
    bucket_bytes: int = BUCKET_BYTES,
    progress: Progress | None = None,
) -> Clustered:
    """Write the rows of files into one Parquet file, those of a session next to each other.

    Args:
        files: Parquet, Arrow, JSON Lines, CSV or TSV, here or in stores; read in this order. What divides the fields of
            text is guessed from the first line, where it is not what the name of the file says.
        session: column of the session.
        out: the Parquet file; appears when it is whole. If it is there, made of the same files and settings, nothing is
            done.
        time: column of the order within a session; "" keeps the order of the files.
        bucket_bytes: memory for the rows that are sorted at a time.
        progress: called with (phase, rows done, rows in all or None).

    Raises:
        ConfigError: `out` is named as another format than Parquet.
        DataError: a file is damaged, has no row, `out` is something else or cannot be written, or no row has a time
            that can be read.
        SchemaError: a file lacks one of the columns or has others than the first, the session is a list, or a column
            has one of our names.
    """
    source = source_with_sessions(files, session=session, time=time, taken=(_ROW, _FIRST, _TIME))
    target = Path(out)
    refuse_text(target, because="what repeats in it is kept once")
    make_room(target, error=DataError)
    fingerprint = _fingerprint(source.paths, session=session, time=time, bucket_bytes=bucket_bytes)
    before = column_bytes(source.paths) if source.all_parquet() else {}
    told: Progress = progress or (lambda *told: None)
    with Work(target, waiting=lambda: told("waiting for another process that writes the same file", 0, None)) as work:
        is_there = target.exists()
        if not is_there:
            work.start()
            clustering = _Clustering(work, session=session, time=time, bucket_bytes=bucket_bytes, progress=told)
            try:
                clustering.run(source, fingerprint)
            except PublishedError:
                is_there = True
    counts = _counts_of(target, fingerprint)
    # What was just written is not read once more.
    if counts is None or (is_there and not is_sealed_and_whole(target)):
        raise DataError(
            expected="a file that does not exist yet, or the result of the same files and settings",
            found="another one exists, or one that is damaged",
            where=str(target),
            ways_out=("choose another name", "delete it"),
        )
    return Clustered(**counts, reused=is_there, bytes_before=before, bytes_after=column_bytes([target]))


def _fingerprint(paths: Sequence[DataPath], **settings: str | int) -> str:
    return digest_of({"version": 3, "files": [list(facts_of(path)) for path in paths], **settings})


def _counts_of(target: Path, fingerprint: str) -> dict[str, int] | None:
    """Return what clustering found when it made this file of the same files; None if something else made it."""
    try:
        made = json.loads((pq.read_metadata(target).metadata or {})[_MADE])
        return made["counts"] if made["fingerprint"] == fingerprint else None
    except (KeyError, ValueError, pa.ArrowException, OSError):
        return None


class _Buckets:
    """Files of a folder, one a bucket, that rows are written to in turn."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[int, pa.OSFile] = {}
        self._writers: dict[int, pa.ipc.RecordBatchFileWriter] = {}

    def write(self, bucket: int, table: pa.Table) -> None:
        with writing_to(self._folder, DataError):
            if bucket not in self._writers:
                options = pa.ipc.IpcWriteOptions(compression="lz4")
                # A writer that is given a path leaves the file to a destructor, which cannot say that closing failed.
                file = self._files[bucket] = pa.OSFile(str(self._folder / f"{bucket}.arrow"), "wb")
                self._writers[bucket] = pa.ipc.new_file(file, table.schema, options=options)
            self._writers[bucket].write_table(table)

    def close(self) -> None:
        with writing_to(self._folder, DataError), ExitStack() as writers:
            for file in self._files.values():
                writers.callback(file.close)
            for writer in self._writers.values():
                writers.callback(writer.close)

    def paths(self) -> list[Path]:
        return [self._folder / f"{bucket}.arrow" for bucket in sorted(self._writers)]


class _Clustering:
    """The two passes, each a unit of work, and what they count."""

    def __init__(self, work: Work, *, session: str, time: str, bucket_bytes: int, progress: Progress) -> None:
        self._work = work
        self._session = session
        self._time = time
        self._bucket_bytes = bucket_bytes
        self._progress = progress
        self._schema: pa.Schema | None = None
        self._signs = OrderSigns()
        self._order = DateOrder.AUTO
        self._is_date: bool | None = None  # of text: what its first cells show holds for every bucket
        self.num_rows = self.num_sessions = self.without_session = self.without_time = self.backwards = self.cut = 0

    def run(self, source: RawSource, fingerprint: str) -> None:
        """Do what is not done yet, or wait for a process that does it."""
        folder = self._work.folder / "buckets"
        if self._work.damaged:
            self._progress(damaged_line(self._work.damaged), 0, None)
        name = f"spread-{fingerprint[:16]}"
        spread = self._work.once(name, lambda: self._spread_anew(source, folder), leaves=lambda: [folder])
        self.num_rows = as_whole(spread["num_rows"])
        self._order = DateOrder(spread["date_order"])
        is_date = spread.get("is_date")
        self._is_date = is_date if isinstance(is_date, bool) else None
        while True:
            with self._work.claimed("write") as is_mine:
                if is_mine:
                    with replacing(self._work.target, error=DataError) as path:
                        self.write([folder / as_text(name) for name in as_list(spread["buckets"])], path, fingerprint)
                        seal_parquet(path)
                    return
            self._work.wait()

    def _spread_anew(self, source: RawSource, folder: Path) -> dict[str, JSON]:
        with writing_to(folder, DataError):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        buckets = self.spread(source, folder)
        names: list[JSON] = [bucket.name for bucket in buckets]
        order = self._order_of_dates().value
        return {"num_rows": self.num_rows, "buckets": names, "date_order": order, "is_date": self._is_date}

    def _order_of_dates(self) -> DateOrder:
        """Return the order that the dates of all rows show; a bucket alone may show nothing, or something else."""
        order = self._signs.order
        if order is None:
            raise DataError(
                expected="a date that shows whether the day or the month stands first (25/12/2023)",
                found="dates like 01/03/2024, and none that shows it",
                where=f"column {self._time!r}",
                ways_out=(
                    "write dates with the year first: 2024-03-01",
                    "leave the time out: rows stay in the order of the files",
                ),
            )
        return order

    def _refuse_other_than_times(self, frame: pl.DataFrame) -> None:
        """Refuse a column without a time in the first rows; where they are empty, all rows are looked at later."""
        present = frame[self._time].drop_nulls()
        orders = (DateOrder.DAY_FIRST, DateOrder.MONTH_FIRST)
        if len(present) and all(np.isnan(readable_times(present, order=order)).all() for order in orders):
            raise self._no_times(f"{str(present[0])[:100]!r}, and none in the first {frame.height:,} rows")

    def _no_times(self, found: str) -> DataError:
        return DataError(
            expected="times: numbers, dates, or text with one of them",
            found=found,
            where=f"column {self._time!r}",
            ways_out=("name another column", "leave the time out: rows stay in the order of the files"),
        )

    def spread(self, source: RawSource, folder: Path) -> list[Path]:
        """Write every row, with its number, to the bucket of its session."""
        total = source.num_rows_hint()
        num_buckets = 0
        key_type: pl.DataType | None = None
        with closing(_Buckets(folder)) as buckets:
            for chunk in source.frames():
                frame = _without_categories(chunk.frame)
                if self._time and frame[self._time].dtype == pl.String:
                    self._signs.add(frame[self._time])
                    # The first chunk decides for all, or buckets would read one text in two ways.
                    self._is_date = is_date_column(frame[self._time]) if self._is_date is None else self._is_date
                if not num_buckets:
                    if self._time:
                        self._refuse_other_than_times(frame)
                    # Without a hint of the number of rows four million are assumed.
                    size = int(frame.estimated_size()) / max(frame.height, 1) * (total or 1 << 22)
                    # Every bucket is an open file, and many systems allow a process 1,024 of them.
                    num_buckets = min(max(1, round(size / self._bucket_bytes)), 512)
                numbers = pl.Series(_ROW, chunk.global_rows, dtype=pl.Int64)
                sessions = frame[self._session]
                key_type = key_type or sessions.dtype
                keys = sessions.cast(key_type, strict=False).hash()  # hashes of 7 differ between types
                # Rows without a session are spread by their numbers: one bucket would have to take all of them.
                keys = keys.zip_with(~without_session(sessions), numbers.hash())
                frame = frame.with_columns(numbers, (keys % num_buckets).alias(_FIRST))
                for (bucket,), part in frame.partition_by(_FIRST, as_dict=True, include_key=False).items():
                    buckets.write(bucket, self._conform(part))
                self.num_rows += frame.height
                self._progress("reading", self.num_rows, None if total is None else max(total, self.num_rows))
        self._progress("reading", self.num_rows, self.num_rows)
        if not self.num_rows:
            raise DataError(
                expected="at least one row", found="none", where=str(source.paths[0]), ways_out="name files with rows"
            )
        self._progress("reading", self.num_rows, self.num_rows)  # before, the rows of text files were an estimate
        return buckets.paths()

    def _conform(self, frame: pl.DataFrame) -> pa.Table:
        """Conform a frame to the first chunk: files may differ in what their columns are stored as."""
        table = frame.to_arrow(compat_level=pl.CompatLevel.oldest())
        schema: pa.Schema = table.schema if self._schema is None else self._schema
        self._schema = schema
        if table.schema.equals(schema):
            return table
        try:
            # Columns are put in the order of the first chunk before their types are compared.
            return table.select(schema.names).cast(schema)
        except (pa.ArrowException, KeyError) as error:
            raise DataError(
                expected=f"the columns and types of the first rows: {', '.join(map(str, schema))[:500]}",
                found=f"{', '.join(map(str, table.schema))[:500]}",
                where="files to cluster by session",
                ways_out=("convert the files to the same columns", "cluster them apart"),
            ) from error

    def write(self, buckets: list[Path], path: Path, fingerprint: str) -> None:
        """Sort each bucket and write it."""
        writer: ParquetFile | None = None
        done = 0
        try:
            for bucket in buckets:
                seen: list[pl.Series] = []
                for frame in self._pieces(bucket):
                    table, sessions = self._sorted(frame)
                    seen.append(sessions)
                    if writer is None:
                        # Measured once, on the first rows: a Parquet file has one schema and one choice for each
                        # column.
                        encodings = smallest_encodings(table.slice(0, _ROWS_PER_GROUP), codec=CODEC)
                        writer = ParquetFile(path, table.schema, use_dictionary=encodings, **CODEC)  # pyright: ignore[reportArgumentType]
                    writer.write_table(table, row_group_size=_ROWS_PER_GROUP)
                    done += table.num_rows
                    self._progress("writing", done, self.num_rows)
                # A session that is in several pieces of its bucket was cut.
                counts = pl.concat(seen).value_counts() if len(seen) > 1 else None
                self.cut += 0 if counts is None else counts.filter(pl.col("count") > 1).height
                self.num_sessions += sum(map(len, seen)) if counts is None else counts.height
            # The file is begun with the first row that stays, so that without one there is none to close.
            if writer is None or self.without_time == self.num_rows:
                raise self._no_times("none in any row")
            made = {name: getattr(self, name) for name in _COUNTS}
            writer.add_key_value_metadata({_MADE: json.dumps({"fingerprint": fingerprint, "counts": made})})
        finally:
            if writer is not None:
                writer.close()

    def _pieces(self, bucket: Path) -> Iterator[pl.DataFrame]:
        """A bucket in as many pieces as memory asks for; one, but for giant sessions."""
        with pa.memory_map(str(bucket)) as source, pa.ipc.open_file(source) as reader:
            self._schema = self._schema or reader.schema
            batches: list[pa.RecordBatch] = []
            size = 0
            for index in range(reader.num_record_batches):
                batch = reader.get_batch(index)
                # Some times the size that was meant: a bucket is only an estimate, and a cut would part sessions.
                if batches and size + batch.nbytes > 4 * self._bucket_bytes:
                    yield _frame(batches)
                    batches = []
                    size = 0
                batches.append(batch)
                size += batch.nbytes
            if batches:
                yield _frame(batches)

    def _sorted(self, frame: pl.DataFrame) -> tuple[pa.Table, pl.Series]:
        """The rows in their order, without our columns; and its sessions (rows without one by their numbers)."""
        absent = without_session(frame[self._session])
        session = pl.col(self._session)
        row = pl.col(_ROW)
        # A session stands where its first row stood, and all of its rows with it.
        first = pl.when(pl.lit(absent)).then(row).otherwise(row.min().over(session)).alias(_FIRST)
        frame = frame.with_columns(first)
        keys = [_FIRST]
        if self._time:
            times = readable_times(frame[self._time], order=self._order, is_date=self._is_date)
            self.without_time += int(np.isnan(times).sum())
            # In the order of the files first, to see where the clock ran backwards.
            frame = frame.with_columns(pl.Series(_TIME, times)).sort(_FIRST, _ROW)
            # NaN compares as False, so rows without a time are no fall.
            fell = (pl.col(_TIME).diff() < 0) & (pl.col(_FIRST).diff() == 0)
            self.backwards += int(frame.select(fell.sum()).item())
            keys.append(_TIME)
        # The row is the last key, so that equal times stay in the order of the files.
        frame = frame.sort([*keys, _ROW], nulls_last=False)
        absent = without_session(frame[self._session])
        self.without_session += int(absent.sum())
        known = frame.filter(~absent)[self._session].unique().cast(pl.String)
        # The NUL keeps the number of a row apart from a session of the same text.
        sessions = pl.concat([known.alias(""), frame.filter(absent)[_ROW].cast(pl.String).alias("") + "\0"])
        ours = [name for name in (_ROW, _FIRST, _TIME) if name in frame.columns]
        assert self._schema is not None
        schema = pa.schema([field for field in self._schema if field.name not in ours])
        return frame.drop(ours).to_arrow(compat_level=pl.CompatLevel.oldest()).cast(schema), sessions


def without_session(sessions: pl.Series) -> pl.Series:
    """Mark the rows that have no session: null, NaN, or an empty text."""
    absent = sessions.is_null()
    if sessions.dtype.is_float():
        absent |= sessions.is_nan().fill_null(False)
    elif sessions.dtype == pl.String:
        absent |= (sessions == "").fill_null(False)
    return absent


def _without_categories(frame: pl.DataFrame) -> pl.DataFrame:
    """The frame with categories as texts: each chunk numbers them in its own way."""
    kinds = {name: _without_category(dtype) for name, dtype in frame.schema.items()}
    changed = {name: kind for name, kind in kinds.items() if kind != frame.schema[name]}
    return frame.cast(pl.Schema(changed)) if changed else frame


def _without_category(dtype: pl.DataType) -> pl.DataType:
    if isinstance(dtype, pl.Categorical | pl.Enum):
        return pl.String()
    if isinstance(dtype, pl.List):
        return pl.List(_without_category(dtype.inner))  # pyright: ignore[reportArgumentType]
    return dtype


def _frame(batches: list[pa.RecordBatch]) -> pl.DataFrame:
    return pl.DataFrame(pa.Table.from_batches(batches))


def column_bytes(paths: Sequence[DataPath]) -> dict[str, int]:
    """Compressed bytes of each column of Parquet files."""
    found: dict[str, int] = {}
    for path in paths:
        with path.open("rb") as file:
            metadata = pq.read_metadata(file)
        for group in range(metadata.num_row_groups):
            for index in range(metadata.num_columns):
                column = metadata.row_group(group).column(index)
                # A list has its values in a column below its own.
                name = column.path_in_schema.split(".")[0]
                found[name] = found.get(name, 0) + column.total_compressed_size
    return found
