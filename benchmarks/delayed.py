"""Labels that come later: ways to train on them, compared on streams whose truth is known, by their scores of new rows.

Two worlds, one pass each, 16 days of rows. Every day is scored before it is trained, by the labels that its rows have
in the end. The first 5 days are the history. Positives take up to 4 days.

    drift     the drift generator: preferences move, and each positive takes as long as another
    features  conversions of our own: the chance and the delay both depend on ids and a number; the chance drifts

    oracle         each day by its true labels at once: what nobody can have
    pretrained     the history by its true labels, and nothing after it
    wait           a row when its label is known: positives sooner than negatives
    wait_all       a row when a positive cannot come any more
    assumed        a row once, by what was observed of it
    duplicates     the same, and again when a positive comes, without weights
    fnw, fnc       nothing is observed; weights, or the likelihood of the biased labels
    es_dfm, defuse as duplicates, with weights

    excess         log loss over that of the true probabilities
    auc, calibration (mean score / mean label), means over days 9 to 15, pairs of runs by seed; these days are read once

The learning rate (of the oracle), the observation and the gradient into embeddings (of es_dfm) are chosen by log loss
on days 5 to 8 of another seed, and are the same for all others.

`ziggurat bench delayed`
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import numpy as np
import polars as pl

import ziggurat as zg
from benchmarks.harness import say
from benchmarks.report import Report, by_round
from ziggurat.data.streams.label_delay import DelayConfig, LabelDelay
from ziggurat.data.streams.windows import StreamConfig
from ziggurat.precision import PLAIN
from ziggurat.runs.stream.run import stream_run
from ziggurat.studies.compare_statistics import paired_difference
from ziggurat.training.delayed_feedback import DelayedConfig
from ziggurat.training.delayed_losses import DelayedLoss

DAY_S = 86_400
BEGIN_S = 1_767_225_600  # 2026-01-01
HISTORY_DAYS = 5
FIRST_READ_DAY = 9
ATTRIBUTION_S = 4 * DAY_S
CHOOSING_SEED = 100
METRICS = ("excess", "auc", "calibration")
METHODS = (
    "oracle",
    "pretrained",
    "wait",
    "wait_all",
    "assumed",
    "duplicates",
    "fnw",
    "fnc",
    "es_dfm",
    "defuse",
)


@dataclass(frozen=True, kw_only=True)
class Size:
    """Size of the experiment.

    Args:
        days: of the streams.
        day_rows: rows of a day.
        seeds: runs of each way in each world.
    """

    days: int
    day_rows: int
    seeds: int


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Settings that days 5 to 8 of another seed have chosen.

    Args:
        learning_rate: of the dense network; that of tables is ten times as high.
        observe_s: seconds of observation.
        gradient_scaling: of the gradient of the network that learns of delays.
    """

    learning_rate: float = 0.01
    observe_s: float = DAY_S / 4
    gradient_scaling: float = 1.0


@dataclass(frozen=True, kw_only=True)
class World:
    """Rows of one seed, and what is known of them.

    Args:
        path: of the file.
        schema: of its rows.
        entropy: log loss of the true probabilities, by day.
        late: share of positives that come after 6 hours.
    """

    path: Path
    schema: zg.Schema
    entropy: dict[str, float]
    late: float


def entropy_of(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """Log loss of the true probabilities."""
    return float(-np.mean(np.where(labels == 1, np.log(probabilities), np.log1p(-probabilities))))


def drift_world(folder: Path, *, size: Size, seed: int) -> World:
    """Rows of the drift generator, whose delays do not depend on features."""
    teacher = zg.DriftingTeacher(
        zg.DriftConfig(
            teacher=replace(zg.DriftConfig().teacher, seed=seed),
            window_rows=size.day_rows,
            preference_rate=0.05,
            delay_s=1.2 * DAY_S,
            attribution_s=ATTRIBUTION_S,
        )
    )
    frames = [teacher.frame(day) for day in range(size.days)]
    entropy = {}
    for day in range(size.days):
        labels = frames[day][teacher.labels[-1]].to_numpy()
        entropy[teacher.name(day)] = entropy_of(teacher.probabilities(day)[-1], labels)
    frame = pl.concat(frames)
    path = folder / f"drift-{seed}.parquet"
    frame.write_parquet(path)
    return World(path=path, schema=teacher.schema(), entropy=entropy, late=_late(frame, label=teacher.labels[-1]))


def features_world(folder: Path, *, size: Size, seed: int) -> World:
    """Conversions whose chance and delay depend on the same features, with weights of their own."""
    rng = np.random.default_rng(seed)
    sizes = {"campaign": 40, "product": 60, "segment": 20}
    chance = {name: rng.normal(0.0, 0.7, count) for name, count in sizes.items()}
    speed = {name: rng.normal(0.0, 0.6, count) for name, count in sizes.items()}
    frames: list[pl.DataFrame] = []
    entropy: dict[str, float] = {}
    for day in range(size.days):
        if day:
            chance = {
                name: math.sqrt(0.9) * each + math.sqrt(0.1) * rng.normal(0.0, 0.7, len(each))
                for name, each in chance.items()
            }
        ids = {name: rng.zipf(1.3, size.day_rows) % count for name, count in sizes.items()}
        price = rng.normal(size=size.day_rows)
        logits = -1.6 - 0.5 * price + sum(chance[name][ids[name]] for name in sizes)
        probabilities = 1.0 / (1.0 + np.exp(-logits))
        labels = (rng.random(size.day_rows) < probabilities).astype(np.int64)
        # From hours to days: dear products are bought later, too.
        mean_s = DAY_S * np.exp(0.5 * price + sum(speed[name][ids[name]] for name in sizes))
        uniform = rng.random(size.day_rows) * -np.expm1(-ATTRIBUTION_S / mean_s)
        delays = np.minimum(-mean_s * np.log1p(-uniform), ATTRIBUTION_S).astype(np.int64)
        times = BEGIN_S + day * DAY_S + np.sort(rng.integers(0, DAY_S, size.day_rows))
        frames.append(
            pl.DataFrame(
                {name: [f"{name[0]}{each}" for each in ids[name]] for name in sizes}
                | {"price": price, "label": labels, "time": times}
                | {"label_time": times + np.where(labels == 1, delays, ATTRIBUTION_S)}
            )
        )
        entropy[str(np.datetime64(BEGIN_S + day * DAY_S, "s").astype("datetime64[D]"))] = entropy_of(
            probabilities, labels
        )
    frame = pl.concat(frames)
    path = folder / f"features-{seed}.parquet"
    frame.write_parquet(path)
    schema = zg.Schema(
        features=(*(zg.Categorical(name=name) for name in sizes), zg.Dense(name="price")),
        labels=(zg.Label(name="label"),),
        time="time",
    )
    return World(path=path, schema=schema, entropy=entropy, late=_late(frame, label="label"))


WORLDS = {"drift": drift_world, "features": features_world}


def _late(frame: pl.DataFrame, *, label: str) -> float:
    positives = frame.filter(pl.col(label) == 1)
    return float((positives["label_time"] - positives["time"] > DAY_S // 4).mean())  # type: ignore[arg-type]


def delay_of(method: str, choice: Choice) -> DelayConfig:
    """Return when rows are trained, and as what."""
    column = "label_time"
    match method:
        case "oracle" | "pretrained":
            return DelayConfig()
        case "wait":
            return DelayConfig(policy=LabelDelay.WAIT, column=column)
        case "wait_all":
            return DelayConfig(policy=LabelDelay.WAIT, column=column, attribution_s=float(ATTRIBUTION_S))
        case "assumed":
            return DelayConfig(policy=LabelDelay.ASSUME_NEGATIVE, column=column, observe_s=choice.observe_s)
        case "fnw" | "fnc":
            return DelayConfig(policy=LabelDelay.CORRECT, column=column)
        case _:
            return DelayConfig(policy=LabelDelay.CORRECT, column=column, observe_s=choice.observe_s)


def streamed(world: World, method: str, *, choice: Choice, seed: int, days: slice) -> dict[str, float]:
    """Stream a world, and return the means of metrics over some of its days."""
    model = zg.DLRMConfig(
        embedding_dim=8, bottom=zg.MLPConfig(hidden_dims=(16,)), top=zg.MLPConfig(hidden_dims=(32, 16))
    )
    run = zg.table_run(model, world.schema)
    is_loss = method in {loss.name for loss in DelayedLoss}
    training = replace(
        run.training,
        seed=seed,
        threads=1,
        precision=PLAIN,
        learning_rate=choice.learning_rate,
        table_learning_rate=10 * choice.learning_rate,
        loader=replace(run.training.loader, batch_size=256, seed=seed),
    )
    config = replace(
        run,
        data=replace(run.data, train=(str(world.path),)),
        training=training,
        delayed=DelayedConfig(
            loss=DelayedLoss.named(method) if is_loss else DelayedLoss.NONE, gradient_scaling=choice.gradient_scaling
        ),
    )
    begin = sorted(world.entropy)[HISTORY_DAYS]
    stream = StreamConfig(by="day", begin=begin, frozen=method == "pretrained", delay=delay_of(method, choice))
    wanted = sorted(world.entropy)[days]
    # Pictures of the report would take a third of the time, and nobody looks at them.
    without_report = mock.patch("ziggurat.runs.stream.run.write_report", lambda folder: folder)
    with tempfile.TemporaryDirectory() as folder, without_report:
        result = stream_run(config, folder=Path(folder) / "run", stream=stream)
    found: dict[str, list[float]] = {name: [] for name in METRICS}
    for window in result.windows:
        if window.name in wanted:
            metrics = {name: math.nan if value is None else value for name, value in window.metrics.items()}
            found["excess"].append(metrics["log_loss"] - world.entropy[window.name])
            found["auc"].append(metrics["auc"])
            found["calibration"].append(metrics["calibration"])
    return {name: statistics.mean(values) for name, values in found.items()}


def chosen(world: World) -> tuple[Choice, list[str]]:
    """Choose settings by days 5 to 8 of a seed that is not read otherwise; say by what."""
    early = slice(HISTORY_DAYS, FIRST_READ_DAY)
    lines: list[str] = []

    def best_of(method: str, choices: Sequence[Choice]) -> Choice:
        excess = [streamed(world, method, choice=each, seed=CHOOSING_SEED, days=early)["excess"] for each in choices]
        for each, value in zip(choices, excess, strict=True):
            say(f"  {method}, {each}: {value:.5f}")
            lines.append(f"{method}, {each}: {value:.5f}")
        return choices[excess.index(min(excess))]

    choice = best_of("oracle", [Choice(learning_rate=rate) for rate in (0.003, 0.01, 0.03, 0.1)])
    others = [
        replace(choice, observe_s=observe_s, gradient_scaling=scaling)
        for observe_s in (DAY_S / 24, DAY_S / 4)
        for scaling in (0.0, 1.0)
    ]
    return best_of("es_dfm", others), lines


def table_of(name: str, found: dict[str, dict[str, list[float]]]) -> str:
    """A Markdown table of one world: means and deviations over seeds."""
    lines = [f"**{name}**, means over days 9 to 15 and seeds, ± deviation over seeds:", ""]
    lines += ["| | excess log loss | AUC | calibration |", "|---|---:|---:|---:|"]
    for method, metrics in found.items():
        cells = [f"{statistics.mean(values):.4f} ± {_spread(values):.4f}" for values in metrics.values()]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def run(*, quick: bool = False) -> Report:
    """Choose settings in both worlds, and stream all seeds of both in every way."""
    size = Size(days=16, day_rows=4_000, seeds=5)
    if quick:
        size = Size(days=11, day_rows=300, seeds=2)
    report = Report(
        benchmark="delayed",
        claim=f"Ways to train on labels that come up to 4 days late: {size.days} days of {size.day_rows:,} rows, "
        f"{size.seeds} seeds; excess log loss over the true probabilities, AUC and calibration of the next day.",
        command="ziggurat bench delayed",
    )
    with tempfile.TemporaryDirectory() as folder:
        for name, make in WORLDS.items():
            choice, lines = chosen(make(Path(folder), size=size, seed=CHOOSING_SEED))
            report.notes += [f"{name}, chosen by days 5 to 8 of another seed: {choice}", *lines]
            say(f"{name}: {choice}")
            found: dict[str, dict[str, list[float]]] = {
                method: {metric: [] for metric in METRICS} for method in METHODS
            }
            for seed in range(size.seeds):
                world = make(Path(folder), size=size, seed=seed)
                say(f"{name}, seed {seed}: {world.late:.0%} of positives come after 6 hours")
                for method in METHODS:
                    metrics = streamed(world, method, choice=choice, seed=seed, days=slice(FIRST_READ_DAY, None))
                    for metric, value in metrics.items():
                        found[method][metric].append(value)
                    say(f"  {method:10} " + "  ".join(f"{metric} {value:.4f}" for metric, value in metrics.items()))
            report.tables.append(table_of(name, found))
            _add_cases(report, name, found)
    return report


def _add_cases(report: Report, name: str, found: dict[str, dict[str, list[float]]]) -> None:
    """Add each way beside duplicates without weights, in pairs by seed."""
    for method in METHODS:
        if method == "duplicates":
            continue
        for metric in ("excess", "auc"):
            ours = found[method][metric]
            peer = found["duplicates"][metric]
            case = f"{name}_{method}_{metric}"
            report.cases.append(by_round(case, ours=(method, ours), peer=("duplicates", peer), unit=metric))
            difference = paired_difference(ours, peer)
            report.notes.append(f"{case}: {difference.mean:+.5f} ± {difference.sd:.5f}, p = {difference.t_p:.4f}")
