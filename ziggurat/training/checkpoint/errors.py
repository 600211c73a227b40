"""The two ways in which a checkpoint disappoints: it is damaged, or the file system refused.

`DamagedCheckpointError` is what makes loading fall back to the checkpoint before; every other `CheckpointError`
(disk full, wrong names, unknown version) is raised as it is. Errors travel between ranks as JSON, so that one rank's
full disk is told by all of them.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ziggurat.errors import CheckpointError
from ziggurat.files.system_text import WAYS_OUT_OF_PROCESS

STEP_NAME = re.compile(r"step-([0-9]{12})")
_WAYS_OUT = {
    errno.ENOSPC: ("free space on this disk, or lower `keep`", "choose a checkpoint folder on a larger disk"),
    errno.EDQUOT: ("free space within the quota, or lower `keep`", "choose a checkpoint folder without a quota"),
    errno.EFBIG: ("raise the limit on file sizes (ulimit -f)",),
    errno.EROFS: ("mount the file system for writing", "choose another checkpoint folder"),
    errno.EACCES: ("give this user write access to the folder", "choose another checkpoint folder"),
    errno.EPERM: ("give this user write access to the folder", "choose another checkpoint folder"),
    errno.EIO: ("look for disk errors in the system log (dmesg)", "choose a checkpoint folder on another disk"),
}


class DamagedCheckpointError(CheckpointError):
    """The files of a checkpoint are not those that were written: flipped, cut, missing, swapped or crafted."""


def damaged(path: Path | str, *, expected: str, found: str) -> DamagedCheckpointError:
    """The error for a file that is not as it was written."""
    return DamagedCheckpointError(
        expected=expected,
        found=found,
        where=str(path),
        ways_out=(
            "load without naming a step: the newest intact checkpoint is used",
            "restore the file from a copy, then run `sha256sum --check SHA256SUMS` in its folder",
        ),
    )


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the operating system raises while `path` is written into a `CheckpointError` that names it."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        ways_out = list(_WAYS_OUT.get(error.errno or 0, ("see the system log (dmesg)",)))
        if _is_beside_a_checkpoint(path):
            ways_out.append("training can go on: checkpoints saved earlier were not touched")
        raise CheckpointError(
            expected="to write the checkpoint",
            found=error.strerror or str(error),
            where=str(path),
            ways_out=ways_out,
        ) from error


def _is_beside_a_checkpoint(path: Path) -> bool:
    """Return whether a finished checkpoint lies beside a path, or beside the folder that the path is in."""
    for folder in (path.parent, path.parent.parent):
        with suppress(OSError):  # a folder that cannot be listed shows none
            if any(STEP_NAME.fullmatch(each.name) and each.is_dir() for each in folder.iterdir()):
                return True
    return False


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what the operating system raises while `path` is read into a `DamagedCheckpointError` that names it."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        if error.errno in WAYS_OUT_OF_PROCESS:  # the file may be as it was written: no older checkpoint is to be taken
            raise CheckpointError(
                expected="to read the checkpoint",
                found=error.strerror or str(error),
                where=str(path),
                ways_out=WAYS_OUT_OF_PROCESS[error.errno],
            ) from error
        raise damaged(path, expected="a readable file", found=error.strerror or str(error)) from error
