"""window_line: what became of a window of a stream, as the line that people read while it goes on.

    2000-06      12,345 rows  auc 0.76012  ne 0.87011  unknown user 3.1%  shifted item 0.41  12 late  trained, 41,000/s

Everything in it stands in `windows.jsonl`, too; here is what a reader needs at once: unknown ids and shifted features
only where they are many, counts only where they are not 0.
"""

from __future__ import annotations

import math

from ziggurat.data.streams.stability import ALARM
from ziggurat.runs.stream.teachers import history_text, taught_text
from ziggurat.training.evaluation.evaluate import metrics_line
from ziggurat.training.records.windows import WindowRecord

_SHOWN = ("auc", "log_loss", "ne", "calibration", "rmse", "mae", "r2")
_OF_AVERAGE = ("ne", "rmse")  # what decides whether an average is worth it, in the line
_SHOWN_SHIFTS = 3  # features whose values are others than in the window before
_NOTABLE_SHARE = 0.005  # of samples with an id that has no row: below, it moves no metric


def labels_line(record: WindowRecord) -> str:
    """Return the line of a window whose labels have become complete since it was scored."""
    parts = [f"{record.name:<10}  {record.rows:>9,} rows", *_metrics(record)]
    return "  ".join([*parts, "labels complete" if record.window > 1 else "history, labels complete"])


def _metrics(record: WindowRecord) -> list[str]:
    shown = [name for name in record.metrics if name.partition("/")[0] in _SHOWN]
    if not shown:
        return []
    values = {name: math.nan if value is None else value for name, value in record.metrics.items()}
    parts = [metrics_line(values, names=shown)]
    averaged = {name: value for name, value in record.averaged.items() if value is not None}
    if decisive := [name for name in averaged if name.partition("/")[0] in _OF_AVERAGE]:
        parts.append("averaged " + metrics_line(averaged, names=decisive))
    return parts


def window_line(record: WindowRecord, *, train_s: float, steps: int) -> str:
    """Return the line of a window.

    Args:
        record: what is kept of it.
        train_s: seconds of its training.
        steps: made in it; 0: it was scored alone.
    """
    parts = [f"{record.name:<10}  {record.rows:>9,} rows"]
    parts += _metrics(record)
    if record.window == 1:
        parts.append("history")
    elif record.labels_until:
        parts.append(f"scored, labels until {record.labels_until}")
    notable = {name: share for name, share in record.unknown.items() if share >= _NOTABLE_SHARE}
    if notable:
        parts.append("unknown " + ", ".join(f"{name} {share:.1%}" for name, share in notable.items()))
    shifted = sorted((item for item in record.shift_before.items() if item[1] > ALARM), key=lambda item: -item[1])
    if shifted:
        parts.append("shifted " + ", ".join(f"{name} {index:.2f}" for name, index in shifted[:_SHOWN_SHIFTS]))
    parts += [taught_text(name, taught) for name, taught in record.teachers.items()]
    parts += [history_text(name, read) for name, read in record.histories.items()]
    if record.late:
        parts.append(f"{record.late:,} late")
    if record.dropped:
        parts.append(f"{record.dropped:,} late, left out")
    if record.bad:
        parts.append(f"{record.bad:,} put aside")
    if record.labels_ahead:
        parts.append(f"{record.labels_ahead:,} labels of the future, which wait")
    if counted := [f"{count:,} {state}" for state, count in record.trained.items() if count]:
        parts.append(", ".join(counted))
    if steps and train_s:
        parts.append(f"trained, {record.trained_rows / train_s:,.0f}/s")
    return "  ".join(parts)
