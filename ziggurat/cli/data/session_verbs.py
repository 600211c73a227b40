"""`ziggurat data cluster-by-session` and `data import`, and the part of `data inspect` that looks at sessions."""

from __future__ import annotations

import argparse
import sys

from ziggurat.cli.tables import print_line, print_table
from ziggurat.commands import pasted
from ziggurat.files.streams import say


def cluster_by_session(options: argparse.Namespace) -> int:
    """Write the clustered file, and print the bytes of each column before and after."""
    from ziggurat.data.clustering import cluster_by_session

    phase = ""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()

    def progress(what: str, done: int, total: int | None) -> None:
        nonlocal phase
        if is_terminal:
            say(f"\r{what} {done:,}{f' of {total:,}' if total else ''} rows")
        elif what != phase:
            say(f"{what} rows\n")
        phase = what

    done = cluster_by_session(
        options.files, session=options.session, time=options.time, out=options.out, progress=progress
    )
    if is_terminal:
        say("\n")
    before = done.bytes_before
    after = done.bytes_after
    rows = [
        [name, *([f"{before.get(name, 0):,}"] if before else []), f"{size:,}"]
        + ([f"{before.get(name, 0) / max(size, 1):.2f}"] if before else [])
        for name, size in [*after.items()]
    ]
    if before:
        total = sum(before.values()), sum(after.values())
        rows.append(["all columns", f"{total[0]:,}", f"{total[1]:,}", f"{total[0] / max(total[1], 1):.2f}"])
    print_table(["column", "bytes before", "bytes after", "times smaller"] if before else ["column", "bytes"], rows)
    what = "were already in" if done.reused else "written to"
    print_line(f"{done.num_rows:,} rows of {done.num_sessions:,} sessions {what} {options.out}")
    if done.without_session:
        print_line(f"{done.without_session:,} rows have no session: each stands for itself")
    if done.without_time:
        print_line(f"{done.without_time:,} rows have no time that can be read: they are the last of their session")
    if done.backwards:
        print_line(f"{done.backwards:,} rows had an earlier time than the row before of their session; sorted by time")
    if done.cut:
        print_line(f"{done.cut:,} sessions are too large for memory: each lies in several pieces")
    return 0


def print_repeats(file: str, *, session: str, separator: str) -> None:
    """Print how often the columns of a file repeat within a session, and advice."""
    from ziggurat.data.inspect.session_repeats import measure_sessions

    found = measure_sessions(file, session=session, separator=separator)
    print_line(
        f"sessions by {session}: {found.num_rows:,} rows in {found.num_sessions:,} sessions, "
        f"S = {found.rows_per_session:.2f} rows each; {found.adjacent:.0%} of what could be adjacent is"
    )
    rows = [[each.column, f"{each.unchanged:.3f}", f"{each.factor:.2f}", each.advice] for each in found.columns]
    print_table(["column", "d (unchanged)", "factor", "advice"], rows)
    if found.adjacent < 0.9 and any(each.factor > 1.5 for each in found.columns):
        command = f"ziggurat data cluster-by-session {pasted(file)} --session {pasted(session)} --out clustered.parquet"
        print_line(f"put them together: {command}")


def import_query(options: argparse.Namespace) -> int:
    """Write what the database answers, and print the columns."""
    from ziggurat.data.sql_import import import_query

    is_terminal = sys.stderr is not None and sys.stderr.isatty()

    def progress(done: int) -> None:
        if is_terminal:
            say(f"\r{done:,} rows")

    done = import_query(options.sql, out=options.out, database=options.database, progress=progress)
    if is_terminal:
        say("\n")
    print_table(["column", "type"], [list(each) for each in done.columns.items()])
    print_line(f"{done.num_rows:,} rows, {done.num_bytes:,} bytes written to {options.out}")
    return 0
