"""Claim: an order of ranks that is found by a probe undoes what a bad launch costs collectives and steps.

An emulated data centre (`datacentre/`) of two racks: hosts with 1 Gbit/s, each rack with 200 Mbit/s to the core. Ranks
are launched in turns on the racks, as a cloud may hand them out:

    ring_4_hosts, ring_8_hosts   `ziggurat cluster order` in the job, then an all-reduce in the given and in the found
                                 order, in turns, 4 to 16 MiB; arithmetic beside it: a ring sends 2 (N−1)/N · S over
                                 each hop, and the e hops that leave a rack share its link, which
                                 carries what plain sockets measure on it
    right_launch                 the same where the launch is good already: what is found must not be slower
    all_to_all                   no order helps, and the probe says so
    step_dlrm, step_wukong       a data-parallel step with 3.5 million dense weights or more
    towers                       2 hosts × 2 ranks launched as a b a b, the launcher taking a a b b for granted: towers
                                 on found hosts against a job that was launched right
    boosting                     LightGBM over its own sockets, by the written file of hosts (`boosting.py`)

Everything is timed in turns; a figure is the median of ratios round by round. Options: --cases a,b --rounds N
"""

from __future__ import annotations

import argparse
import itertools
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.collectives import boosting
from benchmarks.datacentre.jobs import Job, JobSpec
from benchmarks.datacentre.links import measure_link
from benchmarks.datacentre.network import Network, NetworkConfig, PlainNetwork, open_network
from benchmarks.harness import say
from benchmarks.report import Report, by_round
from ziggurat.planning.rank_order.plots import write_picture
from ziggurat.planning.rank_order.rank_order import RankOrder

RANKS = "benchmarks.collectives.ranks"
HOST_MBIT = 1000.0
RACK_MBIT = 200.0
SIZES_MIB = (4, 8, 16)
CASES = (
    "ring_4_hosts",
    "ring_8_hosts",
    "right_launch",
    "all_to_all",
    "step_dlrm",
    "step_wukong",
    "towers",
    "boosting",
)
GOALS = {"ring_4_hosts": 1.9, "ring_8_hosts": 3.7, "step_dlrm": 1.3, "step_wukong": 1.3, "right_launch": 0.98}
GOAL_TOWERS = 0.95
GOAL_BOOSTING = 1.3
MAX_OFF_ARITHMETIC = 0.15


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Ranks on hosts.

    Args:
        network: hosts and racks.
        hosts: the host of every rank.
    """

    network: NetworkConfig
    hosts: tuple[int, ...]

    def racks(self) -> list[int]:
        """Return the rack of every rank."""
        per_rack = self.network.hosts // self.network.racks
        return [host // per_rack for host in self.hosts]

    def ring_ms(self, order: Sequence[int], *, num_bytes: int, rack_mbit: float = RACK_MBIT) -> float:
        """Return what an all-reduce takes by arithmetic: the busiest link of all, each direction by itself.

        Args:
            order: the rank at every place.
            num_bytes: S.
            rack_mbit: that the link of a rack carries.
        """
        racks = self.racks()
        sent = 2 * (len(order) - 1) / len(order) * num_bytes
        hops = list(itertools.pairwise([*order, order[0]]))
        leaving = [sum(racks[one] == rack != racks[other] for one, other in hops) for rack in set(racks)]
        by_rack = max(leaving) * sent * 8 / (rack_mbit * 1e3)
        return max(by_rack, sent * 8 / (HOST_MBIT * 1e3))


def interleaved(num_hosts: int) -> Launch:
    """Return one rank a host, two racks, neighbouring ranks in different ones."""
    network = NetworkConfig(hosts=num_hosts, ranks_per_host=1, racks=2, rate_mbit=HOST_MBIT, rack_rate_mbit=RACK_MBIT)
    half = num_hosts // 2
    return Launch(network=network, hosts=tuple(rank // 2 + half * (rank % 2) for rank in range(num_hosts)))


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Options of this benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="ziggurat bench collectives", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=0, help="of each case")
    return parser.parse_args(list(arguments))


def run(*, quick: bool, options: argparse.Namespace | None = None) -> Report:
    """Measure and report."""
    options = options or parse_options([])
    for number in (signal.SIGTERM, signal.SIGINT):  # leave through the context managers, in the background too
        signal.signal(number, signal.default_int_handler)
    bench = CollectivesBenchmark(rounds=options.rounds or (2 if quick else 7))
    for name in options.cases.split(","):
        bench.measure(name)
    return bench.report


class CollectivesBenchmark:
    """The benchmark and what it has found so far."""

    def __init__(self, *, rounds: int) -> None:
        self._rounds = rounds
        self._found: list[dict[str, Any]] = []
        self._rows: list[str] = []
        self.report = Report(
            benchmark="collectives",
            claim="Collectives and steps in a bad order of ranks, and in the order that a probe of the job finds.",
            command="ziggurat bench collectives",
            extra={"orders": self._found},
        )

    def measure(self, name: str) -> None:
        """Measure one case by its name."""
        say(f"  {name}: starting")
        if name.startswith("ring_"):
            self._rings(name, interleaved(int(name.split("_")[1])))
        elif name == "right_launch":
            four = interleaved(4)
            self._rings(name, Launch(network=four.network, hosts=(0, 1, 2, 3)), sizes_mib=(16,))
        elif name == "all_to_all":
            self._rings(name, interleaved(4), sizes_mib=(16,), what="all_to_all")
        elif name.startswith("step_"):
            self._steps(name, interleaved(4), model=name.removeprefix("step_"))
        elif name == "towers":
            self._towers()
        else:
            self._boosting()

    def _rings(
        self, name: str, launch: Launch, *, sizes_mib: Sequence[int] = SIZES_MIB, what: str = "all_reduce"
    ) -> None:
        """Time a collective in both orders, in turns."""
        variants = [f"{what} {order} {size}" for size in sizes_mib for order in ("given", "found")]
        timed, order, carried = self._in_turns(name, launch, variants, settings={"what": "collectives"}, steps=1)
        for size in sizes_mib:
            given, found = (timed[f"{what} {each} {size}"] for each in ("given", "found"))
            # An order that is the given one can only be as fast: a goal would be one for noise.
            goal = GOALS.get(name, 0.0) if order.order != order.given else 0.0
            self._add(f"{name}_{size}mb", given, found, goal=goal)
            if what == "all_reduce":
                orders = {"given": (order.given, given), "found": (order.order, found)}
                for each, (ranks, times) in orders.items():
                    said_ms = launch.ring_ms(ranks, num_bytes=size << 20, rack_mbit=carried or RACK_MBIT)
                    self._arithmetic(f"{name}_{size}mb_{each}", said_ms=said_ms, took_ms=statistics.median(times))
        if what == "all_reduce" and name != "right_launch":
            picture = f"{name}.png"
            self.report.plots.append((picture, lambda path: write_picture(order, path) and None))

    def _arithmetic(self, name: str, *, said_ms: float, took_ms: float) -> None:
        off = took_ms / said_ms - 1
        figure = {"name": f"{name}_arithmetic", "arithmetic_ms": said_ms, "measured_ms": took_ms, "off": off}
        self.report.figures.append(figure | {"met": abs(off) <= MAX_OFF_ARITHMETIC})
        self._rows.append(f"| {name} | {said_ms:.0f} | {took_ms:.0f} | {off:+.0%} |")
        head = ["| all-reduce | arithmetic, ms | measured, ms | off |", "|---|---:|---:|---:|"]
        self.report.tables[:] = ["\n".join([*head, *self._rows])]

    def _steps(self, name: str, launch: Launch, *, model: str) -> None:
        settings = {"what": "steps", "model": model}
        timed, _, _ = self._in_turns(name, launch, ["given", "found"], settings=settings, steps=2)
        self._add(name, timed["given"], timed["found"], goal=GOALS[name])

    def _towers(self) -> None:
        """Time steps of towers in three ways: launched right, and scrambled with and without a found order."""
        network = NetworkConfig(hosts=2, ranks_per_host=2, rate_mbit=RACK_MBIT)
        settings = {"what": "towers"}
        timed: dict[str, list[float]] = {name: [] for name in ("right", "scrambled", "found")}
        with open_network(network) as opened:
            self._note_links(opened)
            right = JobSpec(
                name="right", python=sys.executable, module=RANKS, settings=settings | {"hosts": [0, 0, 1, 1]}
            )
            bad = JobSpec(
                name="scrambled",
                python=sys.executable,
                module=RANKS,
                settings=settings | {"hosts": [0, 1, 0, 1]},
                hosts=(0, 1, 0, 1),
            )
            with Job(right, opened) as good_job, Job(bad, opened) as bad_job:
                order = _order_of(bad_job)
                self._found.append({"name": "towers", **_summary(order)})
                turns = {"right": (good_job, "given"), "scrambled": (bad_job, "given"), "found": (bad_job, "found")}
                for number in range(-1, self._rounds):
                    names = list(turns)
                    shift = number % len(names)
                    for each in names[shift:] + names[:shift]:
                        job, variant = turns[each]
                        took = _turn_ms(job, variant, 4)
                        timed[each] += [took] if number >= 0 else []
        self._add("towers_found_over_right", timed["right"], timed["found"], goal=GOAL_TOWERS)
        self._add("towers_found_over_scrambled", timed["scrambled"], timed["found"])

    def _boosting(self) -> None:
        reason = boosting.why_not()
        if reason:
            self.report.skipped.append(f"boosting: {reason}")
            return
        # Racks a b b a: every pair that exchanges a large message lies in two racks.
        network_config = interleaved(4).network
        hosts = (0, 2, 3, 1)
        timed: dict[str, list[float]] = {"given": [], "found": []}
        scores: dict[str, list[float]] = {}
        with open_network(network_config) as network, tempfile.TemporaryDirectory() as folder:
            self._note_links(network)
            settings = {"what": "collectives", "algorithm": "halving_doubling", "hosts": list(hosts)}
            spec = JobSpec(name="boosting", python=sys.executable, module=RANKS, settings=settings, hosts=hosts)
            with Job(spec, network) as job:
                order = _order_of(job)
            self._found.append({"name": "boosting", **_summary(order)})
            ordered = {"given": order.with_order(order.given), "found": order}
            port = boosting.PORT
            for number in range(self._rounds):
                for each in ("given", "found") if number % 2 else ("found", "given"):
                    # Another port each time: the system keeps those of the job before for a minute.
                    port += 1
                    lines = ordered[each].host_lines(form="ports", port=port)
                    took, scores[each] = boosting.train_ms(network, lines=lines, folder=Path(folder))
                    timed[each].append(took)
        off = max(abs(one - other) for one, other in zip(scores["given"], scores["found"], strict=True))
        self.report.notes.append(f"boosting: scores of both orders differ by at most {off:.1e}")
        self._add("boosting", timed["given"], timed["found"], goal=GOAL_BOOSTING)

    def _in_turns(
        self, name: str, launch: Launch, variants: Sequence[str], *, settings: dict[str, Any], steps: int
    ) -> tuple[dict[str, list[float]], RankOrder, float]:
        """Start a job, let it find its order, and time all variants round by round.

        Returns:
            Milliseconds by variant and round, the order, and the Mbit/s that the slowest link carries; 0: no links.
        """
        timed: dict[str, list[float]] = {each: [] for each in variants}
        with open_network(launch.network) as network:
            carried = self._note_links(network)
            spec = JobSpec(
                name=name,
                python=sys.executable,
                module=RANKS,
                settings=settings | {"hosts": list(launch.hosts)},
                hosts=launch.hosts,
                timeout_s=400.0,
            )
            with Job(spec, network) as job:
                order = _order_of(job)
                self._found.append({"name": name, **_summary(order), **job.infos[0]["facts"]})
                say(f"    order {order.order}, levels {[(each.name, each.groups) for each in order.levels]}")
                # The first round connects, and fills what is allocated once.
                for number in range(-1, self._rounds):
                    shift = number % len(variants)
                    for each in [*variants[shift:], *variants[:shift]]:
                        took = _turn_ms(job, each, steps)
                        timed[each] += [took] if number >= 0 else []
        return timed, order, carried

    def _add(self, name: str, given_ms: Sequence[float], found_ms: Sequence[float], *, goal: float = 0.0) -> None:
        rates = [[1e3 / each for each in times] for times in (found_ms, given_ms)]
        case = by_round(name, ours=("found order", rates[0]), peer=("given order", rates[1]), goal=goal, unit="1/s")
        self.report.cases.append(case)
        say(f"    {name}: {1e3 / case.peer:.1f} / {1e3 / case.ours:.1f} ms = {case.ratio:.2f} {case.verdict}")

    def _note_links(self, network: Network | PlainNetwork) -> float:
        """Measure the slowest link, and put it into the report; 0 where nothing is emulated."""
        config = network.config
        if not network.is_emulated:
            note = f"no emulated links ({network.reason}): orders make no difference, nothing is to be quoted"
            if note not in self.report.skipped:
                self.report.skipped.append(note)
            return 0.0
        last = config.hosts - 1
        rate = min(config.rate_mbit, config.rack_rate_mbit or config.rate_mbit)
        carried = measure_link(network, source=0, target=last, rate_mbit=rate)
        note = f"{config.describe()}: host 0 to host {last} carries {carried:.0f} Mbit/s of payload"
        if not any(each.startswith(config.describe()) for each in self.report.notes):
            self.report.notes.append(note)
        return carried


def _order_of(job: Job) -> RankOrder:
    """Return the order that the ranks of a job found, as they wrote it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "order.json"
        path.write_text(job.infos[0]["order"])
        return RankOrder.load(path)


def _summary(order: RankOrder) -> dict[str, Any]:
    return {
        "given": order.given,
        "order": order.order,
        "why_given": order.why_given,
        "levels": [[each.name, each.groups, each.confidence, each.by] for each in order.levels],
        "costs": [[each.algorithm, each.given_ms, each.found_ms] for each in order.costs],
    }


def _turn_ms(job: Job, name: str, steps: int) -> float:
    answers = job.ask({"op": "run", "name": name, "steps": steps})
    return answers[0]["seconds"] * 1e3 / steps
