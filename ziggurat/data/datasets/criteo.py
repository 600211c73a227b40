"""Criteo display advertising: 13 counts, 26 hashed categories, clicked or not. Schemas, and a check of the user's file.

    label ⇥ I1 … I13 ⇥ C1 … C26        tab separated, no header, an empty cell is a missing value
    0     ⇥ 1  ⇥ 1 ⇥ 5 …  ⇥ 68fd1e64 ⇥ …     integers; eight hex digits

- *criteo-kaggle*: 45,840,617 rows in `train.txt` (7 days; a quarter clicked). Its `test.txt` has no labels.
- *criteo-1tb*: 24 files `day_0` … `day_23` of about 180 M rows each, packed with gzip; 3 % clicked.
- *criteo-x4*: the Kaggle rows as BARS splits them (CSV with header), with its preprocessing: every number becomes a
  category (`criteo_buckets`), ids seen fewer than 10 times are unknown.

The data may be used for non-commercial research and may not be passed on, so nothing is downloaded: the user names the
file. `fetch` checks its first rows, so a wrong file is refused in a second, not after an hour of training.
"""

from __future__ import annotations

import gzip
import os
import re
import zlib
from pathlib import Path

from ziggurat.data.datasets.fetch import require_file
from ziggurat.errors import DataError, MissingFileError
from ziggurat.features.schema import (
    Categorical,
    Dense,
    Encoding,
    Feature,
    Label,
    MultiHot,
    NumericTransform,
    Pooling,
    Schema,
    Table,
)

NAMES = ("criteo-kaggle", "criteo-1tb", "criteo-x4")
DENSE = tuple(f"I{number}" for number in range(1, 14))
CATEGORICAL = tuple(f"C{number}" for number in range(1, 27))
COLUMNS = ("label", *DENSE, *CATEGORICAL)
CHECKED_ROWS = 10_000
_MAX_LINE_BYTES = 1 << 16  # a line of 40 short cells; a longer one is no row, however small its file is when packed

# Distinct ids of each feature over all 24 days, capped at 40 million: the table sizes of MLPerf's DLRM.
_TERABYTE_IDS = (
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10),
    *(2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36),
)
# Ids a sample of each feature in MLPerf training's DLRM-DCNv2 (its `multi_hot_sizes`); 214 in all.
_MLPERF_LENGTHS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
_HOW = {
    "criteo-kaggle": "download the Criteo Kaggle display advertising data (train.txt) from Criteo AI Lab",
    "criteo-1tb": "download the Criteo 1TB click logs (day_0.gz … day_23.gz) from Criteo AI Lab",
    "criteo-x4": "download Criteo_x4 (train.csv, valid.csv, test.csv) from reczoo on the Hugging Face hub",
}
_INTEGER = re.compile(r"-?\d+")
_HEX = re.compile(r"[0-9a-f]{8}")


def criteo_schema(name: str, *, min_count: int = 10, max_hashed_rows: int = 10_000_000) -> Schema:
    """The schema of one of `NAMES`.

    Args:
        name: criteo-kaggle has log-standardised numbers and a vocabulary for each category; criteo-1tb too, but
            features with more than a million ids are hashed, since their vocabularies would not fit in memory;
            criteo-x4 is BARS's.
        min_count: vocabularies keep ids seen this often in training; BARS uses 10 (and 2 in Criteo_x4_002).
        max_hashed_rows: rows of a hashed table at most; MLPerf has 40 million.
    """
    buckets = name == "criteo-x4"
    transform = NumericTransform.CRITEO_BUCKETS if buckets else NumericTransform.LOG1P_STANDARDISE
    dense: list[Feature] = [
        Dense(name=column, transform=transform, min_count=min_count if buckets else 1) for column in DENSE
    ]
    tables = [Table(name=column, min_count=min_count) for column in CATEGORICAL]
    if name == "criteo-1tb":
        tables = [
            Table(name=column, encoding=Encoding.HASHING, num_rows=min(num_ids, max_hashed_rows))
            if num_ids > 1_000_000
            else Table(name=column, min_count=min_count)
            for column, num_ids in zip(CATEGORICAL, _TERABYTE_IDS, strict=True)
        ]
    return Schema(
        features=(*dense, *(Categorical(name=column) for column in CATEGORICAL)),
        labels=(Label(name="label"),),
        tables=tuple(tables),
    )


def mlperf_schema(*, multi_hot: bool = False) -> Schema:
    """Criteo 1TB with MLPerf's table sizes, every id hashed; 204,184,588 rows.

    Args:
        multi_hot: lists of MLPerf's lengths instead of one id a feature (as its `materialize_synthetic_multihot`
            makes them).
    """
    pairs = zip(CATEGORICAL, _MLPERF_LENGTHS, strict=True)
    features: list[Feature] = [Dense(name=column) for column in DENSE]
    if multi_hot:
        features += [MultiHot(name=name, max_length=length, pooling=Pooling.SUM) for name, length in pairs]
    else:
        features += [Categorical(name=name) for name in CATEGORICAL]
    sizes = zip(CATEGORICAL, _TERABYTE_IDS, strict=True)
    tables = tuple(Table(name=name, encoding=Encoding.HASHING, num_rows=count) for name, count in sizes)
    return Schema(features=tuple(features), labels=(Label(name="label"),), tables=tables)


def check_criteo(name: str, *, source: str | os.PathLike[str] | None) -> Path:
    """`source`, after its first 10,000 rows (of each file, if it is a folder) were found to have Criteo's form.

    Args:
        name: one of `NAMES`.
        source: a file (plain or .gz) or a folder with `train.txt`, `day_*` or `*.csv` files.

    Raises:
        MissingFileError: no source, no such file, or nothing of the kind in the folder.
        DataError: a row is not as it should be; names file, row and column.
    """
    if source is None:
        raise MissingFileError(
            expected="a source: Criteo's data may not be redistributed",
            found="no source",
            where=name,
            ways_out=(f"{_HOW[name]}, then: ziggurat data fetch {name} --source PATH",),
        )
    path = require_file(source, expected=f"a file or folder of {name}", ways_out=(_HOW[name],))
    patterns = {"criteo-kaggle": "train.txt*", "criteo-1tb": "day_*", "criteo-x4": "*.csv"}
    files = sorted(path.glob(patterns[name])) if path.is_dir() else [path]
    if not files:
        raise MissingFileError(
            expected=f"files called {patterns[name]}",
            found=", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "an empty folder",
            where=str(path),
            ways_out=("name the file itself", _HOW[name]),
        )
    for file in files:
        _check_file(file, separator="," if name == "criteo-x4" else "\t", header=name == "criteo-x4")
    return path


def _check_file(path: Path, *, separator: str, header: bool) -> None:
    row = -1
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            if header and (
                names := lines.readline(_MAX_LINE_BYTES).decode("utf-8", "replace").strip().split(separator)
            ) != [*COLUMNS]:
                raise _wrong(str(path), f"the header {separator.join(COLUMNS[:3])}…", separator.join(names)[:80])
            for row in range(CHECKED_ROWS):
                if not (line := lines.readline(_MAX_LINE_BYTES)):
                    row -= 1
                    break
                _check_row(line.decode("utf-8", "replace").rstrip("\r\n").split(separator), f"{path}, row {row}")
    except (OSError, EOFError, zlib.error) as error:
        if isinstance(error, DataError):
            raise
        raise _wrong(f"{path}, after row {row}", "a readable file", str(error)) from error
    if row < 0:
        raise _wrong(str(path), "rows", "an empty file")


def _check_row(cells: list[str], where: str) -> None:
    if len(cells) == len(COLUMNS) - 1:
        raise _wrong(where, "40 cells", "39 cells: rows without labels, as in Criteo's own test.txt")
    if len(cells) != len(COLUMNS):
        raise _wrong(where, "40 cells: label, I1 … I13, C1 … C26", f"{len(cells)} cells")
    if cells[0] not in ("0", "1"):
        raise _wrong(f"{where}, column label", "0 or 1", repr(cells[0][:40]))
    for name, cell in zip(COLUMNS[1:], cells[1:], strict=True):
        pattern, expected = (_INTEGER, "a whole number") if name[0] == "I" else (_HEX, "eight hex digits")
        if cell and not pattern.fullmatch(cell):
            raise _wrong(f"{where}, column {name}", f"{expected}, or nothing", repr(cell[:40]))


def _wrong(where: str, expected: str, found: str) -> DataError:
    return DataError(
        expected=expected,
        found=found,
        where=where,
        ways_out=(
            "name the file as Criteo publishes it, unedited; download it again if it is cut off",
            "for another format: ziggurat data inspect FILE --write-schema my.toml",
        ),
    )
