"""`ziggurat verify RUN`: every file of a run against its checksums, and each row trained once an epoch.

checkpoints/          every tensor and state; the best one is pinned, so that no later save prunes it
metrics.jsonl         and ledger.bin: as the newest intact checkpoint knows them
windows.jsonl         of streams: every line, and that the ledger holds the rows of each window once
inputs.json           and plan, report, traffic, evaluations: as they were written
preprocessing/        every vocabulary; those of data.json, and of the model's inputs
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ziggurat.config import from_json
from ziggurat.data.encoded.ledger import read_ledger, verify_ledgers
from ziggurat.data.preprocess.preprocessing_io import load_preprocessing
from ziggurat.data.streams.journal import JournalFile
from ziggurat.data.streams.kept_rows import refuse_other_part
from ziggurat.errors import CheckpointError, ZigguratError
from ziggurat.features.inputs import InputSpec
from ziggurat.models.build import ModelConfig
from ziggurat.plan import Plan
from ziggurat.precision.dispatch import DISPATCH
from ziggurat.recipes.run_config import load_config
from ziggurat.runs.data_paths import located
from ziggurat.runs.data_record import refuse_other_vocabularies
from ziggurat.runs.execute import prepare_run
from ziggurat.runs.packed_run import read_products
from ziggurat.training.checkpoint import Checkpoint, CheckpointStore, Match
from ziggurat.training.position import Position
from ziggurat.training.records.answers import answers_file, read_answers, read_scored_windows
from ziggurat.training.records.run_folder import EVALUATION, INPUTS, STARTUP, TRAFFIC, RunFolder
from ziggurat.training.records.windows import read_windows
from ziggurat.training.records.written import WrittenFiles


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Lines for a person, and whether all is well."""

    lines: list[str]
    good: bool


def verify_run(folder: str | Path, *, models: Sequence[type[ModelConfig]] = ()) -> Verdict:
    """Check checkpoints and ledger of a run; changes nothing. `models`: see `load_run`."""
    run = RunFolder(Path(folder))
    config = load_config(run.path, models=models)
    lines: list[str] = []
    good = True
    intact = list[int]()
    damaged: dict[int, CheckpointError] = {}
    store = CheckpointStore(run.checkpoints, config=config.training.checkpoint)
    gone = list[int]()
    waiting = store.steps()
    while waiting:
        step = waiting.pop(0)
        try:
            store.verify(step)
            lines.append(f"checkpoint {step:,}: intact")
            intact.append(step)
        except CheckpointError as error:
            if step in store.steps():
                good = False
                damaged[step] = error
                continue
            # The run goes on in another process, which keeps the newest alone.
            lines.append(f"checkpoint {step:,}: deleted meanwhile by the run, which goes on")
            gone.append(step)
            if not waiting and not intact:
                waiting = [each for each in store.steps() if each not in gone and each not in damaged]
    for step, error in damaged.items():
        if not intact:  # no older one can be loaded in its place
            error.ways_out = ("restore a checkpoint from a copy", "start the run again in an empty folder")
        lines.append(f"checkpoint {step:,}: DAMAGED\n{error}")
    if not store.steps() and any(run.evaluation(split).exists() for split in ("valid", "test")):
        good = False
        lines.append("checkpoints: MISSING, of a run that ended; restore them from a copy, or train again")
    for name, error in _damaged_files(run):
        good = False
        lines.append(f"{name}: DAMAGED\n{error}")
    if run.products.exists():  # it was packed from another run, whose log and ledger stay there
        return Verdict(lines=[*lines, f"{run.products.name}: packed for scoring, so no log and no ledger"], good=good)
    files = WrittenFiles(run)
    if intact:
        # No tensor is wanted, only what the checkpoint says of the run.
        newest = store.load(prefer=intact[-1], into={}, match=Match.SUBSET)
        best = _unpinned(store, newest)
        if best:
            good = False
            lines.append(f"checkpoint {best:,}: NOT PINNED\n{_not_pinned(run, best)}")
        problems = files.problems(newest.state.get("written"), step=newest.step)
        lines += [f"{Path(problem.where).name}: DAMAGED\n{problem}" for problem in problems]
        lines += [f"{name} begins after step {step:,}: an earlier one was damaged" for name, step in files.since()]
        if problems:
            return Verdict(lines=lines, good=False)  # what a damaged ledger says of epochs proves nothing
    if run.is_stream():
        found = verify_windows(run)
        return Verdict(lines=lines + found.lines, good=good and found.good)
    train = prepare_run(located(config, folder=run.path)).train
    report = verify_ledgers([run.ledger], num_rows=train.num_rows, row_sum=train.row_sum)
    return Verdict(lines=lines + report.lines(), good=good and report.good)


def verify_windows(run: RunFolder) -> Verdict:
    """Check that a stream scored each window once, and trained its rows once, in order; the last one may be partial."""
    try:
        records = read_scored_windows(run)
        ledger = read_ledger(run.ledger)
        # Of a stream that goes on in another process, both as they were while no window came.
        while (now := read_scored_windows(run)) != records:
            records = now
            ledger = read_ledger(run.ledger)
    except CheckpointError as error:
        return Verdict(lines=[f"{run.windows.name}: DAMAGED\n{error}"], good=False)
    lines: list[str] = []
    good = True
    for path, problem in (*_harmed_parts(run), *_harmed_answers(run)):
        good = False
        lines.append(f"{path}: DAMAGED\n{problem}")
    trained = [record for record in records if record.trained_rows]
    numbers = [record.window for record in records]
    if numbers != list(range(1, len(records) + 1)):
        good = False
        lines.append(f"{run.windows.name}: windows {numbers}, which are not each of them once, in order")
    for epoch, record in enumerate(trained):
        own = ledger[ledger["epoch"] == epoch]
        rows = int(own["num_rows"].sum(dtype=np.int64))
        is_exact = rows == record.trained_rows and f"{int(own['sum'].sum(dtype=np.uint64)):x}" == record.row_sum
        is_partial = record is trained[-1] and rows < record.trained_rows
        verdict = "every row exactly once" if is_exact else f"partial, {rows:,} of {record.trained_rows:,} rows"
        if not is_exact and not is_partial:
            good = False
            verdict = f"NOT every row exactly once: the ledger has {rows:,} rows"
        states = ", ".join(f"{count:,} {state}" for state, count in record.trained.items() if count)
        shown = f"{record.trained_rows:,} rows{f' ({states})' if states else ''}"
        lines.append(f"window {record.name}: {shown} in {len(own):,} steps: {verdict}")
    extra = int((ledger["epoch"] >= len(trained)).sum())
    if extra:
        good = False
        lines.append(f"PROBLEM: {extra:,} steps of windows that {run.windows.name} does not have")
    return Verdict(lines=lines, good=good)


def _harmed_parts(run: RunFolder) -> Iterator[tuple[str, CheckpointError]]:
    """Give the files with rows, keys and labels that have arrived, and are not as they were written."""
    journal = JournalFile(run.stream).read()
    for part, digest in ({} if journal is None else journal.digests).items():
        path = run.stream / "arrived" / part
        try:
            refuse_other_part(path, digest=digest)
        except CheckpointError as error:
            # Of a stream that goes on in another process the file may be needed no longer.
            now = JournalFile(run.stream).read()
            if now is not None and now.digests.get(part) == digest:
                yield str(path.relative_to(run.path)), error


def _harmed_answers(run: RunFolder) -> Iterator[tuple[str, CheckpointError]]:
    """Give the scores of windows that wait for their labels, and are not as they were written."""
    for number, digest in _waiting_answers(run).items():
        try:
            read_answers(run, number, digest=digest)
        except CheckpointError as error:
            # Of a stream that goes on in another process labels may have become complete meanwhile.
            if _waiting_answers(run).get(number) == digest:
                yield str(answers_file(run, number).relative_to(run.path)), error


def _waiting_answers(run: RunFolder) -> dict[int, str]:
    """Return the digests of the scores of windows that wait for their labels, by number."""
    journal = JournalFile(run.stream).read()
    settled = {record.window for record in read_windows(run.windows)}
    done = enumerate([] if journal is None else journal.done, start=1)
    return {number: window.answers for number, window in done if window.answers and number not in settled}


def _damaged_files(run: RunFolder) -> list[tuple[str, ZigguratError]]:
    """Every small file that is not as it was written, with what is wrong."""
    checks: list[tuple[Path, Callable[[Path], object]]] = [
        (run.inputs, INPUTS.read),
        (run.preprocessing, load_preprocessing),
    ]
    optional: list[tuple[Path, Callable[[Path], object]]] = [
        (run.startup, STARTUP.read),
        (run.plan, Plan.load),
        (run.dispatch, DISPATCH.read),
        (run.products, lambda path: read_products(run)),
        (run.traffic, TRAFFIC.read),
        (run.data, lambda path: refuse_other_vocabularies(run)),
        *((path, EVALUATION.read) for path in sorted((run.path / "evaluations").glob("*.json"))),
    ]
    checks += [(path, check) for path, check in optional if path.exists()]
    found: list[tuple[str, ZigguratError]] = []
    for path, check in checks:
        try:
            check(path)
        except ZigguratError as error:
            found.append((str(path.relative_to(run.path)), error))
    # Compared only where both can be read.
    if not found:
        try:
            _refuse_other_inputs(run)
        except ZigguratError as error:
            found.append((run.inputs.name, error))
    return found


def _refuse_other_inputs(run: RunFolder) -> None:
    inputs = from_json(InputSpec, INPUTS.read(run.inputs), where=str(run.inputs))
    known = load_preprocessing(run.preprocessing).inputs
    if inputs != known:
        raise CheckpointError(
            expected=f"the inputs that the run's vocabularies make: {known}"[:600],
            found=f"others: {inputs}"[:600],
            where=str(run.inputs),
            ways_out=("restore the folder from a copy of this run", "train again, into another folder"),
        )


def _unpinned(store: CheckpointStore, newest: Checkpoint) -> int:
    """Return the step of the best checkpoint where nothing keeps it; 0 where all is well.

    Args:
        store: of the run.
        newest: the newest intact checkpoint, which knows the best one.
    """
    best = Position.from_json(newest.state.get("position")).best_step
    while best in store.steps() and best not in store.pinned():
        now = Position.from_json(store.load(into={}, match=Match.SUBSET).state.get("position")).best_step
        # A run that goes on in another process pins a better one before it lets go of this one.
        if now == best:
            return best
        best = now
    return 0


def _not_pinned(run: RunFolder, step: int) -> CheckpointError:
    return CheckpointError(
        expected=f"the best checkpoint, of step {step:,}, with a file step-{step:012d}.pinned that keeps it",
        found="no such file: a later save may prune it",
        where=str(run.checkpoints),
        ways_out=(f"pin it: touch {run.checkpoints}/step-{step:012d}.pinned",),
    )
