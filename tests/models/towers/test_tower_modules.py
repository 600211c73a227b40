"""Tower modules: their equations with weights made by hand, their sizes, and what they refuse."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from ziggurat.config import from_json, to_json
from ziggurat.errors import ConfigError
from ziggurat.models import TowerModule, TowerModuleConfig, TowerModuleKind, build_tower_module
from ziggurat.models.blocks.fieldwise import FieldMix, FieldwiseLinear
from ziggurat.models.blocks.mlp import Init
from ziggurat.models.costs.model_cost import flops_of
from ziggurat.models.towers.modules import (
    CrossTower,
    FactorizationMachineTower,
    FlattenedTower,
    IdentityTower,
    LinearTower,
)

KINDS = list(TowerModuleKind)
COMPRESSING = [kind for kind in KINDS if kind is not TowerModuleKind.IDENTITY]


def build(config: TowerModuleConfig, field_dims=(4, 4, 4), *, dim: int = 4, tower: int = 0, seed: int = 0):
    return build_tower_module(config, field_dims=field_dims, dim=dim, tower=tower, seed=seed)


def array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


def test_identity_is_the_input():
    module = IdentityTower((4, 2))
    pooled = torch.randn(3, 6)
    assert module(pooled) is pooled
    assert module.compression_ratio == 1.0
    assert module.output_field_dims == (4, 2)


@pytest.mark.parametrize("field_dims", [(4, 4, 4), (4, 2, 4)])
def test_linear_is_the_ensemble_of_both_maps(field_dims):
    config = TowerModuleConfig(c=2, p=3, compression=2)
    module = build(config, field_dims)
    assert isinstance(module, LinearTower)
    pooled = torch.randn(5, sum(field_dims))
    weights = field_weights(module.alone)
    expected = []
    for sample in array(pooled):
        together = array(module.together.weight) @ sample
        fields = np.split(sample, np.cumsum(field_dims)[:-1])
        alone = [weight.T @ field for weight, field in zip(weights, fields, strict=True)]
        expected.append(np.concatenate([together, *alone]))
    np.testing.assert_allclose(array(module(pooled)), np.stack(expected), atol=1e-6)
    assert module.output_field_dims == (2,) * (3 + 2 * 3)


def test_linear_by_hand():
    """Two fields of two numbers, c = p = 1, D = 1: sum of everything, then the difference inside each field."""
    module = build(TowerModuleConfig(c=1, p=1, compression=2), (2, 2), dim=2)
    with torch.no_grad():
        module.together.weight.fill_(1.0)
        module.alone.groups[0].weight.copy_(torch.tensor([[[1.0], [-1.0]], [[2.0], [-2.0]]]))
    assert module(torch.tensor([[1.0, 2.0, 3.0, 5.0]])).tolist() == [[11.0, -1.0, -4.0]]
    assert module.compression_ratio == 4 / 3


def test_flattened_by_hand():
    module = build(TowerModuleConfig(kind=TowerModuleKind.FLATTENED, compression=2), (2, 2), dim=2)
    assert isinstance(module, FlattenedTower)
    with torch.no_grad():
        module.projection.weight.copy_(torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0]]))
    assert module(torch.tensor([[1.0, 2.0, 3.0, 5.0]])).tolist() == [[6.0, 5.0]]


@pytest.mark.parametrize("rank", [None, 2])
def test_cross_is_a_cross_network_and_a_projection(rank):
    config = TowerModuleConfig(kind=TowerModuleKind.CROSS, compression=4, num_cross_layers=2, cross_rank=rank)
    module = build(config, (4, 8), dim=8)
    assert isinstance(module, CrossTower)
    pooled = torch.randn(5, 12)
    x0 = array(pooled)
    x = x0
    for layer in range(2):
        if rank is None:
            linear = module.cross.layers[layer]
            mapped = x @ array(linear.weight).T + array(linear.bias)
        else:
            down, up = module.cross.down[layer], module.cross.up[layer]
            mapped = x @ array(down.weight).T @ array(up.weight).T + array(up.bias)
        x = x0 * mapped + x
    np.testing.assert_allclose(array(module(pooled)), x @ array(module.projection.weight).T, atol=1e-5)
    assert module.output_field_dims == (2, 2)


@pytest.mark.parametrize(("c", "p"), [(1, 0), (2, 1), (0, 2)])
@pytest.mark.parametrize("field_dims", [(4, 4, 4), (4, 2, 4)])
def test_fm_is_products_and_a_linear_compression_on_a_residual_path(c, p, field_dims):
    module = build(TowerModuleConfig(kind=TowerModuleKind.FM, compression=2, c=c, p=p, fm_rank=5), field_dims)
    assert isinstance(module, FactorizationMachineTower)
    outputs = c * 3 + p
    pooled = torch.randn(6, sum(field_dims))
    weights = field_weights(module.project)
    expected = []
    for sample in array(pooled):
        fields = np.split(sample, np.cumsum(field_dims)[:-1])
        projected = np.stack([weight.T @ field for weight, field in zip(weights, fields, strict=True)])
        products = (projected @ projected.T @ array(module.products.weight)).flatten()
        normal = (products - products.mean()) / np.sqrt(products.var() + module.norm.eps)
        crossed = (array(module.expand.weight) @ normal + array(module.expand.bias)).reshape(outputs, 2)
        result = crossed + array(module.compress.weight) @ projected
        if c:
            result[:3] += projected
        expected.append(result.flatten())
    np.testing.assert_allclose(array(module(pooled)), np.stack(expected), atol=1e-4)


def field_weights(module: FieldwiseLinear) -> list[np.ndarray]:
    """The matrix (d_f, o) of each field, in order."""
    weights: dict[int, np.ndarray] = {}
    for members, group in zip(module.members, module.groups, strict=True):
        weights.update(zip(members, array(group.weight), strict=True))
    return [weights[index] for index in range(len(weights))]


configs = st.builds(
    TowerModuleConfig,
    kind=st.sampled_from(COMPRESSING),
    compression=st.sampled_from([1.0, 2.4, 3.0, 12.0]),
    c=st.integers(1, 3),
    p=st.integers(0, 2),
    cross_rank=st.sampled_from([None, 3]),
    init=st.sampled_from(list(Init)),
) | st.just(TowerModuleConfig(kind=TowerModuleKind.IDENTITY))


@settings(max_examples=60, deadline=None)
@given(configs, st.lists(st.sampled_from([12, 6, 1]), min_size=1, max_size=4), st.sampled_from([0, 1, 5]))
def test_sizes_gradients_and_flops(config, field_dims, batch_size):
    module = build(config, field_dims, dim=12)
    pooled = torch.randn(batch_size, sum(field_dims), requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        outputs = module(pooled)
    assert outputs.shape == (batch_size, module.output_dim)
    assert module.input_dim == sum(field_dims)
    assert module.output_dim == sum(module.output_field_dims)
    assert module.compression_ratio == module.input_dim / module.output_dim
    if config.kind is not TowerModuleKind.IDENTITY:
        num_fields = config.c * len(field_dims) + config.p
        assert module.output_field_dims == (round(12 / config.compression),) * num_fields
    with FlopCounterMode(display=False) as backward:
        outputs.square().sum().backward()
    assert pooled.grad is not None
    assert all(weight.grad is not None for weight in module.parameters())
    flops = flops_of(module, module.input_dim)
    if batch_size:
        assert forward.get_total_flops() == batch_size * flops.forward
        assert backward.get_total_flops() == batch_size * flops.backward
        assert outputs.isfinite().all()


@pytest.mark.parametrize("kind", COMPRESSING)
def test_gradients_are_right_and_reach_everything(kind):
    module = build(TowerModuleConfig(kind=kind, compression=2, c=1, p=1), (4, 2, 4)).double()
    pooled = torch.randn(4, 10, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(module, pooled)
    module(pooled).square().sum().backward()
    for name, weight in module.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.any(), name


@pytest.mark.parametrize("kind", COMPRESSING)
def test_weights_depend_on_seed_and_tower_alone(kind):
    config = TowerModuleConfig(kind=kind, compression=2)
    torch.manual_seed(1)
    one = build(config, tower=1, seed=5)
    torch.manual_seed(2)
    expected = torch.rand(1)
    torch.manual_seed(2)
    same, other_tower, other_seed = build(config, tower=1, seed=5), build(config, seed=5), build(config, tower=1)
    assert torch.equal(torch.rand(1), expected)
    assert states_equal(one, same)
    assert not states_equal(one, other_tower)
    assert not states_equal(one, other_seed)


def states_equal(one: TowerModule, other: TowerModule) -> bool:
    left, right = one.state_dict(), other.state_dict()
    assert left.keys() == right.keys()
    return all(torch.equal(left[key], right[key]) for key in left)


def test_fieldwise_maps_start_as_linear_maps_do():
    torch.manual_seed(0)
    fields = FieldwiseLinear((16,) * 400, output_dim=8)
    assert fields.groups[0].weight.abs().max() <= 0.25
    assert fields.groups[0].weight.std().item() == pytest.approx(0.25 / 3**0.5, rel=0.02)
    mix = FieldMix(100, num_outputs=400, dim=4)
    mix.initialise_own(Init.XAVIER_NORMAL)
    assert mix.weight.std().item() == pytest.approx((2 / 500) ** 0.5, rel=0.02)


@pytest.mark.parametrize(
    ("dim", "compression", "expected"), [(16, 4.0, 4), (24, 1.5, 16), (16, 5.3333, 3), (1, 1.0, 1)]
)
def test_output_dim(dim, compression, expected):
    assert TowerModuleConfig(compression=compression).output_dim(dim) == expected


@pytest.mark.parametrize(("dim", "compression"), [(16, 3.0), (16, 32.0), (10, 4.0)])
def test_impossible_compressions_name_the_possible_ones(dim, compression):
    with pytest.raises(ConfigError, match=f"N = {dim}: 1, 2, ") as caught:
        TowerModuleConfig(compression=compression).output_dim(dim)
    assert f"{compression:g}" in caught.value.found


def test_identity_refuses_to_compress():
    with pytest.raises(ConfigError, match="kind = linear"):
        TowerModuleConfig(kind=TowerModuleKind.IDENTITY, compression=2).output_dim(4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"compression": 0.5},
        {"c": -1, "p": 2},
        {"c": 0, "p": 0},
        {"num_cross_layers": 0},
        {"fm_rank": 0},
        {"cross_rank": 0},
    ],
)
def test_impossible_settings(wrong):
    with pytest.raises(ConfigError):
        TowerModuleConfig(**wrong)


def test_json_round_trip():
    config = TowerModuleConfig(kind=TowerModuleKind.CROSS, compression=16, cross_rank=4, init=Init.XAVIER_NORMAL)
    assert from_json(TowerModuleConfig, to_json(config), where="test") == config
    assert to_json(dataclasses.replace(config, cross_rank=None))["cross_rank"] is None
