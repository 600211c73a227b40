"""Doubts about the history of a stream, to which vocabularies and statistics are fitted for good.

A stream with a row whose clock stood at 1970 begins with a window of that row alone: no id of any later row has a place
then, and numbers are scaled by one number. A history with one class alone starts all scores at that class. Both run
through, and score badly for long, so they are said once, before the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from ziggurat.commands import pasted
from ziggurat.data.encoded.records import label_column
from ziggurat.data.streams.journal import Window
from ziggurat.data.streams.label_delay import DelayConfig, LabelDelay
from ziggurat.features.inputs import LabelSpec

_FEW = 10  # so many times the rows of the history in another window: it is no sample of what comes

_STEPS = 10  # in a window, of the batch size that is proposed
_LEAST_BATCH = 16


def batch_for_windows(windows: Sequence[Window], *, batch_size: int) -> int:
    """Return a batch size by which a window is more than one step; the given one where it is that already.

    Args:
        windows: that have rows so far, the history first.
        batch_size: of all ranks together.
    """
    largest = max((window.rows for window in windows[1:]), default=windows[0].rows)
    if largest >= batch_size:
        return batch_size
    # A power of two, so that windows of nearly the same size give the same.
    fitting = 1 << max(largest // _STEPS, 1).bit_length() - 1
    return min(max(fitting, _LEAST_BATCH), batch_size)


def doubts_about_history(
    rows: pa.Table,
    *,
    labels: Sequence[LabelSpec],
    windows: Sequence[Window],
    folder: Path,
    batch_size: int,
    delay: DelayConfig,
) -> list[str]:
    """Return a line for each reason to begin with another history.

    Args:
        rows: encoded rows of the history that are trained with it.
        labels: of the model.
        windows: that have rows so far, the history first.
        folder: of the stream.
        batch_size: of all ranks together.
        delay: when labels are known.
    """
    history, *others = windows
    anew = f"begin anew with --from MOMENT behind more rows, and another --out than {pasted(folder)}"
    found: list[str] = []
    largest = max(others, key=lambda window: window.rows, default=history)
    if history.rows * _FEW < largest.rows:
        found.append(
            f"warning: vocabularies and statistics are fitted to {history.name} alone, {history.rows:,} "
            f"row{'s' if history.rows != 1 else ''}, where {largest.name} has {largest.rows:,}: {anew}"
        )
    if largest.rows < batch_size:
        smaller = max(1, largest.rows // _STEPS)
        found.append(
            f"warning: windows have up to {largest.rows:,} rows so far, less than one batch of {batch_size:,}: a step "
            f"a window learns little; begin anew with --batch-size {smaller} or longer windows, and another --out than "
            f"{pasted(folder)}"
        )
    if not rows.num_rows:
        found.append(
            f"warning: no label of {history.name} is known at its end, so nothing is trained until one is, and scores "
            f"begin as the model was drawn: {anew}"
        )
    elif (
        delay.policy is LabelDelay.ASSUME_NEGATIVE and not (rows.column(label_column(delay.label)).to_numpy() > 0).any()
    ):
        found.append(
            f"warning: no positive of {history.name} had come {delay.observe_s:g} seconds after its row, so all are "
            "trained as negatives, and --delay assume-negative never corrects one: begin anew with a longer "
            f"--observe-s, or with --delay correct, and another --out than {pasted(folder)}"
        )
    for label in labels:
        if not label.task.has_positives or not rows.num_rows:
            continue
        values = rows.column(label_column(label.name)).to_numpy()
        known = np.unique(values[~np.isnan(values)])
        if len(known) == 1:
            found.append(
                f"warning: label {label.name!r} is {known[0]:g} in all rows of {history.name}, so scores begin "
                f"there: {anew}"
            )
    return found
