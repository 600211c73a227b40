"""Recommendations for many users in a file, in bounded memory; killed at any instant, it goes on where it was.

    users.parquet ──► chunks of users ──► Recommender.recommend_many ──► lists.parquet.parts/part-000003.parquet
                                                                                  │ when all are there
    lists.parquet ◄── one file, renamed into place ◄──────────────────────────────┘

    row │ user_id │ items                  │ scores            one row a user, in the order of the file
    ────┼─────────┼────────────────────────┼──────────────
      0 │ 17      │ ["Heat (1995)", …]     │ [0.93, …]

Text holds no lists: a file that ends in .csv or .tsv has one line an item, with row, user, rank (from 1), item, score.

`files/parts.py` keeps the parts. `asked.json` beside them says for which question they were made: version of the
export, users, k, filter.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import polars as pl
import pyarrow as pa

from ziggurat.commands import pasted
from ziggurat.config import to_json
from ziggurat.data.raw.names import guess_separator, name_of_separator
from ziggurat.data.raw.source import RawSource
from ziggurat.data.raw.text_blocks import TextOptions
from ziggurat.data.raw.written_numbers import WrittenNumbers
from ziggurat.errors import ConfigError, RequestError, SchemaError
from ziggurat.features.number_marks import DecimalMark, NumberSigns, ThousandsMark
from ziggurat.files import Format, replacing
from ziggurat.files.parquet import ParquetFile
from ziggurat.files.parts import PartsFolder, parts_of
from ziggurat.files.stores import facts_of
from ziggurat.files.table_endings import separator_by_ending
from ziggurat.ops.written_decimals import frame_with_decimals, with_decimals
from ziggurat.serving.answers import MAX_K, Recommendations, RecommendRequest
from ziggurat.serving.recommender import Recommender
from ziggurat.serving.request_rows import canonical_id
from ziggurat.typed import Count, Range, checked

ASKED = Format(name="ziggurat.bulk", what="what lists were asked for", ways_out=("delete the folder of parts",))
PART = Format(name="ziggurat.bulk_part", what="the note of a part of lists", ways_out=("delete the folder of parts",))
_TOGETHER = 64


@dataclass(frozen=True, kw_only=True)
@checked
class BulkConfig:
    """Settings of recommendations in bulk.

    Args:
        k: items for each user.
        filter: which items may be in the lists; "" for all.
        exclude_seen: leave out what a user has had in the data that the export was made from; None: as the export does.
        part_users: users of one part, the unit of going on after a kill.
        separator: of text files of users; "" for the format's own.
        decimal: what stands before the fraction of numbers in their texts; None: as in the files of the run.
        thousands: what stands between thousands; None: as in those files.
        signs: whether signs of currencies and per cent may stand around numbers; None: as in those files.
    """

    k: Annotated[int, Range(1, MAX_K, "more than one request may ask for")] = 100
    filter: str = ""
    exclude_seen: bool | None = None
    part_users: Count = 4096
    separator: str = ""
    decimal: DecimalMark | None = None
    thousands: ThousandsMark | None = None
    signs: NumberSigns | None = None

    def __post_init__(self) -> None:
        TextOptions(delimiter=self.separator)  # refuses an impossible one

    def written(self, of_run: WrittenNumbers) -> WrittenNumbers:
        """Return how numbers in texts of users are written.

        Args:
            of_run: how the files of the run write them.

        Raises:
            ConfigError: one mark for both.
        """
        return WrittenNumbers(
            decimal=of_run.decimal if self.decimal is None else self.decimal,
            thousands=of_run.thousands if self.thousands is None else self.thousands,
            signs=of_run.signs if self.signs is None else self.signs,
        )


@dataclass(frozen=True, kw_only=True)
class BulkResult:
    """The contents of a file of recommendations, once it is written.

    Args:
        num_users: rows of the file.
        num_items: in all lists.
        num_short: users with fewer than k items, since fewer passed.
        num_unknown: users that the export does not know.
        num_equal: users whose items all have one score, so that their order says nothing.
        resumed: users whose lists were there already.
    """

    num_users: int
    num_items: int
    num_short: int
    num_unknown: int
    num_equal: int
    resumed: int


def recommend_in_bulk(
    export: Recommender,
    users: Sequence[str | Path],
    *,
    out: str | Path,
    config: BulkConfig | None = None,
    on_progress: Callable[[int], None] = lambda done: None,
    say: Callable[[str], None] = lambda text: None,
) -> BulkResult:
    """Write the best items of every user of some files.

    Args:
        export: answers.
        users: files with one row a user: the id, and any columns of users; others are ignored.
        out: file to write: Parquet, or text (.csv, .tsv) with one line an item.
        config: k, filter.
        on_progress: called with the number of users done.
        say: called with lines for people.

    Raises:
        ConfigError: `out` is neither Parquet nor text, or the file of users itself.
        FileError: nothing can be written beside `out`; the folder of parts is somebody else's, or in use.
        SchemaError: the files have no column that the export reads.
        RequestError: a row, or the filter, cannot be used; names the row.
    """
    config = config or BulkConfig()
    target = Path(out)
    source = users_of(users, out=target, config=config)
    columns = _columns(export, source)
    config.written(export.chain.settings.written)  # refuses one mark for both
    # Once, before hours of work: a mistake in the filter would else show with the first part.
    if config.filter:
        export.check(RecommendRequest(user={}, k=config.k, filter=config.filter))
        for note in export.notes(config.filter):
            say(f"filter: {note}")
    totals = _Totals()
    with _parts(target, question=_question(export, source, config), say=say) as parts:
        finished = _Lists(parts)
        for number, (start, frame) in enumerate(_chunks(source, columns, size=config.part_users)):
            lists = finished.read(number)
            if lists is not None:
                totals.resumed += frame.height
            else:
                lists = _answered(export, frame, start=start, config=config, where=str(source.paths[0]))
                finished.write(number, lists)
            # Counted of parts that were there as well, so that the result does not depend on how often it was killed.
            totals.add(lists, k=config.k)
            # Ids are counted from the frame, since parts that were there hold no such mark.
            totals.num_unknown += _num_unknown(export, frame)
            on_progress(totals.num_users)
        if separator := separator_by_ending(target):
            finished.join_as_text(target, separator=separator)
        else:
            finished.join(target, columns=_output_types(export, columns))
        # Last: until the file stands, the parts are all that was done.
        parts.remove()
    if name := _user_column(export, columns):
        # Counted by streaming: the ids of all users need not fit into memory at once.
        written = _scanned(target, separator=separator)
        ids = written.select(pl.col(name).n_unique()).collect(engine="streaming").item()
        if ids < totals.num_users:
            say(f"{totals.num_users:,} rows, {ids:,} users: a user of several rows has a list for each of them")
    return BulkResult(**vars(totals))


def users_of(users: Sequence[str | Path], *, out: str | Path, config: BulkConfig) -> RawSource:
    """The files of the users; refuses early what can be refused without the export.

    Args:
        users: files.
        out: file to write: Parquet, or text (.csv, .tsv) with one line an item.
        config: separator.

    Raises:
        MissingFileError: a file is not there.
        ConfigError: `out` is neither Parquet nor text, or the file of users itself.
        FileError: nothing can be written beside `out`.
    """
    target = Path(out)
    separator_by_ending(target)
    source = RawSource(users, text=TextOptions(delimiter=config.separator))
    # Resolved, so that a link to the file of users is recognised, too.
    if target.resolve() in {path.resolve() for path in source.paths}:
        raise ConfigError(
            expected="a file of its own for the lists",
            found=f"{out}, which holds the users",
            where="out",
            ways_out=f"--out {pasted(target.with_stem(target.stem + '_lists'))}",
        )
    _parts(target, question={}, say=lambda text: None).check_place()
    return source


def _scanned(target: Path, *, separator: str) -> pl.LazyFrame:
    """Return a file of lists; of text, which has a separator, all columns as texts."""
    if not separator:
        return pl.scan_parquet(target)
    return pl.scan_csv(target, separator=separator, infer_schema=False)


def _parts(target: Path, *, question: Mapping[str, object], say: Callable[[str], None]) -> PartsFolder:
    return PartsFolder(parts_of(target), question=question, what="lists", asked=ASKED, note=PART, say=say)


@dataclass(kw_only=True)
class _Totals:
    num_users: int = 0
    num_items: int = 0
    num_short: int = 0
    num_unknown: int = 0
    num_equal: int = 0
    resumed: int = 0

    def add(self, frame: pl.DataFrame, *, k: int) -> None:
        lengths = frame["items"].list.len()
        self.num_users += frame.height
        self.num_items += int(lengths.sum())
        self.num_short += int((lengths < k).sum())
        # Lists of no item or one have nothing to order.
        self.num_equal += int(((frame["scores"].list.n_unique() == 1) & (lengths > 1)).sum())


def _columns(export: Recommender, source: RawSource) -> tuple[str, ...]:
    """The columns of the files that the export reads."""
    there = source.columns()
    known = [column.name for column in export.info().user_columns]
    found = tuple(name for name in known if name in there)
    if not found:
        ways = [f"name the column of the user's id {known[0]!r}", "name another file"]
        # A header that was split by a wrong separator is put together again, and split by another.
        own = source.text.delimiter or ","
        if (other := guess_separator(own.join(there))) and other != own:
            ways.insert(0, f"{other!r} divides its first line better: --separator {name_of_separator(other)}")
        raise SchemaError(
            expected=f"columns of users: {', '.join(known)}",
            found=", ".join(list(there)[:20]),
            where=str(source.paths[0]),
            ways_out=ways,
        )
    return found


def _question(export: Recommender, source: RawSource, config: BulkConfig) -> dict[str, object]:
    # Size and time of each file: parts that were made of other users are not taken for these.
    files = [list(facts_of(path)) for path in source.paths]
    return {"export": export.version, "files": files, "config": to_json(config)}


class _Lists:
    """The lists of parts that are finished.

    Args:
        parts: the folder that keeps them, taken up.
    """

    def __init__(self, parts: PartsFolder) -> None:
        self._parts = parts

    def read(self, number: int) -> pl.DataFrame | None:
        """Return the lists of a part that is there as it was written, else None."""
        content = self._parts.read(number)
        return None if content is None else pl.read_parquet(io.BytesIO(content))

    def write(self, number: int, lists: pl.DataFrame) -> None:
        """Keep the lists of a part."""
        content = io.BytesIO()
        lists.write_parquet(content)
        self._parts.write(number, content.getvalue())

    def join(self, target: Path, *, columns: pa.Schema) -> None:
        """Write all parts into one file, each compared with its note as it is read."""
        with (
            replacing(target) as temporary,
            ParquetFile(temporary, columns, compression="zstd", write_page_checksum=True) as writer,
        ):
            for number in range(self._parts.num_parts):
                # oldest: polars would give its strings as views, and the file's columns are none.
                table = self._checked(number).to_arrow(compat_level=pl.CompatLevel.oldest())
                writer.write_table(table.cast(columns))

    def join_as_text(self, target: Path, *, separator: str) -> None:
        """Write all parts into one file of text, one line an item; a user without items has a line that names none."""
        with replacing(target) as temporary, open(temporary, "wb") as file:
            for number in range(self._parts.num_parts):
                # Ranks before the lists are taken apart, as that loses their places.
                lists = self._checked(number).with_columns(rank=pl.int_ranges(1, pl.col("items").list.len() + 1))
                lists = lists.rename({"items": "item", "scores": "score"})
                lines = lists.explode("rank", "item", "score", empty_as_null=True)
                others = [name for name in lines.columns if name not in ("rank", "item", "score")]
                lines = lines.select(*others, "rank", "item", "score")
                # One header for all parts, before the first.
                lines.write_csv(file, separator=separator, include_header=not number)

    def _checked(self, number: int) -> pl.DataFrame:
        return pl.read_parquet(io.BytesIO(self._parts.checked(number)))


def _chunks(source: RawSource, columns: Sequence[str], *, size: int) -> Iterator[tuple[int, pl.DataFrame]]:
    for chunk in source.frames(columns=list(columns), chunk_rows=size):
        yield chunk.start, chunk.frame


def _answered(export: Recommender, frame: pl.DataFrame, *, start: int, config: BulkConfig, where: str) -> pl.DataFrame:
    rows = list(frame_with_decimals(frame).iter_rows(named=True))
    written = config.written(export.chain.settings.written)
    if written != export.chain.settings.written:
        # Only where they differ: texts are else read by the export itself, in its own way.
        rows = [
            _with_numbers(export, row, written=written, where=f"{where}, row {start + place}")
            for place, row in enumerate(rows)
        ]
    items: list[list[str]] = []
    scores: list[list[float]] = []
    for first in range(0, len(rows), _TOGETHER):
        requests = [
            RecommendRequest(
                # A null in the file is a column that the request leaves out, and so a missing value.
                user={name: value for name, value in row.items() if value is not None},
                k=config.k,
                filter=config.filter,
                exclude_seen=config.exclude_seen,
            )
            for row in rows[first : first + _TOGETHER]
        ]
        for place, answer in enumerate(export.recommend_many(requests)):
            if not isinstance(answer, Recommendations):
                raise RequestError(
                    expected=answer.expected,
                    found=answer.found,
                    where=f"{where}, row {start + first + place}: {answer.where}",
                    ways_out=answer.ways_out,
                )
            items.append([item.id for item in answer.items])
            scores.append([item.score for item in answer.items])
    ids = _user_column(export, frame.columns)
    return pl.DataFrame(
        {
            "row": pl.Series(range(start, start + len(rows)), dtype=pl.Int64),
            **({ids: pl.Series([canonical_id(row[ids]) for row in rows], dtype=pl.String)} if ids else {}),
            "items": pl.Series(items, dtype=pl.List(pl.String)),
            "scores": pl.Series(scores, dtype=pl.List(pl.Float64)),
        }
    )


def _user_column(export: Recommender, columns: Sequence[str]) -> str:
    """The column of the user's id, if the files have it."""
    name = export.chain.settings.user_id
    return name if name in columns else ""


def _with_numbers(
    export: Recommender, row: Mapping[str, object], *, written: WrittenNumbers, where: str
) -> dict[str, object]:
    """Return a row whose texts of numbers are numbers, by the marks of the files of users."""
    try:
        return export.with_numbers(row, written=written)
    except RequestError as error:
        raise RequestError(
            expected=f"text of a number{written.in_words()}",
            found=error.found,
            where=f"{where}: {error.where}",
            ways_out=("say how the files write numbers: --data.decimal, --data.thousands, --data.signs", "correct it"),
        ) from None


def _num_unknown(export: Recommender, frame: pl.DataFrame) -> int:
    name = _user_column(export, frame.columns)
    if not name:
        return 0
    return sum(not export.knows({name: value}) for value in with_decimals(frame[name]).to_list())


def _output_types(export: Recommender, columns: Sequence[str]) -> pa.Schema:
    ids = _user_column(export, columns)
    return pa.schema(
        [
            ("row", pa.int64()),
            *([(ids, pa.large_string())] if ids else []),
            ("items", pa.large_list(pa.large_string())),
            ("scores", pa.large_list(pa.float64())),
        ]
    )
