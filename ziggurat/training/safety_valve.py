"""The safety valve of a dispatch: a loss that spikes sends products back to FP32, and they stay there.

    loss of a step ─► finite?  no: all products go back; the step changed no weight, and counts as skipped
                      above median + 8 · max(1.4826 · MAD, median / 100) of the last 64 losses, for 3 steps in a row?
                          the first time    the half of the dispatched products with the largest measured errors
                          the second time   the others, and activations

A dispatch is chosen once, on statistics of one moment of a run; LoKA (arXiv 2605.10886, "Dispatch") changes it while a
model trains only as such a valve. Median and MAD (median of distances to the median) of finite losses that were no
spike do not move with the spike itself; the hundredth keeps a loss that stands still from spiking by rounding. Nothing
is judged before 32 losses. A batch that itself holds NaN or an infinity is no fault of a product, and moves nothing.

Each rank sees the loss of the whole batch, and comes to the same end. What the valve has seen and done is in every
checkpoint, so that a resumed run has the bits of one that was not stopped. BF16 activations whose products are all
torch's own have no half: all of them go back at once.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

from ziggurat.plain import JSON, as_group, as_list, as_number, as_text, as_whole

if TYPE_CHECKING:
    from ziggurat.training.step.train_step import TrainStep

WINDOW = 64
MIN_LOSSES = 32
MIN_ABOVE = 3
_SCALES = 8.0
_OF_NORMAL = 1.4826  # MAD times this estimates the standard deviation of normal numbers
_MIN_SCALE = 0.01


class SafetyValve:
    """Judges the losses of a run by dispatch. See the module's docstring.

    Args:
        step: whose products it sends back.
    """

    def __init__(self, step: TrainStep) -> None:
        self._step = step
        self._losses: list[float] = []
        self._num_above = 0
        self._gone = list[str]()

    @property
    def is_open(self) -> bool:
        """True while some product is computed in fewer bits."""
        return bool(self._step.products_in_few_bits())

    def judge(self, loss: float, *, is_finite: bool) -> str:
        """Judge the loss of a step, and send products back where it spikes; return what was done, "" for nothing.

        Args:
            loss: of all ranks' samples.
            is_finite: whether loss and gradients were, so that weights changed.
        """
        if not is_finite:
            return self._send_back("loss or a gradient is not finite", is_all=True) if self.is_open else ""
        limit = self._limit()
        if limit is None or loss <= limit:
            self._num_above = 0
            self._losses = [*self._losses, loss][-WINDOW:]
            return ""
        self._num_above += 1
        if self._num_above < MIN_ABOVE or not self.is_open:
            return ""
        why = f"loss {loss:.4g}, {MIN_ABOVE} steps in a row above {limit:.4g}"
        return self._send_back(why, is_all=bool(self._gone))

    def _limit(self) -> float | None:
        """Return the loss from which on a step is a spike; None while too few losses are known."""
        if len(self._losses) < MIN_LOSSES:
            return None
        median = statistics.median(self._losses)
        deviation = _OF_NORMAL * statistics.median(abs(each - median) for each in self._losses)
        return median + _SCALES * max(deviation, _MIN_SCALE * abs(median))

    def _send_back(self, why: str, *, is_all: bool) -> str:
        errors = self._step.products_in_few_bits()
        # Of equal errors by name, and an unknown error is the largest.
        by_error = sorted(errors, key=lambda name: (-errors[name], name))
        gone = by_error if is_all else by_error[: math.ceil(len(by_error) / 2)]
        self._gone += gone
        self._losses = []
        self._num_above = 0
        self._step.send_back(self._gone)
        names = ", ".join(gone[:5]) + (f" and {len(gone) - 5} more" if len(gone) > 5 else "")
        rest = len(errors) - len(gone)
        return f"{why}: FP32 from here on in {names}" + (f"; {rest} products stay" if rest else "; none is left")

    def state(self) -> dict[str, JSON]:
        """Return what a checkpoint keeps; floats survive exactly."""
        return {"losses": [*self._losses], "above": self._num_above, "gone": [*self._gone]}

    def load(self, state: JSON) -> None:
        """Go on from a checkpoint; None: one of before there was a valve."""
        if state is None:
            return
        kept = as_group(state)
        self._losses = [as_number(each) for each in as_list(kept["losses"])]
        self._num_above = as_whole(kept["above"])
        self._gone = products_gone(state)
        self._step.send_back(self._gone)


def products_gone(state: JSON) -> list[str]:
    """Return the names of products that a checkpoint's valve has sent back; none of one without a valve."""
    return [] if state is None else [as_text(each) for each in as_list(as_group(state)["gone"])]
