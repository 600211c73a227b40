"""How many machines a model needs with memory of devices alone, with that of hosts below it, and with disks below both.

    devices              all rows in memory of devices
    devices, hosts       all rows in memory of hosts; devices hold the hottest of them
    devices, hosts, disk all rows on disks; hosts hold the hottest, devices the hottest of these

Each tier holds the same share of every table. For N hosts of L devices, B samples a device:

    step = step were all rows in memory of devices
         + B · Σ rows that devices miss · 2 · row bytes / link                  read, and written back
         + B · L · Σ rows that hosts miss · (1/read + 1/written)                rows a second of disks

Nothing is taken to hide behind computing, so a prefetch can only do better; sizes are compared as if tables could be
cut anywhere. The question is that of MTrainS (arXiv 2305.01515): how many machines less, at an equal step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ziggurat.planning.cluster.cluster import Cluster
from ziggurat.planning.problem import TableProfile
from ziggurat.planning.tiers.miss_ratio import MissRatioCurve

ZIPF = 1.05  # of ids nobody has counted
_EXACT_TERMS = 1000
_USABLE = 0.85  # of a host's memory


class Tiers(StrEnum):
    """The tiers where rows lie, from the fastest memory on."""

    DEVICES = "devices"
    HOSTS = "devices, hosts"
    DISKS = "devices, hosts, disk"


@dataclass(frozen=True, kw_only=True)
class UsedTable:
    """A table, and how its rows are used.

    Args:
        profile: rows, columns, format, rows a sample looks up.
        curve: what caches of its rows miss; None: ids are taken to follow Zipf's law.
    """

    profile: TableProfile
    curve: MissRatioCurve | None = None

    @property
    def num_bytes(self) -> int:
        """Weights and optimizer state."""
        return self.profile.bytes_of(num_rows=self.profile.num_rows, dim=self.profile.dim)

    def rows_missed(self, share: float) -> float:
        """Rows that a sample needs and a cache of a share of the rows does not have, mean."""
        if share >= 1:
            return 0.0
        if self.curve is None:
            return self.profile.pooling_factor * zipf_misses(self.profile.num_rows, share)
        trace = self.curve.trace
        touches = trace.all_touches / max(trace.all_lookups, 1)
        return self.profile.pooling_factor * touches * self.curve.misses(share * trace.num_rows)


@dataclass(frozen=True, kw_only=True)
class TieredStep:
    """A number of hosts, and what its step is with some tiers.

    Args:
        hosts: N.
        tiers: that hold rows.
        fits: whether they do.
        device_share: of the rows, that devices hold.
        host_share: of the rows, that hosts hold.
        host_rows: rows that a sample reads from hosts, mean.
        disk_rows: rows that a sample reads from disks, mean.
        step_s: predicted.
        samples_per_s: of all devices.
    """

    hosts: int
    tiers: Tiers
    fits: bool
    device_share: float
    host_share: float
    host_rows: float
    disk_rows: float
    step_s: float
    samples_per_s: float


def zipf_misses(num_rows: int, share: float) -> float:
    """The share of look-ups that the most frequent rows do not get, under Zipf's law."""
    cached = int(share * num_rows)
    return 0.0 if cached >= num_rows else 1.0 - _harmonic(cached) / _harmonic(num_rows)


def tiered_steps(
    tables: Sequence[UsedTable],
    cluster: Cluster,
    *,
    batch_size: int,
    room_bytes: int,
    step_s: Callable[[Cluster], float],
) -> list[TieredStep]:
    """Steps of one host, of two, four, … to those of the cluster, and on until memory of devices holds all tables.

    Args:
        tables: of the model.
        cluster: machines; its hosts are the most that are shown unless more are needed.
        batch_size: B, samples a device.
        room_bytes: for tables, of a device.
        step_s: the step of a cluster on which all rows lie in memory of devices.
    """
    found = list[TieredStep]()
    hosts = 1
    is_over = False
    while not is_over:
        machines = cluster.with_hosts(hosts)
        base_s = step_s(machines)
        steps = [
            _step(tables, machines, tiers, batch_size=batch_size, room_bytes=room_bytes, base_s=base_s)
            for tiers in _available(cluster)
        ]
        found += steps
        is_over = steps[0].fits and hosts >= cluster.hosts
        is_over |= 2 * hosts * cluster.devices_per_host > 1 << 17  # the most ranks of a cluster
        hosts *= 2
    return found


def fewest_hosts(steps: Sequence[TieredStep], tiers: Tiers, *, most_s: float) -> TieredStep | None:
    """The fewest hosts whose step takes no longer than `most_s`; None if there are none."""
    return next((each for each in steps if each.tiers is tiers and each.fits and each.step_s <= most_s), None)


def _available(cluster: Cluster) -> list[Tiers]:
    host = cluster.below
    return [
        Tiers.DEVICES,
        *([Tiers.HOSTS] if host.memory_bytes else []),
        *([Tiers.DISKS] if host.disk_bytes else []),
    ]


def _step(
    tables: Sequence[UsedTable], cluster: Cluster, tiers: Tiers, *, batch_size: int, room_bytes: int, base_s: float
) -> TieredStep:
    host = cluster.below
    whole = max(1, sum(table.num_bytes for table in tables))
    device_share = min(1.0, max(0, room_bytes) * cluster.world_size / whole)
    memory = _USABLE * host.memory_bytes * cluster.hosts
    host_share = 0.0 if tiers is Tiers.DEVICES else min(1.0, memory / whole)
    rooms = {Tiers.DEVICES: device_share, Tiers.HOSTS: host_share, Tiers.DISKS: host.disk_bytes * cluster.hosts / whole}
    host_rows = disk_rows = missed_bytes = 0.0
    for table in tables if tiers is not Tiers.DEVICES else ():
        rows = table.rows_missed(device_share)
        missed_bytes += rows * table.num_bytes / max(table.profile.num_rows, 1)
        host_rows += rows
        # Hosts hold what devices hold, too: the larger of the two shares is not read from disks.
        disk_rows += table.rows_missed(max(device_share, host_share)) if tiers is Tiers.DISKS else 0.0
    step_s = base_s + batch_size * 2 * missed_bytes / host.link_bytes_per_s
    if disk_rows:
        row_s = 1 / host.disk_read_rows_per_s + 1 / host.disk_written_rows_per_s
        step_s += batch_size * cluster.devices_per_host * disk_rows * row_s
    return TieredStep(
        hosts=cluster.hosts,
        tiers=tiers,
        fits=rooms[tiers] >= 1 or device_share >= 1,
        device_share=device_share,
        host_share=host_share,
        host_rows=host_rows,
        disk_rows=disk_rows,
        step_s=step_s,
        samples_per_s=batch_size * cluster.world_size / step_s,
    )


def _harmonic(count: int) -> float:
    """Sum of i^−1.05 for i = 1 … n, the rest of a long one by its integral."""
    total = sum(i**-ZIPF for i in range(1, min(count, _EXACT_TERMS) + 1))
    if count > _EXACT_TERMS:
        # The integral from the middle before a term to the middle behind it is nearly the term.
        total += ((_EXACT_TERMS + 0.5) ** (1 - ZIPF) - (count + 0.5) ** (1 - ZIPF)) / (ZIPF - 1)
    return total
