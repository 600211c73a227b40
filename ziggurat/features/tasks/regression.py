"""Regression: a label that is a number; its logit is the value itself, its loss the squared error in deviations.

ℓ(z, y) = ((z − y) / s)²         z = m + s·x         m, s: mean and deviation of the label in the training rows
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ziggurat.features.tasks.task import Task

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class Regression(Task):
    """Predict the mean of a number."""

    name = "regression"
    linear_model = "linear regression"

    def loss(
        self, logits_B: Float[Tensor, "B"], labels_B: Float[Tensor, "B"], *, mean: float, deviation: float
    ) -> Float[Tensor, "B"]:
        """Return the squared error as a share of the label's variance."""
        del mean
        return ((logits_B - labels_B) / deviation).float().square()
