"""Links between hosts for the demo: emulated for the runs of this machine, simulated for GPUs that it does not have.

    emulated     step = measured step + bytes that leave a host / rate of its link
    simulated    step of a larger DLRM by `planning/simulator`, on hosts of 8 A100 with ports of 200 Gbit/s

The four ranks of the demo are processes of one machine, and what they send each other stays in its memory. So the
measured step has no link in it, and towers, whose purpose is to send less, only cost their computation. The first table
adds what a link would take, from bytes that were counted; nothing overlaps in it, which is the worst case of either
model. The model is small (16 columns a table), so that a minute trains it, and a CPU computes for tens of milliseconds
what it then sends in one; GPUs compute as much in a tenth of the time. The second table is for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ziggurat.features.inputs import InputSpec, LabelSpec, SingleSpec, TableSpec
from ziggurat.models import DLRMConfig
from ziggurat.parallel.exchange.wire import WireFormat
from ziggurat.plan import Plan, TablePlacement
from ziggurat.planning.cluster.catalogue import named_cluster
from ziggurat.planning.plan_model import ModelToPlace
from ziggurat.planning.simulator.step_simulator import StepSimulator
from ziggurat.recipes.catalogue import mlperf_dlrm
from ziggurat.runs.planning.plan_run import neighbours, step_settings

GBIT_PER_S = (10.0, 1.0, 0.1)
CLUSTERS = ("a100x16", "a100x64")
NUM_TABLES = 64
BATCH_SIZE = 8192
COMPRESSION = 4
_ROWS = 1_000_000
_BLOCKS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True, kw_only=True)
class LinkRow:
    """A step of the flat model and of the one with towers over one kind of link.

    Args:
        link: for people.
        flat_ms: a step of the flat model.
        towers_ms: a step of the model with towers.
    """

    link: str
    flat_ms: float
    towers_ms: float

    @property
    def verdict(self) -> str:
        """Say which is faster, and how many times."""
        ratio = self.flat_ms / self.towers_ms
        if round(ratio, 2) == 1.0:
            return "equal"
        return f"towers {ratio:.2f} times as fast" if ratio > 1.0 else f"flat {1 / ratio:.2f} times as fast"


def bytes_out_of_a_host(traffic: Mapping[str, Any], *, num_hosts: int) -> float:
    """Return the bytes that leave each host in a step: messages to other hosts, and its share of sums.

    A sum over n ranks in a ring, host after host, crosses each link with 2·(n − 1)/n of what a rank adds.

    Args:
        traffic: of a run, as `TRAFFIC` reads it.
        num_hosts: of the run.
    """
    num_ranks = traffic["ranks"]
    found = 0.0
    for row in traffic["rows"]:
        if row["link"] == "cross_host":
            found += row["bytes_per_step"] / num_hosts
        elif row["link"] == "reduced":
            found += 2 * (num_ranks - 1) / num_ranks * row["bytes_per_step"] / num_ranks
    return found


def emulated(flat: tuple[float, float], towers: tuple[float, float]) -> list[LinkRow]:
    """Return steps over links of `GBIT_PER_S`, after that of this machine.

    Args:
        flat: milliseconds of a measured step, and bytes that leave a host in it.
        towers: the same of the model with towers.
    """
    rows = [LinkRow(link="measured: memory of this machine", flat_ms=flat[0], towers_ms=towers[0])]
    for rate in GBIT_PER_S:
        flat_ms, towers_ms = (step_ms + 8e3 * size / (rate * 1e9) for step_ms, size in (flat, towers))
        rows.append(LinkRow(link=f"emulated: {rate:g} Gbit/s a host", flat_ms=flat_ms, towers_ms=towers_ms))
    return rows


def even_rate(flat: tuple[float, float], towers: tuple[float, float]) -> float:
    """Return the rate of a link in Gbit/s below which towers are faster; 0 where they are at none, infinity at all.

    Args:
        flat: as in `emulated`.
        towers: the same of the model with towers.
    """
    saved_bytes = flat[1] - towers[1]
    lost_ms = towers[0] - flat[0]
    if saved_bytes <= 0:
        return 0.0 if lost_ms >= 0 else float("inf")
    return 8e3 * saved_bytes / lost_ms / 1e9 if lost_ms > 0 else float("inf")


def explained(flat: tuple[float, float], towers: tuple[float, float]) -> list[str]:
    """Say what the rows of `emulated` and `simulated` are, and where towers win on this machine.

    Args:
        flat: as in `emulated`.
        towers: the same of the model with towers.
    """
    rate = even_rate(flat, towers)
    where = f"towers are faster on links below {rate:.2g} Gbit/s" if 0 < rate < float("inf") else "see above"
    if rate == float("inf"):
        where = "towers are faster on every link"
    elif not rate:
        where = "towers are faster on no link"
    return [
        "measured: 4 processes share this machine's cores, and what they send stays in its memory",
        f"emulated: the measured step, and the counted bytes of a host over the rate of its link, one after the other; "
        f"here {where}, as a small model computes long for what it sends",
        f"simulated: DLRM of MLPerf's layers, {NUM_TABLES} tables × 128, {BATCH_SIZE:,} samples a GPU, both send BF16, "
        f"compression {COMPRESSION} (docs/guides/planning.md holds the simulator against measured steps)",
    ]


def simulated() -> list[LinkRow]:
    """Return steps of MLPerf's DLRM with 64 tables of 128 columns, dealt out evenly; both models send BF16."""
    names = [f"t{number}" for number in range(NUM_TABLES)]
    inputs = InputSpec(
        tables=tuple(TableSpec(name=name, num_rows=_ROWS) for name in names),
        single=tuple(SingleSpec(name=name, table=name) for name in names),
        labels=(LabelSpec(name="click"),),
    )
    config = mlperf_dlrm()
    assert isinstance(config.model, DLRMConfig)
    module = replace(config.model.tower_module, compression=COMPRESSION)
    wire = replace(config.parallel.wire, between_towers=WireFormat.BF16)
    config = replace(
        config,
        model=replace(config.model, tower_module=module),
        parallel=replace(config.parallel, wire=wire),
    )
    rows: list[LinkRow] = []
    for name in CLUSTERS:
        cluster = named_cluster(name)
        step_ms: list[float] = []
        for towers in (None, neighbours(inputs, most=cluster.hosts)):
            model = ModelToPlace(config=config.model, inputs=inputs, batch_size=BATCH_SIZE, towers=towers)
            settings = step_settings(replace(config, towers=towers), cluster)
            # Neighbouring tables lie on neighbouring ranks, so those of a tower lie on its host.
            per_rank = NUM_TABLES // cluster.world_size
            places = tuple(
                TablePlacement(table=table, ranks=(number // per_rank,)) for number, table in enumerate(names)
            )
            plan = Plan(world_size=cluster.world_size, tables=places, towers=towers)
            timeline = StepSimulator(cluster, model.work, settings=settings).timeline(plan)
            step_ms.append(1e3 * timeline.step_s)
        link = f"simulated: {cluster.hosts} hosts × {cluster.devices_per_host} A100"
        rows.append(LinkRow(link=link, flat_ms=step_ms[0], towers_ms=step_ms[1]))
    return rows


def bars(values: Sequence[float], *, width: int = 30) -> list[str]:
    """Draw a bar for each value, the largest of which is `width` long."""
    largest = max(values, default=0.0) or 1.0
    found: list[str] = []
    for value in values:
        eighths = round(8 * width * value / largest)
        found.append((_BLOCKS[8] * (eighths // 8) + _BLOCKS[eighths % 8]).strip() or _BLOCKS[1])
    return found
