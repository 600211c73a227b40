"""`ziggurat teacher log`: score examples by a trained run, once each, for students to learn from."""

from __future__ import annotations

import argparse

from ziggurat.cli.own_models import add_model_argument, own_models
from ziggurat.cli.parser import add_bad_rows, add_verbose
from ziggurat.cli.tables import print_line
from ziggurat.cli.verb import Verb


def teacher(options: argparse.Namespace, rest: list[str]) -> int:
    """Score examples by a trained run, each once, and keep the scores in a side table."""
    from ziggurat.data.raw.bad_rows import BadRowPolicy
    from ziggurat.runs.load import load_run
    from ziggurat.runs.teachers.log import log_teacher
    from ziggurat.training.report.progress import show_progress

    run = load_run(options.run, step=options.step, models=own_models(options))
    logged = log_teacher(
        run,
        options.data,
        out=options.out,
        name=options.name,
        example=tuple(filter(None, options.example.split(","))),
        vectors=options.vectors,
        history=options.history,
        watermark=options.watermark,
        bad_rows=BadRowPolicy(options.bad_rows),
        progress=show_progress(verbose=options.verbose),
    )
    facts = logged.facts
    print_line(f"teacher    {facts.teacher}, version {facts.version}, step {run.step:,}")
    print_line(f"watermark  {_shown(facts.watermark, is_calendar=facts.is_calendar)}")
    print_line(f"examples   {logged.num_new:,} scored, {logged.num_known:,} rows whose example was there")
    print_line(f"folder     {logged.path}")
    return 0


def _shown(watermark: float, *, is_calendar: bool) -> str:
    from ziggurat.data.streams.windows import Clock

    return Clock(per_second=1 if is_calendar else 0).shown(watermark)


def add_teacher_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `teacher`."""
    parser.add_argument("what", choices=("log",), metavar="what", help="log: score examples, and keep the scores")
    parser.add_argument("run", help="folder of a trained run: the teacher")
    parser.add_argument("data", nargs="+", help="raw files or globs: Parquet, JSON Lines, CSV, TSV (also .gz)")
    parser.add_argument("--out", metavar="FOLDER", required=True, help="the side table, which may hold other teachers")
    parser.add_argument("--name", default="", help="of the teacher (default: the name of the run's folder)")
    parser.add_argument(
        "--example",
        metavar="A,B",
        default="",
        help="raw columns that say which example a row is (default: those of all features, and the time)",
    )
    parser.add_argument(
        "--vectors",
        metavar="FORMAT",
        default="bf16",
        help="what the final representation is kept in: bf16, int8, or none (default: %(default)s)",
    )
    parser.add_argument(
        "--history",
        metavar="COLUMN",
        default="",
        help="raw column of the user: keeps user and time beside vectors, for students with --teacher-history",
    )
    parser.add_argument(
        "--watermark",
        metavar="MOMENT",
        default="",
        help="time of the newest row that the run has seen, where that is not known, or a later one "
        "(default: that of its own data and its parents)",
    )
    add_bad_rows(parser)
    parser.add_argument("--step", type=int, help="checkpoint to use (default: the best by validation)")
    add_model_argument(parser)
    add_verbose(parser)


TEACHER = Verb(
    name="teacher",
    summary="log the scores of a trained run, once an example, for students that learn from them",
    epilog=(
        "Given again, it goes on: what was scored by the same weights is not scored again.\nexamples:\n"
        "  ziggurat teacher log runs/big january.parquet february.parquet --out teacher/\n"
        "  ziggurat teacher log runs/big days/*.parquet --out teacher/ --example session_id --vectors int8\n"
        "  ziggurat train table_dlrm --data.train march.parquet --schema my.toml --teacher teacher/ --distil aux-head"
    ),
    add_arguments=add_teacher_arguments,
    run=teacher,
)
