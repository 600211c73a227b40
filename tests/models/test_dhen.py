"""DHEN against its equations, and as the family that Wukong belongs to."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from ziggurat.config import override
from ziggurat.errors import ConfigError
from ziggurat.models import (
    DHEN,
    AttentionConfig,
    DHENConfig,
    DHENModule,
    Ensemble,
    MLPConfig,
    Normalization,
    WukongConfig,
    build_model,
)
from ziggurat.models.blocks.interactions.column_cross import ColumnCross
from ziggurat.models.blocks.interactions.convolution import FieldConvolution
from ziggurat.models.blocks.interactions.dot_block import DotBlock
from ziggurat.models.blocks.interactions.self_attention import AutoIntLayer, TransformerLayer
from ziggurat.models.dhen import DHENLayer
from ziggurat.testing.batches import random_batch, small_inputs

N, D = 4, 6
CONFIG = DHENConfig(
    embedding_dim=4,
    num_layers=2,
    num_outputs=(3, 2),
    mlp=MLPConfig(hidden_dims=(5,)),
    attention=AttentionConfig(dim=6, num_heads=2),
    attention_hidden_dim=7,
    fm_rank=3,
    bottom=MLPConfig(hidden_dims=(7,)),
    head=MLPConfig(hidden_dims=(6,)),
)


def array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().numpy()


def filled(module: torch.nn.Module) -> torch.nn.Module:
    """With random weights everywhere, norms and biases too, in FP64."""
    module = module.double()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module


def norm(x: np.ndarray, weights: torch.nn.Module) -> np.ndarray:
    assert isinstance(weights, torch.nn.LayerNorm)
    x = (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(x.var(axis=-1, keepdims=True) + weights.eps)
    return x * array(weights.weight) + array(weights.bias)


def attention(x: np.ndarray, module) -> np.ndarray:
    """Softmax attention, head by head and field by field."""
    heads, width = module.config.num_heads, module.config.dim // module.config.num_heads
    query, key, value = (x @ array(each.weight).T for each in (module.query, module.key, module.value))
    mixed = np.zeros_like(query)
    for head in range(heads):
        columns = slice(head * width, (head + 1) * width)
        for f in range(len(x)):
            scores = key[:, columns] @ query[f, columns] / (np.sqrt(width) if module.config.scaled else 1.0)
            weights = np.exp(scores - scores.max())
            mixed[f, columns] = (weights / weights.sum()) @ value[:, columns]
    return mixed


@pytest.fixture
def fields() -> torch.Tensor:
    return torch.randn(3, N, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_transformer_layer(fields):
    config = AttentionConfig(dim=4, num_heads=2)
    layer = filled(TransformerLayer(N, dim=D, config=config, hidden_dim=5))
    assert isinstance(layer, TransformerLayer)
    found = layer(fields)
    for sample in range(3):
        x = array(fields[sample])
        x = norm(x + attention(x, layer.attention) @ array(layer.output.weight).T, layer.attention_norm)
        hidden = np.maximum(x @ array(layer.widen.weight).T + array(layer.widen.bias), 0)
        x = norm(x + hidden @ array(layer.narrow.weight).T + array(layer.narrow.bias), layer.norm)
        np.testing.assert_allclose(array(found[sample]), x, rtol=1e-9)


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize(("dim", "residual"), [(4, True), (D, True), (4, False)])
@pytest.mark.parametrize("layer_norm", [True, False])
def test_autoint_layer(fields, dim, scaled, residual, layer_norm):
    config = AttentionConfig(dim=dim, num_heads=2, scaled=scaled, residual=residual, layer_norm=layer_norm)
    layer = filled(AutoIntLayer(N, input_dim=D, config=config))
    assert isinstance(layer, AutoIntLayer)
    assert (layer.residual is None) == (not residual or dim == D)
    for sample in range(3):
        x = array(fields[sample])
        out = attention(x, layer.attention)
        if residual:
            out = out + (x if layer.residual is None else x @ array(layer.residual.weight).T)
        if layer.norm is not None:
            out = norm(out, layer.norm)
        np.testing.assert_allclose(array(layer(fields)[sample]), np.maximum(out, 0), rtol=1e-9)


def test_convolution(fields):
    module = filled(FieldConvolution(N, dim=D, num_channels=2, kernel_size=3))
    assert isinstance(module, FieldConvolution)
    kernels, biases = array(module.convolution.weight)[:, 0], array(module.convolution.bias)
    image = np.pad(array(fields[0]), 1)
    expected = np.zeros((2 * N, D))
    for c in range(2):
        for f in range(N):
            for j in range(D):
                expected[c * N + f, j] = (image[f : f + 3, j : j + 3] * kernels[c]).sum() + biases[c]
    np.testing.assert_allclose(array(module(fields)[0]), expected, rtol=1e-9)


def test_column_cross(fields):
    module = filled(ColumnCross(N, num_outputs=3, dim=D))
    assert isinstance(module, ColumnCross)
    x = array(fields[0])
    products = sum(np.outer(row, row) for row in x)
    expected = array(module.mix.weight) @ products + array(module.bias)
    np.testing.assert_allclose(array(module(fields)[0]), expected, rtol=1e-9)


def test_dot_block(fields):
    module = filled(DotBlock(N, num_outputs=2, dim=D, mlp=MLPConfig(hidden_dims=(5,)), norm_eps=1e-5))
    assert isinstance(module, DotBlock)
    x = array(fields[0])
    dots = np.array([x[i] @ x[j] for i in range(N) for j in range(i + 1, N)])
    state = module.state_dict()
    hidden = array(state["mlp.layers.0.weight"]) @ norm(dots, module.norm) + array(state["mlp.layers.0.bias"])
    expected = array(state["mlp.output.weight"]) @ np.maximum(hidden, 0) + array(state["mlp.output.bias"])
    np.testing.assert_allclose(array(module(fields)[0]), expected.reshape(2, D), rtol=1e-9)


def test_dot_block_with_batch_norm(fields):
    settings = {"mlp": MLPConfig(hidden_dims=(5,)), "norm_eps": 1e-5, "norm": Normalization.BATCH}
    module = DotBlock(N, num_outputs=2, dim=D, **settings).double()
    x = array(fields)
    dots = np.stack([[row[i] @ row[j] for i in range(N) for j in range(i + 1, N)] for row in x])
    normal = (dots - dots.mean(axis=0)) / np.sqrt(dots.var(axis=0) + 1e-5)
    state = module.state_dict()
    hidden = np.maximum(normal @ array(state["mlp.layers.0.weight"]).T + array(state["mlp.layers.0.bias"]), 0)
    expected = hidden @ array(state["mlp.output.weight"]).T + array(state["mlp.output.bias"])
    np.testing.assert_allclose(array(module(fields)), expected.reshape(-1, 2, D), rtol=1e-9)
    assert bool(module(fields[:1]).isfinite().all()), "a last batch of one sample"


@pytest.mark.parametrize("ensemble", list(Ensemble))
def test_layer_is_norm_of_ensemble_and_shortcut(fields, ensemble):
    config = dataclasses.replace(CONFIG, modules=tuple(DHENModule), ensemble=ensemble)
    layer = filled(DHENLayer(N, num_outputs=3, dim=D, config=config))
    assert isinstance(layer, DHENLayer)
    parts = [array(part(fields)) for part in layer.parts.values()]
    assert all(part.shape == (3, 3, D) for part in parts)
    if ensemble is Ensemble.CONCAT:
        mixed = np.concatenate(parts, axis=1)
    else:
        scales = np.ones(6) if layer.scales is None else array(layer.scales)
        mixed = sum(scale * part for scale, part in zip(scales, parts, strict=True))
    assert layer.shortcut is not None
    kept = np.einsum("mf,bfd->bmd", array(layer.shortcut.weight), array(fields))
    np.testing.assert_allclose(array(layer(fields)), norm(mixed + kept, layer.norm), rtol=1e-9)


def test_shortcut_is_the_input_itself_where_the_number_of_fields_stays():
    layer = DHENLayer(N, num_outputs=2, dim=D, config=dataclasses.replace(CONFIG, modules=tuple(DHENModule)[:2]))
    assert layer.shortcut is None


@pytest.mark.parametrize("norms", [("layer", "none"), ("batch", "batch")])
def test_with_fm_and_linear_it_is_wukong(norms):
    shape = {"embedding_dim": 4, "num_layers": 2, "mlp": CONFIG.mlp, "bottom": CONFIG.bottom, "head": CONFIG.head}
    shape |= {"norm": Normalization(norms[0]), "input_norm": Normalization(norms[1])}
    inputs = small_inputs()
    dhen = build_model(
        DHENConfig(**shape, modules=(DHENModule.FM, DHENModule.LINEAR), num_outputs=(2,), fm_rank=3), inputs, seed=0
    )
    wukong = build_model(WukongConfig(**shape, num_fm=(2,), num_linear=(2,), rank=(3,)), inputs, seed=0)
    names = {"parts.fm": "fm", "parts.linear": "linear", "shortcut": "residual"}
    state = dhen.state_dict()
    for ours, theirs in names.items():
        state = {key.replace(f".{ours}.", f".{theirs}."): value for key, value in state.items()}
    wukong.load_state_dict(state)
    batch = random_batch(inputs, 5)
    torch.testing.assert_close(wukong(batch), dhen(batch), rtol=0, atol=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"modules": "dot,dot"},
        {"kernel_size": "2"},
        {"num_outputs": "1,2,3"},
        {"num_layers": "0"},
        {"numeric": "concat"},
        {"norm_eps": "0"},
        {"norm": "none"},
    ],
)
def test_impossible_settings_are_refused(changes):
    with pytest.raises(ConfigError, match="DHEN settings"):
        override(CONFIG, changes)


def test_heads_must_divide_the_attention():
    with pytest.raises(ConfigError, match="dividing"):
        AttentionConfig(dim=6, num_heads=4)


def test_modules_come_from_the_command_line():
    config = override(CONFIG, {"modules": "attention,linear", "ensemble": "weighted_sum"})
    model = build_model(config, small_inputs(), seed=0)
    assert isinstance(model, DHEN)
    assert list(model.layers[0].parts) == ["attention", "linear"]
