"""All-to-all of flat buffers with uneven sizes, asynchronous, counted. The only place where embeddings leave a rank.

    send   [ to 0 | to 1 | to 2 ]    ──►    received   [ from 0 | from 1 | from 2 ]

A group of one, and a job without torch.distributed, copies nothing: what was sent is what was received.

When a rank ends, the others notice by its connection, at once; when it hangs, by the time limit of the job
(`lost_ranks.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ziggurat.parallel.lost_ranks import communicating
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
