"""DrawnNegatives: draws items for each block of samples of a batch, and searches for those that are hard to tell apart.

    batch of the data ──► draw m items a block ──► their features, as m more samples of the block ──► step

What is drawn for a block depends on the seed, the step and the block's first sample, and on nothing else: on any number
of ranks, and after a resume, the same samples get the same negatives. The items are those of the training data, each
with the features of the last row that names it.

Mined negatives: every so many steps the present model gives vectors to all items and to all users (each as their last
training row describes them), and the best items of each user are found by inner product, but for those that the user
likes in the training data. Drawn for a block are such items of its users, one of the first `depth` each; an item that
is drawn twice for a block counts once. The lists are state of the run and lie in its checkpoints, so that a run that is
resumed between two searches goes on with the same ones.

Cost of a search: the encoders of all users and items, and 2·U·N·D FLOPs for U users and N items; on many ranks each
searches for all users. Memory: U · depth numbers of 4 bytes, and the item features of N samples.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from ziggurat.data.encoded.loader import Dataset
from ziggurat.data.encoded.records import GROUP_COLUMN, WEIGHT_COLUMN, label_column, table_to_batch
from ziggurat.errors import ConfigError, DataError
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.features.jagged import JaggedRows
from ziggurat.models import Model
from ziggurat.models.contract.model import device_of
from ziggurat.models.contract.negatives import CANDIDATES, DrawnLayout, NegativesConfig, NegativesKind
from ziggurat.models.contract.step_draw import StepDraw
from ziggurat.training.evaluation.full_ranking_pass import FindsItems, FullRanking, vectors_of_table
from ziggurat.training.metrics.full_ranking import HadBefore, Questions, rank_all

STATE = "negatives."


class DrawnNegatives:
    """Draws negatives for the batches of a run.

    Args:
        model: whose `draws` says what; it finds items.
        train: the training data, a data set.
        ranking: its items.
        seed: of the run.

    Raises:
        ConfigError: the model wants no negatives drawn.
    """

    def __init__(self, model: Model, *, train: Dataset, ranking: FullRanking, seed: int) -> None:
        if model.draws is None:
            raise ConfigError(
                expected='a model that negatives are drawn for: two_tower with negatives.kind = "mixed" or "mined"',
                found=f"{type(model).__name__}, which trains on the items of its batches alone",
                where="DrawnNegatives",
                ways_out=(
                    "TwoTowerConfig(negatives=NegativesConfig(kind=NegativesKind.MIXED))",
                    "train on the batches as they are",
                ),
            )
        self._model = model
        self._inputs = model.inputs
        self._config = model.draws
        self._seed = seed
        self._item = [spec.name for spec in self._inputs.single].index(ranking.item.name)
        self._item_features = ranking.described_by
        items = table_to_batch(ranking.items, ranking.inputs)
        self._items = _without_lists_of_users(items, self._inputs, described_by=ranking.described_by)
        self._table = ranking.items
        self._mined: MinedNegatives | None = None
        if self._config.kind is NegativesKind.MINED:
            self._mined = MinedNegatives(self._config, train=train, ranking=ranking)

    @property
    def lines(self) -> dict[str, str]:
        """The lines of the start-up report."""
        config = self._config
        num_items = self._items.batch_size
        text = f"{config.kind.value}: {config.num_drawn:,} of {num_items:,} items drawn for each block of "
        lines = {"negatives": text + f"{self._model.coupled_samples:,} samples, looked up and encoded with them"}
        if self._mined is not None:
            lines["mining"] = self._mined.text(self._table.num_rows, dim=getattr(self._model.config, "output_dim", 0))
        return lines

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint keeps, sharing memory."""
        return {} if self._mined is None else {f"{STATE}mined": self._mined.lists}

    def is_due(self, step: int) -> bool:
        """Return True if a search comes before negatives are drawn for the batch of the step after this one."""
        return self._mined is not None and self._mined.is_due(step)

    def extended(self, batch: Batch, *, step: int) -> Batch:
        """The batch with drawn items in it (`models/contract/negatives.py`); collective where a search is due.

        Args:
            batch: of the data, on the CPU.
            step: steps that were made before the one that it is for.
        """
        if self._mined is not None and self._mined.is_due(step):
            self._mined.search(cast(FindsItems, self._model), self._table, step=step)
        batch = batch.expanded()
        if not batch.batch_size:
            return dataclasses.replace(batch, extras=batch.extras | {CANDIDATES: batch.row_ids})
        block = self._model.coupled_samples
        drawn = self._config.num_drawn
        layout = DrawnLayout.of_samples(batch.batch_size, block=block, drawn=drawn)
        firsts = torch.arange(layout.num_blocks) * block
        numbers_Zm = np.stack([self._draw(batch, first, step=step) for first in firsts.tolist()])
        numbers = torch.from_numpy(numbers_Zm.reshape(-1))
        # Where nothing was drawn (-1) stands the first item, and `candidates` says that it counts for none.
        items = self._items.take(numbers.clamp(min=0))
        candidates = torch.where(numbers < 0, -1, items.single[self._item])
        whole = Batch.stacked(
            [_marked(batch, batch.single[self._item]), _marked(self._as_batch(items, batch), candidates)]
        )
        # Of users a drawn sample reads what its block reads anyway, so that no other row of a table is touched.
        of_user = [i for i, spec in enumerate(self._inputs.single) if spec.name not in self._item_features]
        whole.single[of_user, batch.batch_size :] = batch.single[of_user][:, firsts].repeat_interleave(drawn, dim=1)
        return whole.take(layout.order())

    def _draw(self, batch: Batch, first: int, *, step: int) -> NDArray[np.int64]:
        """(m,) numbers of items for the block that begins at a sample; -1 for none."""
        generator = StepDraw(self._seed, step).of_row(int(batch.row_ids[first]))
        if self._mined is None:
            return generator.integers(0, self._items.batch_size, self._config.num_drawn)
        some = batch.rows(first, min(first + self._model.coupled_samples, batch.batch_size))
        return self._mined.draw(some, generator)

    def _as_batch(self, items: Batch, like: Batch) -> Batch:
        """Drawn items as samples that ask nothing: no label, weight, user or row of the data."""
        size = items.batch_size
        return dataclasses.replace(
            items,
            labels=torch.full((size, like.labels.shape[1]), torch.nan),
            # A weight of 0, and labels that nobody knows: a drawn item answers for its block, and is no sample itself.
            weights=None if like.weights is None else torch.zeros(size),
            groups=None if like.groups is None else torch.zeros(size, dtype=torch.int64),
            row_ids=torch.full((size,), -1),
            extras={name: value.new_full((size, *value.shape[1:]), torch.nan) for name, value in like.extras.items()},
        )


class MinedNegatives:
    """The items that a model gives users high scores, and that they do not like.

    Args:
        config: depth, and steps between searches.
        train: the training data, a data set with groups.
        ranking: its items.

    Raises:
        ConfigError: the data does not say which samples are of one user.
    """

    def __init__(self, config: NegativesConfig, *, train: Dataset, ranking: FullRanking) -> None:
        self._config = config
        self._ranking = ranking
        self._searched_at = -1
        if not train.inputs.has_groups:
            raise ConfigError(
                expected="data that says which samples are of one user: mined negatives are what a user does not like",
                found="a schema without group",
                where="two_tower, negatives.kind = mined",
                ways_out=('in the schema: [roles], group = "user_id"', 'negatives.kind = "mixed"'),
            )
        self._users = _last_of_groups(train)
        self.groups = self._users.column(GROUP_COLUMN).to_numpy()
        self._likes = HadBefore(_likes(train, ranking))
        self._seconds = 0.0
        self.lists = torch.full((len(self.groups), config.mining.depth), -1, dtype=torch.int32)

    def is_due(self, step: int) -> bool:
        """Return True if a search is due before negatives are drawn for this step's batch."""
        return step > 0 and step % self._config.mining.every == 0 and step != self._searched_at

    def text(self, num_items: int, *, dim: int) -> str:
        """Say in words what a search is and costs."""
        users = len(self.groups)
        mining = self._config.mining
        flops = 2 * users * num_items * dim
        return (
            f"every {mining.every:,} steps the {mining.depth:,} best of {num_items:,} items for each of {users:,} "
            f"users, {flops / 1e9:,.1f} GFLOP and the encoders; {self.lists.numel() * 4 / 2**20:,.1f} MiB"
        )

    def search(self, model: FindsItems, items: pa.Table, *, step: int) -> None:
        """Find the best items of all users anew; collective on many ranks.

        Args:
            model: as it is now.
            items: all of them.
            step: steps made.
        """
        begin = time.perf_counter()
        device = device_of(cast(Model, model))
        items_ND = vectors_of_table(model, items, compute=model.item_vectors, device=device)
        users_UD = vectors_of_table(model, self._users, compute=model.user_vectors, device=device)
        pairs = torch.from_numpy(np.stack(self._likes.pairs_of(self.groups), axis=1)).to(device)
        # Nobody asks for a certain item: only the lists are wanted.
        nothing_U = torch.full((len(users_UD),), -1, dtype=torch.int64, device=device)
        questions = Questions(users=users_UD, targets=nothing_U, excluded=pairs)
        _, found = rank_all(items_ND, questions, depth=self._config.mining.depth)
        # In place: `state` has handed this tensor to checkpoints.
        self.lists.copy_(found.int())
        self._searched_at = step
        self._seconds = time.perf_counter() - begin

    @property
    def seconds(self) -> float:
        """The seconds that the last search took; 0 before the first."""
        return self._seconds

    def draw(self, block: Batch, generator: np.random.Generator) -> NDArray[np.int64]:
        """(m,) numbers of items for a block of samples, each once; -1 for none.

        Args:
            block: its samples; those that are liked are drawn for, if there are any.
            generator: of random numbers.
        """
        if block.groups is None:
            raise DataError(
                expected="batches that say which user each sample is of, as the training data does",
                found="a batch without groups",
                where="negatives, mined",
                ways_out=("Batch(…, groups=…)", 'negatives.kind = "mixed", which asks for no user'),
            )
        groups = block.groups.numpy()
        size = self._config.num_drawn
        liked = np.flatnonzero((block.labels.numpy() > 0).any(axis=1))
        samples = generator.permutation(liked if len(liked) else np.arange(len(groups)))
        # Starts again from the first sample where there are fewer than draws.
        samples = np.resize(samples, size)
        # A user behind the last lies outside; the comparison below tells who has no list.
        places = np.minimum(np.searchsorted(self.groups, groups[samples]), max(len(self.groups) - 1, 0))
        depths = generator.integers(0, self._config.mining.depth, size)
        if not len(self.groups):
            return np.full(size, -1)
        numbers = self.lists.numpy()[places, depths].astype(np.int64)
        numbers[self.groups[places] != groups[samples]] = -1
        # Of an item that came twice the first stays; -1 may be among them, and stays -1 everywhere.
        _, once = np.unique(numbers, return_index=True)
        found = np.full(size, -1)
        found[once] = numbers[once]
        return found


def _marked(batch: Batch, candidates: Tensor) -> Batch:
    return dataclasses.replace(batch, extras=batch.extras | {CANDIDATES: candidates})


def _without_lists_of_users(items: Batch, inputs: InputSpec, *, described_by: Sequence[str]) -> Batch:
    """The batch with empty lists for users: an item has none."""
    of_item = torch.tensor([spec.name in described_by for spec in inputs.jagged], dtype=torch.bool)
    if not len(of_item):
        return items
    lengths = items.jagged.lengths(num_features=len(of_item))
    kept = of_item.unsqueeze(1).expand_as(lengths).reshape(-1)
    values = items.jagged.values[kept.repeat_interleave(lengths.reshape(-1))]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.where(kept, lengths.reshape(-1), 0).cumsum(0)])
    return dataclasses.replace(items, jagged=JaggedRows(values, offsets))


def _last_of_groups(train: Dataset) -> pa.Table:
    """The last row of each user, by user; nobody's rows are left out."""
    # There is a first row group: `FullRanking` has refused training data without an item.
    found = _last_of_each(train.read_group(0))
    for number in range(1, len(train.group_sizes)):
        # Only the last rows are carried on, so memory is that of the users and of one row group.
        found = _last_of_each(pa.concat_tables([found, train.read_group(number)]))
    # Group 0 is that of samples without a user.
    return found.filter(pa.array(found.column(GROUP_COLUMN).to_numpy() != 0))


def _last_of_each(table: pa.Table) -> pa.Table:
    """Return the last row of each group, by group."""
    groups = table.column(GROUP_COLUMN).to_numpy()
    # `unique` finds the first of equals, so the last in a list that is turned round.
    _, from_the_end = np.unique(groups[::-1], return_index=True)
    return table.take(pa.array(len(groups) - 1 - from_the_end))


def _likes(train: Dataset, ranking: FullRanking) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Pairs of user and item of the samples with a positive label."""
    for number in range(len(train.group_sizes)):
        table = train.read_group(number)
        liked = np.any([table.column(label_column(spec.name)).to_numpy() > 0 for spec in train.inputs.labels], axis=0)
        if WEIGHT_COLUMN in table.column_names:
            liked &= table.column(WEIGHT_COLUMN).to_numpy() > 0
        numbers = ranking.numbers(table.column(ranking.item.name).to_numpy())
        liked &= numbers >= 0
        yield table.column(GROUP_COLUMN).to_numpy()[liked], numbers[liked]
