"""Log what a trained run says of examples, each once: the teacher's half of distillation.

    raw files ─► example ids ─► known already? left out ─► encode ─► score ─► part of the side table, then the next

What is logged is the logit of each label (of which σ is the score that `predict` gives) and the final representation
below it, in BF16 or INT8. A version is the digest of the weights that scored; its watermark is the time of the newest
row that training or the choice of its weights has seen, in the run or in one that it began from (`runs/watermark.py`).
See `data/teachers/side_table.py` for the files. Whoever is killed goes on by the same command: complete parts stay, and
an example in them is not scored again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ziggurat.data.encoded.records import table_to_batch
from ziggurat.data.raw.bad_rows import BadRowPolicy, BadRows
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.raw.source import RawSource
from ziggurat.data.teachers.history import keys_of
from ziggurat.data.teachers.side_table import TeacherVersion, VersionFolder, example_ids, times_of
from ziggurat.errors import ConfigError, DataError, FileError
from ziggurat.features.date_order import DateOrder
from ziggurat.features.schema import column_of
from ziggurat.files import locked
from ziggurat.models.contract.losses import logits_among_all
from ziggurat.models.contract.model import device_of
from ziggurat.ops.row_formats import RowFormat
from ziggurat.runs.execute import trained_run
from ziggurat.runs.load import Run
from ziggurat.runs.scores.given_data import check_data, files_in
from ziggurat.runs.scores.scoring import CHUNK_ROWS, collecting_bad_rows, refuse_events
from ziggurat.runs.teachers.rows import history_join_of, order_of_given_dates, raw_columns, with_histories
from ziggurat.runs.watermark import Watermark, given_watermark, watermark_of
from ziggurat.training.report.progress import NoProgress, Progress

VECTOR_FORMATS = ("bf16", "int8", "none")
_ROWS_PER_PART = 262_144
_NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, kw_only=True)
class LoggedTeacher:
    """The results of logging.

    Args:
        path: of the version in the side table.
        facts: of the version.
        num_new: examples that were scored.
        num_known: examples that had been logged before, or came twice.
    """

    path: Path
    facts: TeacherVersion
    num_new: int
    num_known: int


def log_teacher(
    run: Run,
    data: object,
    *,
    out: str | Path,
    name: str = "",
    example: Sequence[str] = (),
    vectors: str = "bf16",
    history: str = "",
    watermark: str = "",
    bad_rows: BadRowPolicy = BadRowPolicy.ERROR,
    progress: Progress | None = None,
    rows_per_part: int = _ROWS_PER_PART,
) -> LoggedTeacher:
    """Score the examples of raw files that this version of a run has not scored yet.

    Args:
        run: on one device.
        data: files or globs.
        out: the side table.
        name: of the teacher; "": that of the run's folder.
        example: raw columns that say which example a row is; (): those of all features, and the time.
        vectors: format of the final representation: bf16, int8, or none.
        history: raw column of the user, by whom students read earlier vectors; "": they cannot.
        watermark: time of the newest row that the run has seen; "": found by `runs/watermark.py`.
        bad_rows: stop at one, or put it aside.
        progress: shows rows.
        rows_per_part: examples of a file of the side table.

    Raises:
        ConfigError: the run has no final representation, or the newest row that it or one of its ancestors has seen
            is not known, or is behind the watermark that is given; or a history is to be made of no vectors, or without
            a time.
        DataError: the side table is damaged, or was logged with other settings.
        FileError: another process logs the same version.
    """
    check_data(data)
    refuse_events(run, data)
    progress = progress or NoProgress()
    name = name or run.folder.resolve().name
    if not _NAME.fullmatch(name):
        raise ConfigError(
            expected="a name of letters, digits, dashes and underscores for the teacher",
            found=repr(name),
            where="ziggurat teacher log, --name",
            ways_out=f"--name {re.sub('[^A-Za-z0-9_-]+', '_', name) or 'teacher'}",
        )
    schema = run.preprocessing.schema
    _check_history(run, history, vectors=vectors)
    maps = _closing_maps(run, vectors)
    dim = sum(linear.in_features for linear in maps)
    newest = _watermark(run, watermark, progress)
    features = [column_of(feature) for feature in schema.features]
    columns = tuple(dict.fromkeys([*example] or [*features, *filter(None, [schema.time])]))
    labels = run.preprocessing.inputs.labels
    facts = TeacherVersion(
        teacher=name,
        version=version_of(run),
        labels=tuple(label.name for label in labels),
        are_probabilities=tuple(label.task.has_positives for label in labels),
        example_columns=columns,
        watermark=newest.time,
        is_calendar=newest.is_calendar,
        vectors="" if vectors == "none" else vectors,
        vector_dim=dim,
        history_key=history,
    )
    folder = VersionFolder.begin(out, facts)

    def busy(_: str) -> FileError:
        return FileError(
            expected="one process that logs a version of a teacher",
            found="another one, which has not ended",
            where=str(folder.path),
            ways_out=("wait for it", "log into another folder: --out ANOTHER_FOLDER"),
        )

    with locked(folder.path / "lock", busy=busy):
        if num_listed := folder.settle():
            parts = "1 part" if num_listed == 1 else f"{num_listed:,} parts"
            progress.say(f"{parts} of an older Ziggurat had no digest: listed with those of today")
        return _log(
            run, data, folder=folder, maps=maps, bad_rows=bad_rows, progress=progress, rows_per_part=rows_per_part
        )


def _log(
    run: Run,
    data: object,
    *,
    folder: VersionFolder,
    maps: Sequence[nn.Linear],
    bad_rows: BadRowPolicy,
    progress: Progress,
    rows_per_part: int,
) -> LoggedTeacher:
    facts = folder.facts
    known = folder.index()
    order = order_of_given_dates(run, data) if facts.history_key else DateOrder.AUTO
    num_new = 0
    num_known = 0
    # Examples, logits, vectors, users, times.
    waiting: list[tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None, np.ndarray | None]] = []

    def write(*, least: int) -> None:
        if sum(len(part[0]) for part in waiting) < least:
            return
        ids, logits, vectors, keys, times = (_joined(column) for column in zip(*waiting, strict=True))
        assert ids is not None, "every part has examples"
        assert logits is not None, "and logits"
        owners = {} if keys is None else {"keys": keys, "times": times}
        folder.write_part(ids, logits, vectors, **owners)
        waiting.clear()

    progress.begin("log", total=None)
    done = 0
    with collecting_bad_rows(run, bad_rows, progress=progress) as collector:
        for chunk in _chunks(run, data, facts, collector):
            done += chunk.num_rows
            ids_N = example_ids(chunk, facts.example_columns)
            is_known_N, _ = known.find(ids_N)
            # Of an example that comes twice in these rows, the first.
            _, first = np.unique(ids_N, axis=0, return_index=True)
            is_first_N = np.zeros(len(ids_N), dtype=np.bool_)
            is_first_N[first] = True
            keep_N = is_first_N & ~is_known_N
            num_known += int((~keep_N).sum())
            if keep_N.any():
                part = chunk.filter(keep_N)
                rows, logits, vectors = _scored(run, part, maps, facts.vectors, collector)
                # Rows that were put aside have no score.
                at = np.searchsorted(part.global_rows, rows)
                ids = ids_N[keep_N][at]
                known.add(ids)
                keys, times = _owners(run, part, facts, date_order=order)
                waiting.append((ids, logits, vectors, _at(keys, at), _at(times, at)))
                num_new += len(ids)
                write(least=rows_per_part)
            progress.update(done, total=None)
    write(least=1)
    progress.end()
    return LoggedTeacher(path=folder.path, facts=facts, num_new=num_new, num_known=num_known)


def _chunks(run: Run, data: object, facts: TeacherVersion, collector: BadRows) -> Iterator[RawChunk]:
    features = [column_of(feature) for feature in run.preprocessing.schema.features]
    schema = run.preprocessing.schema
    owners = [facts.history_key, schema.time] if facts.history_key else []
    join = history_join_of(run, data)
    columns = raw_columns([*features, *facts.example_columns, *owners], join=join)
    source = RawSource(files_in(data), format=run.reading.format, bad_rows=collector, text=run.reading.text)
    return with_histories(source.frames(columns=columns, chunk_rows=CHUNK_ROWS), join)


def _owners(
    run: Run, part: RawChunk, facts: TeacherVersion, *, date_order: DateOrder
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return the digest of the user of each row and its time, of a version whose vectors become histories."""
    if not facts.history_key:
        return None, None
    times, is_calendar = times_of(part, run.preprocessing.schema.time, date_order=date_order)
    if is_calendar != facts.is_calendar and not np.isnan(times).all():
        raise DataError(
            expected="times of the kind that the watermark is of",
            found="dates, or units since 1970" if is_calendar else "times that count from a moment of their own",
            where=part.where(0, column=run.preprocessing.schema.time),
            ways_out=("name the watermark as the files write times: --watermark MOMENT", "leave --history out"),
        )
    return keys_of(part, facts.history_key), times


def _joined(column: Sequence[np.ndarray | None]) -> np.ndarray | None:
    found = [each for each in column if each is not None]
    return np.concatenate(found) if found else None


def _at(values: np.ndarray | None, places: np.ndarray) -> np.ndarray | None:
    return None if values is None else values[places]


def _check_history(run: Run, history: str, *, vectors: str) -> None:
    """Refuse users without what makes their history."""
    if not history:
        return
    if vectors == "none":
        raise ConfigError(
            expected="vectors, of which the history of a user consists",
            found="--vectors none",
            where="ziggurat teacher log, --history",
            ways_out=("--vectors bf16", "leave --history out"),
        )
    if not run.preprocessing.schema.time:
        raise ConfigError(
            expected="a teacher whose schema has a time: a history is what was before a row",
            found="a schema without a time",
            where=f"{run.folder}, --history {history}",
            ways_out=("leave --history out", 'train a teacher with time = "COLUMN" under [roles] of its schema'),
        )


@torch.no_grad()
def _scored(
    run: Run, part: RawChunk, maps: Sequence[nn.Linear], format: str, collector: BadRows
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return the global rows that could be read, their logits, and the bytes of their vectors."""
    encoded = run.preprocessing.encode(part, bad_rows=collector, with_labels=False, needs_extras=False)
    batch = table_to_batch(encoded.combine_chunks(), run.preprocessing.inputs)
    seen: list[Tensor] = []
    hooks = [linear.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])) for linear in maps]
    try:
        logits_BL = run.model(batch.to(device_of(run.model))).float()
    finally:
        for hook in hooks:
            hook.remove()
    logits_BL = logits_among_all(logits_BL, inputs=run.preprocessing.inputs)
    vectors = None
    if format:
        vectors_BW = (
            RowFormat.named(format).encode(torch.cat([each.float() for each in seen], dim=1).cpu()).contiguous()
        )
        vectors = vectors_BW.view(torch.uint8).reshape(len(vectors_BW), -1).numpy()
    return batch.row_ids.numpy(), logits_BL.cpu().numpy(), vectors


def vectors_of_part(folder: VersionFolder, part: Path) -> Tensor:
    """Return the logged vectors of a file as FP32: (N, D)."""
    row_format = RowFormat.named(folder.facts.vectors)
    content = torch.from_numpy(folder.vectors_of(part).copy())
    return row_format.decode(content.view(row_format.dtype), dim=folder.facts.vector_dim)


def version_of(run: Run) -> str:
    """Return a digest of the weights that a run scores with."""
    digest = hashlib.sha256()
    for name, value in sorted(run.model.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def _closing_maps(run: Run, vectors: str) -> Sequence[nn.Linear]:
    if vectors not in VECTOR_FORMATS:
        raise ConfigError(
            expected=f"a format of the vectors: {', '.join(VECTOR_FORMATS)}",
            found=repr(vectors),
            where="ziggurat teacher log, --vectors",
            ways_out="--vectors bf16",
        )
    if vectors == "none":
        return ()
    maps = run.model.closing_maps()
    if not maps:
        raise ConfigError(
            expected="a model with one final representation before its logits, which is logged as a vector",
            found=f"{type(run.model).__name__}, which names no closing maps",
            where=f"{run.folder}, --vectors {vectors}",
            ways_out=("--vectors none", "in a model of your own: def closing_maps(self): return [self.output]"),
        )
    return maps


def _watermark(run: Run, given: str, progress: Progress) -> Watermark:
    """Return the time of the newest row that a run and its ancestors have seen, unless it is given."""
    trained = trained_run(run.folder, run.config, preprocessing=run.preprocessing, step=run.step)
    if given:
        return given_watermark(given, trained, progress=progress)
    return watermark_of(trained, progress=progress)
