"""The demo of long histories: SASRec and HSTU on MovieLens-1M, ranked against all films, with lists to look at.

    events ─► histories, leave one out ─┬─► movielens_sasrec ─┐
                                        └─► movielens_hstu ───┴─► recall, NDCG, MRR, coverage of the test; plots;
                                                                  what each would show next to three people

Ten epochs each, while the learning rate falls to 0: a quarter of what `ziggurat train movielens_hstu` takes, and enough
to see them part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl
from matplotlib.figure import Figure

from ziggurat.data.datasets import fetch
from ziggurat.features.events import NEXT_ITEM
from ziggurat.features.inputs import LabelSpec
from ziggurat.files import write_figure
from ziggurat.recipes.catalogue import recipe_named
from ziggurat.runs.execute import train_run
from ziggurat.runs.load import load_run
from ziggurat.training.metrics.full_ranking import REPEATED, full_ranking_names
from ziggurat.training.records.log import read_records
from ziggurat.training.records.run_folder import RunFolder
from ziggurat.training.report.progress import Progress

RECIPES = {"SASRec": "movielens_sasrec", "HSTU": "movielens_hstu"}
METRICS = tuple(name for name in full_ranking_names([LabelSpec(name=NEXT_ITEM)], ks=(10,)) if name != REPEATED)
PEOPLE = (1, 23, 4169)
EPOCHS = 10


@dataclass(frozen=True, kw_only=True)
class Shown:
    """The items that a person saw last, and those that each model would show next.

    Args:
        user: the person.
        last: the latest items, latest last.
        answers: items by model, best first.
    """

    user: int
    last: tuple[str, ...]
    answers: dict[str, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class SequenceDemo:
    """Rows of the demo's table, its plot, reports, and lists."""

    rows: list[tuple[str, ...]]
    plot: Path
    reports: dict[str, Path]
    shown: list[Shown]


def run_sequence_demo(folder: Path, *, epochs: int = EPOCHS, progress: Progress) -> SequenceDemo:
    """Train both models side by side, or go on with runs that are there.

    Args:
        folder: of the runs.
        epochs: passes over the training data.
        progress: where to say what happens.
    """
    rows: list[tuple[str, ...]] = []
    reports: dict[str, Path] = {}
    for name, recipe in RECIPES.items():
        progress.say(f"\n{name}")
        run = folder / recipe
        config = recipe_named(recipe)
        config = replace(config, training=replace(config.training, epochs=epochs, evaluate_every=0))
        result = train_run(config, folder=run, resume=(run / "config.json").exists(), progress=progress)
        metrics = result.evaluations["test"].metrics
        rate = f"{result.fit.samples_per_s:,.0f}" if result.fit.samples_per_s else "–"
        rows.append((name, *(f"{metrics[metric]:.4f}" for metric in METRICS), rate))
        reports[name] = result.report
    return SequenceDemo(rows=rows, plot=_plot(folder), reports=reports, shown=_shown(folder))


def _plot(folder: Path) -> Path:
    """Validation of both models over epochs."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, metric in zip(figure.subplots(1, 2), METRICS[:2], strict=True):
        for name, recipe in RECIPES.items():
            records = [each for each in read_records(RunFolder(folder / recipe).metrics) if each["kind"] == "valid"]
            axes.plot([each["epoch"] for each in records], [each[metric] for each in records], marker="o", label=name)
        axes.set(xlabel="epoch", title=f"{metric} of validation, all films ranked", ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
    path = folder / "sequences.png"
    write_figure(figure, path, dpi=120)
    return path


def _shown(folder: Path) -> list[Shown]:
    log = pl.read_parquet(fetch("movielens-1m-events"), columns=["user_id", "movie_id", "timestamp"])
    log = log.filter(pl.col("user_id").is_in(PEOPLE))
    found = {name: load_run(folder / recipe).next_items(log, k=5) for name, recipe in RECIPES.items()}
    shown = []
    for user in PEOPLE:
        own = log.filter(pl.col("user_id") == user).sort("timestamp", maintain_order=True)
        answers = {
            name: tuple(frame.filter(pl.col("user_id") == str(user))["movie_id"].to_list())
            for name, frame in found.items()
        }
        shown.append(Shown(user=user, last=tuple(own["movie_id"].tail(5).to_list()), answers=answers))
    return shown
