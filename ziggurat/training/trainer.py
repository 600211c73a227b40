"""Trainer: fit with evaluation, early stop, checkpoints, log and resume, on one device or many ranks.

    for every epoch, for every batch:
        step ─► ledger ─► log line? ─► evaluation? ─► enough? ─► checkpoint?

The position in the data is arithmetic, weights, optimizers and random state are in the checkpoint, and log and ledger
are cut back to it, so a run that is killed at any moment and resumed ends with the same bits as one that was not.

On many ranks every rank runs this very loop: all take the same steps, evaluate, save and stop together. Rank 0 writes
log, ledger and results. A run may go on with another number of ranks: it continues at the same row of the data.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ziggurat.arguments import check_arguments
from ziggurat.data.encoded.records import WEIGHT_COLUMN
from ziggurat.data.source import LoaderSource
from ziggurat.errors import DataError
from ziggurat.features.batch import Batch, validate_batch
from ziggurat.models import Model
from ziggurat.models.blocks.batch_norm import refuse_lone_sample
from ziggurat.ops.lookup import KernelChoice
from ziggurat.parallel.parallelize import Parallel
from ziggurat.training.callbacks import Callback, TellingRecords
from ziggurat.training.checkpoint import JSON, CheckpointStore, DamagedCheckpointError, Match
from ziggurat.training.config import TrainingConfig
from ziggurat.training.early_stop import with_stop_metric
from ziggurat.training.ending import Ending, FitResult
from ziggurat.training.evaluation.evaluate import Evaluation, evaluate_batches, ordered_batches
from ziggurat.training.evaluation.first_look import drawn_negatives, first_look
from ziggurat.training.feed import Fed
from ziggurat.training.judging import Judge, MadeStep
from ziggurat.training.metrics.accumulator import MetricFunction
from ziggurat.training.metrics.metric import is_loss
from ziggurat.training.position import Position
from ziggurat.training.records.run_folder import EVALUATION, RunFolder
from ziggurat.training.records.run_lock import RunLock
from ziggurat.training.records.written import WrittenFiles
from ziggurat.training.repeats import deduplicate_source
from ziggurat.training.report.pace import Pace
from ziggurat.training.report.progress import Progress
from ziggurat.training.state import (
    into_model,
    optional_names,
    prepare_to_load,
    restore_state,
    seed_everything,
    snapshot_tensors,
)
from ziggurat.training.step.own_loss import LossFunction, loss_name, refuse_other_loss
from ziggurat.training.step.results import LateResult, StepResult
from ziggurat.training.step.schedule import learning_rate_factor
from ziggurat.training.team import Team


class Trainer:
    """Trains one model on a data source, with evaluation, early stop, checkpoints, log and resume.

    Args:
        model: on its device; its `inputs` name the labels.
        config: settings.
        train: a `DataSource` of this rank's batches, or a data set (EncodedDataset, MemoryDataset), which all ranks
            then read as `config.loader` says.
        valid: a data set, or batches of this rank to iterate again and again; None: no evaluation, no early stop.
        folder: the run's folder; created, refused if another run is in it (unless `fit(resume=True)`).
        progress: where to show progress; None: nowhere.
        parallel: what `parallelize` returned for the model; None: one device. All ranks then construct a Trainer and
            call its methods together; the folder lies on a file system that all of them share.
        loss: minimised instead of `model.loss`; see `own_loss.py`.
        metrics: functions of your own by name, beside the built-in metrics; see `metrics.MetricFunction`.
        lock: of the folder, where the caller holds it already on the first rank; None: `fit` takes it.

    Raises:
        ConfigError: the evaluation of the validation data has no such metric as early stop names.
    """

    @check_arguments
    def __init__(
        self,
        model: Model,
        *,
        config: TrainingConfig,
        train: Any,
        valid: Any = None,
        folder: str | Path,
        progress: Progress | None = None,
        parallel: Parallel | None = None,
        loss: LossFunction | None = None,
        metrics: Mapping[str, MetricFunction] | None = None,
        lock: RunLock | None = None,
    ) -> None:
        self.folder = RunFolder(Path(folder))
        self._lock = lock
        self.team = team = Team(parallel)
        self.progress = team.progress(progress)
        if config.threads:
            torch.set_num_threads(config.threads)
        self.loss = loss
        self.metrics = dict(metrics or {})
        datasets = {"train": train, "valid": valid}
        self.model = model
        named = {"loss": loss_name(loss), "metrics": ", ".join(self.metrics)}
        self.team.require_same_run(config, datasets=datasets, folder=self.folder.path, named=named)
        self.step = self.team.train_step(model, config, loss=loss)
        self.config = self.step.config
        self.feed = team.feed(train, model, config)
        self.growing = team.growing(model, seed=config.seed)
        self.repeats = {} if self.growing else deduplicate_source(self.feed.source, model, parallel=parallel)
        self._rankings = first_look(model, train, valid=valid, loader=config.loader)
        self.negatives = drawn_negatives(model, train, rankings=self._rankings, seed=config.seed)
        self._refuse_what_cannot_train(train)
        if valid is not None:
            self.config = with_stop_metric(self.config, model.inputs, own=self.metrics, more=self._rankings.names)
        self.valid = valid
        self.position = Position(loss=loss_name(loss))
        self.store = CheckpointStore(self.folder.checkpoints, config=config.checkpoint)
        team.end_with_topology(self.store.close)
        self._pace = Pace()
        self._showing = False
        self._is_undefined_said = False
        self._pinned: set[int] = set()
        self._written = WrittenFiles(self.folder)
        self._damaged = list[str]()
        self._restored: bool | None = None
        self._latest = ""  # the last evaluation, for whoever watches
        told = {"config": config, "inputs": model.inputs, "folder": self.folder, "progress": self.progress}
        self.judge = Judge(team, timing=self._timing, **told)

    @property
    def kernel_name(self) -> KernelChoice:
        """The kernel that looks up embeddings, on all ranks."""
        return self.team.kernel_name(self.model)

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, if nothing stops it early; 0 where the training data does not know."""
        return self.feed.total_steps(self.position)

    def _refuse_what_cannot_train(self, train: Any) -> None:
        """Refuse training rows whose weights are all 0, and a last batch of one for torch's own batch norm.

        Raises:
            DataError: no row has a weight.
            ConfigError: the last batch of an epoch has one sample, and the model cannot train on it.
        """
        source = self.feed.source
        if self.model.inputs.has_weights and hasattr(train, "read_group") and train.num_rows:
            groups = (train.read_group(index) for index in range(len(train.group_sizes)))
            if not any(bool(group.column(WEIGHT_COLUMN).to_numpy().any()) for group in groups):
                raise DataError(
                    expected="training rows with a weight above 0",
                    found=f"{train.num_rows:,} rows, and each has the weight 0",
                    where="training data, the column of the role weight",
                    ways_out=(
                        "name another column: [roles] weight = COLUMN in the schema",
                        "leave weight out of [roles]: each row then counts 1",
                    ),
                )
        if isinstance(source, LoaderSource) and not source.token_budget and self.team.world_size == 1:
            batch_size = self.config.loader.batch_size
            num_rows = source.num_rows
            if num_rows and (num_rows % batch_size or batch_size) == 1:
                where = f"training data: {num_rows:,} rows in batches of {batch_size:,}, the last of which has one"
                refuse_lone_sample(self.model, where=where)

    def fit(self, *, resume: bool = False, callbacks: Sequence[Callback] = ()) -> FitResult:
        """Train to the end, or go on from the newest intact checkpoint; `callbacks` hear of it on the first rank.

        Raises:
            ConfigError: the folder already holds a run and `resume` is False, or another process writes to it.
            NumericsError: NaN or infinity, with `non_finite` STOP; no weight was touched, the batch is dumped.
            CheckpointError: nothing intact to resume from, or a checkpoint could not be written.
        """
        if self._lock is not None:
            return self._fit(resume=resume, callbacks=callbacks)
        with RunLock(self.folder.path) as lock:
            self.team.on_first(lock.acquire)
            return self._fit(resume=resume, callbacks=callbacks)

    def _fit(self, *, resume: bool, callbacks: Sequence[Callback]) -> FitResult:
        resumed = self.restore() if resume else self._start()
        self._restored = None
        for line in self.team.on_first(lambda: self._written.put_aside(self._damaged, step=self.position.step)):
            self.progress.say(line)
        records = self.team.records(self.folder, resume_step=self.position.step if resumed else None)
        callbacks = callbacks if self.team.is_first else ()
        self.records = TellingRecords(records, callbacks=callbacks)
        self.ledger = self.team.ledger(self.folder)
        self.ledger.truncate(self.position.step)
        self.model.train()
        try:
            while not self.position.finished and self.position.epoch < self.config.epochs:
                self._epoch()
            self.store.wait()
        except BaseException:
            for close in (self.progress.end, self.records.close, self.ledger.close):
                with contextlib.suppress(OSError):  # what ended the training is what must be told
                    close()
            raise
        self.progress.end()
        self.records.close()
        self.ledger.close()
        stopped_early = self.ending.patience_is_out
        if stopped_early:
            self.progress.detail(self.ending.text())
        self._restore_best()
        result = self._result(stopped_early)
        for callback in callbacks:
            callback.on_end(result.steps, result.summary)
        return result

    def restore(self) -> bool:
        """Load the newest intact checkpoint, for `fit(resume=True)` to go on from; False if there is none yet.

        Nothing in the folder is written. `fit` does this itself where it was not done before.

        Raises:
            CheckpointError: nothing intact, or the checkpoint does not fit model and optimizers.
        """
        if self._restored is None:
            self._restored = self._resume()
        return self._restored

    @property
    def ending(self) -> Ending:
        """The answer whether and why the run ends where it stands (after `restore`, or after `fit`)."""
        return Ending(position=self.position, config=self.config)

    def evaluate(self, dataset: Any, *, split: str = "") -> Evaluation:
        """Exact metrics of the present weights; written to `evaluations/<split>.json` if a split is named."""
        batch_size = self.config.evaluation_batch_size or 4 * self.config.loader.batch_size
        self._showing = False
        total = getattr(dataset, "num_rows", None)
        progress = self.team.progress_of_all(self.progress, total=total)
        progress.begin(f"evaluate {split}".strip(), total=total)
        batches = dataset
        if hasattr(dataset, "read_group"):
            ranks = {"rank": self.team.rank, "world_size": self.team.world_size}
            batches = ordered_batches(dataset, batch_size=batch_size, **ranks).batches(epoch=0)
        batches = batches if self.growing is None else self.growing.frozen(batches)
        if not hasattr(dataset, "read_group"):
            inputs = self.model.inputs
            batches = (validate_batch(batch, inputs, must_have_labels=True) for batch in batches)
        with self.team.traffic_paused():
            result = evaluate_batches(
                self.model,
                batches,
                inputs=self.model.inputs,
                progress=progress,
                process_group=self.team.process_group,
                metrics=self.metrics,
                full_ranking=self._rankings.begin(dataset),
                error_bar_of=self.config.early_stop.metric if split else "",
            )
        progress.end()
        if split and self.team.is_first:
            EVALUATION.write(self.folder.evaluation(split), result.to_json())
        return result

    # ---------------------------------------------------------------------------------------------- one epoch

    def _epoch(self) -> None:
        position = self.position
        epoch = self.position.epoch
        first_row = position.rows - self.feed.row_in_epoch(position)
        begin = time.perf_counter()
        empty = Batch.empty(self.model.inputs)
        made = {"negatives": self.negatives, "growing": self.growing}
        for fed in self.feed.epoch(device=self.step.device, empty=empty, step=position.step, **made):
            result = self._train(fed)
            elapsed = time.perf_counter() - begin
            self._pace.count(elapsed, rows=fed.num_rows, busy_s=result.busy_s)
            self.judge.judge(position, self.records)
            if not self._showing:
                self.progress.begin(f"epoch {epoch + 1}/{self.config.epochs}", total=self.feed.num_rows)
                self._showing = True
            note = f"loss {self.judge.loss:.4f}{self._latest} · {self._pace.text()}"
            self.progress.update(position.rows - first_row, note=note)
            self._boundary(last=fed.is_last)
            if position.finished or position.epoch != epoch:
                self.team.drain(self.model, feed=self.feed)
                return
            begin = time.perf_counter()
        self._boundary(last=True)  # no batch was left: an empty data set, or a resume at its very end

    def _train(self, fed: Fed) -> StepResult | LateResult:
        position = self.position
        num_rows = fed.num_rows
        factor = self._factor()
        result = self.step(fed.batch, factor=factor, upcoming=fed.upcoming)
        position.step += 1
        position.step_in_epoch += 1
        position.rows += num_rows
        numbers = {"step": position.step, "epoch": position.epoch, "num_rows": num_rows}
        self.judge.take(MadeStep(result=result, batch=fed.batch, line=self._line(factor), **numbers))
        self.ledger.append(epoch=position.epoch, step=position.step, row_ids=fed.row_ids.numpy())
        return result

    def _factor(self) -> float:
        return learning_rate_factor(
            self.config.schedule,
            step=self.position.step,
            total_steps=self.total_steps,
            reductions=self.position.reductions,
            learning_rate=self.config.learning_rate,
        )

    def _line(self, factor: float) -> dict[str, Any] | None:
        """Return the log line of the step that was just made with `factor`, except its loss; None where none is due."""
        position = self.position
        if position.step % self.config.log_every:
            return None
        line: dict[str, Any] = {"kind": "train", "step": position.step, "epoch": position.epoch}
        line |= {"rows": position.rows, "loss": None, "lr": self.config.learning_rate * factor}
        return line | ({} if self.growing is None else self.growing.report())

    def _timing(self) -> dict[str, Any]:
        return self._pace.since_last(self.step.facts()) | self.feed.timing()

    def _judge_all(self) -> None:
        """Judge every step that was made; nothing of the run is ahead of the host afterwards."""
        self.judge.judge(self.position, self.records, all_of_them=True)

    # ---------------------------------------------------------------------------------- evaluation and checkpoint

    def _boundary(self, *, last: bool) -> None:
        """After a step: evaluate, decide, save. `last` says that the epoch has no further batch."""
        position = self.position
        config = self.config
        if last:
            position.epoch = position.epoch + 1
            position.step_in_epoch = 0
        at_end = position.epoch >= config.epochs or bool(config.max_steps and position.step >= config.max_steps)
        due = bool(config.evaluate_every) and position.step % config.evaluate_every == 0
        due = due or (not config.evaluate_every and last)
        improved = False
        if self.valid is not None and (due or at_end):
            improved = self._evaluate_and_judge(is_extra=not due)
        position.finished = at_end or self.ending.patience_is_out
        save = bool(config.checkpoint_every) and position.step % config.checkpoint_every == 0
        if save or last or improved or position.finished:
            self._save(pinned=improved)

    def _evaluate_and_judge(self, *, is_extra: bool) -> bool:
        position = self.position
        stop = self.config.early_stop
        self._judge_all()
        self.progress.end()
        average = self.step.average
        with average.in_place() if average is not None else contextlib.nullcontext():
            evaluation = self.evaluate(self.valid)
        metrics = evaluation.metrics
        value = metrics[stop.metric]
        improved = position.add_evaluation(metrics, is_extra=is_extra, stop=stop)
        if not math.isfinite(value):
            self._say_undefined(stop.metric, metrics)
        shown = "  ".join(f"{name} {value:.5f}" for name, value in metrics.items() if math.isfinite(value))
        self.progress.detail(f"step {position.step:,}  valid  {shown}{'  (best)' if improved else ''}")
        self._latest = f" · valid {stop.metric} {value:.5f}{' (best)' if improved else ''}"
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self.records.append({"kind": "valid", "step": position.step, "epoch": position.epoch, **finite})
        return improved

    def _say_undefined(self, metric: str, metrics: Mapping[str, float]) -> None:
        """Say once that no evaluation can be the best one: patience does not count those without a value."""
        if self._is_undefined_said:
            return
        self._is_undefined_said = True
        others = [name for name, value in metrics.items() if math.isfinite(value) and is_loss(name)]
        ways = [f"--training.early-stop.metric {name}" for name in others[:1]]
        why = "rows have one class" if others else "rows have one class, or no weight"
        self.progress.say(
            f"warning: valid {metric} is undefined (the validation {why}): no evaluation counts as better or as worse, "
            "so patience stops nothing; what decides: " + ", or ".join([*ways, "other validation rows"])
        )

    def _save(self, *, pinned: bool) -> None:
        self._judge_all()
        self.records.flush(durable=True)
        self.ledger.flush(durable=True)
        self.position.threads = torch.get_num_threads()
        self.position.world_size = self.team.world_size
        self.position.sources = self.feed.states()
        self.position.shuffle = self.feed.shuffle
        state: dict[str, JSON] = {"position": self.position.to_json()}
        state["written"] = self.team.on_first(self._written.marks)
        state |= self.team.context_rates(self.model)
        kept = [self.position.step, *(step for step in self.store.steps() if step not in self._pinned)]
        needed = self.position.best_steps(kept, stop=self.config.early_stop)
        for old in self._pinned - needed:
            self.store.unpin(old)
        self._pinned = (self._pinned & needed) | {self.position.best_step}
        tensors = snapshot_tensors(self.step, self.negatives, self.growing)
        self.store.save(self.position.step, tensors=tensors, state=state, pinned=pinned)

    # ------------------------------------------------------------------------------------------ start and resume

    def _start(self) -> bool:
        self.team.on_first(self.folder.refuse_old_run)
        self.folder.path.mkdir(parents=True, exist_ok=True)
        seed_everything(self.config.seed, rank=self.team.rank)
        return False

    def _resume(self) -> bool:
        """Load the newest intact checkpoint; False if the run was killed before it wrote its first one."""
        if not self.team.on_first(self.store.steps):
            self.progress.say("no checkpoint yet: starting from the beginning")
            seed_everything(self.config.seed, rank=self.team.rank)
            return False
        prepare_to_load(self.step)
        into = snapshot_tensors(self.step, self.negatives, self.growing)
        checkpoint = self.store.load(into=into, optional=optional_names(self.step))
        restore_state(self.step, into, self.growing)
        self.team.restore_context_rates(self.model, checkpoint.state)
        for damaged in checkpoint.skipped:
            self.progress.say(f"damaged checkpoint left out:\n{damaged}")
        self.position = Position.from_json(checkpoint.state.get("position"))
        refuse_other_loss(self.position.loss, self.loss, where=str(self.folder.checkpoints))
        self.feed.restore(self.position, where=str(self.folder.checkpoints))
        if self.position.world_size != self.team.world_size:
            seed_everything(self.config.seed + self.position.step, rank=self.team.rank)
            self.progress.say(f"ranks: {self.team.world_size}, before: {self.position.world_size}")
        if self.position.best_step in self.store.steps():
            self.store.pin(self.position.best_step)
        self._pinned = set(self.store.pinned()) & set(self.position.best_steps(None, stop=self.config.early_stop))
        marks = checkpoint.state.get("written")
        step = self.position.step
        damaged = self.config.damaged_records
        self._damaged = self.team.on_first(lambda: self._written.damaged(marks, step=step, then=damaged))
        if self.position.epoch < self.config.epochs and not self.ending.max_steps_reached:
            self.position.finished = self.ending.patience_is_out
        if self.position.threads and not self.config.threads:
            torch.set_num_threads(self.position.threads)
        self.progress.say(f"resumed at step {self.position.step:,} (epoch {self.position.epoch + 1})")
        return True

    def _restore_best(self) -> None:
        best = self.position.best_step
        if not best or best == self.position.step:
            if self.step.average is not None:
                self.step.average.keep()
            return
        wanted = into_model(self.model)
        wanted |= {} if self.growing is None else self.growing.state()
        try:
            self.store.load(best, into=wanted, match=Match.SUBSET)
        except DamagedCheckpointError as error:
            self.progress.say(f"the best weights (step {best:,}) are lost; those of the last step stay:\n{error}")
            return
        if self.growing is not None:
            self.growing.rebuild()
        self.progress.detail(
            f"best weights restored: step {best:,}, {self.config.early_stop.metric} {self.position.best_value:.5f}"
        )

    # ---------------------------------------------------------------------------------------------------- details

    def _result(self, stopped_early: bool) -> FitResult:
        pace = {"samples_per_s": self._pace.samples_per_s, "first_step_s": self._pace.first_step_s}
        return FitResult.of(self.position, stopped_early=stopped_early, end=self.ending.text(), **pace)
