"""Write a drifting data set into a folder: a Parquet file for each window, its schema, and what a model can reach.

    FOLDER/windows/2026-01-01.parquet …   rows in order of time: `ziggurat stream … --data.train FOLDER/windows/`
    FOLDER/schema.toml                    which columns are features, labels and the time
    FOLDER/truth.csv                      of each window the share of positives, the best NE, log loss and AUC, new ids
    FOLDER/truth.svg                      the same as curves
    FOLDER/drift.json                     the settings: a folder goes on with the same ones alone

A window's line in `truth.csv` is written after its file. What has its line is not drawn again; what a kill left without
one is, to the same bits. Memory: a piece of the rows, and some 60 bytes for each row of a window, for its best metrics.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from matplotlib.figure import Figure

from ziggurat.config import from_json, to_json
from ziggurat.data.synthetic.drift import DriftConfig, DriftingTeacher, WindowTruth
from ziggurat.data.synthetic.teacher import write_frames
from ziggurat.errors import ConfigError, DataError
from ziggurat.features.schema_io import write_schema
from ziggurat.files import write_text
from ziggurat.files.figures import write_figure
from ziggurat.files.reading import read_json, read_text
from ziggurat.training.report.plots import INK, SECOND, plain_axes
from ziggurat.training.report.progress import NoProgress, Progress

WINDOWS = "windows"
SCHEMA = "schema.toml"
TRUTH = "truth.csv"
PICTURE = "truth.svg"
SETTINGS = "drift.json"
_MAX_NAMES = 8  # of windows, below a plot


@dataclass(frozen=True, kw_only=True)
class DriftingData:
    """Holds the folder that `write_drifting` filled, and the best metrics of its windows.

    Args:
        folder: where it lies.
        truth: a line for each window, as in `truth.csv`.
        drawn: windows that were drawn now; the others were there.
    """

    folder: Path
    truth: pl.DataFrame
    drawn: int


def write_drifting(
    config: DriftConfig, *, folder: str | Path, windows: int, progress: Progress | None = None
) -> DriftingData:
    """Write windows 0 … windows−1 into a folder; those that are there already stay as they are.

    Args:
        config: what to draw.
        folder: a new or empty one, or one that these settings began.
        windows: how many there are afterwards, at least.
        progress: where each window is said.

    Raises:
        ConfigError: the folder holds something else, or there is no window to write.
        DataError, FileError: a file cannot be written.
    """
    if windows < 1:
        raise ConfigError(
            expected="at least one window",
            found=str(windows),
            where="write_drifting, argument 'windows' (--windows)",
            ways_out="--windows 30",
        )
    progress = progress or NoProgress()
    place = Path(folder)
    _begin(place, config)
    teacher = DriftingTeacher(config)
    write_schema(teacher.schema(), place / SCHEMA)
    lines = _lines_of(place)
    drawn = 0
    for window in range(windows):
        path = place / WINDOWS / f"{teacher.name(window)}.parquet"
        if window < len(lines) and path.is_file():
            continue
        truth = _write_window(teacher, window, path=path)
        lines = [*lines[:window], _line(truth), *lines[window + 1 :]]
        write_text(place / TRUTH, pl.DataFrame(lines).write_csv())
        drawn += 1
        label = teacher.labels[-1]
        best = truth.best[label]
        progress.say(
            f"{truth.name}: {best.num_rows:,} rows, {label} {best.positive_rate:.4f}, "
            f"best NE {best.normalised_entropy:.4f}, best AUC {best.auc:.4f}"
        )
    table = pl.DataFrame(lines)
    write_figure(truth_figure(table), place / PICTURE)
    return DriftingData(folder=place, truth=table, drawn=drawn)


def _begin(place: Path, config: DriftConfig) -> None:
    """Write the settings into a new folder, or refuse one that is not theirs."""
    path = place / SETTINGS
    if path.is_file():
        before = from_json(DriftConfig, read_json(path), where=str(path))
        if before != config:
            raise ConfigError(
                expected=f"the settings that {path} was written with",
                found="others",
                where=f"write_drifting, folder {place}",
                ways_out=("another folder", f"take those of {path}"),
            )
        return
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise ConfigError(
            expected="a new or empty folder, or one with a drifting data set",
            found="something else there",
            where=f"write_drifting, folder {place}",
            ways_out="another folder",
        )
    (place / WINDOWS).mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(to_json(config), indent=2) + "\n")


def _lines_of(place: Path) -> list[dict[str, object]]:
    path = place / TRUTH
    if not path.is_file():
        return []
    try:
        lines = pl.read_csv(read_text(path).encode()).to_dicts()
    except pl.exceptions.PolarsError:
        lines = [{}]
    if [line.get("window") for line in lines] != list(range(len(lines))):
        raise DataError(
            expected="a line for each window, 0, 1, 2 …",
            found="something else in it",
            where=str(path),
            ways_out="move this file away: the same command draws the windows again, to the same bits",
        )
    return lines


def _write_window(teacher: DriftingTeacher, window: int, *, path: Path) -> WindowTruth:
    """Write the rows of a window, and return what is known of them: one drawing serves both."""
    probabilities: list[np.ndarray] = []
    labels: list[np.ndarray] = []

    def frames() -> Iterator[pl.DataFrame]:
        for frame, true, drawn in teacher.parts(window):
            probabilities.append(true)
            labels.append(drawn)
            yield frame

    empty, _, _ = next(teacher.parts(window))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_frames(path, frames(), empty=empty.clear())
    return teacher.truth_of(
        window, probabilities=np.concatenate(probabilities, axis=1), labels=np.concatenate(labels, axis=1)
    )


def _line(truth: WindowTruth) -> dict[str, object]:
    line: dict[str, object] = {"window": truth.window, "name": truth.name}
    for label, best in truth.best.items():
        line["rows"] = best.num_rows
        line[f"{label} rate"] = best.positive_rate
        line[f"{label} best ne"] = best.normalised_entropy
        line[f"{label} best log_loss"] = best.log_loss
        line[f"{label} best auc"] = best.auc
    for feature, share in truth.new_ids.items():
        line[f"new {feature}"] = share
    return line


def truth_figure(truth: pl.DataFrame) -> Figure:
    """Draw the share of positives, the best NE and the share of new ids (of all features, their mean) over windows.

    Args:
        truth: as in `truth.csv`.
    """
    figure, axes = plain_axes("Best NE, share of positives and of new ids, by window")
    places = range(truth.height)
    for column in truth.columns:
        if column.endswith(" best ne"):
            label = column.removesuffix(" best ne")
            axes.plot(places, truth[column].to_list(), color=INK, lw=1.4, label=f"best NE of {label}")
            share = truth[f"{label} rate"].to_list()
            axes.plot(places, share, color=SECOND, lw=1.4, label=f"share of positives of {label}")
    new = [column for column in truth.columns if column.startswith("new ")]
    if new:
        mean = truth.select(pl.mean_horizontal(new)).to_series().to_list()
        axes.plot(places, mean, color="#3a7d44", lw=1.4, label="share of new ids")
    axes.set_ylim(0, 1)
    step = max(1, -(-truth.height // _MAX_NAMES))
    axes.set_xticks(list(places)[::step], truth["name"].to_list()[::step], fontsize=8, rotation=20, ha="right")
    axes.legend(frameon=False, fontsize=8)
    return figure
