"""move_by_units: measure what rounding alone does to a computation, so that a bound need not be guessed.

    move_by_units(model, seed=0)      # then train it: how far from the run whose weights were not moved?

Another device, or another order of sums, rounds each result by about a unit in the last place. A run whose weights
begin a unit away, up or down at random, shows how far a model carries that: a bound for a comparison between devices
is a multiple of it. Where a ReLU or a sort lies within rounding of its threshold, it shows that, too.
"""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def move_by_units(model: nn.Module, *, seed: int, units: int = 1) -> None:
    """Move every floating-point weight of a model to a number above or below it, at random; zeros stay.

    Args:
        model: changed in place, tables included.
        seed: of the directions.
        units: how many units in the last place.
    """
    generator = torch.Generator().manual_seed(seed)
    for value in model.state_dict().values():
        if value.is_floating_point():
            up = torch.rand(value.shape, generator=generator).to(value.device) < 0.5
            ends = torch.where(up, torch.inf, -torch.inf).to(value.dtype)
            moved = value
            for _ in range(units):
                moved = torch.nextafter(moved, ends)
            value.copy_(torch.where(value == 0, value, moved))
