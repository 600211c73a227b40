"""The demo's second half: a flat DLRM and tower models on two emulated hosts of two ranks each.

    trained DLRM ─► towers partition ─► towers.json ─┬─► torchrun, 4 ranks: flat model, FP32
                                                     └─► torchrun, 4 ranks: tower model, compression 4, BF16 wire

Both jobs train the recipe `movielens_dlrm` with the same global batch as on one device. The hosts are emulated: four
processes of this machine, told that two of them make a host, so bytes between hosts are counted as they would cross,
while the times are those of this machine. What a link between hosts adds stands in `links.py`; `ziggurat bench towers`
puts real (rate-limited) links between them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ziggurat.errors import DataError
from ziggurat.planning.towers.partitioner import TowerPartitionConfig
from ziggurat.recipes.catalogue import recipe_named
from ziggurat.runs.demo.links import bytes_out_of_a_host
from ziggurat.runs.planning.partition import partition_run
from ziggurat.training import metrics
from ziggurat.training.records.log import read_records
from ziggurat.training.records.run_folder import TRAFFIC, RunFolder, read_evaluation
from ziggurat.training.report.progress import Progress

NUM_HOSTS = 2
RANKS_PER_HOST = 2
COMPRESSION = 4
_TIME_LIMIT_S = 1800


@dataclass(frozen=True, kw_only=True)
class RanksRow:
    """One model of the comparison.

    Args:
        name: for people.
        test_auc: of the best weights.
        cross_host_bytes: of embeddings and their gradients, between hosts, a step, all ranks together.
        leaving_bytes: all that leaves a host in a step, sums of dense gradients included.
        step_ms: duration of a step in the fastest tenth of the log's intervals: the jobs run one after the other, and
            what else the machine does in that time is no part of either.
        report: the run's report.
    """

    name: str
    test_auc: float
    cross_host_bytes: int
    leaving_bytes: float
    step_ms: float
    report: Path


def run_tower_demo(folder: Path, *, probe: Path, progress: Progress) -> list[RanksRow]:
    """Partition the features of a trained run, then train flat and with towers on 2 × 2 ranks.

    Args:
        folder: where the runs go; finished ones are not trained again.
        probe: the trained flat run.
        progress: where to say what happens.

    Raises:
        DataError: a job failed; names its log.
    """
    towers = folder / "towers.json"
    progress.say(f"\ntowers of {probe.name}")
    partition = partition_run(probe, config=TowerPartitionConfig(num_towers=NUM_HOSTS), progress=progress)
    partition.towers.save(towers)
    for number, features in enumerate(partition.towers.towers):
        progress.say(f"  tower {number}: {', '.join(features)}")
    with_towers = ["--towers", str(towers), "--compression", str(COMPRESSION), "--wire", "bf16"]
    jobs = {"DLRM, flat": ("flat", []), f"DLRM, towers, compression {COMPRESSION}, BF16": ("towers", with_towers)}
    return [_train(name, folder / f"ranks_{key}", flags, progress) for name, (key, flags) in jobs.items()]


def _train(name: str, folder: Path, flags: list[str], progress: Progress) -> RanksRow:
    """Train one model on all ranks, or take a finished run."""
    run = RunFolder(folder)
    num_ranks = NUM_HOSTS * RANKS_PER_HOST
    global_batch = recipe_named("movielens_dlrm").training.loader.batch_size
    if not run.evaluation("test").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        log = folder.with_suffix(".log")
        progress.say(f"{name}: {NUM_HOSTS} emulated hosts × {RANKS_PER_HOST} ranks (log: {log})")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        train = ["-m", "ziggurat", "train"]
        settings = {"parallel.ranks-per-host": RANKS_PER_HOST, "training.loader.batch-size": global_batch // num_ranks}
        text = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
        command = [*torchrun, *train, "movielens_dlrm", "--out", str(folder), *text, *flags]
        if run.config.exists():  # a job that was stopped
            command = [*torchrun, *train, str(folder), "--resume"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with log.open("w") as output:
            done = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, timeout=_TIME_LIMIT_S, check=False
            )
        if done.returncode:
            raise DataError(
                expected=f"{num_ranks} ranks that train to the end",
                found=f"exit {done.returncode}: {(log.read_text().strip().splitlines() or ['no output'])[-1]}",
                where=str(log),
                ways_out=("read the log: the first error in it is the cause", "ziggurat doctor"),
            )
    traffic = TRAFFIC.read(run.traffic)
    hops = [row for row in traffic["rows"] if row["link"] == "cross_host" and "ward" in row["purpose"]]
    rates = [record["timing"]["samples_per_s"] for record in read_records(run.metrics) if record["kind"] == "train"]
    return RanksRow(
        name=name,
        test_auc=read_evaluation(run.evaluation("test"))["metrics"][metrics.USUAL],
        cross_host_bytes=sum(row["bytes_per_step"] for row in hops),
        leaving_bytes=bytes_out_of_a_host(traffic, num_hosts=NUM_HOSTS),
        step_ms=1e3 * global_batch / _fast(rates),
        report=run.report,
    )


def _fast(rates: list[float]) -> float:
    """Return the rate that a tenth of the intervals reach."""
    return sorted(rates, reverse=True)[len(rates) // 10]
