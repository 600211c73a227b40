"""ReplicatedNetwork: copies of one network on the ranks of a group, whose gradients are summed while they are made.

    backward   ── last layers ── … ── first layers ──► end
    buckets       [ full: sum ───►]   [ full: sum ───►]   wait for all; a weight without a gradient counts as zero

Gradients are collected in buckets, in about the order in which the backward pass makes them, and a full bucket is
all-reduced while the pass goes on (Li et al., arXiv 2006.15704). Torch's DistributedDataParallel does the same, but
waits for ever, or raises, where a weight gets no gradient: a part of the model that this batch did not use, or an
output that the loss does not read. Here the end of the backward pass sends what is left, the same on every rank.

Ranks of one host that share memory sum everything once, at the end: no message travels there while they compute.

Buckets are summed in a fixed order, so a repeated or resumed run adds up in the same order. The gradient of a weight is
a view of its bucket; nothing is copied back.

Over several hosts a bucket may be summed host by host first (`exchange/hierarchical.py`).

Cost: the gradients once over the wire, and one copy of them into the buckets.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ziggurat.parallel.exchange.collectives import Pending, start_sum
from ziggurat.parallel.exchange.hierarchical import NUM_STAGES, HierarchicalSum, Hierarchy
from ziggurat.parallel.exchange.traffic import Traffic
from ziggurat.parallel.lost_ranks import communicating
from ziggurat.parallel.topology import RankGroup

_FIRST_BUCKET_BYTES = 1 << 20  # small, so that the first sum starts early
_BUCKET_BYTES = 25 << 20


class Reduction(StrEnum):
    """The type that gradients of the dense network travel as."""

    FP32 = "fp32"
    BF16 = "bf16"


class _Bucket:
    """Gradients that travel together, and zeros behind them that make the bucket a multiple of `num_parts` long."""

    def __init__(self, parameters: list[nn.Parameter], *, num_parts: int) -> None:
        self.parameters = parameters
        first = parameters[0]
        sizes = [p.numel() for p in parameters]
        num_zeros = -sum(sizes) % num_parts
        # Zeros at the end as well, which stay: a sum over ranks of them is zero.
        self.flat = torch.zeros(sum(sizes) + num_zeros, dtype=first.dtype, device=first.device)
        *pieces, _ = self.flat.split([*sizes, num_zeros])
        self.views = [piece.view_as(p) for piece, p in zip(pieces, parameters, strict=True)]
        self.missing: set[int] = set()


@dataclass(frozen=True)
class _BucketSum:
    """The sum of a bucket over ranks, under way; what travels may be a rounded copy of the bucket."""

    bucket: _Bucket
    sent: Tensor
    work: Pending | HierarchicalSum


class ReplicatedNetwork:
    """Copies of one network on the ranks of a group, whose gradients are summed; called in the place of the module.

    Args:
        module: the same on every rank; the weights of the group's first rank are copied to the others.
        group: the ranks, more than one.
        reduction: what gradients travel as.
        traffic: counts reductions.
        purpose: what for, in its report.
        hierarchy: of the group, to sum by hosts; None: all ranks at once.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        group: RankGroup,
        reduction: Reduction,
        traffic: Traffic,
        purpose: str,
        hierarchy: Hierarchy | None = None,
    ) -> None:
        self.module = module
        self._hierarchy = hierarchy
        self._group = group
        self._reduction = reduction
        self._traffic = traffic
        self._purpose = purpose
        # In shared memory nothing travels by itself: sums cost the same whenever they are made, and one costs least.
        is_early = group.memory is None
        limits = (_FIRST_BUCKET_BYTES, _BUCKET_BYTES) if is_early else (sys.maxsize, sys.maxsize)
        num_parts = 1 if hierarchy is None else hierarchy.inside.size
        self._buckets = [_Bucket(each, num_parts=num_parts) for each in _bucketed(module, limits=limits)]
        self._place: dict[Tensor, tuple[int, int]] = {}
        self._is_reduced = True
        self._is_open = False
        self._next = 0
        self._sums: list[_BucketSum] = []
        for index, bucket in enumerate(self._buckets):
            for position, parameter in enumerate(bucket.parameters):
                self._place[parameter] = (index, position)
                # In shared memory nothing is sent before the end, so no hook has to run for each weight.
                if is_early:
                    parameter.register_post_accumulate_grad_hook(self._arrived)
        with torch.no_grad(), communicating("first values of the dense network"):
            # Also buffers, such as running statistics: copies have to begin alike in everything.
            for value in (*module.parameters(), *module.buffers()):
                dist.broadcast(value.detach(), group_src=0, group=group.process_group)

    def __call__(self, *inputs: Any) -> Any:
        """Return the outputs of the module; a backward pass through it sums the gradients."""
        outputs = self.module(*inputs)
        if torch.is_grad_enabled() and self._is_reduced:
            self._is_open = False  # also after a backward pass that an error has cut short
            for tensor in pytree.tree_leaves(outputs):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(self._begin)
        return outputs

    @contextlib.contextmanager
    def unreduced(self) -> Iterator[None]:
        """Let gradients of forward and backward passes in here add up on each rank."""
        self._is_reduced = False
        try:
            yield
        finally:
            self._is_reduced = True

    def _begin(self, gradient: Tensor) -> None:
        """The backward pass has reached the network's outputs."""
        del gradient
        # Several outputs have this hook; the first that runs begins the pass.
        if self._is_open:
            return
        self._is_open = True
        self._next = 0
        self._sums.clear()  # of a backward pass that an error has cut short
        for bucket in self._buckets:
            bucket.missing = set(range(len(bucket.parameters)))
        # At the end of the whole pass: a weight without a gradient has no hook that would run.
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _arrived(self, parameter: Tensor) -> None:
        """The gradient of a weight is complete."""
        if not self._is_open:
            return  # a pass that is not reduced
        index, position = self._place[parameter]
        bucket = self._buckets[index]
        _collect(bucket, position)
        bucket.missing.discard(position)
        # In the order of buckets, whichever is full first: ranks must all send in one order.
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._send(self._buckets[self._next])

    def _finish(self) -> None:
        """The backward pass is over: send what is left, wait for everything."""
        self._is_open = False
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            _collect_all(bucket, sorted(bucket.missing))
            self._send(bucket)
        # As often as a sum has stages: those that were sent last have all of them ahead.
        for _ in range(NUM_STAGES):
            _advance(self._sums)
        for each in self._sums:
            each.work.wait()
            if each.sent is not each.bucket.flat:
                # What travelled was a rounded copy; gradients are views of the bucket.
                each.bucket.flat.copy_(each.sent)
        self._sums.clear()

    def _send(self, bucket: _Bucket) -> None:
        self._next += 1
        sent = bucket.flat.to(torch.bfloat16) if self._reduction is Reduction.BF16 else bucket.flat
        if self._hierarchy is not None:
            work = HierarchicalSum(sent, hierarchy=self._hierarchy, purpose=self._purpose, traffic=self._traffic)
            # The first stage of this sum has started, so those before it may use the wires of their next stages.
            _advance(self._sums)
        else:
            self._traffic.count_reduction(self._purpose, num_bytes=sent.numel() * sent.element_size())
            work = start_sum(sent, group=self._group, purpose=self._purpose)
        self._sums.append(_BucketSum(bucket, sent, work))


def _advance(sums: Sequence[_BucketSum]) -> None:
    """Let sums by stages go on by one."""
    for each in sums:
        if isinstance(each.work, HierarchicalSum):
            each.work.advance()


def _collect(bucket: _Bucket, position: int) -> None:
    """Put a weight's gradient into its place in the bucket, and let the weight have that place as its gradient."""
    parameter = bucket.parameters[position]
    view = bucket.views[position]
    if parameter.grad is None:
        # The view still holds the sum of the step before.
        view.zero_()
    # It is the view already where a backward pass added to the gradient of the pass before.
    elif parameter.grad is not view:
        view.copy_(parameter.grad)
    parameter.grad = view


def _collect_all(bucket: _Bucket, positions: list[int]) -> None:
    """`_collect` for many weights, in one copy."""
    views = []
    gradients = []
    for position in positions:
        parameter = bucket.parameters[position]
        view = bucket.views[position]
        if parameter.grad is None or parameter.grad is view:
            _collect(bucket, position)
        else:
            views.append(view)
            gradients.append(parameter.grad)
            parameter.grad = view
    if views:
        torch._foreach_copy_(views, gradients)


def _bucketed(module: nn.Module, *, limits: tuple[int, int]) -> list[list[nn.Parameter]]:
    """Weights that need gradients, the last ones first, in buckets of one type and of so many bytes."""
    buckets: list[list[nn.Parameter]] = []
    num_bytes = 0
    limit = limits[0]
    for parameter in reversed([p for p in module.parameters() if p.requires_grad]):
        same = bool(buckets) and (buckets[-1][0].dtype, buckets[-1][0].device) == (parameter.dtype, parameter.device)
        # One tensor holds a bucket, so all of its weights have one dtype and device.
        if not same or num_bytes >= limit:
            limit = limits[1] if buckets else limits[0]
            buckets.append([])
            num_bytes = 0
        buckets[-1].append(parameter)
        num_bytes += parameter.numel() * parameter.element_size()
    return buckets
