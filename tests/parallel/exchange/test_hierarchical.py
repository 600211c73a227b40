"""Dense gradients summed host by host have the sums of the flat all-reduce, and cross hosts once a host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from ziggurat.parallel import replicated
from ziggurat.parallel.dense import DenseParallelism, Reduction, parallel_dense, route_line, unreduced
from ziggurat.parallel.exchange.hierarchical import HierarchicalSum, ReductionRoute, why_flat
from ziggurat.parallel.exchange.traffic import Traffic
from ziggurat.parallel.topology import Topology
from ziggurat.testing.collectives import Collective, check_order, recorded_collectives
from ziggurat.testing.ranks import run_ranks

SHAPES = ((3, 5), (7,), (1,), (9, 9), (2,))  # in buckets of uneven sizes
NUM_WEIGHTS = sum(int(np.prod(shape)) for shape in SHAPES)


class Weights(nn.Module):
    """A network that uses its weights one after the other, the last one in one batch of two only."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES)

    def forward(self, inputs: Any) -> Any:
        numbers, uses_last = inputs
        used = list(self.weights) if uses_last else list(self.weights)[:-1]
        return sum(((weight * numbers[: weight.numel()].view_as(weight)).sin().sum() for weight in used), numbers.sum())


def gradients(rank: int, topology: Topology, route: ReductionRoute, reduction: Reduction) -> dict[str, Any]:
    """Two reduced passes and one that is not: gradients, what was counted, what was issued, and how."""
    with (
        recorded_collectives() as found,
        mock.patch.object(replicated, "_FIRST_BUCKET_BYTES", 4),
        mock.patch.object(replicated, "_BUCKET_BYTES", 30),
    ):
        traffic, module = Traffic(topology), Weights()
        network: Any = parallel_dense(
            module, how=DenseParallelism.DDP, reduction=reduction, route=route, topology=topology, traffic=traffic
        )
        draws = torch.randn(3, 100, generator=torch.Generator().manual_seed(1 + rank)).split(1)
        inputs = [each.flatten().requires_grad_() for each in draws]
        with unreduced(network):
            network((inputs[0], True)).backward()
        network((inputs[1], rank != 1)).backward()  # one rank has no gradient for the last weight
        sums = [weight.grad.clone() for weight in module.weights if weight.grad is not None]
        module.zero_grad(set_to_none=True)
        traffic.reset()
        network((inputs[2], True)).backward()
        counted = {str(row["purpose"]): int(row["bytes"]) for row in traffic.report()}
        sums += [weight.grad.clone() for weight in module.weights if weight.grad is not None]
    flat = torch.cat([each.flatten() for each in sums]).numpy()
    return {"sums": flat, "counted": counted, "issued": list(found), "line": _line(route, topology)}


def _line(route: ReductionRoute, topology: Topology) -> str:
    return route_line(route, how=DenseParallelism.DDP, topology=topology).get("dense gradients", "")


def every_way(rank: int, ranks_per_host: int) -> dict[str, dict[str, Any]]:
    """Runs on every rank: both routes, with both formats."""
    with recorded_collectives():  # without memory that ranks share, as between GPUs
        topology = Topology.create(ranks_per_host=ranks_per_host)
    ways = [(route, reduction) for route in ReductionRoute for reduction in Reduction]
    return {f"{route} {reduction}": gradients(rank, topology, route, reduction) for route, reduction in ways}


def between_hosts(issued: Sequence[Collective], ranks_per_host: int) -> int:
    """Numbers that a rank has given to sums of groups that span hosts."""
    spanning = [each for each in issued if len({rank // ranks_per_host for rank in each.ranks}) > 1]
    return sum(each.numel for each in spanning if each.kind == "all_reduce")


@pytest.mark.parametrize(("world_size", "ranks_per_host"), [(4, 2), pytest.param(6, 3, marks=pytest.mark.slow)])
def test_it_sums_what_the_flat_reduction_sums_in_one_order(world_size: int, ranks_per_host: int) -> None:
    found = run_ranks(every_way, world_size, ranks_per_host, timeout_s=240.0)
    for reduction, tolerance in ((Reduction.FP32, 1e-6), (Reduction.BF16, 2**-6)):
        flat = [each[f"flat {reduction}"] for each in found]
        by_host = [each[f"hierarchical {reduction}"] for each in found]
        size = {Reduction.FP32: 4, Reduction.BF16: 2}[reduction]
        exact = found[0]["flat fp32"]["sums"]
        for one, other in zip(flat, by_host, strict=True):
            assert len(one["sums"]) == 2 * NUM_WEIGHTS
            np.testing.assert_array_equal(other["sums"], by_host[0]["sums"])  # every rank has the same bits
            np.testing.assert_allclose(other["sums"], exact, rtol=tolerance, atol=tolerance * np.abs(exact).max())
            payload, part = other["counted"]["dense gradients"], other["counted"]["dense gradients between hosts"]
            assert one["counted"] == {"dense gradients": size * NUM_WEIGHTS}
            assert payload == part * ranks_per_host == other["counted"]["dense gradients, sums"]
            num_buckets = sum(each.kind == "all_reduce" for each in other["issued"]) // 2
            assert num_buckets == 4
            assert 0 < payload - size * NUM_WEIGHTS < num_buckets * ranks_per_host * size  # zeros that fill up buckets
            assert between_hosts(one["issued"], ranks_per_host) == 2 * NUM_WEIGHTS
            assert between_hosts(other["issued"], ranks_per_host) * size == 2 * part
        check_order([each["issued"] for each in by_host])


@pytest.mark.parametrize(("ranks_per_host", "reason"), [(4, "there is one host"), (1, "each host has one rank")])
def test_without_a_hierarchy_sums_are_flat_and_the_report_says_so(ranks_per_host: int, reason: str) -> None:
    for each in run_ranks(every_way, 4, ranks_per_host):
        flat, asked = each["flat fp32"], each["hierarchical fp32"]
        np.testing.assert_array_equal(asked["sums"], flat["sums"])
        assert [it.kind for it in asked["issued"]] == [it.kind for it in flat["issued"]]
        assert (flat["line"], asked["line"]) == ("", f"flat, not hierarchical: {reason}")


def shared(rank: int) -> list[np.ndarray]:
    """Runs on every rank: a sum whose ranks of one host share memory, and that of torch."""
    from ziggurat.parallel.exchange.collectives import start_sum
    from ziggurat.parallel.exchange.hierarchical import Hierarchy

    topology = Topology.create(ranks_per_host=2)
    assert not why_flat(topology)
    hierarchy = Hierarchy.of(topology)
    assert hierarchy.inside.memory is not None, hierarchy.inside.why_no_memory
    values = torch.randn(3, 1000, generator=torch.Generator().manual_seed(rank))
    sums = [
        HierarchicalSum(each.clone(), hierarchy=hierarchy, purpose="sums", traffic=Traffic(topology)) for each in values
    ]
    for each in sums:  # several under way, as buckets are
        each.advance()
    expected = start_sum(values.clone(), group=topology.world, purpose="all").wait()
    return [torch.stack([each.wait() for each in sums]).numpy(), expected.numpy()]


def test_ranks_of_one_host_share_memory() -> None:
    found = run_ranks(shared, 4)
    for sums, expected in found:
        np.testing.assert_array_equal(sums, found[0][0])
        np.testing.assert_allclose(sums, expected, rtol=1e-6, atol=1e-6)
