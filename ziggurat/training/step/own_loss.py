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
from typing import Any

from ziggurat.errors import ConfigError
from ziggurat.features.batch import Batch
from ziggurat.models import LossSums, Outputs

LossFunction = Callable[[Outputs, Batch], LossSums]


def loss_name(loss: LossFunction | None) -> str:
    """Where the function comes from; "" for the model's own loss."""
    if loss is None:
        return ""
    named: Any = loss if hasattr(loss, "__qualname__") else type(loss)
    return f"{named.__module__}:{named.__qualname__}"


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
