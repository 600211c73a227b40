"""Compare models: the same data, the same protocol, the same budget; chosen by validation data, test data read last.

    for each model:   K variants, seed 0  ──►  the best by validation  ──►  seeds 0 … S−1  ──►  test, once a run
                      (`--trials K`)                                        (`--seeds S`)

With `tuned` each model is trained by the recipe that `ziggurat tune` has found for it (`tuned.py`), in tuned_seed<s>.

Every run lives in a folder of its own, OUT/<data>-<protocol>/<model>/variant<k>_seed<s>. A comparison that is stopped
or killed goes on where it was when it is called again; finished runs are read, not repeated. Asking for more seeds or
more models later trains what is missing. A run that was made with other settings than those asked for is an error, not
a silent reuse, and so is a folder that holds runs of another protocol.

With `--precisions` each model is trained once more for each precision, as an entry of its own with the same seeds:

    OUT/<data>-<protocol>/<model>/…              in the precision that the protocol says
    OUT/<data>-<protocol>/<model>-<precision>/…  in another one

An entry is then set beside its model in the first precision, and beside the other models in its own precision.

Next-item models and rankers of one log answer two questions, each with data and a table of its own
(`compare_questions.py`); all are trained in the same folder.

Its result is means and sample standard deviations over seeds, costs, and for every pair of models the paired difference
with its tests (`compare_statistics.py`).
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from ziggurat.data.encoded.loader import LoaderConfig
from ziggurat.data.preprocess.prepared import PreparedData
from ziggurat.errors import ConfigError, SchemaError
from ziggurat.features.schema import Schema
from ziggurat.models import build_model
from ziggurat.models.build import ModelConfig
from ziggurat.models.converted import take_precision
from ziggurat.precision import Precision
from ziggurat.precision.choice import resolve_precision
from ziggurat.recipes.labels_check import check_labels
from ziggurat.recipes.protocols import (
    Protocol,
    averaged,
    bars_model,
    bars_training,
    require_one_protocol,
    scale_model,
    scale_training,
)
from ziggurat.recipes.run_config import RunConfig, run_config_to_json
from ziggurat.runs.execute import prepare_run
from ziggurat.specification import origin_of
from ziggurat.studies.compare_data import ComparedData, data_run
from ziggurat.studies.compare_own import OwnData, main_metric, settings_for_rows
from ziggurat.studies.compare_questions import Question, questions_of
from ziggurat.studies.compare_runs import (
    RunRecord,
    RunRequest,
    finish_run,
    refuse_one_class,
    require_splits,
    test_scores,
)
from ziggurat.studies.compare_settings import VARIANTS, ModelSettings, settings_of_all, variant
from ziggurat.studies.compare_statistics import (
    PairedDifference,
    RowTest,
    paired_difference,
    row_test_of,
)
from ziggurat.studies.tuned import Tuned, read_tuned
from ziggurat.training import metrics
from ziggurat.training.computed_with import computed_with, difference_notes
from ziggurat.training.config import TrainingConfig
from ziggurat.training.metrics.metric import higher_is_better
from ziggurat.training.records.run_folder import RunFolder
from ziggurat.training.report.progress import NoProgress, Progress
from ziggurat.typed import Count, CountOrNone, Threads, checked


@dataclass(frozen=True, kw_only=True)
@checked
class CompareConfig:
    """Settings of a comparison of models.

    Args:
        data: a built-in data set, or data of one's own.
        models: names, as `compare_settings.py` and `compare_own.py` list them.
        seeds: S, runs of each chosen model.
        trials: K, variants of each model that validation data chooses from; 1: the settings as they are.
        protocol: how all of them are trained.
        source: folder or file of the raw data; "" for the cache or the default source.
        rows: of the synthetic data.
        threads: of each run; sums depend on it.
        max_epochs: fewer epochs than the protocol's, for trying things out; 0: the protocol's.
        own: config classes of your own, whose kinds `models` may name.
        precisions: that every model is trained in, the first one being what the others are set beside; none: the
            protocol's.
        judged_by: the metric that models are judged by; "": that of the data.
        tuned: folder of a study of `ziggurat tune`, whose recipes are trained; "": settings as they are given.
        read_test_again: whether test data may be read that another comparison has read with that study's recipes.
    """

    data: ComparedData | OwnData
    models: tuple[str, ...]
    seeds: Count = 5
    trials: int = 1
    protocol: Protocol = Protocol.BARS
    source: str = ""
    rows: int = 1_000_000
    threads: Threads = 1
    max_epochs: CountOrNone = 0
    own: tuple[type[ModelConfig], ...] = ()
    precisions: tuple[Precision, ...] = ()
    judged_by: str = ""
    tuned: str = ""
    read_test_again: bool = False

    @property
    def data_name(self) -> str:
        """The name of the data in folders and titles."""
        return self.data.name if isinstance(self.data, OwnData) else self.data.value

    @property
    def metric(self) -> str:
        """The metric that models are judged by."""
        if self.judged_by:
            return self.judged_by
        if not isinstance(self.data, OwnData):
            return metrics.USUAL
        return self.data.metric or main_metric(self.data.run.table_schema)

    def __post_init__(self) -> None:
        doubled = len(set(self.models)) != len(self.models)
        if not self.models or doubled or not 1 <= self.trials <= len(VARIANTS):
            raise ConfigError(
                expected=f"models, each named once; trials of 1 … {len(VARIANTS)}",
                found=f"models = {','.join(self.models)}, trials = {self.trials}",
                where="settings of a comparison",
                ways_out="correct the number or the list",
            )
        if len(set(self.precisions)) != len(self.precisions):
            raise ConfigError(
                expected="precisions, each named once",
                found=", ".join(map(str, self.precisions)),
                where="settings of a comparison",
                ways_out=f"--precisions {','.join(dict.fromkeys(map(str, self.precisions)))}",
            )
        if self.tuned and self.trials > 1:
            raise ConfigError(
                expected="settings that were tuned, or variants to choose from",
                found=f"tuned = {self.tuned} and trials = {self.trials}",
                where="settings of a comparison",
                ways_out=("leave --trials out", "leave --tuned out"),
            )
        if self.protocol is Protocol.RECIPE and not isinstance(self.data, OwnData):
            raise ConfigError(
                expected="a recipe, or data of your own, for the protocol recipe",
                found=self.data_name,
                where="settings of a comparison",
                ways_out=("--protocol bars", "ziggurat compare movielens_dlrm --models dnn,dcn_v2"),
            )


@dataclass(frozen=True, kw_only=True)
class ComparedModel:
    """One model's place in a comparison, in one precision.

    Args:
        name: of the model, and of the precision where several are compared: "dlrm mx9".
        model: name of the model alone.
        precision: that it was trained in.
        variant: the variant that validation data chose.
        trials: validation metric of every variant tried.
        runs: one record a seed.
        folders: of the runs.
        tries: of the study that tuned it; 0: it was not tuned.
    """

    name: str
    model: str
    precision: Precision
    variant: int
    trials: dict[int, float]
    runs: tuple[RunRecord, ...]
    folders: tuple[Path, ...]
    tries: int = 0

    def values(self, metric: str, *, split: str = "test") -> list[float]:
        """A metric of every seed."""
        return [(run.test if split == "test" else run.valid)[metric] for run in self.runs]

    def mean_sd(self, metric: str, *, split: str = "test") -> tuple[float, float]:
        """Mean and sample standard deviation over seeds (NaN for one seed)."""
        values = self.values(metric, split=split)
        return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The findings of a comparison.

    Args:
        config: what was asked for.
        models: in the order asked for.
        notes: what a reader should know besides.
        differences: first minus second of the test metric, for every pair (first, second) of models, and for each model
            in another precision than the first one (first) and in that one (second).
        question: what the models were asked, where others are asked something else; "" elsewhere.
        ranking: of a log's next-item models: what its rankers found, which were asked another question.
    """

    config: CompareConfig
    models: tuple[ComparedModel, ...]
    notes: tuple[str, ...] = ()
    differences: dict[tuple[str, str], PairedDifference] = field(default_factory=dict)
    question: str = ""
    ranking: Comparison | None = None

    @property
    def tables(self) -> tuple[Comparison, ...]:
        """This comparison, and that of another question if there is one: a table each."""
        return (self,) if self.ranking is None else (self, self.ranking)

    def to_json(self) -> dict[str, object]:
        """Plain data: everything but the folders."""
        entries = {entry.name: getattr(self.config, entry.name) for entry in dataclasses.fields(self.config)}
        own = self.config.data
        return {
            "config": {key: _plain(value) for key, value in entries.items()} | {"data": self.config.data_name},
            "metric": self.config.metric,
            **({"question": self.question} if self.question else {}),
            **({"run": run_config_to_json(own.run)} if isinstance(own, OwnData) else {}),
            "models": [
                {
                    "name": m.name,
                    "model": m.model,
                    "precision": m.precision.name,
                    "variant": m.variant,
                    "trials": m.trials,
                    **({"tries": m.tries} if m.tries else {}),
                    "runs": [run.to_json() for run in m.runs],
                }
                for m in self.models
            ],
            "notes": list(self.notes),
            "differences": [
                {"first": first, "second": second}
                | {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in dataclasses.asdict(d).items()}
                for (first, second), d in self.differences.items()
            ],
            **({} if self.ranking is None else {"ranking": self.ranking.to_json()}),
        }


def compare(config: CompareConfig, *, out: str | Path, progress: Progress | None = None) -> Comparison:
    """Run what is missing, and put everything together.

    Args:
        config: what to compare.
        out: folder of all comparisons.
        progress: where to show it.

    Raises:
        ConfigError: unknown model, or one that does not fit the data; a precision that this machine or a model lacks;
            runs of other settings or of another protocol in the folder.
    """
    progress = progress or NoProgress()
    asked = questions_of(config.models, config.data, own=config.own)
    begun = [_begin(config, question, out=out, progress=progress) for question in asked]
    torch.set_num_threads(config.threads)
    found = [_answer(place, progress=progress) for place in begun]
    return dataclasses.replace(found[0], ranking=found[1]) if len(found) > 1 else found[0]


def _begin(config: CompareConfig, question: Question, *, out: str | Path, progress: Progress) -> _Place:
    """The data of one question, with all of its models found to fit."""
    config = dataclasses.replace(config, data=question.data, models=question.models)
    base = base_run(config)
    chosen = settings_of_all(config.models, config.data, own=config.own)  # unknown names fail before any work
    tuned = _tuned(config)
    if tuned is not None:
        # What is trained is what must fit: a model of one's own may have no settings that fit all data.
        chosen = {name: dataclasses.replace(each, model=tuned.recipes[name].model) for name, each in chosen.items()}
    _refuse_missing_precisions(config.precisions)
    if isinstance(config.data, OwnData) and tuned is None and (said := settings_for_rows(config.data)):
        progress.say(f"note: {said}")
    data = prepare_run(base, progress=progress)
    require_splits(data, with_test=True)
    refuse_one_class(data, metric=config.metric, splits=("valid", "test"))
    refuse_what_does_not_fit(chosen, schema=base.table_schema, data=data)
    _refuse_unreached_products(chosen, config.precisions, data=data)
    folder = Path(out) / f"{config.data_name}-{config.protocol.value}"
    if tuned is not None:
        tuned.refuse_other_data(data)
    place = _Place(config, base=base, folder=folder, data=data, question=question, chosen=chosen, tuned=tuned)
    place.refuse_other_protocols()
    if tuned is not None:
        place.note_that_test_is_read(tuned)
    return place


def _tuned(config: CompareConfig) -> Tuned | None:
    """Read the recipes that a comparison trains, if it trains any, and find that they may be compared so."""
    if not config.tuned:
        return None
    tuned = read_tuned(config.tuned, models=config.models, own=config.own)
    if (config.protocol, config.metric) != (tuned.protocol, tuned.metric):
        raise ConfigError(
            expected=f"the protocol and metric of tuning: {tuned.protocol.value}, {tuned.metric}",
            found=f"{config.protocol.value}, {config.metric}",
            where=f"settings of a comparison, tuned = {config.tuned}",
            ways_out=(f"--protocol {tuned.protocol.value}", f'judged_by="{tuned.metric}" in Python', "tune anew"),
        )
    tuned.refuse_fewer_epochs(config.max_epochs)
    tuned.refuse_seeds(config.seeds)
    return tuned


def _answer(place: _Place, *, progress: Progress) -> Comparison:
    """Train what is missing of one question's models, and put them together."""
    models = []
    question = place.question
    entries = list(_entries(place.chosen, place.config.precisions))
    for number, entry in enumerate(entries, start=1):
        progress.say(f"[{number}/{len(entries)}] {entry.name}")
        models.append(_compare_one(place, entry, progress=progress))
    weighted = bool(place.base.table_schema.weight)
    notes = [*question.notes, *place.notes, *(["rows are weighted, so there is no test over rows"] if weighted else [])]
    notes += _precision_notes(models)
    found = differences(models, metric=place.config.metric, over_rows=not weighted)
    return Comparison(
        config=place.config, models=tuple(models), notes=tuple(notes), differences=found, question=question.text
    )


def _precision_notes(models: Sequence[ComparedModel]) -> list[str]:
    """Say in what runs differ by accident, and what the metrics of rounded products are."""
    facts = [computed_with(RunFolder(folder)) for model in models for folder in model.folders]
    precisions = dict.fromkeys(model.precision for model in models)
    if len(precisions) > 1:  # they differ because they were asked to
        facts = [{name: value for name, value in each.items() if name != "precision"} for each in facts]
    notes = difference_notes(facts)
    rounded = [str(each) for each in precisions if each.arithmetic is not None]
    if rounded:
        notes.append(
            f"metrics of {', '.join(rounded)} are of a network whose products are rounded, as in training; "
            "a run that is loaded computes in FP32"
        )
    return notes


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """A model, and the precision that it is trained in; None: the protocol's."""

    name: str
    model: str
    settings: ModelSettings
    precision: Precision | None


def _entries(chosen: Mapping[str, ModelSettings], precisions: Sequence[Precision]) -> Iterator[_Entry]:
    """Yield every model in every precision."""
    for model, settings in chosen.items():
        for precision in precisions or (None,):
            name = f"{model} {precision}" if len(precisions) > 1 else model
            yield _Entry(name=name, model=model, settings=settings, precision=precision)


def base_run(config: CompareConfig) -> RunConfig:
    """Data and schema of a comparison, and for data of one's own its training settings."""
    if isinstance(config.data, OwnData):
        return config.data.run
    return data_run(config.data, source=config.source, rows=config.rows)


def refuse_what_does_not_fit(chosen: Mapping[str, ModelSettings], *, schema: Schema, data: PreparedData) -> None:
    """Build every model without its tables: one that does not fit fails before others have trained for hours."""
    for name, settings in chosen.items():
        try:
            check_labels(schema, model=settings.model)
            build_model(settings.model, data.inputs, seed=0, draw_tables=False)
        except (ConfigError, SchemaError) as error:
            raise ConfigError(
                expected=error.expected,
                found=error.found,
                where=f"model {name}, {error.where}",
                ways_out=(f"leave {name} out of --models", *error.ways_out),
            ) from error


def _refuse_missing_precisions(precisions: Sequence[Precision]) -> None:
    """A precision that this machine lacks fails before any model has trained."""
    for precision in precisions:
        if precision.is_measured:
            continue
        try:
            resolve_precision(precision, device=torch.device("cpu"))
        except ConfigError as error:
            raise _without(precision, error) from error


def _refuse_unreached_products(
    chosen: Mapping[str, ModelSettings], precisions: Sequence[Precision], *, data: PreparedData
) -> None:
    """Convert every model to every precision, on its shapes: what cannot be converted fails before others trained."""
    for name, settings in chosen.items():
        for precision in precisions:
            model = build_model(settings.model, data.inputs, seed=0, draw_tables=False)
            try:
                take_precision(model, precision)
            except ConfigError as error:
                raise _without(precision, error, model=name) from error


def _without(precision: Precision, error: ConfigError, *, model: str = "") -> ConfigError:
    return ConfigError(
        expected=error.expected,
        found=error.found,
        where=f"precision {precision}{f' of {model}' if model else ''}, {error.where}",
        ways_out=(
            f"leave {precision} out of --precisions",
            *((f"leave {model} out of --models", *error.ways_out) if model else ()),
        ),
    )


def _row_parts(model: ComparedModel, row_test: RowTest) -> object:
    """Return what a test over rows takes of one model: its runs scored the same rows."""
    loaded = [test_scores(folder) for folder in model.folders]
    # NaN is a label that nobody knows: such a row tests nothing.
    known = ~np.isnan(loaded[0][1])
    scores = [each[known] for each, _ in loaded]
    return row_test.parts(scores, loaded[0][1][known])


def differences(
    models: Sequence[ComparedModel], *, metric: str, over_rows: bool = True
) -> dict[tuple[str, str], PairedDifference]:
    """Paired differences of the test metric, over seeds and over rows.

    Models are set beside each other within a precision; each precision of a model beside the first one.

    Args:
        models: with their runs on the same test rows.
        metric: AUC is tested over rows by DeLong's test, RMSE by the paired squared errors; others over seeds alone.
        over_rows: False where no test over rows is right.
    """
    row_test = row_test_of(metric) if over_rows else None
    parts: dict[str, object] = {}
    if row_test is not None:
        parts = {model.name: _row_parts(model, row_test) for model in models}
    found = {}
    for first, second in _pairs(models):
        over_seeds = paired_difference(first.values(metric), second.values(metric))
        if row_test is not None:
            _, error, p = row_test.compare(parts[first.name], parts[second.name])
            over_seeds = dataclasses.replace(over_seeds, rows_p=p, rows_error=error)
        found[first.name, second.name] = over_seeds
    return found


def _pairs(models: Sequence[ComparedModel]) -> Iterator[tuple[ComparedModel, ComparedModel]]:
    """Yield what is set beside each other: what a precision costs each model, then models within a precision."""
    reference: dict[str, ComparedModel] = {}
    for each in models:
        first = reference.setdefault(each.model, each)
        if first is not each:
            yield each, first
    for index, first in enumerate(models):
        for second in models[index + 1 :]:
            if first.precision is second.precision:
                yield first, second


class _Place:
    """Folder, data and models of one question of a comparison."""

    def __init__(
        self,
        config: CompareConfig,
        *,
        base: RunConfig,
        folder: Path,
        data: PreparedData,
        question: Question,
        chosen: Mapping[str, ModelSettings],
        tuned: Tuned | None = None,
    ) -> None:
        self.tuned = tuned
        self.notes: list[str] = []
        self.config = config
        self.base = base
        self.folder = folder
        self.data = data
        self.question = question
        self.chosen = chosen

    def request(self, entry: _Entry, settings: ModelSettings, *, index: int, seed: int) -> RunRequest:
        """The run of one variant and seed."""
        config = self.config
        if self.tuned is not None:
            base = self.tuned.applied(entry.model, self.base)
        else:
            model, training = settings_by_protocol(
                settings,
                protocol=config.protocol,
                base=self.base,
                metric=config.metric,
                num_rows=self.data.train.num_rows,
            )
            base = dataclasses.replace(self.base, model=model, training=training)
        training = base.training
        loader: LoaderConfig = dataclasses.replace(training.loader, seed=seed)
        training = dataclasses.replace(training, seed=seed, threads=config.threads, loader=loader)
        folder = self.folder / entry.model
        if entry.precision is not None and entry.precision is not training.precision:
            folder = self.folder / f"{entry.model}-{entry.precision}"
            training = dataclasses.replace(training, precision=entry.precision)
        if config.max_epochs:
            training = dataclasses.replace(training, epochs=min(training.epochs, config.max_epochs))
        run = dataclasses.replace(base, recipe=f"compare_{config.data_name}_{entry.model}", training=training)
        return RunRequest(
            model=entry.model,
            variant=index,
            config=run,
            folder=folder / (f"variant{index}_seed{seed}" if self.tuned is None else f"tuned_seed{seed}"),
            protocol=Protocol.RECIPE if config.protocol is Protocol.RECIPE else None,
            metric=config.metric,
        )

    def note_that_test_is_read(self, tuned: Tuned) -> None:
        """Write down in the folder of the study that test data is read with its recipes.

        Raises:
            ConfigError: another comparison has read it.
        """
        models = list(self.chosen)
        said = tuned.note_that_test_is_read(models, out=self.folder, read_again=self.config.read_test_again)
        tries = {name: tuned.tries[name] for name in models}
        self.notes += [said] if said else []
        if len(set(tries.values())) > 1:
            counts = ", ".join(f"{name} {count}" for name, count in tries.items())
            self.notes.append(f"models were not tuned with the same number of tries: {counts}")

    def refuse_other_protocols(self) -> None:
        """Runs of another protocol must not have come into this folder."""
        found = []
        for path in sorted(self.folder.glob("*/*/run.json")):
            record = RunRecord.load(path.parent)
            if record is not None and record.protocol != self.config.protocol.value:
                found.append(f"{path.parent}: {record.protocol}")
        if found:
            raise ConfigError(
                expected=f"runs of the protocol {self.config.protocol.value} alone",
                found="; ".join(found[:3]),
                where=str(self.folder),
                ways_out=("move them away", "choose another folder: --out FOLDER"),
            )


def _compare_one(place: _Place, entry: _Entry, *, progress: Progress) -> ComparedModel:
    config = place.config
    name = entry.name
    trials: dict[int, float] = {}
    of_rates = config.protocol is Protocol.RECIPE
    if config.trials > 1:
        for index in range(config.trials):
            request = place.request(entry, variant(entry.settings, index, of_rates=of_rates), index=index, seed=0)
            progress.say(f"{name}: variant {index + 1} of {config.trials}, by validation data")
            record = finish_run(request, data=place.data, read_test=False, progress=progress)
            trials[index] = record.valid[config.metric]
    sign = 1.0 if higher_is_better(config.metric) else -1.0
    index = max(trials, key=lambda key: sign * trials[key], default=0)
    chosen = variant(entry.settings, index, of_rates=of_rates)
    requests = [place.request(entry, chosen, index=index, seed=seed) for seed in range(config.seeds)]
    if not of_rates:
        require_one_protocol([(name, request.config) for request in requests])
    runs = []
    for number, request in enumerate(requests, start=1):
        progress.say(f"{name}: seed {number} of {config.seeds}")
        runs.append(finish_run(request, data=place.data, read_test=True, progress=progress))
    folders = tuple(request.folder for request in requests)
    return ComparedModel(
        name=name,
        model=entry.model,
        precision=requests[0].config.training.precision,
        variant=index,
        trials=trials,
        runs=tuple(runs),
        folders=folders,
        tries=0 if place.tuned is None else place.tuned.tries[entry.model],
    )


def settings_by_protocol(
    settings: ModelSettings, *, protocol: Protocol, base: RunConfig, metric: str, num_rows: int
) -> tuple[ModelConfig, TrainingConfig]:
    """Return the settings of model and training that a protocol gives, without seeds.

    Args:
        settings: of the model.
        protocol: how it is trained.
        base: data, and with a recipe its training settings.
        metric: that decides.
        num_rows: of training.
    """
    if protocol is Protocol.RECIPE:
        return settings.model, recipe_training(base.training, rate=settings.rate, metric=metric)
    if protocol is Protocol.SCALE:
        return scale_model(settings.model), scale_training(num_rows=num_rows)
    training = bars_training(embedding_l2=settings.embedding_l2)
    stop = dataclasses.replace(training.early_stop, metric=metric)
    training = dataclasses.replace(training, early_stop=stop)
    training = averaged(training) if protocol is Protocol.BARS_AVERAGED else training
    return bars_model(settings.model), training


def recipe_training(training: TrainingConfig, *, rate: float, metric: str) -> TrainingConfig:
    """Training settings of a recipe for one variant: both learning rates times `rate`, stopping by `metric`."""
    return dataclasses.replace(
        training,
        learning_rate=training.learning_rate * rate,
        table_learning_rate=training.table_learning_rate * rate,
        early_stop=dataclasses.replace(training.early_stop, metric=metric),
    )


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [origin_of(each) if isinstance(each, type) else _plain(each) for each in value]
    return getattr(value, "value", value)
