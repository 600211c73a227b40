"""Next-item models on public event logs: quality over seeds against published figures, and speed against RecTools.

    ml1m_sasrec, ml1m_hstu, ml1m_hstu_large, beauty_sasrec    HR@10 and NDCG@10 of the test, mean ± sd over seeds
    ml1m_hstu_no_bias, …_position, …_time, …_own_time         the same with less of HSTU's biases: what each is worth
    ml1m_hstu_speed_rectools, ml1m_sasrec_…                   users/s of training epochs, one core, in turns
    ml1m_hstu_speed_padded                                    the same against padded torch

Leave one out with a stable sort, all items ranked but those a user had, weights chosen by validation; test data is read
once a run. Finished runs are kept in the folder of `--runs` and read, not trained again: the benchmark can be stopped
and taken up, and `--minutes` stops it. What is missing is named. Seeds of an earlier report count without its runs:

    ziggurat bench sequences --cases ml1m_sasrec --with-report benchmarks/reports/MACHINE-DATE/sequences.json

trains the seeds of ml1m_sasrec that this report lacks, and the new one has all that either has. Ablations have the
training that `ml1m_hstu` has, which validation chose for both biases, not for each of them.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import RECTOOLS, ROOT, chosen
from benchmarks.next_item.contest import others, speed
from benchmarks.next_item.quality import Found, collect, difference_table, differences, table
from benchmarks.next_item.reported import Reported, read_report
from benchmarks.next_item.subjects import SUBJECTS, beauty_file
from benchmarks.report import Report
from ziggurat.cache import cache_folder
from ziggurat.errors import ConfigError
from ziggurat.training.report.progress import show_progress

CASES = (*SUBJECTS, "speed")


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """`--cases`, `--seeds`, `--minutes`, `--runs`, `--with-report`."""
    parser = argparse.ArgumentParser(prog="ziggurat bench sequences")
    parser.add_argument("--cases", default=",".join(CASES), help=f"out of {', '.join(CASES)}")
    parser.add_argument("--seeds", type=int, choices=range(1, 101), metavar="1…100", default=5, help="runs of a case")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no training after so long")
    parser.add_argument("--runs", type=Path, help="folder of the runs (default: runs/sequences)")
    parser.add_argument(
        "--with-report", type=Path, metavar="FILE.json", help="count the seeds of this report, and train none of them"
    )
    return parser.parse_args(list(arguments))


def run(*, quick: bool = False, options: argparse.Namespace) -> Report:
    """Quality of all subjects (one seed of one epoch each if quick), then the contest of speed."""
    if quick and options.with_report:
        raise ConfigError(
            expected="--quick or --with-report",
            found="both",
            where="command line",
            ways_out="leave --quick away: its runs have one epoch, and the report's seeds have all",
        )
    names = chosen(options.cases, known=CASES, option="ziggurat bench sequences --cases")
    report = Report(
        benchmark="sequences",
        claim="Next-item models on public event logs: quality over seeds, and speed against RecTools on one core.",
        command="ziggurat bench sequences",
    )
    subjects = [name for name in names if name != "speed"]
    if "beauty_sasrec" in subjects and not (beauty_file().exists() or (cache_folder() / "beauty-events").is_dir()):
        subjects.remove("beauty_sasrec")
        report.skipped.append(
            "beauty_sasrec: Beauty.txt of S3-Rec is not here; ziggurat data fetch beauty-events --help"
        )
    reported = read_report(options.with_report) if options.with_report else None
    found, left = collect(
        subjects,
        seeds=1 if quick else options.seeds,
        out=options.runs or ROOT / "runs" / ("sequences_quick" if quick else "sequences"),
        until=time.time() + 60 * options.minutes,
        epochs=1 if quick else 0,
        progress=show_progress(),
        reported=reported,
    )
    add_quality(report, found, reported=reported)
    report.skipped += [f"not finished: {each}" for each in left]
    if reported and "speed" not in names:
        report.cases += reported.speed
        report.notes.append("the comparisons of speed are that report's, too")
    if "speed" not in names:
        return report
    if not (ROOT / RECTOOLS / "bin" / "python").exists():
        report.skipped.append(f"speed: no {RECTOOLS}; bash benchmarks/setup.sh rectools makes it")
        return report
    report.notes.append(others())
    cases, contestants = speed(quick=quick)
    report.cases += cases
    report.contestants += contestants
    return report


def add_quality(report: Report, found: dict[str, Found], *, reported: Reported | None) -> None:
    """Tables and figures of quality, and where their seeds are from."""
    if any(not each.subject.against for each in found.values()):
        report.tables.append(table(found))
    if ablations := difference_table(found):
        report.tables.append(ablations)
    apart = differences(found)
    for name, each in found.items():
        less = {"hr10_less_that_of": each.subject.against, "hr10_differences": apart[name]} if name in apart else {}
        report.figures.append({"name": name} | each.summary() | less)
    if reported:
        report.notes += reported.notes()
