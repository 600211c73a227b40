"""`ziggurat bench graph`: its contestants compute the same, and it runs from end to end on a small graph."""

from __future__ import annotations

import pytest
import torch

from benchmarks import graph as bench
from ziggurat.ops.graph.graph import user_item_graph
from ziggurat.ops.graph.propagation import propagate


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("USERS", 400), ("ITEMS", 500), ("EDGES", 6000), ("BATCH", 64), ("WIDTHS", (4, 16))):
        monkeypatch.setattr(bench, name, value)


def test_ids_fall_by_popularity() -> None:
    found = bench.by_popularity(torch.tensor([5, 9, 9, 2, 9, 2]))
    assert found.tolist() == [2, 0, 0, 1, 0, 1]


@pytest.mark.usefixtures("small")
def test_the_plain_model_is_a_model_of_the_same_graph() -> None:
    users, items = bench.pairs("", quick=False)
    graph = user_item_graph(users, items, num_users=int(users.max()) + 1, num_items=int(items.max()) + 1)
    plain = bench.PlainLightGCN(graph, num_users=int(users.max()) + 1)
    x = torch.randn(graph.num_rows, 8)
    torch.testing.assert_close(torch.sparse.mm(plain.matrix, x), propagate(graph, x), rtol=1e-5, atol=1e-5)
    assert float(plain.loss(users[:9], items[:9], items[9:18]).detach()) > 0


@pytest.mark.usefixtures("small")
def test_it_runs() -> None:
    report = bench.run(quick=True)
    names = [case.name for case in report.cases]
    assert {"spmm_fp32_1_thread", "spmm_bf16_1_thread", "lightgcn_step_fp32", "lightgcn_step_bf16"} <= set(names)
    assert all(case.ratio > 0 for case in report.cases)
    assert {each["name"] for each in report.figures} >= {"sampled_bucket_4", "sampled_fast_rand_16"}
