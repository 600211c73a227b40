"""Execute a run: fetch, prepare, build, train, evaluate, report. The order of everything on one page.

    fetch raw data ─► prepare (fit on training rows, encode) ─► model ─► plan, parallelize (on many ranks)
                   ─► Trainer.fit ─► evaluate valid, test ─► report

Test data is read once, at the very end, with the weights that validation chose.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import ziggurat
from ziggurat.cache import cache_folder
from ziggurat.commands import pasted
from ziggurat.config import to_json
from ziggurat.data.datasets import fetch
from ziggurat.data.encoded.loader import Shuffle
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.prepare import prepare
from ziggurat.data.preprocess.prepared import PreparedData
from ziggurat.data.preprocess.preprocessing import Preprocessing, inputs_of_schema
from ziggurat.data.preprocess.preprocessing_io import load_preprocessing, save_preprocessing, saved_fingerprint
from ziggurat.data.preprocess.values.numeric import NumericState
from ziggurat.data.source import reading_lines
from ziggurat.data.synthetic.teacher import SyntheticTeacher
from ziggurat.embeddings import BatchShape
from ziggurat.embeddings.room import TableSize, TableUse, check_room
from ziggurat.errors import ConfigError, ZigguratError
from ziggurat.features.labels import refuse_threshold_of_number
from ziggurat.features.schema import Encoding, table_of
from ziggurat.features.schema_checks import refuse_unread_numbers
from ziggurat.files import refuse_url
from ziggurat.models import MODEL_CONFIGS, Model, build_model
from ziggurat.models.converted import take_precision
from ziggurat.parallel.device import choose_device, usable_kernel
from ziggurat.parallel.job import job
from ziggurat.parallel.parallelize import Parallel
from ziggurat.parallel.tables.sharded_tables import tables_of
from ziggurat.plan import Plan
from ziggurat.recipes.catalogue import sizes_text
from ziggurat.recipes.run_config import RunConfig, run_config_to_json
from ziggurat.runs.apart_from_rows import refuse_among_rows
from ziggurat.runs.data_paths import located, with_absolute_paths
from ziggurat.runs.data_record import DataRecord, refuse_other_data, refuse_other_vocabularies
from ziggurat.runs.dispatched import by_kept_dispatch, keep_dispatch, naming_given_dispatch
from ziggurat.runs.display import metrics_html, plot_html, result_text
from ziggurat.runs.fingerprint import Difference
from ziggurat.runs.kept_frames import frames_by_split, keep_frames, with_kept_frames
from ziggurat.runs.many_ranks import Ranks
from ziggurat.runs.packed_run import refuse_training
from ziggurat.runs.planning.plan_inputs import measured_lengths
from ziggurat.runs.quality.below_chance import BelowChance
from ziggurat.runs.quality.funnel_order import contradicted_steps
from ziggurat.runs.quality.pairs import fitted_too_long, gain_of_pairs, plateau_text
from ziggurat.runs.resume import config_to_resume, sources_text
from ziggurat.runs.start import start_at_base_rates
from ziggurat.runs.tables.growth import short_of_rows
from ziggurat.runs.tables.memory_limit import with_rungs
from ziggurat.runs.teachers.student import coverage_lines, doubts_about_coverage, doubts_about_teachers, mean_targets
from ziggurat.runs.warm_start.parent import (
    Parent,
    checkpoint_to_take,
    open_parent,
    refuse_another_parent,
    refuse_other_models,
)
from ziggurat.runs.warm_start.take import WarmStartRecord, take_weights
from ziggurat.runs.watermark import TrainedRun, own_watermark
from ziggurat.training.callbacks import Callback
from ziggurat.training.checkpoint.retention import complete_steps
from ziggurat.training.delayed_feedback import DelayedFeedback, correct_labels
from ziggurat.training.delayed_losses import DelayedLoss
from ziggurat.training.distillation import DistilHead, Student, teach
from ziggurat.training.early_stop import decision_lines
from ziggurat.training.evaluation.evaluate import Evaluation
from ziggurat.training.hooks.hook import Hook, check_hooks
from ziggurat.training.label_gradients import drowned_labels, far_labels
from ziggurat.training.label_weights import LabelWeights, LearnedWeights, weigh_labels
from ziggurat.training.metrics.accumulator import MetricFunction
from ziggurat.training.metrics.full_ranking import has_repeats, repeats_lines
from ziggurat.training.metrics.suspicion import suspicious
from ziggurat.training.records.log import read_records
from ziggurat.training.records.run_folder import CONFIG, EVALUATION, INPUTS, STARTUP, WARM_START, RunFolder
from ziggurat.training.records.run_lock import RunLock
from ziggurat.training.records.said import KeptProgress
from ziggurat.training.report.page import write_report
from ziggurat.training.report.progress import NoProgress, Progress
from ziggurat.training.report.startup import ModelFacts, StartupReport, startup_report
from ziggurat.training.step.own_loss import LossFunction, loss_name
from ziggurat.training.trainer import FitResult, Trainer
from ziggurat.training.unknown_ids import with_unknown_shares

if TYPE_CHECKING:
    from ziggurat.runs.load import Run


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The results of a finished run.

    Args:
        folder: of the run.
        fit: steps, best step, rate.
        evaluations: by split, those that exist of valid and test.
        report: path of the HTML report.
        metric: that decided which weights are the best.
        is_first: False on all ranks but the first.
    """

    folder: Path
    fit: FitResult
    evaluations: dict[str, Evaluation]
    report: Path
    metric: str = ""
    is_first: bool = True

    def __repr__(self) -> str:
        return result_text(self.folder, end=self.fit.end, evaluations=self.evaluations)

    def _repr_html_(self) -> str:
        metrics = {split: evaluation.metrics for split, evaluation in self.evaluations.items()}
        title = f"{self.folder}: {self.fit.end}; report {self.report}"
        return metrics_html(metrics, title=title) + plot_html(self.folder)


def raw_files(config: RunConfig, *, progress: Progress) -> DataConfig:
    """The run's DataConfig with real paths in it, after fetching or generating what is not there yet."""
    name = config.dataset.name
    if name == "synthetic":
        if config.teacher is None:
            raise ConfigError(
                expected="a teacher for the synthetic data set",
                found="none",
                where="config, teacher",
                ways_out="start from the recipe synthetic_dlrm",
            )
        teacher = SyntheticTeacher(config.teacher)
        # The settings name the file, so that another teacher never finds the rows of this one.
        digest = hashlib.sha256(json.dumps(to_json(config.teacher), sort_keys=True).encode()).hexdigest()[:16]
        path = cache_folder() / "synthetic" / f"{digest}_{config.dataset.rows}.parquet"
        if not path.exists():
            progress.say(f"generating {config.dataset.rows:,} synthetic rows")
            path.parent.mkdir(parents=True, exist_ok=True)
            teacher.write_parquet(path, rows=config.dataset.rows)
        return dataclasses.replace(config.data, train=(str(path),))
    if name:
        path = fetch(name, source=config.dataset.source or None)
        if path.is_dir():
            # A public split may have no validation part.
            of_split = {split: path / f"{split}.parquet" for split in ("train", "valid", "test")}
            files = {split: (str(file),) if file.exists() else () for split, file in of_split.items()}
        else:
            files = {"train": (str(path),)}
        return dataclasses.replace(config.data, **files)
    if not config.data.train:
        raise ConfigError(
            expected="files to train on",
            found="none",
            where="config, data.train",
            ways_out=(
                "--data.train ratings.parquet --schema my.toml",
                "use a recipe with a data set: ziggurat recipes",
            ),
        )
    return config.data


def prepare_run(
    config: RunConfig,
    *,
    progress: Progress | None = None,
    num_processes: int = 1,
    fitted: Preprocessing | None = None,
) -> PreparedData:
    """Raw files to encoded training, validation and test data; cached, so that a second run starts at once.

    Args:
        config: of the run.
        progress: shows it.
        num_processes: that make this call at the same time, and share the work.
        fitted: what the run was fitted to when it began. Where its data gives the same again but for the rounding of
            statistics, those of the run are taken.
    """
    progress = progress or NoProgress()
    data = raw_files(config, progress=progress)
    phase = ""
    latest = 0

    def end_phase() -> None:
        # How many rows files have is an estimate until they were read.
        if phase and latest:
            progress.update(latest, total=latest)
        progress.end()

    def on_progress(what: str, done: int, total: int | None) -> None:
        nonlocal phase, latest
        if what != phase:
            end_phase()
            progress.begin(what, total=total)
            phase = what
        latest = done
        progress.update(done, total=total)

    def prepared_with(numbers: Mapping[str, NumericState] | None) -> PreparedData:
        return prepare(
            data,
            schema=config.table_schema,
            folder=cache_folder() / "prepared",
            progress=on_progress,
            num_processes=num_processes,
            numbers=numbers,
        )

    prepared = prepared_with(None)
    fitted_anew = prepared.preprocessing
    # The same data, whose statistics round otherwise here: the run goes on with the numbers that it began with.
    if fitted is not None and fitted.numbers != fitted_anew.numbers and not fitted.difference(fitted_anew):
        prepared = prepared_with(fitted.numbers)
    end_phase()
    for warning in (*prepared.summary.warnings, *doubts_about_teachers(config)):
        progress.say(f"warning: {warning}")
    return prepared


def _refuse_what_windows_begin_with(config: RunConfig) -> None:
    """Refuse settings of the begin of a second window of data, which a batch run does not have."""
    training = config.training
    for name, value in (("schedule.rewarm-steps", training.schedule.rewarm_steps), ("forget", training.forget)):
        if value:
            raise ConfigError(
                expected="a stream, or windows of data in Python: a batch run has one, and this acts on the second",
                found=f"training.{name} = {value}",
                where=f"--training.{name}",
                ways_out=(f"leave --training.{name} out", "ziggurat stream", "Trainer.fit(train=…) in a loop"),
            )


def train_run(
    config: RunConfig,
    *,
    folder: str | Path,
    resume: bool = False,
    plan: Plan | None = None,
    progress: Progress | None = None,
    callbacks: Sequence[Callback] = (),
    hooks: Sequence[Hook] = (),
    loss: LossFunction | None = None,
    metrics: Mapping[str, MetricFunction] | None = None,
    data: object = None,
    warm_start: Run | RunResult | str | Path | None = None,
) -> RunResult:
    """Train, evaluate and report one run; on every rank of a job that torchrun started, together.

    Args:
        config: the whole run.
        folder: where it is kept; see `RunFolder`. All ranks must see the same folder.
        resume: go on from the newest intact checkpoint in `folder`, on any number of ranks.
        plan: where tables go on many ranks; None plans (see `many_ranks.py`).
        progress: where to show progress; rank 0 does.
        callbacks: who is told of logged values and evaluations; see `training/callbacks.py`.
        hooks: take part in training, on every rank; see `training/hooks/hook.py`.
        loss: minimised instead of the model's own; see `training/step/own_loss.py`. To resume, give it again.
        metrics: functions of your own by name, `fn(scores, labels, weights) -> float`, beside the built-in ones; early
            stop may follow one (`EarlyStopConfig(metric="name", better=Better.HIGHER)`).
        data: a table in memory (polars, pandas, Arrow, a dict of columns) in the place of `config.data.train`; or a
            dict of such tables by split: train, valid, test. Its rows are kept in the folder (`raw/`), so that the
            run can be resumed, verified and evaluated.
        warm_start: a run whose weights this one begins from, in the place of `config.warm_start.run`; see
            `runs/warm_start/take.py`.

    Raises:
        ConfigError, PlanError: parts of the config contradict each other; nothing was read or written.
        TopologyError: the ranks do not form what was asked for, or one of them is gone.

    Example:
        >>> frame = {"user": ["ann", "bob"] * 200, "bought": [1, 0, 0, 1] * 100}
        >>> config = zg.table_run(zg.LogisticRegressionConfig(), zg.inspect_file(frame).schema)
        >>> result = zg.train_run(config, folder="runs/shop", data=frame)
        >>> sorted(result.evaluations)
        ['test', 'valid']
    """
    if not isinstance(config, RunConfig):
        raise ConfigError(
            expected="a RunConfig",
            found=type(config).__name__,
            where="train_run, config",
            ways_out=("zg.RunConfig(data=…, table_schema=…, model=…)", 'zg.recipe_named("movielens_dlrm")'),
        )
    if warm_start is not None:
        parent = str(warm_start if isinstance(warm_start, str | Path) else warm_start.folder)
        config = dataclasses.replace(config, warm_start=dataclasses.replace(config.warm_start, run=parent))
    # What can be refused before ranks meet and files are read is refused here.
    own_hooks = check_hooks(hooks, where="train_run, argument 'hooks'")
    run = RunFolder(Path(folder))
    if not resume:  # one that goes on has its rows prepared already
        rows = (*config.data.train, *config.data.valid, *config.data.test)
        refuse_among_rows(run.path, rows, flag="--out", instead=f"runs/{run.path.name}")
    refuse_stream(run)
    frames = None if data is None else frames_by_split(data)
    if frames is not None:
        config = with_kept_frames(config, frames, run=run)
    changes: list[Difference] | None = None
    if resume and (run.config.exists() or run.checkpoints.exists()):
        refuse_training(run)
        config, changes = config_to_resume(run, config)  # another schema is named before what it does not go with
    config.check(metrics=metrics or ())
    _refuse_what_windows_begin_with(config)
    if loss is not None and config.distil.head is not DistilHead.NONE:
        raise ConfigError(
            expected="a loss of your own, or the losses of distillation",
            found=f"loss={loss_name(loss)} and --distil {config.distil.head.value}",
            where="train_run",
            ways_out=("leave loss= out", "leave distil out, and read batch.extras in your loss"),
        )
    if loss is not None and config.label_weights is not LabelWeights.GIVEN:
        raise ConfigError(
            expected="a loss of your own, or learned weights of the labels in the loss of the model",
            found=f"loss={loss_name(loss)} and label_weights {config.label_weights.value}",
            where="train_run",
            ways_out=(
                "leave loss= out",
                "--label-weights given (in Python label_weights=LabelWeights.GIVEN), and weigh labels in your loss",
            ),
        )
    if config.delayed.loss is not DelayedLoss.NONE:
        raise ConfigError(
            expected="a stream, whose rows are trained again when their labels come",
            found=f"delayed.loss {config.delayed.loss.value}",
            where="train_run",
            ways_out=("ziggurat stream … --delay correct --label-time COLUMN", "--delayed.loss none"),
        )
    _check_known_tables(config)
    if not resume:
        check_schema_fits(config)
    with job(device=config.device, timeout_s=config.parallel.timeout_s), RunLock(run.path) as lock:
        names = ", ".join(repr(hook) for hook in own_hooks if hook.on_every_rank)
        ranks = Ranks(config, plan=plan, given={"out": run.path.absolute(), "resume": resume, "hook": names})
        progress = progress if progress is not None and ranks.is_first else NoProgress()
        if changes is None:
            files = config.data.resolved(config.table_schema)
            config = with_absolute_paths(dataclasses.replace(config, data=files))
        # The folder: one process writes to it, and its log keeps what is said from here on.
        ranks.on_first(lambda: _check_folder(run, lock=lock, resume=resume))
        if frames is not None:
            ranks.on_first(lambda: keep_frames(frames, run=run))
        progress = KeptProgress(progress, path=run.said)
        has_begun = ranks.on_first(run.has_begun)
        is_given = any(change.setting == "training.dispatch" for change in changes or ())
        ranks.on_first(lambda: keep_dispatch(config, run, has_begun=has_begun, is_given=is_given))
        given_dispatch = config.training.dispatch
        config = by_kept_dispatch(config, run)
        ranks.first_then_all(lambda _: config.tables.check_folder(), progress=progress)
        # The parent: a run with a checkpoint of its own needs it no more.
        parent = parent_of(config, ranks=ranks, run=run)
        if changes is not None:
            progress.say(sources_text(run, changes))
        # The data, and what settings left to it.
        prepared = _prepare_on_ranks(
            config, ranks=ranks, run=run, goes_on=changes is not None and has_begun, progress=progress
        )
        shares = with_unknown_shares(config.training.unknown_ids, prepared)
        config = dataclasses.replace(config, training=dataclasses.replace(config.training, unknown_ids=shares))
        lengths = measured_lengths(prepared) if config.tables.memory_limit else {}
        config, rung_lines = with_rungs(config, prepared.train, list_lengths=lengths, num_ranks=ranks.world_size)
        # The model, and what trains it.
        with naming_given_dispatch(given_dispatch, kept=config.training.dispatch):
            built = build_on_ranks(config, prepared, ranks=ranks, run=run, resume=has_begun)
        trainer = Trainer(
            built.model,
            config=config.training,
            train=prepared.train,
            valid=prepared.valid,
            folder=run.path,
            progress=progress,
            parallel=built.parallel,
            loss=loss or built.loss,
            metrics=metrics,
            lock=lock,
        )
        warm = None if parent is None else take_weights(parent, trainer, config=config, prepared=prepared)
        if parent is not None and warm is not None:
            _note_watermark(parent, warm, ranks=ranks, progress=progress)
        parent = None  # with its ids and what finds them: 80 bytes an id that training may need
        # A checkpoint that does not fit raises here, before anything is written.
        is_over = resume and trainer.restore() and trainer.ending.is_finished
        if trainer.growing is not None:
            prepared.preprocessing.with_grown(trainer.growing.grown(), where=str(run.checkpoints))
        if is_over:
            progress.say(f"finished: {trainer.ending.text()}")
            progress.say(f"to go on: ziggurat train {pasted(run.path)} --resume {trainer.ending.ways_on()}")
        else:
            asked = config
            config = resolved(config, trainer=trainer)
            report = report_of_start(
                asked, config, trainer=trainer, prepared=prepared, ranks=ranks, built=built, rung_lines=rung_lines
            )
            if warm is None and run.warm_start.exists() and config.warm_start.run:
                report.sections["Warm start"] = WARM_START.read(run.warm_start)["lines"]
            elif warm is not None:
                report.sections["Warm start"] = warm["lines"]
            named = ", ".join(map(repr, own_hooks))
            other_hooks = ranks.on_first(lambda: _other_hooks(run, named)) if has_begun else ""
            if named:
                report.sections["Training"]["hooks"] = named
            for doubt in doubts_about_coverage(report.sections["Training"]):
                progress.say(f"warning: {doubt}")
            ranks.on_first(lambda: _write_start(run, config, prepared=prepared, report=report, has_begun=has_begun))
            ranks.on_first(lambda: _write_warm_start(run, warm, config=config))
            if ranks.is_first:
                progress.open()
            if built.parallel is not None:
                ranks.keep_plan(built.parallel, run=run)
            for line in report.brief:
                progress.say(line)
            progress.detail(report.text())
            for name, line in ({} if warm is None else warm["lines"]).items():
                progress.say(f"warm start, {name}: {line}")
            if other_hooks:
                progress.say(other_hooks)
            if built.parallel is None and not trainer.position.step:
                warnings = drowned_labels(built.model, prepared.train, loss=loss)
                if getattr(config.model, "funnel", False):
                    warnings += contradicted_steps(prepared.train)
                for line in [*warnings, *far_labels(built.model, prepared.train)]:
                    progress.say(f"warning: {line}")
        # The training, and what came of it.
        with progress.keeping_error(rank=ranks.rank if ranks.are_many else None):
            if warm is not None:
                trainer.save()  # at step 0: a run that is killed goes on without its parent
            fit = trainer.fit(resume=resume, hooks=own_hooks, callbacks=callbacks)
            evaluations = {
                split: trainer.evaluate(dataset, split=split)
                for split, dataset in (("valid", prepared.valid), ("test", prepared.test))
                if dataset is not None and dataset.num_rows
            }
            if built.parallel is not None and not is_over:
                ranks.write_traffic(built.parallel, run=run)
            evaluations = _say_results(evaluations, trainer, prepared, config=config, run=run, progress=progress)
            progress.detail(f"end  {fit.end}")
            path = Path(ranks.on_first(lambda: str(write_report(run.path))))
        ranks.close()
    return RunResult(
        folder=run.path,
        fit=fit,
        evaluations=evaluations,
        report=path,
        metric=trainer.config.early_stop.metric,
        is_first=ranks.is_first,
    )


def refuse_stream(run: RunFolder) -> None:
    """Refuse to train where a stream is kept: its rows are known window by window.

    Raises:
        ConfigError: one is.
    """
    if run.is_stream() and run.config.exists():
        raise ConfigError(
            expected="a folder without a stream",
            found="a stream, which goes on by the command that began it (ziggurat stream …)",
            where=str(run.path),
            ways_out=("give that command again", "choose another folder: --out runs/another_name"),
        )


def _check_known_tables(config: RunConfig) -> None:
    """Compare tables whose rows the schema names with the memory before any data is read; vocabularies wait for it.

    On many ranks `parallelize` does it, since the plan says what each of them holds.
    """
    # The ranks have not met yet: that there are many is known from who started them alone.
    if type(config.model) not in MODEL_CONFIGS or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return
    if config.tables.memory_limit:  # formats are chosen when all sizes are known
        return
    schema = config.table_schema
    named = {table.name for table in schema.tables if table.num_rows}
    # Fields and all: a model may want more columns of the tables of features that it names.
    inputs = inputs_of_schema(schema, {})
    known = [table for table in inputs.tables if table.name in named]
    columns = config.model.table_columns(inputs)
    optimizer = config.model.embedding.optimizer
    sizes = {
        table.name: TableSize(
            num_rows=table.num_rows,
            dim=columns[table.name],
            optimizer=optimizer,
            row_format=config.tables.format_of(table.name, dim=columns[table.name]),
            cache=config.tables.cache_of(config.tables.format_of(table.name, dim=columns[table.name])),
        )
        for table in known
        if not config.tables.is_on_disk(table.name)
    }
    in_host = {name: size for name, size in sizes.items() if config.tables.is_in_host(name)}
    on_device = {name: size for name, size in sizes.items() if name not in in_host}
    for held, device in ((on_device, choose_device(config.device).device), (in_host, torch.device("cpu"))):
        where = "tables whose num_rows the schema names, before data is read"
        check_room(held, use=TableUse.TRAINING, device=device, where=where)


def check_schema_fits(config: RunConfig) -> None:
    """Refuse a schema that the model cannot be built for, before files are read: tables have a few rows, and no memory.

    A schema with events is looked at by `RunConfig.check`; a model of the user's own may want values while it is built.

    Raises:
        SchemaError, ConfigError: as `build_model` raises them.
    """
    schema = config.table_schema
    refuse_threshold_of_number(schema.labels, where="schema")
    refuse_unread_numbers(schema, where="schema")
    if schema.events is not None or type(config.model) not in MODEL_CONFIGS:
        return
    tables = {name for feature in schema.features if (name := table_of(feature))}
    vocabularies = {name: range(8) for name in tables if schema.table(name).encoding is Encoding.VOCABULARY}
    inputs = inputs_of_schema(schema, vocabularies)
    # Shapes are checked all the same, and no table takes memory or time.
    with torch.device("meta"):
        build_model(config.model, inputs, seed=0, towers=config.towers, draw_tables=False)


def _check_folder(run: RunFolder, *, lock: RunLock, resume: bool) -> None:
    refuse_url(run.path, error=ConfigError)
    if not resume:
        run.refuse_old_run()
        run.refuse_files_of_others()
    run.refuse_unwritable()
    lock.acquire()
    if not resume:
        run.refuse_old_run()  # that of a process which ended while this one waited for the lock
    elif run.has_begun() and run.preprocessing.exists():
        refuse_other_vocabularies(run)


def _prepare_on_ranks(
    config: RunConfig, *, ranks: Ranks, run: RunFolder, goes_on: bool, progress: Progress
) -> PreparedData:
    """Prepare data on rank 0, open it on the others, and compare it with what the run began with.

    Args:
        config: of the run.
        ranks: all of them.
        run: its folder.
        goes_on: whether the run has begun, on data that is known.
        progress: shows it.
    """
    fitted = load_preprocessing(run.preprocessing) if goes_on and run.preprocessing.exists() else None
    prepared = ranks.first_then_all(lambda shown: prepare_run(config, progress=shown, fitted=fitted), progress=progress)
    ranks.require_same_data(prepared)
    if goes_on:
        note = ranks.on_first(lambda: refuse_other_data(run, prepared, data=raw_files(config, progress=NoProgress())))
        if note:
            progress.say(note)
    return prepared


@dataclass(frozen=True, kw_only=True)
class Built:
    """A model, ready to be trained.

    Args:
        model: on its device, its tables drawn or about to be loaded.
        parallel: the ranks that it was made parallel for; None on one device.
        facts: of the model as a whole.
        starts_at: what its scores start at; "" if at 50 %.
        student: what it learns from teachers by, from labels that come later, or what labels count; None: from its
            labels alone.
    """

    model: Model
    parallel: Parallel | None
    facts: ModelFacts
    starts_at: str
    student: Student | DelayedFeedback | LearnedWeights | None = None

    @property
    def loss(self) -> LossFunction | None:
        """The loss of training, where it is another one than the model's own."""
        return None if self.student is None else self.student.loss


def build_on_ranks(config: RunConfig, prepared: PreparedData, *, ranks: Ranks, run: RunFolder, resume: bool) -> Built:
    """Build the model, and make it parallel where there are ranks."""
    device = choose_device(config.device).device
    embedding = config.model.embedding
    if resume:  # perhaps on another machine
        embedding = dataclasses.replace(embedding, kernel=usable_kernel(embedding.kernel, device=device))
    model = build_model(
        dataclasses.replace(config.model, embedding=embedding),
        prepared.inputs,
        seed=config.training.seed,
        towers=config.towers,
        draw_tables=False,
        make_storage=config.tables.make_storage(seed=config.training.seed),
    ).to(device)
    starts_at = start_at_base_rates(model, prepared) if config.training.start_at_base_rate else ""
    facts = ModelFacts.of(model)
    take_precision(model, config.training.precision, dispatch=config.training.dispatch)
    # Behind the facts, which are those of the served network, and the conversion, which does not reach it.
    means = {} if resume else mean_targets(config.distil, prepared.train)
    student = teach(model, config.distil, seed=config.training.seed, mean_targets=means)
    student = student or correct_labels(model, config.delayed, seed=config.training.seed)
    student = student or weigh_labels(model, config.label_weights)
    parallel = ranks.parallelize(model, run=run, resume=resume)
    if parallel is None:
        model.embeddings.tables.check_room(TableUse.TRAINING)
    # A checkpoint fills the tables of a resumed run: rows drawn before would be drawn for nothing.
    if not (resume and ranks.on_first(lambda: complete_steps(run.checkpoints))):
        for tables in tables_of(model):
            tables.draw(config.training.seed)
    if parallel is None:
        model.embeddings.choose_kernel(BatchShape(batch_size=config.training.loader.batch_size))
    return Built(model=model, parallel=parallel, facts=facts, starts_at=starts_at, student=student)


def resolved(config: RunConfig, *, trainer: Trainer) -> RunConfig:
    """The config with every `auto` replaced by what was chosen on this machine, so that it repeats exactly.

    A GPU has no choice of kernels to measure: what was asked for stays, and a CPU that goes on with the run chooses.
    """
    is_on_cpu = trainer.step.device.type == "cpu"
    kernel = trainer.kernel_name if is_on_cpu else config.model.embedding.kernel
    embedding = dataclasses.replace(config.model.embedding, kernel=kernel)
    training = dataclasses.replace(
        config.training,
        precision=trainer.step.precision,
        threads=torch.get_num_threads(),
        early_stop=trainer.config.early_stop,
        loader=dataclasses.replace(config.training.loader, shuffle=Shuffle(trainer.feed.shuffle or Shuffle.AUTO)),
    )
    return dataclasses.replace(config, model=dataclasses.replace(config.model, embedding=embedding), training=training)


def report_of_start(
    asked: RunConfig,
    config: RunConfig,
    *,
    trainer: Trainer,
    prepared: PreparedData,
    ranks: Ranks,
    built: Built,
    rung_lines: dict[str, str],
) -> StartupReport:
    """Report what is about to be trained, on what, and why so.

    Args:
        asked: the config before `auto` was replaced.
        config: of the run.
        trainer: not begun yet.
        prepared: the data.
        ranks: all of them.
        built: the model that is trained.
        rung_lines: formats of tables that a limit of memory chose, and why.
    """
    decision = decision_lines(
        trainer.config.early_stop,
        asked=asked.training.early_stop,
        inputs=prepared.inputs,
        num_rows=prepared.valid.num_rows if prepared.valid is not None else 0,
    )
    lines = dict(line.split(": ", 1) for line in prepared.summary_lines())
    # Unknown ids of these stand beside their metrics, where they say what a metric is worth.
    for split in ("valid", "test"):
        lines.pop(f"unknown in {split}", None)
    lines |= reading_lines(trainer.feed.source) | trainer.repeats
    report = startup_report(trainer.step, data=lines, facts=built.facts, decision=decision)
    if rung_lines:
        report.sections["Formats of tables"] = rung_lines
    training = report.sections["Training"]
    if built.student is not None:
        training |= built.student.lines()
    if config.data.teacher:
        training |= coverage_lines(config, prepared.train)
    if trainer.step.self_distillation is not None:
        training["self-distillation"] = trainer.step.self_distillation.line()
    if built.starts_at:
        training["scores start at"] = built.starts_at
    report.sections["Machine"]["ziggurat"] = ziggurat.__version__
    if trainer.negatives is not None:
        training |= trainer.negatives.lines
    if shares := config.training.unknown_ids:
        training["ids made unknown"] = f"at random, share of the rows: {', '.join(shares)}"
    if sizes := sizes_text(config):
        training["sizes"] = sizes
    if trainer.model.embeddings.tables.on_disk:
        training["checkpoints of the disk"] = trainer.store.rows_line()
    if trainer.feed.balancer is not None:
        report.sections["Balance"] = trainer.feed.balancer.lines
    if ranks.tower_size_reason:
        report.sections["Ranks"]["tower groups"] = ranks.tower_size_reason
    if ranks.order_reason:
        report.sections["Ranks"]["order of ranks"] = ranks.order_reason
    return report


def _write_start(
    run: RunFolder, config: RunConfig, *, prepared: PreparedData, report: StartupReport, has_begun: bool
) -> None:
    CONFIG.write(run.config, run_config_to_json(config))
    INPUTS.write(run.inputs, to_json(prepared.inputs))
    record = DataRecord.of(prepared, data=raw_files(config, progress=NoProgress()))
    if has_begun and run.preprocessing.exists():
        # Compared with the data before; it stays as training began with it, and so does its name in the record.
        record = dataclasses.replace(record, vocabulary=saved_fingerprint(run.preprocessing))
    else:
        # What stands here is that of a start that died before its log, perhaps of other data or another schema.
        save_preprocessing(prepared.preprocessing, run.preprocessing)
        for path in (run.plan, run.traffic):
            path.unlink(missing_ok=True)
    record.save(run.data)
    STARTUP.write(run.startup, report.sections)


def parent_of(config: RunConfig, *, ranks: Ranks, run: RunFolder) -> Parent | None:
    """Open the run that this one begins from; None where it names none, or goes on from a checkpoint of its own.

    Raises:
        MissingFileError, CheckpointError: it cannot be read, or is not what it was when this run first began from it.
        ConfigError: its model is of another kind.
    """
    settings = config.warm_start
    if not settings.run or ranks.on_first(lambda: complete_steps(run.checkpoints)):
        return None
    step = ranks.on_first(lambda: checkpoint_to_take(settings))
    own = () if type(config.model) in MODEL_CONFIGS else (type(config.model),)
    parent = open_parent(settings, step=step, models=own)
    refuse_other_models(parent, config)
    recorded = ranks.on_first(lambda: WARM_START.read(run.warm_start) if run.warm_start.exists() else None)
    if recorded is not None and run.has_begun():
        refuse_another_parent(parent, recorded["ancestors"][0])
    return parent


def trained_run(folder: Path, config: RunConfig, *, preprocessing: Preprocessing, step: int) -> TrainedRun:
    """Return a run as one whose newest row is looked for.

    Args:
        folder: of the run.
        config: as it was stored.
        preprocessing: of the run.
        step: of its weights.
    """
    return TrainedRun(
        folder=RunFolder(folder),
        step=step,
        schema=preprocessing.schema,
        began_from=config.warm_start.run,
        files=lambda: raw_files(located(config, folder=folder), progress=NoProgress()),
        prepared=lambda: prepare_run(located(config, folder=folder), fitted=preprocessing),
    )


def _note_watermark(parent: Parent, warm: WarmStartRecord, *, ranks: Ranks, progress: Progress) -> None:
    """Write down until when the rows of a parent go, while they are there: its weights know their labels.

    It is said where that is not known, and no error: teachers alone need it, and may be told.
    """
    rows = trained_run(parent.folder, parent.config, preprocessing=parent.preprocessing, step=parent.step)
    nearest = warm["ancestors"][0]

    def find() -> tuple[float | None, bool, str]:
        try:
            found = own_watermark(rows, progress=progress)
        except (ZigguratError, OSError) as error:
            progress.end()
            reason = error.found if isinstance(error, ZigguratError) else str(error)
            return None, True, f"not known ({reason}): ziggurat teacher log of this run needs --watermark"
        return found.time, found.is_calendar, found.text()

    time, is_calendar, line = ranks.on_first(find)
    nearest["watermark"] = time
    nearest["is_calendar"] = is_calendar
    warm["lines"]["its newest row"] = line


def _write_warm_start(run: RunFolder, warm: WarmStartRecord | None, *, config: RunConfig) -> None:
    if warm is not None:
        WARM_START.write(run.warm_start, warm)
    elif not config.warm_start.run:  # that of a start that died before its log
        run.warm_start.unlink(missing_ok=True)


def _other_hooks(run: RunFolder, named: str) -> str:
    """Return what to say where a run goes on with other hooks than it began with; "" where they are the same."""
    if not run.startup.exists():
        return ""
    before = STARTUP.read(run.startup).get("Training", {}).get("hooks", "")
    if before == named:
        return ""
    return f"note: the run was started with hooks {before or '(none)'}, and goes on with {named or '(none)'}"


def _say_results(
    evaluations: dict[str, Evaluation],
    trainer: Trainer,
    prepared: PreparedData,
    *,
    config: RunConfig,
    run: RunFolder,
    progress: Progress,
) -> dict[str, Evaluation]:
    """Say what the final metrics mean and what is odd about them; return them with what pairs of features add."""
    for split, evaluation in evaluations.items():
        # A model that finds items learns what is chosen at all; its AUC is that of likes against dislikes.
        for line in () if trainer.model.finds_items else _suspicious(evaluation, split, trainer, prepared):
            progress.say(f"warning: {line}")
    items = config.table_schema.items
    for split, evaluation in evaluations.items():
        for line in () if items is None else repeats_lines(evaluation.metrics, repeats=items.repeats):
            # Where users take items again, the protocol decides what the metrics mean.
            matters = line.startswith("warning") or has_repeats(evaluation.metrics)
            show = progress.say if matters else progress.detail
            show(f"{split}: {line}")
    for line in short_of_rows(run.metrics, prepared.inputs):
        progress.say(f"warning: {line}")
    evaluations, plateau = _with_pairs(evaluations, trainer, prepared, config=config, run=run)
    if plateau:
        progress.say(plateau)
    for split, evaluation in evaluations.items():
        progress.detail(f"{split}  {evaluation.line()}")
    return evaluations


def _suspicious(evaluation: Evaluation, split: str, trainer: Trainer, prepared: PreparedData) -> list[str]:
    """Say which metrics of a split need a second look, and the likely reason for those below chance."""
    if prepared.preprocessing.schema.events is not None:  # rows are read as questions there, with their histories
        return suspicious(evaluation.metrics, split=split)
    return BelowChance(
        split=split, evaluation=evaluation, prepared=prepared, evaluate=lambda rows: trainer.evaluate(rows).metrics
    ).lines()


def _with_pairs(
    evaluations: dict[str, Evaluation], trainer: Trainer, prepared: PreparedData, *, config: RunConfig, run: RunFolder
) -> tuple[dict[str, Evaluation], str]:
    """The evaluations with what pairs of features add on validation rows, and a sentence where that is nothing."""
    has_events = config.table_schema.events is not None
    if trainer.team.parallel is not None or prepared.valid is None or "valid" not in evaluations or has_events:
        return evaluations, ""
    gain = gain_of_pairs(trainer.model, prepared.valid)
    if gain is None:
        return evaluations, ""
    records = [(record["step"], record["loss"]) for record in read_records(run.metrics) if record["kind"] == "train"]
    too_long = fitted_too_long(records, best_step=trainer.position.best_step)
    gain = dataclasses.replace(gain, fitted_too_long=too_long)
    valid = dataclasses.replace(evaluations["valid"], pairs=gain)
    EVALUATION.write(run.evaluation("valid"), valid.to_json())
    losses = [loss for _, loss in records]
    text = plateau_text(gain, config=config, losses=losses, num_rows=prepared.train.num_rows)
    return {**evaluations, "valid": valid}, text
