"""Batch normalisation whose call stands for several passes over the same samples."""

from __future__ import annotations

import pytest
import torch

from ziggurat.models.blocks.batch_norm import BatchNorm


@pytest.mark.parametrize("on_ranks", [False, True])
@pytest.mark.parametrize("num_samples", [7, 1])
def test_one_call_moves_statistics_as_two_passes_do(on_ranks: bool, num_samples: int) -> None:
    once, twice = BatchNorm(5), BatchNorm(5)
    for norm in (once, twice):
        norm.world_sum = (lambda sums: sums) if on_ranks else None  # as if this rank were the only one
    inputs = 3.0 + 2.0 * torch.randn(num_samples, 5)
    twice(inputs)
    torch.testing.assert_close(once(inputs, 2), twice(inputs) if num_samples > 1 else once.eval()(inputs))
    for one, other in zip(once.buffers(), twice.buffers(), strict=True):
        torch.testing.assert_close(one, other)
    assert twice.num_batches_tracked == (2 if num_samples > 1 else 0)
    torch.testing.assert_close(once.eval()(inputs, 2), twice.eval()(inputs))
