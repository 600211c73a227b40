"""RankOrder: what `ziggurat cluster order` found for one job, as a file: who is where, times, levels, the order.

    order.json     format ziggurat.rank_order

An order is of one job: rank 3 is another machine in the next one. So the file names the machine of every rank, and
`check_job` refuses by name a job of another size, one whose ranks are on other machines or on machines that were
started anew, and a file that is older than it says it may be. `compare` says whether a newer probe of the same job
makes an order stale.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from ziggurat.commands import pasted
from ziggurat.config import from_json, to_json
from ziggurat.errors import ConfigError
from ziggurat.files import Format, write_text
from ziggurat.planning.rank_order.algorithms import CollectiveAlgorithm, algorithm_named
from ziggurat.planning.rank_order.levels import Level, infer_levels, without_noise
from ziggurat.planning.rank_order.pair_times import PairTimes
from ziggurat.planning.rank_order.search import SearchConfig, find_order
from ziggurat.typed import checked

MIN_GAIN = 1.05  # of an order that is found against the one that was given, by cost and by the clock: less is noise
UNSURE_GAIN = 1.5  # of an order that nothing times, where no level is sure: what two levels differ by at least
STALE_COST = 1.1  # of an order in a newer probe, against the best one of that probe

RANK_ORDER = Format(
    name="ziggurat.rank_order",
    what="an order of ranks",
    error=ConfigError,
    ways_out=("measure again: torchrun … -m ziggurat cluster order --out FILE", "name another file"),
    max_bytes=1 << 28,
)


@dataclass(frozen=True, kw_only=True)
@checked
class Machine:
    """The machine that a rank says it runs on.

    Args:
        name: of the host.
        address: by which other ranks reach it; "" where none is known.
        boot: changes when the machine is started again; "" where it does not say.
    """

    name: str = ""
    address: str = ""
    boot: str = ""

    @property
    def key(self) -> str:
        """Text that ranks of one machine have in common."""
        return f"{self.name} {self.address} {self.boot}"

    @property
    def shown(self) -> str:
        """Return the machine in words."""
        return f"{self.name} ({self.address})" if self.address and self.address != self.name else self.name


@dataclass(frozen=True, kw_only=True)
@checked
class OrderCost:
    """Costs of the given and the found order for one collective, in numbers to compare; see `algorithms.py`."""

    algorithm: str
    given_ms: float
    found_ms: float


@dataclass(frozen=True, kw_only=True)
@checked
class MeasuredOrders:
    """An all-reduce in both orders, in turns, by the wall.

    Args:
        num_bytes: of the buffer of every rank.
        given_ms: median in the order that was given.
        found_ms: median in the order that was found.
    """

    num_bytes: int
    given_ms: float
    found_ms: float

    @property
    def gains(self) -> bool:
        """True if the found order is faster than the given one by more than noise."""
        return self.given_ms >= MIN_GAIN * self.found_ms


@dataclass(frozen=True, kw_only=True)
@checked
class RankOrder:
    """An order of the ranks of one job, with the times, levels and costs that it was found by.

    Args:
        world_size: ranks of the job.
        machines: of every rank of the launcher.
        measured_at: UTC, ISO.
        valid_days: from then on.
        algorithm: that the order is for.
        num_bytes: of the buffer that it is for.
        given: the rank at every place without this file.
        order: the rank at every place.
        levels: hosts and racks.
        costs: of both orders, by algorithm.
        measured: an all-reduce in both; None where nobody measured.
        why_given: why `order` is the given one; "" where another was found.
        long_bytes: of a long message.
        latency_ms: of every pair i < j, row after row.
        long_ms: the same of long messages.
    """

    world_size: int
    machines: tuple[Machine, ...]
    measured_at: str
    valid_days: float = 7.0
    algorithm: str = "ring"
    num_bytes: int
    given: tuple[int, ...]
    order: tuple[int, ...]
    levels: tuple[Level, ...] = ()
    costs: tuple[OrderCost, ...] = ()
    measured: MeasuredOrders | None = None
    why_given: str = ""
    long_bytes: int
    latency_ms: tuple[float, ...]
    long_ms: tuple[float, ...]

    def __post_init__(self) -> None:
        ranks = list(range(self.world_size))
        for name in ("order", "given"):
            value = getattr(self, name)
            if sorted(value) != ranks or value[0] != 0:
                raise _damaged(f"every rank from 0 to {self.world_size - 1} once, rank 0 first", f"{name} {value}")
        if len(self.machines) != self.world_size or any(len(each.groups) != self.world_size for each in self.levels):
            raise _damaged(f"machines and groups of {self.world_size} ranks", "another number")

    @property
    def pairs(self) -> PairTimes:
        """The times between ranks."""
        return PairTimes.from_upper(
            self.latency_ms, self.long_ms, num_ranks=self.world_size, long_bytes=self.long_bytes
        )

    @property
    def hosts(self) -> tuple[int, ...]:
        """The host of every rank of the launcher, as found; () where nobody can tell, or hosts have unequal ranks."""
        host = self.level("host")
        if host is not None:
            return host.groups if host.is_used and host.is_even else ()
        keys = {machine.key for machine in self.machines}
        return tuple(range(self.world_size)) if len(keys) == self.world_size else ()

    @property
    def _given_parts_hosts(self) -> bool:
        """True if ranks of one found host are apart in the given order."""
        at = [self.hosts[rank] for rank in self.given] if self.hosts else []
        return sum(one != other for one, other in itertools.pairwise(at)) >= max(1, len(set(at)))

    def level(self, name: str) -> Level | None:
        """Return a level by its name."""
        return next((level for level in self.levels if level.name == name), None)

    def describe(self) -> str:
        """Say in one line what a run makes of the order."""
        shown = ", ".join(map(str, self.order[:16])) + (" …" if self.world_size > 16 else "")
        hosts = f"; {len(set(self.hosts))} hosts as found" if self.hosts else "; hosts as the launcher says"
        if self.why_given:
            # A run puts ranks of a host together in any case: towers and copies within hosts need it.
            kept = "host after host as found, else as given" if self._given_parts_hosts else "that which was given"
            return f"{kept} ({self.why_given}){hosts}"
        return f"{shown}, found for {self.algorithm} at {self.measured_at}{hosts}"

    def with_order(self, ranks: Sequence[int], *, why_given: str = "") -> RankOrder:
        """Return the same with another order, and what that costs."""
        costs = order_costs(self.pairs, self.given, ranks, num_bytes=self.num_bytes)
        return replace(self, order=tuple(ranks), costs=costs, why_given=why_given)

    def without_times(self) -> RankOrder:
        """Return the same without the times of pairs, which are most of it, for ranks to tell each other."""
        return replace(self, latency_ms=(), long_ms=())

    def save(self, path: str | Path) -> None:
        """Write, so that a reader finds the old file or the new one."""
        RANK_ORDER.write(path, to_json(self))

    @staticmethod
    def load(path: str | Path) -> RankOrder:
        """Read what `save` wrote.

        Raises:
            MissingFileError: there is no such file.
            ConfigError: it is of another format, or damaged.
        """
        return from_json(RankOrder, RANK_ORDER.read(path), where=str(path))

    def check_job(self, machines: Sequence[Machine], *, where: str, now: datetime | None = None) -> None:
        """Refuse an order of another job, or one that is stale.

        Args:
            machines: of every rank of the job that is to use it.
            where: the file.
            now: UTC; None is now.

        Raises:
            ConfigError: it is; names what differs.
        """
        if len(machines) != self.world_size:
            raise _refused(
                "an order of another job",
                expected=f"an order of {len(machines)} ranks",
                found=f"one of {self.world_size}",
                where=where,
            )
        for rank, (mine, theirs) in enumerate(zip(machines, self.machines, strict=True)):
            if (mine.name, mine.address) != (theirs.name, theirs.address):
                raise _refused(
                    "an order of another job",
                    expected=f"rank {rank} on {theirs.shown}, where it was when the order was found",
                    found=f"rank {rank} on {mine.shown}",
                    where=where,
                )
            if mine.boot != theirs.boot:
                raise _refused(
                    "a stale order",
                    expected=f"{theirs.shown}, of rank {rank}, as it ran when the order was found",
                    found="the machine was started anew since, perhaps at another place",
                    where=where,
                )
        age = (now or datetime.now(UTC)) - datetime.fromisoformat(self.measured_at)
        if age > timedelta(days=self.valid_days):
            raise _refused(
                "a stale order",
                expected=f"an order that was measured within {self.valid_days:g} days",
                found=f"one of {self.measured_at}, {age.total_seconds() / 86400:.1f} days ago",
                where=where,
            )

    def host_lines(self, *, form: str, port: int = 12400) -> list[str]:
        """Return the lines of a file of hosts in this order, for a program that is launched by one.

        Args:
            form: "mpi" ("10.0.0.1 slots=2"; Open MPI, and what launches NCCL's tests) or "ports" ("10.0.0.1 12400",
                one line a rank, as LightGBM's list of machines).
            port: of the first rank of each host; the next rank has the next one.

        Raises:
            ConfigError: the form is "mpi" and the order takes ranks of a host apart. Open MPI refuses two lines with
                slots of one host, and puts the ranks of lines without slots together.
        """
        addresses = [self.machines[rank].address or self.machines[rank].name for rank in self.order]
        if form == "ports":
            return [f"{address} {port + addresses[:place].count(address)}" for place, address in enumerate(addresses)]
        lines: list[tuple[str, int]] = []
        for address in addresses:
            if lines and lines[-1][0] == address:
                lines[-1] = (address, lines[-1][1] + 1)
            else:
                lines.append((address, 1))
        if len(lines) > len(set(addresses)):
            raise ConfigError(
                expected="an order with the ranks of each host together, as lines with slots have them",
                found=f"an order that takes ranks of a host apart: {', '.join(addresses[:8])} …",
                where="file of hosts for MPI",
                ways_out=(
                    "--hostfile-form ports: a line for each rank",
                    "launch the ranks host after host, and measure again",
                ),
            )
        return [f"{address} slots={count}" for address, count in lines]

    def write_matrix(self, path: str | Path) -> None:
        """Write all pairs as CSV: two ranks, latency, a long message."""
        ranks = range(self.world_size)
        pairs = [(one, other) for one in ranks for other in ranks if one < other]
        lines = ["rank,other,latency_ms,long_ms"]
        for (one, other), latency, long in zip(pairs, self.latency_ms, self.long_ms, strict=True):
            lines.append(f"{one},{other},{latency},{long}")
        write_text(path, "\n".join(lines) + "\n")


@dataclass(frozen=True, kw_only=True)
@checked
class OrderNow:
    """The verdict on an order by a newer probe of its job.

    Args:
        is_stale: True if the order should be replaced.
        reasons: in words; of a good order, why.
        other_hosts: True if other ranks than before are together on a host.
        slower_pairs: pairs that take twice as long as before, or more.
        faster_pairs: that take half as long, or less.
    """

    is_stale: bool
    reasons: tuple[str, ...]
    other_hosts: bool = False
    slower_pairs: int
    faster_pairs: int

    def after(self, kept: RankOrder, last: Sequence[int]) -> OrderNow:
        """Return the verdict in view of the order that is written, which all-reduces by the clock had a say in.

        Args:
            kept: the order that takes the place of the last one.
            last: the last order, the rank at every place.
        """
        is_same = kept.order == tuple(last)
        if self.is_stale and is_same and not self.other_hosts:
            return replace(self, is_stale=False, reasons=(f"the given order stays: {kept.why_given}",))
        if not self.is_stale and not is_same:
            return replace(self, is_stale=True, reasons=(kept.why_given,))
        return self


def make_order(
    pairs: PairTimes,
    machines: Sequence[Machine],
    *,
    algorithm: str = "ring",
    num_bytes: int = 16 << 20,
    given: Sequence[int] = (),
    valid_days: float = 7.0,
    search: SearchConfig | None = None,
    now: datetime | None = None,
) -> RankOrder:
    """Infer hosts and racks, and find the cheapest order; nothing here communicates.

    Args:
        pairs: times between ranks.
        machines: of every rank.
        algorithm: that the order is for.
        num_bytes: of the buffer of every rank.
        given: the order without a file; () is 0, 1, 2 …
        valid_days: how long the order may be used.
        search: how long to search.
        now: UTC; None is now.

    Raises:
        PlanError: no such algorithm, or one that no order helps.
    """
    wanted = algorithm_named(algorithm)
    given = tuple(given) or tuple(range(pairs.num_ranks))
    levels = infer_levels(pairs, machines=[machine.key for machine in machines])
    host = next((level for level in levels if level.name == "host" and level.is_used), None)
    hosts = () if host is None else host.groups
    found = find_order(pairs, wanted, num_bytes=num_bytes, hosts=hosts, given=given, config=search).order
    why_given = _why_given(given, found, pairs, levels, wanted, num_bytes=num_bytes)
    if why_given:
        found = given
    latency_ms, long_ms = pairs.upper()
    return RankOrder(
        world_size=pairs.num_ranks,
        machines=tuple(machines),
        measured_at=(now or datetime.now(UTC)).isoformat(timespec="seconds"),
        valid_days=valid_days,
        algorithm=algorithm,
        num_bytes=num_bytes,
        given=given,
        order=found,
        levels=levels,
        costs=order_costs(pairs, given, found, num_bytes=num_bytes),
        why_given=why_given,
        long_bytes=pairs.long_bytes,
        latency_ms=latency_ms,
        long_ms=long_ms,
    )


def compare(last: RankOrder, newer: RankOrder) -> OrderNow:
    """Say how the order of a probe fares by the times of a newer one of the same job, for the same collective."""
    pairs = newer.pairs
    algorithm = algorithm_named(last.algorithm)
    cost = algorithm.cost_ms(last.order, pairs, num_bytes=last.num_bytes)
    best = algorithm.cost_ms(newer.order, pairs, num_bytes=last.num_bytes)
    reasons = []
    other_hosts = last.hosts != newer.hosts
    if other_hosts:
        reasons.append("the ranks that are near each other as on one host are others")
    if cost > STALE_COST * best:
        reasons.append(f"it costs {cost / best:.2f} times what the best order of the newer probe does")
    pairs_now = list(zip(last.long_ms, newer.long_ms, strict=True))
    good = f"it costs {cost / best:.2f} times what the best order of the newer probe does, on the same hosts"
    return OrderNow(
        is_stale=bool(reasons),
        reasons=tuple(reasons) or (good,),
        other_hosts=other_hosts,
        slower_pairs=sum(now >= 2 * before for before, now in pairs_now),
        faster_pairs=sum(now <= before / 2 for before, now in pairs_now),
    )


def _why_given(
    given: Sequence[int],
    found: Sequence[int],
    pairs: PairTimes,
    levels: Sequence[Level],
    algorithm: CollectiveAlgorithm,
    *,
    num_bytes: int,
) -> str:
    """Return why the given order stays; "" if the found one costs less, also by times without their noise."""
    if found == given:
        return "no order is cheaper by the measured times"

    def gain(times: PairTimes) -> float:
        before, after = (algorithm.cost_ms(order, times, num_bytes=num_bytes) for order in (given, found))
        return before / after

    # The given order may take ranks of a host apart, which a found one never does: it can then be the cheaper one.
    if gain(pairs) <= 1.0:
        return "no order that keeps ranks of a host together is cheaper"
    if not algorithm.is_gloos and not any(level.is_used for level in levels) and gain(pairs) < UNSURE_GAIN:
        return "no hosts or racks are sure, and what is gained may be noise"
    if gain(without_noise(pairs, levels)) < MIN_GAIN:
        return "no order crosses between hosts and racks more seldom"
    return ""


def order_costs(
    pairs: PairTimes, given: Sequence[int], found: Sequence[int], *, num_bytes: int
) -> tuple[OrderCost, ...]:
    """Return what two orders cost each of the collectives."""
    return tuple(
        OrderCost(
            algorithm=algorithm.name,
            given_ms=round(algorithm.cost_ms(given, pairs, num_bytes=num_bytes), 4),
            found_ms=round(algorithm.cost_ms(found, pairs, num_bytes=num_bytes), 4),
        )
        for algorithm in CollectiveAlgorithm
    )


def _refused(what: str, *, expected: str, found: str, where: str) -> ConfigError:
    return ConfigError(
        expected=expected,
        found=f"{what}: {found}",
        where=where,
        ways_out=(
            f"measure it on these ranks: torchrun … -m ziggurat cluster order --out {pasted(where)}",
            '--rank-order "" trains without one: ranks are then ordered host after host',
        ),
    )


def _damaged(expected: str, found: str) -> ConfigError:
    return ConfigError(
        expected=expected,
        found=found,
        where="order of ranks",
        ways_out=("measure again: torchrun … -m ziggurat cluster order --out FILE", "name another file"),
    )
