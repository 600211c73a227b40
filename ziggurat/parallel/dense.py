"""Dense parallelism: every rank runs the dense network on its own samples; gradients are summed over ranks.

    ddp    a copy of all weights on every rank; gradients all-reduced in buckets while the backward pass runs
           (Li et al., arXiv 2006.15704)
    fsdp   weights, gradients and optimizer state cut into parts, one a rank; gathered when needed
           (FSDP2; Zhao et al., arXiv 2304.11277)
    hsdp   cut inside a host, copied across hosts: gathers stay on fast links, only 1/L of the gradient crosses hosts

Gradients are summed, not averaged, because the loss is already divided by the size of the global batch; with uneven
batches an average of means would be wrong. Gradients may travel as BF16; weights and optimizer state stay FP32.

Tower modules are copied inside their tower group only, and reduced there: nothing of them crosses between groups.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ziggurat.errors import PlanError
from ziggurat.models import RankingModel
from ziggurat.parallel.collectives import CountedGather, CountedReduceScatter
from ziggurat.parallel.topology import RankGroup, Topology
from ziggurat.parallel.traffic import Traffic


class DenseParallelism(StrEnum):
    """How the dense network is spread over ranks."""

    DDP = "ddp"
    FSDP = "fsdp"
    HSDP = "hsdp"


class Reduction(StrEnum):
    """What gradients of the dense network travel as."""

    FP32 = "fp32"
    BF16 = "bf16"


class DenseNetwork(nn.Module):
    """Everything of a model but embeddings and towers, as a module whose forward is `interact`.

    Args:
        model: its submodules are shared, not copied.
        compute: `model.interact`, or a compiled form of it.
    """

    def __init__(self, model: RankingModel, *, compute: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        for name, child in model.named_children():
            if name not in ("embeddings", "towers"):
                self.add_module(name, child)
        assert not list(model.parameters(recurse=False)), "weights outside of submodules would not be reduced"
        self._compute = compute or type(model).interact.__get__(model)

    def forward(self, dense_BN: Tensor, fields_BX: Tensor, vectors: dict[str, Tensor]) -> Tensor:
        """Logits."""
        return self._compute(dense_BN, fields_BX, vectors)


def check_dense(model: RankingModel) -> None:
    """Refuse layers whose result depends on which samples share a rank.

    Raises:
        PlanError: batch normalisation.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise PlanError(
                expected="layers that treat every sample by itself",
                found=f"{type(module).__name__} at {name}: each rank would normalise its own part of the batch",
                where="parallelize",
                ways_out=(
                    "--model.top.norm none (or the setting of this model that adds batch normalisation)",
                    "train on one device",
                ),
            )


def parallel_dense(
    network: nn.Module,
    *,
    how: DenseParallelism,
    reduction: Reduction,
    topology: Topology,
    traffic: Traffic,
) -> Callable[..., Tensor]:
    """Make a dense network parallel over all ranks; returns what to call instead of it."""
    has_weights = any(parameter.requires_grad for parameter in network.parameters())
    if topology.world.process_group is None or not has_weights:
        return network
    if how is DenseParallelism.DDP:
        return replicate(network, group=topology.world, reduction=reduction, traffic=traffic, purpose="dense gradients")
    device = next(network.parameters()).device.type
    ranks = torch.arange(topology.world_size)
    if how is DenseParallelism.HSDP:
        mesh = DeviceMesh(
            device, ranks.view(topology.num_hosts, topology.ranks_a_host), mesh_dim_names=("replicate", "shard")
        )
    else:
        mesh = DeviceMesh(device, ranks, mesh_dim_names=("shard",))
    reduce_dtype = torch.bfloat16 if reduction is Reduction.BF16 else None
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    sharded: Any = fully_shard(network, mesh=mesh, mp_policy=policy)
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)
    sharded.set_custom_all_gather(CountedGather(traffic))
    sharded.set_custom_reduce_scatter(CountedReduceScatter(traffic))
    if how is DenseParallelism.HSDP and topology.num_hosts > 1:

        def count(part: Tensor) -> None:
            traffic.count_reduction("dense gradients between hosts", num_bytes=part.numel() * part.element_size())

        sharded.set_all_reduce_hook(count)
    return ShardedNetwork(sharded)


class ShardedNetwork:
    """A network under FSDP2; what it sends is counted where it is sent (`collectives.py`).

    Args:
        network: after `fully_shard`.
    """

    def __init__(self, network: Any) -> None:
        self._network = network

    def __call__(self, *inputs: Any) -> Tensor:
        """Logits."""
        return self._network(*inputs)

    @contextlib.contextmanager
    def unreduced(self) -> Iterator[None]:
        """Let gradients of backward passes in here add up on each rank."""
        self._network.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._network.set_requires_gradient_sync(True)


def unreduced(network: Callable[..., Tensor]) -> contextlib.AbstractContextManager[None]:
    """Forward and backward passes in here leave gradients unreduced, to be added to those of the next pass."""
    if isinstance(network, DistributedDataParallel):
        return network.no_sync()
    if isinstance(network, ShardedNetwork):
        return network.unreduced()
    return contextlib.nullcontext()


def replicate(
    module: nn.Module, *, group: RankGroup, reduction: Reduction, traffic: Traffic, purpose: str
) -> Callable[..., Tensor]:
    """DDP over a group that sums gradients; the module itself where there is nothing to reduce."""
    has_weights = any(parameter.requires_grad for parameter in module.parameters())
    if group.process_group is None or not has_weights:
        return module
    process_group = group.process_group
    # Buffers are constants (`check_dense`): sending them before every forward pass would only make ranks wait.
    replicated = DistributedDataParallel(
        module, process_group=process_group, gradient_as_bucket_view=True, forward_sync_buffers=False
    )

    def sum_bucket(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations, and ours are text
        del state
        gradient = bucket.buffer()
        sent = gradient.to(torch.bfloat16) if reduction is Reduction.BF16 else gradient
        traffic.count_reduction(purpose, num_bytes=sent.numel() * sent.element_size())
        work: Any = dist.all_reduce(sent, group=process_group, async_op=True)

        def finish(future: Any) -> Tensor:
            total = future.value()[0]
            return total if total is gradient else gradient.copy_(total)

        return work.get_future().then(finish)

    replicated.register_comm_hook(None, sum_bucket)
    return replicated
