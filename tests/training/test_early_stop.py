"""The metric of early stop is checked before anything is read, and follows the task if it is left open."""

import pytest

from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.splits import SplitBy, SplitConfig
from ziggurat.errors import ConfigError
from ziggurat.features.inputs import InputSpec, LabelSpec
from ziggurat.features.schema import Categorical, Label, Outcomes, Schema, Task
from ziggurat.recipes.catalogue import recipe_named
from ziggurat.training.config import Better, EarlyStopConfig, TrainingConfig
from ziggurat.training.early_stop import best_of, decision_lines, is_improvement, stop_metric
from ziggurat.training.metrics.accumulator import metric_names
from ziggurat.training.metrics.suspicion import suspicious

CLICK, BUY = Label(name="click"), Label(name="buy")
CHOSEN = Label(name="chosen", outcomes=Outcomes.POSITIVE_ONLY)
PRICE = Label(name="price", task=Task.REGRESSION)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ((CLICK,), "auc"),
        ((PRICE,), "rmse"),
        ((CLICK, PRICE), "auc/click"),
        ((PRICE, CLICK), "rmse/price"),
        ((Label(name="next_item"),), "auc"),
        ((CHOSEN, PRICE), "rmse/price"),
    ],
)
def test_auto_follows_the_first_label(labels: tuple[Label, ...], expected: str):
    assert TrainingConfig().early_stop.metric == "auto"
    assert stop_metric(EarlyStopConfig(), labels=labels, has_groups=False) == expected


@pytest.mark.parametrize(
    ("metric", "labels", "has_groups", "way_out"),
    [
        ("auc", (PRICE,), False, "early-stop.metric auto"),
        ("auc", (CLICK, BUY), False, "early-stop.metric auc/click"),
        ("gauc", (CLICK,), False, "without a group"),
        ("acu", (CLICK,), False, "early-stop.metric auc"),
        ("mine", (CLICK,), False, "ziggurat --extension MODULE"),
        ("auc/by", (CLICK, BUY), False, "early-stop.metric auc/buy"),
        ("calibration", (CLICK,), True, "with a direction"),
    ],
)
def test_a_metric_that_the_evaluation_has_not_is_refused(metric, labels, has_groups, way_out):
    with pytest.raises(ConfigError, match=way_out):
        stop_metric(EarlyStopConfig(metric=metric), labels=labels, has_groups=has_groups)
    assert stop_metric(EarlyStopConfig(metric="gauc"), labels=(CLICK,), has_groups=True) == "gauc"


def test_a_label_that_is_always_positive_alone_has_no_metric_and_one_of_any_name_has():
    assert "auc" in metric_names([Label(name="next_item")], has_groups=False)
    assert metric_names([CHOSEN], has_groups=True) == []
    with pytest.raises(ConfigError, match="positive_only"):
        stop_metric(EarlyStopConfig(), labels=(CHOSEN,), has_groups=False)
    assert stop_metric(EarlyStopConfig(), labels=(CHOSEN,), has_groups=False, more=["full_mrr"]) == "full_mrr"


def test_a_run_is_refused_before_the_first_file_is_read():
    schema = Schema(features=(Categorical(name="user"),), labels=(PRICE,))
    config = recipe_named("table_logistic_regression", schema=schema)
    config.check()
    with pytest.raises(ConfigError, match=r"early-stop\.metric"):
        type(config)(
            data=DataConfig(train=("absent.csv",), split=SplitConfig(by=SplitBy.RANDOM)),
            table_schema=schema,
            model=config.model,
            training=TrainingConfig(early_stop=EarlyStopConfig(metric="auc")),
        ).check()


def test_results_that_need_a_second_look():
    metrics = {"auc": 0.9969, "auc/buy": 0.48, "gauc": 0.1, "ne": 0.1}
    first, second = suspicious(metrics, split="test")
    assert first.startswith("test auc is 0.99690")
    assert "worse than chance" in second
    assert suspicious({"auc": 0.7, "auc/buy": float("nan")}, split="test") == []


def test_the_start_up_report_says_what_decides_and_why():
    number = Label(name="dwell", task=Task.REGRESSION)
    inputs = InputSpec(dense=("x",), labels=(LabelSpec(name="click"), LabelSpec(name="dwell", task=number.task)))
    lines = decision_lines(
        EarlyStopConfig(metric="auc/click", patience=2), asked=EarlyStopConfig(), inputs=inputs, num_rows=1234
    )
    assert lines == {
        "best checkpoint": "by auc/click of 1,234 validation rows, higher is better (as is known of it); "
        "chosen because the first label 'click' is binary",
        "early stop": "after 2 evaluations in a row that do not improve it by 1e-06",
    }
    own = EarlyStopConfig(metric="revenue", better=Better.LOWER)
    lines = decision_lines(own, asked=own, inputs=inputs, num_rows=5)
    assert "lower is better (as early-stop.better says); as the settings say" in lines["best checkpoint"]
    assert "patience 0" in lines["early stop"]
    assert "no validation rows" in decision_lines(own, asked=own, inputs=inputs, num_rows=0)["best checkpoint"]


@pytest.mark.parametrize("min_delta", [0.0, 1e-6])
def test_of_equal_values_the_first_is_the_best_whatever_counts_as_an_improvement(min_delta: float) -> None:
    stop = EarlyStopConfig(metric="auc", min_delta=min_delta)
    assert best_of([(1, 0.5), (2, 0.5), (3, 0.4)], stop=stop) == 1
    assert best_of([(1, 0.5), (2, 0.6), (3, 0.6)], stop=stop) == 2
    assert is_improvement(0.5, 0.5, stop=stop, is_equal_enough=True)
    assert not is_improvement(0.4, 0.5, stop=stop, is_equal_enough=True)
