"""The loader: every row once, in an order that is a function of (seed, epoch), from any position, for any ranks."""

from __future__ import annotations

import gc
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ziggurat.testing.encoded_examples import FULL, PLAIN, full_table, list_lengths, plain_table, written
from ziggurat.data.encoded import MemoryDataset
from ziggurat.data.loader import Loader, LoaderConfig, Shuffle
from ziggurat.data.records import table_to_batch
from ziggurat.errors import ConfigError, DataError
from ziggurat.features.batch import Batch, validate_batch


def row_ids(batches) -> list[list[int]]:
    return [batch.row_ids.tolist() for batch in batches]


def flat(batches: list[list[int]]) -> list[int]:
    return [row for batch in batches for row in batch]


def stream(dataset, *, epoch: int = 0, **settings) -> list[int]:
    """The order of an epoch, as one long batch gives it."""
    config = LoaderConfig(batch_size=1_000_000, prefetch=0, **settings)
    return flat(row_ids(Loader(dataset, config=config).batches(epoch=epoch)))


@st.composite
def layouts(draw):
    """Sizes of data, row groups, windows and batches that do not fit each other."""
    return {
        "num_rows": draw(st.integers(0, 300)),
        "rows_per_group": draw(st.integers(1, 80)),
        "batch_size": draw(st.integers(1, 70)),
        "buffer_rows": draw(st.integers(1, 200)),
        "world_size": draw(st.integers(1, 5)),
        "shuffle": draw(st.sampled_from(Shuffle)),
        "seed": draw(st.integers(0, 2**64 - 1)),
        "epoch": draw(st.integers(0, 5)),
    }


def loaders(layout) -> list[Loader]:
    dataset = MemoryDataset(plain_table(layout["num_rows"]), PLAIN, rows_per_group=layout["rows_per_group"])
    config = LoaderConfig(
        batch_size=layout["batch_size"],
        shuffle=layout["shuffle"],
        shuffle_buffer_rows=layout["buffer_rows"],
        seed=layout["seed"],
        prefetch=0,
    )
    world = layout["world_size"]
    return [Loader(dataset, config=config, rank=rank, world_size=world) for rank in range(world)]


@given(layouts())
def test_ranks_share_every_row_exactly_once_in_slices_of_one_stream(layout):
    ranks = loaders(layout)
    order = stream(
        ranks[0].dataset,
        epoch=layout["epoch"],
        shuffle=layout["shuffle"],
        shuffle_buffer_rows=layout["buffer_rows"],
        seed=layout["seed"],
    )
    assert sorted(order) == list(range(layout["num_rows"]))
    if layout["shuffle"] is Shuffle.NONE:
        assert order == sorted(order)

    per_rank = [row_ids(loader.batches(epoch=layout["epoch"])) for loader in ranks]
    global_batch = layout["batch_size"] * layout["world_size"]
    assert {len(batches) for batches in per_rank} == {ranks[0].steps_per_epoch} == {-(-len(order) // global_batch)}
    for step in range(ranks[0].steps_per_epoch):
        expected = order[step * global_batch : (step + 1) * global_batch]
        for rank, batches in enumerate(per_rank):
            size = layout["batch_size"]
            assert batches[step] == expected[rank * size : (rank + 1) * size]


@given(layouts(), st.data())
def test_starting_anywhere_gives_what_an_uninterrupted_pass_gives_from_there(layout, data):
    for loader in loaders(layout):
        whole = row_ids(loader.batches(epoch=layout["epoch"]))
        step = data.draw(st.integers(0, len(whole)))
        global_batch = layout["batch_size"] * layout["world_size"]
        assert row_ids(loader.batches(epoch=layout["epoch"], start_step=step)) == whole[step:]
        start_row = min(step * global_batch, layout["num_rows"])
        assert row_ids(loader.batches(epoch=layout["epoch"], start_row=start_row)) == whole[step:]


@given(layouts(), st.integers(1, 5), st.data())
def test_another_number_of_ranks_goes_on_where_the_first_stopped(layout, other_world, data):
    first = loaders(layout)
    order = flat(row_ids(loaders({**layout, "world_size": 1})[0].batches(epoch=layout["epoch"])))
    step = data.draw(st.integers(0, first[0].steps_per_epoch))
    consumed = min(step * layout["batch_size"] * layout["world_size"], layout["num_rows"])

    second = loaders({**layout, "world_size": other_world})
    per_rank = [row_ids(loader.batches(epoch=layout["epoch"], start_row=consumed)) for loader in second]
    assert {len(batches) for batches in per_rank} == {second[0].num_steps(start_row=consumed)}
    rest = [row for step_batches in zip(*per_rank, strict=True) for batch in step_batches for row in batch]
    assert rest == order[consumed:]
