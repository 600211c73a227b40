"""`evaluate`, `predict`, `embeddings`: what a trained run says of raw files, of its own rows, and of ids."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Collection
from typing import TYPE_CHECKING

from ziggurat.cli.outputs import add_output
from ziggurat.cli.own_models import add_model_argument, own_models
from ziggurat.cli.parser import add_bad_rows, add_verbose
from ziggurat.cli.settings import reading_settings
from ziggurat.cli.tables import print_line, print_table
from ziggurat.cli.verb import Takes, Verb
from ziggurat.commands import pasted
from ziggurat.config import override
from ziggurat.errors import ConfigError

if TYPE_CHECKING:
    from ziggurat.precision import Precision
    from ziggurat.runs.load import Run
    from ziggurat.training.evaluation.evaluate import Evaluation

EVALUATE_SUMMARY = "exact metrics of a trained run on raw files (same columns as its training data), or on its own rows"
_READING = """Text files are read as those that the run was trained on; for files that are written in another way say
--data.separator semicolon, --data.decimal comma, --data.thousands point (1.234,5), --data.signs strip ($12, 12%) or
--data.format csv; where lists came as lists in training and are text now (tag1|tag2), --data.list-separator pipe.
"""
EVALUATE_EPILOG = f"""{_READING}Says so where a file is one that the run was trained on: its own test rows are
--split test.
Tables too large for one device: torchrun --nproc-per-node N -m ziggurat evaluate ...
examples:
  ziggurat evaluate runs/first tomorrow.parquet --json tomorrow.json
  ziggurat evaluate runs/first --split test
  ziggurat evaluate runs/first --split test --precision mx6"""

PREDICT_SUMMARY = "score raw files with a trained run; labels need not be in them"
PREDICT_EPILOG = f"""{_READING}Says how many ids of each feature training never saw.
Tables too large for one device: torchrun --nproc-per-node N -m ziggurat predict ...
example:
  ziggurat predict runs/first today.parquet --out scores.csv --keep user_id,movie_id"""

EMBEDDINGS_SUMMARY = "the embeddings of a feature with the raw ids that they belong to"
EMBEDDINGS_EPILOG = """Columns: id (text) and vector. Ids that are hashed are not kept, and cannot be exported.
example:
  ziggurat embeddings runs/first movie_id --out movies.parquet
  ziggurat embeddings runs/first movie_id --out movies.csv"""


def add_embeddings_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `embeddings`."""
    parser.add_argument("run", help="folder of a trained run")
    parser.add_argument("feature", help="name of a feature with ids")
    add_output(
        parser,
        "--out",
        metavar="FILE",
        required=True,
        help="ids, and vectors as lists: .parquet; one column a number (vector_0 …): .csv or .tsv",
    )
    parser.add_argument("--step", type=int, help="checkpoint to use (default: the best by validation)")
    add_model_argument(parser)


def embeddings(options: argparse.Namespace, rest: list[str]) -> int:
    """Ids and vectors of a feature."""
    from ziggurat.files import replacing
    from ziggurat.files.table_endings import separator_by_ending
    from ziggurat.runs.load import load_run

    separator = separator_by_ending(options.out)
    run = load_run(options.run, step=options.step, models=own_models(options))
    found = run.embeddings(options.feature)
    size = found["vector"].to_numpy().shape[1]
    # An error of polars is one of writing, too.
    with replacing(options.out) as temporary:
        if separator:
            vectors = found["vector"].arr.to_struct([f"vector_{place}" for place in range(size)])
            found.with_columns(vectors).unnest("vector").write_csv(temporary, separator=separator)
        else:
            found.write_parquet(temporary)
    print_line(f"{found.height:,} ids with {size} numbers each written to {options.out} (step {run.step:,})")
    return 0


def add_evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `evaluate`."""
    _scoring_arguments(parser, needs_data=False)
    parser.add_argument("--split", choices=("train", "valid", "test"), help="the run's own rows instead of files")
    parser.add_argument(
        "--ranking-k", type=int, default=10, metavar="K", help="places that count in ndcg@K and recall@K (default: 10)"
    )
    parser.add_argument(
        "--slices",
        metavar="A,B",
        default="",
        help="also the metrics by column or feature of files: known and unknown ids, frequent values, the others",
    )
    parser.add_argument(
        "--slice-min-rows",
        type=int,
        default=100,
        metavar="N",
        help="rows that a value needs for a slice of its own (default: %(default)s)",
    )
    parser.add_argument(
        "--full-ranking",
        action="store_true",
        help="also rank all items for each positive row of files (two_tower); reads the training rows again. With "
        "--split that is done anyway",
    )
    parser.add_argument(
        "--precision",
        metavar="NAME",
        default="",
        help="round operands of dense products: mx9, mx6, mxfp8, … (default: FP32, whatever it trained in)",
    )
    add_output(parser, "--json", metavar="FILE", help="also write metrics, calibration and slices there")
    parser.add_argument("--report", action="store_true", help="also show the result in the run's report.html")
    add_verbose(parser)


def add_predict_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `predict`."""
    _scoring_arguments(parser, needs_data=True)
    add_output(
        parser,
        "--out",
        metavar="FILE",
        required=True,
        help="row, kept columns, one column a label: .parquet, .csv or .tsv",
    )
    parser.add_argument(
        "--keep", metavar="A,B", default="", help="columns of the data to write beside the scores, with commas between"
    )
    add_verbose(parser)


def _scoring_arguments(parser: argparse.ArgumentParser, *, needs_data: bool) -> None:
    parser.add_argument("run", help="folder of a trained run")
    parser.add_argument(
        "data", nargs="+" if needs_data else "*", help="raw files or globs: Parquet, JSON Lines, CSV, TSV (also .gz)"
    )
    add_bad_rows(parser)
    parser.add_argument("--step", type=int, help="checkpoint to use (default: the best by validation)")
    add_model_argument(parser)


def evaluate(options: argparse.Namespace, rest: list[str]) -> int:
    """Metrics on raw files, or on a split of the run."""
    from ziggurat.data.raw.bad_rows import BadRowPolicy
    from ziggurat.runs.load import open_run
    from ziggurat.runs.quality.slices import SliceConfig
    from ziggurat.training.evaluation.evaluate import unknown_text
    from ziggurat.training.metrics.full_ranking import repeats_lines
    from ziggurat.training.records.run_folder import EVALUATION, RunFolder
    from ziggurat.training.report.page import write_report
    from ziggurat.training.report.progress import show_progress

    _files_or_split(options, rest)
    precision = _precision(options)
    with open_run(options.run, step=options.step, models=own_models(options), precision=precision) as run:
        run = _reading_as_told(run, rest)
        progress = run.team.progress(show_progress(verbose=options.verbose))
        progress.begin("evaluate", total=None)
        if options.split:
            evaluation = run.evaluate_split(options.split, progress=progress, ranking_k=options.ranking_k)
        else:
            bad_rows = BadRowPolicy(options.bad_rows)
            columns = tuple(name.strip() for name in options.slices.split(",") if name.strip())
            evaluation = run.evaluate(
                options.data,
                bad_rows=bad_rows,
                progress=progress,
                ranking_k=options.ranking_k,
                slices=SliceConfig(columns=columns, min_rows=options.slice_min_rows),
                full_ranking=options.full_ranking,
            )
        progress.end()
        if run.team.is_first:
            what = f"{options.split} rows of the run" if options.split else "rows"
            print_line(f"{evaluation.num_rows:,} {what}, checkpoint of step {run.step:,}")
            if precision is not None:
                print_line(f"dense products in {precision}")
            if run.packed is not None:
                print_line(run.packed.line())
            print_line(evaluation.line())
            items = run.config.table_schema.items
            for line in () if items is None else repeats_lines(evaluation.metrics, repeats=items.repeats):
                print_line(line)
            if not options.split:
                _print_unknown(run)
            elif unknown := unknown_text(evaluation.unknown):
                print_line(unknown)
            _print_slices(evaluation)
            if options.json:
                named = {} if precision is None else {"precision": str(precision)}
                if run.packed is not None:
                    named["precision"] = f"packed {run.packed.format_name}"
                EVALUATION.write(options.json, evaluation.to_json() | named)
            if options.report:
                EVALUATION.write(RunFolder(run.folder).evaluation("evaluated"), evaluation.to_json())
                print_line(f"report {write_report(run.folder)}")
    return 0


def _precision(options: argparse.Namespace) -> Precision | None:
    """The precision to score in; None: the usual one."""
    from ziggurat.precision import Precision
    from ziggurat.typed import Reader

    if not options.precision:
        return None
    if options.report:
        raise ConfigError(
            expected="the run as it is, for its report",
            found=f"--report with --precision {options.precision}",
            where="command line",
            ways_out=("leave --report out, and write --json FILE", "leave --precision out"),
        )
    return Reader(where="command line, --precision").read(Precision, options.precision)


def _print_slices(evaluation: Evaluation) -> None:
    shown = [
        (each.column, each.value, f"{each.num_rows:,}", *map(_shown, each.metrics.values()))
        for each in evaluation.slices
    ]
    print_table(("slice", "value", "rows", *evaluation.metrics), shown)


def _shown(value: float) -> str:
    return f"{value:.5f}" if math.isfinite(value) else "–"


def _reading_as_told(run: Run, rest: list[str]) -> Run:
    """The run, which reads files as the command line says where it differs from the run's own files."""
    from ziggurat.runs.scores.scoring import FileReading

    known = {f"data.{entry.name.replace('_', '-')}": entry.name for entry in dataclasses.fields(FileReading)}
    changes = reading_settings(
        rest,
        known=known,
        where="command line: a trained run keeps all other settings",
        instead={"data.bad-rows": "for bad rows: --bad-rows quarantine"},
    )
    told = override(run.reading, changes, also={name: f"--{path}" for path, name in known.items()})
    _say_own_marks(run, changes)
    return dataclasses.replace(run, reading=told)


def _say_own_marks(run: Run, changes: Collection[str]) -> None:
    """Name the columns for which marks of the command line do not count, since the schema says how they are written."""
    given = [f"--data.{name}" for name in ("decimal", "thousands", "signs") if name in changes]
    columns = [repr(each.column) for each in run.preprocessing.schema.numbers]
    if given and columns:
        print_line(
            f"note: {', '.join(columns)}: read as [[number]] of the run's schema says, whatever files they are in; "
            f"{', '.join(given)} counts for the other columns"
        )


def _files_or_split(options: argparse.Namespace, rest: list[str]) -> None:
    if options.split and rest:
        raise ConfigError(
            expected="settings of reading with files: a split of the run is prepared as the run was",
            found=f"--split {options.split} {' '.join(rest)}",
            where="command line",
            ways_out=("name a file", f"leave out {rest[0]}"),
        )
    if options.split and options.slices:
        raise ConfigError(
            expected="--slices with files: a split of the run is encoded, and holds no values any more",
            found=f"--split {options.split} --slices {options.slices}",
            where="command line",
            ways_out=("name the file of those rows", "leave --slices out"),
        )
    if bool(options.data) == bool(options.split):
        raise ConfigError(
            expected="either files, or --split train, valid or test",
            found="both" if options.data else "neither",
            where="command line",
            ways_out=(
                f"ziggurat {options.verb} {pasted(options.run)} FILE",
                f"ziggurat {options.verb} {pasted(options.run)} --split test",
            ),
        )


def predict(options: argparse.Namespace, rest: list[str]) -> int:
    """Scores of raw files."""
    from ziggurat.data.raw.bad_rows import BadRowPolicy
    from ziggurat.runs.load import open_run
    from ziggurat.training.report.progress import show_progress

    keep = tuple(name.strip() for name in options.keep.split(",") if name.strip())
    with open_run(options.run, step=options.step, models=own_models(options)) as run:
        run = _reading_as_told(run, rest)
        progress = run.team.progress(show_progress(verbose=options.verbose))
        progress.begin("predict", total=None)
        rows = run.predict(
            options.data, out=options.out, keep=keep, bad_rows=BadRowPolicy(options.bad_rows), progress=progress
        )
        progress.end()
        if run.team.is_first:
            print_line(f"{rows:,} rows scored into {options.out} (checkpoint of step {run.step:,})")
            _print_unknown(run)
    return 0


def _print_unknown(run: Run) -> None:
    from ziggurat.runs.scores.scoring import ids_out_of_range, unknown_ids

    print_line(f"unknown ids: {', '.join(map(str, unknown_ids(run.preprocessing))) or 'none'}")
    if outside := ids_out_of_range(run.preprocessing):
        print_line(f"ids out of range: {', '.join(map(str, outside))}")


EVALUATE = Verb(
    name="evaluate",
    summary=EVALUATE_SUMMARY,
    epilog=EVALUATE_EPILOG,
    add_arguments=add_evaluate_arguments,
    run=evaluate,
    takes=Takes.SETTINGS,
)

PREDICT = Verb(
    name="predict",
    summary=PREDICT_SUMMARY,
    epilog=PREDICT_EPILOG,
    add_arguments=add_predict_arguments,
    run=predict,
    takes=Takes.SETTINGS,
)

EMBEDDINGS = Verb(
    name="embeddings",
    summary=EMBEDDINGS_SUMMARY,
    epilog=EMBEDDINGS_EPILOG,
    add_arguments=add_embeddings_arguments,
    run=embeddings,
)
