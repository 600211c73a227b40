"""Quality of networks that few bits hold well, of training by INT8 products, and of MX9 beyond Frappe.

    mods       no bias, norm of blocks, hard swish: each alone and all together, in FP32 and in MX6
    int8       every product and direction in INT8, against FP32
    few_bits   MX9 against FP32 on the synthetic teacher: test AUC of the models of `--models`
    frappe     MX9 against FP32 on Frappe, by the runs of `ziggurat compare frappe --protocol scale`
    histories  MX9 against FP32 in HSTU on MovieLens-1M: HR@10

A run is one pass over the training rows on one thread, of HSTU twelve. Seeds are the outer loop and variants the
inner one, so that variants take turns, and differences are paired by seed. The CPU time of a run, evaluations
included, stands beside its metrics. Finished runs are kept in `runs/numerics_quality` and are not trained again, so a
part may be stopped and taken up; the time of one that was stopped in the middle is not known then.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from scipy import stats

from benchmarks.harness import ROOT, say
from benchmarks.quality import seeded, with_source
from benchmarks.report import Report
from ziggurat.config import override
from ziggurat.models.build import build_model
from ziggurat.models.network_settings import network_settings
from ziggurat.numerics.probe import Direction
from ziggurat.precision import Precision
from ziggurat.precision.choice import machine_facts
from ziggurat.precision.dispatch import Choice, DispatchPlan
from ziggurat.precision.products import products_of, shapes_of_products
from ziggurat.recipes.catalogue import recipe_named
from ziggurat.recipes.protocols import scale_model, scale_training
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs.execute import prepare_run, train_run
from ziggurat.studies.compare_data import ComparedData, data_run
from ziggurat.studies.compare_settings import settings_of
from ziggurat.studies.compare_statistics import paired_difference

FRAPPE = ("frappe_dlrm", "frappe_dcn_v2")
SYNTHETIC = "synthetic_"  # and a model
COMPARED = "compare_frappe_"  # and a model: a run of `ziggurat compare`
HSTU = "movielens_hstu"
SYNTHETIC_ROWS = 200_000
HSTU_EPOCHS = 12  # of the recipe's 40, where most of the recall is there
BASE = "as it is"
TOGETHER = "together"
MX6 = "mx6"
# Settings of models by recipe. DLRM's bottom MLP takes numbers, of which Frappe has none.
MODS: dict[str, dict[str, dict[str, str]]] = {
    "frappe_dlrm": {
        "no bias": {"model.top.bias": "false"},
        "norm of blocks": {"model.top.normalization": "block"},
        "hard swish": {"model.top.activation": "hard_swish"},
    },
    "frappe_dcn_v2": {
        "no bias": {"model.deep.bias": "false", "model.cross.bias": "false"},
        "norm of blocks": {"model.deep.normalization": "block"},
        "hard swish": {"model.deep.activation": "hard_swish"},
    },
}
MAX_AUC_DIFFERENCE = 0.0003


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One run.

    Args:
        metrics: on its test rows.
        cpu_s: of the process while it trained and evaluated; NaN of a run that was taken up.
    """

    metrics: dict[str, float]
    cpu_s: float


Variants = Mapping[str, Callable[[RunConfig, Path], RunConfig]]  # a change of a config, given the folder of the part


def measure_mods(report: Report, options: argparse.Namespace) -> None:
    """Measure LoKA's options of models, each alone and together, in FP32; the first and the last in MX6, too."""
    for recipe in FRAPPE:
        variants: dict[str, Callable[[RunConfig, Path], RunConfig]] = {BASE: _as_it_is}
        variants |= {name: _changed(changes) for name, changes in mods_of(recipe).items()}
        variants[f"{BASE}, {MX6}"] = _changed({"training.precision": MX6})
        variants[f"{TOGETHER}, {MX6}"] = _changed(mods_of(recipe)[TOGETHER] | {"training.precision": MX6})
        compared(report, options, recipe, variants, part="mods", metric="auc", limit=None)


def measure_int8(report: Report, options: argparse.Namespace) -> None:
    """Measure training whose products are all in INT8, as far as the kernel takes their shapes."""
    for recipe in FRAPPE:
        variants = {BASE: _as_it_is, "int8": by_int8}
        compared(report, options, recipe, variants, part="int8", metric="auc", limit=_small)


def measure_few_bits(report: Report, options: argparse.Namespace) -> None:
    """Measure MX9 on a known teacher, where the five-seed comparison on Frappe and MovieLens did not."""
    for model in options.models:
        compared(report, options, f"{SYNTHETIC}{model}", by_mx9(), part="few_bits", metric="auc", limit=_small)


def measure_frappe(report: Report, options: argparse.Namespace) -> None:
    """Measure MX9 on Frappe with more seeds than a comparison of many precisions had."""
    for model in options.models:
        compared(report, options, f"{COMPARED}{model}", by_mx9(), part="frappe", metric="auc", limit=_small)


def measure_histories(report: Report, options: argparse.Namespace) -> None:
    """Measure MX9 in a model that reads histories."""
    compared(report, options, HSTU, by_mx9(), part="few_bits", metric="full_recall@10", limit=statistics.stdev)


def by_mx9() -> Variants:
    """Return a recipe as it is, and with its products in MX9."""
    return {BASE: _as_it_is, "mx9": _changed({"training.precision": "mx9"})}


def mods_of(recipe: str) -> dict[str, dict[str, str]]:
    """Return the settings of each option, and those of all of them together."""
    alone = MODS[recipe]
    return alone | {TOGETHER: {name: value for each in alone.values() for name, value in each.items()}}


def by_int8(config: RunConfig, folder: Path) -> RunConfig:
    """Return a config that trains by a dispatch of INT8 in all directions; what the kernel refuses stays FP32."""
    model = build_model(config.model, prepare_run(config).inputs, seed=0, draw_tables=False)
    int8 = {each: Choice(kernel="int8", reason="to know what INT8 costs") for each in Direction}
    plan = DispatchPlan(
        model=type(model).__name__,
        machine=machine_facts(torch.device("cpu")),
        choices=dict.fromkeys(products_of(model), int8),
        missing={},
        shapes=shapes_of_products(model),
        settings=network_settings(model),
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = plan.write(folder / f"{config.model.kind}_int8.json")
    return replace(config, training=replace(config.training, precision=Precision.DISPATCH, dispatch=str(path)))


def base_config(recipe: str, *, seed: int, source: str, rows: int = SYNTHETIC_ROWS) -> RunConfig:
    """Return the config of one pass of a recipe; HSTU trains longer, since one pass teaches it nothing."""
    if recipe.startswith(COMPARED):
        return seeded(compared_config(recipe.removeprefix(COMPARED), source=source), seed)
    config = seeded(with_source(_recipe(recipe), Path(source) if source else None), seed)
    epochs = HSTU_EPOCHS if recipe == HSTU else 1
    changes = {"training.precision": "fp32", "training.epochs": str(epochs)}
    if recipe.startswith(SYNTHETIC):
        changes |= {"dataset.rows": str(rows)}
    return override(config, changes)


@functools.cache
def compared_config(model: str, *, source: str) -> RunConfig:
    """Return the run of a model on Frappe that `ziggurat compare` makes by protocol `scale`, in FP32."""
    run = data_run(ComparedData.FRAPPE, source=source)
    settings = settings_of(model, ComparedData.FRAPPE).model
    # The rates rise and fall over all steps, so the number of rows is a setting.
    training = scale_training(num_rows=prepare_run(run).train.num_rows)
    config = replace(run, recipe=f"{COMPARED}{model}", model=scale_model(settings), training=training)
    return override(config, {"training.precision": "fp32"})


def _recipe(name: str) -> RunConfig:
    """Return a recipe by name; Wukong on the synthetic teacher has none of its own, and is as on any table."""
    if name != f"{SYNTHETIC}wukong":
        return recipe_named(name)
    return replace(recipe_named(f"{SYNTHETIC}dlrm"), model=recipe_named("criteo_wukong").model)


def _small(values: Sequence[float]) -> float:
    """Return the largest mean difference that is none, whatever the values of FP32."""
    del values
    return MAX_AUC_DIFFERENCE


def compared(
    report: Report,
    options: argparse.Namespace,
    recipe: str,
    variants: Variants,
    *,
    part: str,
    metric: str,
    limit: Callable[[Sequence[float]], float] | None,
) -> None:
    """Train variants of a recipe with each seed, and add a figure a variant and a table to the report.

    Args:
        report: takes both.
        options: with the number of seeds and the source.
        recipe: whose run is varied.
        variants: by name; the first is what others are compared with.
        part: names the folder of the runs.
        metric: of the test rows.
        limit: largest mean difference that is no loss, by the values of the first variant; None: nothing is promised.
    """
    out = ROOT / "runs" / "numerics_quality" / part
    found: dict[str, list[Trained]] = {name: [] for name in variants}
    for seed in range(options.seeds):
        for name, change in variants.items():
            config = change(base_config(recipe, seed=seed, source=options.source), out)
            found[name].append(trained(config, out / f"{recipe}_{name.replace(', ', '_').replace(' ', '_')}_{seed}"))
            say(f"  {recipe}, {name}, seed {seed}: {metric} {found[name][-1].metrics[metric]:.5f}")
    base = found[BASE]
    rows = [
        f"| {recipe} | {metric} | − {BASE} | p | 90 % interval | log loss | NE | CPU time, of {BASE} |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, runs in found.items():
        values = [run.metrics[metric] for run in runs]
        difference = paired_difference(values, [run.metrics[metric] for run in base])
        times = [run.cpu_s / first.cpu_s for run, first in zip(runs, base, strict=True)]
        known = [each for each in times if math.isfinite(each)]
        time_text = f"{statistics.median(known):.2f}" if known else "not known"
        means = {
            each: f"{statistics.fmean(run.metrics[each] for run in runs):.5f}" if each in runs[0].metrics else ""
            for each in ("log_loss", "ne")
        }
        half_width = half_of_interval(difference.sd, num_pairs=len(values))
        low, high = difference.mean - half_width, difference.mean + half_width
        spread = statistics.stdev(values) if len(values) > 1 else math.nan
        rows.append(
            f"| {name} | {statistics.fmean(values):.5f} ± {spread:.5f} | {difference.mean:+.5f} ± {difference.sd:.5f} "
            f"| {difference.t_p:.3f} | {low:+.5f} to {high:+.5f} | {means['log_loss']} | {means['ne']} | {time_text} |"
        )
        if name != BASE:
            figure: dict[str, object] = {
                "name": f"{recipe}_{name}_{metric}_difference".replace(", ", "_").replace(" ", "_"),
                "ours": difference.mean,
                "sd": difference.sd,
                "p": difference.t_p,
                "low_90": low,
                "high_90": high,
                "seeds": options.seeds,
                "unit": metric,
            }
            if limit is not None and options.seeds > 1:
                figure["limit"] = limit([run.metrics[metric] for run in base])
                figure["verdict"] = "met" if abs(difference.mean) <= figure["limit"] else "missed"
                # Two one-sided tests at 5 %: the interval of 90 % lies within the limit on both sides.
                figure["is_shown"] = max(-low, high) <= figure["limit"]
            report.figures.append(figure)
    report.tables.append("\n".join(rows))


def half_of_interval(sd: float, *, num_pairs: int) -> float:
    """Return half of the 90 % interval of a mean difference, by Student's t; NaN for one pair."""
    if num_pairs < 2:
        return math.nan
    return float(stats.t.ppf(0.95, num_pairs - 1)) * sd / math.sqrt(num_pairs)


def trained(config: RunConfig, folder: Path) -> Trained:
    """Train a run, or take up what is there, and keep its time beside it."""
    kept = folder / "cpu_seconds.json"
    was_begun = (folder / "config.json").exists()
    begin_s = time.process_time()
    result = train_run(config, folder=folder, resume=was_begun)
    seconds = time.process_time() - begin_s
    if not was_begun:
        kept.write_text(json.dumps(seconds))
    cpu_s = float(json.loads(kept.read_text())) if kept.exists() else math.nan
    return Trained(metrics=result.evaluations["test"].metrics, cpu_s=cpu_s)


def _as_it_is(config: RunConfig, folder: Path) -> RunConfig:
    del folder
    return config


def _changed(changes: Mapping[str, str]) -> Callable[[RunConfig, Path], RunConfig]:
    return lambda config, folder: override(config, changes)
