"""The made worlds of several labels: their truth is the truth, and purchases are those of rows that were clicked."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from benchmarks.several_labels import PAGE, PAGE_SHARES, Size, domain_world, excess_of, related_world, selected_world

SIZE = Size(rows=40_000, epochs=1, seeds=1)


def test_excess_is_nothing_at_the_truth_and_more_elsewhere() -> None:
    chances = np.array([0.1, 0.5, 0.9])
    assert excess_of(chances, chances) == pytest.approx(0.0, abs=1e-12)
    assert excess_of(chances, np.full(3, 0.5)) > 0.1


def test_labels_are_drawn_by_the_chances_of_new_rows() -> None:
    world = selected_world(SIZE, seed=0)
    clicked = world.train.filter(pl.col("click") == 1)
    assert world.train.filter(pl.col("click") == 0)["buy"].sum() == 0
    assert world.train["click"].mean() == pytest.approx(world.chances["click"].mean(), abs=0.01)
    # Of those who click, fewer buy than of those who are shown: the two chances pull in opposite directions.
    of_clicked = np.average(world.chances["buy"], weights=world.chances["click"])
    assert clicked["buy"].mean() == pytest.approx(of_clicked, abs=0.02)
    assert of_clicked < world.chances["buy"].mean() - 0.03


def test_related_labels_agree_as_much_as_their_weights() -> None:
    for correlation in (0.0, 1.0):
        world = related_world(SIZE, correlation=correlation, seed=1)
        agree = np.corrcoef(world.chances["first"], world.chances["second"])[0, 1]
        assert abs(agree - correlation) < 0.3
        assert world.train["second"].null_count() == pytest.approx(0.9 * SIZE.rows, rel=0.02)


def test_pages_have_their_shares_and_clicks() -> None:
    world = domain_world(SIZE, seed=2)
    pages = world.train[PAGE].value_counts(normalize=True).sort(PAGE)
    assert pages["proportion"].to_list() == pytest.approx(PAGE_SHARES, abs=0.01)
    new_pages = world.new[PAGE].to_numpy()
    for page in range(len(PAGE_SHARES)):
        clicks = world.train.filter(pl.col(PAGE) == page)["click"].mean()
        assert clicks == pytest.approx(world.chances["click"][new_pages == page].mean(), abs=0.05)
