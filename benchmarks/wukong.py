"""Claim: Wukong and DHEN train at least 1.5 times as fast as FuxiCTR's Wukong at equal shapes, batches in memory.

    ours       `TrainStep`, recommended settings: row-wise Adagrad on tables, fused Adam on the rest; eager
    FuxiCTR    `BaseModel.train_step`: Adam over whole tables, gradient norm clipped at 10; layers re-created from the
               equations (`peers/fuxictr_wukong.py`), because the wheel has no Wukong

39 fields (13 numbers, 26 tables of 100,000 rows), 3 layers of 40 + 40 fields, rank 8, MLPs 512-256: FuxiCTR's defaults.
DHEN takes part with modules fm and linear, with which it is the same function. The update rules differ, and touching
whole tables in every step costs; `network` leaves the tables out on both sides, to show what is left.
"""

from __future__ import annotations

from benchmarks.harness import QUICK, Entry, RoundsConfig, measure
from benchmarks.report import Report, compare
from benchmarks.workload import ModelKind, Workload

OURS, PEER = "benchmarks.ours", "benchmarks.peers.fuxictr_wukong"
GOAL = 1.5


def run(*, quick: bool = False) -> Report:
    """Measure at D = 16 and 64, with tables and without."""
    report = Report(
        benchmark="wukong",
        claim="Wukong and DHEN training steps on in-memory batches of 2048 against FuxiCTR's Wukong.",
        command="ziggurat bench wukong",
    )
    for dim in (16,) if quick else (16, 64):
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
    results = measure(entries, QUICK if quick else RoundsConfig(rounds=9, turn_s=3.0))
    report.contestants += results.values()
    part = "" if mode == "train" else "_network"
    for name, who in (("wukong", ours), ("dhen", ours_dhen)):
        goal = GOAL if mode == "train" else 0.0
        report.cases.append(compare(f"{name}_d{dim}_fuxictr{part}", results, ours=who, peer=peer, goal=goal))
