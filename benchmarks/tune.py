"""Tuning: the cost of a study beside its tries, and what a search finds beside other uses of the same compute.

    tuned     `ziggurat tune` by its defaults: TPE, Hyperband, so many tries
    random    settings drawn at random, each try to its end
    recipe    settings as they are shipped, trained again and again with other seeds: a search over luck

A study of `tuned` comes first; the other two get the FLOPs that it spent, and go on until these are used up. The best
of each by validation data is trained with fresh seeds, and test data is read once for it.

    beside    processor seconds of the study outside of its tries, of all
    in a try  processor seconds of a try over those of the same run without a study, in turns: hooks, notes, storage

Everything is kept in `runs/bench_tune`: called again, it goes on. With `--study FOLDER` nothing is trained, and the
report is that of a study which `ziggurat tune` has made, with every try.

`ziggurat bench tune --json FILE`
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, say
from benchmarks.report import Report, short
from ziggurat.data.preprocess.prepared import PreparedData
from ziggurat.files import Format
from ziggurat.recipes.run_config import load_config
from ziggurat.runs.execute import prepare_run
from ziggurat.studies.compare import CompareConfig, base_run, compare
from ziggurat.studies.compare_data import ComparedData
from ziggurat.studies.compare_runs import RunRequest, finish_run
from ziggurat.studies.tune import SEED, TuneConfig, tune
from ziggurat.studies.tune_report import TUNING, best_so_far
from ziggurat.studies.tune_study import Ended, Pruner, Sampler, Spent, Try
from ziggurat.training.metrics.metric import higher_is_better
from ziggurat.training.report.progress import NoProgress

MAX_OVERHEAD = 0.03
MAX_MINUTES = 60.0  # on two cores: 40 tries of four models on Frappe
CORES = 2
ARMS = ("tuned", "random", "recipe")
PARTS = (0.25, 0.5, 1.0)  # of the compute, at which the best so far is shown
_BETWEEN_SEEDS = 1000  # of studies: each has seeds of its own for the recipe's runs
_KEPT = Format(name="ziggurat.bench_tune", what="a finding of the benchmark of tuning")


@dataclass(frozen=True, kw_only=True)
class Size:
    """Size of the comparison of searches.

    Args:
        rows: of the made data.
        budget: tries of a study.
        seeds: studies of each model.
        fresh: seeds that the choice of each search is trained with.
        epochs: at most; 0: the protocol's.
        pairs: runs with and without a study whose cost is compared.
    """

    rows: int
    budget: int
    seeds: int
    fresh: int
    epochs: int
    pairs: int


@dataclass(frozen=True, kw_only=True)
class Search:
    """The tries of one search, in their order.

    Args:
        arm: which kind.
        tries: of it.
        test: test metric of its choice, by fresh seed.
        outside_s: processor seconds beside tries.
        inside_s: those in tries.
    """

    arm: str
    tries: tuple[Try, ...]
    test: tuple[float, ...] = ()
    outside_s: float = 0.0
    inside_s: float = 0.0

    @property
    def spent(self) -> Spent:
        """The cost of all tries."""
        return sum((each.spent for each in self.tries), Spent())

    @property
    def per_minute(self) -> float:
        """Tries per processor minute, with what is spent beside them."""
        seconds = self.spent.cpu_s + self.outside_s
        return 60.0 * len(self.tries) / seconds if seconds else 0.0

    def count(self, ended: Ended) -> int:
        """Return how many tries ended so."""
        return sum(each.ended is ended for each in self.tries)

    @property
    def saved(self) -> float:
        """The share of FLOPs that pruning saved: of as many tries that cost what complete ones cost in the mean."""
        complete = [each.spent.flops for each in self.tries if each.ended is Ended.COMPLETE]
        whole = statistics.fmean(complete) * len(self.tries) if complete else 0.0
        return 1.0 - self.spent.flops / whole if whole else 0.0


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of this benchmark."""
    parser = argparse.ArgumentParser(prog="ziggurat bench tune", description=__doc__)
    parser.add_argument("--models", default="dcn_v2")
    parser.add_argument("--budget", type=int, default=24, help="tries of a study (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=2, help="studies of each model (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=12_000, help="of the made data (default: %(default)s)")
    parser.add_argument(
        "--study", default="", help="report a study of `ziggurat tune` in this folder, and train nothing"
    )
    parser.add_argument("--note", action="append", default=[], help="a line for the report's notes")
    return parser.parse_args(arguments)


def run(*, quick: bool = False, options: argparse.Namespace | None = None) -> Report:
    """Compare searches, or report a study; `quick`: one tiny study of one model."""
    options = options or parse_options([])
    if options.study:
        report = report_of_study(Path(options.study))
    else:
        models = options.models.split(",")
        size = Size(rows=options.rows, budget=options.budget, seeds=options.seeds, fresh=2, epochs=0, pairs=5)
        if quick:
            size = Size(rows=3_000, budget=3, seeds=1, fresh=1, epochs=2, pairs=1)
            models = models[:1]
        name = f"rows{size.rows}_budget{size.budget}" + ("_quick" if quick else "")
        report = report_of_searches(models, size=size, folder=ROOT / "runs" / "bench_tune" / name)
        report.command = (
            f"ziggurat bench tune --models {','.join(models)} --budget {size.budget} --seeds {size.seeds} "
            f"--rows {size.rows}"
        )
    report.notes += options.note
    return report


# ------------------------------------------------------------------------------------------------ searches compared


def report_of_searches(models: Sequence[str], *, size: Size, folder: Path) -> Report:
    """Make the searches that are missing, and set them side by side."""
    report = Report(
        benchmark="tune",
        claim=f"`ziggurat tune` ({size.budget} tries) beside random search and the shipped recipe with other seeds, "
        f"each with the FLOPs of the first, on {size.rows:,} made rows; its cost beside tries, and in them.",
        command="ziggurat bench tune",
    )
    data = dataclasses.replace(prepare_run(base_run(_config(models[0], size=size).compared)), test=None)
    found: dict[str, object] = {}
    for model in models:
        searches = []
        for seed in range(size.seeds):
            searches += searches_of(model, size=size, seed=seed, folder=folder)
        _add_searches(report, model, searches)
        found[model] = [
            {
                "arm": each.arm,
                "seed": index // len(ARMS),
                "test": each.test,
                "tries": [_plain(one) for one in each.tries],
            }
            for index, each in enumerate(searches)
        ]
        pairs = costs_in_tries(model, size=size, folder=folder, data=data)
        ratios = [tried / plain for tried, plain in pairs]
        plain_s = statistics.median(plain for _, plain in pairs)
        more_ms = 1000.0 * statistics.median(tried - plain for tried, plain in pairs)
        tuned = [each for each in searches if each.arm == "tuned"]
        beside = sum(each.outside_s for each in tuned) / sum(each.outside_s + each.inside_s for each in tuned)
        in_tries = statistics.median(ratios) - 1.0
        per_try_ms = 1000.0 * sum(each.outside_s for each in tuned) / sum(len(each.tries) for each in tuned)
        report.figures += [
            _figure(f"tune_{model}_beside_share", beside, goal=MAX_OVERHEAD),
            _figure(f"tune_{model}_in_try_share", in_tries, goal=MAX_OVERHEAD, rounds=[each - 1.0 for each in ratios]),
            _figure(f"tune_{model}_beside_ms_per_try", per_try_ms),
            _figure(f"tune_{model}_in_try_ms", more_ms),
        ]
        lowest = 100 * (min(ratios) - 1.0)
        highest = 100 * (max(ratios) - 1.0)
        report.notes += [
            f"{model}: {100 * beside:.1f} % of processor seconds beside tries, {per_try_ms:,.0f} ms a try with reports",
            f"{model}: a try costs {100 * in_tries:+.1f} % over the same run without a study (median of {len(ratios)} "
            f"pairs, {lowest:+.1f} to {highest:+.1f} %): {more_ms:+,.0f} ms of {plain_s:.1f} processor seconds",
        ]
    report.extra["searches"] = found
    return report


def searches_of(model: str, *, size: Size, seed: int, folder: Path) -> Iterator[Search]:
    """Yield the three searches of one model and seed."""
    flops = 0.0
    for arm in ARMS:
        place = folder / f"{model}_seed{seed}" / arm
        config = _config(model, size=size, seed=SEED + _BETWEEN_SEEDS * seed)
        if arm == "tuned":
            found = _searched(arm, config, place)
            flops = found.spent.flops
        elif arm == "random":
            without = dataclasses.replace(config, sampler=Sampler.RANDOM, pruner=Pruner.NONE)
            found = _searched(arm, dataclasses.replace(without, budget=0, flops=flops), place)
        else:
            found = _with_other_seeds(config, place, flops=flops)
        if arm == "recipe":
            # Nothing chooses among its settings: seeds that no study before this one has had.
            test = _test(model, size=size, num_seeds=size.fresh * (seed + 1), out=folder / f"{model}_recipe_test")
            test = test[size.fresh * seed :]
        else:
            test = _test(model, size=size, num_seeds=size.fresh, out=place.with_name(f"{arm}_test"), tuned=str(place))
        found = dataclasses.replace(found, test=test)
        best = best_at(found.tries, flops=flops, higher=higher_is_better(config.decides))
        shown = "none" if best is None else f"{best:.5f}"
        say(f"{model}, seed {seed}, {arm}: {len(found.tries)} tries, valid {shown}, test {statistics.fmean(test):.5f}")
        yield found


def best_at(tries: Sequence[Try], *, flops: float, higher: bool) -> float | None:
    """Return the best value of the tries that were complete when so many FLOPs were spent; None before the first."""
    within = []
    spent = 0.0
    for each in tries:
        spent += each.spent.flops
        if spent > flops * (1.0 + 1e-9):
            break
        within.append(each)
    steps = best_so_far(within, higher=higher)
    return steps[-1][1] if steps else None


def costs_in_tries(model: str, *, size: Size, folder: Path, data: PreparedData) -> list[tuple[float, float]]:
    """Return processor seconds of a try and of the same run without a study, in pairs."""
    kept = folder / f"{model}_costs.json"
    found: list[list[float]] = _KEPT.read(kept)["pairs"] if kept.exists() else []
    config = _of_luck(_config(model, size=size), number=0)
    run_config = load_config(
        _luck_folder(folder / f"{model}_seed0" / "recipe", 0) / "tries" / model / f"try0_seed{SEED}"
    )
    for number in range(len(found), size.pairs):
        # Nothing is trained twice in one folder; a call that was killed leaves folders that nobody counts.
        place = folder / f"{model}_costs" / f"pair{number}_{time.time_ns()}"
        seconds = {}
        for part in ("try", "run") if number % 2 else ("run", "try"):
            if part == "try":
                seconds[part] = tune(config, out=place / "try").inside_s
            else:
                request = RunRequest(model=model, variant=0, config=run_config, folder=place / "run")
                begin = time.process_time()
                finish_run(request, data=data, read_test=False, progress=NoProgress())
                seconds[part] = time.process_time() - begin
        found.append([seconds["try"], seconds["run"]])
        _KEPT.write(kept, {"pairs": found})
    return [(tried, plain) for tried, plain in found]


def _config(model: str, *, size: Size, seed: int = SEED) -> TuneConfig:
    """Return the study of `tuned`, from which the others are made."""
    return TuneConfig(
        data=ComparedData.SYNTHETIC,
        models=(model,),
        rows=size.rows,
        budget=size.budget,
        max_epochs=size.epochs,
        seed=seed,
    )


def _of_luck(config: TuneConfig, *, number: int) -> TuneConfig:
    """Return a study whose only try is the recipe with another seed."""
    return dataclasses.replace(config, budget=1, pruner=Pruner.NONE, seed=config.seed + number)


def _luck_folder(folder: Path, number: int) -> Path:
    return folder / f"luck{number}"


def _searched(arm: str, config: TuneConfig, folder: Path) -> Search:
    """Make a study, or take what it has found: to ask one that is over again would add to what it has cost."""
    kept = folder.with_name(f"{folder.name}.json")
    if not kept.exists():
        tuning = tune(config, out=folder)
        tries = [_plain(each) for each in tuning.models[0].tries]
        _KEPT.write(kept, {"tries": tries, "outside_s": tuning.outside_s, "inside_s": tuning.inside_s})
    found = _KEPT.read(kept)
    tries = tuple(_try(each) for each in found["tries"])
    return Search(arm=arm, tries=tries, outside_s=found["outside_s"], inside_s=found["inside_s"])


def _with_other_seeds(config: TuneConfig, folder: Path, *, flops: float) -> Search:
    """Train the recipe by one seed after the other until the FLOPs are spent."""
    found = Search(arm="recipe", tries=())
    while found.spent.flops < flops:
        number = len(found.tries)
        one = _searched("recipe", _of_luck(config, number=number), _luck_folder(folder, number))
        found = dataclasses.replace(
            found,
            tries=(*found.tries, *(dataclasses.replace(each, number=number) for each in one.tries)),
        )
    return found


def _test(model: str, *, size: Size, num_seeds: int, out: Path, tuned: str = "") -> tuple[float, ...]:
    """Return the test metric of the choice of a search, or of the recipe, by fresh seed."""
    config = CompareConfig(
        data=ComparedData.SYNTHETIC,
        models=(model,),
        seeds=num_seeds,
        rows=size.rows,
        max_epochs=0 if tuned else size.epochs,
        tuned=tuned,
    )
    return tuple(compare(config, out=out).models[0].values(config.metric))


def _add_searches(report: Report, model: str, searches: Sequence[Search]) -> None:
    """Add a table of the searches of one model, means over seeds, and a plot of their tries."""
    metric = _config(model, size=Size(rows=1, budget=1, seeds=1, fresh=1, epochs=0, pairs=0)).decides
    higher = higher_is_better(metric)
    by_seed = [searches[begin : begin + len(ARMS)] for begin in range(0, len(searches), len(ARMS))]
    heads = " | ".join(f"valid, {part:.0%} of compute" for part in PARTS)
    lines = [
        f"**{model}**, {metric}, means over {len(by_seed)} searches each:",
        "",
        f"| search | tries | pruned | FLOPs | tries a CPU minute | {heads} | test, fresh seeds |",
        "|---|---:|---:|---:|---:|" + "---:|" * (len(PARTS) + 1),
    ]
    for arm in ARMS:
        mine = [each for each in searches if each.arm == arm]
        best = []
        for part in PARTS:
            values = []
            for group in by_seed:
                flops = part * group[0].spent.flops
                values.append(
                    best_at(next(each for each in group if each.arm == arm).tries, flops=flops, higher=higher)
                )
            known = [value for value in values if value is not None]
            best.append(f"{statistics.fmean(known):.5f}" if len(known) == len(values) else "")
        test = [value for each in mine for value in each.test]
        spread = f" ± {statistics.stdev(test):.5f}" if len(test) > 1 else ""
        pruned = sum(each.count(Ended.PRUNED) for each in mine) / sum(len(each.tries) for each in mine)
        cells = [
            f"{statistics.fmean(len(each.tries) for each in mine):.0f}",
            f"{pruned:.0%}",
            short(statistics.fmean(each.spent.flops for each in mine) / 1e9) + " G",
            f"{statistics.fmean(each.per_minute for each in mine):.1f}",
            *best,
            f"{statistics.fmean(test):.5f}{spread}",
        ]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    tuned = [each for each in searches if each.arm == "tuned"]
    report.tables.append("\n".join(lines))
    saved = statistics.fmean(each.saved for each in tuned)
    report.notes.append(f"{model}: pruning saved {saved:.0%} of the FLOPs that as many complete tries would have cost")
    report.figures += [
        _figure(
            f"tune_{model}_{arm}_test", statistics.fmean(v for each in searches if each.arm == arm for v in each.test)
        )
        for arm in ARMS
    ]
    report.figures.append(_figure(f"tune_{model}_pruning_saved", saved))
    lines_of = [
        (f"{each.arm} {index // len(ARMS)}", ARMS.index(each.arm), each.tries) for index, each in enumerate(searches)
    ]
    report.plots.append((f"tune_{model}.png", lambda path: _draw(path, lines_of, metric=metric)))


# ------------------------------------------------------------------------------------------------- a study reported


def report_of_study(folder: Path) -> Report:
    """Return the report of a study that `ziggurat tune` has made."""
    study: dict[str, Any] = TUNING.read(folder / "tuning.json")
    name = f"tune_{study['data']}".replace("-", "_")
    metric: str = study["metric"]
    higher = higher_is_better(metric)
    models = {each["name"]: [_try(one) for one in each["tries"]] for each in study["models"]}
    budget = study["budget"]["tries"]
    told = study["inside_s"] + study["outside_s"]
    beside = study["outside_s"] / told if told else 0.0
    # Tries count what a call spent that was killed after its last report, too.
    in_tries = sum(each.spent.cpu_s for tries in models.values() for each in tries)
    seconds = max(in_tries, study["inside_s"]) + study["outside_s"]
    ended = {key: sum(each.ended is not Ended.RUNNING for each in tries) for key, tries in models.items()}
    is_whole = bool(budget) and all(number >= budget for number in ended.values())
    minutes = seconds / 60.0 / CORES
    limits: dict[str, str] = dict(study.get("limits", {}))  # reports of older studies have none
    if study.get("max_epochs"):
        limits["max_epochs"] = str(study["max_epochs"])
    flags = "".join(f" --{name.replace('_', '-')} {limit}" for name, limit in limits.items())
    report = Report(
        benchmark=name,
        claim=f"A study of `ziggurat tune`: {study['data']}, protocol {study['protocol']}, sampler {study['sampler']}, "
        f"pruner {study['pruner']}; validation data alone. Every try is in the JSON.",
        command=f"ziggurat tune {study['data']} --models {','.join(models)} --budget {budget}{flags} --out FOLDER; "
        "ziggurat bench tune --study FOLDER",
    )
    report.tables += [
        _models_table(models, metric=metric, higher=higher),
        _progress_table(models, metric=metric, higher=higher),
        _importances_table({each["name"]: each["importances"] for each in study["models"]}),
        *(_best_table(key, tries, higher=higher) for key, tries in models.items()),
    ]
    report.figures = [
        _figure(f"{name}_beside_share", beside, goal=MAX_OVERHEAD),
        _figure(f"{name}_minutes_on_two_cores", minutes, goal=MAX_MINUTES if is_whole else 0.0),
    ]
    so_far = "" if is_whole else "; the study is not over: " + ", ".join(f"{key} {n}" for key, n in ended.items())
    report.notes += [
        f"{seconds:,.0f} processor seconds of {study['calls']} calls, {minutes:.1f} minutes of {CORES} cores, without "
        f"starting Python and preparing data{so_far}",
        f"{100 * beside:.2f} % of them beside tries: asking, storage, reports of the study",
        *study["notes"],
    ]
    report.extra["study"] = study
    lines = [(key, index, tries) for index, (key, tries) in enumerate(models.items())]
    report.plots.append((f"{name}.png", lambda path: _draw(path, lines, metric=metric)))
    return report


def _models_table(models: Mapping[str, Sequence[Try]], *, metric: str, higher: bool) -> str:
    lines = [
        f"| model | valid {metric}, best | as given | best try | tries | complete | pruned | no value | CPU s | FLOPs "
        "| of complete tries | tries a CPU minute |",
        "|---|" + "---:|" * 11,
    ]
    for name, tries in models.items():
        search = Search(arm=name, tries=tuple(tries))
        steps = best_so_far(tries, higher=higher)
        given = next((each.value for each in tries if each.number == 0), None)
        complete = sum((each.spent for each in tries if each.ended is Ended.COMPLETE), Spent())
        cells = [
            f"{steps[-1][1]:.5f}" if steps else "",
            "" if given is None else f"{given:.5f}",
            str(steps[-1][0]) if steps else "",
            str(len(tries)),
            str(search.count(Ended.COMPLETE)),
            str(sum(each.ended is Ended.PRUNED and not each.why for each in tries)),
            str(sum(bool(each.why) for each in tries)),
            f"{search.spent.cpu_s:,.0f}",
            short(search.spent.flops / 1e12) + " T",
            f"{complete.flops / search.spent.flops:.0%}" if search.spent.flops else "",
            f"{search.per_minute:.2f}",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _progress_table(models: Mapping[str, Sequence[Try]], *, metric: str, higher: bool) -> str:
    """Return the best so far, after so many tries and after so much of the compute of the model that spent least."""
    counts = [count for count in (1, 5, 10, 20, 30, 40) if count <= max(map(len, models.values()))]
    least = min(Search(arm=name, tries=tuple(tries)).spent.flops for name, tries in models.items())
    heads = [*(f"{count} tries" for count in counts), *(f"{short(part * least / 1e12)} TFLOP" for part in PARTS)]
    lines = [f"Best validation {metric} so far:", "", f"| model | {' | '.join(heads)} |"]
    lines.append("|---|" + "---:|" * len(heads))
    for name, tries in models.items():
        steps = [best_so_far(tries[:count], higher=higher) for count in counts]
        values = [each[-1][1] if each else None for each in steps]
        values += [best_at(tries, flops=part * least, higher=higher) for part in PARTS]
        lines.append(f"| {name} | {' | '.join('' if value is None else f'{value:.5f}' for value in values)} |")
    return "\n".join(lines)


def _importances_table(importances: Mapping[str, Mapping[str, float]]) -> str:
    lines = ["Share of settings in what tells good tries from the others (PED-ANOVA):", ""]
    for name, shares in importances.items():
        shown = ", ".join(f"{setting} {share:.0%}" for setting, share in list(shares.items())[:6])
        lines.append(f"- {name}: {shown or 'too few complete tries'}")
    return "\n".join(lines)


def _best_table(name: str, tries: Sequence[Try], *, higher: bool) -> str:
    steps = best_so_far(tries, higher=higher)
    if not steps:
        return f"{name}: no complete try."
    if steps[-1][0] == 0:
        return f"{name}: no try was better than the settings as given."
    best = next(each for each in tries if each.number == steps[-1][0])
    given = next(each for each in tries if each.number == 0)
    lines = [f"{name}, try {best.number}:", "", "| setting | best | as given |", "|---|---:|---:|"]
    lines += [
        f"| {key} | {_value(value)} | {_value(given.values.get(key, ''))} |" for key, value in best.values.items()
    ]
    return "\n".join(lines)


def _draw(path: Path, lines: Sequence[tuple[str, int, Sequence[Try]]], *, metric: str) -> None:
    """Draw the best so far against tries and FLOPs, a line each; colours by number."""
    from matplotlib.figure import Figure

    higher = higher_is_better(metric)
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    by_tries, by_compute = figure.subplots(1, 2, sharey=True)
    for name, color, tries in lines:
        steps = best_so_far(tries, higher=higher)
        if not steps:
            continue
        spent = list(itertools.accumulate(each.spent.flops for each in tries))
        place = {each.number: index for index, each in enumerate(tries)}
        indices = [*(place[number] for number, _ in steps), len(tries) - 1]
        values = [*(value for _, value in steps), steps[-1][1]]
        style: dict[str, Any] = {"where": "post", "color": f"C{color}", "label": name, "alpha": 0.8}
        by_tries.step([index + 1 for index in indices], values, **style)
        by_compute.step([spent[index] for index in indices], values, **style)
    by_tries.set_xlabel("tries")
    by_compute.set_xlabel("FLOPs spent")
    by_tries.set_ylabel(f"best validation {metric} so far")
    for axes in (by_tries, by_compute):
        axes.grid(alpha=0.3)
        axes.ticklabel_format(axis="y", useOffset=False)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)


def _figure(name: str, value: float, *, goal: float = 0.0, **more: object) -> dict[str, object]:
    """Return a figure that is good where it is small."""
    verdict = {"goal": goal, "verdict": "met" if value <= goal else "missed"} if goal else {}
    return {"name": name, "value": value, **verdict, **more}


def _try(data: Mapping[str, Any]) -> Try:
    """Return a try as the report of a study keeps it."""
    return Try(
        **{
            **data,
            "reached": {int(step): value for step, value in data["reached"].items()},
            "ended": Ended(data["ended"]),
            "spent": Spent(**data["spent"]),
        }
    )


def _plain(each: Try) -> dict[str, object]:
    return {**dataclasses.asdict(each), "ended": each.ended.value}


def _value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
