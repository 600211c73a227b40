"""One line on how good a run is: what decided, a word of each label, a few more."""

from __future__ import annotations

from ziggurat.training.evaluation.evaluate import Evaluation, result_line


def names_of(metrics: dict[str, float], *, metric: str) -> list[str]:
    line = result_line(Evaluation(num_rows=10, metrics=metrics, curves={}), metric=metric)
    return [part.split()[0] for part in line.split("  ")]


CLICK = {"auc": 0.7, "log_loss": 0.5, "ne": 0.9, "calibration": 1.0, "ece": 0.1, "gauc": 0.6}


def test_one_label_has_the_metric_that_decided_and_three_more() -> None:
    assert names_of(CLICK, metric="auc") == ["auc", "log_loss", "calibration", "gauc"]
    assert names_of(CLICK, metric="ne") == ["ne", "auc", "log_loss", "calibration"]


def test_each_of_several_labels_has_a_word() -> None:
    """Of three labels the line had four metrics of the first."""
    metrics = {
        **{f"{name}/click": value for name, value in CLICK.items()},
        **{f"{name}/bought": value for name, value in CLICK.items()},
        "rmse/minutes": 3.0,
        "mae/minutes": 2.0,
    }
    assert names_of(metrics, metric="auc/click") == ["auc/click", "auc/bought", "rmse/minutes", "log_loss/click"]
    assert names_of(metrics, metric="mae/minutes") == ["mae/minutes", "auc/click", "auc/bought", "log_loss/click"]


def test_of_many_labels_eight_have_one() -> None:
    metrics = {f"auc/label{number}": 0.5 for number in range(20)}
    assert names_of(metrics, metric="auc/label15") == ["auc/label15", *(f"auc/label{number}" for number in range(7))]
