"""Add a task: counts, such as visits of a week or units sold, whose rate is predicted.

Counts are never negative, most are small, and those with a large mean scatter more. Squared errors let the few large
ones decide, and a straight line may predict less than nothing. In Poisson regression effects multiply, and each count
is weighed by what its own mean lets one expect:

    rate  λ = eᶻ,  z = ln m + x          m: mean of the training rows, so a model starts at the mean (x = 0)
    loss  2·(y·ln(y/λ) − y + λ)          the deviance; about (y − λ)²/λ near λ, which is 1 on average

McCullagh and Nelder, Generalized Linear Models, 1989, section 6.2. Labels may be rates as well as whole numbers.

    import poisson_count                        # lists it; on the command line: --extension poisson_count

    [[label]]
    name = "visits"
    task = "count"

Models of such a label are chosen by the mean deviance; RMSE, MAE and R² stand beside it.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from ziggurat.features.tasks import OF_NUMBERS, Task
from ziggurat.features.tasks.task import LabelValues
from ziggurat.training.metrics import Judged, Metric

_MOST = 80.0  # the largest logarithm of a rate; e⁸⁰ is a number that FP32 still has
_MIN_RATE = 1e-12


class Count(Task):
    """Predict the rate of a count."""

    name = "count"
    shown = "is a count"
    expected = "a number from 0 on"
    expected_in_batch = "a number from 0 on"
    ways_out = ('a number that may be negative: task = "regression"',)
    judged_like = OF_NUMBERS
    linear_model = "Poisson regression"

    def possible(self, values: LabelValues) -> LabelValues:
        """Mark what is neither negative nor infinite."""
        return (values >= 0) & (values < math.inf)

    def logits(self, computed: Float[Tensor, "..."], *, mean: float, deviation: float) -> Float[Tensor, "..."]:
        """Return the logarithms of rates."""
        del deviation
        return computed + (math.log(mean) if mean > 0 else 0.0)

    def loss(
        self, logits_B: Float[Tensor, " B"], labels_B: Float[Tensor, " B"], *, mean: float, deviation: float
    ) -> Float[Tensor, " B"]:
        """Return the deviance of each sample."""
        del mean, deviation
        of_labels_B = torch.special.xlogy(labels_B, labels_B) - labels_B
        return (2 * (of_labels_B - labels_B * logits_B + self.scores(logits_B))).float()

    def scores(self, logits: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Return rates."""
        return logits.clamp(max=_MOST).exp()

    def link(self, scores: Float64[np.ndarray, " N"]) -> Float64[np.ndarray, " N"]:
        """Return the logarithms of rates: effects multiply."""
        return np.log(np.maximum(scores, _MIN_RATE))

    def unlink(self, values: Float64[np.ndarray, " N"]) -> Float64[np.ndarray, " N"]:
        """Return rates."""
        return np.exp(values)


COUNT = Task.add(Count())


class MeanDeviance(Metric):
    """The mean deviance of counts: 0 is perfect, and 1 what chance alone leaves."""

    name = "mean_deviance"
    shown = "mean deviance"
    task = COUNT
    higher_is_better = False
    decides = True
    is_loss = True
    is_plotted = True
    is_first_look = True
    beside = "mae"

    def compute(self, judged: Judged) -> float:
        """Return the mean; NaN without samples."""
        samples = judged.samples
        if not samples.weight > 0:
            return math.nan
        rates = np.maximum(samples.scores, _MIN_RATE)
        logarithms = np.log(np.maximum(samples.labels, _MIN_RATE)) - np.log(rates)
        losses = 2 * (samples.labels * logarithms - samples.labels + rates)
        return float(np.average(losses, weights=samples.weights))

    def most_lost(self, value: float, *, tolerance: float) -> float:
        """Hold an export in few bits to it."""
        return tolerance * max(value, _MIN_RATE)


MEAN_DEVIANCE = Metric.add(MeanDeviance())
