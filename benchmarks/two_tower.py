"""Two-tower retrieval on MovieLens-1M: all movies ranked for every like of a period, against baselines and variants.

    peers       the recipe `movielens_two_tower`, one pass over the training rows, against alternating least squares of
                the library implicit (users folded in from all they liked before) and popularity; test rows
    negatives   where negatives come from: in the block, uniform, mixed, mined; validation rows
    over_arch   found movies ordered anew by an MLP or a mixture of logits; validation rows
    tasks       a vector of a user for likes (4 and 5) and one for loves (5), against one for both; validation rows
    chain       the export with a ranker behind it (`two_tower_ranker.py`), and the formula that it chose, against
                retrieval alone; test rows

All answer the same questions (the likes of a split), about the same items (those of the training rows), and leave out
the same ones (what the user had before), by the same code. Whatever is chosen is chosen on validation rows; test rows
are read once for each seed. What is finished is kept in `--out` and not computed again.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, say
from benchmarks.quality import seeded
from benchmarks.report import Report
from benchmarks.two_tower_baselines import all_likes, factorisation, popularity
from benchmarks.two_tower_chain import chosen_formula, on_test
from benchmarks.two_tower_ranker import ranker_run
from ziggurat.features.schema import Label
from ziggurat.models import TwoTowerConfig, UserVectors
from ziggurat.models.contract.negatives import MiningConfig, NegativesConfig, NegativesKind
from ziggurat.models.retrieval.over_arch import OverArchConfig, OverArchKind, OverArchLearning
from ziggurat.recipes.catalogue import recipe_named
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs.execute import prepare_run, train_run
from ziggurat.studies.compare_statistics import paired_difference
from ziggurat.training.evaluation.full_ranking_pass import FullRanking
from ziggurat.training.records.run_folder import EVALUATION, RunFolder
from ziggurat.training.report.progress import show_progress

RECIPE = "movielens_two_tower"
PARTS = ("peers", "negatives", "over_arch", "tasks", "chain")
NEGATIVES = tuple(kind.value for kind in NegativesKind)
SHOWN = ("full_recall@10", "full_recall@50", "full_recall@100", "full_ndcg@10", "full_mrr", "full_coverage@50")
FEW = ("full_recall@50", "full_ndcg@10")
JUDGE = "full_recall@50"
GRID = tuple((factors, 0.1, 10.0) for factors in (8, 16, 32, 64, 128))  # factors, regularisation, alpha
ITERATIONS = 15
DRAWN = {
    "in_batch": NegativesConfig(),
    "uniform": NegativesConfig(kind=NegativesKind.UNIFORM, num_drawn=512),
    "mixed": NegativesConfig(kind=NegativesKind.MIXED, num_drawn=256),
    "mined": NegativesConfig(kind=NegativesKind.MINED, num_drawn=128, mining=MiningConfig(every=50, depth=100)),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is measured.

    Args:
        seeds: of what is compared on test rows.
        variant_seeds: of what is compared on validation rows.
        parts: of the benchmark.
        negatives: where they come from, to compare.
        out: folder with everything that is finished.
    """

    seeds: int = 5
    variant_seeds: int = 2
    parts: tuple[str, ...] = PARTS
    negatives: tuple[str, ...] = NEGATIVES
    out: str = "runs/two_tower"


def parse_options(arguments: Sequence[str]) -> Options:
    """Options of this benchmark's own."""
    parser = argparse.ArgumentParser(
        prog="ziggurat bench two_tower", description="Retrieval of movies, against baselines and variants."
    )
    parser.add_argument("--seeds", type=int, default=5, help="of what is compared on test rows")
    parser.add_argument("--variant-seeds", type=int, default=2, help="of what is compared on validation rows")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--negatives", default=",".join(NEGATIVES), help=f"some of {', '.join(NEGATIVES)}")
    parser.add_argument("--out", default="runs/two_tower", help="keeps what is finished")
    given = parser.parse_args(arguments)
    parts, negatives = (tuple(each.split(",")) if each else () for each in (given.parts, given.negatives))
    for option, names, known in (("--parts", parts, PARTS), ("--negatives", negatives, NEGATIVES)):
        for name in set(names) - set(known):
            parser.error(f"{option}: {name!r} is none of {', '.join(known)}")
    if min(given.seeds, given.variant_seeds) < 1:
        parser.error("--seeds and --variant-seeds of at least 1")
    return Options(
        seeds=given.seeds, variant_seeds=given.variant_seeds, parts=parts, negatives=negatives, out=given.out
    )


def one_pass(seed: int, **changes: Any) -> RunConfig:
    """The recipe with a seed and one epoch: minutes instead of a quarter of an hour, and no choice of an epoch."""
    config = seeded(recipe_named(RECIPE), seed)
    assert isinstance(config.model, TwoTowerConfig)
    return replace(config, training=replace(config.training, epochs=1), model=replace(config.model, **changes))


def two_tasks(seed: int, *, vectors: UserVectors) -> RunConfig:
    """The same with two labels of the rating."""
    config = one_pass(seed, user_vectors=vectors)
    (like,) = config.table_schema.labels
    labels = (like, Label(name="love", column=like.column or like.name, positive_from=5.0))
    return replace(config, table_schema=replace(config.table_schema, labels=labels))


def trained(config: RunConfig, *, folder: Path) -> dict[str, dict[str, float]]:
    """Metrics of a run by split; of a run that is finished those that it wrote then."""
    kept = {split: RunFolder(folder).evaluation(split) for split in ("valid", "test")}
    if not all(path.exists() for path in kept.values()):
        progress = show_progress()
        progress.say(f"\n{folder.name}")
        train_run(config, folder=folder, resume=(folder / "config.json").exists(), progress=progress)
    return {split: EVALUATION.read(path)["metrics"] for split, path in kept.items()}


def cell(values: Sequence[float]) -> str:
    """Mean ± standard deviation over seeds."""
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.4f}{spread}"


def difference(name: str, first: Sequence[float], second: Sequence[float]) -> str:
    """A line of the paired difference of two lists over seeds, with its test."""
    found = paired_difference(first, second)
    ahead = sum(a > b for a, b in zip(first, second, strict=True))
    tested = "" if len(first) == 1 else f", sd {found.sd:.4f}, p {found.t_p:.2g} (paired t, two-sided)"
    return f"{name}: {found.mean:+.4f}{tested}; ahead for {ahead} of {len(first)} seeds"


def table(rows: Mapping[str, Sequence[Mapping[str, float]]], *, shown: Sequence[str], first: str) -> str:
    """A table of means over seeds.

    Args:
        rows: metrics of each seed, by name of the row.
        shown: metrics.
        first: heading of the names.
    """
    lines = [f"| {first} | seeds | " + " | ".join(shown) + " |", "|---|---:|" + "---:|" * len(shown)]
    lines += [
        f"| {name} | {len(found)} | " + " | ".join(cell([each[key] for each in found]) for key in shown) + " |"
        for name, found in rows.items()
    ]
    return "\n".join(lines)


def peers(report: Report, options: Options, *, out: Path, grid: Sequence[tuple[float, ...]]) -> None:
    """The recipe against matrix factorisation and popularity, on test rows."""
    prepared = prepare_run(recipe_named(RECIPE), progress=show_progress())
    assert prepared.valid is not None
    assert prepared.test is not None
    on_valid, on_test_rows = FullRanking(prepared.train), FullRanking(prepared.train, before=(prepared.valid,))
    likes = all_likes(on_valid, prepared)
    chosen: dict[tuple[float, ...], float] = {}
    for setting in grid:
        settings = (*setting, ITERATIONS, 0)
        metrics = factorisation(on_valid, prepared, split="valid", likes=likes, settings=settings, out=out)
        chosen[setting] = metrics[JUDGE]
        say(f"  factors, regularisation, alpha {setting}: valid {JUDGE} {metrics[JUDGE]:.4f}")
    best = max(chosen, key=chosen.__getitem__)
    factors = [
        factorisation(on_test_rows, prepared, split="test", likes=likes, settings=(*best, ITERATIONS, seed), out=out)
        for seed in range(options.seeds)
    ]
    popular = popularity(on_test_rows, prepared, prepared.test)
    ours = [trained(one_pass(seed), folder=out / f"{RECIPE}_seed{seed}")["test"] for seed in range(options.seeds)]
    rows = {"two_tower": ours, f"implicit ALS, factors {best[0]}, alpha {best[2]:g}": factors, "popularity": [popular]}
    report.tables.append("### Test rows\n\n" + table(rows, shown=SHOWN, first="model"))
    mine = [each[JUDGE] for each in ours]
    report.notes.append(difference(f"{JUDGE}, two_tower less implicit ALS", mine, [each[JUDGE] for each in factors]))
    report.notes.append(difference(f"{JUDGE}, two_tower less popularity", mine, [popular[JUDGE]] * len(mine)))
    report.notes.append(
        f"chosen on validation rows by {JUDGE}: the temperature of the recipe; and of the factorisation "
        + ", ".join(f"{setting}: {value:.4f}" for setting, value in chosen.items())
        + " (factors, regularisation, alpha)"
    )
    report.extra["peers"] = {"two_tower": ours, "als": factors, "popularity": popular}


def negatives(report: Report, options: Options, *, out: Path) -> None:
    """Where negatives come from, on validation rows."""
    rows = {
        kind: [
            trained(one_pass(seed, negatives=DRAWN[kind]), folder=out / _name(kind, seed))["valid"]
            for seed in range(options.variant_seeds)
        ]
        for kind in options.negatives
    }
    report.tables.append("### Negatives, validation rows\n\n" + table(rows, shown=SHOWN, first="negatives"))
    report.extra["negatives"] = rows


def over_arch(report: Report, options: Options, *, out: Path) -> None:
    """What an OverArch does to the order of what was found, on validation rows."""
    rows: dict[str, list[dict[str, float]]] = {}
    for kind in (OverArchKind.MLP, OverArchKind.MIXTURE_OF_LOGITS):
        config = OverArchConfig(kind=kind, learning=OverArchLearning.ON_TOP)
        for seed in range(options.variant_seeds):
            folder = out / _name(kind.value, seed)
            trained(one_pass(seed, over_arch=config), folder=folder)
            fact = chosen_formula(folder, ranker=None, out=out / "exports" / folder.name, progress=show_progress())
            tried = {each["formula"]: each["ndcg"] for each in fact["tried"]}
            best = max(value for name, value in tried.items() if name not in ("retrieval", "over_arch"))
            found = {"retrieval": tried["retrieval"], "over_arch": tried["over_arch"], "best mixture": best}
            rows.setdefault(kind.value, []).append(found)
    shown = ("retrieval", "over_arch", "best mixture")
    heading = "### NDCG@10 of the OverArch over 2,000 found movies, validation rows\n\n"
    report.tables.append(heading + table(rows, shown=shown, first="OverArch"))
    report.extra["over_arch"] = rows


def tasks(report: Report, options: Options, *, out: Path) -> None:
    """A vector for each task against one for both, on validation rows."""
    shown = [f"{metric}/{label}" for label in ("like", "love") for metric in FEW]
    rows = {
        kind.value: [
            trained(two_tasks(seed, vectors=kind), folder=out / _name(f"tasks_{kind.value}", seed))["valid"]
            for seed in range(options.variant_seeds)
        ]
        for kind in UserVectors
    }
    report.tables.append(
        "### Two tasks, ratings from 4 on and of 5, validation rows\n\n"
        + table(rows, shown=shown, first="user vectors")
    )
    report.extra["tasks"] = rows


def chain(report: Report, options: Options, *, out: Path) -> None:
    """The chain with the formula that its export chose, against retrieval alone, on test rows."""
    progress, ranker = show_progress(), out / "ranker_seed0"
    trained(ranker_run(0, out=out), folder=ranker)
    chosen, found = [], []
    for seed in range(options.seeds):
        run, export = out / f"{RECIPE}_seed{seed}", out / "exports" / f"seed{seed}"
        trained(one_pass(seed), folder=run)
        chosen.append(chosen_formula(run, ranker=ranker, out=export, progress=progress))
        found.append(on_test(export, run=run, ranker=ranker, progress=progress))
    lines = [
        "| seed | formula, chosen on 4,000 validation likes | valid: retrieval, formula, `like` | "
        "test: retrieval, formula, `like` | test recall@100: index, exact |",
        "|---:|---|---|---|---|",
    ]
    for seed, (fact, test) in enumerate(zip(chosen, found, strict=True)):
        formula = fact["formula"]
        valid = {each["formula"]: each["ndcg"] for each in fact["tried"]}
        triples = [
            ", ".join(f"{each[name]:.4f}" for name in ("retrieval", formula, "like"))
            for each in (valid, test["ndcg@10"])
        ]
        recall = ", ".join(f"{test['recall@100'][name]:.4f}" for name in ("index", "exact"))
        lines.append(f"| {seed} | `{formula}` | {triples[0]} | {triples[1]} | {recall} |")
    report.tables.append("### The chain, NDCG@10\n\n" + "\n".join(lines))
    of = {
        name: [each["ndcg@10"][formula or each["formula"]] for each in found]
        for name, formula in (("retrieval", "retrieval"), ("chain", ""), ("like", "like"))
    }
    report.notes.append(
        f"NDCG@10 of {found[0]['likes']:,} of {found[0]['likes_of_split']:,} test likes (one draw): "
        + "; ".join(f"{name} {cell(values)}" for name, values in of.items())
    )
    report.notes.append(difference("NDCG@10, chain less retrieval alone", of["chain"], of["retrieval"]))
    worst = max(abs(each["recall@100"]["index"] - each["recall@100"]["exact"]) for each in found)
    report.notes.append(f"recall@100 of the index differs from that of a full scan by at most {worst:.5f} (goal 0.002)")
    report.extra["chain"] = {"chosen": chosen, "test": found}


def _name(variant: str, seed: int) -> str:
    """The folder of a run; negatives of the block are what the recipe itself has."""
    return f"{RECIPE}_seed{seed}" if variant == "in_batch" else f"{RECIPE}_{variant}_seed{seed}"


def run(*, quick: bool = False, options: Options | None = None) -> Report:
    """Train, factorise, count; one seed of each if quick."""
    options = options or Options()
    grid = GRID
    if quick:
        options = replace(options, seeds=1, variant_seeds=1, out=f"{options.out}_quick")
        grid = GRID[:1]
    out = ROOT / options.out
    out.mkdir(parents=True, exist_ok=True)
    report = Report(
        benchmark="two_tower",
        claim="MovieLens-1M, time split: each like of a period is to be found among all movies of the training rows "
        "but those that the user had before.",
        command="ziggurat bench two_tower",
    )
    for part in options.parts:
        if part == "peers":
            peers(report, options, out=out, grid=grid)
        else:
            {"negatives": negatives, "over_arch": over_arch, "tasks": tasks, "chain": chain}[part](
                report, options, out=out
            )
    return report
