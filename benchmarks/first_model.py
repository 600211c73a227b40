"""The first model of a table: what is suggested, beside logistic regression and gradient-boosted trees.

    suggested             `ziggurat train auto`: a few models on a small budget, the best by validation goes on
    logistic regression   its candidate: the floor that the suggestion must not be below
    LightGBM              its defaults, ids as categories, early stop on the same validation rows; where it is installed
    tuned FM              a factorisation machine, the best of three rates of its tables and of 20 epochs by validation

Fourteen small tables (`first_model_sets.py`): twelve that are made, two that are published and lie beside the checkout.
Goals: AUC within 0.002 of logistic regression's or above (RMSE within half a per cent or below), within 0.01 of the
best of LightGBM and the tuned FM (RMSE: one per cent), and 0.775 on `taste`.
Finished runs are kept in `runs/first_model`, so the benchmark can be stopped and taken up.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.first_model_sets import MADE, PUBLISHED, SmallSet
from benchmarks.harness import ROOT, say
from benchmarks.report import Report
from ziggurat.features.schema import Task
from ziggurat.files.writing import replacing
from ziggurat.recipes.catalogue import fit_to_rows
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs.execute import prepare_run, train_run
from ziggurat.studies.first_model import Candidate, candidates_of, linear_candidate, train_first_model
from ziggurat.training.records.run_folder import EVALUATION, RunFolder
from ziggurat.training.report.progress import show_progress

GOALS = {"taste": 0.775}
AUC_SLACK, RMSE_SLACK = 0.002, 1.005
BEST_AUC_SLACK, BEST_RMSE_SLACK = 0.01, 1.01
_QUICK = ("tiny",)
_PUBLISHED_FILES = ROOT.parent / "shared" / "data"
_RESULT = "first_model.json"
_TUNED = "tuned_fm.json"
_FM_RATES = (0.003, 0.01, 0.03)
_FM_EPOCHS, _FM_PATIENCE = 20, 5


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line of this benchmark says.

    Args:
        sets: names; none: all.
        seeds: of all weights and orders; the rows of the splits stay.
    """

    sets: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)


def parse_options(arguments: list[str]) -> Options:
    """Read `--sets taste,sums` and `--seeds 0,1,2`."""
    parser = argparse.ArgumentParser(prog="ziggurat bench first-model")
    parser.add_argument("--sets", default="", help="names divided by commas; none: all")
    parser.add_argument("--seeds", default="0", help="numbers divided by commas (default: %(default)s)")
    options = parser.parse_args(arguments)
    seeds = tuple(int(seed) for seed in options.seeds.split(","))
    return Options(sets=tuple(name for name in options.sets.split(",") if name), seeds=seeds)


@dataclass(frozen=True, kw_only=True)
class Found:
    """Test metrics of one table.

    Args:
        metric: auc or rmse.
        suggested: of what is suggested.
        best: name of its model.
        floor: of logistic regression.
        trees: of LightGBM; NaN without it.
        attainable: of the truth.
        seconds: of all candidates.
        tuned: of the tuned factorisation machine.
    """

    metric: str
    suggested: float
    best: str
    floor: float
    trees: float
    attainable: float
    seconds: float
    tuned: float = math.nan

    @staticmethod
    def mean_of(seeds: Sequence[Found]) -> Found:
        """Return the means over seeds; all models that were suggested stand in `best`."""
        names = dict.fromkeys(each.best for each in seeds)
        return Found(
            metric=seeds[0].metric,
            suggested=statistics.fmean(each.suggested for each in seeds),
            best=", ".join(names),
            floor=statistics.fmean(each.floor for each in seeds),
            trees=statistics.fmean(each.trees for each in seeds),
            attainable=seeds[0].attainable,
            seconds=statistics.fmean(each.seconds for each in seeds),
            tuned=statistics.fmean(each.tuned for each in seeds),
        )

    def is_near_best(self) -> bool:
        """Return whether the suggestion is as good as the better of LightGBM and the tuned machine, or nearly."""
        others = [each for each in (self.trees, self.tuned) if math.isfinite(each)]
        if not others:
            return True
        if self.metric == "auc":
            return self.suggested >= max(others) - BEST_AUC_SLACK
        return self.suggested <= min(others) * BEST_RMSE_SLACK

    def is_above_floor(self) -> bool:
        """Return whether the suggestion is not below logistic regression."""
        if self.metric == "auc":
            return self.suggested >= self.floor - AUC_SLACK
        return self.suggested <= self.floor * RMSE_SLACK


def measure(name: str, subject: SmallSet, *, out: Path, seed: int) -> Found:
    """Train what is suggested on a table, or take up what is there."""
    folder = out / f"{name}_seed{seed}"
    kept = folder / _RESULT
    path = out / f"{name}.parquet"
    out.mkdir(parents=True, exist_ok=True)
    if not path.exists():  # another process may train on it with another seed
        with replacing(path) as temporary:
            subject.frame.write_parquet(temporary)

    def change(config: RunConfig) -> RunConfig:
        named = fit_to_rows(replace(config, data=replace(config.data, train=(str(path),))))
        loader = replace(named.training.loader, seed=seed)
        return replace(named, training=replace(named.training, threads=1, seed=seed, loader=loader))

    candidates = candidates_of(subject.schema, change=change)
    if kept.exists():
        found = Found(**json.loads(kept.read_text()))
        return replace(found, tuned=tuned_fm(candidates, folder=folder, metric=found.metric))
    progress = show_progress()
    progress.say(f"\n{name}, seed {seed}")
    result = train_first_model(candidates, folder=folder, progress=progress)
    floor = EVALUATION.read(RunFolder(folder / "candidates" / linear_candidate(subject.schema)).evaluation("test"))[
        "metrics"
    ]
    found = Found(
        metric=result.metric,
        suggested=result.result.evaluations["test"].metrics[result.metric],
        best=result.tried[0].name,
        floor=floor[result.metric],
        trees=trees(subject, config=result.config),
        attainable=subject.attainable,
        seconds=sum(each.seconds for each in result.tried),
    )
    kept.write_text(json.dumps(vars(found)))
    return replace(found, tuned=tuned_fm(candidates, folder=folder, metric=found.metric))


def tuned_fm(candidates: list[Candidate], *, folder: Path, metric: str) -> float:
    """Train a factorisation machine by several rates; the test metric of the best by validation."""
    kept = folder / _TUNED
    if not kept.exists():
        plain = next(each for each in candidates if each.name == "factorisation_machine").config
        stop = replace(plain.training.early_stop, patience=_FM_PATIENCE, min_steps=0)
        tried: list[tuple[float, float]] = []
        for rate in _FM_RATES:
            training = replace(plain.training, epochs=_FM_EPOCHS, early_stop=stop, table_learning_rate=rate)
            place = folder / "tuned" / f"{rate:g}"
            result = train_run(replace(plain, training=training), folder=place, resume=RunFolder(place).config.exists())
            valid, test = (result.evaluations[split].metrics[metric] for split in ("valid", "test"))
            tried.append((valid, test))
        chosen = max(tried) if metric == "auc" else min(tried)
        kept.write_text(json.dumps({"valid": chosen[0], "test": chosen[1]}))
    return json.loads(kept.read_text())["test"]


def trees(subject: SmallSet, *, config: RunConfig) -> float:
    """The test metric of LightGBM's defaults on the rows of the same splits; NaN where it is not installed."""
    try:
        import lightgbm  # pyright: ignore[reportMissingImports]
    except ImportError:
        return math.nan
    data = prepare_run(config)
    columns = [each.name for each in subject.schema.features if each.id_lists is None]
    ids = {spec.name for spec in data.inputs.single}

    def rows_of(dataset: object) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        groups = [dataset.read_group(index) for index in range(len(dataset.group_sizes))]  # pyright: ignore
        values = [np.concatenate([group[name].to_numpy() for group in groups]) for name in columns]
        labels = np.concatenate([group["label:label"].to_numpy() for group in groups])
        return np.stack(values, axis=1).astype(np.float64), labels.astype(np.float64)

    train, valid, test = (rows_of(each) for each in (data.train, data.valid, data.test))
    is_number = subject.schema.labels[0].task is Task.REGRESSION
    kind: Callable[..., object] = lightgbm.LGBMRegressor if is_number else lightgbm.LGBMClassifier
    model = kind(n_jobs=1, verbose=-1)
    places = [index for index, name in enumerate(columns) if name in ids]
    model.fit(  # pyright: ignore[reportAttributeAccessIssue]
        *train,
        eval_set=[valid],
        categorical_feature=places,
        callbacks=[lightgbm.early_stopping(20, verbose=False)],
    )
    from ziggurat.training.metrics.accumulator import auc, rmse

    if is_number:
        return rmse(model.predict(test[0]), test[1])  # pyright: ignore[reportAttributeAccessIssue]
    return auc(model.predict_proba(test[0])[:, 1], test[1])  # pyright: ignore[reportAttributeAccessIssue]


def missing_tables(wanted: Sequence[str], *, published: Path) -> dict[str, str]:
    """Return why each published table cannot be judged here, by name: its files are not there.

    Args:
        wanted: names of tables.
        published: the folder of the files of published tables.
    """
    missing: dict[str, str] = {}
    for name in wanted:
        if name not in PUBLISHED:
            continue
        folder_name, _ = PUBLISHED[name]
        if not (published / folder_name).is_dir():
            missing[name] = f"{name}: its files are not at ../shared/data/{folder_name}"
    return missing


def table(found: dict[str, list[Found]]) -> str:
    """Markdown: one row a table; means over seeds, with standard deviations where there are several."""
    lines = [
        "| table | metric | suggested | its model | logistic regression | LightGBM | tuned FM | attainable | not below "
        "| near the best | s |",
        "|---|---|---:|---|---:|---:|---:|---:|---|---|---:|",
    ]
    for name, seeds in found.items():
        each = Found.mean_of(seeds)
        suggested = _shown([it.suggested for it in seeds])
        floor = _shown([it.floor for it in seeds])
        boosted = _shown([it.trees for it in seeds])
        tuned = _shown([it.tuned for it in seeds])
        attainable = _shown([each.attainable])
        verdict = "yes" if each.is_above_floor() else "**no**"
        near = "yes" if each.is_near_best() else "**no**"
        lines.append(
            f"| {name} | {each.metric} | {suggested} | {each.best} | {floor} | {boosted} | {tuned} | {attainable} | "
            f"{verdict} | {near} | {each.seconds:.0f} |"
        )
    return "\n".join(lines)


def _shown(numbers: Sequence[float]) -> str:
    """Show a mean, and its standard deviation where there are several numbers."""
    if not all(math.isfinite(each) for each in numbers):
        return "–"
    mean = f"{statistics.fmean(numbers):.4f}"
    return mean if len(numbers) == 1 else f"{mean} ± {statistics.stdev(numbers):.4f}"


def run(*, quick: bool = False, options: Options | None = None) -> Report:
    """All tables (one if quick), with all seeds that were asked for."""
    asked = options or Options()
    report = Report(
        benchmark="first_model",
        claim="What `ziggurat train auto` reaches on small tables, beside logistic regression and LightGBM's defaults.",
        command="ziggurat bench first-model",
    )
    out = ROOT / "runs" / ("first_model_quick" if quick else "first_model")
    wanted = asked.sets or (_QUICK if quick else (*MADE, *PUBLISHED))
    missing = missing_tables(wanted, published=_PUBLISHED_FILES)
    for why in missing.values():
        # Before the first table: the report, which repeats it, comes hours later.
        say(f"skipped: {why}")
        report.skipped.append(why)
    found: dict[str, list[Found]] = {}
    for name in wanted:
        if name in missing:
            continue
        if name in MADE:
            subject = MADE[name]()
        else:
            folder_name, read = PUBLISHED[name]
            subject = read(_PUBLISHED_FILES / folder_name)
        found[name] = [measure(name, subject, out=out, seed=seed) for seed in asked.seeds]
    report.command += f" --seeds {','.join(map(str, asked.seeds))}"
    report.tables.append(table(found))
    means = {name: Found.mean_of(seeds) for name, seeds in found.items()}
    for name, goal in GOALS.items():
        if name in found:
            verdict = "reached" if means[name].suggested >= goal else "missed"
            each = ", ".join(f"{it.suggested:.4f}" for it in found[name])
            report.notes.append(f"goal on {name}: {goal}, {verdict} with {means[name].suggested:.4f} ({each})")
    below = [name for name, each in means.items() if not each.is_above_floor()]
    report.notes.append(f"below logistic regression: {', '.join(below) or 'none'}")
    far = [name for name, each in means.items() if not each.is_near_best()]
    report.notes.append(f"more than 0.01 below the best of LightGBM and a tuned FM: {', '.join(far) or 'none'}")
    report.extra["sets"] = {name: [vars(each) for each in seeds] for name, seeds in found.items()}
    return report
