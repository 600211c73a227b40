"""Claim: training is faster than TorchRec as it is pinned, and than the newest one that loads. Both in one run.

    .venv-bench          torch, FBGEMM and TorchRec of requirements/cpu.txt and bench.txt
    .venv-bench-newest   the newest TorchRec and FBGEMM, and the newest torch that this FBGEMM loads with
                         (`benchmarks/setup.sh newest`, which has their versions)

In both environments the same two contestants, ours and TorchRec, with the same torch: FBGEMM is compiled for one
release of torch and does not load with its neighbours, so its version cannot be changed alone. Cases: ours over
TorchRec in each environment, and for each of them newest over pinned. A contestant says which versions its process has
loaded; they stand in the case. FP32 on both sides, eager, so that only versions differ from case to case.

One thread each, and samples per CPU second beside samples a second: on shared cores the clock tells the others' time.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.harness import NEWEST_PEERS, PEERS, QUICK, ROOT, Entry, Measured, RoundsConfig, chosen, measure, say
from benchmarks.report import Case, Report, compare
from benchmarks.train import OURS, TORCHREC
from benchmarks.workload import ModelKind, Workload
from ziggurat.errors import MissingDependencyError

ENVIRONMENTS = {"pinned": PEERS, "newest": NEWEST_PEERS}
FP32_EAGER = {"precision": "fp32", "compile": "off"}


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the options of this benchmark."""
    parser = argparse.ArgumentParser(prog="ziggurat bench peer_versions", description=__doc__)
    parser.add_argument("--rounds", type=int, default=RoundsConfig.rounds)
    parser.add_argument("--cases", default=",".join(workloads()), metavar="CASE,…", help="which workloads")
    return parser.parse_args(arguments)


def run(*, quick: bool = False, options: argparse.Namespace | None = None) -> Report:
    """Measure DLRM and DCNv2 at D=16 and 64; `quick`: the first that is asked for.

    Raises:
        MissingDependencyError: one of the two environments was not made.
        ConfigError: `--cases` names an unknown one.
    """
    for name, venv in ENVIRONMENTS.items():
        _expect_environment(name, venv=venv)
    options = options or parse_options([])
    names = chosen(options.cases, known=list(workloads()), option="ziggurat bench peer_versions --cases")
    config = replace(QUICK if quick else RoundsConfig(rounds=options.rounds), threads=1)
    report = Report(
        benchmark="peer_versions",
        claim="Training in FP32, eager, on one core: ours over TorchRec, as pinned and as new as it loads.",
        command=f"ziggurat bench peer_versions --rounds {config.rounds} --cases {','.join(names)}",
    )
    for name in names[:1] if quick else names:
        workload = workloads()[name]
        say(workload.name)
        results = measure(entries(workload), config)
        report.contestants += results.values()
        found = cases(workload, results)
        report.cases += found
        for case in found:
            say(f"  {case.name}: {case.ratio:.2f} ({case.ratio_p10:.2f} to {case.ratio_p90:.2f})")
    return report


def workloads() -> dict[str, Workload]:
    """Return the workloads by the names of their cases: "dlrm_d16", ..."""
    found = [Workload(model=model, dim=dim) for model in (ModelKind.DLRM, ModelKind.DCN_V2) for dim in (16, 64)]
    return {workload.case: workload for workload in found}


def entries(workload: Workload) -> list[Entry]:
    """Return ours and TorchRec in both environments, the pinned one first."""
    found = []
    for name, venv in ENVIRONMENTS.items():
        cache = {"ZIGGURAT_CACHE": str(ROOT / "build" / "benchmarks" / "cache" / f"peer-versions-{name}")}
        found += [
            Entry(name=f"ours, {name}", module=OURS, workload=workload, settings=FP32_EAGER, venv=venv, env=cache),
            Entry(name=f"TorchRec, {name}", module=TORCHREC, workload=workload, venv=venv),
        ]
    return found


def cases(workload: Workload, results: dict[str, Measured]) -> list[Case]:
    """Compare ours with TorchRec in each environment, by CPU seconds and by the clock; then newest with pinned."""
    found = []
    for name in ENVIRONMENTS:
        ours = f"ours, {name}"
        peer = f"TorchRec, {name}"
        case = f"{workload.case}_torchrec_{results[peer].versions['torchrec']}"
        found.append(compare(f"{case}_cpu_seconds", results, ours=ours, peer=peer, by_cpu=True))
        found.append(compare(f"{case}_clock", results, ours=ours, peer=peer))
    for who in ("TorchRec", "ours"):
        newest = f"{who}, newest"
        pinned = f"{who}, pinned"
        name = f"{workload.case}_{who.lower()}_newest_over_pinned_cpu_seconds"
        found.append(compare(name, results, ours=newest, peer=pinned, by_cpu=True))
    return found


def _expect_environment(name: str, *, venv: str) -> None:
    if not (ROOT / venv / "bin" / "python").exists():
        option = " newest" if name == "newest" else ""
        raise MissingDependencyError(
            expected=f"the environment {venv}, with TorchRec",
            found=f"no {venv}/bin/python in this checkout",
            where="ziggurat bench peer_versions",
            ways_out=f"bash benchmarks/setup.sh{option}",
        )
