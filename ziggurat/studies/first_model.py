"""A first model of a table: a few models on a small budget, a table of what they reach, and the best goes on.

    logistic regression ─┐
    factorisation machine┤                                ┌─► FOLDER/candidates/NAME   a run each
    DeepFM ──────────────┤  at most 1.5 million samples   │
    DLRM ────────────────┼───────────── each ─────────────┴─► best by validation ─► FOLDER   its whole training
    DLRM, penalised ─────┤
    DCNv2 ───────────────┘

No one setting is best: where pairs of ids matter a model that finds them is far above a sum of weights, and where they
do not, or ids are rare, it is below (docs/experiments/2026-11-26-first-model-of-few-rows.md). Which table is which
shows in a minute of training, so it is tried, and logistic regression takes part. Candidates are compared by the
validation metric that decides in their runs; test rows choose nothing.

A candidate that is there already, of a call that ended early, goes on and is not trained again.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ziggurat.data.encoded.loader import Loader, LoaderConfig
from ziggurat.data.preprocess.prepared import PreparedData
from ziggurat.errors import ConfigError
from ziggurat.features.schema import Outcomes, Pooling, Schema
from ziggurat.models import (
    DCNv2Config,
    DeepFMConfig,
    DLRMConfig,
    LogisticRegressionConfig,
    MLPConfig,
    ModelConfig,
    build_model,
)
from ziggurat.recipes.catalogue import table_model, table_run
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs.execute import RunResult, prepare_run, train_run
from ziggurat.training.early_stop import improves_upwards
from ziggurat.training.report.progress import NoProgress, Progress
from ziggurat.training.step.train_step import TrainStep

BUDGET = 1_500_000  # samples of a candidate
PENALTY = 1e-3
_PROBED_STEPS = 3
_FM_DIM = 8
_FITTED = "dlrm_penalised"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A model that takes part.

    Args:
        name: its folder below `candidates`.
        config: its whole training.
    """

    name: str
    config: RunConfig

    def within_budget(self, num_rows: int) -> RunConfig:
        """The run that it is compared by, on so many training rows."""
        training = self.config.training
        samples = training.epochs * num_rows
        if samples <= BUDGET:
            return self.config
        steps = max(1, BUDGET // training.loader.batch_size)
        return dataclasses.replace(self.config, training=dataclasses.replace(training, max_steps=steps))


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What a candidate reached.

    Args:
        name: of the candidate.
        valid: the metric that decides, on validation rows.
        steps: that were trained.
        best_step: of the weights that were kept.
        seconds: with its evaluations.
    """

    name: str
    valid: float
    steps: int
    best_step: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class FirstModel:
    """The best of a few models, and what the others reached.

    Args:
        metric: that decides.
        tried: every candidate, the best first.
        result: of the best one's whole training.
        config: of the same.
    """

    metric: str
    tried: tuple[Tried, ...]
    result: RunResult
    config: RunConfig


def candidates_of(
    schema: Schema, *, change: Callable[[RunConfig], RunConfig] = lambda config: config
) -> list[Candidate]:
    """The models that are tried on a table.

    Args:
        schema: of the table.
        change: names the files, and whatever else the candidates have in common.

    Raises:
        ConfigError: models of samples are not what this table needs; says which are.
    """
    _refuse_other_tables(schema)
    models: dict[str, ModelConfig] = {
        "logistic_regression": LogisticRegressionConfig(),
        "factorisation_machine": DeepFMConfig(embedding_dim=_FM_DIM, deep=MLPConfig(hidden_dims=())),
        "deepfm": table_model(DeepFMConfig),
        "dlrm": table_model(DLRMConfig),
        _FITTED: table_model(DLRMConfig),
        "dcn_v2": table_model(DCNv2Config),
    }
    found: list[Candidate] = []
    for name, model in models.items():
        config = change(table_run(model, schema))
        if name == _FITTED:
            embedding = dataclasses.replace(config.model.embedding, weight_decay=PENALTY)
            config = dataclasses.replace(config, model=dataclasses.replace(config.model, embedding=embedding))
        found.append(Candidate(name=name, config=config))
    return found


def train_first_model(
    candidates: list[Candidate], *, folder: str | Path, progress: Progress | None = None
) -> FirstModel:
    """Train every candidate on its budget, then the best one as long as it improves.

    Args:
        candidates: from `candidates_of`, whose configs name the files.
        folder: of the best one's run; the others lie below `candidates` in it.
        progress: says how long it will take, and shows each training.

    Raises:
        ConfigError: there are no validation rows, or torchrun started this process.
    """
    shown = progress or NoProgress()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            expected="one process: models are tried on one device",
            found=f"{os.environ['WORLD_SIZE']} ranks",
            where="training without a recipe",
            ways_out=("leave torchrun out", "name a recipe: torchrun … -m ziggurat train table_dlrm …"),
        )
    prepared = prepare_run(candidates[0].config, progress=shown)
    if prepared.valid is None:
        raise ConfigError(
            expected="validation rows, by which models are compared",
            found="none",
            where=f"the split: {prepared.summary.split}",
            ways_out=("--data.split.valid-fraction 0.1", "name a recipe: ziggurat train table_dlrm …"),
        )
    shown.say(_plan(candidates, prepared))
    tried: list[Tried] = []
    metric, is_upwards = candidates[0].config.stop_metric(), True
    for candidate in candidates:
        config = candidate.within_budget(prepared.train.num_rows)
        is_upwards = improves_upwards(dataclasses.replace(config.training.early_stop, metric=metric))
        place = Path(folder) / "candidates" / candidate.name
        begin = time.perf_counter()
        started = (place / "config.json").exists()
        result = train_run(config, folder=place, resume=started, progress=_Named(shown, candidate.name))
        valid = result.evaluations["valid"].metrics[metric]
        found = Tried(
            name=candidate.name,
            valid=valid,
            steps=result.fit.steps,
            best_step=result.fit.best_step,
            seconds=time.perf_counter() - begin,
        )
        tried.append(found)
        shown.say(f"{candidate.name}: valid {metric} {valid:.5f} at step {found.best_step:,} ({found.seconds:.1f} s)")
    worst = -math.inf if is_upwards else math.inf
    tried.sort(key=lambda each: each.valid if math.isfinite(each.valid) else worst, reverse=is_upwards)
    best = next(candidate for candidate in candidates if candidate.name == tried[0].name)
    shown.say(f"the best goes on: {best.name}")
    result = train_run(best.config, folder=folder, progress=shown)
    return FirstModel(metric=metric, tried=tuple(tried), result=result, config=best.config)


def _plan(candidates: list[Candidate], prepared: PreparedData) -> str:
    """What will be trained, and how long it takes at most, by the time of a few steps of each model."""
    rows, total_s = prepared.train.num_rows, 0.0
    for candidate in candidates:
        training = candidate.within_budget(rows).training
        steps = training.epochs * -(-rows // training.loader.batch_size)
        steps = min(steps, training.max_steps) if training.max_steps else steps
        total_s += steps * _step_seconds(candidate.config, prepared)
    names = ", ".join(candidate.name for candidate in candidates)
    most = min(max(candidate.config.training.epochs for candidate in candidates) * rows, BUDGET)
    return (
        f"no recipe is named: {len(candidates)} models are tried ({names}), up to {most:,} samples each, in "
        f"{_about(total_s)} at most; then the best goes on"
    )


def _step_seconds(config: RunConfig, prepared: PreparedData) -> float:
    """Seconds of a training step, of a few on a model that is thrown away."""
    model = build_model(config.model, prepared.inputs, seed=0)
    step = TrainStep(model, config.training)
    loader = Loader(prepared.train, config=LoaderConfig(batch_size=config.training.loader.batch_size))
    batch = next(iter(loader.batches(epoch=0)))
    step(batch)
    begin = time.perf_counter()
    for _ in range(_PROBED_STEPS):
        step(batch)
    return (time.perf_counter() - begin) / _PROBED_STEPS


def _about(seconds: float) -> str:
    """A duration to plan by."""
    return f"about {max(seconds, 1.0):.0f} s" if seconds < 90 else f"about {seconds / 60:.0f} min"


def _refuse_other_tables(schema: Schema) -> None:
    if not schema.labels and schema.events is None:
        raise ConfigError(
            expected="a schema with a label: what a model is to predict",
            found="none",
            where="the schema",
            ways_out=(
                "name the column: ziggurat data inspect FILE --label COLUMN --write-schema FILE.toml",
                "for a log of what users did, without a label: add [events] to the schema, and train table_sasrec "
                "(docs/guides/long-histories.md)",
            ),
        )
    needs: Mapping[str, bool] = {
        "ziggurat train table_sasrec": schema.events is not None,
        "ziggurat train table_two_tower": any(label.outcomes is Outcomes.POSITIVE_ONLY for label in schema.labels),
        "ziggurat train table_din": any(getattr(it, "pooling", None) is Pooling.NONE for it in schema.features),
    }
    for command, is_needed in needs.items():
        if is_needed:
            found = {
                "ziggurat train table_sasrec": "a schema with [events]",
                "ziggurat train table_two_tower": 'a label whose outcomes are "positive_only"',
                "ziggurat train table_din": "a list with pooling = none",
            }[command]
            raise ConfigError(
                expected="a table of samples, whose models are known: no recipe is named",
                found=found,
                where="the schema",
                ways_out=(f"name the recipe: {command} …", "see the recipes: ziggurat recipes"),
            )


class _Named:
    """Shows phases of one candidate; what its trainer says is a detail."""

    def __init__(self, progress: Progress, name: str) -> None:
        self._progress, self._name = progress, name

    def begin(self, what: str, *, total: int | None) -> None:
        self._progress.begin(f"{self._name}, {what}", total=total)

    def update(self, done: int, *, note: str = "", total: int | None = None) -> None:
        self._progress.update(done, note=note, total=total)

    def say(self, text: str) -> None:
        """Show it to whoever asked for all of it: the whole training of the best candidate says it again."""
        self._progress.detail(f"{self._name}, {text}")

    def detail(self, text: str) -> None:
        self._progress.detail(f"{self._name}, {text}")

    def end(self) -> None:
        self._progress.end()


def settings_of_models(changes: Mapping[str, Any]) -> list[str]:
    """Settings that belong to one model, and so to no choice between several."""
    return [name for name in changes if name.startswith("model.")]
