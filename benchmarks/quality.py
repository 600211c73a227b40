"""Quality on real data: every model with several seeds on fixed splits, mean ± sd; test data is read once a run.

    MovieLens-1M   time split; popularity and logistic regression beside DLRM and DCNv2
    Frappe_x1      BARS protocol; published DCNv2 0.98382 ± 0.00049 (five runs)
    synthetic      the best reachable AUC is known

Finished runs are kept in `runs/quality` and not trained again, so the benchmark can be stopped and taken up.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.harness import ROOT
from benchmarks.report import Report
from ziggurat.data.synthetic.teacher import SyntheticTeacher
from ziggurat.recipes.catalogue import recipe_named
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs.execute import prepare_run, train_run
from ziggurat.runs.quality.baselines import Popularity
from ziggurat.training.evaluation.evaluate import ordered_batches
from ziggurat.training.metrics.accumulator import auc
from ziggurat.training.report.progress import show_progress

SEEDS = {
    "movielens_logistic_regression": 3,
    "movielens_dlrm": 5,
    "movielens_dcn_v2": 5,
    "frappe_bars_dcn_v2": 5,
    "synthetic_dlrm": 3,
    "synthetic_dcn_v2": 3,
}
PUBLISHED = {"frappe_bars_dcn_v2": "0.98382 ± 0.00049"}
COLUMNS = ("auc", "log_loss", "ne", "calibration")


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Test metrics of one recipe over seeds."""

    recipe: str
    metrics: list[dict[str, float]]
    steps: list[int]

    def mean_sd(self, name: str) -> tuple[float, float]:
        """Mean and sample standard deviation over seeds."""
        values = [run[name] for run in self.metrics]
        return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else float("nan")


def seeded(config: RunConfig, seed: int) -> RunConfig:
    """The same run with another seed for weights, dropout and order, on one thread; splits stay as they are."""
    loader = replace(config.training.loader, seed=seed)
    return replace(config, training=replace(config.training, seed=seed, threads=1, loader=loader))


def with_source(config: RunConfig, frappe: Path | None) -> RunConfig:
    """Point the Frappe recipes at the folder of the published files."""
    if config.dataset.name != "frappe" or frappe is None:
        return config
    return replace(config, dataset=replace(config.dataset, source=str(frappe)))


def measure(recipe: str, *, seeds: int, out: Path, frappe: Path | None) -> Quality:
    """Train `recipe` with seeds 0 … seeds−1, or take up what is there."""
    metrics: list[dict[str, float]] = []
    steps: list[int] = []
    for seed in range(seeds):
        config = seeded(with_source(recipe_named(recipe), frappe), seed)
        folder = out / f"{recipe}_seed{seed}"
        progress = show_progress()
        progress.say(f"\n{recipe}, seed {seed}")
        result = train_run(config, folder=folder, resume=(folder / "config.json").exists(), progress=progress)
        metrics.append(result.evaluations["test"].metrics)
        steps.append(result.fit.best_step)
    return Quality(recipe=recipe, metrics=metrics, steps=steps)


def popularity() -> float:
    """Test AUC of the movies' smoothed share of likes in the training data."""
    prepared = prepare_run(recipe_named("movielens_dlrm"))
    assert prepared.test is not None
    train = ordered_batches(prepared.train, batch_size=65_536).batches(epoch=0)
    model = Popularity.fit(train, inputs=prepared.inputs, feature="movie_id")
    return model.auc(ordered_batches(prepared.test, batch_size=65_536).batches(epoch=0))


def best_synthetic_auc() -> float:
    """AUC of the teacher's own probabilities on the very test rows of the recipe: no model can expect more."""
    config = recipe_named("synthetic_dlrm")
    assert config.teacher is not None
    test = prepare_run(config).test
    assert test is not None
    batches = list(ordered_batches(test, batch_size=65_536).batches(epoch=0))
    rows = torch.cat([batch.row_ids for batch in batches]).numpy()
    labels = torch.cat([batch.labels[:, 0] for batch in batches])
    probabilities = SyntheticTeacher(config.teacher).probabilities(config.dataset.rows)
    return auc(probabilities[0, rows], labels)


def table(results: Sequence[Quality], *, notes: dict[str, str]) -> str:
    """Markdown: one row a recipe."""
    lines = ["| recipe | seeds | " + " | ".join(f"test {name}" for name in COLUMNS) + " | compare with |"]
    lines.append("|---|---:|" + "---:|" * len(COLUMNS) + "---|")
    for result in results:
        cells = []
        for name in COLUMNS:
            mean, deviation = result.mean_sd(name)
            cells.append(f"{mean:.5f} ± {deviation:.5f}")
        note = notes.get(result.recipe, "")
        lines.append(f"| {result.recipe} | {len(result.metrics)} | " + " | ".join(cells) + f" | {note} |")
    return "\n".join(lines)


def run(*, quick: bool = False) -> Report:
    """All recipes (one seed each if quick); Frappe only where its published files lie beside the checkout."""
    frappe = ROOT.parent / "shared" / "data" / "frappe"
    out = ROOT / "runs" / ("quality_quick" if quick else "quality")
    report = Report(
        benchmark="quality",
        claim="Test metrics on real data, mean ± standard deviation over seeds; test data is read once a run.",
        command="ziggurat bench quality",
    )
    notes = {name: f"published {value}" for name, value in PUBLISHED.items()}
    best = best_synthetic_auc()
    notes |= dict.fromkeys(("synthetic_dlrm", "synthetic_dcn_v2"), f"best reachable AUC {best:.5f}")
    notes["movielens_dlrm"] = notes["movielens_dcn_v2"] = f"popularity {popularity():.5f}"
    results: list[Quality] = []
    for recipe, seeds in SEEDS.items():
        if recipe.startswith("frappe") and not frappe.is_dir():
            report.skipped.append(f"{recipe}: the published Frappe files are not at ../shared/data/frappe")
            continue
        results.append(measure(recipe, seeds=1 if quick else seeds, out=out, frappe=frappe))
    report.tables.append(table(results, notes=notes))
    report.extra["recipes"] = {
        result.recipe: {"test": result.metrics, "best_step": result.steps, "compare": notes.get(result.recipe, "")}
        for result in results
    }
    return report
