"""Sums over ranks for layers that look at the whole batch: batch norms, and losses that weigh by its mean loss.

    forward     S = Σ_r s_r                    each rank brings its sums, and all normalise by the same moments
    backward    ∂L/∂s_r = Σ_q ∂L_q/∂S          every rank's share of the loss depends on everybody's samples

Both are one sum of a few numbers, in the order of ranks, so all ranks have the same bits. They have a process group of
their own: layers run, forward and backward, in the order of the network, and never get into the order of gradients and
embeddings. A rank without samples takes part with zeros.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from ziggurat.models.blocks.whole_batch import WholeBatch
from ziggurat.ops.function_ctx import Ctx
from ziggurat.parallel.exchange.collectives import start_sum
from ziggurat.parallel.exchange.traffic import Traffic
from ziggurat.parallel.topology import Axis, RankGroup, Topology, own_group

_PURPOSE = "sums over the batch"


def see_whole_batches(network: nn.Module, *, topology: Topology, traffic: Traffic) -> None:
    """Let the layers of a network that look at the whole batch see the samples of all ranks; collective.

    Args:
        network: the same on every rank.
        topology: the ranks.
        traffic: counts the messages.
    """
    layers = [module for module in network.modules() if isinstance(module, WholeBatch)]
    if not layers or topology.world.process_group is None:
        return
    group = own_group(topology, Axis.WORLD, what="normalise batches")

    def world_sum(values: Tensor) -> Tensor:
        return _WorldSum.apply(values, group, traffic)

    for layer in layers:
        layer.world_sum = world_sum


class _WorldSumCtx(Ctx, Protocol):
    group: RankGroup
    traffic: Traffic


class _WorldSum(torch.autograd.Function):
    """A sum over ranks; so is the sum of its gradients."""

    @staticmethod
    def forward(ctx: _WorldSumCtx, values: Tensor, group: RankGroup, traffic: Traffic) -> Tensor:
        ctx.group = group
        ctx.traffic = traffic
        return _summed(values, group, traffic)

    @staticmethod
    def backward(ctx: _WorldSumCtx, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _summed(gradient, ctx.group, ctx.traffic), None, None


def _summed(values: Tensor, group: RankGroup, traffic: Traffic) -> Tensor:
    traffic.count_reduction(_PURPOSE, num_bytes=values.numel() * values.element_size())
    # A copy: the sum is made in place, and these numbers are autograd's.
    return start_sum(values.clone(memory_format=torch.contiguous_format), group=group, purpose=_PURPOSE).wait()
