"""CheckpointStore: a folder of checkpoints, of which at least one is always whole.

    save(step)                       background thread                            load()
    ──────────                       ─────────────────                            ──────
    wait for the save before         each rank: write, hash, fsync, read back     newest step ◄──────────┐
    ranks agree who writes what ──►  ranks agree that all of it is on disk        verify every file      │
    copy this rank's chunks          manifest, SHA256SUMS, fsync, rename          damaged? the one before┘
    return                           prune what `keep` does not cover             read into the tensors

A kill at any instant leaves the checkpoints before untouched, and either the whole new one or a partial folder that
the next start removes. An error in the background is raised by the next call; training may go on, and save again.

Methods are collective: all ranks of the group call them, and all raise if one does; all but `steps`, `pin`, `pinned`
and `unpin`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import TracebackType

import torch.distributed as dist
from torch import Tensor

from ziggurat.config import JSON
from ziggurat.errors import CheckpointError, ConfigError
from ziggurat.training.checkpoint import retention
from ziggurat.training.checkpoint.errors import DamagedCheckpointError
from ziggurat.training.checkpoint.files import why_no_links
from ziggurat.training.checkpoint.rank_group import TIMEOUT_S, CheckpointRanks
from ziggurat.training.checkpoint.restore import Match, check_fit, fresh_tensors, read_tensors
from ziggurat.training.checkpoint.rows.earlier import SavedRows, name_of
from ziggurat.training.checkpoint.saving import Saving
from ziggurat.training.checkpoint.storage import CheckpointReader
from ziggurat.typed import checked

_GRACE_S = 60.0
_log = logging.getLogger(__name__)


class SaveMode(StrEnum):
    """The moment at which `save` returns."""

    ASYNC = "async"  # once the tensors are copied; a thread writes. Tables on a disk: as with SYNC
    SYNC = "sync"  # once the checkpoint is durable; needs no copy


@dataclass(frozen=True, kw_only=True)
@checked
class CheckpointConfig:
    """Settings of how checkpoints are written and kept.

    Args:
        keep: how many of the newest checkpoints stay, beside pinned ones. 0: all.
        mode: when a save returns. async: once tensors are copied, a thread writes; sync: once they are on the disk.
        rows: of tables on a disk that a checkpoint writes. changed: those since the checkpoint before, whose files are
            linked; all: those that were ever changed, so that it shares no file.
        timeout_s: on many ranks, how long each waits for one that still writes before it gives up with an error.
    """

    keep: int = 3
    mode: SaveMode = SaveMode.ASYNC
    timeout_s: float = TIMEOUT_S
    rows: SavedRows = SavedRows.CHANGED

    def __post_init__(self) -> None:
        if not isinstance(self.mode, SaveMode):  # "async" is not SaveMode.ASYNC, and would save without a copy
            raise ConfigError(
                expected=f"one of {', '.join(map(str, SaveMode.__members__))} of SaveMode",
                found=f"mode = {self.mode!r}",
                where="checkpoint config",
                ways_out="mode=SaveMode.ASYNC",
            )
        if self.keep < 0 or self.timeout_s <= 0:
            raise ConfigError(
                expected="keep >= 0 and timeout_s > 0",
                found=f"keep = {self.keep}, timeout_s = {self.timeout_s}",
                where="checkpoint config",
                ways_out=("keep = 3 keeps the newest three", "keep = 0 keeps all"),
            )


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint as `CheckpointStore.load` returns it.

    Args:
        step: of this checkpoint.
        tensors: by name; those of `into` if it was given, else new ones on the host, whole on every rank.
        state: what was saved as JSON.
        skipped: one error for each newer checkpoint that is damaged, newest first.
    """

    step: int
    tensors: Mapping[str, Tensor]
    state: dict[str, JSON]
    skipped: tuple[CheckpointError, ...] = ()


class CheckpointStore:
    """Saves and loads the checkpoints of one run. See the module's docstring.

    Args:
        folder: of this run's checkpoints; made at the first save.
        config: how to write and keep.
        process_group: the ranks that save and load together; None for all. Constructing is collective.

    Attributes:
        leftovers: names of what killed saves had left in the folder; removed by now.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        config: CheckpointConfig | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.config = config or CheckpointConfig()
        self.leftovers: tuple[str, ...] = ()
        self._ranks = CheckpointRanks(process_group, timeout_s=self.config.timeout_s)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._replaceable: set[int] = set()  # steps that this store saved, loaded or found damaged
        self._damaged: set[int] = set()
        if self._ranks.is_coordinator and retention.has_leftovers(self.folder):
            self._clear_leftovers()

    def save(
        self, step: int, *, tensors: Mapping[str, Tensor], state: Mapping[str, JSON], pinned: bool = False
    ) -> None:
        """Save a checkpoint. Collective.

        With several ranks, a plain tensor counts as a copy of the tensor of that name on other ranks, and one of
        them is written; `DTensor`s and `ShardedTensor`s are written shard by shard; state must be equal on all ranks.

        Args:
            step: later than all others in the folder; the latest one may be saved again, and is replaced.
            tensors: by name; any device, stride or size. They may be changed as soon as this returns.
            state: everything else, as JSON.
            pinned: never prune this checkpoint (until `unpin`).

        Raises:
            CheckpointError: the save before failed (its error, once), or this one cannot be started (or, with
                `SaveMode.SYNC`, failed). Earlier checkpoints are untouched, and saving may be tried again.
        """
        self.wait()
        saving = Saving(self.folder, step=step, ranks=self._ranks, pinned=pinned, saved_rows=self.config.rows)
        try:
            saving.plan(tensors, state, guard=lambda: self._require_latest(step))
            is_async = self.config.mode is SaveMode.ASYNC and not saving.has_rows
            if is_async:
                saving.copy()
        except BaseException:
            # What was planned may hold a lock on the folder, which the next try needs.
            saving.close()
            raise
        if not is_async:
            self._write(saving)
            return
        # Not a daemon: an interpreter that ends in good order finishes the checkpoint first.
        self._thread = threading.Thread(target=self._write_in_background, args=(saving,), name=f"checkpoint-{step}")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the last save is durable; raises its error, once. Collective."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        # Kept by the thread, and raised where somebody can catch it.
        if self._error is not None:
            error = self._error
            self._error = None
            raise error

    def rows_line(self) -> str:
        """Say what a checkpoint writes of tables on a disk, for the start-up report."""
        if self.config.rows is SavedRows.ALL:
            return "all rows that were ever changed, at each checkpoint"
        why = why_no_links(self.folder)
        if why:
            return f"all rows that were ever changed, at each checkpoint: files cannot be linked in its folder ({why})"
        return "rows that were changed since the checkpoint before, whose files are linked"

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, oldest first. Complete, not verified: `load` and `verify` do that."""
        return retention.complete_steps(self.folder)

    def load(
        self,
        step: int | None = None,
        *,
        prefer: int | None = None,
        into: Mapping[str, Tensor] | None = None,
        match: Match = Match.EXACT,
        optional: str | tuple[str, ...] = "",
    ) -> Checkpoint:
        """Load a checkpoint, after verifying every file. Collective.

        Names, types and shapes are compared first, so that no file is read that would not fit; nothing in `into` is
        changed before all files were verified. Where a run goes on in another process, which saves and deletes
        meanwhile, a checkpoint that is deleted while it is read is not damaged: a newer one is read.

        Args:
            step: which one; None takes the newest that is intact, and reports damaged newer ones in `skipped`.
            prefer: without `step`: try this one first. If it is gone or damaged, `skipped` says so.
            into: tensors to fill, sharded in any way, on any device; None makes new ones.
            match: whether `into` must name every tensor of the checkpoint.
            optional: tensors whose names begin so are read where `into` and the checkpoint both have them, and left
                alone otherwise (the random state of each rank, when their number has changed).

        Raises:
            CheckpointError: the checkpoint of `step` is damaged or missing, none is intact, or `into` does not fit.
        """
        self.wait()
        skipped: list[CheckpointError] = []
        candidates = self._candidates(step)
        if prefer in candidates:
            candidates = [prefer, *(other for other in candidates if other != prefer)]
        elif prefer is not None:
            skipped.append(self._absent(prefer, candidates))
        tried: list[int] = []
        while candidates:
            candidate = candidates.pop(0)
            tried.append(candidate)
            try:
                # Names and shapes first: a checkpoint that does not fit is no damaged one, and its files need no
                # look.
                reader = self._reader(candidate)
                check_fit(reader, into=into, match=match, optional=optional, ranks=self._ranks)
                self._verify(reader)
                state = self._ranks.agree_on_coordinator(reader.state)
            except DamagedCheckpointError as error:
                newer = self._newer_ones(candidate, tried)
                # A step that was asked for by number gives way to no other.
                if step is not None and newer:
                    raise self._absent(step, self.steps()) from error
                if step is not None:
                    raise
                if newer:
                    candidates = newer
                    continue
                _log.warning("checkpoint of step %d is damaged and was skipped:\n%s", candidate, error)
                skipped.append(error)
                self._damaged.add(candidate)
                continue
            stored = reader.manifest.named
            if into is None:
                tensors: Mapping[str, Tensor] = fresh_tensors(stored)
            else:
                tensors = into if not optional else {name: into[name] for name in into if name in stored}
            # Only now, when all ranks have verified their files: an error before has changed no tensor.
            try:
                self._ranks.agree(partial(read_tensors, reader, tensors, name=name_of(reader)))
            except DamagedCheckpointError:
                candidates = [] if step is not None else self._newer_ones(candidate, tried)
                if not candidates:
                    raise
                continue
            # Its step may be saved again: training goes on from there.
            self._replaceable.add(candidate)
            return Checkpoint(step=candidate, tensors=tensors, state=state, skipped=tuple(skipped))
        raise CheckpointError(
            expected="an intact checkpoint",
            found=f"{len(skipped)} damaged: " + "; ".join(f"{it.where}: {it.found}" for it in skipped)
            if skipped
            else "none",
            where=str(self.folder),
            ways_out=("restore a checkpoint from a copy", "start the run again in an empty folder"),
        )

    def verify(self, step: int) -> None:
        """Check every byte of a checkpoint; raises `CheckpointError` naming the first wrong file. Collective."""
        self.wait()
        (candidate,) = self._candidates(step)
        self._verify(self._reader(candidate))

    def pin(self, step: int) -> None:
        """Never prune this checkpoint."""
        self._require_step(step)
        if self._ranks.is_coordinator:
            retention.set_pin(self.folder, step)

    def unpin(self, step: int) -> None:
        """Let this checkpoint be pruned again, at the next save."""
        if self._ranks.is_coordinator:
            retention.remove_pin(self.folder, step)

    def pinned(self) -> list[int]:
        """The steps of all checkpoints that are pinned."""
        return [step for step in self.steps() if retention.is_pinned(self.folder, step)]

    def discard_after(self, step: int) -> list[int]:
        """Delete every checkpoint later than `step`, pinned ones too, to go on from there. Collective.

        Returns:
            The steps that were deleted.
        """
        self.wait()

        def discard() -> list[int]:
            later = [it for it in self.steps() if it > step]
            if not later:
                return []
            lock = retention.FolderLock(self.folder)
            # A process that reads the folder takes what is being deleted for what a killed save left.
            lock.acquire()
            try:
                return self._discard(later)
            finally:
                lock.release()

        return self._ranks.agree_on_coordinator(discard)

    def close(self) -> None:
        """Wait for the last save, and end the process group of the store, which saves and loads no more. Collective."""
        self.wait()
        self._ranks.close()

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        if self._thread is not None:  # its error was logged; other ranks may be gone, so the wait is bounded
            self._thread.join(_GRACE_S)

    # ---- saving ----------------------------------------------------------------------------------------------

    def _write(self, saving: Saving) -> None:
        try:
            saving.write()
            self._replaceable.add(saving.step)
            # Written anew, a step that was damaged is whole.
            self._damaged.discard(saving.step)
            if self._ranks.is_coordinator:
                self._prune(saving.step)
        finally:
            saving.close()

    def _write_in_background(self, saving: Saving) -> None:
        try:
            self._write(saving)
        except BaseException as error:  # kept for the next call
            # The next call raises the error with its ways out: the log says what failed, and no more.
            what = f"{error.found}, {error.where}" if isinstance(error, CheckpointError) else error
            _log.error("checkpoint of step %d failed: %s", saving.step, what)
            self._error = error

    def _prune(self, newest: int) -> None:
        """Delete what `keep` does not cover, and damaged checkpoints that this run has left behind."""
        try:
            retention.prune(self.folder, keep=self.config.keep, newest=newest)
            self._discard([step for step in self.steps() if step > newest])
        except CheckpointError as error:  # the new checkpoint is safe; an old one too many is no reason to stop
            _log.warning("an old checkpoint could not be deleted:\n%s", error)

    def _discard(self, steps: list[int]) -> list[int]:
        for step in reversed(steps):
            _log.warning("checkpoint of step %d is deleted: the run goes on from an earlier one", step)
            retention.discard(retention.step_folder(self.folder, step))
        return steps

    def _require_latest(self, step: int) -> None:
        # Damaged ones are in nobody's way: they are deleted when the new one is whole.
        later = [other for other in self.steps() if other >= step and other not in self._damaged]
        if not 0 <= step <= retention.MAX_STEP or (later and not (later == [step] and step in self._replaceable)):
            raise CheckpointError(
                expected="a step later than every checkpoint in the folder",
                found=f"step {step}; the folder has {later}" if later else f"step {step}",
                where=str(self.folder),
                ways_out=(
                    "load() the newest checkpoint first, to go on from it",
                    f"discard_after({step - 1}) to delete those later ones and go on from an earlier checkpoint",
                    "give this run an empty folder",
                ),
            )

    def _clear_leftovers(self) -> None:
        lock = retention.FolderLock(self.folder)
        try:
            lock.acquire(waits=False)
        except CheckpointError as error:  # another process is saving right now, or the folder is only for reading
            _log.info("leftovers of a killed save were not removed:\n%s", error)
            return
        try:
            self.leftovers = tuple(retention.clear_leftovers(self.folder))
            _log.warning("removed what a killed save had left in %s: %s", self.folder, ", ".join(self.leftovers))
        except CheckpointError as error:
            _log.warning("leftovers of a killed save could not be removed:\n%s", error)
        finally:
            lock.release()

    # ---- loading ---------------------------------------------------------------------------------------------

    def _candidates(self, step: int | None) -> list[int]:
        """Return the steps to try, in order; the coordinator decides for all ranks."""

        def choose() -> list[int]:
            if step is None:
                return list(reversed(self.steps()))
            self._require_step(step)
            return [step]

        return self._ranks.agree_on_coordinator(choose)

    def _newer_ones(self, gone: int, tried: Sequence[int]) -> list[int]:
        """Return the steps to try in place of one that was deleted meanwhile, in order; none where it is there."""

        def look() -> list[int]:
            steps = self.steps()
            return [] if gone in steps else [step for step in reversed(steps) if step not in tried]

        return self._ranks.agree_on_coordinator(look)

    def _require_step(self, step: int) -> None:
        steps = self.steps()
        if step not in steps:
            raise self._absent(step, steps)

    def _absent(self, step: int, steps: list[int]) -> DamagedCheckpointError:
        return DamagedCheckpointError(
            expected=f"one of the steps {sorted(steps)}" if steps else "a checkpoint",
            found=f"no checkpoint of step {step}",
            where=str(self.folder),
            ways_out=("load without naming a step to get the newest", "check the folder"),
        )

    def _reader(self, step: int) -> CheckpointReader:
        """A reader with a manifest that is intact on every rank."""
        reader = CheckpointReader(retention.step_folder(self.folder, step), step=step)
        # Read on each rank, so that a file that only one of them cannot see is found by all.
        self._ranks.agree(lambda: reader.manifest.step)
        return reader

    def _verify(self, reader: CheckpointReader) -> None:
        """Verify all files, each by one rank."""

        def verify() -> JSON:
            names = list(reader.manifest.files)
            # Every rank verifies another part, so that each byte is read once.
            reader.verify(names[self._ranks.rank :: self._ranks.world_size])
            return None

        self._ranks.agree(verify)
        # The others have verified the rest, and reading need not do so again.
        reader.trust(reader.manifest.files)
