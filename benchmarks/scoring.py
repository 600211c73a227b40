"""Claim: scoring (forward only, eval mode) is faster than TorchRec's.

ours       `scores_of`, the loop that `evaluate` and `predict` run; probabilities as numpy arrays
TorchRec   the sharded model in eval mode without gradients, then sigmoid; plain torch the same
"""

from __future__ import annotations

from benchmarks.harness import QUICK, Entry, RoundsConfig, measure
from benchmarks.limits import limit_entries, limit_samples_per_s
from benchmarks.report import Report, compare
from benchmarks.train import OURS, PLAIN, TORCHREC, compile_cache
from benchmarks.workload import ModelKind, Workload


def run(*, quick: bool = False) -> Report:
    """Measure DLRM and DCNv2 at D=16 and 64."""
    report = Report(
        benchmark="scoring",
        claim="Scored samples/s on in-memory batches of 2048, forward only.",
        command="ziggurat bench scoring",
    )
    workloads = [Workload(model=model, dim=dim) for model in (ModelKind.DLRM, ModelKind.DCN_V2) for dim in (16, 64)]
    for workload in workloads[:1] if quick else workloads:
        score = {"mode": "score"}
        entries = [
            Entry(name="ours", module=OURS, workload=workload, settings=score, env=compile_cache("ours")),
            Entry(name="TorchRec", module=TORCHREC, workload=workload, settings=score),
            Entry(name="plain torch", module=PLAIN, workload=workload, settings=score),
            *limit_entries(workload, bf16=False)[:1],
        ]
        results = measure(entries, QUICK if quick else RoundsConfig())
        limit = limit_samples_per_s(results, workload, "fp32", training=False)
        report.limits[workload.name] = limit
        report.contestants += results.values()
        goal = 1.2 if workload.model is ModelKind.DLRM else 0.0
        for peer in ("TorchRec", "plain torch"):
            name = f"{workload.case}_{peer.lower().replace(' ', '_')}_scoring"
            report.cases.append(
                compare(name, results, ours="ours", peer=peer, goal=goal if peer == "TorchRec" else 0.0, limit=limit)
            )
    return report
