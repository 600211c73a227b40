"""Growth: how a model becomes larger, as its config says it in the file that the model is in.

    smallest()        settings from which a study of scaling begins
    deeper()          the next number of layers; None where more are not tried
    wider(factor)     all widths that grow, together

    smallest ──► deeper, while the compute allows it ──► wider, until the compute is met

That order is the Wukong paper's (section 3.8): a layer more raises the order of the products that a model can hold,
which no width does. Columns of tables stay: what grows is the dense network, as in figure 1 of that paper.

A config that states nothing of this does not grow; `ziggurat scale` says which do.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol, Self, runtime_checkable

from ziggurat.models.blocks.mlp import MLPConfig


@runtime_checkable
class Grows(Protocol):
    """A config that says how its model grows."""

    @classmethod
    def smallest(cls) -> Self:
        """Return settings of about 10 to 20 kFLOP a sample, from which a study of scaling begins."""
        ...

    def deeper(self) -> Self | None:
        """Return the settings with the next number of layers, or None if more layers are not tried."""
        ...

    def wider(self, factor: float) -> Self:
        """Return the settings with every width that grows `factor` times as large, rounded; at 1 the same settings."""
        ...


def times(size: int, factor: float) -> int:
    """Return a width, `factor` times as large, rounded, at least 1."""
    return max(1, round(size * factor))


def widened(mlp: MLPConfig, factor: float) -> MLPConfig:
    """Return the same hidden layers, each `factor` times as wide."""
    return replace(mlp, hidden_dims=tuple(times(width, factor) for width in mlp.hidden_dims))
