"""WaitingWindows: windows of a stream that were scored at their end, and whose metrics wait for their labels.

    add ─► file of scores ─► journal: its digest          before a row of the window is trained
    settle ─► labels are complete? ─► metrics ─► line of windows.jsonl ─► journal: no digest ─► file goes

A stream that goes on finds them by the digests of the journal: scores that are gone or harmed cannot be made again, as
the weights have learned since, and are refused. Scores of weights behind the checkpoint with which it goes on are
dropped: their windows are scored again, by the same weights. The first rank has them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from ziggurat.data.streams.awaiting_labels import Truth
from ziggurat.errors import CheckpointError
from ziggurat.features.inputs import InputSpec
from ziggurat.runs.stream.source import StreamWindows
from ziggurat.training.evaluation.evaluate import Answers
from ziggurat.training.metrics.accumulator import MetricFunction
from ziggurat.training.records.answers import ScoredWindow, answers_file, read_answers, write_answers
from ziggurat.training.records.run_folder import RunFolder
from ziggurat.training.records.windows import WindowRecord, WindowsFile


class WaitingWindows:
    """The windows of a stream that wait for their labels.

    Args:
        run: the folder of the stream.
        windows: know labels and digests.
        inputs: of the model.
        label: name of the label that comes later.
        own: metrics of the user's own.
    """

    def __init__(
        self,
        run: RunFolder,
        *,
        windows: StreamWindows,
        inputs: InputSpec,
        label: str,
        own: Mapping[str, MetricFunction],
    ) -> None:
        self._run = run
        self._windows = windows
        self._inputs = inputs
        self._label = label
        self._own = own
        self.records: dict[int, WindowRecord] = {}

    def restore(self, *, settled: set[int], last_step: int) -> None:
        """Find those that wait where a stream goes on.

        Args:
            settled: windows that have a line.
            last_step: of the weights with which the stream goes on.

        Raises:
            CheckpointError: scores are gone or harmed.
        """
        for number, digest in self._windows.answered().items():
            record = None if number in settled else read_answers(self._run, number, digest=digest).record
            if record is not None and record.step <= last_step:
                self.records[number] = record
            else:
                self._drop(number)
        for path in (self._run.stream / "answers").glob("*.parquet"):
            if path not in {answers_file(self._run, number) for number in self.records}:
                path.unlink()  # written by a process that died before its digest was in the journal

    def add(self, scored: ScoredWindow) -> None:
        """Keep a window that was scored; it is on the disk when this returns."""
        number = scored.record.window
        self._windows.keep_answers(number, write_answers(self._run, scored))
        self.records[number] = scored.record

    def settle(self, file: WindowsFile) -> list[WindowRecord]:
        """Write the lines of windows whose labels are complete, in their order; return their records.

        Args:
            file: takes the lines.
        """
        found: list[WindowRecord] = []
        for number in sorted(self.records):
            truth = self._windows.truth(number)
            if truth is None:
                break
            scored = read_answers(self._run, number, digest=self._windows.answered()[number])
            record = self._judged(scored, truth)
            file.append(record)
            del self.records[number]
            self._drop(number)
            found.append(record)
        return found

    def _drop(self, number: int) -> None:
        """Forget scores; journal first, as a file without a digest is nobody's."""
        self._windows.keep_answers(number, "")
        answers_file(self._run, number).unlink(missing_ok=True)

    def _judged(self, scored: ScoredWindow, truth: Truth) -> WindowRecord:
        """Return the record of a window with its metrics."""
        if scored.answers is None:
            labelled = float(truth.is_labelled.mean()) if len(truth.rows) else 0.0
            return dataclasses.replace(scored.record, labelled=round(labelled, 6), labels_until="")
        order = np.argsort(truth.rows)
        at = np.searchsorted(truth.rows, scored.answers.rows, sorter=order).clip(max=max(len(order) - 1, 0))
        places = order[at] if len(order) else at
        if not len(order) or (truth.rows[places] != scored.answers.rows).any():
            raise CheckpointError(
                expected=f"labels of the rows of window {scored.record.window:,} that were scored",
                found="rows that have none",
                where=str(self._run.stream),
                ways_out=("restore the folder from a copy", "begin the stream anew: --out ANOTHER_FOLDER"),
            )
        is_positive = truth.is_positive[places]
        return dataclasses.replace(
            scored.record,
            metrics=self._metrics(scored.answers, is_positive),
            averaged={} if scored.averaged is None else self._metrics(scored.averaged, is_positive),
            labelled=round(int(truth.is_labelled[places].sum()) / max(len(places), 1), 6),
            labels_until="",
        )

    def _metrics(self, answers: Answers, is_positive: np.ndarray) -> dict[str, float | None]:
        labels = answers.labels.copy()
        labels[:, [spec.name for spec in self._inputs.labels].index(self._label)] = is_positive
        found = dataclasses.replace(answers, labels=labels).metrics(self._inputs, own=self._own)
        return without_nan(found)


def without_nan(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Return metrics as JSON has them: null where one is undefined."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}
