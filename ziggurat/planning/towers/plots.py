"""Pictures of a partition: the features in the plane, coloured by tower, and the interactions ordered by tower.

In a good coherent partition the colours form regions, and the matrix has bright blocks along its diagonal; a plane of
high stress shows less than the matrix does. Matplotlib is imported when a picture is asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ziggurat.errors import PlanError
from ziggurat.files import write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

    from ziggurat.planning.towers.partitioner import TowerPartition

_MAX_NAMES = 60
_MAX_IN_LEGEND = 16
_SUFFIXES = (".svg", ".png", ".pdf")


def write_picture(partition: TowerPartition, path: str | Path) -> Path:
    """Draw a partition into a file and return its path.

    Args:
        partition: what to draw.
        path: ends in .svg, .png or .pdf.

    Raises:
        PlanError: another ending.
    """
    import matplotlib as mpl

    path = Path(path)
    if path.suffix not in _SUFFIXES:
        raise PlanError(
            expected=f"a picture that ends in {', '.join(_SUFFIXES)}",
            found=path.name,
            where=str(path),
            ways_out="give another name",
        )
    # Without a date and random names, the same partition gives the same file.
    metadata = {"Date": None} if path.suffix == ".svg" else None
    with mpl.rc_context({"svg.hashsalt": "ziggurat"}):
        write_figure(partition_figure(partition), path, dpi=130, metadata=metadata)
    return path


def partition_figure(partition: TowerPartition) -> Figure:
    """Plane on the left, matrix on the right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_plane(left, partition)
    image = _draw_matrix(right, partition)
    figure.colorbar(image, ax=right, label="mean |cosine|", shrink=0.8)
    return figure


def _draw_plane(axes: Axes, partition: TowerPartition) -> None:
    import matplotlib as mpl

    position = {feature.name: index for index, feature in enumerate(partition.features)}
    points = partition.coordinates
    if points.shape[1] == 1:
        points = torch.cat([points, torch.zeros_like(points)], dim=1)
    num_towers = len(partition.towers)
    colours = mpl.colormaps["tab10" if num_towers <= 10 else "turbo"]
    for number, names in enumerate(partition.towers.towers):
        colour = colours(number if num_towers <= 10 else number / (num_towers - 1))
        mine = points[[position[name] for name in names]]
        label = f"tower {number}" if num_towers <= _MAX_IN_LEGEND else None
        axes.scatter(mine[:, 0].tolist(), mine[:, 1].tolist(), s=36, color=colour, label=label)
        if len(position) <= _MAX_NAMES:
            for name, (x, y) in zip(names, mine[:, :2].tolist(), strict=True):
                axes.annotate(_plain(name), (x, y), xytext=(4, 3), textcoords="offset points", fontsize=7)
    strategy = partition.towers.strategy
    axes.set_title(f"Features in the plane ({strategy}, stress {partition.plane.stress:.2f})", fontsize=11, loc="left")
    axes.set_aspect("equal", adjustable="datalim")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    if num_towers <= _MAX_IN_LEGEND:
        axes.legend(frameon=False, fontsize=8)


def _draw_matrix(axes: Axes, partition: TowerPartition) -> AxesImage:
    position = {feature.name: index for index, feature in enumerate(partition.features)}
    order = [position[name] for name in partition.towers.features]
    matrix = partition.interactions[order][:, order].clone()
    off = matrix[~torch.eye(len(order), dtype=torch.bool)]
    top = float(off.max()) if off.numel() else 1.0  # the diagonal is 1 and would hide the rest
    image = axes.imshow(matrix.numpy(), cmap="viridis", vmin=0.0, vmax=top or 1.0, interpolation="nearest")
    border = -0.5
    for names in partition.towers.towers[:-1]:
        border += len(names)
        axes.axhline(border, color="white", lw=1)
        axes.axvline(border, color="white", lw=1)
    if len(order) <= _MAX_NAMES:
        labels = [_plain(name) for name in partition.towers.features]
        axes.set_xticks(range(len(order)), labels, rotation=90, fontsize=6)
        axes.set_yticks(range(len(order)), labels, fontsize=6)
    else:
        axes.set_xticks([])
        axes.set_yticks([])
    axes.set_title("Interaction, ordered by tower", fontsize=11, loc="left")
    return image


def _plain(name: str) -> str:
    """A name as text: matplotlib reads mathematics between dollars."""
    return name.replace("$", r"\$")
