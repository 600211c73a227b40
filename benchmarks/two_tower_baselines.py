"""What a two-tower model is compared with on MovieLens: implicit's matrix factorisation, and popularity.

Both answer the questions of a full ranking by vectors that they computed, through the code that ranks a model's.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor, nn

from benchmarks.harness import PEER_PYTHON, ROOT
from ziggurat.data.datasets import fetch
from ziggurat.data.preprocess.prepared import PreparedData
from ziggurat.features.batch import Batch
from ziggurat.training.evaluation.evaluate import ordered_batches
from ziggurat.training.evaluation.full_ranking_pass import FullRanking


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
