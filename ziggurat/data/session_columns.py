"""The files of a log with sessions: their separator is guessed, and their columns are checked before a row is read."""

from __future__ import annotations

from collections.abc import Sequence

from ziggurat.data.raw.names import missing_column
from ziggurat.data.raw.source import RawSource
from ziggurat.data.raw.text_blocks import TextOptions
from ziggurat.errors import SchemaError
from ziggurat.files.stores import DataPath


def source_with_sessions(
    files: Sequence[str | DataPath], *, session: str, time: str = "", taken: Sequence[str] = ()
) -> RawSource:
    """The files to read, all of the same columns, those of session and time among them.

    Args:
        files: as `RawSource` takes them.
        session: column of the session.
        time: column of the time, or "".
        taken: names that no column may have.

    Raises:
        SchemaError: a column is missing, in one file or in all; one has a name that is taken; or sessions are lists.
    """
    source = RawSource(list(files))
    if session not in source.columns() and (separator := source.better_separator()):
        source = RawSource(list(files), text=TextOptions(delimiter=separator))
    first = source.paths[0]
    known = source.columns()
    for flag, name in (("--session", session), ("--time", time)):
        if name and name not in known:
            raise missing_column(first, name, tuple(known), asked=flag)
    doubled = [name for name in taken if name in known]
    if known[session].is_nested() or doubled:
        raise SchemaError(
            expected="a column with one session a row" + (f", and no column called {', '.join(taken)}" * bool(taken)),
            found=", ".join(doubled) or f"type {known[session]}",
            where=str(first) if doubled else f"{first}, column {session!r}",
            ways_out="rename the column" if doubled else "name a column of text or numbers",
        )
    for path in source.paths[1:]:
        _check_same(list(source.columns_of(path)), list(known), path=path, first=first)
    return source


def _check_same(found: Sequence[str], known: Sequence[str], *, path: DataPath, first: DataPath) -> None:
    missing = [name for name in known if name not in found]
    more = [name for name in found if name not in known]
    if not missing and not more:
        return
    said = [f"without {', '.join(missing[:10])}"] if missing else []
    said += [f"with {', '.join(more[:10])} besides"] if more else []
    raise SchemaError(
        expected=f"the columns of {first}: {', '.join(known[:30])}",
        found=f"{', '.join(found[:30])}; {' and '.join(said)}",
        where=str(path),
        ways_out=(f"leave {path.name} out", "cluster files of other columns apart", "convert it to the same columns"),
    )
