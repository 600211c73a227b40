"""Self-distillation (SMC-2) against labels alone: the cost of a step, a confirmatory study, and the first sample.

    cost        seconds of a step with second views over those of one without, in turns on the same batches: the fastest
                of each kind, and the median of ratios in pairs
    confirmed   Frappe and MovieLens-1M; settings, seeds and tests were fixed before: `self_distil_confirmed.py`
    sample      the study that came first, and from which α = 0.3 was chosen: 20,000 rows of Frappe

In the part `sample` a share of the training labels (0, 10, 20 %) is replaced by its opposite; test labels are as they
are. All learn with the same seeds (weights, order), the same number of epochs and no early stop: SMC-2 with α = 0.9, as
published, and with α = 0.3. With noise of share p the labels' own rate moves towards 1/2, so calibration is off by
construction in both.

`ziggurat bench self_distil --json FILE`, with Frappe in the cache (`ziggurat data fetch frappe --source FOLDER`)
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl
import torch

import ziggurat as zg
from benchmarks import self_distil_confirmed as confirmed
from benchmarks.harness import ROOT, chosen, say
from benchmarks.report import Case, Report, by_round
from ziggurat.cache import cache_folder
from ziggurat.data.encoded.loader import Loader
from ziggurat.data.preprocess.prepared import PreparedData
from ziggurat.data.preprocess.splits import SplitBy, SplitConfig
from ziggurat.ops.machine.turns import seconds_in_turns, time_on
from ziggurat.recipes.catalogue import recipe_named
from ziggurat.studies.compare_statistics import paired_difference
from ziggurat.training.config import SelfDistil, SelfDistilConfig, TrainingConfig
from ziggurat.training.step.train_step import TrainStep

PARTS = ("cost", "confirmed", "sample")
BATCH_SIZE = 512  # of a small sample, so that an epoch has 40 steps
NOISE = (0.0, 0.1, 0.2)
SMC2 = SelfDistilConfig(method=SelfDistil.SMC2)
OFF = SelfDistilConfig()
KINDS = {"off": OFF, "smc2": SMC2, "smc2_alpha_0.3": replace(SMC2, alpha=0.3)}
METRICS = ("auc", "log_loss", "calibration")


@dataclass(frozen=True, kw_only=True)
class Size:
    """Size of the experiment.

    Args:
        num_rows: training rows that are sampled.
        epochs: of each run.
        seeds: runs of each kind.
        rounds: pairs of steps that are timed.
    """

    num_rows: int
    epochs: int
    seeds: int
    rounds: int


def noisy_data(folder: Path, *, noise: float, num_rows: int) -> PreparedData:
    """Prepare a sample of Frappe with a share of its training labels turned round."""
    source = cache_folder() / "frappe"
    rng = np.random.default_rng(17)
    train = pl.read_parquet(source / "train.parquet").sample(num_rows, seed=5)
    turned = rng.random(num_rows) < noise
    labels = train["label"].to_numpy()
    train = train.with_columns(label=pl.Series(np.where(turned, 1 - labels, labels)))
    folder.mkdir()
    train.write_parquet(folder / "train.parquet")
    data = zg.DataConfig(
        train=(str(folder / "train.parquet"),),
        test=(str(source / "test.parquet"),),
        split=SplitConfig(by=SplitBy.FILES),
    )
    return zg.prepare(data, schema=recipe_named("frappe_dcn_v2").table_schema, folder=folder / "prepared")


def settings(size: Size, *, seed: int, self_distil: SelfDistilConfig) -> TrainingConfig:
    """The recipe's own settings, for so many epochs."""
    training = recipe_named("frappe_dcn_v2").training
    loader = replace(training.loader, seed=seed, batch_size=BATCH_SIZE)
    return replace(training, epochs=size.epochs, seed=seed, threads=1, self_distil=self_distil, loader=loader)


def trained(data: PreparedData, size: Size, *, seed: int, self_distil: SelfDistilConfig) -> dict[str, float]:
    """Test metrics after the last epoch."""
    model = zg.build_model(recipe_named("frappe_dcn_v2").model, data.inputs, seed=seed)
    config = settings(size, seed=seed, self_distil=self_distil)
    with tempfile.TemporaryDirectory() as folder:
        trainer = zg.Trainer(model, config=config, train=data.train, folder=folder)
        for _ in range(size.epochs):
            for _ in trainer.steps():
                pass
        assert data.test is not None, "it was named"
        return trainer.evaluate(data.test).metrics


def step_seconds(data: PreparedData, size: Size) -> list[list[float]]:
    """Seconds of steps with second views, and of steps without, in turns; batches are of the recipe's size."""
    loader = Loader(data.train, config=recipe_named("frappe_dcn_v2").training.loader)
    batches = [batch for batch, _ in zip(loader.batches(epoch=0), range(8), strict=False)]

    def timed(kind: SelfDistilConfig) -> Callable[[int], float]:
        model = zg.build_model(recipe_named("frappe_dcn_v2").model, data.inputs, seed=0)
        step = TrainStep(model, settings(size, seed=0, self_distil=kind))

        def once(turn: int) -> float:
            if step.self_distillation is not None:
                step.self_distillation.begin(step=turn + 1, total_steps=size.rounds + 4)
            begin = time_on(torch.device("cpu"))
            step(batches[turn % len(batches)])
            return time_on(torch.device("cpu")) - begin

        return once

    found = seconds_in_turns([timed(SMC2), timed(OFF)], turns=size.rounds + 2)
    return [seconds[2:] for seconds in found]  # the first three compile and page in


def beside_labels(name: str, ours: list[float], peer: list[float], *, unit: str) -> Case:
    """A case of numbers with second views and without, in pairs."""
    return by_round(name, ours=("--self-distil smc2", ours), peer=("labels alone", peer), unit=unit)


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """`--parts`, `--minutes`, `--rows`, `--runs`."""
    parser = argparse.ArgumentParser(prog="ziggurat bench self-distil")
    parser.add_argument("--parts", default="cost,confirmed", help=f"out of {', '.join(PARTS)} (default: %(default)s)")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="start no training of `confirmed` after so long"
    )
    parser.add_argument("--rows", type=int, default=confirmed.FRAPPE_ROWS, help="training rows of Frappe; 0: all")
    parser.add_argument("--runs", type=Path, help="folder of finished runs (default: runs/self_distil)")
    return parser.parse_args(list(arguments))


def run(*, quick: bool = False, options: argparse.Namespace | None = None) -> Report:
    """Measure the parts that were asked for."""
    options = options or parse_options([])
    parts = chosen(options.parts, known=PARTS, option="ziggurat bench self-distil --parts")
    size = Size(num_rows=20_000, epochs=4, seeds=3, rounds=60)
    if quick:
        size = Size(num_rows=5_000, epochs=1, seeds=2, rounds=10)
    report = Report(
        benchmark="self_distil",
        claim="SMC-2 beside labels alone: seconds of a step, and test metrics over seeds.",
        command=f"ziggurat bench self_distil --parts {','.join(parts)}",
    )
    with tempfile.TemporaryDirectory() as folder:
        if "cost" in parts:
            add_cost(report, size, folder=Path(folder))
        if "sample" in parts:
            add_sample(report, size, folder=Path(folder))
    if "confirmed" in parts:
        out = options.runs or ROOT / "runs" / ("self_distil_quick" if quick else "self_distil")
        until = time.time() + 60 * options.minutes
        confirmed.add_to(report, out=out, until=until, frappe_rows=options.rows, quick=quick)
    return report


def add_cost(report: Report, size: Size, *, folder: Path) -> None:
    """Time steps, in batches of the recipe's size."""
    data = noisy_data(folder / "cost", noise=0.0, num_rows=size.num_rows)
    with_views, without = step_seconds(data, size)
    report.cases.append(beside_labels("cost_of_a_step", with_views, without, unit="s"))
    fastest = min(with_views) / min(without)
    report.figures.append({"name": "cost_of_the_fastest_step", "ratio": fastest, "goal": 1.4, "unit": "ratio"})
    report.notes.append(
        f"a step with second views takes {report.cases[-1].ratio:.3f} times one without (median of {len(without)} "
        f"pairs in turns), the fastest one {fastest:.3f} times the fastest; goal 1.4 or less; seconds of its thread"
    )
    say(report.notes[-1])


def add_sample(report: Report, size: Size, *, folder: Path) -> None:
    """Train pairs of runs on a sample, at every share of noise."""
    amount = f"{size.num_rows:,} rows of Frappe, {size.epochs} epochs, {size.seeds} seeds"
    report.notes.append(f"sample: DCNv2 in batches of {BATCH_SIZE:,}, {amount}")
    for noise in NOISE:
        data = noisy_data(folder / f"noise_{noise}", noise=noise, num_rows=size.num_rows)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in KINDS}
        for seed in range(size.seeds):
            for name, kind in KINDS.items():
                found[name].append(trained(data, size, seed=seed, self_distil=kind))
            said = ", ".join(f"{name} {runs[-1]}" for name, runs in found.items())
            say(f"noise {noise:g}, seed {seed}: {said}")
        for name in list(KINDS)[1:]:
            for metric in METRICS:
                ours = [each[metric] for each in found[name]]
                peer = [each[metric] for each in found["off"]]
                case = f"{name}_noise_{round(100 * noise)}_{metric}"
                report.cases.append(beside_labels(case, ours, peer, unit=metric))
                report.notes.append(f"{case}: {_difference_line(ours, peer)}")
                say(report.notes[-1])


def _difference_line(ours: list[float], peer: list[float]) -> str:
    difference = paired_difference(ours, peer)
    return (
        f"{statistics.mean(ours):.5f} ± {statistics.stdev(ours):.5f} against {statistics.mean(peer):.5f} ± "
        f"{statistics.stdev(peer):.5f}, "
        f"difference {difference.mean:+.5f} ± {difference.sd:.5f}, p = {difference.t_p:.3f}"
    )
