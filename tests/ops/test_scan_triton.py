"""Search of INT8 rows by Triton against the reference, bit for bit, by Triton's interpreter (`make test-triton`)."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.ops.test_scan import random_problem, same
from tests.ops.triton_runs import run_python
from ziggurat.errors import MissingDependencyError
from ziggurat.ops import scan
from ziggurat.ops.scan import kernel, scan_clusters, scan_clusters_triton, scan_rows, scan_rows_triton
from ziggurat.ops.scan.triton import why_not_triton
from ziggurat.testing.pretend_cuda import pretend_cuda

HAS_TRITON = importlib.util.find_spec("triton") is not None

CHECK = """
from tests.ops.test_scan import random_problem, same
from ziggurat.ops import scan
from ziggurat.ops.scan import triton

for seed in range(40):
    triton._BLOCK = 1024 if seed % 8 == 0 else 64
    triton._MOST_KEYS = 2**25 if seed % 3 else 1
    tables, queries, by_cluster, by_row = random_problem(seed, most_rows=500)
    for name, options in (("clusters", by_cluster), ("rows", by_row)):
        expected, found = (getattr(scan, f"scan_{name}_{how}") for how in ("reference", "triton"))
        assert same(found(tables, queries, **options), expected(tables, queries, **options)), (seed, name)
"""


@pytest.mark.skipif(not HAS_TRITON, reason="no package triton: the kernels cannot be interpreted")
@pytest.mark.slow
def test_kernels_equal_the_reference_under_the_interpreter() -> None:
    done = run_python("-c", CHECK, interpreted=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or not HAS_TRITON, reason="no CUDA device, or no package triton")
def test_kernels_equal_the_reference_on_a_gpu() -> None:
    from ziggurat.retrieval.vectors import VectorIndex

    vectors, queries = torch.randn(20_000, 64), torch.randn(9, 64)
    index = VectorIndex.build(vectors)
    before = index.search(queries, k=50)
    after = index.to("cuda").search(queries.to("cuda"), k=50)
    assert torch.equal(before.positions, after.positions.cpu())
    assert torch.equal(before.scores, after.scores.cpu())


def test_asking_for_triton_where_it_cannot_run_is_an_error() -> None:
    tables, queries, by_cluster, by_row = random_problem(0, most_rows=50)
    if not why_not_triton(queries):
        pytest.skip("Triton runs here")
    with pytest.raises(MissingDependencyError, match="Triton"):
        scan_clusters_triton(tables, queries, **by_cluster)
    with pytest.raises(MissingDependencyError, match="Triton"):
        scan_rows_triton(tables, queries, **by_row)


def test_cuda_tensors_go_to_triton_and_without_it_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    tables, queries, by_cluster, by_row = random_problem(1, most_rows=50)
    by_cluster["masks"], by_row["rows"] = None, [None] * len(queries)
    expected = scan_clusters(tables, queries, **by_cluster)
    with pretend_cuda() as device:
        moved = scan.ScanTables(
            dim=tables.dim,
            rows=scan.Rows(*(each.to(device) for each in tables.rows)),
            offsets=tables.offsets.to(device),
            centroids=scan.Rows(*(each.to(device) for each in tables.centroids)),
            centroid_reach=tables.centroid_reach.to(device),
        )
        found = scan_clusters(moved, queries.to(device), **by_cluster)
        assert same(scan.Found(*(each.cpu() for each in found)), expected)
        monkeypatch.setattr(kernel, "why_not_triton", lambda queries: "")
        for name in ("scan_clusters_triton", "scan_rows_triton"):
            monkeypatch.setattr(kernel, name, lambda *_, name=name, **__: name)
        assert scan_clusters(moved, queries.to(device), **by_cluster) == "scan_clusters_triton"
        assert scan_rows(moved, queries.to(device), **by_row) == "scan_rows_triton"
    assert "CUDA" in scan.scan_kernel()
