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
from benchmarks.table_tiers.reported import Reported, read_report
from ziggurat.data.datasets.frappe import fetch_frappe
from ziggurat.errors import ConfigError, MissingFileError
from ziggurat.training.report.progress import show_progress

MEASURED = (*memory.CASES, *speed.CASES, *disk.CASES)
CASES = (*MEASURED, *subjects.CASES)


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """`--cases`, `--seeds`, `--minutes`, `--runs`, `--with-report`."""
    parser = argparse.ArgumentParser(prog="ziggurat bench tables")
    default = ",".join((*MEASURED, *subjects.PROMISED))
    parser.add_argument("--cases", default=default, help=f"all, or out of {', '.join(CASES)} (default: %(default)s)")
    parser.add_argument("--seeds", type=int, choices=range(1, 101), metavar="1…100", default=5, help="runs of a case")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no training after so long")
    parser.add_argument("--runs", type=Path, help="folder of the runs (default: runs/tables)")
    parser.add_argument(
        "--with-report",
        type=Path,
        metavar="FILE.json",
        help="keep what this report has: cases that --cases does not name, and seeds, which count and are not trained",
    )
    return parser.parse_args(list(arguments))


def run(*, quick: bool = False, options: argparse.Namespace) -> Report:
    """Bytes first, then speed, then AUC (small tables, few rounds, and one seed of one epoch each if quick)."""
    if quick and options.with_report:
        raise ConfigError(
            expected="--quick or --with-report",
            found="both",
            where="command line",
            ways_out="leave --quick away: its tables are small and its runs have one epoch, unlike the report's",
        )
    asked = ",".join(CASES) if options.cases == "all" else options.cases
    names = chosen(asked, known=CASES, option="ziggurat bench tables --cases")
    reported = read_report(options.with_report) if options.with_report else None
    report = Report(
        benchmark="tables",
        claim="Tables in few bits behind a cache, and on a disk: bytes and speed against FP32 in memory, and test AUC.",
        command="ziggurat bench tables",
    )
    _add_sizes(report, names, reported)
    _add_speeds(report, names, reported, quick=quick)
    _add_disk(report, names, reported, quick=quick)
    _add_quality(report, names, reported, quick=quick, options=options)
    if reported is not None:
        report.notes += reported.notes(names)
    return report


def _add_sizes(report: Report, names: Sequence[str], reported: Reported | None) -> None:
    found = [{"name": name} | case.measure() for name, case in memory.CASES.items() if name in names]
    found += reported.kept(memory.CASES, measured=names) if reported else []
    if found:
        report.tables.append(memory.table({str(each["name"]): each for each in found}))
    report.figures += found


def _add_speeds(report: Report, names: Sequence[str], reported: Reported | None, *, quick: bool) -> None:
    asked = [name for name in names if name in speed.CASES]
    groups = speed.measure(asked, quick=quick, progress=show_progress()) if asked else []
    found = [(group.case(name), group.table_share) for group in groups for name in group.seconds if name in speed.CASES]
    found += reported.speeds(speed.CASES, measured=names) if reported else []
    shares = dict[float, list[str]]()
    for case, share in found:
        report.cases.append(case)
        report.extra[f"table_share {case.name}"] = round(share, 4)
        shares.setdefault(share, []).append(case.name)
    for share, told in shares.items():
        report.notes.append(f"{', '.join(told)}: lookups and updates take {share:.0%} of the step with FP32 tables")
    if found:
        report.plots.append(("tables_speed.png", partial(plots.plot_speed, [case for case, _ in found])))


def _add_disk(report: Report, names: Sequence[str], reported: Reported | None, *, quick: bool) -> None:
    asked, size = [name for name in names if name in disk.CASES], disk.QUICK if quick else disk.Size()
    found = disk.measure(asked, size=size, progress=show_progress()) if asked else []
    found += reported.kept(disk.CASES, measured=names) if reported else []
    if found:
        report.tables.append(disk.table(found))
    report.figures += found


def _add_quality(
    report: Report, names: Sequence[str], reported: Reported | None, *, quick: bool, options: argparse.Namespace
) -> None:
    asked = [name for name in names if name in subjects.CASES]
    if not _has_frappe() and (without := [name for name in asked if name.startswith("frappe_")]):
        asked = [name for name in asked if name not in without]
        report.skipped.append(f"{', '.join(without)}: Frappe is not here; ziggurat data fetch frappe --help")
    found, left = quality.collect(
        asked,
        seeds=1 if quick else options.seeds,
        out=options.runs or ROOT / "runs" / ("tables_quick" if quick else "tables"),
        until=time.time() + 60 * options.minutes,
        epochs=1 if quick else 0,
        progress=show_progress(),
        reported=reported,
    )
    if found:
        report.tables.append(quality.table(found))
        report.plots.append(("tables_quality.png", partial(plots.plot_quality, found)))
    report.figures += [{"name": name} | each.summary() for name, each in found.items()]
    report.skipped += [f"not finished: {each}" for each in left]


def _has_frappe() -> bool:
    try:
        fetch_frappe()
    except MissingFileError:
        return False
    return True
