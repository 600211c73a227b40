"""Tell what stands first in the dates of raw files: one that only one order allows decides for all of them.

A file of one day in June, `11/06/2026`, shows nothing; that of the 13th does. So the order is that of all files
together, and never that of a chunk or a file, which would refuse the days before the 13th.

Cost: the time column up to the first date that shows it, usually the first chunk of the first file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.values.times import with_date_order
from ziggurat.data.raw.bad_rows import BadRows
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.features.date_order import DateOrder
from ziggurat.files.stores import DataPath


def order_of_dates(data: DataConfig, paths: Sequence[str | DataPath], *, column: str) -> DateOrder:
    """Return what stands first in the dates of a column; AUTO where no date needs it.

    Args:
        data: how files are read; its `split.date_order` is taken where it says one.
        paths: of raw files.
        column: of times.

    Raises:
        ConfigError: there are dates like 01/03/2024, and none shows what stands first.
    """
    order = data.split.date_order
    if order is not DateOrder.AUTO:
        return order
    # Rows with faults are reported by whoever reads the rest of them, and put aside here where nobody looks.
    with tempfile.TemporaryDirectory() as aside, BadRows(data.bad_rows, folder=Path(aside)) as bad_rows:
        return shown_order(data.source(paths, bad_rows=bad_rows).frames(columns=[column]), column)


def shown_order(chunks: Iterable[RawChunk], column: str) -> DateOrder:
    """Return what stands first in the dates of a column, as all of these rows show it; AUTO where no date needs it.

    Args:
        chunks: read up to the first date that shows it.
        column: of times.

    Raises:
        ConfigError: there are dates like 01/03/2024, and none shows what stands first.
    """
    shown = with_date_order(chunks, column, order=DateOrder.AUTO)
    return next((order for _, order in shown), DateOrder.AUTO)
