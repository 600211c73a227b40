from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from ziggurat.errors import ConfigError
from ziggurat.models import (
    CrossConfig,
    CrossKind,
    DCNv2,
    DCNv2Config,
    HeadSharing,
    MLPConfig,
    NumericInput,
    Structure,
    build_model,
)
from ziggurat.models.blocks.cross import CrossNet, CrossNetMix, LowRankCrossNet
from ziggurat.testing.batches import random_batch, small_inputs

SMALL = DCNv2Config(
    embedding_dim=3, cross=CrossConfig(num_layers=2, rank=2, num_experts=3), deep=MLPConfig(hidden_dims=(6, 4))
)


def array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().numpy().astype(np.float64)


def build(config: DCNv2Config, **sizes: int) -> DCNv2:
    model = build_model(config, small_inputs(**sizes), seed=3)
    assert isinstance(model, DCNv2)
    return model


def crossed(net: CrossNet, x0: np.ndarray) -> np.ndarray:
    """Equation 1, for one sample."""
    x = x0
    for layer in net.layers:
        x = x0 * (array(layer.weight) @ x + array(layer.bias)) + x
    return x


def hidden(network, values: np.ndarray) -> np.ndarray:
    for layer in network.layers:
        values = np.maximum(array(layer.weight) @ values + array(layer.bias), 0)
    return values


def linear(layer, values: np.ndarray) -> np.ndarray:
    return array(layer.weight) @ values + array(layer.bias)


def flat(model: DCNv2, dense: np.ndarray, pooled: np.ndarray) -> np.ndarray:
    weight = array(model.flat.dense.numeric_fields.weight)
    return np.concatenate([(dense[:, None] * weight).ravel(), pooled])


def check(model: DCNv2, equation) -> None:
    batch = random_batch(model.inputs, 4)
    pooled = torch.randn(4, sum(model.embeddings.field_dims))
    found = array(model.interact(batch.dense, pooled, batch.vectors))
    expected = [equation(flat(model, array(batch.dense[b]), array(pooled[b]))) for b in range(4)]
    np.testing.assert_allclose(found, np.array(expected), rtol=1e-4, atol=1e-5)


# -------------------------------------------------------------------------------------------------- cross networks


def test_full_rank_is_equation_1():
    net = CrossNet(5, num_layers=3)
    inputs = torch.randn(4, 5)
    np.testing.assert_allclose(array(net(inputs)), [crossed(net, array(x)) for x in inputs], rtol=1e-5, atol=1e-6)


def test_low_rank_is_equation_2():
    net = LowRankCrossNet(5, num_layers=3, rank=2)
    inputs = torch.randn(4, 5)
    expected = []
    for x0 in array(inputs):
        x = x0
        for down, up in zip(net.down, net.up, strict=True):
            x = x0 * (array(up.weight) @ (array(down.weight) @ x) + array(up.bias)) + x
        expected.append(x)
    np.testing.assert_allclose(array(net(inputs)), expected, rtol=1e-5, atol=1e-6)


def test_mixture_is_equations_3_and_4_expert_by_expert():
    dim, rank, num_experts = 5, 2, 3
    net = CrossNetMix(dim, num_layers=2, rank=rank, num_experts=num_experts)
    inputs = torch.randn(4, dim)
    expected = []
    for x0 in array(inputs):
        x = x0
        for down, cores, up in zip(net.down, net.cores, net.up, strict=True):
            scores = array(net.gate.weight) @ x
            gates = np.exp(scores) / np.exp(scores).sum()
            mixed = np.zeros(dim)
            for e in range(num_experts):
                mine = slice(e * rank, (e + 1) * rank)
                v, c, u = array(down.weight)[mine], array(cores.weight)[e], array(up.weight)[:, mine]
                mixed += gates[e] * (x0 * (u @ np.tanh(c @ np.tanh(v @ x)) + array(up.bias)))
            x = mixed + x
        expected.append(x)
    np.testing.assert_allclose(array(net(inputs)), expected, rtol=1e-5, atol=1e-6)


def test_full_rank_with_a_product_of_low_rank_is_the_low_rank_one():
    low, full = LowRankCrossNet(6, num_layers=2, rank=3), CrossNet(6, num_layers=2)
    with torch.no_grad():
        for down, up, layer in zip(low.down, low.up, full.layers, strict=True):
            layer.weight.copy_(up.weight @ down.weight)
            layer.bias.copy_(up.bias)
    inputs = torch.randn(3, 6)
    torch.testing.assert_close(low(inputs), full(inputs))


# ------------------------------------------------------------------------------------------------------ structures


def test_parallel():
    model = build(SMALL)
    check(
        model,
        lambda x: linear(model.outputs[0], np.concatenate([crossed(model.cross, x), hidden(model.deep[0], x)])),
    )


def test_stacked():
    model = build(dataclasses.replace(SMALL, structure=Structure.STACKED))
    network = model.stacked.networks[0]
    check(model, lambda x: linear(network.output, hidden(network, crossed(model.cross, x))))


def test_cross_only():
    model = build(dataclasses.replace(SMALL, structure=Structure.CROSS_ONLY))
    check(model, lambda x: linear(model.outputs[0], crossed(model.cross, x)))


@pytest.mark.parametrize("structure", [Structure.PARALLEL, Structure.STACKED])
def test_separate_heads_have_a_deep_network_each(structure):
    model = build(dataclasses.replace(SMALL, structure=structure, heads=HeadSharing.SEPARATE), num_labels=2)

    def equation(x):
        c = crossed(model.cross, x)
        if structure is Structure.STACKED:
            logits = [linear(network.output, hidden(network, c)) for network in model.stacked.networks]
        else:
            pairs = zip(model.deep, model.outputs, strict=True)
            logits = [linear(output, np.concatenate([c, hidden(deep, x)])) for deep, output in pairs]
        assert len(logits) == 2
        return np.concatenate(logits)

    check(model, equation)


def test_numbers_and_vectors_beside_the_embeddings():
    model = build(dataclasses.replace(SMALL, numeric=NumericInput.CONCAT), num_vectors=1)
    batch = random_batch(model.inputs, 2)
    pooled = torch.randn(2, 12)
    projected = batch.vectors["vector0"] @ model.flat.dense.vector_fields[0].weight.T
    expected = torch.cat([batch.dense, pooled, projected], dim=1)
    torch.testing.assert_close(model.flat(batch.dense, pooled, batch.vectors), expected)


@pytest.mark.parametrize("kind", list(CrossKind))
def test_every_kind_of_cross_network_can_be_built(kind):
    config = dataclasses.replace(SMALL, cross=dataclasses.replace(SMALL.cross, kind=kind))
    expected = {CrossKind.FULL: CrossNet, CrossKind.LOW_RANK: LowRankCrossNet, CrossKind.MIXTURE: CrossNetMix}
    assert isinstance(build(config).cross, expected[kind])


def test_settings_without_effect_or_sense_are_refused():
    with pytest.raises(ConfigError, match="cross_only"):
        dataclasses.replace(SMALL, structure=Structure.CROSS_ONLY, heads=HeadSharing.SEPARATE)
    with pytest.raises(ConfigError, match="hidden layer"):
        dataclasses.replace(SMALL, deep=MLPConfig(hidden_dims=()))
    with pytest.raises(ConfigError, match="num_layers"):
        CrossConfig(num_layers=0)
