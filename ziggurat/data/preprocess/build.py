"""One preparation, from raw files to a published folder: read, split, parse, fit, keep, encode.

    raw files ─► where to cut? ─► parse, check ─► draft on disk ─► encode ─► temporary folder ─► publish
                 (split by time)       └► fit on training rows ─────┘

`prepare.py` decides whether this must be done at all. Reading, fitting and writing overlap, each in its own thread, and
then so do encoding and writing; at most a few chunks are in memory.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

from ziggurat.config import to_json
from ziggurat.data.background import in_background
from ziggurat.data.encoded.dataset import EncodedDataset, EncodedWriter
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.draft import DraftWriter
from ziggurat.data.preprocess.fitter import Fitted, Fitter
from ziggurat.data.preprocess.latest_items import LATEST_FILE, LatestItems
from ziggurat.data.preprocess.leaks import find_leaks
from ziggurat.data.preprocess.negatives import kept_rows
from ziggurat.data.preprocess.parsing import ParsedChunk, parse_chunk
from ziggurat.data.preprocess.prepared import PreparedSummary, SplitSummary, write_prepared
from ziggurat.data.preprocess.preprocessing import Preprocessing, id_columns, numeric_columns
from ziggurat.data.preprocess.preprocessing_io import save_preprocessing
from ziggurat.data.preprocess.splits import SPLITS, SplitBy, Splitter, fit_splitter, split_column
from ziggurat.data.raw.bad_rows import BadRow, BadRowPolicy, BadRows
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.raw.source import RawSource
from ziggurat.errors import ConfigError, DataError
from ziggurat.features.schema import Schema
from ziggurat.files import publish, temporary_beside
from ziggurat.ops.text.choose import text_kernel

ProgressCallback = Callable[[str, int, int | None], None]

_FORMAT = 2  # raise it when the same raw rows are encoded in another way: old caches are not reused
_NOT_COMPARED = ("train", "valid", "test", "negative_rate")  # the rate is part of the schema by then


class Sources:
    """The raw files of a DataConfig: one source of all rows, or one for each split (FILES)."""

    def __init__(self, config: DataConfig) -> None:
        if not config.train:
            raise ConfigError(
                expected="at least one raw file to train on",
                found="data.train is empty",
                where="data settings",
                ways_out=("name files, folders or globs: --data.train ratings.parquet",),
            )
        self._config = config
        named = [config.train, config.valid, config.test] if config.split.by is SplitBy.FILES else [config.train]
        sources = [RawSource(paths, format=config.format) if paths else None for paths in named]
        self.by_split = [source.paths if source is not None else () for source in sources]
        self.left_out: tuple[Path, ...] = tuple(
            path for source in sources if source is not None for path in source.left_out
        )
        self.paths: tuple[Path, ...] = tuple(path for paths in self.by_split for path in paths)

    @property
    def by_files(self) -> bool:
        """Whether the files were split before."""
        return self._config.split.by is SplitBy.FILES

    def open(self, bad_rows: BadRows) -> list[RawSource | None]:
        """The sources in the order of the splits; None for a split without files."""
        form, text = self._config.format, self._config.text
        return [
            RawSource(paths, format=form, bad_rows=bad_rows, text=text) if paths else None for paths in self.by_split
        ]


def fingerprint_of(config: DataConfig, schema: Schema, sources: Sources) -> str:
    """16 hex digits that change with the settings, the schema and the raw files."""

    def facts(path: Path) -> tuple[str, int, int]:
        return str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns

    # How the files were named (relative, absolute, by a glob) changes nothing; which split each is for does.
    files = [[facts(path) for path in paths] for paths in sources.by_split]
    settings = {name: value for name, value in to_json(config).items() if name not in _NOT_COMPARED}
    state = {"format": _FORMAT, "config": settings, "schema": schema.to_state(), "files": files}
    if schema.items is not None and schema.time:
        state["latest_items"] = 1  # prepared before they were kept: prepare again
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()[:16]


class _SharedBadRows(BadRows):
    """Bad rows that several threads report."""

    def __init__(self, policy: BadRowPolicy, *, folder: Path, budget: int) -> None:
        super().__init__(policy, folder=folder, budget=budget)
        self._lock = threading.Lock()

    def report(self, bad: BadRow) -> bool:
        with self._lock:
            return super().report(bad)


class Build:
    """One preparation, from raw files to a published folder."""

    def __init__(
        self,
        config: DataConfig,
        schema: Schema,
        *,
        sources: Sources,
        target: Path,
        progress: ProgressCallback,
    ) -> None:
        self._config, self._schema, self._sources = config, schema, sources
        self._target, self._progress = target, progress
        aside = target.with_name(f"{target.name}_bad_rows")
        shutil.rmtree(aside, ignore_errors=True)
        self._bad_rows = _SharedBadRows(config.bad_rows, folder=aside, budget=config.bad_row_budget)
        self._latest = LatestItems(schema, date_order=config.split.date_order)
        self._split_column = split_column(config.split, schema)
        self._columns = tuple(dict.fromkeys([*schema.columns, self._split_column]))
        if not self._split_column:
            self._columns = schema.columns

    def run(self, fingerprint: str) -> None:
        """Prepare and publish."""
        temporary = temporary_beside(self._target)
        try:
            temporary.mkdir()
            with self._bad_rows:
                splitter = self._fit_splitter()
                drafts = [DraftWriter(temporary / f"{split.value}.arrow") for split in SPLITS]
                fitted = self._draft(splitter, drafts)
            # An encoder for each split counts what it met there; they share what was fitted.
            encoders = [
                Preprocessing(self._schema, vocabularies=fitted.vocabularies, numbers=fitted.numbers) for _ in SPLITS
            ]
            self._encode(fitted, drafts, encoders)
            self._latest.write(temporary / SPLITS[0].value)
            save_preprocessing(encoders[0], temporary / "preprocessing")
            quarantined = {reason.value: count for reason, count in self._bad_rows.counts.most_common()}
            train, valid = (EncodedDataset(temporary / split.value) for split in SPLITS[:2])
            summary = PreparedSummary(
                split=splitter.describe(),
                warnings=tuple(find_leaks(train, valid)),
                left_out=tuple(str(path) for path in self._sources.left_out),
                splits={
                    split.value: SplitSummary(rows=draft.num_rows, features=encoder.counters)
                    for split, draft, encoder in zip(SPLITS, drafts, encoders, strict=True)
                },
                quarantined=quarantined,
                quarantine=str(self._bad_rows.folder) if quarantined else "",
                raw_files=len(self._sources.paths),
                text_kernel=text_kernel().name,
            )
            self._refuse_changed_files(fingerprint)
            write_prepared(temporary, fingerprint=fingerprint, preprocessing=encoders[0], summary=summary)
            publish(temporary, self._target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _fit_splitter(self) -> Splitter:
        split = self._config.split
        if split.by not in (SplitBy.TIME, SplitBy.TIME_ORDER):
            return fit_splitter(split, (), schema=self._schema)
        columns = [self._split_column or self._schema.columns[0]]
        chunks = self._read("find the split", columns=columns)
        return fit_splitter(split, (chunk for chunk, _ in chunks), schema=self._schema, bad_rows=self._bad_rows)

    def _draft(self, splitter: Splitter, drafts: Sequence[DraftWriter]) -> Fitted:
        """Read, check and keep all rows, one draft a split; fit on the training rows."""
        fitter = Fitter(self._schema)

        def parsed_rows() -> Iterator[tuple[int, ParsedChunk]]:
            for chunk, source in self._read("fit"):
                for split, part in self._parts(chunk, source, splitter):
                    parsed = parse_chunk(self._schema, part, bad_rows=self._bad_rows)
                    if split == 0 and not (keep := kept_rows(self._schema, parsed, seed=self._config.split.seed)).all():
                        part = part.filter(np.isin(part.global_rows, parsed.global_rows[keep]))
                        if not part.num_rows:
                            continue
                        parsed = parse_chunk(self._schema, part, bad_rows=self._bad_rows)
                    if split == 0:
                        self._latest.add(part, parsed)
                    yield split, fitter.add(parsed) if split == 0 else parsed

        with ExitStack() as stack:
            for draft in drafts:
                stack.enter_context(draft)
            parsed_ahead = in_background(parsed_rows(), depth=2, name="ziggurat-fit")
            stack.callback(parsed_ahead.close)
            for split, parsed in parsed_ahead:
                drafts[split].append(parsed)
        if not drafts[0].num_rows:
            raise self._nothing_to_train_on()
        return fitter.finish()

    def _encode(self, fitted: Fitted, drafts: Sequence[DraftWriter], encoders: Sequence[Preprocessing]) -> None:
        """Encode all drafts, each into the folder of its split beside it."""
        total = sum(draft.num_rows for draft in drafts)
        done = 0
        self._progress("encode", 0, total)
        for split, draft, encoder in zip(SPLITS, drafts, encoders, strict=True):
            tables = (encoder.encode_parsed(parsed, row_of_number=fitted.row_of_number) for parsed in draft.read())
            folder = draft.path.with_name(split.value)
            with ExitStack() as stack:
                extra = {"latest_items": LATEST_FILE} if self._latest.is_kept and split is SPLITS[0] else {}
                writer = stack.enter_context(
                    EncodedWriter(folder, encoder.inputs, rows_per_group=self._config.rows_per_group, extra=extra)
                )
                encoded = in_background(tables, depth=2, name="ziggurat-encode")
                stack.callback(encoded.close)
                for table in encoded:
                    writer.append(table)
                    done += table.num_rows
                    self._progress("encode", done, total)
            assert writer.num_rows == draft.num_rows
            for name, counters in encoder.counters.items():
                counters.out_of_range += draft.out_of_range[name]
                counters.truncated += draft.truncated[name]
            draft.path.unlink(missing_ok=True)

    def _parts(self, chunk: RawChunk, source: int, splitter: Splitter) -> Iterator[tuple[int, RawChunk]]:
        """The rows of a chunk by split."""
        if self._sources.by_files:
            yield source, chunk
            return
        codes = splitter.assign(chunk, bad_rows=self._bad_rows)
        for split in range(len(SPLITS)):
            keep = codes == split
            if keep.all():
                yield split, chunk
            elif keep.any():
                yield split, chunk.filter(keep)

    def _read(self, phase: str, *, columns: Sequence[str] = ()) -> Generator[tuple[RawChunk, int]]:
        """Chunks of all sources with the number of their source, read ahead, rows numbered through."""
        sources = self._sources.open(self._bad_rows)
        hints = [source.num_rows_hint() for source in sources if source is not None]
        total = None if None in hints else sum(hint for hint in hints if hint is not None)
        numbers = [name for name in numeric_columns(self._schema) if name != self._split_column]
        ids = [name for name in id_columns(self._schema) if name != self._split_column]
        done = 0
        for chunk, source in in_background(
            _chunks(sources, columns or self._columns, numbers=numbers, ids=ids), depth=2, name="ziggurat-read"
        ):
            self._progress(phase, done, total)
            yield chunk, source
            done += chunk.num_rows
        self._progress(phase, done, done)

    def _nothing_to_train_on(self) -> DataError:
        return DataError(
            expected="at least one training row",
            found=f"none ({self._bad_rows.num_rows:,} bad rows)",
            where=", ".join(map(str, self._config.train)),
            ways_out=("check the files", "check the split", f"look at {self._bad_rows.folder}"),
        )

    def _refuse_changed_files(self, fingerprint: str) -> None:
        if fingerprint_of(self._config, self._schema, self._sources) != fingerprint:
            raise DataError(
                expected="raw files that stay as they are while they are prepared",
                found="one of them changed",
                where=", ".join(map(str, self._sources.paths[:5])),
                ways_out="prepare again when nothing writes to them any more",
            )


def _chunks(
    sources: Sequence[RawSource | None], columns: Sequence[str], *, numbers: Sequence[str], ids: Sequence[str]
) -> Iterator[tuple[RawChunk, int]]:
    offset = 0
    for index, source in enumerate(sources):
        if source is None:
            continue
        end = offset
        for chunk in source.frames(columns=columns, numbers=numbers, ids=ids):
            shifted = replace(chunk, start=chunk.start + offset)
            end = int(np.max(shifted.global_rows)) + 1
            yield shifted, index
        offset = end
