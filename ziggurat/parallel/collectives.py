"""All-to-all of flat buffers with uneven sizes, asynchronous, counted. The only place where embeddings leave a rank.

    send   [ to 0 | to 1 | to 2 ]    ──►    received   [ from 0 | from 1 | from 2 ]

A group of one, and a job without torch.distributed, copies nothing: what was sent is what was received.

When a rank ends, the others notice by its connection, at once; when it hangs, by the time limit of the job. They then
ask each other who is still there, and raise a `TopologyError` that names the exchange and the ranks that are silent.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ziggurat.errors import TopologyError
from ziggurat.parallel.topology import RankGroup
from ziggurat.parallel.traffic import Traffic


class Pending:
    """A buffer that is on its way. The buffer that is sent must not be changed before `wait`."""

    def __init__(self, received: Tensor, *, work: dist.Work | None, sent: Tensor, where: str) -> None:
        self._received = received
        self._work = work
        self._sent: Tensor | None = sent
        self._where = where

    def wait(self) -> Tensor:
        """The received buffer.

        Raises:
            TopologyError: another rank ended or did not answer in time.
        """
        if self._work is not None:
            with communicating(self._where):
                self._work.wait()
            self._work = None
        self._sent = None
        return self._received


def all_to_all(
    send: Tensor,
    *,
    sent: Sequence[int],
    received: Sequence[int],
    group: RankGroup,
    traffic: Traffic,
    purpose: str,
) -> Pending:
    """Start an exchange of a flat buffer.

    Args:
        send: (sum of `sent`,) what to send, member after member.
        sent: items for each member of the group.
        received: items from each member.
        group: who takes part.
        traffic: counts the messages.
        purpose: what the messages are, for counts and errors.
    """
    if group.process_group is None:
        return Pending(send, work=None, sent=send, where=purpose)
    size = send.element_size()
    traffic.count_messages(purpose, sizes_bytes=[number * size for number in sent], group=group)
    buffer = torch.empty(sum(received), dtype=send.dtype, device=send.device)
    with communicating(purpose):
        work = dist.all_to_all_single(
            buffer, send, list(received), list(sent), group=group.process_group, async_op=True
        )
    return Pending(buffer, work=work, sent=send, where=purpose)


@contextlib.contextmanager
def communicating(what: str) -> Iterator[None]:
    """Turn what torch raises when another rank is gone into a `TopologyError`; other errors pass.

    Args:
        what: the exchange, for the message.
    """
    try:
        yield
    except TopologyError:
        raise
    except RuntimeError as error:
        text = str(error)
        if not isinstance(error, dist.DistError) and not any(sign in text for sign in _SIGNS):
            raise
        raise lost_rank(error, where=what) from error


def lost_rank(error: RuntimeError, *, where: str) -> TopologyError:
    """What to raise when a collective fails: another rank is gone, or hangs."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    silent = _silent_ranks()
    found = (str(error).splitlines() or [type(error).__name__])[0]
    return TopologyError(
        expected="all ranks to take part in every exchange",
        found=f"no answer from rank {', '.join(map(str, silent))}: {found}" if silent else found,
        where=f"rank {rank}, {where}",
        ways_out=(
            "look in the log of the rank that ended first: it says why",
            "torchrun --max-restarts 3 restarts the job; with --resume it goes on from the last checkpoint",
        ),
    )


# How the errors of gloo's connections read; torch has no type for them.
_SIGNS = ("Connection closed by peer", "Connection reset", "Broken pipe", "gloo", "Timed out waiting", "Socket Timeout")
_PATIENCE_S = 1.0


def _silent_ranks() -> list[int]:
    """Ranks that do not report within a second that they have noticed, too; none where nobody can be asked."""
    if not dist.is_initialized():
        return []
    try:
        store = dist.distributed_c10d._get_default_store()
        key = "ziggurat/noticed/{}".format
        store.set(key(dist.get_rank()), "yes")
        silent = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
        deadline = time.monotonic() + _PATIENCE_S
        while silent and time.monotonic() < deadline:
            silent = [rank for rank in silent if not store.check([key(rank)])]
            time.sleep(0.01)
    except RuntimeError:  # the store has gone with its host
        return []
    return silent
