"""The memory of a process: the machine's, within the limits of its container."""

from __future__ import annotations

from pathlib import Path

import pytest

from ziggurat.ops.machine.memory import enough_text, host_memory, size_of_text, size_text

GIB = 1 << 30
MEMINFO = "MemTotal: 25165824 kB\nMemFree: 1024 kB\nMemAvailable: 16777216 kB\nSwapFree: 1048576 kB\n"  # 24, 16, 1 GiB


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


VERSION_2 = {
    "proc/self/cgroup": "0::/job/step\n",
    "sys/fs/cgroup/job/memory.max": f"{8 * GIB}\n",  # of the parent: its children share it
    "sys/fs/cgroup/job/memory.current": f"{5 * GIB}\n",
    "sys/fs/cgroup/job/memory.stat": f"anon 7\ninactive_file {GIB}\n",
    "sys/fs/cgroup/job/step/memory.max": "max\n",
    "sys/fs/cgroup/job/step/memory.current": f"{GIB}\n",
}
VERSION_1 = {
    "proc/self/cgroup": "5:cpu,cpuacct:/other\n4:memory:/not/mounted/here\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{3 * GIB}\n",
    "sys/fs/cgroup/memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 2}\n",
}


@pytest.mark.parametrize(
    ("files", "total", "free", "owner"),
    [
        ({}, 24, 17, "this machine"),
        (VERSION_2, 8, 4, "the limit of this container"),
        (VERSION_1, 4, 1.5, "the limit of this container"),
        ({**VERSION_1, "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, 24, 17, "this machine"),
    ],
)
def test_the_least_limit_counts(tmp_path: Path, files: dict[str, str], total: float, free: float, owner: str) -> None:
    memory = host_memory(system(tmp_path, files))
    assert (memory.total_bytes / GIB, memory.free_bytes / GIB, memory.owner) == (total, free, owner)


def test_this_machine_has_memory() -> None:
    memory = host_memory()
    assert memory.free_bytes > 0
    assert memory.total_bytes > 0


def test_bytes_are_written_for_people() -> None:
    assert [size_text(each) for each in (2048, 3 << 20, 5 << 29, 3 << 40)] == ["2 KiB", "3 MiB", "2.50 GiB", "3.00 TiB"]


@pytest.mark.parametrize("num_bytes", [1, 400, 1024, 1025, 10_239, (1 << 20) - 1, 26_040_000, 2_469_606_196, 3 << 41])
def test_what_is_enough_is_written_no_smaller_and_little_larger(num_bytes: int) -> None:
    named = size_of_text(enough_text(num_bytes), where="--limit")
    assert num_bytes <= named <= 1.1 * num_bytes + 11
