"""Rows of length 1: as torch's own, values and gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ziggurat.ops.unit_length import unit_length


def test_values_and_gradients_are_torchs_own() -> None:
    generator = torch.Generator().manual_seed(0)
    for scale in (1e-8, 1.0, 1e6):
        drawn = scale * torch.randn(40, 7, generator=generator)
        drawn[3:5] = 0.0
        rows, same = drawn.clone().requires_grad_(), drawn.clone().requires_grad_()
        grad = torch.randn(40, 7, generator=generator)
        found, expected = unit_length(rows, eps=1e-6), F.normalize(same, dim=1, eps=1e-6)
        assert torch.equal(found, expected)
        found.backward(grad)
        expected.backward(grad)
        assert rows.grad is not None
        torch.testing.assert_close(rows.grad, same.grad)
        assert torch.equal(unit_length(drawn, eps=1e-6), expected)
