"""The report of a run: title, best step, curves that are not zoomed into noise, settings that differ from defaults."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
from matplotlib.figure import Figure

from ziggurat.config import to_json
from ziggurat.recipes.catalogue import recipe_named
from ziggurat.training.records.run_folder import CONFIG, EVALUATION, STARTUP, RunFolder
from ziggurat.training.report import page as report_page
from ziggurat.training.report import windows
from ziggurat.training.report.page import best_step, changed_settings, dated, title_of, write_report
from ziggurat.training.report.plots import axis_limits, calibration_figure, training_figures
from ziggurat.training.report.startup import flat_lines

RECORDS: list[dict[str, Any]] = [
    {"kind": "train", "step": 50, "loss": 0.6, "lr": 0.001, "timing": {"samples_per_s": 1000.0}},
    {"kind": "valid", "step": 60, "auc": 0.70, "log_loss": 0.55},
    {"kind": "train", "step": 100, "loss": 0.5, "lr": 0.001, "timing": {"samples_per_s": 900.0}},
    {"kind": "valid", "step": 120, "auc": 0.72, "log_loss": 0.56},
    {"kind": "valid", "step": 180, "auc": 0.71, "log_loss": 0.58},
]


def by_title(records: list[dict[str, Any]], **given: int):
    return {figure.axes[0].get_title(loc="left"): figure.axes[0] for figure in training_figures(records, **given)}


def test_training_stands_beside_validation_and_the_best_step_is_marked() -> None:
    axes = by_title(RECORDS, best_step=120)
    assert [line.get_label() for line in axes["Loss"].lines] == ["training", "validation", "best: step 120"]
    assert list(axes["Loss"].lines[1].get_ydata()) == [0.55, 0.56, 0.58]
    assert list(axes["Validation AUC"].lines[-1].get_xdata()) == [120, 120]


def test_a_single_point_is_drawn_and_a_constant_curve_is_not_zoomed() -> None:
    axes = by_title(RECORDS[:2])
    assert axes["Validation AUC"].lines[0].get_marker() == "o"
    low, high = by_title(RECORDS)["Learning rate of the dense network"].get_ylim()
    assert low == pytest.approx(0.000995)
    assert high == pytest.approx(0.001005)
    assert axis_limits([0.7, 0.7 + 1e-9]) is not None
    assert axis_limits([0.7, 0.75]) is None


def test_the_best_step_is_by_the_metric_of_the_run() -> None:
    assert best_step(RECORDS, {}) == 120
    by_loss = {"training": {"early_stop": {"metric": "log_loss"}}}
    assert best_step(RECORDS, by_loss) == 60
    assert best_step([], {}) == 0


@pytest.mark.draws
def test_the_page(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    config = to_json(recipe_named("movielens_dlrm"))
    CONFIG.write(run.config, config)
    STARTUP.write(run.startup, {"Data": {"split": "by time column 't': valid from 975768748, test from 978133414"}})
    metrics = {"auc": 0.71234, "log_loss": 0.55, "ne": 0.9}
    found = {"num_rows": 1234, "metrics": metrics, "curves": {}, "half_widths": {"auc": 0.0123}}
    EVALUATION.write(run.evaluation("test"), found)
    run.metrics.write_text("".join(f"{line}\n" for line in map(json.dumps, RECORDS)))
    page = write_report(run.path).read_text()
    assert "0.71234 ± 0.01230" in page
    for words in ("<h1>dlrm on movielens-1m</h1>", "best at step 120", "0.71234", "1,234", "2000-12-02", "UTC ·"):
        assert words in page, words
    assert "<td>--training.early-stop.patience<td>1<td>0" in page
    assert page.count("<svg ") == page.count(">best: step 120<") == len(by_title(RECORDS))
    assert write_report(run.path).read_text() == page, "no date, and no ids that change"
    assert "975768748" not in page


@pytest.mark.draws
def test_a_figure_that_is_drawn_once_is_that_of_savefig() -> None:
    def figures() -> list[Figure]:
        points = [{"mean_score": x, "mean_label": x * x, "standard_error": 0.1} for x in (0.1, 0.5, 0.9)]
        many = {str(index): [0.1, float(index)] for index in range(9)}  # their legend stands beside the plot
        beside = windows._figure(["2026-01-01", "2026-01-02"], many, title="NE", unit="NE")
        return [*training_figures(RECORDS), calibration_figure({"x": points}, title="Calibration"), beside]

    for ours, other in zip(figures(), figures(), strict=True):
        buffer = io.StringIO()
        with mpl.rc_context({"svg.hashsalt": "ziggurat", "svg.fonttype": "none"}):
            other.savefig(buffer, format="svg", metadata={"Date": None})
        drawn = report_page.figure_svg(ours).removeprefix("<figure style='margin:0'>").removesuffix("</figure>")
        assert drawn.startswith("<svg ")
        assert buffer.getvalue().endswith(drawn)


def test_titles_and_dates() -> None:
    run = RunFolder(Path("runs/shop"))
    config = {"model": {"kind": "dnn"}, "data": {"train": ["a/shop.csv"]}}
    assert title_of(run, config) == "dnn on shop.csv"
    assert title_of(run, {}) == "shop"
    assert dated("test from 978133414, 1234567890 rows") == "test from 2000-12-29 23:43:34 UTC, 1234567890 rows"


def test_lists_of_groups_are_words_in_the_start_up_report() -> None:
    report = {"kernel": "cpp", "storages": [{"dim": 16, "rows": 3}, {"dim": 4}], "tried": {"fbgemm": ["a", 2]}}
    expected = [("kernel", "cpp"), ("storages", "dim 16 rows 3, dim 4"), ("tried fbgemm", "a, 2")]
    assert flat_lines(report) == expected


def test_only_what_differs_from_the_defaults() -> None:
    rows = changed_settings(to_json(recipe_named("movielens_dlrm")))
    changed = {name: (value, default) for name, value, default in rows}
    assert changed["training.epochs"] == ("5", "1")
    assert "training.learning-rate" not in changed
    assert changed["model.top.dropout"] == ("0.2", "0.0")
