"""Which rows a cache holds: compiled code and torch against dictionaries, whatever the order of rows and threads."""

from __future__ import annotations

import pytest
import torch

from tests.ops.row_cache.way_oracle import WayOracle
from ziggurat.ops.row_cache import HIT, NO_WAY, NUM_WAYS, CachePolicy, Ways
from ziggurat.ops.row_cache.cpp import why_not_cache


def stream(num_rows: int, *, steps: int, most: int, seed: int) -> list[torch.Tensor]:
    """Distinct rows of each step, some far more often than others, in no order."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(steps, most, generator=generator).pow(4).mul(num_rows).long()
    sizes = torch.randint(0, most + 1, (steps,), generator=generator)
    shuffled = [torch.unique(rows[:size]) for rows, size in zip(drawn, sizes.tolist(), strict=True)]
    return [rows[torch.randperm(len(rows), generator=generator)] for rows in shuffled]


@pytest.mark.parametrize("policy", list(CachePolicy))
@pytest.mark.parametrize(("num_rows", "share", "most"), [(40, 0.3, 60), (3000, 0.05, 200), (2000, 0.2, 1200)])
def test_what_a_cache_holds_is_what_dictionaries_hold(
    policy: CachePolicy, num_rows: int, share: float, most: int
) -> None:
    both = [Ways(num_rows, share=share, policy=policy) for _ in range(2)]
    both[1]._compiled = False
    oracle, hits = WayOracle(both[0].num_sets, policy), 0
    assert share * num_rows <= both[0].num_places < share * num_rows + NUM_WAYS
    num_hits = 0
    for number, rows in enumerate(stream(num_rows, steps=16, most=most, seed=num_rows), start=1):
        left, conflicts = oracle.step(rows.tolist(), step=number)
        for ways in both:
            admission = ways.admit(rows, step=number)
            assert set(admission.left[admission.left >= 0].tolist()) == left
            assert set(rows[admission.left == NO_WAY].tolist()) == conflicts
            held = set(ways.held_rows.tolist()) - {-1}
            assert held == {row for rows_of in oracle.sets.values() for row in rows_of}
            assert torch.equal(ways.find(rows), admission.places)
            num_hits = int((admission.left == HIT).sum())
            if ways.counts_R is not None:
                counts = ways.counts_R.tolist()
                assert all(counts[row] == count for row, count in oracle.counts.items())
        hits += num_hits
        assert torch.equal(both[0].tags_SW, both[1].tags_SW) or why_not_cache()
    assert hits == oracle.hits > 0


def test_threads_and_the_order_of_rows_change_nothing() -> None:
    threads = torch.get_num_threads()
    found = []
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            ways = Ways(2000, share=0.1, policy=CachePolicy.LRU)
            for number, rows in enumerate(stream(2000, steps=6, most=900, seed=3), start=1):
                ways.admit(rows.flip(0) if num_threads == 2 else rows, step=number)
            found.append(ways.tags_SW.sort(dim=1).values)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])


def test_a_share_of_one_gives_every_row_a_way() -> None:
    ways = Ways(1000, share=1.0, policy=CachePolicy.LRU)
    admission = ways.admit(torch.randperm(1000), step=1)
    assert not bool((admission.left == NO_WAY).any())


def test_rows_that_are_put_take_free_and_stale_ways_alone() -> None:
    ways = Ways(64 * 10, share=0.1, policy=CachePolicy.LRU)  # two sets
    assert ways.num_sets == 2
    first = ways.put(torch.arange(0, 60))
    assert not bool((first.left == NO_WAY).any())
    second = ways.put(torch.arange(60, 80))
    assert int((second.left == NO_WAY).sum()) == 16
    assert not ways.has_room
    ways.age()
    ways.refresh(ways.find(torch.arange(0, 10)))
    third = ways.put(torch.arange(100, 200))
    assert set(third.left[third.left >= 0].tolist()) == set(range(10, 64)), "what was made fresh again stays"


@pytest.mark.parametrize("policy", list(CachePolicy))
def test_stale_rows_go_after_free_ways_and_before_all_others(policy: CachePolicy) -> None:
    both = [Ways(400, share=0.2, policy=policy) for _ in range(2)]
    both[1]._compiled = False
    for ways in both:
        ways.admit(torch.arange(0, 200, 3), step=1)
        ways.age()
        for step, rows in enumerate((torch.arange(0, 60), torch.arange(100, 260, 2)), start=2):
            ways.admit(rows, step=step)
    assert torch.equal(both[0].held_rows, both[1].held_rows)


@pytest.mark.parametrize("policy", list(CachePolicy))
def test_asking_what_would_leave_after_a_load_changes_nothing(policy: CachePolicy) -> None:
    left = []
    for asks in (False, True):
        ways = Ways(64, share=0.5, policy=policy)
        for step in range(1, NUM_WAYS + 1):
            ways.admit(torch.tensor([step]), step=step)
        ways.age()  # as a load begins: rows that it does not replace keep their order
        if asks:
            ways.leaving(torch.tensor([50]))
        left.append(ways.admit(torch.tensor([51]), step=NUM_WAYS + 1).left.tolist())
    assert left[0] == left[1]
