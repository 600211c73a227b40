"""Wukong against its equations, written as loops over samples with weights that are set by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from ziggurat.config import override
from ziggurat.errors import ConfigError
from ziggurat.models import (
    FMKind,
    MLPConfig,
    Normalization,
    NumericInput,
    Wukong,
    WukongConfig,
    build_model,
    flops_per_sample,
)
from ziggurat.models.blocks.field_norm import FieldBatchNorm
from ziggurat.models.blocks.interactions.factorization_machine import (
    AttentiveFactorizationMachine,
    FactorizationMachine,
    PlainFactorizationMachine,
)
from ziggurat.models.blocks.stacked_inputs import StackedInputs
from ziggurat.models.wukong import WukongLayer
from ziggurat.testing.batches import random_batch, small_inputs

CONFIG = WukongConfig(
    embedding_dim=4,
    num_layers=2,
    num_fm=(2, 3),
    num_linear=(2, 1),
    rank=(3, 2),
    mlp=MLPConfig(hidden_dims=(5,)),
    attention=MLPConfig(hidden_dims=(6,)),
    num_attention_fields=2,
    bottom=MLPConfig(hidden_dims=(7,)),
    head=MLPConfig(hidden_dims=(6,)),
)


def build(config: WukongConfig = CONFIG, **sizes: int) -> Wukong:
    model = build_model(config, small_inputs(**sizes), seed=3)
    assert isinstance(model, Wukong)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too, so that a wrong order of operations shows
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
    return model.double()


def array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().numpy()


def layer_norm(x: np.ndarray, norm: torch.nn.Module) -> np.ndarray:
    assert isinstance(norm, torch.nn.LayerNorm)
    centred = x - x.mean(axis=-1, keepdims=True)
    scale = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + norm.eps)
    return centred / scale * array(norm.weight) + array(norm.bias)


def batch_norm(x: np.ndarray, norm: torch.nn.BatchNorm1d) -> np.ndarray:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    flat = (x.reshape(-1) - array(norm.running_mean)) / np.sqrt(array(norm.running_var) + norm.eps)
    return (flat * array(norm.weight) + array(norm.bias)).reshape(x.shape)


def any_norm(x: np.ndarray, norm: torch.nn.Module) -> np.ndarray:
    if isinstance(norm, FieldBatchNorm):
        norm = norm.norm
    return batch_norm(x, norm) if isinstance(norm, torch.nn.BatchNorm1d) else layer_norm(x, norm)


def mlp(x: np.ndarray, state: dict[str, torch.Tensor], prefix: str, *, hidden: int) -> np.ndarray:
    for index in range(hidden):
        name = f"{prefix}.layers.{index}"
        x = np.maximum(array(state[f"{name}.weight"]) @ x + array(state[f"{name}.bias"]), 0)
    return array(state[f"{prefix}.output.weight"]) @ x + array(state[f"{prefix}.output.bias"])


def products(x: np.ndarray, layer: WukongLayer) -> np.ndarray:
    """Numbers of the factorization machine, from all dot products."""
    module, dots = layer.fm.products, x @ x.T
    if isinstance(module, PlainFactorizationMachine):
        return dots
    if isinstance(module, FactorizationMachine):
        return dots @ array(module.weight)
    assert isinstance(module, AttentiveFactorizationMachine)
    compressed = array(module.compress.weight) @ x
    made = mlp(compressed.reshape(-1), module.state_dict(), "attention", hidden=1)
    return dots @ made.reshape(len(x), module.rank)


def wukong_layer(x: np.ndarray, layer: WukongLayer) -> np.ndarray:
    flat = any_norm(products(x, layer).reshape(-1), layer.fm.norm)
    crossed = mlp(flat, layer.state_dict(), "fm.mlp", hidden=1).reshape(-1, x.shape[1])
    parts = [crossed] if layer.linear is None else [crossed, array(layer.linear.weight) @ x]
    kept = x if layer.residual is None else array(layer.residual.weight) @ x
    return any_norm(np.concatenate(parts) + kept, layer.norm)


@pytest.mark.parametrize("kind", list(FMKind))
@pytest.mark.parametrize("num_linear", [(2, 1), (0, 1)])
def test_logits_are_the_papers_equations(kind, num_linear):
    model = build(dataclasses.replace(CONFIG, fm=kind, num_linear=num_linear))
    pooled = torch.randn(3, 16, dtype=torch.float64)
    dense = torch.randn(3, 3, dtype=torch.float64)
    found = model.interact(dense, pooled, {})
    state = model.state_dict()
    for sample in range(3):
        number = np.maximum(mlp(array(dense[sample]), state, "stack.dense.bottom", hidden=1), 0)
        x = np.concatenate([number.reshape(1, 4), array(pooled[sample]).reshape(4, 4)])
        for layer in model.layers:
            assert isinstance(layer, WukongLayer)
            x = wukong_layer(x, layer)
        expected = mlp(x.reshape(-1), state, "heads.networks.0", hidden=1)
        np.testing.assert_allclose(array(found[sample]), expected, rtol=1e-9)


def test_widths_differ_by_layer_and_residual_is_compressed_only_where_it_must_be():
    model = build()
    shapes = [(layer.fm.products.weight.shape, layer.num_outputs, layer.residual is None) for layer in model.layers]
    assert shapes == [((5, 3), 4, False), ((4, 2), 4, True)]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_each_layer_doubles_the_order(depth):
    """X (Xᵀ Y) alone, layer on layer: twice the input is 2^(2^depth) times the output."""
    machine = FactorizationMachine(5, dim=4, rank=4).double()
    fields = torch.randn(2, 5, 4, dtype=torch.float64)
    once, twice = fields, 2 * fields
    for _ in range(depth):
        once, twice = machine(once), machine(twice)
    torch.testing.assert_close(twice, once * 2.0 ** (2**depth))


def test_numbers_may_be_several_fields_or_one_each():
    assert build(dataclasses.replace(CONFIG, num_bottom_fields=3)).stack.num_fields == 3 + 4
    assert build(dataclasses.replace(CONFIG, numeric=NumericInput.FIELDS)).stack.num_fields == 3 + 4
    assert build(CONFIG, num_dense=0).stack.num_fields == 4


def test_several_embeddings_a_feature_are_columns_of_one_table():
    model = build(dataclasses.replace(CONFIG, embeddings_per_feature=2), num_dense=0)
    assert model.embeddings.field_dims == (8,) * 4
    assert model.stack.num_fields == 8
    pooled = torch.randn(2, 32, dtype=torch.float64)
    torch.testing.assert_close(model.stack(torch.empty(2, 0).double(), pooled, {}), pooled.view(2, 8, 4))


def test_schema_gives_one_feature_more_embeddings_and_narrow_tables_a_projection():
    inputs = small_inputs(num_dense=0)
    stack = StackedInputs(inputs, field_dims=(4, 12, 3), dim=4, numeric=NumericInput.FIELDS, bottom=MLPConfig())
    assert stack.num_fields == 5
    pooled = torch.randn(2, 19)
    found = stack(torch.empty(2, 0), pooled, {})
    torch.testing.assert_close(found[:, :4].flatten(1), pooled[:, :16])
    weight = stack.alignment.projections[0].weight
    torch.testing.assert_close(found[:, 4], pooled[:, 16:] @ weight.T)


def test_batch_norms_in_place_of_layer_norms_and_on_the_inputs():
    model = build(dataclasses.replace(CONFIG, norm=Normalization.BATCH, input_norm=Normalization.BATCH)).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm1d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.copy_(torch.randn(module.num_features))
            module.running_var.copy_(torch.rand(module.num_features) + 0.5)
    pooled, dense = torch.randn(3, 16, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    found, state = model.interact(dense, pooled, {}), model.state_dict()
    for sample in range(3):
        number = np.maximum(mlp(array(dense[sample]), state, "stack.dense.bottom", hidden=1), 0)
        x = np.concatenate([number.reshape(1, 4), array(pooled[sample]).reshape(4, 4)])
        x = any_norm(x, model.input_norm)
        for layer in model.layers:
            assert isinstance(layer, WukongLayer)
            x = wukong_layer(x, layer)
        expected = mlp(x.reshape(-1), state, "heads.networks.0", hidden=1)
        np.testing.assert_allclose(array(found[sample]), expected, rtol=1e-9)
    one = model.train().interact(dense[:1], pooled[:1], {})  # a last batch of one sample
    assert bool(one.isfinite().all())


def test_input_dropout_acts_in_training_only():
    model = build(dataclasses.replace(CONFIG, input_dropout=0.5))
    batch = random_batch(model.inputs, 4)
    inputs = batch.dense.double(), torch.randn(4, 16, dtype=torch.float64), {}
    assert not torch.equal(model.train().interact(*inputs), model.interact(*inputs))
    assert torch.equal(model.eval().interact(*inputs), model.interact(*inputs))


def test_flops_of_the_paper():
    """4·n·k·d + 2·n·k·h + 2·h·n_F·d + 2·n·n_L·d + 2·n·(n_F + n_L)·d of the first layer, n = 5."""
    one = dataclasses.replace(CONFIG, num_layers=1, num_fm=(2,), num_linear=(2,), rank=(3,))
    model = build_model(one, small_inputs(), seed=0)
    n, d, k, h = 5, 4, 3, 5
    layer = 4 * n * k * d + 2 * n * k * h + 2 * h * 2 * d + 2 * n * 2 * d + 2 * n * 4 * d
    bottom, head = 2 * 3 * 7 + 2 * 7 * 4, 2 * 16 * 6 + 2 * 6
    assert flops_per_sample(model).forward == layer + bottom + head


@pytest.mark.parametrize(
    "changes",
    [
        {"num_fm": "1,2,3"},
        {"num_fm": "0"},
        {"num_linear": "-1"},
        {"rank": "0"},
        {"num_layers": "0"},
        {"numeric": "concat"},
        {"input_dropout": "1.0"},
        {"norm_eps": "0"},
        {"norm": "none"},
        {"embeddings_per_feature": "0"},
    ],
)
def test_impossible_settings_are_refused(changes):
    with pytest.raises(ConfigError, match="Wukong settings"):
        override(CONFIG, changes)


def test_widths_come_from_the_command_line():
    assert override(CONFIG, {"num-fm": "8,16", "fm": "plain"}).layer(1) == (16, 1, 2)
