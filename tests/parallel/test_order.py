"""No order of collectives can stop a job on GPUs: recorded on every rank, for every plan."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from ziggurat.config import from_json, to_json
from ziggurat.parallel.dense import DenseParallelism
from ziggurat.parallel.exchange.hierarchical import ReductionRoute
from ziggurat.parallel.exchange.wire import WireConfig, WireFormat
from ziggurat.parallel.parallelize import ParallelConfig, parallelize
from ziggurat.parallel.prioritised.choice import Exchange
from ziggurat.parallel.process_groups import time_limit_s
from ziggurat.parallel.topology import Axis, Lane, Topology
from ziggurat.placements import Placement
from ziggurat.plan import Plan
from ziggurat.testing.batches import random_batch
from ziggurat.testing.collectives import Collective, check_order, on_gpus, recorded_collectives
from ziggurat.testing.pretend_cuda import pretend_cuda
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.config import Precision, TrainingConfig
from ziggurat.training.step.train_step import TrainStep

from .test_parity import TOWERS, build, inputs, placed

TIMEOUT_S = 120.0


def steps_of(plan: Plan, case: dict[str, Any], *, rank: int, on_cpu: bool) -> tuple[list[Collective], list[float]]:
    """Three steps of a small model, batches of another size on every rank: what was issued, and the losses."""
    with contextlib.ExitStack() as around:
        device = torch.device("cpu") if on_cpu else around.enter_context(pretend_cuda())
        found = around.enter_context(recorded_collectives())
        around.enter_context(on_gpus())
        topology = Topology.create(tower_size=plan.ranks_per_group, ranks_per_host=2)
        lanes = [topology.world, *(topology.lane(Axis.WORLD, lane) for lane in (Lane.IDS, Lane.DENSE))]
        groups = [lane.process_group for lane in lanes]
        assert len(set(map(id, groups))) == 3
        assert {time_limit_s(group) for group in groups} == {time_limit_s()} == {TIMEOUT_S}
        towers = plan.towers if case.get("modules") else None
        model = build(towers=towers, optimizer="rowwise_adagrad").to(device)
        config = ParallelConfig(
            dense=DenseParallelism(case.get("dense", "ddp")),
            exchange=Exchange(case.get("exchange", "plain")),
            num_parts=case.get("num_parts", 1),
            reduction_route=ReductionRoute(case.get("route", "flat")),
            wire=WireConfig(between_towers=WireFormat(case.get("wire", "fp32"))),
        )
        parallel = parallelize(model, plan, topology, config=config)
        training = TrainingConfig(precision=Precision.FP32, clip_norm=case.get("clip_norm", 0.0))
        step = TrainStep(model, training, parallel=parallel)
        sizes = (3 + rank, 7 * (rank % 2), 5)
        batches = [random_batch(inputs(), size, seed=rank).to(device) for size in sizes]
        losses = []
        for batch, upcoming in zip(batches, [*batches[1:], None], strict=True):
            result = step(batch, upcoming=upcoming)
            assert result.finite
            losses.append(result.loss)
        step.settle()
        return list(found), losses


def record(rank: int, cases: list[tuple[str, Any, dict[str, Any]]]) -> dict[str, list[Collective]]:
    """Runs on every rank: tensors pretend to be on GPUs, but for FSDP, which asks the driver for streams."""
    plans = [(name, from_json(Plan, plan, where="test"), case) for name, plan, case in cases]
    return {name: steps_of(plan, case, rank=rank, on_cpu="dense" in case)[0] for name, plan, case in plans}


def losses_of(rank: int, cases: list[tuple[str, Any, dict[str, Any]]]) -> dict[str, list[list[float]]]:
    """Runs on every rank: losses on the CPU, and on tensors that pretend to be on GPUs."""
    plans = [(name, from_json(Plan, plan, where="test"), case) for name, plan, case in cases]
    both = (True, False)
    return {name: [steps_of(plan, case, rank=rank, on_cpu=on_cpu)[1] for on_cpu in both] for name, plan, case in plans}


def check(cases: Sequence[tuple[str, Plan, dict[str, Any]]]) -> None:
    found = run_ranks(record, 4, [(name, to_json(plan), case) for name, plan, case in cases], timeout_s=TIMEOUT_S)
    for name, _, _ in cases:
        by_rank = [each[name] for each in found]
        assert all(by_rank), name
        check_order(by_rank)


def flat(kind: Placement) -> Plan:
    """Tables of a flat model on four ranks; those that are cut inside a host go to one host or the other."""
    plan = placed(4, kind)
    if kind is not Placement.TABLE_ROW_WISE:
        return plan
    hosts = ((0, 1), (2, 3))
    return replace(plan, tables=tuple(replace(table, ranks=hosts[n % 2]) for n, table in enumerate(plan.tables)))


def every_case() -> list[tuple[str, Plan, dict[str, Any]]]:
    """Every placement × towers × dense parallelism × whole batches, parts of them, and the prioritised exchange.

    The prioritised exchange refuses parts, and tables that are summed inside a host before they travel
    (`tests/parallel/prioritised`).
    """
    cases: list[tuple[str, Plan, dict[str, Any]]] = []
    ways: dict[str, dict[str, Any]] = {"": {}, "parts": {"num_parts": 2}, "prioritised": {"exchange": "prioritised"}}
    for kind, dense, way in itertools.product(Placement, DenseParallelism, ways):
        case = ways[way] | ({} if dense is DenseParallelism.DDP else {"dense": dense.value})
        words = [kind.value, dense.value if "dense" in case else "", way]
        if kind is not Placement.TABLE_ROW_WISE or way != "prioritised":
            cases.append((" ".join(filter(None, words)), flat(kind), case))
        towers = case | {"modules": True, "clip_norm": 1.0}
        cases.append((" ".join(filter(None, [*words, "towers"])), placed(4, kind, TOWERS, 2), towers))
    by_host = {"route": "hierarchical", "modules": True, "num_parts": 2}
    cases.append(("hierarchical", placed(4, Placement.ROW_WISE, TOWERS, 2), by_host))
    cases.append(("int8", placed(4, Placement.COLUMN_WISE), {"wire": "int8"}))
    return cases


FEW = ("row_wise towers", "data_parallel towers", "row_wise prioritised", "hierarchical")


def test_collectives_have_one_order_on_all_ranks() -> None:
    check([case for case in every_case() if case[0] in FEW])


def test_no_plan_is_left_out() -> None:
    names = [case[0] for case in every_case()]
    assert len(set(names)) == len(names) == (len(Placement) * 3 * 2 - 1) * len(DenseParallelism) + 2
    assert set(FEW) <= set(names)


# A job of one kind of placement ends within the time limit beside other work, too; one of all plans did not.
FIRST_WORDS = list(dict.fromkeys(name.partition(" ")[0] for name, _, _ in every_case()))


@pytest.mark.slow
@pytest.mark.parametrize("first", FIRST_WORDS)
def test_collectives_of_every_plan_have_one_order_on_all_ranks(first: str) -> None:
    check([case for case in every_case() if case[0].partition(" ")[0] == first])


def check_losses(cases: Sequence[tuple[str, Plan, dict[str, Any]]]) -> None:
    given = [(name, to_json(plan), case) for name, plan, case in cases]
    for found in run_ranks(losses_of, 4, given, timeout_s=TIMEOUT_S):
        for name, (on_cpu, on_gpu) in found.items():
            assert on_gpu == pytest.approx(on_cpu, rel=1e-5), name


def test_ranks_on_gpus_have_the_losses_of_ranks_on_cpus() -> None:
    check_losses([case for case in every_case() if case[0] in FEW])


@pytest.mark.slow
@pytest.mark.parametrize("first", FIRST_WORDS)
def test_ranks_on_gpus_have_the_losses_of_ranks_on_cpus_by_every_plan(first: str) -> None:
    check_losses([case for case in every_case() if case[0].partition(" ")[0] == first and "dense" not in case[2]])


def made(communicator: str, ranks: tuple[int, ...] = (0, 1), **other: Any) -> Collective:
    facts = {"kind": "all_reduce", "dtype": "float32", "numel": 3, "sent": (), "received": (), "where": "here"}
    return Collective(communicator=communicator, ranks=ranks, **(facts | other))


def test_orders_that_stop_a_job_are_found() -> None:
    ids, hops = made("ids/cuda"), made("hops/cuda")
    check_order([[ids, hops, ids], [ids, hops, ids]])
    with pytest.raises(AssertionError, match="opposite orders"):
        check_order([[ids, hops], [hops, ids]])
    told, dealt = made("told/cpu"), made("dealt/cpu")
    beside = made("dealt/cpu", thread="beside"), made("hops/cuda", thread="beside")
    check_order([[told, beside[0]], [beside[0], told]])  # threads wait apart
    for one, other in ((told, dealt), (ids, beside[1])):  # in one thread, and on the GPU whatever the thread
        with pytest.raises(AssertionError, match="opposite orders"):
            check_order([[one, other], [other, one]])
    ring = [made(f"{a}{b}", (a, b)) for a, b in ((0, 1), (1, 2), (0, 2))]
    with pytest.raises(AssertionError, match="opposite orders"):  # no two ranks disagree
        check_order([[ring[2], ring[0]], [ring[0], ring[1]], [ring[1], ring[2]]])
    with pytest.raises(AssertionError, match="number 0"):
        check_order([[ids], [made("ids/cuda", dtype="int64")]])
    with pytest.raises(AssertionError, match="collectives by rank"):
        check_order([[ids, ids], [ids]])
    exchange = [made("w", kind="all_to_all_single", sent=(1, 2), received=each) for each in ((1, 1), (2, 9))]
    with pytest.raises(AssertionError, match="waits for"):
        check_order([[exchange[0]], [exchange[1]]])
