"""Claim: training is faster than TorchRec as its users run it, and than plain torch. In-memory batches, one machine.

Contestants, on the same batches (`workload.py`), 2 threads, batch 2048, dense optimizer fused Adam everywhere:

    ours: recommended       the settings that the recipes use (TrainingConfig's defaults, chosen by measurement)
    ours: FP32 eager        no BF16, no compilation
    ours: compiled …        torch.compile of the dense network, in FP32, and in BF16 where the CPU has it
    TorchRec …              DistributedModelParallel, fused row-wise Adagrad; FP32 eager is what its examples run
    plain torch             26 nn.EmbeddingBag(sparse=True), Adagrad
    products only           the network's matrix products and nothing else; `peak` the machine's rate at 2048³

The limit is peak rate / FLOPs a sample: what remains if lookups, activations, losses, optimizers and Python are free.
"""

from __future__ import annotations

from benchmarks.harness import QUICK, ROOT, Entry, Measured, RoundsConfig, measure, say
from benchmarks.limits import Bf16Probe, limit_entries, limit_samples_per_s, peak_gflop_per_s, probe_bf16
from benchmarks.report import Case, Report, compare
from benchmarks.workload import ModelKind, Workload, flops_per_sample

OURS, TORCHREC, PLAIN = "benchmarks.ours", "benchmarks.peers.torchrec_dlrm", "benchmarks.peers.plain_torch"
CACHE = ROOT / "build" / "benchmarks" / "cache"
GOALS = {16: 2.5, 64: 2.2}  # recommended against TorchRec FP32 eager


def compile_cache(owner: str) -> dict[str, str]:
    """Environment that keeps compiled code between runs, apart for each contestant."""
    folder = CACHE / owner
    return {"ZIGGURAT_CACHE": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}


def compiles(workload: Workload) -> bool:
    """FP32 compilation is measured at D=16 only: it gains little, and each cold start takes about a minute."""
    return workload.dim == 16


def entries(workload: Workload, *, bf16: bool) -> list[Entry]:
    """Everyone who trains this workload."""
    ours, theirs = compile_cache("ours"), compile_cache("torchrec")
    compiled = {"precision": "fp32", "compile": "default"}
    found = [
        Entry(name="ours: recommended", module=OURS, workload=workload, env=ours),
        Entry(
            name="ours: FP32 eager",
            module=OURS,
            workload=workload,
            settings={"precision": "fp32", "compile": "off"},
            env=ours,
        ),
        Entry(name="TorchRec: FP32 eager", module=TORCHREC, workload=workload),
        Entry(name="plain torch", module=PLAIN, workload=workload),
    ]
    if compiles(workload):
        theirs_compiled: dict[str, object] = {"compile": True}
        found += [
            Entry(name="ours: FP32 compiled", module=OURS, workload=workload, settings=compiled, env=ours),
            Entry(
                name="TorchRec: FP32 compiled",
                module=TORCHREC,
                workload=workload,
                settings=theirs_compiled,
                env=theirs,
            ),
        ]
    if bf16:
        both = {"precision": "bf16", "compile": "default"}
        found.append(Entry(name="ours: BF16 compiled", module=OURS, workload=workload, settings=both, env=ours))
        both = {"precision": "bf16", "compile": True}
        found.append(
            Entry(name="TorchRec: BF16 compiled", module=TORCHREC, workload=workload, settings=both, env=theirs)
        )
    return found + limit_entries(workload, bf16=bf16)


def cases(workload: Workload, results: dict[str, Measured], *, bf16: bool) -> list[Case]:
    """The comparisons of one workload."""
    fastest = "bf16" if results["ours: recommended"].info["precision"] == "bf16" else "fp32"
    best = limit_samples_per_s(results, workload, fastest)
    fp32 = limit_samples_per_s(results, workload, "fp32")
    ours = "ours: recommended"
    is_dlrm = workload.model is ModelKind.DLRM
    found = [
        compare(
            f"{workload.case}_torchrec_default",
            results,
            ours=ours,
            peer="TorchRec: FP32 eager",
            goal=GOALS[workload.dim] if is_dlrm else 0.0,
            limit=best,
        ),
        compare(
            f"{workload.case}_torchrec_fp32_eager",
            results,
            ours="ours: FP32 eager",
            peer="TorchRec: FP32 eager",
            goal=1.1 if is_dlrm else 0.0,
            limit=fp32,
        ),
        compare(
            f"{workload.case}_plain_torch_default",
            results,
            ours=ours,
            peer="plain torch",
            goal=2.8 if is_dlrm else 0.0,
            limit=best,
        ),
    ]
    if compiles(workload):
        found.append(
            compare(
                f"{workload.case}_torchrec_fp32_compiled",
                results,
                ours="ours: FP32 compiled",
                peer="TorchRec: FP32 compiled",
                limit=fp32,
            )
        )
    if bf16:
        found.append(
            compare(
                f"{workload.case}_torchrec_bf16_compiled",
                results,
                ours="ours: BF16 compiled",
                peer="TorchRec: BF16 compiled",
                goal=1.15 if is_dlrm else 0.0,
                limit=limit_samples_per_s(results, workload, "bf16"),
            )
        )
    return found


def run(*, quick: bool = False) -> Report:
    """Measure all workloads."""
    config = QUICK if quick else RoundsConfig()
    probe = probe_bf16()
    report = Report(
        benchmark="train",
        claim="Training samples/s on in-memory batches: 26 tables × 100,000 rows, 13 numbers, batch 2048, 2 threads.",
        command="ziggurat bench train --json out.json",
    )
    report.notes.append(probe.reason)
    if not probe.pays:
        report.skipped.append(f"BF16 variants of both sides, and the goals that need them ({probe.reason})")
    workloads = [Workload(model=model, dim=dim) for model in (ModelKind.DLRM, ModelKind.DCN_V2) for dim in (16, 64)]
    for workload in workloads[:1] if quick else workloads:
        measure_workload(workload, report, config=config, probe=probe)
    return report


def measure_workload(workload: Workload, report: Report, *, config: RoundsConfig, probe: Bf16Probe) -> None:
    """Measure one workload and add what was found to the report."""
    say(f"{workload.name}")
    results = measure(entries(workload, bf16=probe.pays), config)
    report.contestants += results.values()
    found = cases(workload, results, bf16=probe.pays)
    report.cases += found
    report.limits[workload.name] = limit_samples_per_s(results, workload, "bf16" if probe.pays else "fp32")
    peaks = ", ".join(
        f"{dtype} {peak_gflop_per_s(results, dtype):.0f} GFLOP/s"
        for dtype in ("fp32", "bf16")
        if f"peak {dtype}" in results
    )
    report.notes.append(f"{workload.name}: {flops_per_sample(workload) / 1e6:.2f} MFLOP a sample; peak {peaks}")
    for case in found:
        say(f"  {case.name}: {case.ours:,.0f} / {case.peer:,.0f} = {case.ratio:.2f} {case.verdict}")
