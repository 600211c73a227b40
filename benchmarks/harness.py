"""Harness: run contestants in turns, in one run, and compare them round by round.

A machine drifts (neighbours, clock, temperature), so rates measured one after the other cannot be divided. Here every
contestant lives in its own process for the whole run; a *round* gives each one turn of about `turn_s` seconds, in an
order that rotates from round to round, and a ratio is the median over rounds of (ours / peer *in that round*).

    round 1   ours │ TorchRec │ plain │ matmul          only one runs at a time; the others sleep in a read
    round 2   TorchRec │ plain │ matmul │ ours
    …                                                   rate = samples / seconds; median, p10, p90 over rounds

Threads are pinned to the first `threads` cores the process may use. The share of CPU time that other processes took
during the turns is recorded (`others_cpu_share`): above a few per cent, the rates are too low, the ratios usually hold.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.workload import Workload
from ziggurat.errors import ConfigError, MissingDependencyError

ROOT = Path(__file__).resolve().parent.parent
# Interpreters: of most contestants; with the versions that RecTools asks for; with the newest TorchRec and its torch.
PEERS = ".venv-bench"
RECTOOLS = ".venv-rectools"
NEWEST_PEERS = ".venv-bench-newest"
PEER_PYTHON = ROOT / PEERS / "bin" / "python"


@dataclass(frozen=True, kw_only=True)
class RoundsConfig:
    """How long to measure.

    Args:
        rounds: turns of each contestant that count.
        turn_s: about how long one turn takes.
        warmup_s: how long each contestant runs before the first round.
        threads: CPU threads of each contestant.
        gap_s: pause between turns, so that spinning threads of the last one are asleep.
    """

    rounds: int = 11
    turn_s: float = 0.7
    warmup_s: float = 1.5
    threads: int = 2
    gap_s: float = 0.05


QUICK = RoundsConfig(rounds=5, turn_s=0.3, warmup_s=0.5)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Who takes part.

    Args:
        name: shown in reports; unique in a run.
        module: the worker module, run as `python -m module` in `.venv-bench`.
        workload: what it trains on.
        settings: passed to the worker as JSON.
        samples_per_step: samples of one step; 0: the workload's batch size.
        env: further environment variables of the process (cache folders).
        group: what it is compared within (a panel of the plot); "": the workload's name.
        venv: folder of the interpreter that runs it.
        root: the checkout whose packages it imports; the interpreter is always this one's.
    """

    name: str
    module: str
    workload: Workload = field(default_factory=Workload)
    settings: Mapping[str, object] = field(default_factory=dict)
    samples_per_step: float = 0.0
    env: dict[str, str] = field(default_factory=dict)
    group: str = ""
    venv: str = PEERS
    root: Path = ROOT

    @property
    def group_name(self) -> str:
        """What it is compared within."""
        return self.group or self.workload.name


@dataclass(kw_only=True)
class Measured:
    """What a contestant did.

    Args:
        rates: samples a second, one a round (steps a second of `samples_per_step`).
        cpu_rates: samples per CPU second, one a round.
        others_cpu_share: CPU time of other processes during its turns, as a share of all cores, one a round.
        versions: of the packages that its process has imported, see `worker.VERSIONED`.
    """

    entry: Entry
    info: dict[str, object]
    build_s: float
    first_step_s: float
    rates: list[float] = field(default_factory=list)
    cpu_rates: list[float] = field(default_factory=list)
    others_cpu_share: list[float] = field(default_factory=list)
    peak_rss_bytes: float = 0.0
    last_value: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def versioned_name(self) -> str:
        """Its name and the versions in its process: "TorchRec: FP32 eager (torchrec 1.8.0, torch 2.13.0+cpu)"."""
        versions = ", ".join(f"{package} {version}" for package, version in self.versions.items())
        return f"{self.entry.name} ({versions})" if versions else self.entry.name

    @property
    def rate(self) -> float:
        """Median rate."""
        return statistics.median(self.rates)

    def to_json(self) -> dict[str, object]:
        """Plain data for the report."""
        low, high = percentiles(self.rates)
        return {
            "name": self.entry.name,
            "group": self.entry.group_name,
            "settings": self.entry.settings,
            "info": self.info,
            "versions": dict(self.versions),
            "samples_per_s": {
                "median": self.rate,
                "p10": low,
                "p90": high,
                "rounds": [round(r, 1) for r in self.rates],
            },
            "samples_per_cpu_s": statistics.median(self.cpu_rates),
            "others_cpu_share": statistics.median(self.others_cpu_share),
            "build_s": self.build_s,
            "first_step_s": self.first_step_s,
            "peak_rss_bytes": self.peak_rss_bytes,
            "last_value": self.last_value,
        }


class WorkerError(RuntimeError):
    """A contestant failed; carries its traceback."""


class Worker:
    """One contestant's process. Use as a context manager.

    Args:
        entry: what to start.
        threads: pinned cores and intra-op threads.
        first_steps: steps right after building, timed as `first_step_s` (1: with compilation; 0: none, for losses).
    """

    def __init__(self, entry: Entry, *, threads: int, first_steps: int = 1) -> None:
        python = ROOT / entry.venv / "bin" / "python"
        if not python.exists():
            raise MissingDependencyError(
                expected=f"the interpreter of the peers, {entry.venv}",
                found=f"no {python}",
                where="benchmarks/harness.py",
                ways_out=("bash benchmarks/setup.sh (about 2 minutes)", "make bench does that and runs everything"),
            )
        self.entry = entry
        cores = sorted(os.sched_getaffinity(0))[:threads]
        env = {**os.environ, **entry.env, "PYTHONPATH": str(entry.root), "OMP_NUM_THREADS": str(threads)}
        env["PYTHONWARNINGS"] = "ignore"
        self._process = subprocess.Popen(
            [str(python), "-m", entry.module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if not os.environ.get("BENCH_VERBOSE") else None,
            text=True,
            cwd=entry.root,
            env=env,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        settings = {"threads": threads, **entry.settings}
        self.built = self._ask(
            {"op": "build", "workload": entry.workload.to_json(), "settings": settings, "first_steps": first_steps}
        )

    def run(self, steps: int) -> dict[str, float]:
        """One turn."""
        return self._ask({"op": "run", "steps": steps})

    def losses(self, steps: int) -> list[float]:
        """Train and return every loss."""
        return self._ask({"op": "losses", "steps": steps})["losses"]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, command: dict[str, object]) -> dict:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(f"{self.entry.name}: the process ended with code {self._process.wait()}")
        reply = json.loads(line)
        if "error" in reply:
            self.close()
            raise WorkerError(f"{self.entry.name}: {reply['error'][:300]}\n{reply['traceback'][-2000:]}")
        return reply


def measure(entries: Sequence[Entry], config: RoundsConfig) -> dict[str, Measured]:
    """Run all contestants in interleaved rounds.

    Returns:
        One result an entry, by name, in order.

    Raises:
        WorkerError: one could not be built or failed.
    """
    workers: dict[str, Worker] = {}
    try:
        results: dict[str, Measured] = {}
        for entry in entries:
            say(f"  starting {entry.name}")
            worker = workers[entry.name] = Worker(entry, threads=config.threads)
            results[entry.name] = Measured(
                entry=entry,
                info=worker.built["info"],
                build_s=worker.built["build_s"],
                first_step_s=worker.built["first_step_s"],
                versions=worker.built.get("versions", {}),  # the worker of an older commit does not say
            )
        _expect_same_network(results)
        steps = {name: _calibrate(worker, config) for name, worker in workers.items()}
        names = list(workers)
        for number in range(config.rounds):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                time.sleep(config.gap_s)
                _turn(workers[name], steps[name], results[name])
        return results
    finally:
        for worker in workers.values():
            worker.close()


def _calibrate(worker: Worker, config: RoundsConfig) -> int:
    """Warm a contestant up and return how many steps fill a turn."""
    steps, spent_s, step_s = 1, 0.0, 1.0
    while spent_s < config.warmup_s:
        seconds = worker.run(steps)["seconds"]
        spent_s += seconds
        step_s = seconds / steps
        steps = max(1, min(2 * steps, int(config.warmup_s / 4 / step_s)))
    return max(1, round(config.turn_s / step_s))


def _turn(worker: Worker, steps: int, result: Measured) -> None:
    busy = _busy_cpu_s()
    reply = worker.run(steps)
    busy = _busy_cpu_s() - busy
    samples = steps * (worker.entry.samples_per_step or worker.entry.workload.batch_size)
    result.rates.append(samples / reply["seconds"])
    result.cpu_rates.append(samples / max(reply["cpu_seconds"], 1e-9))
    others = max(0.0, busy - reply["cpu_seconds"])
    result.others_cpu_share.append(others / (reply["seconds"] * (os.cpu_count() or 1)))
    result.peak_rss_bytes, result.last_value = reply["peak_rss_bytes"], reply["value"]


def _expect_same_network(results: dict[str, Measured]) -> None:
    sizes = {
        name: value.info["num_dense_parameters"]
        for name, value in results.items()
        if "num_dense_parameters" in value.info
    }
    by_workload: dict[str, set[object]] = {}
    for name, size in sizes.items():
        by_workload.setdefault(results[name].entry.group_name, set()).add(size)
    if any(len(found) > 1 for found in by_workload.values()):
        raise WorkerError(f"contestants train different networks (dense parameters): {sizes}")


def _busy_cpu_s() -> float:
    """CPU seconds that this machine has spent on processes since boot (user, nice, system, interrupts)."""
    with open("/proc/stat") as file:
        values = [int(value) for value in file.readline().split()[1:9]]
    idle_and_wait = values[3] + values[4]
    stolen = values[7]
    return (sum(values) - idle_and_wait - stolen) / os.sysconf("SC_CLK_TCK")


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    """10th and 90th percentile (linear between order statistics)."""
    if len(values) < 2:
        return values[0], values[0]
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return cuts[0], cuts[-1]


def paired_ratio(ours: Measured, peer: Measured) -> dict[str, float]:
    """Median, p10 and p90 over rounds of ours / peer in the same round."""
    ratios = [mine / theirs for mine, theirs in zip(ours.rates, peer.rates, strict=True)]
    low, high = percentiles(ratios)
    return {"median": statistics.median(ratios), "p10": low, "p90": high}


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def chosen(text: str, *, known: Sequence[str], option: str) -> list[str]:
    """The names in a comma-separated option.

    Args:
        text: what was given.
        known: all names that there are.
        option: the command and its option, for the error.

    Raises:
        ConfigError: a name that is none of them.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(
            expected=f"names out of {', '.join(known)}",
            found=", ".join(unknown),
            where=option,
            ways_out=f"separate names by commas: {option.split()[-1]} {','.join(known[:2])!r}",
        )
    return names
