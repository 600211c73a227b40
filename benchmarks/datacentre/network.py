"""Network: hosts that are network namespaces, joined by links whose rate is limited.

    namespace of host 0     namespace of the switch           namespace of host 1
    ranks 0, 1              bridge "core"                     ranks 2, 3
    eth0 10.77.0.1 ═══veth═══ port0 ─┴─ port1 ═══veth═══ eth0 10.77.0.2
         └ tbf, up              └ tbf, down   (token bucket filters, both directions of every link)

With racks every rack has a bridge of its own, joined to the core by a veth pair with limits of its own. Two ranks of
one host talk over its loopback, without a limit, as devices of one host do.

Life and death. A namespace lives as long as a process in it. Here each is held by a `cat` that reads a pipe from this
process: when this process ends, however it ends (exception, SIGTERM, `kill -9`), the pipes close, the `cat`s end, and
the kernel removes namespaces, devices and limits. Nothing has a name outside, so there is nothing to clean up after a
predecessor either. All addresses are from 10.77.0.0/16, inside the namespaces only.

Without root the same is done inside a user namespace, where the machine allows that. Where neither is possible,
`open_network` returns `PlainNetwork`: all ranks on the loopback, with the reason.

What it does not emulate: latency (a link adds some 20 µs), loss, and that real hosts do not share their cores.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ziggurat.errors import ConfigError, TopologyError

SUBNET = "10.77.0"
_MTU = 1500
_BURST_BYTES = 128 * 1024  # at least one segment of 64 KiB, or nothing passes
_QUEUE_BYTES = 4 * 1024 * 1024
_FIRST_PORT = 29600
_TOOLS = ("unshare", "nsenter", "ip", "tc", "cat")


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """A data centre.

    Args:
        hosts: number of hosts, 1 to 64.
        ranks_per_host: ranks that will run in each.
        racks: number of racks; must divide the hosts.
        rate_mbit: of each host's link in each direction, Mbit/s; 0: no limit.
        rack_rate_mbit: of each rack's link to the core; 0: no limit.
    """

    hosts: int = 2
    ranks_per_host: int = 2
    racks: int = 1
    rate_mbit: float = 1000.0
    rack_rate_mbit: float = 0.0

    def __post_init__(self) -> None:
        fits = 1 <= self.hosts <= 64 and self.ranks_per_host >= 1 and self.racks >= 1 and self.hosts % self.racks == 0
        if not fits or min(self.rate_mbit, self.rack_rate_mbit) < 0:
            raise ConfigError(
                expected="1 to 64 hosts, racks that divide them, a rank or more a host, rates of 0 (none) or more",
                found=f"{self.hosts} hosts, {self.racks} racks, {self.ranks_per_host} ranks a host, "
                f"{self.rate_mbit:g} and {self.rack_rate_mbit:g} Mbit/s",
                where="emulated data centre",
                ways_out="correct --hosts, --racks, --ranks, --rate or --rack-rate",
            )

    @property
    def num_ranks(self) -> int:
        """Ranks of the job."""
        return self.hosts * self.ranks_per_host

    def describe(self) -> str:
        """One line for reports."""
        racks = f" in {self.racks} racks" if self.racks > 1 else ""
        rack_rate = f", {self.rack_rate_mbit:g} Mbit/s a rack" if self.racks > 1 and self.rack_rate_mbit else ""
        rate = f"{self.rate_mbit:g} Mbit/s a host" if self.rate_mbit else "links without limit"
        return f"{self.hosts} hosts × {self.ranks_per_host} ranks{racks}, {rate}{rack_rate}"


class Network:
    """The emulated network; a context manager.

    Args:
        config: hosts and rates.
        with_user_namespace: no root needed; chosen by `open_network`.
    """

    is_emulated = True
    reason = ""
    interface = "eth0"

    def __init__(self, config: NetworkConfig, *, with_user_namespace: bool = False) -> None:
        self.config = config
        self._unshare = ["unshare", "-n"] if not with_user_namespace else ["unshare", "-U", "-r", "-n"]
        self._enter = (
            ["nsenter", "-n"] if not with_user_namespace else ["nsenter", "-U", "--preserve-credentials", "-n"]
        )
        self._holders: list[subprocess.Popen[bytes]] = []
        self._limits: list[tuple[int, str, bool]] = []  # holder, device, whether it is a rack's
        self._ports = 0

    # ------------------------------------------------------------------------------------------------- life and death

    def __enter__(self) -> Network:
        try:
            switch = self._hold(self._unshare)
            for _ in range(self.config.hosts):
                self._hold([*self._inside(switch), "unshare", "-n"])
            self._connect()
            self.limit(self.config.rate_mbit, rack_rate_mbit=self.config.rack_rate_mbit)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the holders; the kernel removes the rest when the last process in a namespace is gone."""
        for holder in reversed(self._holders):
            with contextlib.suppress(BrokenPipeError):
                assert holder.stdin is not None
                holder.stdin.close()
        for holder in self._holders:
            try:
                holder.wait(timeout=5)
            except subprocess.TimeoutExpired:
                holder.kill()
                holder.wait()
            for pipe in (holder.stdout, holder.stderr):
                if pipe is not None:
                    pipe.close()
        self._holders.clear()

    # ------------------------------------------------------------------------------------------------------ using it

    def address(self, host: int) -> str:
        """Where the ranks of a host are reached."""
        return f"{SUBNET}.{host + 1}"

    def command(self, host: int, words: list[str]) -> list[str]:
        """What to start instead of `words`, to run it on a host."""
        return [*self._inside(self._holders[1 + host]), *words]

    def limit(self, rate_mbit: float, *, rack_rate_mbit: float = 0.0) -> None:
        """Set the rate of every host link, and of every rack link, in place; 0 removes the limit."""
        for holder, device, is_rack in self._limits:
            rate = rack_rate_mbit if is_rack else rate_mbit
            place = ["dev", device, "root"]
            if rate:
                bucket = ["tbf", "rate", f"{rate:g}mbit", "burst", str(_BURST_BYTES), "limit", str(_QUEUE_BYTES)]
                self._run(holder, ["tc", "qdisc", "replace", *place, *bucket])
            elif " tbf " in self._run(holder, ["tc", "qdisc", "show", *place]):
                self._run(holder, ["tc", "qdisc", "del", *place])

    def free_port(self) -> int:
        """A port that nobody in the hosts uses: nobody else is in them."""
        self._ports += 1
        return _FIRST_PORT + self._ports

    def sent_bytes(self) -> list[int]:
        """Bytes that left each host since the network was made, as its interface counts them, headers included."""
        words = ["ip", "-s", "-j", "link", "show", "dev", "eth0"]
        answers = [json.loads(self._run(1 + host, words)) for host in range(self.config.hosts)]
        return [int(answer[0]["stats64"]["tx"]["bytes"]) for answer in answers]

    # ----------------------------------------------------------------------------------------------------- inside it

    def _hold(self, words: list[str]) -> subprocess.Popen[bytes]:
        """Start a holder: `cat` that says it is there by returning what it is told."""
        holder = subprocess.Popen(
            [*words, "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
        )
        self._holders.append(holder)
        assert holder.stdin is not None
        assert holder.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            holder.stdin.write(b".")
        if holder.stdout.read(1) != b".":
            assert holder.stderr is not None
            raise _failed(words, holder.stderr.read().decode(errors="replace"))
        return holder

    def _inside(self, holder: subprocess.Popen[bytes]) -> list[str]:
        return [*self._enter, "-t", str(holder.pid)]

    def _run(self, holder: int, words: list[str]) -> str:
        command = [*self._inside(self._holders[holder]), *words]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise _failed(words, done.stderr)
        return done.stdout

    def _connect(self) -> None:
        """Bridges, links, addresses."""
        racks, per_rack = self.config.racks, self.config.hosts // self.config.racks
        lines = ["link set lo up", *_bridge("core")]
        for rack in range(racks if racks > 1 else 0):
            lines += [
                *_bridge(f"rack{rack}"),
                f"link add up{rack} mtu {_MTU} type veth peer name down{rack} mtu {_MTU}",
            ]
            lines += [f"link set up{rack} master rack{rack} up", f"link set down{rack} master core up"]
            self._limits += [(0, f"up{rack}", True), (0, f"down{rack}", True)]
        for host in range(self.config.hosts):
            bridge = f"rack{host // per_rack}" if racks > 1 else "core"
            pid = self._holders[1 + host].pid
            lines.append(f"link add port{host} mtu {_MTU} type veth peer name eth0 netns {pid} mtu {_MTU}")
            lines.append(f"link set port{host} master {bridge} up")
            self._limits += [(0, f"port{host}", False), (1 + host, "eth0", False)]
        for line in lines:
            self._run(0, ["ip", *line.split()])
        for host in range(self.config.hosts):
            for line in ("link set lo up", f"addr add {self.address(host)}/16 dev eth0", "link set eth0 up"):
                self._run(1 + host, ["ip", *line.split()])


@dataclass(kw_only=True)
class PlainNetwork:
    """All ranks on the loopback, where no namespaces may be made: the same interface, no limits.

    Args:
        config: what was asked for; used to count and to predict.
        reason: why there are no namespaces.
    """

    config: NetworkConfig
    reason: str
    is_emulated: bool = field(default=False, init=False)
    interface: str = field(default="lo", init=False)

    def __enter__(self) -> PlainNetwork:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing to remove."""

    def address(self, host: int) -> str:
        """The loopback."""
        del host
        return "127.0.0.1"

    def command(self, host: int, words: list[str]) -> list[str]:
        """The command itself."""
        del host
        return words

    def limit(self, rate_mbit: float, *, rack_rate_mbit: float = 0.0) -> None:
        """There is nothing to limit."""
        del rate_mbit, rack_rate_mbit

    def free_port(self) -> int:
        """A port of the loopback that is free now."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()[1]

    def sent_bytes(self) -> list[int]:
        """No links: nothing is known."""
        return []


@contextlib.contextmanager
def open_network(config: NetworkConfig, *, emulate: bool = True) -> Iterator[Network | PlainNetwork]:
    """The emulated network where it is possible, with root or without; else plain local ranks, with the reason.

    Args:
        config: hosts and rates.
        emulate: False asks for plain local ranks.
    """
    opened, reasons = None, ["plain local ranks were asked for"]
    if emulate:
        opened, reasons = _first_that_works(config)
    network = opened or PlainNetwork(config=config, reason="; ".join(reasons))
    try:
        yield network
    finally:
        network.close()


def _first_that_works(config: NetworkConfig) -> tuple[Network | None, list[str]]:
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return None, [f"not installed: {', '.join(missing)} (packages iproute2 and util-linux)"]
    attempts: list[tuple[str, Callable[[], Network]]] = [
        ("in a user namespace", lambda: Network(config, with_user_namespace=True))
    ]
    if os.geteuid() == 0:
        attempts.insert(0, ("as root", lambda: Network(config)))
    reasons = []
    for how, make in attempts:
        try:
            return make().__enter__(), []
        except TopologyError as error:
            reasons.append(f"{how}: {error.found}")
    return None, reasons


def _bridge(name: str) -> list[str]:
    return [f"link add {name} type bridge", f"link set {name} mtu {_MTU} up"]


def _failed(words: list[str], message: str) -> TopologyError:
    return TopologyError(
        expected="to be allowed to make network namespaces, virtual links and token bucket filters",
        found=f"`{' '.join(words)}` says: {message.strip() or 'nothing'}",
        where="emulated data centre",
        ways_out=(
            "run as root, or allow user namespaces (sysctl user.max_user_namespaces)",
            "without them the benchmark runs plain local ranks, counts bytes and predicts times",
        ),
    )
