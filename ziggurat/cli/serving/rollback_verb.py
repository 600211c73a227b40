"""`ziggurat rollback`: let readers of a published folder have an earlier version, and hold it there."""

from __future__ import annotations

import argparse

from ziggurat.cli.tables import print_line
from ziggurat.cli.verb import Verb
from ziggurat.commands import pasted


def add_rollback_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `rollback`."""
    parser.add_argument("folder", help="folder that a stream publishes into")
    parser.add_argument(
        "--to",
        metavar="VERSION",
        default="",
        help="number or hex digits of a version; newest: the newest one, and those that follow at once again "
        "(default: the one before the current one)",
    )


def rollback(options: argparse.Namespace, rest: list[str]) -> int:
    """Move the pointer, and say from where to where."""
    from ziggurat.serving.export.published_folder import roll_back

    del rest
    before, after = roll_back(options.folder, to=options.to)
    was = before.version(before.current)
    now = after.version(after.current)
    assert was is not None, "a pointer lists its current version"
    assert now is not None, "a pointer lists its current version"
    print_line(f"{options.folder}: version {now.number} ({now.version}, window {now.name}), before {was.number}")
    if after.held:
        release = f"ziggurat rollback {pasted(options.folder)} --to newest"
        print_line(f"it stays there, also when newer versions are published, until: {release}")
    else:
        print_line("versions that are published from now on are read at once")
    return 0


ROLLBACK = Verb(
    name="rollback",
    summary="let readers of a published stream have the version before, or another one",
    epilog=(
        "A server that follows the folder swaps within a second. The version is held: what the stream publishes later\n"
        "waits, and the stream says so, until you let it go on with --to newest.\nexamples:\n"
        "  ziggurat rollback exports/live\n"
        "  ziggurat rollback exports/live --to 12\n"
        "  ziggurat rollback exports/live --to newest"
    ),
    add_arguments=add_rollback_arguments,
    run=rollback,
)
