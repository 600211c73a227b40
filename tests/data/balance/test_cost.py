"""Costs follow from lengths; coefficients are found again from sums over batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.features.test_batch import INPUTS, full_batch, samples_of
from ziggurat.data.balance.cost import LengthCost, SampleCost, cost_of_terms, fit_cost, lengths_of, terms_of, tokens_of
from ziggurat.errors import ConfigError, DataError
from ziggurat.testing.batches import random_batch, small_inputs


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 6), st.integers(0, 50), st.one_of(st.none(), st.lists(st.integers(0, 5), min_size=1)))
def test_lengths_are_those_of_the_samples(size: int, seed: int, sequences: list[int] | None) -> None:
    batch = full_batch(size, seed=seed, sequences=sequences)
    lengths = lengths_of(batch, INPUTS)
    samples = samples_of(batch)
    names = {"tags": "list 0", "seen": "list 1", "history": "history.item"}
    for name, key in names.items():
        assert lengths[name].tolist() == [len(sample[key]) for sample in samples]
    assert tokens_of(batch, INPUTS).tolist() == [sum(len(sample[key]) for key in names.values()) for sample in samples]


def test_cost_of_a_sample() -> None:
    cost = SampleCost(fixed=2, lists=(LengthCost(name="a", per_event=3, per_square=0.5), LengthCost(name="b")))
    lengths = {"a": np.array([0, 4]), "b": np.array([1, 0])}
    assert cost.of(lengths, num_samples=2).tolist() == [3.0, 22.0]
    assert cost.describe() == "2 + 3 · a + 0.5 · a² + 1 · b"
    assert not cost.is_constant
    assert SampleCost(fixed=1, lists=(LengthCost(name="a", per_event=0),)).is_constant
    with pytest.raises(DataError, match="'c'"):
        SampleCost(lists=(LengthCost(name="c"),)).of(lengths, num_samples=2)


def test_terms_are_read() -> None:
    wanted = SampleCost(
        fixed=42.5, lists=(LengthCost(name="a", per_event=3.5, per_square=1e-3), LengthCost(name="b_2"))
    )
    assert cost_of_terms(("40", "2.5", "2.5*a", "a", "1e-3 * a^2", "b_2")) == wanted
    for text in ("a^3", "-1*a", "a*2", "", "2*"):
        with pytest.raises(ConfigError, match="balance-cost"):
            cost_of_terms((text,))


def test_coefficients_are_found_again() -> None:
    inputs = small_inputs(num_jagged=2)
    batches = [random_batch(inputs, 5 + seed, seed=seed, max_length=1 + 3 * seed) for seed in range(8)]
    cost = SampleCost(fixed=1.0, lists=(LengthCost(name="jagged0", per_square=1.0), LengthCost(name="jagged1")))
    terms = terms_of(cost, batches, inputs)
    true = np.array([1e-4, 2e-5, 3e-7, 5e-6, 0.0])
    found = fit_cost(cost, terms=terms, seconds=terms @ true)
    values = [found.fixed, *(value for each in found.lists for value in (each.per_event, each.per_square))]
    np.testing.assert_allclose(values, true, rtol=1e-6, atol=1e-12)
    with pytest.raises(DataError, match="4 batches"):
        fit_cost(cost, terms=terms[:3], seconds=np.ones(3))


def test_cost_reads_no_padding_of_an_empty_batch() -> None:
    inputs = small_inputs(num_jagged=1)
    empty = random_batch(inputs, 0)
    assert torch.equal(empty.jagged.offsets, torch.zeros(1, dtype=torch.int64))
    assert lengths_of(empty, inputs)["jagged0"].shape == (0,)
