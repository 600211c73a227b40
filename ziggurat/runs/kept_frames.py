"""Train on tables in memory: their rows are written into the folder of the run, once, and are files from then on.

    train_run(config, folder="runs/shop", data=frame)                       runs/shop/raw/train.parquet
    train_run(config, folder="runs/shop", data={"train": a, "valid": b})    … and runs/shop/raw/valid.parquet

Training reads its rows several times, on ranks by several processes, and a run that was killed reads them again: so
they are kept with the run, and go when its folder goes. A run that goes on with another table is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import polars as pl
from polars.exceptions import PolarsError

from ziggurat.data.preprocess.splits import SplitBy
from ziggurat.data.raw.frames import as_polars, is_frame, write_frame
from ziggurat.errors import ConfigError, DataError
from ziggurat.files.writing import replacing
from ziggurat.recipes.run_config import RunConfig
from ziggurat.training.records.run_folder import RunFolder

SPLITS = ("train", "valid", "test")


def frames_by_split(data: object) -> dict[str, pl.DataFrame]:
    """Return a table, or tables by split, as polars frames by split.

    Raises:
        ConfigError: it is no table; or tables without one to train on.
        DataError: a table that polars cannot take.
    """
    if not (isinstance(data, Mapping) and data and all(is_frame(each) for each in data.values())):
        if not is_frame(data):
            raise ConfigError(
                expected="a frame (polars, pandas, Arrow, a dict of columns), or a dict of frames by split",
                found=type(data).__name__,
                where="train_run, argument 'data'",
                ways_out=("data=frame", "data={'train': frame, 'valid': other}", "files: DataConfig(train=('FILE',))"),
            )
        return {"train": as_polars(data, where="data to train on")}
    if "train" not in data or not set(data) <= set(SPLITS):
        raise ConfigError(
            expected="frames by split: train, and valid and test if there are such",
            found=", ".join(map(repr, data)),
            where="train_run, argument 'data'",
            ways_out=("data={'train': frame, 'valid': other}", "data=frame, which is split as config.data.split says"),
        )
    return {split: as_polars(frame, where=f"{split} data") for split, frame in data.items()}


def with_kept_frames(config: RunConfig, frames: Mapping[str, pl.DataFrame], *, run: RunFolder) -> RunConfig:
    """Return the config with the files that `keep_frames` writes.

    Raises:
        ConfigError: the config names files, or a data set, too.
    """
    kept = {split: (str(_path(run, split)),) if split in frames else () for split in SPLITS}
    named = [
        *config.data.train,
        *config.data.valid,
        *config.data.test,
        *([config.dataset.name] if config.dataset.name else ()),
    ]
    # A config that is resumed names the kept files already.
    named = [name for name in named if (name,) not in kept.values()]
    if named:
        raise ConfigError(
            expected="either files or a table in memory",
            found=f"data, and {', '.join(named[:3])} in the config",
            where="train_run, argument 'data'",
            ways_out=("leave data out", "leave the files out of config.data, and the data set out of config.dataset"),
        )
    split = config.data.split
    # Frames that come by split are not to be split again.
    if len(frames) > 1:
        split = dataclasses.replace(split, by=SplitBy.FILES)
    data = dataclasses.replace(config.data, split=split, **kept)
    return dataclasses.replace(config, data=data)


def keep_frames(frames: Mapping[str, pl.DataFrame], *, run: RunFolder) -> None:
    """Write the tables into the folder of the run; what is there already must be the same.

    Raises:
        DataError: a run that has begun was trained on another table.
        FileError: they cannot be written.
    """
    for split, frame in frames.items():
        path = _path(run, split)
        is_there = path.exists() and _holds(path, frame)
        if is_there:
            continue
        # What a start has left that never began may be replaced.
        if run.has_begun() and path.exists():
            raise DataError(
                expected=f"the table that the run was started with, {path.name}",
                found=f"another one, of {frame.height:,} rows and {frame.width} columns",
                where=f"{path}, resume",
                ways_out=("leave data out: the run has kept its own", "start a new run in another folder"),
            )
        with replacing(path) as temporary:
            write_frame(frame, temporary)


def _path(run: RunFolder, split: str) -> Path:
    return run.raw.absolute() / f"{split}.parquet"


def _holds(path: Path, frame: pl.DataFrame) -> bool:
    """Return whether a file has the rows of a frame; one that is damaged has not."""
    try:
        kept = pl.read_parquet(path)
    except (PolarsError, OSError):
        return False
    return kept.schema == frame.schema and kept.equals(frame)
