"""Every sample has one rank, loads are near to equal, and the plan depends on the costs alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ziggurat.data.balance.partition import (
    Balance,
    corrected_shares,
    loads_of,
    partition,
    straggler_share,
    variable,
    zigzag,
)
from ziggurat.errors import DataError

COSTS = st.lists(st.one_of(st.just(0.0), st.integers(1, 5000).map(float)), max_size=40)


def drawn_lengths(name: str, *, seed: int = 0, num: int = 64 * 128) -> np.ndarray:
    draw = np.random.default_rng(seed)
    lengths = draw.lognormal(7, 1.3, num) if name == "lognormal" else draw.zipf(1.2, num)
    return np.minimum(lengths, 21_000).astype(np.int64).astype(np.float64)


@settings(max_examples=150, deadline=None)
@given(COSTS, st.integers(1, 9), st.sampled_from(Balance))
@example([0.0, 3.0], 6, Balance.VARIABLE)  # a sixth of six times three is less than three
def test_every_sample_has_a_rank(costs: list[float], num_ranks: int, balance: Balance) -> None:
    values = np.array(costs)
    ranks = partition(values, balance=balance, num_ranks=num_ranks)
    assert ranks.shape == values.shape
    assert not len(ranks) or 0 <= ranks.min() <= ranks.max() < num_ranks
    np.testing.assert_array_equal(ranks, partition(values, balance=balance, num_ranks=num_ranks))
    counts = np.bincount(ranks, minlength=num_ranks)
    if balance is Balance.VARIABLE:
        assert (np.diff(ranks) >= 0).all(), "pieces of the stream"
    else:
        assert counts.max() - counts.min() <= 1


@settings(max_examples=100, deadline=None)
@given(COSTS.filter(lambda costs: 0 < len(costs) <= 9), st.integers(1, 4))
def test_variable_cuts_as_well_as_can_be(costs: list[float], num_ranks: int) -> None:
    """The dearest piece is that of the best cuts, found by trying all."""

    def best(rest: list[float], pieces: int) -> float:
        if pieces == 1:
            return sum(rest)
        return min(max(sum(rest[:cut]), best(rest[cut:], pieces - 1)) for cut in range(len(rest) + 1))

    values = np.array(costs)
    loads = loads_of(values, variable(values, num_ranks=num_ranks), num_ranks=num_ranks)
    assert loads.max() == pytest.approx(best(costs, num_ranks), rel=1e-6)


@pytest.mark.parametrize("name", ["lognormal", "zipf"])
@pytest.mark.parametrize("square", [False, True])
def test_stragglers_of_64_ranks(name: str, square: bool) -> None:
    """128 samples a rank: at most 1 % lost, where a quarter and more is lost as they come."""
    lengths = drawn_lengths(name)
    costs = lengths**2 + 4000 * lengths if square else lengths
    lost = {
        balance: straggler_share(loads_of(costs, partition(costs, balance=balance, num_ranks=64), num_ranks=64))
        for balance in Balance
    }
    assert lost[Balance.NONE] > 0.2
    assert lost[Balance.ZIGZAG] < 0.01
    assert lost[Balance.KARMARKAR_KARP] < 0.0005
    assert lost[Balance.VARIABLE] < 0.04


def test_zigzag_deals_there_and_back() -> None:
    assert zigzag(np.array([1.0, 9, 5, 7, 3, 8]), num_ranks=2).tolist() == [1, 0, 0, 1, 0, 1]


def test_shares_follow_the_time_of_each_rank() -> None:
    """Ranks of speeds 1, 1 and 1/2: after some corrections they need the same time."""
    costs, speeds = np.full(3000, 1.0), np.array([1.0, 1.0, 0.5])
    shares = (1 / 3, 1 / 3, 1 / 3)
    for _ in range(12):
        loads = loads_of(costs, variable(costs, num_ranks=3, shares=shares), num_ranks=3)
        shares = corrected_shares(shares, seconds=(loads / speeds).tolist())
    np.testing.assert_allclose(shares, (0.4, 0.4, 0.2), atol=0.01)
    assert corrected_shares((0.5, 0.5), seconds=(0.0, 0.0)) == (0.5, 0.5)


def test_straggler_share_is_time_waited() -> None:
    assert straggler_share(np.array([1.0, 1.0, 2.0])) == pytest.approx(1 / 3)
    assert straggler_share(np.array([[1.0, 3.0], [3.0, 1.0]])) == pytest.approx(1 / 3), "steps wait one by one"
    assert straggler_share(np.zeros((2, 3))) == 0.0


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_costs_that_are_none_are_refused(bad: float) -> None:
    with pytest.raises(DataError, match=r"for sample 1"):
        partition(np.array([1.0, bad]), balance=Balance.ZIGZAG, num_ranks=2)
