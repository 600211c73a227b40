"""A loss of the user's own: a function beside the model, in the place of `model.loss`.

    def focal(outputs: Outputs, batch: Batch) -> LossSums: ...

    zg.train_run(config, folder="runs/focal", loss=focal)      Trainer(model, …, loss=focal)

The function returns numerators and denominators, so that samples of all ranks add up to the loss of one batch. The
denominators are those of `model.loss_weight` (the labelled weight): ranks add them up before the forward pass. A loss
with others is a method of the model, with `loss_weight` beside it.

A checkpoint keeps the function's name. A run that is resumed with another loss, or without, is refused: it would go
on as another experiment, and nothing would show it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ziggurat.errors import ConfigError
from ziggurat.features.batch import Batch
from ziggurat.models import LossSums, Model, Outputs

LossFunction = Callable[[Outputs, Batch], LossSums]


def loss_name(loss: LossFunction | None) -> str:
    """Say where the loss function comes from; return "" for the model's own loss."""
    if loss is None:
        return ""
    named: object = loss if hasattr(loss, "__qualname__") else type(loss)
    return f"{named.__module__}:{named.__qualname__}"


def checked_sums(found: object, batch: Batch, *, name: str) -> LossSums:
    """Return what a loss gave, if it is numerators and denominators of every label, through which weights can learn.

    Args:
        found: what the loss returned for a batch with samples.
        batch: the samples.
        name: of the loss, for the error.

    Raises:
        ConfigError: it is a plain tensor, has another shape, or has no gradient.
    """
    num_labels = batch.labels.shape[1]
    if not isinstance(found, LossSums):
        is_tensor = isinstance(found, Tensor)
        raise ConfigError(
            expected="zg.LossSums: for each label the sum of the weighted losses, and the sum of the weights",
            found=f"a tensor of shape {tuple(found.shape)}" if is_tensor else type(found).__name__,
            where=f"loss {name}",
            ways_out=(
                "losses of shape (samples, labels): zg.LossSums(total=(losses * weights).sum(dim=0), "
                "weight=weights.sum(dim=0)), where weights are batch.weights.unsqueeze(1).expand_as(losses), or "
                "torch.ones_like(losses) where samples have none",
                "leave loss= out: the model's own is that of the labels",
            ),
        )
    shapes = (tuple(found.total.shape), tuple(found.weight.shape))
    if shapes != ((num_labels,), (num_labels,)):
        raise ConfigError(
            expected=f"total and weight of shape ({num_labels},): a number for each label",
            found=f"total {shapes[0]}, weight {shapes[1]}",
            where=f"loss {name}",
            ways_out="sum over the samples alone, sum(dim=0), of losses and weights of shape (samples, labels)",
        )
    if not found.total.requires_grad:
        raise ConfigError(
            expected="a total that carries the gradient of the network: nothing would learn without",
            found="a total without gradient",
            where=f"loss {name}",
            ways_out=(
                "compute it of outputs.logits without detach(), no_grad(), numpy, item() or comparisons alone",
                "let weights learn: requires_grad is False for all of them, or forward_dense detaches what it gives",
            ),
        )
    return found


def refuse_unweighted(sums: LossSums, batch: Batch, *, model: Model, name: str) -> None:
    """Refuse a loss whose denominators count every sample once, although samples or positives have weights.

    Metrics and losses of the model weigh samples; a function that forgets them trains another task, and only its
    denominators show it.

    Args:
        sums: of the loss for the batch.
        batch: the samples.
        model: knows the denominators of a loss of its labels.
        name: of the loss, for the error.

    Raises:
        ConfigError: the denominators are those of samples without weights.
    """
    has_weights = batch.weights is not None
    if not has_weights and all(label.positive_weight == 1.0 for label in model.inputs.labels):
        return
    found_L = sums.weight.detach()
    weighted_L = model.loss_weight(batch).to(found_L)
    if found_L.shape != weighted_L.shape or torch.allclose(found_L, weighted_L):
        return
    num_known_L = (~batch.labels.isnan()).sum(dim=0).to(found_L)
    num_samples_L = torch.full_like(found_L, batch.batch_size)
    if not (torch.equal(found_L, num_known_L) or torch.equal(found_L, num_samples_L)):
        return  # other denominators than those of the labels, which one device may have
    raise ConfigError(
        expected=f"a loss that weighs samples as the schema says, {weighted_L.tolist()} in all for this batch",
        found=f"{found_L.tolist()}, as if each sample weighed 1",
        where=f"loss {name}",
        ways_out=(
            "losses of shape (samples, labels): weights = labelled_weights(batch.labels, batch.weights, inputs=inputs) "
            "of ziggurat.models.contract.losses, then "
            "zg.LossSums(total=(losses * weights).sum(dim=0), weight=weights.sum(dim=0))",
            f"train without weights: leave {'weight' if has_weights else 'positive_weight'} out of the schema",
        ),
    )


def refuse_other_loss(stored: str, given: LossFunction | None, *, where: str) -> None:
    """Compare the loss of a checkpoint with the one to go on with.

    Raises:
        ConfigError: they have other names.
    """
    name = loss_name(given)
    if stored.rpartition(":")[2] != name.rpartition(":")[2]:  # a script's module has another name when it is imported
        raise ConfigError(
            expected=f"the loss that the run was started with, {stored or 'that of the model'}",
            found=name or "that of the model",
            where=f"{where}, resume",
            ways_out=(
                f"train_run(…, resume=True, loss={stored.rpartition(':')[2]})" if stored else "leave loss= out",
                "start a new run in another folder",
            ),
        )
