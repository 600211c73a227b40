"""The report's section on stragglers: what ranks lost waiting for the slowest, and how busy each of them was."""

from __future__ import annotations

import html
from collections.abc import Sequence

import numpy as np

from ziggurat.training.records.log import LogRecord


def straggler_section(records: Sequence[LogRecord]) -> str:
    """Share of time lost, measured and planned, and the busy seconds of each rank; "" where no ranks were measured.

    Args:
        records: of metrics.jsonl.
    """
    timings = [record.get("timing", {}) for record in records if record["kind"] == "train"]
    planned = [each for each in timings if "planned_straggler_share" in each]
    measured = [each for each in timings if each.get("busy_s")]
    ranks = len(measured[-1]["busy_s"]) if measured else 0
    measured = [each for each in measured if len(each["busy_s"]) == ranks]  # a run may go on with other ranks
    lines = []
    if measured:
        slowest = np.array([max(each["busy_s"]) / max(1 - each["straggler_share"], 1e-9) for each in measured])
        shares = np.array([each["straggler_share"] for each in measured])
        lost = float((shares * slowest).sum() / max(slowest.sum(), 1e-12))
        lines.append(f"{100 * lost:.1f} % of the ranks' time lost waiting for the slowest, measured (processor time).")
    if planned:
        before = planned[-1]["unbalanced_straggler_share"]
        after = planned[-1]["planned_straggler_share"]
        lines.append(f"By the cost of the samples: {100 * before:.1f} % as they came, {100 * after:.2f} % as dealt.")
    if not lines:
        return ""
    rows = ""
    if measured:
        busy = np.mean([each["busy_s"] for each in measured], axis=0)
        rows = "".join(
            f"<tr><td>{rank}<td class=n>{1e3 * value:,.2f}<td class=n>{value / busy.mean():.3f}"
            for rank, value in enumerate(busy.tolist())
        )
        head = "<tr><th>rank<th class=n>busy ms a step<th class=n>of the mean"
        rows = f"<div class=wide><table>{head}{rows}</table></div>"
    return f"<h2>Stragglers</h2><p>{html.escape(' '.join(lines))}</p>{rows}"
