"""Two-tower retrieval on MovieLens-1M: all movies ranked for every like of the test period, against two baselines.

    two_tower       the recipe `movielens_two_tower`, one pass over the training rows, with several seeds
    matrix factors  alternating least squares of the library implicit; users folded in from all they liked before
    popularity      movies by their number of likes in the training rows

The three answer the same questions (the likes of a split), about the same items (those of the training rows), and leave
out the same ones (what the user had before), by the same code. Settings of both are chosen on validation rows; the test
rows are read once for each seed. What is finished is kept in `runs/two_tower` and not computed again.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor, nn

from benchmarks.harness import PEER_PYTHON, ROOT, say
from benchmarks.quality import seeded
from benchmarks.report import Report
from ziggurat.data.datasets import fetch
from ziggurat.data.preprocess.prepared import PreparedData
from ziggurat.features.batch import Batch
from ziggurat.recipes.catalogue import recipe_named
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs.execute import prepare_run, train_run
from ziggurat.training.evaluation.evaluate import ordered_batches
from ziggurat.training.evaluation.full_ranking_pass import FullRanking
from ziggurat.training.report.progress import show_progress

RECIPE, SEEDS = "movielens_two_tower", 5
SHOWN = ("full_recall@10", "full_recall@50", "full_recall@100", "full_ndcg@10", "full_mrr", "full_coverage@50")
JUDGE = "full_recall@50"
GRID = tuple((factors, 0.1, 10.0) for factors in (8, 16, 32, 64, 128))  # factors, regularisation, alpha
ITERATIONS = 15


@dataclass(frozen=True, kw_only=True)
class Likes:
    """All likes of the data, by user and time; users are numbers, items those of the training rows.

    Args:
        keys: user and time in one number, rising.
        items: of each like.
        row_keys: of every raw row.
    """

    keys: np.ndarray
    items: np.ndarray
    row_keys: np.ndarray


class Given(nn.Module):
    """Vectors that somebody else computed, in the place of a model that finds items.

    Args:
        users: (questions, D).
        items: (N, D), in the order of the ranking's items.
        rows: raw row of each question, rising.
        ranking: the items.
    """

    def __init__(self, users: Tensor, items: Tensor, *, rows: np.ndarray, ranking: FullRanking) -> None:
        super().__init__()
        self.inputs = ranking.inputs
        self.weight = nn.Parameter(torch.zeros(1))
        self._users, self._items, self._rows, self._ranking = users, items, torch.from_numpy(rows), ranking

    def user_vectors(self, batch: Batch) -> Tensor:
        """Those of the rows' questions; any for rows that ask nothing."""
        places = torch.searchsorted(self._rows, batch.row_ids).clamp(max=len(self._rows) - 1)
        return self._users[places]

    def item_vectors(self, batch: Batch) -> Tensor:
        """Those of the rows' items."""
        return self._items[torch.from_numpy(self._ranking.targets(batch))]


def evaluate(model: Given, ranking: FullRanking, dataset: object) -> dict[str, float]:
    """The metrics of given vectors on a split."""
    asked = ranking.begin(model)
    for batch in ordered_batches(dataset, batch_size=8192).batches(epoch=0):
        asked.update(batch)
    return asked.compute()


def liked_rows(dataset: Any) -> tuple[np.ndarray, np.ndarray]:
    """Raw rows of a split that are likes, rising; and their rows in the movie table."""
    rows, items = [], []
    for batch in ordered_batches(dataset, batch_size=65_536).batches(epoch=0):
        liked = batch.labels[:, 0] > 0
        rows.append(batch.row_ids[liked].numpy())
        names = [spec.name for spec in dataset.inputs.single]
        items.append(batch.single[names.index("movie_id")][liked].numpy())
    order = np.argsort(np.concatenate(rows))
    return np.concatenate(rows)[order], np.concatenate(items)[order]


def popularity(ranking: FullRanking, prepared: PreparedData, dataset: object) -> dict[str, float]:
    """Movies by their likes in the training rows."""
    numbers = ranking.numbers(liked_rows(prepared.train)[1])
    counts = np.bincount(numbers[numbers >= 0], minlength=ranking.items.num_rows)
    rows, _ = liked_rows(dataset)
    items = torch.from_numpy(counts).float().unsqueeze(1)
    return evaluate(Given(torch.ones(len(rows), 1), items, rows=rows, ranking=ranking), ranking, dataset)


def all_likes(ranking: FullRanking, prepared: PreparedData) -> Likes:
    """Likes of the raw file, with the numbers of their movies."""
    frame = pl.read_parquet(fetch("movielens-1m-histories"), columns=["user_id", "timestamp"])
    row_keys = frame.select(pl.col("user_id").cast(pl.Int64) * (1 << 40) + pl.col("timestamp")).to_series().to_numpy()
    parts = [liked_rows(each) for each in (prepared.train, prepared.valid, prepared.test)]
    rows, items = (np.concatenate(each) for each in zip(*parts, strict=True))
    numbers = ranking.numbers(items)
    rows, numbers = rows[numbers >= 0], numbers[numbers >= 0]
    order = np.argsort(row_keys[rows], kind="stable")
    return Likes(keys=row_keys[rows][order], items=numbers[order], row_keys=row_keys)


def before(likes: Likes, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What the users of some rows had liked strictly before: offsets and items."""
    keys = likes.row_keys[rows]
    first = np.searchsorted(likes.keys, keys >> 40 << 40)
    lengths = np.searchsorted(likes.keys, keys, side="left") - first
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return offsets, likes.items[np.arange(offsets[-1]) + np.repeat(first - offsets[:-1], lengths)]


def factorisation(
    ranking: FullRanking, prepared: PreparedData, *, split: str, likes: Likes, settings: Sequence[float], out: Path
) -> dict[str, float]:
    """Metrics of alternating least squares on a split, or what was found before.

    Args:
        ranking: items.
        prepared: the training rows, and those of the split.
        split: valid or test.
        likes: of all rows; those of a question are the ones strictly before it.
        settings: factors, regularisation, alpha, iterations, seed.
        out: keeps what was found.
    """
    kept = out / f"als_{split}_{'_'.join(f'{each:g}' for each in settings)}.json"
    if kept.exists():
        return json.loads(kept.read_text())
    dataset = prepared.valid if split == "valid" else prepared.test
    rows, items = liked_rows(prepared.train)
    numbers = ranking.numbers(items)
    users = likes.row_keys[rows][numbers >= 0] >> 40
    asked, _ = liked_rows(dataset)
    offsets, values = before(likes, asked)
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "in.npz", Path(folder) / "out.npz"
        np.savez(
            source,
            users=users,
            items=numbers[numbers >= 0],
            offsets=offsets,
            values=values,
            num_items=ranking.items.num_rows,
            settings=np.array(list(settings)),
        )
        subprocess.run(
            [str(PEER_PYTHON), "-m", "benchmarks.peers.implicit_als", str(source), str(target)], check=True, cwd=ROOT
        )
        found = np.load(target)
        vectors = torch.from_numpy(found["users"]).float(), torch.from_numpy(found["items"]).float()
    metrics = evaluate(Given(*vectors, rows=asked, ranking=ranking), ranking, dataset)
    kept.write_text(json.dumps(metrics))
    return metrics


def one_pass(seed: int) -> RunConfig:
    """The recipe with a seed and one epoch: minutes instead of a quarter of an hour, and no choice of an epoch."""
    config = seeded(recipe_named(RECIPE), seed)
    return replace(config, training=replace(config.training, epochs=1))


def two_tower(*, seeds: int, out: Path) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Validation and test metrics of the recipe, seed by seed."""
    valid, test = [], []
    for seed in range(seeds):
        folder = out / f"{RECIPE}_seed{seed}"
        progress = show_progress()
        progress.say(f"\n{RECIPE}, seed {seed}")
        config = one_pass(seed)
        result = train_run(config, folder=folder, resume=(folder / "config.json").exists(), progress=progress)
        valid.append(result.evaluations["valid"].metrics)
        test.append(result.evaluations["test"].metrics)
    return valid, test


def cell(values: list[float]) -> str:
    """Mean ± standard deviation over seeds."""
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.4f}{spread}"


def run(*, quick: bool = False) -> Report:
    """Train, factorise, count; one seed if quick."""
    seeds, grid = (1, GRID[:1]) if quick else (SEEDS, GRID)
    out = ROOT / "runs" / ("two_tower_quick" if quick else "two_tower")
    out.mkdir(parents=True, exist_ok=True)
    prepared = prepare_run(recipe_named(RECIPE), progress=show_progress())
    assert prepared.valid is not None
    assert prepared.test is not None
    on_valid, on_test = FullRanking(prepared.train), FullRanking(prepared.train, before=(prepared.valid,))
    likes = all_likes(on_valid, prepared)
    chosen: dict[tuple[float, ...], float] = {}
    for setting in grid:
        settings = (*setting, ITERATIONS, 0)
        metrics = factorisation(on_valid, prepared, split="valid", likes=likes, settings=settings, out=out)
        chosen[setting] = metrics[JUDGE]
        say(f"  factors, regularisation, alpha {setting}: valid {JUDGE} {metrics[JUDGE]:.4f}")
    best = max(chosen, key=chosen.__getitem__)
    factors = [
        factorisation(on_test, prepared, split="test", likes=likes, settings=(*best, ITERATIONS, seed), out=out)
        for seed in range(seeds)
    ]
    popular = popularity(on_test, prepared, prepared.test)
    valid, ours = two_tower(seeds=seeds, out=out)
    report = Report(
        benchmark="two_tower",
        claim="MovieLens-1M, time split: each like of the test period is to be found among all movies of the training "
        "rows but those that the user had before.",
        command="ziggurat bench two_tower",
    )
    rows = {"two_tower": ours, f"implicit ALS, factors {best[0]}, alpha {best[2]:g}": factors, "popularity": [popular]}
    lines = ["| model | seeds | " + " | ".join(SHOWN) + " |", "|---|---:|" + "---:|" * len(SHOWN)]
    lines += [
        f"| {name} | {len(found)} | " + " | ".join(cell([each[key] for each in found]) for key in SHOWN) + " |"
        for name, found in rows.items()
    ]
    report.tables.append("\n".join(lines))
    report.notes.append(
        f"chosen on validation rows by {JUDGE}: the temperature of the recipe; and of the factorisation "
        + ", ".join(f"{setting}: {value:.4f}" for setting, value in chosen.items())
        + " (factors, regularisation, alpha)"
    )
    report.extra["two_tower"] = {"test": ours, "valid": valid, "als": factors, "popularity": popular}
    return report
