"""Deduplicated batches say the same as plain ones, whatever repeats in them."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ziggurat.errors import BoundsError, DataError
from ziggurat.features.batch import Batch, JaggedRows, validate_batch
from ziggurat.features.batches.repeats import deduplicate, distinct_lists, find_groups, joint_codes, measure_repeats
from ziggurat.features.batches.samples import concatenate_batches, take_samples
from ziggurat.features.jagged import FeatureGroup
from ziggurat.testing.batches import small_inputs

INPUTS = small_inputs(num_dense=1, num_single=2, num_jagged=3)
GROUPS = (FeatureGroup(single=(1,), jagged=(0, 2)), FeatureGroup(jagged=(1,)))


def batch_of(lists: list[list[list[int]]], single: list[list[int]]) -> Batch:
    """A batch of lists [sample][feature] and rows [sample][feature]."""
    size = len(lists)
    flat = [lists[sample][feature] for feature in range(3) for sample in range(size)]
    offsets = torch.tensor([0, *np.cumsum([len(each) for each in flat])], dtype=torch.int64)
    values = torch.tensor([row for each in flat for row in each], dtype=torch.int64)
    return Batch(
        dense=torch.arange(float(size)).view(size, 1),
        single=torch.tensor(single, dtype=torch.int64).view(size, 2).t().contiguous(),
        jagged=JaggedRows(values, offsets if size else offsets[:1]),
        labels=torch.zeros(size, 1),
        row_ids=torch.arange(size),
    )


def assert_same(found: Batch, wanted: Batch) -> None:
    assert found.tensors().keys() == wanted.tensors().keys()
    for name, tensor in wanted.tensors().items():
        assert torch.equal(found.tensors()[name], tensor), name


SHORT = st.lists(st.integers(0, 2), max_size=3)
SAMPLES = st.lists(st.tuples(SHORT, SHORT, SHORT, st.integers(0, 2), st.integers(0, 1)), max_size=12)


@settings(max_examples=60, deadline=None)
@given(samples=SAMPLES, cut=st.tuples(st.integers(0, 12), st.integers(0, 12)))
def test_expanding_gives_the_batch_back(samples: list[tuple], cut: tuple[int, int]) -> None:
    plain = batch_of([list(each[:3]) for each in samples], [list(each[3:]) for each in samples])
    short = validate_batch(deduplicate(plain, GROUPS), INPUTS)
    assert_same(short.expanded(), plain)
    wanted = [len({(tuple(each[0]), tuple(each[2]), each[4]) for each in samples}), len({tuple(e[1]) for e in samples})]
    assert [group.num_slices for group in short.repeated] == wanted
    first, last = min(*cut, len(samples)), min(max(cut), len(samples))
    part = short.rows(first, last)
    assert_same(validate_batch(part, INPUTS).expanded(), plain.rows(first, last))
    assert all(group.num_slices <= max(group.batch_size, 0) for group in part.repeated)
    assert_same(short.map(torch.clone), short)
    assert_same(
        concatenate_batches([short.rows(0, last), part]).expanded(),
        concatenate_batches([plain.rows(0, last), plain.rows(first, last)]),
    )
    assert_same(
        concatenate_batches([plain.rows(0, last), part]).expanded(),
        concatenate_batches([plain.rows(0, last), plain.rows(first, last)]),
    )
    order = torch.arange(len(samples)).flip(0)
    assert_same(take_samples(short, order).expanded(), take_samples(plain, order))
    assert len(short.tensors()) == len(plain.tensors()) + 8


def test_equal_lists_have_one_code_whatever_their_neighbours() -> None:
    values, offsets = np.array([1, 2, 1, 2, 12, 1, 2], dtype=np.int32), np.array([0, 2, 2, 4, 5, 5, 7])
    codes, first = distinct_lists(values, offsets)
    assert codes.tolist() == [0, 1, 0, 2, 1, 0]
    assert first.tolist() == [0, 1, 3]
    assert joint_codes([codes, np.array([0, 0, 1, 0, 0, 0])])[0].tolist() == [0, 1, 2, 3, 1, 0]


def test_one_giant_session_and_no_repeats() -> None:
    same = batch_of([[[1], [], [2, 2]]] * 5, [[3, 4]] * 5)
    assert [group.num_slices for group in deduplicate(same, GROUPS).repeated] == [1, 1]
    other = batch_of([[[row], [row], []] for row in range(5)], [[row, row] for row in range(5)])
    assert find_groups(other, INPUTS) == []
    assert [found.factor for found in measure_repeats(other, INPUTS)] == [1.0, 1.0, 5.0, 1.0, 1.0]


def test_features_that_repeat_together_form_a_group() -> None:
    lists = [[[sample // 4], [sample // 4, 1], [sample]] for sample in range(16)]
    batch = batch_of(lists, [[sample % 12, sample // 4] for sample in range(16)])
    (group,) = find_groups(batch, INPUTS)
    assert group.features == FeatureGroup(single=(1,), jagged=(0, 1))
    assert group.names == ("single1", "jagged0", "jagged1")
    assert (group.factor, group.num_values, group.num_kept) == (4.0, 48, 12)


def test_a_batch_with_impossible_groups_is_refused() -> None:
    short = deduplicate(batch_of([[[1], [2], [3]]] * 3, [[1, 2]] * 3), GROUPS)
    group = short.repeated[0]
    for wrong, error in (
        (dataclasses.replace(group, inverse=group.inverse + 1), BoundsError),
        (dataclasses.replace(group, single=group.single + 1), DataError),
        (dataclasses.replace(group, features=FeatureGroup(single=(1,), jagged=(0, 1))), DataError),
        (dataclasses.replace(group, jagged=JaggedRows(group.jagged.values + 99, group.jagged.offsets)), BoundsError),
    ):
        with pytest.raises(error):
            validate_batch(dataclasses.replace(short, repeated=(wrong, short.repeated[1])), INPUTS)
