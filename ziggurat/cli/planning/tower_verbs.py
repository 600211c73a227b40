"""`towers partition`: group features by what a trained run learned; a recipe is trained first."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ziggurat.cli.outputs import add_output
from ziggurat.cli.own_models import add_model_argument, own_models
from ziggurat.cli.parser import add_verbose
from ziggurat.cli.settings import add_short_forms, apply_settings, print_settings, refuse_unknown, settings_from
from ziggurat.cli.tables import print_line, print_table
from ziggurat.cli.verb import Takes, Verb
from ziggurat.commands import pasted
from ziggurat.errors import ConfigError

if TYPE_CHECKING:
    from ziggurat.recipes.run_config import RunConfig
    from ziggurat.runs.load import Run
    from ziggurat.runs.planning.partition import PartitionRunConfig

_SUMMARY = "group features by what a trained flat model learned about them, and write towers.json"
_EPILOG = """Reads a sample of the run's training data with its best weights (seconds). Features that share a
table stay together. Writes FILE, which `ziggurat train RECIPE --towers FILE` takes and which can be
edited by hand, and beside it a picture (FILE with .svg): features in the plane, and the interactions.

In the place of a run a recipe may stand, with its settings as for `ziggurat train`: it is trained flat first,
in runs/RECIPE_TABLE (--run), and not again the next time. A run's own data may lie elsewhere now: --data.train FILE.
Every setting of the partitioner and of the probe has a full name: --settings lists them.
examples:
  ziggurat towers partition runs/first --towers 4
  ziggurat towers partition runs/first --towers 4 --balance bytes --memory-limit-bytes 40000000000
  ziggurat towers partition table_dlrm --data.train shop.csv --schema my.toml --epochs 2 --towers 2
  ziggurat towers partition runs/first --settings"""
_OWN = ("partition.", "probe.")


def add_towers_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `towers partition`."""
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)
    partition = actions.add_parser(
        "partition",
        help=_SUMMARY,
        description=_SUMMARY,
        epilog=_EPILOG,
    )
    partition.add_argument(
        "run", help="folder of a trained run, flat, best a DLRM; or a recipe, such as table_dlrm, to train first"
    )
    partition.add_argument("--towers", metavar="T", type=int, help="number of towers")
    partition.add_argument(
        "--strategy",
        choices=("coherent", "diverse", "naive", "sequential"),
        help="what a tower holds: features that interact strongly, little, dealt out in turn, or blocks of neighbours "
        "(default: coherent)",
    )
    partition.add_argument(
        "--balance",
        choices=("count", "bytes", "lookups"),
        help="what towers hold the same amount of: features, bytes of tables with optimizer state, or numbers read a "
        "sample (default: count)",
    )
    partition.add_argument("--tolerance", metavar="X", help="share by which they may differ (default: 0.1)")
    partition.add_argument("--memory-limit-bytes", metavar="N", help="most that the tables of a tower may take")
    partition.add_argument("--seed", metavar="X", help="of the search and the sample (default: 0)")
    partition.add_argument("--samples", metavar="N", help="training rows to read (default: 65536)")
    add_output(partition, "--out", metavar="FILE", default="towers.json", help="default: %(default)s")
    partition.add_argument("--settings", action="store_true", help="list every setting with what it means, and stop")
    recipe = partition.add_argument_group("to train a recipe first")
    recipe.add_argument("--schema", metavar="FILE", help="schema (TOML) for the recipes table_*")
    recipe.add_argument(
        "--run", metavar="FOLDER", dest="run_folder", help="of that run (default: runs/RECIPE, or runs/RECIPE_TABLE)"
    )
    add_model_argument(partition)
    add_short_forms(partition, leave_out=("seed",))
    add_verbose(partition)


def towers(options: argparse.Namespace, rest: list[str]) -> int:
    """Run `towers partition`: write towers.json and a picture, and print the table."""
    from ziggurat.planning.towers.plots import write_picture
    from ziggurat.runs.planning.partition import PartitionRunConfig, partition_run
    from ziggurat.training.report.progress import show_progress

    changes = settings_from(options, rest)
    own = {path: text for path, text in changes.items() if path.startswith(_OWN)}
    others = {path: text for path, text in changes.items() if path not in own}
    default = PartitionRunConfig()
    listed = f"ziggurat towers partition {pasted(options.run)} --settings"
    settings = apply_settings(default, own | _flags(options), listed=listed)
    if options.settings:
        _list_settings(options, default, settings, others)
        return 0
    if options.towers is None and "partition.num-towers" not in own:
        raise ConfigError(
            expected="the number of towers",
            found="none",
            where="command line",
            ways_out=(f"ziggurat towers partition {pasted(options.run)} --towers 4",),
        )
    run = _trained_run(options, others)
    progress = show_progress(verbose=options.verbose)
    partition = partition_run(run, config=settings.partition, probe=settings.probe, progress=progress)
    out = Path(options.out)
    partition.towers.save(out)
    picture = write_picture(partition, out.with_suffix(".svg"))
    report = partition.report()
    head, *lines = report.table()
    print_table(head, lines)
    for line in report.lines():
        print_line(line)
    print_line(f"towers {out}\npicture {picture}")
    return 0


def _flags(options: argparse.Namespace) -> dict[str, str]:
    """Return the settings that the short flags stand for."""
    given = {
        "partition.num-towers": options.towers,
        "partition.strategy": options.strategy,
        "partition.balance": options.balance,
        "partition.tolerance": options.tolerance,
        "partition.memory-limit-bytes": options.memory_limit_bytes,
        "partition.seed": options.seed,
        "probe.seed": options.seed,
        "probe.num-samples": options.samples,
    }
    return {path: str(value) for path, value in given.items() if value is not None}


def _is_run(options: argparse.Namespace) -> bool:
    return (Path(options.run) / "config.json").is_file()


def _list_settings(
    options: argparse.Namespace, default: PartitionRunConfig, settings: PartitionRunConfig, others: Mapping[str, str]
) -> None:
    from ziggurat.cli.verbs import fitted

    print_settings(default, settings)
    if not _is_run(options):
        stored = fitted(_recipe(options), others)
        print_settings(stored, apply_settings(stored, others))


def _recipe(options: argparse.Namespace) -> RunConfig:
    from ziggurat.cli.verbs import any_schema
    from ziggurat.features.schema_io import read_schema
    from ziggurat.recipes.catalogue import RECIPES, recipe_named
    from ziggurat.recipes.run_config import with_model

    known = [recipe.__name__ for recipe in RECIPES]
    if options.run not in known:
        raise ConfigError(
            expected="the folder of a trained run, with its config.json, or a recipe to train first",
            found=repr(options.run),
            where="command line",
            ways_out=("see the recipes: ziggurat recipes", "train first: ziggurat train table_dlrm --out runs/first"),
        )
    schema = read_schema(options.schema) if options.schema else None
    if schema is None and options.settings and options.run.startswith("table_"):
        schema = any_schema()  # settings do not depend on it
    return with_model(recipe_named(options.run, schema=schema), own_models(options))


def _trained_run(options: argparse.Namespace, others: Mapping[str, str]) -> Run:
    """The run, with data where the command line says it lies now; a recipe's after training it."""
    from ziggurat.cli.verbs import fitted
    from ziggurat.config import override, settings
    from ziggurat.runs.load import load_run

    models = own_models(options)
    if not _is_run(options):
        recipe = _recipe(options)
        refuse_unknown(others, known=[path for path, _, _ in settings(recipe)])
        return load_run(_train(options, fitted(recipe, others), others), models=models)
    idle = [path for path in others if not path.startswith("data.")]
    if idle or options.schema or options.run_folder:
        found = [f"--{path}" for path in idle]
        found += ["--schema"] * bool(options.schema) + ["--run"] * bool(options.run_folder)
        raise ConfigError(
            expected="settings that take effect here: of the partition, the probe, and where the run's data lies",
            found=", ".join(found),
            where=f"command line: {options.run} is trained already",
            ways_out=("leave them out", "name a recipe to train first: ziggurat towers partition table_dlrm …"),
        )
    run = load_run(options.run, models=models)
    return dataclasses.replace(run, config=override(run.config, others)) if others else run


def _train(options: argparse.Namespace, config: RunConfig, others: Mapping[str, str]) -> Path:
    """Train a recipe, or go on with it, or take the finished run."""
    from ziggurat.runs.execute import train_run
    from ziggurat.training.records.run_folder import default_folder
    from ziggurat.training.report.progress import show_progress

    train = others.get("data.train", "")
    folder = Path(options.run_folder or default_folder(options.run, train=train))
    resume = (folder / "config.json").is_file()
    progress = show_progress(verbose=options.verbose)
    return train_run(apply_settings(config, others), folder=folder, resume=resume, progress=progress).folder


TOWERS = Verb(
    name="towers",
    summary="group the features of a trained model into towers",
    epilog="example:\n  ziggurat towers partition runs/first --towers 4\n",
    add_arguments=add_towers_arguments,
    run=towers,
    takes=Takes.WORDS,
)
