"""Sentences of a stream's report about drift: features that shifted, and windows in which the loss rose for good.

    shift     windows in which the population stability index of a feature is above 0.2 (`data/streams/stability.py`)
    alarm     the Page-Hinkley test on the NE of windows: the sum of how far NE is above its mean so far, less a
              tolerance, rises above a threshold (Page, "Continuous inspection schemes", Biometrika 1954)

The test is that of the library `river`, which is optional: without it the report says what to install. It looks at the
windows that are written down, from the first on, so it has no state, and a stream has its bits with it and without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ziggurat.data.streams.stability import ALARM
from ziggurat.training.metrics.metric import shown_name
from ziggurat.training.records.windows import WindowRecord

_MAX_NAMES = 6
_TOLERANCE = 0.005  # of NE
_THRESHOLD = 0.05
_MIN_WINDOWS = 3


def shift_notes(records: Sequence[WindowRecord]) -> list[str]:
    """Name features whose values are others than in the window before, and in how many windows.

    Args:
        records: of the windows.
    """
    counts: dict[str, list[str]] = {}
    for record in records:
        for name, index in record.shift_before.items():
            if index > ALARM:
                counts.setdefault(name, []).append(record.name)
    most = sorted(counts, key=lambda name: -len(counts[name]))
    return [
        f"{name}: other values than in the window before (population stability index above {ALARM}) in "
        f"{len(counts[name]):,} of {len(records):,} windows: {_few(counts[name])}"
        for name in most[:_MAX_NAMES]
    ]


def alarm_notes(records: Sequence[WindowRecord]) -> list[str]:
    """Name windows in which NE rose for good, by the Page-Hinkley test of `river`, for each label.

    Args:
        records: of the windows.
    """
    metrics = dict.fromkeys(name for record in records for name in record.metrics if name.partition("/")[0] == "ne")
    if not metrics:
        return []
    try:
        from river.drift import PageHinkley
    except ImportError:
        return ["no alarm was looked for: the Page-Hinkley test needs river (pip install 'ziggurat-rec[drift]')"]
    notes: list[str] = []
    for metric in metrics:
        test = PageHinkley(min_instances=_MIN_WINDOWS, delta=_TOLERANCE, threshold=_THRESHOLD, mode="up")
        alarms: list[str] = []
        for record in records:
            value = record.metrics.get(metric)
            if value is None or not math.isfinite(value):
                continue
            test.update(value)
            if test.drift_detected:
                alarms.append(record.name)
        said = f"rose for good in {_few(alarms)}" if alarms else "never rose for good"
        notes.append(f"{shown_name(metric)}: {said} (Page-Hinkley test over windows, by river)")
    return notes


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES])
    return f"{shown}, …" if len(names) > _MAX_NAMES else shown
