"""Reading a shard: every row checked, split and kept in drafts; the training rows are learnt from."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ziggurat.config import JSON, from_json
from ziggurat.data.background import in_background
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.fit.draft import DraftFacts, DraftWriter
from ziggurat.data.preprocess.fit.fitter import Fitter
from ziggurat.data.preprocess.fit.latest_items import LatestItems
from ziggurat.data.preprocess.fit.shards import Shard
from ziggurat.data.preprocess.negatives import kept_rows
from ziggurat.data.preprocess.order_of_dates import order_of_dates
from ziggurat.data.preprocess.preprocessing import id_columns, numeric_columns
from ziggurat.data.preprocess.splits import SPLITS, SplitBy, Splitter, split_column
from ziggurat.data.preprocess.values.parsing import ParsedChunk, parse_chunk
from ziggurat.data.raw.bad_rows import BadRow, BadRowPolicy, BadRows
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.teachers.join import TeacherJoin, is_joined
from ziggurat.errors import DataError
from ziggurat.features.date_order import DateOrder
from ziggurat.features.schema import Schema


class SharedBadRows(BadRows):
    """Bad rows that several threads report."""

    def __init__(self, policy: BadRowPolicy, *, folder: Path, budget: int) -> None:
        super().__init__(policy, folder=folder, budget=budget)
        self._lock = threading.Lock()

    def report(self, bad: BadRow) -> bool:
        """See `BadRows.report`."""
        with self._lock:
            return super().report(bad)


@dataclass(frozen=True, kw_only=True)
class ShardFacts:
    """Facts about the rows of a shard.

    Args:
        drafts: its rows, for each split.
        bad: bad rows by reason.
        num_read: rows that were read.
    """

    drafts: tuple[DraftFacts, ...]
    bad: dict[str, int]
    num_read: int

    @property
    def num_bad(self) -> int:
        """Bad rows."""
        return sum(self.bad.values())

    def to_json(self) -> dict[str, JSON]:
        """The facts as plain data."""
        drafts: list[JSON] = [
            {
                "batch_rows": list(each.batch_rows),
                "out_of_range": {**each.out_of_range},
                "truncated": {**each.truncated},
                "negatives": {name: {**counts} for name, counts in each.negatives.items()},
            }
            for each in self.drafts
        ]
        return {"drafts": drafts, "bad": {**self.bad}, "num_read": self.num_read}

    @staticmethod
    def from_json(data: JSON) -> ShardFacts:
        """Read what `to_json` made."""
        return from_json(ShardFacts, data, where="note of what a shard holds", error=DataError)


class ShardReader:
    """Reads the raw files of shards, and learns from those of their rows that train.

    Args:
        config: how.
        schema: what their columns mean.
        bad_rows: where rows with faults go.
        progress: called with (phase, rows done, rows in all or None) every chunk.
        total: rows in all, if they are known.
    """

    def __init__(
        self,
        config: DataConfig,
        schema: Schema,
        *,
        bad_rows: BadRows,
        progress: Callable[[str, int, int | None], None],
        total: int | None,
    ) -> None:
        self._config = config
        self._schema = schema
        self._bad_rows = bad_rows
        self._progress = progress
        self._total = total
        self._split_column = split_column(config.split, schema)
        self._date_order: DateOrder | None = None  # of all files; whoever joins teachers asks for it

    def chunks(
        self, shards: Sequence[Shard], *, phase: str, columns: Sequence[str], rows: list[int], start: int = 0
    ) -> Generator[RawChunk]:
        """The rows of shards in order, read ahead.

        Args:
            shards: which follow each other.
            phase: for the progress.
            columns: those wanted.
            rows: takes the number of rows of each shard, bad ones included.
            start: number of the first row.
        """
        join: TeacherJoin | None = None
        if any(map(is_joined, columns)):
            if self._date_order is None:
                self._date_order = order_of_dates(self._config, self._config.train, column=self._schema.time)
            join = TeacherJoin(self._config.teacher, schema=self._schema, date_order=self._date_order)
        raw = [name for name in columns if not is_joined(name)]
        if join is not None:
            raw = list(dict.fromkeys([*raw, *join.columns]))

        def read() -> Iterator[RawChunk]:
            first = start
            for shard in shards:
                source = self._config.source(shard.paths, bad_rows=self._bad_rows, part=shard.part)
                if join is not None:
                    join.check(tuple(source.columns()), where=str(source.paths[0]))
                for chunk in source.frames(columns=raw, numbers=numbers, ids=ids):
                    taught = chunk if join is None else join.added_to(chunk)
                    yield replace(taught, start=taught.start + first) if first else taught
                rows.append(source.num_read)
                first += source.num_read

        numbers = [
            name
            for name in numeric_columns(self._schema, with_extras=True)
            if name in raw and name != self._split_column
        ]
        ids = [name for name in id_columns(self._schema) if name not in (self._split_column, self._schema.time)]
        done = 0
        for chunk in in_background(read(), depth=2, name="ziggurat-read"):
            self._progress(phase, done, None if self._total is None else max(self._total, done))
            yield chunk
            done += chunk.num_rows
        # The rows of text files were an estimate, until all of the last shard were read.
        self._progress(phase, done, max(self._total or done, done))

    def fit(self, shard: Shard, *, folder: Path, splitter: Splitter, start: int) -> tuple[ShardFacts, Fitter]:
        """Read, check and keep the rows of a shard, one draft a split; learn from the training rows.

        Args:
            shard: what to read.
            folder: takes the drafts.
            splitter: says where rows go.
            start: number of the first row.
        """
        fitter = Fitter(self._schema)
        latest = LatestItems(self._schema, date_order=self._config.split.date_order)
        drafts = [draft_of(folder, split) for split in range(len(SPLITS))]
        num_read = 0

        def parsed_rows() -> Iterator[tuple[int, ParsedChunk]]:
            nonlocal num_read
            columns = tuple(dict.fromkeys([*self._schema.training_columns, *filter(None, [self._split_column])]))
            for chunk in self.chunks([shard], phase="fit", columns=columns, rows=[], start=start):
                num_read += chunk.num_rows
                for split, part in self._parts(chunk, shard.source, splitter):
                    parsed = parse_chunk(self._schema, part, bad_rows=self._bad_rows)
                    if split == 0 and not (keep := kept_rows(self._schema, parsed, seed=self._config.split.seed)).all():
                        part = part.filter(np.isin(part.global_rows, parsed.global_rows[keep]))
                        if not part.num_rows:
                            continue
                        parsed = parse_chunk(self._schema, part, bad_rows=self._bad_rows)
                    if split == 0:
                        latest.add(part, parsed)
                        fitter.add_numbers(parsed)
                    yield split, parsed

        def counted_rows() -> Iterator[tuple[int, ParsedChunk]]:
            with closing(in_background(parsed_rows(), depth=2, name="ziggurat-parse")) as ahead:
                for split, parsed in ahead:
                    yield split, fitter.add_ids(parsed) if split == 0 else parsed

        with ExitStack() as stack:
            writers = [stack.enter_context(DraftWriter(path)) for path in drafts]
            # Four threads, one behind the other: read and split into fields, check and learn numbers, count ids, write.
            counted_ahead = in_background(counted_rows(), depth=2, name="ziggurat-fit")
            stack.callback(counted_ahead.close)
            for split, parsed in counted_ahead:
                writers[split].append(parsed)
        latest.save(folder)
        bad = {reason.value: count for reason, count in self._bad_rows.counts.most_common()}
        return ShardFacts(drafts=tuple(each.facts for each in writers), bad=bad, num_read=num_read), fitter

    def _parts(self, chunk: RawChunk, source: int, splitter: Splitter) -> Iterator[tuple[int, RawChunk]]:
        """The rows of a chunk by split."""
        if self._config.split.by is SplitBy.FILES:
            yield source, chunk
            return
        codes = splitter.assign(chunk, bad_rows=self._bad_rows)
        for split in range(len(SPLITS)):
            keep = codes == split
            if keep.all():
                yield split, chunk
            elif keep.any():
                yield split, chunk.filter(keep)


def draft_of(folder: Path, split: int) -> Path:
    """Return the path of the draft of a split in the folder of a shard."""
    return folder / f"{SPLITS[split].value}.arrow"
