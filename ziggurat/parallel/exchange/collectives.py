"""All-to-all of flat buffers with uneven sizes, asynchronous, counted. The only place where embeddings leave a rank.

    send   [ to 0 | to 1 | to 2 ]    ──►    received   [ from 0 | from 1 | from 2 ]

A group of one, and a job without torch.distributed, copies nothing: what was sent is what was received.

When a rank ends, the others notice by its connection, at once; when it hangs, by the time limit of the job
(`lost_ranks.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ziggurat.parallel.exchange.traffic import Traffic
from ziggurat.parallel.lost_ranks import communicating
from ziggurat.parallel.topology import RankGroup


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


# torch renamed both: the old names warn where the new ones exist.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class CountedGather:
    """How FSDP2 gathers weights, with a count: takes the place of its own all-gather (`set_custom_all_gather`).

    Args:
        traffic: counts what is gathered, as payload: all parts together.
    """

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the whole weights."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather the parts of all ranks of a group."""
        if group.size() > 1:
            num_bytes = output_tensor.numel() * output_tensor.element_size()
            self._traffic.count_reduction("dense weights", num_bytes=num_bytes)
        return _ALL_GATHER(output_tensor, input_tensor, group=group, async_op=async_op)


class CountedReduceScatter:
    """How FSDP2 sums gradients and cuts the sums into parts, with a count (`set_custom_reduce_scatter`).

    Args:
        traffic: counts the payload: the gradients of all weights.
    """

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for gradients."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Sum over the ranks of a group; each keeps its part."""
        if group.size() > 1:
            num_bytes = input_tensor.numel() * input_tensor.element_size()
            self._traffic.count_reduction("dense gradients", num_bytes=num_bytes)
        return _REDUCE_SCATTER(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
