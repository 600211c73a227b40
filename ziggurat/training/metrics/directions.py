"""Which metrics improve upwards: what early stopping, comparisons and searches go by."""

from __future__ import annotations

from ziggurat.errors import ConfigError

_HIGHER_IS_BETTER = {
    "auc": True,
    "gauc": True,
    "accuracy": True,
    "ndcg": True,
    "recall": True,
    "mrr": True,
    "r2": True,
    "full_recall": True,
    "full_ndcg": True,
    "full_mrr": True,
    "log_loss": False,
    "ne": False,
    "ece": False,
    "rmse": False,
    "mae": False,
}


def has_direction(metric: str) -> bool:
    """Return whether a metric is a known one that improves upwards or downwards."""
    return metric.partition("/")[0].partition("@")[0] in _HIGHER_IS_BETTER


def higher_is_better(metric: str) -> bool:
    """Return True if a metric improves upwards.

    Args:
        metric: a name as `MetricAccumulator.compute` returns it, with or without `/label`.

    Raises:
        ConfigError: the metric is unknown, or, like calibration, best in the middle.
    """
    name = metric.partition("/")[0].partition("@")[0]
    if name not in _HIGHER_IS_BETTER:
        raise ConfigError(
            expected="a metric with a direction: " + ", ".join(_HIGHER_IS_BETTER),
            found=repr(metric) + (", which is best at 1" if name == "calibration" else ""),
            where="choice of a metric to improve",
            ways_out=("use log_loss or ece to watch calibration", "correct the name"),
        )
    return _HIGHER_IS_BETTER[name]
