"""Propagation: C++ gives what torch.sparse gives, for any graph, dtype, number of columns and of threads."""

from __future__ import annotations

import ctypes
import math
import platform
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from ziggurat.errors import BoundsError
from ziggurat.features.jagged import offsets_of
from ziggurat.ops.cpp_build import CppLibrary
from ziggurat.ops.graph import propagation
from ziggurat.ops.graph.edge_sampling import EdgeSampling, EdgeStrategy, sampled
from ziggurat.ops.graph.graph import Graph, user_item_graph
from ziggurat.ops.graph.propagation import (
    layer_average,
    layer_average_reference,
    propagate,
    propagate_reference,
    propagation_kernel,
)

# Sums of another order may be rounded to the next number of BF16, which is up to 2^-7 of it away.
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2**-7}


def any_graph(seed: int) -> Graph:
    """Empty rows, one that has most edges, and edges that come twice."""
    rng = np.random.default_rng(seed)
    num_rows = int(rng.integers(1, 40))
    num_columns = int(rng.integers(1, 50))
    lengths = rng.integers(0, 6, num_rows) * (rng.random(num_rows) < 0.7)
    lengths[rng.integers(num_rows)] = rng.integers(0, 400)
    num_edges = int(lengths.sum())
    return Graph(
        offsets=offsets_of(torch.from_numpy(lengths.astype(np.int64))),
        columns=torch.from_numpy(rng.integers(0, num_columns, num_edges).astype(np.int32)),
        weights=torch.from_numpy(rng.normal(size=num_edges).astype(np.float32)),
        num_columns=num_columns,
    )


def interactions(seed: int, *, num_users: int = 30, num_items: int = 20) -> Graph:
    rng = np.random.default_rng(seed)
    users, items = rng.integers(0, num_users, 150), rng.integers(0, num_items, 150)
    return user_item_graph(torch.from_numpy(users), torch.from_numpy(items), num_users=num_users, num_items=num_items)


@pytest.fixture
def needs_cpp() -> None:
    if "not available" in propagation_kernel():
        pytest.skip(propagation_kernel())


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.usefixtures("needs_cpp")
def test_the_kernel_gives_what_torch_sparse_gives(seed):
    rng = np.random.default_rng(1000 + seed)
    graph = any_graph(seed)
    dim = int(rng.choice([1, 7, 16, 24, 64, 80, 128, 200]))
    of_features = (torch.float32, torch.bfloat16)[seed % 2]
    dtype = torch.float32 if of_features is torch.float32 else (torch.float32, torch.bfloat16)[seed // 2 % 2]
    x = torch.from_numpy(rng.normal(size=(graph.num_columns, dim)).astype(np.float32)).to(of_features)
    rows = torch.from_numpy(rng.integers(0, graph.num_rows, 13)) if rng.random() < 0.5 else None
    num_rows = graph.num_rows if rows is None else 13
    base = torch.randn(num_rows, dim) if rng.random() < 0.5 else None
    asked = {"rows": rows, "base": base, "scale": 0.5, "dtype": dtype}
    found = propagate(graph, x, **asked)
    wanted = propagate_reference(graph, x, **asked)
    assert found.dtype is dtype
    assert found.shape == wanted.shape
    torch.testing.assert_close(found.float(), wanted.float(), rtol=LIMITS[dtype], atol=1e-4)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names instruction sets of x86")
@pytest.mark.parametrize("level", ["x86-64", "x86-64-v3"])
@pytest.mark.usefixtures("needs_cpp")
def test_a_build_for_another_instruction_set_gives_the_same(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vectors have other widths there; a processor with AVX-512 runs these builds, too."""
    out = tmp_path / "other.so"
    flags = ["-O3", "-std=c++17", "-fPIC", "-shared", *propagation._SOURCE.flags, f"-march={level}"]
    subprocess.run(["g++", *flags, str(propagation._SOURCE.path), "-o", str(out)], check=True)
    library = ctypes.CDLL(str(out))
    propagation._declare(library)
    monkeypatch.setattr(propagation, "library_for", lambda x, known: library)
    for seed in range(24):
        test_the_kernel_gives_what_torch_sparse_gives(seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("needs_cpp")
def test_not_a_number_and_infinity_pass(dtype: torch.dtype) -> None:
    graph = interactions(4)
    x = torch.randn(graph.num_columns, 80).to(dtype)
    x[0, ::3] = math.nan
    x[1, 1::3] = math.inf
    x[2, 2::3] = -math.inf
    found = propagate(graph, x, dtype=dtype)
    wanted = propagate_reference(graph, x, dtype=dtype)
    torch.testing.assert_close(found, wanted, rtol=LIMITS[dtype], atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("needs_cpp")
def test_the_number_of_threads_changes_no_bit(dtype):
    graph = interactions(3)
    x = torch.randn(graph.num_columns, 64).to(dtype)
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append(propagate(graph, x, dtype=dtype))
    torch.set_num_threads(before)
    assert all(torch.equal(found[0], each) for each in found[1:])


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("num_layers", [0, 1, 3])
def test_average_of_layers_and_its_gradient(seed, num_layers):
    graph = interactions(seed)
    x = torch.randn(graph.num_rows, 16, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    rows = torch.randint(0, graph.num_rows, (70,)) if seed % 2 else None
    found, first = layer_average(graph, x, num_layers=num_layers, rows=rows)
    wanted = layer_average_reference(graph, other, num_layers=num_layers, rows=rows)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert torch.equal(first, x if rows is None else x[rows])
    grad = torch.randn_like(wanted)
    (found * grad + first.square()).sum().backward()
    (wanted * grad + (other if rows is None else other[rows]).square()).sum().backward()
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-5, atol=1e-6)


def test_gradient_over_a_graph_that_is_not_symmetric():
    graph = sampled(interactions(5), EdgeSampling(width=2))
    assert not graph.is_symmetric
    x = torch.randn(graph.num_rows, 16, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    weights = torch.randn(graph.num_rows, 16)
    (layer_average(graph, x, num_layers=2)[0] * weights).sum().backward()
    (layer_average_reference(graph, other, num_layers=2) * weights).sum().backward()
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-5, atol=1e-6)


def test_layers_in_bf16_are_near_those_in_fp32():
    graph = interactions(1)
    x = torch.randn(graph.num_rows, 64)
    exact, _ = layer_average(graph, x, num_layers=3)
    rounded, _ = layer_average(graph, x, num_layers=3, dtype=torch.bfloat16)
    assert rounded.dtype is torch.float32
    assert 0 < float((exact - rounded).abs().max()) < 0.01


def test_without_a_compiler_torch_computes(monkeypatch):
    monkeypatch.setattr(propagation, "_LIBRARY", CppLibrary.missing("no compiler"))
    graph = any_graph(0)
    x = torch.randn(graph.num_columns, 8)
    assert torch.equal(propagate(graph, x), propagate_reference(graph, x))
    assert "no compiler" in propagation_kernel()


def test_features_that_do_not_fit_are_not_given_to_the_kernel():
    with pytest.raises(RuntimeError):
        propagate(any_graph(0), torch.randn(500, 8))


# ------------------------------------------------------------------------------------------------------------- graphs


def test_graph_of_users_and_items():
    users = torch.tensor([0, 0, 2, 0])
    items = torch.tensor([1, 0, 1, 1])  # (0, 1) twice: one edge
    graph = user_item_graph(users, items, num_users=3, num_items=2)
    matrix = torch.zeros(5, 5)
    matrix[graph.rows_of_edges(), graph.columns.long()] = graph.weights
    degrees = {(0, 4): (2, 2), (0, 3): (2, 1), (2, 4): (1, 2)}
    wanted = torch.zeros(5, 5)
    for (row, column), (one, other) in degrees.items():
        wanted[row, column] = wanted[column, row] = (one * other) ** -0.5
    assert graph.num_edges == 6
    torch.testing.assert_close(matrix, wanted)
    assert graph.transposed() is graph


@pytest.mark.parametrize("wrong", [([3], [0]), ([0], [2]), ([-1], [0])])
def test_edges_outside_of_the_graph_are_refused(wrong):
    users, items = (torch.tensor(each) for each in wrong)
    with pytest.raises(BoundsError, match="edges of a graph"):
        user_item_graph(users, items, num_users=3, num_items=2)


@pytest.mark.parametrize("seed", range(10))
def test_the_transpose_is_that_of_the_matrix(seed):
    graph = any_graph(seed)
    x = torch.randn(graph.num_rows, 3)
    wanted = propagation._matrix(graph).to_dense().T @ x
    torch.testing.assert_close(propagate(graph.transposed(), x), wanted, rtol=1e-5, atol=1e-4)


# ------------------------------------------------------------------------------------------------------ edge sampling


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("strategy", EdgeStrategy)
def test_sampled_rows_have_distinct_edges_of_their_own(seed, strategy):
    graph = any_graph(seed)
    # Each edge is a column of its own, so that one can tell which took part.
    graph = Graph(
        offsets=graph.offsets,
        columns=torch.arange(graph.num_edges, dtype=torch.int32),
        weights=torch.ones(graph.num_edges),
        num_columns=graph.num_edges,
    )
    width = 1 + seed % 7
    found = sampled(graph, EdgeSampling(width=width, strategy=strategy, seed=seed))
    lengths = graph.offsets.diff()
    assert torch.equal(found.offsets.diff(), lengths.clamp(max=width))
    assert len(found.columns.unique()) == found.num_edges
    # What was one row's stays that row's.
    assert torch.equal(graph.rows_of_edges()[found.columns.long()], found.rows_of_edges())
    sums = propagate_reference(found, torch.ones(graph.num_edges, 1)).squeeze(1)
    torch.testing.assert_close(sums, lengths.float())  # weights grow by n / W


@pytest.mark.parametrize("strategy", EdgeStrategy)
@pytest.mark.parametrize("rescales", [False, True])
@pytest.mark.usefixtures("needs_cpp")
def test_the_kernel_samples_the_edges_of_the_reference(strategy, rescales):
    for seed in range(20):
        graph = any_graph(seed)
        x = torch.randn(graph.num_columns, 24)
        sampling = EdgeSampling(width=1 + seed % 9, strategy=strategy, rescales=rescales, seed=seed * 7919)
        found = propagate(graph, x, sampling=sampling)
        wanted = propagate_reference(graph, x, sampling=sampling)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)


def test_another_seed_chooses_other_edges():
    graph = any_graph(4)
    graph = Graph(graph.offsets, graph.columns, torch.arange(graph.num_edges).float(), graph.num_columns)
    chosen = [sampled(graph, EdgeSampling(width=3, rescales=False, seed=seed)).weights for seed in (1, 2)]
    assert not torch.equal(*chosen)


@pytest.mark.parametrize("width", [8, 24])
@pytest.mark.parametrize("strategy", EdgeStrategy)
def test_over_many_seeds_each_edge_takes_part_as_often(strategy, width):
    """Rows of all lengths up to 60, so that many a row's number is a multiple of its length."""
    lengths = torch.arange(240) % 61
    offsets = offsets_of(lengths)
    num_edges = int(offsets[-1])
    numbers = torch.arange(num_edges, dtype=torch.int32)
    graph = Graph(offsets=offsets, columns=numbers, weights=torch.ones(num_edges), num_columns=num_edges)
    counts = torch.zeros(num_edges)
    for seed in range(1, 401):
        counts[sampled(graph, EdgeSampling(width=width, strategy=strategy, seed=seed)).columns.long()] += 1
    wanted = 400 * (width / lengths[graph.rows_of_edges()]).clamp(max=1)
    # Five standard deviations of a count, and one more for that many of them.
    assert float(((counts - wanted).abs() / wanted.sqrt()).max()) < 6


@pytest.mark.parametrize("strategy", EdgeStrategy)
def test_a_row_begins_at_its_first_edge_for_seed_0(strategy):
    graph = Graph(torch.tensor([0, 0, 10]), torch.arange(10, dtype=torch.int32), torch.ones(10), num_columns=10)
    found = sampled(graph, EdgeSampling(width=4, strategy=strategy, seed=0)).columns.tolist()
    wanted = {EdgeStrategy.BUCKET: [0, 2, 5, 7], EdgeStrategy.FAST_RAND: [0, 7, 4, 1]}  # the prime ends in 7
    assert found == wanted[strategy]


@pytest.mark.usefixtures("needs_cpp")
def test_a_width_beyond_all_rows_takes_all_edges():
    graph = any_graph(1)
    x = torch.randn(graph.num_columns, 8)
    assert torch.equal(propagate(graph, x, sampling=EdgeSampling(width=1 << 40)), propagate(graph, x))
