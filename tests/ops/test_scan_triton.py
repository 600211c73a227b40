"""Search of INT8 rows by Triton against the reference, bit for bit, by Triton's interpreter (`make test-triton`)."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from tests.ops.test_scan import random_problem, same
from tests.ops.triton_runs import run_python
from ziggurat.errors import DataError, MissingDependencyError
from ziggurat.ops import scan
from ziggurat.ops.bitmask import full_mask, pack_mask
from ziggurat.ops.scan import kernel, scan_clusters, scan_clusters_triton, scan_rows, scan_rows_triton, triton
from ziggurat.ops.scan.triton import why_not_triton
from ziggurat.testing.pretend_cuda import pretend_cuda
from ziggurat.testing.pretend_queues import record_waits

HAS_TRITON = importlib.util.find_spec("triton") is not None

CHECK = """
from tests.ops.test_scan import random_problem, same
from ziggurat.ops import scan
from ziggurat.ops.scan import triton

for seed in range(40):
    triton._BLOCK = 1024 if seed % 8 == 0 else 64
    triton._SMALL_BLOCK = 16 if seed % 5 else 64
    triton._FEWEST_QUERIES = 2
    triton._FEW_QUERIES = 0 if seed % 7 == 0 else 64  # none are few: lists are sorted by torch
    triton._MERGED_OTHERS = 4 if seed % 4 else 32
    triton._COUNTED_CLUSTERS = 4 if seed % 2 else 32
    triton._COUNTED_WORDS = 2 if seed % 2 else 8
    triton._MAX_KEYS = 2**25 if seed % 3 else 1
    triton._FEWEST_PROGRAMS = 2 if seed % 2 else 64  # of several blocks each
    triton._MAX_PROGRAMS = 2 if seed % 2 else 256
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
    """Each question thrice: by launches, captured, replayed; the CPU finds the same bits."""
    from ziggurat.retrieval.vectors import VectorIndex

    vectors = torch.randn(20_000, 64)
    index = VectorIndex.build(vectors)
    on_gpu = VectorIndex.build(vectors).to("cuda")
    for num in (1, 9, 64, 65):
        queries = torch.randn(num, 64)
        bits = pack_mask(torch.rand(2, len(vectors)) < torch.tensor([[0.5], [0.01]]))
        each = [None if number % 3 == 0 else bits[number % 2] for number in range(num)]
        for masks in (None, bits[1], each):
            before = index.search(queries, k=50, masks=masks)
            moved = masks
            if isinstance(masks, torch.Tensor):
                moved = masks.to("cuda")
            elif masks is not None:
                moved = [None if mask is None else mask.to("cuda") for mask in masks]
            for _ in range(3):
                after = on_gpu.search(queries.to("cuda"), k=50, masks=moved)
                assert torch.equal(before.positions, after.positions.cpu())
                assert torch.equal(before.scores, after.scores.cpu())
    wrong = torch.randn(2, 64, device="cuda")
    wrong[1, 3] = torch.inf
    for _ in range(3):
        with pytest.raises(DataError, match="query 1"):
            on_gpu.search(wrong, k=50)


class _NoKernels:
    """Kernels that write nothing, but that queries are finite."""

    def __init__(self) -> None:
        self.launched: list[str] = []

    def __getattr__(self, name: str) -> dict[Any, Any]:
        launched = self.launched

        class Launches(dict[Any, Any]):
            def __missing__(self, grid: Any) -> Any:
                def launch(*arguments: Any, **_: Any) -> None:
                    launched.append(name)
                    if name == "round_kernel":
                        arguments[5].fill_(True)

                return launch

        return Launches()


@pytest.mark.parametrize("has_masks", [False, True])
def test_a_search_of_few_queries_waits_once_and_at_its_end(has_masks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tables, queries, _, _ = random_problem(2, most_rows=400)
    kernels = _NoKernels()
    monkeypatch.setattr(triton, "why_not_triton", lambda queries: "")
    monkeypatch.setattr(triton, "kernels_of", lambda module: kernels)
    with pretend_cuda() as device:
        moved = scan.ScanTables(
            dim=tables.dim,
            rows=scan.Rows(*(each.to(device) for each in tables.rows)),
            offsets=tables.offsets.to(device),
            centroids=scan.Rows(*(each.to(device) for each in tables.centroids)),
            centroid_reach=tables.centroid_reach.to(device),
        )
        masks = full_mask(tables.num_rows).to(device) if has_masks else None
        asked = queries[:1].to(device)
        for repeat in range(2):
            kernels.launched.clear()
            with record_waits() as waits:
                triton.scan_clusters_triton(moved, asked, k=5, probes=2, least=5, masks=masks, candidates=20)
            first = 1 if repeat == 0 and not has_masks else 0  # sizes of clusters
            assert len(waits) == 1 + first, waits
    expected = [
        "round_kernel",
        "best_kernel",
        "merge_kernel",
        *(["passing_kernel"] if has_masks else []),
        "choose_kernel",
    ]
    assert kernels.launched == [*expected, "best_kernel", "merge_kernel", "exact_kernel"]


def test_a_mask_of_several_queries_is_taken_once() -> None:
    queries = torch.zeros(4, 2)
    one = full_mask(100)
    other = full_mask(100)
    found = triton._Masks.of([one, None, other, one], queries)
    assert found is not None
    assert found.words.shape[0] == 2
    assert found.row_of_query.tolist() == [0, -1, 1, 0]
    assert triton._Masks.of([None] * 4, queries) is None


def test_few_queries_have_lists_that_are_merged_and_hold_what_is_wanted() -> None:
    for num, longest, most in ((1, 20_000, 400), (1, 1_000_000, 400), (64, 20_000, 400), (64, 10**6, 1000), (1, 5, 5)):
        sizes = triton._Sizes.of(num, triton._Spans(totals=torch.zeros(num), longest=longest), most=most)
        assert sizes.is_merged
        assert sizes.programs <= max(triton._FEWEST_PROGRAMS, triton._MAX_PROGRAMS // num)
        assert sizes.has_more or sizes.programs * sizes.block >= longest
        assert sizes.keep >= (most if sizes.has_more else min(most, sizes.block))
    for num, most in ((65, 400), (1, 5000)):
        sizes = triton._Sizes.of(num, triton._Spans(totals=torch.zeros(num), longest=10**6), most=most)
        assert not sizes.is_merged
        assert sizes.programs * sizes.block >= 10**6


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
