"""Start a model at the share of positives: the bias of its output says what it knows before it has seen a row.

    bias_l += ln(p_l / (1 − p_l))         p_l: share of positives of label l among the training rows

A model that starts at 0 says 50 % of every sample. Where 2 % are positives, the first hundred steps teach all ids and
layers together to say less. (Lin et al., "Focal loss for dense object detection", ICCV 2017, start their detector so.)
A label that is a number needs no such start: what a network computes of it is a deviation from the mean
(`models/contract/losses.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ziggurat.data.encoded.records import WEIGHT_COLUMN, label_column
from ziggurat.data.preprocess.prepared import PreparedData
from ziggurat.models import Model
from ziggurat.runs.quality.below_chance import some_rows
from ziggurat.training.metrics.accumulator import has_metrics

_SMALLEST = 1e-4  # no share is taken to be smaller, whatever the rows that were counted say


@dataclass(frozen=True, kw_only=True)
class BaseRates:
    """The share of positives of each label.

    Args:
        names: of the labels.
        shares: as the loss weighs them; NaN of labels that are numbers, or have one class alone by design.
    """

    names: tuple[str, ...]
    shares: tuple[float, ...]

    @property
    def logits(self) -> Sequence[float]:
        """The logits of a model that knows nothing else; 0 where there is no share."""
        return [0.0 if math.isnan(share) else math.log(share / (1.0 - share)) for share in self.shares]


def base_rates(prepared: PreparedData) -> BaseRates:
    """Count positives in up to 65,536 training rows, the same on every rank."""
    table = some_rows(prepared.train)
    labels = prepared.inputs.labels
    weights = table[WEIGHT_COLUMN].to_numpy() if prepared.inputs.has_weights else np.ones(len(table))
    shares: list[float] = []
    for label in labels:
        values = table[label_column(label.name)].to_numpy().astype(np.float64)
        # A label that is missing counts for neither side.
        known = ~np.isnan(values)
        positives = label.positive_weight * float((weights[known] * values[known]).sum())
        negatives = float((weights[known] * (1.0 - values[known])).sum())
        if not label.task.has_positives or not has_metrics(label) or positives + negatives <= 0.0:
            shares.append(math.nan)
        else:
            shares.append(min(max(positives / (positives + negatives), _SMALLEST), 1.0 - _SMALLEST))
    return BaseRates(names=tuple(label.name for label in labels), shares=tuple(shares))


def start_at_base_rates(model: Model, prepared: PreparedData) -> str:
    """Let a model start at the shares of positives; say in a few words what it starts at.

    Args:
        model: as it was drawn, before it is spread over ranks.
        prepared: its training rows.
    """
    found = base_rates(prepared)
    shares = zip(found.names, found.shares, strict=True)
    known = [f"{name} {share:.2%}" for name, share in shares if not math.isnan(share)]
    if not known:
        return ""
    biases = model.output_biases()
    if len(biases) != len(found.names):
        return f"50 %: {type(model).__name__} names no bias of its output (Model.output_biases)"
    with torch.no_grad():
        for bias, start in zip(biases, model.starting_biases(found.logits), strict=True):
            bias.add_(start)
    return f"the share of positives: {', '.join(known)}"
