"""What is trained to measure quality: recipes, and HSTU's with less of its biases; runs are known by settings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT
from benchmarks.quality import seeded
from benchmarks.tower_quality import comparable
from ziggurat.data.encoded.loader import Shuffle
from ziggurat.errors import ConfigError
from ziggurat.models.sequence.next_item import NextItemConfig
from ziggurat.recipes.catalogue import recipe_named
from ziggurat.recipes.next_item import next_item_variants
from ziggurat.recipes.run_config import RunConfig, load_config, run_config_to_json
from ziggurat.training.config import AUTO_METRIC
from ziggurat.training.records.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One case of quality.

    Args:
        recipe: what is trained.
        hit: the HR@10 that is wanted; published ones have one seed. 0: none.
        gain: the NDCG@10 likewise.
        published: what it is compared with.
        variant: the recipe's model by this name of `next_item_variants`; "": as it is.
        against: the subject that it is compared with, seed by seed; "": none.
        about: what it is, for the table of differences.
    """

    recipe: str
    hit: float = 0.0
    gain: float = 0.0
    published: str = ""
    variant: str = ""
    against: str = ""
    about: str = ""


def _ablation(variant: str, about: str) -> Subject:
    """HSTU with other biases, and with the training that its own recipe has."""
    return Subject(recipe="movielens_hstu", variant=variant, against="ml1m_hstu", about=about)


SUBJECTS = {
    "ml1m_sasrec": Subject(recipe="movielens_sasrec", hit=0.288, published="RecTools .2877 / .1622, one seed"),
    "ml1m_hstu": Subject(recipe="movielens_hstu", hit=0.323, published="RecTools .3227 / .1879, one seed"),
    "ml1m_hstu_large": Subject(recipe="movielens_hstu_large", hit=0.364, published="RecTools .3642 / .2164, one seed"),
    "beauty_sasrec": Subject(
        recipe="beauty_sasrec", hit=0.092, gain=0.053, published="SASRec, sampled softmax .0921 / .0531"
    ),
    "ml1m_hstu_no_bias": _ablation("hstu_no_bias", "no bias"),
    "ml1m_hstu_position": _ablation("hstu_position", "bias by position"),
    "ml1m_hstu_time": _ablation("hstu_time", "bias by time"),
    "ml1m_hstu_own_time": _ablation("hstu_own_time", "both; a question knows the time of its latest event alone"),
}


def config_of(subject: Subject, seed: int, *, epochs: int = 0) -> RunConfig:
    """The run of one seed on one thread.

    Args:
        subject: what is trained.
        seed: of weights, order, dropout and negatives.
        epochs: fewer than the recipe's, to try things out; 0: the recipe's.
    """
    config = seeded(recipe_named(subject.recipe), seed)
    if config.dataset.name == "beauty-events" and (beside := beauty_file()).exists():
        config = replace(config, dataset=replace(config.dataset, source=str(beside)))
    if subject.variant:
        assert isinstance(config.model, NextItemConfig)
        config = replace(config, model=next_item_variants(config.model)[subject.variant])
    return replace(config, training=replace(config.training, epochs=epochs)) if epochs else config


def beauty_file() -> Path:
    """Where the file is expected: beside the checkout."""
    return ROOT.parent / "shared" / "data" / "beauty_s3rec" / "Beauty.txt.gz"


def folder_of(name: str, seed: int, *, out: Path) -> RunFolder:
    """Where the run of a subject is, or will be: named after its recipe, or after itself where it changes the model."""
    subject = SUBJECTS[name]
    return RunFolder(out / f"{name if subject.variant else subject.recipe}_seed{seed}")


def refuse_others(run: RunFolder, config: RunConfig) -> None:
    """Refuse a run that is there with other settings than the recipe's.

    Raises:
        ConfigError: it would be taken for a run of the recipe.
    """
    if not run.config.exists():
        return
    found = load_config(run.path)
    if config.training.early_stop.metric == AUTO_METRIC:  # the run has chosen one
        chosen = replace(config.training.early_stop, metric=found.training.early_stop.metric)
        config = replace(config, training=replace(config.training, early_stop=chosen))
    if without_choices(found) != without_choices(config):
        raise ConfigError(
            expected=f"a run of {config.recipe}, seed {config.training.seed}, as the recipe is now",
            found="a run with other settings",
            where=str(run.path),
            ways_out=("remove it, so that it is trained again", "read other runs: --runs FOLDER"),
        )


def without_choices(config: RunConfig) -> RunConfig:
    """Without what a run chooses when it starts: kernel, precision, the order of its loader."""
    config = comparable(config)
    loader = replace(config.training.loader, shuffle=Shuffle.AUTO)
    return replace(config, training=replace(config.training, loader=loader))


def settings_of(subject: Subject, *, epochs: int = 0) -> dict[str, Any]:
    """What every seed of a subject is trained with, as plain data for the report: no seed, no path, no choice."""
    config = without_choices(config_of(subject, 0, epochs=epochs))
    return run_config_to_json(replace(config, dataset=replace(config.dataset, source="")))
