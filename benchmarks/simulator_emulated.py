"""Predictions for the emulated data centre: its hosts as a cluster, our benchmark's plans, and four fitted constants.

A rank there is a share of two cores. Known before: the rates of the links (as set, less headers), which plan and which
messages. Fitted, to times without limited links alone: matrix rate, memory rate, packing rate, time of a step beside
its work. Assumed: what gloo takes to start an exchange.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.datacentre.network import NetworkConfig
from benchmarks.our_ranks import Variant, split_features, tower_module
from benchmarks.ours import config_of, inputs_of
from benchmarks.report import REPORTS
from benchmarks.towers import variants_for
from benchmarks.workload import Workload
from ziggurat.plan import Plan
from ziggurat.planning.cluster.cluster import Cluster, Device, Link, Port
from ziggurat.planning.placement import place_tables
from ziggurat.planning.simulator.step_simulator import StepSettings, StepSimulator
from ziggurat.planning.simulator.step_work import StepWork, step_work

START = {"flop_per_s": 30e9, "memory_bytes_per_s": 3e9, "packing_bytes_per_s": 4e8, "step_s": 0.03}
ASSUMED = {"loopback_bytes_per_s": 1e9, "latency_s": 1.5e-3, "message_s": 2e-4, "payload": 0.94}
FITTED_VARIANTS = ("compression4_fp32", "compression16_bf16")  # on two hosts, links without limit
_WIRE_BYTES = {"fp32": 4.0, "bf16": 2.0}
_NETWORKS = {
    "2 hosts × 2 ranks, 1000 Mbit/s a host": NetworkConfig(hosts=2, ranks_per_host=2, rate_mbit=1000.0),
    "4 hosts × 1 ranks, 1000 Mbit/s a host": NetworkConfig(hosts=4, ranks_per_host=1, rate_mbit=1000.0),
    "4 ranks on one host": NetworkConfig(hosts=1, ranks_per_host=4, rate_mbit=0.0),
}


def newest_whole_report() -> Path:
    """Return the newest committed `towers` report that measured all the networks that are predicted."""
    found = sorted(REPORTS.glob("*/towers.json"), key=lambda path: path.parent.name[-10:], reverse=True)
    return next(
        path for path in found if {run["network"] for run in json.loads(path.read_text())["runs"]} >= set(_NETWORKS)
    )


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One variant of the towers benchmark and how long its steps took.

    Args:
        name: of run and variant.
        network: hosts and rate.
        workload: model and batch.
        variant: wire, towers, parts.
        step_ms: median, links limited.
        free_ms: median without limit; 0 where it was not measured.
    """

    name: str
    network: NetworkConfig
    workload: Workload
    variant: Variant
    step_ms: float
    free_ms: float

    @cached_property
    def planned(self) -> tuple[StepWork, Plan]:
        """What a rank does, and where the tables are."""
        workload, variant = self.workload, self.variant
        inputs, config = inputs_of(workload), config_of(workload)
        towers = split_features(workload, num_towers=variant.towers) if variant.towers else None
        if towers is not None:
            config = replace(config, tower_module=tower_module(workload, variant))
        world, size = self.network.num_ranks, variant.tower_size
        plan = place_tables(inputs, dim=workload.dim, world_size=world, towers=towers, tower_size=size)
        return step_work(config, inputs, batch_size=workload.batch_size, towers=towers), plan

    @property
    def is_fitted(self) -> bool:
        """True if its time without limit decides the constants."""
        is_main = self.network.hosts == 2 and self.variant.name in FITTED_VARIANTS
        return self.network.hosts == 1 or (is_main and self.free_ms > 0)

    def predicted_ms(self, constants: dict[str, float], *, limited: bool = True) -> float:
        """Of a step."""
        work, plan = self.planned
        variant = self.variant
        settings = StepSettings(
            between_bytes=_WIRE_BYTES[variant.wire.value],
            in_tower_bytes=_WIRE_BYTES[variant.wire_in_tower.value],
            reduction_bytes=_WIRE_BYTES[variant.reduction.value],
            num_parts=variant.num_parts,
        )
        cluster = emulated_cluster(self.network, constants, limited=limited)
        return 1e3 * StepSimulator(cluster, work, settings=settings).timeline(plan).step_s


def read_settings(report: dict[str, Any]) -> list[Setting]:
    """Our variants in a report of the towers benchmark, on networks that a `Cluster` can describe (no racks)."""
    found = []
    for run in report["runs"]:
        network = _NETWORKS.get(run["network"])
        if network is None:
            continue
        known = {"flat_fp32": Variant(name="flat_fp32")}
        known |= {each.name: each for each in variants_for(network)} if network.hosts > 1 else {}
        for entry in run["variants"]:
            if entry["name"] in known:
                found.append(
                    Setting(
                        name=f"{run['name']} {entry['name']}",
                        network=network,
                        workload=Workload.from_json(run["workload"]),
                        variant=known[entry["name"]],
                        step_ms=entry["step_ms"]["median"],
                        free_ms=entry["unlimited_links_ms"] or 0.0,
                    )
                )
    return found


def emulated_cluster(network: NetworkConfig, constants: dict[str, float], *, limited: bool = True) -> Cluster:
    """The hosts as a planner sees them; a host's ranks share its link."""
    free = not limited or not network.rate_mbit
    rate = ASSUMED["loopback_bytes_per_s"] * network.ranks_per_host if free else network.rate_mbit * 1e6 / 8
    starts = {"latency_s": ASSUMED["latency_s"], "message_s": ASSUMED["message_s"]}
    return Cluster(
        name="emulated",
        hosts=network.hosts,
        devices_per_host=network.ranks_per_host,
        device=Device(
            name="share of two cores",
            memory_bytes=4 * 2**30,
            memory_bytes_per_s=constants["memory_bytes_per_s"],
            gather_efficiency=0.5,
            fp32_flop_per_s=constants["flop_per_s"],
            matmul_efficiency=1.0,
            launch_s=2e-5,
            packing_bytes_per_s=constants["packing_bytes_per_s"],
            step_s=constants["step_s"],
        ),
        inside=Link(bytes_per_s=ASSUMED["loopback_bytes_per_s"], efficiency=1.0, **starts),
        between=Link(bytes_per_s=rate, efficiency=ASSUMED["payload"], port=Port.HOST, **starts),
    )


def fitted_constants(settings: Sequence[Setting]) -> dict[str, float]:
    """Four constants that predict the fitted settings' times without limited links best (least squares of logs)."""
    from scipy.optimize import minimize

    chosen = [setting for setting in settings if setting.is_fitted]

    def loss(logs: Sequence[float]) -> float:
        constants = {name: math.exp(value) for name, value in zip(START, logs, strict=True)}
        errors = [
            math.log(setting.predicted_ms(constants, limited=False) / (setting.free_ms or setting.step_ms))
            for setting in chosen
        ]
        return sum(error * error for error in errors)

    start = [math.log(value) for value in START.values()]
    best = minimize(loss, start, method="Nelder-Mead", options={"maxiter": 300, "fatol": 1e-6})
    return {name: math.exp(value) for name, value in zip(START, best.x, strict=True)}


def emulated_cases(settings: Sequence[Setting], constants: dict[str, float]) -> list[dict[str, Any]]:
    """Every setting on its limited links."""
    found = []
    for setting in settings:
        predicted = setting.predicted_ms(constants)
        fitted = setting.is_fitted and setting.network.hosts == 1
        note = "its compute-alone time was fitted, this time was not" if setting.is_fitted and not fitted else ""
        found.append(
            {
                "group": "emulated",
                "name": setting.name,
                "unit": "ms",
                "known": setting.step_ms,
                "predicted": predicted,
                "error": predicted / setting.step_ms - 1,
                "fitted": fitted,
                "unseen": not setting.is_fitted,
                "note": note,
            }
        )
    return found
