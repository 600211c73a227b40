"""Tables in few bits behind a cache of hot rows: bytes against FP32 with everything counted, and test AUC over seeds.

    dlrm_d64_int8_cache5_memory, …           bytes of rows, optimizer state, cache and its index; ratio to FP32
    RECIPE_d64_int8_cache5_auc, …            paired with FP32 of the same seed; the curve over cache sizes and both
                                             roundings are cases of their own (`--cases all`)
    dlrm_d128_…_speed, disk_8x_zipf          not here yet: left out with a line that says so

Finished runs are kept in the folder of `--runs` and read, not trained again: the benchmark can be stopped and taken up,
and `--minutes` stops it. What is missing is named.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import ROOT, chosen
from benchmarks.report import Report
from benchmarks.table_tiers import memory, quality
from ziggurat.training.report.progress import show_progress

AUC = tuple(f"{name}_auc" for name in quality.VARIANTS)
PROMISED = tuple(f"{name}_auc" for name, each in quality.VARIANTS.items() if each.promised)
CASES = (*memory.CASES, *AUC)
LEFT_OUT = (
    "dlrm_d128_bf16_speed, dlrm_d128_split_bf16_speed, dlrm_d64_int8_cache5_speed: no case yet; "
    "docs/experiments.md has what was measured of lookups and updates",
    "disk_8x_zipf: no case yet",
)


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """`--cases`, `--recipes`, `--seeds`, `--minutes`, `--runs`."""
    parser = argparse.ArgumentParser(prog="ziggurat bench tables")
    default = ",".join((*memory.CASES, *PROMISED))
    parser.add_argument("--cases", default=default, help=f"all, or out of {', '.join(CASES)} (default: %(default)s)")
    parser.add_argument(
        "--recipes", default=quality.RECIPES[0], help=f"of cases of AUC, out of {', '.join(quality.RECIPES)}"
    )
    parser.add_argument("--seeds", type=int, choices=range(1, 101), metavar="1…100", default=5, help="runs of a case")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no training after so long")
    parser.add_argument("--runs", type=Path, help="folder of the runs (default: runs/tables)")
    return parser.parse_args(list(arguments))


def run(*, quick: bool = False, options: argparse.Namespace) -> Report:
    """Bytes first, then AUC (one seed of one epoch each if quick)."""
    asked = ",".join(CASES) if options.cases == "all" else options.cases
    names = chosen(asked, known=CASES, option="ziggurat bench tables --cases")
    recipes = chosen(options.recipes, known=quality.RECIPES, option="ziggurat bench tables --recipes")
    report = Report(
        benchmark="tables",
        claim="Tables in few bits behind a cache of hot rows: bytes against FP32, and test AUC over seeds.",
        command="ziggurat bench tables",
        skipped=list(LEFT_OUT),
    )
    sizes = {name: memory.CASES[name].measure() for name in names if name in memory.CASES}
    if sizes:
        report.tables.append(memory.table(sizes))
    report.figures += [{"name": name} | each for name, each in sizes.items()]
    found, left = quality.collect(
        [(recipe, name.removesuffix("_auc")) for recipe in recipes for name in names if name in AUC],
        seeds=1 if quick else options.seeds,
        out=options.runs or ROOT / "runs" / ("tables_quick" if quick else "tables"),
        until=time.time() + 60 * options.minutes,
        epochs=1 if quick else 0,
        progress=show_progress(),
    )
    if found:
        report.tables.append(quality.table(found))
    report.figures += [{"name": name} | each.summary() for name, each in found.items()]
    report.skipped += [f"not finished: {each}" for each in left]
    return report
