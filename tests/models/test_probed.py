"""A probe sees the operands of every product of a model, and leaves the model as it was."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.models.test_converted import RICH
from tests.models.test_every_model import CONFIGS
from ziggurat.errors import ConfigError
from ziggurat.models import DNNConfig, MLPConfig, build_model
from ziggurat.models.probed import MAX_SAMPLES, ModelProbe
from ziggurat.numerics.probe import MatrixNormal, Moments, ProbeRecord
from ziggurat.precision import NATIVE, DenseProducts, Linear
from ziggurat.testing.batches import random_batch


def test_statistics_are_those_of_what_layers_read_and_of_their_gradients() -> None:
    model = build_model(DNNConfig(embedding_dim=4, deep=MLPConfig(hidden_dims=(8, 6))), RICH, seed=0)
    batch = random_batch(RICH, batch_size=MAX_SAMPLES)
    probe = ModelProbe(model)
    probe.take(batch)
    seen = dict[str, Tensor]()
    gradients = dict[str, Tensor]()

    def note(module: nn.Module, inputs: tuple[Tensor], output: Tensor, name: str) -> None:
        seen[name] = inputs[0].detach().clone()
        output.register_hook(lambda gradient: gradients.__setitem__(name, gradient))

    for name, module in model.named_modules():
        if isinstance(module, Linear):
            module.register_forward_hook(partial(note, name=name))
    model.loss(model.dense_outputs(model.embed(batch)), batch).mean().backward()
    assert seen.keys() == probe.record.products.keys()
    for name, inputs in seen.items():
        gradient = gradients[name]
        product = probe.record.products[name]
        assert isinstance(product.left, Moments)
        assert isinstance(product.right, MatrixNormal)
        width = inputs.shape[1]
        torch.testing.assert_close(product.left.mean[:width], inputs.mean(dim=0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(product.left.covariance()[:width, :width], inputs.t().cov(), rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(product.gradient.mean, gradient.mean(dim=0), rtol=1e-3, atol=1e-7)
        assert product.right.mean[:width].equal(model.get_parameter(f"{name}.weight").detach().t())


@pytest.mark.parametrize("name", list(CONFIGS))
def test_every_product_of_every_model_is_seen_and_nothing_is_changed(name: str) -> None:
    model = build_model(CONFIGS[name], RICH, seed=0)
    model.train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    batch = random_batch(RICH, batch_size=40)
    random = torch.get_rng_state()
    probe = ModelProbe(model)
    probe.take(batch)
    probe.take(batch)
    assert torch.get_rng_state().equal(random)
    assert all(value.equal(before[key]) for key, value in model.state_dict().items())
    assert all(each.grad is None for each in model.parameters())
    modules = [each for each in model.modules() if isinstance(each, DenseProducts)]
    assert all(each.arithmetic is NATIVE for each in modules)
    record = probe.record
    assert record.num_passes == 2
    assert not record.left_out
    if modules:
        assert record.products
    for product in record.products.values():
        assert product.gradient.count > 0, product.name
        assert product.shape[-1] == product.right_shape[-1]
        # A gate of FinalMLP reads a constant, of one row.
        assert any(size % 40 == 0 for size in product.shape) or product.shape[0] == 1


def test_record_of_another_model_is_refused() -> None:
    small = build_model(DNNConfig(embedding_dim=4, deep=MLPConfig(hidden_dims=(8,))), RICH, seed=0)
    large = build_model(DNNConfig(embedding_dim=4, deep=MLPConfig(hidden_dims=(8, 6))), RICH, seed=0)
    probe = ModelProbe(large)
    probe.take(random_batch(RICH, batch_size=40))
    with pytest.raises(ConfigError, match="a probe of this model"):
        ModelProbe(small, record=probe.record)
    assert ModelProbe(large, record=probe.record).record is probe.record
    assert ProbeRecord(model="x").num_bytes() == 0
