"""`ziggurat compare` and `ziggurat scale`: their arguments, and what they print."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ziggurat.cli.outputs import add_output
from ziggurat.cli.own_models import add_model_argument, own_models
from ziggurat.cli.parser import add_verbose
from ziggurat.cli.settings import add_short_forms, settings_from, settings_given
from ziggurat.cli.tables import print_line, print_table
from ziggurat.cli.verb import Takes, Verb
from ziggurat.errors import ConfigError, nearest_names

if TYPE_CHECKING:
    from ziggurat.models.build import ModelConfig
    from ziggurat.precision import Precision
    from ziggurat.studies.compare_data import ComparedData
    from ziggurat.studies.compare_own import OwnData

COMPARE_SUMMARY = "train models on the same data with several seeds, and say which is better; or compare finished runs"
DEFAULT_MODELS = "dnn,dlrm,dcn_v2,wukong"
Number = TypeVar("Number", int, float)

COMPARE_EPILOG = """What to compare on:
  frappe, movielens, movielens-random, synthetic   built-in sets, with settings of their own for each model
  synthetic-300k, synthetic-1m, synthetic-10m      made rows with interactions of up to six features
  table, with --data.train and --schema            a table of yours
  sequences                                        MovieLens-1M as histories: sasrec, gsasrec, hstu_research, stu, …
                                                   by full ranking; bst, din, dien, transact, … by AUC of likes
  RECIPE or config.json                            its data, split and training settings, for every model
  RUN RUN …                                        folders of finished runs: side by side, and what differs between them
Every model gets the same number of trials, chosen by validation data; test data is read once a run. Called again, it
goes on where it was stopped. With a recipe or a table every setting can be given, as for `ziggurat train`; those of
`--model.` reach the models that have them. Examples:
  ziggurat compare table --data.train shop.parquet --schema my.toml --models dnn,dcn_v2,wukong --seeds 3 --epochs 2
  ziggurat compare movielens_dlrm --models dlrm,dcn_v2 --batch-size 4096 --json movielens.json
  ziggurat compare frappe --models dnn,dlrm,dcn_v2,wukong --seeds 5 --source FOLDER
  ziggurat compare frappe --models dlrm,wukong --precisions fp32,bf16,mx9,mx6 --seeds 5 --source FOLDER
  ziggurat compare sequences --models sasrec,gsasrec,hstu_research,stu --seeds 5
  ziggurat compare sequences --models sasrec,hstu_research,bst,din,dien,transact --seeds 5
  ziggurat compare synthetic --protocol scale --models dlrm,wukong --seeds 3
  ziggurat compare frappe --tuned tuned/ --seeds 5
  ziggurat compare runs/first runs/second
  ziggurat compare runs/seed0 runs/seed1 runs/seed2 --target auc=0.62
"""

SCALE_SUMMARY = "grow models in width, depth and rank together, and say which law their loss follows"
SCALE_EPILOG = """One pass over the data with row-wise Adagrad (protocol scale); results are never set beside those of
`ziggurat compare --protocol bars`. Called again, it goes on where it was stopped. Examples:
  ziggurat scale wukong,dcn_v2,rankmixer --data synthetic-1m --points 6 --seeds 3 --rates 1e-3,2e-3,4e-3
  ziggurat scale wukong,dcn_v2 --data synthetic-300k --compute 1x..64x --rates 2e-3,4e-3,8e-3 --rates-for every-size
  ziggurat scale wukong --compute 1x..256x
  ziggurat scale wukong,dlrm,dcn_v2 --compute 1x..64x --points 4 --data movielens --json scaling.json
  ziggurat scale wukong,dcn_v2 --tuned tuned/ --compute 1x..64x
  ziggurat scale wukong --data table --data.train shop.parquet --schema my.toml --training.loader.batch-size 1024
  ziggurat scale sequence_ranker --data movielens_hstu_ranker --lengths 6,12,25,50,100 --seeds 3
"""


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `ziggurat compare`."""
    parser.add_argument(
        "data", nargs="+", metavar="what", help="a built-in set, table, sequences, a recipe, or folders of runs"
    )
    parser.add_argument("--models", metavar="A,B,…", default="", help=f"default: {DEFAULT_MODELS}, or those of --tuned")
    add_model_argument(parser, about="config class of a model of your own, to compare with the others")
    parser.add_argument(
        "--precisions",
        metavar="P,Q,…",
        default="",
        help="train each model in each of these, and set them beside the first: fp32,bf16,mx9,… (default: the "
        "protocol's alone)",
    )
    parser.add_argument("--seeds", metavar="S", type=int, default=5, help="runs of each model (default: %(default)s)")
    parser.add_argument(
        "--trials",
        metavar="K",
        type=int,
        default=1,
        help="settings of each model to choose from (default: 1, as given)",
    )
    parser.add_argument("--tuned", metavar="FOLDER", default="", help="train the recipes that `ziggurat tune` found")
    parser.add_argument(
        "--read-test-again",
        action="store_true",
        help="though another comparison has read test data with recipes of that study; it is said",
    )
    add_protocol(parser)
    parser.add_argument("--out", metavar="FOLDER", default="runs/compare", help="default: %(default)s")
    add_output(parser, "--json", metavar="FILE", help="write everything there; tables and plots lie beside it")
    parser.add_argument(
        "--target", metavar="METRIC=VALUE", help="of finished runs: samples each trained on until validation reached it"
    )
    parser.add_argument(
        "--ranks", metavar="N", type=int, default=1, help="of finished runs, for --target (default: %(default)s)"
    )
    add_short_forms(parser, leave_out=("threads", "seed"))
    add_verbose(parser)


def add_protocol(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that say how all models are trained, and on which rows: of `compare` and of `tune`."""
    parser.add_argument(
        "--protocol",
        choices=("bars", "bars-averaged", "scale", "recipe"),
        help="default: bars for built-in sets, else as the recipe says",
    )
    parser.add_argument("--schema", metavar="FILE", help="schema (TOML) of your table")
    parser.add_argument("--source", metavar="PATH", default="", help="folder or file of the raw data")
    parser.add_argument("--rows", metavar="N", type=int, default=0, help="of data synthetic (default: 1,000,000)")
    parser.add_argument("--threads", metavar="T", type=int, default=1, help="of each run (default: %(default)s)")
    parser.add_argument("--max-epochs", metavar="E", type=int, default=0, help="stop earlier than the protocol does")


_COMPUTE = "1x..256x"


def add_scale_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `ziggurat scale`."""
    parser.add_argument(
        "models",
        help="that say how they grow: wukong, dhen, rankmixer, dcn_v2, dlrm, dnn, sequence_ranker; by commas, the last "
        "one on event logs",
    )
    parser.add_argument("--compute", metavar="RANGE", default="", help=f"default: {_COMPUTE}")
    parser.add_argument("--points", metavar="P", type=int, default=5, help="sizes in that range (default: %(default)s)")
    parser.add_argument(
        "--lengths",
        metavar="L,L,…",
        default="",
        help="events of the longest history, of event logs with labels: the same model, told of more, in place of "
        "--compute",
    )
    parser.add_argument(
        "--data", metavar="DATA", default="synthetic", help="a built-in set, table or a recipe (default: %(default)s)"
    )
    parser.add_argument("--schema", metavar="FILE", help="schema (TOML) of your table")
    parser.add_argument("--rows", metavar="N", type=int, default=0, help="of data synthetic (default: 1,000,000)")
    parser.add_argument("--seeds", metavar="S", type=int, default=1, help="runs of each size (default: %(default)s)")
    add_model_argument(parser, about="config class of a model of your own that says how it grows")
    parser.add_argument(
        "--rates",
        metavar="R,R,…",
        default="",
        help="learning rates that each model tries by validation data (default: the protocol's)",
    )
    parser.add_argument(
        "--rates-for",
        choices=("smallest", "every-size"),
        default="smallest",
        help="sizes that try them: the smallest, whose best rate all sizes then have, or each from the best rate of "
        "the size before (default: %(default)s)",
    )
    parser.add_argument("--batch-size", metavar="B", type=int, default=0, help="rows of a step (default: 512)")
    parser.add_argument("--source", metavar="PATH", default="", help="folder or file of the raw data")
    parser.add_argument("--threads", metavar="T", type=int, default=1, help="of each run (default: %(default)s)")
    parser.add_argument(
        "--tuned", metavar="FOLDER", default="", help="grow the recipes of `ziggurat tune … --protocol scale`"
    )
    parser.add_argument("--read-test-again", action="store_true", help="as for `ziggurat compare`")
    parser.add_argument("--out", metavar="FOLDER", default="runs/scale", help="default: %(default)s")
    add_output(parser, "--json", metavar="FILE", help="write everything there; tables and plots lie beside it")
    add_verbose(parser)


def scale(options: argparse.Namespace, rest: list[str]) -> int:
    """Run what is missing of a scaling study, and show it."""
    from ziggurat.models.build import kind_of
    from ziggurat.studies.scaling_report import summary, tables, write_scaling
    from ziggurat.studies.scaling_runs import RatesFor, ScaleConfig, factors_of
    from ziggurat.studies.scaling_runs import scale as run_scaling
    from ziggurat.studies.tuned import read_tuned
    from ziggurat.training.report.progress import show_progress

    changes = settings_given(rest)
    own = own_models(options)
    refuse_groups(changes, groups=("model.",), why="a study of scaling sets the sizes of models itself")
    if options.tuned:
        read_tuned(options.tuned, own=own).refuse_settings(changes)
    if options.lengths and options.compute:
        raise ConfigError(
            expected="sizes by compute or by the lengths of histories",
            found=f"--compute {options.compute} and --lengths {options.lengths}",
            where="command line",
            ways_out=("leave --compute out", "leave --lengths out"),
        )
    rates = tuple(float_of(each, flag="--rates") for each in names_in(options.rates))
    config = ScaleConfig(
        models=tuple(dict.fromkeys([*names_in(options.models), *(kind_of(each) for each in own)])),
        factors=factors_of(options.compute or _COMPUTE, points=options.points),
        lengths=tuple(int_of(each, flag="--lengths") for each in names_in(options.lengths)),
        data=data_named(options.data, options.schema, changes, own=own),
        rows=options.rows,
        seeds=options.seeds,
        own=own,
        rates=rates,
        rates_for=RatesFor(options.rates_for),
        batch_size=options.batch_size,
        source=options.source,
        threads=options.threads,
        tuned=options.tuned,
        read_test_again=options.read_test_again,
    )
    study = run_scaling(config, out=options.out, progress=show_progress(verbose=options.verbose))
    for line in summary(study):
        print_line(line)
    for columns, rows in tables(study):
        print_table(columns, rows)
    default = Path(options.out) / config.data_name / "scaling"
    for path in write_scaling(study, Path(options.json).with_suffix("") if options.json else default):
        print_line(str(path))
    return 0


def compare(options: argparse.Namespace, rest: list[str]) -> int:
    """Run what is missing of a comparison, and show it."""
    from ziggurat.models.build import kind_of
    from ziggurat.recipes.protocols import Protocol
    from ziggurat.studies.compare import CompareConfig
    from ziggurat.studies.compare import compare as run_comparison
    from ziggurat.studies.compare_data import USUAL_ROWS, check_rows
    from ziggurat.studies.compare_own import OwnData
    from ziggurat.studies.compare_report import (
        difference_columns,
        difference_rows,
        model_columns,
        model_rows,
        notes_of,
        write_comparison,
    )
    from ziggurat.studies.tuned import read_tuned
    from ziggurat.training.report.progress import show_progress

    changes = settings_from(options, rest)
    if len(options.data) > 1 or (Path(options.data[0]) / "config.json").is_file():
        refuse_groups(changes, groups=("",), why="finished runs have their settings")
        if options.precisions:
            raise _precisions_of_finished(options)
        return _compare_finished(options)
    if options.target:
        raise ConfigError(
            expected="folders of finished runs, for --target",
            found=", ".join(options.data),
            where="ziggurat compare --target",
            ways_out="ziggurat compare RUN RUN … --target auc=0.62",
        )
    data = data_named(options.data[0], options.schema, changes, own=own_models(options))
    own = own_models(options)
    tuned = read_tuned(options.tuned, own=own) if options.tuned else None
    if tuned is not None:
        tuned.refuse_settings(changes)
    check_rows(data, options.rows)
    usual = "recipe" if isinstance(data, OwnData) else "bars"
    protocol = options.protocol or (usual if tuned is None else tuned.protocol.value)
    names = names_in(options.models) or (names_in(DEFAULT_MODELS) if tuned is None else tuple(tuned.recipes))
    if protocol != "recipe":
        refuse_groups(changes, groups=("training.",), why=f"the protocol {protocol} sets them")
    config = CompareConfig(
        data=data,
        models=tuple(dict.fromkeys([*names, *(kind_of(each) for each in own)])),
        own=own,
        seeds=options.seeds,
        trials=options.trials,
        protocol=Protocol(protocol),
        source=options.source,
        rows=options.rows or USUAL_ROWS,
        threads=options.threads,
        max_epochs=options.max_epochs,
        precisions=_precisions(options, changes),
        judged_by="" if tuned is None else tuned.metric,
        tuned=options.tuned,
        read_test_again=options.read_test_again,
    )
    comparison = run_comparison(config, out=options.out, progress=show_progress(verbose=options.verbose))
    for table in comparison.tables:
        if table.question:
            print_line(f"{table.question}\n")
        print_table(model_columns(table), model_rows(table))
        print_table(difference_columns(table), difference_rows(table))
    for note in notes_of(comparison):
        print_line(f"note: {note}")
    default = Path(options.out) / f"{config.data_name}-{config.protocol.value}" / "comparison"
    for path in write_comparison(comparison, Path(options.json).with_suffix("") if options.json else default):
        print_line(str(path))
    return 0


def _compare_finished(options: argparse.Namespace) -> int:
    from ziggurat.studies.compare_finished import FINISHED, compare_finished
    from ziggurat.studies.samples_to_target import samples_to_target, target_json, target_of, target_table

    metric, value = target_of(options.target) if options.target else ("", 0.0)
    found = compare_finished([Path(folder) for folder in options.data], models=own_models(options))
    for columns, rows in found.tables():
        print_table(columns, rows)
    for note in found.notes:
        print_line(f"note: {note}")
    needed = samples_to_target(options.data, metric=metric, target=value, ranks=options.ranks) if metric else ()
    if needed:
        print_table(*target_table(needed))
    if options.json:
        counts = {"samples_to_target": target_json(needed, metric=metric, target=value)} if needed else {}
        FINISHED.write(options.json, found.to_json() | counts)
        print_line(options.json)
    return 0


def _precisions(options: argparse.Namespace, changes: Mapping[str, str]) -> tuple[Precision, ...]:
    """The precisions that were asked for."""
    from ziggurat.precision import Precision
    from ziggurat.typed import Reader

    names = names_in(options.precisions)
    if names and "training.precision" in changes:
        raise ConfigError(
            expected="one of --precision and --precisions",
            found=f"--precision {changes['training.precision']} and --precisions {options.precisions}",
            where="command line",
            ways_out=("leave --precision out", "leave --precisions out"),
        )
    return Reader(where="command line, --precisions").read(tuple[Precision, ...], names)


def _precisions_of_finished(options: argparse.Namespace) -> ConfigError:
    return ConfigError(
        expected="data to train models on, for --precisions",
        found=f"finished runs: {', '.join(options.data)}",
        where="ziggurat compare --precisions",
        ways_out=(
            "leave --precisions out: runs are set beside each other in the precisions that they were trained in",
            f"ziggurat compare frappe --precisions {options.precisions}",
        ),
    )


def float_of(text: str, *, flag: str) -> float:
    """Return a number of the command line.

    Raises:
        ConfigError: it is none.
    """
    return _number_of(text, float, flag=flag, expected="numbers", example="1e-3,2e-3,4e-3")


def int_of(text: str, *, flag: str) -> int:
    """Return a whole number of the command line.

    Raises:
        ConfigError: it is none.
    """
    return _number_of(text, int, flag=flag, expected="whole numbers", example="6,12,25,50,100")


def _number_of(text: str, kind: Callable[[str], Number], *, flag: str, expected: str, example: str) -> Number:
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(
            expected=f"{expected} with commas between them",
            found=repr(text),
            where=f"command line, {flag}",
            ways_out=f"{flag} {example}",
        ) from None


def names_in(text: str) -> tuple[str, ...]:
    """Return the names in a list that commas separate."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def refuse_groups(changes: Mapping[str, str], *, groups: Sequence[str], why: str) -> None:
    """Settings that would have no effect."""
    idle = [f"--{path}" for path in changes if path.startswith(tuple(groups))]
    if idle:
        raise ConfigError(
            expected="settings that take effect here",
            found=", ".join(idle),
            where=f"command line: {why}",
            ways_out=[
                "leave them out",
                "compare by a recipe's own settings: ziggurat compare RECIPE, --protocol recipe",
            ],
        )


def data_named(
    name: str,
    schema: str | None,
    changes: Mapping[str, str],
    *,
    own: Sequence[type[ModelConfig]] = (),
    seeds: str = "--seeds",
) -> ComparedData | OwnData:
    """Return a built-in data set, or the data and settings of a recipe, a config or a table of one's own.

    Args:
        name: as on the command line.
        schema: its file; None for none.
        changes: settings of the command line.
        own: config classes of the user's own.
        seeds: the flag that says the seeds of all runs.

    Raises:
        ConfigError: there is no such data, or a setting that cannot be.
    """
    from ziggurat.cli.settings import refuse_unknown
    from ziggurat.config import settings
    from ziggurat.features.schema_io import read_schema
    from ziggurat.recipes.catalogue import RECIPES, recipe_named
    from ziggurat.recipes.run_config import load_config
    from ziggurat.studies.compare_data import ComparedData
    from ziggurat.studies.compare_own import own_data

    built_in = [member.value for member in ComparedData]
    if name in built_in:
        refuse_groups(changes, groups=("",), why=f"{name} is a built-in set, with settings of its own for each model")
        return ComparedData(name)
    recipes = [recipe.__name__ for recipe in RECIPES]
    if name.endswith(".json"):
        run = load_config(name, models=own)
    elif name in ("table", "sequences") or name in recipes:
        given = None if schema is None else read_schema(schema)
        run = recipe_named({"table": "table_dnn", "sequences": "movielens_hstu"}.get(name, name), schema=given)
    else:
        raise _no_such_data(name, [*built_in, "table", "sequences", *recipes])
    refuse_unknown(
        [path for path in changes if not path.startswith("model.")], known=[each for each, _, _ in settings(run)]
    )
    mine = {"training.seed": seeds, "training.loader.seed": seeds, "training.threads": "--threads"}
    for path in changes:
        if path.replace("_", "-") in mine:
            refuse_groups({path: ""}, groups=("",), why=f"{mine[path.replace('_', '-')]} says it for all runs")
    return own_data(run, changes, name=name if name == "sequences" else "")


def _no_such_data(name: str, known: Sequence[str]) -> ConfigError:
    return ConfigError(
        expected="a built-in data set, table, a recipe, a config.json, or folders of runs: " + ", ".join(known),
        found=repr(name),
        where="command line",
        ways_out=[
            *(f"did you mean {match!r}?" for match in nearest_names(name, known, most=1)),
            "compare on data of yours: ziggurat compare table --data.train FILE --schema my.toml",
        ],
    )


COMPARE = Verb(
    name="compare",
    summary=COMPARE_SUMMARY,
    epilog=COMPARE_EPILOG,
    add_arguments=add_compare_arguments,
    run=compare,
    takes=Takes.WORDS,
)

SCALE = Verb(
    name="scale",
    summary=SCALE_SUMMARY,
    epilog=SCALE_EPILOG,
    add_arguments=add_scale_arguments,
    run=scale,
    takes=Takes.WORDS,
)
