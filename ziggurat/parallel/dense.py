"""Dense parallelism: every rank runs the dense network on its own samples; gradients are summed over ranks.

    ddp    a copy of all weights on every rank; gradients all-reduced in buckets while the backward pass runs
           (`replicated.py`), at once over all ranks, or host by host first (`exchange/hierarchical.py`)
    fsdp   weights, gradients and optimizer state cut into parts, one a rank; gathered when needed
           (FSDP2; Zhao et al., arXiv 2304.11277)
    hsdp   cut inside a host, copied across hosts: gathers stay on fast links, only 1/L of the gradient crosses hosts

Gradients are summed, not averaged, because the loss is already divided by the size of the global batch; with uneven
batches an average of means would be wrong. Gradients may travel as BF16; weights and optimizer state stay FP32.

Tower modules are copied inside their tower group only, and reduced there: nothing of them crosses between groups.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ziggurat.errors import ConfigError, PlanError
from ziggurat.models import AttentionActivation, Embedded, Model, Normalization, Outputs
from ziggurat.models.blocks.batch_norm import BatchNorm
from ziggurat.models.blocks.branch_supervision import BranchSupervision
from ziggurat.parallel.exchange.collectives import CountedGather, CountedReduceScatter
from ziggurat.parallel.exchange.hierarchical import Hierarchy, ReductionRoute, why_flat
from ziggurat.parallel.exchange.traffic import Traffic
from ziggurat.parallel.process_groups import let_gloo_speak_first, make_group, time_limit_s
from ziggurat.parallel.replicated import Reduction, ReplicatedNetwork
from ziggurat.parallel.topology import Axis, Lane, RankGroup, Topology

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

DenseForward = Callable[[Embedded], Outputs]


class DenseParallelism(StrEnum):
    """A way to spread the dense network over ranks."""

    DDP = "ddp"
    FSDP = "fsdp"
    HSDP = "hsdp"


def route_line(route: ReductionRoute, *, how: DenseParallelism, topology: Topology) -> dict[str, str]:
    """Return the start-up report's line on the route of dense gradients; nothing where it is flat as configured."""
    if route is ReductionRoute.FLAT:
        return {}
    if how is not DenseParallelism.DDP:
        hsdp = "sums inside a host and then between hosts" if how is DenseParallelism.HSDP else "sums over all ranks"
        return {"dense gradients": f"not {route.value}, which is for {DenseParallelism.DDP.value}: {how.value} {hsdp}"}
    if reason := why_flat(topology):
        return {"dense gradients": f"{ReductionRoute.FLAT.value}, not {route.value}: {reason}"}
    part = f"1/{topology.ranks_per_host} of them between hosts on each rank"
    return {"dense gradients": f"{route.value}: summed inside a host, {part}, gathered inside a host"}


class DenseNetwork(nn.Module):
    """Everything of a model but embeddings and towers, as a module whose forward is `Model.trained_dense`.

    Args:
        model: its submodules, and weights and buffers of its own, are shared, not copied: where FSDP puts a part in a
            weight's place, the model sees the part.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        for name, child in model.named_children():
            if name not in ("embeddings", "towers"):
                self.add_module(name, child)
        # The very dictionaries: where FSDP2 puts a part in the place of a weight, the model sees it, too.
        self._parameters = model._parameters
        self._buffers = model._buffers
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self._compute: DenseForward = model.trained_dense

    def forward(self, embedded: Embedded) -> Outputs:
        """Return the outputs of the dense network."""
        return self._compute(embedded)


def compute_copies(network: DenseForward | None, compute: DenseForward) -> None:
    """Let copies of a dense network compute with another function of the same weights: the compiled one."""
    module = network.module if isinstance(network, ReplicatedNetwork) else network
    if not isinstance(module, DenseNetwork):
        raise ConfigError(
            expected="copies of a dense network on the ranks, each of which computes all of it",
            found=type(module).__name__,
            where="training settings, compile",
            ways_out=("--training.compile off", "--dense ddp"),
        )
    module._compute = compute


def check_dense(model: Model, *, num_parts: int = 1) -> None:
    """Refuse layers whose result depends on which samples share a rank, or a part of a batch.

    Batch norms of ours see the samples of all ranks (`parallel/whole_batch.py`).

    Args:
        model: to be made parallel.
        num_parts: parts of a batch.

    Raises:
        PlanError: batch normalisation of another kind, inside a tower, or of batches in parts.
    """
    for name, module in model.named_modules():
        if isinstance(module, BranchSupervision) and num_parts > 1:
            raise PlanError(
                expected="whole batches, whose mean losses weigh the losses of a model's networks",
                found=f"{type(module).__name__} at {name}, and batches in {num_parts} parts",
                where="parallelize",
                ways_out=("--parallel.num-parts 1", "--model.supervision none"),
            )
        if not isinstance(module, nn.modules.batchnorm._BatchNorm):
            continue
        found = f"{type(module).__name__} at {name}"
        if not isinstance(module, BatchNorm):
            raise PlanError(
                expected="layers that treat every sample by itself, or see those of all ranks",
                found=f"{found}: each rank would normalise its own part of the batch",
                where="parallelize",
                ways_out=(f"{BatchNorm.__module__}.{BatchNorm.__name__} in its place", "train on one device"),
            )
        if name.split(".")[0] == "towers":
            raise PlanError(
                expected="tower modules that treat every sample by itself",
                found=f"{found}: each tower group would normalise for itself",
                where="parallelize",
                ways_out=(*_without_batch_norm(model), "train on one device"),
            )
        if num_parts > 1:
            raise PlanError(
                expected="whole batches, which batch normalisation looks at",
                found=f"{found}, and batches in {num_parts} parts",
                where="parallelize",
                ways_out=("--parallel.num-parts 1", *_without_batch_norm(model)),
            )


def _without_batch_norm(model: Model) -> list[str]:
    """The settings of a model that add batch normalisation, as they are taken back on the command line."""
    config = getattr(model, "config", None)
    found = _settings(config) if dataclasses.is_dataclass(config) and not isinstance(config, type) else {}
    ways = []
    for name, value in found.items():
        flag = f"--model.{name.replace('_', '-')}"
        if value is Normalization.BATCH:
            ways.append(f"{flag} {Normalization.NONE.value} (or {Normalization.LAYER.value})")
        elif value is AttentionActivation.DICE:
            ways.append(f"{flag} {AttentionActivation.RELU.value}")
    return ways or ["take another model, such as dcn_v2, or batch normalisation out of one of yours"]


def _settings(config: DataclassInstance) -> dict[str, object]:
    """Every setting in a tree of dataclasses, by its dotted name."""
    found: dict[str, object] = {}
    for each in dataclasses.fields(config):
        value = getattr(config, each.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            found |= {f"{each.name}.{name}": inner for name, inner in _settings(value).items()}
        else:
            found[each.name] = value
    return found


def parallel_dense(
    network: nn.Module,
    *,
    how: DenseParallelism,
    reduction: Reduction,
    route: ReductionRoute = ReductionRoute.FLAT,
    topology: Topology,
    traffic: Traffic,
) -> DenseForward:
    """Make a dense network parallel over all ranks; returns what to call instead of it."""
    has_weights = any(parameter.requires_grad for parameter in network.parameters())
    # Nothing to sum: one rank, or no weight that learns.
    if topology.world.process_group is None or not has_weights:
        return network
    if how is DenseParallelism.DDP:
        group = topology.lane(Axis.WORLD, Lane.DENSE)
        by_host = route is ReductionRoute.HIERARCHICAL and not why_flat(topology)
        return ReplicatedNetwork(
            network,
            group=group,
            reduction=reduction,
            traffic=traffic,
            purpose="dense gradients",
            hierarchy=Hierarchy.of(topology) if by_host else None,
        )
    mesh = _mesh(how, topology, device=next(network.parameters()).device.type)
    # None keeps the dtype of the gradients.
    reduce_dtype = torch.bfloat16 if reduction is Reduction.BF16 else None
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    sharded: Any = fully_shard(network, mesh=mesh, mp_policy=policy)
    # Sums, where FSDP2 would take means: the loss is divided by the global batch already.
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)
    sharded.set_custom_all_gather(CountedGather(traffic))
    sharded.set_custom_reduce_scatter(CountedReduceScatter(traffic))
    if how is DenseParallelism.HSDP and topology.num_hosts > 1:

        def count(part: Tensor) -> None:
            traffic.count_reduction("dense gradients between hosts", num_bytes=part.numel() * part.element_size())

        sharded.set_all_reduce_hook(count)
    return ShardedNetwork(network, controls=sharded)


_meshes = threading.local()  # the world that this thread's meshes belong to, and the meshes by what they are made of


def _mesh(how: DenseParallelism, topology: Topology, *, device: str) -> DeviceMesh:
    """Return the mesh of a kind of dense parallelism, made once in a job.

    Torch keeps results of its own for meshes that are equal, with the mesh that came first in them. So the groups of a
    mesh stay when its topology is closed, and equal topologies of a process share one.
    """
    if how is DenseParallelism.HSDP:
        grid = [list(ranks) for ranks in topology.host_grid]
        names = ("replicate", "shard")
    else:
        grid = list(topology.order)
        names = ("shard",)
    world = dist.group.WORLD
    if getattr(_meshes, "world", None) is not world:
        # Another job: the groups of the meshes before are no longer there.
        _meshes.world = world
        _meshes.made = {}
    made: dict[tuple[str, str], DeviceMesh] = _meshes.made
    # The grid says kind and ranks in one: a list of ranks is FSDP's, a list of lists HSDP's.
    key = (device, str(grid))
    if key not in made:
        made[key] = _mesh_of(torch.tensor(grid), names=names, device=device)
    # Its public name, from torch 2.14 on; before, there was the private one alone.
    set_timeout = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)
    for group in made[key].get_all_groups():
        set_timeout(timedelta(seconds=time_limit_s()), group)
        let_gloo_speak_first(group)
    return made[key]


def _mesh_of(grid_of_ranks: Tensor, *, names: tuple[str, ...], device: str) -> DeviceMesh:
    """Make a mesh of the launcher's ranks whose groups have the order of the grid; collective."""
    flat = grid_of_ranks.flatten().tolist()
    if flat == sorted(flat):
        return DeviceMesh(device, grid_of_ranks, mesh_dim_names=names)
    # A mesh sorts the ranks of groups that it makes, and a ring would go by the launcher's numbers: made by hand.
    own: list[dist.ProcessGroup] = []
    for dim in range(grid_of_ranks.dim()):
        for members in grid_of_ranks.movedim(dim, -1).reshape(-1, grid_of_ranks.shape[dim]).tolist():
            group = make_group(members)
            # Ranks outside of a group get None of it; each rank is in one group along a dim.
            own += [] if group is None else [group]
    if len(own) == 1:
        return DeviceMesh.from_group(own[0], device, mesh_dim_names=names)
    return DeviceMesh.from_group(own, device, mesh=grid_of_ranks, mesh_dim_names=names)


class ShardedNetwork:
    """A network under FSDP2; what it sends is counted where it is sent (`exchange/collectives.py`).

    A backward pass leaves parts of weights; a forward pass without one, of an evaluation, leaves them gathered for the
    next. FSDP2 takes the parts back when a state dict is made of a module that it knows. The model is none of those, so
    weights of its own were named while they were gathered, and freed before they were read.

    Args:
        network: after `fully_shard`.
        controls: what `fully_shard` returned, which is the network under the type of its switches.
    """

    def __init__(self, network: nn.Module, *, controls: FSDPModule) -> None:
        self._network = network
        self._controls = controls

    def reshard(self) -> None:
        """Go back to parts of weights, where an evaluation has left them gathered; sends nothing."""
        self._controls.reshard()

    def reshard_for_states_of(self, model: nn.Module) -> None:
        """Go back to parts before weights of the model are named to be saved, or loaded."""
        # Hooks of the model, since FSDP2's own are of modules that it knows, and the model is none of them.
        model.register_state_dict_pre_hook(lambda *_: self.reshard())
        model.register_load_state_dict_pre_hook(lambda *_: self.reshard())

    def __call__(self, embedded: Embedded) -> Outputs:
        """Return the outputs of the dense network."""
        return self._network(embedded)

    @contextlib.contextmanager
    def unreduced(self) -> Iterator[None]:
        """Let gradients of backward passes in here add up on each rank."""
        self._controls.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._controls.set_requires_gradient_sync(True)


def unreduced(network: Callable[..., object] | None) -> contextlib.AbstractContextManager[None]:
    """Forward and backward passes in here leave gradients unreduced, to be added to those of the next pass."""
    if isinstance(network, ReplicatedNetwork | ShardedNetwork):
        return network.unreduced()
    return contextlib.nullcontext()


def replicate(
    module: nn.Module, *, group: RankGroup, reduction: Reduction, traffic: Traffic, purpose: str
) -> Callable[..., Tensor]:
    """Copies over a group whose gradients are summed; the module itself where there is nothing to sum."""
    has_weights = any(parameter.requires_grad for parameter in module.parameters())
    if group.process_group is None or not has_weights:
        return module
    return ReplicatedNetwork(module, group=group, reduction=reduction, traffic=traffic, purpose=purpose)
