"""Leave the figures of reports undrawn: drawing took 0.6 of the 0.9 CPU seconds of a training of test size.

Figures are made of what a run has written, as ever. Their titles and labels stand in place of the SVG that matplotlib
would write. Tests marked `draws` have them drawn. Ranks load this module (`tests.conftest`), and draw none.
"""

from __future__ import annotations

from html import escape

from matplotlib.figure import Figure

from ziggurat.training.report import page

drawn = page.figure_svg


def undrawn(figure: Figure) -> str:
    """Return the titles and labels of a figure in place of its drawing."""
    words = [
        escape(text)
        for axes in figure.axes
        for text in (axes.get_title(loc="left"), axes.get_xlabel(), axes.get_ylabel())
    ]
    return f"<figure style='margin:0'><svg>{' · '.join(words)}</svg></figure>"


page.figure_svg = undrawn
