"""Loss against compute: `ziggurat scale` with a report (machine, versions, commit) around it.

    ziggurat bench scaling --data synthetic-1m --models wukong,dcn_v2,rankmixer --compute 1x..64x --points 6 --seeds 3

Runs are kept in `runs/scale` and taken up; with every run there, this only writes the report again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import ROOT
from benchmarks.report import Report
from ziggurat.recipes.catalogue import recipe_named
from ziggurat.studies.compare_data import ComparedData
from ziggurat.studies.compare_own import OwnData, own_data
from ziggurat.studies.scaling_report import markdown, plot
from ziggurat.studies.scaling_runs import RatesFor, ScaleConfig, factors_of, scale
from ziggurat.training.report.progress import show_progress


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of this benchmark."""
    parser = argparse.ArgumentParser(prog="ziggurat bench scaling", description=__doc__)
    parser.add_argument("--data", default="synthetic-1m", help="a built-in set, or a recipe")
    parser.add_argument("--models", default="wukong,dcn_v2,rankmixer")
    parser.add_argument("--compute", default="1x..64x")
    parser.add_argument("--points", type=int, default=6)
    parser.add_argument("--lengths", default="", help="of the longest history, of event logs, in place of --compute")
    parser.add_argument("--max-steps", type=int, default=0, help="of a run of a recipe; 0: one pass")
    parser.add_argument("--valid-fraction", default="", help="of a recipe's data")
    parser.add_argument("--test-fraction", default="", help="of a recipe's data")
    parser.add_argument("--name", default="", help="of the report (default: scaling_DATA)")
    parser.add_argument("--rows", type=int, default=0, help="of data synthetic")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", default="", help="learning rates that each model tries")
    parser.add_argument("--rates-for", default="smallest", choices=[each.value for each in RatesFor])
    parser.add_argument("--batch-size", type=int, default=0)
    parser.add_argument("--out", default="", help="folder of the runs (default: runs/scale)")
    return parser.parse_args(arguments)


def run(*, quick: bool = False, options: argparse.Namespace | None = None) -> Report:
    """One study; `quick`: three small sizes and few rows."""
    options = options or parse_options([])
    config = ScaleConfig(
        models=tuple(options.models.split(",")),
        factors=(1.0, 2.0, 4.0) if quick else factors_of(options.compute, points=options.points),
        lengths=() if quick else tuple(int(length) for length in options.lengths.split(",") if length),
        data=ComparedData.SYNTHETIC if quick else _data(options),
        rows=20_000 if quick else options.rows,
        seeds=1 if quick else options.seeds,
        rates=tuple(float(rate) for rate in options.rates.split(",") if rate),
        rates_for=RatesFor(options.rates_for),
        batch_size=options.batch_size,
    )
    out = Path(options.out or ROOT / "runs" / ("scale_quick" if quick else "scale"))
    study = scale(config, out=out, progress=show_progress())
    name = options.name or f"scaling_{options.data.replace('-', '_')}"
    report = Report(
        benchmark=name,
        claim="Test loss above the best reachable after one pass, for models of growing compute: no gain, a power "
        "law or a saturating law, told apart by sizes left out, with bands of 90 % over seeds and test rows.",
        command=f"ziggurat bench scaling --data {options.data} --models {options.models} --compute {options.compute} "
        f"--points {options.points} --seeds {options.seeds}{_given(options)}",
    )
    report.tables.append(markdown(study))
    report.figures += [
        {
            "name": f"{model.name}, {config.size_label(point.factor)}",
            "flops": point.flops,
            "above_best": point.above_best,
        }
        for model in study.models
        for point in model.points
    ]
    report.extra["scaling"] = study.to_json()
    report.plots.append((f"{name}.png", lambda path: plot(study).savefig(path, dpi=130)))
    return report


def _data(options: argparse.Namespace) -> ComparedData | OwnData:
    """Return the built-in set, or the data of a recipe."""
    if options.data in [each.value for each in ComparedData]:
        return ComparedData(options.data)
    settings = {
        "training.max_steps": str(options.max_steps or ""),
        "data.split.valid_fraction": options.valid_fraction,
        "data.split.test_fraction": options.test_fraction,
    }
    given = {name: value for name, value in settings.items() if value}
    return own_data(recipe_named(options.data), given)


def _given(options: argparse.Namespace) -> str:
    """Return the options that are not their defaults, as the command has them."""
    every = options.rates_for if options.rates_for != RatesFor.SMALLEST.value else ""
    given = {
        "--lengths": options.lengths,
        "--max-steps": options.max_steps,
        "--valid-fraction": options.valid_fraction,
        "--test-fraction": options.test_fraction,
        "--rates": options.rates,
        "--rates-for": every,
        "--batch-size": options.batch_size,
        "--rows": options.rows,
        "--name": options.name,
    }
    return "".join(f" {flag} {value}" for flag, value in given.items() if value)
