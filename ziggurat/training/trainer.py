"""Trainer: makes steps on a source of batches; `fit` adds evaluation, early stop, checkpoints, log and resume.

    fit      on_start ─► for every epoch: steps ─► on_end
    steps    for every batch: step ─► ledger ─► log line? ─► on_step: evaluation? enough? checkpoint? ─► yield it
             ─► on_window

When a run evaluates, ends and saves is said by hooks (`hooks/fitting.py`), to which a user adds others. A loop of one's
own is made of the same parts, on one window of data after another:

    for window in windows:
        for made in trainer.steps(window):
            ...
        trainer.validate()
        trainer.save()

A stream, whose windows are gone once they are trained, numbers them and holds the folder open over all of them:

    with trainer.over_windows(hooks=[SaveWhenDue()]):
        for number in range(trainer.position.window + 1, …):
            trainer.evaluate(window)
            for made in trainer.steps(window, number=number):
                ...

The position in the data is arithmetic, weights, optimizers and random state are in the checkpoint, and log and ledger
are cut back to it, so a run that is killed at any moment and resumed ends with the same bits as one that was not.

On many ranks every rank runs this very loop: all take the same steps, evaluate, save and stop together. Rank 0 writes
log, ledger and results. A run may go on with another number of ranks: it continues at the same row of the data.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from ziggurat.arguments import check_arguments
from ziggurat.data.encoded.ledger import Ledger
from ziggurat.data.encoded.loader import Dataset, is_dataset
from ziggurat.data.encoded.records import WEIGHT_COLUMN
from ziggurat.data.source import DataSource, LoaderSource
from ziggurat.errors import ConfigError, DataError, refusing_exits
from ziggurat.features.batch import Batch, validate_batch
from ziggurat.models import Model
from ziggurat.models.blocks.batch_norm import refuse_lone_sample
from ziggurat.ops.lookup import KernelChoice
from ziggurat.parallel.parallelize import Parallel
from ziggurat.training.callbacks import Callback
from ziggurat.training.checkpoint import CheckpointStore, DamagedCheckpointError
from ziggurat.training.config import AverageOver, TrainingConfig
from ziggurat.training.early_stop import with_stop_metric
from ziggurat.training.ending import Ending, FitResult
from ziggurat.training.evaluation.evaluate import (
    Answers,
    Evaluation,
    answer_batches,
    evaluate_batches,
    ordered_batches,
)
from ziggurat.training.evaluation.first_look import drawn_negatives, first_look
from ziggurat.training.feed import Fed
from ziggurat.training.growing.growing_tables import GrowingTables
from ziggurat.training.hooks.fitting import EndWhenDone, EvaluateWhenDue, RestoreBest, SaveWhenDue
from ziggurat.training.hooks.hook import Hook, Hooks, check_hooks, with_own
from ziggurat.training.hooks.writers import TellCallback, WriteEvents, WriteMetrics
from ziggurat.training.judging import Judge, MadeStep
from ziggurat.training.metrics.accumulator import MetricFunction
from ziggurat.training.metrics.metric import is_loss
from ziggurat.training.negatives import DrawnNegatives
from ziggurat.training.position import Position
from ziggurat.training.records.log import check_record
from ziggurat.training.records.run_folder import EVALUATION, RunFolder
from ziggurat.training.records.run_lock import RunLock
from ziggurat.training.records.shared_ledger import SharedLedger
from ziggurat.training.records.written import WrittenFiles
from ziggurat.training.repeats import deduplicate_source
from ziggurat.training.report.pace import Pace
from ziggurat.training.report.progress import Progress
from ziggurat.training.safety_valve import SafetyValve
from ziggurat.training.state import TrainState
from ziggurat.training.step.own_loss import LossFunction, loss_name, refuse_other_loss
from ziggurat.training.step.schedule import learning_rate_factor
from ziggurat.training.team import Team


class Trainer:
    """Trains one model on a data source, with evaluation, early stop, checkpoints, log and resume.

    Args:
        model: on its device; its `inputs` name the labels.
        config: settings.
        train: a `DataSource` of this rank's batches, or a data set (EncodedDataset, MemoryDataset), which all ranks
            then read as `config.loader` says. The first window; `fit` and `steps` take others.
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
        train: Dataset | DataSource,
        valid: Dataset | Iterable[Batch] | None = None,
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
        self.model = model
        self._require_same_data(config, train=train, valid=valid)
        self.step = self.team.train_step(model, config, loss=loss)
        self.config = self.step.config
        valve = SafetyValve(self.step) if self.step.precision.is_dispatched else None
        self.state = TrainState(step=self.step, position=Position(loss=loss_name(loss)), valve=valve)
        self._window = 0  # number of the window that the feed reads
        self._window_name = ""  # for the display
        self._is_over_windows = False  # a session of several windows is open
        self._read(train, valid=valid)
        self.store = CheckpointStore(self.folder.checkpoints, config=config.checkpoint)
        team.end_with_topology(self.store.close)
        self.hooks = Hooks((), trainer=self, is_first=team.is_first)
        self.stop_reason = ""
        self._may_be_stopped = False
        self.steps_of_pass = 0  # steps of the present pass over the data, made by this process
        self.resume_step: int | None = None  # step after which log and ledger go on; None: they are new
        self._pace = Pace()
        self._showing = False
        self._is_undefined_said = False
        self._has_begun = False
        self._is_placed = True  # the feed stands where the position of a checkpoint says
        self._is_ahead = False  # the feed has taken batches whose steps were not made
        self._pinned: set[int] = set()
        self._written = WrittenFiles(self.folder)
        self._damaged = list[str]()
        self._has_new_records = False  # a damaged log or ledger was put aside, and no checkpoint knows the new one
        self._restored: bool | None = None
        self._latest = ""  # the last evaluation, for whoever watches
        self.judge = Judge(
            team,
            config=config,
            inputs=model.inputs,
            folder=self.folder,
            progress=self.progress,
            timing=self._timing,
            write=self._log,
            valve=valve,
        )

    @property
    def position(self) -> Position:
        """Steps, epochs, rows and evaluations so far."""
        return self.state.position

    @property
    def negatives(self) -> DrawnNegatives | None:
        """What draws negatives; None where the model wants none."""
        return self.state.negatives

    @property
    def growing(self) -> GrowingTables | None:
        """Vocabularies that grow; None where there are none."""
        return self.state.growing

    @property
    def kernel_name(self) -> KernelChoice:
        """The kernel that looks up embeddings, on all ranks."""
        return self.team.kernel_name(self.model)

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, if nothing stops it early; 0 where the training data does not know."""
        return self.feed.total_steps(self.position)

    def _require_same_data(self, config: TrainingConfig, *, train: object, valid: object) -> None:
        """Compare settings and data of all ranks."""
        named = {"loss": loss_name(self.loss), "metrics": ", ".join(self.metrics)}
        datasets = {"train": train, "valid": valid}
        self.team.require_same_run(config, datasets=datasets, folder=self.folder.path, named=named)

    def _read(self, train: Dataset | DataSource, *, valid: Dataset | Iterable[Batch] | None) -> None:
        """Read this data from now on."""
        self.feed = self.team.feed(train, self.model, self.config)
        if self.state.growing is None:  # ids that earlier windows have brought keep their rows
            self.state.growing = self.team.growing(self.model, seed=self.config.seed)
        parallel = self.team.parallel
        self.repeats = {} if self.growing else deduplicate_source(self.feed.source, self.model, parallel=parallel)
        self._rankings = first_look(self.model, train, valid=valid, loader=self.config.loader)
        self.state.negatives = drawn_negatives(self.model, train, rankings=self._rankings, seed=self.config.seed)
        self._refuse_what_cannot_train(train)
        if valid is not None:
            more = self._rankings.names
            self.config = with_stop_metric(self.config, self.model.inputs, own=self.metrics, more=more)
        self.valid = valid
        self._train = train

    def _refuse_what_cannot_train(self, train: object) -> None:
        """Refuse training rows whose weights are all 0, and a last batch of one for torch's own batch norm.

        Raises:
            DataError: no row has a weight.
            ConfigError: the last batch of an epoch has one sample, and the model cannot train on it.
        """
        source = self.feed.source
        if self.model.inputs.has_weights and is_dataset(train) and train.num_rows:
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
            # A remainder of 1, or batches that are of one row altogether.
            if num_rows and (num_rows % batch_size or batch_size) == 1:
                where = f"training data: {num_rows:,} rows in batches of {batch_size:,}, the last of which has one"
                refuse_lone_sample(self.model, where=where)

    def fit(
        self,
        *,
        resume: bool = False,
        train: Dataset | DataSource | None = None,
        valid: Dataset | Iterable[Batch] | None = None,
        hooks: Sequence[Hook] = (),
        callbacks: Sequence[Callback] = (),
    ) -> FitResult:
        """Train to the end, or go on from the newest intact checkpoint.

        Args:
            resume: go on.
            train: another window of data, on which training goes on where it stands: `epochs` passes over it, with its
                own best weights and its own patience. A script that is resumed calls `fit` for all of its windows
                again; those that the checkpoint has behind it are passed over.
            valid: other validation data, from now on.
            hooks: take part, on every rank; see `hooks/hook.py`.
            callbacks: hear of it on the first rank; see `callbacks.py`.

        Raises:
            ConfigError: the folder already holds a run and `resume` is False, or another process writes to it.
            NumericsError: NaN or infinity, with `non_finite` STOP; no weight was touched, the batch is dumped.
            CheckpointError: nothing intact to resume from, or a checkpoint could not be written.
        """
        self._refuse_in_hook("trainer.fit")
        own = (*(TellCallback(callback) for callback in callbacks), *check_hooks(hooks, where="fit, argument 'hooks'"))
        self._take(train, valid=valid)
        is_new = train is None and (resume or self.ending.is_finished)
        with self._session(self._hooks_of_fit(own), resume=resume, is_new=is_new):
            if self.position.window > self._window:
                self.progress.say(f"window {self._window + 1} of the data is done: the checkpoint is further")
                return self._result()
            # Records that were put aside began anew; without this save no checkpoint would vouch for the new ones.
            if self._has_new_records and self.ending.is_finished:
                self.save(pinned=self.position.best_step == self.position.step)
            # Resumed behind the last step, but before what the end of the pass brings: hooks are still owed that.
            if not self.ending.is_finished and self.ending.no_step_is_left:
                self.steps_of_pass = 0
                self.hooks.on_window()
            while not self.ending.is_finished:
                for _ in self.steps():
                    pass
            # A checkpoint may still be on its way to the disk, and an error of that belongs to this call.
            self.store.wait()
            self.progress.end()
            if self.ending.patience_is_out or self.stop_reason:
                self.progress.detail(self.ending.text())
            result = self._result()
            self.hooks.on_end(result)
        return result

    def steps(
        self,
        source: Dataset | DataSource | None = None,
        *,
        hooks: Sequence[Hook] = (),
        number: int | None = None,
        name: str = "",
    ) -> Iterator[MadeStep]:
        """Train the rest of a pass over the data, and yield every step when it was made.

        Nothing is evaluated and saved but by `hooks` and by whoever iterates (`validate`, `save`). Whoever ends early
        goes on with the batch after the last one the next time. On many ranks all must do so at the same step.

        Args:
            source: another window of data, which takes the place of the present one; None: the present one.
            hooks: take part; inside of `fit` and of `over_windows` theirs do.
            number: of that window, where windows before it are not given again; None: the one after the present one.
            name: of that window, for the display.
        """
        self._refuse_in_hook("trainer.steps")
        own = check_hooks(hooks, where="steps, argument 'hooks'")
        # Here and not in `_steps`: a generator runs nothing before its first `next`, and errors should come at the
        # call.
        self._take(source, valid=None, number=number)
        self._window_name = name
        return self._steps(own)

    @contextlib.contextmanager
    def over_windows(self, *, hooks: Sequence[Hook] = ()) -> Iterator[None]:
        """Hold folder, log and ledger open while `steps` trains one window after the other, each by its number.

        After `restore` the run goes on where its checkpoint stands: windows that it has behind it need not be given
        again, the one that it stands in is given by its number.

        Args:
            hooks: take part from the first window to the last; `on_end` is called where the block ends.
        """
        self._refuse_in_hook("trainer.over_windows")
        own = check_hooks(hooks, where="over_windows, argument 'hooks'")
        writers = (WriteMetrics(), WriteEvents())
        with self._session((*writers, *own), resume=self._restored is not None, is_new=False, stands=False):
            self._is_over_windows = True
            try:
                yield
                self.store.wait()
                self.progress.end()
                self.hooks.on_end(self._result())
            finally:
                self._is_over_windows = False

    def _steps(self, own: tuple[Hook, ...]) -> Iterator[MadeStep]:
        if self.state.ledger is not None:  # inside of `fit` or `over_windows`, whose session it is
            if self._is_over_windows:
                self._stand()
                if self.position.window > self._window:
                    return
                self.position.finished = False
            yield from self._pass(self.state.ledger)
            return
        hooks = (WriteMetrics(), WriteEvents(), *own)
        with self._session(hooks, resume=self._restored is not None, is_new=False) as ledger:
            if self.position.window > self._window:
                return
            # Also where `fit` has ended: whoever iterates says how long training goes on.
            self.position.finished = False
            yield from self._pass(ledger)
            self.store.wait()
            self.progress.end()
            self.hooks.on_end(self._result())

    def stop(self, reason: str) -> None:
        """Let `fit` or `steps` end after the present step, on all ranks; for hooks, on any rank.

        In `on_end` and `close` no step is left: it says so, and does nothing.
        """
        # `calling` names the hook, then the moment; "" where no hook is at work.
        moment = self.hooks.calling.rpartition(", ")[2]
        if moment in ("on_end", "close"):
            self.progress.say(f"trainer.stop({reason!r}) in {moment} has no effect: training is over")
            return
        self.stop_reason = reason

    def _refuse_in_hook(self, call: str) -> None:
        """Refuse to train within a step: batches, position and log of the outer steps would no longer be theirs.

        Raises:
            ConfigError: a hook makes the call.
        """
        by = self.hooks.calling
        if not by:
            return
        raise ConfigError(
            expected="steps that are made between the calls of hooks",
            found=f"a call of {call} in a hook",
            where=f"the hook {by}, at step {self.position.step:,}",
            ways_out=(
                "leave it out: training goes on by itself when the hook comes back",
                "train on when fit has come back: trainer.fit(train=…)",
            ),
        )

    def _refuse_in_close(self, call: str) -> None:
        """Refuse a call that writes to the log, which hooks of ours close as a user's close what they hold.

        Raises:
            ConfigError: a hook makes the call in its `close`.
        """
        by = self.hooks.calling
        if not by.endswith(", close"):
            return
        raise ConfigError(
            expected=f"{call} before the log of the run is closed",
            found="a call of it in close, which also follows an error",
            where=f"the hook {by}, at step {self.position.step:,}",
            ways_out="call it in on_end, which follows training that did not fail",
        )

    def agree_to_stop(self, *, moment: str = "on_step") -> None:
        """Let training end on all ranks where it was to end on one; collective, where a user's hook may end it.

        Args:
            moment: of hooks that is over.
        """
        if self._may_be_stopped:
            what = f"the end of {moment}, at step {self.position.step:,}"
            # The first reason in the order of ranks, so that all of them end with the same words.
            self.stop_reason = next(filter(None, self.team.meet(what, self.stop_reason)), "")

    def meet_after(self, moment: str) -> None:
        """Require that every rank is done with its hooks of `moment`; collective, where there is a user's hook.

        Raises:
            ConfigError: a hook of another rank is in a call that all ranks must make, on every rank.
        """
        if self._may_be_stopped:
            self.team.meet(f"the end of {moment}, at step {self.position.step:,}")

    def _meet(self, call: str) -> None:
        """Require that every rank makes this call, from the same hook; collective.

        Raises:
            ConfigError: one does not, on every rank.
        """
        by = self.hooks.calling
        self.team.meet(f"{call}{f', called by the hook {by}' if by else ''}, at step {self.position.step:,}")

    def record(self, record: Mapping[str, object], timing: Mapping[str, object] | None = None) -> None:
        """Add a line to the training log.

        Args:
            record: plain data with a `kind` of your own; `step` is the present one unless it says an earlier one.
            timing: what depends on the clock, and differs in a run that is repeated.

        Raises:
            ConfigError: the line could not be written, or what reads the log could not read it.
        """
        self._refuse_in_close("trainer.record")
        step = self.position.step
        check_record(record, timing={} if timing is None else timing, present_step=step)
        self._log(record if "step" in record else {**record, "step": step}, timing or {})

    def _log(self, record: Mapping[str, object], timing: Mapping[str, object]) -> None:
        """Add a line of our own to the training log."""
        self.hooks.on_record(record, timing)

    def _hooks_of_fit(self, own: tuple[Hook, ...]) -> tuple[Hook, ...]:
        first = (WriteMetrics(), WriteEvents(), RestoreBest())
        last = (EvaluateWhenDue(), EndWhenDone(), SaveWhenDue())
        ours = tuple(type(hook) for hook in (*first, *last))
        others = [hook for hook in own if not isinstance(hook, ours)]
        return (*with_own(first, own), *others, *with_own(last, own))

    def _take(
        self,
        train: Dataset | DataSource | None,
        *,
        valid: Dataset | Iterable[Batch] | None,
        number: int | None = None,
    ) -> None:
        """Read another window of data, or evaluate other validation data, where one is given."""
        if train is None and valid is None:
            return
        valid = self.valid if valid is None else valid
        if train is not None:
            self._window = self._window + 1 if number is None else number
            self._showing = False
            # What was prefetched was of the window before, so there is nothing to rewind in this one.
            self._is_ahead = False
        else:
            train = self._train
        self._require_same_data(self.config, train=train, valid=valid)
        self._read(train, valid=valid)

    @contextlib.contextmanager
    def _session(
        self, hooks: Sequence[Hook], *, resume: bool = False, is_new: bool = True, stands: bool = True
    ) -> Iterator[Ledger | SharedLedger]:
        """Hold the folder, its log and its ledger, which is given; call hooks from `on_start` to `close`.

        Args:
            hooks: of this session.
            resume: go on from the newest checkpoint, unless this object has begun.
            is_new: begin a run, and refuse one that is there; False: go on where this object stands, if it has begun.
            stands: the window of the feed is the one to train; False: `steps` takes another one first.
        """
        with contextlib.ExitStack() as stack:
            if self._lock is None:
                lock = stack.enter_context(RunLock(self.folder.path))
                # One rank holds it for all of them: they write into one folder.
                self.team.on_first(lock.acquire)
            self._begin(resume=resume, is_new=is_new)
            if stands:
                self._stand()
            if stands and self.position.window > self._window:
                hooks = ()  # this window was trained before
            # Before any hook is called: one that a rank lacks would leave the others waiting in its collectives.
            self.team.require_same_hooks(hooks)
            self.hooks = Hooks(hooks, trainer=self, is_first=self.team.is_first)
            self.stop_reason = ""
            # Where no rank has a hook of the user's nobody calls `stop`, and no step pays for an agreement on it.
            self._may_be_stopped = any(self.team.gather(self.hooks.has_own))
            try:
                # Before `on_start`, in which a hook may save: a checkpoint brings the ledger to the disk.
                ledger = self.team.ledger(self.folder)
                self.state.ledger = ledger
                # Steps behind the checkpoint are made again; their rows must not count twice.
                ledger.truncate(self.position.step)
                self.hooks.on_start()
                self.model.train()
                # A model may come in evaluation mode, from its maker or from an evaluation of a hook.
                with refusing_exits():
                    yield ledger
            except GeneratorExit:  # whoever iterates has enough: no failure
                self._close()
                self.store.wait()
                raise
            except BaseException:
                for close in (self.progress.end, self._close):
                    with contextlib.suppress(Exception):  # what ended the training is what must be told
                        close()
                raise
            else:
                self._close()
                # A hook may have saved in `on_end` or `close`: an error of that is one of the run.
                self.store.wait()
                self.meet_after("close")
            finally:
                self._may_be_stopped = False
                self.state.ledger = None
                self.hooks = Hooks((), trainer=self, is_first=self.team.is_first)

    def _close(self) -> None:
        try:
            self.hooks.close()
        finally:
            if self.state.ledger is not None:
                self.state.ledger.close()

    def _begin(self, *, resume: bool, is_new: bool) -> None:
        """Draw or load what training begins with."""
        if is_new or not self._has_begun:
            goes_on = self.restore() if resume else self._start()
            self._restored = None
            self._has_begun = True
        else:
            goes_on = True
        for line in self.team.on_first(lambda: self._written.put_aside(self._damaged, step=self.position.step)):
            self.progress.say(line)
        self._has_new_records = bool(self._damaged)
        self._damaged = []
        self.resume_step = self.position.step if goes_on else None

    def _stand(self) -> None:
        """Let position and feed stand in the same window of data."""
        if self.position.window < self._window:
            self.position.begin_window(self._window)
            self._is_placed = True
            self._begin_window()
        elif self.position.window == self._window and not self._is_placed:
            self.feed.restore(self.position, where=str(self.folder.checkpoints))
            self._is_placed = True

    def _begin_window(self) -> None:
        """Change what begins anew in a window of data; a run that is resumed inside of it has done so already."""
        if self.step.average is not None and self.config.average_over is AverageOver.WINDOW:
            self.step.average.restart()
        if self.config.forget and self.position.window_rows:
            self.step.forget(self.config.forget)

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
        return Ending(position=self.position, config=self.config, stop_reason=self.stop_reason)

    @property
    def is_at_limit(self) -> bool:
        """True if the last epoch or the last step that settings allow is done."""
        return self.ending.epochs_are_done or self.ending.max_steps_reached

    def evaluate(self, dataset: Dataset | Iterable[Batch], *, split: str = "") -> Evaluation:
        """Exact metrics of the present weights; written to `evaluations/<split>.json` if a split is named."""
        self._meet("trainer.evaluate")
        batches, progress = self._to_score(dataset, shown=f"evaluate {split}".strip())
        with refusing_exits(), self.team.traffic_paused():
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

    def answer(self, dataset: Dataset | Iterable[Batch]) -> Answers:
        """Return the scores of the present weights, for labels that come later; on many ranks the first has them."""
        self._meet("trainer.answer")
        batches, progress = self._to_score(dataset, shown="score")
        with refusing_exits(), self.team.traffic_paused():
            result = answer_batches(
                self.model,
                batches,
                inputs=self.model.inputs,
                progress=progress,
                process_group=self.team.process_group,
            )
        progress.end()
        return result

    def _to_score(self, dataset: Dataset | Iterable[Batch], *, shown: str) -> tuple[Iterable[Batch], Progress]:
        """Return the batches of this rank of data that are scored, and the display of their progress, which begins.

        Args:
            dataset: to score.
            shown: what the display says.
        """
        # No gradients are kept, so an evaluation has room for larger batches than training.
        batch_size = self.config.evaluation_batch_size or 4 * self.config.loader.batch_size
        self._showing = False  # the evaluation takes the display, so the next step begins the epoch's bar anew
        total = getattr(dataset, "num_rows", None)
        progress = self.team.progress_of_all(self.progress, total=total)
        progress.begin(shown, total=total)
        if is_dataset(dataset):
            ranks = {"rank": self.team.rank, "world_size": self.team.world_size}
            batches: Iterable[Batch] = ordered_batches(dataset, batch_size=batch_size, **ranks).batches(epoch=0)
        else:
            batches = dataset
        batches = batches if self.growing is None else self.growing.frozen(batches)
        if not is_dataset(dataset):
            inputs = self.model.inputs
            # A loader of ours reads what was checked when it was encoded; other batches nobody has looked at.
            batches = (validate_batch(batch, inputs, must_have_labels=True) for batch in batches)
        return batches, progress

    # ------------------------------------------------------------------------------------------ one pass over data

    def _say_news(self) -> None:
        """Say what has been decided about steps."""
        for line in self.step.take_news():
            self.progress.say(line)

    def _pass(self, ledger: Ledger | SharedLedger) -> Iterator[MadeStep]:
        """Make the steps that are left of a pass over the data."""
        position = self.position
        if self._is_ahead:
            self.feed.rewind(position)
            self._is_ahead = False
        # Rows of earlier passes: the display counts those of this one.
        first_row = position.rows - self.feed.row_in_epoch(position)
        self.steps_of_pass = 0
        batches = self.feed.epoch(
            device=self.step.device,
            # Ranks whose rows have run out take part in the exchanges of the others with this one.
            empty=Batch.empty(self.model.inputs),
            step=position.step,
            negatives=self.negatives,
            growing=self.growing,
        )
        self._say_news()
        begin = time.perf_counter()
        for fed in batches:
            made = self._train_on(fed, ledger=ledger, begin=begin)
            self._say_news()
            self.judge.judge(position)
            self._show(made, done=position.rows - first_row)
            if made.is_last:
                self._end_pass()
            # Behind the end of the pass: a checkpoint that a hook saves here says that the epoch is done.
            self.hooks.on_step(made)
            self.agree_to_stop()
            is_over = made.is_last or position.finished or bool(self.stop_reason)
            if is_over:
                self._drain(is_ahead=not made.is_last)
            if made.is_last:
                self.hooks.on_window()
            try:
                yield made
            except GeneratorExit:
                if not is_over:
                    self._drain(is_ahead=True)
                raise
            if is_over:
                return
            # What the caller did with the step is no time of the next one.
            begin = time.perf_counter()
        self._end_pass()  # no batch was left: an empty data set, or a resume at its very end
        self.hooks.on_window()

    def _drain(self, *, is_ahead: bool) -> None:
        """Receive what was sent ahead for steps that will not come."""
        self.team.drain(self.model, feed=self.feed)
        self._is_ahead = is_ahead

    def _end_pass(self) -> None:
        self.position.epoch += 1
        self.position.step_in_epoch = 0
        if self._showing:
            # Without validation data no evaluation comes between: the next epoch begins a display of its own.
            self.progress.end()
            self._showing = False

    def _train_on(self, fed: Fed, *, ledger: Ledger | SharedLedger, begin: float) -> MadeStep:
        """Make one step.

        Args:
            fed: the batch, and the one after it.
            ledger: of the session.
            begin: when it was asked for.
        """
        position = self.position
        factor = self._factor()
        if self.step.self_distillation is not None:
            self.step.self_distillation.begin(step=position.step, total_steps=self.total_steps)
        result = self.step(fed.batch, factor=factor, upcoming=fed.upcoming)
        position.step += 1
        position.step_in_epoch += 1
        position.rows += fed.num_rows
        self.steps_of_pass += 1
        # Behind the step: rows of one that raised were not trained.
        ledger.append(epoch=position.epoch, step=position.step, row_ids=fed.row_ids.numpy())
        seconds = time.perf_counter() - begin
        self._pace.count(seconds, rows=fed.num_rows, busy_s=result.busy_s)
        made = MadeStep(
            result=result,
            batch=fed.batch,
            step=position.step,
            epoch=position.epoch,
            num_rows=fed.num_rows,
            seconds=seconds,
            is_last=fed.is_last,
            line=self._line(factor),
        )
        self.judge.take(made)
        return made

    def _show(self, made: MadeStep, *, done: int) -> None:
        """Show a person how far the epoch is."""
        if not self._showing:
            window = f"window {self._window + 1}, " if self._window else ""
            epoch = made.epoch - self.position.window_epoch + 1
            shown = self._window_name or f"{window}epoch {epoch}/{self.config.epochs}"
            self.progress.begin(shown, total=self.feed.num_rows)
            self._showing = True
        self.progress.update(done, note=f"loss {self.judge.loss:.4f}{self._latest} · {self._pace.text()}")

    def _factor(self) -> float:
        return learning_rate_factor(
            self.config.schedule,
            step=self.position.step,
            total_steps=self.total_steps,
            reductions=self.position.reductions,
            learning_rate=self.config.learning_rate,
            step_in_window=self._step_in_window,
        )

    @property
    def _step_in_window(self) -> int | None:
        """Steps taken in this window of data; None in the first window of the run."""
        position = self.position
        if not position.window_rows:
            return None
        is_first_pass = position.epoch == position.window_epoch
        # Later passes over a window begin with an optimizer that knows it.
        return position.step_in_epoch if is_first_pass else self.config.schedule.rewarm_steps

    def _line(self, factor: float) -> dict[str, object] | None:
        """Return the log line of the step that was just made with `factor`, except its loss; None where none is due."""
        position = self.position
        if position.step % self.config.log_every:
            return None
        line: dict[str, object] = {"kind": "train", "step": position.step, "epoch": position.epoch}
        # The loss follows when the step is judged: on a GPU the host does not know it yet.
        line |= {"rows": position.rows, "loss": None, "lr": self.config.learning_rate * factor}
        if self.step.self_distillation is not None:
            line |= self.step.self_distillation.report()
        return line | ({} if self.growing is None else self.growing.report())

    def _timing(self) -> dict[str, object]:
        return self._pace.since_last(self.step.facts()) | self.feed.timing()

    def _judge_all(self) -> None:
        """Judge every step that was made; nothing of the run is ahead of the host afterwards."""
        self.judge.judge(self.position, all_of_them=True)

    # ---------------------------------------------------------------------------------- evaluation and checkpoint

    def validate(self, *, is_extra: bool = False) -> Evaluation:
        """Evaluate the validation data, and count it: for the best weights, for patience and for the log.

        Args:
            is_extra: nothing but the end of the run asked for it, so a run that ends later has none at this step.

        Raises:
            ConfigError: there is no validation data.
        """
        if self.valid is None:
            raise ConfigError(
                expected="validation data",
                found="none",
                where="Trainer.validate",
                ways_out=("Trainer(…, valid=…)", "of other data: trainer.evaluate(data)"),
            )
        self._refuse_in_close("trainer.validate")
        self._meet("trainer.validate")
        position = self.position
        stop = self.config.early_stop
        self._judge_all()
        self.progress.end()
        # Where weights are averaged the average is what is kept at the end, so it is what is compared.
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
        # JSON has no word for NaN: a metric that is undefined has no place in the log.
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._log({"kind": "valid", "step": position.step, "epoch": position.epoch, **finite}, {})
        self.hooks.on_evaluate(evaluation, is_best=improved)
        return evaluation

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

    def save(self, *, pinned: bool = False) -> None:
        """Save a checkpoint of the present step. Collective.

        Args:
            pinned: keep it as long as it is the best one.

        Raises:
            CheckpointError: it, or the one before it, could not be written.
        """
        ledger = self.state.ledger
        if ledger is None:
            hooks = (WriteMetrics(), WriteEvents())
            with self._session(hooks, resume=self._restored is not None, is_new=False):
                self.save(pinned=pinned)
                self.store.wait()
            return
        self._refuse_in_close("trainer.save")
        self._meet("trainer.save")
        position = self.position
        self._judge_all()
        # Before the state is put together: it has a hash of the log, whose lines must be on the disk by then.
        self.hooks.on_checkpoint()
        # A checkpoint that outlives rows of its ledger, after a power cut, could not be verified.
        ledger.flush(durable=True)
        position.threads = torch.get_num_threads()
        position.world_size = self.team.world_size
        position.sources = self.feed.states()
        position.shuffle = self.feed.shuffle
        state = self.state.plain()
        state["written"] = self.team.on_first(self._written.marks)
        state |= self.team.context_rates(self.model)
        kept = [position.step, *(step for step in self.store.steps() if step not in self._pinned)]
        # Of every checkpoint that may turn out to be the newest intact one, not of this one alone.
        needed = position.best_steps(kept, stop=self.config.early_stop)
        for old in self._pinned - needed:
            self.store.unpin(old)
        self._pinned = (self._pinned & needed) | {position.best_step}
        self.store.save(position.step, tensors=self.state.tensors(), state=state, pinned=pinned)

    # ------------------------------------------------------------------------------------------ start and resume

    def _start(self) -> bool:
        self.team.on_first(self.folder.refuse_old_run)
        self.folder.path.mkdir(parents=True, exist_ok=True)
        self.state.seed(self.config.seed, rank=self.team.rank)
        return False

    def _resume(self) -> bool:
        """Load the newest intact checkpoint; False if the run was killed before it wrote its first one."""
        if not self.team.on_first(self.store.steps):
            self.progress.say("no checkpoint yet: starting from the beginning")
            self.state.seed(self.config.seed, rank=self.team.rank)
            return False
        checkpoint = self.state.load(self.store)
        position = self.position
        self.team.restore_context_rates(self.model, checkpoint.state)
        for damaged in checkpoint.skipped:
            self.progress.say(f"damaged checkpoint left out:\n{damaged}")
        refuse_other_loss(position.loss, self.loss, where=str(self.folder.checkpoints))
        self._is_placed = position.window == self._window
        if self._is_placed:
            self.feed.restore(position, where=str(self.folder.checkpoints))
        if position.world_size != self.team.world_size:
            # A checkpoint has one state of random numbers a rank: other ranks have none to go on from.
            self.state.seed(self.config.seed + position.step, rank=self.team.rank)
            self.progress.say(f"ranks: {self.team.world_size}, before: {position.world_size}")
        if position.best_step in self.store.steps():
            self.store.pin(position.best_step)
        self._pinned = set(self.store.pinned()) & set(position.best_steps(None, stop=self.config.early_stop))
        marks = checkpoint.state.get("written")
        damaged = self.config.damaged_records
        self._damaged = self.team.on_first(lambda: self._written.damaged(marks, step=position.step, then=damaged))
        if not self.is_at_limit:
            # A run that was done goes on where settings allow more epochs or steps by now.
            position.finished = self.ending.patience_is_out
        if position.threads and not self.config.threads:
            # Another number of threads adds up in another order, and a resumed run is to repeat the same bits.
            torch.set_num_threads(position.threads)
        self.progress.say(f"resumed at step {position.step:,} (epoch {position.epoch + 1})")
        return True

    def restore_best(self) -> None:
        """Load the weights of the best evaluation, where they are not those of the last step. Collective.

        If they are lost that is said, and the last ones stay.
        """
        self._meet("trainer.restore_best")
        best = self.position.best_step
        # Nothing is to be loaded then; where weights are averaged, their average is what is kept.
        if not best or best == self.position.step:
            if self.step.average is not None:
                self.step.average.keep()
            return
        try:
            self.state.load_weights(self.store, best)
        except DamagedCheckpointError as error:
            self.progress.say(f"the best weights (step {best:,}) are lost; those of the last step stay:\n{error}")
            return
        self.progress.detail(
            f"best weights restored: step {best:,}, {self.config.early_stop.metric} {self.position.best_value:.5f}"
        )

    # ---------------------------------------------------------------------------------------------------- details

    def _result(self) -> FitResult:
        return FitResult.of(
            self.position,
            stopped_early=self.ending.patience_is_out,
            end=self.ending.text(),
            samples_per_s=self._pace.samples_per_s,
            first_step_s=self._pace.first_step_s,
        )
