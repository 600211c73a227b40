"""FullRanking: the items and past of a run's training data, and an evaluation of a model that finds items among them.

    ranking = FullRanking(train)                          one pass: items, and what each user had
    asked = ranking.begin(model)                          vectors of all items
    asked.update(batch); …; asked.compute()               metrics of `metrics/full_ranking.py`

The items are those of the training samples, each with the features of the row that names it last: in time, where the
prepared data has a time (`data/preprocess/fit/latest_items.py`), else in the order of the rows. Of samples that were
made of events, the items of histories count as well; the model itself knows what they are like (`NextItem.item_sides`).
On many ranks each computes the vectors of all items, and asks the questions of its own rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, cast, runtime_checkable

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ziggurat.data.encoded.dataset import EncodedDataset
from ziggurat.data.encoded.loader import Dataset, is_dataset
from ziggurat.data.encoded.records import GROUP_COLUMN, ROW_COLUMN, table_to_batch
from ziggurat.errors import ConfigError
from ziggurat.features.batch import NO_GROUP, Batch
from ziggurat.features.events import HISTORY
from ziggurat.features.inputs import InputSpec
from ziggurat.features.schema import NUM_RESERVED_ROWS
from ziggurat.models import Model
from ziggurat.models.contract.losses import labelled_weights
from ziggurat.models.contract.model import device_of
from ziggurat.precision.choice import whole_products
from ziggurat.training.metrics.full_ranking import (
    DEFAULT_KS,
    FullRankingSums,
    HadBefore,
    Questions,
    full_ranking_names,
    had_targets,
    left_out,
    rank_all,
    rank_of_users,
)

_ROWS = 8_192
_MOST_AT_ONCE = 200_000  # items whose scores fit into memory for some users at a time
_TIME = "time:"


class FindsItems(Protocol):
    """A model with vectors of users and items, both FP32; see `TwoTower`."""

    inputs: InputSpec
    training: bool

    def user_vectors(self, batch: Batch) -> Tensor:
        """(B, D) vectors of the users."""
        ...

    def item_vectors(self, batch: Batch) -> Tensor:
        """(B, D) vectors of the items."""
        ...

    def train(self, mode: bool = True) -> object:
        """Set the training mode, as for any module."""
        ...


@runtime_checkable
class _HasTasks(Protocol):
    """A model with a vector of each user for each task."""

    def task_vectors(self, batch: Batch) -> Tensor:
        """(B, T, D) vectors of the users."""
        ...


class FullRankings:
    """Begins the full ranking of each split of a run; knows what came before it. Nothing is read until it is needed.

    Args:
        model: any; those that do not find items have no full ranking.
        train: a data set, or a source of batches, of which there is no full ranking either.
        valid: likewise, or None.

    Attributes:
        names: of the metrics.
    """

    def __init__(self, model: Model, *, train: object, valid: object = None) -> None:
        self._model = model
        self._train = train
        self._valid = valid
        self._made: dict[bool, FullRanking] = {}
        has_any = model.finds_items and is_dataset(train)
        inputs = model.inputs
        self.names = tuple(full_ranking_names(inputs.labels, has_users=inputs.has_groups)) if has_any else ()

    def begin(self, dataset: object) -> FullRankingPass | None:
        """The full ranking of a split, the validation data as what came before any other; collective on many ranks."""
        if not self.names:
            return None
        # Validation itself is asked with the training data alone behind it.
        after_valid = dataset is not self._valid and is_dataset(self._valid)
        return self._ranking(after_valid=after_valid).begin(cast(FindsItems, self._model))

    def of_training(self) -> FullRanking:
        """The items of the training data and what users had in it, for who draws negatives."""
        return self._ranking(after_valid=False)

    def _ranking(self, *, after_valid: bool) -> FullRanking:
        if after_valid not in self._made:
            assert is_dataset(self._train), "nobody asks for the ranking of a source"
            before = (self._valid,) if after_valid and is_dataset(self._valid) else ()
            # Kept for both cases: an evaluation each epoch would else read the data again.
            self._made[after_valid] = FullRanking(self._train, before=before)
        return self._made[after_valid]


class FullRanking:
    """The items of the training data, and what each group had in it.

    Args:
        train: an encoded data set.
        before: further splits whose samples came before those that will be evaluated.

    Raises:
        ConfigError: the schema has no items, or no training sample has a known one.

    Attributes:
        described_by: names of the features that describe an item.
    """

    def __init__(self, train: Dataset, *, before: Sequence[Dataset] = ()) -> None:
        inputs = train.inputs
        items = inputs.items
        if items is None:
            raise ConfigError(
                expected="data that says which feature is the item, because models are asked to find items in it",
                found="a schema without [items]",
                where="full ranking",
                ways_out='name the item in the schema: [items], id = "movie_id", features = ["genres"]',
            )
        self.inputs = inputs
        self.described_by = items.features
        self.repeats = items.repeats  # the schema's protocol for what a user had before
        self.item = next(spec for spec in inputs.single if spec.name == items.id)
        self.items = self._items_of(train)
        if not self.items.num_rows:
            raise ConfigError(
                expected="training samples with an item that has a row of its own",
                found="unknown or missing items only",
                where=f"feature {self.item.name!r}, full ranking",
                ways_out=("lower min_count of the item's table", "name the feature with the item's id in [items]"),
            )
        rows = self.items.column(self.item.name).to_numpy()
        # −1 for rows of items that training never saw.
        self._number_of_row = np.full(inputs.table(self.item.table).num_rows, -1, dtype=np.int64)
        self._number_of_row[rows] = np.arange(len(rows))
        # Lists of the same table that describe the item itself are nobody's past.
        self._histories = [
            index
            for index, spec in enumerate(inputs.jagged)
            if spec.table == self.item.table and spec.name not in items.features
        ]
        self._had = HadBefore(pair for dataset in (train, *before) for pair in self._pairs(dataset))

    @property
    def has_histories(self) -> bool:
        """True if samples have lists of items of their own, beside what their group had."""
        return bool(self._histories)

    def begin(self, model: FindsItems, *, ks: Sequence[int] = DEFAULT_KS) -> FullRankingPass:
        """Compute the vectors of all items; collective on many ranks."""
        return FullRankingPass(self, model, ks=ks)

    def numbers(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The numbers of items from their rows in the item's table, -1 where training never saw one."""
        return self._number_of_row[rows]

    def targets(self, batch: Batch) -> NDArray[np.int64]:
        """(B,) the number of each sample's item."""
        index = self.inputs.single.index(self.item)
        return self.numbers(batch.single[index].cpu().numpy())

    def had(self, batch: Batch, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """(E, 2) pairs of question and item that the user had, by question; question i is sample `samples[i]`."""
        parts = list(self._of_histories(batch, samples))
        if batch.groups is not None:
            parts.append(self._had.pairs_of(batch.groups.cpu().numpy()[samples]))
        if not parts:
            return np.empty((0, 2), dtype=np.int64)
        questions, items = (np.concatenate(each) for each in zip(*parts, strict=True))
        # Of an item that nobody can find it does not matter whether a user had it.
        known = items >= 0
        if len(parts) == 1 and not self._histories:
            # What a group had is by question and item already, each once.
            return np.stack([questions[known], items[known]], axis=1)
        num_items = self.items.num_rows
        # One number a pair, which sorts ten times as fast as pairs do.
        return np.stack(np.divmod(np.unique(questions[known] * num_items + items[known]), num_items), axis=1)

    def _of_histories(
        self, batch: Batch, samples: NDArray[np.int64]
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        values = batch.jagged.values.cpu().numpy()
        offsets = batch.jagged.offsets.cpu().numpy()
        for index in self._histories:
            # Offsets are feature by feature, and within a feature sample by sample.
            first = offsets[index * batch.batch_size + samples]
            lengths = offsets[index * batch.batch_size + samples + 1] - first
            starts = np.cumsum(lengths) - lengths
            # Each value's place: the start of its list in the batch, and its number within the list.
            places = np.arange(lengths.sum()) + np.repeat(first - starts, lengths)
            yield np.repeat(np.arange(len(samples)), lengths), self._number_of_row[values[places]]

    def _items_of(self, dataset: Dataset) -> pa.Table:
        """One row for each item, the last that names it, in the order of its table's rows."""
        latest = None
        if isinstance(dataset, EncodedDataset) and dataset.extra.get("latest_items"):
            from ziggurat.data.preprocess.fit.latest_items import read_latest_items  # needs polars

            latest = read_latest_items(dataset.folder)
        # Row groups one by one: the data set need not fit in memory.
        found: pa.Table | None = None
        for number in range(len(dataset.group_sizes)):
            table = _with_times(dataset.read_group(number), latest)
            # Only the last rows are carried on, so memory is that of the items and of one row group.
            table = table if found is None else pa.concat_tables([found, _last_rows(table, self.item.name)])
            found = _last_rows(table, self.item.name)
        if found is None:
            return pa.table({self.item.name: pa.array([], type=pa.int32())})
        rows = found.column(self.item.name).to_numpy()
        # The reserved rows (padding, unknown, missing) are no items that could be found.
        items = found.drop_columns([_TIME]).filter(pa.array(rows >= NUM_RESERVED_ROWS))
        listed = np.setdiff1d(self._listed(dataset), rows)
        if not len(listed):
            return items
        items = pa.concat_tables([items, _bare_rows(items.schema, name=self.item.name, rows=listed)])
        return items.take(pa.array(np.argsort(items.column(self.item.name).to_numpy(), kind="stable")))

    def _listed(self, dataset: Dataset) -> NDArray[np.int64]:
        """Rows of the items in histories whose every event is predicted."""
        names = [spec.name for spec in self.inputs.sequences if spec.name == HISTORY and self.inputs.moments]
        found = np.empty(0, dtype=np.int64)
        for number in range(len(dataset.group_sizes) if names else 0):
            for name in names:
                # The values behind the list column, whatever list they are in.
                values = dataset.read_group(number).column(name).combine_chunks().values.to_numpy()
                found = np.union1d(found, np.unique(values))
        return found[found >= NUM_RESERVED_ROWS]

    def _pairs(self, dataset: Dataset) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        if not dataset.inputs.has_groups:
            return
        for number in range(len(dataset.group_sizes)):
            table = dataset.read_group(number)
            numbers = self._number_of_row[table.column(self.item.name).to_numpy()]
            groups = table.column(GROUP_COLUMN).to_numpy()
            # Items that no question can name are no past either.
            yield groups[numbers >= 0], numbers[numbers >= 0]


class FullRankingPass:
    """One evaluation of a model by full ranking; see the module's docstring.

    Args:
        ranking: items and past.
        model: the vectors of its items are computed now.
        ks: lengths of lists.
    """

    def __init__(self, ranking: FullRanking, model: FindsItems, *, ks: Sequence[int]) -> None:
        self._ranking = ranking
        self._model = model
        self._depth = max(ks)
        self._num_vectors: int = getattr(model, "num_vectors", 1)
        self._sums = FullRankingSums(
            model.inputs.labels,
            num_items=ranking.items.num_rows,
            ks=ks,
            repeats=ranking.repeats,
            has_users=ranking.inputs.has_groups,
        )
        self._device = device_of(cast(Model, model))
        # Once for all questions, as weights do not change within an evaluation.
        self._items_ND = vectors_of_table(model, ranking.items, compute=model.item_vectors, device=self._device)

    def update(self, batch: Batch) -> None:
        """Ask the questions of a batch, its positive samples, of a model in evaluation mode; collective on ranks."""
        weights_BL = self._weights(batch)
        for task, users_BD in enumerate(self._users(batch)):
            of_task = weights_BL if self._num_vectors == 1 else _column(weights_BL, task)
            self._ask(batch, users_BD, of_task)

    def _users(self, batch: Batch) -> Sequence[Tensor]:
        """The vectors of the users, one tensor for all tasks or one for each."""
        with torch.no_grad(), whole_products():
            model = self._model
            if self._num_vectors == 1 or not isinstance(model, _HasTasks):
                return (model.user_vectors(batch.to(self._device)),)
            return model.task_vectors(batch.to(self._device)).unbind(dim=1)

    def _ask(self, batch: Batch, users_BD: Tensor, weights_BL: Tensor) -> None:
        # A sample without a positive label asks nothing.
        samples = (weights_BL > 0).any(dim=1).nonzero().squeeze(1)
        numbers = samples.numpy()
        wanted = self._ranking.targets(batch)[numbers]
        users_QD = users_BD[samples.to(self._device)]
        found = self._asked_by_users(batch, users_QD, samples, wanted)
        if found is None:
            had = self._ranking.had(batch, numbers)
            targets, excluded = left_out(wanted, had, repeats=self._ranking.repeats)
            questions = Questions(
                users=users_QD,
                targets=torch.from_numpy(targets).to(self._device),
                excluded=torch.from_numpy(excluded).to(self._device),
            )
            ranks_Q, lists_QK = rank_all(self._items_ND, questions, depth=self._depth)
            is_repeated_Q = torch.from_numpy(had_targets(wanted, had))
        else:
            ranks_Q, lists_QK = found
            is_repeated_Q = torch.zeros(len(wanted), dtype=torch.bool)
        # Questions of a user are not independent: the error is that of whole users.
        units_B = batch.row_ids if batch.groups is None else batch.groups
        self._sums.add(
            ranks_Q.cpu(),
            lists_QK.cpu(),
            weights_BL[samples],
            is_repeated_Q=is_repeated_Q,
            units_Q=units_B.cpu().numpy()[numbers],
            targets_Q=wanted,
        )

    def _asked_by_users(
        self, batch: Batch, users_QD: Tensor, samples: Tensor, wanted: NDArray[np.int64]
    ) -> tuple[Tensor, Tensor] | None:
        """Ranks and lists of questions whose users ask several times, each with one vector; None of any others.

        What a user had is the same for all questions of that user, and so is the list.
        """
        if batch.groups is None or self._ranking.has_histories or len(self._items_ND) > _MOST_AT_ONCE:
            return None
        groups_Q = batch.groups.cpu()[samples]
        order_Q = groups_Q.argsort(stable=True)
        _, users_Q, counts_U = torch.unique_consecutive(groups_Q[order_Q], return_inverse=True, return_counts=True)
        if len(groups_Q) < 2 * len(counts_U) or not len(groups_Q) or bool((groups_Q == NO_GROUP).any()):
            return None
        firsts_U = order_Q[counts_U.cumsum(0) - counts_U]
        vectors_UD = users_QD[firsts_U.to(self._device)]
        if not torch.equal(vectors_UD[users_Q.to(self._device)], users_QD[order_Q.to(self._device)]):
            return None
        had = self._ranking.had(batch, samples[firsts_U].numpy())
        targets = wanted[order_Q.numpy()]
        # One number a pair: sets of pairs are compared as sets of numbers.
        num_items = self._ranking.items.num_rows
        if np.isin(users_Q.numpy() * num_items + targets, had[:, 0] * num_items + had[:, 1]).any():
            # A target that was had is spared in its own question alone.
            return None
        excluded = had if self._ranking.repeats.answers_leave_out else had[:0]
        questions = Questions(
            users=vectors_UD,
            targets=torch.from_numpy(targets).to(self._device),
            excluded=torch.from_numpy(excluded).to(self._device),
        )
        ranks, lists = rank_of_users(self._items_ND, questions, users_Q=users_Q.to(self._device), depth=self._depth)
        ranks_Q = torch.empty_like(ranks)
        lists_QK = torch.empty_like(lists)
        # In the order in which they were asked.
        ranks_Q[order_Q.to(self._device)] = ranks
        lists_QK[order_Q.to(self._device)] = lists
        return ranks_Q, lists_QK

    def compute(self, *, process_group: dist.ProcessGroup | None = None) -> dict[str, float]:
        """The metrics of all questions; collective where there is a process group."""
        return self._sums.compute(process_group=process_group)

    def half_widths(self, *, process_group: dist.ProcessGroup | None = None) -> dict[str, float]:
        """Return half of the 95 % interval of each mean; collective where there is a process group."""
        return self._sums.half_widths(process_group=process_group)

    def _weights(self, batch: Batch) -> Tensor:
        labels_BL = batch.labels.cpu()
        weights_B = None if batch.weights is None else batch.weights.cpu()
        # A NaN would be one under a weight of 0, too.
        known_BL = torch.where(labels_BL.isnan(), 0.0, labels_BL)
        return labelled_weights(labels_BL, weights_B, inputs=self._model.inputs) * known_BL


def _column(weights_BL: Tensor, label: int) -> Tensor:
    """The weights of one label; 0 for the others."""
    return torch.zeros_like(weights_BL).index_copy(1, torch.tensor([label]), weights_BL[:, label : label + 1])


def _with_times(table: pa.Table, latest: tuple[NDArray[np.int64], NDArray[np.float64]] | None) -> pa.Table:
    """The rows that may be the last of an item, with their times; all rows, at one time, where nobody knows these."""
    if latest is None:
        return table.append_column(_TIME, pa.array(np.zeros(table.num_rows)))
    rows, times = latest
    own = table.column(ROW_COLUMN).to_numpy()
    # A row behind the last would lie outside; the comparison below tells that it is none of them.
    places = np.searchsorted(rows, own).clip(max=max(len(rows) - 1, 0))
    is_latest = rows[places] == own if len(rows) else np.zeros(len(own), dtype=bool)
    return table.filter(pa.array(is_latest)).append_column(_TIME, pa.array(times[places[is_latest]]))


def _bare_rows(schema: pa.Schema, *, name: str, rows: NDArray[np.int64]) -> pa.Table:
    """Encoded rows of which nothing is known but the item: zeros and empty lists."""
    columns = []
    for entry in schema:
        if entry.name == name:
            column = pa.array(rows, type=entry.type)
        elif pa.types.is_list(entry.type):
            empty = pa.array([], type=entry.type.value_type)
            column = pa.ListArray.from_arrays(pa.array(np.zeros(len(rows) + 1, np.int32)), empty, type=entry.type)
        elif pa.types.is_fixed_size_list(entry.type):
            flat = pa.array(np.zeros(len(rows) * entry.type.list_size, np.float32))
            column = pa.FixedSizeListArray.from_arrays(flat, type=entry.type)
        else:
            column = pa.array(np.zeros(len(rows)), type=entry.type)
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=schema)


def _last_rows(table: pa.Table, name: str) -> pa.Table:
    """The last row of each item: by time, then by the order of the rows; ordered by item."""
    items = table.column(name).to_numpy()
    times = table.column(_TIME).to_numpy()
    # The last key weighs most: by item, then by time, then by place.
    order = np.lexsort((np.arange(len(items)), times, items))
    # The last of each item differs from the next one; −1 stands behind all, and is no item.
    last = np.diff(items[order], append=-1) != 0
    return table.take(pa.array(order[last]))


def vectors_of_table(
    model: FindsItems, table: pa.Table, *, compute: Callable[[Batch], Tensor], device: torch.device
) -> Tensor:
    """(rows, D) vectors of the samples of a table, in evaluation mode; collective on many ranks.

    Args:
        model: whose method `compute` is.
        table: encoded samples, at least one.
        compute: `user_vectors` or `item_vectors`.
        device: of the model.
    """
    was_training = model.training
    parts = []
    # With dropout two readings of an item would differ.
    model.train(False)
    with torch.no_grad(), whole_products():
        for first in range(0, table.num_rows, _ROWS):
            batch = table_to_batch(table.slice(first, _ROWS), model.inputs)
            parts.append(compute(batch.to(device)))
    # As it was: training may go on.
    model.train(was_training)
    return torch.cat(parts)
