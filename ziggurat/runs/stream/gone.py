"""Refuse a stream of which something is gone: made anew, it would be of other rows than its weights have seen.

The journal says which rows were trained, vocabularies what the rows of tables mean, settings what the weights are. A
window is in the journal before it is scored, so a journal that knows fewer windows than `windows.jsonl` is an older
one.
"""

from __future__ import annotations

from pathlib import Path

from ziggurat.data.streams.arrivals import Arrivals
from ziggurat.data.streams.journal import JOURNAL_FILE
from ziggurat.data.streams.stability import COUNTS_FILE
from ziggurat.errors import CheckpointError
from ziggurat.training.records.run_folder import RunFolder
from ziggurat.training.records.windows import read_windows


def refuse_gone(run: RunFolder) -> None:
    """Refuse a stream of which something is gone that says what its weights mean, or which rows they have seen.

    Raises:
        CheckpointError: names it. It would be made anew, of other rows.
    """
    for path, what in (
        (run.stream / JOURNAL_FILE, "journal, which says which rows were trained"),
        (run.preprocessing, "vocabularies and statistics, to which its weights belong"),
        (run.config, "settings"),
    ):
        if not path.exists():
            raise damaged(f"a stream that has begun, with its {what}", "none", where=path)
    counts = run.stream / COUNTS_FILE
    # An older Ziggurat wrote no digests of them into the journal; its lines show whether it counted.
    if not counts.exists() and any(record.shift or record.shift_before for record in read_windows(run.windows)):
        what = "counts, with which windows are compared"
        raise damaged(f"a stream that has begun, with its {what}", "none", where=counts)


def refuse_shorter_journal(run: RunFolder, arrivals: Arrivals) -> None:
    """Refuse a journal that does not know a window that was scored: it is on the disk before that.

    Raises:
        CheckpointError: it does not, and would deal rows anew that were trained.
    """
    scored = max((record.window for record in read_windows(run.windows)), default=0)
    known = len(arrivals.journal.done)
    if known < scored:
        raise damaged(
            f"a stream that has begun, with {scored:,} windows in its journal, as {run.windows.name} has",
            f"{known:,}",
            where=run.stream,
        )


def damaged(expected: str, found: str, *, where: Path) -> CheckpointError:
    """Return the error for a stream that has lost a part of itself.

    Args:
        expected: what a whole one has.
        found: in its place.
        where: it is missing.
    """
    return CheckpointError(
        expected=expected,
        found=found,
        where=str(where),
        ways_out=("restore the folder from a copy", "begin the stream anew: --out ANOTHER_FOLDER"),
    )
