"""Ids of rows of requests that training did not know: all of them are scored by one row of their table.

    {"movie_id": "m7", "genres": ["Drama", "Dramma"]}      genres: 1 unknown of 2 ids

Counted from the encoded rows of a request itself, since counters of a `Preprocessing` add up over all threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import torch

from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.features.jagged import offsets_of
from ziggurat.features.schema import UNKNOWN_ROW

UnknownOfRow = dict[str, tuple[int, int]]
"""Unknown ids and all ids of a row, by feature."""


def unknown_of_rows(batch: Batch, inputs: InputSpec) -> list[UnknownOfRow]:
    """Count the unknown ids of each sample of a batch.

    Args:
        batch: encoded rows, whose lists are written out.
        inputs: what they are.
    """
    size = batch.batch_size
    if not size:
        return []
    unknown_FB = (batch.single == UNKNOWN_ROW).long()
    ids_FB = torch.ones_like(unknown_FB)
    if inputs.jagged:
        offsets = batch.jagged.offsets
        # Running sums: the difference of two of them is the count of a list.
        ends = offsets_of((batch.jagged.values == UNKNOWN_ROW).long())
        unknown_FB = torch.cat([unknown_FB, ends[offsets].diff().view(-1, size)])
        ids_FB = torch.cat([ids_FB, offsets.diff().view(-1, size)])
    names = [spec.name for spec in inputs.lookups]
    pairs = zip(unknown_FB.t().tolist(), ids_FB.t().tolist(), strict=True)
    return [dict(zip(names, zip(unknown, ids, strict=True), strict=True)) for unknown, ids in pairs]


def unknown_note(rows: Sequence[UnknownOfRow], *, features: Collection[str]) -> tuple[str, ...]:
    """Say how many ids of some rows were unknown, feature by feature; nothing where none was.

    Args:
        rows: of a request.
        features: to look at.
    """
    unknown: Counter[str] = Counter()
    ids: Counter[str] = Counter()
    for row in rows:
        for name, (missed, looked_up) in row.items():
            unknown[name] += missed
            ids[name] += looked_up
    found = [
        f"{name} {unknown[name]:,} of {ids[name]:,} ({unknown[name] / ids[name]:.1%})"
        for name in ids
        if unknown[name] and name in features
    ]
    return (f"unknown ids: {', '.join(found)}",) if found else ()
