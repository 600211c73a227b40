"""`ziggurat <verb>`: parse, call, and turn errors into four lines. Loads torch only when a verb needs it."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from ziggurat import __version__
from ziggurat.cli.compare_verbs import COMPARE, SCALE
from ziggurat.cli.data.data_verbs import DATA
from ziggurat.cli.data.drift_verb import DRIFT
from ziggurat.cli.data.images_verb import IMAGES
from ziggurat.cli.data.prepare_verb import PREPARE
from ziggurat.cli.extensions import installed_verbs, load_extensions
from ziggurat.cli.interrupts import Interrupts
from ziggurat.cli.numerics.numerics_verbs import NUMERICS
from ziggurat.cli.outputs import replacing_is_said
from ziggurat.cli.parser import VerbParser, is_flag
from ziggurat.cli.planning.cluster_verbs import CLUSTER
from ziggurat.cli.planning.plan_verbs import PLAN, SIMULATE
from ziggurat.cli.planning.tower_verbs import TOWERS
from ziggurat.cli.runs.importance_verb import IMPORTANCE
from ziggurat.cli.runs.quantise_verb import QUANTISE
from ziggurat.cli.runs.scoring_verbs import EMBEDDINGS, EVALUATE, PREDICT
from ziggurat.cli.runs.stream_verb import STREAM
from ziggurat.cli.runs.tables_verb import TABLES
from ziggurat.cli.runs.teacher_verb import TEACHER
from ziggurat.cli.serving.rollback_verb import ROLLBACK
from ziggurat.cli.serving.serve_verb import SERVE
from ziggurat.cli.serving.serving_verbs import EXPORT, INDEX, RECOMMEND
from ziggurat.cli.tune_verb import TUNE
from ziggurat.cli.verb import Takes, Verb
from ziggurat.cli.verbs import BENCH, DEMO, DOCTOR, RECIPES, REPORT, TRAIN, VERIFY, to_go_on
from ziggurat.commands import take_extensions, with_extensions
from ziggurat.errors import FileError, SchemaError, ZigguratError, of_user_code, refusing_exits
from ziggurat.files.streams import say

DESCRIPTION = "Topology-aware recommendation models in PyTorch: train, plan, scale out, compress."
EXAMPLES = """examples:
  ziggurat demo                                               MovieLens-1M: fetch, train DLRM and DCNv2, compare
  ziggurat train movielens_dlrm --training.epochs 2 --model.embedding-dim 32
  ziggurat train runs/movielens_dlrm --resume                 go on after kill -9, bit for bit
  ziggurat data inspect ratings.parquet --write-schema my.toml
  ziggurat train table_dlrm --data.train ratings.parquet --schema my.toml
  ziggurat stream movielens_dlrm --by month --from 2000-06 --growing 10000 --out runs/live
  ziggurat evaluate runs/movielens_dlrm ratings.parquet
  ziggurat predict runs/movielens_dlrm ratings.parquet --out scores.parquet
  ziggurat export runs/movielens_dlrm --out exports/films     one folder that ranks; see `ziggurat recommend`, too
  ziggurat towers partition runs/movielens_dlrm --towers 4
  ziggurat plan movielens_dlrm --cluster h100x64 --save plan.json
  torchrun --nproc-per-node 2 -m ziggurat train movielens_dlrm --towers towers.json --wire bf16
"""

# In the order of `ziggurat --help`.
OWN_VERBS = (
    *(DEMO, TRAIN, STREAM, TEACHER, PREPARE),
    *(EVALUATE, PREDICT, EMBEDDINGS, IMPORTANCE, TABLES, QUANTISE, NUMERICS),
    *(EXPORT, RECOMMEND, INDEX, SERVE, ROLLBACK),
    *(DATA, DRIFT, IMAGES, TOWERS),
    *(PLAN, SIMULATE, CLUSTER, COMPARE, TUNE, SCALE),
    *(RECIPES, REPORT, VERIFY, DOCTOR, BENCH),
)


def build_parser(verbs: Sequence[Verb] = OWN_VERBS) -> VerbParser:
    """Return the whole command line; its flags are frozen by a test: settings of runs belong into configs."""
    parser = VerbParser(prog="ziggurat", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument("--version", action="version", version=f"ziggurat {__version__}")
    parser.add_argument(
        "--extension",
        metavar="MODULE",
        action="append",
        default=[],
        help="module of yours that adds a placement, a row format, a precision, …; may be repeated",
    )
    parsers = parser.add_subparsers(dest="verb", metavar="verb", required=True)
    for verb in verbs:
        own = parsers.add_parser(verb.name, help=verb.summary, description=verb.summary, epilog=verb.epilog)
        verb.add_arguments(own)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status: 0 done, 1 a check failed, 2 an error, 130 interrupted."""
    with Interrupts() as interrupts:
        return _main(arguments, interrupts)


def _main(arguments: Sequence[str] | None, interrupts: Interrupts) -> int:
    verbs = {verb.name: verb for verb in (*OWN_VERBS, *installed_verbs([verb.name for verb in OWN_VERBS]))}
    parser = build_parser(tuple(verbs.values()))
    known, settings = _split_settings(_with_home(sys.argv[1:] if arguments is None else arguments))
    try:
        options, rest = parser.parse_known_args(known)
        verb = verbs[options.verb]
        unknown = rest if verb.takes is Takes.SETTINGS else [*rest, *settings] if verb.takes is Takes.NOTHING else []
        if unknown:
            raise options.parser.unknown(unknown)
        options.parser.refuse_shortened(rest)
        options.parser.refuse_misspelt(rest)
        load_extensions(options.extension)
        take_extensions(options.extension, verbs=verbs)
        return _run(verb, options, [*rest, *settings], interrupts=interrupts)
    except ZigguratError as error:
        notes = "".join(f"{note}\n" for note in getattr(error, "__notes__", ()))
        say(with_extensions(f"{type(error).__name__}\n{error}\n{notes}"))
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
            *(("correct the path",) if isinstance(problem, FileNotFoundError | NotADirectoryError) else ()),
            "free space, or correct the permissions, where the path lies",
            "raise the limit on open files (ulimit -n) where too many are open",
            "look for disk errors in the system log (dmesg), and give the same command again",
        ),
    )


# Where errors in a schema are that was made in Python, or read from a file by somebody else.
_IN_A_SCHEMA = ("schema", "the inputs of the model")


def _run(verb: Verb, options: argparse.Namespace, rest: list[str], *, interrupts: Interrupts) -> int:
    """Run a verb; an error in a schema names its file too, which what reads data and builds models does not know."""
    try:
        with refusing_exits(), replacing_is_said(options, rest):
            return verb.run(options, rest)
    except SchemaError as error:
        file = getattr(options, "schema", None)
        if file and error.where.startswith("[roles]"):
            error.where = f"{file}, {error.where}"
        elif file and error.where in _IN_A_SCHEMA:
            error.where = str(file)
        raise
    except (ZigguratError, OSError):
        raise
    except (KeyboardInterrupt, Exception) as error:
        if isinstance(error, Exception) and not interrupts.was_just_pressed:
            # Of code of the user's: no lines of ours explain it.
            in_four_parts = getattr(error, "in_four_parts", None) or of_user_code(error)
            if not isinstance(in_four_parts, ZigguratError):
                raise
            if getattr(options, "verbose", False):
                say("".join(traceback.format_exception(error)))
            in_four_parts.left_job = getattr(error, "left_job", False)
            raise in_four_parts from error
        if verb is not TRAIN:
            raise KeyboardInterrupt from error
        try:
            ways = to_go_on(options)
        except (AttributeError, ImportError):  # half imported, so nothing can have been trained
            ways = "no step was trained: give the same command again"
        say(with_extensions(f"\ninterrupted; {ways}\n"))
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
    is_value = False
    for position, token in enumerate(arguments):
        if is_value:
            is_value = False
            continue
        name, equals, _ = token.partition("=")
        if not (name.startswith("--") and "." in name):
            known.append(token)
            continue
        settings.append(token)
        # A setting without a value, before another flag: that one is not its value.
        if not equals and position + 1 < len(arguments) and not is_flag(arguments[position + 1]):
            settings.append(arguments[position + 1])
            is_value = True
    return known, settings


if __name__ == "__main__":
    sys.exit(main())
