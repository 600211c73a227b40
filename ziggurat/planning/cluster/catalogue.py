"""The machines that `named_cluster` knows, each number with its source.

Devices and links are as their makers publish them; ports are those of the training platforms of the towers paper
(Luo et al., arXiv 2403.00877): 100, 200 and 400 Gbit/s a device. What no data sheet says (efficiencies, latencies,
what a packed byte costs) is assumed, the same for all three, and marked so; `docs/guides/planning.md` holds the sum of
it against published step times.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import tempfile
from pathlib import Path

from ziggurat.config import from_json, to_json
from ziggurat.errors import ConfigError, nearest_names
from ziggurat.files import check_version, read_toml
from ziggurat.ops.machine.memory import host_memory
from ziggurat.planning.cluster.cluster import Cluster, Device, Host, Launch, Link, Origin, Port, Source, expect
from ziggurat.typed import Reader

DEVICES_PER_HOST = 8
_GB = 1e9
_ASSUMED = {
    "device.gather_efficiency": "scattered rows against long reads",
    "device.row_overhead_bytes": "index, offset and the rest of two 32-byte sectors",
    "device.matmul_efficiency": "layers of a few hundred columns against the peak",
    "device.launch_s": "one operation of an eager PyTorch program",
    "device.packing_bytes_per_s": "a quarter of the memory's rate: read and written at both ends",
    "device.step_s": "an eager PyTorch step; set to TorchRec's DLRM at batch 2,048 on 8 A100, which is bound by it",
    "inside.efficiency": "all-to-all of NCCL against the link",
    "inside.latency_s": "start of a collective inside a host",
    "inside.message_s": "per peer",
    "between.efficiency": "all-to-all of NCCL against the port",
    "between.latency_s": "start of a collective over the network",
    "between.message_s": "per peer",
    "below.link_bytes_per_s": "0.6 of the PCIe of a device",
    "below.disk_read_rows_per_s": "500,000 reads of 4 KiB a second for each NVMe disk",
    "below.disk_written_rows_per_s": "100,000 pages a second read and written for each NVMe disk",
    "reserve": "context, fragmentation, activations: what nobody counts",
}


def _host(*, memory_gb: float, link: float, disk_tb: float, disks: int) -> Host:
    """A kind of host below its devices; the rate of a device's PCIe in GB/s of one direction."""
    return Host(
        memory_bytes=int(memory_gb * _GB),
        link_bytes_per_s=0.6 * link * _GB,
        disk_bytes=int(disk_tb * 1e12),
        # Rows for each disk, of which a host has several.
        disk_read_rows_per_s=disks * 5e5,
        disk_written_rows_per_s=disks * 1e5,
    )


def _gpu(
    *,
    name: str,
    memory_gb: float,
    memory_rate: float,
    tflop: tuple[float, float, float],
    link: tuple[float, float],
    host: Host,
) -> Cluster:
    """A kind of host; rates in GB/s of one direction and TFLOP/s (FP32, TF32, BF16)."""
    fp32, tf32, half = tflop
    sheet = f"NVIDIA data sheet, {name}"
    published = {
        "device.memory_bytes": sheet,
        "device.memory_bytes_per_s": sheet,
        "device.fp32_flop_per_s": sheet,
        # A rate of 0 stands for a format that the device does not have.
        "device.tf32_flop_per_s": sheet + (", dense" if tf32 else ": has none"),
        "device.bf16_flop_per_s": sheet + (", dense" if half else ": has FP16 alone"),
        "inside.bytes_per_s": f"{sheet}: NVLink, {2 * link[0]:g} GB/s in both directions",
        "between.bytes_per_s": f"arXiv 2403.00877, platform table: {link[1] * 8:g} Gbit/s a device",
        "devices_per_host": "DGX and HGX boards",
        "below.memory_bytes": "NVIDIA data sheet of the DGX with these devices",
        "below.disk_bytes": "NVIDIA data sheet of the DGX with these devices: its disks for data",
    }
    return Cluster(
        name=name,
        hosts=1,
        devices_per_host=8,
        device=Device(
            name=name,
            memory_bytes=int(memory_gb * _GB),
            memory_bytes_per_s=memory_rate * _GB,
            fp32_flop_per_s=fp32 * 1e12,
            tf32_flop_per_s=tf32 * 1e12,
            bf16_flop_per_s=half * 1e12,
            launch_s=8e-6,
            # A byte is read and written on both sides of a hop.
            packing_bytes_per_s=memory_rate * _GB / 4,
            step_s=7e-3,
            launch=Launch.AHEAD,
        ),
        inside=Link(bytes_per_s=link[0] * _GB, efficiency=0.75, latency_s=2e-5, message_s=5e-7),
        between=Link(bytes_per_s=link[1] * _GB, efficiency=0.7, latency_s=4e-5, message_s=1e-6),
        below=host,
        sources=(
            *(Source(constant=key, origin=Origin.PUBLISHED, text=text) for key, text in published.items()),
            *(Source(constant=key, origin=Origin.ASSUMED, text=text) for key, text in _ASSUMED.items()),
            Source(constant="hosts", origin=Origin.ASSUMED, text="asked for"),
        ),
    )


KINDS: dict[str, Cluster] = {
    "v100": _gpu(
        name="V100 SXM2 32 GB",
        memory_gb=32,
        memory_rate=900,
        tflop=(15.7, 0.0, 0.0),
        link=(150, 12.5),
        host=_host(memory_gb=512, link=16, disk_tb=7.68, disks=4),
    ),
    "a100": _gpu(
        name="A100 SXM 40 GB",
        memory_gb=40,
        memory_rate=1555,
        tflop=(19.5, 156.0, 312.0),
        link=(300, 25),
        host=_host(memory_gb=1024, link=32, disk_tb=15.36, disks=4),
    ),
    "h100": _gpu(
        name="H100 SXM 80 GB",
        memory_gb=80,
        memory_rate=3350,
        tflop=(67.0, 494.7, 989.4),
        link=(450, 50),
        host=_host(memory_gb=2048, link=64, disk_tb=30.72, disks=8),
    ),
}


def local_cluster(ranks: int) -> Cluster:
    """This machine, its cores shared by so many ranks: memory as the system or its container limits it, rates assumed.

    `ziggurat cluster probe` measures the rates.
    """
    cores = os.cpu_count() or 1
    # Ranks beyond the number of cores take turns on them.
    share = min(1.0, cores / ranks)
    memory = host_memory().total_bytes
    rates = "a core of a server CPU of 2020; `ziggurat cluster probe` measures yours"
    assumed = {key: rates for key in _ASSUMED if key.startswith("device.")} | {
        "device.memory_bytes_per_s": rates,
        "device.fp32_flop_per_s": rates,
        "device.tf32_flop_per_s": "none",
        "device.bf16_flop_per_s": "does not pay where it is emulated",
        "inside.bytes_per_s": "gloo over the loopback",
        "between.bytes_per_s": "10 Gbit/s Ethernet; one host sends nothing over it",
        "reserve": _ASSUMED["reserve"],
        "below.memory_bytes": "none beside the ranks' own",
        "below.link_bytes_per_s": "of no meaning without such memory",
        "below.disk_read_rows_per_s": "a virtual disk; `ziggurat cluster probe --disk FOLDER` measures yours",
        "below.disk_written_rows_per_s": "likewise",
        **{
            f"{link}.{name}": "gloo"
            for link in ("inside", "between")
            for name in ("efficiency", "latency_s", "message_s")
        },
    }
    measured = {
        "hosts": "this one",
        "below.disk_bytes": "size of the disk that has the folder for temporary files",
        "devices_per_host": f"as asked for; the machine has {cores} cores",
        "device.memory_bytes": f"the system's or its container's, divided by {ranks} ranks",
    }
    return Cluster(
        name=f"localx{ranks}",
        hosts=1,
        devices_per_host=ranks,
        device=Device(
            name="share of a CPU",
            memory_bytes=memory // ranks,
            memory_bytes_per_s=10 * _GB * share,
            gather_efficiency=0.5,
            fp32_flop_per_s=80e9 * share,
            matmul_efficiency=0.7,
            launch_s=1e-5,
            packing_bytes_per_s=1.5 * _GB * share,
            # Ranks that share a core wait for each other's steps as well.
            step_s=2e-3 / share,
        ),
        inside=Link(bytes_per_s=2 * _GB, efficiency=0.8, latency_s=2e-4, message_s=2e-5),
        # Ranks of one host share its port.
        between=Link(bytes_per_s=1.25 * _GB, efficiency=0.9, latency_s=3e-4, message_s=2e-5, port=Port.HOST),
        below=Host(disk_bytes=shutil.disk_usage(tempfile.gettempdir()).total),
        sources=(
            *(Source(constant=key, origin=Origin.MEASURED, text=text) for key, text in measured.items()),
            *(Source(constant=key, origin=Origin.ASSUMED, text=text) for key, text in assumed.items()),
        ),
    )


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster from TOML: what `save` wrote, or a file by hand.

    With `like = "a100x16"` a file starts from a named cluster and needs only what differs; a changed constant loses
    the source that it had.

    Raises:
        MissingFileError: no such file.
        ConfigError: not TOML, a name that is not known (with the nearest), a missing or impossible value.
    """
    ways_out = ("correct the path or the file", "start from one: ziggurat cluster show h100x64 --out cluster.toml")
    data = read_toml(path, what="a cluster in TOML", error=ConfigError, ways_out=ways_out)
    check_version(data, 1, where=str(path), what="a cluster", error=ConfigError)
    data = {Cluster.FORMERLY.get(name, name): value for name, value in data.items()}
    sources = Reader(where=str(path)).read(dict[str, str], data.pop("sources", {}), "sources")
    sources = {Cluster.FORMERLY.get(name, name): text for name, text in sources.items()}
    if "like" in data:
        data, sources = _merged(data, sources)
    data["sources"] = [_source(name, text, where=str(path)) for name, text in sources.items()]
    try:
        return from_json(Cluster, data, where=str(path))
    except ConfigError as error:
        ways = [way for way in error.ways_out if "did you mean" in way or "correct" in way]
        raise ConfigError(
            expected=error.expected,
            found=error.found,
            where=error.where,
            ways_out=[*ways, "see every name in a known one: ziggurat cluster show h100x64 --out cluster.toml"],
        ) from None


def named_cluster(name: str) -> Cluster:
    """The cluster of a name: `v100xN`, `a100xN`, `h100xN` (N devices, 8 a host), or `localxN`: N ranks of this machine.

    Raises:
        ConfigError: another name, or a number of devices that does not fill its hosts.
    """
    # Without a number `local` means all cores; the other kinds need one.
    match = re.fullmatch(r"(local|[a-z]+[0-9]+)(?:x([0-9]+))?", name)
    kind, number = (match.group(1), int(match.group(2) or 0)) if match else (name, 0)
    if kind == "local":
        return local_cluster(number or os.cpu_count() or 1)
    if kind not in KINDS or number < 1:
        near = nearest_names(name, [f"{known}x64" for known in KINDS] + ["local"], most=1)
        raise ConfigError(
            expected="a cluster: " + ", ".join(f"{known}xN" for known in KINDS) + ", local, or a file cluster.toml",
            found=repr(name),
            where="cluster",
            ways_out=[*(f"did you mean {each!r}?" for each in near), "N counts devices, 8 a host: h100x64 is 8 hosts"],
        )
    expect(
        number < DEVICES_PER_HOST or number % DEVICES_PER_HOST == 0,
        f"up to {DEVICES_PER_HOST} devices, or a multiple of {DEVICES_PER_HOST}",
        f"{number} devices",
        f"cluster {name!r}",
    )
    devices = min(number, DEVICES_PER_HOST)  # fewer are one host that is not full
    # The whole number of hosts was asked for above.
    return dataclasses.replace(KINDS[kind], name=name, hosts=number // devices, devices_per_host=devices)


def find_cluster(name: str) -> Cluster:
    """A named cluster, or the one in a file.

    Raises:
        ConfigError, MissingFileError: see `named_cluster` and `load_cluster`.
    """
    return load_cluster(name) if name.endswith(".toml") or Path(name).is_file() else named_cluster(name)


def _merged(data: dict[str, object], sources: dict[str, str]) -> tuple[dict[str, object], dict[str, str]]:
    """A file on top of the named cluster that it is like."""
    start = named_cluster(str(data.pop("like")))
    whole = to_json(start)
    changed = set()
    for key, value in data.items():
        group = whole.get(key)
        if isinstance(value, dict) and isinstance(group, dict):
            whole[key] = {**group, **value}
            changed |= {f"{key}.{name}" for name in value}
        else:
            whole[key] = value
            changed.add(key)
    # A number that the file changes has lost its source.
    kept = {
        each.constant: f"{each.origin.value}: {each.text}" for each in start.sources if each.constant not in changed
    }
    return whole, {**kept, **sources}


def _source(name: str, text: str, *, where: str) -> dict[str, str]:
    origin, colon, rest = text.partition(":")
    if not colon or origin.strip() not in list(Origin):
        raise ConfigError(
            expected='"measured: …", "published: …" or "assumed: …"',
            found=repr(text),
            where=f"{where}, sources, {name!r}",
            ways_out="say which it is, then where the number comes from",
        )
    return {"constant": name, "origin": origin.strip(), "text": rest.strip()}
