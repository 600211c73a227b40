"""`ziggurat compare` and `ziggurat scale`: their arguments, and what they print."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ziggurat.recipes.compare_data import ComparedData

COMPARE_SUMMARY = "train models on one data set with several seeds, and say which is better"
COMPARE_EPILOG = """Data sets: frappe, movielens, movielens-random, synthetic. Every model gets the same number of
trials, chosen by validation data; test data is read once a run. Called again, it goes on where it was stopped.
Examples:
  ziggurat compare frappe --models dnn,dlrm,dcn_v2,wukong --seeds 5 --source FOLDER
  ziggurat compare movielens --models dnn,dcn_v2,wukong --trials 3 --json movielens.json
  ziggurat compare synthetic --protocol scale --models dlrm,wukong --seeds 3
"""


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `ziggurat compare`."""
    parser.add_argument("data", help="frappe, movielens, movielens-random or synthetic")
    parser.add_argument("--models", metavar="A,B,…", default="dnn,dlrm,dcn_v2,wukong", help="default: %(default)s")
    parser.add_argument("--seeds", metavar="S", type=int, default=5, help="runs of each model (default: %(default)s)")
    parser.add_argument(
        "--trials",
        metavar="K",
        type=int,
        default=1,
        help="settings of each model to choose from (default: 1, as given)",
    )
    parser.add_argument("--protocol", choices=("bars", "scale"), default="bars", help="default: %(default)s")
    parser.add_argument("--source", metavar="PATH", default="", help="folder or file of the raw data")
    parser.add_argument("--rows", metavar="N", type=int, default=1_000_000, help="of synthetic data")
    parser.add_argument("--threads", metavar="T", type=int, default=1, help="of each run (default: %(default)s)")
    parser.add_argument("--max-epochs", metavar="E", type=int, default=0, help="stop earlier than the protocol does")
    parser.add_argument("--out", metavar="FOLDER", default="runs/compare", help="default: %(default)s")
    parser.add_argument("--json", metavar="FILE", help="write everything there; tables and plots lie beside it")


def compare(options: argparse.Namespace, rest: list[str]) -> int:
    """Run what is missing of a comparison, and show it."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from ziggurat.recipes.compare import CompareConfig
    from ziggurat.recipes.compare import compare as run_comparison
    from ziggurat.recipes.compare_report import (
        DIFFERENCE_COLUMNS,
        MODEL_COLUMNS,
        difference_rows,
        model_rows,
        write_comparison,
    )
    from ziggurat.recipes.protocols import Protocol
    from ziggurat.training.progress import show_progress

    del rest  # none: settings of runs stand in compare_settings.py
    config = CompareConfig(
        data=_data_named(options.data),
        models=tuple(name.strip() for name in options.models.split(",") if name.strip()),
        seeds=options.seeds,
        trials=options.trials,
        protocol=Protocol(options.protocol),
        source=options.source,
        rows=options.rows,
        threads=options.threads,
        max_epochs=options.max_epochs,
    )
    comparison = run_comparison(config, out=options.out, progress=show_progress())
    console = Console()
    for columns, rows in ((MODEL_COLUMNS, model_rows(comparison)), (DIFFERENCE_COLUMNS, difference_rows(comparison))):
        if not rows:
            continue
        table = Table(*columns, box=box.SIMPLE)
        table.columns[0].no_wrap = True
        for row in rows:
            table.add_row(*row)
        console.print(table)
    name = f"{config.data.value}-{config.protocol.value}"
    stem = Path(options.json).with_suffix("") if options.json else Path(options.out) / name / "comparison"
    for path in write_comparison(comparison, stem):
        console.print(f"{path}", soft_wrap=True)
    return 0


def _data_named(name: str) -> ComparedData:
    import difflib

    from ziggurat.errors import ConfigError
    from ziggurat.recipes.compare_data import ComparedData

    names = [member.value for member in ComparedData]
    if name in names:
        return ComparedData(name)
    raise ConfigError(
        expected="a data set: " + ", ".join(names),
        found=repr(name),
        where="command line",
        ways_out=[
            *(f"did you mean {match!r}?" for match in difflib.get_close_matches(name, names, n=1)),
            "train a single model on data of yours: ziggurat train table_dcn_v2",
        ],
    )
