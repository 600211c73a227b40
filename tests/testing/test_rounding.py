"""move_by_units changes each weight by the least that its type allows, the same way for the same seed."""

from __future__ import annotations

import torch
from torch import nn

from ziggurat.testing.rounding import move_by_units


def moved(seed: int) -> torch.Tensor:
    model = nn.Linear(300, 7)
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-3, 3, 2100).view(7, 300))
        model.bias.zero_()
    move_by_units(model, seed=seed)
    assert not model.bias.any()
    return model.weight.detach()


def test_each_weight_moves_by_one_unit_up_or_down() -> None:
    before = torch.linspace(-3, 3, 2100).view(7, 300)
    units = moved(0).view(torch.int32) - before.view(torch.int32)
    assert set(units.flatten().tolist()) == {-1, 1}
    assert torch.equal(moved(0), moved(0))
    assert not torch.equal(moved(0), moved(1))
