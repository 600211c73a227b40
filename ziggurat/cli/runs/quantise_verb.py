"""`ziggurat quantise`: what a finished run costs with its tables in few bits."""

from __future__ import annotations

import argparse
from pathlib import Path

from ziggurat.cli.outputs import add_output
from ziggurat.cli.own_models import add_model_argument, own_models
from ziggurat.cli.parser import add_verbose
from ziggurat.cli.runs.importance_verb import check_data_and_plot
from ziggurat.cli.tables import print_line, print_table
from ziggurat.cli.verb import Verb
from ziggurat.commands import pasted

QUANTISE_SUMMARY = "what a trained run costs with its tables in bf16, int8 or int4: AUC, log loss, scores and bytes"
QUANTISE_EPILOG = """Loads the run's checkpoint into each format, scores the same samples, and compares: AUC, log loss
(± the standard error of the difference, sample by sample), calibration, the largest change of any score, and bytes
table by table. --by-table tries one table at a time as well: a few of them may cost all of it. Nothing is written but
what --json and --plot name; the chosen formats go into an export, which answers from tables in few bits:
  ziggurat export runs/first --tables int8 --by-table user_id=int4 --out exports/small
examples:
  ziggurat quantise runs/first
  ziggurat quantise runs/first --split test --by-table --json costs.json --plot costs.png
  ziggurat quantise runs/first --data tomorrow.parquet --formats int8,int4"""


def add_quantise_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `quantise`."""
    parser.add_argument("run", help="folder of a trained run")
    parser.add_argument("--data", metavar="FILE", nargs="+", help="raw files or globs with labels")
    parser.add_argument(
        "--split", choices=("train", "valid", "test"), help="the run's own rows instead of files (default: valid)"
    )
    parser.add_argument("--formats", metavar="A,B", default="bf16,int8,int4", help="what to try (default: %(default)s)")
    parser.add_argument("--by-table", action="store_true", help="also try one table at a time, the others as they are")
    parser.add_argument("--step", type=int, help="checkpoint to use (default: the best by validation)")
    add_model_argument(parser)
    add_output(parser, "--json", metavar="FILE", help="write everything there")
    add_output(parser, "--plot", metavar="FILE", help="draw costs over bytes there (.png, .svg or .pdf)")
    add_verbose(parser)


def quantise(options: argparse.Namespace, rest: list[str]) -> int:
    """Measure what formats of fewer bits cost a run."""
    del rest
    from ziggurat.config import override
    from ziggurat.files import write_figure
    from ziggurat.runs.export.parity import METRIC_TOLERANCE
    from ziggurat.runs.tables.quantisation import (
        QUANTISATION,
        QuantisationConfig,
        quantisation_report,
    )
    from ziggurat.runs.tables.quantisation_plot import quantisation_figure
    from ziggurat.training.report.progress import show_progress

    check_data_and_plot(options)
    config = QuantisationConfig(
        by_table=options.by_table, split=options.split or "valid", data=tuple(options.data or ()), step=options.step
    )
    config = override(config, {"formats": options.formats})
    found = quantisation_report(
        options.run, config=config, models=own_models(options), progress=show_progress(verbose=options.verbose)
    )
    print_line(found.summary)
    print_table(found.columns(), found.cells())
    print_table(found.byte_columns(), found.byte_cells())
    if found.within:
        print_line(
            f"no metric worse than an export takes ({METRIC_TOLERANCE:g}) on these rows: "
            f"ziggurat export {pasted(options.run)} --tables {found.within} --out FOLDER "
            "(which compares again, on rows of all splits)"
        )
    if options.json:
        QUANTISATION.write(options.json, found.to_json())
        print_line(options.json)
    if options.plot:
        write_figure(quantisation_figure(found, title=f"tables in few bits, {Path(options.run).name}"), options.plot)
        print_line(options.plot)
    return 0


QUANTISE = Verb(
    name="quantise",
    summary=QUANTISE_SUMMARY,
    epilog=QUANTISE_EPILOG,
    add_arguments=add_quantise_arguments,
    run=quantise,
)
