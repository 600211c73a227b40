"""Samples taken and batches joined are the same samples, whatever they have."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.features.test_batch import INPUTS, full_batch, samples_of
from ziggurat.errors import DataError
from ziggurat.features.batch import validate_batch
from ziggurat.features.batches.repeats import deduplicate
from ziggurat.features.batches.samples import batch_of_parts, concatenate_batches, join_lists, named_parts, take_samples
from ziggurat.features.jagged import FeatureGroup

SEQUENCES = st.one_of(st.none(), st.lists(st.integers(0, 4), min_size=1, max_size=4))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 6), st.integers(0, 100), SEQUENCES, st.data())
def test_taken_samples_are_those(size: int, seed: int, sequences: list[int] | None, data: st.DataObject) -> None:
    batch = full_batch(size, seed=seed, sequences=sequences)
    chosen = data.draw(st.lists(st.integers(0, size - 1), max_size=8)) if size else []
    taken = take_samples(batch, torch.tensor(chosen, dtype=torch.int64))
    if chosen:
        validate_batch(taken, INPUTS)
    samples = samples_of(batch)
    assert samples_of(taken) == [samples[index] for index in chosen]
    for group in taken.sequences.values():
        assert group.inverse is None or len(group.inverse.unique()) == len(group.offsets) - 1, "nothing unused is kept"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), SEQUENCES), min_size=1, max_size=4), st.integers(0, 100))
def test_joined_batches_have_all_samples(parts: list[tuple[int, list[int] | None]], seed: int) -> None:
    batches = [full_batch(size, seed=seed + at, sequences=sequences) for at, (size, sequences) in enumerate(parts)]
    joined = concatenate_batches(batches)
    if joined.batch_size:
        validate_batch(joined, INPUTS)
    assert samples_of(joined) == [sample for batch in batches for sample in samples_of(batch)]


def test_batches_of_other_parts_are_refused() -> None:
    whole = full_batch(2, seed=0)
    with pytest.raises(DataError, match=r"weights in one of them only"):
        concatenate_batches([whole, dataclasses.replace(whole, weights=None)])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 6), st.integers(0, 100), SEQUENCES, st.booleans())
def test_named_parts_are_the_batch(size: int, seed: int, sequences: list[int] | None, once: bool) -> None:
    batch = full_batch(size, seed=seed, sequences=sequences)
    if once:
        batch = deduplicate(batch, (FeatureGroup(single=(1,), jagged=(0,)), FeatureGroup(jagged=(1,))))
    parts = named_parts(batch)
    found = named_parts(batch_of_parts(dict(reversed(parts.items()))))
    assert found.keys() == parts.keys()
    assert all(torch.equal(found[name], value) for name, value in parts.items())
    assert batch_of_parts(parts).expanded().tensors().keys() == batch.expanded().tensors().keys()


def test_lengths_of_32_bits_give_offsets_of_64() -> None:
    """Ranks send lengths in 32 bits; kernels read offsets in 64."""
    lengths = torch.tensor([[2, 0]], dtype=torch.int32)
    joined = join_lists([lengths, lengths], [torch.tensor([1, 2]), torch.tensor([3, 4])])
    assert joined.offsets.dtype == torch.int64
    assert joined.offsets.tolist() == [0, 2, 2, 4, 4]
