"""The demo: MovieLens-1M from raw files to a comparison of models, each with its report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ziggurat.models import num_parameters
from ziggurat.recipes.catalogue import recipe_named
from ziggurat.runs.data_record import rows_of_split
from ziggurat.runs.execute import prepare_run, train_run
from ziggurat.runs.load import load_run
from ziggurat.runs.quality.baselines import Popularity
from ziggurat.training.evaluation.evaluate import ordered_batches
from ziggurat.training.report.progress import Progress


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """Rows of the demo's table, and where the reports are."""

    rows: list[tuple[str, ...]]
    num_test_rows: int
    reports: dict[str, Path]


def run_demo(folder: Path, *, progress: Progress) -> DemoResult:
    """Train logistic regression, DLRM and DCNv2 on MovieLens-1M and compare them with popularity.

    A model that was trained in `folder` before is resumed (a finished one only evaluated again).
    """
    prepared = prepare_run(recipe_named("movielens_dlrm"), progress=progress)
    test = rows_of_split(prepared, "test", run=folder)
    train = ordered_batches(prepared.train, batch_size=65_536).batches(epoch=0)
    popularity = Popularity.fit(train, inputs=prepared.inputs, feature="movie_id")
    baseline = popularity.auc(ordered_batches(test, batch_size=65_536).batches(epoch=0))
    rows = [("popularity of the movie", f"{baseline:.4f}", "–", "–", "–", "–")]
    reports: dict[str, Path] = {}
    for name, recipe in {
        "logistic regression": "movielens_logistic_regression",
        "DLRM": "movielens_dlrm",
        "DCNv2": "movielens_dcn_v2",
    }.items():
        progress.say(f"\n{name}")
        run = folder / recipe
        result = train_run(recipe_named(recipe), folder=run, resume=(run / "config.json").exists(), progress=progress)
        metrics = result.evaluations["test"].metrics
        weights = num_parameters(load_run(run).model).total
        rate = f"{result.fit.samples_per_s:,.0f}" if result.fit.samples_per_s else "–"
        shown = (f"{metrics['auc']:.4f}", f"{metrics['log_loss']:.4f}", f"{metrics['calibration']:.3f}")
        rows.append((name, *shown, f"{weights:,}", rate))
        reports[name] = result.report
    return DemoResult(rows=rows, num_test_rows=test.num_rows, reports=reports)
