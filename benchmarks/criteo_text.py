"""A Criteo-format TSV of any size: label, 13 integers, 26 hexadecimal ids, tab-separated, no header, with gaps.

Ids follow Zipf(1.1) over vocabularies of Criteo Kaggle's sizes; 0 to 45 % of a column is empty, as there; integers
are geometric with heavy tails, some negative. About 240 bytes a row. Made once for each size, kept in `build/`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl

from benchmarks.harness import ROOT, say

NUM_NUMBERS, NUM_IDS = 13, 26
CHUNK_ROWS = 250_000
# Distinct ids of the 26 columns of Criteo Kaggle's training set, as published with DLRM.
CARDINALITIES = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)


def criteo_text(num_rows: int) -> Path:
    """The file with so many rows; written on first use."""
    folder = ROOT / "build" / "benchmarks"
    path = folder / f"criteo-{num_rows}.tsv"
    if path.exists():
        return path
    say(f"  writing {num_rows:,} rows of Criteo text")
    folder.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".partial")
    generator = np.random.default_rng(0)
    with temporary.open("wb") as file:
        for start in range(0, num_rows, CHUNK_ROWS):
            _chunk(generator, min(CHUNK_ROWS, num_rows - start)).write_csv(
                file, separator="\t", include_header=False, null_value=""
            )
    temporary.rename(path)
    return path


def _chunk(generator: np.random.Generator, num_rows: int) -> pl.DataFrame:
    columns: dict[str, pl.Series] = {"label": pl.Series((generator.random(num_rows) < 0.256).astype(np.int8))}
    for index in range(NUM_NUMBERS):
        values = np.floor(generator.lognormal(1.0 + index % 4, 1.5, num_rows)).astype(np.int64) - (index == 1) * 3
        columns[f"I{index + 1}"] = _with_gaps(pl.Series(values), generator, share=0.05 * (index % 10))
    for index, cardinality in enumerate(CARDINALITIES):
        ranks = np.minimum(generator.zipf(1.1, num_rows) - 1, 2**40).astype(np.uint64) % np.uint64(cardinality)
        hashed = (ranks * np.uint64(0x9E3779B97F4A7C15) + np.uint64(index)) >> np.uint64(32)
        unique, inverse = np.unique(hashed, return_inverse=True)
        words = pl.Series([f"{value:08x}" for value in unique])
        columns[f"C{index + 1}"] = _with_gaps(words.gather(inverse), generator, share=0.05 * (index % 9 == 2) * 9)
    return pl.DataFrame(columns)


def _with_gaps(values: pl.Series, generator: np.random.Generator, *, share: float) -> pl.Series:
    keep = pl.Series(generator.random(len(values)) >= share)
    return pl.select(pl.when(keep).then(values)).to_series()
