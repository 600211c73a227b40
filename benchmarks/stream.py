"""A stream against training in one batch run on the same rows: samples a second inside of steps, and from files on.

Both train the same rows once, with the same model, batch size and threads, in turns. A stream reads its rows window
after window, starts its loader anew in each, scores each window before it is trained, and saves after it.

    inside of steps     rows / seconds from asking for a batch to the end of its step, over all steps
    from files          rows / seconds of the whole run: reading, fitting, encoding, training; the stream also scores

`ziggurat bench stream`
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import polars as pl

import ziggurat as zg
from benchmarks.harness import say
from benchmarks.report import Report, by_round
from ziggurat.cache import cache_folder
from ziggurat.data.preprocess.splits import SplitBy, SplitConfig
from ziggurat.data.streams.windows import StreamConfig
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs.execute import train_run
from ziggurat.runs.stream.run import stream_run
from ziggurat.training.hooks.hook import Hook
from ziggurat.training.judging import MadeStep
from ziggurat.training.trainer import Trainer

DAYS = 10
SCHEMA = zg.Schema(
    features=(
        *(zg.Categorical(name=f"id_{index}") for index in range(8)),
        *(zg.Dense(name=f"number_{index}") for index in range(4)),
    ),
    labels=(zg.Label(name="click"),),
    time="at",
)


class Seconds(Hook):
    """Adds up rows and seconds of all steps."""

    def __init__(self) -> None:
        self.rows = 0
        self.seconds = 0.0

    def on_step(self, trainer: Trainer, made: MadeStep) -> None:
        """Add a step."""
        del trainer
        self.rows += made.num_rows
        self.seconds += made.seconds

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.rows / self.seconds


def write_rows(path: Path, *, num_rows: int) -> None:
    """Write rows of ten days in order of time, whose click follows from two ids and a number."""
    rng = np.random.default_rng(0)
    columns: dict[str, np.ndarray] = {f"id_{index}": rng.zipf(1.2, num_rows) % 20_000 for index in range(8)}
    columns |= {f"number_{index}": rng.normal(size=num_rows) for index in range(4)}
    logit = columns["number_0"] + (columns["id_0"] % 2) - (columns["id_1"] % 3 == 0)
    columns["click"] = (rng.random(num_rows) < 1 / (1 + np.exp(-logit))).astype(np.int64)
    columns["at"] = 957_139_200 + np.arange(num_rows) * (DAYS * 86_400) // num_rows
    pl.DataFrame(columns).write_parquet(path)


def config_of(path: Path) -> RunConfig:
    """The run: one pass, no validation, one thread."""
    run = zg.table_run(zg.DLRMConfig(embedding_dim=16), SCHEMA)
    training = dataclasses.replace(run.training, epochs=1, unknown_ids=(), threads=1)
    split = SplitConfig(by=SplitBy.TIME, valid_fraction=0.0, test_fraction=0.0)
    data = dataclasses.replace(run.data, train=(str(path),), split=split)
    return dataclasses.replace(run, data=data, training=training)


def measured(path: Path, *, streams: bool) -> tuple[float, float]:
    """Samples a second inside of steps, and from files on."""
    hook = Seconds()
    shutil.rmtree(cache_folder() / "prepared", ignore_errors=True)  # compiled kernels stay
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        if streams:
            stream_run(config_of(path), folder=f"{folder}/run", stream=StreamConfig(by="day"), hooks=[hook])
        else:
            train_run(config_of(path), folder=f"{folder}/run", hooks=[hook])
        seconds = time.perf_counter() - begin
    return hook.rate, hook.rows / seconds


def run(*, quick: bool = False) -> Report:
    """Train both in turns."""
    report = Report(
        benchmark="stream",
        claim="A stream trains at 0.95 of the samples a second of a batch run over the same rows, or more.",
        command="ziggurat bench stream",
    )
    num_rows = 100_000 if quick else 1_000_000
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.parquet"
        write_rows(path, num_rows=num_rows)
        found: list[tuple[tuple[float, float], tuple[float, float]]] = []
        kept = os.environ.get("ZIGGURAT_CACHE")
        os.environ["ZIGGURAT_CACHE"] = f"{folder}/cache"
        measured(path, streams=False)  # what is compiled and paged in at the first start counts for neither
        for number in range(2 if quick else 7):
            # Which of both is first changes from round to round.
            order = (True, False) if number % 2 else (False, True)
            rates = {streams: measured(path, streams=streams) for streams in order}
            found.append((rates[True], rates[False]))
            say(f"round {number}: stream {rates[True]}, batch {rates[False]}")
        if kept is None:
            os.environ.pop("ZIGGURAT_CACHE", None)
        else:
            os.environ["ZIGGURAT_CACHE"] = kept
    for index, name in enumerate(("inside_of_steps", "from_files")):
        ours = [stream[index] for stream, _ in found]
        peer = [batch[index] for _, batch in found]
        case = by_round(name, ours=("ziggurat stream", ours), peer=("ziggurat train, one epoch", peer))
        report.cases.append(case)
    report.notes.append(
        f"{num_rows:,} rows, {DAYS} windows, DLRM with 8 tables of D = 16, batches of 2,048, one thread; from files "
        "the stream also scores every window before it is trained, the batch run scores nothing"
    )
    return report
