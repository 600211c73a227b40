"""Where the raw data of a run lies: paths are stored absolute, and relative ones of older runs are found again.

`--data.train events.parquet` means a file in the folder where the command is given. A run that remembered it so could
be verified, resumed and partitioned from that one folder alone. So a run stores absolute paths; `located` reads runs
that were stored before, whose paths were relative to a folder that nobody wrote down: the present folder is tried
first, then the run's own folder and those above it, since `runs/shop` is where most runs of a folder lie.
"""

from __future__ import annotations

import dataclasses
import glob
import os
from collections.abc import Iterable
from pathlib import Path

from ziggurat.errors import MissingFileError
from ziggurat.files.stores import is_url, local_path
from ziggurat.recipes.run_config import RunConfig

_LEVELS = 4  # the run's folder, and so many above it


def with_absolute_paths(config: RunConfig, *, base: Path | None = None) -> RunConfig:
    """The same run, its files and globs relative to nothing.

    Args:
        config: of a run.
        base: what relative paths are relative to; None: the present folder.
    """
    base = (base or Path.cwd()).absolute()

    def absolute(text: str) -> str:
        text = local_path(text)
        return os.path.normpath(base / Path(text).expanduser()) if text and not is_url(text) else text

    data = config.data
    files = {name: tuple(absolute(text) for text in getattr(data, name)) for name in ("train", "valid", "test")}
    moved = dataclasses.replace(data, **files, copies=absolute(data.copies))
    dataset = dataclasses.replace(config.dataset, source=absolute(config.dataset.source))
    tables = dataclasses.replace(config.tables, disk=absolute(config.tables.disk))
    training = dataclasses.replace(config.training, dispatch=absolute(config.training.dispatch))
    warm_start = dataclasses.replace(config.warm_start, run=absolute(config.warm_start.run))
    return dataclasses.replace(
        config, data=moved, dataset=dataset, tables=tables, training=training, warm_start=warm_start
    )


def located(config: RunConfig, *, folder: Path) -> RunConfig:
    """The config of a stored run with absolute paths, found again if they were stored relative.

    Args:
        config: as it was stored.
        folder: of the run.

    Raises:
        MissingFileError: relative paths that no folder that was tried has; it lists them.
    """
    named = [text for text in _paths(config) if text and not is_url(text)]
    relative = [text for text in named if not Path(text).expanduser().is_absolute()]
    if not relative:
        return with_absolute_paths(config)
    place = folder.absolute()
    tried = [Path.cwd(), place, *list(place.parents)[:_LEVELS]]
    for base in tried:
        if all(_is_there(base / text) for text in relative):
            return with_absolute_paths(config, base=base)
    raise MissingFileError(
        expected="the raw data of the run, whose config.json names it relative to an unknown folder",
        found="no " + ", ".join(relative[:4]) + " in " + ", ".join(dict.fromkeys(map(str, tried))),
        where=str(folder / "config.json"),
        ways_out=(
            "give the command in the folder where the run was started",
            "name the files, with --resume: --data.train FILE",
            "write absolute paths into config.json (data.train, data.valid, data.test, dataset.source)",
        ),
    )


def _paths(config: RunConfig) -> Iterable[str]:
    data = config.data
    return (*data.train, *data.valid, *data.test, config.dataset.source)


def _is_there(path: Path) -> bool:
    return path.exists() or bool(glob.glob(str(path)))
