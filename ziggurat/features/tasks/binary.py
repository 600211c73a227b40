"""Binary: a label that is 1 or 0; its logit is the log odds, its loss cross-entropy.

ℓ(z, y) = max(z, 0) − z·y + ln(1 + e^−|z|)  =  −y ln σ(z) − (1 − y) ln(1 − σ(z))         score σ(z)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ziggurat.features.tasks.task import LabelValues, Task

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float, Float64
    from torch import Tensor

_SMALLEST = 1e-7  # a probability, where log odds are taken


class Binary(Task):
    """Predict the probability of a positive."""

    name = "binary"
    shown = "is binary"
    expected = "0 or 1"
    expected_in_batch = "0 or 1, or a number between"
    ways_out = (
        'a label of texts: positive = "yes", negative = "no"',
        "a label of numbers: positive_from = 4.0",
        'a number to predict: task = "regression"',
    )
    ways_out_in_batch = (
        "make it 0 or 1 in the source, as in (stars >= 4).float()",
        "a number to predict is a label with task=Task.REGRESSION",
    )
    is_number = False
    has_positives = True
    gives_probabilities = True
    linear_model = "logistic regression"

    def possible(self, values: LabelValues) -> Any:
        """Mark zeros and ones."""
        return (values == 0) | (values == 1)

    def learnable(self, values: LabelValues) -> LabelValues:
        """Mark what a teacher may say as well: all from 0 to 1."""
        return (values >= 0) & (values <= 1)

    def loss(
        self, logits_B: Float[Tensor, "B"], labels_B: Float[Tensor, "B"], *, mean: float, deviation: float
    ) -> Float[Tensor, "B"]:
        """Return the cross-entropy."""
        import torch.nn.functional as F

        del mean, deviation
        return F.binary_cross_entropy_with_logits(logits_B.float(), labels_B.float(), reduction="none")

    def scores(self, logits: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Return probabilities."""
        return logits.sigmoid()

    def link(self, scores: Float64[np.ndarray, " N"]) -> Float64[np.ndarray, " N"]:
        """Return log odds."""
        import numpy as np

        scores = scores.clip(_SMALLEST, 1.0 - _SMALLEST)
        return np.log(scores) - np.log1p(-scores)

    def unlink(self, values: Float64[np.ndarray, " N"]) -> Float64[np.ndarray, " N"]:
        """Return probabilities of log odds."""
        import numpy as np

        return 1.0 / (1.0 + np.exp(-values))

    def value_term(self, name: str) -> str:
        """Return its logarithm: sums of these are products of probabilities."""
        return f"log({name})"
