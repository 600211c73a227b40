"""Pictures of an order: times between ranks as heat maps before and after, and the tree of clusters.

In the given order of a job whose racks are interleaved the map is a chessboard; in a good order the near ranks are
blocks along the diagonal. Matplotlib is imported when a picture is asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from scipy.cluster.hierarchy import dendrogram

from ziggurat.files import write_figure
from ziggurat.planning.rank_order.levels import cluster_tree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

    from ziggurat.planning.rank_order.rank_order import RankOrder

_MAX_LABELS = 40


def write_picture(order: RankOrder, path: str | Path) -> Path:
    """Draw an order into a file and return its path, which ends in .png, .svg or .pdf."""
    path = Path(path)
    write_figure(order_figure(order), path, dpi=130)
    return path


def order_figure(order: RankOrder) -> Figure:
    """Draw the heat map of the given order, that of the found one, and the tree of clusters."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    _draw_map(left, order, order.given, title="The order that was given")
    title = "The order that was found" if order.order != order.given else "Kept: no order is better"
    image = _draw_map(middle, order, order.order, title=title)
    megabytes = order.long_bytes / (1 << 20)
    figure.colorbar(image, ax=[left, middle], label=f"ms of {megabytes:g} MiB between two ranks", shrink=0.85)
    _draw_tree(right, order)
    return figure


def _draw_map(axes: Axes, order: RankOrder, ranks: Sequence[int], *, title: str) -> AxesImage:
    from matplotlib.colors import LogNorm

    times = order.pairs.long_ms[np.ix_(ranks, ranks)]
    apart = times[~np.eye(len(times), dtype=bool)]
    masked = np.ma.masked_where(np.eye(len(times), dtype=bool), times)
    # Two equal limits would divide by zero: a job whose pairs are all alike.
    norm = LogNorm(vmin=float(apart.min()), vmax=max(float(apart.max()), 1.01 * float(apart.min())))
    image = axes.imshow(masked, cmap="viridis", norm=norm, interpolation="nearest")
    _label(axes, ranks)
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel("rank, in this order")
    return image


def _label(axes: Axes, ranks: Sequence[int]) -> None:
    if len(ranks) > _MAX_LABELS:
        axes.set_xticks([])
        axes.set_yticks([])
        return
    axes.set_xticks(range(len(ranks)), [str(rank) for rank in ranks], fontsize=7)
    axes.set_yticks(range(len(ranks)), [str(rank) for rank in ranks], fontsize=7)


def _draw_tree(axes: Axes, order: RankOrder) -> None:
    times = order.pairs.long_ms
    tree, least = cluster_tree(times)
    has_labels = len(times) <= _MAX_LABELS
    tree[:, 2] = np.maximum(tree[:, 2], 1e-9)
    dendrogram(tree, ax=axes, no_labels=not has_labels, color_threshold=0.0, above_threshold_color="tab:blue")
    # Ranks that are all equally far have a tree of height 0, of which matplotlib would complain.
    axes.set_ylim(0.0, max(1.1 * float(tree[-1, 2]), 0.1))
    # Heights are logarithms: the labels are turned back into ms.
    axes.yaxis.set_major_formatter(lambda value, _: f"{np.exp(value + least):.3g}")
    axes.set_ylabel("ms")
    levels = [f"{level.num_groups} × {level.name} ({level.confidence:.2f})" for level in order.levels]
    axes.set_title(f"Groups: {', '.join(levels) or 'none'}", fontsize=11, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
