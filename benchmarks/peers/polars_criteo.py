"""A hand-written polars script: Criteo TSV to Parquet with vocabularies and standardised logarithms, no validation.

What a polars user would write when the file fits into memory: read it once, count the ids of 26 columns, take means and
deviations of 13 numbers, encode (a cast to an Enum of the vocabulary is polars' fastest lookup), write Parquet with the
same rows, types, row groups and compression as ours. (Two lazy passes with the streaming engine were slower: the text
is parsed twice, or once for every column that is counted.) A malformed number would end it without naming the row.

    rows as in our schema: 1 unknown or rarer than `min_count`, 2 missing, 3… by falling count
    numbers: (log1p − mean) / sd, log1p(x) = sign(x)·ln(1+|x|), missing 0 before the transform

Settings: `text`: the TSV; `folder`: where to write; `min_count`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import polars as pl

from benchmarks.worker import serve
from benchmarks.workload import Workload

NUMBERS = [f"I{index}" for index in range(1, 14)]
IDS = [f"C{index}" for index in range(1, 27)]


class PolarsCriteo:
    """One step is the whole file."""

    def __init__(self, workload: Workload, settings: dict[str, object]) -> None:
        self.text, self.folder = str(settings["text"]), Path(str(settings["folder"]))
        self.min_count = int(str(settings["min_count"]))
        self.info: dict[str, object] = {"validation": "none", "engine": "polars, in memory"}

    def run(self, steps: int) -> float:
        """Preprocess the file so many times; returns the number of rows written."""
        num_rows = 0
        for _ in range(steps):
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            num_rows = preprocess(self.text, self.folder / "part-00000.parquet", min_count=self.min_count)
        return float(num_rows)


def preprocess(text: str, target: Path, *, min_count: int) -> int:
    """Fit, encode, write; returns the number of rows."""
    schema = {"label": pl.Int8, **dict.fromkeys(NUMBERS, pl.Int64), **dict.fromkeys(IDS, pl.String)}
    frame = pl.read_csv(text, separator="\t", has_header=False, schema=schema, quote_char=None)
    logs = frame.select(_log1p(pl.col(name)) for name in NUMBERS)
    counts = pl.collect_all([frame.lazy().select(pl.col(name)).drop_nulls().group_by(name).len() for name in IDS])
    vocabularies = [
        table.filter(pl.col("len") >= min_count).sort(["len", name], descending=[True, False])[name]
        for name, table in zip(IDS, counts, strict=True)
    ]
    numbers = logs.select(
        ((pl.col(name) - pl.col(name).mean()) / pl.col(name).std(ddof=0)).cast(pl.Float32) for name in NUMBERS
    )
    rows = frame.select(_row(name, vocabulary) for name, vocabulary in zip(IDS, vocabularies, strict=True))
    label = frame.select(pl.col("label").cast(pl.Float32).alias("label:label"))
    encoded = pl.concat([numbers, rows, label], how="horizontal")
    encoded.write_parquet(target, compression="lz4", row_group_size=65_536)
    return len(encoded)


def _row(name: str, vocabulary: pl.Series) -> pl.Expr:
    row = pl.col(name).cast(pl.Enum(vocabulary), strict=False).to_physical().cast(pl.Int32) + 3
    return pl.when(pl.col(name).is_null()).then(2).otherwise(row.fill_null(1)).cast(pl.Int32).alias(name)


def _log1p(value: pl.Expr) -> pl.Expr:
    number = value.fill_null(0).cast(pl.Float64)
    return number.sign() * (number.abs() + 1).log()


if __name__ == "__main__":
    serve(PolarsCriteo)
