"""Negative downsampling: training keeps a share of the negatives, and scores are corrected for it.

At a click rate of 1 %, most rows say little; He et al. (ADKDD 2014, section 6.3) keep a tenth of the negatives and lose
little. A model trained on them gives odds that are 1/r times too high, which is undone exactly:

    q = p / (p + (1 − p) / r)          logit(q) = logit(p) + ln r

A row stays if a hash of the split's seed and its number is below r·2⁶⁴: the same rows on any number of ranks and in any
chunks. Positives and rows without a label stay, and so does every row of validation and test, whose metrics are
therefore those of the data as it is. Vocabularies and statistics are fitted on the rows that stay.

The rate becomes part of the label (`Label.negative_rate`), and so of what a run and its inputs keep: scores are
corrected wherever they are made (`models/losses.scores_from_logits`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from jaxtyping import Bool

from ziggurat.data.mixing import derive_seed, splitmix64
from ziggurat.data.preprocess.values.parsing import ParsedChunk
from ziggurat.errors import SchemaError
from ziggurat.features.schema import Schema

_PURPOSE = 0x6E6567


def with_negative_rate(schema: Schema, rate: float) -> Schema:
    """The schema whose label has the rate; 1 leaves what the schema says.

    Raises:
        SchemaError: a rate below 1, and the schema has several labels, or one that is not binary.
    """
    if rate != 1.0 and len(schema.labels) == 1:
        schema = replace(schema, labels=(replace(schema.labels[0], negative_rate=rate),))
    is_one = len(schema.labels) == 1 and schema.labels[0].task.has_positives
    if not is_one and (rate != 1.0 or any(label.negative_rate != 1.0 for label in schema.labels)):
        raise SchemaError(
            expected="one binary label where negatives are left out: a row is negative by it",
            found=", ".join(f"{label.name!r} ({label.task.value})" for label in schema.labels),
            where="negative_rate",
            ways_out=("leave negative_rate out", "positive_weight of a label weighs positives instead"),
        )
    return schema


def kept_rows(schema: Schema, parsed: ParsedChunk, *, seed: int) -> Bool[np.ndarray, " N"]:
    """Mark the training rows that stay."""
    rate = schema.labels[0].negative_rate if schema.labels else 1.0
    if rate == 1.0:
        return np.ones(parsed.num_rows, dtype=bool)
    mixed = splitmix64(np.ascontiguousarray(parsed.global_rows ^ np.int64(derive_seed(seed, _PURPOSE) >> 1)))
    return (mixed < np.uint64(rate * 2.0**64)) | (parsed.labels[schema.labels[0].name] != 0.0)
