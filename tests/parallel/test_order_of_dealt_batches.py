"""Batches that are dealt anew, to balance ranks or divide histories, bring no order of collectives that stops a job."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.models.sequence.test_next_item import INPUTS, batch_of
from tests.parallel.context.test_context_on_ranks import MODEL, PLAN
from tests.training.rank_runs import Case, trainer_of
from tests.training.test_balanced_ranks import COST
from ziggurat.data.balance.partition import Balance
from ziggurat.models import build_model
from ziggurat.parallel.context.choice import Passing
from ziggurat.parallel.context.history_exchange import HistoryExchange
from ziggurat.parallel.dense import DenseParallelism
from ziggurat.parallel.parallelize import ParallelConfig, parallelize
from ziggurat.parallel.prioritised.choice import Exchange
from ziggurat.parallel.topology import Topology
from ziggurat.placements import Placement
from ziggurat.plan import Plan, TablePlacement
from ziggurat.testing.collectives import Collective, check_order, on_gpus, recorded_collectives
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.config import Precision, TrainingConfig
from ziggurat.training.step.train_step import TrainStep

DENSE = tuple(DenseParallelism)
BALANCES: tuple[dict[str, Any], ...] = (
    {"balance": Balance.VARIABLE, "balance_cost": COST, "balance_shares": (1.0, 3.0, 1.0, 1.0)},
    {"balance": Balance.ZIGZAG},
    {"balance": Balance.KARMARKAR_KARP},
)
FEW_DIVIDED = (f"context 2 {Passing.KEYS.value} row_wise ddp", f"context 4 {Passing.QUERIES.value} table_wise fsdp")
FEW_BALANCED = ("row_wise ddp", "table_wise ddp prioritised", "row_wise hsdp parts towers")


def divided_cases() -> dict[str, dict[str, Any]]:
    """Context sizes and what travels × placements × dense parallelism, and the prioritised exchange.

    Batches in parts are refused there, and these models have no towers.
    """
    found = {}
    sizes = ((2, Passing.KEYS), (4, Passing.QUERIES))
    for (size, passing), kind, dense, exchange in itertools.product(sizes, Placement, DENSE, Exchange):
        if exchange is Exchange.PRIORITISED_ALWAYS:
            continue
        name = f"context {size} {passing.value} {kind.value} {dense.value}"
        name += " prioritised" if exchange is Exchange.PRIORITISED else ""
        found[name] = {"size": size, "passing": passing, "kind": kind, "dense": dense, "exchange": exchange}
    return found


def balanced_cases() -> dict[str, tuple[Case, dict[str, Any]]]:
    """Placements × towers × dense parallelism × whole batches, parts of them, and the prioritised exchange.

    The three ways to balance take turns. What the prioritised exchange refuses is left out, see `test_order.py`.
    """
    ways: dict[str, dict[str, Any]] = {
        "": {},
        "parts": {"num_parts": 2},
        "prioritised": {"exchange": Exchange.PRIORITISED},
    }
    found, turns = {}, itertools.cycle(BALANCES)
    for kind, dense, way, has_towers in itertools.product(Placement, DENSE, ways, (False, True)):
        if kind is Placement.TABLE_ROW_WISE and way == "prioritised" and not has_towers:
            continue
        towers = {"towers": True, "tower_size": 2} if has_towers else {}
        name = " ".join(filter(None, (kind.value, dense.value, way, "towers" if has_towers else "")))
        found[name] = (Case(placement=kind, dense=dense, **ways[way], **towers), next(turns))
    return found


def plan_of(kind: Placement) -> Plan:
    """Tables of the next-item model on four ranks of one host."""
    whole = kind is Placement.TABLE_WISE
    names = [table.table for table in PLAN.tables]
    ranks = [(index % 4,) if whole else (0, 1, 2, 3) for index in range(len(names))]
    tables = [TablePlacement(table=name, placement=kind, ranks=at) for name, at in zip(names, ranks, strict=True)]
    return Plan(world_size=4, tables=tuple(tables))


def divided(rank: int, *, size: int, passing: Passing, kind: Placement, dense: Any, exchange: Exchange) -> None:
    """Two steps whose histories are divided, samples of another number on every rank."""
    topology, model = Topology.create(context_size=size), build_model(MODEL, INPUTS, seed=3)
    config = ParallelConfig(passing=passing, dense=dense, exchange=exchange)
    parallel = parallelize(model, plan_of(kind), topology, config=config)
    deal = HistoryExchange(model, topology=topology, traffic=parallel.traffic)
    step = TrainStep(model, TrainingConfig(precision=Precision.FP32, clip_norm=1.0), parallel=parallel)
    lengths = ([4, 6, 0, 1, 2, 5, 3][: 7 - 2 * rank], [3] * rank)
    batches = [deal(batch_of(each)) for each in lengths]
    for batch, upcoming in zip(batches, [batches[1], None], strict=True):
        assert step(batch, upcoming=upcoming).finite
    step.settle()


def record_divided(rank: int, names: list[str]) -> dict[str, list[Collective]]:
    """Runs on every rank."""
    cases, found = divided_cases(), dict[str, list[Collective]]()
    for name in names:
        with recorded_collectives() as mine, on_gpus():
            divided(rank, **cases[name])
        found[name] = list(mine)
    return found


def record_balanced(rank: int, names: list[str], folder: str) -> dict[str, list[Collective]]:
    """Runs on every rank."""
    del rank
    cases, found = balanced_cases(), dict[str, list[Collective]]()
    for name in names:
        case, changes = cases[name]
        settings: dict[str, Any] = {**changes, "max_steps": 4, "checkpoint_every": 3}
        with recorded_collectives() as mine, on_gpus():
            trainer_of(case, Path(folder) / name, world_size=4, **settings).fit()
        found[name] = list(mine)
    return found


def check(found: list[dict[str, list[Collective]]], names: Sequence[str], *, rooms: set[str]) -> None:
    """The records of all ranks meet in one order, and have what a deal sends."""
    for name in names:
        by_rank = [each[name] for each in found]
        places = {each.where.split("/")[0] for each in by_rank[0]}
        assert rooms & places, (name, places)
        check_order(by_rank)


def test_collectives_of_divided_histories_have_one_order_on_all_ranks() -> None:
    names = list(FEW_DIVIDED)
    check(run_ranks(record_divided, 4, names, timeout_s=240.0), names, rooms={"context"})


def test_collectives_of_balanced_ranks_have_one_order_on_all_ranks(tmp_path: Path) -> None:
    names = list(FEW_BALANCED)
    found = run_ranks(record_balanced, 4, names, str(tmp_path), timeout_s=240.0)
    check(found, names, rooms={"balance", "training", "tables"})


def test_no_deal_is_left_out() -> None:
    assert len(divided_cases()) == 2 * len(Placement) * len(DENSE) * 2
    assert len(balanced_cases()) == (len(Placement) * 3 * 2 - 1) * len(DENSE)


@pytest.mark.slow
@pytest.mark.parametrize("dense", DENSE)
def test_collectives_of_every_division_have_one_order_on_all_ranks(dense: DenseParallelism) -> None:
    names = [name for name, case in divided_cases().items() if case["dense"] is dense]
    check(run_ranks(record_divided, 4, names, timeout_s=600.0), names, rooms={"context"})


@pytest.mark.slow
@pytest.mark.parametrize("dense", DENSE)
def test_collectives_of_every_balance_have_one_order_on_all_ranks(dense: DenseParallelism, tmp_path: Path) -> None:
    names = [name for name, (case, _) in balanced_cases().items() if case.dense is dense]
    found = run_ranks(record_balanced, 4, names, str(tmp_path), timeout_s=900.0)
    check(found, names, rooms={"balance", "training", "tables"})
