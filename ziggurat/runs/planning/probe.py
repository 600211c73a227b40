"""probe: measure this machine, or the job that torchrun started, for planning. Resumable at any point.

    memory      one thread: copying, reading scattered rows                                      seconds
    disk        of a folder that is named: rows read and replaced in random order, on rank 0     seconds
    links       messages between two ranks, inside a host and between hosts     (many ranks)     seconds
    exchanges   embeddings among all ranks, random columns on each              (many ranks)     a third of the time
    lookups     groups of tables through our kernel, on rank 0                                   the rest of the time
    learning    a cost model from the above (`planning/costs/learned_training.py`)                     about a minute

Everything goes into one file (`Measurements`), written every few seconds. Called again with the same file, a probe goes
on where it stopped, adds measurements until the time is up, and trains again. A file of another machine, other versions
or another number of ranks is refused, because a cost model must not mix machines.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

from ziggurat.config import from_json, to_json
from ziggurat.errors import ConfigError
from ziggurat.ops.lookup.cpp import CppKernel
from ziggurat.parallel.agreement import Agreement
from ziggurat.parallel.exchange.link_meter import ExchangeMeter, MeterClock, message_ms
from ziggurat.parallel.job import job
from ziggurat.parallel.topology import Topology
from ziggurat.planning.costs.learned import LearnedCostModel
from ziggurat.planning.costs.learned_training import MIN_GROUPS, LearningConfig, train_cost_model
from ziggurat.planning.costs.lookup_meter import LookupMeter
from ziggurat.planning.costs.measurements import (
    ExchangeMeasurement,
    LinkMeasurement,
    LookupMeasurement,
    Measurements,
    MemoryMeasurement,
)
from ziggurat.planning.costs.probe_tables import DrawConfig, draw_group, draw_pool
from ziggurat.runs.planning.disk_probe import measured_disk
from ziggurat.training.report.progress import NoProgress, Progress
from ziggurat.training.report.startup import machine_lines, version_lines
from ziggurat.typed import checked

_SAVE_EVERY_S = 5.0  # about what is lost of a probe that is killed
_EXCHANGE_SHARE = 1 / 3  # of the time; lookups have the rest
_NUM_CUT_GROUPS = 16
_LINK_BYTES = (8, 1 << 12, 1 << 16, 1 << 20, 1 << 23)  # from what latency alone takes to what bandwidth alone takes


@dataclass(frozen=True, kw_only=True)
@checked
class ProbeConfig:
    """Settings of how much to measure.

    Args:
        minutes: of measuring, without learning; 0 measures nothing more and trains.
        max_groups: of tables in the file.
        max_exchanges: in the file.
        rounds: of each group; the fastest of each batch counts.
        disk: a folder, whose disk is measured; "" measures none.
        draw: tables and groups.
        learning: of the cost model.
    """

    minutes: float = 10.0
    max_groups: int = 4000
    max_exchanges: int = 600
    rounds: int = 2
    disk: str = ""
    draw: DrawConfig = field(default_factory=DrawConfig)
    learning: LearningConfig = field(default_factory=LearningConfig)


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """The results of a probe; on ranks other than 0 without a cost model.

    Args:
        measurements: as in the file.
        cost_model: the learned cost model; None where fewer than 50 groups are measured.
        is_first: True on the rank that writes files.
    """

    measurements: Measurements
    cost_model: LearnedCostModel | None
    is_first: bool = True


def probe(config: ProbeConfig, out: str | Path, *, progress: Progress | None = None) -> ProbeResult:
    """Measure until the time is up, then learn; collective over all ranks of the job.

    Args:
        config: how much.
        out: the file of measurements; the cost model is written beside it (see `cost_model_path`).
        progress: bars on rank 0.

    Raises:
        ConfigError: the file belongs to another machine, other versions, ranks or draws.
        FileError: the folder whose disk is to be measured takes no files.
    """
    threads = torch.get_num_threads()
    # One thread, so that rates are those of a core, and two measurements share nothing.
    torch.set_num_threads(1)
    try:
        with job():
            return _probe(config, Path(out), progress or NoProgress())
    finally:
        torch.set_num_threads(threads)


def cost_model_path(out: str | Path) -> Path:
    """Return the path of the cost model of a file of measurements, without its endings."""
    path = Path(out)
    return path.with_name(path.name.removesuffix(".json") + ".cost")


def _probe(config: ProbeConfig, out: Path, progress: Progress) -> ProbeResult:
    agreement = Agreement()
    topology = Topology.create()
    seconds = 60.0 * config.minutes
    bar = progress if agreement.is_first else NoProgress()
    # Read or begun on one rank, and then the same on all.
    begun = agreement.on_first(lambda: to_json(_begin(config, out, topology)))
    found = from_json(Measurements, begun, where=str(out))
    state = _State(out, found, is_first=agreement.is_first)
    if topology.world_size > 1:
        deadline = time.monotonic() + seconds * _EXCHANGE_SHARE
        started = time.monotonic()
        _measure_links(state, topology, bar)
        _measure_exchanges(state, topology, config, agreement=agreement, deadline=deadline, progress=bar)
        # What links and exchanges took, also where they were done before and took nothing.
        seconds -= time.monotonic() - started
    cost_model = None

    def on_first_rank() -> None:
        nonlocal cost_model
        _measure_memory(state, bar)
        _measure_disk(state, config.disk, bar)
        _measure_lookups(state, config, deadline=time.monotonic() + seconds, progress=bar)
        if len(state.found.lookups) >= MIN_GROUPS:
            bar.begin("learning", total=None)
            cost_model = train_cost_model(state.found, config=config.learning)
            cost_model.save(cost_model_path(out))
            bar.end()

    # The other ranks wait meanwhile, so that they do not disturb what is measured.
    agreement.on_first(on_first_rank)
    topology.close()
    agreement.close()
    return ProbeResult(measurements=state.found, cost_model=cost_model, is_first=agreement.is_first)


class _State:
    """The measurements so far, and when they were last written."""

    def __init__(self, path: Path, found: Measurements, *, is_first: bool) -> None:
        self.path = path
        self.found = found
        self._is_first = is_first
        self._saved = time.monotonic()

    def add(self, **changes: object) -> None:
        """Replace parts of the measurements; writes now and then."""
        self.found = replace(self.found, **changes)
        # Not at every measurement: a file of thousands would be written each time.
        if time.monotonic() - self._saved > _SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        """Write now."""
        if self._is_first:
            self.found.save(self.path)
        self._saved = time.monotonic()


def _begin(config: ProbeConfig, out: Path, topology: Topology) -> Measurements:
    """An empty file, or the one that is there, if it is of the same machine and settings."""
    # Where ranks share cores, the wall's clock would count the turns of others.
    shared = topology.ranks_per_host > len(os.sched_getaffinity(0))
    new = Measurements(
        machine=machine_lines()["machine"],
        versions=tuple(f"{name} {version}" for name, version in version_lines().items()),
        date=datetime.now(UTC).date().isoformat(),
        clock=(MeterClock.PROCESSOR if shared else MeterClock.WALL).value,
        ranks=topology.world_size,
        ranks_per_host=topology.ranks_per_host,
        batch_size=config.draw.num_samples // topology.world_size,
        draw=config.draw,
    )
    if not out.exists():
        return new
    old = Measurements.load(out)
    for name in ("machine", "versions", "ranks", "ranks_per_host", "draw", "clock"):
        found = getattr(old, name)
        expected = getattr(new, name)
        if found != expected:
            raise ConfigError(
                expected=f"measurements of this job: {name} = {expected}",
                found=f"{name} = {found}",
                where=str(out),
                ways_out=("write into another file: --out FILE", "remove the file, to measure anew"),
            )
    return old


# --------------------------------------------------------------------------------------------------------- measuring


def _measure_memory(state: _State, progress: Progress) -> None:
    """Rates of one thread, by processor time, the fastest of several."""
    if state.found.memory is not None:
        return
    progress.begin("memory", total=None)
    # 128 MiB, more than the caches of a core hold.
    source = torch.zeros(1 << 25)
    target = torch.zeros(1 << 25)
    # Scattered over the table, as ids are.
    rows = torch.randint(1 << 18, (1 << 16,))
    table = source[: 1 << 24].view(1 << 18, 64)
    picked = torch.empty(len(rows), 64)
    copy_s = _fastest_s(lambda: target.copy_(source))
    gather_s = _fastest_s(lambda: torch.index_select(table, 0, rows, out=picked))
    memory = MemoryMeasurement(
        copy_bytes_per_s=round(2 * 4 * source.numel() / copy_s), gather_bytes_per_s=round(4 * picked.numel() / gather_s)
    )
    state.add(memory=memory)
    state.save()
    progress.end()


def _measure_disk(state: _State, folder: str, progress: Progress) -> None:
    """Anew in each probe that names a folder: a disk may be another one, or busy."""
    if not folder:
        return
    progress.begin("disk", total=None)
    state.add(disk=measured_disk(folder))
    state.save()
    progress.end()


def _fastest_s(action: Callable[[], object], *, repeats: int = 7) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        # Other work of the machine only adds to a time: the shortest is the nearest.
        action()
        best = min(best, time.process_time() - start)
    return best


def _measure_links(state: _State, topology: Topology, progress: Progress) -> None:
    if state.found.links:
        # A file that was begun has them already.
        return
    partners = {"host": 1} if topology.ranks_per_host > 1 else {}
    if topology.num_hosts > 1:
        partners["cross_host"] = topology.ranks_per_host
    progress.begin("links", total=len(partners) * len(_LINK_BYTES))
    links = []
    for link, partner in partners.items():
        for num_bytes in _LINK_BYTES:
            taken_ms = message_ms(topology, partner=partner, num_bytes=num_bytes)
            links.append(LinkMeasurement(link=link, num_bytes=num_bytes, ms=round(taken_ms, 5)))
            progress.update(len(links), note=f"{link} {num_bytes:,} bytes {taken_ms:.3f} ms")
    state.add(links=tuple(links))
    progress.end()


def _measure_exchanges(
    state: _State,
    topology: Topology,
    config: ProbeConfig,
    *,
    agreement: Agreement,
    deadline: float,
    progress: Progress,
) -> None:
    """Random columns on each rank; with the wall's clock also random starts, as after uneven lookups."""
    clock = MeterClock(state.found.clock)
    meter = ExchangeMeter(topology, batch_size=state.found.batch_size, clock=clock)
    progress.begin("exchanges", total=config.max_exchanges)
    # Rank 0 says when it is enough: a rank that stopped by its own clock would leave the others waiting.
    done = agreement.gather(len(state.found.exchanges))[0]
    while done < config.max_exchanges and agreement.gather(time.monotonic() < deadline)[0]:
        columns, starts = _draw_exchange(config.draw.seed, done, topology.world_size, clock=clock)
        forward, backward = meter.measure(columns, starts_ms=starts)
        entry = ExchangeMeasurement(
            columns=columns,
            starts_ms=starts,
            forward_ms=tuple(round(value, 5) for value in forward),
            backward_ms=tuple(round(value, 5) for value in backward),
        )
        state.add(exchanges=(*state.found.exchanges, entry))
        done += 1
        progress.update(done, note=f"forward {max(forward):.2f} ms, backward {max(backward):.2f} ms")
    state.save()
    progress.end()


def _draw_exchange(
    seed: int, index: int, ranks: int, *, clock: MeterClock
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Columns from balanced to as uneven as plans get; starts up to 5 ms apart."""
    # By its index alone: a probe that goes on draws what one long one would have drawn.
    generator = np.random.default_rng([seed, 2, index])
    mean = generator.uniform(16, 640)
    spread = generator.uniform(0, 1)
    shares = generator.uniform(1 - spread, 1 + spread, ranks)
    columns = tuple(int(4 * round(mean * share / 4)) for share in shares)
    starts = generator.uniform(0, generator.uniform(0, 5), ranks)
    if clock is MeterClock.PROCESSOR:
        return columns, (0.0,) * ranks
    return columns, tuple(float(value) for value in (starts - starts.min()).round(3))


def _measure_lookups(state: _State, config: ProbeConfig, *, deadline: float, progress: Progress) -> None:
    done = len(state.found.lookups)
    draw = config.draw
    if done >= config.max_groups or time.monotonic() >= deadline:
        return
    progress.begin("groups of tables", total=config.max_groups)
    meter = LookupMeter(CppKernel(), arena_mib=draw.group_mib, rounds=config.rounds)
    if not state.found.cut_factor:
        state.add(cut_factor=_cut_factor(meter, draw, num_groups=min(_NUM_CUT_GROUPS, config.max_groups)))
    new: list[LookupMeasurement] = []
    pool_number = -1
    pool = ()
    while done < config.max_groups and time.monotonic() < deadline:
        if done // draw.groups_per_pool != pool_number:
            pool_number = done // draw.groups_per_pool
            pool = draw_pool(draw, pool_number)
        group = draw_group(draw, pool, done)
        times = meter.measure([(pool[table], dim) for table, dim in group])
        entry = LookupMeasurement(
            tables=tuple(table for table, _ in group),
            dims=tuple(dim for _, dim in group),
            forward_ms=round(times.forward_ms, 5),
            total_ms=round(times.total_ms, 5),
        )
        new.append(entry)
        done += 1
        progress.update(done, note=f"{len(group)} tables {times.total_ms:.2f} ms")
        # Each `add` copies all lookups before, so that it is not called for every one.
        if len(new) == 16:
            state.add(lookups=(*state.found.lookups, *new))
            new.clear()
    state.add(lookups=(*state.found.lookups, *new))
    state.save()
    progress.end()


def _cut_factor(meter: LookupMeter, draw: DrawConfig, *, num_groups: int) -> float:
    """Measure how much longer a step of tables that are cut by columns takes; the median of some groups."""
    pool = draw_pool(draw, 0)
    ratios = []
    for index in range(num_groups):
        tables = [(pool[table], dim) for table, dim in draw_group(draw, pool, index)]
        ratios.append(meter.measure_cut(tables) / max(meter.measure(tables).total_ms, 1e-6))
    return round(float(np.median(ratios)), 4)
