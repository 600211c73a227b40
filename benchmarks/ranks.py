"""Claim: four ranks that share the cores of one process take little longer than it, and a small step is short.

Four ranks on two cores, one thread each, and one process of two threads do the same work: DLRM, the trainer's own step
(`our_step_ranks.py`: guard, dense and table optimizers, all exchanges on the loopback or in shared memory). What ranks
take longer is the price of being many: exchanges, Python in every process, updates of dense weights by all.

    one process    batch 4,096, two threads                  ranks    4 × 1,024, one thread each
    TorchRec flat  4 × 128, FP32, DistributedModelParallel   ranks    4 × 128, FP32: what a step costs beside its work

A round gives each contestant a turn; only one job runs at a time. A ratio of 0.71 to one process is 1.4 times its time.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.datacentre.jobs import Job, JobSpec
from benchmarks.datacentre.network import NetworkConfig, PlainNetwork
from benchmarks.harness import PEER_PYTHON, percentiles, say
from benchmarks.limits import probe_bf16
from benchmarks.our_step_ranks import StepVariant
from benchmarks.report import Case, Report, by_round
from benchmarks.train import compile_cache
from benchmarks.workload import Workload
from ziggurat.config import to_json
from ziggurat.training.config import Compile, Precision

NUM_RANKS, GLOBAL_BATCH, SMALL_BATCH = 4, 4096, 128
OURS, TORCHREC = "benchmarks.our_step_ranks", "benchmarks.peers.torchrec_ranks"
PEERS = ("table_wise", "table_wise_pipelined")
GOAL_ONE_PROCESS = 1 / 1.4
GOAL_SMALL = 2.0


@dataclass(kw_only=True)
class Turned:
    """A variant of a job, and what it took.

    Args:
        samples: of a step, over all ranks.
    """

    name: str
    job: Job
    variant: str
    samples: int
    steps: int = 1
    step_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)

    def turn(self, steps: int) -> tuple[float, float]:
        """Wall milliseconds a step, and processor time of all ranks."""
        answers = self.job.ask({"op": "run", "name": self.variant, "steps": steps})
        cpu_s = sum(answer["cpu_seconds"] for answer in answers)
        return answers[0]["seconds"] * 1e3 / steps, cpu_s * 1e3 / steps

    def to_json(self) -> dict[str, Any]:
        """For the report."""
        low, high = percentiles(self.step_ms)
        return {
            "name": self.name,
            "samples_per_step": self.samples,
            "step_ms": {"median": statistics.median(self.step_ms), "p10": low, "p90": high, "rounds": self.step_ms},
            "cpu_ms_of_all_ranks": statistics.median(self.cpu_ms),
            "info": self.job.infos[0][self.variant],
        }


def run(*, quick: bool = False) -> Report:
    """Measure both comparisons."""
    probe = probe_bf16()
    report = Report(
        benchmark="ranks",
        claim="Four ranks on the cores of one process against that process, and small steps against TorchRec.",
        command="ziggurat bench ranks",
    )
    report.notes.append(probe.reason)
    timed: list[dict[str, Any]] = []
    report.extra["timed"] = timed
    precisions = [Precision.FP32, *([Precision.BF16] if probe.pays else [])]
    variants = [StepVariant(name=f"{each.value}", precision=each) for each in precisions]
    if not quick:
        variants.append(replace(variants[-1], name=f"{variants[-1].name}_compiled", compile=Compile.DEFAULT))
    workload = Workload(dim=64, batch_size=GLOBAL_BATCH // NUM_RANKS, num_rows=20_000, num_batches=8)
    with contextlib.ExitStack() as stack:
        ranks = _start(stack, "ranks", OURS, workload, variants, ranks=NUM_RANKS)
        one = _start(stack, "one process", OURS, replace(workload, batch_size=GLOBAL_BATCH), variants, ranks=1)
        _measure([*ranks.values(), *one.values()], rounds=3 if quick else 7)
        for each in variants:
            name = f"{workload.case}_ranks{NUM_RANKS}_one_process_{each.name}"
            goal = GOAL_ONE_PROCESS if each.precision is precisions[-1] else 0.0
            report.cases.append(_case(name, ours=ranks[each.name], peer=one[each.name], goal=goal))
        timed += [each.to_json() for each in (*ranks.values(), *one.values())]
    small = replace(workload, batch_size=SMALL_BATCH)
    with contextlib.ExitStack() as stack:
        ranks = _start(stack, "ranks", OURS, small, variants[:1], ranks=NUM_RANKS)
        peers = _start(stack, "TorchRec", TORCHREC, small, PEERS, ranks=NUM_RANKS)
        _measure([*ranks.values(), *peers.values()], rounds=3 if quick else 9)
        best = min(peers.values(), key=lambda each: statistics.median(each.step_ms))
        name = f"{workload.case}_torchrec_flat_batch{SMALL_BATCH}"
        report.cases.append(_case(name, ours=ranks[variants[0].name], peer=best, goal=GOAL_SMALL))
        timed += [each.to_json() for each in (*ranks.values(), *peers.values())]
    report.tables.append(_table(timed))
    for case in report.cases:
        say(f"  {case.name}: {case.ours:,.0f} / {case.peer:,.0f} = {case.ratio:.2f} {case.verdict}")
    return report


def _start(
    stack: contextlib.ExitStack,
    name: str,
    module: str,
    workload: Workload,
    variants: Sequence[StepVariant | str],
    *,
    ranks: int,
) -> Mapping[str, Turned]:
    """A job on the loopback, with all its variants; one process has the threads that the ranks share."""
    network = PlainNetwork(config=NetworkConfig(hosts=1, ranks_per_host=ranks, rate_mbit=0.0), reason="not needed")
    settings = [each if isinstance(each, str) else to_json(each) for each in variants]
    spec = JobSpec(
        name=name,
        python=str(PEER_PYTHON),
        module=module,
        settings={"workload": workload.to_json(), "variants": settings},
        env=compile_cache("ours"),
        threads=2 if ranks == 1 else 1,
        timeout_s=600.0,
    )
    say(f"  {name}, batch {workload.batch_size}: starting")
    job = stack.enter_context(Job(spec, network))
    names = [each if isinstance(each, str) else each.name for each in variants]
    samples = workload.batch_size * ranks
    return {each: Turned(name=f"{name}: {each}", job=job, variant=each, samples=samples) for each in names}


def _measure(contestants: Sequence[Turned], *, rounds: int, turn_s: float = 0.7) -> None:
    """Rounds of turns, in an order that rotates."""
    for each in contestants:
        each.turn(3)  # compiles
        each.steps = max(2, round(turn_s * 1e3 / each.turn(2)[0]))
    for number in range(rounds):
        shift = number % len(contestants)
        for each in (*contestants[shift:], *contestants[:shift]):
            step_ms, cpu_ms = each.turn(each.steps)
            each.step_ms.append(step_ms)
            each.cpu_ms.append(cpu_ms)


def _case(name: str, *, ours: Turned, peer: Turned, goal: float) -> Case:
    """A ratio of samples a second, round by round."""
    mine, theirs = ((each.name, [each.samples * 1e3 / ms for ms in each.step_ms]) for each in (ours, peer))
    return by_round(name, ours=mine, peer=theirs, goal=goal)


def _table(timed: Sequence[Mapping[str, Any]]) -> str:
    """Steps and processor time as Markdown."""
    lines = ["| contestant | samples a step | step, ms | processor time of all ranks, ms |", "|---|---:|---:|---:|"]
    lines += [
        f"| {each['name']} | {each['samples_per_step']:,} | {each['step_ms']['median']:.1f} "
        f"| {each['cpu_ms_of_all_ranks']:.1f} |"
        for each in timed
    ]
    return "\n".join(lines)
