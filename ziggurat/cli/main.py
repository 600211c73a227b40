"""`ziggurat <verb>`: parse, call, and turn errors into four lines. Loads torch only when a verb needs it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from ziggurat import __version__
from ziggurat.cli.compare_verbs import (
    COMPARE_EPILOG,
    COMPARE_SUMMARY,
    SCALE_EPILOG,
    SCALE_SUMMARY,
    add_compare_arguments,
    add_scale_arguments,
)
from ziggurat.cli.data.data_verbs import DATA_EPILOG, DATA_SUMMARY, add_data_arguments
from ziggurat.cli.data.prepare_verb import PREPARE_EPILOG, PREPARE_SUMMARY, add_prepare_arguments
from ziggurat.cli.outputs import add_output, replacing_is_said
from ziggurat.cli.own_models import add_model_argument
from ziggurat.cli.parser import VerbParser, add_verbose
from ziggurat.cli.planning.cluster_verbs import CLUSTER_EPILOG, CLUSTER_SUMMARY, add_cluster_arguments
from ziggurat.cli.planning.plan_verbs import (
    PLAN_EPILOG,
    PLAN_SUMMARY,
    SIMULATE_EPILOG,
    SIMULATE_SUMMARY,
    add_plan_arguments,
    add_simulate_arguments,
)
from ziggurat.cli.planning.tower_verbs import add_towers_arguments
from ziggurat.cli.runs.importance_verb import IMPORTANCE_EPILOG, IMPORTANCE_SUMMARY, add_importance_arguments
from ziggurat.cli.runs.quantise_verb import QUANTISE_EPILOG, QUANTISE_SUMMARY, add_quantise_arguments
from ziggurat.cli.runs.scoring_verbs import (
    EMBEDDINGS_EPILOG,
    EMBEDDINGS_SUMMARY,
    EVALUATE_EPILOG,
    EVALUATE_SUMMARY,
    PREDICT_EPILOG,
    PREDICT_SUMMARY,
    add_embeddings_arguments,
    add_evaluate_arguments,
    add_predict_arguments,
)
from ziggurat.cli.runs.tables_verb import TABLES_EPILOG, TABLES_SUMMARY, add_tables_arguments
from ziggurat.cli.serving.serving_verbs import add_serving_verbs
from ziggurat.cli.settings import add_short_forms
from ziggurat.errors import FileError, SchemaError, ZigguratError
from ziggurat.files.streams import say

DESCRIPTION = "Topology-aware recommendation models in PyTorch: train, plan, scale out, compress."
EXAMPLES = """examples:
  ziggurat demo                                               MovieLens-1M: fetch, train DLRM and DCNv2, compare
  ziggurat train movielens_dlrm --training.epochs 2 --model.embedding-dim 32
  ziggurat train runs/movielens_dlrm --resume                 go on after kill -9, bit for bit
  ziggurat data inspect ratings.parquet --write-schema my.toml
  ziggurat train table_dlrm --data.train ratings.parquet --schema my.toml
  ziggurat evaluate runs/movielens_dlrm ratings.parquet
  ziggurat predict runs/movielens_dlrm ratings.parquet --out scores.parquet
  ziggurat export runs/movielens_dlrm --out exports/films     one folder that ranks; see `ziggurat recommend`, too
  ziggurat towers partition runs/movielens_dlrm --towers 4
  ziggurat plan movielens_dlrm --cluster h100x64 --save plan.json
  torchrun --nproc-per-node 2 -m ziggurat train movielens_dlrm --towers towers.json --wire bf16
"""


TOWERS_EPILOG = """example:
  ziggurat towers partition runs/first --towers 4
"""
_AddVerb = Callable[[str, str, str], argparse.ArgumentParser]  # of its name, summary and epilog


def _add_demo(verb: _AddVerb) -> None:
    demo = verb(
        "demo",
        "fetch MovieLens-1M, train DLRM and DCNv2, then towers on 2 × 2 ranks; tables, reports with plots",
        "Needs no data of yours; the ranks run on this machine.\n"
        "examples:\n  ziggurat demo\n  ziggurat demo --no-ranks --out runs/demo\n  ziggurat demo --serve\n"
        "  ziggurat demo --sequences",
    )
    demo.add_argument("--out", default="runs/demo", help="folder of the runs (default: %(default)s)")
    demo.add_argument("--no-ranks", action="store_true", help="leave out the towers on two emulated hosts")
    demo.add_argument(
        "--sequences", action="store_true", help="instead: SASRec and HSTU on histories, the next film of each user"
    )
    demo.add_argument(
        "--serve", action="store_true", help="instead: train encoders and a ranker, export them, serve them, ask them"
    )
    add_verbose(demo)


def _add_train(verb: _AddVerb) -> None:
    train = verb(
        "train",
        "train a recipe, repeat a config, or resume a run",
        "Every setting of a run can be given as --group.name VALUE; `ziggurat train RECIPE --settings` lists them\n"
        "with their defaults.\nexamples:\n"
        "  ziggurat train movielens_dlrm --epochs 2 --dim 32\n"
        "  ziggurat train auto --data.train ratings.parquet --schema my.toml\n"
        "  ziggurat train table_dlrm --data.train ratings.parquet --schema my.toml\n"
        "  ziggurat train runs/movielens_dlrm --resume\n"
        "  ziggurat train movielens_dcn_v2 --training.seed 1 --out runs/dcn_v2_seed1\n"
        "  ziggurat train --config runs/demo/dlrm/config.json --out runs/again",
    )
    train.add_argument(
        "recipe",
        nargs="?",
        help="name of a recipe (see `ziggurat recipes`), or with --resume a run folder; none, or auto, with a schema: "
        "a few models are tried, and the best goes on",
    )
    train.add_argument("--config", metavar="FILE", help="config.json of a run: repeats it exactly")
    train.add_argument("--schema", metavar="FILE", help="schema (TOML) for the recipes table_*")
    train.add_argument("--towers", metavar="FILE", help="towers.json: groups of features, each behind a tower module")
    train.add_argument(
        "--compression", metavar="X", help="N / D of the tower modules; short for --model.tower-module.compression"
    )
    add_model_argument(train, about="config class of a model of your own, in the place of the recipe's model")
    train.add_argument("--out", metavar="FOLDER", help="folder of the run (default: runs/RECIPE, or runs/RECIPE_TABLE)")
    _rank_arguments(train)
    train.add_argument("--resume", action="store_true", help="go on from the newest intact checkpoint")
    train.add_argument(
        "--baseline", action="store_true", help="afterwards also logistic regression on the same rows, for the report"
    )
    train.add_argument("--settings", action="store_true", help="list every setting with what it means, and stop")
    add_verbose(train)
    add_short_forms(train)


def _add_reports(verb: _AddVerb) -> None:
    verb(
        "recipes",
        "list the recipes with one line each",
        "A recipe is a complete run: data, model, training. table_* are for data of yours.\n"
        "examples:\n  ziggurat recipes\n  ziggurat train movielens_dcn_v2",
    )
    report = verb(
        "report",
        "write report.html of a run again",
        "It reads what the run has logged.\nexample:\n  ziggurat report runs/first",
    )
    report.add_argument("run", help="folder of a run")
    report.add_argument(
        "--baseline",
        action="store_true",
        help="first train logistic regression on the run's rows, unless it was",
    )
    add_model_argument(report)
    add_verbose(report)
    verify = verb(
        "verify",
        "check every checkpoint of a run, and that each row was trained exactly once per epoch",
        "Ends with status 1 if something is damaged or missing, and says what.\nexample:\n  ziggurat verify runs/first",
    )
    verify.add_argument("run", help="folder of a run")
    add_model_argument(verify)


def _add_machine(verb: _AddVerb) -> None:
    verb(
        "doctor",
        "what this machine and installation can do, and what is missing and why",
        "Says which kernels look up embeddings and why not a faster one.\nexample:\n  ziggurat doctor",
    )
    bench = verb(
        "bench",
        "speed and quality against the peers; needs a checkout of the repository",
        "examples:\n  ziggurat bench list\n  ziggurat bench towers --quick --json towers.json\n"
        "Options of a benchmark's own: benchmarks/README.md.",
    )
    bench.add_argument("name", help="a benchmark (`ziggurat bench list` shows them), or all")
    add_output(bench, "--json", metavar="FILE", help="write machine, versions, commit and cases there")
    bench.add_argument("--quick", action="store_true", help="fewer rounds: to see that it works, not to be quoted")


def build_parser() -> VerbParser:
    """The whole command line. Its flags are frozen by a test: settings of runs belong into configs."""
    parser = VerbParser(prog="ziggurat", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument("--version", action="version", version=f"ziggurat {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="verb", required=True)

    def verb(name: str, summary: str, epilog: str) -> argparse.ArgumentParser:
        return verbs.add_parser(name, help=summary, description=summary, epilog=epilog)

    _add_demo(verb)
    _add_train(verb)
    add_prepare_arguments(verb("prepare", PREPARE_SUMMARY, PREPARE_EPILOG))
    add_evaluate_arguments(verb("evaluate", EVALUATE_SUMMARY, EVALUATE_EPILOG))
    add_predict_arguments(verb("predict", PREDICT_SUMMARY, PREDICT_EPILOG))
    add_embeddings_arguments(verb("embeddings", EMBEDDINGS_SUMMARY, EMBEDDINGS_EPILOG))
    add_importance_arguments(verb("importance", IMPORTANCE_SUMMARY, IMPORTANCE_EPILOG))
    add_tables_arguments(verb("tables", TABLES_SUMMARY, TABLES_EPILOG))
    add_quantise_arguments(verb("quantise", QUANTISE_SUMMARY, QUANTISE_EPILOG))

    add_serving_verbs(verb)

    add_data_arguments(verb("data", DATA_SUMMARY, DATA_EPILOG))
    add_towers_arguments(verb("towers", "group the features of a trained model into towers", TOWERS_EPILOG))

    add_plan_arguments(verb("plan", PLAN_SUMMARY, PLAN_EPILOG))
    add_simulate_arguments(verb("simulate", SIMULATE_SUMMARY, SIMULATE_EPILOG))
    add_cluster_arguments(verb("cluster", CLUSTER_SUMMARY, CLUSTER_EPILOG))
    add_compare_arguments(verb("compare", COMPARE_SUMMARY, COMPARE_EPILOG))
    add_scale_arguments(verb("scale", SCALE_SUMMARY, SCALE_EPILOG))
    _add_reports(verb)
    _add_machine(verb)
    return parser


def _rank_arguments(verb: argparse.ArgumentParser) -> None:
    ranks = verb.add_argument_group("on many ranks (torchrun --nproc-per-node N -m ziggurat train ...)")
    ranks.add_argument(
        "--plan", metavar="FILE", help="plan.json: where each table goes (default: balanced, table-wise)"
    )
    ranks.add_argument(
        "--tower-size", metavar="S", help="short for --parallel.tower-size: ranks that share their towers"
    )
    ranks.add_argument(
        "--context", metavar="N", help="short for --parallel.context: ranks that divide long histories between them"
    )
    ranks.add_argument(
        "--dense", metavar="HOW", help="short for --parallel.dense: ddp, fsdp or hsdp, for the dense network"
    )
    ranks.add_argument(
        "--wire", metavar="FORMAT", help="short for --parallel.wire.between-towers: fp32, bf16, fp16, int8 or fp8"
    )
    ranks.add_argument(
        "--exchange", metavar="WHEN", help="short for --parallel.exchange: plain, prioritised or prioritised_always"
    )


_WITH_SETTINGS = (
    "train",
    "prepare",
    "bench",
    "plan",
    "simulate",
    "compare",
    "scale",
    "evaluate",
    "predict",
    "serve",
    "towers",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status: 0 done, 1 a check failed, 2 an error, 130 interrupted."""
    parser = build_parser()
    known, settings = _split_settings(_with_home(sys.argv[1:] if arguments is None else arguments))
    try:
        options, rest = parser.parse_known_args(known)
        if rest and options.verb in ("evaluate", "predict"):
            raise options.parser.unknown(rest)  # settings of reading have a dot
        rest += settings
        if rest and options.verb not in _WITH_SETTINGS:
            raise options.parser.unknown(rest)
        return _run(options, rest)
    except ZigguratError as error:
        say(f"{type(error).__name__}\n{error}\n")
        if error.left_job:  # the interpreter's ordinary end would wait for ranks that may be gone
            from ziggurat.parallel.lost_ranks import end_process

            end_process(2, after=error)
        return 2
    except OSError as problem:
        say(f"FileError\n{_of_system(problem, arguments)}\n")
        return 2
    except KeyboardInterrupt:
        say("\ninterrupted\n")
        return 130


def _of_system(problem: OSError, arguments: Sequence[str] | None) -> FileError:
    """Return what the system refused, in four parts, where nobody nearer to it has said more."""
    verb = next(iter(sys.argv[1:] if arguments is None else arguments), "ziggurat")
    return FileError(
        expected=f"what `ziggurat {verb}` asks of the system",
        found=problem.strerror or str(problem),
        where=str(problem.filename or verb),
        ways_out=(
            "free space, or correct the permissions, where the path lies",
            "raise the limit on open files (ulimit -n) where too many are open",
            "look for disk errors in the system log (dmesg), and give the same command again",
        ),
    )


def _run(options: argparse.Namespace, rest: list[str]) -> int:
    """Run a verb; an error in a role of a schema names the file too, which whoever reads the data does not know."""
    try:
        with replacing_is_said(options, rest):
            return _handler(options.verb)(options, rest)
    except SchemaError as error:
        if error.where.startswith("[roles]") and getattr(options, "schema", None):
            error.where = f"{options.schema}, {error.where}"
        raise
    except KeyboardInterrupt:
        if options.verb != "train":
            raise
        from ziggurat.cli.verbs import to_go_on

        say(f"\ninterrupted; {to_go_on(options)}\n")
        return 130


def _with_home(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the home folder where a shell leaves ~: behind `=`, and behind a comma.

    A folder that is named `~` is `./~`.
    """
    found: list[str] = []
    for argument in arguments:
        flag, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
        parts = [os.path.expanduser(part) if part.startswith("~/") else part for part in value.split(",")]
        found.append(flag + equals + ",".join(parts))
    return found


def _split_settings(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Settings (`--group.name VALUE`, `--group.name=VALUE`) apart from the rest, which argparse reads.

    Argparse knows no `--group.name`, and would take its value for the name of a recipe.
    """
    known: list[str] = []
    settings: list[str] = []
    tokens = iter(arguments)
    for token in tokens:
        name, equals, _ = token.partition("=")
        if not (name.startswith("--") and "." in name):
            known.append(token)
            continue
        settings.append(token)
        if not equals and (value := next(tokens, None)) is not None:
            settings.append(value)
    return known, settings


def _handler(verb: str) -> Callable[[argparse.Namespace, list[str]], int]:
    from ziggurat.cli import compare_verbs, verbs
    from ziggurat.cli.data import data_verbs, prepare_verb
    from ziggurat.cli.planning import cluster_verbs, plan_verbs, tower_verbs
    from ziggurat.cli.runs import importance_verb, quantise_verb, scoring_verbs, tables_verb
    from ziggurat.cli.serving import serve_verb, serving_verbs

    return {
        "demo": verbs.demo,
        "train": verbs.train,
        "prepare": prepare_verb.prepare,
        "evaluate": scoring_verbs.evaluate,
        "predict": scoring_verbs.predict,
        "embeddings": scoring_verbs.embeddings,
        "importance": importance_verb.importance,
        "tables": tables_verb.tables,
        "quantise": quantise_verb.quantise,
        "export": serving_verbs.export,
        "recommend": serving_verbs.recommend,
        "index": serving_verbs.index,
        "serve": serve_verb.serve,
        "data": data_verbs.data,
        "towers": tower_verbs.towers,
        "plan": plan_verbs.plan,
        "simulate": plan_verbs.simulate,
        "cluster": cluster_verbs.cluster,
        "compare": compare_verbs.compare,
        "scale": compare_verbs.scale,
        "recipes": verbs.recipes,
        "report": verbs.report,
        "verify": verbs.verify,
        "doctor": verbs.doctor,
        "bench": verbs.bench,
    }[verb]


if __name__ == "__main__":
    sys.exit(main())
