"""Tables in few bits behind a cache of hot rows, and on a disk: bytes, a step's speed, and test AUC over seeds.

    dlrm_d64_int8_cache5_memory, …           bytes of rows, optimizer state, cache and its index; ratio to FP32
    dlrm_d128_bf16_speed, …                  a whole step of DLRM, against the one with FP32 tables in memory
    disk_8x_zipf, disk_8x_uniform            a table of eight times the memory for it (enforced), against all in memory
    frappe_d64_int8_cache5_auc, …            paired with FP32 of the same seed, on four kinds of data (`subjects.py`);
                                             the curve over cache sizes and both roundings: `--cases all`

Finished runs are kept in the folder of `--runs` and read, not trained again: the benchmark can be stopped and taken up,
and `--minutes` stops it. What is missing is named.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.harness import ROOT, chosen
from benchmarks.report import Report
from benchmarks.table_tiers import disk, memory, plots, quality, speed, subjects
from ziggurat.training.report.progress import show_progress

MEASURED = (*memory.CASES, *speed.CASES, *disk.CASES)
CASES = (*MEASURED, *subjects.CASES)


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """`--cases`, `--seeds`, `--minutes`, `--runs`."""
    parser = argparse.ArgumentParser(prog="ziggurat bench tables")
    default = ",".join((*MEASURED, *subjects.PROMISED))
    parser.add_argument("--cases", default=default, help=f"all, or out of {', '.join(CASES)} (default: %(default)s)")
    parser.add_argument("--seeds", type=int, choices=range(1, 101), metavar="1…100", default=5, help="runs of a case")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no training after so long")
    parser.add_argument("--runs", type=Path, help="folder of the runs (default: runs/tables)")
    return parser.parse_args(list(arguments))


def run(*, quick: bool = False, options: argparse.Namespace) -> Report:
    """Bytes first, then speed, then AUC (small tables, few rounds, and one seed of one epoch each if quick)."""
    asked = ",".join(CASES) if options.cases == "all" else options.cases
    names = chosen(asked, known=CASES, option="ziggurat bench tables --cases")
    report = Report(
        benchmark="tables",
        claim="Tables in few bits behind a cache, and on a disk: bytes and speed against FP32 in memory, and test AUC.",
        command="ziggurat bench tables",
    )
    sizes = {name: memory.CASES[name].measure() for name in names if name in memory.CASES}
    if sizes:
        report.tables.append(memory.table(sizes))
    report.figures += [{"name": name} | each for name, each in sizes.items()]
    _add_speeds(report, [name for name in names if name in speed.CASES], quick=quick)
    _add_disk(report, [name for name in names if name in disk.CASES], quick=quick)
    _add_quality(report, [name for name in names if name in subjects.CASES], quick=quick, options=options)
    return report


def _add_speeds(report: Report, names: list[str], *, quick: bool) -> None:
    if not names:
        return
    for group in speed.measure(names, quick=quick, progress=show_progress()):
        cases = [group.case(name) for name in group.seconds if name in speed.CASES]
        report.cases += cases
        share = group.table_share
        told = ", ".join(case.name for case in cases)
        report.notes.append(f"{told}: lookups and updates take {share:.0%} of the step with FP32 tables")
        report.extra |= {f"table_share {case.name}": round(share, 4) for case in cases}
    report.plots.append(("tables_speed.png", partial(plots.plot_speed, list(report.cases))))


def _add_disk(report: Report, names: list[str], *, quick: bool) -> None:
    if not names:
        return
    found = disk.measure(names, size=disk.QUICK if quick else disk.Size(), progress=show_progress())
    report.tables.append(disk.table(found))
    report.figures += found


def _add_quality(report: Report, names: list[str], *, quick: bool, options: argparse.Namespace) -> None:
    found, left = quality.collect(
        names,
        seeds=1 if quick else options.seeds,
        out=options.runs or ROOT / "runs" / ("tables_quick" if quick else "tables"),
        until=time.time() + 60 * options.minutes,
        epochs=1 if quick else 0,
        progress=show_progress(),
    )
    if found:
        report.tables.append(quality.table(found))
        report.plots.append(("tables_quality.png", partial(plots.plot_quality, found)))
    report.figures += [{"name": name} | each.summary() for name, each in found.items()]
    report.skipped += [f"not finished: {each}" for each in left]
