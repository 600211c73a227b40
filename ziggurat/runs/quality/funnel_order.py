"""Rows that contradict a funnel: a later step happened where the one before it did not.

A model with a funnel (`models/blocks/funnel.py`) multiplies chances, so it cannot say that a later label is likelier
than an earlier one. On labels that are no funnel, or that stand in the wrong order, it trains all the same, and is
wrong without a word. A few such rows are usual (bought later, by another way); many are a mistake in the schema.
"""

from __future__ import annotations

import itertools

import numpy as np

from ziggurat.data.encoded.loader import Dataset
from ziggurat.data.encoded.records import label_column

MANY = 0.05  # of the positives of the later label
LOOKED_AT = 100_000  # rows


def contradicted_steps(train: Dataset) -> list[str]:
    """Return a line for each label of which many positives are rows where the label before it is negative.

    Args:
        train: training rows of a model with a funnel, of which the first 100,000 are looked at.
    """
    names = [label.name for label in train.inputs.labels]
    columns: dict[str, list[np.ndarray]] = {name: [] for name in names}
    rows = 0
    for group in range(len(train.group_sizes)):
        if rows >= LOOKED_AT:
            break
        table = train.read_group(group)
        rows += len(table)
        for name in names:
            columns[name].append(table[label_column(name)].to_numpy() > 0.5)
    happened = {name: np.concatenate(parts) if parts else np.zeros(0, dtype=bool) for name, parts in columns.items()}
    lines = []
    for earlier, later in itertools.pairwise(names):
        positives = int(happened[later].sum())
        without = int((happened[later] & ~happened[earlier]).sum())
        if positives and without > MANY * positives:
            lines.append(
                f"{without:,} of {positives:,} rows with {later!r} have no {earlier!r} ({without / positives:.0%}): a "
                f"funnel says that {earlier!r} comes first, and never gives {later!r} a higher chance; put the labels "
                "of the schema in the order in which they happen, or take a model without a funnel, such as table_mmoe"
            )
    return lines
