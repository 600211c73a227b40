"""Models compared on one data set: `ziggurat compare` with a report (machine, versions, commit) around it.

    ziggurat bench compare --data frappe --models dnn,dcn_v2,wukong --seeds 5

Runs are kept in `runs/compare` and taken up; with every run there, this only writes the report again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.harness import ROOT
from benchmarks.report import Report
from ziggurat.recipes.protocols import Protocol
from ziggurat.studies.compare import CompareConfig, compare
from ziggurat.studies.compare_data import ComparedData
from ziggurat.studies.compare_report import markdown, plot
from ziggurat.training.report.progress import show_progress


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of this benchmark."""
    parser = argparse.ArgumentParser(prog="ziggurat bench compare", description=__doc__)
    parser.add_argument("--data", default="frappe", choices=[each.value for each in ComparedData])
    parser.add_argument("--protocol", default="bars", choices=[each.value for each in Protocol])
    parser.add_argument("--models", default="dnn,dlrm,dcn_v2,wukong")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=1)
    parser.add_argument("--note", action="append", default=[], help="a line for the report's notes")
    return parser.parse_args(arguments)


def run(*, quick: bool = False, options: argparse.Namespace | None = None) -> Report:
    """One comparison; `quick`: one seed and one epoch."""
    options = options or parse_options([])
    frappe = ROOT.parent / "shared" / "data" / "frappe"
    config = CompareConfig(
        data=ComparedData(options.data),
        protocol=Protocol(options.protocol),
        models=tuple(options.models.split(",")),
        seeds=1 if quick else options.seeds,
        trials=options.trials,
        source=str(frappe) if options.data == "frappe" and frappe.is_dir() else "",
        max_epochs=1 if quick else 0,
    )
    out = ROOT / "runs" / ("compare_quick" if quick else "compare")
    comparison = compare(config, out=out, progress=show_progress())
    name = f"compare_{options.data}_{options.protocol}".replace("-", "_")
    report = Report(
        benchmark=name,
        claim="Test metrics, mean ± standard deviation over seeds; every model with the same budget, chosen by "
        "validation data, test data read once a run.",
        command=f"ziggurat bench compare --data {options.data} --protocol {options.protocol} "
        f"--models {options.models} --seeds {config.seeds} --trials {config.trials}",
    )
    report.tables.append(markdown(comparison))
    report.notes += list(options.note)
    report.notes.append("samples/s of each run on a machine that other work shared: no speed comparison")
    report.extra["comparison"] = comparison.to_json()
    report.plots.append((f"{name}.png", lambda path: plot(comparison).savefig(path, dpi=130)))
    return report
