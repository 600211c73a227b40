"""What a training step reports: at once on a CPU, when the device has come to it on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ziggurat.features.batch import Batch

OVERFLOW = "norm of all gradients (overflow)"


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The values that one step reports.

    Args:
        loss: mean loss of the (global) batch, before the update.
        finite: False if loss or a gradient was NaN or infinite; then nothing was updated.
        first_bad: the first tensor that was not finite, "" if none.
        squared: Σ g² over the gradients that were looked at: of the dense network, and with a norm to clip at of tables
            too. NaN where a device keeps it to itself.
        busy_s: seconds of processor time that each rank took for forward and backward pass, by rank; zeros where a
            device computes, whose clock is another.
    """

    loss: float
    finite: bool
    first_bad: str = ""
    squared: float = math.nan
    busy_s: tuple[float, ...] = ()

    def read(self) -> StepResult:
        """Itself: a step on the CPU knows what it found."""
        return self


class LateResult:
    """The result of a step, read when the device has come to it. Reading waits for that step and for no later one.

    Args:
        numbers: the step's message, on its way into locked memory.
        arrived: happens when it is there.
        batch: that the step trained; kept until the message is read, since it may have to be shown.
        settle: takes the message once, and returns the result.
    """

    busy_s = (0.0,)

    def __init__(
        self, numbers: Tensor, *, arrived: torch.cuda.Event, batch: Batch, settle: Callable[[Tensor, Batch], StepResult]
    ) -> None:
        self._numbers = numbers
        self._arrived = arrived
        self._batch = batch
        self._settle = settle
        self._read: StepResult | None = None

    def read(self) -> StepResult:
        """The result, once the device has made it.

        Raises:
            BoundsError: a row of the batch lies outside its table; no weight was changed.
        """
        if self._read is None:
            self._arrived.synchronize()
            self._read = self._settle(self._numbers, self._batch)
            del self._batch
        return self._read

    @property
    def loss(self) -> float:
        """Mean loss of the batch; waits for the step."""
        return self.read().loss

    @property
    def finite(self) -> bool:
        """True if the step changed weights; waits for the step."""
        return self.read().finite

    @property
    def first_bad(self) -> str:
        """The first tensor that was not finite, "" if none; waits for the step."""
        return self.read().first_bad
