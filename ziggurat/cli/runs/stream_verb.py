"""`ziggurat stream`: score every window of rows in order of time, and then train on it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ziggurat.cli.own_models import add_model_argument, own_models
from ziggurat.cli.parser import add_hook, add_verbose
from ziggurat.cli.settings import add_short_forms, apply_settings, print_settings, settings_from
from ziggurat.cli.tables import print_line
from ziggurat.cli.verb import Takes, Verb
from ziggurat.cli.verbs import add_teacher, any_schema, fitted, taught, train_files
from ziggurat.errors import ConfigError, MissingFileError

if TYPE_CHECKING:
    from ziggurat.recipes.run_config import RunConfig
    from ziggurat.runs.stream.publish import PublishConfig
    from ziggurat.training.records.run_folder import RunFolder

# Settings of passes over rows that are split, and what of these a stream reads all the same.
_WITHOUT_EFFECT = ("training.epochs", "training.early-stop", "data.split")
_WITH_EFFECT = ("data.split.date-order",)
_EVERY = 1  # windows between two versions, where --publish-every says nothing
_KEEP = 8  # versions that stay, where --publish-keep says nothing
# Flags that say how another flag does what it does, and are looked at by nothing without it.
_FLAGS_OF = {
    "--publish": ("--publish-every", "--publish-keep", "--publish-value", "--server"),
    "--follow": ("--idle-close-s",),
}
# By the config and the setting in it.
_FLAG_OF = {
    ("StreamConfig", "growing"): "--growing",
    ("PublishConfig", "every"): "--publish-every",
    ("PublishConfig", "keep"): "--publish-keep",
}
_WITHOUT = {
    "--publish": "--publish exports/live",
    "--follow": "--follow",
}


def stream(options: argparse.Namespace, rest: list[str]) -> int:
    """Run a stream, or go on with it."""
    from ziggurat.data.streams.label_delay import DelayConfig, LabelDelay
    from ziggurat.data.streams.windows import LateRows, StreamConfig
    from ziggurat.plan import Plan
    from ziggurat.recipes.run_config import with_model
    from ziggurat.runs.apart_from_rows import refuse_among_rows
    from ziggurat.runs.stream.run import stream_run
    from ziggurat.runs.stream.source import FollowConfig
    from ziggurat.training.hooks.hook import hooks_named
    from ziggurat.training.records.run_folder import RunFolder, default_folder
    from ziggurat.training.report.progress import show_progress

    folder = Path(options.out or f"{default_folder(options.recipe, train=train_files(rest))}_stream")
    changes = settings_from(options, rest)
    changes |= {} if options.distil is None else {"distil.head": options.distil}
    _refuse_without_effect(changes)
    _refuse_idle_flags(options)
    _refuse_warm_start(changes)
    # Before files are looked at for sizes that fit: records of an earlier start would be taken for rows.
    refuse_among_rows(folder, train_files(rest).split(","), flag="--out", instead=f"runs/{folder.name}")
    run = RunFolder(folder)
    if run.is_stream() and run.has_begun() and run.config.exists() and not options.settings:
        stored = _stored(options, run)
    else:
        stored = with_model(_recipe(options), own_models(options))
        # A folder that is followed may be empty when its stream begins.
        may_be_empty = options.settings or (options.follow and Path(train_files(rest)).is_dir())
        with contextlib.suppress(MissingFileError) if may_be_empty else contextlib.nullcontext():
            stored = fitted(stored, changes)
    config = apply_settings(stored, changes)
    if options.settings:
        print_settings(stored, config)
        return 0
    config = taught(config, options, by="ziggurat stream", is_stream=True)
    with _by_flags():
        windows = StreamConfig(
            by=options.by,
            begin=options.begin,
            until=options.until,
            late=LateRows(options.late),
            growing=_number(options.growing),
            frozen=options.frozen,
            delay=DelayConfig(
                policy=LabelDelay(options.delay),
                column=options.label_time,
                observe_s=_seconds(options.observe_s, flag="--observe-s"),
                attribution_s=_seconds(options.attribution_s, flag="--attribution-s"),
                key=options.label_key,
            ),
        )
        publish = _publish(options)
    idle_close_s = 0.0
    if options.idle_close_s is not None:
        idle_close_s = _seconds(options.idle_close_s, flag="--idle-close-s")
    result = stream_run(
        config,
        folder=folder,
        stream=windows,
        follow=FollowConfig(idle_close_s=idle_close_s) if options.follow else None,
        publish=publish,
        plan=Plan.load(options.plan) if options.plan else None,
        progress=show_progress(verbose=options.verbose),
        hooks=hooks_named(options.hook),
        # Nobody has named one, and the recipe's is for as many rows as files have, or for many.
        fits_batch=options.recipe.startswith("table_") and not _names_batch(changes),
        labels=tuple(options.labels),
        takes_future=options.future == "take",
    )
    if result.is_first:
        num_rows = sum(window.trained_rows for window in result.windows)
        print_line(f"windows  {len(result.windows):,}, {num_rows:,} rows trained in {result.steps:,} steps")
        if result.windows:
            print_line(f"report   {result.report}")
    return 130 if result.ended_early and not options.follow else 0


@contextlib.contextmanager
def _by_flags() -> Iterator[None]:
    """Name the flag that was typed, where an error names the setting that it gives."""
    try:
        yield
    except ConfigError as error:
        found = re.search(r"(\w+), setting '(\w+)'", error.where)
        if found is not None and (flag := _FLAG_OF.get((found[1], found[2]))):
            error.where = flag
        raise


def _names_batch(changes: Mapping[str, str]) -> bool:
    return any(name.replace("_", "-") == "training.loader.batch-size" for name in changes)


def _refuse_without_effect(changes: Mapping[str, str]) -> None:
    """Refuse settings that a stream, which sees each row once and never chooses weights, would not look at."""
    for name in changes:
        dashed = name.replace("_", "-")
        if dashed in _WITH_EFFECT:
            continue
        if dashed in _WITHOUT_EFFECT or dashed.startswith(tuple(f"{each}." for each in _WITHOUT_EFFECT)):
            raise ConfigError(
                expected=f"no {dashed} in a stream: each row is scored and then trained, once",
                found=f"--{name} {changes[name]}",
                where="command line",
                ways_out=(f"leave --{name} out", "train in passes, with validation rows: ziggurat train"),
            )


def _publish(options: argparse.Namespace) -> PublishConfig | None:
    from ziggurat.runs.stream.publish import PublishConfig

    if options.publish:
        return PublishConfig(
            folder=options.publish,
            every=_EVERY if options.publish_every is None else options.publish_every,
            keep=_KEEP if options.publish_keep is None else options.publish_keep,
            value=options.publish_value or "",
            server=options.server or "",
        )
    if options.publish is not None:
        raise ConfigError(
            expected="a folder to publish into",
            found="an empty text",
            where="--publish",
            ways_out=("--publish exports/live", "leave --publish out"),
        )
    return None


def _refuse_idle_flags(options: argparse.Namespace) -> None:
    """Refuse flags that would do nothing, because the flag that they belong to is absent.

    Raises:
        ConfigError: names the first of them, and what it belongs to.
    """
    for main, flags in _FLAGS_OF.items():
        # An empty text is given, and refused for what it is.
        if _given(options, main) not in (None, False):
            continue
        for flag in flags:
            value = _given(options, flag)
            if value is None:
                continue
            raise ConfigError(
                expected=f"{main} beside {flag}, which says how {main} works",
                found=f"{flag} {value}, and no {main}",
                where="command line",
                ways_out=(f"{_WITHOUT[main]} {flag} {value}", f"leave {flag} out"),
            )
    if options.frozen and (options.publish_every or _EVERY) > 1:
        raise ConfigError(
            expected="a version after the history, the one window that a frozen stream trains",
            found=f"--publish-every {options.publish_every}, which leaves the first window out",
            where="command line, --frozen",
            ways_out=("leave --publish-every out", "leave --frozen out"),
        )


def _given(options: argparse.Namespace, flag: str) -> object:
    """Return the value of a flag of the command line; None where it was not given."""
    return getattr(options, flag.removeprefix("--").replace("-", "_"))


def _refuse_warm_start(changes: Mapping[str, str]) -> None:
    """Refuse the short form of `train`, which would be read as a group of settings."""
    if run := changes.get("warm-start", ""):
        raise ConfigError(
            expected="no parent of a stream, whose tables are not there before its first window",
            found=f"--warm-start {run}",
            where="ziggurat stream",
            ways_out=("leave --warm-start out", f"begin a batch run from it: ziggurat train … --warm-start {run}"),
        )


def _recipe(options: argparse.Namespace) -> RunConfig:
    from ziggurat.recipes.catalogue import recipe_named

    schema = None
    if options.schema:
        from ziggurat.features.schema_io import read_schema

        schema = read_schema(options.schema)
    elif options.settings and options.recipe.startswith("table_"):
        schema = any_schema()  # settings do not depend on it
    return recipe_named(options.recipe, schema=schema)


def _stored(options: argparse.Namespace, run: RunFolder) -> RunConfig:
    """The settings that a stream began with, if it is one of the recipe that is named."""
    from ziggurat.recipes.run_config import load_config

    stored = load_config(run.path, models=own_models(options))
    if stored.recipe != options.recipe:
        raise ConfigError(
            expected=f"the recipe that the stream began with, {stored.recipe!r}",
            found=repr(options.recipe),
            where=str(run.path),
            ways_out=(f"ziggurat stream {stored.recipe} …", "begin another stream: --out ANOTHER_FOLDER"),
        )
    if not options.schema:
        return stored
    from ziggurat.features.schema_io import read_schema

    return dataclasses.replace(stored, table_schema=read_schema(options.schema))


def _number(text: str) -> int:
    try:
        return int(text.replace("_", "").replace(",", ""))
    except ValueError as error:
        raise ConfigError(
            expected="a number of rows", found=repr(text), where="--growing", ways_out="--growing 100000"
        ) from error


def _seconds(text: str, *, flag: str) -> float:
    try:
        seconds = float(text.replace("_", ""))
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < math.inf:
        raise ConfigError(expected="seconds, 0 or more", found=repr(text), where=flag, ways_out=f"{flag} 3600")
    return seconds


def add_stream_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `stream`."""
    parser.add_argument("recipe", help="name of a recipe (see `ziggurat recipes`); table_* for files of yours")
    parser.add_argument("--schema", metavar="FILE", help="schema (TOML) for the recipes table_*")
    parser.add_argument(
        "--by", metavar="WINDOW", default="day", help="hour, day, week, month, or rows:N (default: %(default)s)"
    )
    parser.add_argument(
        "--from",
        dest="begin",
        metavar="MOMENT",
        default="",
        help="where the first window begins, such as 2000-05; rows before it are the history, to which vocabularies "
        "are fitted (default: the first window is the history)",
    )
    parser.add_argument("--until", metavar="MOMENT", default="", help="rows from here on are left out")
    parser.add_argument(
        "--follow",
        action="store_true",
        help="wait for files that come into the folder, or messages of the broker, until SIGTERM or Ctrl-C",
    )
    parser.add_argument(
        "--idle-close-s",
        metavar="SECONDS",
        help="with --follow: windows are done, too, when no row has come for so long; later ones of them are late "
        "(default: never)",
    )
    parser.add_argument(
        "--late",
        choices=("train", "drop"),
        default="train",
        help="what becomes of rows of a window that is done: they are scored and trained with the window that they "
        "come in, or only counted, by the next window that is done (default: %(default)s)",
    )
    parser.add_argument(
        "--future",
        choices=("refuse", "take"),
        default="refuse",
        help="what becomes of rows of more than a day from now: they are bad rows, or, of made data, rows like others; "
        "one of them calls all windows before it done (default: %(default)s)",
    )
    parser.add_argument(
        "--growing",
        metavar="ROWS",
        default="0",
        help="tables of fitted vocabularies grow instead: so many ids have a row at a time",
    )
    parser.add_argument(
        "--frozen", action="store_true", help="train the history alone, and score all windows by it: the control"
    )
    parser.add_argument(
        "--delay",
        choices=("none", "wait", "assume-negative", "correct"),
        default="none",
        help="what becomes of a row whose label is known later: it waits for it, is trained as a negative, or that and "
        "once more when a positive comes (default: %(default)s, the label is known with the row)",
    )
    parser.add_argument("--label-time", metavar="COLUMN", default="", help="when the label of a row is known")
    parser.add_argument(
        "--labels",
        metavar="PATH",
        action="append",
        default=[],
        help="files, a folder, or a stream of a broker (redis://HOST/STREAM) with labels that come later than their "
        "rows, in records of their own: key, --label-time and the label column, without which each is a positive; "
        "needs --attribution-s; files may be given again",
    )
    parser.add_argument(
        "--label-key", metavar="COLUMN", default="", help="with --labels: column by which a label finds its row"
    )
    parser.add_argument(
        "--observe-s",
        metavar="S",
        default="0",
        help="seconds until a row is trained by what is known of it then; with 0 each positive that comes later than "
        "its row is trained as a negative, and stays one with --delay assume-negative (default: %(default)s)",
    )
    parser.add_argument(
        "--attribution-s",
        metavar="S",
        default="0",
        help="seconds in which a positive may come: rows without a label time are negatives that are known then",
    )
    about = "each window learns from the scores (--distil), or reads the vectors (--teacher-history), that are there"
    add_teacher(parser, about=f"{about} when it is opened")
    parser.add_argument(
        "--publish", metavar="FOLDER", help="publish the model after each window, as a checked export of this folder"
    )
    parser.add_argument(
        "--publish-every", type=int, metavar="N", help=f"with --publish: after each Nth window (default: {_EVERY})"
    )
    parser.add_argument(
        "--publish-keep", type=int, metavar="N", help=f"with --publish: versions that stay, at least (default: {_KEEP})"
    )
    parser.add_argument(
        "--publish-value",
        metavar="FORMULA",
        help="with --publish: what orders answers, over the tasks; needed where there are several",
    )
    parser.add_argument(
        "--server",
        metavar="SOCKET",
        help="with --publish: admin socket of a server that is told of each version; or its URL, which is asked until "
        "it has it",
    )
    add_model_argument(parser, about="config class of a model of your own, in the place of the recipe's model")
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        help="folder of the stream (default: runs/RECIPE_stream, or runs/RECIPE_TABLE_stream)",
    )
    parser.add_argument("--plan", metavar="FILE", help="plan.json: where each table goes, on many ranks")
    parser.add_argument("--settings", action="store_true", help="list every setting with what it means, and stop")
    add_hook(parser)
    add_verbose(parser)
    add_short_forms(parser, leave_out=("epochs", "patience"))


STREAM = Verb(
    name="stream",
    summary="score every window of rows in order of time, then train on it; given again, it goes on",
    epilog=(
        "Each row is a test before it is trained, once. A stream that was killed goes on by the same command, bit for\n"
        "bit; so does one whose folder has new files.\nexamples:\n"
        "  ziggurat stream movielens_dlrm --by month --from 2000-06 --growing 10000 --out runs/live\n"
        "  ziggurat stream table_dlrm --data.train clicks/ --schema my.toml --by day --follow\n"
        "  ziggurat stream movielens_dlrm --by month --from 2000-06 --teacher teacher/ --distil aux-head\n"
        "  ziggurat stream table_dcn_v2 --data.train rows/ --schema my.toml --teacher teacher/ --teacher-history user\n"
        "  ziggurat stream table_dlrm --data.train clicks/ --schema my.toml --by rows:100000\n"
        "  ziggurat stream table_dlrm --data.train redis://localhost:6379/clicks --schema my.toml --by hour --follow\n"
        "  ziggurat stream table_dlrm --data.train clicks/ --schema my.toml --follow --publish exports/live"
    ),
    add_arguments=add_stream_arguments,
    run=stream,
    takes=Takes.WORDS,
)
