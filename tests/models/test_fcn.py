"""FCN against its equations, in every form, and its loss against the three losses written out."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.models.as_written import INPUTS, Given, assert_as_written, random_model
from ziggurat.errors import ConfigError
from ziggurat.models import DCNv2Config, Embedded, FCNConfig, SecondHalf, Supervision, build_model, flops_per_sample
from ziggurat.models.contract.losses import loss_sums
from ziggurat.testing.batches import random_batch, small_inputs

D = 4
F = 6
FCN = FCNConfig(embedding_dim=D, exponential_layers=2, linear_layers=3, dropout=0.0)


def second_half(parts: Given, name: str, first: torch.Tensor, kind: SecondHalf) -> torch.Tensor:
    if kind is SecondHalf.SCALE:
        return first * parts[f"{name}.scale"] + parts[f"{name}.shift"]
    deviation = (first.var(dim=-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    normal = (first - first.mean(dim=-1, keepdim=True)) / deviation
    normal = normal * parts[f"{name}.norm.weight"] + parts[f"{name}.norm.bias"]
    return normal if kind is SecondHalf.NORM else first * normal.clamp(min=0)


def crossed(parts: Given, name: str, x: torch.Tensor, *, num_layers: int, config: FCNConfig) -> torch.Tensor:
    x0 = x
    for layer in range(num_layers):
        first = parts.linear(f"{name}.layers.{layer}.map", x)
        both = torch.cat([first, second_half(parts, f"{name}.layers.{layer}", first, config.second_half)], dim=-1)
        anchor = x if name == "exponential" else x0
        x = anchor * (both + parts[f"{name}.layers.{layer}.bias"]) + x
    return parts.linear(f"{name}.output", x)


def written(parts: Given, config: FCNConfig) -> torch.Tensor:
    fields = parts.stacked(D * config.num_heads)
    logits = []
    for head in range(config.num_heads):
        own = fields[:, :, head * D : (head + 1) * D]
        x = torch.cat([own[:, :, : D // 2].flatten(1), own[:, :, D // 2 :].flatten(1)], dim=1)
        of_head = crossed(parts, "exponential", x, num_layers=config.exponential_layers, config=config)
        logits.append((of_head + crossed(parts, "linear", x, num_layers=config.linear_layers, config=config)) / 2)
    return torch.stack(logits).mean(dim=0)


@pytest.mark.parametrize("num_heads", [1, 2])
@pytest.mark.parametrize("kind", list(SecondHalf))
def test_logits_and_gradients_are_those_of_the_equations(kind: SecondHalf, num_heads: int) -> None:
    config = dataclasses.replace(FCN, second_half=kind, num_heads=num_heads)
    model = assert_as_written(config, lambda parts: written(parts, config))
    assert model.field_dims == (D * num_heads,) * 3


@pytest.mark.parametrize("importance", [1.0, 3.0])
def test_each_network_that_is_behind_the_mean_has_a_loss_of_its_own(importance: float) -> None:
    """Gradients of all weights, with weights of samples and a missing label, as the authors' three losses give them.

    The weight of a label in the schema multiplies all three, once.
    """
    labels = tuple(dataclasses.replace(label, weight=importance) for label in INPUTS.labels)
    inputs = dataclasses.replace(INPUTS, has_weights=True, labels=labels)
    model = random_model(FCN, inputs).float()
    batch = random_batch(inputs, 32)
    batch.labels[3, 0] = torch.nan
    embedded = Embedded(dense=batch.dense, fields=torch.randn(32, 3 * D) * 0.3, vectors=batch.vectors)
    outputs = model.forward_dense(embedded)
    reported = model.loss(outputs, batch)
    plain = loss_sums(outputs.logits, batch.labels, batch.weights, inputs=inputs)
    assert torch.equal(reported.total, plain.total)  # what is reported stays comparable with other models
    reported.mean().backward()
    found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()

    outputs = model.forward_dense(embedded)
    means = {
        name: (sums.total / sums.weight)
        for name, logits in {"mean": outputs.logits, **outputs.named}.items()
        for sums in [loss_sums(logits, batch.labels, batch.weights, inputs=INPUTS)]  # without the weights of labels
    }
    behind = [means[name] - means["mean"] for name in ("exponential", "linear")]
    assert min(float(each.min()) for each in behind) < 0 < max(float(each.max()) for each in behind)  # both cases
    weighed = [each.clamp(min=0) * means[name] for each, name in zip(behind, ("exponential", "linear"), strict=True)]
    (importance * (means["mean"] + weighed[0] + weighed[1])).mean().backward()
    for name, weight in model.named_parameters():
        if name in found:
            torch.testing.assert_close(found[name], weight.grad, rtol=1e-4, atol=1e-5)


def test_without_supervision_and_in_evaluation_the_loss_is_plain() -> None:
    batch = random_batch(INPUTS, 8)
    for model in (
        build_model(dataclasses.replace(FCN, supervision=Supervision.NONE), INPUTS, seed=0),
        build_model(FCN, INPUTS, seed=0).eval(),
    ):
        outputs = model.outputs_of(batch)
        model.loss(outputs, batch).mean().backward()
        found = [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
        model.zero_grad()
        loss_sums(model.outputs_of(batch).logits, batch.labels, inputs=INPUTS).mean().backward()
        wanted = [weight.grad for weight in model.parameters() if weight.grad is not None]
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_a_label_that_nobody_has_adds_nothing() -> None:
    model = build_model(FCN, INPUTS, seed=0)
    batch = random_batch(INPUTS, 8)
    batch.labels[:, 1] = torch.nan
    model.loss(model.outputs_of(batch), batch).mean().backward()
    assert all(weight.grad.isfinite().all() for weight in model.parameters() if weight.grad is not None)


def test_a_layer_costs_half_of_a_full_one() -> None:
    ids = small_inputs(num_dense=0, num_single=4, num_jagged=0)
    model = build_model(FCN, ids, seed=0)
    assert flops_per_sample(model).forward == 5 * (4 * D) ** 2 + 2 * 2 * (4 * D)


def test_an_odd_width_is_refused_with_ways_out_that_work() -> None:
    with pytest.raises(ConfigError, match="embedding_dim = 7") as caught:
        FCNConfig(embedding_dim=7)
    assert "set embedding_dim = 8" in str(caught.value)
    FCNConfig(embedding_dim=8)
    DCNv2Config(embedding_dim=7)
