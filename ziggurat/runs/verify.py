"""`ziggurat verify RUN`: every checkpoint against its checksums, and whether each row was trained once an epoch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ziggurat.data.encoded.ledger import verify_ledgers
from ziggurat.errors import CheckpointError
from ziggurat.recipes.run_config import load_config
from ziggurat.runs.data_paths import located
from ziggurat.runs.execute import prepare_run
from ziggurat.training.checkpoint import CheckpointStore
from ziggurat.training.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Lines for a person, and whether all is well."""

    lines: list[str]
    good: bool


def verify_run(folder: str | Path) -> Verdict:
    """Check checkpoints and ledger of a run; changes nothing."""
    run = RunFolder(Path(folder))
    config = load_config(run.path)
    lines: list[str] = []
    good = True
    store = CheckpointStore(run.checkpoints, config=config.training.checkpoint)
    for step in store.steps():
        try:
            store.verify(step)
            lines.append(f"checkpoint {step:,}: intact")
        except CheckpointError as error:
            good = False
            lines.append(f"checkpoint {step:,}: DAMAGED\n{error}")
    train = prepare_run(located(config, folder=run.path)).train
    report = verify_ledgers([run.ledger], num_rows=train.num_rows, row_sum=train.row_sum)
    return Verdict(lines=lines + report.lines(), good=good and report.good)
