"""The report's section on the exchange: what ranks waited for embeddings, and how many rows collided."""

from __future__ import annotations

import html
from collections.abc import Sequence

import numpy as np

from ziggurat.training.records.log import LogRecord


def exchange_section(records: Sequence[LogRecord]) -> str:
    """Exposed time, collisions and the choice of a run that could look ahead; "" for others.

    Args:
        records: of metrics.jsonl.
    """
    train = [record for record in records if record["kind"] == "train"]
    told = [(each["step"], each["timing"]) for each in train if "exposed_ms" in each.get("timing", {})]
    if not told:
        return ""
    rows = ""
    for step, each in told[-12:]:
        collisions = f"{100 * each['collisions']:.1f} %" if "collisions" in each else "–"
        rows += f"<tr><td>{step:,}<td class=n>{each['exposed_ms']:,.2f}<td class=n>{collisions}"
        rows += f"<td class=n>{100 * each['prioritised_share']:.0f} %"
    exposed = float(np.mean([each["exposed_ms"] for _, each in told]))
    line = f"{exposed:,.2f} ms a step waited for embeddings on the first rank. Exchange: {told[-1][1]['exchange']}."
    head = "<tr><th>step<th class=n>exposed ms<th class=n>collisions<th class=n>steps that looked ahead"
    return f"<h2>Exchange</h2><p>{html.escape(line)}</p><div class=wide><table>{head}{rows}</table></div>"
