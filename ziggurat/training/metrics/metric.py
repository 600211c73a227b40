"""Metric: what one number says of scores, which way it improves, and how people see it.

    class TopShare(Metric):                 one object in one file, of the package or from outside
        name = "top_share"
        shown = "positives in the top percent"
        higher_is_better = True
        def compute(self, judged): …
    Metric.add(TopShare())                  from then on every evaluation has it

Evaluations, early stopping, choices on the command line, reports, comparisons and error bars ask these objects. In
results a metric is its name: `auc`, `ndcg@10` where it looks at the first k places, `auc/click` where there are several
labels. Those that the package has stand in `built_in.py`.
"""

from __future__ import annotations

import math
import reprlib
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, partial
from numbers import Real
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ziggurat.errors import ConfigError
from ziggurat.features.batch import NO_GROUP
from ziggurat.features.tasks import USUAL, Task
from ziggurat.specification import Specification, answer_of
from ziggurat.training.metrics.ranking import ranking_metrics
from ziggurat.training.metrics.scored_samples import ScoredSamples, ScoreScale, scored_samples


class OverRows(StrEnum):
    """Choices of the test that compares a metric of two models row by row."""

    NONE = "none"  # over seeds alone
    PLACEMENTS = "placements"  # DeLong's test
    SQUARED_ERRORS = "squared_errors"  # a paired test of the errors


@dataclass(frozen=True)
class Judged:
    """The samples of one label, and what several metrics take of them.

    Args:
        samples: checked scores, labels and weights.
        groups: (n,) whose sample each is, `NO_GROUP` for nobody's; None for data without groups.
        k: places that count.
    """

    samples: ScoredSamples
    groups: NDArray[np.int64] | None
    k: int

    @cached_property
    def ranking(self) -> dict[str, float]:
        """NDCG, recall and MRR of the groups, by their names at k; computed once for the three."""
        groups = self.known_groups
        has = self.samples_of_groups.weights > 0  # a sample without weight is nobody
        samples = self.samples_of_groups
        return ranking_metrics(samples.scores[has], samples.labels[has], groups[has], k=self.k)

    @cached_property
    def samples_of_groups(self) -> ScoredSamples:
        """The samples that are somebody's."""
        return self.samples if self.groups is None else self.samples.at(self.groups != NO_GROUP)

    @cached_property
    def known_groups(self) -> NDArray[np.int64]:
        """The groups of `samples_of_groups`."""
        return np.empty(0, np.int64) if self.groups is None else self.groups[self.groups != NO_GROUP]


class Metric(Specification, kind="metric"):
    """Say of one metric what it is, which way it improves and how it is shown.

    Attributes:
        shown: what people call it; its name where this is left out.
        task: of the labels that it judges.
        higher_is_better: None for one that is best in the middle: nothing is chosen by it.
        is_best_at_one: neither higher nor lower is better, but what is nearer to 1.
        needs_groups: it looks at the samples of each group (a user) for themselves.
        has_places: it looks at the first k places, and its name says how many.
        ranks_all: it is of a full ranking of all items (`full_ranking.py`), not of scored samples.
        decides: labels of its task, or full rankings, are judged by it unless the settings name another.
        is_loss: it is what training makes small, in its own unit.
        is_plotted: a report draws it over the steps.
        is_first_look: the line that ends a run has it.
        in_few_bits: a table of what row formats cost has a column for it.
        beside: name of the metric that a comparison shows beside it; "" for none.
        within_groups: name of the same metric inside each group; "" for none.
        over_rows: the test that compares two models on the same rows.
        floor: what it is without a model; None where nobody can say.
        below: what is wrong of a value below the floor.
        question: what to look for then, unless the rows give a reason.
    """

    shown: ClassVar[str] = ""
    task: ClassVar[Task] = USUAL
    higher_is_better: ClassVar[bool | None] = True
    is_best_at_one: ClassVar[bool] = False
    needs_groups: ClassVar[bool] = False
    has_places: ClassVar[bool] = False
    ranks_all: ClassVar[bool] = False
    decides: ClassVar[bool] = False
    is_loss: ClassVar[bool] = False
    is_plotted: ClassVar[bool] = False
    is_first_look: ClassVar[bool] = False
    in_few_bits: ClassVar[bool] = False
    beside: ClassVar[str] = ""
    within_groups: ClassVar[str] = ""
    over_rows: ClassVar[OverRows] = OverRows.NONE
    floor: ClassVar[float | None] = None
    below: ClassVar[str] = "worse than no model"
    question: ClassVar[str] = "does this split differ from the training rows?"

    @abstractmethod
    def compute(self, judged: Judged) -> float:
        """Compute it; NaN where it is undefined, as for no samples.

        Args:
            judged: the samples of one label whose task it judges.
        """

    def checked(self, judged: Judged) -> float:
        """Return `compute`, and refuse an answer that is no number.

        Raises:
            ConfigError: `compute` failed, or gave no number, or infinity.
        """
        where = f"metric {self}, {type(self).__module__}.{type(self).__qualname__}.compute"
        expected = f"a float from a metric, for {len(judged.samples.scores):,} samples; NaN where it is undefined"
        found = answer_of(lambda: self.compute(judged), expected=expected, where=where)
        try:
            return checked_value(found)
        except NotANumberError as error:
            raise ConfigError(
                expected=expected,
                found=str(error),
                where=where,
                ways_out="return float(…), or math.nan where nothing can be said",
            ) from error

    def try_out(self) -> None:
        """Try samples of both classes, of one, and none."""
        for num in (0, 1, 40):
            scores = np.linspace(0.0, 1.0, num)
            samples = scored_samples(scores, np.arange(num) % 2.0, task=self.task, scale=ScoreScale.ANY)
            judged = Judged(samples, np.arange(num, dtype=np.int64) // 8, 10)
            where = f"metric {self}, {type(self).__module__}.{type(self).__qualname__}.compute"
            expected = f"a float, which is NaN where the metric is undefined, as it may be of {num} samples"
            found = answer_of(partial(self.compute, judged), expected=expected, where=where)
            if not isinstance(found, float):
                raise ConfigError(
                    expected=expected,
                    found=f"{found!r}, of {num} samples",
                    where=where,
                    ways_out="return float(…)",
                )

    def name_at(self, k: int) -> str:
        """Return its name in results, without a label's."""
        return f"{self.name}@{k}" if self.has_places else self.name

    def most_lost(self, value: float, *, tolerance: float) -> float:
        """Return how much of it a change of a model's form may cost; infinity where it is not held to that.

        Args:
            value: of the model as it was trained.
            tolerance: of a metric between 0 and 1.
        """
        del value, tolerance
        return float("inf")

    @property
    def is_held(self) -> bool:
        """True if a change of a model's form may not make it worse by more than `most_lost`."""
        return math.isfinite(self.most_lost(1.0, tolerance=1.0))

    def loss_of(self, change: float) -> float:
        """Return how much worse it became.

        Args:
            change: its new value less the old one.
        """
        return -change if self.higher_is_better else change


class NotANumberError(TypeError):
    """An answer of a metric is no number, or infinity; the message says which."""


def checked_value(found: object) -> float:
    """Return the answer of a metric as a float.

    Args:
        found: a number of Python or NumPy, or an array or a tensor of one.

    Raises:
        NotANumberError: it is something else, or infinity.
    """
    number = found.item() if isinstance(found, np.ndarray | Tensor) and math.prod(found.shape) == 1 else found
    if not isinstance(number, Real):
        raise NotANumberError(f"{reprlib.repr(found)}, of type {type(found).__name__}")
    value = float(number)
    if math.isinf(value):
        raise NotANumberError(f"{value}")
    return value


def metric_of(name: str) -> Metric | None:
    """Return the metric of a name in results, with or without `@k` and `/label`; None for a function of the user's."""
    plain = name.partition("/")[0].partition("@")[0]
    return next((metric for metric in Metric if metric.name == plain), None)


def judging(task: Task, *, has_groups: bool) -> list[Metric]:
    """Return the metrics of scored samples of a task, in the order of results."""
    of_task = [metric for metric in _of(task) if not metric.ranks_all]
    return [metric for metric in of_task if has_groups or not metric.needs_groups]


def deciding(task: Task) -> Metric:
    """Return the metric that labels of a task are judged by, unless the settings name another."""
    return _first(task, lambda metric: metric.decides and not metric.ranks_all, what="decides = True")


def loss_metric(task: Task) -> Metric:
    """Return the metric that says what training makes small."""
    return _first(task, lambda metric: metric.is_loss, what="is_loss = True")


def held_in_few_bits(task: Task) -> list[Metric]:
    """Return the metrics of a task that a model in few bits must keep."""
    return [metric for metric in judging(task, has_groups=False) if metric.is_held]


def ranking_metric() -> Metric:
    """Return the metric that models which find items among all are judged by."""
    return next(metric for metric in Metric if metric.ranks_all and metric.decides)


def is_loss(name: str) -> bool:
    """Return whether a metric of that name is what training makes small, in its own unit."""
    metric = metric_of(name)
    return metric is not None and metric.is_loss


def with_floor(task: Task) -> Metric:
    """Return the metric of a task that says how far a model is above none."""
    return _first(task, lambda metric: metric.floor is not None, what="a floor")


def _of(task: Task) -> list[Metric]:
    """Return the metrics of a task: its own, then those of the task that it is judged like."""
    own = [metric for metric in Metric if metric.task is task]
    return own if task.judged_like is None else [*own, *_of(task.judged_like)]


def _first(task: Task, has: Callable[[Metric], bool], *, what: str) -> Metric:
    """Return the first metric of a task that has something."""
    found = next((metric for metric in _of(task) if has(metric)), None)
    if found is None:
        raise ConfigError(
            expected=f"a metric with {what} that judges labels of task {task}",
            found=", ".join(metric.name for metric in _of(task)) or "no metric of the task",
            where=f"task {task}, {type(task).__module__}.{type(task).__qualname__}",
            ways_out=("judged_like = Task.REGRESSION in the task", f"a Metric with task = Task.{task.name.upper()}"),
        )
    return found


def is_best_at_one(name: str) -> bool:
    """Return whether a metric is a known one that is better the nearer it is to 1, as calibration is."""
    metric = metric_of(name)
    return metric is not None and metric.is_best_at_one


def from_one(name: str) -> str:
    """Return the name under which differences of a metric's distances from 1 are kept."""
    return f"{name} from 1"


def has_direction(name: str) -> bool:
    """Return whether a metric is a known one that improves upwards or downwards."""
    metric = metric_of(name)
    return metric is not None and metric.higher_is_better is not None


def higher_is_better(name: str) -> bool:
    """Return True if a metric improves upwards.

    Args:
        name: as `MetricAccumulator.compute` returns it, with or without `/label`.

    Raises:
        ConfigError: the metric is unknown, or, like calibration, best in the middle.
    """
    metric = metric_of(name)
    if metric is None or metric.higher_is_better is None:
        directed = [each.name for each in Metric if each.higher_is_better is not None]
        raise ConfigError(
            expected="a metric with a direction: " + ", ".join(directed),
            found=repr(name) + ("" if metric is None else ", which is best in the middle"),
            where="choice of a metric to improve",
            ways_out=(
                "use log_loss or ece to watch calibration",
                "correct the name",
                "import the module that adds a metric of this name: ziggurat --extension MODULE …",
            ),
        )
    return metric.higher_is_better


def gain_over(name: str, value: float, reference: float) -> float:
    """Return how much better a value of a metric is than a reference, below 0 how much worse; NaN where none is better.

    Args:
        name: as `MetricAccumulator.compute` returns it; what is best at 1, as calibration, is better nearer to it.
        value: of a model; NaN where it has none.
        reference: the same of what it is compared with.
    """
    if is_best_at_one(name):
        return abs(reference - 1.0) - abs(value - 1.0)
    if not has_direction(name):
        return math.nan
    return value - reference if higher_is_better(name) else reference - value


def shown_name(name: str) -> str:
    """Return a metric's name for people: `log_loss/click` is "log loss of click", `ndcg@10` "NDCG at 10"."""
    plain, _, label = name.partition("/")
    metric = metric_of(plain)
    text = plain
    if metric is not None and metric.shown:
        places = plain.partition("@")[2]
        text = metric.shown + (f" at {places}" if places else "")
    return text + (f" of {label}" if label else "")
