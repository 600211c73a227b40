"""Data that a user hands over to be scored: a table in memory, or names of files.

    run.predict(frame)                  what `data/raw/frames.py` takes for a frame
    run.predict(["a.parquet", "b/*"])   names of files, or globs

Everything else is refused here, before a line is read or a GPU is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ziggurat.data.raw.frames import is_frame
from ziggurat.errors import ConfigError
from ziggurat.files.stores import DataPath, StoreFile


def check_data(data: object) -> None:
    """Refuse what is neither a table nor names of files.

    Raises:
        ConfigError: it is neither.
    """
    if not is_frame(data):
        files_in(data)


def files_in(data: object) -> list[str | DataPath]:
    """Return data that is no table as names of files.

    Raises:
        ConfigError: it is something else.
    """
    # A name is a sequence of letters, each of which is a name, too.
    names = [data] if isinstance(data, str) or not isinstance(data, Sequence) else data
    found: list[str | DataPath] = [name for name in names if isinstance(name, str | Path | StoreFile)]
    if len(found) == len(names):
        return found
    raise ConfigError(
        expected="a frame (polars, pandas, Arrow, a dict of columns), or names of files",
        found=type(data).__name__,
        where="data to score",
        ways_out=('run.predict(["new.parquet"])', "run.predict(frame)"),
    )
