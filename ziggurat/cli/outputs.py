"""One rule for every file or folder that a verb is told to write: a result is replaced and that is said, data never is.

- Results (scores, lists, tables, plots, schemas, plans, exports) can be made again. An older one stays until the new
  one is whole (`ziggurat/files/writing.py`); an error or a kill leaves it as it was.
- What the verb reads is never replaced: a file of the command line, or one that a run or an export consists of.
- Runs and data that others are made of are never replaced: `train`, `compare`, `scale`, `data import` and
  `data cluster-by-session` refuse a place where something else is. A folder is replaced by `export` alone, and only
  where an export is in it.

A verb declares such an argument with `add_output`; the rest is done around it by `replacing_is_said`.
"""

from __future__ import annotations

import argparse
import glob
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ziggurat.cli.tables import print_line
from ziggurat.commands import pasted
from ziggurat.errors import ConfigError

_READ = ("FILE", "FOLDER", "RUN", "PATH")  # what help calls a path that is read, beside positional arguments


def add_output(parser: argparse.ArgumentParser, flag: str, *, suffix: str = "", **settings: Any) -> None:
    """Declare an argument that names a file or folder to write.

    Args:
        parser: of the verb.
        flag: with its dashes.
        suffix: that the file must have, ".parquet"; "" where the verb takes several, or none.
        settings: as of `add_argument`.
    """
    action = parser.add_argument(flag, **settings)
    declared: dict[str, str] = parser.get_default("outputs") or {}
    parser.set_defaults(outputs={**declared, action.dest: suffix})


@contextmanager
def replacing_is_said(options: argparse.Namespace, rest: Sequence[str]) -> Iterator[None]:
    """Refuse outputs that are read inside the block; afterwards, say which were there before and are replaced.

    Args:
        options: of the command line.
        rest: settings of it, with their values.

    Raises:
        ConfigError: an output is what the verb reads.
    """
    suffixes: dict[str, str] = getattr(options, "outputs", {})
    given = {dest: path for dest in suffixes if (path := getattr(options, dest))}
    read = _paths_read(options, rest) if given else []
    before = {}
    for dest, path in given.items():
        if os.path.isfile(path):
            _refuse_what_is_read(f"--{dest.replace('_', '-')}", _new_name(path, suffix=suffixes[dest]), path, read)
        before[path] = _identity(path)
    yield
    if os.environ.get("RANK", "0") != "0":
        return
    for path, identity in before.items():
        if identity is not None and _identity(path) not in (identity, None):
            print_line(f"{path} was there before, and is replaced")


def _identity(path: str) -> tuple[int, int, int] | None:
    """Return what differs between a file or folder and another one at its path; None where neither, or nothing, is."""
    if not (os.path.isfile(path) or os.path.isdir(path)):
        return None
    if os.path.isdir(path) and os.access(path, os.R_OK) and not os.listdir(path):
        return None
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _paths_read(options: argparse.Namespace, rest: Sequence[str]) -> list[str]:
    texts = list(rest)
    for action in options.parser._actions:
        is_read = not action.option_strings or action.metavar in _READ
        if is_read and action.dest not in options.outputs:
            value = getattr(options, action.dest, None)
            texts += value if isinstance(value, list) else [value]
    parts = [part for text in texts if isinstance(text, str) for part in (text, *text.split(","))]
    # A setting may stand in one word: --data.train=FILE.
    parts += [part.partition("=")[2] for part in parts if part.startswith("--")]
    return [path for part in parts if part for path in (glob.glob(part, recursive=True) or [part])]


def _new_name(path: str, *, suffix: str) -> str:
    """Return a name that the verb takes in the place of one that it reads."""
    place = Path(path)
    return place.with_name(f"{place.stem}_new{suffix or place.suffix}").name


def _refuse_what_is_read(flag: str, new: str, path: str, read: Sequence[str]) -> None:
    for each in read:
        if os.path.isfile(each) and os.path.samefile(each, path):
            raise _refused(flag, new, path, "a file that this command reads")
        if os.path.isdir(each) and _belongs_to(Path(each).resolve(), Path(path).resolve()):
            raise _refused(flag, new, path, f"a file that {each} consists of")


def _belongs_to(folder: Path, path: Path) -> bool:
    """Return whether a run or an export consists of a file, among others."""
    from ziggurat.serving.export.export_folder import MANIFEST_NAME
    from ziggurat.training.records.run_folder import RunFolder

    if folder not in path.parents:
        return False
    return (folder / MANIFEST_NAME).is_file() or RunFolder(folder).consists_of(path)


def _refused(flag: str, new: str, path: str, found: str) -> ConfigError:
    return ConfigError(
        expected=f"a file of its own after {flag}",
        found=found,
        where=f"command line, {flag} {path}",
        ways_out=f"{flag} {pasted(new)}",
    )
