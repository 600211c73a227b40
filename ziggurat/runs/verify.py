"""`ziggurat verify RUN`: checkpoints, log and ledger against checksums, and each row trained once an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ziggurat.data.encoded.ledger import verify_ledgers
from ziggurat.errors import CheckpointError
from ziggurat.recipes.run_config import load_config
from ziggurat.runs.data_paths import located
from ziggurat.runs.execute import prepare_run
from ziggurat.training.checkpoint import CheckpointStore, Match
from ziggurat.training.records.run_folder import RunFolder
from ziggurat.training.records.written import WrittenFiles


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Lines for a person, and whether all is well."""

    lines: list[str]
    good: bool


def verify_run(folder: str | Path, *, models: Sequence[type[Any]] = ()) -> Verdict:
    """Check checkpoints and ledger of a run; changes nothing. `models`: see `load_run`."""
    run = RunFolder(Path(folder))
    config = load_config(run.path, models=models)
    lines: list[str] = []
    good, intact = True, list[int]()
    store = CheckpointStore(run.checkpoints, config=config.training.checkpoint)
    for step in store.steps():
        try:
            store.verify(step)
            lines.append(f"checkpoint {step:,}: intact")
            intact.append(step)
        except CheckpointError as error:
            good = False
            lines.append(f"checkpoint {step:,}: DAMAGED\n{error}")
    if not store.steps() and any(run.evaluation(split).exists() for split in ("valid", "test")):
        good = False
        lines.append("checkpoints: MISSING, of a run that ended; restore them from a copy, or train again")
    files = WrittenFiles(run)
    if intact:
        written = store.load(intact[-1], into={}, match=Match.SUBSET).state.get("written")
        problems = files.problems(written, step=intact[-1])
        lines += [f"{Path(problem.where).name}: DAMAGED\n{problem}" for problem in problems]
        lines += [f"{name} begins after step {step:,}: an earlier one was damaged" for name, step in files.since()]
        if problems:
            return Verdict(lines=lines, good=False)  # what a damaged ledger says of epochs proves nothing
    train = prepare_run(located(config, folder=run.path)).train
    report = verify_ledgers([run.ledger], num_rows=train.num_rows, row_sum=train.row_sum)
    return Verdict(lines=lines + report.lines(), good=good and report.good)
