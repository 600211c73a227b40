"""WorldSums: the few numbers that a step adds up over all ranks, in two small all-reduces.

    before the forward pass, waited for when the loss needs it     Σ labelled weight of each label       (L numbers)
    after the backward pass                                        loss · Σ g² · anything not finite     (3 numbers)

Each rank divides its loss by the *global* weight, so gradients add up to those of the global batch, with uneven and
empty batches too. The second sum makes all ranks report one loss, clip by one norm, and skip or stop together: a NaN
on one rank is a NaN everywhere.

The global norm counts every weight once, wherever its gradient lies:

    tables            the parts of all ranks are disjoint: all count
    dense, DDP        equal on all ranks: rank 0 counts
    dense, FSDP       parts of all ranks: all count; with HSDP those of the first host
    tower modules     equal on the ranks of a tower group: the first of each group counts

On one device there is nothing to add, and every method returns what it was given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ziggurat.parallel.lost_ranks import communicating
from ziggurat.parallel.parallelize import Parallel


class PendingWeight:
    """The global weight of each label, on its way."""

    def __init__(self, weight_L: Tensor | None, work: Any) -> None:
        self._weight_L, self._work = weight_L, work

    def wait(self) -> Float[Tensor, "L"] | None:
        """The weight; None without `parallelize`, where a batch's own weight is the global one."""
        if self._work is not None:
            with communicating("loss weights"):
                self._work.wait()
        return self._weight_L


class WorldSums:
    """The few numbers that a step adds up over all ranks, in two small all-reduces.

    Args:
        parallel: the ranks; None for one device.
        named: the weights of the dense network and of tower modules on this rank.
    """

    def __init__(self, parallel: Parallel | None, named: Mapping[str, nn.Parameter]) -> None:
        self._parallel = parallel
        self._group = None if parallel is None else parallel.topology.world.process_group
        self._counted = [value for name, value in named.items() if self._counts(name, value)]

    def start_weight(self, weight_L: Float[Tensor, "L"]) -> PendingWeight:
        """Start to add up the weight of this step's batches.

        Args:
            weight_L: `Model.loss_weight` of this rank's batch; overwritten.
        """
        if self._parallel is None:
            return PendingWeight(None, None)
        if self._group is None:
            return PendingWeight(weight_L, None)
        self._parallel.traffic.count_reduction("loss weights", num_bytes=weight_L.numel() * weight_L.element_size())
        with communicating("loss weights"):
            work = dist.all_reduce(weight_L, group=self._group, async_op=True)
        return PendingWeight(weight_L, work)

    def squared_norm(self) -> Tensor:
        """This rank's part of Σ g² over dense network and tower modules; a scalar."""
        gradients = [local(value.grad) for value in self._counted if value.grad is not None]
        return torch.stack(torch._foreach_norm(gradients)).square().sum() if gradients else torch.zeros(())

    def totals(self, *, loss: float, squared: float, finite: bool) -> tuple[float, float, bool]:
        """Loss, Σ g² and verdict of all ranks, the same on each."""
        if self._group is not None and self._parallel is not None:
            topology = self._parallel.topology
            device = "cuda" if dist.get_backend(topology.world.process_group) == "nccl" else "cpu"
            sums = torch.tensor([loss, squared, 0.0 if finite else 1.0], dtype=torch.float64, device=device)
            self._parallel.traffic.count_reduction("loss and guard", num_bytes=sums.numel() * sums.element_size())
            with communicating("loss and guard"):
                dist.all_reduce(sums, group=self._group)
            loss, squared, bad = sums.tolist()
            finite = bad == 0.0
        return loss, squared, finite and math.isfinite(loss) and math.isfinite(squared)

    def _counts(self, name: str, value: nn.Parameter) -> bool:
        """Whether this rank's gradient of a weight counts in the global norm."""
        if self._parallel is None:
            return True
        if isinstance(value, DTensor):
            coordinate = value.device_mesh.get_coordinate()
            assert coordinate is not None
            return all(at == 0 for at, how in zip(coordinate, value.placements, strict=True) if how.is_replicate())
        topology = self._parallel.topology
        return (topology.tower.position if name.startswith("towers.") else topology.rank) == 0


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank, sharing memory; plain tensors are their own part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
