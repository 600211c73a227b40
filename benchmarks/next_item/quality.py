"""Runs of next-item recipes over seeds: train what is missing, read what is finished, and say mean and deviation."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.harness import ROOT
from benchmarks.quality import seeded
from benchmarks.tower_quality import comparable
from ziggurat.data.encoded.loader import Shuffle
from ziggurat.errors import ConfigError
from ziggurat.recipes.catalogue import recipe_named
from ziggurat.recipes.run_config import RunConfig, load_config
from ziggurat.runs.execute import train_run
from ziggurat.training.records.run_folder import EVALUATION, RunFolder
from ziggurat.training.report.progress import Progress

HIT, GAIN = "full_recall@10", "full_ndcg@10"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One case of quality.

    Args:
        recipe: what is trained.
        hit: the HR@10 that is wanted; published ones have one seed.
        gain: the NDCG@10 likewise; 0: none.
        published: what it is compared with.
    """

    recipe: str
    hit: float
    gain: float = 0.0
    published: str


SUBJECTS = {
    "ml1m_sasrec": Subject(recipe="movielens_sasrec", hit=0.288, published="RecTools .2877 / .1622, one seed"),
    "ml1m_hstu": Subject(recipe="movielens_hstu", hit=0.323, published="RecTools .3227 / .1879, one seed"),
    "ml1m_hstu_large": Subject(recipe="movielens_hstu_large", hit=0.364, published="RecTools .3642 / .2164, one seed"),
    "beauty_sasrec": Subject(
        recipe="beauty_sasrec", hit=0.092, gain=0.053, published="SASRec, sampled softmax .0921 / .0531"
    ),
}


@dataclass(kw_only=True)
class Found:
    """Test metrics of the finished seeds of one subject.

    Args:
        subject: which.
        test: by seed.
        valid: by seed, of the weights that were kept.
    """

    subject: Subject
    test: dict[int, dict[str, float]] = field(default_factory=dict)
    valid: dict[int, dict[str, float]] = field(default_factory=dict)

    def summary(self) -> dict[str, object]:
        """The figures of the case, for the report's JSON."""
        hits, gains = ([run[name] for run in self.test.values()] for name in (HIT, GAIN))
        return {
            "recipe": self.subject.recipe,
            "seeds": len(hits),
            "hr10_mean": statistics.fmean(hits) if hits else None,
            "hr10_std": statistics.stdev(hits) if len(hits) > 1 else None,
            "ndcg10_mean": statistics.fmean(gains) if gains else None,
            "ndcg10_std": statistics.stdev(gains) if len(gains) > 1 else None,
            "valid_hr10": [run[HIT] for run in self.valid.values()],
            "hr10": hits,
            "goal_hr10": self.subject.hit,
            "goal_ndcg10": self.subject.gain or None,
            "published": self.subject.published,
        }


def config_of(recipe: str, seed: int, *, epochs: int = 0) -> RunConfig:
    """The run of one seed on one thread.

    Args:
        recipe: its name.
        seed: of weights, order, dropout and negatives.
        epochs: fewer than the recipe's, to try things out; 0: the recipe's.
    """
    config = seeded(recipe_named(recipe), seed)
    if config.dataset.name == "beauty-events" and (beside := beauty_file()).exists():
        config = replace(config, dataset=replace(config.dataset, source=str(beside)))
    return replace(config, training=replace(config.training, epochs=epochs)) if epochs else config


def beauty_file() -> Path:
    """Where the file is expected: beside the checkout."""
    return ROOT.parent / "shared" / "data" / "beauty_s3rec" / "Beauty.txt.gz"


def collect(
    names: Sequence[str], *, seeds: int, out: Path, until: float, epochs: int, progress: Progress
) -> tuple[dict[str, Found], list[str]]:
    """All subjects, seed by seed, so that each has as many seeds as any other when time is over.

    Args:
        names: of subjects.
        seeds: 1 … so many.
        out: folder of the runs.
        until: no training starts after this time.
        epochs: see `config_of`.
        progress: where to say what happens.

    Returns:
        What was found, and what is missing.

    Raises:
        ConfigError: a run that is there has other settings than the recipe.
    """
    found, left = {name: Found(subject=SUBJECTS[name]) for name in names}, []
    for seed in range(1, seeds + 1):
        for name in names:
            recipe = SUBJECTS[name].recipe
            run, config = RunFolder(out / f"{recipe}_seed{seed}"), config_of(recipe, seed, epochs=epochs)
            refuse_others(run, config)
            if not run.evaluation("test").exists():
                if time.time() >= until:
                    left.append(f"{name}, seed {seed}")
                    continue
                progress.say(f"\n{name}, seed {seed}")
                train_run(config, folder=run.path, resume=run.config.exists(), progress=progress)
            for split, kept in (("test", found[name].test), ("valid", found[name].valid)):
                kept[seed] = EVALUATION.read(run.evaluation(split))["metrics"]
    return found, left


def refuse_others(run: RunFolder, config: RunConfig) -> None:
    """Refuse a run that is there with other settings than the recipe's.

    Raises:
        ConfigError: it would be taken for a run of the recipe.
    """
    if run.config.exists() and _without_order(load_config(run.path)) != _without_order(config):
        raise ConfigError(
            expected=f"a run of {config.recipe}, seed {config.training.seed}, as the recipe is now",
            found="a run with other settings",
            where=str(run.path),
            ways_out=("remove it, so that it is trained again", "read other runs: --runs FOLDER"),
        )


def _without_order(config: RunConfig) -> RunConfig:
    """Without what a run chooses when it starts, the order of its loader included."""
    config = comparable(config)
    loader = replace(config.training.loader, shuffle=Shuffle.AUTO)
    return replace(config, training=replace(config.training, loader=loader))


def table(found: dict[str, Found]) -> str:
    """Markdown: one row a subject."""
    lines = ["| case | seeds | HR@10 | NDCG@10 | goal | published |", "|---|---:|---:|---:|---:|---|"]
    for name, each in found.items():
        figures = each.summary()
        cells = [_mean(figures, "hr10"), _mean(figures, "ndcg10")]
        goal = f"{each.subject.hit}" + (f" / {each.subject.gain}" if each.subject.gain else "")
        lines.append(f"| {name} | {len(each.test)} | {cells[0]} | {cells[1]} | {goal} | {each.subject.published} |")
    return "\n".join(lines)


def _mean(figures: dict[str, object], name: str) -> str:
    mean, deviation = figures[f"{name}_mean"], figures[f"{name}_std"]
    if mean is None:
        return "–"
    return f"{mean:.4f}" if deviation is None else f"{mean:.4f} ± {deviation:.4f}"
