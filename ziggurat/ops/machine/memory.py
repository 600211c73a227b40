"""How much memory this process may take: what the machine has free, within the limits of its containers.

    /proc/meminfo                     MemTotal; MemAvailable (free, and what the kernel would give back) and free swap
    cgroup v2, this one and parents   memory.max − (memory.current − inactive_file)
    cgroup v1, this one and parents   memory.limit_in_bytes − (memory.usage_in_bytes − total_inactive_file)

The least of these counts. A container sees the whole machine in /proc/meminfo, so that without the second and third
line a program in it would take memory until the kernel kills it. `inactive_file` is file cache, which is given back
first. A system without /proc (macOS) tells only its whole memory.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from ziggurat.errors import ConfigError

_NO_LIMIT = 1 << 60  # cgroup v1 writes "none" as a number near 2^63
_SYSTEM = Path("/")
_UNITS = (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10))


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of a device, as far as this process may use it.

    Args:
        total_bytes: the device's, or the limit on this process.
        free_bytes: of it, what could be taken now.
        owner: whose it is, for messages.
    """

    total_bytes: int
    free_bytes: int
    owner: str

    def text(self) -> str:
        """Return the memory in words: "15.2 GiB free of 24.0 GiB (this machine)"."""
        return f"{size_text(self.free_bytes)} free of {size_text(self.total_bytes)} ({self.owner})"


def memory_of(device: torch.device) -> Memory:
    """The memory of a device: a GPU's own, else the host's."""
    if device.type != "cuda":
        return host_memory()
    free, total = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch's own cache
    return Memory(total_bytes=total, free_bytes=free + kept, owner=str(device))


def host_memory(root: Path = _SYSTEM) -> Memory:
    """The memory of this machine, or of the container that this process runs in.

    Args:
        root: of the file system that tells it; another one for tests.
    """
    rooms = [_machine(root), *_version_2(root), *_version_1(root)]
    # Not one room for both: a parent's limit may leave less than the group's own, which is what an error should name.
    least = min(rooms, key=lambda room: room.free_bytes)
    limit = min(rooms, key=lambda room: room.total_bytes)
    return Memory(total_bytes=limit.total_bytes, free_bytes=max(least.free_bytes, 0), owner=limit.owner)


def size_text(num_bytes: float) -> str:
    """Write a number of bytes for people: 512 MiB, 2.30 GiB."""
    for unit, power in (("TiB", 40), ("GiB", 30)):
        if abs(num_bytes) >= 1 << power:
            return f"{num_bytes / (1 << power):,.2f} {unit}"
    return f"{num_bytes / 2**20:.0f} MiB" if abs(num_bytes) >= 1 << 20 else f"{num_bytes / 2**10:.0f} KiB"


def enough_text(num_bytes: int) -> str:
    """Write the least size with few digits that is no smaller: what an error may ask for. 512 MiB, 2.31 GiB."""
    unit, power = next((each for each in _UNITS if num_bytes >= 1 << each[1]), _UNITS[-1])
    digits = 2 if power >= 30 or num_bytes < 10 << power else 0
    return f"{math.ceil(num_bytes * 10**digits / (1 << power)) / 10**digits:,.{digits}f} {unit}"


def size_of_text(text: str, *, where: str) -> int:
    """Bytes as people write them: "4GiB", "500 MB", "1.5 TiB", "4096".

    Args:
        text: a number, and a unit of 1,000 (KB, MB, GB, TB) or of 1,024 (KiB, MiB, GiB, TiB).
        where: the setting or flag, for the error.

    Raises:
        ConfigError: it is no such text, or not a byte.
    """
    found = re.fullmatch(r"\s*(\d[\d_,]*\.?\d*)\s*([kmgt]?)(i?)b?\s*", text, re.IGNORECASE)
    if found is not None and not (found[3] and not found[2]):
        number = float(found[1].replace("_", "").replace(",", ""))
        power = " kmgt".index(found[2].lower() or " ")
        size = int(number * (1024 if found[3] else 1000) ** power)
        if size >= 1:
            return size
    raise ConfigError(
        expected="bytes: a number with a unit, such as 4GiB, 500MB or 1.5TiB",
        found=repr(text),
        where=where,
        ways_out=f"{where} 4GiB",
    )


def unit_missing(text: str, *, setting: str) -> str:
    """A way out where a size that is too small was written without a unit: "400" means 400 bytes; "" with a unit.

    Args:
        text: as `size_of_text` reads it.
        setting: the flag.
    """
    number = text.strip()
    if number[-1:].isalpha():
        return ""
    return f"{number} without a unit means {number} bytes: {setting} {number}MiB, or {number}GiB"


def _machine(root: Path) -> Memory:
    lines = _text(root / "proc/meminfo").splitlines()
    known = {name: 1024 * int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if rest}
    total = known.get("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # Swap counts: what the kernel can move out of the way can be taken.
    free = known.get("MemAvailable", total) + known.get("SwapFree", 0)
    return Memory(total_bytes=total, free_bytes=free, owner="this machine")


def _version_2(root: Path) -> list[Memory]:
    return _limits(root, "", mount="sys/fs/cgroup", limit="memory.max", usage="memory.current", cache="inactive_file")


def _version_1(root: Path) -> list[Memory]:
    return _limits(
        root,
        "memory",
        mount="sys/fs/cgroup/memory",
        limit="memory.limit_in_bytes",
        usage="memory.usage_in_bytes",
        cache="total_inactive_file",
    )


def _limits(root: Path, controller: str, *, mount: str, limit: str, usage: str, cache: str) -> list[Memory]:
    """Return the memory that each cgroup from this process's own up to the root leaves; [] where there are none."""
    found = list[Memory]()
    for folder in _folders(root / mount, _own_group(root, controller)):
        most = _number(folder / limit)
        used = _number(folder / usage)
        if most is None or used is None or most >= _NO_LIMIT:
            continue
        pairs = (line.split() for line in _text(folder / "memory.stat").splitlines())
        given_back = next((int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] == cache), 0)
        found.append(Memory(total_bytes=most, free_bytes=most - used + given_back, owner="the limit of this container"))
    return found


def _own_group(root: Path, controller: str) -> str:
    """The path of this process's cgroup, as /proc/self/cgroup tells it: `4:memory:/path`, `0::/path`."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        parts = line.split(":", 2)
        # Version 2 names no controller: its line is 0::/path, and "" is among the parts of "".
        if len(parts) == 3 and controller in parts[1].split(","):
            return parts[2].strip("/")
    return ""


def _folders(mount: Path, group: str) -> list[Path]:
    """The folder of a cgroup and those above it. Inside a container the path may be the host's, and is not there."""
    parts = [part for part in group.split("/") if part not in ("", "..")]
    return [mount.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
