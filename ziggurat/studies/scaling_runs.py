"""`ziggurat scale`: train models of growing compute by one pass over the data, and fit the law of scaling.

    1x, 4x, 16x, 64x, 256x  ──►  grow (scaling.py)  ──►  one pass each (protocol `scale`)  ──►  test log loss
                                                     ──►  loss = a + b·x^(−c) for each model (scaling_law.py)

Which settings a model starts from and how it grows, its config says (`models/contract/growth.py`). All start from about
the same FLOPs, so the curves begin at the same place. The learning rates are those of the protocol for every size. Log
loss is what falls by a law; AUC stands beside it in the table. Runs are kept and taken up as those of a comparison are
(`compare_runs.py`); test data is read once a run.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from ziggurat.config import override
from ziggurat.data.preprocess.prepared import PreparedData
from ziggurat.errors import ConfigError
from ziggurat.models import BuiltInConfig
from ziggurat.models.contract.growth import Grows
from ziggurat.recipes.model_settings import nearest_model
from ziggurat.recipes.protocols import Protocol, scale_model, scale_training
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs.execute import prepare_run
from ziggurat.studies.compare_data import ComparedData, data_run
from ziggurat.studies.compare_own import OwnData, main_loss, main_metric
from ziggurat.studies.compare_runs import RunRecord, RunRequest, finish_run
from ziggurat.studies.scaling import grow, growing_models
from ziggurat.studies.scaling_law import FittedLaw, doubt_of, fit_with_band
from ziggurat.studies.tuned import read_tuned
from ziggurat.training import metrics
from ziggurat.training.report.progress import NoProgress, Progress
from ziggurat.typed import Threads, checked


@dataclass(frozen=True, kw_only=True)
@checked
class ScaleConfig:
    """Settings of a study that grows models.

    Args:
        models: that say how they grow; see `growing_models`.
        factors: of compute, each 1 or more, relative to each model's smallest settings.
        data: a built-in data set, or data of one's own.
        rows: of synthetic data.
        seeds: runs of each point.
        source: folder or file of the raw data.
        threads: of each run.
        tuned: folder of a study of `ziggurat tune` by protocol scale: each model's recipe is its smallest size, and its
            learning rates are those of all sizes; "": `smallest()` of each.
        read_test_again: whether test data may be read that another study has read with those recipes.
    """

    models: tuple[str, ...] = ("wukong", "dlrm", "dcn_v2")
    factors: tuple[float, ...] = (1.0, 4.0, 16.0, 64.0, 256.0)
    data: ComparedData | OwnData = ComparedData.SYNTHETIC
    rows: int = 1_000_000
    seeds: int = 1
    source: str = ""
    threads: Threads = 1
    tuned: str = ""
    read_test_again: bool = False

    @property
    def data_name(self) -> str:
        """The name of the data in folders and titles."""
        return self.data.name if isinstance(self.data, OwnData) else self.data.value

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metric that falls by a law, and the one that models are judged by besides."""
        if not isinstance(self.data, OwnData):
            return (metrics.USUAL_LOSS, metrics.USUAL)
        schema = self.data.run.table_schema
        return tuple(dict.fromkeys((main_loss(schema), main_metric(schema))))

    def __post_init__(self) -> None:
        known = growing_models()
        for name in self.models:
            if name not in known:
                raise ConfigError(
                    expected=f"models that say how they grow: {', '.join(known)}",
                    found=repr(name),
                    where="ziggurat scale",
                    ways_out=(
                        *(f"did you mean {near!r}?" for near in nearest_model(name, known)),
                        "for example: ziggurat scale wukong,dlrm --compute 1x..64x",
                    ),
                )
        if not self.models or len(self.factors) < 3 or min(self.factors) < 1 or self.seeds < 1:
            raise ConfigError(
                expected="a model; three factors of compute or more, each >= 1; a seed",
                found=f"models = {','.join(self.models)}, factors = {self.factors}, seeds = {self.seeds}",
                where="ziggurat scale",
                ways_out="for example: ziggurat scale wukong --compute 1x..256x --points 5",
            )


@dataclass(frozen=True, kw_only=True)
class ScaledPoint:
    """One size of one model.

    Args:
        factor: compute asked for, relative to the smallest.
        model: its settings.
        runs: one record a seed.
    """

    factor: float
    model: BuiltInConfig
    runs: tuple[RunRecord, ...]

    @property
    def flops(self) -> int:
        """The FLOPs of a forward pass, as counted."""
        return self.runs[0].cost.forward_flops

    def mean(self, metric: str) -> float:
        """Mean test metric over seeds."""
        return sum(run.test[metric] for run in self.runs) / len(self.runs)


@dataclass(frozen=True, kw_only=True)
class ScaledModel:
    """All sizes of one model, smallest first, and the law through their test log losses."""

    name: str
    points: tuple[ScaledPoint, ...]
    fitted: FittedLaw
    metric: str = metrics.USUAL_LOSS

    @property
    def falls(self) -> bool:
        """True if every larger model has a lower mean test loss than the one before."""
        losses = [point.mean(self.metric) for point in self.points]
        return all(later < earlier for earlier, later in itertools.pairwise(losses))

    @property
    def doubt(self) -> str:
        """The reason why the fitted exponent means nothing; "" if no reason is found."""
        compute = [point.flops / self.points[0].flops for point in self.points]
        return doubt_of(compute, [point.mean(self.metric) for point in self.points], law=self.fitted.law)

    def to_json(self) -> dict[str, object]:
        """The model's runs as plain data."""
        points = [
            {"factor": point.factor, "flops": point.flops, "runs": [run.to_json() for run in point.runs]}
            for point in self.points
        ]
        return {
            "name": self.name,
            "falls": self.falls,
            "doubt": self.doubt,
            "points": points,
            "law": dataclasses.asdict(self.fitted),
        }


def smallest(name: str) -> BuiltInConfig:
    """Return the settings that a model starts from, by its name."""
    return scale_model(cast(BuiltInConfig, cast(Grows, growing_models()[name]).smallest()))


def factors_of(text: str, *, points: int) -> tuple[float, ...]:
    """`1x..256x` as `points` factors, equally far apart in logarithm.

    Raises:
        ConfigError: not of that form.
    """
    parts = text.replace("x", "").split("..")
    try:
        low, high = (float(part) for part in parts)
    except ValueError:
        low = high = 0.0
    if not 1.0 <= low < high or points < 3:
        raise ConfigError(
            expected="a range of compute such as 1x..256x, from 1x or more upwards, and 3 points or more",
            found=f"{text!r}, {points} points",
            where="command line, --compute and --points",
            ways_out="--compute 1x..256x --points 5",
        )
    ratio = (high / low) ** (1.0 / (points - 1))
    return tuple(round(low * ratio**index, 6) for index in range(points))


def scale(config: ScaleConfig, *, out: str | Path, progress: Progress | None = None) -> list[ScaledModel]:
    """Train every size that is missing, and fit.

    Args:
        config: what to scale.
        out: folder of all scaling runs.
        progress: where to show it.
    """
    progress = progress or NoProgress()
    if isinstance(config.data, OwnData):
        base = config.data.run
        changes = config.data.training_changes
    else:
        base = data_run(config.data, source=config.source, rows=config.rows)
        changes = {}
    data = prepare_run(base, progress=progress)
    torch.set_num_threads(config.threads)
    folder = Path(out) / f"{config.data_name}-scale-{data.train.num_rows}{'-tuned' if config.tuned else ''}"
    recipes = _recipes(config, data=data, folder=folder, progress=progress)
    training = scale_training(num_rows=data.train.num_rows)
    loss, *_, judge = config.metrics
    training = dataclasses.replace(training, early_stop=dataclasses.replace(training.early_stop, metric=judge))
    training = override(training, changes)
    scaled = []
    for name in config.models:
        points = []
        for factor in config.factors:
            recipe = recipes.get(name)
            model = grow(_smallest_of(name, recipe), data.inputs, factor=factor)
            runs = []
            for seed in range(config.seeds):
                progress.say(f"{name}, {factor:g}x, seed {seed}")
                settings = training if recipe is None else recipe.training
                tables = base.tables if recipe is None else recipe.tables
                loader = dataclasses.replace(settings.loader, seed=seed)
                settings = dataclasses.replace(settings, seed=seed, threads=config.threads, loader=loader)
                run = dataclasses.replace(base, recipe=f"scale_{name}", model=model, training=settings, tables=tables)
                request = RunRequest(
                    model=name,
                    variant=0,
                    config=run,
                    folder=folder / name / f"{factor:g}x_seed{seed}",
                    protocol=Protocol.SCALE,
                    metric=judge,
                )
                runs.append(finish_run(request, data=data, read_test=True, progress=progress))
            points.append(ScaledPoint(factor=factor, model=model, runs=tuple(runs)))
        scaled.append(ScaledModel(name=name, points=tuple(points), fitted=_fit(points, metric=loss), metric=loss))
    return scaled


def _smallest_of(name: str, recipe: RunConfig | None) -> BuiltInConfig:
    """Return the settings that a model grows from: those that were tuned, if any were."""
    return smallest(name) if recipe is None else cast(BuiltInConfig, recipe.model)


def _recipes(config: ScaleConfig, *, data: PreparedData, folder: Path, progress: Progress) -> Mapping[str, RunConfig]:
    """Read the recipes that models grow from; none without a study that tuned them.

    Raises:
        ConfigError: they were tuned by another protocol, or on other data.
    """
    if not config.tuned:
        return {}
    tuned = read_tuned(config.tuned, models=config.models)
    if tuned.protocol is not Protocol.SCALE:
        raise ConfigError(
            expected="recipes that were tuned by one pass over the data: protocol scale",
            found=f"protocol {tuned.protocol.value}",
            where=f"ziggurat scale, --tuned {config.tuned}",
            ways_out=(
                "ziggurat tune DATA --protocol scale --out ANOTHER_FOLDER, and --tuned ANOTHER_FOLDER",
                "leave --tuned out",
            ),
        )
    tuned.refuse_seeds(config.seeds)
    tuned.refuse_other_data(data)
    said = tuned.note_that_test_is_read(config.models, out=folder, read_again=config.read_test_again)
    if said:
        progress.say(f"note: {said}")
    return tuned.recipes


def _fit(points: list[ScaledPoint], *, metric: str) -> FittedLaw:
    compute = [point.flops / points[0].flops for point in points]
    return fit_with_band(compute, [[run.test[metric] for run in point.runs] for point in points])
