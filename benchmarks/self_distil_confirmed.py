"""Does SMC-2 with α = 0.3 gain on Frappe and MovieLens-1M? Settings, seeds and tests were fixed before the runs.

A first study (`self_distil.py`, part `sample`) chose α = 0.3 after it had seen its results, so they are no evidence
for it. What follows was written down before the first run of this one, and is not changed by what comes out:

    settings      SMC-2, α = 0.3, T = 1, one pooled field in ten left out, α rises over all epochs of the recipe
    data          60,000 of Frappe's training rows (`frappe_dcn_v2`) and all of MovieLens-1M by time (`movielens_dlrm`),
                  with the recipes' sizes, batches, epochs and early stop on validation AUC; all test rows, once, with
                  the weights it chose. `--rows 0` takes all rows of Frappe; the machine at hand had no time for them
    noise         0 and 10 % of the labels of training rows turned round; those of validation and test never
    seeds         101 to 105, pairs of runs with the same first weights and order of rows
    tests         Student's paired t-test of SMC-2 against labels alone: test AUC, log loss and calibration error (ECE)
                  on both sets at both shares of noise, 12 tests, by Holm at 5 % for all of them together; a test whose
                  runs are not all made counts as one with p = 1
    gain          AUC higher, or log loss lower, with Holm's p < 0.05
    controls      what else could be the cause, on Frappe without noise, by the same seeds and with the same weight a_t
                  at every step; each beside labels alone, and SMC-2 beside each (24 tests, a family of its own):
                      no_field_dropout   second views see all fields
                      smoothing          (1 − a_t)·y + a_t/2 for a label y: label smoothing
                      smoothing_to_rate  (1 − a_t)·y + a_t·r, r the share of positives among training labels
                      labels_less        labels alone, their loss times 1 − a_t: nothing but the smaller gradient

Finished runs are kept, one JSON file each, so the study can be stopped and taken up.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl
import torch

import ziggurat as zg
from benchmarks.harness import say
from benchmarks.report import Report, by_round
from ziggurat.data.datasets import fetch
from ziggurat.data.preprocess.prepared import PreparedData
from ziggurat.data.preprocess.splits import SplitBy, SplitConfig
from ziggurat.features.batch import Batch
from ziggurat.models.contract.losses import loss_sums
from ziggurat.recipes.catalogue import recipe_named
from ziggurat.recipes.run_config import RunConfig
from ziggurat.studies.compare_statistics import holm, paired_difference
from ziggurat.training.config import SelfDistil, SelfDistilConfig
from ziggurat.training.step.self_distillation import weight_of_views

SEEDS = (101, 102, 103, 104, 105)
RECIPES = {"frappe": "frappe_dcn_v2", "movielens": "movielens_dlrm"}
NOISE = (0.0, 0.1)
FRAPPE_ROWS = 60_000
METRICS = ("auc", "log_loss", "ece")
SMC2 = SelfDistilConfig(method=SelfDistil.SMC2, alpha=0.3)
OFF = "labels"
ON = "smc2"
CONTROLS = ("no_field_dropout", "smoothing", "smoothing_to_rate", "labels_less")
_SEED_OF_NOISE = 17
_SEED_OF_ROWS = 23


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of the study.

    Args:
        data: a key of `RECIPES`.
        noise: share of training labels that are turned round.
        kind: `labels`, `smc2` or a control.
        seed: of weights and order.
    """

    data: str
    noise: float
    kind: str
    seed: int

    @property
    def name(self) -> str:
        """Name of its file."""
        return f"{self.data}_noise_{round(100 * self.noise)}_{self.kind}_seed_{self.seed}"


class LabelsWithLess:
    """A loss in which labels have the weight 1 − a_t, as beside second views, and nothing or a constant has the rest.

    Args:
        towards: the constant c of the target (1 − a_t)·y + a_t·c; None: nothing takes the place of second views.
        inputs: of the model.
    """

    def __init__(self, towards: float | None, *, inputs: zg.InputSpec) -> None:
        self.towards = towards
        self.inputs = inputs
        self.trainer: zg.Trainer | None = None

    def __call__(self, outputs: zg.Outputs, batch: Batch) -> zg.LossSums:
        """Return the loss of a batch."""
        assert self.trainer is not None
        weight = weight_of_views(SMC2, step=self.trainer.position.step, total_steps=self.trainer.total_steps)
        labels_BL = batch.labels
        if self.towards is not None:
            # Cross-entropy is linear in its target.
            labels_BL = (1.0 - weight) * labels_BL + weight * self.towards
        sums = loss_sums(outputs.logits, labels_BL, batch.weights, inputs=self.inputs)
        return sums if self.towards is not None else replace(sums, total=(1.0 - weight) * sums.total)


def cells(*, quick: bool = False) -> list[Cell]:
    """The runs in the order in which they are made: whole pairs, the cheaper data first."""
    seeds = SEEDS[:2] if quick else SEEDS

    def of(data: str, noise: float, kinds: Sequence[str]) -> list[Cell]:
        return [Cell(data=data, noise=noise, kind=kind, seed=seed) for seed in seeds for kind in kinds]

    return [
        *of("frappe", 0.0, (OFF, ON)),
        *of("frappe", 0.1, (OFF, ON)),
        *of("frappe", 0.0, CONTROLS),
        *of("movielens", 0.0, (OFF, ON)),
        *of("movielens", 0.1, (OFF, ON)),
    ]


def raw_frames(data: str, *, frappe_rows: int) -> dict[str, pl.DataFrame]:
    """Raw rows for training, validation and test; of Frappe so many for training, or all with 0."""
    config = recipe_named(RECIPES[data])
    files = fetch(config.dataset.name)
    if data == "frappe":
        frames = {path.stem: pl.read_parquet(path) for path in sorted(files.glob("*.parquet"))}
        if frappe_rows:
            frames["train"] = frames["train"].sample(frappe_rows, seed=_SEED_OF_ROWS)
        return frames
    ratings = pl.read_parquet(files)
    times = ratings["timestamp"].sort()
    valid_from = times[int(0.8 * len(times))]
    test_from = times[int(0.9 * len(times))]
    return {
        "train": ratings.filter(pl.col("timestamp") < valid_from),
        "valid": ratings.filter(pl.col("timestamp").is_between(valid_from, test_from, closed="left")),
        "test": ratings.filter(pl.col("timestamp") >= test_from),
    }


def turned_round(train: pl.DataFrame, *, noise: float, data: str) -> pl.DataFrame:
    """The same rows with a share of the labels replaced by their opposite; ratings become 1 or 5."""
    turned = pl.Series(np.random.default_rng(_SEED_OF_NOISE).random(len(train)) < noise)
    if data == "frappe":
        return train.with_columns(label=pl.when(turned).then(1 - pl.col("label")).otherwise(pl.col("label")))
    other = pl.when(pl.col("rating") >= 4).then(1).otherwise(5).cast(pl.Int32)
    return train.with_columns(rating=pl.when(turned).then(other).otherwise(pl.col("rating")))


def prepared(data: str, *, noise: float, folder: Path, frappe_rows: int, quick: bool) -> PreparedData:
    """Training, validation and test data of one set at one share of noise."""
    frames = raw_frames(data, frappe_rows=frappe_rows)
    if quick:
        frames = {name: frame.sample(min(len(frame), 5_000), seed=5) for name, frame in frames.items()}
    frames["train"] = turned_round(frames["train"], noise=noise, data=data)
    raw = folder / f"{data}_{noise}"
    raw.mkdir()
    for name, frame in frames.items():
        frame.write_parquet(raw / f"{name}.parquet")
    config = zg.DataConfig(
        train=(str(raw / "train.parquet"),),
        valid=(str(raw / "valid.parquet"),),
        test=(str(raw / "test.parquet"),),
        split=SplitConfig(by=SplitBy.FILES),
    )
    return zg.prepare(config, schema=recipe_named(RECIPES[data]).table_schema, folder=raw / "prepared")


def seeded(config: RunConfig, *, seed: int, self_distil: SelfDistilConfig, quick: bool) -> zg.TrainingConfig:
    """The recipe's own settings with a seed, on one thread."""
    training = config.training
    loader = replace(training.loader, seed=seed)
    epochs = 1 if quick else training.epochs
    return replace(training, seed=seed, threads=1, loader=loader, self_distil=self_distil, epochs=epochs)


def trained(cell: Cell, data: PreparedData, *, rate: float, quick: bool) -> dict[str, float]:
    """Train one cell; returns test metrics by the weights that validation chose, the step of these, and seconds."""
    begin_s = time.process_time()
    config = recipe_named(RECIPES[cell.data])
    self_distil = {ON: SMC2, "no_field_dropout": replace(SMC2, field_dropout=0.0)}.get(cell.kind, SelfDistilConfig())
    loss = None
    if cell.kind in CONTROLS[1:]:
        towards = {"smoothing": 0.5, "smoothing_to_rate": rate, "labels_less": None}[cell.kind]
        loss = LabelsWithLess(towards, inputs=data.inputs)
    model = zg.build_model(config.model, data.inputs, seed=cell.seed)
    training = seeded(config, seed=cell.seed, self_distil=self_distil, quick=quick)
    with tempfile.TemporaryDirectory() as folder:
        trainer = zg.Trainer(model, config=training, train=data.train, valid=data.valid, folder=folder, loss=loss)
        if loss is not None:
            loss.trainer = trainer
        result = trainer.fit()
        assert data.test is not None, "it was named"
        metrics = trainer.evaluate(data.test).metrics
        steps = trainer.position.step
    known = {name: metrics[name] for name in ("auc", "log_loss", "ne", "calibration", "ece")}
    return known | {"best_step": result.best_step, "steps": steps, "cpu_s": time.process_time() - begin_s}


def share_of_positives(data: PreparedData) -> float:
    """The mean label of the training rows."""
    labels = [
        batch.labels[:, 0]
        for batch in zg.Loader(data.train, config=zg.LoaderConfig(batch_size=65_536)).batches(epoch=0)
    ]
    return float(torch.cat(labels).mean())


def collect(
    wanted: Sequence[Cell],
    *,
    out: Path,
    until: float = math.inf,
    frappe_rows: int = FRAPPE_ROWS,
    quick: bool = False,
) -> dict[Cell, dict[str, float]]:
    """Make the runs that are not kept yet, until the time is over; returns what is there of each cell.

    Args:
        wanted: in their order.
        out: folder of the kept ones.
        until: seconds since 1970, from which on no run begins.
        frappe_rows: training rows of Frappe; 0: all.
        quick: few rows and one epoch.
    """
    out.mkdir(parents=True, exist_ok=True)
    found: dict[Cell, dict[str, float]] = {}
    ready: dict[tuple[str, float], tuple[PreparedData, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for cell in wanted:
            path = out / f"{cell.name}.json"
            if not path.exists():
                if time.time() >= until:
                    continue
                key = (cell.data, cell.noise)
                if key not in ready:
                    data = prepared(
                        cell.data, noise=cell.noise, folder=Path(scratch), frappe_rows=frappe_rows, quick=quick
                    )
                    ready[key] = data, share_of_positives(data)
                data, rate = ready[key]
                metrics = trained(cell, data, rate=rate, quick=quick)
                partial = path.with_suffix(".part")
                partial.write_text(json.dumps(metrics))
                partial.replace(path)
                say(f"{cell.name}: {metrics}")
            found[cell] = json.loads(path.read_text())
    return found


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Runs of two kinds by the same seeds, one metric of them."""

    data: str
    noise: float
    kind: str
    beside: str
    metric: str
    ours: tuple[float, ...]
    theirs: tuple[float, ...]

    @property
    def name(self) -> str:
        """Names it in the report."""
        return f"{self.data}_noise_{round(100 * self.noise)}_{self.kind}_beside_{self.beside}_{self.metric}"


def comparisons(
    found: dict[Cell, dict[str, float]],
    *,
    pairs: Sequence[tuple[str, str]],
    data: Sequence[str],
    noises: Sequence[float],
    num_pairs: int,
) -> list[Comparison]:
    """Comparisons whose pairs of runs are all there."""
    result: list[Comparison] = []
    for noise in noises:
        for each in data:
            for kind, beside in pairs:
                both = [
                    (found[first], found[second])
                    for seed in SEEDS
                    if (first := Cell(data=each, noise=noise, kind=kind, seed=seed)) in found
                    and (second := Cell(data=each, noise=noise, kind=beside, seed=seed)) in found
                ]
                if len(both) < num_pairs:
                    continue
                result += [
                    Comparison(
                        data=each,
                        noise=noise,
                        kind=kind,
                        beside=beside,
                        metric=metric,
                        ours=tuple(ours[metric] for ours, _ in both),
                        theirs=tuple(theirs[metric] for _, theirs in both),
                    )
                    for metric in METRICS
                ]
    return result


def table(compared: Sequence[Comparison], *, num_tests: int) -> str:
    """Markdown of one family: means, differences and p, by Holm over all tests that were planned."""
    differences = [paired_difference(each.ours, each.theirs) for each in compared]
    not_made = max(0, num_tests - len(differences))
    corrected = holm([each.t_p for each in differences] + [1.0] * not_made)[: len(differences)]
    lines = ["| data | noise | metric | ours | | beside | | difference | p | Holm's p | pairs |"]
    lines.append("|---|---:|---|---|---:|---|---:|---:|---:|---:|---:|")
    for each, difference, p in zip(compared, differences, corrected, strict=True):
        lines.append(
            f"| {each.data} | {each.noise:.0%} | {each.metric} | {each.kind} | {_mean(each.ours)} | {each.beside} | "
            f"{_mean(each.theirs)} | {difference.mean:+.5f} ± {difference.sd:.5f} | {difference.t_p:.4f} | {p:.4f} | "
            f"{difference.num_pairs} |"
        )
    return "\n".join(lines)


def _mean(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.5f} ± {statistics.stdev(values):.5f}"


def add_to(
    report: Report, *, out: Path, until: float = math.inf, frappe_rows: int = FRAPPE_ROWS, quick: bool = False
) -> None:
    """Make the runs, and write what came out into a report."""
    wanted = cells(quick=quick)
    found = collect(wanted, out=out, until=until, frappe_rows=frappe_rows, quick=quick)
    num_pairs = 2 if quick else len(SEEDS)
    both = [(kind, OFF) for kind in CONTROLS] + [(ON, kind) for kind in CONTROLS]
    families = (
        (
            "SMC-2, α = 0.3, beside labels alone",
            comparisons(found, pairs=[(ON, OFF)], data=tuple(RECIPES), noises=NOISE, num_pairs=num_pairs),
            len(RECIPES) * len(NOISE) * len(METRICS),
        ),
        (
            "Controls on Frappe, a family of its own",
            comparisons(found, pairs=both, data=("frappe",), noises=NOISE[:1], num_pairs=num_pairs),
            len(both) * len(METRICS),
        ),
    )
    for title, family, num_tests in families:
        if not family:
            continue
        report.tables.append(f"{title}:\n\n{table(family, num_tests=num_tests)}")
        report.cases += [
            by_round(each.name, ours=(each.kind, each.ours), peer=(each.beside, each.theirs), unit=each.metric)
            for each in family
        ]
    report.extra["runs"] = {cell.name: metrics for cell, metrics in found.items()}
    report.skipped += [f"not finished: {cell.name}" for cell in wanted if cell not in found]
