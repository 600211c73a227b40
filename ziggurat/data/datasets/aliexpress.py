"""AliExpress search logs of a country, as comparisons of several labels have them: shown, clicked, bought.

    search_id, categorical_1 … categorical_16, numerical_1 … numerical_63, click, conversion      CSV with a header

The CSV form is that of MTReclib, `train.csv` and `test.csv` of a country: NL (the Netherlands), ES, FR and US.
`conversion` has a value in every row: it is the purchase among all that was shown, which tables call CTCVR. Published
runs stopped by the test file; here a twentieth of the searches of the training file validates, drawn by their number,
and the test file is read once.

Parquet, train, valid and test: search_id int64 · categorical_* int32 · numerical_* float32 · click, conversion int8.

Reference: Li et al., "Improving Multi-Scenario Learning to Rank in E-commerce by Exploiting Task Relationships in the
Label Space", CIKM 2020, which published the logs.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import polars as pl

from ziggurat.cache import cache_folder
from ziggurat.data.datasets.fetch import kept_dataset, require_file, write_dataset
from ziggurat.data.mixing import splitmix64
from ziggurat.errors import DataError
from ziggurat.features.schema import Categorical, Dense, Feature, Label, Schema
from ziggurat.files import sha256_of

NAMES = ("aliexpress-nl", "aliexpress-es", "aliexpress-fr", "aliexpress-us")
SPLITS = ("train", "test")
CATEGORIES = tuple(f"categorical_{number}" for number in range(1, 17))
NUMBERS = tuple(f"numerical_{number}" for number in range(1, 64))
LABELS = ("click", "conversion")
COLUMNS = ("search_id", *CATEGORIES, *NUMBERS, *LABELS)
VALID_EVERY = 20  # of twenty searches one validates
_TYPES: dict[str, type[pl.DataType]] = {
    "search_id": pl.Int64,
    **dict.fromkeys(CATEGORIES, pl.Int32),
    **dict.fromkeys(NUMBERS, pl.Float32),
    **dict.fromkeys(LABELS, pl.Int8),
}
TERMS = """
Terms: those of the Tianchi data set 74690 (research); do not redistribute.
Cite: Pengcheng Li et al. Improving Multi-Scenario Learning to Rank in E-commerce by Exploiting Task Relationships in
the Label Space. CIKM 2020.
"""


def fetch_aliexpress(
    name: str, *, source: str | os.PathLike[str] | None = None, cache: str | os.PathLike[str] | None = None
) -> Path:
    """The folder with train.parquet, valid.parquet and test.parquet.

    Args:
        name: one of `NAMES`.
        source: a folder with `train.csv` and `test.csv` of that country; None takes what is in the cache.
        cache: the cache folder; see `cache_folder`.

    Raises:
        MissingFileError: nothing cached and no source, or a file of the source is missing.
        DataError: a file of another form, or the cache cannot be written.
    """
    folder = cache_folder(cache) / name
    ways = (
        f"get train.csv and test.csv of {name[-2:].upper()} as MTReclib prepares them into one folder, "
        f"then: ziggurat data fetch {name} --source FOLDER",
    )
    if source is None:
        return kept_dataset(
            folder, why="the logs may not be redistributed, so there is no default download", ways_out=ways
        )
    path = require_file(source, expected="a folder with train.csv and test.csv", ways_out=ways)
    frames = {}
    members = {}
    for split in SPLITS:
        file = require_file(path / f"{split}.csv", expected="a folder with train.csv and test.csv", ways_out=ways)
        frames[split] = read_aliexpress(file)
        members[file.name] = sha256_of(file)
    is_valid = pl.Series(splitmix64(frames["train"]["search_id"].to_numpy()) % np.uint64(VALID_EVERY) == 0)
    if is_valid.all() or not is_valid.any():
        raise DataError(
            expected="searches of which one in twenty validates, and the others train",
            found=f"{frames['train']['search_id'].n_unique():,} searches",
            where=str(path / "train.csv"),
            ways_out="take the files as MTReclib prepares them",
        )
    files = {
        "train.parquet": frames["train"].filter(~is_valid),
        "valid.parquet": frames["train"].filter(is_valid),
        "test.parquet": frames["test"],
    }
    return write_dataset(folder, files, origin=f"{name}, train.csv and test.csv", members=members, notes=TERMS)


def aliexpress_schema() -> Schema:
    """Sixteen categories, 63 numbers as they are, and two labels in the order in which they happen."""
    categories: list[Feature] = [Categorical(name=name) for name in CATEGORIES]
    return Schema(
        features=(*categories, *(Dense(name=name) for name in NUMBERS)),
        labels=tuple(Label(name=name) for name in LABELS),
        group="search_id",
    )


def read_aliexpress(path: Path) -> pl.DataFrame:
    """The rows of a file in the published form.

    Args:
        path: CSV with a header.

    Raises:
        DataError: other columns, a value of another type, or a label other than 0 and 1.
    """
    try:
        header = pl.read_csv(path, n_rows=0, infer_schema=False).columns
        if set(header) != set(COLUMNS):
            strange = sorted(set(header) ^ set(COLUMNS))
            raise _other_form(path, f"{len(header)} columns; not in both: {', '.join(map(repr, strange[:6]))}")
        # A label may be written 0.0.
        frame = pl.read_csv(path, schema_overrides=_TYPES | dict.fromkeys(LABELS, pl.Float32)).select(COLUMNS)
    except pl.exceptions.PolarsError as error:
        raise _other_form(path, str(error).splitlines()[0]) from error
    are_right = frame.select(pl.all_horizontal(pl.col(LABELS).is_in([0.0, 1.0]).fill_null(value=False))).to_series()
    if not are_right.all():
        row = int((~are_right).arg_true()[0])
        labels = frame.select(LABELS).row(row, named=True).items()
        shown = ", ".join(f"{name} {'none' if value is None else f'{value:g}'}" for name, value in labels)
        raise _other_form(path, f"{shown} in line {row + 2}")
    if not frame.height or frame["search_id"].has_nulls():
        raise _other_form(path, "no rows" if not frame.height else "a row without search_id")
    return frame.cast(dict.fromkeys(LABELS, pl.Int8))


def _other_form(path: Path, found: str) -> DataError:
    return DataError(
        expected="the columns search_id, categorical_1 … 16, numerical_1 … 63, click and conversion; labels 0 and 1",
        found=found,
        where=str(path),
        ways_out=(
            "take the files as MTReclib prepares them",
            "for data of your own, skip fetch: `ziggurat data inspect FILE --write-schema my.toml`",
        ),
    )
