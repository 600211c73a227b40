"""Features of samples in another order; lists of the same events stay as long as they are."""

from __future__ import annotations

import dataclasses
import itertools

import torch

from tests.embeddings.embedding_inputs import MIXED, make_batch
from ziggurat.features.batch import Batch
from ziggurat.features.batches.permutation import permuted
from ziggurat.features.jagged import JaggedRows


def lists_of(batch: Batch, index: int) -> list[list[int]]:
    offsets = batch.jagged.offsets[index * batch.batch_size : (index + 1) * batch.batch_size + 1].tolist()
    return [batch.jagged.values[start:end].tolist() for start, end in itertools.pairwise(offsets)]


def test_lists_of_the_same_events_keep_their_lengths() -> None:
    first, second = MIXED.jagged[0], dataclasses.replace(MIXED.jagged[0], name="second")
    inputs = dataclasses.replace(MIXED, jagged=(first, second))
    lengths, order = [2, 0, 1, 3], torch.tensor([3, 1, 0, 2])
    offsets = torch.tensor([0, *lengths, *lengths]).cumsum(0)
    batch = dataclasses.replace(
        make_batch(MIXED, size=4, seed=0), jagged=JaggedRows(torch.arange(12, dtype=torch.int32), offsets)
    )
    names, joined = (first.name, "second"), ((first.name, "second", "times"),)
    moved = permuted(batch, inputs=inputs, features=names, order=order, joined=joined)
    assert lists_of(moved, 0) == [[3, 4], [], [5], [0, 1, 2]]
    assert lists_of(moved, 1) == [[9, 10], [], [11], [6, 7, 8]]  # what belongs to one event stays together
    alone = permuted(batch, inputs=inputs, features=names[:1], order=order)
    assert lists_of(alone, 0) == [[3, 4, 5], [], [0, 1], [2]]
    assert lists_of(alone, 1) == lists_of(batch, 1)


def test_a_sample_may_be_taken_by_several() -> None:
    first, second = MIXED.jagged[0], dataclasses.replace(MIXED.jagged[0], name="second")
    inputs = dataclasses.replace(MIXED, jagged=(first, second))
    offsets = torch.tensor([0, 2, 0, 1, 3, 1, 1, 2, 0]).cumsum(0)
    batch = dataclasses.replace(
        make_batch(MIXED, size=4, seed=0), jagged=JaggedRows(torch.arange(10, dtype=torch.int32), offsets)
    )
    taken = permuted(batch, inputs=inputs, features=(first.name,), order=torch.tensor([3, 3, 3, 1]))
    assert lists_of(taken, 0) == [[3, 4, 5], [3, 4, 5], [3, 4, 5], []]
    assert lists_of(taken, 1) == [[6], [7], [8, 9], []]
