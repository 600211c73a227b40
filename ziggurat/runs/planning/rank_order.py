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
from ziggurat.parallel.exchange.pair_meter import is_loopback, measure_orders, measure_pairs, where_this_rank_is
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
from ziggurat.typed import Count, CountOrNone, FloatOrZero, checked

_ALGORITHM = "ring"
_NUM_BYTES = 16 << 20
_VALID_DAYS = 7.0
_NO_LIMIT_DAYS = 1e5


@dataclass(frozen=True, kw_only=True)
@checked
class OrderProbeConfig:
    """Settings of a probe of all pairs of ranks.

    Args:
        algorithm: name of the collective that the order is for, one that an order helps; "": that of the order to
            compare with, ring without one.
        num_bytes: of the buffer of every rank that the order is for; 0: that of the order to compare with, 16 MiB
            without one.
        long_bytes: of a long message of the probe.
        measured_bytes: of the all-reduce that compares the two orders.
        repeats: of that all-reduce, in each order.
        valid_days: how long a run may use the order; 0: as long as the order to compare with, 7 days without one.
        search: how long to search.
    """

    algorithm: str = ""
    num_bytes: CountOrNone = 0
    long_bytes: Count = 1 << 20
    measured_bytes: Count = 4 << 20
    repeats: Count = 5
    valid_days: FloatOrZero = 0.0
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
        ConfigError: there are fewer than three ranks, or `last` is of another job, or for another collective or size.
        MissingFileError: there is no such file.
        PlanError: no such collective, or one that no order helps.
    """
    if config.algorithm:
        # Before ranks meet: a name that is none is refused on each at once.
        algorithm_named(config.algorithm)
    with job():
        agreement = Agreement()
        if agreement.world_size < 3:
            raise ConfigError(
                expected="a job of three ranks or more, whose order can matter",
                found=f"{agreement.world_size} rank{'s' if agreement.world_size > 1 else ''}",
                where="ziggurat cluster order",
                ways_out=(
                    "start it with torchrun on all hosts of the job: torchrun … -m ziggurat cluster order",
                    "train without --rank-order: one rank or two have one ring only",
                ),
            )
        machines = job_machines(agreement)
        # Before minutes of measuring: an order of another job is refused, and settings that nobody named are its own.
        config = from_json(
            OrderProbeConfig, agreement.on_first(lambda: to_json(_settled(config, last, machines))), where="rank 0"
        )
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
        if compared is not None:
            compared = compared.after(order, probed["last"])
        agreement.close()
        return ProbedOrder(order=order, compared=compared, is_first=agreement.is_first)


def job_machines(agreement: Agreement) -> tuple[Machine, ...]:
    """Return where every rank of the job runs, in the order of the launcher; collective."""
    told = agreement.everywhere(where_this_rank_is)
    # Where all ranks meet is itself at a loopback address for the host of rank 0, if its own name leads there, as most
    # Linux distributions set it up. Others cannot reach it by that, so it asks for the way to one of them.
    elsewhere = [address for _, address, _ in told if address and not is_loopback(address)]
    if elsewhere and len(elsewhere) < len(told):
        told = agreement.everywhere(lambda: where_this_rank_is(towards=elsewhere[0]))
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
    """The result of rank 0, as plain data: the order without its times, how the last one fares, and which it was."""

    order: JSON
    compared: JSON
    last: tuple[int, ...]


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
    last_order: tuple[int, ...] = ()
    if last:
        earlier = _earlier(last, machines)
        last_order = earlier.order
        compared = compare(earlier, order)
        # The order that runs already use, rather than another one that is as good.
        if not compared.is_stale:
            order = order.with_order(earlier.order, why_given=earlier.why_given if earlier.order == order.given else "")
    told = None if compared is None else to_json(compared)
    return {"order": to_json(order.without_times()), "compared": told, "last": last_order}


def _settled(config: OrderProbeConfig, last: str | Path, machines: Sequence[Machine]) -> OrderProbeConfig:
    """Return the settings with those that nobody named from the last order, which must be for the same collective."""
    earlier = _earlier(last, machines) if last else None
    algorithm = _ALGORITHM if earlier is None else earlier.algorithm
    num_bytes = _NUM_BYTES if earlier is None else earlier.num_bytes
    settled = replace(
        config,
        algorithm=config.algorithm or algorithm,
        num_bytes=config.num_bytes or num_bytes,
        valid_days=config.valid_days or (_VALID_DAYS if earlier is None else earlier.valid_days),
    )
    # Costs of two collectives cannot be compared, and an order that is good for one may be bad for the other.
    if earlier is not None and (settled.algorithm, settled.num_bytes) != (algorithm, num_bytes):
        raise ConfigError(
            expected=f"the collective of the order to compare with: {_purpose(algorithm, num_bytes)}",
            found=_purpose(settled.algorithm, settled.num_bytes),
            where=str(last),
            ways_out=(
                "leave out --for and --mib: --again takes those of the file",
                "write an order for another collective into a file of its own: --out FILE, without --again",
            ),
        )
    return settled


def _purpose(algorithm: str, num_bytes: int) -> str:
    return f"{algorithm}, {num_bytes / 2**20:g} MiB"


def _earlier(last: str | Path, machines: Sequence[Machine]) -> RankOrder:
    """Read the order of the last probe, which must be of this job, of whatever age: a probe finds out if it is good."""
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
