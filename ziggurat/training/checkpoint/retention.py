"""The folder of checkpoints: names, publishing by rename, pins, and deleting what is no longer wanted.

    checkpoints/
      step-000000001200/             complete: it got this name by a rename, after everything in it was on disk
      step-000000001200.pinned       marker: never pruned
      .partial-step-000000001300/    being written, or left over from a killed save
      .replaced-step-000000001200/   moved aside while a save of the same step takes its place
      .pruned-step-000000000900/     being deleted; the name was taken away first, so no half checkpoint is ever seen
      .lock                          held (flock) during a save; a kill releases it

Every arrow between these names is one rename, which POSIX makes atomic; fsync of the folder makes it durable.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path

from ziggurat.errors import CheckpointError
from ziggurat.training.checkpoint.errors import STEP_NAME, writing
from ziggurat.training.checkpoint.files import sync_folder

_LEFTOVER_NAME = re.compile(r"\.(partial|replaced|pruned)-step-[0-9]{12}")
_PIN_NAME = re.compile(r"step-[0-9]{12}\.pinned")
MAX_STEP = 10**12 - 1
_PATIENCE_S = 10.0
_POLL_S = 0.05


def step_folder(folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint of `step`."""
    return folder / f"step-{step:012d}"


def make_folder(folder: Path) -> None:
    """Make the folder of a run's checkpoints, durably."""
    if not folder.is_dir():
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)


def complete_steps(folder: Path) -> list[int]:
    """Steps with a complete checkpoint, oldest first. Complete, not verified: loading does that."""
    if not folder.is_dir():
        return []
    matches = (STEP_NAME.fullmatch(entry.name) for entry in os.scandir(folder))
    return sorted(int(match[1]) for match in matches if match)


def partial_folder(final: Path) -> Path:
    """Return the folder where a checkpoint is written before it is published as `final`."""
    return _aside("partial", final)


def start_partial(final: Path) -> Path:
    """Make an empty partial folder; an earlier one of the same step is deleted."""
    partial = partial_folder(final)
    with writing(partial):
        remove_quietly(partial)
        partial.mkdir(parents=True)
    return partial


def publish(final: Path) -> None:
    """Give a finished partial folder its name, durably. A checkpoint of the same step is replaced, never lost."""
    partial = partial_folder(final)
    replaced = _aside("replaced", final)
    # What is in the folder must be on the disk before its name says that it is complete.
    sync_folder(partial)
    with writing(final):
        if final.exists():
            remove_quietly(replaced)
            # Out of the way first: no folder can be renamed over one that has content.
            os.rename(final, replaced)
        try:
            os.rename(partial, final)
        except OSError:
            if replaced.exists():
                os.rename(replaced, final)
            raise
    sync_folder(final.parent)
    remove_quietly(replaced)


def discard(final: Path) -> None:
    """Delete a checkpoint: first its name, then its content."""
    pruned = _aside("pruned", final)
    with writing(final):
        for aside in (pruned, _aside("replaced", final)):  # nothing of this step may come back at the next start
            remove_quietly(aside)
        os.rename(final, pruned)
        _pin_path(final).unlink(missing_ok=True)
        _delete(pruned)


def prune(folder: Path, *, keep: int, newest: int) -> list[int]:
    """Delete the oldest checkpoints up to step `newest` until `keep` are left; pinned ones are not touched.

    Args:
        folder: of checkpoints.
        keep: how many stay, `newest` among them; 0 keeps all.
        newest: the step that was just verified and published; never deleted, nor is anything later.

    Returns:
        The steps that were deleted.
    """
    if keep == 0:
        return []
    candidates = [step for step in complete_steps(folder) if step < newest and not is_pinned(folder, step)]
    doomed = candidates[: max(0, len(candidates) - (keep - 1))]
    for step in doomed:
        discard(step_folder(folder, step))
    return doomed


def clear_leftovers(folder: Path) -> list[str]:
    """Remove what a killed save left behind; the names of what was found. Call it while holding the lock.

    A checkpoint that was moved aside, and whose replacement was never published, gets its name back.
    """
    found = _leftovers(folder)
    for name in found:
        path = folder / name
        final = folder / name.split("-", 1)[1]
        with writing(path):
            if name.endswith(".pinned"):
                path.unlink()
            elif name.startswith(".replaced") and not final.exists():
                os.rename(path, final)
            else:
                _delete(path)
    if found:
        sync_folder(folder)
    return found


def has_leftovers(folder: Path) -> bool:
    """True if `clear_leftovers` would find anything."""
    return folder.is_dir() and bool(_leftovers(folder))


def set_pin(folder: Path, step: int) -> None:
    """Keep a checkpoint from being pruned; durable."""
    path = _pin_path(step_folder(folder, step))
    with writing(path):
        path.touch()
    sync_folder(folder)


def remove_pin(folder: Path, step: int) -> None:
    """Let a checkpoint be pruned again; harmless if it was not pinned."""
    path = _pin_path(step_folder(folder, step))
    with writing(path):
        path.unlink(missing_ok=True)


def is_pinned(folder: Path, step: int) -> bool:
    """True if `set_pin` was called for `step`."""
    return _pin_path(step_folder(folder, step)).exists()


def remove_quietly(path: Path) -> None:
    """Delete a folder that nobody needs; what cannot be deleted now is a leftover, and goes at the next start."""
    with suppress(OSError):  # rmtree's own ignore_errors lets some errors through
        _delete(path)


class FolderLock:
    """One save at a time in a folder, over all processes of a host: `flock` on `.lock`. A kill releases it.

    A process that only reads the folder holds it too, for as long as it takes to remove what a killed save left.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / ".lock"
        self._descriptor = -1

    def acquire(self, *, waits: bool = True) -> None:
        """Take the lock, or raise `CheckpointError` if somebody else holds it.

        Args:
            waits: a while, for a process that removes what a killed save left; else it raises at once.
        """
        with writing(self._path):
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        end = time.monotonic() + (_PATIENCE_S if waits else 0.0)
        while True:
            try:
                with writing(self._path):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except CheckpointError as error:
                is_held = isinstance(error.__cause__, BlockingIOError)
                if is_held and time.monotonic() < end:
                    time.sleep(_POLL_S)
                    continue
                os.close(descriptor)
                raise CheckpointError(
                    expected="one save at a time in a checkpoint folder",
                    found="a save that is still running, here or in another process",
                    where=str(self._path.parent),
                    ways_out=("give every run a folder of its own", "end the other run"),
                ) from error
        self._descriptor = descriptor

    @property
    def is_held(self) -> bool:
        """True between `acquire` and `release` of this object."""
        return self._descriptor >= 0

    def release(self) -> None:
        """Give the lock back; harmless if it is not held."""
        if self._descriptor >= 0:
            descriptor = self._descriptor
            self._descriptor = -1
            with suppress(OSError):  # Linux gives the descriptor back, and with it the lock, even then
                os.close(descriptor)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _leftovers(folder: Path) -> list[str]:
    names = {entry.name for entry in os.scandir(folder)}
    aside = {name for name in names if _LEFTOVER_NAME.fullmatch(name)}
    pins = {name for name in names if _PIN_NAME.fullmatch(name)}
    pinned = {name: name.removesuffix(".pinned") for name in pins}
    pins_of_nothing = {name for name, step in pinned.items() if not names & {step, f".replaced-{step}"}}
    return sorted(aside | pins_of_nothing)


def _aside(why: str, final: Path) -> Path:
    return final.parent / f".{why}-{final.name}"


def _pin_path(final: Path) -> Path:
    return final.parent / f"{final.name}.pinned"
