"""Claim: rows that the present step does not touch travel while it computes, and nothing changes but time.

An emulated data centre (`datacentre/`): 2 hosts × 2 ranks with links of 1 Gbit/s, a DLRM of 16 features whose tables
are cut by rows over all ranks, D = 64, batch 256 a rank. In one run, in turns, on the same batches:

    plain                 the exchange of pooled embeddings when their batch has its turn
    prioritised_always    rows of the next batch ahead, gradients in two rounds (`ziggurat.parallel.prioritised`)
    prioritised           the same with the choice that it makes by itself, after it has made it

Cases: `zipf_EXPONENT`, ids by a Zipf law; `disjoint`, no two neighbouring batches read a row in common; `same`, all
batches read the same rows. `collisions` is the share of looked-up vectors that wait for the update, `exposed_reduction`
what the time that ranks wait for messages of embeddings falls by, `ratio` the plain step's time over the prioritised
one's, `chosen_ratio` the same of what the choice does. `waited_free_ms` is what ranks wait on links without limit: they
share two cores and wait for each other there, whatever the wire does.

Options: --rate MBIT --batch B --rounds N --cases zipf_0.6,disjoint,same
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.datacentre.jobs import Job, JobSpec
from benchmarks.datacentre.network import Network, NetworkConfig, PlainNetwork, open_network
from benchmarks.exchange.ranks import Shape
from benchmarks.harness import percentiles, say
from benchmarks.report import Case, Report
from ziggurat.config import to_json
from ziggurat.parallel.prioritised.choice import Exchange

MODULE = "benchmarks.exchange.ranks"
CASES = ("zipf_0.6", "zipf_0.7", "zipf_1.05", "disjoint", "same")
GOAL_STEP, GOAL_EXPOSED, GOAL_NEVER_SLOWER, MAX_COLLISIONS = 1.3, 0.8, 0.98, 0.15
CHOOSING_STEPS = 30  # until the choice is made
PLAIN, ALWAYS, CHOSEN = Exchange.PLAIN.value, Exchange.PRIORITISED_ALWAYS.value, Exchange.PRIORITISED.value


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Options of this benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="ziggurat bench exchange", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=float, default=1000.0, help="Mbit/s of a host's link (default: %(default)g)")
    parser.add_argument("--batch", type=int, default=256, help="of a rank (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--cases", default=",".join(CASES))
    return parser.parse_args(list(arguments))


def run(*, quick: bool, options: argparse.Namespace | None = None) -> Report:
    """Measure and report."""
    options = options or parse_options([])
    shape = Shape(batch_size=options.batch)
    rounds, steps = (2, 3) if quick else (options.rounds or 5, 8)
    found: list[dict[str, Any]] = []
    report = Report(
        benchmark="exchange",
        claim="Training steps on an emulated data centre: embeddings ahead of their batch against the plain exchange.",
        command="ziggurat bench exchange",
        extra={"cases": found},
    )
    with open_network(NetworkConfig(hosts=2, ranks_per_host=2, rate_mbit=options.rate)) as network:
        if not network.is_emulated:
            report.skipped.append(f"no emulated links ({network.reason}): there is nothing to hide")
        for name in options.cases.split(","):
            found.append(measure(network, name, shape=shape, rounds=rounds, steps=steps))
            for case in cases_of(found[-1]):
                report.cases.append(case)
                say(f"  {case.name}: {case.peer:.1f} / {case.ours:.1f} ms = {case.ratio:.2f} {case.verdict}")
    report.tables.append(table(found))
    return report


def measure(network: Network | PlainNetwork, name: str, *, shape: Shape, rounds: int, steps: int) -> dict[str, Any]:
    """One case: all contestants in turns."""
    say(f"  {name}: starting")
    names = [PLAIN, ALWAYS, CHOSEN]
    settings = {"shape": to_json(shape), "ids": name.removeprefix("zipf_"), "exchanges": names}
    spec = JobSpec(name=name, python=sys.executable, module=MODULE, settings=settings)
    timed: dict[str, list[float]] = {each: [] for each in names}
    facts: dict[str, list[list[dict[str, Any]]]] = {each: [] for each in names}
    losses: dict[str, list[float]] = {each: [] for each in names}
    with Job(spec, network) as job:

        def turn(each: str, count: int) -> float:
            answers = job.ask({"op": "run", "name": each, "steps": count})
            losses[each].append(answers[0]["value"])
            return answers[0]["seconds"] * 1e3 / count

        for each in names:
            turn(each, CHOOSING_STEPS)
            job.ask({"op": "profile", "name": each, "steps": 0})
        for number in range(rounds):
            shift = number % len(names)
            for each in (*names[shift:], *names[:shift]):
                timed[each].append(turn(each, steps))
                facts[each].append(job.ask({"op": "profile", "name": each, "steps": 0}))
        free = {}
        if network.is_emulated:
            network.limit(0.0)
            for each in names[:2]:
                free[each] = turn(each, steps), job.ask({"op": "profile", "name": each, "steps": 0})
            network.limit(network.config.rate_mbit)
    assert losses[PLAIN][: 1 + rounds] == losses[ALWAYS][: 1 + rounds] == losses[CHOSEN][: 1 + rounds], losses
    return _summary(name, timed, facts, free)


def _summary(
    name: str, timed: dict[str, list[float]], facts: dict[str, list[list[dict[str, Any]]]], free: dict[str, Any]
) -> dict[str, Any]:
    waited = {each: [statistics.mean(rank["waited_ms"] for rank in turn) for turn in facts[each]] for each in facts}
    exposed = {each: statistics.median(values) for each, values in waited.items()}
    ahead = [rank for turn in facts[ALWAYS] for rank in turn if "collisions" in rank]
    always = [plain / ours for plain, ours in zip(timed[PLAIN], timed[ALWAYS], strict=True)]
    chosen = [plain / ours for plain, ours in zip(timed[PLAIN], timed[CHOSEN], strict=True)]
    return {
        "name": name,
        "ratio": statistics.median(always),
        "ratio_p10_p90": percentiles(always),
        "chosen_ratio": statistics.median(chosen),
        "chosen_ratio_p10_p90": percentiles(chosen),
        "choice": facts[CHOSEN][-1][0].get("exchange", ""),
        "collisions": statistics.mean(rank["collisions"] for rank in ahead) if ahead else None,
        "exposed_ms": exposed,
        "exposed_reduction": 1.0 - exposed[ALWAYS] / max(exposed[PLAIN], 1e-9),
        "step_ms": {each: statistics.median(values) for each, values in timed.items()},
        "step_ms_rounds": timed,
        "crossing_bytes": {each: _crossing_bytes(facts[each][-1]) for each in facts},
        "free_step_ms": {each: step_ms for each, (step_ms, _) in free.items()},
        "waited_free_ms": {
            each: statistics.mean(rank["waited_ms"] for rank in answers) for each, (_, answers) in free.items()
        },
        "same_losses": True,
    }


def _crossing_bytes(answers: list[dict[str, Any]]) -> float:
    """Bytes of embeddings and ids that cross between hosts, a step, of all ranks."""
    rows = [(row, rank["steps"]) for rank in answers for row in rank["traffic"] if row["link"] == "cross_host"]
    return sum(row["bytes"] / max(steps, 1) for row, steps in rows)


def cases_of(found: dict[str, Any]) -> list[Case]:
    """What the report compares: always ahead, and what the choice does."""
    few = found["collisions"] is not None and found["collisions"] <= MAX_COLLISIONS
    pairs = (
        (found["name"], ALWAYS, "ratio", GOAL_STEP if few and found["name"].startswith("zipf") else 0.0),
        (f"{found['name']}_chosen", CHOSEN, "chosen_ratio", GOAL_NEVER_SLOWER),
    )
    return [
        Case(
            name=name,
            ours=found["step_ms"][who],
            peer=found["step_ms"][PLAIN],
            ratio=found[ratio],
            ratio_p10=found[f"{ratio}_p10_p90"][0],
            ratio_p90=found[f"{ratio}_p10_p90"][1],
            ours_name=who,
            peer_name=PLAIN,
            goal=goal,
            unit="ms",
        )
        for name, who, ratio, goal in pairs
    ]


def table(found: Sequence[dict[str, Any]]) -> str:
    """Every case in words, as Markdown."""
    lines = [
        "| case | collisions | exposed, ms: plain | prioritised | reduction | step, ms: plain | prioritised | ratio "
        "| chosen | MB between hosts: plain | prioritised |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---|---:|---:|",
    ]
    for each in found:
        exposed, step, sent = each["exposed_ms"], each["step_ms"], each["crossing_bytes"]
        collisions = "–" if each["collisions"] is None else f"{100 * each['collisions']:.1f} %"
        lines.append(
            f"| {each['name']} | {collisions} | {exposed[PLAIN]:.1f} | {exposed[ALWAYS]:.1f} "
            f"| {100 * each['exposed_reduction']:.0f} % | {step[PLAIN]:.1f} | {step[ALWAYS]:.1f} | {each['ratio']:.2f} "
            f"| {each['choice'].partition(':')[0]}, {each['chosen_ratio']:.2f} | {sent[PLAIN] / 1e6:.2f} "
            f"| {sent[ALWAYS] / 1e6:.2f} |"
        )
    return "\n".join(lines)
