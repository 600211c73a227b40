"""The rates of a disk: measured on a file of its own, kept, written into a cluster's file, and planned with."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from ziggurat.cli.main import main
from ziggurat.errors import FileError
from ziggurat.ops.row_file import DiskSample, RowFile, disk_rate, rate_while_written
from ziggurat.planning.cluster.catalogue import load_cluster, named_cluster
from ziggurat.planning.cluster.cluster import Cluster, Origin
from ziggurat.planning.costs.measurements import DiskMeasurement, Measurements
from ziggurat.planning.problem import TableProfile
from ziggurat.planning.tiers.machines import Tiers, UsedTable, tiered_steps
from ziggurat.runs.planning.disk_probe import measured_disk, save_with_disk, with_disk

SAMPLE = DiskSample(file_bytes=1 << 20, num_rows=64, seconds=0.0)
DISK = DiskMeasurement(
    folder="/mnt/nvme",
    disk_bytes=10**12,
    row_bytes=260,
    moved_bytes=4096,
    is_direct=True,
    read_rows_per_s=40_000.0,
    written_rows_per_s=8_000.0,
)


def test_a_disk_is_measured_and_nothing_stays_there(tmp_path: Path) -> None:
    found = measured_disk(tmp_path, sample=SAMPLE)
    assert min(found.read_rows_per_s, found.written_rows_per_s) > 0
    assert (found.row_bytes, found.moved_bytes) == (260, 4096)
    assert found.disk_bytes > found.moved_bytes
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileError, match="make a file for rows"):
        measured_disk(tmp_path / "gone", sample=SAMPLE)


def test_rows_keep_their_numbers_while_the_disk_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"read": 0, "write": 0}
    for name in counts:
        whole = getattr(RowFile, name)

        def counted(file: RowFile, rows, *values, name=name, whole=whole):  # type: ignore[no-untyped-def]
            counts[name] += len(rows)
            return whole(file, rows, *values)

        monkeypatch.setattr(RowFile, name, counted)
    disk_rate(str(tmp_path), payload_bytes=260, sample=DiskSample(file_bytes=1 << 20, num_rows=64))
    filled = (1 << 20) // 4096 * (4096 // 264)
    assert counts == {"read": 64, "write": filled + 64}
    file = RowFile(tmp_path, num_rows=200, payload_bytes=8)
    numbers = np.arange(1600, dtype=np.uint8).reshape(200, 8)
    file.write(np.arange(200), numbers)
    assert rate_while_written(file, chunks=2, num_rows=50) > 0
    assert (file.read(np.arange(200))[0] == numbers).all()
    file.close()


def test_a_cluster_says_what_was_measured_and_where_it_comes_from(tmp_path: Path) -> None:
    changed = with_disk(with_disk(named_cluster("h100x16"), DISK), DISK)  # again: as once
    named = {each.name: each for each in changed.constants()}
    for name, value in (("disk_bytes", 1e12), ("disk_read_rows_per_s", 4e4), ("disk_written_rows_per_s", 8e3)):
        assert named[f"below.{name}"].value == value
        assert named[f"below.{name}"].origin is Origin.MEASURED
        assert "past the page cache" in named[f"below.{name}"].source
    path = tmp_path / "cluster.toml"
    assert save_with_disk(path, DISK, ranks_per_host=3).world_size == 3, "of this machine, if there is no file"
    named_cluster("h100x16").save(path)
    save_with_disk(path, DISK, ranks_per_host=3)
    assert load_cluster(path) == with_disk(named_cluster("h100x16"), DISK)


def test_tiers_are_predicted_with_the_measured_disk() -> None:
    table = UsedTable(profile=TableProfile(name="t", num_rows=10_000_000, dim=63, pooling_factor=4.0))

    def on_disks(cluster: Cluster) -> float:
        small = dataclasses.replace(cluster, below=dataclasses.replace(cluster.below, memory_bytes=10**8))
        steps = tiered_steps([table], small, batch_size=100, room_bytes=10**7, step_s=lambda machines: 1e-9)
        return next(each.step_s for each in steps if each.tiers is Tiers.DISKS)

    cluster = dataclasses.replace(named_cluster("h100x8"), sources=())
    fast, slow = (
        with_disk(cluster, dataclasses.replace(DISK, read_rows_per_s=rate, written_rows_per_s=rate))
        for rate in (1e6, 1e4)
    )
    assert on_disks(slow) > 20 * on_disks(fast)


def test_the_verb_keeps_it_beside_the_other_measurements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, cluster = tmp_path / "probe.json", tmp_path / "cluster.toml"
    words = ["cluster", "probe", "--minutes", "0", "--out", str(out)]
    assert main([*words, "--cluster", str(cluster)]) == 2
    assert "--disk FOLDER" in capsys.readouterr().err
    assert main([*words, "--disk", str(tmp_path), "--cluster", str(cluster)]) == 0
    shown = capsys.readouterr().out
    disk = Measurements.load(out).disk
    assert disk is not None
    assert f"{disk.read_rows_per_s:,.0f} rows/s at random" in shown
    assert load_cluster(cluster).below.disk_read_rows_per_s == disk.read_rows_per_s
