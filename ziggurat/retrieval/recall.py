"""Recall against time: what an index finds of the exact answer, and how long it takes, by the clusters it looks into.

    for each filter:   exact answer by all vectors ──► recall@k and µs a query, for 1, 2, 4, … clusters

The points choose `probes`: the first whose recall is enough. The plot shows where more clusters stop paying.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from ziggurat.commands import pasted
from ziggurat.errors import ConfigError, MissingDependencyError
from ziggurat.files import write_figure
from ziggurat.retrieval.item_index import ItemIndex
from ziggurat.retrieval.main_search import Wanted
from ziggurat.retrieval.vectors.best import exact_search, recall_of

_PICTURES = (".png", ".svg", ".pdf", ".jpg", ".webp")
_WARM = 8  # queries before the clock starts


@dataclass(frozen=True, kw_only=True)
class RecallPoint:
    """One setting of an index with one filter.

    Args:
        filter: its text; "" for none.
        probes: clusters that a query without a filter would look into.
        recall: share of the exact best k that was found.
        us_per_query: microseconds of CPU time a query, one query a call.
        plan: how the first query was answered.
    """

    filter: str
    probes: int
    recall: float
    us_per_query: float
    plan: str


def measure_recall(
    index: ItemIndex,
    queries: Float[Tensor, "Q D"],
    *,
    k: int,
    filters: Sequence[Wanted] = (None,),
    vectors: Float[Tensor, "N D"] | None = None,
    probes: Sequence[int] = (),
) -> list[RecallPoint]:
    """Compare an index with the exact answer.

    Args:
        index: without a fresh segment: merge it first.
        queries: user vectors; a few hundred.
        k: items wanted.
        filters: each is tried with all queries.
        vectors: the item vectors by number, which the index was built of; without them, what the index holds of them
            counts as exact (kept vectors, else INT8 rows).
        probes: clusters to try; powers of two and all clusters unless given.
    """
    own = index.vectors
    exact_vectors = own.vectors(torch.arange(len(own))) if vectors is None else vectors[own.order]
    tried = sorted({*probes} or {*(2**i for i in range(24) if 2**i < own.num_clusters), own.num_clusters})
    points = []
    for wanted in filters:
        mask = index.mask(wanted)
        exact = exact_search(exact_vectors, queries, k=k, masks=mask).positions
        numbers = torch.where(exact < 0, -1, own.order[exact.clamp(min=0)])
        for number in tried:
            answers = [
                index.search(queries[i : i + 1], k=k, filters=[wanted], probes=number)
                for i in range(min(_WARM, len(queries)))
            ]
            # The calls above warm up caches and are not counted.
            begin = time.process_time()
            answers = [
                index.search(queries[i : i + 1], k=k, filters=[wanted], probes=number) for i in range(len(queries))
            ]
            spent = time.process_time() - begin
            points.append(
                RecallPoint(
                    filter="" if wanted is None else str(wanted),
                    probes=number,
                    recall=recall_of(torch.cat([each.items for each in answers]), numbers),
                    us_per_query=1e6 * spent / max(1, len(queries)),
                    plan=str(answers[0].plans[0]) if answers else "",
                )
            )
    return points


def check_plot(path: Path) -> None:
    """Refuse a file that no picture can be written into.

    Raises:
        ConfigError: its name ends in no format of pictures, or there is no such folder.
        MissingDependencyError: matplotlib is not there.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError(
            expected="matplotlib, which draws",
            found="no such package",
            where="this Python",
            ways_out=("pip install matplotlib", "leave the plot out"),
        )
    if path.suffix.lower() not in _PICTURES or not path.parent.is_dir():
        raise ConfigError(
            expected=f"a file in a folder that is there, which ends in {', '.join(_PICTURES)}",
            found=f"{path}" + ("" if path.parent.is_dir() else f", and no folder {path.parent}"),
            where="plot",
            ways_out=f"--plot {pasted(path.with_suffix('.png'))}",
        )


def plot_recall(points: Sequence[RecallPoint], path: Path, *, k: int) -> None:
    """Draw recall against microseconds a query, a line a filter."""
    import matplotlib

    # Draws into files, so no display is needed.
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for name in dict.fromkeys(point.filter for point in points):
        own = [point for point in points if point.filter == name]
        axis.plot([p.us_per_query for p in own], [p.recall for p in own], marker="o", ms=3, label=name or "no filter")
        for point in own[:: max(1, len(own) // 5)]:
            axis.annotate(str(point.probes), (point.us_per_query, point.recall), fontsize=7, va="top")
    axis.set_xscale("log")
    axis.set_xlabel("µs of CPU time a query (numbers: clusters)")
    axis.set_ylabel(f"recall@{k}")
    axis.legend(fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    write_figure(figure, path, dpi=130)
    plt.close(figure)
