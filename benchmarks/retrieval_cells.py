"""Measure one width of vectors: all contestants in one process, one thread, in turns; JSON to stdout's last line.

Run by `benchmarks/retrieval.py` in `.venv-bench`. For each cell and contestant the fastest setting whose recall@100 is
at least 0.95 is found first; then rounds of all contestants, the first one changing, by process CPU time.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.retrieval_contestants import Contestant, Faiss, Graph, K, Ours, PreFilter, Scann
from benchmarks.retrieval_data import make_filters, make_vectors

RECALL = 0.95
CELLS = (
    ("none", 1.0, False),
    ("50 %", 0.5, False),
    ("10 %", 0.1, False),
    ("1 %", 0.01, False),
    ("1 % cached", 0.01, True),
)


def main(options: dict[str, Any]) -> dict[str, Any]:
    """Build, tune, measure."""
    import torch

    torch.set_num_threads(1)
    num, dim, num_queries, rounds = (options[name] for name in ("num", "dim", "queries", "rounds"))
    vectors, queries = make_vectors(num, dim, num_queries=num_queries)
    contestants = _build(vectors, options["peers"])
    cells = []
    for name, share, cached in CELLS:
        count = options["filters"]
        filters = None if share == 1.0 else make_filters(num, share=share, count=count)
        which = np.arange(num_queries) % count
        truth = exact(vectors, queries, filters, which)
        entries: list[dict[str, Any]] = []
        runs: list[tuple[dict[str, Any], Contestant, Any]] = []
        for contestant in contestants:
            if not contestant.prepare(share, filters, cached=cached):
                continue
            setting, recall = _tune(contestant, share, queries, which, truth)
            entry = {"name": contestant.name, "setting": str(setting), "recall": recall, "b1": [], "b64": []}
            entries.append(entry)
            runs.append((entry, contestant, setting))
            say(f"d={dim} {name}: {contestant.name} {setting} recall {recall:.3f}")
        for number in range(rounds):
            shift = number % len(runs)
            for entry, contestant, setting in runs[shift:] + runs[:shift]:
                for batch in (1, 64):
                    entry[f"b{batch}"].append(_rate(contestant, queries, which, setting, batch))
        cells.append({"cell": name, "dim": dim, "entries": entries})
        for entry in entries:
            say(f"  {entry['name']}: {statistics.median(entry['b1']):.0f} / {statistics.median(entry['b64']):.0f} QPS")
    builds = [{"name": each.name, "build_s": each.build_s, "bytes": each.num_bytes} for each in contestants]
    return {"cells": cells, "builds": builds}


def exact(vectors: np.ndarray, queries: np.ndarray, filters: np.ndarray | None, which: np.ndarray) -> np.ndarray:
    """The true best K of each query, among what its filter lets pass."""
    import torch

    parts = []
    for begin in range(0, len(queries), 32):
        scores = torch.from_numpy(queries[begin : begin + 32]) @ torch.from_numpy(vectors).t()
        if filters is not None:
            scores.masked_fill_(~torch.from_numpy(filters[which[begin : begin + 32]]), -torch.inf)
        parts.append(scores.topk(K).indices)
    return torch.cat(parts).numpy()


def recall_of(found: np.ndarray, truth: np.ndarray) -> float:
    """Share of the true answers that were found."""
    return float(np.mean([len(np.intersect1d(own, true)) / K for own, true in zip(found, truth, strict=True)]))


def say(text: str) -> None:
    """Tell the person who waits."""
    print(text, file=sys.stderr, flush=True)


def _build(vectors: np.ndarray, peers: list[str]) -> list[Contestant]:
    lists = max(16, min(1024, len(vectors) // 64))
    width = vectors.shape[1] // 2
    makers: dict[str, list[Callable[[], Contestant]]] = {
        "faiss": [
            lambda: Faiss(vectors, kind=f"IVF{lists},Flat"),
            lambda: Faiss(vectors, kind=f"IVF{lists},SQ8"),
            lambda: Faiss(vectors, kind=f"IVF{lists},PQ{width}x4fs", refine=8.0 if width == 32 else 4.0),
            lambda: PreFilter(vectors),
        ],
        "scann": [lambda: Scann(vectors)],
        "usearch": [lambda: Graph(vectors, library="usearch")],
        "hnswlib": [lambda: Graph(vectors, library="hnswlib")],
    }
    made: list[Contestant] = []
    for maker in (lambda: Ours(vectors), *(each for peer in peers for each in makers[peer])):
        made.append(maker())
        say(f"built {made[-1].name} in {made[-1].build_s:.1f} CPU s")
    return made


def _tune(
    contestant: Contestant, share: float, queries: np.ndarray, which: np.ndarray, truth: np.ndarray
) -> tuple[Any, float]:
    settings = list(contestant.settings(share))
    low, high, recalls = 0, len(settings) - 1, {}
    while low < high:
        middle = (low + high) // 2
        recalls[middle] = recall_of(contestant.search(queries, which, settings[middle]), truth)
        low, high = (low, middle) if recalls[middle] >= RECALL else (middle + 1, high)
    return settings[low], recalls.get(low) or recall_of(contestant.search(queries, which, settings[low]), truth)


def _rate(contestant: Contestant, queries: np.ndarray, which: np.ndarray, setting: Any, batch: int) -> float:
    begin = time.process_time()
    for at in range(0, len(queries), batch):
        contestant.search(queries[at : at + batch], which[at : at + batch], setting)
    return len(queries) / (time.process_time() - begin)


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
