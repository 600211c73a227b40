"""Label weights: what each label counts in the loss of a model with several, as the schema says, or learned.

    given          loss = (1/L) Σ_l v_l · mean_l                          v_l: the label's `weight`, mostly 1
    uncertainty    loss = (1/L) Σ_l exp(−s_l) · mean_l + s_l / 2          s_l: a learned number a label, 0 at first

A label that is hard to predict has a large loss whatever the network does, and its gradients drown those of others.
With learned weights exp(−s_l) goes to 1 / (2 · mean_l), where every label counts the same, and s_l / 2 keeps it from
going to 0. It is the likelihood of a label whose noise has the variance exp(s_l): exact for numbers up to a constant
factor of the squared error, and as published an approximation for classes.

Source: Kendall, Gal and Cipolla, "Multi-Task Learning Using Uncertainty to Weigh Losses for Scene Geometry and
Semantics", CVPR 2018, arXiv 1705.07115, equations 7 and 10, with s = ln σ².

The loss that is reported stays the plain mean, so that it can be compared; the weights stand in the training log. The
numbers are weights of the dense network: its optimizer learns them, checkpoints hold them, what is served does not.
Cost: none that could be measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from enum import StrEnum

import torch
from torch import Tensor, nn

from ziggurat.errors import ConfigError
from ziggurat.features.batch import Batch
from ziggurat.features.labels import Label
from ziggurat.models import Embedded, LossSums, Model, Outputs
from ziggurat.models.contract.model import device_of

_NUMBERS = "label_weights.log_variances"


class LabelWeights(StrEnum):
    """Choices of what labels count in the loss."""

    GIVEN = "given"  # `weight` of each label in the schema
    UNCERTAINTY = "uncertainty"  # learned

    def check(self, labels: Sequence[Label]) -> None:
        """Refuse labels among which there is nothing to weigh.

        Raises:
            ConfigError: learned weights of one label, or of labels that have weights.
        """
        if self is LabelWeights.GIVEN:
            return
        weighted = [f"{label.name} = {label.weight:g}" for label in labels if label.weight != 1.0]
        if len(labels) > 1 and not weighted:
            return
        raise ConfigError(
            expected="two labels or more without weights in the schema, where weights are learned",
            found=f"weights {', '.join(weighted)}" if weighted else f"{len(labels)} label",
            where="config, label_weights",
            ways_out=(
                "--label-weights given",
                "take weight out of the labels of the schema" if weighted else "add a label to the schema",
            ),
        )


class LearnedWeights(nn.Module):
    """The loss of a model's labels with weights that are learned; made by `weigh_labels`.

    Args:
        model: on one device, not yet parallel.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self._names = [label.name for label in model.inputs.labels]
        self._label_loss = model.loss
        self.log_variances = nn.Parameter(torch.zeros(len(self._names)))
        self._last: Tensor | None = None

    def inputs_of(self, batch: Batch) -> dict[str, Tensor]:
        """Return nothing: weights do not depend on samples."""
        del batch
        return {}

    def outputs_beside(self, outputs: Outputs, embedded: Embedded) -> Outputs:
        """Return the outputs with the log variances, a row a sample, by a name that the loss knows."""
        del embedded
        # Read inside of the forward pass, and copied: a sharded weight is whole there alone, and no view may outlive
        # it.
        rows_BL = self.log_variances.repeat(len(outputs.logits), 1)
        return dataclasses.replace(outputs, named={**outputs.named, _NUMBERS: rows_BL})

    def loss(self, outputs: Outputs, batch: Batch) -> LossSums:
        """Return the sums of the plain loss, with the gradient of the weighted one."""
        sums = self._label_loss(outputs, batch)
        rows_BL = outputs.named[_NUMBERS].float()
        if not len(rows_BL):
            # A rank without samples takes part in the sum of gradients all the same.
            return LossSums(total=sums.total + rows_BL.sum(), weight=sums.weight)
        numbers_L = rows_BL[0]
        self._last = numbers_L.detach()
        weighted_L = (-numbers_L).exp() * sums.total + 0.5 * numbers_L * sums.weight
        return LossSums(total=sums.total.detach() + (weighted_L - weighted_L.detach()), weight=sums.weight)

    def facts(self) -> dict[str, object]:
        """Return the weight of each label in the last step, for the log."""
        if self._last is None:
            return {}
        weights = (-self._last).exp().tolist()
        return {f"weight of {name}": weight for name, weight in zip(self._names, weights, strict=True)}

    def lines(self) -> dict[str, str]:
        """Return lines for the start-up report by their titles."""
        return {"label weights": f"learned: {', '.join(self._names)}"}


def weigh_labels(model: Model, weights: LabelWeights) -> LearnedWeights | None:
    """Give a model the loss with learned weights; it is then that of training.

    Args:
        model: on its device, converted to its precision, and not yet parallel.
        weights: given or learned.

    Returns:
        The loss and what it learns, which is `model.student`; None where weights are given.
    """
    if weights is LabelWeights.GIVEN:
        return None
    made = LearnedWeights(model).to(device_of(model))
    model.student = made
    return made
