"""move_by_one_unit: measure what rounding alone does to a computation, so that a bound need not be guessed.

    step = TrainStep(model, config);  move_by_one_unit(model, seed=0)      # then train: how far is the plain run?

Another device, or another order of sums, rounds each result by about a unit in the last place. A run whose weights
begin a unit away, up or down at random, shows how far a model carries that: a bound for a comparison between devices
is a multiple of it. Where a ReLU or a sort lies within rounding of its threshold, it shows that, too.
"""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def move_by_one_unit(model: nn.Module, *, seed: int) -> None:
    """Move every floating-point weight of a model to the next number above or below it, at random; zeros stay.

    Args:
        model: changed in place, tables included.
        seed: of the directions.
    """
    generator = torch.Generator().manual_seed(seed)
    for value in model.state_dict().values():
        if value.is_floating_point():
            up = torch.rand(value.shape, generator=generator).to(value.device) < 0.5
            ends = torch.where(up, torch.inf, -torch.inf).to(value.dtype)
            value.copy_(torch.where(value == 0, value, torch.nextafter(value, ends)))
