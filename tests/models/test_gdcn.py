"""GDCN against its equation, in every structure."""

from __future__ import annotations

import pytest
import torch

from tests.models.as_written import Given, assert_as_written, given, interact, random_model
from ziggurat.errors import ConfigError
from ziggurat.models import CrossConfig, DCNv2Config, GDCNConfig, HeadSharing, MLPConfig, Structure, flops_per_sample

D = 4
MLP = MLPConfig(hidden_dims=(6, 5))


def crossed(parts: Given, *, num_layers: int) -> torch.Tensor:
    x0 = x = parts.flat(D)
    for layer in range(num_layers):
        gate = 1 / (1 + torch.exp(-parts.linear(f"cross.gates.{layer}", x)))
        x = x0 * parts.linear(f"cross.layers.{layer}", x) * gate + x
    return x


@pytest.mark.parametrize("structure", list(Structure))
def test_logits_and_gradients_are_those_of_the_equation(structure: Structure) -> None:
    def written(parts: Given) -> torch.Tensor:
        x = crossed(parts, num_layers=2)
        if structure is Structure.STACKED:
            return parts.mlp("stacked.networks.0", x)
        if structure is Structure.PARALLEL:
            x = torch.cat([x, parts.mlp("deep.0", parts.flat(D))], dim=1)
        return parts.linear("outputs.0", x)

    assert_as_written(GDCNConfig(embedding_dim=D, structure=structure, num_layers=2, deep=MLP), written)


def test_open_gates_are_dcn_v2_with_half_of_each_product() -> None:
    """σ(0) = 1/2, so a gate of zeros is a cross network with half the weights."""
    model = random_model(GDCNConfig(embedding_dim=D, num_layers=2, deep=MLP))
    twin = random_model(DCNv2Config(embedding_dim=D, cross=CrossConfig(num_layers=2), deep=MLP))
    with torch.no_grad():
        for gate in model.cross.gates:
            gate.weight.zero_()
    twin.load_state_dict({name: weight for name, weight in model.state_dict().items() if ".gates." not in name})
    with torch.no_grad():
        for layer in twin.cross.layers:
            layer.weight.mul_(0.5)
            layer.bias.mul_(0.5)
    parts = given(model)
    torch.testing.assert_close(interact(model, parts)[0], interact(twin, parts)[0])


def test_a_gate_doubles_the_price_of_a_layer() -> None:
    gated, plain = (
        flops_per_sample(random_model(config)).forward
        for config in (
            GDCNConfig(embedding_dim=D, num_layers=3, deep=MLP),
            DCNv2Config(embedding_dim=D, cross=CrossConfig(num_layers=3), deep=MLP),
        )
    )
    assert gated - plain == 3 * 2 * (6 * D) ** 2


def test_impossible_structures_are_refused_with_ways_out_that_work() -> None:
    none = MLPConfig(hidden_dims=())
    with pytest.raises(ConfigError, match="GDCN settings"):
        GDCNConfig(deep=none)
    with pytest.raises(ConfigError, match="heads = separate"):
        GDCNConfig(structure=Structure.CROSS_ONLY, heads=HeadSharing.SEPARATE)
    GDCNConfig(structure=Structure.CROSS_ONLY, deep=none)
    GDCNConfig(structure=Structure.STACKED, heads=HeadSharing.SEPARATE)
