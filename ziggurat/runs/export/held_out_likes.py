"""Held-out likes of a run as questions to the chain of an export: would it put the item that was liked first?

    positive samples of a split ──► a seeded sample ──► their raw rows, as requests ─┐
    items of the training rows, what each user had before ───────────────────────────┴─► chain ──► candidates, scores

It is the full ranking of `training/metrics/full_ranking.py`, asked of the chain as it is served, index and ranker
included: the same questions, the same items (those of the training rows), and the same ones left out. Rows of other
splits than those that are asked for, and those before them, are neither asked nor counted as had.

Items have the columns of the export's catalogue. Cost: one pass over the training rows, one over the raw files, and
the candidates of each question through the ranker.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import torch
from jaxtyping import Bool, Float32, Float64, Int64
from numpy.typing import NDArray
from torch import Tensor

from ziggurat.data.encoded.dataset import EncodedDataset
from ziggurat.data.preprocess.prepared import PreparedData
from ziggurat.data.preprocess.splits import SplitBy
from ziggurat.features.batch import Batch
from ziggurat.features.schema import Schema, column_of
from ziggurat.models.contract.losses import labelled_weights
from ziggurat.runs.export.data import RunData
from ziggurat.runs.export.parity import plain_columns, request_rows
from ziggurat.serving.answering.chain import OVER_ARCH, RETRIEVAL, Candidates, Chain, Question
from ziggurat.serving.answering.sides import encode_frame
from ziggurat.training.evaluation.evaluate import ordered_batches
from ziggurat.training.evaluation.full_ranking_pass import FullRanking
from ziggurat.training.metrics.full_ranking import left_out
from ziggurat.training.report.progress import NoProgress, Progress

_AT_ONCE = 64
_BATCH = 8_192


@dataclass(frozen=True, kw_only=True)
class LikesWanted:
    """The choice of likes that become questions.

    Args:
        split: valid or test.
        most: questions; of more likes a sample is drawn.
        seed: of the sample.
    """

    split: str = "valid"
    most: int = 4_000
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class HeldOutLikes:
    """Questions whose answers are known.

    Args:
        questions: raw columns of users, and the items that they had before and that do not take part.
        targets: number of each one's item in the catalogue; -1 where it is not there, or training never saw it.
        weights: of each question, all labels together.
        groups: number of each one's user, whose questions hang together.
        num_all: positive samples of the split.
        chain: with the items of the training rows alone.
    """

    questions: Sequence[Question]
    targets: Int64[np.ndarray, " Q"]
    weights: Float64[np.ndarray, " Q"]
    groups: Int64[np.ndarray, " Q"]
    num_all: int
    chain: Chain

    @property
    def num_users(self) -> int:
        """Users who ask."""
        return len(np.unique(self.groups))


@dataclass(frozen=True, kw_only=True)
class ScoredCandidates:
    """The candidates of all questions with what a formula may name, padded to one length.

    Args:
        items: numbers in the catalogue; -1 where there are fewer.
        scores: by name.
        target: which candidate is the item that was liked.
        of_tasks: names of inner products with the vector of one task.
    """

    items: Int64[Tensor, "Q C"]
    scores: dict[str, Float32[Tensor, "Q C"]]
    target: Bool[Tensor, "Q C"]
    of_tasks: tuple[str, ...] = ()

    def ranks(self, values: Float64[Tensor, "Q C"]) -> Int64[Tensor, "Q"]:
        """The rank of the target of each question, from 1 on; 0 where it is no candidate.

        Args:
            values: what orders; of equal ones the item that is earlier in the catalogue is first, as in answers.
        """
        is_there = self.items >= 0
        own = torch.where(self.target, values, -torch.inf).amax(dim=1, keepdim=True)
        number = torch.where(self.target, self.items, -1).amax(dim=1, keepdim=True)
        ahead = (values > own) | ((values == own) & (self.items < number))
        return torch.where(self.target.any(dim=1), (ahead & is_there).sum(dim=1) + 1, 0)


def held_out_likes(
    prepared: PreparedData, *, chain: Chain, data: RunData, schemas: Sequence[Schema], wanted: LikesWanted
) -> HeldOutLikes:
    """The likes of a split as questions.

    Args:
        prepared: of the run that retrieves.
        chain: of its export.
        data: its raw files.
        schemas: of the models, whose columns of users are wanted.
        wanted: split and sample.
    """
    dataset = prepared.valid if wanted.split == "valid" else prepared.test
    assert dataset is not None, "who asks looks first"
    # Who is asked in the test split has had the items of his validation samples by then.
    before = () if wanted.split == "valid" or prepared.valid is None else (prepared.valid,)
    ranking = FullRanking(prepared.train, before=before)
    places = _Places.of(chain, ranking)
    of_item = chain.needed_catalogue.columns.features
    chain = dataclasses.replace(chain, index=without(chain, places.unknown))
    rows, num_all = _sampled(dataset, most=wanted.most, seed=wanted.seed)
    found = _facts(dataset, rows, ranking=ranking)
    raw = _raw_rows(data, rows, split=wanted.split, schemas=schemas, of_item=of_item)
    # The protocol may let a target win that the user had: it is then not among what is left out.
    spared = found.targets if ranking.repeats.target_can_win else np.full_like(found.targets, -1)
    questions = [
        Question(row=row, k=1, exclude=places.of_items(had, but=target))
        for row, had, target in zip(raw, found.had, spared.tolist(), strict=True)
    ]
    return HeldOutLikes(
        questions=questions,
        targets=places.first(found.targets),
        weights=found.weights,
        groups=found.groups,
        num_all=num_all,
        chain=chain,
    )


def scored_candidates(likes: HeldOutLikes, *, progress: Progress | None = None) -> ScoredCandidates:
    """Ask the chain, and score all candidates by all of its parts.

    Args:
        likes: questions and chain.
        progress: shows questions.
    """
    progress = progress or NoProgress()
    found = list[Candidates]()
    progress.begin("candidates of held-out likes", total=len(likes.questions))
    for first in range(0, len(likes.questions), _AT_ONCE):
        found += likes.chain.candidates(likes.questions[first : first + _AT_ONCE])
        progress.update(len(found))
    progress.end()
    items = _padded([each.items for each in found], fill=-1)
    columns = {name: [each.tasks[:, at] for each in found] for at, name in enumerate(likes.chain.labels)}
    columns[RETRIEVAL] = [each.retrieval for each in found if each.retrieval is not None]
    if likes.chain.rescorer is not None:
        columns[OVER_ARCH] = [each.over_arch for each in found if each.over_arch is not None]
    tasks = () if likes.chain.encoder is None else likes.chain.encoder.tasks
    products = [each.of_tasks for each in found if each.of_tasks is not None]
    columns |= {name: [each[:, at] for each in products] for at, name in enumerate(tasks)}
    targets = torch.from_numpy(likes.targets).unsqueeze(1)
    return ScoredCandidates(
        items=items,
        scores={name: _padded(parts, fill=0.0) for name, parts in columns.items()},
        target=(items == targets) & (targets >= 0),
        of_tasks=tasks,
    )


def without(chain: Chain, items: NDArray[np.int64]) -> Any:
    """The search of a chain that does not find some items."""
    index = chain.needed_index
    if not len(items):
        return index
    # A change that changes nothing, so that only what is gone counts.
    nothing = torch.empty(0, dtype=torch.int64)
    vectors = index.vectors_of(nothing)
    return index.changed(nothing, vectors=vectors, items=chain.needed_catalogue.frame.head(0), gone=items.tolist())


@dataclass(frozen=True, kw_only=True)
class _Places:
    """The positions of the items of a full ranking in a catalogue.

    Args:
        order: rows of the catalogue by the number of their item in the ranking.
        numbers: of the items in that order; -1 for items that training never saw.
    """

    order: NDArray[np.int64]
    numbers: NDArray[np.int64]

    @staticmethod
    def of(chain: Chain, ranking: FullRanking) -> _Places:
        side = encode_frame(chain.needed_encoder.items, chain.needed_catalogue.frame)
        at = [spec.name for spec in side.inputs.single].index(ranking.item.name)
        numbers = ranking.numbers(side.batch.single[at].numpy())
        order = np.argsort(numbers, kind="stable")
        return _Places(order=order, numbers=numbers[order])

    @property
    def unknown(self) -> NDArray[np.int64]:
        """Items of the catalogue that are none of the ranking's."""
        return self.order[: np.searchsorted(self.numbers, 0)]

    def first(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The row of the catalogue of each item; -1 where there is none."""
        if not len(self.numbers):
            return np.full(len(numbers), -1)
        at = np.searchsorted(self.numbers, numbers).clip(max=len(self.numbers) - 1)
        return np.where((self.numbers[at] == numbers) & (numbers >= 0), self.order[at], -1)

    def of_items(self, numbers: NDArray[np.int64], *, but: int) -> Tensor:
        """The rows of the catalogue of some items, without one."""
        numbers = np.unique(numbers[(numbers >= 0) & (numbers != but)])
        # An item may have several rows, side by side in `order`: one gather takes the ranges of all items.
        first, end = (np.searchsorted(self.numbers, numbers, side=side) for side in ("left", "right"))
        lengths = end - first
        starts = np.cumsum(lengths) - lengths
        return torch.from_numpy(self.order[np.arange(lengths.sum()) + np.repeat(first - starts, lengths)])


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """The contents of the encoded samples of questions; items are numbers of the ranking."""

    targets: NDArray[np.int64]
    had: list[NDArray[np.int64]]
    weights: NDArray[np.float64]
    groups: NDArray[np.int64]


def _weights(batch: Batch, dataset: EncodedDataset) -> Float64[np.ndarray, " B"]:
    known = torch.where(batch.labels.isnan(), 0.0, batch.labels)
    return (labelled_weights(batch.labels, batch.weights, inputs=dataset.inputs) * known).sum(dim=1).double().numpy()


def _batches(dataset: EncodedDataset) -> Iterator[Batch]:
    return ordered_batches(dataset, batch_size=_BATCH).batches(epoch=0)


def _sampled(dataset: EncodedDataset, *, most: int, seed: int) -> tuple[NDArray[np.int64], int]:
    """Raw rows of the positive samples that are asked, rising; and how many there are."""
    rows = [batch.row_ids.numpy()[_weights(batch, dataset) > 0] for batch in _batches(dataset)]
    rows_all = np.sort(np.concatenate(rows)) if rows else np.empty(0, dtype=np.int64)
    if len(rows_all) <= most:
        return rows_all, len(rows_all)
    chosen = np.random.default_rng(seed).choice(len(rows_all), size=most, replace=False)
    return rows_all[np.sort(chosen)], len(rows_all)


def _facts(dataset: EncodedDataset, rows: NDArray[np.int64], *, ranking: FullRanking) -> _Facts:
    had: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)] * len(rows)
    targets = np.full(len(rows), -1)
    groups = np.arange(len(rows))
    weights = np.zeros(len(rows))
    for batch in _batches(dataset):
        mine = np.flatnonzero(np.isin(batch.row_ids.numpy(), rows))
        at = np.searchsorted(rows, batch.row_ids.numpy()[mine])
        targets_here = ranking.targets(batch)[mine]
        targets[at] = targets_here
        weights[at] = _weights(batch, dataset)[mine]
        if batch.groups is not None:
            groups[at] = batch.groups.numpy()[mine]
        _, pairs = left_out(targets_here, ranking.had(batch, mine), repeats=ranking.repeats)
        # Pairs lie question by question: these are where each one begins.
        bounds = np.searchsorted(pairs[:, 0], np.arange(len(mine) + 1))
        for number, place in enumerate(at.tolist()):
            had[place] = pairs[bounds[number] : bounds[number + 1], 1]
    return _Facts(targets=targets, had=had, weights=weights, groups=groups)


def _raw_rows(
    data: RunData, rows: NDArray[np.int64], *, split: str, schemas: Sequence[Schema], of_item: Sequence[str]
) -> list[dict[str, object]]:
    """The columns of users of some raw rows, as requests have them."""
    by_files = data.config.split.by is SplitBy.FILES
    source = data.source(getattr(data.config, split)) if by_files else data.source()
    features = {column_of(each): each for schema in schemas for each in schema.features}
    features = {name: each for name, each in features.items() if name in source.columns() and name not in of_item}
    found: list[pl.DataFrame] = []
    for chunk in source.frames(columns=tuple(features)):
        wanted = np.isin(chunk.global_rows, rows)
        if wanted.any():
            chunk = chunk.with_number_columns(data.schema.numbers)
            found.append(plain_columns(chunk.filter(wanted), features.values()))
    return request_rows(pl.concat(found)) if found else []


def _padded(parts: Sequence[Tensor], *, fill: float) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True, padding_value=fill)
