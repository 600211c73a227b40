"""Position: where a run stands. Plain data in every checkpoint.

Step, epoch, step in the epoch, sums of the open log interval, and the history of evaluations, from which early stop and
the learning rate follow. Where the run stands in its data follows from `rows`, or is in `sources`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ziggurat.config import JSON
from ziggurat.errors import CheckpointError
from ziggurat.training.config import EarlyStopConfig
from ziggurat.training.early_stop import is_improvement
from ziggurat.typed import Reader

_OLDER = ("load an older checkpoint", "load it with the release of ziggurat that saved it")


@dataclass
class Position:
    """The position of a run.

    Args:
        step: steps taken in all.
        epoch: the epoch that the next step belongs to.
        step_in_epoch: steps taken in that epoch. Where it stands in the data follows from `rows`, which is right for
            any number of ranks.
        loss_sum: sum of loss · rows since the last log line.
        loss_rows: rows since the last log line.
        rows: rows trained in all, by all ranks.
        evaluations: metrics of every evaluation so far, oldest first, each with its `step`.
        best_step: step of the best evaluation; 0: none yet.
        best_value: its metric.
        not_improved: evaluations since the best one.
        reductions: evaluations that did not improve, in all (drives the plateau schedule).
        skipped: steps skipped because of NaN or infinity.
        finished: the run has come to its end.
        threads: CPU threads that computed so far; sums depend on it.
        world_size: ranks that computed last.
        sources: states of the data sources, one a rank, as plain data; empty where `rows` says it (`LoaderSource`).
        shuffle: order of the rows; "" in checkpoints of before it could be chosen.
        loss: name of the function that is minimised instead of the model's own loss; "" for the model's.
        window: number of the window of data that is trained, from 0 (`Trainer.fit(train=…)`).
        window_rows: rows trained before that window.
        window_epoch: epochs done before that window.
    """

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    loss_sum: float = 0.0
    loss_rows: int = 0
    rows: int = 0
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    best_step: int = 0
    best_value: float | None = None
    not_improved: int = 0
    reductions: int = 0
    skipped: int = 0
    finished: bool = False
    threads: int = 0
    world_size: int = 1
    sources: list[Any] = field(default_factory=list)
    shuffle: str = ""
    loss: str = ""
    window: int = 0
    window_rows: int = 0
    window_epoch: int = 0

    def begin_window(self, number: int) -> None:
        """Go on to another window of data, whose evaluations are not compared with those of the one before."""
        self.window = number
        self.window_rows = self.rows
        self.window_epoch = self.epoch
        self.step_in_epoch = 0
        self.sources = []
        self.evaluations = []
        self.best_step = 0
        self.best_value = None
        self.not_improved = 0
        self.finished = False

    def best_steps(self, steps: Sequence[int] | None, *, stop: EarlyStopConfig) -> set[int]:
        """Return the steps of evaluations best so far at some of `steps` (None: any time); their weights may be needed.

        A checkpoint names the best step as of its own. If newer ones turn out damaged, an older one is what counts,
        and so is the best that it names.
        """
        best: dict[str, Any] | None = None
        found = {self.best_step} - {0}
        ends = [*(entry["step"] for entry in self.evaluations[1:]), self.step + 1]
        for entry, end in zip(self.evaluations, ends, strict=False):  # no evaluation, and one end too many
            if _improves(entry, best, stop=stop):
                best = entry
            if best is not None and (steps is None or any(entry["step"] <= step < end for step in steps)):
                found.add(best["step"])
        return found

    @property
    def is_evaluated(self) -> bool:
        """True if the newest evaluation is of the weights of this step, in this epoch."""
        newest = self.evaluations[-1] if self.evaluations else {}
        return (newest.get("step"), newest.get("epoch")) == (self.step, self.epoch)

    def add_evaluation(self, metrics: dict[str, float], *, is_extra: bool, stop: EarlyStopConfig) -> bool:
        """Add an evaluation of the weights of this step; return whether it is the best so far.

        Args:
            metrics: by name.
            is_extra: nothing but the end of the run asked for it, so a run that ends later has none at this step.
            stop: what decides.
        """
        best = next((entry for entry in self.evaluations if entry["step"] == self.best_step), None)
        entry: dict[str, object] = {"step": self.step, "epoch": self.epoch, "metrics": metrics}
        entry |= {"extra": True} if is_extra else {}
        improved = _improves(entry, best, stop=stop)
        value = metrics[stop.metric]
        if improved:
            self.best_step = self.step
            self.best_value = value
            self.not_improved = 0
        elif math.isfinite(value):
            self.not_improved += 1
            self.reductions += 1
        self.evaluations.append(entry)
        return improved

    def to_json(self) -> dict[str, JSON]:
        """Plain data; floats survive exactly. A run on one window says nothing of windows, as it always did."""
        found = asdict(self)
        if not self.window:
            for name in ("window", "window_rows", "window_epoch"):
                del found[name]
        return found

    @classmethod
    def from_json(cls, data: object) -> Position:
        """The inverse of `to_json`."""
        reader = Reader(where="the checkpoint's state", noun="key", error=CheckpointError, ways_out=_OLDER)
        return reader.build(cls, data, "position")


def _improves(entry: dict[str, Any], best: dict[str, Any] | None, *, stop: EarlyStopConfig) -> bool:
    """Return whether an evaluation is better than the best one before it.

    An equal one is not, but for this: what a run evaluated only because it ended there gives way to an equal evaluation
    of the run that goes on, which then ends with the weights of one that was never stopped.
    """
    value = entry["metrics"].get(stop.metric, math.nan)
    if not math.isfinite(value) or best is None:
        return math.isfinite(value)
    before = best["metrics"][stop.metric]
    return is_improvement(value, before, stop=stop, is_equal_enough=best.get("extra", False))
