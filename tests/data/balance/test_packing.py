"""Packed batches hold every sample in order, fill their budget, and do not depend on where one starts."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ziggurat.data.balance.cost import tokens_of
from ziggurat.data.balance.packing import packed
from ziggurat.features.batch import Batch
from ziggurat.testing.batches import random_batch, small_inputs

INPUTS = small_inputs(num_jagged=2)


def tokens(batch: Batch) -> np.ndarray:
    return tokens_of(batch, INPUTS)


def by_hand(lengths: list[int], *, budget: int, most: int) -> list[list[int]]:
    """Sample numbers of each batch, one sample at a time."""
    found: list[list[int]] = []
    filled = 0
    for sample, length in enumerate(lengths):
        if not found or filled + length > budget or len(found[-1]) == most:
            found.append([])
            filled = 0
        found[-1].append(sample)
        filled += length
    return found


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 30), st.integers(0, 99), st.integers(1, 25), st.integers(1, 7), st.integers(1, 9), st.integers(0, 30)
)
def test_batches_are_those_filled_by_hand(size: int, seed: int, budget: int, most: int, read: int, skip: int) -> None:
    """However many samples are read at once, and wherever a batch boundary is taken as the start."""
    whole = random_batch(INPUTS, size, seed=seed, max_length=6)
    wanted = by_hand(tokens(whole).tolist(), budget=budget, most=most)
    starts = [0, *np.cumsum([len(each) for each in wanted]).tolist()]
    first = starts[min(skip, len(starts) - 1)]
    reads = (whole.rows(at, min(at + read, size)) for at in range(first, size, read))
    found = list(packed(reads, budget=budget, most=most, cost_of=tokens))
    assert [batch.row_ids.tolist() for batch in found] == [each for each in wanted if each[0] >= first]
    for batch in found:
        assert tokens(batch).sum() <= budget or batch.batch_size == 1
        assert np.array_equal(tokens(batch), tokens(whole)[batch.row_ids.numpy()])
