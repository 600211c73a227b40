"""Plans, measured: what the learned cost model finds against the additive plan, run on four real ranks.

A suite of tasks, each 32 tables with few or very many rows, short or long lists, and half of them read so unevenly that
most lookups go to a few rows, which formulas of bytes cannot know. For each task whole tables are placed on four ranks:

    additive        each table's own formula milliseconds, greedily balanced (how TorchRec's planner adds up)
    formula         the same formulas, annealed
    learned         the cost model that `ziggurat cluster probe` trained on this machine, annealed

and the three plans run in turns in the same processes: ids, lookup, exchange, gradients, exact update. A rank's time is
the processor time of its parts of a step, of each batch the fewest of several rounds, and a plan's time that of its
busiest rank: four ranks share the cores of this machine, so the wall would show who waited for a core.

    ziggurat cluster probe --out runs/probe.json && ziggurat bench planning_measured --cost-model runs/probe.cost
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from benchmarks.harness import ROOT, say
from benchmarks.machine import describe_machine
from benchmarks.planned_step import PARTS, SuiteConfig, measure_plans
from benchmarks.report import Case, Report
from ziggurat.config import to_json
from ziggurat.placements import Placement
from ziggurat.planning.cluster.catalogue import local_cluster
from ziggurat.planning.costs.analytic import AnalyticCostModel, AnalyticCosts, HopSettings
from ziggurat.planning.costs.learned import LearnedCostModel
from ziggurat.planning.costs.probe_tables import DrawConfig
from ziggurat.planning.problem import Assignment, PlanningProblem
from ziggurat.planning.search.search import Clock, SearchConfig, Strategy, search
from ziggurat.testing.ranks import run_ranks

RANKS = 4
GOAL = 1.10
NAMES = ("additive", "formula", "learned")
SUITE = SuiteConfig(
    draw=DrawConfig(
        num_tables=32, max_rows=500_000, skews=(0.0, 1.3), single_share=0.2, list_lengths=(16.0,), dims=(8, 16, 32, 64)
    )
)


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Options of this benchmark."""
    parser = argparse.ArgumentParser(prog="ziggurat bench planning_measured")
    parser.add_argument(
        "--cost-model",
        "--judge",
        default=str(ROOT / "benchmarks" / "costs" / "amd-epyc-25-1-2-cores"),
        help="learned cost model",
    )
    parser.add_argument("--tasks", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=6, help="of each plan and batch (default: %(default)s)")
    return parser.parse_args(list(arguments))


def run(*, quick: bool, options: argparse.Namespace | None = None) -> Report:
    """Plan, run, compare."""
    options = options or parse_options([])
    if quick:
        options.tasks, options.rounds = min(options.tasks, 2), 2
    cost_model = LearnedCostModel.load(options.cost_model)
    card = cost_model.card
    busiest, lines, errors, entries = [], [], [], []
    for task in range(options.tasks):
        problem = problem_of(task)
        plans = plans_of(problem, cost_model)
        sent = [to_json(problem.to_plan(plans[name])) for name in NAMES]
        # [rank, plan, part]
        found = np.array(run_ranks(measure_plans, RANKS, to_json(SUITE), task, sent, options.rounds, timeout_s=600.0))
        ranks_ms = found.sum(axis=2)
        predicted = np.array([device_ms(problem, plans[name], cost_model) for name in NAMES]).T
        busiest.append(ranks_ms.max(axis=0))
        errors.append(np.abs(predicted - ranks_ms) / ranks_ms)
        entries.append({"task": task, "ranks_ms": ranks_ms.T.round(2).tolist(), "predicted_ms": predicted.T.tolist()})
        shown = " | ".join(f"{value:.1f}" for value in busiest[-1])
        lines.append(f"| {task} | {shown} | {busiest[-1][0] / busiest[-1][2]:.3f} |")
        say(f"  task {task}: {dict(zip(NAMES, busiest[-1].round(1).tolist(), strict=True))}")
    heading = "| task | " + " | ".join(f"{name}, ms" for name in NAMES) + " | additive / learned |"
    times = np.array(busiest)
    return Report(
        benchmark="planning_measured",
        claim="Measured time of a plan's busiest rank; ratio = the additive (or formula) plan's over the learned's.",
        command="ziggurat bench planning_measured",
        cases=[
            _case("learned_against_additive", times[:, 0], times[:, 2]),
            _case("learned_against_formula", times[:, 1], times[:, 2]),
        ],
        tables=["\n".join([heading, "|---|---|---|---|---|", *lines])],
        notes=[
            f"processor time; the ranks share {describe_machine()['cores']} cores. Parts of a step: {', '.join(PARTS)}",
            f"the prediction of a rank's time is off by {np.mean(errors):.1%} on average (it leaves out ids)",
            f"cost model: {card.num_groups} groups and {card.num_exchanges} exchanges of {card.date}",
        ],
        extra={"tasks": entries, "plans": list(NAMES)},
    )


def problem_of(task: int) -> PlanningProblem:
    """Whole tables on four ranks with room for all."""
    tables = tuple(table.with_dim(dim) for table, dim in SUITE.tables(task))
    return PlanningProblem(
        tables=tables, num_devices=RANKS, memory_bytes=(8 << 30,), placements=(Placement.TABLE_WISE,)
    )


def plans_of(problem: PlanningProblem, cost_model: LearnedCostModel) -> dict[str, tuple[Assignment, ...]]:
    """The plans that are compared, by name."""
    batch_size = SUITE.draw.num_samples // RANKS
    formula = AnalyticCostModel(AnalyticCosts(local_cluster(RANKS), HopSettings(batch_size=batch_size)))
    config = SearchConfig(clock=Clock.CPU)
    additive = search(problem, formula, strategy=Strategy.ADDITIVE, config=config)
    annealed = [search(problem, each, budget_s=2.0, config=config) for each in (formula, cost_model)]
    found = (additive, *annealed)
    return {name: result.assignments for name, result in zip(NAMES, found, strict=True)}


def device_ms(problem: PlanningProblem, plan: Sequence[Assignment], cost_model: LearnedCostModel) -> list[float]:
    """What the cost model predicts for every rank."""
    shards = [problem.shards(index, each)[0] for index, each in enumerate(plan)]
    encoded = cost_model.encode(shards)
    states = np.zeros((1, RANKS, encoded.shape[1]), dtype=np.float32)
    for each, vector in zip(plan, encoded, strict=True):
        states[0, each.devices[0]] += vector
    costs = cost_model.exchange(cost_model.local(states[0])[None])[0]
    return [round(float(value), 3) for value in costs]


def _case(name: str, peer: np.ndarray, ours: np.ndarray) -> Case:
    ratios = peer / ours
    return Case(
        name=name,
        ours=float(ours.mean()),
        peer=float(peer.mean()),
        ratio=float(peer.mean() / ours.mean()),
        ratio_p10=float(np.percentile(ratios, 10)),
        ratio_p90=float(np.percentile(ratios, 90)),
        ours_name="learned",
        peer_name=name.rpartition("_")[2],
        goal=GOAL if name.endswith("additive") else 0.0,
        unit="ms",
    )
