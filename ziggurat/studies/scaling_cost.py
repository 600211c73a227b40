"""Estimate the processor seconds of a study of scaling, before it begins.

The smallest and the largest size of a model make a few real steps; a run's seconds are its steps times

    seconds(FLOPs) = s + g · FLOPs      of a step, through both

since a step has a part that every size pays (the loader, tables, calls) and one that grows with its products. Sizes in
between that have more layers than the straight line assumes cost more than it says; as runs finish, what they took
corrects what is left (`Remaining`).
"""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ziggurat.data.preprocess.prepared import PreparedData
from ziggurat.embeddings import BatchShape
from ziggurat.models import BuiltInConfig, build_model
from ziggurat.training.config import TrainingConfig
from ziggurat.training.trainer import Trainer

_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Processor seconds of a training step, by FLOPs of a sample's forward pass.

    Args:
        fixed_s: of every step.
        per_flop_s: for each FLOP of a sample.
    """

    fixed_s: float
    per_flop_s: float

    def seconds(self, flops: int, *, steps: int) -> float:
        """Return the processor seconds of a run."""
        return steps * (self.fixed_s + self.per_flop_s * flops)


@dataclass(frozen=True, kw_only=True)
class MeasuredSize:
    """A size of a model whose steps are timed.

    Args:
        model: its settings.
        data: what it trains on.
        flops: of a sample, forward.
    """

    model: BuiltInConfig
    data: PreparedData
    flops: int


def measure(smallest: MeasuredSize, largest: MeasuredSize, *, training: TrainingConfig) -> StepCost:
    """Time a few steps of two sizes of a model.

    Args:
        smallest: the one.
        largest: the other.
        training: as runs are trained.
    """
    low_s, high_s = (_step_s(size.model, data=size.data, training=training) for size in (smallest, largest))
    per_flop_s = max(0.0, high_s - low_s) / max(1, largest.flops - smallest.flops)
    return StepCost(fixed_s=max(0.0, low_s - per_flop_s * smallest.flops), per_flop_s=per_flop_s)


def _step_s(model: BuiltInConfig, *, data: PreparedData, training: TrainingConfig) -> float:
    built = build_model(model, data.inputs, seed=0)
    built.embeddings.choose_kernel(BatchShape(batch_size=training.loader.batch_size))
    few = dataclasses.replace(training, max_steps=_STEPS)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(built, config=few, train=data.train, valid=None, folder=Path(folder))
        times = [time.process_time()]
        for _ in trainer.steps():
            times.append(time.process_time())
            if len(times) > _STEPS:
                break
    # The first step allocates what later ones use again.
    spans = sorted(later - earlier for earlier, later in itertools.pairwise(times[1:]))
    return spans[len(spans) // 2] if spans else times[-1] - times[0]


@dataclass(kw_only=True)
class Remaining:
    """Estimates what is left of a study, corrected by what finished runs took.

    Args:
        estimates: seconds of each run that is missing, by its name.
        left: of those that have not ended.
        taken_s: what ended runs took.
        expected_s: what was expected of them.
    """

    estimates: Mapping[str, float]
    left: dict[str, float] = field(init=False)
    taken_s: float = 0.0
    expected_s: float = 0.0

    def __post_init__(self) -> None:
        self.left = dict(self.estimates)

    def ended(self, run: str, seconds: float) -> None:
        """Note that a run has ended."""
        self.expected_s += self.left.pop(run)
        self.taken_s += seconds

    def skipped(self, run: str) -> None:
        """Note that a run is not made, or was there before."""
        self.left.pop(run, None)

    @property
    def seconds(self) -> float:
        """Processor seconds of the runs that are left."""
        corrected = self.taken_s / self.expected_s if self.expected_s else 1.0
        return corrected * sum(self.left.values())


def as_time(seconds: float) -> str:
    """Return processor seconds for people: `40 CPU seconds`, `12 CPU minutes`."""
    return f"{seconds:.0f} CPU seconds" if seconds < 90 else f"{seconds / 60:.0f} CPU minutes"
