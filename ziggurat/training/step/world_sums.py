"""WorldSums: the few numbers that a step adds up over all ranks, in two small all-reduces.

    before the forward pass, waited for when the loss needs it     Σ labelled weight of each label       (L numbers)
    after the backward pass                            loss · Σ g² · anything not finite · busy seconds  (5 + R numbers)

Each rank divides its loss by the *global* weight, so gradients add up to those of the global batch, with uneven and
empty batches too. The second sum makes all ranks report one loss, clip by one norm, and skip or stop together: a NaN
on one rank is a NaN everywhere. With it travels how long each rank was busy, so that all know who waited for whom.

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

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ziggurat.parallel.exchange.collectives import Pending, start_sum
from ziggurat.parallel.parallelize import Parallel
from ziggurat.parallel.process_groups import communication_device
from ziggurat.parallel.topology import Axis, Lane
from ziggurat.training.step.results import StepResult


class WorldSums:
    """The few numbers that a step adds up over all ranks, in two small all-reduces.

    Args:
        parallel: the ranks; None for one device.
        named: the weights of the dense network and of tower modules on this rank.
    """

    def __init__(self, parallel: Parallel | None, named: Mapping[str, nn.Parameter]) -> None:
        self._parallel = parallel
        self._world = None if parallel is None else parallel.topology.lane(Axis.WORLD, Lane.DENSE)
        self._counted = [value for name, value in named.items() if self._counts(name, value)]

    def start_weight(self, weight_L: Float[Tensor, "L"]) -> Pending:
        """Start to add up the weight of this step's batches; on many ranks, and on one that `parallelize` knows.

        Args:
            weight_L: `Model.loss_weight` of this rank's batch; overwritten.
        """
        return self._start(weight_L, purpose="loss weights")

    def squared_norm(self) -> Tensor:
        """This rank's part of Σ g² over dense network and tower modules; a scalar."""
        gradients = [local(value.grad) for value in self._counted if value.grad is not None]
        return torch.stack(torch._foreach_norm(gradients)).square().sum() if gradients else torch.zeros(())

    def totals(
        self, *, loss: float, squared: float, finite: bool, busy_s: float, bound: tuple[float, int] | None = None
    ) -> StepResult | None:
        """Add up loss, Σ g², verdict and busy seconds of all ranks; return the same result on each.

        Args:
            loss: of this rank.
            squared: of this rank.
            finite: on this rank.
            busy_s: of this rank.
            bound: the largest magnitude among gradients that are still to come, and how many are added up in all.

        Returns:
            The result without its first bad tensor; None where `bound` does not prove that the sums of gradients to
            come are finite.
        """
        busy, largest, count = [busy_s], *(bound or (0.0, 0))
        if self._world is not None and self._world.process_group is not None:
            device = communication_device(self._world.process_group)
            # A sum that gathers: each rank adds its number at its own place, and zeros at the others'.
            busy = [busy_s if rank == self._world.position else 0.0 for rank in range(self._world.size)]
            numbers = [loss, squared, 0.0 if finite else 1.0, largest, float(count), *busy]
            sums = torch.tensor(numbers, dtype=torch.float64, device=device)
            loss, squared, bad, largest, count, *busy = self._start(sums, purpose="loss and guard").wait().tolist()
            finite = bad == 0.0
        # A NaN or an infinity of one rank is in the sums of all, so all come to one verdict.
        finite = finite and math.isfinite(loss) and math.isfinite(squared)
        # Both are sums over ranks, so the product is no less than any sum of the gradients to come.
        if bound is not None and not largest * count < torch.finfo(torch.float32).max:
            return None
        return StepResult(loss=loss, finite=finite, squared=squared, busy_s=tuple(busy))

    def _start(self, numbers: Tensor, *, purpose: str) -> Pending:
        """Start to add up a few numbers over all ranks, in place."""
        parallel = self._parallel
        if parallel is None or self._world is None or self._world.process_group is None:
            return Pending(lambda: numbers, where=purpose)
        parallel.traffic.count_reduction(purpose, num_bytes=numbers.numel() * numbers.element_size())
        return start_sum(numbers, group=self._world, purpose=purpose)

    def _counts(self, name: str, value: nn.Parameter) -> bool:
        """Return True if this rank's gradient of a weight counts in the global norm."""
        if self._parallel is None:
            return True
        if isinstance(value, DTensor):
            coordinate = value.device_mesh.get_coordinate()
            if coordinate is None:
                return False  # a rank outside of the mesh holds no part of the weight
            return all(at == 0 for at, how in zip(coordinate, value.placements, strict=True) if how.is_replicate())
        topology = self._parallel.topology
        return (topology.tower.position if name.startswith("towers.") else topology.rank) == 0


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank, sharing memory; plain tensors are their own part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
