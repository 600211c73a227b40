"""Warm start: the cost of carrying ten million rows over by raw id, and the gain of a run that begins from another one.

    rows       10⁷ ids, tables of 16 columns: a vocabulary into another one that knows 90 % of its ids, into a growing
               table, and a hash into twice the rows; seconds and memory beside scripts of a few lines (pandas, polars).
               `warm_start_rows.py` says what is measured, each contestant in a process of its own
    quality    MovieLens-1M by time: a DLRM trained on the first 60 %, then the next 20 % come; a run over these begins
               cold, warm (weights and rows), or warm with what its optimizers kept, five seeds each. Validated on the
               next 10 % every few steps, tested once on the last 10 % by the weights that validation chose

Two epochs each; the parent's best weights are chosen by the last tenth of its time. Validation data are 20,000 rows,
drawn once.
Vocabularies are fitted anew to the new rows, so that rows have to be matched by raw id.

`ziggurat bench warm_start --json FILE`; finished runs are kept in `runs/warm_start` and not made again
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl

import ziggurat as zg
from benchmarks.harness import ROOT, chosen, say
from benchmarks.report import Report, by_round
from benchmarks.warm_start_rows import CASES, contestants_of
from ziggurat.data.datasets import fetch
from ziggurat.data.preprocess.splits import SplitBy, SplitConfig
from ziggurat.recipes.catalogue import recipe_named
from ziggurat.recipes.run_config import DatasetConfig, RunConfig
from ziggurat.recipes.warm_start import WarmStartConfig
from ziggurat.runs.execute import train_run
from ziggurat.studies.compare_statistics import paired_difference
from ziggurat.training.config import EarlyStopConfig
from ziggurat.training.evaluation.evaluate import Evaluation
from ziggurat.training.hooks.hook import Hook

PARTS = ("rows", "quality")
STARTS = ("cold", "warm", "warm_with_optimizers")
METRICS = ("ne", "auc", "log_loss", "calibration")
_SEED_OF_ROWS = 29


@dataclass(frozen=True, kw_only=True)
class Size:
    """Size of the experiment.

    Args:
        num_ids: of a table.
        rounds: of each contestant that carries rows over.
        seeds: runs of each start.
        epochs: of a parent, and of a run over the new rows.
        evaluate_every: steps between two validations of it.
        valid_rows: of validation data.
        rows_of_data: 0: all rows of MovieLens-1M.
    """

    num_ids: int = 10_000_000
    rounds: int = 1
    seeds: int = 5
    epochs: int = 2
    evaluate_every: int = 14
    valid_rows: int = 20_000
    rows_of_data: int = 0


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """`--parts`, `--rounds`, `--runs`."""
    parser = argparse.ArgumentParser(prog="ziggurat bench warm-start")
    parser.add_argument("--parts", default=",".join(PARTS), help="out of %(default)s (default: all)")
    parser.add_argument("--rounds", type=int, choices=range(1, 21), metavar="1…20", default=1, help="of carrying rows")
    parser.add_argument("--runs", type=Path, help="folder of finished runs (default: runs/warm_start)")
    return parser.parse_args(list(arguments))


def kept(path: Path, make: Callable[[], dict[str, object]]) -> dict:
    """What a file holds; where there is none, what is made now and kept there."""
    if not path.exists():
        found = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(found))
        partial.replace(path)
        say(f"{path.stem}: { {name: value for name, value in found.items() if name != 'curve'} }")
    return json.loads(path.read_text())


def carry(folder: Path, *arguments: str) -> dict[str, object]:
    """Run `warm_start_rows` in a process of its own, on one thread."""
    one_thread = {"OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "benchmarks.warm_start_rows", *arguments]
    result = subprocess.run(
        command, cwd=ROOT, env=os.environ | one_thread, stdout=subprocess.PIPE, text=True, check=True
    )
    shutil.rmtree(folder / "run", ignore_errors=True)
    return json.loads(result.stdout or "{}")


def add_rows(report: Report, size: Size, *, out: Path) -> None:
    """Measure seconds and memory of all contestants, in turns."""
    lines = ["| rows carried over | contestant | seconds of CPU | peak memory beyond the tables |"]
    lines.append("|---|---|---:|---:|")
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        folder = Path(scratch)
        found: dict[tuple[str, str], list[dict]] = {}
        for number in range(size.rounds):
            for case in CASES:
                for name in contestants_of(case):

                    def measure(case: str = case, name: str = name) -> dict[str, object]:
                        if not (folder / "theirs.parquet").exists():
                            carry(folder, "make", str(folder), str(size.num_ids))
                        return carry(folder, case, name, str(folder))

                    path = out / f"rows_{size.num_ids}_{case}_{name}_round_{number}.json"
                    found.setdefault((case, name), []).append(kept(path, measure))
    for (case, name), rounds in found.items():
        seconds = statistics.median(each["cpu_s"] for each in rounds)
        memory = max(each["peak_bytes"] for each in rounds)
        lines.append(f"| {case} | {name} | {seconds:.2f} | {memory / 2**20:,.0f} MiB |")
        if name == "ziggurat":
            continue
        for unit, key in (("CPU s", "cpu_s"), ("bytes", "peak_bytes")):
            report.cases.append(
                by_round(
                    f"rows_{case}_beside_{name}_{key}",
                    ours=("ziggurat train --warm-start", [each[key] for each in found[case, "ziggurat"]]),
                    peer=(name, [each[key] for each in rounds]),
                    unit=unit,
                )
            )
    report.tables.append("\n".join(lines))
    report.notes.append(f"rows: {size.num_ids:,} ids, 16 columns, one thread; ratios below 1 are in our favour")


class Curve(Hook):
    """Keeps log loss and NE of the validation data by step, step 0 included."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float, float]] = []

    def on_start(self, trainer: zg.Trainer) -> None:
        """Evaluate before the first step."""
        assert trainer.valid is not None, "it was named"
        self._add(trainer, trainer.evaluate(trainer.valid))

    def on_evaluate(self, trainer: zg.Trainer, evaluation: Evaluation, *, is_best: bool) -> None:
        """Add a point."""
        del is_best
        self._add(trainer, evaluation)

    def _add(self, trainer: zg.Trainer, evaluation: Evaluation) -> None:
        self.points.append((trainer.position.step, evaluation.metrics["log_loss"], evaluation.metrics["ne"]))


def write_times(folder: Path, size: Size) -> dict[str, str]:
    """Write the parts of MovieLens-1M in order of time; returns their files."""
    ratings = pl.read_parquet(fetch("movielens-1m")).sort("timestamp", maintain_order=True)
    if size.rows_of_data:
        ratings = ratings.gather_every(len(ratings) // size.rows_of_data)
    ends = {"old": 0.54, "old_valid": 0.6, "new": 0.8, "valid": 0.9, "test": 1.0}
    files: dict[str, str] = {}
    begin = 0
    for name, share in ends.items():
        end = round(share * len(ratings))
        part = ratings.slice(begin, end - begin)
        if name.endswith("valid"):
            part = part.sample(min(size.valid_rows, len(part)), seed=_SEED_OF_ROWS)
        part.write_parquet(folder / f"{name}.parquet")
        files[name] = str(folder / f"{name}.parquet")
        begin = end
    return files


def config_of(files: dict[str, str], size: Size, *, seed: int, is_new: bool) -> RunConfig:
    """The recipe over the old rows or the new ones, on one thread."""
    recipe = recipe_named("movielens_dlrm")
    training = replace(recipe.training, seed=seed, threads=1, loader=replace(recipe.training.loader, seed=seed))
    if is_new:
        stop = EarlyStopConfig(metric="log_loss")  # no end but the last epoch; the best weights are tested
        training = replace(training, epochs=size.epochs, evaluate_every=size.evaluate_every, early_stop=stop)
        names = ("new", "valid", "test")
    else:
        training = replace(training, epochs=size.epochs)
        names = ("old", "old_valid", "old_valid")
    train, valid, test = ((files[name],) for name in names)
    data = replace(recipe.data, train=train, valid=valid, test=test, split=SplitConfig(by=SplitBy.FILES))
    return replace(recipe, recipe="", dataset=DatasetConfig(), data=data, training=training)


def begun(files: dict[str, str], size: Size, *, seed: int, start: str, parent: Path, folder: Path) -> dict[str, object]:
    """Train over the new rows from one start; returns test metrics and the curve of validation."""
    config = config_of(files, size, seed=seed, is_new=True)
    if start != "cold":
        config = replace(
            config, warm_start=WarmStartConfig(run=str(parent), optimizers=start == "warm_with_optimizers")
        )
    curve = Curve()
    result = train_run(config, folder=folder, hooks=[curve])
    metrics = result.evaluations["test"].metrics
    return {**{name: metrics[name] for name in METRICS}, "best_step": result.fit.best_step, "curve": curve.points}


def steps_to(curve: Sequence[Sequence[float]], log_loss: float) -> float:
    """The first step whose validation log loss is as low; infinite where none is."""
    return next((step for step, found, _ in curve if found <= log_loss), math.inf)


def add_quality(report: Report, size: Size, *, out: Path) -> None:
    """Train from all starts by all seeds, and compare them in pairs."""
    found: dict[str, list[dict]] = {start: [] for start in STARTS}
    with tempfile.TemporaryDirectory() as scratch:
        files: dict[str, str] = {}
        for seed in range(size.seeds):
            parent = Path(scratch) / f"parent_{seed}"
            for start in STARTS:

                def measure(seed: int = seed, start: str = start, parent: Path = parent) -> dict[str, object]:
                    if not files:
                        files.update(write_times(Path(scratch), size))
                    if start != "cold" and not parent.exists():
                        train_run(config_of(files, size, seed=seed, is_new=False), folder=parent)
                    folder = Path(scratch) / f"{start}_{seed}"
                    return begun(files, size, seed=seed, start=start, parent=parent, folder=folder)

                found[start].append(kept(out / f"quality_{start}_seed_{seed}.json", measure))
    batch = recipe_named("movielens_dlrm").training.loader.batch_size
    report.tables.append(quality_table(found, batch_size=batch))
    for start in STARTS[1:]:
        for metric in METRICS:
            ours = [each[metric] for each in found[start]]
            peer = [each[metric] for each in found["cold"]]
            report.cases.append(by_round(f"{start}_{metric}", ours=(start, ours), peer=("cold", peer), unit=metric))
            if len(ours) > 1:
                difference = paired_difference(ours, peer)
                report.notes.append(
                    f"{start} beside cold, test {metric}: {difference.mean:+.5f} ± {difference.sd:.5f}, "
                    f"p = {difference.t_p:.5f} ({difference.num_pairs} pairs)"
                )
    report.extra["runs"] = found


def quality_table(found: dict[str, list[dict]], *, batch_size: int) -> str:
    """Markdown: test metrics, and the steps to the best validation log loss of the cold run by the same seed."""
    lines = [
        "| start | validation log loss at step 0 | best | steps to cold's best | rows | "
        + " | ".join(f"test {metric}" for metric in METRICS)
        + " |"
    ]
    lines.append("|---|" + "---:|" * (4 + len(METRICS)))
    best_of_cold = [min(point[1] for point in each["curve"]) for each in found["cold"]]
    for start, runs in found.items():
        steps = [steps_to(each["curve"], best) for each, best in zip(runs, best_of_cold, strict=True)]
        reached = [step for step in steps if step < math.inf]
        said = f"{statistics.median(steps):g} ({min(steps):g} to {max(steps):g})" if reached else "never"
        rows = f"{batch_size * statistics.median(steps):,.0f}" if reached else "–"
        cells = [
            _mean([each["curve"][0][1] for each in runs]),
            _mean([min(point[1] for point in each["curve"]) for each in runs]),
            said,
            rows,
            *(_mean([each[metric] for each in runs]) for metric in METRICS),
        ]
        lines.append(f"| {start} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _mean(values: Sequence[float]) -> str:
    deviation = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.4f}{deviation}"


def run(*, quick: bool = False, options: argparse.Namespace | None = None) -> Report:
    """Measure both parts."""
    options = options or parse_options([])
    parts = chosen(options.parts, known=PARTS, option="ziggurat bench warm-start --parts")
    size = Size(rounds=options.rounds)
    if quick:
        size = Size(num_ids=20_000, seeds=1, epochs=1, evaluate_every=2, valid_rows=500, rows_of_data=20_000)
    out = options.runs or ROOT / "runs" / ("warm_start_quick" if quick else "warm_start")
    out.mkdir(parents=True, exist_ok=True)
    report = Report(
        benchmark="warm_start",
        claim="Rows carried over by raw id beside scripts that do the same, and runs that begin warm beside cold ones.",
        command="ziggurat bench warm_start",
    )
    if "rows" in parts:
        add_rows(report, size, out=out)
    if "quality" in parts:
        add_quality(report, size, out=out)
    return report
