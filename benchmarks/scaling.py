"""Loss against compute: `ziggurat scale` with a report (machine, versions, commit) around it.

    ziggurat bench scaling --data synthetic --models wukong,dlrm,dcn_v2 --compute 1x..256x

Runs are kept in `runs/scale` and taken up; with every run there, this only writes the report again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.harness import ROOT
from benchmarks.report import Report
from ziggurat.studies.compare_data import ComparedData
from ziggurat.studies.scaling_report import markdown, plot
from ziggurat.studies.scaling_runs import ScaleConfig, factors_of, scale
from ziggurat.training.report.progress import show_progress


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of this benchmark."""
    parser = argparse.ArgumentParser(prog="ziggurat bench scaling", description=__doc__)
    parser.add_argument("--data", default="synthetic", choices=[each.value for each in ComparedData])
    parser.add_argument("--models", default="wukong,dlrm,dcn_v2")
    parser.add_argument("--compute", default="1x..256x")
    parser.add_argument("--points", type=int, default=5)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--seeds", type=int, default=1)
    return parser.parse_args(arguments)


def run(*, quick: bool = False, options: argparse.Namespace | None = None) -> Report:
    """One study; `quick`: three small sizes and few rows."""
    options = options or parse_options([])
    config = ScaleConfig(
        models=tuple(options.models.split(",")),
        factors=(1.0, 2.0, 4.0) if quick else factors_of(options.compute, points=options.points),
        data=ComparedData(options.data),
        rows=20_000 if quick else options.rows,
        seeds=options.seeds,
    )
    out = ROOT / "runs" / ("scale_quick" if quick else "scale")
    scaled = scale(config, out=out, progress=show_progress())
    name = f"scaling_{options.data.replace('-', '_')}"
    report = Report(
        benchmark=name,
        claim="Test log loss after one pass, for models of growing compute; the law loss = a + b·x^(−c) with a band.",
        command=f"ziggurat bench scaling --data {options.data} --models {options.models} --compute {options.compute} "
        f"--points {options.points} --rows {options.rows} --seeds {options.seeds}",
    )
    report.tables.append(markdown(scaled, config))
    report.extra["scaling"] = [model.to_json() for model in scaled]
    report.plots.append((f"{name}.png", lambda path: plot(scaled, config).savefig(path, dpi=130)))
    return report
