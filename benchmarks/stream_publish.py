"""Publishing a window of a stream: seconds and bytes by rows that changed, beside a version that is written whole.

A table that grows to 10⁶ ids, all of which the history brings. Then windows that touch so many different rows as
their names say, each published as a delta, and once more with versions that are whole: the bytes and seconds of both.

    delta     dense weights and changed rows; digests, a load, all weights compared, golden answers, rename, pointer
    whole     the same with all rows: what a stream without deltas would write after each window

`ziggurat bench stream` runs it.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import numpy as np
import polars as pl

import ziggurat as zg
from benchmarks.harness import say
from benchmarks.report import Report, by_round
from ziggurat.data.preprocess.splits import SplitBy, SplitConfig
from ziggurat.data.streams.windows import StreamConfig
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs.stream.publish import PublishConfig
from ziggurat.runs.stream.run import stream_run
from ziggurat.serving.export.published_folder import Publication, read_pointer

NUM_IDS = 1_000_000
TOUCHED = (1_000_000, 10_000, 100)
GOAL_S = 2.0
_DAY_S = 86_400
_SCHEMA = zg.Schema(
    features=(zg.Categorical(name="user"), zg.Dense(name="age")), labels=(zg.Label(name="click"),), time="at"
)


def write_windows(path: Path, *, scale: int) -> None:
    """Write a day that brings all ids, and one for each number of touched rows.

    Args:
        path: of the file.
        scale: divides the numbers of ids.
    """
    rng = np.random.default_rng(0)
    parts: list[pl.DataFrame] = []
    for day, number in enumerate((NUM_IDS, *TOUCHED)):
        ids = rng.permutation(NUM_IDS // scale)[: max(number // scale, 1)]
        columns = {
            "user": ids,
            "age": rng.normal(size=len(ids)),
            "click": rng.integers(0, 2, len(ids)),
            "at": np.full(len(ids), 957_139_200 + day * _DAY_S) + np.arange(len(ids)) % _DAY_S,
        }
        parts.append(pl.DataFrame(columns))
    pl.concat(parts).write_parquet(path)


def published(path: Path, *, folder: Path, scale: int, max_deltas: int) -> tuple[Publication, ...]:
    """Stream the windows and publish each; returns the versions."""
    run = zg.table_run(zg.DLRMConfig(embedding_dim=16), _SCHEMA)
    loader = dataclasses.replace(run.training.loader, batch_size=16_384)
    training = dataclasses.replace(run.training, epochs=1, unknown_ids=(), threads=1, loader=loader)
    split = SplitConfig(by=SplitBy.TIME, valid_fraction=0.0, test_fraction=0.0)
    data = dataclasses.replace(run.data, train=(str(path),), split=split)
    config: RunConfig = dataclasses.replace(run, data=data, training=training)
    stream_run(
        config,
        folder=folder / "run",
        stream=StreamConfig(by="day", growing=NUM_IDS // scale),
        publish=PublishConfig(folder=str(folder / "live"), max_deltas=max_deltas, max_delta_share=1000.0),
    )
    return read_pointer(folder / "live").versions


def add_cases(report: Report, *, quick: bool = False) -> None:
    """Publish windows as deltas and whole, in turns, and add the cases to a report.

    Args:
        report: of the benchmark.
        quick: a hundredth of the rows, and one round.
    """
    scale = 100 if quick else 1
    rounds: list[tuple[tuple[Publication, ...], tuple[Publication, ...]]] = []
    with tempfile.TemporaryDirectory() as base:
        path = Path(base) / "rows.parquet"
        write_windows(path, scale=scale)
        for number in range(1 if quick else 3):
            made: dict[bool, tuple[Publication, ...]] = {}
            for whole in (True, False) if number % 2 else (False, True):
                with tempfile.TemporaryDirectory(dir=base) as folder:
                    found = published(path, folder=Path(folder), scale=scale, max_deltas=0 if whole else 1000)
                made[whole] = found
                shown = [(each.rows, each.new_bytes, round(each.seconds, 2), round(each.cpu_s, 2)) for each in found]
                say(f"round {number}, {'whole' if whole else 'deltas'}: rows, bytes, seconds, CPU s {shown}")
            rounds.append((made[False], made[True]))
    for place, number in enumerate(TOUCHED, start=1):
        deltas = [delta[place] for delta, _ in rounds]
        wholes = [whole[place] for _, whole in rounds]
        seconds = by_round(
            f"publish_{number}_rows_s",
            ours=("a delta", [each.seconds for each in deltas]),
            peer=("a version that is whole", [each.seconds for each in wholes]),
            unit="s",
            smaller_is_better=True,
        )
        cpu = by_round(
            f"publish_{number}_rows_cpu_s",
            ours=("a delta", [each.cpu_s for each in deltas]),
            peer=("a version that is whole", [each.cpu_s for each in wholes]),
            unit="CPU s",
            smaller_is_better=True,
        )
        num_bytes = by_round(
            f"publish_{number}_rows_bytes",
            ours=("a delta", [float(each.new_bytes) for each in deltas]),
            peer=("a version that is whole", [float(each.new_bytes) for each in wholes]),
            unit="bytes",
            smaller_is_better=True,
        )
        report.cases += [seconds, cpu, num_bytes]
        report.figures.append(
            {
                "name": f"published_{number}_rows",
                "rows": deltas[0].rows,
                "bytes_per_row": deltas[0].new_bytes / max(deltas[0].rows, 1),
                "seconds": sorted(each.seconds for each in deltas),
                "cpu_s": sorted(each.cpu_s for each in deltas),
                "goal_s": GOAL_S if number == TOUCHED[0] else None,
            }
        )
    report.notes.append(
        f"publishing: a table that grows, of {NUM_IDS // scale:,} ids and D = 16; each version is read back, all of "
        f"its weights are compared with the trained ones, and golden requests answered; the goal is {GOAL_S:g} s for "
        f"{TOUCHED[0]:,} changed rows"
    )


if __name__ == "__main__":
    found = Report(benchmark="stream_publish", claim="", command="python -m benchmarks.stream_publish")
    add_cases(found)
    for each in found.figures:
        print(each)
