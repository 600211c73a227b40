"""Leave the figures of reports undrawn: they took four fifths of the CPU time of a training of test size.

Figures are made of what a run has written, as ever; only that matplotlib draws them as SVG is left out, and their titles
stand in its place. Tests marked `draws` have them drawn. Ranks load this module (`tests.conftest`), and draw none.
"""

from __future__ import annotations

from html import escape

from matplotlib.figure import Figure

from ziggurat.training.report import page

drawn = page._svg


def undrawn(figure: Figure) -> str:
    """Return the titles and labels of a figure in place of its drawing."""
    words = [
        escape(text)
        for axes in figure.axes
        for text in (axes.get_title(loc="left"), axes.get_xlabel(), axes.get_ylabel())
    ]
    return f"<figure style='margin:0'><svg>{' · '.join(words)}</svg></figure>"


page._svg = undrawn
