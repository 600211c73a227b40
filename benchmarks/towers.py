"""Claim: towers train several times faster than TorchRec's flat models where links between hosts are slow.

An emulated data centre (`datacentre/`): 2 hosts × 2 ranks with links of 1 Gbit/s, Criteo's shape (13 numbers, 26 ids),
batch 1024 a rank, DLRM and DCNv2 at D = 64 and 128. In one run, in turns:

    TorchRec flat      DistributedModelParallel, the best of table-wise and table-row-wise, with and without its
                       pipeline; FP32; fused row-wise Adagrad
    ours, flat         FP32 and BF16 on the wire
    ours, towers       2 towers of 2 ranks at compression 4 and 16, FP32 and BF16 on the wire between hosts

"2_parts" cuts a batch in two, so that one part computes while the other travels (`ziggurat.parallel.pipeline`).

"bf16" means that embeddings between hosts and gradients of the dense network travel as BF16. Everybody computes in
FP32, unless the machine multiplies BF16 in hardware.

`limit_ms` is what no schedule can beat: the larger of the step with unlimited links (compute alone) and of the bytes
that leave a host over the rate of its link. Where namespaces may not be made, plain local ranks are timed, and a step
on slow links is predicted as local time + bytes / rate; the report says so.

Options: --rate MBIT --hosts H --ranks R --racks N --rack-rate MBIT --batch B --models dlrm,dcn_v2 --dims 64,128
--rounds N --plain (no emulation) --no-extras
"""

from __future__ import annotations

import argparse
import signal
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.datacentre.links import measure_link
from benchmarks.datacentre.network import Network, NetworkConfig, PlainNetwork, open_network
from benchmarks.harness import percentiles, say
from benchmarks.limits import probe_bf16
from benchmarks.our_ranks import Variant
from benchmarks.report import Report
from benchmarks.towers_plot import cases_table, plot_steps, profile_table
from benchmarks.towers_rounds import PEERS, QUICK, RoundsConfig, Timed, counted_bytes, measure_side_by_side
from benchmarks.workload import ModelKind, Workload
from ziggurat.parallel.dense import Reduction
from ziggurat.parallel.exchange.wire import WireFormat
from ziggurat.training.config import Precision

NUM_ROWS, NUM_BATCHES = 20_000, 8
COMPRESSIONS = (4, 16)
SETTINGS = (
    *((compression, wire, "") for compression in COMPRESSIONS for wire in ("fp32", "bf16")),
    (4, "bf16", "_2_parts"),
)
GOALS = {  # against TorchRec, by D, compression and wire
    (64, 4, "bf16"): 2.5,
    (64, 16, "bf16"): 3.0,
    (64, 4, "fp32"): 1.9,
    (128, 4, "bf16"): 4.0,
    (128, 16, "bf16"): 5.0,
    (128, 4, "fp32"): 2.5,
}
GOALS_FLAT = {64: 1.5, 128: 2.0}  # against our own flat with BF16 on the wire
GOAL_LIMIT = 1.2
GOAL_SMALL_BATCH = 1.3


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Options of this benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="ziggurat bench towers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=float, default=1000.0, help="Mbit/s of a host's link (default: %(default)g)")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="of each host (default: %(default)s)")
    parser.add_argument("--racks", type=int, default=1)
    parser.add_argument("--rack-rate", type=float, default=0.0, help="Mbit/s of a rack's link; 0: no limit")
    parser.add_argument("--batch", type=int, default=1024, help="of a rank (default: %(default)s)")
    parser.add_argument("--models", default="dlrm,dcn_v2")
    parser.add_argument("--dims", default="64,128")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--rows", type=int, default=NUM_ROWS, help="of a table (default: %(default)s)")
    parser.add_argument("--plain", action="store_true", help="plain local ranks, predicted times")
    parser.add_argument("--no-extras", action="store_true", help="leave out 200 Mbit/s, 4 hosts, racks, small batches")
    return parser.parse_args(list(arguments))


def run(*, quick: bool, options: argparse.Namespace | None = None) -> Report:
    """Measure and report."""
    options = options or parse_options([])
    for number in (signal.SIGTERM, signal.SIGINT):  # leave through the context managers, in the background too
        signal.signal(number, signal.default_int_handler)
    bench = TowersBenchmark(options, quick=quick)
    try:
        bench.measure()
    except KeyboardInterrupt:
        if not bench.cases:
            raise
        bench.report.skipped.append("interrupted: what was measured until then")
    return bench.finished()


class TowersBenchmark:
    """The benchmark and what it has found so far."""

    def __init__(self, options: argparse.Namespace, *, quick: bool) -> None:
        self.options, self.quick = options, quick
        self.rounds = QUICK if quick else RoundsConfig()
        if options.rounds:
            self.rounds = replace(self.rounds, rounds=options.rounds)
        probe = probe_bf16()
        self.computes_bf16 = probe.pays
        self.cases: list[dict[str, Any]] = []
        self.runs: list[dict[str, Any]] = []
        self.report = Report(
            benchmark="towers",
            claim="A training step on an emulated data centre: towers against flat models, ours and TorchRec's.",
            command="ziggurat bench towers",
            extra={"cases": self.cases, "runs": self.runs},
        )
        self.report.notes.append(f"bf16 variants compute in {'BF16' if probe.pays else 'FP32'}: {probe.reason}")

    def measure(self) -> None:
        """Everything that the options ask for."""
        options = self.options
        main = NetworkConfig(
            hosts=options.hosts,
            ranks_per_host=options.ranks,
            racks=options.racks,
            rate_mbit=options.rate,
            rack_rate_mbit=options.rack_rate,
        )
        workloads = [
            Workload(
                model=ModelKind(model),
                dim=int(dim),
                batch_size=options.batch,
                num_rows=options.rows,
                num_batches=NUM_BATCHES,
            )
            for model in options.models.split(",")
            for dim in options.dims.split(",")
        ]
        for workload in workloads[:1] if self.quick else workloads:
            self._compare(main, workload)
        if not options.no_extras:
            self._extras(main, workloads[0])

    def finished(self) -> Report:
        """The report, with tables and plot of what was measured."""
        self.report.tables += [cases_table(self.cases), profile_table(self.runs)]
        self.report.plots.append(("towers.png", lambda path: plot_steps(self.cases, path)))
        return self.report

    def _extras(self, main: NetworkConfig, workload: Workload) -> None:
        self._small_batches(workload)
        if self.quick:
            return
        self._compare(replace(main, rate_mbit=200.0), workload, suffix="_200mbit")
        four = NetworkConfig(hosts=4, ranks_per_host=1, rate_mbit=self.options.rate)
        self._compare(four, workload, suffix="_4_hosts")
        self._compare(replace(four, racks=2, rack_rate_mbit=self.options.rate), workload, suffix="_2_racks")

    def _compare(self, config: NetworkConfig, workload: Workload, *, suffix: str = "") -> None:
        variants = variants_for(config, computes_bf16=self.computes_bf16)
        with open_network(config, emulate=not self.options.plain) as network:
            checked = self._self_check(network)
            timed = measure_side_by_side(
                network, workload, variants=variants, rates_mbit=[config.rate_mbit], config=self.rounds
            )[config.rate_mbit]
            goals = not suffix and (config.hosts, config.ranks_per_host, config.racks) == (2, 2, 1)
            self._add(config, workload, timed, network, tag=suffix, goals=goals)
            self.runs[-1]["links"] = checked

    def _self_check(self, network: Network | PlainNetwork) -> dict[str, Any]:
        """Measure what links carry, before anything is timed on them."""
        config = network.config
        if not network.is_emulated:
            note = f"no emulated links ({network.reason}): times on them are predicted"
            if note not in self.report.skipped:
                self.report.skipped.append(note)
            return {"emulated": False, "reason": network.reason}
        last = config.hosts - 1
        measured = [
            measure_link(network, source=source, target=target, rate_mbit=config.rate_mbit)
            for source, target in ((0, last), (last, 0))
        ]
        say(f"  links: {config.rate_mbit:g} Mbit/s asked for, {' and '.join(f'{m:.0f}' for m in measured)} measured")
        self.report.notes.append(
            f"{config.describe()}: a link carries {' and '.join(f'{m:.0f}' for m in measured)} Mbit/s (plain sockets)"
        )
        return {"emulated": True, "asked_mbit": config.rate_mbit, "measured_mbit": measured}

    def _add(
        self,
        config: NetworkConfig,
        workload: Workload,
        timed: dict[str, Timed],
        network: Network | PlainNetwork,
        *,
        tag: str,
        goals: bool,
    ) -> None:
        if not network.is_emulated:
            _predict(timed, config)
        found = cases_of(config, workload, timed, tag=tag, goals=goals)
        for case in found:
            case["emulated"] = network.is_emulated
            say(
                f"    {case['name']}: {case['flat_torchrec_ms']:.0f} / {case['towers_ms']:.0f} ms = {case['ratio']:.2f}"
            )
        self.cases += found
        self.runs.append(
            {
                "network": config.describe(),
                "workload": workload.to_json(),
                "name": f"{workload.case}{tag}",
                "variants": [each.to_json() for each in timed.values()],
            }
        )

    def _small_batches(self, workload: Workload) -> None:
        """Flat against flat at batch 128 a rank on unlimited loopback: what a step costs beside its work."""
        config = NetworkConfig(hosts=1, ranks_per_host=4, rate_mbit=0.0)
        small = replace(workload, batch_size=128)
        with open_network(config, emulate=not self.options.plain) as network:
            timed = measure_side_by_side(
                network, small, variants=[Variant(name="flat_fp32")], rates_mbit=[0.0], config=self.rounds
            )[0.0]
        case = _flat_case(timed, name=f"{workload.case}_torchrec_flat_batch128")
        self.cases.append(case)
        self.runs.append(
            {
                "network": "4 ranks on one host",
                "workload": small.to_json(),
                "name": case["name"],
                "variants": [each.to_json() for each in timed.values()],
                "links": {"emulated": network.is_emulated},
            }
        )
        say(f"    {case['name']}: {case['flat_torchrec_ms']:.0f} / {case['flat_ms']:.0f} ms = {case['ratio']:.2f}")


def variants_for(config: NetworkConfig, *, computes_bf16: bool = False) -> list[Variant]:
    """Ours on this data centre: a tower a host, or a rack if there are several; flat beside them.

    Args:
        config: of the data centre.
        computes_bf16: the bf16 variants also compute in it.
    """
    towers = config.racks if config.racks > 1 else config.hosts
    tower_size = config.num_ranks // towers
    bf16: dict[str, Any] = {"wire": WireFormat.BF16, "reduction": Reduction.BF16}
    if computes_bf16:
        bf16["compute"] = Precision.BF16
    found = [Variant(name="flat_fp32"), Variant(name="flat_bf16", **bf16)]
    for compression in COMPRESSIONS:
        for wire, settings in (("fp32", {}), ("bf16", bf16)):
            name = f"compression{compression}_{wire}"
            shape: dict[str, Any] = {"towers": towers, "tower_size": tower_size, "compression": float(compression)}
            found.append(Variant(name=name, **shape, **settings))
    overlapped = next(each for each in found if each.name == "compression4_bf16")
    return [*found, replace(overlapped, name="compression4_bf16_2_parts", num_parts=2)]


def cases_of(
    config: NetworkConfig, workload: Workload, timed: dict[str, Timed], *, tag: str, goals: bool
) -> list[dict[str, Any]]:
    """The comparisons of one workload on one network."""
    peer = _best_peer(timed)
    found = []
    for compression, wire, setting in SETTINGS:
        name = f"compression{compression}_{wire}{setting}"
        if name in timed:
            towers, flat = timed[name], timed[f"flat_{wire}"]
            ratio, ratio_flat = _ratio(peer, towers), _ratio(flat, towers)
            limit = _limit(towers, config)
            goal = GOALS.get((workload.dim, compression, wire), 0.0) if goals else 0.0
            goal_flat = GOALS_FLAT.get(workload.dim, 0.0) if goals and wire == "bf16" else 0.0
            found.append(
                {
                    "name": f"{workload.case}_torchrec_{name}{tag}",
                    "network": config.describe(),
                    "flat_torchrec_ms": peer.median_ms,
                    "flat_torchrec": peer.name,
                    "flat_ms": flat.median_ms,
                    "towers_ms": towers.median_ms,
                    "ratio": ratio[0],
                    "ratio_p10": ratio[1],
                    "ratio_p90": ratio[2],
                    "goal": goal,
                    "verdict": _verdict(ratio[0], goal),
                    "ratio_flat": ratio_flat[0],
                    "goal_flat": goal_flat,
                    "verdict_flat": _verdict(ratio_flat[0], goal_flat),
                    "cross_host_bytes": {
                        "flat": counted_bytes(flat, config),
                        "towers": counted_bytes(towers, config),
                    },
                    "link_bytes": {each.name: _median(each.link_bytes) for each in (peer, flat, towers)},
                    **limit,
                    "limit_factor": towers.median_ms / limit["limit_ms"],
                    "goal_limit_factor": GOAL_LIMIT if goals else 0.0,
                }
            )
    return found


def _limit(towers: Timed, config: NetworkConfig) -> dict[str, float]:
    """What no schedule can beat: compute alone, or the bytes of the busiest link over its rate."""
    counted = counted_bytes(towers, config)
    link_bytes = _median(towers.link_bytes) or sum(counted.values()) / config.hosts
    bytes_ms = link_bytes * 8 / (config.rate_mbit * 1e6) * 1e3 if config.rate_mbit else 0.0
    return {"limit_ms": max(towers.compute_ms, bytes_ms), "compute_ms": towers.compute_ms, "bytes_ms": bytes_ms}


def _predict(timed: dict[str, Timed], config: NetworkConfig) -> None:
    """Local time + bytes / rate, in place; TorchRec's flat models send what our flat FP32 model sends."""
    for each in timed.values():
        known = each if each.profile else timed["flat_fp32"]
        link_bytes = sum(counted_bytes(known, config).values()) / config.hosts
        wire_ms = link_bytes * 8 / (config.rate_mbit * 1e6) * 1e3 if config.rate_mbit else 0.0
        each.free_ms = list(each.step_ms)
        each.step_ms = [local_ms + wire_ms for local_ms in each.step_ms]


def _flat_case(timed: dict[str, Timed], *, name: str) -> dict[str, Any]:
    peer, flat = _best_peer(timed), timed["flat_fp32"]
    ratio = _ratio(peer, flat)
    return {
        "name": name,
        "network": "4 ranks on one host, no limit",
        "flat_torchrec_ms": peer.median_ms,
        "flat_torchrec": peer.name,
        "flat_ms": flat.median_ms,
        "ratio": ratio[0],
        "ratio_p10": ratio[1],
        "ratio_p90": ratio[2],
        "goal": GOAL_SMALL_BATCH,
        "verdict": _verdict(ratio[0], GOAL_SMALL_BATCH),
    }


def _best_peer(timed: dict[str, Timed]) -> Timed:
    return min((timed[name] for name in PEERS if name in timed), key=lambda each: each.median_ms)


def _ratio(peer: Timed, ours: Timed) -> tuple[float, float, float]:
    """Median, p10 and p90 over rounds of peer / ours in the same round."""
    ratios = [theirs / mine for theirs, mine in zip(peer.step_ms, ours.step_ms, strict=True)]
    return statistics.median(ratios), *percentiles(ratios)


def _verdict(value: float, goal: float) -> str:
    return "" if not goal else ("met" if value >= goal else "missed")


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0
