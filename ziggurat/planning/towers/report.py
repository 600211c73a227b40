"""What a partition into towers is worth: interaction within and across towers, loads, and balance.

    within   mean I over the pairs of features that share a tower        coherent: high, diverse: low
    across   mean I over all other pairs

Both stand beside those of the naive partition of the same features into as many towers; within alone says little,
since the level of I depends on the dim. Imbalance is the fullest tower over the mean: 1 is perfect, and the slowest
host sets the pace.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from ziggurat.plan import Towers
from ziggurat.planning.towers.items import FeatureLoad

_SHOWN_NAMES = 6


@dataclass(frozen=True, kw_only=True)
class TowerLoad:
    """Features, bytes and numbers read of one tower.

    Args:
        features: names.
        num_bytes: of its tables with optimizer state, each table once.
        lookups: rows read a sample.
        reads: numbers read a sample (rows · width).
        within: mean interaction of its pairs; NaN for a single feature.
    """

    features: tuple[str, ...]
    num_bytes: int
    lookups: float
    reads: float
    within: float


@dataclass(frozen=True, kw_only=True)
class PartitionReport:
    """A partition in numbers; `text()` prints it.

    Args:
        strategy: where it comes from.
        towers: one entry a tower.
        within: mean interaction of pairs inside towers; NaN if there are none.
        across: that of all other pairs; NaN if there are none.
        naive_within: the same for the naive partition.
        naive_across: the same for the naive partition.
        notes: what a reader should know besides.
    """

    strategy: str
    towers: tuple[TowerLoad, ...]
    within: float
    across: float
    naive_within: float
    naive_across: float
    notes: tuple[str, ...] = ()

    @property
    def imbalance(self) -> dict[str, float]:
        """Fullest tower over the mean, by count, bytes and lookups (numbers read)."""
        return {
            "count": _imbalance([len(tower.features) for tower in self.towers]),
            "bytes": _imbalance([tower.num_bytes for tower in self.towers]),
            "lookups": _imbalance([tower.reads for tower in self.towers]),
        }

    def table(self) -> list[tuple[str, ...]]:
        """Head, one line a tower, and a last line with the imbalances."""
        lines = [("tower", "features", "bytes", "lookups a sample", "numbers read", "within", "names")]
        for index, tower in enumerate(self.towers):
            names = ", ".join(tower.features[:_SHOWN_NAMES])
            more = len(tower.features) - _SHOWN_NAMES
            lines.append(
                (
                    f"{index}",
                    f"{len(tower.features)}",
                    f"{tower.num_bytes:,}",
                    f"{tower.lookups:,.2f}",
                    f"{tower.reads:,.0f}",
                    _shown(tower.within),
                    names + (f", and {more} more" if more > 0 else ""),
                )
            )
        even = {name: f"× {value:.2f}" for name, value in self.imbalance.items()}
        lines.append(("fullest / mean", even["count"], even["bytes"], "", even["lookups"], "", ""))
        return lines

    def lines(self) -> list[str]:
        """Interaction within and across, and the notes."""
        head = f"mean interaction, {self.strategy or 'towers'}: within {_shown(self.within)}, across"
        naive = f"naive: within {_shown(self.naive_within)}, across {_shown(self.naive_across)}"
        return [f"{head} {_shown(self.across)} ({naive})", *(f"note: {note}" for note in self.notes)]

    def text(self) -> str:
        """All of it, for a terminal without a table printer."""
        rows = self.table()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        aligned = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
        return "\n".join([*(line.rstrip() for line in aligned), *self.lines()])


def report_on(
    towers: Towers,
    *,
    naive: Towers,
    interactions: Float64[Tensor, "F F"],
    features: Sequence[FeatureLoad],
    notes: tuple[str, ...] = (),
) -> PartitionReport:
    """Measure the interactions and loads of a partition.

    Args:
        towers: the features' towers.
        naive: what to compare with.
        interactions: I, rows in the order of `features`.
        features: their loads.
        notes: to pass on.
    """
    index = {feature.name: position for position, feature in enumerate(features)}
    within, across = within_and_across(towers, interactions=interactions, features=features)
    naive_within, naive_across = within_and_across(naive, interactions=interactions, features=features)
    loads = []
    for names in towers.towers:
        mine = [features[index[name]] for name in names]
        pairs = interactions[[index[name] for name in names]][:, [index[name] for name in names]]
        # Without the pairs of a feature with itself.
        off = ~torch.eye(len(mine), dtype=torch.bool)
        loads.append(
            TowerLoad(
                features=names,
                # By table, so that one which several features share counts once.
                num_bytes=int(sum({feature.table: feature.table_bytes for feature in mine}.values())),
                lookups=float(sum(feature.lookups for feature in mine)),
                reads=float(sum(feature.lookups * feature.dim for feature in mine)),
                within=_mean(pairs[off]),
            )
        )
    return PartitionReport(
        strategy=towers.strategy,
        towers=tuple(loads),
        within=within,
        across=across,
        naive_within=naive_within,
        naive_across=naive_across,
        notes=notes,
    )


def within_and_across(
    towers: Towers, *, interactions: Float64[Tensor, "F F"], features: Sequence[FeatureLoad]
) -> tuple[float, float]:
    """Mean interaction of pairs in one tower, and of pairs in two."""
    home = {name: number for number, names in enumerate(towers.towers) for name in names}
    tower_F = torch.tensor([home[feature.name] for feature in features])
    same = tower_F.unsqueeze(1) == tower_F
    pairs = ~torch.eye(len(features), dtype=torch.bool)
    return _mean(interactions[same & pairs]), _mean(interactions[~same])


def _mean(values: Tensor) -> float:
    return float(values.mean()) if values.numel() else math.nan


def _imbalance(values: Sequence[float]) -> float:
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0


def _shown(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3f}"
