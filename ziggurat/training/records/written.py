"""What a checkpoint knows of the log and the ledger: how long they were, and a hash of what they held.

    checkpoint of step 1200    written: metrics.jsonl  81,230 bytes  sha256 5f…    ledger.bin  48,024 bytes  sha256 c1…
    metrics.jsonl on resume    ████████████████████████│░░░░░░░░░░
                               must have that hash     └ steps that will be done again: cut off

Both files are appended to for days, and a resumed run goes on with them. A flipped bit, a file that was emptied or one
that is gone would be carried on in silence: the report would show other numbers, and the proof that every row was
trained once would prove nothing. So resuming and `ziggurat verify` compare them with the newest intact checkpoint.
Runs saved before there were hashes are held to what can be known: the ledger must reach the checkpoint's step.

What is damaged stops a resume (`DamagedRecords.STOP`), or is put aside under another name, and a new file begins
(`START_NEW`). The weights do not depend on either file. Cost: each byte is hashed once, when a checkpoint is written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from ziggurat.commands import pasted
from ziggurat.config import JSON
from ziggurat.data.encoded.ledger import read_ledger
from ziggurat.errors import CheckpointError, MissingFileError
from ziggurat.training.checkpoint import CheckpointStore, Match
from ziggurat.training.config import DamagedRecords
from ziggurat.training.records.log import num_lost_lines
from ziggurat.training.records.run_folder import RunFolder

_BLOCK_BYTES = 1 << 20


class WrittenFile:
    """One file that only grows, and a hash of it that grows with it.

    Args:
        path: the file.

    Attributes:
        since_step: the step after which it begins; 0 unless a damaged one was put aside.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.since_step = 0
        self._hash = hashlib.sha256()
        self._num_bytes = 0

    def mark(self) -> JSON:
        """Return what the file holds now, as plain data; read what was appended since the last time."""
        self._read(None)
        return {"bytes": self._num_bytes, "sha256": self._hash.hexdigest(), "since_step": self.since_step}

    def problem(self, mark: object) -> str:
        """Say what is wrong with the beginning of the file, which `mark` describes; return "" if nothing is."""
        self._hash = hashlib.sha256()
        self._num_bytes = 0
        if not isinstance(mark, dict) or not isinstance(mark.get("bytes"), int):
            return "a checkpoint that does not say what the file held"
        self.since_step = int(mark.get("since_step", 0))
        if not self.path.is_file():
            return "no such file"
        self._read(mark["bytes"])
        if self._num_bytes < mark["bytes"]:
            return f"{self._num_bytes:,} bytes"
        return "" if self._hash.hexdigest() == mark.get("sha256") else "other content in them"

    def put_aside(self, *, step: int) -> Path:
        """Give the file another name, so that a new one begins after `step`."""
        name = f"{self.path.name}.damaged-at-{step}"
        aside = self.path.with_name(name)
        number = 1
        while aside.exists():  # one that was damaged at this step before is kept, too
            number += 1
            aside = self.path.with_name(f"{name}-{number}")
        if self.path.exists():
            self.path.replace(aside)
        self.since_step = step
        self._hash = hashlib.sha256()
        self._num_bytes = 0
        return aside

    def _read(self, limit: int | None) -> None:
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            file.seek(self._num_bytes)
            while limit is None or self._num_bytes < limit:
                size = _BLOCK_BYTES if limit is None else min(_BLOCK_BYTES, limit - self._num_bytes)
                if not (block := file.read(size)):
                    return
                self._hash.update(block)
                self._num_bytes += len(block)


class WrittenFiles:
    """Log and ledger of a run. Only the rank that writes them asks.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._files = [WrittenFile(folder.metrics), WrittenFile(folder.ledger)]

    def marks(self) -> dict[str, JSON]:
        """Return what both files hold now, for the checkpoint."""
        return {file.path.name: file.mark() for file in self._files}

    def problems(self, marks: object, *, step: int) -> list[CheckpointError]:
        """Return errors for what is not as the checkpoint of `step` has it; empty if all is well. Changes no file.

        Args:
            marks: what `marks` returned then; None for a checkpoint of an older version.
            step: of the checkpoint.
        """
        found: list[CheckpointError] = []
        for file in self._files:
            mark = marks.get(file.path.name) if isinstance(marks, dict) else None
            if isinstance(marks, dict):
                text = file.problem(mark)
                expected = f"the first {_bytes_of(mark)} bytes as the checkpoint knows them"
            else:
                text = _problem_without_mark(file.path, step)
                expected = f"a file that reaches step {step:,}"
            if text:
                found.append(_damaged(file.path, expected=f"{expected} (step {step:,})", found=text))
        return found

    def damaged(self, marks: object, *, step: int, then: DamagedRecords) -> list[str]:
        """The names of what is damaged, in a run that is about to go on from `step`. Changes no file.

        Raises:
            CheckpointError: one is damaged, and `then` is STOP.
        """
        problems = self.problems(marks, step=step)
        if problems and then is DamagedRecords.STOP:
            raise problems[0]
        return [Path(problem.where).name for problem in problems]

    def put_aside(self, names: Sequence[str], *, step: int) -> list[str]:
        """Give damaged files another name, so that new ones begin; a line for people on each."""
        asides = [(file.path.name, file.put_aside(step=step)) for file in self._files if file.path.name in names]
        return [f"{name} is damaged: a new one begins after step {step:,}; {aside} keeps it" for name, aside in asides]

    def since(self) -> list[tuple[str, int]]:
        """The files that begin later than the run, and after which step."""
        return [(file.path.name, file.since_step) for file in self._files if file.since_step]


def damage_of_log(run: RunFolder) -> str:
    """Return in a sentence what is wrong with the log of a run; "" if nothing is known to be. One process alone asks.

    It is compared with the newest intact checkpoint; where there is none, lines that cannot be read are counted.
    """
    lost = num_lost_lines(run.metrics)
    if lost:
        lines = f"{lost:,} lines" if lost > 1 else "1 line"
        return f"{run.metrics} is damaged: {lines} from the first that cannot be read on left out"
    store = CheckpointStore(run.checkpoints)
    try:
        newest = store.load(into={}, match=Match.SUBSET) if store.steps() else None
    except CheckpointError:
        return ""  # nothing knows what the log held
    if newest is None:
        return ""
    problems = WrittenFiles(run).problems(newest.state.get("written"), step=newest.step)
    found = [each.found for each in problems if each.where == str(run.metrics)]
    return (
        f"{run.metrics} is damaged: {found[0]}, unlike what the checkpoint of step {newest.step:,} knows"
        if found
        else ""
    )


def _bytes_of(mark: object) -> str:
    return f"{mark['bytes']:,}" if isinstance(mark, dict) and isinstance(mark.get("bytes"), int) else "?"


def _problem_without_mark(path: Path, step: int) -> str:
    if not path.is_file():
        # At step 0 a run may have written neither.
        return "no such file" if step else ""
    # Without a hash nothing can be said of a log: only the ledger has records of a known form.
    if path.suffix != ".bin":
        return ""
    try:
        records = read_ledger(path)
    except (CheckpointError, MissingFileError) as error:
        return error.found
    last = int(records["step"][-1]) if len(records) else 0
    return f"an end at step {last:,}" if last < step else ""


def _damaged(path: Path, *, expected: str, found: str) -> CheckpointError:
    return CheckpointError(
        expected=expected,
        found=found,
        where=str(path),
        ways_out=(
            "restore the file from a copy",
            "go on with a new one, and keep this one under another name: "
            f"ziggurat train {pasted(path.parent)} --resume --training.damaged-records start_new",
        ),
    )
