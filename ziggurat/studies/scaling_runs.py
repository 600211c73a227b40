"""`ziggurat scale`: train models of growing compute by one pass over the data, and say which law their loss follows.

    rates at the smallest size  ──►  1x, 2.5x, 6.3x … 100x: grow (scaling.py)  ──►  one pass each (protocol `scale`)
        ──►  loss of each test row over the best reachable (scaling_best.py)  ──►  in blocks (scaling_draws.py)
        ──►  no gain, power or saturating law, with bands; exponents compared (scaling_law.py)

Which settings a model starts from and how it grows, its config says (`models/contract/growth.py`). All start from about
the same FLOPs, so the curves begin at the same place.

Equal treatment: every model tries the same learning rates at its smallest size (`rates`), judged by validation data
with a seed that no run has; the best of them is that of all its sizes. That is too high for wide models: with
`RatesFor.EVERY_SIZE` each larger size begins with the best rate of the size before and tries the next lower ones, and
if none of them is better the next higher ones, for as long as validation loss falls. Recipes of `ziggurat tune`
(`tuned`) take their place.

Sizes may be lengths of histories in place of compute (`lengths`): the same model, told of more of what a user did. Each
length has its own prepared data, with the same test samples, and compute is what the model computes at that length.

Runs of one seed come before those of the next, and all models take turns, so a study that was stopped has complete
seeds. Runs are kept and taken up as those of a comparison are (`compare_runs.py`); test data is read once a run.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import cast

import numpy as np
import torch

from ziggurat.config import override
from ziggurat.data.encoded.loader import LoaderConfig
from ziggurat.data.preprocess.prepared import PreparedData
from ziggurat.errors import ConfigError, DataError, NumericsError
from ziggurat.files import Format
from ziggurat.models import BuiltInConfig, ModelConfig, build_model
from ziggurat.models.build import kind_of
from ziggurat.models.contract.growth import Grows
from ziggurat.recipes.model_settings import nearest_model
from ziggurat.recipes.protocols import Protocol, ScaleSettings, scale_model, scale_training
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs.execute import prepare_run
from ziggurat.studies.compare_data import USUAL_ROWS, ComparedData, check_rows, data_run
from ziggurat.studies.compare_own import OwnData, main_loss, main_metric
from ziggurat.studies.compare_runs import RUN_WAYS_OUT, RunRecord, RunRequest, finish_run
from ziggurat.studies.compare_runs import test_scores as scores_of_test
from ziggurat.studies.counted_flops import CountedSamples
from ziggurat.studies.scaling import grow, growing_models
from ziggurat.studies.scaling_best import BestReachable, best_of_test, row_losses
from ziggurat.studies.scaling_cost import MeasuredSize, Remaining, as_time, measure
from ziggurat.studies.scaling_draws import RunLosses, draw_blocks, draw_losses, in_blocks, mean_losses
from ziggurat.studies.scaling_law import (
    MIN_SIZES,
    Difference,
    FittedLaws,
    LargestSize,
    LossRatio,
    compare_laws,
    exponent_difference,
    largest_ratio,
)
from ziggurat.studies.tuned import read_tuned
from ziggurat.training import metrics
from ziggurat.training.config import TrainingConfig
from ziggurat.training.report.progress import NoProgress, Progress
from ziggurat.typed import Threads, checked

SEARCH_SEED = 1000  # of the runs that choose rates; runs of the study have 0, 1, 2 …
DRAWS = 1000
_COST = Format(name="ziggurat.scaled_run_cost", what="processor seconds of a run", ways_out=RUN_WAYS_OUT)
_CPU = "cpu.json"


class RatesFor(Enum):
    """Sizes of a model that try learning rates."""

    SMALLEST = "smallest"
    EVERY_SIZE = "every-size"


@dataclass(frozen=True, kw_only=True)
@checked
class ScaleConfig:
    """Settings of a study that grows models.

    Args:
        models: that say how they grow; see `growing_models`.
        factors: of compute, each 1 or more, relative to each model's smallest settings.
        data: a built-in data set, or data of one's own.
        rows: of the data set `synthetic`; 0: a million. Other data has its own.
        lengths: events of the longest history, ascending, in place of `factors`; (): sizes grow by compute.
        seeds: runs of each point.
        own: config classes of your own, whose kinds `models` may name; they say how they grow.
        rates: learning rates that each model tries; (): that of the protocol.
        rates_for: the sizes that try them: the smallest, whose best one all sizes then have, or every one.
        batch_size: rows of a step; 0: those of the protocol.
        source: folder or file of the raw data.
        threads: of each run.
        tuned: folder of a study of `ziggurat tune` by protocol scale: each model's recipe is its smallest size, and its
            learning rates are those of all sizes; "": `smallest()` of each.
        read_test_again: whether test data may be read that another study has read with those recipes.
    """

    models: tuple[str, ...] = ("wukong", "dlrm", "dcn_v2")
    factors: tuple[float, ...] = (1.0, 4.0, 16.0, 64.0, 256.0)
    data: ComparedData | OwnData = ComparedData.SYNTHETIC
    rows: int = 0
    lengths: tuple[int, ...] = ()
    seeds: int = 1
    own: tuple[type[ModelConfig], ...] = ()
    rates: tuple[float, ...] = ()
    rates_for: RatesFor = RatesFor.SMALLEST
    batch_size: int = 0
    source: str = ""
    threads: Threads = 1
    tuned: str = ""
    read_test_again: bool = False

    @property
    def known(self) -> dict[str, type[ModelConfig]]:
        """Config classes of the models that say how they grow, built in and of one's own."""
        mine = {kind_of(each): each for each in self.own if issubclass(each, Grows)}
        return {**growing_models(), **mine}

    @property
    def sizes(self) -> tuple[float, ...]:
        """The lengths or factors of compute, smallest first."""
        return tuple(map(float, self.lengths)) or self.factors

    def size_text(self, size: float) -> str:
        """Name a size for people and in folders."""
        return f"{size:g}-events" if self.lengths else f"{size:g}x"

    def size_label(self, size: float) -> str:
        """Name a size shortly, for tables."""
        return f"{size:g} events" if self.lengths else f"{size:.3g}x"

    def _check_lengths(self) -> None:
        """Refuse lengths of data that has no histories, and those that are none.

        Raises:
            ConfigError: says which.
        """
        if not self.lengths:
            return
        schema = self.data.run.table_schema if isinstance(self.data, OwnData) else None
        if schema is None or schema.events is None or not schema.labels or self.tuned:
            raise ConfigError(
                expected="lengths of the histories of an event log with labels, and no --tuned beside them",
                found=f"--lengths {','.join(map(str, self.lengths))}, data {self.data_name}"
                + (f", --tuned {self.tuned}" if self.tuned else ""),
                where="ziggurat scale, --lengths",
                ways_out=(
                    "for example: ziggurat scale sequence_ranker --data movielens_hstu_ranker --lengths 6,12,25,50,100",
                    "leave --lengths out: sizes then grow by --compute",
                ),
            )
        if min(self.lengths) < 1 or len(self.lengths) < 3 or list(self.lengths) != sorted(set(self.lengths)):
            raise ConfigError(
                expected="three lengths or more, ascending, of 1 event or more",
                found=",".join(map(str, self.lengths)),
                where="ziggurat scale, --lengths",
                ways_out="--lengths 6,12,25,50,100",
            )

    def _check_settings(self) -> None:
        """Refuse settings that two flags say, and rates that are none."""
        changes = self.data.training_changes if isinstance(self.data, OwnData) else {}
        said = {"learning_rate": self.rates, "loader.batch_size": self.batch_size}
        flags = {"learning_rate": "--rates", "loader.batch_size": "--batch-size"}
        twice = [path for path, value in said.items() if value and (self.tuned or path in changes)]
        if twice:
            other = "--tuned" if self.tuned else f"--training.{twice[0].replace('_', '-')}"
            raise ConfigError(
                expected="one flag that says a setting",
                found=f"{flags[twice[0]]} and {other}",
                where="ziggurat scale",
                ways_out=(f"leave {flags[twice[0]]} out", f"leave {other} out"),
            )
        if self.rates_for is RatesFor.EVERY_SIZE and len(set(self.rates)) < 2:
            raise ConfigError(
                expected="two learning rates or more, of which every size takes the better one",
                found=f"--rates-for every-size, rates {self.rates}",
                where="ziggurat scale, --rates and --rates-for",
                ways_out=("--rates 1e-3,2e-3,4e-3", "leave --rates-for out"),
            )
        if any(not 0 < rate < float("inf") for rate in self.rates) or self.batch_size < 0:
            raise ConfigError(
                expected="learning rates above 0, and a batch size of 1 or more (0: that of the protocol)",
                found=f"rates {self.rates}, batch size {self.batch_size}",
                where="ziggurat scale, --rates and --batch-size",
                ways_out="--rates 1e-3,2e-3,4e-3",
            )

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
        check_rows(self.data, self.rows)
        known = self.known
        for name in self.models:
            if name not in known:
                raise ConfigError(
                    expected=f"models that say how they grow: {', '.join(known)}",
                    found=repr(name),
                    where="ziggurat scale",
                    ways_out=(
                        *(
                            f"your class is called {kind_of(each)}: --model gives it, and no name is needed"
                            for each in self.own
                            if issubclass(each, Grows)
                        ),
                        *(f"did you mean {near!r}?" for near in nearest_model(name, known)),
                        "for example: ziggurat scale wukong,dlrm --compute 1x..64x",
                        "give the config methods smallest, deeper and wider (ziggurat.models.contract.growth.Grows)",
                    ),
                )
        self._check_settings()
        self._check_lengths()
        if not self.models or len(self.factors) < 3 or min(self.factors) < 1 or self.seeds < 1:
            raise ConfigError(
                expected="a model; three factors of compute or more, each >= 1; a seed",
                found=f"models = {','.join(self.models)}, factors = {self.factors}, seeds = {self.seeds}",
                where="ziggurat scale",
                ways_out="for example: ziggurat scale wukong --compute 1x..256x --points 5",
            )


@dataclass(frozen=True, kw_only=True)
class ScaledRun:
    """One run of one size.

    Args:
        record: what it reached.
        losses: of its test rows over the best reachable, by blocks.
        cpu_s: processor seconds of the process that finished it; 0: not known.
    """

    record: RunRecord
    losses: RunLosses
    cpu_s: float

    def to_json(self) -> dict[str, object]:
        """The run as plain data."""
        blocks = [float(f"{each:.7g}") for each in self.losses.sums]
        return {
            **self.record.to_json(),
            "above_best": self.losses.mean,
            "cpu_s": round(self.cpu_s, 2),
            "block_sums": blocks,
        }


@dataclass(frozen=True, kw_only=True)
class TriedRate:
    """A learning rate that a size tried.

    Args:
        rate: of the dense network.
        valid: the validation loss of that size; NaN if training diverged.
        cpu_s: processor seconds.
    """

    rate: float
    valid: float
    cpu_s: float

    @property
    def has_diverged(self) -> bool:
        """True if training has."""
        return math.isnan(self.valid)

    @property
    def loss(self) -> float:
        """The validation loss, to be compared: infinite if training diverged."""
        return math.inf if self.has_diverged else self.valid

    def to_json(self) -> dict[str, object]:
        """The rate as plain data; no loss where training diverged."""
        return {"rate": self.rate, "valid": None if self.has_diverged else self.valid, "cpu_s": self.cpu_s}


@dataclass(frozen=True, kw_only=True)
class ScaledPoint:
    """One size of one model.

    Args:
        factor: compute asked for, relative to the smallest; where sizes are lengths, events of the longest history.
        model: its settings.
        learning_rate: of all its runs.
        tried: learning rates that it tried; () if it tried none.
        runs: one a seed.
    """

    factor: float
    model: BuiltInConfig
    learning_rate: float
    tried: tuple[TriedRate, ...]
    runs: tuple[ScaledRun, ...]

    @property
    def flops(self) -> int:
        """The FLOPs of a forward pass, as counted."""
        return self.runs[0].record.cost.forward_flops

    @property
    def above_best(self) -> float:
        """The geometric mean of the loss over the best reachable."""
        return float(mean_losses([[run.losses for run in self.runs]])[0])

    def mean(self, metric: str) -> float:
        """Mean test metric over seeds."""
        return sum(run.record.test[metric] for run in self.runs) / len(self.runs)


@dataclass(frozen=True, kw_only=True)
class ScaledModel:
    """All sizes of one model, smallest first, and the laws through their losses.

    Args:
        name: of the model.
        points: its sizes.
        laws: fitted; None if there are too few sizes, or nothing tells how sure a loss is.
        metric: the test loss.
        has_scatter: whether several seeds or the losses of rows tell how sure a loss is.
    """

    name: str
    points: tuple[ScaledPoint, ...]
    laws: FittedLaws | None
    metric: str = metrics.USUAL_LOSS
    has_scatter: bool = True

    @property
    def falls(self) -> bool:
        """True if every larger model has a lower mean test loss than the one before."""
        losses = [point.above_best for point in self.points]
        return all(later < earlier for earlier, later in itertools.pairwise(losses))

    @property
    def says(self) -> str:
        """The finding, in words."""
        if not self.has_scatter:
            return "one run a size, and no losses of rows: nothing tells how sure they are; give --seeds 3"
        if self.laws is None:
            return f"{len(self.points)} sizes tell no laws apart: measure {MIN_SIZES} or more"
        return self.laws.says

    def to_json(self) -> dict[str, object]:
        """The model's runs as plain data."""
        points = [
            {
                "factor": point.factor,
                "flops": point.flops,
                "above_best": point.above_best,
                "learning_rate": point.learning_rate,
                "rates_tried": [each.to_json() for each in point.tried],
                "runs": [run.to_json() for run in point.runs],
            }
            for point in self.points
        ]
        return {
            "name": self.name,
            "falls": self.falls,
            "says": self.says,
            "points": points,
            "laws": None if self.laws is None else dataclasses.asdict(self.laws),
        }


@dataclass(frozen=True, kw_only=True)
class ScaleStudy:
    """Holds all sizes of all models of a study, and how their exponents differ.

    Args:
        config: what was scaled.
        models: each with all its sizes.
        differences: of the exponents of two models each; () without laws, or of one seed.
        ratios: of the losses of two models each, at their largest sizes; () of one seed.
        best_log_loss: best reachable on the test rows; None: not known.
        num_train: training rows.
        num_test: test rows.
        notes: what else should be known.
    """

    config: ScaleConfig
    models: tuple[ScaledModel, ...]
    differences: tuple[Difference, ...]
    ratios: tuple[LossRatio, ...]
    best_log_loss: float | None
    num_train: int
    num_test: int
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """The study as plain data: every run, with the block sums that bands are drawn from."""
        counts = self.models[0].points[0].runs[0].losses.counts
        return {
            "data": self.config.data_name,
            "sizes": "events of the longest history" if self.config.lengths else "compute over the smallest",
            "seeds": self.config.seeds,
            "training_rows": self.num_train,
            "test_rows": self.num_test,
            "best_log_loss": self.best_log_loss,
            "notes": list(self.notes),
            "block_rows": counts.tolist(),
            "models": [model.to_json() for model in self.models],
            "differences": [dataclasses.asdict(each) for each in self.differences],
            "ratios_at_largest": [dataclasses.asdict(each) for each in self.ratios],
        }


def smallest(name: str, *, known: Mapping[str, type[ModelConfig]] | None = None) -> BuiltInConfig:
    """Return the settings that a model starts from, by its name."""
    cls = (growing_models() if known is None else known)[name]
    try:
        start = cast(Grows, cls).smallest()
    except Exception as error:
        raise ConfigError(
            expected="settings of the class",
            found=f"{type(error).__name__}: {error}",
            where=f"{cls.__name__}.smallest()",
            ways_out="@classmethod above `def smallest(cls)`, which returns cls(…) with the smallest sizes",
        ) from error
    return scale_model(cast(BuiltInConfig, start))


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


@dataclass(kw_only=True)
class _Work:
    """Hold the settings, data and rates that all runs of a study share.

    Args:
        config: of the study.
        bases: the run of each size on its data, without model and training.
        datasets: prepared, of each size.
        folder: of all runs.
        recipes: that were tuned, by model.
        progress: where it is shown.
        rates: learning rate of each size of each model, once chosen.
        tried: rates that were tried, by model and size.
        counted: FLOPs of a sample, by settings and data.
        samples: on which they were counted, by data.
    """

    config: ScaleConfig
    bases: Mapping[float, RunConfig]
    datasets: Mapping[float, PreparedData]
    folder: Path
    recipes: Mapping[str, RunConfig]
    progress: Progress
    rates: dict[tuple[str, float], float] = field(default_factory=dict)
    tried: dict[tuple[str, float], tuple[TriedRate, ...]] = field(default_factory=dict)
    counted: dict[tuple[BuiltInConfig, Path], int] = field(default_factory=dict)
    samples: dict[Path, CountedSamples] = field(default_factory=dict)

    @property
    def judge(self) -> str:
        """The metric that chooses by validation data."""
        return self.config.metrics[-1]

    @property
    def base(self) -> RunConfig:
        """The run of the smallest size; all sizes have its labels."""
        return self.bases[self.config.sizes[0]]

    @property
    def data(self) -> PreparedData:
        """The data of the smallest size; all sizes have its rows."""
        return self.datasets[self.config.sizes[0]]

    def model(self, name: str, size: float) -> BuiltInConfig:
        """Return the settings of a size."""
        recipe = self.recipes.get(name)
        start = smallest(name, known=self.config.known) if recipe is None else cast(BuiltInConfig, recipe.model)
        if not self.config.lengths:
            return grow(start, self.data.inputs, factor=size, flops=functools.partial(self.flops, size=size))
        own = self.config.data.run.model if isinstance(self.config.data, OwnData) else None
        return scale_model(cast(BuiltInConfig, own)) if own is not None and kind_of(type(own)) == name else start

    def flops(self, model: BuiltInConfig, *, size: float) -> int:
        """Return the FLOPs of a sample of a size, forward."""
        data = self.datasets[size]
        key = (model, data.folder)
        if key not in self.counted:
            built = build_model(model, data.inputs, seed=0, draw_tables=False)
            samples = self.samples.setdefault(data.folder, CountedSamples(data.train, loader=self.loader))
            self.counted[key] = samples.flops(built, backward=False).forward
        return self.counted[key]

    @property
    def loader(self) -> LoaderConfig:
        """Return how runs read rows: as the protocol says, in the order that one's own data asks for."""
        own = self.config.data
        size = self.config.batch_size or ScaleSettings().batch_size
        given = own.run.training.loader if isinstance(own, OwnData) else LoaderConfig()
        return LoaderConfig(batch_size=size, shuffle=given.shuffle)

    def training(self, name: str, size: float, *, rate: float | None = None, seed: int = 0) -> TrainingConfig:
        """Return how a size of a model is trained.

        Args:
            name: of the model.
            size: factor of compute, or length; only the learning rate depends on it.
            rate: another learning rate than its own.
            seed: of weights and order.
        """
        recipe = self.recipes.get(name)
        if recipe is not None:
            settings = recipe.training
        else:
            own = self.config.data
            usual = ScaleSettings()
            changes = own.training_changes if isinstance(own, OwnData) else {}
            sizes = dataclasses.replace(usual, batch_size=self.loader.batch_size)
            settings = scale_training(num_rows=self.data.train.num_rows, settings=sizes)
            # Where a pass is cut short, a tenth of what is left of it warms up.
            steps = _num_steps(override(settings, changes), num_rows=self.data.train.num_rows)
            settings = scale_training(num_rows=steps * sizes.batch_size, settings=sizes)
            early_stop = dataclasses.replace(settings.early_stop, metric=self.judge)
            settings = dataclasses.replace(settings, early_stop=early_stop, loader=self.loader)
            settings = override(settings, changes)
        rate = rate or self.rates.get((name, size))
        if rate:
            settings = dataclasses.replace(settings, learning_rate=rate)
        loader = dataclasses.replace(settings.loader, seed=seed)
        return dataclasses.replace(settings, seed=seed, threads=self.config.threads, loader=loader)

    def request(
        self, name: str, model: BuiltInConfig, training: TrainingConfig, *, size: float, folder: str
    ) -> RunRequest:
        """Return a run that is wanted."""
        recipe = self.recipes.get(name)
        base = self.bases[size]
        tables = base.tables if recipe is None else recipe.tables
        run = dataclasses.replace(base, recipe=f"scale_{name}", model=model, training=training, tables=tables)
        return RunRequest(
            model=name,
            variant=0,
            config=run,
            folder=self.folder / name / folder,
            protocol=Protocol.SCALE,
            metric=self.judge,
        )

    def finish(self, request: RunRequest, *, size: float, read_test: bool) -> tuple[RunRecord, float]:
        """Train a run, or take it up; return its record and its processor seconds."""
        begin = time.process_time()
        record = finish_run(request, data=self.datasets[size], read_test=read_test, progress=self.progress)
        path = request.folder / _CPU
        if not path.exists():
            _COST.write(path, {"cpu_s": time.process_time() - begin})
        return record, float(cast(float, _COST.read(path)["cpu_s"]))

    def finish_rate(self, request: RunRequest, *, size: float, rate: float) -> TriedRate:
        """Train a run that judges a learning rate, or take it up; one that diverged stays so."""
        path = request.folder / _CPU
        kept = _COST.read(path) if path.exists() else {}
        if kept.get("diverged"):
            return TriedRate(rate=rate, valid=math.nan, cpu_s=float(cast(float, kept["cpu_s"])))
        begin = time.process_time()
        try:
            record, cpu_s = self.finish(request, size=size, read_test=False)
        except NumericsError as error:
            cpu_s = time.process_time() - begin
            _COST.write(path, {"cpu_s": cpu_s, "diverged": error.found})
            return TriedRate(rate=rate, valid=math.nan, cpu_s=cpu_s)
        return TriedRate(rate=rate, valid=record.valid[self.config.metrics[0]], cpu_s=cpu_s)

    def is_missing(self, name: str, folder: str) -> bool:
        """True if a run has not ended."""
        return not (self.folder / name / folder / _CPU).exists()


def _run_folder(config: ScaleConfig, size: float, seed: int) -> str:
    return f"{config.size_text(size)}_seed{seed}"


def _rate_folder(config: ScaleConfig, size: float, rate: float) -> str:
    return f"{config.size_text(size)}_rate{rate:g}_seed{SEARCH_SEED}"


def scale(config: ScaleConfig, *, out: str | Path, progress: Progress | None = None) -> ScaleStudy:
    """Train every size that is missing, and compare laws.

    Args:
        config: what to scale.
        out: folder of all scaling runs.
        progress: where to show it.
    """
    progress = progress or NoProgress()
    if isinstance(config.data, OwnData):
        base = config.data.run
    else:
        base = data_run(config.data, source=config.source, rows=config.rows or USUAL_ROWS)
    bases = {size: _base_of(base, config=config, size=size) for size in config.sizes}
    if config.lengths:
        datasets = {size: prepare_run(each, progress=progress) for size, each in bases.items()}
        refuse_other_samples(datasets)
    else:
        datasets = dict.fromkeys(config.sizes, prepare_run(base, progress=progress))
    data = datasets[config.sizes[0]]
    torch.set_num_threads(config.threads)
    folder = Path(out) / f"{config.data_name}-scale-{data.train.num_rows}{'-tuned' if config.tuned else ''}"
    recipes = _recipes(config, data=data, folder=folder, progress=progress)
    work = _Work(config=config, bases=bases, datasets=datasets, folder=folder, recipes=recipes, progress=progress)
    models = {(name, size): work.model(name, size) for name in config.models for size in config.sizes}
    _refuse_sizes_alike(work, models)
    remaining = _say_cost(work, models)
    for name in config.models:
        _choose_rates(work, models, name=name, remaining=remaining)
    runs: dict[tuple[str, float, int], tuple[RunRecord, float]] = {}
    total = len(models) * config.seeds
    for seed, size, name in itertools.product(range(config.seeds), config.sizes, config.models):
        folder_name = _run_folder(config, size, seed)
        is_missing = work.is_missing(name, folder_name)
        progress.say(f"{name}, {config.size_text(size)}, seed {seed}")
        training = work.training(name, size, seed=seed)
        request = work.request(name, models[name, size], training, size=size, folder=folder_name)
        record, cpu_s = work.finish(request, size=size, read_test=True)
        runs[name, size, seed] = record, cpu_s
        if is_missing:
            remaining.ended(f"{name}/{folder_name}", cpu_s)
            shown = ", ".join(f"{metric} {record.test[metric]:.5f}" for metric in config.metrics)
            progress.say(
                f"{name}, {config.size_text(size)}, seed {seed}: {shown}; {cpu_s:.0f} CPU seconds; "
                f"{len(runs)} of {total} runs, about {as_time(remaining.seconds)} left"
            )
    return _study(work, models, runs)


def _base_of(base: RunConfig, *, config: ScaleConfig, size: float) -> RunConfig:
    """Return the run of a size on its data: with histories of that length, where sizes are lengths."""
    schema = base.table_schema
    if not config.lengths or schema.events is None:
        return base
    events = dataclasses.replace(schema.events, max_length=int(size))
    return dataclasses.replace(base, table_schema=dataclasses.replace(schema, events=events))


def refuse_other_samples(datasets: Mapping[float, PreparedData]) -> None:
    """Refuse data of several lengths whose samples are not the same: their losses could not be compared.

    Args:
        datasets: prepared, by length.

    Raises:
        DataError: a length that has other samples.
    """
    parts = {
        size: tuple((each.num_rows, each.row_sum) for each in (data.train, data.valid, data.test) if each is not None)
        for size, data in datasets.items()
    }
    first = min(parts)
    for size, found in parts.items():
        if found != parts[first]:
            raise DataError(
                expected=f"the same samples at every length: {_counts(parts[first])} at {first:g}",
                found=f"{_counts(found)} at {size:g}",
                where="ziggurat scale, --lengths",
                ways_out=(
                    "[events] without min_history and reach, which choose samples by their histories",
                    "lengths that are closer together",
                ),
            )


def _counts(parts: tuple[tuple[int, int], ...]) -> str:
    return " / ".join(f"{rows:,}" for rows, _ in parts) + " samples"


def _refuse_sizes_alike(work: _Work, models: Mapping[tuple[str, float], BuiltInConfig]) -> None:
    """Refuse sizes of a model that cost the same: no law can be fitted to them, and all runs would be trained for it.

    Raises:
        ConfigError: names the model, and what was asked for and met.
    """
    config = work.config
    for name in config.models:
        flops = [work.flops(models[name, size], size=size) for size in config.sizes]
        for (smaller, less), (larger, more) in itertools.pairwise(zip(config.sizes, flops, strict=True)):
            if more <= less:
                raise ConfigError(
                    expected=f"sizes of {name} that cost more, one after the other",
                    found=f"{more:,} FLOPs a sample at {config.size_text(larger)}, after {less:,} at "
                    f"{config.size_text(smaller)}",
                    where="ziggurat scale, before anything is trained",
                    ways_out=(
                        "sizes that are further apart: fewer --points, or a wider --compute",
                        f"leave {name} out, if it grows no further",
                    ),
                )


def _say_cost(work: _Work, models: Mapping[tuple[str, float], BuiltInConfig]) -> Remaining:
    """Estimate and say what the missing runs will take."""
    config = work.config
    sizes = config.sizes
    rate_sizes = sizes if config.rates_for is RatesFor.EVERY_SIZE else sizes[:1]
    rates = {
        f"{name}/{_rate_folder(config, size, rate)}": (name, size)
        for name in config.models
        for size in rate_sizes
        for rate in config.rates
        if work.is_missing(name, _rate_folder(config, size, rate))
    }
    runs = {
        f"{name}/{_run_folder(config, size, seed)}": (name, size)
        for seed, size, name in itertools.product(range(config.seeds), sizes, config.models)
        if work.is_missing(name, _run_folder(config, size, seed))
    }
    missing = rates | runs
    if not missing:
        return Remaining(estimates={})
    # Before rates are chosen all sizes of a model are trained alike.
    training = {name: work.training(name, sizes[0]) for name in dict.fromkeys(name for name, _ in missing.values())}

    def measured(name: str, size: float) -> MeasuredSize:
        model = models[name, size]
        return MeasuredSize(model=model, data=work.datasets[size], flops=work.flops(model, size=size))

    costs = {
        name: measure(measured(name, sizes[0]), measured(name, sizes[-1]), training=settings)
        for name, settings in training.items()
    }
    steps = {name: _num_steps(settings, num_rows=work.data.train.num_rows) for name, settings in training.items()}
    estimates = {
        run: costs[name].seconds(work.flops(models[name, size], size=size), steps=steps[name])
        for run, (name, size) in missing.items()
    }
    remaining = Remaining(estimates=estimates)
    at_most = "at most " if config.rates_for is RatesFor.EVERY_SIZE else ""
    work.progress.say(
        f"{len(runs)} runs of {work.data.train.num_rows:,} rows"
        + (f" and {at_most}{len(rates)} to choose learning rates" if rates else "")
        + f": {at_most or 'about '}{as_time(remaining.seconds)} in all"
    )
    return remaining


def _choose_rates(
    work: _Work, models: Mapping[tuple[str, float], BuiltInConfig], *, name: str, remaining: Remaining
) -> None:
    """Choose the learning rate of each size of a model, smallest first, by validation data."""
    config = work.config
    rates = tuple(sorted(set(config.rates)))
    if not rates:
        return

    def try_rate(size: float, rate: float) -> TriedRate:
        folder = _rate_folder(config, size, rate)
        is_missing = work.is_missing(name, folder)
        training = work.training(name, size, rate=rate, seed=SEARCH_SEED)
        request = work.request(name, models[name, size], training, size=size, folder=folder)
        tried = work.finish_rate(request, size=size, rate=rate)
        if is_missing:
            remaining.ended(f"{name}/{folder}", tried.cpu_s)
            reached = "diverged" if tried.has_diverged else f"validation loss {tried.valid:.5f}"
            work.progress.say(f"{name}, {config.size_text(size)}, learning rate {rate:g}: {reached}")
        return tried

    first, *larger = config.sizes
    tried = tuple(try_rate(first, rate) for rate in rates)
    best = best_rate(tried)
    work.tried[name, first] = tried
    work.rates[name, first] = best
    for size in larger:
        if config.rates_for is RatesFor.EVERY_SIZE:
            tried = descend(rates, start=best, try_rate=functools.partial(try_rate, size))
            best = best_rate(tried)
            work.tried[name, size] = tried
            for rate in set(rates) - {each.rate for each in tried}:
                remaining.skipped(f"{name}/{_rate_folder(config, size, rate)}")
        work.rates[name, size] = best


def best_rate(tried: Sequence[TriedRate]) -> float:
    """Return the rate with the lowest validation loss; one that diverged has none.

    Raises:
        ConfigError: all of them diverged.
    """
    best = min(tried, key=lambda each: each.loss)
    if math.isinf(best.loss):
        rates = ", ".join(f"{each.rate:g}" for each in tried)
        raise ConfigError(
            expected="a learning rate that training can follow",
            found=f"each of {rates} diverged",
            where="ziggurat scale, --rates",
            ways_out=f"lower ones: --rates {tried[0].rate / 100:g},{tried[0].rate / 10:g}",
        )
    return best.rate


def descend(rates: Sequence[float], *, start: float, try_rate: Callable[[float], TriedRate]) -> tuple[TriedRate, ...]:
    """Try rates from one downwards, and upwards if none below it is better, for as long as the loss falls.

    Args:
        rates: ascending.
        start: one of them.
        try_rate: returns what a rate reaches.
    """
    first = rates.index(start)
    tried = [try_rate(start)]
    for direction in (rates[:first][::-1], rates[first + 1 :]):
        best = tried[0]
        for rate in direction:
            tried.append(try_rate(rate))
            if not tried[-1].loss < best.loss and not math.isinf(best.loss):
                break
            best = tried[-1]
        if best is not tried[0]:
            break
    return tuple(sorted(tried, key=lambda each: each.rate))


def _study(
    work: _Work,
    models: Mapping[tuple[str, float], BuiltInConfig],
    runs: Mapping[tuple[str, float, int], tuple[RunRecord, float]],
) -> ScaleStudy:
    """Compare laws by the losses of all test rows."""
    config = work.config
    losses, best, notes = _losses_of_rows(work, runs)
    notes += _rates_at_an_end(work)
    has_rows = len(next(iter(losses.values())).sums) > 1
    has_scatter = has_rows or config.seeds > 1
    if config.seeds == 1:
        notes.append(
            "one seed of each size: bands are of other test rows alone, not of other seeds, and models are not "
            "compared; give --seeds 3"
        )
    seeds = range(config.seeds)
    blocks = draw_blocks(len(next(iter(losses.values())).sums), draws=DRAWS, rng=np.random.default_rng(0))
    scaled = []
    fitted = []
    ends = []
    for name in config.models:
        points = tuple(
            ScaledPoint(
                factor=size,
                model=models[name, size],
                learning_rate=work.training(name, size).learning_rate,
                tried=work.tried.get((name, size), ()),
                runs=tuple(
                    ScaledRun(
                        record=runs[name, size, seed][0],
                        losses=losses[name, size, seed],
                        cpu_s=runs[name, size, seed][1],
                    )
                    for seed in seeds
                ),
            )
            for size in config.sizes
        )
        laws = None
        if has_scatter:
            sizes = [[run.losses for run in point.runs] for point in points]
            # Each model has seeds of its own, so its draws do not depend on which others stand beside it.
            drawn = draw_losses(sizes, blocks=blocks, rng=np.random.default_rng((1, *name.encode())))
            means = mean_losses(sizes)
            if config.seeds > 1:
                ends.append(_largest(points[-1], name=name, blocks=blocks))
            if len(points) >= MIN_SIZES:
                compute = [float(point.flops) for point in points]
                laws = compare_laws(compute, means, drawn)
                if config.seeds > 1:
                    fitted.append((name, compute, means, drawn))
        scaled.append(
            ScaledModel(
                name=name,
                points=points,
                laws=laws,
                metric=config.metrics[0],
                has_scatter=has_scatter,
            )
        )
    return ScaleStudy(
        config=config,
        models=tuple(scaled),
        differences=tuple(exponent_difference(first, second) for first, second in itertools.combinations(fitted, 2)),
        ratios=tuple(largest_ratio(first, second) for first, second in itertools.combinations(ends, 2)),
        best_log_loss=None if best is None else best.log_loss,
        num_train=work.data.train.num_rows,
        num_test=0 if work.data.test is None else work.data.test.num_rows,
        notes=tuple(notes),
    )


def _largest(point: ScaledPoint, *, name: str, blocks: np.ndarray) -> LargestSize:
    """Return the losses of a model's largest size, for all rows and for drawn ones."""
    by_run = [(blocks @ run.losses.sums) / np.maximum(blocks @ run.losses.counts, 1.0) for run in point.runs]
    return LargestSize(
        name=name,
        flops=point.flops,
        runs=np.array([run.losses.mean for run in point.runs]),
        rows=np.exp(np.log(np.stack(by_run)).mean(axis=0)),
    )


def _num_steps(training: TrainingConfig, *, num_rows: int) -> int:
    """Return the steps of one pass, or those after which it ends."""
    steps = -(-num_rows // training.loader.batch_size)
    return min(steps, training.max_steps) if training.max_steps else steps


def _rates_at_an_end(work: _Work) -> list[str]:
    """Say which sizes have the smallest or the largest of the rates that their model tried: others may be better."""
    rates = sorted(set(work.config.rates))
    at: dict[tuple[str, float], list[str]] = {}
    for name, size in work.tried:
        rate = work.rates[name, size]
        if len(rates) > 1 and rate in (rates[0], rates[-1]):
            at.setdefault((name, rate), []).append(work.config.size_label(size))
    return [
        f"the learning rate of {name} at {', '.join(sizes)}, {rate:g}, is at an end of those tried: "
        "a better one may lie beyond"
        for (name, rate), sizes in at.items()
    ]


def _losses_of_rows(
    work: _Work, runs: Mapping[tuple[str, float, int], tuple[RunRecord, float]]
) -> tuple[dict[tuple[str, float, int], RunLosses], BestReachable | None, list[str]]:
    """Return the losses of each run in blocks of rows, what is reachable, and notes.

    Where a loss is not the plain mean over rows (a number to predict, weights, several labels), each run is one block.
    """
    folders = {key: work.folder / key[0] / _run_folder(work.config, key[1], key[2]) for key in runs}
    _, labels = scores_of_test(next(iter(folders.values())))
    best = best_of_test(work.base, labels)
    metric = work.config.metrics[0]
    losses = {}
    for key, folder in folders.items():
        scores, labels = scores_of_test(folder)
        of_rows = row_losses(scores, labels, None)
        reached = runs[key][0].test[metric]
        if not np.isclose(of_rows.mean(), reached, rtol=1e-3):
            note = f"bands leave out which rows the test has: {metric} is no plain mean of their log losses"
            one = np.ones(1)
            alone = {each: RunLosses(sums=np.array([run.test[metric]]), counts=one) for each, (run, _) in runs.items()}
            return alone, None, [note]
        losses[key] = in_blocks(of_rows if best is None else row_losses(scores, labels, best))
    notes = []
    if best is None:
        notes.append("the best reachable loss is not known: laws are of the loss itself, and a floor is part of it")
    return losses, best, notes


def _recipes(config: ScaleConfig, *, data: PreparedData, folder: Path, progress: Progress) -> Mapping[str, RunConfig]:
    """Read the recipes that models grow from; none without a study that tuned them.

    Raises:
        ConfigError: they were tuned by another protocol, or on other data.
    """
    if not config.tuned:
        return {}
    tuned = read_tuned(config.tuned, models=config.models, own=config.own)
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
