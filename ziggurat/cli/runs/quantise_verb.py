"""`ziggurat quantise`: what a finished run costs with its tables, or its dense products, in few bits."""

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
from ziggurat.errors import ConfigError

QUANTISE_SUMMARY = (
    "what a trained run costs with its tables or its products in few bits: metrics, bytes, time; and write it"
)
QUANTISE_EPILOG = """Loads the run's checkpoint into each format, scores the same samples, and compares: AUC, log loss
(± the standard error of the difference, sample by sample), calibration, the largest change of any score, and bytes
table by table. --by-table tries one table at a time as well: a few of them may cost all of it. Nothing is written but
what --json and --plot name; the chosen formats go into an export, which answers from tables in few bits:
  ziggurat export runs/first --tables int8 --by-table user_id=int4 --out exports/small

--products packs the weights of the dense network instead (MLPs, crosses, projections), for scoring on a CPU: the same
samples are scored before and after, each change of a metric stands beside half of its 95 % interval, and batches of 1,
16 and 64 rows are timed in turns. What stays FP32 is named. --out writes the packed run, which evaluate, predict,
export and serve take like any run. --epochs N trains the dense network on in the precision of the format before.
examples:
  ziggurat quantise runs/first
  ziggurat quantise runs/first --split test --by-table --json costs.json --plot costs.png
  ziggurat quantise runs/first --data tomorrow.parquet --formats int8,int4
  ziggurat quantise runs/first --products mx6 --out runs/mx6
  ziggurat quantise runs/first --products mx6 --epochs 1 --out runs/mx6"""


def add_quantise_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `quantise`."""
    parser.add_argument("run", help="folder of a trained run")
    parser.add_argument("--data", metavar="FILE", nargs="+", help="raw files or globs with labels")
    parser.add_argument(
        "--split", choices=("train", "valid", "test"), help="the run's own rows instead of files (default: valid)"
    )
    parser.add_argument("--formats", metavar="A,B", help="what to try for tables (default: bf16,int8,int4)")
    parser.add_argument("--products", metavar="FORMAT", help="pack dense products: mx6, mx9, int8, …")
    parser.add_argument(
        "--epochs",
        type=int,
        default=0,
        metavar="N",
        help="train the dense network on in the precision of --products first (default: a direct cast)",
    )
    parser.add_argument(
        "--learning-rate", type=float, default=0.0, metavar="X", help="of --epochs (default: a tenth of the run's)"
    )
    add_output(parser, "--out", metavar="FOLDER", help="write the run with packed products there")
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
    _refuse_mixed(options)
    if options.products is not None:
        return _quantise_products(options)
    config = QuantisationConfig(
        by_table=options.by_table, split=options.split or "valid", data=tuple(options.data or ()), step=options.step
    )
    config = override(config, {"formats": options.formats or "bf16,int8,int4"})
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


def _refuse_mixed(options: argparse.Namespace) -> None:
    """Refuse what is of tables beside --products, and what is of products without it."""
    of_tables = [name for name in ("formats", "by_table", "plot") if getattr(options, name)]
    of_products = [name for name in ("out", "epochs", "learning_rate") if getattr(options, name)]
    wrong = of_tables if options.products is not None else of_products
    if not wrong:
        return
    flag = f"--{wrong[0].replace('_', '-')}"
    if options.products is not None:
        raise ConfigError(
            expected="--products, or the formats of tables: one thing is compared at a time",
            found=f"{flag} beside --products",
            where="command line",
            ways_out=(
                f"leave {flag} out",
                "both together are an export: ziggurat export RUN --tables int8 --products mx6 --out FOLDER",
            ),
        )
    raise ConfigError(
        expected=f"--products FORMAT beside {flag}: it is of packed products",
        found=f"{flag} alone",
        where="command line",
        ways_out=(
            "--products mx6",
            "tables in few bits go into an export: ziggurat export RUN --tables int8 --out FOLDER",
        ),
    )


def _quantise_products(options: argparse.Namespace) -> int:
    """Pack the dense products of a run, compare, and write it."""
    from ziggurat.runs.products_cost import (
        METRIC_COLUMNS,
        PRODUCTS_COST,
        TIME_COLUMNS,
        ProductsConfig,
        quantise_products,
    )
    from ziggurat.training.report.progress import show_progress

    config = ProductsConfig(
        format=options.products,
        split=options.split or "valid",
        data=tuple(options.data or ()),
        step=options.step,
        epochs=options.epochs,
        learning_rate=options.learning_rate,
    )
    found = quantise_products(
        options.run,
        config=config,
        out=options.out,
        models=own_models(options),
        progress=show_progress(verbose=options.verbose),
    )
    for line in found.lines():
        print_line(line)
    print_table(METRIC_COLUMNS, found.metric_cells())
    print_table(TIME_COLUMNS, found.time_cells())
    if options.json:
        PRODUCTS_COST.write(options.json, found.to_json())
        print_line(options.json)
    if options.out:
        print_line(f"{options.out}: ziggurat evaluate, predict, export and serve score by it")
    return 0


QUANTISE = Verb(
    name="quantise",
    summary=QUANTISE_SUMMARY,
    epilog=QUANTISE_EPILOG,
    add_arguments=add_quantise_arguments,
    run=quantise,
)
