"""Rounds of jobs that live side by side in one network: turns of all variants, with links limited and without.

    round r    limited links    flat, towers …, TorchRec …   rotating order, turns of about a second, one at a time
               no limit         towers again                 what a step takes if links cost nothing: compute alone

The bytes that leave a host are read from its interface before and after every turn.
"""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.datacentre.jobs import Job, JobSpec
from benchmarks.datacentre.network import Network, NetworkConfig, PlainNetwork
from benchmarks.harness import PEER_PYTHON, percentiles, say
from benchmarks.our_ranks import Variant
from benchmarks.workload import Workload
from ziggurat.config import to_json

OURS, TORCHREC = "benchmarks.our_ranks", "benchmarks.peers.torchrec_ranks"
PEERS = ("table_wise", "table_row_wise", "table_wise_pipelined", "table_row_wise_pipelined")
MAX_SLOWER = 1.08  # peers that are slower than the best by more than this in a first round do not go on


@dataclass(frozen=True, kw_only=True)
class RoundsConfig:
    """How long to measure.

    Args:
        rounds: that count.
        turn_s: about how long a turn takes; it has at least two steps.
        warmup_steps: of each variant, before the first round.
    """

    rounds: int = 7
    turn_s: float = 1.2
    warmup_steps: int = 2


QUICK = RoundsConfig(rounds=2, turn_s=0.5, warmup_steps=1)


@dataclass(kw_only=True)
class Timed:
    """What one variant did.

    Args:
        step_ms: one a round, links limited.
        free_ms: one a round, links without limit; empty if not measured.
        link_bytes: a step: the largest of all hosts, as their interfaces counted; empty where there are none.
        cpu_ms: CPU time of all ranks a step.
        info: what the variant says of itself.
        profile: of rank 0: phases; and the traffic of all ranks.
    """

    name: str
    step_ms: list[float] = field(default_factory=list)
    free_ms: list[float] = field(default_factory=list)
    link_bytes: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    info: Mapping[str, Any] = field(default_factory=dict)
    profile: dict[str, Any] = field(default_factory=dict)

    @property
    def median_ms(self) -> float:
        """Of a step."""
        return statistics.median(self.step_ms)

    @property
    def compute_ms(self) -> float:
        """Of a step with links without limit."""
        return statistics.median(self.free_ms) if self.free_ms else self.median_ms

    def to_json(self) -> dict[str, Any]:
        """For the report."""
        low, high = percentiles(self.step_ms)
        return {
            "name": self.name,
            "step_ms": {"median": self.median_ms, "p10": low, "p90": high, "rounds": self.step_ms},
            "unlimited_links_ms": statistics.median(self.free_ms) if self.free_ms else None,
            "cpu_ms_of_all_ranks": statistics.median(self.cpu_ms),
            "link_bytes_per_step": statistics.median(self.link_bytes) if self.link_bytes else None,
            "info": dict(self.info),
            "profile": self.profile,
        }


def measure_side_by_side(
    network: Network | PlainNetwork,
    workload: Workload,
    *,
    variants: Sequence[Variant],
    rates_mbit: Sequence[float],
    config: RoundsConfig,
    peers: Sequence[str] = PEERS,
    python: str = str(PEER_PYTHON),
) -> dict[float, dict[str, Timed]]:
    """Run ours and TorchRec in turns.

    Args:
        network: where.
        workload: its batch size is a rank's.
        variants: of ours.
        rates_mbit: of the host links; every rate gets its own rounds, with rounds without limit beside them.
        config: how long.
        peers: variants of TorchRec.
        python: interpreter of the ranks.

    Returns:
        By rate, then by name of the variant.

    Raises:
        TopologyError: a rank failed.
    """
    both = ((OURS, [to_json(variant) for variant in variants]), (TORCHREC, list(peers)))
    say(f"  {workload.name}, batch {workload.batch_size} a rank, {network.config.describe()}: starting")
    with contextlib.ExitStack() as stack:
        jobs: dict[str, Job] = {}
        for (module, chosen), names in zip(both, ([v.name for v in variants], peers), strict=True):
            if names:
                settings = {"workload": workload.to_json(), "variants": chosen}
                spec = JobSpec(name=module, python=python, module=module, settings=settings)
                jobs |= dict.fromkeys(names, stack.enter_context(Job(spec, network)))
        results = {}
        for rate in rates_mbit:
            turns = _Turns(network, jobs, config=config, rate_mbit=rate)
            results[rate] = turns.measure(profiled=[variant.name for variant in variants])
        return results


class _Turns:
    def __init__(
        self, network: Network | PlainNetwork, jobs: Mapping[str, Job], *, config: RoundsConfig, rate_mbit: float
    ) -> None:
        self._network, self._jobs, self._config, self._rate = network, jobs, config, rate_mbit
        self._steps: dict[str, int] = {}
        self._first_ms: dict[str, float] = {}
        self.timed = {name: Timed(name=name, info=job.infos[0][name]) for name, job in jobs.items()}

    def measure(self, *, profiled: Sequence[str]) -> dict[str, Timed]:
        self._limit(True)
        for name in self._jobs:
            self._turn(name, self._config.warmup_steps)
            step_ms = self._first_ms[name] = self._turn(name, 2)[0]
            self._steps[name] = max(2, min(50, round(self._config.turn_s * 1e3 / step_ms)))
        names = self._without_slow_peers([name for name in self._jobs if name not in profiled], list(self._jobs))
        for number in range(self._config.rounds):
            shift = number % len(names)
            order = names[shift:] + names[:shift]
            for name in order:
                self._record(name)
            if self._rate and self._network.is_emulated:
                self._limit(False)
                for name in order:
                    if name in profiled and not name.startswith("flat"):
                        self.timed[name].free_ms.append(self._turn(name, self._steps[name])[0])
                self._limit(True)
        for name in profiled:
            self._profile(name)
        medians = ", ".join(f"{name} {self.timed[name].median_ms:.0f}" for name in names)
        say(f"    {f'{self._rate:g} Mbit/s' if self._rate else 'no limit'}, ms: {medians}")
        return {name: self.timed[name] for name in names}

    def _limit(self, limited: bool) -> None:
        config = self._network.config
        rack_rate = config.rack_rate_mbit if limited else 0.0
        self._network.limit(self._rate if limited else 0.0, rack_rate_mbit=rack_rate)

    def _turn(self, name: str, steps: int) -> tuple[float, float]:
        """Wall and CPU milliseconds a step."""
        answers = self._jobs[name].ask({"op": "run", "name": name, "steps": steps})
        cpu_s = sum(answer["cpu_seconds"] for answer in answers)
        return answers[0]["seconds"] * 1e3 / steps, cpu_s * 1e3 / steps

    def _record(self, name: str) -> None:
        steps, timed = self._steps[name], self.timed[name]
        before = self._network.sent_bytes()
        step_ms, cpu_ms = self._turn(name, steps)
        sent = [after - first for after, first in zip(self._network.sent_bytes(), before, strict=True)]
        timed.step_ms.append(step_ms)
        timed.cpu_ms.append(cpu_ms)
        if sent:
            timed.link_bytes.append(max(sent) / steps)

    def _without_slow_peers(self, peers: list[str], names: list[str]) -> list[str]:
        if len(peers) < 2:
            return names
        first = {name: min(self._first_ms[name], self._turn(name, self._steps[name])[0]) for name in peers}
        best = min(first.values())
        slow = [name for name, step_ms in first.items() if step_ms > MAX_SLOWER * best]
        say(f"    TorchRec, ms: {', '.join(f'{name} {step_ms:.0f}' for name, step_ms in first.items())}")
        return [name for name in names if name not in slow]

    def _profile(self, name: str) -> None:
        answers = self._jobs[name].ask({"op": "profile", "name": name, "steps": self._steps[name]})
        sums: dict[tuple[str, str], float] = {}
        for answer in answers:
            for row in answer["traffic"]:
                key = (row["purpose"], row["link"])
                sums[key] = sums.get(key, 0.0) + row["bytes"]
        phases = json.loads(json.dumps(answers[0]["phases_ms"]))
        self.timed[name].profile = {
            "phases_ms_of_rank_0": phases,
            "bytes_of_all_ranks": [{"purpose": p, "link": link, "bytes": b} for (p, link), b in sorted(sums.items())],
        }


def counted_bytes(timed: Timed, network: NetworkConfig) -> dict[str, float]:
    """Bytes a step that cross between hosts, over all hosts, as `ziggurat.parallel.exchange.traffic` counted them.

    A reduction over all ranks is counted by its payload P; as a ring it sends 2·P·(G − 1)/G over every link of the
    ring, and one link a host crosses. Tower modules are reduced inside a tower group; with towers on one host nothing
    of that crosses.
    """
    rows = timed.profile["bytes_of_all_ranks"]
    exchanged = sum(row["bytes"] for row in rows if row["link"] == "cross_host")
    ranks, hosts = network.num_ranks, network.hosts
    payload = sum(row["bytes"] for row in rows if row["purpose"] == "dense gradients") / ranks
    dense = hosts * 2 * payload * (ranks - 1) / ranks if hosts > 1 else 0.0
    return {"exchanges": exchanged, "dense_gradients": dense}
