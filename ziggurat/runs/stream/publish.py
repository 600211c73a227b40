"""Publish a stream: after each window an export of its model, checked, and put before readers in one step.

    window trained ─► checkpoint ─► rows that changed ─► versions/000012: links to version 11 + one delta
                                                         ─► read back, compare, golden answers ─► seal ─► rename
                                                         ─► published.json: current = 12 ─► tell the server

A version is complete by itself (`serving/export/published_folder.py`). What it does not share with the version before
is a delta: dense weights, and the rows of tables that changed (`changed_rows.py`). So publishing writes bytes in
proportion to changed rows. The chain is compacted by a version that is written whole: after `max_deltas` of them, or
when their bytes exceed a share of the base's. Every link of the chain is read and its SHA-256 compared each time.

A model that reads histories of a teacher's vectors has their table written whole each time, with the users and vectors
that the side table has by then: 8 + 4 · W bytes a user (`serving/answering/histories.py`).

Each version is read back before anybody is sent to it. On one device all its weights are compared, bit by bit, with
those that are trained, and its scores with the model's on rows of the window; on ranks the rows that it brings. Golden
requests are rows of the window. A version that does not pass is written whole; one that does not pass then is an error.

*Once*: a version is written when the checkpoint of its window is on the disk. A stream that was killed publishes at its
next start what it lacks, and nothing twice: the pointer knows the windows of each stream. A stream that goes on from an
older checkpoint trains windows again that are published already; it says so, and publishes the first one that is new.
A window whose rows end before those of the newest version, as of another stream into the same folder, is not published.

Cost beside the bytes: the tables are read (a digest and a load, about 1 s a GB each), while training waits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypedDict

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from ziggurat.commands import pasted
from ziggurat.config import to_json
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.preprocess.values.grown import GrownVocabulary
from ziggurat.data.raw.bad_rows import BadRowPolicy, BadRows
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.streams.windows import Clock
from ziggurat.data.teachers.join import TeacherJoin
from ziggurat.errors import ConfigError, ExportError, ZigguratError
from ziggurat.features.schema import PADDING_ROW
from ziggurat.files import Format
from ziggurat.models.build import MODEL_CONFIGS
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs.apart_from_rows import refuse_among_rows
from ziggurat.runs.export.data import RunData
from ziggurat.runs.export.export_config import ExportConfig
from ziggurat.runs.export.golden_requests import golden_requests
from ziggurat.runs.export.histories import missing_histories, write_histories
from ziggurat.runs.export.made_from import source_of, versions
from ziggurat.runs.export.parity import compare, refuse_difference
from ziggurat.runs.export.value_fit import quoted
from ziggurat.runs.load import Run
from ziggurat.runs.scores.scoring import FileReading
from ziggurat.runs.stream.changed_rows import (
    RowMarks,
    all_rows,
    are_marks_enough,
    different_rows,
    gathered_dense,
    gathered_rows,
    reader_of,
    table_names,
)
from ziggurat.runs.stream.tell_server import ServerToTell
from ziggurat.runs.teachers.rows import with_histories
from ziggurat.serving.answering.chain import CHAIN_FILE, ChainSettings
from ziggurat.serving.answering.histories import HISTORIES
from ziggurat.serving.export.deltas import ChangedRows, Delta, changed_ids, ids_in_order
from ziggurat.serving.export.export_folder import (
    MANIFEST_NAME,
    FileEntry,
    open_export,
    read_manifest,
    replacing_export,
    seal_export,
)
from ziggurat.serving.export.packed_model import (
    MODEL_FILE,
    WEIGHTS_FILE,
    PackedModel,
    delta_names,
    save_delta,
    save_weights,
)
from ziggurat.serving.export.published_folder import (
    PUBLISHED_FACTS,
    Pointer,
    Publication,
    change_pointer,
    is_published,
    newest_number,
    prune,
    publishing,
    read_pointer,
    refuse_other_folder,
    version_folder,
)
from ziggurat.serving.golden import GOLDEN_FILE, check_golden, read_requests, write_golden
from ziggurat.serving.load_parts import RANKER
from ziggurat.serving.recommender import Recommender
from ziggurat.serving.value_model.formula import ValueModel
from ziggurat.training.checkpoint.files import link
from ziggurat.training.hooks.hook import Hook
from ziggurat.training.judging import MadeStep
from ziggurat.training.records.windows import WindowRecord
from ziggurat.training.report.progress import Progress
from ziggurat.training.team import Team
from ziggurat.training.trainer import Trainer
from ziggurat.typed import Count, CountOrNone, Range, checked

_PARITY_ROWS = 1_000
_MODEL = "model."
_STUDENT = "model.student."
_DELTAS = "deltas"
_ID_FILE = "id.json"
_MIB = 1 << 20

STREAM_ID = Format(name="ziggurat.stream_id", what="the name by which a published folder knows a stream")


@dataclass(frozen=True, kw_only=True)
@checked
class PublishConfig:
    """Settings of how a stream is published.

    Args:
        folder: the published folder; made if it is absent.
        every: windows between two versions.
        keep: versions that stay, at least.
        max_deltas: a version is written whole after so many deltas; 0: each is.
        max_delta_share: and when the bytes of its deltas exceed this share of those of their base.
        golden: golden requests, rows of the window.
        value: formula over the tasks that orders answers; "": the one task.
        server: path of the admin socket of a server that is told of each version; or the URL of one that follows the
            folder by itself, which is asked until it has the version; "": nobody is told.
    """

    folder: str
    every: Count = 1
    keep: Annotated[int, Range(2, 100_000)] = 8
    max_deltas: CountOrNone = 16
    max_delta_share: Annotated[float, Range(0.0, 1000.0)] = 0.5
    golden: CountOrNone = 8
    value: str = ""
    server: str = ""


class _Due(TypedDict):
    """The decision of the first rank about a window, as plain data for all."""

    is_due: bool
    is_whole: bool
    is_known: bool


@dataclass(kw_only=True)
class _Weights:
    """The weights of a version on the first rank.

    Args:
        dense: all but tables.
        tables: rows by table: all of them, or those that changed.
        ids: of growing tables, in the order of their rows.
    """

    dense: dict[str, Tensor]
    tables: dict[str, ChangedRows] = field(default_factory=dict)
    ids: dict[str, Int64[np.ndarray, " K"]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _RowsOfWindow(RunData):
    """Raw rows of a window, where an export of a run reads those of its files."""

    chunk: RawChunk

    def samples(self, *, num_rows: int) -> Iterator[RawChunk]:
        """Return the first rows."""
        for raw in with_histories([self.chunk], self.join):
            chunk = raw.with_number_columns(self.schema.numbers)
            yield chunk.filter(np.arange(chunk.num_rows) < num_rows)


class PublishWindows(Hook):
    """Publishes the model of a stream after each window; on every rank, since all have parts of it.

    Args:
        config: settings.
        run: folder of the stream's run.
        stream: folder in it for what the stream keeps.
        settings: of the run, with every `auto` replaced by what was chosen.
        data: how files are read.
        preprocessing: as fitted to the history.
        record: gives the record of a window by its number, on the first rank.
        sample: gives raw rows of a window, on the first rank; None where they are gone.
        histories: gives what joins rows with the histories of now, on the first rank; None where the model reads none.
        progress: where it is said.
    """

    def __init__(
        self,
        config: PublishConfig,
        *,
        run: Path,
        stream: Path,
        settings: RunConfig,
        data: DataConfig,
        preprocessing: Preprocessing,
        record: Callable[[int], WindowRecord | None],
        sample: Callable[[int], RawChunk | None],
        histories: Callable[[], TeacherJoin | None],
        progress: Progress,
    ) -> None:
        self._config = config
        self._folder = Path(config.folder)
        self._run = run
        self._stream = stream
        self._settings = settings
        self._data = data
        self._preprocessing = preprocessing
        self._record = record
        self._sample = sample
        self._histories = histories
        self._progress = progress
        self._names = table_names(preprocessing.inputs)
        self._marks = RowMarks(preprocessing.inputs)
        self._are_marked = False  # all rows that changed since the version before are marked
        self._previous: Publication | None = None  # of this stream, the newest; on the first rank
        self._ids: dict[str, Int64[np.ndarray, " K"]] = {}  # of growing tables in that version
        self._dense: dict[str, Tensor] = {}  # of that version, where it was read
        self._is_current = False
        self._id = ""
        self._said: set[str] = set()
        self._held = contextlib.ExitStack()
        self._server: ServerToTell | None = None
        config_class = type(settings.model)
        self._models = () if config_class in MODEL_CONFIGS else (config_class,)

    # ------------------------------------------------------------------------------------------------------ moments

    def on_start(self, trainer: Trainer) -> None:
        """Take the folder, remove what a killed process left in it, and publish what it did not come to."""
        trainer.team.on_first(self._begin)
        trainer.team.on_first(self._fill_in_metrics)  # of windows that were judged before a process was killed
        position = trainer.position
        if position.window and position.epoch > position.window_epoch:
            self._publish(trainer, position.window)

    def on_step(self, trainer: Trainer, made: MadeStep) -> None:
        """Mark the rows that changed."""
        del trainer
        self._marks.add(made.batch)

    def on_window(self, trainer: Trainer) -> None:
        """Publish."""
        self._publish(trainer, trainer.position.window)

    def on_labelled(self, trainer: Trainer, record: WindowRecord) -> None:
        """Fill in the metrics of a version that was published before the labels of its window were complete."""
        del record
        trainer.team.on_first(self._fill_in_metrics)

    def close(self) -> None:
        """Wait for the server that was told, and give the folder back."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self._held.close()

    # --------------------------------------------------------------------------------------------------------- begin

    def _begin(self) -> None:
        self._held.enter_context(publishing(self._folder))
        path = self._stream / _ID_FILE
        found = STREAM_ID.read(path) if path.is_file() else {"id": secrets.token_hex(8)}
        self._id = str(found["id"])
        folder = str(self._folder.absolute())
        if found.get("folder") != folder:
            path.parent.mkdir(parents=True, exist_ok=True)
            STREAM_ID.write(path, {"id": self._id, "folder": folder})
        if self._config.server:
            self._server = ServerToTell(self._config.server, folder=self._folder, say=self._progress.say)
        if is_published(self._folder):
            mine = [each for each in read_pointer(self._folder).versions if each.run == self._id]
            self._previous = mine[-1] if mine else None

    def _fill_in_metrics(self) -> None:
        """Write the metrics of windows that are known by now beside their versions; the versions stay as they are."""
        if not is_published(self._folder):
            return
        found: dict[int, dict[str, float | None]] = {}
        for each in read_pointer(self._folder).versions:
            record = self._record(each.window) if each.run == self._id and not each.metrics else None
            if record is not None and record.metrics:
                found[each.number] = _metrics_of(record)
        if not found:
            return

        def filled(pointer: Pointer | None) -> Pointer:
            assert pointer is not None, "it was read, and stays"
            versions = (
                dataclasses.replace(each, metrics=found.get(each.number, each.metrics)) for each in pointer.versions
            )
            return dataclasses.replace(pointer, versions=tuple(versions))

        change_pointer(self._folder, filled)

    # ------------------------------------------------------------------------------------------------------- publish

    def _publish(self, trainer: Trainer, number: int) -> None:
        """Publish the model as it is after a window, if that is due; collective."""
        begin = time.perf_counter(), time.process_time()
        team = trainer.team
        due = team.on_first(lambda: self._due(number, may_compare=team.world_size == 1))
        if not due["is_due"]:
            return
        # A version never comes from weights that a resumed stream would have to train again.
        trainer.store.wait()
        state = trainer.state.tensors()
        tensors = {
            name.removeprefix(_MODEL): each
            for name, each in state.items()
            # What a model learns by from teachers, or of delays, is not served.
            if name.startswith(_MODEL) and not name.startswith(_STUDENT)
        }
        of_tables = {table: tensors.pop(name, None) for table, name in self._names.items()}
        weights = _Weights(dense=gathered_dense(team, tensors))
        if trainer.growing is not None:
            weights.ids = {name: ids_in_order(each) for name, each in trainer.growing.grown().items()}
        has_marks = self._are_marked and are_marks_enough(trainer.model) and trainer.step.average is None
        is_whole = due["is_whole"] or not (has_marks or team.world_size == 1)
        if not is_whole:
            changed = self._marks.rows(team) if has_marks else self._compared(of_tables)
            is_whole = changed is None
            if changed is not None:
                weights.tables = self._rows(team, of_tables, changed)
        if is_whole:
            weights.tables = self._rows(team, of_tables, None)
        if due["is_known"] and not is_whole and team.is_first and self._is_same(weights):
            self._go_on_from(weights)
            return
        problem = team.on_first(lambda: self._write(trainer, number, weights, of_tables, whole=is_whole, begin=begin))
        if problem:
            self._say(f"the next version is written whole: {problem}")
            weights.tables = self._rows(team, of_tables, None)
            team.on_first(lambda: self._write(trainer, number, weights, of_tables, whole=True, begin=begin))
        self._go_on_from(weights)

    def _go_on_from(self, weights: _Weights) -> None:
        """Mark changes from the present weights on, which are published."""
        self._marks.clear()
        self._are_marked = True
        self._ids = weights.ids

    def _due(self, number: int, *, may_compare: bool) -> _Due:
        """Decide whether a window is published, and how."""
        no = _Due(is_due=False, is_whole=False, is_known=False)
        record = self._record(number)
        if record is None or not record.is_trained:
            return no
        pointer = read_pointer(self._folder) if is_published(self._folder) else None
        versions = () if pointer is None else pointer.versions
        known = [each for each in versions if each.run == self._id and each.window >= number]
        if any(each.window > number for each in known) or (known and not may_compare):
            self._say_once(
                f"window {record.name} is published already, as version {known[0].number}: it is not published again"
            )
            self._are_marked = False
            return no
        if not known and number % self._config.every:
            return no
        watermark = self._watermark(number)
        ahead = [each for each in versions if each.run != self._id and _is_before(watermark, each.watermark)]
        if ahead and not known:
            self._say_once(
                f"{self._folder} has version {ahead[-1].number} of another stream with rows up to "
                f"{ahead[-1].watermark}: windows before that are not published"
            )
            return no
        is_whole = self._previous is None or (not known and self._is_chain_long(self._previous))
        return _Due(is_due=True, is_whole=is_whole, is_known=bool(known))

    def _watermark(self, number: int) -> str:
        """Return the time of the newest row that was trained up to a window.

        Windows that were not published count as well, and where labels are known later than rows, the newest row may
        have been trained before the newest window.
        """
        before = 0 if self._previous is None else self._previous.window
        newest = "" if self._previous is None else self._previous.watermark
        records = (self._record(each) for each in range(min(before + 1, number), number + 1))
        return max([newest, *(each.watermark for each in records if each is not None)], key=_order)

    def _is_chain_long(self, previous: Publication) -> bool:
        """Return whether the next version is written whole, so that the chain does not grow."""
        if previous.deltas >= self._config.max_deltas:
            return True
        try:
            files = read_manifest(version_folder(self._folder, previous.number)).manifest.files
        except ZigguratError:
            return True
        prefix = f"{RANKER}/{_DELTAS}/"
        num_bytes = sum(entry.bytes for name, entry in files.items() if name.startswith(prefix))
        return num_bytes > self._config.max_delta_share * files[f"{RANKER}/{WEIGHTS_FILE}"].bytes

    def _rows(
        self, team: Team, of_tables: dict[str, Tensor | None], changed: dict[str, Int64[np.ndarray, " N"]] | None
    ) -> dict[str, ChangedRows]:
        """Rows of all tables on the first rank: all, or those that changed; collective."""
        found: dict[str, ChangedRows] = {}
        for table in self._preprocessing.inputs.tables:
            rows = all_rows(table.num_rows) if changed is None else changed[table.name]
            mine = gathered_rows(team, of_tables[table.name], rows)
            if mine is not None and (changed is None or len(rows)):
                found[table.name] = mine
        return found

    def _compared(self, of_tables: dict[str, Tensor | None]) -> dict[str, Int64[np.ndarray, " N"]] | None:
        """Rows that differ from those of the version before, on one device; None where that cannot be read."""
        assert self._previous is not None, "else the version is written whole"
        try:
            loaded = self._load(version_folder(self._folder, self._previous.number))
        except ZigguratError as error:
            self._say(f"version {self._previous.number} cannot be read, so the next one is written whole\n{error}")
            return None
        packed = loaded.chain.needed_ranker.packed
        found: dict[str, Int64[np.ndarray, " N"]] = {}
        for name, value in of_tables.items():
            assert value is not None, "one device has all tables"
            found[name] = different_rows(reader_of(value), _rows_of(packed, name))
        self._ids = {name: ids_in_order(each) for name, each in packed.preprocessing.grown.items()}
        self._dense = {name: each for name, each in packed.model.state_dict().items() if name not in self._table_keys}
        return found

    @property
    def _table_keys(self) -> set[str]:
        return set(self._names.values())

    def _is_same(self, weights: _Weights) -> bool:
        """Return whether a version that is published already has these very weights."""
        assert self._previous is not None
        is_same = (
            not any(len(each.rows) for each in weights.tables.values())
            and all(_same_bits(each, self._dense[name]) for name, each in weights.dense.items())
            and self._ids.keys() == weights.ids.keys()
            and all(np.array_equal(ids, self._ids[name]) for name, ids in weights.ids.items())
        )
        if not is_same:
            self._say(
                f"window {self._previous.name} is published already, as version {self._previous.number}, with other "
                "weights: it is published again"
            )
        return is_same

    # --------------------------------------------------------------------------------------------------------- write

    def _write(
        self,
        trainer: Trainer,
        number: int,
        weights: _Weights,
        of_tables: dict[str, Tensor | None],
        *,
        whole: bool,
        begin: tuple[float, float],
    ) -> str:
        """Write a version, check it, and let the pointer lead to it; return why it must be written whole, or ""."""
        pointer = read_pointer(self._folder) if is_published(self._folder) else None
        record = self._record(number)
        assert record is not None, "looked at in _due"
        previous = self._previous
        # A number is taken once, also where an older copy of the pointer was put back.
        version = 1 + max(0 if pointer is None else pointer.last, newest_number(self._folder))
        path = version_folder(self._folder, version)
        publication = Publication(
            number=version,
            version="",
            run=self._id,
            window=number,
            name=record.name,
            step=trainer.position.step,
            watermark=self._watermark(number),
            deltas=0 if whole or previous is None else previous.deltas + 1,
            rows=sum(len(each.rows) for each in weights.tables.values()),
            created=datetime.now(UTC).isoformat(timespec="milliseconds"),
            metrics=_metrics_of(record),
        )
        grown = {name: GrownVocabulary.of(ids) for name, ids in weights.ids.items()}
        fitted = self._preprocessing.with_grown(grown) if grown else self._preprocessing
        packed = PackedModel(
            config=self._settings.model, towers=self._settings.towers, preprocessing=fitted, model=trainer.model
        )
        with replacing_export(path) as folder:
            known: dict[str, FileEntry] = {}
            if whole or previous is None:
                self._write_whole(packed, folder, weights)
            else:
                why = self._write_delta(packed, folder, weights, known, number=version, previous=previous)
                if why:
                    return why
            self._chain_settings().write(folder / CHAIN_FILE)
            known.pop(CHAIN_FILE, None)
            join = self._histories()
            facts: dict[str, object] = {PUBLISHED_FACTS: to_json(publication)}
            facts |= self._write_histories(join, folder)
            source = source_of(
                RANKER, folder=self._run, config=self._settings, preprocessing=fitted, step=publication.step
            )
            made: dict[str, Any] = {"sources": (source,), "made_with": versions()}
            seal_export(folder, facts=facts, known=known, **made)
            try:
                loaded = self._load(folder)
                self._check(trainer, loaded, weights, of_tables)
            except ExportError as error:
                if whole:
                    raise
                return f"a check failed\n{error}"
            with self._rows_of(number, join=join) as rows:
                if rows is not None and trainer.team.world_size == 1:
                    facts |= self._compare_scores(trainer, loaded, rows, fitted, publication)
                write_golden(loaded, self._golden(loaded, rows), folder / GOLDEN_FILE)
            sealed = seal_export(folder, facts=facts, known=known, **made)
            check_golden(loaded, sealed)
            new_bytes = sum(entry.bytes for name, entry in sealed.manifest.files.items() if name not in known)
            new_bytes += (folder / MANIFEST_NAME).stat().st_size
            publication = dataclasses.replace(publication, version=sealed.version, new_bytes=new_bytes)
        spent = time.perf_counter() - begin[0], time.process_time() - begin[1]
        publication = dataclasses.replace(publication, seconds=round(spent[0], 4), cpu_s=round(spent[1], 4))
        self._lead_to(publication)
        self._previous = publication
        self._tell(publication)
        return ""

    def _write_whole(self, packed: PackedModel, folder: Path, weights: _Weights) -> None:
        tensors = dict(weights.dense)
        tensors |= {self._names[name]: each.values for name, each in weights.tables.items()}
        save_weights(packed, folder / RANKER, weights=tensors)

    def _write_histories(self, join: TeacherJoin | None, folder: Path) -> dict[str, object]:
        """Write the histories of users as of now; return what is said of them."""
        schema = self._preprocessing.schema
        if join is None:
            return {}
        for line in missing_histories(join, schema):
            self._say_once(line)
        return write_histories(join, folder / RANKER, schema=schema)

    def _write_delta(
        self,
        packed: PackedModel,
        folder: Path,
        weights: _Weights,
        known: dict[str, FileEntry],
        *,
        number: int,
        previous: Publication,
    ) -> str:
        """Link what the version before has, and write a delta beside it; return why that is impossible, or ""."""
        before = version_folder(self._folder, previous.number)
        try:
            files = read_manifest(before).manifest.files
            names = delta_names(before / RANKER)
        except ZigguratError as error:
            return f"version {previous.number} is damaged\n{error}"
        for name, entry in files.items():
            if name in (GOLDEN_FILE, CHAIN_FILE, f"{RANKER}/{MODEL_FILE}"):
                continue
            if name.startswith(f"{RANKER}/{HISTORIES}/"):  # those of now are written
                continue
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                why = link(before / name, folder / name)
            except OSError as problem:
                why = problem.strerror or str(problem)
            if why:
                return f"{before / name} cannot be linked: {why}"
            known[name] = entry
        tables = {name: each for name, each in weights.tables.items() if len(each.rows)}
        nothing = np.empty(0, dtype=np.int64)
        grown = {name: changed_ids(self._ids.get(name, nothing), ids) for name, ids in weights.ids.items()}
        grown = {name: each for name, each in grown.items() if len(each.rows)}
        delta = Delta(dense=weights.dense, tables=tables, grown=grown)
        names = (*names, f"{_DELTAS}/{number:06}.safetensors")
        save_delta(packed, folder / RANKER, delta=delta, names=names)
        return ""

    def _lead_to(self, publication: Publication) -> None:
        """Let the pointer lead to a version that is there, unless it was rolled back and is held; then prune."""

        def with_new(pointer: Pointer | None) -> Pointer:
            number = publication.number
            if pointer is None:
                return Pointer(current=number, last=number, versions=(publication,))
            return dataclasses.replace(
                pointer,
                current=pointer.current if pointer.held else number,
                last=number,
                versions=(*pointer.versions, publication),
            )

        pointer = change_pointer(self._folder, with_new)
        self._is_current = pointer.current == publication.number
        if not self._is_current:
            self._say(
                f"readers stay at version {pointer.current}, to which {self._folder} was rolled back: "
                f"ziggurat rollback {pasted(self._folder)} --to newest lets them have version {publication.number}"
            )
        prune(self._folder, keep=self._config.keep)

    def _tell(self, publication: Publication) -> None:
        how = f"delta {publication.deltas}" if publication.deltas else "whole"
        self._say(
            f"published  version {publication.number} ({how}): {publication.rows:,} rows of tables, "
            f"{publication.new_bytes / _MIB:,.2f} MiB new, {publication.seconds:.2f} s"
        )
        if self._server is not None and self._is_current:
            self._server.tell(publication)

    # --------------------------------------------------------------------------------------------------------- check

    def _load(self, folder: Path) -> Recommender:
        return Recommender.load(folder, models=self._models, check=False)

    def _check(
        self, trainer: Trainer, loaded: Recommender, weights: _Weights, of_tables: dict[str, Tensor | None]
    ) -> None:
        """Compare what was read back with the weights that are trained.

        Raises:
            ExportError: they differ; names the tensor.
        """
        packed = loaded.chain.needed_ranker.packed
        read = packed.model.state_dict()
        wrong = [name for name, each in weights.dense.items() if not _same_bits(each, read[name])]
        for name in self._names:
            value = of_tables[name]
            rows = _rows_of(packed, name)
            if trainer.team.world_size == 1 and value is not None:
                others = different_rows(reader_of(value), rows)
                # The padding row of some storages holds numbers that nobody reads.
                if len(others[others != PADDING_ROW]):
                    wrong.append(f"{len(others):,} rows of table {name}")
            elif name in weights.tables:
                changed = weights.tables[name]
                if not _same_bits(changed.values, rows[changed.rows]):
                    wrong.append(f"rows of table {name}")
        for name, ids in weights.ids.items():
            if not np.array_equal(ids_in_order(packed.preprocessing.grown[name]), ids):
                wrong.append(f"ids of table {name}")
        if wrong:
            raise ExportError(
                expected="the weights of the stream, bit for bit, in what was written of them",
                found=f"others: {', '.join(wrong)[:200]}",
                where=str(loaded.export.path),
                ways_out=("look for errors of disk or memory", "publish into another folder"),
            )

    def _compare_scores(
        self, trainer: Trainer, loaded: Recommender, rows: RunData, fitted: Preprocessing, publication: Publication
    ) -> dict[str, object]:
        """Compare scores of raw rows with those of the model that is trained, where that computes in FP32 as exports.

        Raises:
            ExportError: they differ.
        """
        precision = self._settings.training.precision
        if precision.arithmetic is not None or precision.is_dispatched or not are_marks_enough(trainer.model):
            return {}
        run = Run(
            folder=self._run,
            config=self._settings,
            preprocessing=fitted,
            model=trainer.model,
            step=publication.step,
            team=trainer.team,
            reading=FileReading.of(self._settings),
        )
        average = trainer.step.average
        # Of an average it is the average that is evaluated, kept and published.
        with contextlib.nullcontext() if average is None else average.in_place():
            parity = compare(run, loaded.chain.needed_ranker, data=rows, num_rows=_PARITY_ROWS)
        refuse_difference(parity, config=ExportConfig(), where=str(self._run))
        return {"parity": parity.to_json()}

    @contextlib.contextmanager
    def _rows_of(self, number: int, *, join: TeacherJoin | None) -> Iterator[_RowsOfWindow | None]:
        """Raw rows of a window, with histories where the model reads them; None where they are gone."""
        chunk = self._sample(number)
        if chunk is None or not chunk.num_rows:
            yield None
            return
        # Bad rows were reported when the window was encoded; here they are only left out.
        with (
            tempfile.TemporaryDirectory() as folder,
            BadRows(BadRowPolicy.QUARANTINE, folder=Path(folder)) as bad_rows,
        ):
            schema = self._preprocessing.schema
            yield _RowsOfWindow(config=self._data, schema=schema, bad_rows=bad_rows, chunk=chunk, join=join)

    def _golden(self, loaded: Recommender, rows: _RowsOfWindow | None) -> Sequence[dict[str, Any]]:
        """Questions about rows of the window, else those of the version before."""
        if rows is not None:
            return golden_requests(loaded, {RANKER: rows}, number=self._config.golden)
        if self._previous is None:
            return []
        return read_requests(open_export(version_folder(self._folder, self._previous.number), only=(GOLDEN_FILE,)))

    # ------------------------------------------------------------------------------------------------------- details

    def _chain_settings(self) -> ChainSettings:
        schema = self._preprocessing.schema
        numbers = {each.column: each for each in schema.numbers}
        return ChainSettings(
            formula=formula_of(self._config, self._settings),
            written=self._data.text.numbers,
            number_columns=tuple(numbers.values()),
        )

    def _say(self, text: str) -> None:
        self._progress.end()
        self._progress.say(text)

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)


def formula_of(config: PublishConfig, settings: RunConfig) -> str:
    """Return the formula that orders the answers of a published stream.

    Raises:
        ConfigError: several tasks and no formula, or one that names what is not there.
    """
    labels = [label.name for label in settings.table_schema.labels]
    names = [quoted(label) for label in labels]
    formula = config.value or (names[0] if len(labels) == 1 else "")
    if not formula:
        raise ConfigError(
            expected="a formula that makes one value of the scores of the tasks",
            found=f"none, and the tasks {', '.join(labels)}",
            where="--publish-value",
            ways_out=(f"--publish-value '{' + '.join(names)}'",),
        )
    ValueModel(formula, names=tuple(labels), where="--publish-value")
    return formula


def check_publishing(config: PublishConfig, settings: RunConfig, *, run: Path) -> None:
    """Refuse what cannot be published, before anything is read or trained.

    Args:
        config: settings.
        settings: of the run.
        run: its folder.

    Raises:
        ConfigError: several tasks and no formula; a folder of something else; a server that cannot be told.
        ExportError: the pointer of the folder is damaged or gone.
    """
    formula_of(config, settings)
    refuse_other_folder(config.folder)
    refuse_among_rows(
        config.folder,
        settings.data.train,
        flag="--publish",
        also=(run / "stream", run / "checkpoints"),
        instead="exports/live",
    )
    if config.server:
        ServerToTell.check(config.server)


def say_published_before(stream: Path, *, say: Callable[[str], None]) -> None:
    """Say that a stream which goes on without a folder to publish into had one before.

    Args:
        stream: folder in the run for what the stream keeps.
        say: tells people.
    """
    path = stream / _ID_FILE
    if not path.is_file():
        return
    # Streams of older releases did not keep the folder.
    folder = str(STREAM_ID.read(path).get("folder", ""))
    where = f"into {folder}" if folder else "into a folder"
    say(
        f"not published: this stream was published {where} before, and no --publish is given now; "
        f"--publish {pasted(folder) if folder else 'FOLDER'} goes on with it"
    )


def _metrics_of(record: WindowRecord) -> dict[str, float | None]:
    """Return the metrics of a window; of an average that is published, its own."""
    return dict(record.averaged or record.metrics)


def _rows_of(packed: PackedModel, name: str) -> Tensor:
    rows = packed.model.embeddings.tables.rows(name)
    return rows.read(0, rows.num_rows)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal bit by bit: NaN is itself, and 0 is not -0."""
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    first, second = (each.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(first, second)


def _order(watermark: str) -> tuple[int, float]:
    """Return what orders watermarks: dates by time, numbers by size, nothing before all."""
    if not watermark:
        return (0, 0.0)
    with contextlib.suppress(ValueError):
        return (1, float(watermark))
    return (2, Clock(per_second=1).moment(watermark, flag="watermark of a version"))


def _is_before(watermark: str, other: str) -> bool:
    """Return whether rows end before others, where both have a time."""
    return bool(watermark and other) and _order(watermark) < _order(other)
