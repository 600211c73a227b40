from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from ziggurat.errors import ConfigError
from ziggurat.models.blocks.mlp import MLP, Activation, Init, MLPConfig, Normalization, initialise

NUMPY = {
    Activation.RELU: lambda x: np.maximum(x, 0),
    Activation.GELU: lambda x: np.vectorize(lambda v: 0.5 * v * (1 + math.erf(v / math.sqrt(2))))(x),
    Activation.SILU: lambda x: x / (1 + np.exp(-x)),
    Activation.TANH: np.tanh,
    Activation.HARD_SWISH: lambda x: x * np.clip(x + 3, 0, 6) / 6,
    Activation.IDENTITY: lambda x: x,
}


@pytest.mark.parametrize("activation", list(Activation))
def test_equals_the_definition(activation):
    mlp = MLP(3, config=MLPConfig(hidden_dims=(4, 2), activation=activation), output_dim=1)
    inputs = torch.randn(5, 3)
    hidden = inputs.numpy()
    for layer in mlp.layers:
        hidden = NUMPY[activation](hidden @ layer.weight.detach().numpy().T + layer.bias.detach().numpy())
    assert mlp.output is not None
    expected = hidden @ mlp.output.weight.detach().numpy().T + mlp.output.bias.detach().numpy()
    np.testing.assert_allclose(mlp(inputs).detach().numpy(), expected, rtol=1e-5, atol=1e-6)


def test_batch_norm_stands_before_the_activation():
    mlp = MLP(2, config=MLPConfig(hidden_dims=(3,), normalization=Normalization.BATCH))
    inputs = torch.randn(6, 2)
    linear = inputs.numpy() @ mlp.layers[0].weight.detach().numpy().T + mlp.layers[0].bias.detach().numpy()
    normalised = (linear - linear.mean(0)) / np.sqrt(linear.var(0) + 1e-5)
    np.testing.assert_allclose(mlp(inputs).detach().numpy(), np.maximum(normalised, 0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch_size", [0, 1])
def test_batch_norm_of_fewer_than_two_samples_uses_and_keeps_running_statistics(batch_size):
    mlp = MLP(2, config=MLPConfig(hidden_dims=(3,), normalization=Normalization.BATCH), output_dim=1)
    mlp(torch.randn(50, 2))
    before = [buffer.clone() for buffer in mlp.buffers()]
    inputs = torch.randn(batch_size, 2)
    trained = mlp(inputs)
    assert all(torch.equal(one, other) for one, other in zip(before, mlp.buffers(), strict=True))
    torch.testing.assert_close(trained, mlp.eval()(inputs))
    trained.sum().backward()
    assert all(weight.grad is not None for weight in mlp.parameters() if weight.requires_grad)


def test_dropout_only_in_training_and_keeps_the_mean():
    mlp = MLP(4, config=MLPConfig(hidden_dims=(1000,), dropout=0.25))
    inputs = torch.rand(1, 4) + 1
    whole = mlp.eval()(inputs)
    dropped = mlp.train()(inputs)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], whole[kept] / 0.75)
    assert 0.6 < kept.sum() / (whole != 0).sum() < 0.9


def test_input_is_not_overwritten():
    inputs = torch.randn(4, 3)
    before = inputs.clone()
    MLP(3, config=MLPConfig(hidden_dims=(2,)), output_activation=None)(inputs)
    MLP(3, config=MLPConfig(hidden_dims=()), output_dim=3, output_activation=Activation.RELU)(inputs)
    assert torch.equal(inputs, before)


def test_widths():
    assert MLP(3, config=MLPConfig(hidden_dims=(7, 5))).output_dim == 5
    assert MLP(3, config=MLPConfig(hidden_dims=(7, 5)), output_dim=2).output_dim == 2
    bare = MLP(3, config=MLPConfig(hidden_dims=()))
    assert bare.output_dim == 3
    assert torch.equal(bare(torch.ones(2, 3)), torch.ones(2, 3))


def test_xavier_normal_has_its_variance_and_zero_bias():
    mlp = MLP(400, config=MLPConfig(hidden_dims=(200,)), output_dim=100)
    initialise([mlp], Init.XAVIER_NORMAL)
    for linear in (mlp.layers[0], mlp.output):
        assert isinstance(linear, nn.Linear)
        expected = math.sqrt(2 / (linear.in_features + linear.out_features))
        assert linear.weight.std().item() == pytest.approx(expected, rel=0.03)
        assert (linear.bias == 0).all()


def test_impossible_settings_are_refused():
    for bad in ({"hidden_dims": (4, 0)}, {"dropout": 1.0}, {"dropout": -0.1}):
        with pytest.raises(ConfigError):
            MLPConfig(**bad)
