"""AFN and AFN+ against their equations: powers of fields, written as powers."""

from __future__ import annotations

import pytest
import torch

from tests.models.as_written import Given, assert_as_written, random_model
from ziggurat.errors import ConfigError
from ziggurat.models import AFNConfig, MLPConfig, NumericInput, build_model
from ziggurat.models.blocks.interactions.logarithmic import LogarithmicNeurons
from ziggurat.testing.batches import small_inputs

D = 4
M = 3
MLP = MLPConfig(hidden_dims=(6, 5))
NONE = MLPConfig(hidden_dims=())


def norm(parts: Given, name: str, values: torch.Tensor, *, training: bool) -> torch.Tensor:
    """A norm of (B, C, d) for each C over the other two."""
    if training:
        mean = values.mean(dim=(0, 2), keepdim=True)
        variance = ((values - mean) ** 2).mean(dim=(0, 2), keepdim=True)
    else:
        mean = parts[f"{name}.running_mean"].view(1, -1, 1)
        variance = parts[f"{name}.running_var"].view(1, -1, 1)
    scaled = (values - mean) / (variance + 1e-5).sqrt()
    return scaled * parts[f"{name}.weight"].view(1, -1, 1) + parts[f"{name}.bias"].view(1, -1, 1)


def neurons(parts: Given, *, training: bool) -> torch.Tensor:
    fields = parts.stacked(D).abs().clamp(min=1e-5)
    logs = norm(parts, "neurons.log_norm", fields.log(), training=training)
    powers = parts["neurons.powers.weight"]
    # Π_f of e^(normal logarithm) to the learned power, field by field.
    products = torch.stack([(logs.exp() ** row.view(1, -1, 1)).prod(dim=1) for row in powers], dim=1)
    return norm(parts, "neurons.exp_norm", products, training=training)


@pytest.mark.parametrize("training", [True, False])
def test_afn_is_its_equation(training: bool) -> None:
    def written(parts: Given) -> torch.Tensor:
        return parts.mlp("deep", neurons(parts, training=training).flatten(1))

    config = AFNConfig(embedding_dim=D, num_neurons=M, deep=MLP, beside=NONE)
    assert_as_written(config, written, training=training)


def test_afn_plus_has_embeddings_of_its_own_for_the_mlp_beside() -> None:
    def written(parts: Given) -> torch.Tensor:
        deep = parts.mlp("deep", neurons(parts, training=True).flatten(1))
        beside = parts.mlp("beside", parts.stacked_from(D, D, at="stack_beside").flatten(1))
        return parts.linear("output", torch.cat([deep, beside], dim=1))

    model = assert_as_written(AFNConfig(embedding_dim=D, num_neurons=M, deep=MLP, beside=MLP), written)
    assert model.field_dims == (2 * D,) * 3


def test_neurons_can_learn_any_product_of_powers() -> None:
    """Without norms a neuron is Π_f |x_f|^W_f: here x₀² / x₁, of numbers that are not positive as well."""
    block = LogarithmicNeurons(2, num_neurons=1, dim=3).double().eval()
    with torch.no_grad():
        block.powers.weight.copy_(torch.tensor([[2.0, -1.0]]))
        for each in (block.log_norm, block.exp_norm):
            each.running_var.fill_(1.0 - each.eps)
    fields = torch.tensor([[[2.0, -3.0, 0.5], [4.0, 2.0, -1.0]]], dtype=torch.float64)
    torch.testing.assert_close(block(fields)[0, 0], torch.tensor([1.0, 4.5, 0.25], dtype=torch.float64))


def test_fields_of_zeros_have_finite_logits_and_gradients() -> None:
    """The padding row of every table, and a number that is 0."""
    model = random_model(AFNConfig(embedding_dim=D, num_neurons=M, deep=MLP, beside=MLP)).eval()
    fields = torch.zeros(2, sum(model.field_dims), dtype=torch.float64, requires_grad=True)
    logits = model.interact(torch.zeros(2, 2, dtype=torch.float64), fields, {"vector0": torch.zeros(2, 5).double()})
    logits.sum().backward()
    assert logits.isfinite().all()
    assert fields.grad is not None
    assert fields.grad.isfinite().all()


def test_numbers_beside_the_fields_are_refused() -> None:
    with pytest.raises(ConfigError, match="AFN settings"):
        AFNConfig(numeric=NumericInput.CONCAT)
    build_model(AFNConfig(numeric=NumericInput.BOTTOM_MLP, num_neurons=M), small_inputs(), seed=0)
