"""Searches by graphs find what searches find; the graph of these tests is a function that is called again."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
from torch import Tensor

from tests.ops.test_scan import random_problem, same
from ziggurat.errors import DataError
from ziggurat.ops.bitmask import pack_mask
from ziggurat.ops.scan import Found, Masks, ScanTables, scan_clusters_reference
from ziggurat.ops.scan.triton import is_without_wait
from ziggurat.retrieval.vectors.graphs import Answer, Captured, Form, SearchGraphs

FORM = Form(k=5, probes=2, least=5, candidates=0, rerank=0)


def answer_of(tables: ScanTables, form: Form) -> Answer:
    def answer(queries: Tensor, masks: Masks) -> tuple[Found, Tensor]:
        are_finite = queries.isfinite().all(dim=1)
        safe = queries.nan_to_num(0.0, posinf=0.0, neginf=0.0)
        options = {"k": form.k, "probes": form.probes, "least": form.least, "masks": masks}
        return scan_clusters_reference(tables, safe, **options), are_finite

    return answer


class Graphs:
    """`SearchGraphs` of some tables, and how often something was captured."""

    def __init__(self, tables: ScanTables) -> None:
        self.tables, self.sizes = tables, list[int]()
        self.graphs = SearchGraphs(tables.num_rows, capture=self._capture)

    def _capture(self, answer: Answer, queries: Tensor, masks: Tensor | None) -> Captured:
        """Fill the same memory at each replay, as a CUDA graph does."""
        self.sizes.append(len(queries))
        found, are_finite = answer(queries, masks)

        def replay() -> None:
            now, finite_now = answer(queries, masks)
            for target, source in zip((*found, are_finite), (*now, finite_now), strict=True):
                target.copy_(source)

        return Captured(replay=replay, queries=queries, masks=masks, found=found, are_finite=are_finite)

    def search(self, queries: Tensor, masks: Masks = None, form: Form = FORM) -> Found:
        return self.graphs.search(answer_of(self.tables, form), queries, masks=masks, form=form)


def test_replays_find_what_searches_find() -> None:
    tables, queries, _, _ = random_problem(2, most_rows=300)
    graphs = Graphs(tables)
    draw = torch.Generator().manual_seed(0)
    for count in range(12):
        num = 1 + count % 5
        given = torch.randn(num, queries.shape[1], generator=draw)
        bits = pack_mask(torch.rand(3, tables.num_rows, generator=draw) < 0.5)
        each: list[Tensor | None] = [bits[number % 3] if number % 2 else None for number in range(num)]
        for masks in (None, bits[0], torch.stack([bits[1]] * num), each, [None] * num):
            expected = answer_of(tables, FORM)(given, masks)[0]
            found = graphs.search(given, masks)
            assert same(found, expected), (count, num)
            kept = Found(*(each.clone() for each in found))
            graphs.search(torch.randn_like(given), masks)
            assert same(found, kept)  # what was given away is not written again
    assert sorted(set(graphs.sizes)) == [1, 2, 4, 8]
    assert len(graphs.sizes) == 4 * 3  # sizes; without masks, with one, with one each


def test_a_form_is_captured_when_it_comes_again() -> None:
    tables, queries, _, _ = random_problem(2, most_rows=300)
    graphs = Graphs(tables)
    for number, captured in enumerate((0, 1, 1)):
        graphs.search(queries[:1])
        assert len(graphs.sizes) == captured, number
    graphs.search(queries[:1], form=FORM._replace(k=3))
    assert len(graphs.sizes) == 1
    for k in range(1, 40):
        graphs.search(queries[:1], form=FORM._replace(k=k))
    graphs.search(queries[:1])  # forgotten since
    graphs.search(queries[:1])
    assert len(graphs.sizes) <= 3


def test_queries_that_are_not_finite_are_named_and_do_not_stay() -> None:
    tables, queries, _, _ = random_problem(2, most_rows=300)
    graphs, wrong = Graphs(tables), torch.randn(3, queries.shape[1])
    wrong[2, 1] = torch.nan
    for _ in range(3):
        with pytest.raises(DataError, match="query 2"):
            graphs.search(wrong)
    assert len(graphs.sizes) == 1
    graphs.search(wrong[:2].repeat(2, 1))
    found = graphs.search(torch.zeros(4, queries.shape[1]))  # of the same graph
    assert found.positions.shape == (4, 5)
    graphs.search(wrong[:2, :].repeat(2, 1)[:3])  # the NaN is in none of the three places that count


def test_graphs_are_no_part_of_a_copy() -> None:
    tables, queries, _, _ = random_problem(2, most_rows=300)
    graphs = Graphs(tables)
    for _ in range(2):
        graphs.search(queries[:1])
    for made in (copy.deepcopy(graphs.graphs), pickle.loads(pickle.dumps(SearchGraphs(7)))):
        assert not made._forms


def test_rows_are_bounded_without_asking_the_device() -> None:
    for seed in range(30):
        tables, queries, _, _ = random_problem(seed, most_rows=200)
        if not tables.num_rows or not len(queries):
            continue
        sizes = tables.offsets.diff()
        for probes in (0, 1, 3, 100):
            for least in (0, 1, 7, 1000):
                bound = tables.most_rows(probes, least=least)
                for order in (sizes, sizes.flip(0), sizes.sort().values, sizes.sort(descending=True).values):
                    before = order.cumsum(0) - order
                    ranks = torch.arange(len(order))
                    taken = (ranks < max(probes, 1)) | (before < least)
                    assert int(order[taken].sum()) <= bound
                    assert int(taken.sum()) <= tables.most_clusters(probes, least=least)
    wait = functools.partial(is_without_wait, most=100)
    assert wait(64, knows_sizes=False)
    assert not wait(65, knows_sizes=True)
    assert not is_without_wait(1, knows_sizes=False, most=5000)
