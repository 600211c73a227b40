"""`ziggurat data …`: look at files, write schemas, put sessions together, import, fetch public data sets."""

from __future__ import annotations

import argparse
import shlex

from ziggurat.cli.data.session_verbs import cluster_by_session, import_query, print_repeats
from ziggurat.cli.outputs import add_output
from ziggurat.cli.tables import print_line, print_table
from ziggurat.cli.verb import Verb

DATA_SUMMARY = "look at files, write schemas, fetch public data sets"
DATA_EPILOG = """examples:
  ziggurat data inspect ratings.parquet --write-schema my.toml
  ziggurat data cluster-by-session log.parquet --session session_id --out clustered.parquet
  ziggurat data fetch movielens-1m
"""
_INSPECT_EPILOG = """Guesses what each column becomes (label, time, group, feature), how text is written (separator,
decimal comma, marks between thousands, order of day and month, texts that mean no value), and what gives the label
away. Read the schema and correct it: each guess stands there with its reason.
examples:
  ziggurat data inspect ratings.parquet --write-schema my.toml
  ziggurat data inspect office.csv --label Bought --separator semicolon
  ziggurat data inspect survey.csv --label answer --positive yes
"""
_FETCH_EPILOG = """Into the folder ZIGGURAT_CACHE, by default ~/.cache/ziggurat. Where a set must be asked for, the
error says where.
examples:
  ziggurat data fetch movielens-1m
  ziggurat data fetch frappe --source downloads/Mobile_Frappe.zip
"""
_CLUSTER_EPILOG = """examples:
  ziggurat data cluster-by-session log.parquet --session session_id --out clustered.parquet
  ziggurat data cluster-by-session day_*.parquet --session session_id --time timestamp --out clustered.parquet
"""
_IMPORT_EPILOG = """examples:
  ziggurat data import --sql "SELECT * FROM 'logs/*.csv' WHERE country = 'FR'" --out france.parquet
  ziggurat data import --sql "SELECT user, item, click FROM events" --database shop.sqlite --out events.parquet
  ziggurat data import --sql "SELECT * FROM events" --database postgresql://me@host/shop --out events.parquet
"""


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `data inspect`, `data cluster-by-session`, `data import` and `data fetch`."""
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)

    def action(name: str, summary: str, epilog: str) -> argparse.ArgumentParser:
        return actions.add_parser(name, help=summary, description=summary, epilog=epilog)

    _add_inspect(action("inspect", "guess the schema of a file, and explain each guess", _INSPECT_EPILOG))
    clustered = "write the rows of a session next to each other, so that what repeats compresses"
    _add_cluster(action("cluster-by-session", clustered, _CLUSTER_EPILOG))
    _add_import(action("import", "write what a database answers to a query into a Parquet file", _IMPORT_EPILOG))
    fetch = action("fetch", "get a public data set into the cache, checked by checksum", _FETCH_EPILOG)
    fetch.add_argument(
        "name",
        help="movielens-1m, movielens-1m-histories, movielens-1m-events, beauty-events, gowalla, yambda-events, "
        "yambda-made, frappe, census-income, aliexpress-nl, aliexpress-es, aliexpress-fr, aliexpress-us, "
        "criteo-kaggle, criteo-1tb, criteo-x4",
    )
    fetch.add_argument("--source", metavar="PATH", help="archive or folder to take it from, instead of fetching it")


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", help="Parquet, Arrow, JSON Lines, CSV or TSV (also .gz); a path, or a URL (s3://bucket/key)"
    )
    parser.add_argument("--label", metavar="COLUMN", default="", help="the column to predict (default: guessed)")
    parser.add_argument(
        "--positive",
        metavar="TEXT",
        default="",
        help="the value of the label that is the positive, all others are not (default: guessed, of two values)",
    )
    parser.add_argument(
        "--separator", metavar="X", default="", help="of a text file: a character, semicolon, tab … (default: guessed)"
    )
    add_output(parser, "--write-schema", metavar="FILE", help="write the guess as TOML, explanations as comments")
    parser.add_argument(
        "--session",
        metavar="COLUMN",
        default="",
        help="the column of the session: measures how often each column repeats in one",
    )


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="+",
        help="Parquet, Arrow, JSON Lines, CSV or TSV (also .gz), or URLs, in the order of their rows",
    )
    parser.add_argument("--session", metavar="COLUMN", required=True, help="the column of the session")
    parser.add_argument(
        "--time", metavar="COLUMN", default="", help="order within a session (default: as in the files)"
    )
    add_output(parser, "--out", suffix=".parquet", metavar="FILE", required=True, help="the Parquet file to write")


def _add_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sql", metavar="QUERY", required=True, help="the query")
    parser.add_argument(
        "--database", metavar="DB", default="", help="a file of DuckDB or SQLite, or a URI (default: files it names)"
    )
    add_output(parser, "--out", suffix=".parquet", metavar="FILE", required=True, help="the Parquet file to write")


def data(options: argparse.Namespace, rest: list[str]) -> int:
    """`data inspect`, `data cluster-by-session`, `data import` and `data fetch`."""
    if options.action == "fetch":
        from ziggurat.data.datasets import fetch

        print_line(f"{fetch(options.name, source=options.source)}")
        return 0
    if options.action == "cluster-by-session":
        return cluster_by_session(options)
    if options.action == "import":
        return import_query(options)
    from ziggurat.data.inspect.inspect_file import Named, inspect_named
    from ziggurat.features.schema_io import write_schema

    named = Named(label=options.label, positive=options.positive, session=options.session)
    inspection = inspect_named(options.file, named, separator=options.separator)
    head, *lines = inspection.table()
    print_table(head, lines)
    for warning in inspection.warnings:
        print_line(f"warning: {warning}")
    if session := options.session or inspection.schema.session:
        print_repeats(options.file, session=session, separator=options.separator)
    if options.write_schema:
        write_schema(inspection.schema, options.write_schema, comments=inspection.explanations)
        if not inspection.schema.labels and not inspection.recipe:
            print_line(f"schema written to {options.write_schema}, without a label; name the column to predict:")
            named = ["--session", options.session] if options.session else []
            again = ["data", "inspect", options.file, "--label", "COLUMN", *named]
            again += ["--write-schema", options.write_schema]
            print_line(f"  ziggurat {shlex.join(again)}")
            return 0
        print_line(f"schema written to {options.write_schema}; read it, correct it, then:")
        command = ["train", inspection.recipe or "auto", "--data.train", options.file, "--schema", options.write_schema]
        print_line(f"  ziggurat {shlex.join([*command, *inspection.settings()])}")
    elif inspection.settings():
        print_line(f"to read the file: {shlex.join(inspection.settings())}")
    return 0


DATA = Verb(
    name="data",
    summary=DATA_SUMMARY,
    epilog=DATA_EPILOG,
    add_arguments=add_data_arguments,
    run=data,
)
