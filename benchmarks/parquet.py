"""Claim: training from Parquet on disk is as fast as from tensors in memory (at least 0.95 of it).

    in memory      `TrainStep` on ready-made batches: nothing but the step
    from Parquet   `Trainer.fit`: page checksums, decoding, shuffling in a bounded buffer, the sample ledger, the log

10⁶ rows; the first window of the shuffle buffer is filled before the first round, as it is once in a run.
"""

from __future__ import annotations

from benchmarks.harness import QUICK, Entry, RoundsConfig, measure
from benchmarks.parquet_rows import encoded_rows
from benchmarks.report import Report, compare
from benchmarks.train import OURS, compile_cache
from benchmarks.workload import Workload

MEMORY, DISK = "ours: batches in memory", "ours: Trainer.fit from Parquet"


def run(*, quick: bool = False) -> Report:
    """Measure one-hot at D=16 and 64, and multi-hot at D=16."""
    report = Report(
        benchmark="parquet",
        claim="End to end from shuffled, checksummed Parquet with the whole training loop, against batches in memory.",
        command="ziggurat bench parquet",
    )
    for workload in [Workload(), Workload(dim=64), Workload(multi_hot=True, num_batches=16)][: 1 if quick else 3]:
        folder = str(encoded_rows(workload))
        cache = compile_cache("ours")
        entries = [
            Entry(name=MEMORY, module=OURS, workload=workload, env=cache),
            Entry(
                name=DISK, module="benchmarks.our_trainer", workload=workload, settings={"folder": folder}, env=cache
            ),
        ]
        results = measure(entries, QUICK if quick else RoundsConfig())
        report.contestants += results.values()
        report.cases.append(compare(f"{workload.case}_memory_parquet", results, ours=DISK, peer=MEMORY, goal=0.95))
    return report
