"""One preparation, from raw files to a published folder: read, split, parse, fit, keep, encode.

    raw files ─► shards ─► where to cut? ─► each shard: parse, check ─► draft on disk ─► each file: encode ─► publish
                           (split by time)               └► fit on training rows ─► merge ─┘

`prepare.py` decides whether this must be done at all. Shards and files are units of work (`work.py`): several threads
and processes share them, and what is finished when all of them end early is not done again. Reading, fitting and
writing a shard overlap, each in its own thread; a few chunks are in memory.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ziggurat.config import JSON, to_json
from ziggurat.data.encoded.dataset import DEFAULT_ROWS_PER_FILE, EncodedDataset, write_manifest
from ziggurat.data.encoded.part_files import part_name, row_groups, write_part
from ziggurat.data.events.sequences import Sequences
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.encode_parts import EncodedPart
from ziggurat.data.preprocess.fit.draft import DraftFacts
from ziggurat.data.preprocess.fit.fitted_files import DraftEncoder, FittedFiles
from ziggurat.data.preprocess.fit.flat_numbers import find_flat_numbers
from ziggurat.data.preprocess.fit.latest_items import LATEST_FILE, LatestItems
from ziggurat.data.preprocess.fit.leaks import find_leaks
from ziggurat.data.preprocess.fit.shard_fit import ShardFacts, ShardReader, SharedBadRows
from ziggurat.data.preprocess.fit.shards import Shard, ShardSizes, count_rows, plan_shards
from ziggurat.data.preprocess.fit.work import PLAN, PublishedError, Work
from ziggurat.data.preprocess.prepared import PreparedSummary, SplitSummary, write_prepared
from ziggurat.data.preprocess.preprocessing import FeatureCounters
from ziggurat.data.preprocess.splits import SPLITS, SplitBy, Splitter, fit_splitter, split_column
from ziggurat.data.preprocess.values.list_ends import doubts_about_lists
from ziggurat.data.preprocess.values.numeric import NumericState
from ziggurat.data.preprocess.values.parsing import third_texts_note
from ziggurat.data.raw.bad_rows import BadRowPolicy, BadRows
from ziggurat.data.raw.names import missing_column
from ziggurat.data.raw.source import RawSource
from ziggurat.data.raw.text_parts import TextPart
from ziggurat.data.teachers.join import facts_of_teacher, with_teacher_columns
from ziggurat.errors import ConfigError, DataError, ZigguratError
from ziggurat.features.growing import NUM_NUMBERS
from ziggurat.features.labels import is_number
from ziggurat.features.schema import Encoding, Schema, column_of
from ziggurat.files import publish
from ziggurat.files.stores import DataPath, facts_of
from ziggurat.ops.text.choose import text_kernel
from ziggurat.plain import as_group, as_list, as_whole

ProgressCallback = Callable[[str, int, int | None], None]

_FORMAT = 4  # raise it when the same raw rows are encoded in another way: old caches are not reused
_NOT_COMPARED = (
    "train",
    "valid",
    "test",
    "copies",
    "negative_rate",
    "teacher",
)  # the rate is part of the schema by then
_ENCODING_THREADS = 2


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
        sources = [config.source(paths) if paths else None for paths in named]
        self.by_split = [source.paths if source is not None else () for source in sources]
        self.left_out: tuple[Path, ...] = tuple(
            path for source in sources if source is not None for path in source.left_out
        )
        self.paths: tuple[DataPath, ...] = tuple(path for paths in self.by_split for path in paths)

    @property
    def by_files(self) -> bool:
        """True if the files were split before."""
        return self._config.split.by is SplitBy.FILES

    def refuse_missing_roles(self, schema: Schema) -> None:
        """Refuse a role of the schema whose column the first training file has not: no feature is to blame.

        Raises:
            SchemaError: a column is missing; says which role names it.
        """
        source = self._config.source(self.by_split[0])
        first = source.paths[0]
        known = tuple(source.columns())
        separator = source.separator_of(first) if source.is_text(first) else ""
        for role in ("group", "session", "time", "weight"):
            name = getattr(schema, role)
            if name and name not in known and name not in map(column_of, schema.features):
                raise missing_column(first, name, known, separator=separator, asked=role)

    def parts_of(self, path: DataPath, num_parts: int) -> tuple[TextPart, ...]:
        """A large text file in parts, if it can be cut."""
        return self._config.source([path]).parts_of(path, num_parts=num_parts)

    def open(self, bad_rows: BadRows) -> list[RawSource | None]:
        """The sources in the order of the splits; None for a split without files."""
        return [self._config.source(paths, bad_rows=bad_rows) if paths else None for paths in self.by_split]


def fingerprint_of(
    config: DataConfig, schema: Schema, sources: Sources, *, numbers: Mapping[str, NumericState] | None = None
) -> str:
    """16 hex digits that change with the settings, the schema, the raw files and the statistics that are given."""
    # How the files were named (relative, absolute, by a glob) changes nothing; which split each is for does.
    files = [[facts_of(path) for path in paths] for paths in sources.by_split]
    settings = {name: value for name, value in config.to_state().items() if name not in _NOT_COMPARED}
    state = {"format": _FORMAT, "config": settings, "schema": schema.to_state(), "files": files}
    if config.teacher and with_teacher_columns(schema):
        state["teacher"] = facts_of_teacher(config.teacher)
    if numbers is not None:
        state["numbers"] = {name: to_json(each) for name, each in sorted(numbers.items())}
    if schema.items is not None and schema.time:
        state["latest_items"] = 1  # prepared before they were kept: prepare again
    if any(is_number(label) for label in schema.labels):
        # Prepared before their mean and deviation were kept, or with their values in 32 bits: prepare again.
        state["numbers_of_labels"] = 2
    if any(table.encoding is Encoding.GROWING for table in schema.tables):
        state["growing_numbers"] = NUM_NUMBERS
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()[:16]


class Build:
    """One preparation, from raw files to a published folder.

    Args:
        config: the raw files and how to split them.
        schema: what their columns mean.
        sources: the raw files.
        work: the folder of what is finished; shared with other processes.
        progress: called with (phase, rows done, rows in all or None).
        sizes: of the shards.
        numbers: statistics of dense features to encode with, in place of those of the training rows.
    """

    def __init__(
        self,
        config: DataConfig,
        schema: Schema,
        *,
        sources: Sources,
        work: Work,
        progress: ProgressCallback,
        sizes: ShardSizes,
        numbers: Mapping[str, NumericState] | None = None,
    ) -> None:
        self._config = config
        self._schema = schema
        self._sources = sources
        self._work = work
        self._progress = progress
        self._sizes = sizes
        self._aside = work.target.with_name(f"{work.target.name}_bad_rows")
        self._out = work.folder / "out"
        self._numbers = numbers
        self._fitted = FittedFiles(work.folder, schema=schema, out=self._out / "preprocessing", given_numbers=numbers)
        self._encoded_rows = 0
        self._counting = threading.Lock()
        self._made_of: Sequences | None = None

    def run(self, fingerprint: str, *, made_of: Sequences | None = None) -> None:
        """Prepare and publish, or take part until another process has published.

        Args:
            fingerprint: of settings and raw files.
            made_of: the events that the raw rows were made of; None: they are samples.
        """
        self._made_of = made_of
        try:
            self._work.start()
            plan = self._work.once(PLAN, self._plan)
            shards = [Shard.from_json(entry) for entry in as_list(plan["shards"])]
            splitter, starts = self._splitter_and_starts(shards)
            facts = self._fit(shards, splitter, starts)
            parts = self._encode(shards, facts)
            self._publish_once(fingerprint, facts=facts, parts=parts, split=splitter)
        except (PublishedError, OSError, ZigguratError):
            # What another process publishes is moved away from under those that still look at it.
            if not self._work.target.exists():
                raise

    def _plan(self) -> dict[str, JSON]:
        shutil.rmtree(self._aside, ignore_errors=True)
        shards = plan_shards(self._sources.by_split, sizes=self._sizes, parts_of=self._sources.parts_of)
        return {"shards": [shard.to_json() for shard in shards]}

    # ------------------------------------------------------------------------------------------ numbers of rows, split

    def _splitter_and_starts(self, shards: Sequence[Shard]) -> tuple[Splitter, list[int]]:
        """The split, and the number of the first row of each shard."""
        split = self._config.split
        if split.by in (SplitBy.TIME, SplitBy.TIME_ORDER):
            found = self._work.once("split", lambda: self._find_split(shards))
            splitter = Splitter.from_json(as_group(found["splitter"]), config=split)
            rows = [as_whole(size) for size in as_list(found["rows"])]
        else:
            splitter = fit_splitter(split, (), schema=self._schema)
            # No shard starts behind the last one, so its rows need not be counted.
            names = [f"rows-{shard.index:04}" for shard in shards[:-1]]
            counts = self._work.each(names, lambda name: self._count(shards[int(name[5:])]))
            rows = [as_whole(each["rows"]) for each in counts]
        starts = [0]
        for size in rows[: len(shards) - 1]:
            starts.append(starts[-1] + size)
        return splitter, starts

    def _find_split(self, shards: Sequence[Shard]) -> dict[str, JSON]:
        column = split_column(self._config.split, self._schema) or self._schema.columns[0]
        with self._bad_rows(self._work.folder / "split") as bad_rows:  # the second look reports them
            reader = ShardReader(
                self._config, self._schema, bad_rows=bad_rows, progress=self._progress, total=self._rows_hint()
            )
            rows: list[int] = []
            chunks = reader.chunks(shards, phase="find the split", columns=[column], rows=rows)
            paths = list(dict.fromkeys(str(path) for path in self._config.train))
            where = ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
            splitter = fit_splitter(self._config.split, chunks, schema=self._schema, bad_rows=bad_rows, where=where)
        return {"splitter": splitter.to_json(), "rows": list(rows)}

    def _count(self, shard: Shard) -> dict[str, JSON]:
        if shard.part is not None and shard.part.num_rows is not None:
            return {"rows": shard.part.num_rows}
        with self._bad_rows(self._work.folder / f"rows-{shard.index:04}") as bad_rows:  # the second look reports them
            source = self._config.source(shard.paths, bad_rows=bad_rows, part=shard.part)
            column = self._schema.columns[0]
            rows = count_rows(source, column=column, progress=lambda done: self._progress("count rows", done, None))
        return {"rows": rows}

    def _doubts_of_first_rows(self) -> list[str]:
        """Return what the first rows show of lists that the schema does not say."""
        lists = [column_of(each) for each in self._schema.features if each.id_lists is not None]
        if not lists:
            return []
        with self._bad_rows(self._work.folder / "lists") as bad_rows:  # the rows were reported before
            source = self._config.source(self._sources.by_split[0], bad_rows=bad_rows)
            first = next(iter(source.frames(columns=lists)), None)
            return [] if first is None else doubts_about_lists(self._schema, first)

    def _rows_hint(self) -> int | None:
        hints = [source.num_rows_hint() for source in self._sources.open(BadRows()) if source is not None]
        return None if None in hints else sum(hint for hint in hints if hint is not None)

    def _bad_rows(self, folder: Path) -> BadRows:
        return SharedBadRows(self._config.bad_rows, folder=folder, budget=self._config.bad_row_budget)

    # ------------------------------------------------------------------------------------------------------- fit

    def _fit(self, shards: Sequence[Shard], splitter: Splitter, starts: Sequence[int]) -> list[ShardFacts]:
        """Read, check and keep all rows, shard by shard; learn from the training rows."""
        total = self._rows_hint()
        done = 0

        def fit(name: str) -> dict[str, JSON]:
            nonlocal done
            shard = shards[int(name[-4:])]
            folder = self._work.folder / name
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            before = done
            with self._bad_rows(self._aside) as bad_rows:
                reader = ShardReader(
                    self._config,
                    self._schema,
                    bad_rows=bad_rows,
                    progress=lambda phase, rows, of: self._progress(phase, before + rows, of),
                    total=total,
                )
                facts, fitter = reader.fit(shard, folder=folder, splitter=splitter, start=starts[shard.index])
            done += facts.num_read
            if len(shards) == 1:
                self._refuse_no_training_rows([facts])
                self._fitted.keep_only(fitter)
            else:
                num_rows = facts.drafts[0].num_rows
                self._fitted.keep_state(fitter, folder=folder, first_row=starts[shard.index], num_rows=num_rows)
            return facts.to_json()

        def left(name: str) -> list[Path]:
            folder = self._work.folder / name
            return [folder, *self._fitted.files(1)] if len(shards) == 1 else [folder]

        notes = self._work.each([shard.name for shard in shards], fit, leaves=left)
        facts = [ShardFacts.from_json(note) for note in notes]
        self._refuse_no_training_rows(facts)
        self._refuse_too_many_bad_rows(facts)
        if len(shards) > 1:
            folders = [self._work.folder / shard.name for shard in shards]
            self._work.once(
                "fitted", lambda: self._fitted.merge(folders), leaves=lambda: self._fitted.files(len(folders))
            )
        self._progress("fit", sum(each.num_read for each in facts), sum(each.num_read for each in facts))
        return facts

    # ----------------------------------------------------------------------------------------------------- encode

    def _encode(self, shards: Sequence[Shard], facts: Sequence[ShardFacts]) -> dict[str, list[EncodedPart]]:
        """Encode all drafts into the files of the result."""
        sizes = [sum(each.drafts[split].num_rows for each in facts) for split in range(len(SPLITS))]
        total = sum(sizes)
        self._progress("encode", 0, total)
        rows_per_part = max(1, DEFAULT_ROWS_PER_FILE // self._config.rows_per_group) * self._config.rows_per_group
        names: list[str] = []
        for split, size in zip(SPLITS, sizes, strict=True):
            (self._out / split.value).mkdir(parents=True, exist_ok=True)
            names += [f"{split.value}-{index:05}" for index in range(-(-size // rows_per_part))]
        self._fitted.preprocessing()  # read once, before threads ask for it

        def encode(name: str) -> dict[str, JSON]:
            split, _, index = name.partition("-")
            number = [each.value for each in SPLITS].index(split)
            drafts = [
                (self._work.folder / shard.name, each.drafts[number]) for shard, each in zip(shards, facts, strict=True)
            ]
            encoder = DraftEncoder(self._fitted, drafts=drafts, split=number, count=self._count_encoded)
            first = int(index) * rows_per_part
            groups = row_groups(
                encoder.tables(range(first, first + rows_per_part)), rows_per_group=self._config.rows_per_group
            )
            part = write_part(self._out / split / part_name(int(index)), groups)
            return EncodedPart(part=part, counters=encoder.counters).to_json()

        notes = self._work.each(
            names,
            encode,
            leaves=lambda name: [self._out / name.rpartition("-")[0] / part_name(int(name.rpartition("-")[2]))],
            threads=_ENCODING_THREADS,
            tick=lambda: self._progress("encode", min(self._encoded_rows, total - 1), total),
        )
        self._progress("encode", total, total)
        found: dict[str, list[EncodedPart]] = {split.value: [] for split in SPLITS}
        for name, note in zip(names, notes, strict=True):
            found[name.partition("-")[0]].append(EncodedPart.from_json(note))
        return found

    def _count_encoded(self, rows: int) -> None:
        with self._counting:
            self._encoded_rows += rows
        if self._work.stopped.is_set():
            raise InterruptedError("the other thread failed")

    # ---------------------------------------------------------------------------------------------------- publish

    def _publish_once(
        self,
        fingerprint: str,
        *,
        facts: Sequence[ShardFacts],
        parts: dict[str, list[EncodedPart]],
        split: Splitter,
    ) -> None:
        while True:
            with self._work.claimed("publish") as is_mine:
                if is_mine:
                    self._publish(fingerprint, facts=facts, parts=parts, split=split)
                    return
            self._work.wait()

    def _publish(
        self, fingerprint: str, *, facts: Sequence[ShardFacts], parts: dict[str, list[EncodedPart]], split: Splitter
    ) -> None:
        preprocessing = self._fitted.preprocessing()
        latest = LatestItems(self._schema, date_order=self._config.split.date_order)
        for index in range(len(facts)):
            latest.absorb(self._work.folder / f"shard-{index:04}")
        for name, written in parts.items():
            is_train = name == SPLITS[0].value
            extra = {"latest_items": LATEST_FILE} if latest.is_kept and is_train else {}
            files = [each.part for each in written]
            write_manifest(self._out / name, files, inputs=preprocessing.inputs, extra=extra)
        latest.write(self._out / SPLITS[0].value)
        bad = sum((Counter(each.bad) for each in facts), Counter[str]())
        train, valid = (EncodedDataset(self._out / name.value) for name in SPLITS[:2])
        events = self._made_of
        warnings = [*split.notes, *find_leaks(train, valid)] if events is None else list(events.warnings)
        warnings += self._doubts_of_first_rows() if events is None else []
        warnings += [doubt for feature in self._schema.features for doubt in feature.doubts()]
        warnings += self._third_texts([draft for each in facts for draft in each.drafts])
        summary = PreparedSummary(
            split=split.describe() if events is None else events.split,
            warnings=(*warnings, *find_flat_numbers(train, preprocessing)),
            left_out=tuple(map(str, self._sources.left_out)) if events is None else events.left_out,
            splits={
                name.value: SplitSummary(
                    rows=sum(each.drafts[index].num_rows for each in facts),
                    features=self._counters([each.drafts[index] for each in facts], parts[name.value]),
                )
                for index, name in enumerate(SPLITS)
            },
            quarantined=dict(bad.most_common()),
            quarantine=str(self._aside / "quarantine") if bad else "",
            raw_files=len(self._sources.paths) if events is None else events.raw_files,
            text_kernel=text_kernel().name,
        )
        # As late as possible: by now every raw file has been read to its end.
        self._refuse_changed_files(fingerprint)
        write_prepared(self._out, fingerprint=fingerprint, preprocessing=preprocessing, summary=summary)
        publish(self._out, self._work.target)

    def _third_texts(self, drafts: Sequence[DraftFacts]) -> list[str]:
        """Name labels with texts that count as 0 beside their negative."""
        notes: list[str] = []
        for label in self._schema.labels:
            counts = sum((Counter(each.negatives.get(label.name, {})) for each in drafts), Counter[str]())
            num_rows = sum(each.num_rows for each in drafts)
            notes.append(third_texts_note(label, counts, num_rows=num_rows))
        return list(filter(None, notes))

    def _counters(self, drafts: Sequence[DraftFacts], parts: Sequence[EncodedPart]) -> dict[str, FeatureCounters]:
        total = {feature.name: FeatureCounters() for feature in self._schema.features}
        for name, counters in total.items():
            for part in parts:
                counters.ids += part.counters[name].ids
                counters.unknown += part.counters[name].unknown
                counters.missing += part.counters[name].missing
            counters.out_of_range = sum(draft.out_of_range.get(name, 0) for draft in drafts)
            counters.truncated = sum(draft.truncated.get(name, 0) for draft in drafts)
        return total

    # --------------------------------------------------------------------------------------------------- refusals

    def _refuse_no_training_rows(self, facts: Sequence[ShardFacts]) -> None:
        if not sum(each.drafts[0].num_rows for each in facts):
            raise DataError(
                expected="at least one training row",
                found=f"none ({sum(each.num_bad for each in facts):,} bad rows)",
                where=", ".join(map(str, self._config.train)),
                ways_out=("check the files", "check the split", f"look at {self._aside / 'quarantine'}"),
            )

    def _refuse_too_many_bad_rows(self, facts: Sequence[ShardFacts]) -> None:
        """Refuse too many bad rows of several shards read at once; a single shard stops where its own are too many."""
        budget = self._config.bad_row_budget
        found = sum(each.num_bad for each in facts)
        if self._config.bad_rows is BadRowPolicy.QUARANTINE and budget and found > budget:
            raise DataError(
                expected=f"at most {budget:,} bad rows (bad_row_budget)",
                found=f"{found:,} in all files",
                where=", ".join(map(str, self._config.train)),
                ways_out=(f"look at {self._aside / 'quarantine'}", "raise bad_row_budget", "correct the data"),
            )

    def _refuse_changed_files(self, fingerprint: str) -> None:
        if fingerprint_of(self._config, self._schema, self._sources, numbers=self._numbers) != fingerprint:
            raise DataError(
                expected="raw files that stay as they are while they are prepared",
                found="one of them changed",
                where=", ".join(map(str, self._sources.paths[:5])),
                ways_out="prepare again when nothing writes to them any more",
            )
