"""Task: what the values of a label mean, and so how they are read, learned, scored and judged.

    raw cells ──`possible`──► labels ──`loss`──► training          what the network computes ──`logits`──► logits
                                                                   logits ──`scores`──► predictions, metrics, answers

A network computes one number x for each label. With a binary label x is the log odds; with a label that is a number it
is the distance from the mean of the training rows, in deviations. The rest of the package asks the object

    what a value may be   `possible`, `learnable`, `expected`        parsing, batches, metrics
    what is learned       `loss`, `logits`, `is_number`              training, and where a head starts
    what is said          `scores`, `gives_probabilities`            evaluation, predictions, exports, servers
    what judges it        `judged_like`; `Metric.task`               metrics, early stopping, reports
    what else is sensible `has_positives`, `link`, `linear_model`    weights of positives, sampling, baselines, leaks

and never which task it is. One of your own derives from `Task` and is listed by `Task.add` (docs/guides/extending.md).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, TypeVar

from ziggurat.errors import ConfigError
from ziggurat.specification import Specification

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float, Float64
    from torch import Tensor

# Values of labels: an array of NumPy, or a tensor; the answer is of the same library.
LabelValues = TypeVar("LabelValues", "np.ndarray", "Tensor")


class Task(Specification, kind="task"):
    """Say of one kind of label what its values mean. See the module's docstring.

    What stands here suits a label that is a number, as one derived from it mostly is.

    Attributes:
        shown: what is said of a label of this task: "is binary".
        expected: what its values are, for messages on rows of a file.
        expected_in_batch: the same, for messages on batches that were made by hand.
        ways_out: what a schema may say of a column with other values.
        ways_out_in_batch: what to do with other values in a batch.
        is_number: mean and deviation of the training rows are fitted (`logits` and `loss` get them), and values stay
            in FP64 from the raw file to the metric.
        has_positives: each value is 1, a positive, or 0, a negative: weights of positives, shares of negatives, AUC.
        gives_probabilities: scores are from 0 to 1, and have a calibration curve.
        judged_like: another task whose metrics judge this one too.
        linear_model: the name of a model that adds one weight a feature.
    """

    shown: ClassVar[str] = "is a number"
    expected: ClassVar[str] = "a finite number"
    expected_in_batch: ClassVar[str] = "a finite number"
    ways_out: ClassVar[tuple[str, ...]] = ()
    ways_out_in_batch: ClassVar[tuple[str, ...]] = (
        "clean the value, or make it NaN, which leaves the sample out of the loss",
    )
    is_number: ClassVar[bool] = True
    has_positives: ClassVar[bool] = False
    gives_probabilities: ClassVar[bool] = False
    judged_like: ClassVar[Task | None] = None
    linear_model: ClassVar[str] = "a linear model"

    def possible(self, values: LabelValues) -> LabelValues:
        """Mark the values that a row may have; NaN, which is a missing label, is none.

        Args:
            values: an array of NumPy or a tensor: compare it, and call nothing of either library.
        """
        return (values > -math.inf) & (values < math.inf)

    def learnable(self, values: LabelValues) -> LabelValues:
        """Mark the values that the loss takes; those of a teacher may lie between the possible ones.

        Args:
            values: as in `possible`.
        """
        return self.possible(values)

    @abstractmethod
    def loss(
        self, logits_B: Float[Tensor, "B"], labels_B: Float[Tensor, "B"], *, mean: float, deviation: float
    ) -> Float[Tensor, "B"]:
        """Return the loss of each sample, in FP32; about 1 for a model that knows nothing.

        Args:
            logits_B: FP32, or FP64 of a label that is a number.
            labels_B: 0 in the place of missing ones, whose loss is left out.
            mean: of the training rows; 0 for a label that is no number, and where nothing was fitted.
            deviation: of the same; 1 likewise.
        """

    def logits(self, computed: Float[Tensor, "..."], *, mean: float, deviation: float) -> Float[Tensor, "..."]:
        """Return what a network computes, numbers about as large as 1, as logits; 0 is what a model starts at.

        Args:
            computed: FP64.
            mean: as in `loss`.
            deviation: likewise.
        """
        return computed * deviation + mean

    def scores(self, logits: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Return predictions, in the unit of the labels; element by element, of any shape."""
        return logits

    def link(self, scores: Float64[np.ndarray, " N"]) -> Float64[np.ndarray, " N"]:
        """Return scores on the scale on which effects add up, as in a generalised linear model."""
        return scores

    def unlink(self, values: Float64[np.ndarray, " N"]) -> Float64[np.ndarray, " N"]:
        """Return the scores of values on that scale."""
        return values

    def value_term(self, name: str) -> str:
        """Return the score as a term of a sum, in the language of value models.

        Args:
            name: of the label, as it is quoted there.
        """
        return name

    def try_out(self) -> None:
        """Ask for the loss and the scores of a few values, some of which cannot be."""
        import numpy as np
        import torch

        where = f"task {self}, {type(self).__module__}.{type(self).__qualname__}"
        values = np.array([0.0, 1.0, 2.5, -3.0, np.nan, np.inf])
        for name, ask in (("possible", self.possible), ("learnable", self.learnable)):
            of_array = ask(values)
            of_tensor = ask(torch.from_numpy(values))
            same = isinstance(of_array, np.ndarray) and of_array.dtype == bool and of_array.shape == values.shape
            if not (same and isinstance(of_tensor, torch.Tensor) and np.array_equal(of_array, of_tensor.numpy())):
                raise ConfigError(
                    expected="a truth value for each value, the same of an array and of a tensor",
                    found=f"{of_array!r} and {of_tensor!r}",
                    where=f"{where}.{name}",
                    ways_out="compare the values: (values >= 0) & (values < math.inf)",
                )
        labels = torch.from_numpy(values)[torch.from_numpy(self.possible(values) & np.isfinite(values))]
        if not len(labels):
            labels = torch.ones(1, dtype=torch.float64)
        computed = torch.linspace(3.0, -3.0, len(labels), dtype=torch.float64)
        logits = self.logits(computed, mean=1.0, deviation=2.0).requires_grad_()
        loss = self.loss(logits, labels, mean=1.0, deviation=2.0)
        (grad,) = torch.autograd.grad(loss.sum(), logits) if loss.requires_grad else (torch.tensor(math.nan),)
        scores = self.scores(logits.detach())
        right = loss.shape == labels.shape == scores.shape and loss.dtype == torch.float32
        if not (right and all(bool(each.isfinite().all()) for each in (loss, grad, scores))):
            raise ConfigError(
                expected=f"{len(labels)} finite losses in FP32 with a gradient, and as many finite scores",
                found=f"losses {loss.tolist()} in {loss.dtype}, gradient {grad.tolist()}, scores {scores.tolist()}",
                where=f"{where}.loss, .logits and .scores",
                ways_out="return a loss for each sample, and .float() last",
            )
        if self.gives_probabilities and not bool(((scores >= 0) & (scores <= 1)).all()):
            raise ConfigError(
                expected="scores from 0 to 1, as gives_probabilities says",
                found=f"{scores.tolist()}",
                where=f"{where}.scores",
                ways_out=("return logits.sigmoid()", "take gives_probabilities = True out"),
            )
