"""Settings of a warm start: another run whose weights a run begins from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ziggurat.typed import CountOrNone, checked


class OtherDims(StrEnum):
    """Ways to treat a table whose number of columns is another one than in the parent."""

    REFUSE = "refuse"
    FRESH = "fresh"  # the table begins as it was drawn
    CUT = "cut"  # the columns that both have are taken, further ones stay as they were drawn


@dataclass(frozen=True, kw_only=True)
@checked
class WarmStartConfig:
    """Settings of the parent of a run, and of what is taken from it.

    Args:
        run: folder of the parent; "" begins from weights that are drawn.
        step: of its checkpoint; 0: its best one by validation, else its last.
        optimizers: take what optimizers keep of the weights and rows that are taken, too.
        dims: tables with another number of columns. refuse: an error; fresh: they begin as they were drawn; cut: the
            columns that both have are taken.
    """

    run: str = ""
    step: CountOrNone = 0
    optimizers: bool = False
    dims: OtherDims = OtherDims.REFUSE
