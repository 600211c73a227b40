"""Claim: histories that are divided between ranks may be as many times longer, and what travels is chosen well.

    memory_N_ranks     longest history whose training step fits into a fixed memory a rank, on N ranks against one: a
                       stack of HSTU layers, forward and backward, peak of resident memory beyond that before the step
    speed_N_ranks      the same step at one length, all ranks on the same two cores
    pass_kv_T_P_R      T new events behind P cached ones, emulated data centre with links of R Mbit/s: the way that
                       the rule takes against the better of both, each in turns
    rule_within_10_percent   share of these cells in which the rule's way is at most 10 % slower than the better one

The data centre: 2 hosts × 2 ranks (`datacentre/`). Where namespaces may not be made, the grid is left out, and the
report says so. The rule's rates are measured by the ranks themselves, once for each rate of the links.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.datacentre.jobs import Job, JobSpec
from benchmarks.datacentre.network import NetworkConfig, PlainNetwork, open_network
from benchmarks.harness import percentiles, say
from benchmarks.report import Case, Report

MODULE = "benchmarks.context_ranks"
SETTINGS: dict[str, Any] = {"heads": 1, "dim": 64, "layers": 4, "width": 32}
GOALS = {2: 1.8, 4: 3.2}
GOAL_RULE, TOLERANCE = 0.9, 1.1
NEW, CACHED, RATES_MBIT = (16, 256, 2048), (0, 4096, 32768), (200.0, 1000.0)
WAYS = ("pass_kv", "pass_q")


def run(*, quick: bool = False) -> Report:
    """Measure memory, speed and the rule."""
    report = Report(
        benchmark="context",
        claim="Histories divided between ranks: length at a fixed memory, speed, and the choice of what travels.",
        command="ziggurat bench context",
    )
    _memory_and_speed(report, quick=quick)
    _rule(report, quick=quick)
    memory = {int(case.name.split("_")[1]): case.ours for case in report.cases if case.name.startswith("memory_")}
    alone = next(case.peer for case in report.cases if case.name.startswith("memory_"))
    cells = report.extra.get("cells")
    if isinstance(cells, list):
        report.plots.append(("context_ranks.png", partial(plot, {1: alone, **memory}, cells)))
    for case in report.cases:
        if case.goal:
            say(f"  {case.name}: {case.ratio:.2f} (goal {case.goal:g}: {case.verdict})")
    return report


def _job(network: Any, name: str) -> Job:
    settings = SETTINGS | {"ranks_per_host": network.config.ranks_per_host}
    return Job(JobSpec(name=name, python=sys.executable, module=MODULE, settings=settings, timeout_s=600), network)


# ------------------------------------------------------------------------------------------------- memory and speed


def _memory_and_speed(report: Report, *, quick: bool) -> None:
    base, rounds = (2048, 2) if quick else (4096, 5)
    longest, steps_ms, limit = {}, {}, 0.0
    for ranks in (1, 2, 4):
        network = PlainNetwork(config=NetworkConfig(hosts=1, ranks_per_host=ranks, rate_mbit=0.0), reason="one host")
        with network, _job(network, f"{ranks} ranks") as job:
            _peak(job, base)  # kernels are built, groups are met
            if ranks == 1:
                limit = statistics.median(_peak(job, base) for _ in range(rounds))
            longest[ranks] = _longest(job, limit, guess=base * ranks, rounds=rounds)
            steps_ms[ranks] = [_turn(job, f"step/{base // 2}", 1) for _ in range(2 * rounds)]
        text = f"{longest[ranks]:,} events in {limit / 2**20:.0f} MiB"
        say(f"  {ranks} ranks: {text}; {base // 2:,} in {statistics.median(steps_ms[ranks]):.0f} ms")
    for ranks in (2, 4):
        ratio = longest[ranks] / longest[1]
        report.cases.append(
            Case(
                name=f"memory_{ranks}_ranks",
                ours=longest[ranks],
                peer=longest[1],
                ratio=ratio,
                ratio_p10=ratio,
                ratio_p90=ratio,
                ours_name=f"{ranks} ranks",
                peer_name="one rank",
                goal=GOALS[ranks],
                unit=f"events in {limit / 2**20:.0f} MiB a rank",
            )
        )
        ratios = [one / many for one, many in zip(steps_ms[1], steps_ms[ranks], strict=True)]
        report.cases.append(_case(f"speed_{ranks}_ranks", steps_ms[ranks], steps_ms[1], ratios, f"{ranks} ranks"))
    mib = f"{limit / 2**20:.0f} MiB"
    report.notes.append(
        f"memory and speed: {SETTINGS['layers']} HSTU layers of width {SETTINGS['width']}, one history, FP32, bias by "
        f"position and time; {mib} is what one rank takes for {base:,} events; speed at {base // 2:,} events; ranks "
        "share two cores"
    )


def _peak(job: Job, length: int) -> float:
    """Of the rank that takes most."""
    return max(answer["bytes"] for answer in job.ask({"op": "profile", "name": f"memory/{length}", "steps": 1}))


def _longest(job: Job, limit: float, *, guess: int, rounds: int) -> int:
    """The longest history that stays below the limit: memory is linear in the length, so two lengths tell."""
    lengths = (int(guess * 0.75), int(guess * 0.95))
    peaks = [statistics.median(_peak(job, length) for _ in range(rounds)) for length in lengths]
    slope = (peaks[1] - peaks[0]) / (lengths[1] - lengths[0])
    found = int(lengths[1] + (limit - peaks[1]) / slope) // 64 * 64
    while found > 64 and statistics.median(_peak(job, found) for _ in range(rounds)) > limit * 1.005:
        found = int(found * 0.98) // 64 * 64
    return found


def _turn(job: Job, name: str, steps: int) -> float:
    """Milliseconds a step."""
    answers = job.ask({"op": "run", "name": name, "steps": steps})
    return answers[0]["seconds"] * 1e3 / steps


# ------------------------------------------------------------------------------------------------------------ the rule


def _rule(report: Report, *, quick: bool) -> None:
    rates, news, cached = (RATES_MBIT[1:2], NEW[:2], CACHED[:2]) if quick else (RATES_MBIT, NEW, CACHED)
    cells: list[dict[str, Any]] = []
    with open_network(NetworkConfig(hosts=2, ranks_per_host=2, rate_mbit=rates[0])) as network:
        if not network.is_emulated:
            report.skipped.append(f"the rule: no emulated links ({network.reason})")
            return
        with _job(network, "2 hosts x 2 ranks") as job:
            for rate in rates:
                network.limit(rate)
                job.ask({"op": "profile", "name": "rates/", "steps": 1})
                for new in news:
                    for old in cached:
                        cells.append(_cell(job, new, old, rate=rate, rounds=3))
    good = 0
    for cell in cells:
        chosen, best = cell["ms"][cell["chosen"]], cell["ms"][cell["better"]]
        good += statistics.median(chosen) <= TOLERANCE * statistics.median(best)
        ratios = [one / other for one, other in zip(best, chosen, strict=True)]
        name = f"pass_kv_{cell['new']}_{cell['cached']}_{cell['rate_mbit']:g}mbit"
        report.cases.append(_case(name, chosen, best, ratios, cell["chosen"], peer_name=f"better: {cell['better']}"))
    share = good / len(cells)
    report.cases.append(
        Case(
            name="rule_within_10_percent",
            ours=good,
            peer=len(cells),
            ratio=share,
            ratio_p10=share,
            ratio_p90=share,
            ours_name="cells within 10 %",
            peer_name="cells",
            goal=GOAL_RULE,
            unit="cells",
        )
    )
    report.extra["cells"] = cells
    report.tables.append(_table(cells))
    report.notes.append(
        f"the rule: one head of {SETTINGS['dim']}, forward, SiLU; 2 hosts x 2 ranks, links limited in both directions"
    )


def _cell(job: Job, new: int, cached: int, *, rate: float, rounds: int) -> dict[str, Any]:
    """Both ways in turns, and what the rule says."""
    told = job.ask({"op": "profile", "name": f"predict/{new}/{cached}", "steps": 1})[0]
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for way in WAYS:
        _turn(job, f"attention/{way}/{new}/{cached}", 1)
    steps = 3 if new * (new + cached) < 4_000_000 else 1
    for number in range(rounds):
        for way in WAYS if number % 2 else WAYS[::-1]:
            times[way].append(_turn(job, f"attention/{way}/{new}/{cached}", steps))
    better = min(WAYS, key=lambda way: statistics.median(times[way]))
    medians = ", ".join(
        f"{way} {statistics.median(times[way]):.1f} ms (predicted {told['predicted_s'][way] * 1e3:.1f})" for way in WAYS
    )
    say(f"    {new} new, {cached} cached, {rate:g} Mbit/s: {medians}; taken {told['chosen']}")
    return {"new": new, "cached": cached, "rate_mbit": rate, "ms": times, "better": better, **told}


def _case(
    name: str, ours: list[float], peer: list[float], ratios: list[float], ours_name: str, peer_name: str = "one rank"
) -> Case:
    low, high = percentiles(ratios)
    return Case(
        name=name,
        ours=statistics.median(ours),
        peer=statistics.median(peer),
        ratio=statistics.median(ratios),
        ratio_p10=low,
        ratio_p90=high,
        ours_name=ours_name,
        peer_name=peer_name,
        unit="ms",
    )


def _table(cells: list[dict[str, Any]]) -> str:
    """The grid as Markdown."""
    lines = ["| Mbit/s | new | cached | pass-KV, ms | pass-Q, ms | taken |", "|---:|---:|---:|---:|---:|---|"]
    for cell in cells:
        ours = [statistics.median(cell["ms"][way]) for way in WAYS]
        lines.append(
            f"| {cell['rate_mbit']:g} | {cell['new']:,} | {cell['cached']:,} | {ours[0]:.1f} | {ours[1]:.1f} "
            f"| {cell['chosen']}{'' if cell['chosen'] == cell['better'] else ' (slower)'} |"
        )
    return "\n".join(lines)


def plot(longest: Mapping[int, float], cells: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The longest history by ranks, and what keys take against queries.

    Args:
        longest: events by number of ranks.
        cells: of the grid, as the report has them.
        path: the file.
    """
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = [str(ranks) for ranks in longest]
    bars = left.bar(names, list(longest.values()), color="#3b6ea5", width=0.62)
    labels = [f"{events:,.0f}\n{events / longest[1]:.2f} ×" for events in longest.values()]
    left.bar_label(bars, labels, fontsize=8)
    left.set(xlabel="ranks that divide a history", ylabel="longest history in equal memory, events")
    left.margins(y=0.2)
    for rate, color in zip(RATES_MBIT, ("#3b6ea5", "#c26f3d"), strict=True):
        for new, marker in zip(NEW, ("o", "s", "^"), strict=True):
            row = [cell for cell in cells if (cell["rate_mbit"], cell["new"]) == (rate, new)]
            if not row:  # --quick
                continue
            ratios = [statistics.median(cell["ms"][WAYS[0]]) / statistics.median(cell["ms"][WAYS[1]]) for cell in row]
            label = f"{new:,} new, {rate:g} Mbit/s"
            right.plot([f"{cell['cached']:,}" for cell in row], ratios, marker=marker, color=color, lw=1, label=label)
    right.axhline(1, color="grey", lw=0.8)
    right.set(yscale="log", xlabel="cached events", ylabel="time of keys / time of queries")
    ticks = (0.5, 1, 2, 5, 10, 20)
    right.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    right.minorticks_off()
    right.legend(fontsize=7)
    figure.savefig(path, dpi=110)
