"""Cluster: the machines that a plan is made for, as numbers. Plain data, by name or from a TOML file.

    cluster ── hosts × devices
       below    memory and disks of a host, for tables of which devices hold the hot rows
       device   memory, memory rate, matrix-product rates, what a kernel launch and a packed byte cost
       inside   the link of a device to the others of its host    (NVLink, shared memory)
       between  the link of a device, or of a whole host, to other hosts    (a port a device, or one a host)

    named_cluster("h100x64")       64 devices, 8 a host                         both are in `catalogue.py`
    load_cluster("cluster.toml")   unknown names are errors that say the nearest known one

A prediction is worth what its constants are worth, so each carries where it comes from: `measured` on the machine,
`published` by who made it, or `assumed` by us (efficiencies above all). `constants()` lists them, and
`ziggurat cluster show NAME` prints them.

Rates are of one direction. A data sheet's "600 GB/s NVLink" counts both, and becomes 300 GB/s here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from ziggurat.config import to_json
from ziggurat.errors import ConfigError, nearest_names
from ziggurat.files import write_text
from ziggurat.typed import Range, checked

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class Origin(StrEnum):
    """The kind of source of a constant."""

    MEASURED = "measured"
    PUBLISHED = "published"
    ASSUMED = "assumed"


class Port(StrEnum):
    """The owner of a link between hosts."""

    DEVICE = "device"  # every device has its own
    HOST = "host"  # the devices of a host share one


class Launch(StrEnum):
    """The time when the program starts the operations of a step."""

    AHEAD = "ahead"  # before the device has done the ones before (GPU streams): a step takes no less than `step_s`
    INLINE = "inline"  # one after the other (CPU): a step takes `step_s` more than its work


@dataclass(frozen=True, kw_only=True)
@checked
class Link:
    """One direction of a link.

    Args:
        bytes_per_s: as sold.
        efficiency: share of it that an exchange reaches.
        latency_s: from the start of an exchange to its first byte.
        message_s: further time for each message that a rank sends in an exchange.
        port: whose `bytes_per_s` it is.
    """

    bytes_per_s: float
    efficiency: float = 0.8
    latency_s: float = 1e-5
    message_s: float = 5e-7
    port: Port = Port.DEVICE

    def __post_init__(self) -> None:
        expect(self.bytes_per_s > 0, "a rate above 0", f"bytes_per_s = {self.bytes_per_s:g}", "link")
        expect(0 < self.efficiency <= 1, "an efficiency of (0, 1]", f"{self.efficiency:g}", "link")
        expect(
            min(self.latency_s, self.message_s) >= 0,
            "times of 0 or more",
            f"{self.latency_s}, {self.message_s}",
            "link",
        )

    @property
    def effective_bytes_per_s(self) -> float:
        """The bytes per second that an exchange gets."""
        return self.bytes_per_s * self.efficiency


@dataclass(frozen=True, kw_only=True)
@checked
class Device:
    """One computing device: a GPU, or a rank's share of a CPU.

    Args:
        name: for people.
        memory_bytes: for tables, dense network, activations and buffers.
        memory_bytes_per_s: of long reads.
        gather_efficiency: share of it that reads of scattered rows reach.
        row_overhead_bytes: bytes that a row's read costs beyond its own: address, index, rest of a burst.
        fp32_flop_per_s: rate of matrix products in FP32.
        tf32_flop_per_s: in TF32; 0 where there is none.
        bf16_flop_per_s: in BF16 or FP16; 0 where it does not pay.
        matmul_efficiency: share of those rates that the layers of a network reach.
        launch_s: time to start one operation (kernel); no part of a step is shorter than its starts.
        packing_bytes_per_s: bytes of an exchange that are gathered, handed over and scattered; takes compute time.
        step_s: of the program beside the work that is counted: the loop, its starts, the loss, waking up.
        launch: whether that adds to the work, or runs ahead of it.
    """

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    gather_efficiency: float = 0.6
    row_overhead_bytes: float = 64.0
    fp32_flop_per_s: float
    tf32_flop_per_s: float = 0.0
    bf16_flop_per_s: float = 0.0
    matmul_efficiency: float = 0.6
    launch_s: float = 5e-6
    packing_bytes_per_s: float
    step_s: float = 0.0
    launch: Launch = Launch.INLINE

    def __post_init__(self) -> None:
        rates = (self.memory_bytes, self.memory_bytes_per_s, self.fp32_flop_per_s, self.packing_bytes_per_s)
        expect(min(rates) > 0, "memory and rates above 0", str(rates), "device")
        shares = (self.gather_efficiency, self.matmul_efficiency)
        expect(all(0 < share <= 1 for share in shares), "efficiencies of (0, 1]", str(shares), "device")
        rest = (self.row_overhead_bytes, self.tf32_flop_per_s, self.bf16_flop_per_s, self.launch_s, self.step_s)
        expect(min(rest) >= 0, "0 or more", str(rest), "device")


@dataclass(frozen=True, kw_only=True)
@checked
class Host:
    """The resources of a host below the memory of its devices.

    Args:
        memory_bytes: of the host; 0: none beside its devices', as where devices are shares of a CPU.
        link_bytes_per_s: of each device from and to it, as an exchange of rows reaches it.
        disk_bytes: of all its disks; 0: none.
        disk_read_rows_per_s: rows in random order, of all its disks.
        disk_written_rows_per_s: replaced, each with what lies in its page.
    """

    memory_bytes: int = 0
    link_bytes_per_s: float = 10e9
    disk_bytes: int = 0
    disk_read_rows_per_s: float = 5e4
    disk_written_rows_per_s: float = 2.5e4

    def __post_init__(self) -> None:
        sizes = (self.memory_bytes, self.disk_bytes)
        expect(min(sizes) >= 0, "bytes of 0 or more", str(sizes), "host")
        rates = (self.link_bytes_per_s, self.disk_read_rows_per_s, self.disk_written_rows_per_s)
        expect(min(rates) > 0, "rates above 0", str(rates), "host")


@dataclass(frozen=True, kw_only=True)
@checked
class Source:
    """The source of one constant.

    Args:
        constant: its name, with the groups it is in: "device.memory_bytes_per_s".
        origin: kind of source.
        text: which one.
    """

    constant: str
    origin: Origin
    text: str


@dataclass(frozen=True, kw_only=True)
class Constant:
    """A number of a cluster, its name, and where it comes from."""

    name: str
    value: float
    origin: Origin
    source: str

    @property
    def shown(self) -> str:
        """The number with a unit that a person can read."""
        return _shown(self.name, self.value)


Hosts = Annotated[int, Range(0, 1 << 17, "the largest jobs have 100,000 ranks")]


@dataclass(frozen=True, kw_only=True)
@checked
class Cluster:
    """A description of machines: hosts, devices, link rates and memory.

    Args:
        name: for people.
        hosts: number of hosts.
        devices_per_host: devices of each; ranks are numbered host after host.
        device: each of them.
        inside: link of a device to the others of its host.
        between: link to other hosts.
        below: what each host has below the memory of its devices.
        reserve: share of a device's memory that a plan leaves alone, for what nobody counts.
        sources: of the constants; those without one count as assumed.
    """

    FORMERLY: ClassVar[Mapping[str, str]] = {"devices_a_host": "devices_per_host"}

    name: str
    hosts: Hosts
    devices_per_host: Hosts
    device: Device
    inside: Link
    between: Link
    below: Host = field(default_factory=Host)
    reserve: float = 0.15
    sources: tuple[Source, ...] = field(default=())

    def __post_init__(self) -> None:
        expect(
            self.hosts >= 1 and self.devices_per_host >= 1,
            "a host and a device or more",
            f"{self.hosts} hosts × {self.devices_per_host} devices",
            "cluster",
        )
        expect(self.world_size <= 1 << 17, f"at most {1 << 17:,} ranks", f"{self.world_size:,}", "cluster")
        expect(0 <= self.reserve < 1, "a reserve of [0, 1)", f"reserve = {self.reserve:g}", "cluster")
        names = [name for name, _ in _leaves(self)]
        for source in self.sources:
            if source.constant not in names:
                near = nearest_names(source.constant, names, most=1)
                raise ConfigError(
                    expected="sources of constants of the cluster",
                    found=f"{source.constant!r}",
                    where="cluster, sources",
                    ways_out=[*(f"did you mean {match!r}?" for match in near), "remove the line"],
                )

    @property
    def world_size(self) -> int:
        """Ranks: one a device."""
        return self.hosts * self.devices_per_host

    @property
    def usable_bytes(self) -> int:
        """Memory of a device without the reserve."""
        return int(self.device.memory_bytes * (1 - self.reserve))

    def host_of(self, rank: int) -> int:
        """The host of a rank."""
        return rank // self.devices_per_host

    def between_bytes_per_s(self) -> float:
        """Return the bytes per second that each device gets of the link between hosts when all devices send."""
        # In an all-to-all the devices of a host send at the same time.
        shared = self.devices_per_host if self.between.port is Port.HOST else 1
        return self.between.effective_bytes_per_s / shared

    def with_hosts(self, hosts: int) -> Cluster:
        """The same machines, another number of hosts."""
        kind = self.name.partition("x")[0]
        return dataclasses.replace(self, hosts=hosts, name=f"{kind}x{hosts * self.devices_per_host}")

    def constants(self) -> tuple[Constant, ...]:
        """Every number, with its source."""
        known = {source.constant: source for source in self.sources}
        nothing = Source(constant="", origin=Origin.ASSUMED, text="nobody says where it comes from")
        found = []
        for name, value in _leaves(self):
            source = known.get(name, nothing)
            found.append(Constant(name=name, value=value, origin=source.origin, source=source.text))
        return tuple(found)

    def describe(self) -> str:
        """Describe the cluster in one line."""
        hosts = f"{self.hosts} host{'s' if self.hosts > 1 else ''}"
        return f"{self.name}: {hosts} × {self.devices_per_host} {self.device.name}"

    def to_toml(self) -> str:
        """The file that `load_cluster` reads."""
        import tomlkit

        data = to_json(self)
        del data["sources"]
        document = tomlkit.document()
        for key, value in data.items():
            document[key] = value
        document["sources"] = {each.constant: f"{each.origin.value}: {each.text}" for each in self.sources}
        return tomlkit.dumps(document)

    def save(self, path: str | Path) -> None:
        """Write as TOML."""
        write_text(path, self.to_toml())


def _leaves(value: DataclassInstance, prefix: str = "") -> Iterator[tuple[str, float]]:
    for entry in dataclasses.fields(value):
        inner = getattr(value, entry.name)
        if dataclasses.is_dataclass(inner) and not isinstance(inner, type):
            yield from _leaves(inner, f"{prefix}{entry.name}.")
        elif isinstance(inner, int | float):
            yield f"{prefix}{entry.name}", float(inner)


def _shown(name: str, value: float) -> str:
    if name.endswith("row_overhead_bytes"):
        return f"{value:g} B"
    # Longer endings first: "flop_per_s" ends in "_s", too.
    for suffix, unit, scale in (
        ("flop_per_s", "TFLOP/s", 1e12),
        ("bytes_per_s", "GB/s", 1e9),
        ("rows_per_s", "million rows/s", 1e6),
        ("_bytes", "GB", 1e9),
        ("_s", "µs", 1e-6),
    ):
        if name.endswith(suffix):
            return f"{value / scale:,.4g} {unit}"
    return f"{value:g}"


def expect(fits: bool, expected: str, found: str, where: str) -> None:
    """Raise a `ConfigError` unless a number of a cluster is possible."""
    if not fits:
        raise ConfigError(expected=expected, found=found, where=where, ways_out="correct the number")
