"""`ziggurat compare` and `ziggurat scale`: their arguments, and what they print."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ziggurat.studies.compare_data import ComparedData

COMPARE_SUMMARY = "train models on one data set with several seeds, and say which is better"
COMPARE_EPILOG = """Data sets: frappe, movielens, movielens-random, synthetic. Every model gets the same number of
trials, chosen by validation data; test data is read once a run. Called again, it goes on where it was stopped.
Examples:
  ziggurat compare frappe --models dnn,dlrm,dcn_v2,wukong --seeds 5 --source FOLDER
  ziggurat compare movielens --models dnn,dcn_v2,wukong --trials 3 --json movielens.json
  ziggurat compare synthetic --protocol scale --models dlrm,wukong --seeds 3
"""

SCALE_SUMMARY = "grow models in width, depth and rank together, train each size once, fit the law of scaling"
SCALE_EPILOG = """One pass over the data with row-wise Adagrad (protocol scale); results are never set beside those of
`ziggurat compare --protocol bars`. Called again, it goes on where it was stopped. Examples:
  ziggurat scale wukong --compute 1x..256x
  ziggurat scale wukong,dlrm,dcn_v2 --compute 1x..64x --points 4 --data movielens --json scaling.json
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
    parser.add_argument(
        "--protocol", choices=("bars", "bars-averaged", "scale"), default="bars", help="default: %(default)s"
    )
    parser.add_argument("--source", metavar="PATH", default="", help="folder or file of the raw data")
    parser.add_argument("--rows", metavar="N", type=int, default=1_000_000, help="of synthetic data")
    parser.add_argument("--threads", metavar="T", type=int, default=1, help="of each run (default: %(default)s)")
    parser.add_argument("--max-epochs", metavar="E", type=int, default=0, help="stop earlier than the protocol does")
    parser.add_argument("--out", metavar="FOLDER", default="runs/compare", help="default: %(default)s")
    parser.add_argument("--json", metavar="FILE", help="write everything there; tables and plots lie beside it")


def add_scale_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `ziggurat scale`."""
    parser.add_argument("models", help="out of wukong, dcn_v2, dlrm, dnn, separated by commas")
    parser.add_argument("--compute", metavar="RANGE", default="1x..256x", help="default: %(default)s")
    parser.add_argument("--points", metavar="P", type=int, default=5, help="sizes in that range (default: %(default)s)")
    parser.add_argument("--data", metavar="DATA", default="synthetic", help="as for compare (default: %(default)s)")
    parser.add_argument("--rows", metavar="N", type=int, default=1_000_000, help="of synthetic data")
    parser.add_argument("--seeds", metavar="S", type=int, default=1, help="runs of each size (default: %(default)s)")
    parser.add_argument("--source", metavar="PATH", default="", help="folder or file of the raw data")
    parser.add_argument("--threads", metavar="T", type=int, default=1, help="of each run (default: %(default)s)")
    parser.add_argument("--out", metavar="FOLDER", default="runs/scale", help="default: %(default)s")
    parser.add_argument("--json", metavar="FILE", help="write everything there; tables and plots lie beside it")


def scale(options: argparse.Namespace, rest: list[str]) -> int:
    """Run what is missing of a scaling study, and show it."""
    from ziggurat.studies.scaling_report import LAW_COLUMNS, POINT_COLUMNS, law_rows, point_rows, write_scaling
    from ziggurat.studies.scaling_runs import ScaleConfig, factors_of
    from ziggurat.studies.scaling_runs import scale as run_scaling
    from ziggurat.training.progress import show_progress

    del rest
    config = ScaleConfig(
        models=_names(options.models),
        factors=factors_of(options.compute, points=options.points),
        data=_data_named(options.data),
        rows=options.rows,
        seeds=options.seeds,
        source=options.source,
        threads=options.threads,
    )
    scaled = run_scaling(config, out=options.out, progress=show_progress())
    _print_tables([(POINT_COLUMNS, point_rows(scaled)), (LAW_COLUMNS, law_rows(scaled))])
    default = Path(options.out) / config.data.value / "scaling"
    _print_paths(write_scaling(scaled, config, Path(options.json).with_suffix("") if options.json else default))
    return 0


def compare(options: argparse.Namespace, rest: list[str]) -> int:
    """Run what is missing of a comparison, and show it."""
    from ziggurat.recipes.protocols import Protocol
    from ziggurat.studies.compare import CompareConfig
    from ziggurat.studies.compare import compare as run_comparison
    from ziggurat.studies.compare_report import (
        DIFFERENCE_COLUMNS,
        MODEL_COLUMNS,
        difference_rows,
        model_rows,
        write_comparison,
    )
    from ziggurat.training.progress import show_progress

    del rest  # none: settings of runs stand in compare_settings.py
    config = CompareConfig(
        data=_data_named(options.data),
        models=_names(options.models),
        seeds=options.seeds,
        trials=options.trials,
        protocol=Protocol(options.protocol),
        source=options.source,
        rows=options.rows,
        threads=options.threads,
        max_epochs=options.max_epochs,
    )
    comparison = run_comparison(config, out=options.out, progress=show_progress())
    columns, rows = narrowed(MODEL_COLUMNS, model_rows(comparison))
    _print_tables([(columns, rows), (DIFFERENCE_COLUMNS, difference_rows(comparison))])
    default = Path(options.out) / f"{config.data.value}-{config.protocol.value}" / "comparison"
    _print_paths(write_comparison(comparison, Path(options.json).with_suffix("") if options.json else default))
    return 0


def narrowed(
    columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, width: int = 0
) -> tuple[list[str], list[list[str]]]:
    """The columns that are not empty and fit on the terminal, first ones first; the file has them all."""
    from rich.console import Console

    left = width or Console().width
    kept = []
    for index, column in enumerate(columns):
        cells = [row[index] for row in rows]
        needed = max(len(cell) for cell in (column, *cells)) + 4
        if any(cells) and needed <= left:
            kept.append(index)
            left -= needed
    return [columns[index] for index in kept], [[row[index] for index in kept] for row in rows]


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _print_tables(tables: Sequence[tuple[Sequence[str], Sequence[Sequence[str]]]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    for columns, rows in tables:
        if not rows:
            continue
        table = Table(*columns, box=box.SIMPLE)
        table.columns[0].no_wrap = True
        for row in rows:
            table.add_row(*row)
        Console().print(table)


def _print_paths(paths: Sequence[Path]) -> None:
    from rich.console import Console

    for path in paths:
        Console().print(str(path), soft_wrap=True)


def _data_named(name: str) -> ComparedData:
    import difflib

    from ziggurat.errors import ConfigError
    from ziggurat.studies.compare_data import ComparedData

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
