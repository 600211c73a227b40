"""EDCN against its equations, for every bridge, with and without gates and norms."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.models.as_written import Given, assert_as_written
from ziggurat.errors import ConfigError
from ziggurat.models import Bridge, EDCNConfig, Gates, Normalization, NumericInput

D = 4
F = 6
EDCN = EDCNConfig(embedding_dim=D, num_layers=2, numeric=NumericInput.FIELDS)


def bridged(parts: Given, name: str, x: torch.Tensor, h: torch.Tensor, kind: Bridge) -> torch.Tensor:
    if kind is Bridge.PRODUCT:
        return x * h
    if kind is Bridge.SUM:
        return x + h
    if kind is Bridge.CONCAT:
        return parts.linear(f"{name}.concat", torch.cat([x, h], dim=1)).clamp(min=0)
    weights = [parts.mlp(f"{name}.attention.{place}", each, layers=1).exp() for place, each in enumerate((x, h))]
    a, b = (each / each.sum(dim=1, keepdim=True) for each in weights)
    return a * x + b * h


def regulated(parts: Given, gate: int, values: torch.Tensor, config: EDCNConfig) -> torch.Tensor:
    if not config.regulation:
        return values
    weights = (parts[f"gates.{gate}.strengths"] / config.temperature).exp()
    size = F if config.gates is Gates.MEAN_ONE else 1
    scaled = values * (size * weights / weights.sum()).repeat_interleave(D)
    if config.norm is Normalization.NONE:
        return scaled
    name = f"gates.{gate}.norm.norm"
    deviation = (scaled.var(dim=0, unbiased=False) + 1e-5).sqrt()
    return (scaled - scaled.mean(dim=0)) / deviation * parts[f"{name}.weight"] + parts[f"{name}.bias"]


def written(parts: Given, config: EDCNConfig) -> torch.Tensor:
    shared = parts.stacked(D).flatten(1)
    first = None
    for layer in range(config.num_layers):
        x = regulated(parts, 2 * layer, shared, config)
        h = regulated(parts, 2 * layer + 1, shared, config)
        first = x if first is None else first
        dot = (x * parts[f"cross.{layer}.weight.weight"]).sum(dim=1, keepdim=True)
        x = first * dot + parts[f"cross.{layer}.bias"] + (x if config.residual else 0.0)
        h = parts.mlp(f"deep.{layer}", h, layers=1)
        shared = bridged(parts, f"bridges.{layer}", x, h, config.bridge)
    return parts.linear("output", torch.cat([x, h, shared], dim=1))


@pytest.mark.parametrize("bridge", list(Bridge))
def test_every_bridge_is_its_equation(bridge: Bridge) -> None:
    config = dataclasses.replace(EDCN, bridge=bridge, temperature=2.0)
    assert_as_written(config, lambda parts: written(parts, config))


@pytest.mark.parametrize(
    "changes",
    [
        {"norm": Normalization.BATCH},
        {"gates": Gates.SUM_ONE},
        {"regulation": False},
        {"residual": False},
        {"num_layers": 1},
    ],
    ids=str,
)
def test_every_form_is_its_equation(changes: dict[str, object]) -> None:
    config = dataclasses.replace(EDCN, **changes)
    assert_as_written(config, lambda parts: written(parts, config))


def test_impossible_settings_are_refused_with_ways_out_that_work() -> None:
    with pytest.raises(ConfigError, match="temperature = 0"):
        EDCNConfig(temperature=0.0)
    with pytest.raises(ConfigError, match="norm = layer"):
        EDCNConfig(norm=Normalization.LAYER)
    EDCNConfig(regulation=False, norm=Normalization.BATCH, temperature=1.0)
