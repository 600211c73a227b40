"""Claim: Wukong and DHEN train at least 1.5 times as fast as FuxiCTR's Wukong at equal shapes, batches in memory.

    ours       `TrainStep`, recommended settings: row-wise Adagrad on tables, fused Adam on the rest; eager
    FuxiCTR    `BaseModel.train_step`: Adam over whole tables, gradient norm clipped at 10; layers re-created from the
               equations (`peers/fuxictr_wukong.py`), because the wheel has no Wukong

39 fields (13 numbers, 26 tables of 100,000 rows), 3 layers of 40 + 40 fields, rank 8, MLPs 512-256: FuxiCTR's defaults.
DHEN takes part with modules fm and linear, with which it is the same function. The update rules differ, and touching
whole tables in every step costs; `network` leaves the tables out on both sides, to show what is left.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from benchmarks.harness import QUICK, Entry, RoundsConfig, measure
from benchmarks.report import Report, compare
from benchmarks.workload import ModelKind, Workload

OURS, PEER = "benchmarks.ours", "benchmarks.peers.fuxictr_wukong"
GOAL = 1.5


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is measured.

    Args:
        dims: embedding dimensions D.
    """

    dims: tuple[int, ...] = (16, 64)


def parse_options(arguments: list[str]) -> Options:
    """`--dims 16`, or `--dims 16,64`."""
    parser = argparse.ArgumentParser(prog="ziggurat bench wukong")
    parser.add_argument("--dims", default="16,64", help="embedding dimensions, comma separated (default: 16,64)")
    return Options(dims=tuple(int(dim) for dim in parser.parse_args(arguments).dims.split(",")))


def run(*, quick: bool = False, options: Options | None = None) -> Report:
    """Measure with tables and without."""
    dims = (16,) if quick else (options or Options()).dims
    report = Report(
        benchmark="wukong",
        claim="Wukong and DHEN training steps on in-memory batches of 2048 against FuxiCTR's Wukong.",
        command=f"ziggurat bench wukong --dims {','.join(map(str, dims))}",
    )
    for dim in dims:
        for mode in ("train", "dense"):
            _measure(report, dim=dim, mode=mode, quick=quick)
    report.notes.append("eager on both sides; 'network' has ready-made embeddings in place of the tables")
    return report


def _measure(report: Report, *, dim: int, mode: str, quick: bool) -> None:
    wukong = Workload(model=ModelKind.WUKONG, dim=dim, num_batches=16)
    dhen = Workload(model=ModelKind.DHEN, dim=dim, num_batches=16)
    group = f"{wukong.name}{'' if mode == 'train' else ', network'}"
    settings: dict[str, object] = {"mode": mode, "precision": "fp32", "compile": "off"}
    ours, ours_dhen, peer = (f"{name} D={dim} {mode}" for name in ("ours: Wukong", "ours: DHEN", "FuxiCTR's Wukong"))
    entries = [
        Entry(name=ours, module=OURS, workload=wukong, settings=settings, group=group),
        Entry(name=ours_dhen, module=OURS, workload=dhen, settings=settings, group=group),
        Entry(name=peer, module=PEER, workload=wukong, settings={"mode": mode}, group=group),
    ]
    results = measure(entries, QUICK if quick else RoundsConfig(rounds=9, turn_s=1.0, warmup_s=1.0))
    report.contestants += results.values()
    part = "" if mode == "train" else "_network"
    for name, who in (("wukong", ours), ("dhen", ours_dhen)):
        goal = GOAL if mode == "train" else 0.0
        report.cases.append(compare(f"{name}_d{dim}_fuxictr{part}", results, ours=who, peer=peer, goal=goal))
