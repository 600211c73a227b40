"""Claims: raw text is prepared faster than by a plain polars script, and loading keeps up with any trainer.

    prepare_polars     `prepare` on Criteo text, validated, against a hand-written polars script that checks nothing
    load_unshuffled    one rank, rows as stored: rows/s against 5 M
    load_shuffled      one rank, the default shuffle: rows/s against 2.5 M
    load_4_ranks       four ranks on two cores against one rank on one core: the work is divided, not repeated

The rows have 26 ids, 13 numbers, a label and a number. Files are in the page cache, as in every epoch but the first.
Each contestant loads whole epochs and throws them away; turns alternate.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.criteo_text import CARDINALITIES
from benchmarks.harness import ROOT, WorkerError, say
from benchmarks.load_worker import BATCH_SIZE
from benchmarks.report import Case, Report

UNSHUFFLED_GOAL, SHUFFLED_GOAL, RANKS_GOAL, PREPARE_GOAL = 5e6, 2.5e6, 1.8, 1.3
_ROWS = 4_000_000


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of these cases: none."""


def cases(*, quick: bool, options: argparse.Namespace, report: Report) -> None:
    """Append the cases to a report."""
    from benchmarks import preprocess

    prepared = preprocess.run(quick=quick)
    report.contestants += prepared.contestants
    report.notes += prepared.notes
    report.cases.append(replace(prepared.cases[0], name="prepare_polars", goal=PREPARE_GOAL))
    report.cases += load_cases(quick=quick)


def load_cases(*, quick: bool) -> list[Case]:
    """Rates of loading, against the goals."""
    folder = encoded_criteo(_ROWS // 8 if quick else _ROWS)
    both = ",".join(map(str, sorted(os.sched_getaffinity(0))[:2]))
    subjects = {
        "load_unshuffled": Ranks(folder, shuffle="none", cores=both),
        "load_shuffled": Ranks(folder, shuffle="lanes", cores=both),
        "one rank, one core": Ranks(folder, shuffle="lanes", cores=both[0]),
        "four ranks, two cores": Ranks(folder, shuffle="lanes", cores=both, world_size=4),
    }
    rates: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(2 if quick else 5):
        for name, subject in subjects.items():
            rates[name].append(subject.rate(num_rows=(_ROWS // 8 if quick else _ROWS)))
            say(f"  {name}: {rates[name][-1] / 1e6:.2f} M rows/s")
    found = [
        _against(name, rates[name], [goal] * len(rates[name]), peer=f"{goal / 1e6:g} M rows/s", goal=1.0)
        for name, goal in (("load_unshuffled", UNSHUFFLED_GOAL), ("load_shuffled", SHUFFLED_GOAL))
    ]
    four, one = rates["four ranks, two cores"], rates["one rank, one core"]
    return [*found, _against("load_4_ranks", four, one, peer="one rank, one core", goal=RANKS_GOAL)]


def _against(name: str, rates: list[float], peers: list[float], *, peer: str, goal: float) -> Case:
    ratios = [rate / other for rate, other in zip(rates, peers, strict=True)]
    return Case(
        name=name,
        ours=statistics.median(rates),
        peer=statistics.median(peers),
        ratio=statistics.median(ratios),
        ratio_p10=float(np.quantile(ratios, 0.1)),
        ratio_p90=float(np.quantile(ratios, 0.9)),
        ours_name="ours: Loader",
        peer_name=peer,
        goal=goal,
        unit="rows/s",
    )


@dataclass(frozen=True)
class Ranks:
    """Ranks that load together.

    Args:
        folder: of the data.
        shuffle: the order.
        cores: that all ranks share.
        world_size: number of ranks.
    """

    folder: Path
    shuffle: str
    cores: str
    world_size: int = 1

    def rate(self, *, num_rows: int) -> float:
        """Rows a second, all ranks together, after an epoch to warm up."""
        command = [sys.executable, "-m", "benchmarks.load_worker", str(self.folder), self.shuffle]
        workers = [
            subprocess.Popen(
                [*command, str(rank), str(self.world_size), self.cores],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in range(self.world_size)
        ]
        try:
            for worker in workers:
                assert worker.stdout is not None
                if worker.stdout.readline().strip() != "ready":
                    raise WorkerError(f"a rank of {' '.join(command)} failed")
            for worker in workers:
                assert worker.stdin is not None
                worker.stdin.write(f"go {2 * num_rows // (BATCH_SIZE * self.world_size)}\n")
                worker.stdin.flush()
            said = [[float(each) for each in worker.stdout.readline().split()] for worker in workers if worker.stdout]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        return sum(rows for _, _, rows in said) / (max(end for _, end, _ in said) - min(begin for begin, _, _ in said))


def encoded_criteo(num_rows: int) -> Path:
    """Folder of encoded rows with Criteo's columns and sizes of vocabularies; made once, in `build/`."""
    from ziggurat.data.encoded.dataset import EncodedWriter
    from ziggurat.features.inputs import InputSpec, LabelSpec, SingleSpec, TableSpec

    folder = ROOT / "build" / "benchmarks" / f"encoded-criteo-{num_rows}"
    if (folder / "manifest.json").exists():
        return folder
    say(f"  writing {num_rows:,} encoded rows")
    shutil.rmtree(folder, ignore_errors=True)
    names = [f"C{index + 1}" for index in range(len(CARDINALITIES))]
    inputs = InputSpec(
        dense=tuple(f"I{index + 1}" for index in range(13)),
        single=tuple(SingleSpec(name=name, table=name) for name in names),
        tables=tuple(TableSpec(name=name, num_rows=size + 3) for name, size in zip(names, CARDINALITIES, strict=True)),
        labels=(LabelSpec(name="label"),),
    )
    rng = np.random.default_rng(0)
    with EncodedWriter(folder, inputs) as writer:
        for start in range(0, num_rows, 250_000):
            size = min(250_000, num_rows - start)
            counts = [np.floor(rng.lognormal(1.0 + index % 4, 1.5, size)) for index in range(13)]
            columns = {name: np.log1p(each).astype(np.float32) for name, each in zip(inputs.dense, counts, strict=True)}
            ids = [np.minimum(rng.zipf(1.1, size) - 1, 2**40) % each + 3 for each in CARDINALITIES]
            columns |= {name: each.astype(np.int32) for name, each in zip(names, ids, strict=True)}
            columns |= {"label:label": (rng.random(size) < 0.25).astype(np.float32), "row:": start + np.arange(size)}
            writer.append(pa.table(columns))
    return folder
