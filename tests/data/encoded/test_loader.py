"""The loader: every row once, in an order that is a function of (seed, epoch), from any position, for any ranks."""

from __future__ import annotations

import gc
import threading
import time

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ziggurat.data.encoded.dataset import MemoryDataset
from ziggurat.data.encoded.lanes import MIN_LANE_ROWS, NUM_LANES
from ziggurat.data.encoded.loader import Loader, LoaderConfig, Shuffle
from ziggurat.data.encoded.records import table_to_batch
from ziggurat.errors import ConfigError, DataError
from ziggurat.features.batch import Batch, validate_batch
from ziggurat.ops import rows
from ziggurat.ops.cpp_build import CppLibrary
from ziggurat.testing.encoded_examples import FULL, PLAIN, full_table, list_lengths, plain_table, written


def row_ids(batches) -> list[list[int]]:
    return [batch.row_ids.tolist() for batch in batches]


def flat(batches: list[list[int]]) -> list[int]:
    return [row for batch in batches for row in batch]


def stream(dataset, *, epoch: int = 0, **settings) -> list[int]:
    """The rows of an epoch as one long batch gives them; in lanes, lane after lane within each window."""
    config = LoaderConfig(batch_size=1_000_000, prefetch=0, **settings)
    return flat(row_ids(Loader(dataset, config=config).batches(epoch=epoch)))


ORDERS = (Shuffle.LANES, Shuffle.SESSION_LANES, Shuffle.BUFFER, Shuffle.NONE)
IN_LANES = (Shuffle.LANES, Shuffle.SESSION_LANES)


def same_rows(shuffle: Shuffle, left: list[int], right: list[int]) -> bool:
    """Whether global batches are equal; in lanes, ranks sort their rows by lane."""
    return sorted(left) == sorted(right) if shuffle in IN_LANES else left == right


@st.composite
def layouts(draw):
    """Sizes of data, row groups, windows and batches that do not fit each other."""
    return {
        "num_rows": draw(st.integers(0, 300)),
        "rows_per_group": draw(st.integers(1, 80)),
        "batch_size": draw(st.integers(1, 70)),
        "buffer_rows": draw(st.integers(1, 300)),
        "world_size": draw(st.integers(1, 5)),
        "shuffle": draw(st.sampled_from(ORDERS)),
        "seed": draw(st.integers(0, 2**64 - 1)),
        "epoch": draw(st.integers(0, 5)),
    }


class WithSessions(MemoryDataset):
    """Rows with sessions of 1 to 7 rows that end where a row group does."""

    def sessions(self, index: int) -> np.ndarray:
        """Lengths that depend on the row group alone."""
        size = self.group_sizes[index]
        ends = np.cumsum(np.random.default_rng(index).integers(1, 8, size))
        return np.diff(np.concatenate([[0], ends[ends < size], [size]]))


def loaders(layout) -> list[Loader]:
    dataset = WithSessions(plain_table(layout["num_rows"]), PLAIN, rows_per_group=layout["rows_per_group"])
    config = LoaderConfig(
        batch_size=layout["batch_size"],
        shuffle=layout["shuffle"],
        shuffle_buffer_rows=layout["buffer_rows"],
        seed=layout["seed"],
        prefetch=0,
    )
    world = layout["world_size"]
    return [Loader(dataset, config=config, rank=rank, world_size=world) for rank in range(world)]


@settings(deadline=None, max_examples=25)
@given(layouts())
def test_ranks_share_every_row_exactly_once_in_slices_of_one_stream(layout):
    ranks = loaders(layout)
    order = flat(row_ids(loaders({**layout, "world_size": 1, "batch_size": 1})[0].batches(epoch=layout["epoch"])))
    assert sorted(order) == list(range(layout["num_rows"]))
    if layout["shuffle"] is Shuffle.NONE:
        assert order == sorted(order)

    per_rank = [row_ids(loader.batches(epoch=layout["epoch"])) for loader in ranks]
    global_batch = layout["batch_size"] * layout["world_size"]
    assert {len(batches) for batches in per_rank} == {ranks[0].steps_per_epoch} == {-(-len(order) // global_batch)}
    for step in range(ranks[0].steps_per_epoch):
        expected = order[step * global_batch : (step + 1) * global_batch]
        assert same_rows(layout["shuffle"], flat([batches[step] for batches in per_rank]), expected)
        sizes = [len(batches[step]) for batches in per_rank]
        if len(expected) == global_batch:
            assert sizes == [layout["batch_size"]] * layout["world_size"]
        elif layout["shuffle"] in IN_LANES:
            assert max(sizes) - min(sizes) <= 1
        else:
            assert sizes == sorted(sizes, reverse=True)


@settings(deadline=None, max_examples=25)
@given(layouts(), st.data())
def test_starting_anywhere_gives_what_an_uninterrupted_pass_gives_from_there(layout, data):
    for loader in loaders(layout):
        whole = row_ids(loader.batches(epoch=layout["epoch"]))
        step = data.draw(st.integers(0, len(whole)))
        global_batch = layout["batch_size"] * layout["world_size"]
        assert row_ids(loader.batches(epoch=layout["epoch"], start_step=step)) == whole[step:]
        start_row = min(step * global_batch, layout["num_rows"])
        assert row_ids(loader.batches(epoch=layout["epoch"], start_row=start_row)) == whole[step:]


@settings(deadline=None, max_examples=25)
@given(layouts(), st.integers(1, 5), st.data())
def test_another_number_of_ranks_goes_on_where_the_first_stopped(layout, other_world, data):
    first = loaders(layout)
    order = flat(row_ids(loaders({**layout, "world_size": 1, "batch_size": 1})[0].batches(epoch=layout["epoch"])))
    step = data.draw(st.integers(0, first[0].steps_per_epoch))
    consumed = min(step * layout["batch_size"] * layout["world_size"], layout["num_rows"])

    second = loaders({**layout, "world_size": other_world})
    per_rank = [row_ids(loader.batches(epoch=layout["epoch"], start_row=consumed)) for loader in second]
    assert {len(batches) for batches in per_rank} == {second[0].num_steps(start_row=consumed)}
    rest = [flat(list(step_batches)) for step_batches in zip(*per_rank, strict=True)]
    for number, found in enumerate(rest):
        begin = consumed + number * layout["batch_size"] * other_world
        expected = order[begin : begin + layout["batch_size"] * other_world]
        assert same_rows(layout["shuffle"], found, expected)
    assert sorted(flat(rest)) == sorted(order[consumed:])


@settings(deadline=None, max_examples=25)
@given(layouts())
def test_ranks_read_little_more_than_their_share_of_row_groups(layout):
    ranks = loaders({**layout, "shuffle": Shuffle.LANES})
    for loader in ranks:
        order = loader._order(loader._slices(0), layout["epoch"])
        for number, window in enumerate(order.windows):
            runs = np.concatenate([order.runs(step) for step in range(order.num_steps)] or [np.empty((0, 3), int)])
            here = runs[runs[:, 0] == number]
            taken = np.concatenate([np.arange(first, first + rows) for _, first, rows in here.tolist()] or [[]])
            assert len(np.unique(taken)) == len(taken) <= window.num_rows == sum(part.num_rows for part in window.parts)
            size = window.end - window.start
            num_lanes = min(max(size // MIN_LANE_ROWS, 1), NUM_LANES)
            if size % num_lanes == 0 and layout["batch_size"] % num_lanes == 0:
                own = -(-num_lanes // loader.world_size) + 1
                assert window.num_rows <= own * (size // num_lanes) + layout["batch_size"]


def test_a_rank_reads_its_own_row_groups_only():
    dataset = MemoryDataset(plain_table(16_384), PLAIN, rows_per_group=256)
    config = LoaderConfig(batch_size=16, shuffle_buffer_rows=4096)
    read = []
    for rank in range(4):
        loader = Loader(dataset, config=config, rank=rank, world_size=4)
        order = loader._order(loader._slices(0), 0)
        read.append([part.group for window in order.windows for part in window.parts])
    assert sorted(flat(read)) == list(range(64))


@pytest.mark.parametrize("shuffle", [Shuffle.LANES, Shuffle.BUFFER, Shuffle.NONE])
def test_without_a_compiler_the_batches_are_the_same(shuffle, monkeypatch):
    table = full_table(230)
    dataset = MemoryDataset(table, FULL, rows_per_group=37)
    loader = Loader(dataset, config=LoaderConfig(batch_size=16, shuffle=shuffle, shuffle_buffer_rows=80, prefetch=0))
    fast = list(loader.batches(epoch=0))
    monkeypatch.setattr(rows, "_LIBRARY", CppLibrary.missing("no compiler"))
    assert all(same_batch(a, b) for a, b in zip(fast, loader.batches(epoch=0), strict=True))


def same_batch(left: Batch, right: Batch) -> bool:
    pairs = [
        (left.dense, right.dense),
        (left.single, right.single),
        (left.jagged.values, right.jagged.values),
        (left.jagged.offsets, right.jagged.offsets),
        (left.labels, right.labels),
        (left.row_ids, right.row_ids),
        *((left.vectors[name], right.vectors[name]) for name in right.vectors),
    ]
    if right.weights is not None:
        pairs.append((left.weights, right.weights))
    if right.groups is not None:
        pairs.append((left.groups, right.groups))
    return all(a is not None and a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def rows_of(table, row_ids: list[int]) -> Batch:
    """What a batch of these rows must be, by way of pyarrow's own `take`."""
    return table_to_batch(table.take(pa.array(row_ids, pa.int64())), FULL)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("shuffle", [Shuffle.LANES, Shuffle.BUFFER, Shuffle.NONE])
@pytest.mark.parametrize(("batch_size", "buffer_rows"), [(16, 50), (64, 40), (1, 30), (1000, 1000)])
def test_every_value_stays_with_its_row(tmp_path, shuffle, world_size, batch_size, buffer_rows):
    table = full_table(230)
    dataset = written(tmp_path / "data", table, inputs=FULL, rows_per_group=37)
    config = LoaderConfig(batch_size=batch_size, shuffle=shuffle, shuffle_buffer_rows=buffer_rows, seed=3)
    for rank in range(world_size):
        for batch in Loader(dataset, config=config, rank=rank, world_size=world_size).batches(epoch=1):
            validate_batch(batch, FULL)
            assert batch.single.is_contiguous()
            assert batch.dense.is_contiguous()
            assert same_batch(batch, rows_of(table, batch.row_ids.tolist()))


def test_feature_that_is_empty_for_a_whole_batch_and_lists_that_are_huge(tmp_path):
    dataset = written(tmp_path / "data", full_table(60), inputs=FULL, rows_per_group=10)
    config = LoaderConfig(batch_size=1, shuffle=Shuffle.NONE)
    lengths = [
        batch.jagged.lengths(num_features=2).ravel().tolist()
        for batch in Loader(dataset, config=config).batches(epoch=0)
    ]
    assert lengths == [list(list_lengths(row)) for row in range(60)]
    assert [0, 0] in lengths
    assert max(max(pair) for pair in lengths) == 5000


def test_data_to_predict_has_no_labels_and_no_weights():
    dataset = MemoryDataset(full_table(20, with_labels=False), FULL)
    (batch,) = Loader(dataset, config=LoaderConfig(shuffle=Shuffle.NONE)).batches(epoch=0)
    assert batch.labels.shape == (20, 0)
    assert batch.weights is None
    assert batch.groups is not None
    assert batch.row_ids.tolist() == list(range(20))


def test_epochs_and_seeds_differ_and_repeat():
    dataset = MemoryDataset(plain_table(2000), PLAIN, rows_per_group=100)
    orders = [tuple(stream(dataset, epoch=epoch, seed=seed)) for epoch in range(3) for seed in range(3)]
    assert len(set(orders)) == 9
    assert orders == [tuple(stream(dataset, epoch=epoch, seed=seed)) for epoch in range(3) for seed in range(3)]


def test_order_is_frozen():
    """A change here breaks the resume of runs that older versions started."""
    for shuffle, order, rows_per_group, buffer_rows in (
        (Shuffle.BUFFER, FROZEN_ORDER, 7, 15),
        (Shuffle.LANES, FROZEN_LANES, 20, 160),
    ):
        dataset = MemoryDataset(plain_table(len(order)), PLAIN, rows_per_group=rows_per_group)
        config = LoaderConfig(shuffle=shuffle, seed=5, shuffle_buffer_rows=buffer_rows, batch_size=1)
        assert flat(row_ids(Loader(dataset, config=config).batches(epoch=2))) == order


FROZEN_ORDER = list(bytes.fromhex("1e18171a22151c21161f1d201b190225270304230024012606050b120d101407130e0c080f110a09"))
FROZEN_LANES = list(
    bytes.fromhex(
        "510a3f0b3e78994b8d6bc510577a5905bd41b46e9e653d4cc2809d13bf4791123c71c176c064b50db6865d4fc377f78abb82"
        "c7855e6662749f895b09bc44ba11b87d954e9b7f60674046f40f9a00f64af206926c546f6307f0045c49554d8e699702980c"
        "c483f872527b93735f7c8c758f8194689c035388f542906d5a7ef943be796170506ab945f148b708568b960e5884f387c601"
        "cc20e7251faa26ab24b3cf2cd9a72bd5b2a9d830dccde514dd28e4e1af2f18391ad638a0e9dfe3d715b019da34d023a335d4"
        "291ea42733ee2137cba1d3a6d2c8ada52d321ddb2231c9a82a1bae16a2e0d11ce8efe6eb3beddee2ca2e17acce36b1ea3aec"
    )
)


def test_shuffle_mixes_row_groups_within_the_buffer_only():
    dataset = MemoryDataset(plain_table(10_000), PLAIN, rows_per_group=100)
    order = np.array(stream(dataset, shuffle_buffer_rows=1000))
    first_window = order[:1000]
    assert len(np.unique(first_window // 100)) == 10  # ten whole row groups …
    assert np.corrcoef(np.arange(1000), first_window % 100)[0, 1] < 0.1  # … in no order
    assert sorted(first_window.tolist()) != list(range(first_window.min(), first_window.min() + 1000))


def test_batches_do_not_share_memory_with_later_ones():
    dataset = MemoryDataset(plain_table(1000), PLAIN, rows_per_group=50)
    config = LoaderConfig(batch_size=64, shuffle_buffer_rows=100)
    loader = Loader(dataset, config=config)
    kept = list(loader.batches(epoch=0))
    list(loader.batches(epoch=1))
    for batch in kept:
        assert batch.single[0].tolist() == batch.row_ids.tolist()


def test_two_passes_of_one_loader_at_once_do_not_disturb_each_other():
    loader = Loader(
        MemoryDataset(plain_table(1000), PLAIN, rows_per_group=50),
        config=LoaderConfig(batch_size=64, shuffle_buffer_rows=100),
    )
    alone = row_ids(loader.batches(epoch=0)), row_ids(loader.batches(epoch=1))
    first, second = loader.batches(epoch=0), loader.batches(epoch=1)
    together = [(a.row_ids.tolist(), b.row_ids.tolist()) for a, b in zip(first, second, strict=True)]
    assert together == list(zip(*alone, strict=True))


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_prefetch_changes_nothing(prefetch):
    dataset = MemoryDataset(plain_table(777), PLAIN, rows_per_group=50)
    expected = row_ids(Loader(dataset, config=LoaderConfig(batch_size=10, prefetch=0)).batches(epoch=0))
    assert row_ids(Loader(dataset, config=LoaderConfig(batch_size=10, prefetch=prefetch)).batches(epoch=0)) == expected


class Damaged(MemoryDataset):
    """Its third row group cannot be read."""

    def read_group(self, index):
        if index == 2:
            raise DataError(expected="a row group", found="damage", where="row group 2", ways_out="none")
        return super().read_group(index)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_error_while_reading_reaches_the_consumer_after_the_good_batches(prefetch):
    dataset = Damaged(plain_table(300_000), PLAIN, rows_per_group=100_000)
    config = LoaderConfig(batch_size=1000, shuffle=Shuffle.NONE, prefetch=prefetch)
    seen: list[int] = []
    with pytest.raises(DataError, match="row group 2"):
        seen.extend(batch.batch_size for batch in Loader(dataset, config=config).batches(epoch=0))
    assert 100_000 < sum(seen) <= 200_000
    assert not loader_threads()


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("ziggurat-loader")]


def test_dropping_the_iterator_stops_the_thread():
    dataset = MemoryDataset(plain_table(10_000), PLAIN, rows_per_group=100)
    config = LoaderConfig(batch_size=10, prefetch=2, shuffle_buffer_rows=500)
    iterator = Loader(dataset, config=config).batches(epoch=0)
    next(iterator)
    assert len(loader_threads()) >= 2
    del iterator
    gc.collect()
    deadline = time.monotonic() + 5
    while loader_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not loader_threads()


def test_iterator_that_is_never_started_starts_no_thread():
    iterator = Loader(MemoryDataset(plain_table(10), PLAIN)).batches(epoch=0)
    assert not loader_threads()
    del iterator


def test_seeking_reads_nothing_before_the_position():
    read: list[int] = []

    class Counting(MemoryDataset):
        def read_group(self, index):
            read.append(index)
            return super().read_group(index)

    dataset = Counting(plain_table(10_000), PLAIN, rows_per_group=100)
    loader = Loader(dataset, config=LoaderConfig(batch_size=100, shuffle_buffer_rows=1000, prefetch=0))
    last = list(loader.batches(epoch=0, start_step=95))
    assert len(last) == 5
    assert len(read) == 10  # the last of ten windows


def test_memory_stays_bounded_by_the_shuffle_buffer():
    dataset = MemoryDataset(plain_table(100_000), PLAIN, rows_per_group=1000)
    loader = Loader(dataset, config=LoaderConfig(batch_size=100, shuffle_buffer_rows=5000))
    for _ in loader.batches(epoch=0):
        pass
    assert 0 < sum(len(storage.arrays[0]) for storage in loader._storages) <= 2 * (5000 + 1000 + 100)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"shuffle_buffer_rows": 0}, "shuffle_buffer_rows"),
        ({"prefetch": -1}, "prefetch"),
    ],
)
def test_impossible_settings_are_refused(settings, name):
    with pytest.raises(ConfigError, match=name):
        LoaderConfig(**settings)


def test_impossible_positions_and_ranks_are_refused():
    dataset = MemoryDataset(plain_table(100), PLAIN)
    loader = Loader(dataset, config=LoaderConfig(batch_size=30))
    assert loader.steps_per_epoch == 4
    assert list(loader.batches(epoch=0, start_step=4)) == []
    for position in ({"start_step": 5}, {"start_row": 121}, {"start_step": -1}, {"start_row": -1}, {"epoch": -1}):
        with pytest.raises(ConfigError, match="position within its 100 rows"):
            loader.batches(**{"epoch": 0, **position})
    with pytest.raises(ConfigError, match="rank = 2"):
        Loader(dataset, rank=2, world_size=2)
