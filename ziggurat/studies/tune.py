"""Tune models: the same search for each, by validation data alone; what is found is a recipe file a model.

    for each model:   try 0: settings as given  ──►  try 1, 2, …: settings that the sampler asks for
                      each: trained by seed 1000 ──►  validation at each evaluation ──►  pruned, or complete
                      the best complete try      ──►  OUT/<model>.json  ──►  ziggurat compare --tuned OUT

Equal budgets, counted in tries (`budget`), in compute (`flops`: FLOPs of a row times rows, steps and evaluations) and
in hours (`hours`, all workers together, divided equally between models); whichever is used up first ends a model's
search, and the report says what each has spent of all three. Models take turns, so a study that is stopped early is
still an equal one.

A try is a run as those of a comparison are (`compare_runs.py`): same data, same protocol, same trainer, in a folder of
its own. It is never given the test rows: the prepared data that it gets has none.

    OUT/tries/<model>/try<k>_seed<s>/   config.json, the log, run.json of a complete one; no checkpoints once it ended
    OUT/journal.log …                   see `tune_study.py`: how workers share a study, and who goes on after a kill
    OUT/tuned.json, <model>.json        see `tuned.py`
    OUT/report.html                     see `tune_report.py`
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import statistics
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ziggurat.commands import pasted
from ziggurat.config import to_json
from ziggurat.data.preprocess.prepared import PreparedData
from ziggurat.embeddings.room import TableUse
from ziggurat.errors import ConfigError, DataError, NoRoomError, NumericsError, SchemaError
from ziggurat.files import digest_of as digest_of_data
from ziggurat.files import is_temporary
from ziggurat.models import ModelConfig, build_model
from ziggurat.models.contract.search_space import Integers, Value
from ziggurat.recipes.protocols import Protocol
from ziggurat.recipes.run_config import RunConfig, run_config_to_json
from ziggurat.runs.execute import prepare_run
from ziggurat.studies.compare import CompareConfig, base_run, refuse_what_does_not_fit, settings_by_protocol
from ziggurat.studies.compare_data import ComparedData
from ziggurat.studies.compare_own import OwnData, settings_for_rows
from ziggurat.studies.compare_questions import questions_of
from ziggurat.studies.compare_runs import (
    RunCost,
    RunRequest,
    content_of,
    digest_of,
    finish_run,
    refuse_one_class,
    require_splits,
    unusual_of,
)
from ziggurat.studies.compare_settings import ModelSettings, settings_of_all
from ziggurat.studies.counted_flops import CountedSamples
from ziggurat.studies.tune_limit import MOST_DRAWS, Limit, SizeLimits
from ziggurat.studies.tune_space import TuningSpace, for_model, refuse_unknown, tuning_space
from ziggurat.studies.tune_study import ASKING, Ended, Pruner, Sampler, Spent, Tries, Try, Work, asking, optuna
from ziggurat.studies.tuned import CALLS, CALLS_FORMAT, STUDY, STUDY_FORMAT, TUNED, TUNED_FORMAT
from ziggurat.training.config import AUTO_METRIC, TrainingConfig
from ziggurat.training.hooks.hook import Hook
from ziggurat.training.metrics.metric import higher_is_better
from ziggurat.training.records.run_folder import CONFIG
from ziggurat.training.report.progress import NoProgress, Progress
from ziggurat.typed import Count, CountOrNone, FloatOrZero, Threads, checked

if TYPE_CHECKING:
    from ziggurat.training.evaluation.evaluate import Evaluation
    from ziggurat.training.judging import MadeStep
    from ziggurat.training.trainer import Trainer

SEED = 1000  # of tries: comparisons take 0, 1, 2, …
_MAX_FAILED = 3
_LOOK_EVERY_S = 10.0  # at the seconds that all workers have spent, where these are limited
_REPORT_EVERY_S = 60.0
_REPORT_SHARE = 0.01  # of the processor seconds of tries, that reports of a study that goes on may take
WILCOXON_SEEDS = 5  # the fewest of which four can tell that a try is worse, at p = 0.1
_LIMITS = ("max_flops_per_sample", "max_parameters")  # in study.json where they are given
# What a study keeps of each model, in words for whoever asks for another one.
_PARTS = {"space": "space", "given": "settings as given (of training, model, tables, --max-epochs, --fix)"}


@dataclass(frozen=True, kw_only=True)
@checked
class TuneConfig:
    """Settings of a study that tunes models.

    Args:
        data: a built-in data set, or data of one's own.
        models: names, as for a comparison.
        budget: tries of each model; 0: as many as the other budgets allow.
        flops: of each model: FLOPs of steps and evaluations; 0: no limit.
        hours: of all models and all workers together; 0: no limit.
        protocol: how all of them are trained.
        metric: that decides, by validation data; "": that of the data.
        source: folder or file of the raw data; "" for the cache or the default source.
        rows: of the synthetic data.
        threads: of each run.
        max_epochs: fewer epochs than the protocol's; 0: the protocol's.
        max_flops_per_sample: of a model that is tried, forward: `2x` those of the settings as given, or a number.
        max_parameters: of a model that is tried, tables and dense network together: likewise.
        own: config classes of your own, whose kinds `models` may name.
        narrowed: `NAME=VALUES`; see `tune_space.py`.
        fixed: `NAME=VALUE`.
        sampler: how settings are chosen.
        pruner: how tries are ended early.
        seed: of weights, order and dropout of every try, and of the sampler.
        try_seeds: runs of each try, with seeds from `seed` on; their mean is its value.
        storage: URL of a database that Optuna can use; "": a journal in the folder.
    """

    data: ComparedData | OwnData
    models: tuple[str, ...]
    budget: CountOrNone = 40
    flops: FloatOrZero = 0.0
    hours: FloatOrZero = 0.0
    protocol: Protocol = Protocol.BARS
    metric: str = ""
    source: str = ""
    rows: int = 1_000_000
    threads: Threads = 1
    max_epochs: CountOrNone = 0
    max_flops_per_sample: str = ""
    max_parameters: str = ""
    own: tuple[type[ModelConfig], ...] = ()
    narrowed: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    sampler: Sampler = Sampler.TPE
    pruner: Pruner = Pruner.HYPERBAND
    seed: CountOrNone = SEED
    try_seeds: Count = 1
    storage: str = ""

    def __post_init__(self) -> None:
        if not (self.budget or self.flops or self.hours):
            raise ConfigError(
                expected="a budget: tries of each model, FLOPs of each model, or hours of all",
                found="none",
                where="ziggurat tune",
                ways_out=("--budget 40", "--hours 2", "--flops 1e14"),
            )
        if self.pruner is Pruner.WILCOXON and self.try_seeds < WILCOXON_SEEDS:
            raise ConfigError(
                expected=f"{WILCOXON_SEEDS} seeds of each try or more, which the pruner wilcoxon compares with "
                "those of the best try: of fewer it ends no try before its last seed, however bad it is",
                found=f"{self.try_seeds}",
                where="ziggurat tune, --pruner wilcoxon",
                ways_out=(
                    f"--try-seeds {WILCOXON_SEEDS}",
                    "--pruner hyperband, which looks at evaluations of one seed",
                    "--pruner none: every try has all its seeds",
                ),
            )
        assert self.limits is not None  # reading them refuses what is none

    @property
    def limits(self) -> dict[str, Limit]:
        """The limits of what a sample may cost, by the name of the setting; those that there are."""
        read = {
            "max_flops_per_sample": Limit.parse(self.max_flops_per_sample, flag="--max-flops-per-sample"),
            "max_parameters": Limit.parse(self.max_parameters, flag="--max-parameters"),
        }
        return {name: limit for name, limit in read.items() if limit is not None}

    @property
    def compared(self) -> CompareConfig:
        """The comparison whose data, models and protocol these are."""
        return CompareConfig(
            data=self.data,
            models=self.models,
            seeds=1,
            protocol=self.protocol,
            source=self.source,
            rows=self.rows,
            threads=self.threads,
            max_epochs=self.max_epochs,
            own=self.own,
            judged_by=self.metric,
        )

    @property
    def data_name(self) -> str:
        """The name of the data in folders and titles."""
        return self.compared.data_name

    @property
    def decides(self) -> str:
        """The metric that decides."""
        return self.compared.metric


@dataclass(frozen=True, kw_only=True)
class TunedModel:
    """The result of a study for one model.

    Args:
        name: of the model.
        tries: all of them, in the order of asking.
        best: number of the best complete try; None without one.
        importances: share of each setting in what tries differ by; {} of few tries.
        cost: parameters and FLOPs of the best one.
    """

    name: str
    tries: tuple[Try, ...]
    best: int | None
    importances: Mapping[str, float] = field(default_factory=dict)
    cost: RunCost | None = None

    @property
    def best_try(self) -> Try | None:
        """The best complete try."""
        return None if self.best is None else next(each for each in self.tries if each.number == self.best)

    @property
    def spent(self) -> Spent:
        """On all of its tries."""
        return sum((each.spent for each in self.tries), Spent())

    def count(self, ended: Ended) -> int:
        """Return how many tries ended so."""
        return sum(each.ended is ended for each in self.tries)


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The result of a study.

    Args:
        config: what was asked for.
        models: in the order asked for.
        spaces: what was searched, by model.
        outside_s: processor seconds of all calls beside tries: asking, writing reports; without preparing data. Of a
            call that goes on or was killed, those up to its last report.
        inside_s: processor seconds of the same calls in tries.
        calls: how many there were, of all workers.
        notes: what a reader should know besides.
        limits: of what a model that is tried may cost, by model.
    """

    config: TuneConfig
    models: tuple[TunedModel, ...]
    spaces: Mapping[str, TuningSpace]
    outside_s: float = 0.0
    inside_s: float = 0.0
    calls: int = 1
    notes: tuple[str, ...] = ()
    limits: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def spaces_of(config: TuneConfig, *, num_rows: int = 1_000_000) -> dict[str, TuningSpace]:
    """Return the search space of each model, without reading data.

    Args:
        config: of the study.
        num_rows: of training, which the steps of protocol `scale` follow.

    Raises:
        ConfigError: unknown models or names, or impossible values.
    """
    config, base = _asked(config)
    given = _given(config)
    made = {
        name: settings_by_protocol(
            settings, protocol=config.protocol, base=base, metric=config.decides, num_rows=num_rows
        )
        for name, settings in given.items()
    }
    models = {name: model for name, (model, _) in made.items()}
    training = next(iter(made.values()))[1]
    refuse_unknown((*config.narrowed, *config.fixed), models, training)
    return {
        name: tuning_space(
            model,
            _limited(training, config=config),
            narrowed=for_model(config.narrowed, model, training),
            fixed=for_model(config.fixed, model, training),
        )
        for name, (model, training) in made.items()
    }


def tune(config: TuneConfig, *, out: str | Path, progress: Progress | None = None) -> Tuning:
    """Make the tries that are missing, and write what was found.

    Args:
        config: what to tune.
        out: folder of the study.
        progress: where to show it.

    Raises:
        MissingDependencyError: Optuna is not installed.
        ConfigError: what was asked for cannot be; a study of something else in the folder; a space that the memory
            does not hold.
    """
    progress = progress or NoProgress()
    optuna()  # without it no data is prepared
    config, base = _asked(config)
    spaces_of(config)  # what cannot be fails before data is prepared
    if isinstance(config.data, OwnData) and (said := settings_for_rows(config.data)):
        progress.say(f"note: {said}")
    prepared = prepare_run(base, progress=progress)
    require_splits(prepared, with_test=False)
    # From here on nothing has a way to test rows.
    data = dataclasses.replace(prepared, test=None)
    refuse_one_class(data, metric=config.decides, splits=("valid",))
    given = _given(config)
    refuse_what_does_not_fit(given, schema=base.table_schema, data=data)
    spaces = spaces_of(config, num_rows=data.train.num_rows)
    samples = CountedSamples(data.train, loader=base.training.loader)
    limits = {
        name: SizeLimits(
            space,
            inputs=data.inputs,
            count_flops=lambda model: samples.flops(model, backward=False).forward,
            flops=config.limits.get("max_flops_per_sample"),
            parameters=config.limits.get("max_parameters"),
        )
        for name, space in spaces.items()
        if config.limits
    }
    for name, space in spaces.items():
        # Of a search whose parameters are limited, the largest model that is tried is a smaller one.
        largest = limits[name].shrunk(space.largest()) if config.max_parameters else None
        _refuse_what_has_no_room(name, space, largest=largest or space.largest(), base=base, data=data)
        _refuse_what_never_ends(name, space, config=config, data=data, samples=samples)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    _refuse_what_is_no_study(folder)
    torch.set_num_threads(config.threads)
    study = _Study(
        config,
        folder=folder,
        base=base,
        data=data,
        spaces=spaces,
        limits=limits,
        samples=samples,
        progress=progress,
    )
    return study.run()


class _Study:
    """A study in its folder, as one worker sees it."""

    def __init__(
        self,
        config: TuneConfig,
        *,
        folder: Path,
        base: RunConfig,
        data: PreparedData,
        spaces: Mapping[str, TuningSpace],
        limits: Mapping[str, SizeLimits],
        samples: CountedSamples,
        progress: Progress,
    ) -> None:
        self.begun = time.process_time()
        self.call = uuid.uuid4().hex
        self.config = config
        self.folder = folder
        self.base = base
        self.data = data
        self.spaces = spaces
        self.limits = limits
        self.samples = samples
        self.progress = progress
        self.higher = higher_is_better(config.decides)
        self.inside_s = 0.0
        self.reported = -math.inf
        self.reports_s = 0.0
        # By the number of the try: counting builds a model, which each report would do for the best ones.
        self.costs: dict[tuple[str, int], RunCost] = {}
        with asking(folder):
            self._open()
        self.tries = {
            name: Tries(
                folder,
                model=name,
                space=space,
                higher=self.higher,
                sampler=config.sampler,
                pruner=config.pruner,
                seed=config.seed,
                storage=config.storage,
                limits=limits.get(name),
            )
            for name, space in spaces.items()
        }

    def run(self) -> Tuning:
        """Work on the study until its budget is used up."""
        while (taken := self._next()) is not None:
            name, work = taken
            begin = time.process_time()
            try:
                said = self._try(name, work)
            finally:
                work.leave()
                self.inside_s += time.process_time() - begin
            self._say(name, work, said)
            self._refuse_endless_failing(name)
        self._clean()
        tuning = self._write(is_last=True)
        if not any(model.best_try for model in tuning.models):
            raise _nothing_finished(tuning, folder=self.folder)
        return tuning

    # -------------------------------------------------------------------------------------------------- one try

    def _next(self) -> tuple[str, Work] | None:
        """Take the next try, of the model that had the fewest."""
        for name in turns({name: tries.all() for name, tries in self.tries.items()}):
            work = self.tries[name].next(may_ask=self._may_ask, may_go_on=self._may_go_on)
            if work is not None:
                return name, work
        return None

    def _may_ask(self, tries: Sequence[Try]) -> bool:
        """Return whether a model may begin another try beside these."""
        return (not self.config.budget or len(tries) < self.config.budget) and self._may_go_on(tries)

    def _may_go_on(self, tries: Sequence[Try]) -> bool:
        """Return whether a model that has spent so much may spend more."""
        config = self.config
        has_flops = not config.flops or sum(each.spent.flops for each in tries) < config.flops
        return has_flops and (not config.hours or _seconds(tries) < self._share_s)

    @property
    def _share_s(self) -> float:
        """Seconds of each model."""
        return self.config.hours * 3600.0 / len(self.spaces)

    def _try(self, name: str, work: Work) -> str:
        """Train a try; return how it ended."""
        config = self.config
        begun = _now()  # counting FLOPs is a part of what the try costs
        try:
            model, _ = self.spaces[name].apply(work.values)
            cost = RunCost.of(build_model(model, self.data.inputs, seed=0, draw_tables=False), samples=self.samples)
        except (ConfigError, SchemaError) as error:
            work.fail(f"{error.found}; expected {error.expected}")
            return f"cannot be: {error.found}"
        self.costs[name, work.number] = cost  # where it is the best one, the report counts nothing again
        watch = Watch(
            work,
            cost=cost,
            metric=config.decides,
            valid_rows=0 if self.data.valid is None else self.data.valid.num_rows,
            several=config.try_seeds > 1,
            is_over_seeds=config.pruner is Pruner.WILCOXON,
            left=(lambda: self._left_s(name)) if config.hours else None,
        )
        folders = []
        values = []
        try:
            for seed in range(config.seed, config.seed + config.try_seeds):
                watch.begin(seed, since=begun)
                request = self._request(name, work, seed=seed, hooks=(watch,), cost=cost)
                folders.append(request.folder)
                record = finish_run(request, data=self.data, read_test=False, progress=self.progress)
                values.append(record.valid[config.decides])
                watch.end_of_seed(statistics.fmean(values), value=values[-1], is_last=len(values) == config.try_seeds)
                begun = _now()
        except PrunedError as pruned:
            work.prune("")
            said = f"pruned after {pruned}"
        except OutOfTimeError:
            return "out of time; a call with more --hours goes on with it"
        except NumericsError as error:
            work.prune(f"diverged: {error.found}")
            said = "diverged"
        else:
            value = statistics.fmean(values)
            if math.isfinite(value):
                work.complete(value)
                said = f"{config.decides} {value:.5f}"
            else:
                work.prune(f"{config.decides} is undefined")
                said = f"{config.decides} is undefined"
        for folder in folders:
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        return said

    def _request(self, name: str, work: Work, *, seed: int, hooks: tuple[Hook, ...], cost: RunCost) -> RunRequest:
        recipe = self._recipe(name, work.values)
        loader = dataclasses.replace(recipe.training.loader, seed=seed)
        training = dataclasses.replace(recipe.training, seed=seed, threads=self.config.threads, loader=loader)
        return RunRequest(
            model=name,
            variant=work.number,
            config=dataclasses.replace(recipe, training=training),
            folder=self.folder / "tries" / name / f"try{work.number}_seed{seed}",
            protocol=Protocol.RECIPE if self.config.protocol is Protocol.RECIPE else None,
            metric=self.config.decides,
            hooks=hooks,
            cost=cost,
        )

    def _left_s(self, name: str) -> float:
        """Return the seconds of a model's hours that are left for each worker that may be at work on it."""
        tries = self.tries[name].all()
        running = sum(each.ended is Ended.RUNNING for each in tries)
        return (self._share_s - _seconds(tries)) / max(running, 1)

    # ------------------------------------------------------------------------------------------------ what is kept

    def _open(self) -> None:
        """Write down what the study searches, or refuse a folder that holds another one."""
        path = self.folder / STUDY
        models = {
            name: {
                "space": space.to_json(),
                "given": digest_of_data([*to_json([space.model, space.training]), *unusual_of(self.base)]),
            }
            for name, space in self.spaces.items()
        }
        content = content_of(self.data)
        now: dict[str, Any] = {
            "data": self.config.data_name,
            "train": content["train"],
            "valid": content["valid"],
            "schema": digest_of_data(self.base.table_schema.to_state()),
            "metric": self.config.decides,
            "protocol": self.config.protocol.value,
            "seed": self.config.seed,
            "try_seeds": self.config.try_seeds,
            "sampler": self.config.sampler.value,
            "pruner": self.config.pruner.value,
            "storage": "a database" if self.config.storage else "a journal",
            **{name: str(limit) for name, limit in self.config.limits.items()},
        }
        if path.exists():
            stored = STUDY_FORMAT.read(path)
            before = stored.pop("models")
            differing = [name for name in now if stored.get(name) != now[name]]
            differing += [name for name in _LIMITS if name in stored and name not in now]
            differing += [
                f"{_PARTS[part]} of {name}"
                for name in models
                if name in before
                for part in models[name]
                if before[name].get(part) != models[name][part]
            ]
            if differing:
                raise _another_study(differing, stored=stored, now=now, folder=self.folder)
            models = {**before, **models}
        STUDY_FORMAT.write(path, {**now, "models": models})

    def _models(self, *, with_importances: bool) -> tuple[TunedModel, ...]:
        found = []
        for name, tries in self.tries.items():
            made = tries.all()
            best = tries.best(made)
            found.append(
                TunedModel(
                    name=name,
                    tries=tuple(made),
                    best=None if best is None else best.number,
                    importances=tries.importances() if with_importances else {},
                    cost=self._cost(name, best),
                )
            )
        return tuple(found)

    def _cost(self, name: str, best: Try | None) -> RunCost | None:
        if best is None:
            return None
        key = (name, best.number)
        if key not in self.costs:
            model, _ = self.spaces[name].apply(best.values)
            built = build_model(model, self.data.inputs, seed=0, draw_tables=False)
            self.costs[key] = RunCost.of(built, samples=self.samples)
        return self.costs[key]

    def _write(self, *, is_last: bool) -> Tuning:
        """Write recipes and the report, of what all workers have found so far."""
        from ziggurat.studies.tune_report import write_tuning

        begin = time.process_time()
        with asking(self.folder):
            models = self._models(with_importances=is_last)
            calls = self._calls()
            tuning = Tuning(
                config=self.config,
                models=models,
                spaces=self.spaces,
                inside_s=sum(each["inside_s"] for each in calls),
                outside_s=sum(each["outside_s"] for each in calls),
                calls=len(calls),
                notes=self._notes(models),
                limits={name: limits.numbers for name, limits in self.limits.items()},
            )
            self._write_recipes(models)
            write_tuning(tuning, self.folder, is_live=not is_last)
            self._calls()
        self.reported = time.perf_counter()
        self.reports_s += time.process_time() - begin
        return tuning

    def _calls(self) -> list[dict[str, float]]:
        """Write down the processor seconds of this call so far; return those of all calls."""
        path = self.folder / CALLS
        calls: dict[str, dict[str, float]] = CALLS_FORMAT.read(path)["calls"] if path.exists() else {}
        outside_s = time.process_time() - self.begun - self.inside_s
        calls[self.call] = {"inside_s": self.inside_s, "outside_s": outside_s}
        CALLS_FORMAT.write(path, {"calls": calls})
        return list(calls.values())

    def _write_recipes(self, models: Sequence[TunedModel]) -> None:
        path = self.folder / TUNED
        try:
            entries: dict[str, Any] = TUNED_FORMAT.read(path)["models"] if path.exists() else {}
        except DataError as error:  # cut off by a full disk or an editor: tries say all of it
            self.progress.say(f"note: {path} could not be read ({error.found}), and is written anew")
            entries = {}
        for model in models:
            best = model.best_try
            if best is None:
                continue
            recipe = self._recipe(model.name, best.values)
            CONFIG.write(self.folder / f"{model.name}.json", run_config_to_json(recipe))
            entries[model.name] = {
                "digest": digest_of(recipe),
                "try": best.number,
                "value": best.value,
                "values": best.values,
                "tries": len(model.tries),
                "spent": dataclasses.asdict(model.spent),
            }
        if entries:
            config = self.config
            TUNED_FORMAT.write(
                path,
                {
                    "data": config.data_name,
                    "content": {name: digest for name, digest in content_of(self.data).items() if name != "test"},
                    "protocol": config.protocol.value,
                    "metric": config.decides,
                    "seeds": list(range(config.seed, config.seed + config.try_seeds)),
                    "models": entries,
                },
            )

    def _recipe(self, name: str, values: Mapping[str, Value]) -> RunConfig:
        """Return the run of these values, without the seeds that it is trained with."""
        model, training = self.spaces[name].apply(values)
        return dataclasses.replace(
            self.base, recipe=f"tuned_{self.config.data_name}_{name}", model=model, training=training
        )

    def _notes(self, models: Sequence[TunedModel]) -> tuple[str, ...]:
        notes = []
        for model in models:
            limits = self.limits.get(model.name)
            if moved := self.spaces[model.name].moved(None if limits is None else limits.start):
                shown = ", ".join(
                    f"{name} {'several' if old is None else old} → {new}" for name, (old, new) in moved.items()
                )
                beside = " or beyond the limit" if limits else ""
                notes.append(f"{model.name}: try 0 is as given but for what lies outside of the space{beside}: {shown}")
            if running := model.count(Ended.RUNNING):
                notes.append(
                    f"{model.name}: tries that are not finished: {running}; another worker trains them, or the same "
                    "command goes on with them, with more --hours where these are used up"
                )
            if beyond := sum(each.beyond for each in model.tries):
                shrunk = sum(each.beyond >= MOST_DRAWS for each in model.tries)
                notes.append(
                    f"{model.name}: draws that lay beyond the limit, and were drawn again: {beyond}"
                    + (f"; tries made smaller after {MOST_DRAWS} of them: {shrunk}" if shrunk else "")
                )
            if failed := [each for each in model.tries if each.why]:
                notes.append(f"{model.name}: tries that gave no value: {len(failed)}, first: {failed[0].why}")
        return tuple(notes)

    # -------------------------------------------------------------------------------------------------------- the rest

    def _say(self, name: str, work: Work, said: str) -> None:
        tries = self.tries[name].all()
        best = self.tries[name].best(tries)
        of = f"/{self.config.budget}" if self.config.budget else ""
        shown = f"; best {best.value:.5f}, try {best.number}" if best is not None and best.value is not None else ""
        self.progress.say(f"{name}, try {work.number} ({len(tries)}{of}): {said}{shown}")
        since = time.perf_counter() - self.reported
        # Before the first minute is over, too: there is something to look at from the first try on. On a machine that
        # others use, a minute has few processor seconds: reports would then take a large share of them.
        if since > _REPORT_EVERY_S and self.reports_s <= _REPORT_SHARE * self.inside_s:
            self._write(is_last=False)

    def _refuse_endless_failing(self, name: str) -> None:
        """Refuse to spend a budget on settings that cannot be."""
        tries = self.tries[name].all()
        if len(tries) >= _MAX_FAILED and all(each.ended is Ended.FAILED for each in tries):
            raise ConfigError(
                expected=f"a search space of {name} whose settings go together",
                found=f"{len(tries)} tries that cannot be built, the last one: {tries[-1].why}",
                where=f"search space of {name}",
                ways_out=("narrow the space: --space NAME=VALUES", f"leave {name} out of --models"),
            )

    def _clean(self) -> None:
        """Remove checkpoints of tries that ended where a worker was killed before it removed them."""
        for name, tries in self.tries.items():
            for each in tries.all():
                if each.ended is not Ended.RUNNING:
                    for folder in (self.folder / "tries" / name).glob(f"try{each.number}_seed*"):
                        shutil.rmtree(folder / "checkpoints", ignore_errors=True)


class PrunedError(Exception):
    """A pruner ended a try."""


class OutOfTimeError(Exception):
    """The hours of a model are used up."""


class Watch(Hook):
    """Reports a try's evaluations to its study, counts its cost, and ends it where the pruner or the clock says so.

    Args:
        work: the try.
        cost: of its model.
        metric: that decides.
        valid_rows: of an evaluation.
        several: whether the try has several seeds.
        is_over_seeds: whether the pruner compares seeds, and not evaluations.
        left: returns the seconds that this worker may still spend, by what all workers have noted; None: no limit.
    """

    def __init__(
        self,
        work: Work,
        *,
        cost: RunCost,
        metric: str,
        valid_rows: int,
        several: bool,
        is_over_seeds: bool,
        left: Callable[[], float] | None,
    ) -> None:
        self.seed = 0
        self._work = work
        self._cost = cost
        self._metric = metric
        self._valid_rows = valid_rows
        self._several = several
        self._is_over_seeds = is_over_seeds
        self._left = left
        self._next_look = 0.0
        self._first_seed: int | None = None
        self._cpu = 0.0
        self._wall = 0.0
        self._trainer: Trainer | None = None
        self._is_trained = False

    def begin(self, seed: int, *, since: tuple[float, float]) -> None:
        """Begin a seed, before its model is built.

        Args:
            seed: of weights, order and dropout.
            since: the processor seconds and the clock from which it is counted.
        """
        self.seed = seed
        self._first_seed = seed if self._first_seed is None else self._first_seed
        self._cpu, self._wall = since
        self._trainer = None
        self._is_trained = False

    def on_start(self, trainer: Trainer) -> None:
        """Remember whose rows and evaluations are counted."""
        self._trainer = trainer

    def on_step(self, trainer: Trainer, made: MadeStep) -> None:
        """End the try where the hours are used up; another call goes on with it after this step."""
        del made
        if self._left is None or time.perf_counter() < self._next_look:
            return
        # What other workers spend meanwhile is known by what they note, so all of them note and look again and again.
        self._note()
        left_s = self._left()
        if left_s <= 0:
            trainer.save()
            trainer.store.wait()  # whoever goes on with the try may read the checkpoint in the next moment
            raise OutOfTimeError
        self._next_look = time.perf_counter() + min(left_s, _LOOK_EVERY_S)

    def on_evaluate(self, trainer: Trainer, evaluation: Evaluation, *, is_best: bool) -> None:
        """Report the best value so far."""
        del evaluation, is_best
        self._note()
        if self._several and (self._is_over_seeds or self.seed != self._first_seed):
            return
        best = trainer.position.best_value
        if best is None:  # undefined so far
            return
        step = len(trainer.position.evaluations)
        if self._work.report(best, step=step):
            raise PrunedError(f"evaluation {step}, {self._metric} {best:.5f}")

    def on_end(self, trainer: Trainer, result: object) -> None:
        """Count the evaluation of the best weights, which follows when training is over."""
        del trainer, result
        self._is_trained = True

    def close(self) -> None:
        """Write down what training has cost, however it ended."""
        if self._trainer is not None:
            self._note()

    def end_of_seed(self, mean: float, *, value: float, is_last: bool) -> None:
        """Report a seed that is done to a pruner that compares seeds.

        Args:
            mean: over the seeds so far.
            value: of this one.
            is_last: whether the try has no further seed.
        """
        # A run that another worker finished, and no more than that, was read here: its counts are known.
        self._write_down(self._work.spent.get(str(self.seed), Spent()))
        if self._is_over_seeds and self._work.report(value, step=self.seed) and not is_last:
            raise PrunedError(f"{self.seed} seeds, {self._metric} {mean:.5f}")

    def _note(self) -> None:
        """Write down what this seed of the try has cost so far."""
        assert self._trainer is not None, "on_start comes first"
        rows = self._trainer.position.rows
        evaluations = len(self._trainer.position.evaluations) + self._is_trained
        of_steps = float(self._cost.step_flops) * rows
        of_evaluations = float(self._cost.forward_flops) * evaluations * self._valid_rows
        self._write_down(Spent(rows=rows, flops=of_steps + of_evaluations, evaluations=evaluations))

    def _write_down(self, counts: Spent) -> None:
        """Write down counts of a seed, with the seconds of this worker so far."""
        cpu_s = time.process_time() - self._cpu
        wall_s = time.perf_counter() - self._wall
        self._work.note(self.seed, dataclasses.replace(counts, cpu_s=cpu_s, wall_s=wall_s))


def turns(known: Mapping[str, Sequence[Try]]) -> list[str]:
    """Return models in the order of their turns: the fewest tries first, then whom fewest workers train.

    Two workers at one model would know less of it: a try whose elder is not complete has nobody to be pruned by.
    """

    def place(name: str) -> tuple[int, int, float]:
        tries = known[name]
        return len(tries), sum(each.ended is Ended.RUNNING for each in tries), _seconds(tries)

    return sorted(known, key=place)


def _asked(config: TuneConfig) -> tuple[TuneConfig, RunConfig]:
    """Return the study with the data of the one question that its models are asked, and a run without a model.

    Raises:
        ConfigError: they are asked two questions, or the metric does not exist.
    """
    questions = questions_of(config.models, config.data, own=config.own)
    if len(questions) > 1:
        raise ConfigError(
            expected="models that are asked one question: what comes next, or how a user answers",
            found=" and ".join(", ".join(question.models) for question in questions),
            where="ziggurat tune, --models",
            ways_out=[f"--models {','.join(question.models)}" for question in questions],
        )
    config = dataclasses.replace(config, data=next(iter(questions)).data)
    base = base_run(config.compared)
    if base.table_schema.labels:
        stop = dataclasses.replace(base.training.early_stop, metric=config.decides)
        training = dataclasses.replace(base.training, early_stop=stop)
        try:
            dataclasses.replace(base, training=training).stop_metric()
        except ConfigError as error:
            flag = "--metric" if config.metric else "--training.early-stop.metric"
            raise ConfigError(
                expected=error.expected,
                found=error.found,
                where=f"ziggurat tune, {flag}",
                ways_out=[
                    *(
                        each.replace("--training.early-stop.metric", flag)
                        for each in error.ways_out
                        if not each.endswith(AUTO_METRIC)
                    ),
                    f"leave {flag} out",
                ],
            ) from error
    return config, base


def _given(config: TuneConfig) -> dict[str, ModelSettings]:
    """Return the settings of the models as they are given.

    Raises:
        ConfigError: no such model.
    """
    try:
        return settings_of_all(config.models, config.data, own=config.own)
    except ConfigError as error:
        error.where = error.where.replace("ziggurat compare", "ziggurat tune")
        raise


def _limited(training: TrainingConfig, *, config: TuneConfig) -> TrainingConfig:
    """Return training settings with the limit of epochs of the study."""
    if not config.max_epochs:
        return training
    return dataclasses.replace(training, epochs=min(training.epochs, config.max_epochs))


def _refuse_what_has_no_room(
    name: str, space: TuningSpace, *, largest: Mapping[str, Value], base: RunConfig, data: PreparedData
) -> None:
    """Build the largest model of a space without its tables, and ask for their room: hours later is too late.

    Raises:
        ConfigError: it does not fit; says which of its settings fits.
    """
    error = _no_room(space, largest, base=base, data=data)
    if error is None:
        return
    ways = []
    for dimension in space.dimensions:
        if isinstance(dimension, Integers) and dimension.name in largest:
            high = _high_with_room(space, dimension, largest=largest, base=base, data=data)
            ways += [] if high is None else [f"--space {dimension.name}={dimension.low}..{high}"]
    raise NoRoomError(
        expected=f"a search space of {name} whose largest model fits the memory",
        found=f"{error.found}, at {', '.join(f'{key} {value}' for key, value in largest.items())}; {error.expected}",
        where=f"search space of {name}, before anything is trained",
        ways_out=(*ways, f"leave {name} out of --models", *([] if ways else error.ways_out)),
    )


def _high_with_room(
    space: TuningSpace, dimension: Integers, *, largest: Mapping[str, Value], base: RunConfig, data: PreparedData
) -> int | None:
    """Return an upper end of a dimension at which the rest of the space has room; None where it is not the reason."""
    high = dimension.high
    while high > dimension.low:
        half = max(dimension.low, high // 2)
        high = dimension.low + (half - dimension.low) // dimension.step * dimension.step
        if _no_room(space, {**largest, dimension.name: high}, base=base, data=data) is None:
            return high
    return None


def _no_room(
    space: TuningSpace, values: Mapping[str, Value], *, base: RunConfig, data: PreparedData
) -> NoRoomError | None:
    made = base.tables.make_storage(seed=0)
    try:
        model, _ = space.apply(values)
        built = build_model(model, data.inputs, seed=0, draw_tables=False, make_storage=made)
        built.embeddings.tables.check_room(TableUse.TRAINING)
    except NoRoomError as error:
        return error
    except (ConfigError, SchemaError):  # settings that do not go together: a try that has them says so
        return None
    return None


def _refuse_what_never_ends(
    name: str, space: TuningSpace, *, config: TuneConfig, data: PreparedData, samples: CountedSamples
) -> None:
    """Refuse a budget of FLOPs alone for a model whose work is lookups and sums, which count none.

    Raises:
        ConfigError: the search would have no end.
    """
    if config.budget or config.hours:
        return
    try:
        model, _ = space.apply(space.start())
        cost = RunCost.of(build_model(model, data.inputs, seed=0, draw_tables=False), samples=samples)
    except (ConfigError, SchemaError):  # a try that has them says so
        return
    if not cost.step_flops:
        raise ConfigError(
            expected=f"a budget that tries of {name} use up",
            found=f"--flops {config.flops:g} alone, and a model of lookups and sums, which count no FLOPs",
            where=f"ziggurat tune, budget of {name}",
            ways_out=("--budget 40 beside --flops", "--hours 1 beside --flops", f"leave {name} out of --models"),
        )


def _refuse_what_is_no_study(folder: Path) -> None:
    """Refuse a folder that holds something else.

    Raises:
        ConfigError: it does.
    """
    there = sorted(path.name for path in folder.iterdir())
    # A worker that begins, or was killed before it wrote what it searches, has its lock and what it writes there.
    there = [name for name in there if name != ASKING and not (is_temporary(name) and name.startswith(f".{STUDY}."))]
    # Behind the listing, in which one that begins meanwhile may have come with other files.
    if not there or (folder / STUDY).exists():
        return
    raise ConfigError(
        expected="a new folder, an empty one, or that of a study",
        found=f"{', '.join(there[:3])}{' and more' if len(there) > 3 else ''}, and no {STUDY}",
        where=str(folder),
        ways_out=(f"--out {pasted(folder / 'tuned')}", "name a folder that does not exist yet: --out FOLDER"),
    )


def _another_study(
    differing: Sequence[str], *, stored: Mapping[str, object], now: Mapping[str, object], folder: Path
) -> ConfigError:
    shown = [
        f"{name}: {stored.get(name, 'none')} there, {now.get(name, 'none')} now"
        if name in (*now, *_LIMITS) and name not in ("train", "valid", "schema")
        else f"{name} (other)"
        for name in differing
    ]
    words = {"train (other)": "other training rows", "valid (other)": "other validation rows"}
    return ConfigError(
        expected="the study that is in the folder: the same data, schema, spaces and way to search",
        found="; ".join({**words, "schema (other)": "another schema"}.get(each, each) for each in shown),
        where=str(folder / STUDY),
        ways_out=(
            "give this study a folder of its own: --out FOLDER",
            "give the settings that the study began with, to go on with it",
            f"remove it: rm -r {pasted(folder)}",
        ),
    )


def _nothing_finished(tuning: Tuning, *, folder: Path) -> ConfigError:
    spent = sum((model.spent for model in tuning.models), Spent())
    tries = [each for model in tuning.models for each in model.tries]
    reasons = [each.why for each in tries if each.why]
    ways = []
    if any(each.ended is Ended.RUNNING for each in tries):
        ways.append("more time: the same command with larger --hours goes on with the tries that were begun")
    if any(reason.startswith("diverged") for reason in reasons):
        ways.append("lower learning rates: --space training.learning_rate=1e-5..1e-3, into another folder")
    if any(each.ended is Ended.PRUNED and not each.why for each in tries):
        ways.append("no pruning: --pruner none, into another folder")
    return ConfigError(
        expected="a complete try of a model",
        found=f"none of {len(tries)}, in {spent.wall_s:,.0f} s" + (f"; {reasons[0]}" if reasons else ""),
        where=str(folder),
        ways_out=(*ways, "more tries: the same command with a larger --budget"),
    )


def _now() -> tuple[float, float]:
    """Return the processor seconds of this process, and its clock."""
    return time.process_time(), time.perf_counter()


def _seconds(tries: Sequence[Try]) -> float:
    return sum(each.spent.wall_s for each in tries)
