"""Growing vocabularies: C++ against the dict that defines them, and both against what is promised."""

from __future__ import annotations

import numpy as np
import pytest

from ziggurat.errors import ConfigError
from ziggurat.features.growing import Counting, Evict, Growing
from ziggurat.features.hashing import GOLDEN
from ziggurat.ops.growing.growing_ids import GrowingIds
from ziggurat.ops.growing.state import map_bytes


def _ids(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.uint64)


def _random_growing(rng: np.random.Generator) -> Growing:
    return Growing(
        num_ids=int(rng.integers(1, 200)),
        admit_after=int(rng.integers(1, 4)),
        evict=list(Evict)[rng.integers(3)],
        counting=list(Counting)[rng.integers(2)],
    )


@pytest.mark.parametrize("seed", range(12))
def test_cpp_leaves_the_bits_that_the_reference_does(seed: int) -> None:
    rng = np.random.default_rng(seed)
    growing = _random_growing(rng)
    both = [GrowingIds(growing, kernel=kernel) for kernel in ("cpp", "reference")]
    for each in both:  # so small that estimates are wrong, and halved often
        object.__setattr__(each.state, "sketch", each.state.sketch[:200].copy())
    spread = rng.choice(np.array([1, 1 << 32, int(GOLDEN)], dtype=np.uint64))
    for step in range(25):
        ids = np.minimum(rng.zipf(1.3, 80), 1000).astype(np.uint64) * spread + np.uint64(step // 5)
        order = rng.permutation(len(ids))  # of ids within a step: it does not matter
        mine, other = both[0].step(ids, step=step), both[1].step(ids[order], step=step)
        assert np.array_equal(mine.rows[order], other.rows)
        assert np.array_equal(mine.new_ids, other.new_ids)
        assert np.array_equal(mine.new_rows, other.new_rows)
        assert mine.num_evicted == other.num_evicted
        for name, array in both[0].state.arrays().items():
            assert np.array_equal(array, both[1].state.arrays()[name]), name
        if step == 12:
            both[0].rebuild()
    keys = both[0].state.keys[: len(both[0])]
    assert len(np.unique(keys)) == len(keys), "no id twice"
    assert np.array_equal(both[0].find(keys), np.arange(len(keys))), "none lost"


@pytest.mark.parametrize("evict", [Evict.LEAST_FREQUENT, Evict.OLDEST])
def test_who_goes_first_is_who_a_sort_of_all_rows_says(evict: Evict) -> None:
    rng = np.random.default_rng(3)
    grown = GrowingIds(Growing(num_ids=40, evict=evict))
    uses: dict[int, list[int]] = {}
    for step in range(1, 200):
        ids = rng.permutation(60)[:5] + 1  # of 40 rows one at a time is queued: the order is exact
        found = grown.step(ids.astype(np.uint64), step=step)
        for each in ids.tolist():
            if each in uses:
                uses[each] = [min(uses[each][0] + 1, 255), step]
        for each in sorted(ids.tolist()):
            if each in uses:
                continue
            if len(uses) == 40:
                row_of = {key: int(grown.find(_ids(key))[0]) for key in uses}
                free = [key for key, (_, last) in uses.items() if last < step]
                order = {key: (uses[key] if evict is Evict.LEAST_FREQUENT else uses[key][1:]) for key in free}
                gone = [key for key in free if row_of[key] < 0]
                worst = min(gone, key=lambda key: order[key])
                assert all(order[worst] <= order[key] for key in free if row_of[key] >= 0)
                del uses[worst]
            uses[each] = [1, step]
        if found.num_evicted and evict is Evict.LEAST_FREQUENT and grown.state.numbers[4] == 0:
            uses = {key: [used >> 1, last] for key, (used, last) in uses.items()}
    assert sorted(uses) == sorted(grown.state.keys[: len(grown)].tolist())


def test_admission_counts_the_sightings_of_all_steps() -> None:
    for counting in Counting:
        grown = GrowingIds(Growing(num_ids=8, admit_after=3, counting=counting))
        assert grown.step(_ids(7, 9), step=1).rows.tolist() == [-1, -1]
        assert grown.step(_ids(7, 9, 7), step=2).rows.tolist() == [0, -1, 0], "two more: 7 is due, in the whole step"
        assert grown.report() == {"known": 2, "unknown": 3, "new": 1, "evicted": 0, "ids": 1}
        assert grown.find(_ids(7, 9)).tolist() == [0, -1]
        assert grown.state.last[0] == 2


def test_rows_of_this_step_stay_and_a_full_table_leaves_the_rest_unknown() -> None:
    grown = GrowingIds(Growing(num_ids=2, evict=Evict.OLDEST))
    assert grown.step(_ids(1, 2, 3), step=1).rows.tolist() == [0, 1, -1]
    assert grown.step(_ids(2, 4, 5), step=2).rows.tolist() == [1, 0, -1]
    never = GrowingIds(Growing(num_ids=1, evict=Evict.NEVER))
    assert never.step(_ids(1), step=1).rows.tolist() == [0]
    assert never.step(_ids(2), step=2).rows.tolist() == [-1]


def test_an_id_takes_twenty_bytes_and_settings_have_bounds() -> None:
    grown = GrowingIds(Growing(num_ids=1 << 20, admit_after=2))
    assert grown.num_bytes <= 20 << 20
    for growing in (grown.growing, Growing(num_ids=10), Growing(num_ids=70, admit_after=2)):
        assert GrowingIds(growing, kernel="cpp").num_bytes == map_bytes(growing)
    with pytest.raises(ConfigError, match="admit_after"):
        Growing(num_ids=10, admit_after=256)
