"""The picture of miss-ratio curves: what a step has to fetch, over the share of the rows that a cache holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from ziggurat.planning.tiers.miss_ratio import MissRatioCurve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_CURVES = 12
_POINTS = 25


def curve_figure(curves: Mapping[str, MissRatioCurve], *, title: str) -> Figure:
    """Draw curves, the tables with the most rows first.

    Args:
        curves: by name.
        title: above the picture.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    # Even steps on an axis of powers of ten.
    shares = np.geomspace(0.001, 1.0, _POINTS)
    largest = sorted(curves, key=lambda name: -curves[name].trace.num_rows)
    for name in largest[:_MAX_CURVES]:
        curve = curves[name]
        rows = shares * curve.trace.num_rows
        style = "--" if name.startswith("all of ") else "-"
        axes.plot(100 * shares, [100 * curve.misses(each) for each in rows], style, marker=".", label=name)
    axes.set_xscale("log")
    axes.set_xlabel("rows in the cache, % of all rows")
    axes.set_ylabel("rows of a step that are not there, %")
    axes.set_ylim(0, 102)
    axes.set_title(title if len(largest) <= _MAX_CURVES else f"{title}: the {_MAX_CURVES} largest")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure
