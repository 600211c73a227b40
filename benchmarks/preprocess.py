"""Claim: Criteo text to Parquet with vocabularies *and validation* is no slower than a polars script without it.

    ours    ziggurat.data.preprocess.prepare: bounded memory, every cell checked (file, row and column in the error),
            pages with checksums, a manifest, the fitted preprocessing saved beside the data
    peer    a hand-written polars script for the same rows and numbers: whole file in memory, nothing checked

Both fit 26 vocabularies (ids seen at least 10 times), standardise log(1+x) of 13 numbers, and write LZ4 Parquet in row
groups of 65,536 rows. The outputs are compared: the same number of rows, and the same histogram of rows in every id
column. Peak memory is that of the whole process, interpreter and libraries included.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from benchmarks.criteo_text import CARDINALITIES, criteo_text
from benchmarks.harness import ROOT, Entry, RoundsConfig, WorkerError, measure
from benchmarks.report import Case, Report, compare

OURS, PEER = "ours: prepare, validated", "polars script, not validated"
MAX_RSS_BYTES = 2 * 2**30
MIN_COUNT = 10


def run(*, quick: bool = False) -> Report:
    """Preprocess 10⁶ rows in turns (10⁵ if quick)."""
    num_rows = 100_000 if quick else 1_000_000
    text = criteo_text(num_rows)
    folder = ROOT / "build" / "benchmarks" / "preprocess"
    entries = [
        Entry(
            name=name,
            module=module,
            settings={"text": str(text), "folder": str(folder / module), "min_count": MIN_COUNT},
            samples_per_step=num_rows,
            group=f"Criteo TSV to Parquet, {num_rows:,} rows",
        )
        for name, module in ((OURS, "benchmarks.our_preprocess"), (PEER, "benchmarks.peers.polars_criteo"))
    ]
    results = measure(entries, RoundsConfig(rounds=3 if quick else 7, turn_s=0.1, warmup_s=0.0))
    check_same_output(folder / entries[0].module, folder / entries[1].module)
    ours = results[OURS]
    report = Report(
        benchmark="preprocess",
        claim=f"Criteo TSV to Parquet, {num_rows:,} rows ({text.stat().st_size / 1e6:.0f} MB): ours against polars.",
        command="ziggurat bench preprocess",
    )
    report.contestants += results.values()
    report.cases.append(compare(f"criteo_{num_rows}rows_polars_default", results, ours=OURS, peer=PEER, goal=1.0))
    memory = MAX_RSS_BYTES / ours.peak_rss_bytes
    report.cases.append(
        Case(
            name=f"criteo_{num_rows}rows_limit_peak_memory",
            ours=ours.peak_rss_bytes / 2**30,
            peer=MAX_RSS_BYTES / 2**30,
            ratio=memory,
            ratio_p10=memory,
            ratio_p90=memory,
            ours_name=OURS,
            peer_name="limit",
            goal=1.0,
            unit="GiB",
        )
    )
    size = text.stat().st_size / num_rows
    report.notes.append(f"{ours.rate * size / 1e6:.0f} MB/s of text ours; a row has {size:.0f} bytes")
    report.notes.append("the outputs were compared: same rows, same histogram of rows in each of the 26 id columns")
    return report


def check_same_output(ours: Path, peer: Path) -> None:
    """Both must have written the same rows, up to the order of ids that are equally frequent."""
    our_files = sorted(ours.glob("*/train/part-*.parquet"))
    peer_files = sorted(peer.glob("*.parquet"))
    for index in range(1, len(CARDINALITIES) + 1):
        mine, theirs = (
            np.sort(np.bincount(np.concatenate([pq.read_table(f, columns=[f"C{index}"])[0].to_numpy() for f in files])))
            for files in (our_files, peer_files)
        )
        mine, theirs = mine[mine > 0], theirs[theirs > 0]
        if not np.array_equal(mine, theirs):
            raise WorkerError(f"column C{index}: the two outputs differ ({len(mine)} and {len(theirs)} different rows)")


if __name__ == "__main__":
    print(run(quick=True).to_json())
