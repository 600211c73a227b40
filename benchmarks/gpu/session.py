"""Run everything that wants a GPU on a machine that has one for minutes: `python -m benchmarks.gpu.session OUT`.

    every part is a process with its own limit; what it wrote stands in OUT when the next one begins

    facts      what the machine is
    products   dots, cross layers, Wukong's norm, messages
    truth      the CPU's losses, resume
    lookups    rows against the rate of a copy
    tests      what `make test-gpu` runs, in as many processes as pytest-xdist and the cores allow
    kernels    every launch against its bytes, search, a whole step (`benchmarks/kernels_gpu.py`)
    steps      DLRM against plain and tuned torch
    tune       launches of this family of GPUs; only where it is named

The machine may have Python, torch, triton, numpy, pyarrow, jaxtyping, safetensors and pytest alone: nothing is
installed, nothing is downloaded. A part that fails, hangs or is killed costs its own time, and the next one begins.
Short parts stand first. OUT has `session.json` (each part's seconds, exit code, report and the end of
its output, written again after every part: this one file is enough to take away), a log a part, and their reports.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_TAIL = 12_000  # characters of a part's output that stand in session.json
_FACTS = (
    "import torch, sys; print(sys.version); print(torch.__version__, torch.version.cuda); "
    "print(torch.cuda.get_device_properties(0)); import triton; print('triton', triton.__version__)"
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A process of the session.

    Args:
        name: of the part, of its log and of its JSON.
        arguments: of Python.
        limit_s: it is killed after so long.
        is_default: it runs unless parts were named.
    """

    name: str
    arguments: tuple[str, ...]
    limit_s: float
    is_default: bool = True


def parts(out: Path) -> tuple[Part, ...]:
    """Return all parts in their order."""
    return (
        Part(name="facts", arguments=("-c", _FACTS), limit_s=30),
        _bench(out, "products", limit_s=45),
        _bench(out, "truth", limit_s=30),
        _bench(out, "lookups", limit_s=45),
        Part(name="tests", arguments=_test_arguments(out), limit_s=150),
        Part(name="kernels", arguments=_kernel_arguments(out), limit_s=110),
        _bench(out, "steps", limit_s=150),
        _bench(out, "tune", limit_s=120, is_default=False, more=("--tune", str(out / "launches.json"))),
    )


def main(arguments: Sequence[str]) -> int:
    """Run the parts; return 1 where one of them failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.session", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("out", type=Path, help="folder of what is found; made if it is not there")
    parser.add_argument("--parts", default="", help="names, separated by commas; all but tune unless given")
    parser.add_argument("--seconds", type=float, default=280.0, help="no part begins, and none runs on, after so long")
    options = parser.parse_args(arguments)
    out = options.out.resolve()
    known = {part.name: part for part in parts(out)}
    names = options.parts.split(",") if options.parts else [name for name, part in known.items() if part.is_default]
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"no such parts: {', '.join(unknown)}; there are {', '.join(known)}")
    out.mkdir(parents=True, exist_ok=True)
    return run_parts([known[name] for name in names], out=out, seconds=options.seconds)


def run_parts(chosen: Sequence[Part], *, out: Path, seconds: float) -> int:
    """Run parts one after the other, whatever becomes of each; return 1 where one failed.

    Args:
        chosen: the parts.
        out: folder for `session.json` and the logs.
        seconds: for all of them: a part's limit is cut to what is left, and one for which nothing is left is left out.
    """
    begin, found = time.monotonic(), {}
    for part in chosen:
        left = seconds - (time.monotonic() - begin)
        found[part.name] = _run(part, out=out, limit_s=min(part.limit_s, left)) if left > 1 else {"left_out": True}
        (out / "session.json").write_text(json.dumps(found, indent=1) + "\n")
        print(f"{part.name}: {found[part.name].get('exit', 'left out: no time')}", flush=True)
    return int(any(each.get("exit") != 0 for each in found.values()))


def _run(part: Part, *, out: Path, limit_s: float) -> dict[str, object]:
    """Run a part in a process group of its own, so that what it started ends with it."""
    begin, log = time.monotonic(), out / f"{part.name}.log"
    places = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": places, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    report = out / f"{part.name}.json"
    report.unlink(missing_ok=True)  # of an earlier session
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, *part.arguments],
            stdout=stream,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        try:
            code: int | str = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = f"killed after {limit_s:.0f} s"
    tail = log.read_bytes().decode(errors="replace")[-_TAIL:]
    found = {"exit": code, "seconds": round(time.monotonic() - begin, 1), "output": tail}
    if report.is_file():
        try:
            found["report"] = json.loads(report.read_text())
        except ValueError:
            found["report"] = f"{report.name} was cut off"
    return found


def _bench(out: Path, name: str, *, limit_s: float, is_default: bool = True, more: tuple[str, ...] = ()) -> Part:
    more = more or ("--parts", name)
    arguments = ("-m", "benchmarks.main", "gpu", "--json", str(out / f"{name}.json"), *more)
    return Part(name=name, arguments=arguments, limit_s=limit_s, is_default=is_default)


def _kernel_arguments(out: Path) -> tuple[str, ...]:
    return ("-m", "benchmarks.kernels_gpu", "--out", str(out / "kernels.json"))


def _test_arguments(out: Path) -> tuple[str, ...]:
    """Return pytest's arguments: the Makefile's list, in as many processes as pytest-xdist and the cores allow."""
    lines = (ROOT / "Makefile").read_text().replace("\\\n", " ").splitlines()
    lists = {name.strip(): words.split() for name, _, words in (line.partition(":=") for line in lines)}
    ignored = [f"--ignore={file}" for file in lists["BARE_NEEDS_MORE"]]
    return (
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-rs",
        "--durations=10",
        f"--junitxml={out / 'tests.xml'}",
        *_processes(),
        *ignored,
        *lists["GPU_TESTS"],
    )


def _processes() -> tuple[str, ...]:
    if importlib.util.find_spec("xdist") is None:
        return ()
    return ("-n", str(min(8, len(os.sched_getaffinity(0)))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
