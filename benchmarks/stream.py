"""A stream against training in one batch run on the same rows, and against online regression by other libraries.

Stream and batch run train the same rows once, with the same model, batch size and threads, in turns. A stream reads its
rows window after window, starts its loader anew in each, scores each window before it is trained, and saves after it.

    inside of steps     rows / seconds from asking for a batch to the end of its step, over all steps
    from files          rows / seconds of the whole run: reading, fitting, encoding, training; the stream also scores
    without scoring     the same without the seconds in which the stream scores
    evaluating too      the same, beside a batch run that evaluates the rows of all windows but the first

Beside river's and Vowpal Wabbit's logistic regression: the same rows and windows, each a test by what was learned
before it; ours is `logistic_regression` as the like-for-like model, and the model of the recipe. Rows a second count
from files on for us, and from rows in memory for them.

`ziggurat bench stream`
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

import ziggurat as zg
from benchmarks import stream_publish
from benchmarks.harness import PEERS, ROOT, say
from benchmarks.report import Report, by_round
from ziggurat.cache import cache_folder
from ziggurat.data.datasets.movielens import fetch_movielens, movielens_schema
from ziggurat.data.encoded.loader import is_dataset
from ziggurat.data.preprocess.splits import SplitBy, SplitConfig
from ziggurat.data.streams.windows import StreamConfig
from ziggurat.recipes.catalogue import recipe_named
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs.execute import train_run
from ziggurat.runs.stream.run import stream_run
from ziggurat.training.evaluation.evaluate import ordered_batches
from ziggurat.training.hooks.hook import Hook
from ziggurat.training.judging import MadeStep
from ziggurat.training.trainer import Trainer

DAYS = 10
GOAL = 0.95
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


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Samples a second of one run.

    Args:
        in_steps: inside of steps.
        from_files: of the whole run.
        without_scoring: without the seconds of scoring or evaluating.
    """

    in_steps: float
    from_files: float
    without_scoring: float


class EvaluatesAtEnd(Hook):
    """Evaluates the training rows behind the first window when training is over: what a stream scores."""

    def __init__(self, *, first_rows: int) -> None:
        self.first_rows = first_rows
        self.seconds = 0.0

    def on_end(self, trainer: Trainer, result: object) -> None:
        """Evaluate."""
        del result
        begin = time.perf_counter()
        batch_size = 4 * trainer.config.loader.batch_size
        dataset = trainer._train
        assert is_dataset(dataset)
        batches = ordered_batches(dataset, batch_size=batch_size).batches(
            epoch=0, start_step=round(self.first_rows / batch_size)
        )
        trainer.evaluate(batches)
        self.seconds = time.perf_counter() - begin


def measured(path: Path, *, streams: bool, num_rows: int) -> Rates:
    """Stream, or train in one batch run that evaluates at its end."""
    hook = Seconds()
    evaluates = EvaluatesAtEnd(first_rows=num_rows // DAYS)
    shutil.rmtree(cache_folder() / "prepared", ignore_errors=True)  # compiled kernels stay
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        if streams:
            result = stream_run(config_of(path), folder=f"{folder}/run", stream=StreamConfig(by="day"), hooks=[hook])
            scoring = sum(window.timing["score_s"] for window in result.windows)
        else:
            train_run(config_of(path), folder=f"{folder}/run", hooks=[hook, evaluates])
            scoring = evaluates.seconds
        seconds = time.perf_counter() - begin
    return Rates(in_steps=hook.rate, from_files=hook.rows / seconds, without_scoring=hook.rows / (seconds - scoring))


def add_throughput(report: Report, folder: Path, *, num_rows: int, rounds: int) -> None:
    """Train both in turns."""
    path = folder / "rows.parquet"
    write_rows(path, num_rows=num_rows)
    found: list[tuple[Rates, Rates]] = []
    measured(path, streams=False, num_rows=num_rows)  # what is compiled and paged in at the first start is of neither
    for number in range(rounds):
        # Which of both is first changes from round to round.
        order = (True, False) if number % 2 else (False, True)
        rates = {streams: measured(path, streams=streams, num_rows=num_rows) for streams in order}
        found.append((rates[True], rates[False]))
        say(f"round {number}: stream {rates[True]}, batch {rates[False]}")
    stream = "ziggurat stream"
    batch = "ziggurat train, one epoch"
    streamed = [ours for ours, _ in found]
    trained = [peer for _, peer in found]
    report.cases += [
        by_round(
            "inside_of_steps",
            ours=(stream, [each.in_steps for each in streamed]),
            peer=(batch, [each.in_steps for each in trained]),
            goal=GOAL,
        ),
        by_round(
            "from_files_without_scoring",
            ours=(stream, [each.without_scoring for each in streamed]),
            peer=(batch, [each.without_scoring for each in trained]),
            goal=GOAL,
        ),
        by_round(
            "from_files_evaluating_too",
            ours=(stream, [each.from_files for each in streamed]),
            peer=(f"{batch}, and an evaluation", [each.from_files for each in trained]),
            goal=GOAL,
        ),
        by_round(
            "from_files",
            ours=(stream, [each.from_files for each in streamed]),
            peer=(batch, [each.without_scoring for each in trained]),
        ),
    ]
    report.notes.append(
        f"throughput: {num_rows:,} rows, {DAYS} windows, DLRM with 8 tables of D = 16, batches of 2,048, one thread, "
        f"{rounds} rounds in turns; scoring and evaluating compute in FP32, steps in BF16 where the machine has it"
    )


def peer_stream(name: str, path: Path, columns: dict[str, object]) -> dict[str, object] | str:
    """Stream by a peer in a process of its own; why not, where it is absent."""
    python = ROOT / PEERS / "bin/python"
    command = [str(python if python.exists() else sys.executable), "-m", "benchmarks.online_peers"]
    done = subprocess.run(
        [*command, name, str(path), json.dumps(columns)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit status {done.returncode}"
        return f"{name}: {last}"
    return json.loads(done.stdout.strip().splitlines()[-1])


def our_stream(config: RunConfig, *, stream: StreamConfig) -> dict[str, object]:
    """Stream by one of our models."""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        result = stream_run(config, folder=f"{folder}/run", stream=stream)
        seconds = time.perf_counter() - begin
    rows = sum(window.rows for window in result.windows)
    return {"rows": rows, "seconds": seconds, "ne": {each.name: each.metrics["ne"] for each in result.windows[1:]}}


def add_peers(
    report: Report,
    name: str,
    path: Path,
    *,
    columns: dict[str, object],
    models: dict[str, RunConfig],
    stream: StreamConfig,
) -> None:
    """Stream one data set by our models and by the peers; a table of the NE of windows, and rates."""
    found = {label: our_stream(config, stream=stream) for label, config in models.items()}
    frozen = {
        f"{label}, frozen after the history": our_stream(config, stream=dataclasses.replace(stream, frozen=True))
        for label, config in list(models.items())[:1]
    }
    for peer in ("river", "vowpalwabbit"):
        result = peer_stream(peer, path, columns)
        if isinstance(result, str):
            report.skipped.append(f"{name}, {result}")
        else:
            found[f"{peer}, logistic regression"] = result
    every = found | frozen
    windows = list(dict.fromkeys(window for each in found.values() for window in each["ne"]))  # type: ignore[attr-defined]
    lines = [f"NE of the windows of {name}, each scored before it is trained:", ""]
    lines += ["| window | " + " | ".join(every) + " |", "|---|" + "---:|" * len(every)]
    for window in windows:
        cells = [each["ne"].get(window) for each in every.values()]  # type: ignore[attr-defined]
        lines.append(f"| {window} | " + " | ".join("–" if cell is None else f"{cell:.4f}" for cell in cells) + " |")
    rates = {label: each["rows"] / each["seconds"] for label, each in found.items()}  # type: ignore[operator]
    lines += ["| rows/s | " + " | ".join(f"{rates[label]:,.0f}" if label in rates else "" for label in every) + " |"]
    report.tables.append("\n".join(lines))
    ours = next(iter(found.values()))["ne"]
    frozen_ne = next(iter(frozen.values()))["ne"]
    later = windows[max(1, len(windows) // 10) :]
    wins = sum(ours[window] < frozen_ne[window] for window in later)  # type: ignore[index]
    report.figures.append(
        {
            "name": f"{name}_windows_better_than_frozen",
            "of": len(later),
            "windows": wins,
            "verdict": "met" if wins == len(later) else "missed",
        }
    )
    report.extra[name] = every
    regression = "logistic regression"
    for peer in ("river", "vowpalwabbit"):
        label = f"{peer}, logistic regression"
        if label in rates:
            case = by_round(
                f"{name}_rows_per_s_beside_{peer}",
                ours=(f"ziggurat stream, {regression}", [rates[regression]]),
                peer=(label, [rates[label]]),
            )
            report.cases.append(case)


def add_drifting(report: Report, folder: Path, *, num_rows: int) -> None:
    """Stream the drift generator's rows."""
    config = zg.DriftConfig(window_rows=num_rows // DAYS, preference_rate=0.05, lifetime=8.0)
    teacher = zg.DriftingTeacher(config)
    frame = pl.concat([teacher.frame(number) for number in range(DAYS)])
    path = folder / "drift.parquet"
    frame.write_parquet(path)
    schema = teacher.schema()
    columns = {
        "ids": [each.name for each in schema.features if isinstance(each, zg.Categorical)],
        "numbers": [each.name for each in schema.features if isinstance(each, zg.Dense)],
        "label": schema.labels[0].name,
        "time": schema.time,
        "by": "day",
    }
    run = zg.table_run(zg.DLRMConfig(embedding_dim=16), schema)
    models = {"DLRM": _one_thread(run, path)}
    models["logistic regression"] = _one_thread(_fast(zg.table_run(zg.LogisticRegressionConfig(), schema)), path)
    stream = StreamConfig(by="day", growing=20_000)
    add_peers(report, "drift", path, columns=columns, models=models, stream=stream)


def add_movielens(report: Report) -> None:
    """Stream MovieLens-1M by month."""
    path = fetch_movielens()
    schema = movielens_schema()
    columns = {
        "ids": [each.name for each in schema.features if isinstance(each, zg.Categorical)],
        "lists": ["genres"],
        "label": "rating",
        "positive_from": 4.0,
        "time": "timestamp",
        "by": "month",
        "begin": "2000-06",
    }
    models = {"movielens_dlrm": recipe_named("movielens_dlrm"), "logistic regression": _movielens_regression()}
    stream = StreamConfig(by="month", begin="2000-06", growing=10_000)
    models = {name: _one_thread(run, path) for name, run in models.items()}
    add_peers(report, "movielens", path, columns=columns, models=models, stream=stream)


def _movielens_regression() -> RunConfig:
    return _fast(dataclasses.replace(recipe_named("movielens_dlrm"), model=zg.LogisticRegressionConfig()))


def _fast(run: RunConfig) -> RunConfig:
    """The run with the rates by which a sum of weights learns in one pass; those of recipes are for networks."""
    training = dataclasses.replace(run.training, learning_rate=0.01, table_learning_rate=0.2)
    return dataclasses.replace(run, training=training)


def _one_thread(run: RunConfig, path: Path) -> RunConfig:
    training = dataclasses.replace(run.training, epochs=1, unknown_ids=(), threads=1)
    return dataclasses.replace(run, data=dataclasses.replace(run.data, train=(str(path),)), training=training)


def run(*, quick: bool = False) -> Report:
    """Measure throughput, then the quality beside other libraries."""
    report = Report(
        benchmark="stream",
        claim="A stream trains at 0.95 of the samples a second of a batch run over the same rows, or more, and has a "
        "lower NE than a frozen model and than online logistic regression of river and Vowpal Wabbit.",
        command="ziggurat bench stream",
    )
    kept = os.environ.get("ZIGGURAT_CACHE")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            os.environ["ZIGGURAT_CACHE"] = f"{folder}/cache"
            add_throughput(report, folder, num_rows=100_000 if quick else 1_000_000, rounds=2 if quick else 7)
            add_drifting(report, folder, num_rows=20_000 if quick else 200_000)
        finally:
            if kept is None:
                os.environ.pop("ZIGGURAT_CACHE", None)
            else:
                os.environ["ZIGGURAT_CACHE"] = kept
    if not quick:
        add_movielens(report)
    stream_publish.add_cases(report, quick=quick)
    return report
