"""Baselines: what popularity alone reaches, and what a sum of weights does. A trained model is shown beside them.

Gradient-boosted trees are grown beside it, where a library is installed (`trees.py`).

Logistic regression knows every feature and no two of them together, so what a model is better than it is what its
interactions and layers have learned; a model that is not better shows no sign of having learned more than that sum.

    runs/shop/              train DLRM … test auc 0.7419
    runs/shop/baseline/     logistic regression on the same rows: a run of its own, trained once, read afterwards

It is trained by the ordinary trainer: up to 20 passes of 300 to 600 steps, until the validation metric that the run
itself stops by no longer improves in two of them, in FP32, with the run's threads, seed and data. Same machine, same
numbers. On small tables it is as good as scikit-learn's (docs/experiments, "Is our logistic regression as good as
scikit-learn's?"). It costs a lookup of one number a feature and sample and pass. It is trained when asked for: it can
double the time of a small run, and whoever trains on the same data again and again needs it once.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ziggurat.data.preprocess.prepared import PreparedData
from ziggurat.data.preprocess.preprocessing_io import load_preprocessing
from ziggurat.errors import ConfigError
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.features.labels import Outcomes, linear_model_name
from ziggurat.features.schema import Schema
from ziggurat.models import LogisticRegressionConfig
from ziggurat.models.build import ModelConfig
from ziggurat.models.contract.reads import finds_items, is_linear
from ziggurat.recipes.catalogue import logistic_run
from ziggurat.recipes.run_config import RunConfig, load_config
from ziggurat.recipes.warm_start import WarmStartConfig
from ziggurat.runs.data_record import refuse_other_data, refuse_splits_of_stream
from ziggurat.runs.execute import prepare_run, raw_files, train_run
from ziggurat.runs.load import load_run
from ziggurat.runs.quality.paired import ScoredRows, paired_differences, scored_rows
from ziggurat.runs.quality.trees import TreesResult, boosted_trees
from ziggurat.training.config import AUTO_METRIC, Better, EarlyStopConfig
from ziggurat.training.evaluation.evaluate import Evaluation, ordered_batches
from ziggurat.training.metrics.accumulator import auc, metric_names
from ziggurat.training.records.run_folder import TREES, VERSUS, RunFolder
from ziggurat.training.report.page import write_report
from ziggurat.training.report.progress import NoProgress, Progress

_EPOCHS = 20  # at most: validation stops it sooner
_WITHOUT_VALIDATION = 3  # epochs, where nothing says when to stop
_SCORED_ROWS = 4096


@dataclass(frozen=True, kw_only=True)
class Popularity:
    """Score of a sample = smoothed share of positives of its row in one table, from training data.

        score(r) = (positives(r) + s·p) / (count(r) + s),   p = overall share, s = 10

    Args:
        field: index of the single feature in the batch.
        scores: score of every row of its table.
    """

    field: int
    scores: np.ndarray

    @staticmethod
    def fit(batches: Iterable[Batch], *, inputs: InputSpec, feature: str, smoothing: float = 10.0) -> Popularity:
        """Count positives of the first label over one pass of training batches."""
        index = [spec.name for spec in inputs.single].index(feature)
        num_rows = inputs.table(inputs.single[index].table).num_rows
        counts = np.zeros(num_rows)
        positives = np.zeros(num_rows)
        for batch in batches:
            rows = batch.single[index].numpy()
            counts += np.bincount(rows, minlength=num_rows)
            positives += np.bincount(rows, weights=batch.labels[:, 0].numpy(), minlength=num_rows)
        share = positives.sum() / max(1.0, counts.sum())
        return Popularity(field=index, scores=(positives + smoothing * share) / (counts + smoothing))

    def auc(self, batches: Iterable[Batch]) -> float:
        """Exact AUC on batches."""
        scores: list[torch.Tensor] = []
        labels: list[torch.Tensor] = []
        for batch in batches:
            scores.append(torch.from_numpy(self.scores[batch.single[self.field].numpy()]))
            labels.append(batch.labels[:, 0])
        return auc(torch.cat(scores), torch.cat(labels))


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """A linear model beside a run: logistic regression, or linear regression where labels are numbers.

    Args:
        name: what it is called.
        evaluations: by split, as those of the run.
        epochs: passes over the training rows, in all.
        seconds: of this call; a finished baseline is only evaluated again.
        half_widths: by split and metric, half of the 95 % interval of the run's metric minus the baseline's.
        trees: what gradient-boosted trees reach; None without a library, or where they have no part in the metric.
    """

    name: str
    evaluations: dict[str, Evaluation]
    epochs: float
    seconds: float
    half_widths: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    trees: TreesResult | None = None


def train_baseline(
    folder: str | Path, *, models: Sequence[type[ModelConfig]] = (), progress: Progress | None = None
) -> Baseline:
    """Train logistic regression on the rows of a run, in its folder `baseline`, and write the run's report again.

    Args:
        folder: of the run.
        models: config classes of your own; see `load_run`.
        progress: shows passes; what else the trainer says is left out.

    Raises:
        ConfigError: the run is of logistic regression itself, or torchrun started this process.
        DataError: the run's raw data changed since it was trained.
    """
    begin = time.perf_counter()
    run = RunFolder(Path(folder))
    refuse_splits_of_stream(run, asked="a baseline on its rows")
    config = load_config(run.path, models=models)
    check_baseline(config)
    quiet = _Quiet(progress or NoProgress())
    fitted = load_preprocessing(run.preprocessing)
    prepared = prepare_run(config, progress=quiet, fitted=fitted)
    refuse_other_data(
        run,
        prepared,
        data=raw_files(config, progress=quiet),
        asked="a baseline on the rows of the run",
        ways_out=("restore the raw files", "train the run again, in another folder"),
    )
    place = RunFolder(run.baseline)
    # What was begun goes on by its own settings.
    started = place.config.exists()
    wanted = load_config(place.path) if started else baseline_config(config, data=prepared)
    result = train_run(wanted, folder=place.path, resume=started, progress=quiet)
    half_widths, scored = _half_widths(run, place, models=models, progress=quiet)
    VERSUS.write(run.versus, half_widths)
    trees = _grown_trees(config, wanted, run=run, scored=scored, progress=quiet)
    write_report(run.path)
    steps_per_epoch = -(-prepared.train.num_rows // wanted.training.loader.batch_size)
    return Baseline(
        name=linear_model_name(label.task for label in config.table_schema.labels),
        evaluations=result.evaluations,
        epochs=result.fit.steps / max(1, steps_per_epoch),
        seconds=time.perf_counter() - begin,
        half_widths=half_widths,
        trees=trees,
    )


def _grown_trees(
    config: RunConfig,
    linear: RunConfig,
    *,
    run: RunFolder,
    scored: Mapping[str, ScoredRows],
    progress: Progress,
) -> TreesResult | None:
    """Grow trees by the metric that decides in a run, and keep what they reach beside it.

    Args:
        config: of the run.
        linear: of its baseline, whose lists are pooled: trees read no sequences.
        run: its folder.
        scored: by split, the scores of the run.
        progress: shows phases.
    """
    metric = config.stop_metric()
    prepared = prepare_run(linear, progress=progress, fitted=load_preprocessing(RunFolder(run.baseline).preprocessing))
    progress.begin("grow trees", total=None)
    grown = boosted_trees(
        prepared,
        metric=metric,
        threads=config.training.threads,
        seed=config.training.seed,
        scored=scored,
    )
    progress.end()
    if grown is None:
        run.trees.unlink(missing_ok=True)
    else:
        TREES.write(run.trees, grown.to_json(metric=metric))
    return grown


def _half_widths(
    run: RunFolder, place: RunFolder, *, models: Sequence[type[ModelConfig]], progress: Progress
) -> tuple[dict[str, dict[str, float]], dict[str, ScoredRows]]:
    """Return error bars of the differences between a run and its baseline, and the run's scores, by split of both."""
    found: dict[str, dict[str, float]] = {}
    ours: dict[str, ScoredRows] = {}
    loaded = [load_run(run.path, models=models), load_run(place.path)]
    prepared = [prepare_run(each.config, progress=progress, fitted=each.preprocessing) for each in loaded]
    for split in ("valid", "test"):
        datasets = [getattr(each, split) for each in prepared]
        if any(dataset is None or not dataset.num_rows for dataset in datasets):
            continue
        scored: list[ScoredRows] = []
        for each, dataset in zip(loaded, datasets, strict=True):
            batches = ordered_batches(dataset, batch_size=_SCORED_ROWS).batches(epoch=0)
            scored.append(scored_rows(each.model, batches))
        ours[split] = scored[0]
        # Both models read the same rows in the same order, so that the units of either are those of both.
        differences = paired_differences(*(each.metrics for each in scored), units=scored[-1].units)
        found[split] = {name: each.half_width for name, each in differences.items() if math.isfinite(each.half_width)}
    return found, ours


def check_baseline(config: RunConfig) -> None:
    """Refuse what cannot have a baseline, before anything is trained.

    Raises:
        ConfigError: see `train_baseline`.
    """
    if is_linear(config.model):
        name = linear_model_name(label.task for label in config.table_schema.labels)
        raise ConfigError(
            expected=f"a model to compare with {name}",
            found=f"{name} itself",
            where="baseline",
            ways_out="leave --baseline out",
        )
    schema = config.table_schema
    if schema.events is not None:
        raise ConfigError(
            expected="a run on samples: a linear model has no order of events to learn from",
            found="a schema with [events]",
            where="baseline",
            ways_out=(
                "leave --baseline out",
                "train another model on the same events, table_sasrec or table_hstu, then: ziggurat compare RUN OTHER",
            ),
        )
    if finds_items(config.model):
        chosen_alone = any(label.outcomes is Outcomes.POSITIVE_ONLY for label in schema.labels)
        ranker = "train a ranker on the same rows: ziggurat train table_dlrm … --baseline"
        raise ConfigError(
            expected="a model that scores samples: a linear model finds no items among all",
            found=f"{config.recipe or type(config.model).__name__}, which is judged by how it ranks all items",
            where="baseline",
            # Where every row was chosen, a ranker has nothing to tell chosen items from.
            ways_out=("leave --baseline out", *(() if chosen_alone else (ranker,))),
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            expected="one process: the baseline is trained on one device",
            found=f"{os.environ['WORLD_SIZE']} ranks",
            where="baseline",
            ways_out="train without --baseline, then: ziggurat report RUN --baseline",
        )


def baseline_config(config: RunConfig, *, data: PreparedData) -> RunConfig:
    """Logistic regression on the data of a run.

    Args:
        config: of the run.
        data: its rows.
    """
    training = config.training
    stop = config.training.early_stop
    schema = config.table_schema
    if stop.metric not in metric_names(schema.labels, has_groups=bool(schema.group)):  # a function of the user's own
        stop = EarlyStopConfig(metric=AUTO_METRIC, better=Better.AUTO)
    linear = dataclasses.replace(
        config,
        recipe=f"{config.recipe or 'run'}_baseline",
        table_schema=pooled_schema(schema),
        model=LogisticRegressionConfig(),
        towers=None,
        training=dataclasses.replace(training, early_stop=stop),
        warm_start=WarmStartConfig(),
    )
    epochs = _EPOCHS if data.valid is not None else _WITHOUT_VALIDATION
    return logistic_run(linear, rows=data.train.num_rows, epochs=epochs)


def pooled_schema(schema: Schema) -> Schema:
    """The schema with every list pooled: logistic regression reads no sequences."""
    return dataclasses.replace(schema, features=tuple(each.pooled() for each in schema.features))


class _Quiet:
    """Shows phases and warnings; what else is said is a detail."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def begin(self, what: str, *, total: int | None) -> None:
        self._progress.begin(f"baseline, {what}", total=total)

    def update(self, done: int, *, note: str = "", total: int | None = None) -> None:
        self._progress.update(done, note=note, total=total)

    def say(self, text: str) -> None:
        """Show a warning; anything else only to whoever asked for all of it."""
        show = self._progress.say if text.startswith("warning") else self._progress.detail
        show(f"baseline, {text}")

    def detail(self, text: str) -> None:
        self._progress.detail(f"baseline, {text}")

    def end(self) -> None:
        self._progress.end()
