"""Measure one width of vectors: all contestants in one process, one thread, in turns; JSON to stdout's last line.

Run by `benchmarks/retrieval.py` in `.venv-bench`. For each cell and contestant the fastest setting whose recall@100 is
at least 0.95 is found first; then rounds of all contestants, the first one changing, by process CPU time. A contestant
that answers fewer than `_FEW` queries a second in a cell is asked a part of the queries. What a cell gave is written to
a file at once, so that a run that was interrupted can go on (`--resume`).
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.retrieval_contestants import Contestant, Faiss, Graph, K, Ours, PreFilter, Scann
from benchmarks.retrieval_data import make_filters, make_near_filters, make_vectors

RECALL = 0.95
_FEW = 500.0


class Cell(NamedTuple):
    """A kind of filter.

    Args:
        name: of the cell.
        share: of the items that pass.
        cached: whether rows may be copied before the clock starts.
        lies: where the items that pass are, seen from the query: anywhere, near, far.
    """

    name: str
    share: float
    cached: bool = False
    lies: str = "anywhere"


CELLS = (
    Cell("none", 1.0),
    Cell("50 %", 0.5),
    Cell("10 %", 0.1),
    Cell("10 % near", 0.1, lies="near"),
    Cell("10 % far", 0.1, lies="far"),
    Cell("1 %", 0.01),
    Cell("1 % cached", 0.01, cached=True),
)


def main(options: dict[str, Any]) -> dict[str, Any]:
    """Build, tune, measure."""
    import torch

    torch.set_num_threads(1)
    kept = Path(options["kept"])
    done: dict[str, Any] = json.loads(kept.read_text()) if options["resume"] and kept.exists() else {}
    missing = [cell for cell in CELLS if cell.name in options["cells"] and cell.name not in done.get("cells", {})]
    if missing:
        vectors, queries = make_vectors(options["num"], options["dim"], num_queries=options["queries"])
        contestants = _build(vectors, options["peers"])
        done.setdefault("cells", {})
        done["builds"] = [{"name": each.name, "build_s": each.build_s, "bytes": each.num_bytes} for each in contestants]
        for cell in missing:
            done["cells"][cell.name] = _measure(cell, contestants, vectors, queries, options)
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(done))
    order = [cell.name for cell in CELLS if cell.name in options["cells"]]
    return {"cells": [done["cells"][name] for name in order], "builds": done["builds"], "peak_bytes": _peak_bytes()}


def _measure(
    cell: Cell, contestants: list[Contestant], vectors: np.ndarray, queries: np.ndarray, options: dict[str, Any]
) -> dict[str, Any]:
    """All contestants in one cell."""
    dim, count = options["dim"], options["filters"]
    filters, which = _filters(cell, vectors, queries, count)
    truth = exact(vectors, queries, filters, which)
    entries: list[dict[str, Any]] = []
    runs: list[tuple[dict[str, Any], Contestant, Any]] = []
    for contestant in contestants:
        if not contestant.prepare(cell.share, filters, cached=cell.cached):
            continue
        setting, recall = _tune(contestant, cell.share, queries, which, truth)
        entry = {"name": contestant.name, "setting": str(setting), "recall": recall, "b1": [], "b64": []}
        entries.append(entry)
        runs.append((entry, contestant, setting))
        say(f"d={dim} {cell.name}: {contestant.name} {setting} recall {recall:.3f}")
    asked = [_num_asked(contestant, queries, which, setting) for _, contestant, setting in runs]
    for number in range(options["rounds"]):
        shift = number % len(runs)
        turns = list(zip(runs, asked, strict=True))
        for (entry, contestant, setting), num in turns[shift:] + turns[:shift]:
            for batch in (1, 64):
                entry[f"b{batch}"].append(_rate(contestant, queries[:num], which[:num], setting, batch))
    for entry in entries:
        say(f"  {entry['name']}: {statistics.median(entry['b1']):.0f} / {statistics.median(entry['b64']):.0f} QPS")
    return {"cell": cell.name, "dim": dim, "entries": entries}


def _filters(cell: Cell, vectors: np.ndarray, queries: np.ndarray, count: int) -> tuple[np.ndarray | None, np.ndarray]:
    """The filters of a cell, and which one each query has."""
    which = np.arange(len(queries)) % count
    if cell.share == 1.0:
        return None, which
    if cell.lies == "anywhere":
        return make_filters(len(vectors), share=cell.share, count=count), which
    filters, centres = make_near_filters(vectors, share=cell.share, count=count)
    products = queries @ centres.T
    return filters, products.argmax(1) if cell.lies == "near" else products.argmin(1)


def _num_asked(contestant: Contestant, queries: np.ndarray, which: np.ndarray, setting: Any) -> int:
    """Queries a round: all, or 64 if that would take long."""
    few = queries[:16], which[:16]
    return len(queries) if _rate(contestant, *few, setting, 1) >= _FEW else min(64, len(queries))


def _peak_bytes() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def exact(vectors: np.ndarray, queries: np.ndarray, filters: np.ndarray | None, which: np.ndarray) -> np.ndarray:
    """The true best K of each query, among what its filter lets pass."""
    import torch

    parts, block = [], 32 if len(vectors) <= 2_000_000 else 4
    for begin in range(0, len(queries), block):
        scores = torch.from_numpy(queries[begin : begin + block]) @ torch.from_numpy(vectors).t()
        if filters is not None:
            scores.masked_fill_(~torch.from_numpy(filters[which[begin : begin + block]]), -torch.inf)
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
