"""Write a drawing of matplotlib as a file, whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ziggurat.files.writing import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_figure(
    figure: Figure, path: str | os.PathLike[str], *, dpi: int = 150, metadata: Mapping[str, object] | None = None
) -> None:
    """Write a picture in the format that its name ends in; text of an SVG stays text.

    Args:
        figure: what is drawn.
        path: ends in .png, .svg or .pdf.
        dpi: dots an inch, of a PNG.
        metadata: of the file, as matplotlib takes it.

    Raises:
        FileError: the system refuses; an older file is left as it was.
    """
    import matplotlib as mpl

    with replacing(path) as temporary, mpl.rc_context({"svg.fonttype": "none"}):
        figure.savefig(temporary, dpi=dpi, format=Path(path).suffix[1:].lower(), metadata=metadata)
