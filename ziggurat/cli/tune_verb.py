"""`ziggurat tune`: search the settings of models by validation data, each with the same budget."""

from __future__ import annotations

import argparse
from pathlib import Path

from ziggurat.cli.compare_verbs import DEFAULT_MODELS, add_protocol, data_named, names_in, refuse_groups
from ziggurat.cli.own_models import add_model_argument, own_models
from ziggurat.cli.parser import add_verbose
from ziggurat.cli.settings import add_short_forms, settings_from
from ziggurat.cli.tables import print_line, print_table
from ziggurat.cli.verb import Takes, Verb

SUMMARY = "search the settings of models by validation data, each with the same budget; write a recipe for each"
EPILOG = """Test data is not read; `ziggurat compare DATA --tuned FOLDER` reads it once, with fresh seeds. Called again,
it goes on where it was stopped or killed; called several times at once, the processes share the tries. Needs Optuna:
pip install 'ziggurat-rec[tune]'. Examples:
  ziggurat tune frappe --models dcn_v2,wukong,dhen --budget 40 --out tuned/
  ziggurat tune table --data.train shop.parquet --schema my.toml --model wukong --hours 2
  ziggurat tune frappe --models dlrm,wukong --show-space
  ziggurat tune frappe --models wukong --space training.learning_rate=1e-4..1e-2 --space model.num_layers=2,3,4
  ziggurat tune frappe --models dnn --fix model.embedding_dim=16 --pruner wilcoxon --try-seeds 6
  ziggurat compare frappe --tuned tuned/ --seeds 5
"""


def add_tune_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `ziggurat tune`."""
    parser.add_argument("data", metavar="what", help="a built-in set, table, sequences, a recipe or a config.json")
    parser.add_argument("--models", metavar="A,B,…", default="", help=f"default: {DEFAULT_MODELS}")
    add_model_argument(parser, about="one more model: its name, or the config class of a model of your own")
    parser.add_argument("--budget", metavar="N", type=int, help="tries of each model (default: 40, or no limit)")
    parser.add_argument("--hours", metavar="H", type=float, default=0.0, help="of all models and processes together")
    parser.add_argument("--flops", metavar="F", type=float, default=0.0, help="of each model: of steps and evaluations")
    parser.add_argument("--metric", metavar="NAME", default="", help="that decides (default: AUC, or RMSE for numbers)")
    parser.add_argument(
        "--space", metavar="NAME=VALUES", action="append", default=[], help="search these: LOW..HIGH or A,B,C"
    )
    parser.add_argument("--fix", metavar="NAME=VALUE", action="append", default=[], help="do not search this setting")
    limit = "2x those of the settings as given, or a number for all models; draws beyond it are drawn again"
    parser.add_argument(
        "--max-flops-per-sample", metavar="LIMIT", default="", help=f"of a model that is tried, forward: {limit}"
    )
    parser.add_argument(
        "--max-parameters", metavar="LIMIT", default="", help="of a model that is tried, tables too: likewise"
    )
    parser.add_argument("--show-space", action="store_true", help="show what would be searched, and do nothing")
    parser.add_argument("--sampler", choices=("tpe", "random", "qmc"), default="tpe", help="default: %(default)s")
    parser.add_argument(
        "--pruner",
        choices=("hyperband", "median", "wilcoxon", "none"),
        default="hyperband",
        help="what ends bad tries early (default: %(default)s)",
    )
    parser.add_argument("--try-seeds", metavar="S", type=int, default=1, help="runs of each try (default: %(default)s)")
    parser.add_argument("--seed", metavar="N", type=int, default=1000, help="of tries (default: %(default)s)")
    parser.add_argument(
        "--storage", metavar="URL", default="", help="of a database for the tries (default: a journal in the folder)"
    )
    add_protocol(parser)
    parser.add_argument("--out", metavar="FOLDER", default="runs/tuned", help="default: %(default)s")
    add_short_forms(parser, leave_out=("threads", "seed"))
    add_verbose(parser)


def tune(options: argparse.Namespace, rest: list[str]) -> int:
    """Make the tries that are missing, and show what was found."""
    from ziggurat.models.build import kind_of
    from ziggurat.recipes.protocols import Protocol
    from ziggurat.studies.compare_data import USUAL_ROWS, check_rows
    from ziggurat.studies.compare_own import OwnData
    from ziggurat.studies.tune import TuneConfig, spaces_of
    from ziggurat.studies.tune import tune as run_study
    from ziggurat.studies.tune_report import SPACE_COLUMNS, columns_of, limit_lines, rows_of, space_rows, summary
    from ziggurat.studies.tune_study import Pruner, Sampler
    from ziggurat.training.report.progress import show_progress

    changes = settings_from(options, rest)
    # A name without a colon is one of ours: `--model wukong` beside `--models dnn,dcn_v2`.
    named = [name for name in options.own_models if ":" not in name]
    options.own_models = [name for name in options.own_models if ":" in name]
    own = own_models(options)
    data = data_named(options.data, options.schema, changes, own=own, seeds="--seed")
    check_rows(data, options.rows)
    protocol = options.protocol or ("recipe" if isinstance(data, OwnData) else "bars")
    if protocol != "recipe":
        refuse_groups(changes, groups=("training.",), why=f"the protocol {protocol} sets them")
    asked = [*names_in(options.models), *named, *(kind_of(each) for each in own)]
    has_budget = bool(options.hours or options.flops)
    config = TuneConfig(
        data=data,
        models=tuple(dict.fromkeys(asked or names_in(DEFAULT_MODELS))),
        budget=(0 if has_budget else 40) if options.budget is None else options.budget,
        flops=options.flops,
        hours=options.hours,
        protocol=Protocol(protocol),
        metric=options.metric,
        source=options.source,
        rows=options.rows or USUAL_ROWS,
        threads=options.threads,
        max_epochs=options.max_epochs,
        max_flops_per_sample=options.max_flops_per_sample,
        max_parameters=options.max_parameters,
        own=own,
        narrowed=tuple(options.space),
        fixed=tuple(options.fix),
        sampler=Sampler(options.sampler),
        pruner=Pruner(options.pruner),
        seed=options.seed,
        try_seeds=options.try_seeds,
        storage=options.storage,
    )
    if options.show_space:
        print_table(SPACE_COLUMNS, space_rows(spaces_of(config)))
        for line in limit_lines(config):
            print_line(line)
        return 0
    found = run_study(config, out=options.out, progress=show_progress(verbose=options.verbose))
    print_table(columns_of(found), rows_of(found))
    for line in (*summary(found), *(f"note: {note}" for note in found.notes)):
        print_line(line)
    folder = Path(options.out)
    for model in found.models:
        if model.best is not None:
            print_line(str(folder / f"{model.name}.json"))
    print_line(str(folder / "report.html"))
    return 0


TUNE = Verb(name="tune", summary=SUMMARY, epilog=EPILOG, add_arguments=add_tune_arguments, run=tune, takes=Takes.WORDS)
