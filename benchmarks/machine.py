"""The machine, the versions and the commit that a figure belongs to. Names no host, no user and no path."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path

from benchmarks.harness import PEER_PYTHON, ROOT

INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")
PACKAGES = ("torch", "fbgemm_gpu-cpu", "torchrec", "fuxictr", "ray", "polars", "pyarrow", "numpy")
RETRIEVAL_PACKAGES = ("faiss-cpu", "scann-core", "usearch", "hnswlib")


def describe_machine() -> dict[str, object]:
    """CPU, cores, caches, memory and the vector instructions that matter for matrix products."""
    cpu = _cpu_fields()
    flags = set(cpu.get("flags", "").split())
    return {
        "cpu": cpu.get("model name", platform.processor()),
        "family_model": f"{cpu.get('cpu family', '?')}/{cpu.get('model', '?')}",
        "cores": len(os.sched_getaffinity(0)),
        "cache": _largest_cache(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "instructions": [name for name in INSTRUCTIONS if name in flags],
        "os": f"{platform.system()} {platform.release().split('-')[0]}",
    }


def machine_slug(machine: dict[str, object]) -> str:
    """A file name for the machine: `amd-epyc-25-1-2-cores`."""
    words = f"{machine['cpu']} {machine['family_model']} {machine['cores']} cores"
    return "-".join("".join(letter if letter.isalnum() else " " for letter in words.lower()).split())


def describe_versions(python: Path = PEER_PYTHON, *, packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Versions of Python and of what contestants use.

    Args:
        python: the interpreter of `.venv-bench`, where contestants run; benchmarks without peers need none, and then
            this one is described, with the packages that it has.
        packages: whose versions are wanted.
    """
    code = (
        "import importlib.metadata as m, json, platform, sys\n"
        "has = {d.metadata['Name'].lower().replace('_', '-') for d in m.distributions()}\n"
        "names = [n for n in sys.argv[1:] if n.lower().replace('_', '-') in has]\n"
        "print(json.dumps({'python': platform.python_version(), **{n: m.version(n) for n in names}}))"
    )
    interpreter = str(python) if python.exists() else sys.executable
    done = subprocess.run([interpreter, "-c", code, *packages], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def describe_commit() -> str:
    """Commit of the checkout, with `+changes` if tracked files differ from it; "unknown" outside git."""
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", "ziggurat", "benchmarks", "requirements")
    except (subprocess.CalledProcessError, FileNotFoundError):
        return "unknown"
    return f"{commit}+changes" if changed else commit


def describe_run() -> dict[str, object]:
    """All of the above with the date: the head of every report."""
    machine = describe_machine()
    return {
        "machine": machine,
        "versions": describe_versions(),
        "commit": describe_commit(),
        "date": date.today().isoformat(),
    }


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _cpu_fields() -> dict[str, str]:
    fields: dict[str, str] = {}
    with open("/proc/cpuinfo") as file:
        for line in file:
            key, _, value = line.partition(":")
            if not key.strip():
                break
            fields[key.strip()] = value.strip()
    return fields


def _largest_cache() -> str:
    folder = "/sys/devices/system/cpu/cpu0/cache"
    found = []
    for index in range(8):
        try:
            with open(f"{folder}/index{index}/level") as level, open(f"{folder}/index{index}/size") as size:
                found.append((int(level.read()), size.read().strip()))
        except OSError:
            break
    return f"L{max(found)[0]} {max(found)[1]}" if found else "unknown"
