"""A small cluster with round numbers, for costs that are computed by hand."""

from __future__ import annotations

from typing import Any

from ziggurat.planning.cluster.cluster import Cluster, Device, Link


def round_cluster(*, hosts: int = 2, devices_per_host: int = 2, device: Any = None, **links: Any) -> Cluster:
    """1 GB/s of memory (half of it for rows), 100 MB/s inside a host, 10 MB/s between hosts, no latency."""
    settings: dict[str, Any] = {
        "memory_bytes": 10**9,
        "memory_bytes_per_s": 1e9,
        "gather_efficiency": 0.5,
        "row_overhead_bytes": 0.0,
        "fp32_flop_per_s": 1e11,
        "matmul_efficiency": 1.0,
        "launch_s": 0.0,
        "packing_bytes_per_s": 1e12,
        **(device or {}),
    }
    plain: dict[str, Any] = {"efficiency": 1.0, "latency_s": 0.0, "message_s": 0.0}
    return Cluster(
        name="round",
        hosts=hosts,
        devices_per_host=devices_per_host,
        device=Device(name="round", **settings),
        inside=Link(**{"bytes_per_s": 1e8, **plain, **links.get("inside", {})}),
        between=Link(**{"bytes_per_s": 1e7, **plain, **links.get("between", {})}),
        reserve=links.get("reserve", 0.0),
    )
