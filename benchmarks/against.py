"""Claim: a training step on a CPU is as fast as that of an older commit, within 2 %. Both commits take turns.

    build/benchmarks/against/COMMIT/   ziggurat/ and benchmarks/ of the older commit, as git has them
    older          its own `benchmarks.ours`, in a process of its own
    older again    the same once more: what two processes of one program differ by on this machine
    today          this tree, with what is not committed

All run by this checkout's `.venv`, so torch is the same, on the same batches. A step of 2,048 samples on one core is
what is timed. Cases are ratios of samples per CPU second (today over older), because a core that is shared tells the
time of others; the ratios of the clock stand beside them. "older again" should be 1.00; what it is not is the error of
this measurement, and a difference within it says nothing.

The default commit is the last one before anything of GPUs. An older one is refused where its worker speaks another
language than the harness (`worker.py`).
"""

from __future__ import annotations

import argparse
import io
import subprocess
import tarfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.harness import QUICK, ROOT, Entry, Measured, RoundsConfig, chosen, measure, say
from benchmarks.report import Case, Report, compare
from benchmarks.train import OURS
from benchmarks.workload import ModelKind, Workload
from ziggurat.errors import ConfigError

BEFORE_GPUS = "c0ca678"
FOLDERS = ("ziggurat", "benchmarks")
TODAY, OLDER, AGAIN = "today", "older", "older again"
GOAL = 0.98
# DLRM with one id a feature and with lists, and DCNv2.
WORKLOADS = [Workload(), Workload(multi_hot=True, num_batches=16), Workload(model=ModelKind.DCN_V2)]
FP32_EAGER = {"precision": "fp32", "compile": "off"}


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of this benchmark."""
    parser = argparse.ArgumentParser(prog="ziggurat bench against", description=__doc__)
    parser.add_argument("--against", default=BEFORE_GPUS, metavar="COMMIT", help="the older commit")
    parser.add_argument("--rounds", type=int, default=RoundsConfig.rounds)
    parser.add_argument("--cases", metavar="CASE,…", help="which workloads; left out: all, with --quick the first")
    return parser.parse_args(arguments)


def run(*, quick: bool = False, options: argparse.Namespace | None = None) -> Report:
    """Measure three workloads; `quick`: one of them, unless the options name others."""
    options = options or parse_options([])
    measured = workloads(options.cases, quick=quick)
    older = checkout(options.against)
    config = replace(QUICK if quick else RoundsConfig(rounds=options.rounds), threads=1)
    report = Report(
        benchmark="against",
        claim=f"A training step on one core, today's tree against commit {options.against}: samples per CPU second.",
        command=f"ziggurat bench against --against {options.against}"
        + (f" --cases {options.cases}" if options.cases else ""),
    )
    for workload in measured:
        say(workload.name)
        results = measure(entries(workload, older=older), config)
        report.contestants += results.values()
        report.cases += cases(workload, results)
        for case in report.cases[-3:]:
            say(f"  {case.name}: {case.ratio:.3f} ({case.ratio_p10:.3f} to {case.ratio_p90:.3f}) {case.verdict}")
    return report


def workloads(cases: str | None = None, *, quick: bool) -> list[Workload]:
    """Return the workloads that are measured.

    Args:
        cases: their names, with commas between; None: all, or with `quick` the first.
        quick: see above.

    Raises:
        ConfigError: there is none of a name.
    """
    if cases is not None:
        known = {workload.case: workload for workload in WORKLOADS}
        return [known[name] for name in chosen(cases, known=list(known), option="ziggurat bench against --cases")]
    return WORKLOADS[:1] if quick else WORKLOADS


def entries(workload: Workload, *, older: Path) -> list[Entry]:
    """Today's step and twice the older one, with the settings that both have."""
    places = ((TODAY, ROOT), (OLDER, older), (AGAIN, older))
    return [
        Entry(
            name=name,
            module=OURS,
            workload=workload,
            settings=FP32_EAGER,
            venv=".venv",
            root=root,
            env={"ZIGGURAT_CACHE": str(ROOT / "build" / "benchmarks" / "cache" / f"against-{root.name}")},
        )
        for name, root in places
    ]


def cases(workload: Workload, results: dict[str, Measured]) -> list[Case]:
    """Today over older by CPU seconds and by the clock, and the older one over itself."""
    return [
        compare(f"{workload.case}_cpu_seconds", results, ours=TODAY, peer=OLDER, by_cpu=True, goal=GOAL),
        compare(f"{workload.case}_clock", results, ours=TODAY, peer=OLDER),
        compare(f"{workload.case}_cpu_seconds_older_again", results, ours=AGAIN, peer=OLDER, by_cpu=True),
    ]


def checkout(commit: str) -> Path:
    """The package and the benchmarks of a commit, in a folder of `build/`; no working tree of git's.

    Raises:
        ConfigError: git does not know the commit, or it had no benchmark of a step yet.
    """
    found = _git("rev-parse", "--verify", "--short=12", f"{commit}^{{commit}}")
    if found.returncode:
        raise _refused(commit, found=found.stderr.decode().strip())
    name = found.stdout.decode().strip()
    folder = ROOT / "build" / "benchmarks" / "against" / name
    if not folder.is_dir():
        packed = _git("archive", name, "--", *FOLDERS)
        if packed.returncode:
            raise _refused(commit, found=packed.stderr.decode().strip())
        partial = folder.with_suffix(".partial")
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
            archive.extractall(partial, filter="data")
        partial.rename(folder)
    if not (folder / "benchmarks" / "ours.py").is_file():
        raise _refused(commit, found="no benchmarks/ours.py in it")
    return folder


def _git(*words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=False)


def _refused(commit: str, *, found: str) -> ConfigError:
    return ConfigError(
        expected="a commit of this checkout that has benchmarks/ours.py",
        found=f"{commit}: {found}",
        where="ziggurat bench against --against",
        ways_out=("name one that `git log --oneline` shows", "fetch the whole history: git fetch --unshallow"),
    )
