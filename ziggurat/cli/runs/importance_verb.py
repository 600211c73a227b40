"""`importance`: which features a trained run needs, and how much."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ziggurat.cli.outputs import add_output
from ziggurat.cli.own_models import add_model_argument, own_models
from ziggurat.cli.parser import add_bad_rows
from ziggurat.cli.tables import print_line, print_table
from ziggurat.cli.verb import Verb
from ziggurat.commands import pasted
from ziggurat.errors import ConfigError

if TYPE_CHECKING:
    from ziggurat.runs.load import Run
    from ziggurat.runs.quality.importance import Importance

IMPORTANCE_SUMMARY = "permutation importance: how much worse a trained run gets when it no longer knows a feature"
IMPORTANCE_EPILOG = """Permutes a feature at a time among the samples, in several rounds; the run is not trained again.
Features that tell the same share their importance: permute them together with --group.
Tables too large for one device: torchrun --nproc-per-node N -m ziggurat importance ...
examples:
  ziggurat importance runs/first
  ziggurat importance runs/first --data tomorrow.parquet --metric log_loss --rounds 10 --plot importance.png
  ziggurat importance runs/first --group who=user_id,age --group when=hour,weekday --csv importance.csv"""

_PICTURES = (".png", ".svg", ".pdf")


def add_importance_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `importance`."""
    parser.add_argument("run", help="folder of a trained run")
    parser.add_argument("--data", metavar="FILE", nargs="+", help="raw files or globs with labels")
    parser.add_argument(
        "--split", choices=("train", "valid", "test"), help="the run's own rows instead of files (default: valid)"
    )
    parser.add_argument("--metric", default="auto", help="of the evaluation (default: the one that training stops by)")
    parser.add_argument(
        "--rounds", metavar="N", type=int, default=5, help="permutations of each feature (default: %(default)s)"
    )
    parser.add_argument(
        "--samples",
        metavar="N",
        type=int,
        default=65_536,
        help="rows to take, drawn at random where there are more; 0: all, in memory (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sample and the permutations (default: 0)")
    parser.add_argument("--features", metavar="A,B", default="", help="only these (default: all)")
    parser.add_argument(
        "--group", metavar="NAME=A,B", action="append", default=[], help="features to permute together; may be repeated"
    )
    parser.add_argument(
        "--towers",
        metavar="FILE",
        nargs="?",
        const="",
        help="permute the features of each tower together: the run's towers, or those of FILE",
    )
    add_bad_rows(parser)
    parser.add_argument("--step", type=int, help="checkpoint to use (default: the best by validation)")
    add_model_argument(parser)
    add_output(parser, "--json", metavar="FILE", help="write everything there, each round too")
    add_output(parser, "--csv", metavar="FILE", help="write the table there")
    add_output(parser, "--plot", metavar="FILE", help="write bars there (.png, .svg or .pdf)")


def importance(options: argparse.Namespace, rest: list[str]) -> int:
    """Permutation importance of a run's features."""
    from ziggurat.data.raw.bad_rows import BadRowPolicy
    from ziggurat.runs.load import open_run
    from ziggurat.runs.quality.importance import COLUMNS, ImportanceConfig
    from ziggurat.training.report.progress import show_progress

    check_data_and_plot(options)
    with open_run(options.run, step=options.step, models=own_models(options)) as run:
        config = ImportanceConfig(
            metric=options.metric,
            rounds=options.rounds,
            samples=options.samples,
            seed=options.seed,
            features=_names(options.features),
            groups=_groups(options, run),
        )
        found = run.importance(
            options.data,
            split=options.split or "valid",
            config=config,
            bad_rows=BadRowPolicy(options.bad_rows),
            progress=run.team.progress(show_progress()),
        )
        if run.team.is_first:
            print_line(f"{found.summary}; checkpoint of step {run.step:,}")
            print_table(COLUMNS, found.table())
            print_line("Features that tell the same share their importance; permute them together: --group NAME=A,B")
            _write(found, options)
    return 0


def check_data_and_plot(options: argparse.Namespace) -> None:
    """Refuse two data sets to score, and a plot that is no picture, before anything is computed.

    Raises:
        ConfigError: either.
    """
    if options.data and options.split:
        raise ConfigError(
            expected="either --data, or --split",
            found="both",
            where="command line",
            ways_out=("leave --split out", "leave --data out"),
        )
    check_picture(options.plot)


def check_picture(path: str | None) -> None:
    """Refuse what `--plot` names if it is no picture, before anything is computed.

    Raises:
        ConfigError: another ending.
    """
    if path and Path(path).suffix.lower() not in _PICTURES:
        raise ConfigError(
            expected="a picture that ends in " + ", ".join(_PICTURES),
            found=repr(path),
            where="command line, --plot",
            ways_out=f"--plot {pasted(Path(path).with_suffix('.png'))}",
        )


def _groups(options: argparse.Namespace, run: Run) -> dict[str, tuple[str, ...]]:
    """Return the groups that `--group` and `--towers` name; a tower of one feature is that feature."""
    from ziggurat.plan import Towers

    pairs: list[tuple[str, tuple[str, ...]]] = []
    for text in options.group:
        name, equals, members = text.partition("=")
        if not name or not equals:
            raise _wrong_group(repr(text))
        pairs.append((name, _names(members)))
    if options.towers is not None:
        towers = Towers.load(options.towers) if options.towers else run.config.towers
        if towers is None:
            raise ConfigError(
                expected="a run with towers, or a file of towers",
                found="a flat run",
                where=f"{options.run}, --towers",
                ways_out=("--towers towers.json", "--group NAME=A,B"),
            )
        pairs += [(f"tower {index}", members) for index, members in enumerate(towers.towers)]
    if len(dict(pairs)) < len(pairs):
        raise _wrong_group(", ".join(name for name, _ in pairs))
    return dict(pairs)


def _wrong_group(found: str) -> ConfigError:
    return ConfigError(
        expected="NAME=A,B with another name for each group",
        found=found,
        where="command line, --group",
        ways_out="--group who=user_id,age --group when=hour,weekday",
    )


def _names(text: str) -> tuple[str, ...]:
    names: Iterable[str] = (name.strip() for name in text.split(","))
    return tuple(name for name in names if name)


def _write(found: Importance, options: argparse.Namespace) -> None:
    from ziggurat.files import replacing, write_figure
    from ziggurat.runs.quality.importance import IMPORTANCE

    if options.json:
        IMPORTANCE.write(options.json, found.to_json())
    if options.csv:
        with replacing(options.csv) as temporary:
            found.frame().write_csv(temporary)
    if options.plot:
        write_figure(found.plot(), options.plot)
    for path in (options.json, options.csv, options.plot):
        if path:
            print_line(path)


IMPORTANCE = Verb(
    name="importance",
    summary=IMPORTANCE_SUMMARY,
    epilog=IMPORTANCE_EPILOG,
    add_arguments=add_importance_arguments,
    run=importance,
)
