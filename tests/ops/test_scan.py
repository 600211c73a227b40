"""Search of INT8 rows: every path of the kernel finds what the reference finds, bit for bit."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from ziggurat.errors import DataError
from ziggurat.ops import scan
from ziggurat.ops.bitmask import pack_mask
from ziggurat.ops.cpp_build import CppLibrary
from ziggurat.ops.scan import (
    Found,
    Rows,
    ScanPath,
    ScanTables,
    dequantize_rows,
    kernel,
    quantize_rows,
    scan_clusters,
    scan_clusters_reference,
    scan_rows,
    scan_rows_reference,
    scan_tables,
)
from ziggurat.ops.scan.reference import round_query


def tables_of(vectors: Tensor, *, num_clusters: int, generator: torch.Generator) -> ScanTables:
    num, dim = vectors.shape
    cuts = torch.randint(0, num + 1, (num_clusters - 1,), generator=generator).sort().values
    return ScanTables(
        dim=dim,
        rows=quantize_rows(vectors),
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), cuts, torch.tensor([num])]),
        centroids=quantize_rows(torch.randn(num_clusters, dim, generator=generator)),
        centroid_reach=torch.rand(num_clusters, generator=generator),
    )


def same(first: Found, second: Found) -> bool:
    return torch.equal(first.positions, second.positions) and torch.equal(first.scores, second.scores)


def paths() -> list[ScanPath]:
    return [path for path in ScanPath if path <= scan.best_path()]


class Problem(NamedTuple):
    """A table, queries, and the options of both kinds of search."""

    tables: ScanTables
    queries: Tensor
    by_cluster: dict[str, Any]
    by_row: dict[str, Any]


def random_problem(seed: int, *, most_rows: int = 1500) -> Problem:
    """Any shape, ragged and empty clusters, equal rows, masks for all, for each or for some queries."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    num, dim = draw.choice([1, 2, 16, 17, 100, most_rows]), draw.choice([1, 4, 16, 17, 48, 63, 64, 65, 128, 200])
    vectors = torch.randn(num, dim, generator=generator) * draw.choice([1e-3, 1.0, 100.0])
    if seed % 4 == 0:  # many equal ones: only the position decides
        vectors = vectors[torch.randint(0, num // 4 + 1, (num,), generator=generator)]
    num_clusters, num_queries, k = draw.choice([1, 2, 5, 40]), draw.choice([1, 3]), draw.choice([1, 5, 100, num + 3])
    tables = tables_of(vectors, num_clusters=num_clusters, generator=generator)
    queries = torch.randn(num_queries, dim, generator=generator)
    probes = torch.randint(0, num_clusters + 1, (num_queries,), generator=generator)
    least = torch.full((num_queries,), draw.choice([0, k, num]))
    shape = draw.choice([(num,), (num_queries, num)])
    masks = draw.choice([None, pack_mask(torch.rand(shape, generator=generator) < draw.choice([0.0, 0.1, 0.6]))])
    if masks is not None and seed % 3 == 0:
        masks = [None, *(masks if masks.dim() == 2 else [masks] * num_queries)][:num_queries]
    lists = [torch.randperm(num, generator=generator)[: draw.randint(0, num)] for _ in range(num_queries - 1)]
    both = {"k": k, "candidates": draw.choice([0, 0, 1, k + 3, 2 * k])}
    return Problem(
        tables,
        queries,
        by_cluster=both | {"probes": probes, "least": least, "masks": masks},
        by_row=both | {"rows": [None, *lists]},
    )


@pytest.mark.parametrize("seed", range(40))
def test_every_path_equals_the_reference(seed: int) -> None:
    tables, queries, by_cluster, by_row = random_problem(seed)
    first, second = (
        scan_clusters_reference(tables, queries, **by_cluster),
        scan_rows_reference(tables, queries, **by_row),
    )
    for path in paths():
        assert same(scan_clusters(tables, queries, **by_cluster, path=path), first), path
        assert same(scan_rows(tables, queries, **by_row, path=path), second), path


@pytest.mark.parametrize("dim", [16, 40, 64, 128, 256, 1000])
def test_the_largest_products_do_not_overflow(dim: int) -> None:
    """Every number is the largest there is, so that sums of few bits would overflow first."""
    signs = torch.tensor([1.0, -1.0]).repeat(10)
    tables = tables_of(signs.unsqueeze(1).expand(20, dim), num_clusters=1, generator=torch.Generator())
    queries = torch.tensor([1.0, -1.0]).unsqueeze(1).repeat(1, dim)
    for candidates in (0, 15):
        expected = scan_rows_reference(tables, queries, k=12, rows=[None] * 2, candidates=candidates)
        for path in paths():
            found = scan_rows(tables, queries, k=12, rows=[None] * 2, candidates=candidates, path=path)
            assert same(found, expected), path


@pytest.mark.parametrize("seed", range(12))
def test_a_table_for_each_query_is_searched_as_its_rows_are(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dim, k = draw.choice([5, 64, 128]), draw.choice([1, 7, 40])
    tables, numbers = [], []
    for num in (0, 1, 30, 300):
        tables.append(tables_of(torch.randn(num, dim, generator=generator), num_clusters=1, generator=generator))
        numbers.append(torch.randperm(1000, generator=generator)[:num])
    queries = torch.randn(4, dim, generator=generator)
    candidates = draw.choice([0, k, 3 * k, 299, 300])
    options: dict[str, Any] = {"k": k, "numbers": numbers, "candidates": candidates}
    found = [scan_tables(tables, queries, **options, path=path) for path in paths()]
    monkeypatch.setattr(kernel, "_LIBRARY", CppLibrary.missing("no compiler"))
    expected = scan_tables(tables, queries, **options)
    for each in found:
        assert same(each, expected)
    for i, table in enumerate(tables):
        own = scan_rows_reference(table, queries[i : i + 1], k=k, rows=[None], candidates=candidates)
        assert torch.equal(own.scores[0], expected.scores[i])
        names = [int(numbers[i][at]) if at >= 0 else -1 for at in own.positions[0].tolist()]
        assert names == expected.positions[i].tolist()


def test_more_clusters_are_read_until_enough_rows_pass() -> None:
    generator = torch.Generator().manual_seed(0)
    tables = tables_of(torch.randn(400, 8, generator=generator), num_clusters=20, generator=generator)
    masks = pack_mask(torch.arange(400) == 399)
    for least, expected in ((0, -1), (1, 399)):
        first = [
            scan_clusters(
                tables,
                torch.randn(1, 8, generator=generator),
                k=1,
                probes=torch.tensor([1]),
                least=torch.tensor([least]),
                masks=masks,
            )
            for _ in range(10)
        ]
        assert min(int(each.positions[0, 0]) for each in first) == expected


def test_rounding_is_within_half_a_step_and_zeros_stay() -> None:
    vectors = torch.randn(50, 33) * torch.logspace(-3, 3, 50).unsqueeze(1)
    vectors[7] = 0
    rows = quantize_rows(vectors)
    assert rows.upper.shape == rows.lower.shape == (50, 24)
    error = (dequantize_rows(rows, dim=33) - vectors).abs()
    assert bool((error <= 0.501 * rows.scales.unsqueeze(1)).all())
    assert not dequantize_rows(rows, dim=33)[7].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_query_that_is_not_finite_is_refused(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = tables_of(torch.randn(9, 4), num_clusters=1, generator=torch.Generator())
    queries = torch.randn(3, 4)
    queries[1, 2] = bad
    one = torch.ones(3, dtype=torch.int64)
    for library in (kernel._LIBRARY, CppLibrary.missing("no compiler")):
        monkeypatch.setattr(kernel, "_LIBRARY", library)
        with pytest.raises(DataError, match="column 2"):
            scan_clusters(tables, queries, k=1, probes=one, least=one)
        with pytest.raises(DataError, match="query 1"):
            scan_rows(tables, queries, k=1, rows=[None] * 3)
        with pytest.raises(DataError, match="query 1"):
            scan_tables([tables] * 3, queries, k=1, numbers=[torch.arange(9)] * 3)


def test_without_a_compiler_the_reference_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = tables_of(torch.randn(30, 4), num_clusters=3, generator=torch.Generator())
    queries, two = torch.randn(2, 4), torch.full((2,), 2)
    expected = scan_clusters(tables, queries, k=4, probes=two, least=two)
    monkeypatch.setattr(kernel, "_LIBRARY", CppLibrary.missing("no compiler"))
    assert same(scan_clusters(tables, queries, k=4, probes=two, least=two), expected)
    assert "no compiler" in scan.scan_kernel()


def test_a_table_without_rows_finds_nothing() -> None:
    none = quantize_rows(torch.zeros(0, 5))
    tables = ScanTables(
        dim=5, rows=none, offsets=torch.zeros(1, dtype=torch.int64), centroids=none, centroid_reach=none.scales
    )
    one = torch.ones(1, dtype=torch.int64)
    found = scan_clusters(tables, torch.randn(1, 5), k=3, probes=one, least=one)
    assert found.positions.tolist() == [[-1] * 3]
    assert isinstance(tables.rows, Rows)


def test_a_query_is_rounded_by_one_division() -> None:
    """127 / x and 127 · (1 / x) differ in the last bit of a quarter of all numbers; kernels divide."""
    queries = torch.randn(200_000, 8, generator=torch.Generator().manual_seed(1))
    largest = queries.abs().amax(-1).numpy()
    inverse = np.float32(127) / largest
    codes = np.rint(queries.numpy() * inverse[:, None])
    assert (round_query(queries)[0].numpy() == codes).all()
