"""A batch in one buffer comes out as it went in, in fewer bytes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ziggurat.features.batch import Batch, SequenceGroup
from ziggurat.features.batches.packed import pack
from ziggurat.features.batches.repeats import deduplicate
from ziggurat.features.jagged import FeatureGroup
from ziggurat.testing.batches import random_batch, small_inputs
from ziggurat.testing.pretend_cuda import pretend_cuda

INPUTS = dataclasses.replace(small_inputs(num_jagged=2, num_vectors=1), has_groups=True, has_weights=True)


def batch_of(size: int) -> Batch:
    """Everything a batch can have: slices, sequences, hashes of 64 bits, numbers of other types."""
    plain = random_batch(INPUTS, size, seed=size)
    events = torch.arange(2 * size)
    history = SequenceGroup(values={"item": events, "late": events > 3}, offsets=torch.arange(size + 1) * 2)
    return dataclasses.replace(
        deduplicate(plain, [FeatureGroup(jagged=(1,))]),
        groups=torch.arange(size) * (1 << 40),
        row_ids=torch.arange(size) + (1 << 33),
        sequences={"history": history},
        extras={"teacher": torch.rand(size, 2, dtype=torch.float64), "kind": torch.arange(size, dtype=torch.uint8)},
    )


def assert_equal(found: Batch, wanted: Batch) -> None:
    assert found.tensors().keys() == wanted.tensors().keys()
    for name, tensor in wanted.tensors().items():
        given = found.tensors()[name]
        assert given.dtype == tensor.dtype, name
        assert torch.equal(given.cpu(), tensor), name


@pytest.mark.parametrize("size", [0, 1, 13])
def test_a_packed_batch_is_the_same_batch(size: int) -> None:
    batch = batch_of(size)
    packed = pack(batch)
    assert_equal(packed.to("cpu"), batch)
    with pretend_cuda() as cuda:
        there = batch.to(cuda)
        assert all(tensor.is_cuda for name, tensor in there.tensors().items() if name != "row_ids")
        assert not there.row_ids.is_cuda
        assert_equal(there, batch)


@pytest.mark.parametrize(("largest", "width"), [((1 << 31) - 1, 4), (1 << 31, 8)])
def test_rows_take_four_bytes_where_they_fit(largest: int, width: int) -> None:
    rows = torch.tensor([[0, 5, largest, 1]] * 4)
    batch = dataclasses.replace(random_batch(small_inputs(num_dense=0, num_single=4, num_jagged=0), 4), single=rows)
    place = pack(batch).places[1]
    assert place is not None
    assert place.num_bytes == width * rows.numel()
    assert torch.equal(pack(batch).to("cpu").single, rows)


def test_bytes_of_a_batch_as_criteo_has_them() -> None:
    batch = random_batch(small_inputs(num_dense=13, num_single=26, num_jagged=0), 2048)
    plain = sum(tensor.nbytes for name, tensor in batch.tensors().items() if name != "row_ids")
    assert (plain, pack(batch).num_bytes) == (2048 * (13 * 4 + 26 * 8 + 4) + 8, 2048 * (13 * 4 + 26 * 4 + 4) + 16)
