"""Machines needed with tiers below memory of devices: counted by hand where that can be done."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.planning.tiers.test_stack_distances import zipf_trace
from ziggurat.planning.cluster.catalogue import named_cluster
from ziggurat.planning.cluster.cluster import Cluster, Host
from ziggurat.planning.problem import TableProfile
from ziggurat.planning.tiers.machines import TieredStep, Tiers, UsedTable, fewest_hosts, tiered_steps, zipf_misses
from ziggurat.planning.tiers.miss_ratio import miss_ratio_curve

HOST = Host(
    memory_bytes=2_000_000_000,
    link_bytes_per_s=1e10,
    disk_bytes=10**12,
    disk_read_rows_per_s=1e6,
    disk_written_rows_per_s=5e5,
)
TABLE = TableProfile(name="t", num_rows=10_000_000, dim=63, pooling_factor=4.0, optimizer_bytes_per_row=4)  # 2.56 GB


def steps_of(table: UsedTable, *, host: Host = HOST, room: int = 80_000_000) -> list[TieredStep]:
    cluster: Cluster = dataclasses.replace(named_cluster("h100x16"), below=host)
    return tiered_steps([table], cluster, batch_size=100, room_bytes=room, step_s=lambda machines: 0.01)


@pytest.mark.parametrize(("num_rows", "share"), [(500, 0.1), (200_000, 0.01), (200_000, 0.5), (50, 1.0)])
def test_misses_under_zipf_are_those_of_a_sum(num_rows: int, share: float) -> None:
    weights = np.arange(1, num_rows + 1) ** -1.05
    expected = 1 - weights[: int(share * num_rows)].sum() / weights.sum()
    assert zipf_misses(num_rows, share) == pytest.approx(expected, abs=1e-5)


def test_steps_with_misses_are_those_counted_by_hand() -> None:
    found = {(each.hosts, each.tiers): each for each in steps_of(UsedTable(profile=TABLE))}
    assert not found[2, Tiers.DEVICES].fits
    assert found[4, Tiers.DEVICES].fits  # 4 · 8 · 80 MB
    assert max(hosts for hosts, _ in found) == 4
    assert not found[1, Tiers.HOSTS].fits
    disk = found[1, Tiers.DISKS]
    devices, hosts = 8 * 80e6 / 2.56e9, 0.85 * 2e9 / 2.56e9
    rows, below = (4 * zipf_misses(TABLE.num_rows, share) for share in (devices, hosts))
    assert (disk.device_share, disk.host_share) == pytest.approx((devices, hosts))
    assert (disk.host_rows, disk.disk_rows) == pytest.approx((rows, below))
    expected = 0.01 + 100 * rows * 2 * 256 / 1e10 + 800 * below * 3e-6
    assert disk.step_s == pytest.approx(expected)
    assert disk.samples_per_s == pytest.approx(800 / expected)
    assert found[4, Tiers.DISKS].step_s == 0.01


def test_the_fewest_hosts_at_an_equal_step() -> None:
    steps = steps_of(UsedTable(profile=TABLE))
    for tiers, most_s, hosts in ((Tiers.DEVICES, 0.02, 4), (Tiers.HOSTS, 0.011, 2), (Tiers.DISKS, 0.1, 1)):
        found = fewest_hosts(steps, tiers, most_s=most_s)
        assert found is not None
        assert found.hosts == hosts
    assert fewest_hosts(steps, Tiers.DISKS, most_s=0.009) is None


def test_tiers_that_a_host_has_not_are_left_out() -> None:
    none = dataclasses.replace(HOST, memory_bytes=0, disk_bytes=0)
    assert {each.tiers for each in steps_of(UsedTable(profile=TABLE), host=none)} == {Tiers.DEVICES}


def test_rows_that_were_counted_count() -> None:
    curve = miss_ratio_curve(zipf_trace(seed=0, num_rows=2_000, batches=20, size=100))
    used = UsedTable(profile=TABLE, curve=curve)
    a_lookup = curve.trace.all_touches / curve.trace.all_lookups
    assert used.rows_missed(0.1) == pytest.approx(4 * a_lookup * curve.misses(200))
    assert used.rows_missed(1.0) == 0.0
