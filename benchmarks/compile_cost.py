"""What torch.compile costs at start-up: the first step with an empty cache, with a full one, and without compiling.

Not a claim, a warning label: the compiled network is faster by a few per cent in FP32, and a short run never earns the
compilation back. `steps to earn it back` = (first step cold − first step eager) / seconds saved a step.
"""

from __future__ import annotations

import shutil

from benchmarks.harness import Entry, RoundsConfig, Worker, measure, say
from benchmarks.report import Case, Report
from benchmarks.train import CACHE, OURS, compile_cache
from benchmarks.workload import ModelKind, Workload

EAGER, COMPILED = "ours: eager", "ours: compiled"


def run(*, quick: bool = False) -> Report:
    """Start DLRM and DCNv2 cold and from the cache."""
    config = RoundsConfig(rounds=3 if quick else 9, turn_s=0.4)
    report = Report(
        benchmark="compile_cost",
        claim="Start-up time of the compiled network (recommended precision), cold and from the cache.",
        command="ziggurat bench compile_cost",
    )
    for model in (ModelKind.DLRM,) if quick else (ModelKind.DLRM, ModelKind.DCN_V2):
        workload = Workload(model=model, num_batches=8)
        shutil.rmtree(CACHE / "compile_cost", ignore_errors=True)
        env = compile_cache("compile_cost")
        entry = Entry(name=COMPILED, module=OURS, workload=workload, settings={"compile": "default"}, env=env)
        first: list[float] = []
        for state in ("cold", "cached"):
            say(f"  {workload.name}: {state}")
            with Worker(entry, threads=config.threads) as worker:
                first.append(worker.built["first_step_s"])
        eager = Entry(name=EAGER, module=OURS, workload=workload, settings={"compile": "off"}, env=env)
        results = measure([eager, entry], config)
        report.contestants += results.values()
        step_s = {name: workload.batch_size / measured.rate for name, measured in results.items()}
        saved_s = step_s[EAGER] - step_s[COMPILED]
        ratio = first[0] / first[1]
        report.cases.append(
            Case(
                name=f"{workload.case}_cold_cached",  # first step: ours from the cache, the peer cold
                ours=first[1],
                peer=first[0],
                ratio=ratio,
                ratio_p10=ratio,
                ratio_p90=ratio,
                ours_name="cached",
                peer_name="cold",
                unit="s",
            )
        )
        earned = f"after {(first[0] - results[EAGER].first_step_s) / saved_s:,.0f} steps" if saved_s > 0 else "never"
        report.notes.append(
            f"{workload.name}: eager {1e3 * step_s[EAGER]:.1f} ms a step, compiled {1e3 * step_s[COMPILED]:.1f} ms; "
            f"a cold compilation is earned back {earned}"
        )
    return report
