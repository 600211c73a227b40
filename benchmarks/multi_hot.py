"""Claim: with lists of ids (MLPerf's lengths, mean 8.2 a feature) training is faster than TorchRec and plain torch.

With one id a feature the dense network is nearly all of the time on a CPU; with 214 ids a sample the tables count too.
Their share is shown: `ours: without tables` trains on ready-made pooled embeddings, so

    share of lookup and update = 1 − rate with tables / rate without tables        (round by round)
"""

from __future__ import annotations

from benchmarks.harness import QUICK, Entry, RoundsConfig, measure, paired_ratio
from benchmarks.limits import limit_entries, limit_samples_per_s, probe_bf16
from benchmarks.report import Report, compare
from benchmarks.train import OURS, PLAIN, TORCHREC, compile_cache
from benchmarks.workload import Workload

FULL, WITHOUT = "ours: recommended", "ours: without tables"


def run(*, quick: bool = False) -> Report:
    """Measure DLRM at D=16 and 64."""
    config = QUICK if quick else RoundsConfig()
    probe = probe_bf16()
    report = Report(
        benchmark="multi_hot",
        claim="Training samples/s with MLPerf's list lengths: 214 ids a sample over 26 features, sum pooling.",
        command="ziggurat bench multi_hot",
    )
    report.notes.append(probe.reason)
    for workload in [Workload(multi_hot=True, dim=dim, num_batches=16) for dim in (16, 64)][: 1 if quick else 2]:
        ours, fp32 = compile_cache("ours"), {"precision": "fp32", "compile": "off"}
        entries = [
            Entry(name=FULL, module=OURS, workload=workload, env=ours),
            Entry(name="ours: FP32 eager", module=OURS, workload=workload, settings=fp32, env=ours),
            Entry(name=WITHOUT, module=OURS, workload=workload, settings={"mode": "dense"}, env=ours),
            Entry(name="TorchRec: FP32 eager", module=TORCHREC, workload=workload),
            Entry(name="plain torch", module=PLAIN, workload=workload),
            *limit_entries(workload, bf16=probe.pays),
        ]
        results = measure(entries, config)
        fastest = "bf16" if results[FULL].info["precision"] == "bf16" else "fp32"
        limit = limit_samples_per_s(results, workload, fastest)
        report.limits[workload.name] = limit
        report.contestants += results.values()
        name = workload.name
        pairs = {
            "torchrec_default": (FULL, "TorchRec: FP32 eager"),
            "torchrec_fp32_eager": ("ours: FP32 eager", "TorchRec: FP32 eager"),
            "plain_torch_default": (FULL, "plain torch"),
        }
        report.cases += [
            compare(f"{workload.case}_{pair}", results, ours=mine, peer=peer, limit=limit)
            for pair, (mine, peer) in pairs.items()
        ]
        share = 1.0 - paired_ratio(results[FULL], results[WITHOUT])["median"]
        report.notes.append(f"{name}: lookup and table update take {share:.0%} of our step")
        report.extra[f"lookup_share {name}"] = round(share, 4)
    return report
