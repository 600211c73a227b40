"""Lost ranks: how a rank notices that another one is gone or stands still, says so, and ends.

    another rank ended       its connection closes: the exchange fails at once
    another rank stands      (SIGSTOP, a dead disk, a debugger): the exchange fails after the time limit of the job
    another rank never came  joining the job fails after the same limit
    torchrun is gone         the system ends its ranks

What torch raises then becomes a `TopologyError` that names the exchange and the ranks that are silent. After it a rank
must end, and nothing on the way out may wait for the others: no collective in a `finally`, and no ordinary end of the
interpreter, which would wait for exchanges that are still open (gloo's destructor does, for hours). `end_process` ends
the process by itself; what still writes a checkpoint may finish, within bounds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType

import torch.distributed as dist

from ziggurat.errors import TopologyError

# How the errors of gloo's connections read, and those of NCCL that are no `DistError`; torch has no type for them.
_SIGNS = (
    "NCCL communicator was aborted",
    "NCCL error",
    "ncclRemoteError",
    "Watchdog caught collective operation timeout",
    "Connection closed by peer",
    "Connection reset",
    "Connection refused",
    "Broken pipe",
    "gloo",
    "Application timeout caused pair closure",
    "Timed out waiting",
    "timed out",
    "Socket Timeout",
)
_SOURCE_LINE = re.compile(r"^\[[^\]]*\] ")  # [/…/gloo/transport/tcp/pair.cc:553]
_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
_ASKING_S = 3.0  # a rank of a busy machine takes more than one to notice
_PATIENCE_S = 1.0
_WRITING_S = 60.0


@contextlib.contextmanager
def communicating(what: str) -> Iterator[None]:
    """Turn what torch raises when another rank is gone into a `TopologyError`; other errors pass.

    Args:
        what: the exchange, for the message.
    """
    try:
        yield
    # Raised inside already, with a place that is nearer to the cause.
    except TopologyError:
        raise
    except RuntimeError as error:
        if not is_lost_rank(error):
            raise
        raise lost_rank(error, where=what) from error


def is_lost_rank(error: RuntimeError) -> bool:
    """True for what torch raises when a rank is gone, or does not answer in time."""
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in _SIGNS)


def lost_rank(error: RuntimeError, *, where: str) -> TopologyError:
    """Return the error to raise when a collective fails: another rank is gone, or hangs."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    silent = silent_ranks()
    found = _plain(error)
    return TopologyError(
        expected="all ranks to take part in every exchange",
        found=f"no answer from rank {', '.join(map(str, silent))}: {found}" if silent else found,
        where=f"rank {rank}, {where}",
        ways_out=(
            "look in the log of the rank that ended first: it says why",
            "torchrun --max-restarts 3 restarts the job; with --resume it goes on from the last checkpoint",
        ),
    )


def _plain(error: RuntimeError) -> str:
    """Return what torch says of a lost connection without lines of its own sources and advice about them."""
    found = (str(error).splitlines() or [type(error).__name__])[0]
    if "gloo" not in found:
        return found
    for sign in ("Connection closed by peer", "Connection reset by peer", "Broken pipe"):
        if sign in found:
            return f"its connection is gone ({sign})"
    return _SOURCE_LINE.sub("", found).partition(" This is typically caused")[0]


def silent_ranks() -> list[int]:
    """Ranks that do not report within three seconds that they have noticed, too; none where nobody can be asked."""
    if not dist.is_initialized():
        return []
    found: list[int] = []
    # The store may live on the very rank that stands still, and has no time limit of its own for a question.
    asking = threading.Thread(target=lambda: found.extend(_ask()), daemon=True)
    asking.start()
    # Longer than the question takes when the store answers; the thread is left alone if it does not.
    asking.join(2 * _ASKING_S)
    return list(found)


def _ask() -> list[int]:
    try:
        store = dist.distributed_c10d._get_default_store()
        key = "ziggurat/noticed/{}".format
        # So that the others do not take this rank for a silent one.
        store.set(key(dist.get_rank()), "yes")
        silent = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
        deadline = time.monotonic() + _ASKING_S
        while silent and time.monotonic() < deadline:
            silent = [rank for rank in silent if not store.check([key(rank)])]
            time.sleep(0.01)
    except (RuntimeError, ValueError):  # the store has gone with its host, or the group with its end
        return []
    return silent


def end_with_launcher() -> None:
    """Have this process ended (SIGTERM) from now on when the torchrun that started it is gone, as after `kill -9`.

    Otherwise its ranks would train on, unseen, and write beside those of the job that is started again. Linux alone
    can do that; elsewhere, and in ranks that torchrun did not start, nothing changes.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or sys.platform != "linux":
        return
    launcher = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != launcher:  # it went before it was watched
        os.kill(os.getpid(), signal.SIGTERM)


def end_process(status: int, *, after: BaseException) -> None:
    """End this process now, whatever it waits for in other threads.

    What still writes (a checkpoint) may finish within a minute, unless the error says that another rank is gone.
    """
    deadline = time.monotonic() + (_PATIENCE_S if isinstance(after, TopologyError) else _WRITING_S)
    # Threads that are no daemons may be writing a checkpoint; all of them share one deadline.
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
    sys.stdout.flush()
    sys.stderr.flush()
    # Not `sys.exit`: handlers at exit may wait for ranks that are gone.
    os._exit(status)


def end_process_if_uncaught() -> None:
    """Make an exception that nobody catches end the process from now on, after it is shown as always."""
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show(kind, error, trace)
        end_process(1, after=error)

    sys.excepthook = hook
