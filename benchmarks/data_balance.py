"""Balance: planning time, time lost to stragglers on 64 simulated ranks, and steps of four real ranks.

    balance_plan          8,192 samples over 64 ranks, Karmarkar-Karp, against 5 ms
    balance_simulated_…   share of time that is useful: lengths drawn from two distributions, two costs, three ways to
                          deal, 64 ranks of 128 samples; against samples as they come. Goal: at most 1 % lost
    balance_step          the trainer on four ranks, an encoder (STU layers, an event sees 256 before it) over histories
                          of lognormal(7, 1.3) events: the processor time of the busiest rank in each step, which all
                          wait for, as if every rank had a core; `--history din` takes DIN in its place
    balance_step_wall     the same by the clock of this machine, whose two cores the four ranks share

On two cores a rank that waits leaves its core to another one, so the wall shows little of what ranks on cores of their
own would gain. For `balance_step` all ranks share one core, so that no rank slows another by what they share (memory,
caches, the other half of a core) and processor time is that of the rank's own work. The threads beside the step (the
loader, the one that deals samples) are added to it, as if nothing hid them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.harness import say
from benchmarks.history_encoder import HistoryEncoder
from benchmarks.report import Case, Report
from ziggurat.data.balance.partition import Balance, loads_of, partition, straggler_share
from ziggurat.data.encoded.dataset import MemoryDataset
from ziggurat.data.encoded.loader import LoaderConfig
from ziggurat.features.inputs import InputSpec, JaggedSpec, LabelSpec, SingleSpec, TableSpec
from ziggurat.features.schema import Pooling
from ziggurat.models import AttentionActivation, DINConfig, MLPConfig, Model, build_model
from ziggurat.ops.karmarkar_karp import karmarkar_karp_kernel
from ziggurat.parallel.parallelize import parallelize
from ziggurat.parallel.topology import Topology
from ziggurat.placements import Placement
from ziggurat.plan import Plan, TablePlacement
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.config import Precision, TrainingConfig
from ziggurat.training.trainer import Trainer

_MOST = 21_000
_PLAN_GOAL_MS, _LOST_GOAL, _STEP_GOAL = 5.0, 0.01, 1.25
_RANKS, _DIM = 4, 16


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this part."""
    parser.add_argument("--history", choices=("stu", "din"), default="stu", help="what reads histories in balance_step")
    parser.add_argument("--rank-batch", type=int, default=16, help="samples a rank in balance_step")


def cases(*, quick: bool, options: argparse.Namespace, report: Report) -> None:
    """Append the cases of this part."""
    report.cases.append(_plan_case(rounds=5 if quick else 51))
    for name in ("lognormal", "zipf"):
        for is_square in (False, True):
            report.cases += _simulated(name, is_square=is_square, draws=1 if quick else 5)
    given = {"rank_batch": options.rank_batch, "history": options.history}
    report.cases += _step_cases(rounds=1 if quick else 3, steps=8 if quick else 10, **given)
    report.notes += [
        f"balance_plan: {karmarkar_karp_kernel()}",
        f"balance_step: {_RANKS} ranks, {options.rank_batch} samples each, {options.history}, on two cores",
    ]


def lengths(name: str, *, seed: int, num: int) -> np.ndarray:
    """Drawn lengths of histories, at most 21,000."""
    draw = np.random.default_rng(seed)
    found = draw.lognormal(7, 1.3, num) if name == "lognormal" else draw.zipf(1.2, num)
    return np.minimum(found, _MOST).astype(np.int64)


def _plan_case(*, rounds: int) -> Case:
    times = []
    for seed in range(rounds):
        costs = lengths("lognormal", seed=seed, num=64 * 128).astype(np.float64)
        begin = time.perf_counter()
        partition(costs, balance=Balance.KARMARKAR_KARP, num_ranks=64)
        times.append((time.perf_counter() - begin) * 1e3)
    ratios = _spread([_PLAN_GOAL_MS / each for each in times])
    return _case(
        "balance_plan", statistics.median(times), _PLAN_GOAL_MS, ratios, peer="goal", goal=1.0, unit="ms a plan"
    )


def _simulated(name: str, *, is_square: bool, draws: int) -> list[Case]:
    useful: dict[Balance, list[float]] = {each: [] for each in Balance}
    for seed in range(draws):
        drawn = lengths(name, seed=seed, num=64 * 128).astype(np.float64)
        costs = drawn**2 + 4000 * drawn if is_square else drawn
        for balance, found in useful.items():
            loads = loads_of(costs, partition(costs, balance=balance, num_ranks=64), num_ranks=64)
            found.append(100 * (1 - straggler_share(loads)))
    plain = useful.pop(Balance.NONE)
    made = []
    for balance, found in useful.items():
        ratios = _spread([ours / other for ours, other in zip(found, plain, strict=True)])
        goal = 0.0 if balance is Balance.VARIABLE else 100 * (1 - _LOST_GOAL) / statistics.median(plain)
        title = f"balance_simulated_{name}_{'square' if is_square else 'linear'}_{balance.value}"
        ours, peer = statistics.median(found), statistics.median(plain)
        say(f"{title}: {100 - ours:.2f} % lost, {100 - peer:.1f} % as they come")
        made.append(_case(title, ours, peer, ratios, peer="as they come", goal=goal, unit="% of time useful"))
    return made


def _step_cases(*, rounds: int, steps: int, rank_batch: int, history: str) -> list[Case]:
    turns = [(Balance.NONE, True), (Balance.KARMARKAR_KARP, True), (Balance.ZIGZAG, True)]
    turns += [(Balance.NONE, False), (Balance.KARMARKAR_KARP, False)]
    measured: dict[tuple[Balance, bool], list[float]] = {turn: [] for turn in turns}
    for number in range(rounds):
        for (balance, is_pinned), found in measured.items():
            with tempfile.TemporaryDirectory() as folder:
                given = (folder, balance.value, is_pinned, number, steps, rank_batch, history)
                each = run_ranks(_train, _RANKS, *given, timeout_s=300.0)
            beside_ms = max(one["beside_ms"] for one in each)
            found.append(each[0]["busy_ms"] + beside_ms if is_pinned else each[0]["wall_ms"])
            how = "one core for all" if is_pinned else "two cores"
            say(f"round {number + 1}, {balance.value}, {how}: {each[0]}, beside the step at most {beside_ms:.1f}")
    made = []
    for (balance, is_pinned), found in measured.items():
        if balance is Balance.NONE:
            continue
        plain = measured[Balance.NONE, is_pinned]
        end = "" if balance is Balance.KARMARKAR_KARP else f"_{balance.value}"
        name = f"balance_step{end}{'' if is_pinned else '_wall'}"
        ratios = _spread([other / ours for ours, other in zip(found, plain, strict=True)])
        goal = _STEP_GOAL if name == "balance_step" else 0.0
        ours, peer = statistics.median(found), statistics.median(plain)
        made.append(_case(name, ours, peer, ratios, peer="as they come", goal=goal, unit="ms a step"))
    return made


def _case(name: str, ours: float, other: float, ratios: dict[str, float], *, peer: str, goal: float, unit: str) -> Case:
    return Case(
        name=name,
        ours=ours,
        peer=other,
        ratio=ratios["median"],
        ratio_p10=ratios["p10"],
        ratio_p90=ratios["p90"],
        ours_name="ziggurat",
        peer_name=peer,
        goal=goal,
        unit=unit,
    )


def _spread(ratios: list[float]) -> dict[str, float]:
    p10, median, p90 = np.percentile(ratios, (10, 50, 90)).tolist()
    return {"p10": p10, "median": median, "p90": p90}


def _data(seed: int, num_rows: int, *, pooling: Pooling) -> MemoryDataset:
    """Users with histories of lognormal lengths."""
    draw = np.random.default_rng(seed)
    sizes = lengths("lognormal", seed=seed, num=num_rows)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    clicks = draw.integers(3, 10_000, int(offsets[-1]), dtype=np.int32)
    table = pa.table(
        {
            "age": pa.array(draw.random(num_rows, dtype=np.float32)),
            "item": pa.array(draw.integers(3, 10_000, num_rows, dtype=np.int32)),
            "clicks": pa.ListArray.from_arrays(pa.array(offsets), pa.array(clicks)),
            "label:like": pa.array((draw.random(num_rows) < 0.5).astype(np.float32)),
            "row:": pa.array(np.arange(num_rows, dtype=np.int64)),
        }
    )
    inputs = InputSpec(
        dense=("age",),
        single=(SingleSpec(name="item", table="item"),),
        jagged=(JaggedSpec(name="clicks", table="item", ordered=True, pooling=pooling),),
        tables=(TableSpec(name="item", num_rows=10_000),),
        labels=(LabelSpec(name="like"),),
    )
    return MemoryDataset(table, inputs, rows_per_group=256)


def _din(inputs: InputSpec) -> Model:
    config = DINConfig(
        embedding_dim=_DIM,
        attention_dims=(200, 80),
        attention_activation=AttentionActivation.RELU,
        deep=MLPConfig(hidden_dims=(64,)),
    )
    return build_model(config, inputs, seed=0)


def _train(
    rank: int, folder: str, balance: str, is_pinned: bool, seed: int, steps: int, rank_batch: int, history: str
) -> dict[str, Any]:
    """Train on this rank; milliseconds a step by the wall, of the busiest rank, and beside the step."""
    del rank
    if is_pinned:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    is_din = history == "din"
    pooling = Pooling.MEAN if is_din else Pooling.NONE
    data = _data(seed, rank_batch * _RANKS * (steps + 2), pooling=pooling)
    model = _din(data.inputs) if is_din else HistoryEncoder(data.inputs, dim=64, num_layers=1, reach=256)
    # By rows: a rank that holds a whole table looks up for all, and no deal of samples changes that.
    table = TablePlacement(table="item", placement=Placement.ROW_WISE, ranks=tuple(range(_RANKS)))
    plan = Plan(world_size=_RANKS, tables=(table,))
    parallel = parallelize(model, plan, Topology.create())
    training = TrainingConfig(
        precision=Precision.FP32,
        threads=1,
        log_every=1,
        max_steps=steps,
        balance=Balance(balance),
        balance_cost=() if is_din or balance == "none" else ("1*clicks",),  # the kernel's FLOPs cannot be counted
        loader=LoaderConfig(batch_size=rank_batch),
    )
    trainer = Trainer(model, config=training, train=data, folder=folder, parallel=parallel)
    begin, thread = resource.getrusage(resource.RUSAGE_SELF), time.thread_time()
    trainer.fit()
    end = resource.getrusage(resource.RUSAGE_SELF)
    all_threads = end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime
    beside_ms = (all_threads - (time.thread_time() - thread)) * 1e3 / steps  # the loader's threads are in it, too
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    timings = [line["timing"] for line in lines if line["kind"] == "train" and line["timing"].get("busy_s")]
    busy = np.array([each["busy_s"] for each in timings])
    rows = _RANKS * rank_batch
    return {
        "wall_ms": float(np.mean([rows / each["samples_per_s"] for each in timings]) * 1e3),
        "busy_ms": float(busy.max(axis=1).mean() * 1e3),
        "beside_ms": beside_ms,
        "lost": round(straggler_share(busy), 4),
        "planned": timings[-1].get("planned_straggler_share"),
    }
