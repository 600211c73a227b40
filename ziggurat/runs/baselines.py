"""Baselines without a model: what popularity alone reaches. Every trained model is shown beside them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.training.metrics.accumulator import auc


@dataclass(frozen=True, kw_only=True)
class Popularity:
    """Score of a sample = smoothed share of positives of its row in one table, from training data.

        score(r) = (positives(r) + s·p) / (count(r) + s),   p = overall share, s = 10

    Args:
        field: index of the single feature in the batch.
        scores: score of every row of its table.
    """

    field: int
    scores: np.ndarray

    @staticmethod
    def fit(batches: Iterable[Batch], *, inputs: InputSpec, feature: str, smoothing: float = 10.0) -> Popularity:
        """Count positives of the first label over one pass of training batches."""
        index = [spec.name for spec in inputs.single].index(feature)
        num_rows = inputs.table(inputs.single[index].table).num_rows
        counts, positives = np.zeros(num_rows), np.zeros(num_rows)
        for batch in batches:
            rows = batch.single[index].numpy()
            counts += np.bincount(rows, minlength=num_rows)
            positives += np.bincount(rows, weights=batch.labels[:, 0].numpy(), minlength=num_rows)
        share = positives.sum() / max(1.0, counts.sum())
        return Popularity(field=index, scores=(positives + smoothing * share) / (counts + smoothing))

    def auc(self, batches: Iterable[Batch]) -> float:
        """Exact AUC on batches."""
        scores: list[torch.Tensor] = []
        labels: list[torch.Tensor] = []
        for batch in batches:
            scores.append(torch.from_numpy(self.scores[batch.single[self.field].numpy()]))
            labels.append(batch.labels[:, 0])
        return auc(torch.cat(scores), torch.cat(labels))
