"""Which metric an evaluation is judged by: checked against the labels before anything is read, and chosen if left open.

`auto` follows the task of the first label: AUC for a binary one, RMSE for regression (the order of the squared error
that is trained). With several labels a metric carries the label's name, `auc/click`; `auto` takes the first label's,
as a mean over tasks would let the one with the noisiest metric decide.

A name is refused where the evaluation would not have it: `auc` for a number, `gauc` without a group, `auc` without the
label's name where there are several, `calibration`, which is best in the middle.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from ziggurat.errors import ConfigError
from ziggurat.features.inputs import LabelSpec
from ziggurat.features.schema import Label, Task
from ziggurat.training.config import AUTO_METRIC, EarlyStopConfig
from ziggurat.training.metrics import higher_is_better, metric_names


def stop_metric(config: EarlyStopConfig, *, labels: Sequence[Label | LabelSpec], has_groups: bool) -> str:
    """The name of the metric that decides.

    Args:
        config: settings.
        labels: of the data, at least one.
        has_groups: whether the samples have groups.

    Raises:
        ConfigError: the evaluation of these labels has no such metric, or it has no direction.
    """
    if config.metric == AUTO_METRIC:
        metric = "auc" if labels[0].task is Task.BINARY else "rmse"
        return f"{metric}/{labels[0].name}" if len(labels) > 1 else metric
    known = [name for name in metric_names(labels, has_groups=has_groups) if not name.startswith("calibration")]
    if config.metric in known:
        higher_is_better(config.metric)
        return config.metric
    near = [name for name in known if name.partition("/")[0] == config.metric]
    near = near or difflib.get_close_matches(config.metric, known, n=2)
    tasks = ", ".join(f"{label.name!r} ({label.task.value})" for label in labels)
    raise ConfigError(
        expected="a metric of the evaluation with a direction: " + ", ".join(known),
        found=f"{config.metric!r}, for {'labels' if len(labels) > 1 else 'label'} {tasks}"
        + ("" if has_groups else ", without a group"),
        where="training settings, early-stop.metric",
        ways_out=[f"--training.early-stop.metric {name}" for name in [*near[:2], AUTO_METRIC]],
    )
