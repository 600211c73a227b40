"""Other things that may stand where an export was expected, and what leads from each to an export.

    a file of an export, a folder in it     the export itself
    a run                                   `ziggurat export RUN`
    a folder that is published into         its first version, which comes; its last one, where the pointer is gone
    a version that is gone                  the folder that it was published into
    a folder with exports or runs in it     one of them
    prepared data, files of data            train on them first
    anything else                           its first names, and how an export is made

Told apart by names alone: nothing is read, so a damaged or foreign file does no harm.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from ziggurat.commands import pasted
from ziggurat.errors import MissingFileError
from ziggurat.files.table_endings import READ_AS
from ziggurat.serving.export.published_folder import (
    POINTER_NAME,
    PUBLISHER_LOCK,
    VERSIONS,
    is_version,
    versions_there,
)

_MANIFEST = "export.json"
_PARTS = ("chain.json", "golden.json")  # that every export has beside its manifest
_BEGUN = ("config.json", "data.json")  # of a run before its first checkpoint
_CHECKPOINTS = "checkpoints"
_PREPARED = "prepared.json"
_DATA = READ_AS.keys() - {".txt"}  # most files of that ending are no data
_MAX_ENTRIES = 1_000  # of a folder that are looked at
_SHOWN = 3


def is_damaged_export(folder: Path) -> bool:
    """Return whether a folder without a manifest is an export all the same, by its other files."""
    return any((folder / name).exists() for name in _PARTS)


def no_export(given: Path) -> MissingFileError:
    """Return the error for a path at which there is no export: it says what is there.

    Args:
        given: the path, as it was named.
    """
    found, ways_out = _what_is_there(given)
    return MissingFileError(expected="the folder of an export", found=found, where=str(given), ways_out=ways_out)


def _what_is_there(given: Path) -> tuple[str, list[str]]:
    """Return what stands at a path, and the ways from there to an export."""
    make = f"make one: ziggurat export RUN --out {pasted(given if not given.exists() else Path('exports/first'))}"
    if is_version(given) and not given.exists():
        folder = given.parent.parent
        others = [f"name another version: {pasted(each)}" for each in versions_there(folder)[-1:]]
        return "no such version", [f"name the folder, which leads to the current one: {pasted(folder)}", *others]
    if not given.exists():
        return "no such folder", ["correct the path", make]
    around = next((each for each in given.parents if each.name and (each / _MANIFEST).is_file()), None)
    if around is not None:
        return f"a part of the export {around.name}", [f"name the whole export: {pasted(around)}"]
    if not given.is_dir():
        return "a file", [_train_on(given), make] if _is_data(given) else ["name the folder of an export", make]
    if (given / _CHECKPOINTS).is_dir():
        out = pasted(f"exports/{given.resolve().name}")
        return "the folder of a run", [f"make an export of it: ziggurat export {pasted(given)} --out {out}"]
    if all((given / name).is_file() for name in _BEGUN):
        resume = f"train it on: ziggurat train {pasted(given)} --resume"
        return "the folder of a run that has no checkpoint yet", [resume, "name another run to export"]
    if (given / VERSIONS).is_dir() and (versions := versions_there(given)):
        found = f"a folder that a stream published into, without {POINTER_NAME}"
        return found, [f"restore {POINTER_NAME} from a copy", f"name a version: {pasted(versions[-1])}"]
    if (given / PUBLISHER_LOCK).exists():
        ways = ["wait until its first window is trained", "see what the stream says: run.log in its folder"]
        return "a folder that a stream publishes into, which has no version yet", ways
    entries = _entries(given)
    exports = [each for each in entries if (each / _MANIFEST).is_file()]
    if exports:
        ways = [f"name one: {pasted(each)}" for each in exports[:_SHOWN]]
        return _listed("a folder with exports in it", exports), ways
    runs = [each for each in entries if (each / _CHECKPOINTS).is_dir()]
    if runs:
        commands = [f"ziggurat export {pasted(each)} --out {pasted(f'exports/{each.name}')}" for each in runs[:_SHOWN]]
        return _listed("a folder with runs in it", runs), [f"make an export of one: {each}" for each in commands]
    if (given / _PREPARED).is_file():
        return "prepared data, which a run reads", ["name the folder of an export", make]
    data = [each for each in entries if _is_data(each)]
    if data:
        return _listed("a folder of data", data), [_train_on(data[0]), make]
    return _listed("a folder with other files", entries) if entries else "an empty folder", ["correct the path", make]


def _is_data(path: Path) -> bool:
    return any(suffix in _DATA for suffix in path.suffixes)


def _train_on(data: Path) -> str:
    return f"train a model on it, and export that: ziggurat data inspect {pasted(data)} --write-schema my.toml"


def _entries(folder: Path) -> list[Path]:
    """Return the first entries of a folder, by name; none of one that may not be read."""
    try:
        return sorted(itertools.islice(folder.iterdir(), _MAX_ENTRIES))
    except OSError:
        return []


def _listed(what: str, entries: list[Path]) -> str:
    names = ", ".join(each.name for each in entries[:_SHOWN])
    return f"{what}: {names}" + (f" and {len(entries) - _SHOWN:,} more" if len(entries) > _SHOWN else "")
