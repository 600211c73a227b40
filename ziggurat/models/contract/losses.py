"""Losses: cross-entropy for binary labels, squared error for regression, with weights and missing labels.

    binary       ℓ(z, y) = max(z, 0) − z·y + ln(1 + e^−|z|)          = −y ln σ(z) − (1−y) ln(1 − σ(z))
    regression   ℓ(z, y) = ((z − y) / s)²                            s: deviation of the label in the training rows

    label l      mean_l = Σ_b w_b m_bl ℓ(z_bl, y_bl) / Σ_b w_b m_bl      m_bl = 0 where the label is missing (NaN)
    all labels   loss = (1/L) Σ_l v_l mean_l                           a label nobody in the batch has counts as 0
                                                                     v_l: the label's `weight`, mostly 1

A label that is a number is predicted as z = m + s·x, with m and s of the training rows and x what the network computes
(`in_label_units`): it starts at the mean, and times in milliseconds are learned as well as stars. The loss is a share
of the label's variance, 1 for always saying the mean, so that beside a click neither label is drowned.

A label's `positive_weight` c makes w_b c of the weight of positives (w_b (1 + (c − 1) y) for soft labels), in numerator
and denominator alike. A label's `negative_rate` r says that training kept that share of the negatives: odds are then
1/r times too high, and a score is σ(z + ln r), which is p / (p + (1 − p) / r) of the p trained (He et al., ADKDD 2014).

The mean is over *labelled weight*, not over rows. With ranks that hold different numbers of rows (the last batch of an
epoch) the average of the ranks' means is therefore not the mean over all rows; `loss_sums` returns numerators and
denominators apart, so that data parallelism can sum both over ranks and get exactly the loss of one big batch:

    loss = (1/L) Σ_l (Σ_r total_rl) / (Σ_r weight_rl)          v_l is part of total_rl

Everything is computed in FP32, whatever the precision of the network, but for a label that is a number: it comes in
FP64, z = m + s·x is FP64 too, and (z − y) / s is rounded to FP32 after the difference was taken. Of a label around 1e9
FP32 knows the multiples of 64 alone, and would lose both y and z. A NaN logit makes the loss NaN even where its
label is missing: it shows that the network is broken, and the trainer stops on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ziggurat.errors import ConfigError
from ziggurat.features.inputs import InputSpec, LabelSpec
from ziggurat.specification import answer_of


@dataclass(frozen=True, kw_only=True)
class LossSums:
    """Numerator and denominator of each label's mean loss.

    Args:
        total: Σ weight · loss of the labelled samples, times the weight of the label; carries the gradient.
        weight: Σ weight of the labelled samples.

    Example:
        >>> import torch
        >>> zg.LossSums(total=torch.tensor([6.0]), weight=torch.tensor([3.0])).mean()
        tensor(2.)
    """

    total: Float[Tensor, "L"]
    weight: Float[Tensor, "L"]

    def mean(self, weight: Float[Tensor, "L"] | None = None) -> Float[Tensor, ""]:
        """Mean over labels of the mean over samples.

        Args:
            weight: denominators to use instead of this batch's own: the sums over all ranks. The result is then
                this rank's share of the global loss; the shares of all ranks *add up* to it (multiply by the number of
                ranks first where gradients are averaged).
        """
        # A label that nobody in the batch has counts as 0, and not as 0 / 0.
        denominators = self.weight if weight is None else weight
        return (self.total / torch.where(denominators > 0, denominators, 1.0)).mean()


def loss_of(
    logits_BL: Float[Tensor, "B L"],
    labels_BL: Float[Tensor, "B L"],
    weights_B: Float[Tensor, "B"] | None = None,
    *,
    inputs: InputSpec,
) -> Float[Tensor, ""]:
    """Mean loss of a batch; 0 (with zero gradients) for an empty one. See the module docstring.

    Args:
        logits_BL: what the model returns.
        labels_BL: NaN where missing.
        weights_B: sample weights, or None for 1 each.
        inputs: says which label is of which task.
    """
    return loss_sums(logits_BL, labels_BL, weights_B, inputs=inputs).mean()


def loss_sums(
    logits_BL: Float[Tensor, "B L"],
    labels_BL: Float[Tensor, "B L"],
    weights_B: Float[Tensor, "B"] | None = None,
    *,
    inputs: InputSpec,
) -> LossSums:
    """Numerators and denominators of `loss_of`, for sums over ranks or over accumulated batches."""
    # 0 for the arithmetic: NaN times a weight of 0 would still be NaN.
    known_BL = torch.where(labels_BL.isnan(), 0.0, labels_BL)
    weights_BL = labelled_weights(labels_BL, weights_B, inputs=inputs)
    losses = [
        _sample_losses(logits_BL[:, column], known_BL[:, column], label) for column, label in enumerate(inputs.labels)
    ]
    losses_BL = torch.stack(losses, dim=1)
    total_L = times_label_weights((losses_BL * weights_BL).sum(dim=0), inputs=inputs)
    return LossSums(total=total_L, weight=weights_BL.sum(dim=0))


def times_label_weights(total_L: Float[Tensor, "L"], *, inputs: InputSpec) -> Float[Tensor, "L"]:
    """Return a numerator of each label times the weight of the label in the schema, v_l."""
    # The usual case has no operation more.
    if all(label.weight == 1.0 for label in inputs.labels):
        return total_L
    return total_L * numbers_of_labels([label.weight for label in inputs.labels], total_L)


def in_label_units(computed_BL: Float[Tensor, "B L"], *, inputs: InputSpec) -> Float[Tensor, "B L"]:
    """Return what a network computes as logits: m + s·x for a label that is a number, x for a binary one.

    Args:
        computed_BL: by a network whose numbers are about as large as 1; FP64 where a label is a number.
        inputs: has mean and deviation of each label that is a number.
    """
    if all(label.offset == 0.0 and label.scale == 1.0 for label in inputs.labels):
        return computed_BL
    columns = [
        # FP64: of a label around 1e9 FP32 knows the multiples of 64 alone.
        label.task.logits(computed_BL[:, column].double(), mean=label.offset, deviation=label.scale)
        for column, label in enumerate(inputs.labels)
    ]
    return torch.stack(columns, dim=1)


def add_sample_losses(
    sums: LossSums,
    losses_B: Float[Tensor, "B"],
    *,
    labels_BL: Float[Tensor, "B L"],
    weights_B: Float[Tensor, "B"] | None,
    inputs: InputSpec,
) -> LossSums:
    """Losses that no label has (auxiliary ones, penalties), added to each label's with the weights of its samples.

    The mean over labels then has their weighted mean once, and denominators stay those of the labels.

    Args:
        sums: of the labels.
        losses_B: of each sample.
        labels_BL: NaN where missing.
        weights_B: sample weights, or None for 1 each.
        inputs: says which label is of which task.
    """
    weights_BL = labelled_weights(labels_BL, weights_B, inputs=inputs)
    added_L = (weights_BL * losses_B.float().unsqueeze(1)).sum(dim=0)
    return LossSums(total=sums.total + added_L, weight=sums.weight)


def labelled_weight(
    labels_BL: Float[Tensor, "B L"], weights_B: Float[Tensor, "B"] | None = None, *, inputs: InputSpec
) -> Float[Tensor, "L"]:
    """`LossSums.weight` of a batch, known before the forward pass, so that its sum over ranks can travel meanwhile."""
    return labelled_weights(labels_BL, weights_B, inputs=inputs).sum(dim=0)


def logits_among_all(logits_BL: Float[Tensor, "B L"], *, inputs: InputSpec) -> Float[Tensor, "B L"]:
    """Return logits z + ln r among all samples, where training kept the share r of the negatives; else z itself."""
    # Training kept that share of the negatives, so its odds are 1 / r times too high.
    if any(label.negative_rate != 1.0 for label in inputs.labels):
        return logits_BL + numbers_of_labels([math.log(each.negative_rate) for each in inputs.labels], logits_BL)
    return logits_BL


def scores_from_logits(logits_BL: Float[Tensor, "B L"], *, inputs: InputSpec) -> Float[Tensor, "B L"]:
    """Turn logits into predictions: the probability of a binary label, the value of a label that is a number.

    The probability among all samples, also where training kept some of the negatives only. In FP32, and in FP64 where
    the logits are (`in_label_units`).
    """
    logits_BL = logits_among_all(at_least_fp32(logits_BL), inputs=inputs)
    tasks = [label.task for label in inputs.labels]
    if not tasks:
        return logits_BL
    # Each task scores all columns and those of its own labels are taken: the bits of a vectorised function may depend
    # on where a number stands in memory, and must not on the tasks of other labels.
    scores_BL = tasks[0].scores(logits_BL)
    for task in dict.fromkeys(tasks[1:]):
        if task is not tasks[0]:
            is_its_own_L = numbers_of_labels([each is task for each in tasks], logits_BL) > 0
            scores_BL = torch.where(is_its_own_L, task.scores(logits_BL), scores_BL)
    return scores_BL


def labelled_weights(
    labels_BL: Float[Tensor, "B L"], weights_B: Float[Tensor, "B"] | None = None, *, inputs: InputSpec
) -> Float[Tensor, "B L"]:
    """The weight of each sample for each label: w_b, times the label's positive weight; 0 where it is missing."""
    present_BL = labels_BL.isnan().logical_not()
    weights_BL = present_BL.float() if weights_B is None else present_BL * weights_B.unsqueeze(1)
    if all(label.positive_weight == 1.0 for label in inputs.labels):
        return weights_BL
    # 1 for a negative, c for a positive, in between for soft labels.
    more_L = numbers_of_labels([label.positive_weight - 1.0 for label in inputs.labels], weights_BL)
    return weights_BL * (1.0 + more_L * torch.where(present_BL, labels_BL, 0.0).float())


def at_least_fp32(numbers: Tensor) -> Tensor:
    """Return BF16 and FP16 as FP32, and FP32 and FP64 as they are."""
    return numbers.to(torch.promote_types(numbers.dtype, torch.float32))


def numbers_of_labels(numbers: Sequence[float], like: Tensor, /) -> Float[Tensor, "L"]:
    """One number for each label, in the dtype and on the device of a tensor.

    A GPU makes them itself: to copy numbers of the host there would let the host wait for it.
    """
    if like.device.type == "cpu":
        return like.new_tensor(numbers)
    # Filled on the device, number by number: few labels, and no copy to wait for.
    return torch.stack([like.new_full((), float(number)) for number in numbers])


# By label: what a task from outside the package gave that is no number, for the message of a step that is not finite.
_no_numbers: dict[str, str] = {}


def take_bad_loss(inputs: InputSpec) -> str:
    """Return which task gave NaN or infinity for finite numbers since the last call, for messages; "" for none."""
    found = [_no_numbers.pop(label.name, "") for label in inputs.labels]
    return next(filter(None, found), "")


def _sample_losses(logits_B: Tensor, labels_B: Tensor, label: LabelSpec) -> Tensor:
    """Ask the task of a label for losses, and look at the answer of code from outside the package.

    Raises:
        ConfigError: the task failed, or returned other than one loss in FP32 for each sample.
    """
    logits_B = at_least_fp32(logits_B)
    task = label.task
    kind = type(task)
    if kind.__module__.startswith("ziggurat.") or torch.compiler.is_compiling():
        return task.loss(logits_B, labels_B, mean=label.offset, deviation=label.scale)
    where = f"label {label.name!r}, task {task}, {kind.__module__}.{kind.__qualname__}.loss"
    expected = f"a loss for each of {len(logits_B)} samples, in FP32"
    found: object = answer_of(
        lambda: task.loss(logits_B, labels_B, mean=label.offset, deviation=label.scale), expected=expected, where=where
    )
    if not isinstance(found, Tensor) or found.shape != logits_B.shape or found.dtype != torch.float32:
        shown = f"{tuple(found.shape)} {found.dtype}" if isinstance(found, Tensor) else type(found).__name__
        raise ConfigError(
            expected=expected,
            found=shown,
            where=where,
            ways_out="return a loss for each sample, without a sum or a mean over them, and .float() last",
        )
    # A GPU would let the host wait for this; there a step that is not finite says that it is, and not whose fault.
    if found.device.type == "cpu" and label.name not in _no_numbers:
        bad_B = found.detach().isfinite().logical_not() & logits_B.detach().isfinite()
        if bool(bad_B.any()):
            first = int(bad_B.nonzero()[0, 0])
            given = f"logit {float(logits_B.detach()[first]):g} and label {float(labels_B[first]):g}"
            _no_numbers[label.name] = f"loss {float(found.detach()[first])} of {given}, by {where}"
    return found
