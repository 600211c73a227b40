"""What the disk of a folder gives for rows of tables, and what a cluster's file says of it: part of `cluster probe`.

    measured_disk(folder)             a file of 256 MiB, rows of 64 numbers and a state: read, and replaced
    save_with_disk("cluster.toml")    the same rates, as constants of the cluster, with where they come from

The rates are those of one host with all its disks, if that folder is what its tables will lie in.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from ziggurat.ops.row_file import DiskSample, RowFile, RowLayout, disk_rate
from ziggurat.planning.cluster.catalogue import find_cluster, local_cluster
from ziggurat.planning.cluster.cluster import Cluster, Origin, Source
from ziggurat.planning.costs.measurements import DiskMeasurement

ROW_BYTES = 4 * (64 + 1)  # D = 64, row-wise Adagrad
SAMPLE = DiskSample(file_bytes=256 << 20, num_rows=4096, seconds=2.0)
_CONSTANTS = ("disk_bytes", "disk_read_rows_per_s", "disk_written_rows_per_s")


def measured_disk(folder: str | Path, *, sample: DiskSample = SAMPLE) -> DiskMeasurement:
    """Measure the disk of a folder.

    Args:
        folder: on it; must exist.
        sample: how much.

    Raises:
        FileError: no file can be made there, or the disk refuses.
    """
    # A file of one row, to learn whether this file system takes direct I/O.
    file = RowFile(folder, num_rows=1, payload_bytes=ROW_BYTES)
    is_direct = file.is_direct
    file.close()
    rate = disk_rate(str(folder), payload_bytes=ROW_BYTES, sample=sample)
    return DiskMeasurement(
        folder=str(folder),
        disk_bytes=shutil.disk_usage(folder).total,
        row_bytes=ROW_BYTES,
        moved_bytes=RowLayout(ROW_BYTES).unit_bytes,
        is_direct=is_direct,
        read_rows_per_s=round(rate.read_rows_per_s, 1),
        written_rows_per_s=round(rate.written_rows_per_s, 1),
    )


def save_with_disk(path: str | Path, disk: DiskMeasurement, *, ranks_per_host: int) -> Cluster:
    """Write what a disk gives into the file of a cluster; where there is none, into a new one of this machine.

    Args:
        path: cluster.toml.
        disk: what was measured.
        ranks_per_host: of a new file.

    Raises:
        ConfigError: the file is no cluster.
    """
    found = find_cluster(str(path)) if Path(path).exists() else local_cluster(ranks_per_host)
    changed = with_disk(found, disk)
    changed.save(path)
    return changed


def with_disk(cluster: Cluster, disk: DiskMeasurement) -> Cluster:
    """The cluster, each of whose hosts has such a disk."""
    names = tuple(f"below.{name}" for name in _CONSTANTS)
    page_cache = (
        "past the page cache"
        if disk.is_direct
        else "pages dropped after use, since this file system refuses direct I/O"
    )
    text = (
        f"ziggurat cluster probe, {datetime.now(UTC).date().isoformat()}: rows of {disk.row_bytes} bytes in random "
        f"order, {page_cache}"
    )
    # What the cluster said of its disk before goes, and where that came from goes with it.
    sources = (each for each in cluster.sources if each.constant not in names)
    values = (disk.disk_bytes, disk.read_rows_per_s, disk.written_rows_per_s)
    return replace(
        cluster,
        below=replace(cluster.below, **dict(zip(_CONSTANTS, values, strict=True))),
        sources=(*sources, *(Source(constant=name, origin=Origin.MEASURED, text=text) for name in names)),
    )
