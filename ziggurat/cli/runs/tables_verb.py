"""`ziggurat tables`: what the tables of a run take, how their rows are used, and what a cache of them would hit."""

from __future__ import annotations

import argparse
from pathlib import Path

from ziggurat.cli.outputs import add_output
from ziggurat.cli.own_models import add_model_argument, own_models
from ziggurat.cli.parser import add_verbose
from ziggurat.cli.runs.importance_verb import check_picture
from ziggurat.cli.tables import print_line, print_table
from ziggurat.cli.verb import Verb

TABLES_SUMMARY = "per table of a run: rows, bytes, format, rows touched, and what a cache of its rows would hit"
TABLES_EPILOG = """Reads a sample of the run's training data as training does, and needs no checkpoint. A few rows
get most of the lookups: `hits at 5 %` says which share of the rows that a step needs lie in a cache of one row in
twenty, the rows touched last. Where it is high, that table can be kept in few bits or on disk behind a small cache
(docs/guides/tables-larger-than-memory.md). Tables of a width and format share one cache: `all of …`. Where the run has
a cache, its own share is predicted, too, and what its log has measured stands beside it.
Rows that the sample never touches are unknown, not cold: large tables want more --samples.
examples:
  ziggurat tables runs/first
  ziggurat tables runs/first --plot curves.png --json tables.json
  ziggurat tables runs/first --table user_id --table movie_id --samples 10000000"""


def add_tables_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `tables`."""
    parser.add_argument("run", help="folder of a run, or its config.json")
    parser.add_argument(
        "--samples",
        metavar="N",
        type=int,
        default=1_000_000,
        help="training samples to read, half of them to fill the cache (default: %(default)s)",
    )
    parser.add_argument(
        "--table", metavar="NAME", action="append", default=[], help="only this one; may be repeated (default: all)"
    )
    add_model_argument(parser)
    add_output(parser, "--json", metavar="FILE", help="write everything there")
    add_output(parser, "--plot", metavar="FILE", help="draw the curves of misses there (.png, .svg or .pdf)")
    add_verbose(parser)


def tables(options: argparse.Namespace, rest: list[str]) -> int:
    """Bytes, use and predicted hits of a run's tables."""
    del rest
    from ziggurat.errors import ConfigError
    from ziggurat.files import write_figure
    from ziggurat.recipes.run_config import load_config
    from ziggurat.runs.execute import prepare_run
    from ziggurat.runs.tables.curve_plot import curve_figure
    from ziggurat.runs.tables.table_report import COLUMNS, TABLES, tables_report
    from ziggurat.runs.tables.touched_rows import touched_rows
    from ziggurat.training.records.run_folder import RunFolder
    from ziggurat.training.report.progress import show_progress

    if options.samples < 2:
        raise ConfigError(
            expected="2 samples or more, of which half fill the cache",
            found=str(options.samples),
            where="command line, --samples",
            ways_out="leave --samples out",
        )
    check_picture(options.plot)
    config = load_config(options.run, models=own_models(options))
    prepared = prepare_run(config, progress=show_progress(verbose=options.verbose))
    touched = touched_rows(prepared.train, loader=config.training.loader, samples=options.samples)
    log = RunFolder(Path(options.run)).metrics
    found = tables_report(config, touched, names=options.table, log=log)
    print_table(COLUMNS, found.rows())
    for line in found.lines():
        print_line(line)
    if options.json:
        TABLES.write(options.json, found.to_json())
        print_line(options.json)
    if options.plot:
        write_figure(curve_figure(found.curves, title=f"misses of caches, {Path(options.run).name}"), options.plot)
        print_line(options.plot)
    return 0


TABLES = Verb(
    name="tables",
    summary=TABLES_SUMMARY,
    epilog=TABLES_EPILOG,
    add_arguments=add_tables_arguments,
    run=tables,
)
