"""Samples with every kind of label, weights and groups, for the tests of metrics on one device and on ranks."""

from __future__ import annotations

import torch

from ziggurat.features.inputs import InputSpec, LabelSpec
from ziggurat.features.schema import Task

CLICK = InputSpec(labels=(LabelSpec(name="click"),))
FULL = InputSpec(
    labels=(LabelSpec(name="click"), LabelSpec(name="stars", task=Task.REGRESSION), LabelSpec(name="buy")),
    has_weights=True,
    has_groups=True,
)


def full_samples(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    scores = torch.rand(count, 3, generator=generator)
    scores[:, 1] = scores[:, 1] * 10 - 5
    labels = (torch.rand(count, 3, generator=generator) < 0.3).float()
    labels[:, 1] = torch.randn(count, generator=generator)
    labels[torch.rand(count, 3, generator=generator) < 0.2] = torch.nan
    weights = torch.rand(count, generator=generator) + 0.1
    groups = torch.randint(-5, 20, (count,), generator=generator)
    groups[groups == 0] = 20  # 0 is no group
    return scores, labels, weights, groups
