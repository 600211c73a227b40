"""rank_order: probe the job that torchrun started, find an order of its ranks, and read one for a run.

    all ranks   every pair, in rounds ─► rank 0: hosts, racks, the cheapest order ─► all: an all-reduce in both orders

The found order is kept only if the all-reduce is faster in it than in the order that the job has without: by the times
of pairs alone, noise may look like a gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypedDict

from ziggurat.config import JSON, from_json, to_json
from ziggurat.errors import ConfigError, TopologyError
from ziggurat.parallel.agreement import Agreement
from ziggurat.parallel.exchange.pair_meter import measure_orders, measure_pairs, where_this_rank_is
from ziggurat.parallel.job import job
from ziggurat.parallel.topology import Topology
from ziggurat.planning.rank_order.algorithms import algorithm_named
from ziggurat.planning.rank_order.pair_times import PairTimes
from ziggurat.planning.rank_order.rank_order import (
    Machine,
    MeasuredOrders,
    OrderNow,
    RankOrder,
    compare,
    make_order,
)
from ziggurat.planning.rank_order.search import SearchConfig
from ziggurat.training.report.progress import NoProgress, Progress
from ziggurat.typed import checked

_NO_LIMIT_DAYS = 1e5


@dataclass(frozen=True, kw_only=True)
@checked
class OrderProbeConfig:
    """Settings of a probe of all pairs of ranks.

    Args:
        algorithm: name of the collective that the order is for; one that an order helps.
        num_bytes: of the buffer of every rank that the order is for.
        long_bytes: of a long message of the probe.
        measured_bytes: of the all-reduce that compares the two orders.
        repeats: of that all-reduce, in each order.
        valid_days: how long a run may use the order.
        search: how long to search.
    """

    algorithm: str = "ring"
    num_bytes: int = 16 << 20
    long_bytes: int = 1 << 20
    measured_bytes: int = 4 << 20
    repeats: int = 5
    valid_days: float = 7.0
    search: SearchConfig = field(default_factory=SearchConfig)


@dataclass(frozen=True, kw_only=True)
class ProbedOrder:
    """The result of a probe.

    Args:
        order: as it is to be written.
        compared: how the order of the last probe fares; None without one.
        is_first: True on the rank that writes.
    """

    order: RankOrder
    compared: OrderNow | None
    is_first: bool


def probe_order(config: OrderProbeConfig, *, last: str | Path = "", progress: Progress | None = None) -> ProbedOrder:
    """Probe the ranks of the job and find an order; collective over all of them.

    Args:
        config: what for.
        last: file of an earlier order of the same job, to compare with: that order stays unless it has become stale.
        progress: a bar on rank 0.

    Raises:
        ConfigError: there are fewer than three ranks, or `last` is of another job.
        MissingFileError: there is no such file.
        PlanError: no such collective, or one that no order helps.
    """
    algorithm_named(config.algorithm)
    with job():
        agreement = Agreement()
        if agreement.world_size < 3:
            raise ConfigError(
                expected="a job of three ranks or more, whose order can matter",
                found=f"{agreement.world_size} rank{'s' if agreement.world_size > 1 else ''}",
                where="ziggurat cluster order",
                ways_out="start it with torchrun on the hosts of the job: torchrun … -m ziggurat cluster order",
            )
        machines = job_machines(agreement)
        if last:
            # Before minutes of measuring. By its age it is not refused: whether it is good is what this finds out.
            agreement.on_first(lambda: _earlier(last, machines).world_size)
        given = _given_order(agreement.world_size)
        bar = progress if progress is not None and agreement.is_first else NoProgress()
        bar.begin("pairs of ranks", total=agreement.world_size - 1)
        latency_ms, long_ms = measure_pairs(long_bytes=config.long_bytes, on_round=bar.update)
        bar.end()
        pairs = PairTimes(latency_ms=latency_ms, long_ms=long_ms, long_bytes=config.long_bytes)
        # On one rank: a search that ends by its clock may end elsewhere on another.
        probed = agreement.on_first(lambda: _found(config, pairs, machines, given=given, last=last))
        times = pairs.upper()
        order = replace(from_json(RankOrder, probed["order"], where="rank 0"), latency_ms=times[0], long_ms=times[1])
        compared = None if probed["compared"] is None else from_json(OrderNow, probed["compared"], where="rank 0")
        order = _measured(order, config)
        agreement.close()
        return ProbedOrder(order=order, compared=compared, is_first=agreement.is_first)


def job_machines(agreement: Agreement) -> tuple[Machine, ...]:
    """Return where every rank of the job runs, in the order of the launcher; collective."""
    told = agreement.everywhere(where_this_rank_is)
    return tuple(Machine(name=name, address=address, boot=boot) for name, address, boot in told)


def read_order(path: str | Path, agreement: Agreement) -> RankOrder:
    """Read an order for the ranks of this job; collective.

    Raises:
        ConfigError: it is of another job, stale, damaged, or differs between ranks; on every rank.
        MissingFileError: there is no such file.
    """
    machines = job_machines(agreement)
    # Read once: hosts that do not share the file would otherwise have another one each, or none.
    told = agreement.on_first(lambda: to_json(RankOrder.load(path).without_times()))
    order = from_json(RankOrder, told, where=str(path))
    order.check_job(machines, where=str(path))
    return order


def _given_order(world_size: int) -> tuple[int, ...]:
    """Return the order that a run has without a file: host after host as the launcher says, else by rank."""
    try:
        with Topology.create() as topology:
            return topology.order
    except TopologyError:
        # Hosts with different numbers of ranks, or what a launcher that is wrong takes for them: on every rank.
        return tuple(range(world_size))


class _Found(TypedDict):
    """The result of rank 0, as plain data: the order without its times, and how the last one fares."""

    order: JSON
    compared: JSON


def _found(
    config: OrderProbeConfig,
    pairs: PairTimes,
    machines: Sequence[Machine],
    *,
    given: Sequence[int],
    last: str | Path,
) -> _Found:
    order = make_order(
        pairs,
        machines,
        algorithm=config.algorithm,
        num_bytes=config.num_bytes,
        given=given,
        valid_days=config.valid_days,
        search=config.search,
    )
    compared = None
    if last:
        earlier = _earlier(last, machines)
        compared = compare(earlier, order)
        # The order that runs already use, rather than another one that is as good.
        if not compared.is_stale:
            order = order.with_order(earlier.order, why_given=earlier.why_given if earlier.order == order.given else "")
    return {"order": to_json(order.without_times()), "compared": None if compared is None else to_json(compared)}


def _earlier(last: str | Path, machines: Sequence[Machine]) -> RankOrder:
    """Read the order of the last probe, which must be of this job."""
    earlier = RankOrder.load(last)
    replace(earlier, valid_days=_NO_LIMIT_DAYS).check_job(machines, where=str(last))
    return earlier


def _measured(order: RankOrder, config: OrderProbeConfig) -> RankOrder:
    """Time both orders by what they are for, where torch has it; keep the given one if the found one gains nothing."""
    # Orders for other algorithms than gloo's are for programs that torch does not run.
    if order.order == order.given or not algorithm_named(order.algorithm).is_gloos:
        return order
    times = measure_orders([order.given, order.order], num_bytes=config.measured_bytes, repeats=config.repeats)
    measured = MeasuredOrders(num_bytes=config.measured_bytes, given_ms=times[0], found_ms=times[1])
    order = replace(order, measured=measured)
    if measured.gains:
        return order
    why = f"an all-reduce took {measured.found_ms:.1f} ms in the found order, {measured.given_ms:.1f} in the given one"
    return order.with_order(order.given, why_given=why)
