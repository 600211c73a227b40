"""What a training step reports: at once on a CPU, when the device has come to it on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float32
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
        busy_s: seconds of processor time that each rank took for forward and backward pass, by rank; zeros where a
            device computes, whose clock is another.
    """

    loss: float
    finite: bool
    first_bad: str = ""
    busy_s: tuple[float, ...] = ()

    def read(self) -> StepResult:
        """Itself: a step on the CPU knows what it found."""
        return self


@dataclass(frozen=True)
class Verdict:
    """The numbers of a step as they leave the device, in the order of its one message.

    Args:
        loss: of the batch.
        applies: whether weights changed.
        fault: a row lay outside its table.
        tables: gradients of the tables are finite.
        norms: of the gradient of each weight.
    """

    loss: float
    applies: bool
    fault: bool
    tables: bool
    norms: Sequence[float]

    @staticmethod
    def packed(loss: Tensor, *, applies: Tensor, fault: Tensor, tables: Tensor, norms_W: Tensor) -> Tensor:
        """One tensor of all, so that one copy takes them to the host."""
        flags = torch.stack([loss.float(), applies.float(), fault.float(), tables.float()])
        return torch.cat([flags, norms_W.float()])

    @staticmethod
    def read(numbers: Float32[Tensor, "4+W"]) -> Verdict:
        """The verdict of a message that has arrived."""
        loss, applies, fault, tables, *norms = numbers.tolist()
        return Verdict(loss, bool(applies), bool(fault), bool(tables), norms)


class LateResult:
    """The result of a step, read when the device has come to it. Reading waits for that step and for no later one.

    Args:
        numbers: a `Verdict`, on its way into locked memory.
        arrived: happens when it is there.
        batch: that the step trained; kept until the verdict is read, since it may have to be shown.
        settle: hears the verdict once, and says what the first bad tensor is.
    """

    busy_s = (0.0,)

    def __init__(
        self, numbers: Tensor, *, arrived: torch.cuda.Event, batch: Batch, settle: Callable[[Verdict, Batch], str]
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
            verdict = Verdict.read(self._numbers)
            first_bad = self._settle(verdict, self._batch)
            self._read = StepResult(loss=verdict.loss, finite=verdict.applies, first_bad=first_bad, busy_s=self.busy_s)
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


def first_bad_of(verdict: Verdict, *, names: Sequence[str], bad_weight: str) -> str:
    """Name the tensor that made a verdict fail; "" where the verdict did not fail.

    Args:
        verdict: of the step.
        names: of the weights that `Verdict.norms` are of.
        bad_weight: the first weight that is not finite, as `weight NAME`; "" if all are.
    """
    if verdict.applies:
        return ""
    if bad_weight:
        return bad_weight
    for name, norm in zip(names, verdict.norms, strict=True):
        if not math.isfinite(norm):
            return f"gradient of {name}"
    if not verdict.tables:
        return "gradient of the embedding tables"
    return "loss" if not math.isfinite(verdict.loss) else OVERFLOW
