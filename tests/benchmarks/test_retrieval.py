"""The report of retrieval: ours against the fastest peer that reaches the recall; options that cannot be."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("benchmarks.retrieval")

from benchmarks import retrieval
from benchmarks.retrieval_data import make_filters, make_vectors
from ziggurat.errors import ConfigError


def entry(name: str, rate: float, recall: float) -> dict[str, Any]:
    return {"name": name, "setting": "8", "recall": recall, "b1": [rate, rate], "b64": [2 * rate, 2 * rate]}


def test_peers_below_the_recall_are_shown_but_not_compared_with() -> None:
    entries = [entry("ziggurat", 13_000.0, 0.951), entry("slow", 1000.0, 0.96), entry("wrong", 99_000.0, 0.90)]
    result = {
        "cells": [{"cell": "none", "dim": 64, "entries": entries}],
        "peak_bytes": 2**30,
        "builds": [{"name": "ziggurat", "build_s": 1.0, "bytes": 5}],
    }
    report = retrieval.report_of([64], [result], options=retrieval.parse_options([]))
    assert [(case.peer_name, case.ratio) for case in report.cases] == [("slow", 13.0), ("slow", 13.0)]
    first = report.extra["cells"][0]  # type: ignore[index]
    assert first == {
        "dim": 64,
        "filter": "none",
        "batch": 1,
        "ours_qps": 13_000.0,
        "peer_qps": 1000.0,
        "peer": "slow",
        "ratio": 13.0,
        "recall": 0.951,
        "goal_qps": 12_000,
        "goal_met": True,
    }
    assert "0.900 **below**" in report.tables[0]


def test_unknown_peers_are_refused() -> None:
    options = retrieval.parse_options(["--peers", "faiss,annoy"])
    with pytest.raises(ConfigError, match="annoy"):
        retrieval.run(quick=True, options=options)
    with pytest.raises(ConfigError, match="5 %"):
        retrieval.run(quick=True, options=retrieval.parse_options(["--cells", "none,5 %"]))


def test_data_is_of_length_one_and_the_same_every_time() -> None:
    vectors, queries = make_vectors(200, 8, num_queries=5)
    again, _ = make_vectors(200, 8, num_queries=5)
    assert (vectors == again).all()
    assert abs((vectors**2).sum(1) - 1).max() < 1e-5
    assert queries.shape == (5, 8)
    assert 0.05 < make_filters(2000, share=0.1, count=2).mean() < 0.15
