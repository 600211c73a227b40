"""Which metric an evaluation is judged by: checked against the labels before anything is read, and chosen if left open.

`auto` follows the task of the first label: AUC for a binary one, RMSE for regression (the order of the squared error
that is trained). For a model that finds items it is recall in a full ranking of all items. With several labels a metric
carries the label's name, `auc/click`; `auto` takes the first label's, as a mean over tasks would let the one with the
noisiest metric decide.

A name is refused where the evaluation would not have it: `auc` for a number, `gauc` without a group, `auc` without the
label's name where there are several, `calibration`, which is best in the middle. Of a metric of the user's own,
`early-stop.better` says the direction.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from ziggurat.commands import pasted
from ziggurat.errors import ConfigError, nearest_names
from ziggurat.features.inputs import InputSpec, LabelSpec
from ziggurat.features.schema import Label
from ziggurat.training.config import AUTO_METRIC, Better, EarlyStopConfig, TrainingConfig
from ziggurat.training.metrics.accumulator import has_metrics, metric_names
from ziggurat.training.metrics.metric import deciding, has_direction, higher_is_better, metric_of


def improves_upwards(config: EarlyStopConfig) -> bool:
    """Return True if the metric that decides is better when it is higher."""
    return higher_is_better(config.metric) if config.better is Better.AUTO else config.better is Better.HIGHER


def is_improvement(value: float, best: float, *, stop: EarlyStopConfig, is_equal_enough: bool = False) -> bool:
    """Return whether a value of the metric that decides is better than the best one before it.

    Args:
        value: finite.
        best: the value to beat.
        stop: names the metric, and how much is an improvement.
        is_equal_enough: an equal value takes the place of the best one.
    """
    gain = (value - best) * (1.0 if improves_upwards(stop) else -1.0)
    if is_equal_enough:
        return gain > -stop.min_delta or gain == 0.0
    return gain >= stop.min_delta and gain > 0.0  # min_delta may be 0, and an equal value is no improvement


def best_of(evaluations: Iterable[tuple[int, float]], *, stop: EarlyStopConfig) -> int:
    """Return the step of the best evaluation, by the rule of training: of equal ones the first; 0 without any.

    Args:
        evaluations: step and value of the metric that decides, in the order of steps; what is NaN is left out.
        stop: as training has it.
    """
    found = 0
    best = math.nan
    for step, value in evaluations:
        if math.isfinite(value) and (not found or is_improvement(value, best, stop=stop)):
            found = step
            best = value
    return found


def stop_metric(
    config: EarlyStopConfig,
    *,
    labels: Sequence[Label | LabelSpec],
    has_groups: bool,
    own: Iterable[str] = (),
    more: Sequence[str] = (),
) -> str:
    """The name of the metric that decides.

    Args:
        config: settings.
        labels: of the data, at least one.
        has_groups: whether the samples have groups.
        own: names of the user's own metrics.
        more: names of further metrics that the evaluation has, of full ranking; the first is then taken for `auto`.

    Raises:
        ConfigError: the evaluation of these labels has no such metric, or it has no direction.
    """
    # A model that finds items is judged by what it finds among all, not by its scores of given ones.
    if config.metric == AUTO_METRIC and more:
        return more[0]
    if config.metric == AUTO_METRIC:
        return _metric_of(_first_judged(labels), several=len(labels) > 1)
    known = [name for name in (*metric_names(labels, has_groups=has_groups), *more) if has_direction(name)]
    # The user's own stand behind all others; nobody but the user knows which way they improve.
    mine = metric_names(labels, has_groups=has_groups, own=own)[len(metric_names(labels, has_groups=has_groups)) :]
    if config.metric in mine:
        if config.better is Better.AUTO:
            raise _no_direction(config.metric)
        return config.metric
    if config.metric in known:
        if improves_upwards(config) is not higher_is_better(config.metric):
            raise _wrong_direction(config)
        return config.metric
    known += mine
    # With several labels `auc` alone is no name: those of each label come before names that are spelt alike.
    near = [name for name in known if name.partition("/")[0] == config.metric]
    near = near or nearest_names(config.metric, known, most=2)
    tasks = ", ".join(f"{label.name!r} ({label.task.value})" for label in labels)
    raise ConfigError(
        expected="a metric of the evaluation with a direction: " + ", ".join(known),
        found=f"{config.metric!r}, for {'labels' if len(labels) > 1 else 'label'} {tasks}"
        + ("" if has_groups else ", without a group"),
        where="training settings, early-stop.metric",
        ways_out=[
            *(f"--training.early-stop.metric {pasted(name)}" for name in [*near[:2], AUTO_METRIC]),
            "load the module that adds a metric of this name, as where the run began: ziggurat --extension MODULE …",
        ],
    )


def with_stop_metric(
    config: TrainingConfig, inputs: InputSpec, *, own: Iterable[str] = (), more: Sequence[str] = ()
) -> TrainingConfig:
    """The settings with the metric that decides in the place of `auto`; see `stop_metric`."""
    stop = config.early_stop
    metric = stop_metric(stop, labels=inputs.labels, has_groups=inputs.has_groups, own=own, more=more)
    return dataclasses.replace(config, early_stop=dataclasses.replace(stop, metric=metric))


def decision_lines(
    config: EarlyStopConfig, *, asked: EarlyStopConfig, inputs: InputSpec, num_rows: int
) -> dict[str, str]:
    """Say what decides which checkpoint is the best and when training ends, for the start-up report.

    Args:
        config: with the metric that decides.
        asked: as it was given, perhaps with `auto`.
        inputs: of the model.
        num_rows: of the validation data.
    """
    if not num_rows:
        return {"best checkpoint": "the last one: there are no validation rows", "early stop": "never, likewise"}
    direction = "higher is better" if improves_upwards(config) else "lower is better"
    known = "as is known of it" if config.better is Better.AUTO else "as early-stop.better says"
    several = len(inputs.labels) > 1
    why = "as the settings say"
    if asked.metric == AUTO_METRIC and not _ranks_all(config.metric):
        first = _first_judged(inputs.labels)
        why = f"chosen because the {'first ' if several else ''}label {first.name!r} {first.task.shown}"
    elif asked.metric == AUTO_METRIC:
        why = "chosen because the model finds items among all"
    stop = "never before the last epoch (patience 0)"
    if config.patience:
        stop = f"after {config.patience} evaluations in a row that do not improve it by {config.min_delta:g}"
        stop += f", not before step {config.min_steps:,}" if config.min_steps else ""
    return {
        "best checkpoint": f"by {config.metric} of {num_rows:,} validation rows, {direction} ({known}); {why}",
        "early stop": stop,
    }


def _ranks_all(name: str) -> bool:
    metric = metric_of(name)
    return metric is not None and metric.ranks_all


def _metric_of(label: Label | LabelSpec, *, several: bool) -> str:
    metric = deciding(label.task).name
    return f"{metric}/{label.name}" if several else metric


def _first_judged(labels: Sequence[Label | LabelSpec]) -> Label | LabelSpec:
    """The first label that has metrics without full ranking."""
    for label in labels:
        if has_metrics(label):
            return label
    raise ConfigError(
        expected="a label that is not always positive, or a model that finds items and is judged by full ranking",
        found=", ".join(f'label {label.name!r}, outcomes = "positive_only"' for label in labels),
        where="training settings, early-stop.metric auto",
        ways_out=(
            "train a model that finds items: ziggurat train table_two_tower",
            "add rows with label 0, and take outcomes out of the label",
            "a metric function of your own decides: --training.early-stop.metric NAME",
        ),
    )


def _no_direction(metric: str) -> ConfigError:
    return ConfigError(
        expected="the direction in which a metric of your own improves",
        found=f"none for {metric!r}",
        where="training settings, early-stop.better",
        ways_out=("--training.early-stop.better higher", "--training.early-stop.better lower"),
    )


def _wrong_direction(config: EarlyStopConfig) -> ConfigError:
    return ConfigError(
        expected=f"the direction in which {config.metric!r} improves",
        found=config.better.value,
        where="training settings, early-stop.better",
        ways_out="leave it out: those of the built-in metrics are known",
    )
