"""Stochastic length: which histories are thinned, how often, to how many events."""

from __future__ import annotations

import torch

from ziggurat.features.jagged import offsets_of
from ziggurat.models.sequence.stochastic_length import thinned


def test_long_histories_are_thinned_as_often_as_the_equation_says() -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([0, 1, 10, 50, 63, 64, 100, 256]).repeat(500)
    offsets = offsets_of(lengths)
    kept = thinned(offsets, alpha=1.5, longest=256)  # M = 64, N^α = 4096
    counts = torch.stack([each.sum() for each in kept.split(lengths.tolist())]).view(500, 8)
    assert (counts[:, :6] == lengths[:6]).all()
    shares = (counts == lengths[:8]).double().mean(dim=0)
    assert abs(float(shares[6]) - 4096 / 100**2) < 0.08
    assert abs(float(shares[7]) - 4096 / 256**2) < 0.04
    assert set(counts[:, 6].tolist()) == {64, 100}
    assert set(counts[:, 7].tolist()) == {64, 256}
    # Each place of a thinned history is as likely as any other.
    often = torch.stack([each for each in kept.split(lengths.tolist()) if len(each) == 256]).double().mean(dim=0)
    assert float(often.min()) > 0.15
    assert float(often.max()) < 0.50
    assert thinned(offsets, alpha=2.0, longest=256).all()
    assert not len(thinned(torch.tensor([0]), alpha=1.5, longest=256))
