"""Stream: every window is a test first, and then it is trained. The order of everything on one page.

    files ─► windows in order of time ─┬─► history: fit vocabularies, train once
                                       └─► later ones: encode ─► score ─► windows.jsonl ─► train once ─► checkpoint
                                           encode the next one ══════════════════════════ in a thread

A score of a window is that of a model which has seen nothing of it (progressive validation; Blum, Kalai and Langford,
"Beating the hold-out", COLT 1999): what a model in service would have reached, that is trained at the end of each
window. NE is its log loss over that of always saying the window's own share of positives (He et al., "Practical lessons
from predicting clicks on ads at Facebook", ADKDD 2014), so windows with other shares can be compared. Where labels come
behind the end of a window, its scores are kept, and judged when the labels are complete (`waiting_windows.py`).

The trainer is that of `ziggurat train`. Its checkpoint knows the window, the row in it, and how much of log and ledger
was written; which rows each window has is in the stream's journal; a window's score is on the disk before its first row
is trained. So a stream that is killed anywhere and started again by the same command ends with the same bits, no window
is scored twice into the record, and no row is trained twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ziggurat.commands import pasted
from ziggurat.config import from_json, to_json
from ziggurat.data.encoded.dataset import MemoryDataset
from ziggurat.data.encoded.records import encoded_schema
from ziggurat.data.preprocess.prepared import PreparedData, PreparedSummary, SplitSummary
from ziggurat.data.preprocess.splits import SPLITS
from ziggurat.data.streams.brokers.broker import broker_of
from ziggurat.data.streams.journal import JournalFile
from ziggurat.data.streams.windows import StreamConfig
from ziggurat.errors import ConfigError, ZigguratError
from ziggurat.files import refuse_url
from ziggurat.ops.text.choose import text_kernel
from ziggurat.parallel.job import job
from ziggurat.plan import Plan
from ziggurat.recipes.catalogue import with_soft_start
from ziggurat.recipes.run_config import RunConfig, load_config, run_config_to_json
from ziggurat.runs.apart_from_rows import refuse_among_rows
from ziggurat.runs.data_paths import with_absolute_paths
from ziggurat.runs.execute import Built, build_on_ranks, check_schema_fits, raw_files, report_of_start, resolved
from ziggurat.runs.fingerprint import Difference
from ziggurat.runs.many_ranks import Ranks
from ziggurat.runs.packed_run import refuse_training
from ziggurat.runs.resume import config_to_resume
from ziggurat.runs.stream.publish import PublishConfig, PublishWindows, check_publishing, say_published_before
from ziggurat.runs.stream.reader import refuse_other_messages
from ziggurat.runs.stream.settings import (
    for_losses,
    for_stream,
    refuse_half_of_labels,
    refuse_nothing_grows,
    with_delayed_label,
    with_growing_tables,
    with_teachers_of,
)
from ziggurat.runs.stream.source import FollowConfig, StreamWindow, StreamWindows
from ziggurat.runs.stream.stop_on_signal import StopOnSignal
from ziggurat.runs.stream.waiting_windows import WaitingWindows, without_nan
from ziggurat.runs.stream.window_encoder import NO_ROWS
from ziggurat.runs.stream.window_line import labels_line, window_line
from ziggurat.training.checkpoint.retention import complete_steps
from ziggurat.training.evaluation.evaluate import Answers, unknown_text
from ziggurat.training.hooks.fitting import SaveWhenDue
from ziggurat.training.hooks.hook import Hook, check_hooks
from ziggurat.training.records.answers import ScoredWindow
from ziggurat.training.records.run_folder import CONFIG, INPUTS, STARTUP, RunFolder
from ziggurat.training.records.run_lock import RunLock
from ziggurat.training.records.said import KeptProgress
from ziggurat.training.records.windows import WindowRecord, WindowsFile, read_windows
from ziggurat.training.report.page import write_report
from ziggurat.training.report.progress import NoProgress, Progress
from ziggurat.training.trainer import Trainer

_MANY_UNKNOWN = 0.2  # of samples with an id that has no row: growing tables are named


@dataclass(frozen=True, kw_only=True)
class StreamResult:
    """The results of a stream.

    Args:
        folder: of its run.
        windows: all windows so far, the history first.
        steps: made in all.
        report: path of the HTML report.
        is_first: False on all ranks but the first.
        ended_early: somebody asked it to end, by SIGTERM or Ctrl-C.
    """

    folder: Path
    windows: tuple[WindowRecord, ...]
    steps: int
    report: Path
    is_first: bool = True
    ended_early: bool = False


def stream_run(
    config: RunConfig,
    *,
    folder: str | Path,
    stream: StreamConfig | None = None,
    follow: FollowConfig | None = None,
    publish: PublishConfig | None = None,
    plan: Plan | None = None,
    progress: Progress | None = None,
    hooks: Sequence[Hook] = (),
    fits_batch: bool = False,
    labels: Sequence[str] = (),
    takes_future: bool = False,
) -> StreamResult:
    """Score and train a stream window by window; on every rank of a job that torchrun started, together.

    Called again with the same arguments it goes on where it was, with the files that have come since.

    Args:
        config: the whole run; `data.train` are the files of the stream.
        folder: where it is kept; see `RunFolder`.
        stream: how rows are cut into windows.
        follow: wait for further files, until SIGTERM or Ctrl-C; None ends with the files that are there.
        publish: publish the model after each window; see `publish.py`. None: it is not published.
        plan: where tables go on many ranks; None plans.
        progress: where to show progress; rank 0 does.
        hooks: take part in training, on every rank.
        fits_batch: take a smaller batch size than that of the config where a window would be less than one step, and
            say so. A stream that goes on keeps the one that it began with.
        labels: files, folders or a stream of a broker, with records of labels, which find their rows by
            `stream.delay.key`.
        takes_future: take rows of more than a day from now, as made data may have; else they are bad rows, since one
            of them would call all windows before it done.

    Raises:
        ConfigError: settings that have no place in a stream, or others than those that it began with.
        DataError, SchemaError: files that do not fit, or no row before `--from`.
    """
    stream = stream or StreamConfig()
    own = check_hooks(hooks, where="stream_run, argument 'hooks'")
    run = RunFolder(Path(folder))
    refuse_among_rows(run.path, config.data.train, flag="--out", instead=f"runs/{run.path.name}")
    config = for_stream(config)
    refuse_half_of_labels(stream.delay, labels=labels, train=config.data.train)
    goes_on = run.is_stream() and run.has_begun() and run.config.exists()
    if goes_on:
        _refuse_other_growing(run, stream)
    if stream.growing:
        if not goes_on:  # the tables of one that goes on grow already
            refuse_nothing_grows(config.table_schema)
        config = dataclasses.replace(
            config, table_schema=with_growing_tables(config.table_schema, num_rows=stream.growing)
        )
    stream = dataclasses.replace(stream, delay=for_losses(stream.delay, config.delayed, schema=config.table_schema))
    config = with_delayed_label(config, stream.delay)
    changes: list[Difference] = []
    if goes_on:
        refuse_training(run)
        stored = load_config(run.path, models=(type(config.model),))
        _refuse_other_source(run, stored, given=config)
        config = with_teachers_of(config, stored)
        config, changes = config_to_resume(run, config, again="the same command without them", by="ziggurat stream")
    config.check()
    if publish is not None:
        check_publishing(publish, config, run=run.path)
    if not goes_on:
        check_schema_fits(config)
    with job(device=config.device, timeout_s=config.parallel.timeout_s), RunLock(run.path) as lock:
        given = {"out": run.path.absolute(), "stream": to_json(stream), "hooks": ", ".join(map(repr, own))}
        given["labels"] = list(labels)
        given["publish"] = None if publish is None else to_json(publish)
        given["takes_future"] = takes_future
        ranks = Ranks(config, plan=plan, given=given)
        progress = progress if progress is not None and ranks.is_first else NoProgress()
        if not goes_on:
            config = with_absolute_paths(config)
        ranks.on_first(lambda: _check_folder(run, lock=lock))
        progress = KeptProgress(progress, path=run.said)
        with progress.keeping_error(rank=ranks.rank if ranks.are_many else None), _ways_out_of_streams(run):
            for change in changes:
                if not change.setting.startswith("data."):  # which files there are is said by the stream itself
                    progress.say(f"changed: {change.setting} {change.first or 'none'} → {change.second or 'none'}")
            if goes_on and publish is None and ranks.is_first:
                say_published_before(run.stream, say=progress.say)
            with StopOnSignal() as asked:
                made = _Stream(
                    run,
                    config=config,
                    stream=stream,
                    follow=follow,
                    publish=publish,
                    ranks=ranks,
                    lock=lock,
                    progress=progress,
                    own=own,
                    asked=asked,
                    fits_batch=fits_batch and not goes_on,
                    labels=labels,
                    takes_future=takes_future,
                )
                with contextlib.closing(made):
                    has_begun = made.begin()
                    if has_begun:
                        made.go()
            if not has_begun:
                ranks.close()
                return StreamResult(folder=run.path, windows=(), steps=0, report=run.report, ended_early=True)
            path = Path(ranks.on_first(lambda: str(write_report(run.path))))
        result = StreamResult(
            folder=run.path,
            windows=tuple(made.scored),
            steps=made.trainer.position.step,
            report=path,
            is_first=ranks.is_first,
            ended_early=made.is_asked,
        )
        ranks.close()
    return result


@contextmanager
def _ways_out_of_streams(run: RunFolder) -> Iterator[None]:
    """Name the command of a stream where an error of its parts names that by which other runs go on."""
    try:
        yield
    except ZigguratError as error:
        of_runs = f"ziggurat train {pasted(run.path)} --resume"
        error.ways_out = tuple(way.replace(of_runs, "the same ziggurat stream command with") for way in error.ways_out)
        raise


def _refuse_other_source(run: RunFolder, stored: RunConfig, *, given: RunConfig) -> None:
    """Refuse files in the place of a broker, the reverse, and other messages than those of before.

    A row that comes from both would be trained twice, and the position in one stream of messages says nothing of
    another one.

    Raises:
        ConfigError: the stream began with the other one.
    """
    before = stored.data.train
    first = broker_of(before)
    second = broker_of(given.data.train)
    if first is None and second is None:
        return
    if first is not None and second is not None:
        refuse_other_messages(before[0], given.data.train[0], kept_in=run.config, flag="--data.train")
        return
    raise ConfigError(
        expected=f"rows from {', '.join(before)}, as before: files are known by content, messages by their ids",
        found=", ".join(given.data.train),
        where=f"{run.config}, --data.train",
        ways_out=("leave --data.train out", "begin another stream: --out ANOTHER_FOLDER"),
    )


def _refuse_other_growing(run: RunFolder, stream: StreamConfig) -> None:
    """Refuse other tables than those of before by their flag, since they would look like another schema.

    Raises:
        ConfigError: the stream began with another `--growing`.
    """
    journal = JournalFile(run.stream).read()
    if journal is None or journal.config.growing == stream.growing:
        return
    before = journal.config.growing
    raise ConfigError(
        expected="the tables that the stream began with",
        found=f"--growing {before or '(none)'}, given {stream.growing or '(none)'}",
        where=str(run.path),
        ways_out=(
            f"--growing {before}" if before else "leave --growing out",
            "begin another stream: --out ANOTHER_FOLDER",
        ),
    )


def _check_folder(run: RunFolder, *, lock: RunLock) -> None:
    refuse_url(run.path, error=ConfigError)
    if not run.is_stream():
        run.refuse_old_run()
        run.refuse_files_of_others()
    run.refuse_unwritable()
    lock.acquire()
    if not run.is_stream():
        run.refuse_old_run()  # that of a process which ended while this one waited for the lock


class _Stream:
    """One stream on one rank.

    Args:
        run: its folder.
        config: of the run.
        stream: how rows are cut.
        follow: how further files are waited for; None: none are.
        publish: how it is published; None: it is not.
        ranks: all of them.
        lock: of the folder, held.
        progress: shows it.
        own: hooks of the user.
        asked: says whether a signal has come.
        fits_batch: take a batch size that fits the windows.
        labels: files, folders or a stream of a broker, with records of labels.
        takes_future: rows of the future are rows like others.
    """

    def __init__(
        self,
        run: RunFolder,
        *,
        config: RunConfig,
        stream: StreamConfig,
        follow: FollowConfig | None,
        publish: PublishConfig | None,
        ranks: Ranks,
        lock: RunLock,
        progress: KeptProgress,
        own: tuple[Hook, ...],
        asked: StopOnSignal,
        fits_batch: bool,
        labels: Sequence[str],
        takes_future: bool,
    ) -> None:
        self._run = run
        self._config = config
        self._stream = stream
        self._ranks = ranks
        self._progress = progress
        self._own = own
        self._lock = lock
        self._asked = asked
        self._follow = follow
        self._publish = publish
        self._fits_batch = fits_batch
        self.is_asked = False  # all ranks know that it ends
        self._is_waiting = False
        self._has_warned = False
        self._is_untaught_said = False
        data = raw_files(config, progress=progress if ranks.is_first else NoProgress())
        self._windows = StreamWindows(
            run,
            config=stream,
            data=data,
            schema=config.table_schema,
            ranks=ranks,
            progress=progress,
            follow=follow,
            takes_future=takes_future,
            is_asked=lambda: asked.is_asked,
            labels=labels,
        )
        self._ends: list[tuple[int, int]] = []  # windows that no checkpoint contains yet, and the step at their end
        self.records: WindowsFile | None = None  # of the first rank
        self.waiting: WaitingWindows | None = None  # of the first rank, too

    # ------------------------------------------------------------------------------------------------------- begin

    def begin(self) -> bool:
        """Read what is there, fit to the history, build the model, and load the newest checkpoint.

        Returns:
            False if somebody asked it to end before the history was there.
        """
        windows = self._windows
        self._look()
        # Who was asked to end amid the messages of a broker has not seen all of them.
        is_over = self._follow is None and not self._is_ending()
        while not windows.is_done(1, is_over=is_over):
            if is_over:
                break  # `fit` says what is missing
            if self.is_asked or not self._waited():
                return False
        windows.fit()
        has_begun = self._ranks.on_first(self._run.has_begun)
        has_weights = self._ranks.on_first(lambda: bool(complete_steps(self._run.checkpoints)))
        if self._fits_batch and not has_weights:
            self._fit_batch()
        config = self._config
        if has_weights:  # they are loaded, with the bias that the shares of the history gave
            training = dataclasses.replace(config.training, start_at_base_rate=False)
            config = dataclasses.replace(config, training=training)
        first = windows.open(NO_ROWS if has_weights else 1)
        if not has_weights:
            self._windows.refuse_no_rows(first.data)
        if not first.has_fair_shares:
            training = dataclasses.replace(config.training, start_at_base_rate=False)
            config = dataclasses.replace(config, training=training)
        prepared = self._prepared(first)
        built = build_on_ranks(config, prepared, ranks=self._ranks, run=self._run, resume=has_weights)
        inputs = prepared.inputs
        self.trainer = trainer = Trainer(
            built.model,
            config=config.training,
            # Windows are numbered from 1 on, and each is given when it is there: nothing is before the first.
            train=MemoryDataset(encoded_schema(inputs).empty_table(), inputs),
            folder=self._run.path,
            progress=self._progress,
            parallel=built.parallel,
            lock=self._lock,
            loss=built.loss,
        )
        goes_on = has_begun and trainer.restore()
        self._opened: StreamWindow | None = first
        self._write_start(prepared, built)
        if not has_weights:
            batch_size = config.training.loader.batch_size * self._ranks.world_size
            for line in self._windows.doubts(prepared.train, batch_size=batch_size):
                self._progress.say(line)
        step = trainer.position.step

        def open_records() -> None:
            last_step = step if goes_on else -1
            waiting = WaitingWindows(
                self._run,
                windows=self._windows,
                inputs=trainer.model.inputs,
                label=self._stream.delay.label,
                own=trainer.metrics,
            )
            if self._stream.delay.has_records:
                settled = {record.window for record in read_windows(self._run.windows) if record.step <= last_step}
                waiting.restore(settled=settled, last_step=last_step)
            self.waiting = waiting
            self.records = WindowsFile(
                self._run.windows,
                last_step=last_step,
                last_window=trainer.position.window if goes_on else 0,
                waiting=waiting.records,
            )

        self._ranks.on_first(open_records)
        return True

    def _fit_batch(self) -> None:
        """Take a batch size by which windows are several steps, where that of the config is for many rows."""
        num_ranks = self._ranks.world_size
        loader = self._config.training.loader
        whole = self._windows.batch_size(loader.batch_size * num_ranks)
        batch_size = max(1, whole // num_ranks)
        if batch_size >= loader.batch_size:
            return
        training = dataclasses.replace(self._config.training, loader=dataclasses.replace(loader, batch_size=batch_size))
        self._config = with_soft_start(dataclasses.replace(self._config, training=training))
        self._progress.say(
            f"batch    {batch_size:,} rows instead of {loader.batch_size:,}, which is more than the largest window so "
            "far has: several steps a window learn more than one; --batch-size takes another"
        )

    def _prepared(self, window: StreamWindow) -> PreparedData:
        """The first window as what a run is built on."""
        preprocessing = self._windows.preprocessing
        return PreparedData(
            folder=window.data.folder,
            preprocessing=preprocessing,
            train=window.training,
            valid=None,
            test=None,
            summary=PreparedSummary(
                split=f"windows by {self._stream.by}",
                splits={SPLITS[0].value: SplitSummary(rows=window.training.num_rows, features=preprocessing.counters)},
                quarantined={},
                quarantine="",
                raw_files=0,
                text_kernel=text_kernel().name,
            ),
        )

    def _write_start(self, prepared: PreparedData, built: Built) -> None:
        """Write down what the stream begins with, and say it."""
        trainer = self.trainer
        config = resolved(self._config, trainer=trainer)
        report = report_of_start(
            self._config, config, trainer=trainer, prepared=prepared, ranks=self._ranks, built=built, rung_lines={}
        )
        facts = self._windows.facts()
        report.sections["Data"] |= facts

        def write() -> None:
            CONFIG.write(self._run.config, run_config_to_json(config))
            INPUTS.write(self._run.inputs, to_json(prepared.inputs))
            STARTUP.write(self._run.startup, report.sections)

        self._ranks.on_first(write)
        if self._ranks.is_first:
            self._progress.open()
        if built.parallel is not None:
            self._ranks.keep_plan(built.parallel, run=self._run)
        # Of all that has arrived, where the report of a run speaks of the rows that it was prepared on.
        self._progress.say(f"data     {facts['rows']}; {facts['split']}")
        for line in report.brief:
            if not line.startswith("data "):
                self._progress.say(line)
        self._progress.detail(report.text())

    # ---------------------------------------------------------------------------------------------------- windows

    def go(self) -> None:
        """Score and train all windows that are there, and with `follow` those that come."""
        hooks = [SaveWhenDue(), *self._publishers(), *([self._asked] if self._listens else []), *self._own]
        with self.trainer.over_windows(hooks=hooks):
            number = self._next()
            self._ends.append((number - 1, self.trainer.position.step))
            self._acknowledge()
            self._settle()
            while not self._is_ending():
                if self._windows.is_done(number, is_over=self._follow is None):
                    self._take(number)
                    number += not self.is_asked
                    self._settle()
                elif self._follow is None or not self._waited():
                    break
                else:
                    self._settle()
            self._settle()
        self.trainer.store.wait()
        self._acknowledge()
        if self._stream.delay.is_on and (waiting := self._windows.waiting()):
            self._progress.say(waiting)
        if self.is_asked:
            why = self.trainer.stop_reason or "asked to end"
            self._progress.say(f"{why}; ended at step {self.trainer.position.step:,}: the same command goes on")

    def _publishers(self) -> list[Hook]:
        """The hook that publishes windows, if they are published; behind the one that saves them."""
        if self._publish is None:
            return []
        hook = PublishWindows(
            self._publish,
            run=self._run.path,
            stream=self._run.stream,
            # As config.json has them, which a stream that goes on begins with: else its versions would say "auto"
            # before a kill and the kernel that was chosen after it, and have other digests with the same weights.
            settings=resolved(self._config, trainer=self.trainer),
            data=self._windows.reading,
            preprocessing=self._windows.preprocessing,
            record=lambda number: next((each for each in self.scored if each.window == number), None),
            sample=self._windows.sample,
            histories=self._windows.histories_now,
            progress=self._progress,
        )
        return [hook]

    @property
    def _listens(self) -> bool:
        """True if steps are asked whether to end: on ranks an exchange each, which a stream that ends anyway spares."""
        return self._follow is not None or not self._ranks.are_many

    def _is_ending(self) -> bool:
        """Return whether somebody has asked it to end, on all ranks."""
        self.is_asked = self.is_asked or self._ranks.on_first(lambda: self._asked.is_asked)
        return self.is_asked

    def _waited(self) -> bool:
        """Wait a moment, and look for files; False if somebody asks it to end."""
        if not self._is_waiting:
            self._is_waiting = True
            self._progress.end()
            self._progress.say(f"waiting for {self._windows.waits_for}")
            if self._ranks.is_first and self.scored:
                write_report(self._run.path)
        self._acknowledge()
        if not self._windows.wait(is_asked=lambda: self._asked.is_asked):
            self.is_asked = True
            return False
        self._look()
        return True

    def _look(self) -> None:
        if came := self._windows.look():
            self._is_waiting = False
            self._progress.say(came)

    def _next(self) -> int:
        """The number of the window that is scored or trained next."""
        position = self.trainer.position
        is_done = position.epoch > position.window_epoch or not position.window
        number = position.window + is_done
        if self._stream.frozen and number > 1:
            return self._ranks.on_first(lambda: max(2, self.scored[-1].window + 1 if self.scored else 2))
        return number

    def _take(self, number: int) -> None:
        """Score a window, unless it was, and train it."""
        window = self._window(number)
        # Before this one is scored, so that the next is there when it was trained.
        self._windows.open_ahead(number + 1, is_over=self._follow is None)
        position = self.trainer.position
        is_scored = self._ranks.on_first(lambda: any(record.window == number for record in self.scored))
        if not is_scored:
            self._score(window)
            if self.trainer.stop_reason:  # by a hook that saw the score: the next start trains the window
                self.is_asked = True
                return
        is_trained = number == 1 or not self._stream.frozen
        if is_trained and window.training.num_rows:
            begin = time.perf_counter()
            step = position.step
            for _ in self.trainer.steps(window.training, number=number, name=window.name):
                pass
            self.is_asked = bool(self.trainer.stop_reason)
            if position.epoch == position.window_epoch:  # it ends inside of the window
                self.trainer.save()
                return
            self._say(number, train_s=time.perf_counter() - begin, steps=position.step - step)
        else:
            self._say(number, train_s=0.0, steps=0)
        self._ends.append((number, self.trainer.position.step))
        self._acknowledge()
        self._forget()

    def _acknowledge(self) -> None:
        """Tell the broker of rows that a checkpoint on the disk contains; it is written while training goes on."""

        def acknowledge() -> None:
            newest = max(complete_steps(self._run.checkpoints), default=-1)
            covered = [number for number, step in self._ends if step <= newest]
            self._ends = [(number, step) for number, step in self._ends if step > newest]
            if covered:
                self._windows.acknowledge(max(covered))

        self._ranks.on_first(acknowledge)

    def _window(self, number: int) -> StreamWindow:
        opened = self._opened
        self._opened = None
        if opened is not None and opened.number == number:
            return opened
        return self._windows.open(number)

    def _score(self, window: StreamWindow) -> None:
        """Score a window by the weights as they are, and write that down before a row of it is trained."""
        begin = time.perf_counter()
        metrics: dict[str, float] = {}
        averaged: dict[str, float] = {}
        unknown: Mapping[str, float] = {}
        answers: Answers | None = None
        answers_of_average: Answers | None = None
        is_scored = window.number > 1 and bool(window.data.num_rows)
        average = self.trainer.step.average
        if is_scored and window.awaits:
            answers = self.trainer.answer(window.data)
            unknown = answers.unknown
            if average is not None:
                with average.in_place():
                    answers_of_average = self.trainer.answer(window.data)
        elif is_scored:
            evaluation = self.trainer.evaluate(window.data)
            metrics = evaluation.metrics
            unknown = evaluation.unknown
            if average is not None:
                with average.in_place():
                    averaged = self.trainer.evaluate(window.data).metrics
        record = WindowRecord(
            window=window.number,
            name=window.name,
            step=self.trainer.position.step,
            rows=window.data.num_rows,
            late=window.late,
            dropped=window.dropped,
            bad=window.bad,
            row_sum=f"{window.training.row_sum:x}",
            is_trained=window.number == 1 or not self._stream.frozen,
            watermark=window.watermark,
            has_fractions=True,
            metrics=without_nan(metrics),
            averaged=without_nan(averaged),
            unknown=dict(unknown),
            shift=_rounded(window.stability.history),
            shift_before=_rounded(window.stability.before),
            trained=dict(window.trained),
            labelled=None if window.labelled is None else round(window.labelled / max(window.data.num_rows, 1), 6),
            labels_ahead=window.labels_ahead,
            labels_until=window.labels_until,
            teachers=window.teachers,
            histories=window.histories,
            timing={
                "encode_s": round(window.encode_s, 3),
                "wait_s": round(window.wait_s, 3),
                "score_s": round(time.perf_counter() - begin, 3),
            },
        )

        if window.awaits:
            scored = ScoredWindow(record=record, answers=answers, averaged=answers_of_average)
            self._ranks.on_first(lambda: self._waiting.add(scored))
            record = self._settle(scored=record) or record
        else:
            self._ranks.on_first(lambda: self._file.append(record))
        self.trainer.hooks.on_scored(record)

    def _settle(self, *, scored: WindowRecord | None = None) -> WindowRecord | None:
        """Write the metrics of windows whose labels have become complete, and say them.

        Args:
            scored: a window that was scored just now, whose line is said when it was trained.

        Returns:
            Its record, with metrics where its labels are complete; None without it.
        """
        if self._stream.delay.has_records:
            told = self._ranks.on_first(lambda: [to_json(record) for record in self._waiting.settle(self._file)])
            for each in told:
                record = from_json(WindowRecord, each, where="windows of the first rank")
                if scored is not None and record.window == scored.window:
                    scored = record
                    continue
                self._progress.end()
                self._progress.say(labels_line(record))
                self.trainer.hooks.on_labelled(record)
                self.is_asked = self.is_asked or bool(self.trainer.stop_reason)
        return scored

    def _say(self, number: int, *, train_s: float, steps: int) -> None:
        """Say in a line what became of a window."""
        if self.records is None:
            return
        record = next(each for each in self.scored if each.window == number)
        self._progress.end()
        self._progress.say(window_line(record, train_s=train_s, steps=steps))
        self._warn_of_unknown(record)
        self._warn_of_untaught(record)

    def _warn_of_unknown(self, record: WindowRecord) -> None:
        """Name growing tables once, where many ids have come since vocabularies were fitted."""
        most = max(record.unknown.values(), default=0.0)
        if self._has_warned or self._stream.growing or most < _MANY_UNKNOWN:
            return
        self._has_warned = True
        self._progress.say(
            f"warning: {unknown_text(record.unknown)} in {record.name}: vocabularies are those of the history; "
            f"--growing 100000 lets tables take new ids (in another folder: {pasted(self._run.path)} keeps its own)"
        )

    def _warn_of_untaught(self, record: WindowRecord) -> None:
        """Say once that a head learns nothing, where a window is trained of which teachers have said nothing."""
        names = [name for name, taught in record.teachers.items() if not taught.share]
        if self._is_untaught_said or not names or not record.is_trained or not record.rows:
            return
        self._is_untaught_said = True
        self._progress.say(
            f"warning: {', '.join(names)} has scored no row of {record.name}: the head learned nothing from it; were "
            f"the same examples logged into {self._config.data.teacher} before the window was opened?"
        )

    def close(self) -> None:
        """End what goes on beside training, and the connection to a broker."""
        self._windows.close()

    def _forget(self) -> None:
        """Remove raw rows that no checkpoint needs again."""

        def forget() -> int:
            # Labels of a window are joined with its rows, so these stay until its metrics are known.
            waiting = min(self._waiting.records, default=self.scored[-1].window + 1) - 1
            if self._stream.frozen:
                return min(self.scored[-1].window, waiting)
            oldest = min(complete_steps(self._run.checkpoints), default=-1)
            trained = max((record.window for record in self.scored if record.step <= oldest), default=1) - 1
            return min(trained, waiting)

        self._windows.forget(self._ranks.on_first(forget))

    @property
    def _file(self) -> WindowsFile:
        assert self.records is not None, "the first rank alone has it"
        return self.records

    @property
    def _waiting(self) -> WaitingWindows:
        assert self.waiting is not None, "the first rank alone has them"
        return self.waiting

    @property
    def scored(self) -> list[WindowRecord]:
        """All windows that were scored, in order; those whose labels are not complete have no metrics."""
        if self.records is None or self.waiting is None:
            return []
        found = [*self.records.windows, *self.waiting.records.values()]
        return sorted(found, key=lambda record: record.window)


def _rounded(shifts: Mapping[str, float]) -> dict[str, float]:
    """Indices as a line of windows.jsonl has them: nobody compares the fifth digit."""
    return {name: round(value, 4) for name, value in shifts.items()}
