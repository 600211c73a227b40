"""Propagation by Triton against the reference, by Triton's interpreter (`make test-triton`)."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.ops.triton_runs import run_python
from ziggurat.ops.graph.propagation import propagate
from ziggurat.ops.graph.triton import why_not_triton

HAS_TRITON = importlib.util.find_spec("triton") is not None

CHECK = """
import numpy as np
import torch

from tests.ops.graph.test_propagation import LIMITS, any_graph
from ziggurat.ops.graph import triton
from ziggurat.ops.graph.edge_sampling import EdgeSampling, EdgeStrategy
from ziggurat.ops.graph.propagation import propagate_reference

for seed in range(40):
    rng = np.random.default_rng(seed)
    graph = any_graph(seed)
    dim = int(rng.choice([1, 16, 24, 64, 130, 200]))
    of_features = (torch.float32, torch.bfloat16)[seed % 2]
    dtype = (torch.float32, torch.bfloat16)[seed // 2 % 2]
    x = torch.from_numpy(rng.normal(size=(graph.num_columns, dim)).astype(np.float32)).to(of_features)
    rows = torch.from_numpy(rng.integers(0, graph.num_rows, 13)) if rng.random() < 0.5 else None
    num_rows = graph.num_rows if rows is None else 13
    base = torch.randn(num_rows, dim) if rng.random() < 0.5 else None
    strategy = list(EdgeStrategy)[seed // 4 % 2]
    sampling = EdgeSampling(width=1 + seed % 9, strategy=strategy, rescales=bool(seed % 3), seed=seed * 7919)
    asked = {"rows": rows, "base": base, "scale": 0.5, "dtype": dtype, "sampling": sampling if seed % 5 else None}
    assert triton.why_not_triton(x, base=base, dtype=dtype) == ""
    found = triton.propagate_triton(graph, x, **asked)
    wanted = propagate_reference(graph, x, **asked)
    assert found.dtype is dtype
    torch.testing.assert_close(found.float(), wanted.float(), rtol=LIMITS[dtype], atol=1e-4)
"""


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton: make test-triton")
def test_the_kernel_gives_what_the_reference_gives() -> None:
    done = run_python("-c", CHECK, interpreted=True)
    assert done.returncode == 0, done.stderr


def test_it_says_why_it_does_not_serve_a_cpu() -> None:
    x = torch.randn(3, 4)
    assert why_not_triton(x, base=None, dtype=torch.float32)
    assert "float64" in why_not_triton(x.double(), base=None, dtype=torch.float32)


def test_the_cpu_does_not_ask_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.ops.graph.test_propagation import any_graph

    monkeypatch.setattr("ziggurat.ops.graph.propagation.propagate_triton", None)
    graph = any_graph(0)
    assert propagate(graph, torch.randn(graph.num_columns, 8)).shape == (graph.num_rows, 8)
