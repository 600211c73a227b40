"""Rows in columns: the C++ kernel gives the bytes of the numpy reference, whatever the types, runs and places."""

from __future__ import annotations

import numpy as np
import pytest

from ziggurat.data.mixing import splitmix64
from ziggurat.features.hashing import GOLDEN, mix
from ziggurat.ops import rows
from ziggurat.ops.rows import CHUNK_BITS, Columns, Targets, share_lists, share_lists_reference

pytestmark = pytest.mark.skipif(bool(rows.kernel_reason()), reason=rows.kernel_reason())


def some_columns(rng: np.random.Generator, num_rows: int) -> Columns:
    """Columns of every width: 4 bytes, 8 bytes, and vectors of 1 and 3 numbers."""
    integers = rng.integers(-(2**31), 2**31, num_rows).astype(np.int32)
    vectors = [rng.normal(size=(num_rows, dim)).astype(np.float32) for dim in (3, 1)]
    return Columns([integers, rng.normal(size=num_rows).astype(np.float32), rng.integers(0, 2**62, num_rows), *vectors])


def emptied(columns: Columns, num_rows: int) -> Columns:
    return Columns([np.zeros((num_rows, *array.shape[1:]), array.dtype) for array in columns.arrays])


@pytest.mark.parametrize("seed", range(6))
def test_placed_rows_are_the_reference_s(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_rows = int(rng.integers(1, 400))
    columns = some_columns(rng, num_rows)
    places = rng.permutation(num_rows + 50)[:num_rows].astype(np.int32)
    places[rng.random(num_rows) < (seed % 3) / 3] = -1
    found, wanted = emptied(columns, num_rows + 50), emptied(columns, num_rows + 50)
    rows.place_rows(columns, out=found, places=places)
    rows.place_rows_reference(columns, out=wanted, places=places)
    assert all(np.array_equal(a, b) for a, b in zip(found.arrays, wanted.arrays, strict=True))


@pytest.mark.parametrize("seed", range(6))
def test_gathered_rows_are_the_reference_s(seed: int) -> None:
    rng = np.random.default_rng(seed)
    blocks = [some_columns(rng, 500) for _ in range(3)]
    runs = np.array([(block, rng.integers(0, 200), rng.integers(0, 290)) for block in range(3) for _ in range(4)])
    size = int(runs[:, 2].sum())
    # integers widened; floats into the second column of a matrix; the rest as they are.
    targets = Targets(*(np.array(each) for each in ([0, 1, 2, 3, 4], [0, 1, 0, 0, 0], [1, 2, 1, 3, 1])))
    shapes = [((size,), np.int64), ((size, 2), np.float32), ((size,), np.int64), ((size, 3), np.float32)]
    shapes.append(((size, 1), np.float32))
    found, wanted = ([np.zeros(shape, dtype) for shape, dtype in shapes] for _ in range(2))
    rows.gather_rows(blocks, runs, out=found, targets=targets)
    rows.gather_rows_reference(blocks, runs, out=wanted, targets=targets)
    assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert (found[0] < 0).any()


def test_gathered_lists_are_the_reference_s() -> None:
    rng = np.random.default_rng(0)
    chunks = [rng.integers(0, 2**31, size).astype(np.int32) for size in (0, 40, 7)]
    chunk = rng.choice([1, 2], 100)
    first = rng.integers(0, 4, 100)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 4, 100))])
    starts = (chunk.astype(np.int64) << CHUNK_BITS) + first
    found = rows.gather_lists(starts, offsets=offsets, chunks=chunks)
    assert np.array_equal(found, rows.gather_lists_reference(starts, offsets=offsets, chunks=chunks))


@pytest.mark.parametrize("size", [0, 1, 1000])
def test_hashes_of_rows_are_those_of_the_ledger_s_definition(size: int) -> None:
    row_ids = np.random.default_rng(size).integers(-(2**63), 2**63 - 1, size)
    mixed = splitmix64(row_ids)
    ordered = mix(mixed + np.arange(size, dtype=np.uint64) * GOLDEN)
    wanted = int(ordered.sum(dtype=np.uint64)), int(mixed.sum(dtype=np.uint64))
    assert rows.hash_rows(row_ids) == rows.hash_rows_reference(row_ids) == wanted


def test_equal_neighbours_share_a_start() -> None:
    generator = np.random.default_rng(0)
    for seed in range(30):
        lists = [generator.integers(0, 2, generator.integers(0, 3)) for _ in range(seed)]
        values = np.concatenate([*lists, np.empty(0, np.int64)]).astype(np.int32)
        offsets = np.cumsum([0, *map(len, lists)])
        found = share_lists(values, offsets)
        assert np.array_equal(found, share_lists_reference(values, offsets))
        for at, start in enumerate(found.tolist()):
            assert np.array_equal(values[start : start + len(lists[at])], lists[at])
            assert (
                at == 0
                or (start == found[at - 1]) == np.array_equal(lists[at], lists[at - 1])
                or not len(lists[at - 1])
            )
