"""All-to-all of flat buffers with uneven sizes, asynchronous, counted. The only place where embeddings leave a rank.

    send   [ to 0 | to 1 | to 2 ]    ──►    received   [ from 0 | from 1 | from 2 ]

A group of one, and a job without torch.distributed, copies nothing: what was sent is what was received.

Ranks of one host exchange through memory that they share, where the machine allows it (`host_memory.py`), all others
through their process group.

When a rank ends, the others notice by its connection, at once; when it hangs, by the time limit of the job
(`lost_ranks.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ziggurat.parallel.exchange.host_memory import HostMemory, Ticket
from ziggurat.parallel.exchange.traffic import Traffic
from ziggurat.parallel.lost_ranks import communicating
from ziggurat.parallel.topology import RankGroup

_SMALL_BYTES = 16 << 10  # every rank adds up everything: one exchange instead of two


class Pending:
    """Numbers that are on their way. The buffer that is sent must not be changed before they have come.

    Args:
        receive: waits; returns them, flat, sender after sender.
        where: names the exchange in errors.
        pieces: waits; what came from each sender, where it lies, until the context is left. None: cut from `receive`.
        traffic: counts the time of waiting.
    """

    def __init__(
        self,
        receive: Callable[[], Tensor],
        *,
        where: str,
        pieces: Callable[[], contextlib.AbstractContextManager[list[Tensor]]] | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        self._receive = receive
        self._pieces = pieces
        self._has_come = False
        self._where = where
        self._traffic = traffic

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Name the exchange in errors, and count the time."""
        begin_s = time.perf_counter()
        with communicating(self._where):
            yield
        if self._traffic is not None:
            self._traffic.count_wait(time.perf_counter() - begin_s)

    def wait(self) -> Tensor:
        """The received numbers.

        Raises:
            TopologyError: another rank ended or did not answer in time.
        """
        if not self._has_come:
            with self._waiting():
                received = self._receive()
            # Those who wait again, and there may be several, get the same numbers: a message is received once.
            self._receive = lambda: received
            self._has_come = True
        return self._receive()

    @contextlib.contextmanager
    def pieces(self, sizes: Sequence[int]) -> Iterator[Sequence[Tensor]]:
        """Yield the data of each sender, to be read inside the context, once, instead of `wait`; saves a copy.

        Args:
            sizes: numbers from each sender.
        """
        if self._pieces is None:
            yield self.wait().split(list(sizes))
            return
        # Two contexts: only the waiting is timed, but the memory stays readable until the caller is done.
        with contextlib.ExitStack() as lying:
            with self._waiting():
                found = lying.enter_context(self._pieces())
            with communicating(self._where):
                yield found


def outbox(count: int, *, like: Tensor, dtype: torch.dtype, group: RankGroup) -> Tensor:
    """Memory for the next message of a group, to be filled and then sent: where the others read it, if that can be."""
    memory = memory_of(group, like)
    if memory is None:
        return torch.empty(count, dtype=dtype, device=like.device)
    return memory.outbox(count, dtype=dtype)


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
        return Pending(lambda: send, where=purpose)
    size = send.element_size()
    traffic.count_messages(purpose, sizes_bytes=[number * size for number in sent], group=group)
    memory = memory_of(group, send)
    with communicating(purpose):
        if memory is not None:
            ticket = memory.send(send, sizes=sent, purpose=purpose)
            return Pending(
                lambda: memory.receive(ticket, sizes=received, dtype=send.dtype),
                where=purpose,
                pieces=lambda: memory.pieces(ticket, sizes=received, dtype=send.dtype),
                traffic=traffic,
            )
        # Kept alive by the `Pending`: the work below writes into it later.
        buffer = torch.empty(sum(received), dtype=send.dtype, device=send.device)
        work = dist.all_to_all_single(
            buffer, send, list(received), list(sent), group=group.process_group, async_op=True
        )

    return Pending(lambda: _after(work, buffer), where=purpose, traffic=traffic)


def start_sum(values: Tensor, *, group: RankGroup, purpose: str) -> Pending:
    """Start to add up a tensor over a group, in place; the same bits on every rank.

    Args:
        values: contiguous; must not be read or changed before `wait`, which returns it.
        group: more than one rank.
        purpose: for errors.
    """
    memory = memory_of(group, values)
    with communicating(purpose):
        if memory is not None:
            ticket = memory.share(values, purpose=purpose)
            return Pending(lambda: _sum(values, ticket, memory), where=purpose)
        work = dist.all_reduce(values, group=group.process_group, async_op=True)

    return Pending(lambda: _after(work, values), where=purpose)


def start_part_sum(values: Tensor, *, group: RankGroup, purpose: str) -> Pending:
    """Start to add up a tensor over a group, of which each rank receives its part: the first the first, and so on.

    Args:
        values: flat and contiguous, a multiple of the ranks long; must not be changed before `wait`, which returns the
            part.
        group: more than one rank.
        purpose: for errors.
    """
    memory, count = memory_of(group, values), values.numel() // group.size
    with communicating(purpose):
        if memory is not None:
            ticket = memory.share(values, purpose=purpose)
            return Pending(lambda: _part_of_sum(values, ticket, memory), where=purpose)
        part = torch.empty(count, dtype=values.dtype, device=values.device)
        work = _REDUCE_SCATTER(part, values, group=group.process_group, async_op=True)

    return Pending(lambda: _after(work, part), where=purpose)


def start_gather(part: Tensor, *, into: Tensor, group: RankGroup, purpose: str) -> Pending:
    """Start to gather equal parts from all ranks of a group: what `start_part_sum` has cut is put together.

    Args:
        part: flat and contiguous; must not be changed before `wait`.
        into: flat, all parts long; `wait` returns it.
        group: more than one rank.
        purpose: for errors.
    """
    memory = memory_of(group, part)
    with communicating(purpose):
        if memory is not None:
            ticket = memory.share(part, purpose=purpose)
            return Pending(lambda: _gathered(into, ticket, memory), where=purpose)
        work = _ALL_GATHER(into, part, group=group.process_group, async_op=True)

    return Pending(lambda: _after(work, into), where=purpose)


def memory_of(group: RankGroup, tensor: Tensor) -> HostMemory | None:
    """The memory that a group exchanges such a tensor through; None: its process group does it."""
    # What lies on a GPU is not in the host's memory, even if the group shares some.
    return group.memory if tensor.device.type == "cpu" else None


def _after(work: dist.Work | None, result: Tensor) -> Tensor:
    assert work is not None, "this process is in the group"
    work.wait()
    return result


def _sum(values: Tensor, ticket: Ticket, memory: HostMemory) -> Tensor:
    """Each rank adds up one part of what all have shared, in the order of ranks, and shares the sum."""
    flat = values.view(-1)
    size = memory.size
    # Every rank has to read all parts then, which is little.
    if size * flat.numel() * flat.element_size() <= _SMALL_BYTES:
        with memory.pieces(ticket, sizes=[flat.numel()] * size, dtype=flat.dtype) as shared:
            flat.copy_(_sum_of(shared))
        return values
    # Parts differ by one number at most where the ranks do not divide the tensor.
    bounds = [flat.numel() * member // size for member in range(size + 1)]
    part = slice(bounds[memory.position], bounds[memory.position + 1])
    with memory.pieces(ticket, sizes=[flat.numel()] * size, dtype=flat.dtype) as shared:
        # Halves were summed in FP32, and travel in their own dtype again.
        total = _sum_of([each[part] for each in shared]).to(flat.dtype)
    # One rank alone adds up each number, so all have the same bits.
    sums = memory.share(total, purpose=f"{ticket.purpose}, sums")
    sizes = [last - first for first, last in itertools.pairwise(bounds)]
    with memory.pieces(sums, sizes=sizes, dtype=flat.dtype) as shared:
        torch.cat(shared, out=flat)
    return values


def _part_of_sum(values: Tensor, ticket: Ticket, memory: HostMemory) -> Tensor:
    count = values.numel() // memory.size
    part = slice(memory.position * count, (memory.position + 1) * count)
    with memory.pieces(ticket, sizes=[values.numel()] * memory.size, dtype=values.dtype) as shared:
        return _sum_of([each[part] for each in shared]).to(values.dtype)


def _gathered(into: Tensor, ticket: Ticket, memory: HostMemory) -> Tensor:
    sizes = [into.numel() // memory.size] * memory.size
    with memory.pieces(ticket, sizes=sizes, dtype=into.dtype) as shared:
        return torch.cat(shared, out=into)


def _sum_of(parts: Sequence[Tensor]) -> Tensor:
    """The sum from left to right, of halves in FP32."""
    first, *others = parts
    # A copy in any case: `first` lies in memory that others still read.
    total = first.to(torch.float32) if first.element_size() < 4 else first.clone()
    for part in others:
        total += part
    return total


# torch renamed both: the old names warn where the new ones exist.
_ALL_GATHER: Callable[..., dist.Work | None] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Callable[..., dist.Work | None] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


class CountedGather:
    """Gathers weights for FSDP2, with a count: takes the place of its own all-gather (`set_custom_all_gather`).

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
    """Sums gradients for FSDP2 and cuts the sums into parts, with a count (`set_custom_reduce_scatter`).

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
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Sum over the ranks of a group; each keeps its part."""
        if group.size() > 1:
            num_bytes = input_tensor.numel() * input_tensor.element_size()
            self._traffic.count_reduction("dense gradients", num_bytes=num_bytes)
        return _REDUCE_SCATTER(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
