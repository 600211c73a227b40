"""Answers of a stream: scores of windows whose labels are not complete, each in a file until they are.

    score window 7 ─► stream/answers/000007.parquet ─► digest into the journal ─► train ─► … ─► labels are complete
                                                                                     └► line of windows.jsonl; file goes

A file has the row ids, scores, and the labels that do not come later, and the record of the window without its metrics.
Metrics are computed of what was answered when the window ended: a server could not have answered otherwise. The file is
on the disk before its digest is in the journal, and that before a row of the window is trained.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ziggurat.config import from_json, to_json
from ziggurat.errors import CheckpointError
from ziggurat.files import write_bytes
from ziggurat.files.checked_lines import checked_content, checked_line
from ziggurat.plain import as_group
from ziggurat.training.evaluation.evaluate import Answers
from ziggurat.training.records.run_folder import RunFolder
from ziggurat.training.records.windows import WindowRecord, read_windows

_RECORD = b"ziggurat.window"
_WAYS_OUT = ("restore the folder of the stream from a copy", "begin the stream anew: --out ANOTHER_FOLDER")


@dataclass(frozen=True, kw_only=True)
class ScoredWindow:
    """A window that was scored, and whose labels come later.

    Args:
        record: of it, without metrics.
        answers: of the weights as they stood; None of the history, which nothing scores.
        averaged: of their average, if there is one.
    """

    record: WindowRecord
    answers: Answers | None = None
    averaged: Answers | None = None


def answers_file(run: RunFolder, number: int) -> Path:
    """Return the file of the scores of a window."""
    return run.stream / "answers" / f"{number:06}.parquet"


def write_answers(run: RunFolder, scored: ScoredWindow) -> str:
    """Write the scores of a window; return the digest by which they are known."""
    columns: dict[str, np.ndarray] = {}
    answers = scored.answers
    if answers is not None:
        columns["row"] = answers.rows
        for name, values in (("score", answers.scores), ("label", answers.labels)):
            columns |= {f"{name}:{index}": values[:, index] for index in range(values.shape[1])}
        if answers.weights is not None:
            columns["weight"] = answers.weights
        if answers.groups is not None:
            columns["group"] = answers.groups
        if scored.averaged is not None:
            scores = scored.averaged.scores
            columns |= {f"averaged:{index}": scores[:, index] for index in range(scores.shape[1])}
    line = checked_line(as_group(to_json(scored.record)))
    table = pa.table({name: pa.array(np.ascontiguousarray(values)) for name, values in columns.items()})
    table = table.replace_schema_metadata({_RECORD: line.encode()})
    sink = pa.BufferOutputStream()
    # Scores do not compress.
    pq.write_table(table, sink, compression="none", use_dictionary=False, write_statistics=False)
    content = sink.getvalue().to_pybytes()
    path = answers_file(run, scored.record.window)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, content)
    return hashlib.sha256(content).hexdigest()


def read_answers(run: RunFolder, number: int, *, digest: str) -> ScoredWindow:
    """Read the scores of a window.

    Args:
        run: the folder of the stream.
        number: of the window.
        digest: that the journal has.

    Raises:
        CheckpointError: they are gone, or others than were written: weights have learned the window since.
    """
    path = answers_file(run, number)
    found = path.read_bytes() if path.is_file() else None
    if found is None or hashlib.sha256(found).hexdigest() != digest:
        raise CheckpointError(
            expected=f"the scores that window {number:,} was given at its end, which wait for their labels",
            found="no such file" if found is None else "other bytes than were written",
            where=str(path),
            ways_out=_WAYS_OUT,
        )
    table = pq.read_table(pa.BufferReader(found))
    record = _record_of(table.schema, path=path)
    if not table.num_columns:
        return ScoredWindow(record=record)
    columns = {name: table.column(name).to_numpy() for name in table.column_names}
    answers = Answers(
        rows=columns["row"],
        scores=_together(columns, "score"),
        labels=_together(columns, "label"),
        weights=columns.get("weight"),
        groups=columns.get("group"),
        num_rows=table.num_rows,
    )
    averaged = None
    if "averaged:0" in columns:
        averaged = Answers(
            rows=answers.rows,
            scores=_together(columns, "averaged"),
            labels=answers.labels,
            weights=answers.weights,
            groups=answers.groups,
            num_rows=table.num_rows,
        )
    return ScoredWindow(record=record, answers=answers, averaged=averaged)


def _together(columns: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    found = [values for key, values in columns.items() if key.partition(":")[0] == name]
    return np.stack(found, axis=1)


def _record_of(schema: pa.Schema, *, path: Path) -> WindowRecord:
    line = checked_content((schema.metadata or {}).get(_RECORD, b"").decode(errors="replace"))
    if line is None:
        raise CheckpointError(
            expected="the record of a window beside its scores",
            found="none that is whole",
            where=str(path),
            ways_out=_WAYS_OUT,
        )
    return from_json(WindowRecord, line, where=str(path), error=CheckpointError)


def read_scored_windows(run: RunFolder) -> list[WindowRecord]:
    """Return the records of all windows that were scored, in order: those whose labels are complete have metrics.

    Args:
        run: the folder of a stream.

    Raises:
        CheckpointError: one of them is damaged.
    """
    found: dict[int, WindowRecord] = {}
    for path in sorted((run.stream / "answers").glob("[0-9]*.parquet")):
        try:
            schema = pq.read_schema(path)
        except FileNotFoundError:
            continue  # of a stream that goes on in another process: its labels are complete now, and its line is there
        except (pa.ArrowException, OSError) as error:
            raise CheckpointError(
                expected="the scores of a window, which wait for their labels",
                found=str(error).partition("\n")[0],
                where=str(path),
                ways_out=_WAYS_OUT,
            ) from error
        record = _record_of(schema, path=path)
        found[record.window] = record
    # Lines behind files: a line is written before its file goes.
    found |= {record.window: record for record in read_windows(run.windows)}
    return [found[number] for number in sorted(found)]
