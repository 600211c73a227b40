"""Gradients of several labels, compared before the first step: does one of them drown the others?

    g_l = ‖∂(v_l · mean loss of label l) / ∂(weights of the dense network)‖      of one batch, before any training

All labels of a model share its network, and their losses add up to one sum. A label whose gradient is twenty times that
of another moves the shared weights as if the other did not exist: a click beside a time in milliseconds, whose loss was
taken in square milliseconds, ends at the AUC of a coin. Losses of numbers are therefore in units of their variance
(`models/contract/losses.py`); what is left are weights of labels, weights of positives, and losses of one's own.

Cost: one forward pass and one backward pass a label through the dense network, for 1,024 rows, once a run.
"""

from __future__ import annotations

import math
from itertools import combinations

import torch

from ziggurat.data.encoded.dataset import EncodedDataset
from ziggurat.features.batch import Batch
from ziggurat.models import Embedded, LossSums, Model, Outputs
from ziggurat.models.contract.model import device_of
from ziggurat.training.evaluation.evaluate import ordered_batches
from ziggurat.training.step.own_loss import LossFunction

_ROWS = 1024
_DROWNED = 20.0
_FAR = 3.0  # deviations of a label


def gradients_of_labels(model: Model, batch: Batch, *, loss: LossFunction | None = None) -> dict[str, float]:
    """Return the norm of the dense network's gradient for each label; the model stays as it is.

    Args:
        model: on one device.
        batch: some samples, on its device.
        loss: minimised in the place of the model's own.
    """
    parameters = [each for each in model.parameters() if each.requires_grad]
    was_training = model.training
    model.eval()  # no dropout: no random number is taken from the run
    try:
        with torch.no_grad():
            embedded: Embedded = model.embed(batch)
        with torch.enable_grad():
            outputs: Outputs = model.forward_dense(embedded)
            sums: LossSums = (loss or model.loss)(outputs, batch)
            means_L = sums.total / torch.where(sums.weight > 0, sums.weight, 1.0)
        norms: dict[str, float] = {}
        for column, label in enumerate(model.inputs.labels):
            found = torch.autograd.grad(means_L[column], parameters, retain_graph=True, allow_unused=True)
            squares = [float(each.square().sum()) for each in found if each is not None]
            norms[label.name] = math.sqrt(sum(squares))
    finally:
        model.train(was_training)
    return norms


def drowned_labels(model: Model, dataset: EncodedDataset, *, loss: LossFunction | None = None) -> list[str]:
    """Sentences on labels whose gradient is a twentieth of another's, or less; none for a single label.

    Args:
        model: on one device, before its first step.
        dataset: training rows.
        loss: as in `gradients_of_labels`.
    """
    if len(model.inputs.labels) < 2 or not dataset.num_rows:
        return []
    device = device_of(model)
    batch = next(iter(ordered_batches(dataset, batch_size=_ROWS).batches(epoch=0))).to(device)
    norms = gradients_of_labels(model, batch, loss=loss)
    lines: list[str] = []
    for pair in combinations(norms, 2):
        weak, strong = sorted(pair, key=norms.__getitem__)
        if norms[weak] > 0.0 and norms[strong] > _DROWNED * norms[weak]:
            lines.append(
                f"the gradient of label {strong!r} is {norms[strong] / norms[weak]:,.0f} times that of {weak!r}, which "
                f"will hardly be learned: give label {strong!r} a smaller weight in the schema"
            )
    return lines


def far_labels(model: Model, dataset: EncodedDataset) -> list[str]:
    """Say which labels that are numbers a model starts far from: it computes their own units, and learns slowly.

    Args:
        model: on one device, before its first step.
        dataset: training rows.
    """
    numbers = [index for index, label in enumerate(model.inputs.labels) if label.task.is_number]
    if not numbers or not dataset.num_rows:
        return []
    device = device_of(model)
    batch = next(iter(ordered_batches(dataset, batch_size=_ROWS).batches(epoch=0))).to(device)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            logits_BL = model(batch).double()
    finally:
        model.train(was_training)
    lines: list[str] = []
    for index in numbers:
        label = model.inputs.labels[index]
        mean = float(label.task.scores(logits_BL[:, index]).mean())
        if abs(mean - label.offset) > _FAR * label.scale:
            lines.append(
                f"label {label.name!r} is {label.offset:,.6g} ± {label.scale:,.6g} in the training rows, and "
                f"{type(model).__name__} starts at {mean:,.6g}: a network learns numbers about as large as 1. Return "
                "self.as_outputs(x) from forward_dense, which makes mean + deviation · x of what it computes (the "
                "output of a module in zg.wrap is taken as it is, so let the module do that)"
            )
    return lines
